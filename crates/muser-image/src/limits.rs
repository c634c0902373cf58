//! What a picture may be at most. Checked against its header, before anything of its size is allocated.

/// Encoded bytes.
pub const MAX_ENCODED_BYTES: usize = 20 << 20;

/// Pixels of a side.
pub const MAX_SIDE: u32 = 16_384;

/// Pixels.
pub const MAX_PIXELS: u64 = 64 << 20;

/// Scans of a JPEG. Each may go over every pixel again, for a few bytes of the file.
pub const MAX_SCANS: usize = 100;

/// Scans of a JPEG times its pixels: what bounds the time, where [`MAX_SCANS`] and [`MAX_PIXELS`] alone would allow minutes.
pub const MAX_SCANNED_PIXELS: u64 = 1 << 30;

/// Bytes that a decoder may allocate for what a header or a compressed chunk beside the pixels holds.
pub(crate) const MAX_METADATA_BYTES: u64 = 64 << 20;
