//! Why a picture is refused.

use crate::Format;
use crate::limits::{MAX_ENCODED_BYTES, MAX_PIXELS, MAX_SCANNED_PIXELS, MAX_SCANS, MAX_SIDE};

/// Why a picture cannot be used. All of it is the sender's to mend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// No bytes.
    #[error("the image is empty")]
    Empty,
    /// Too many encoded bytes.
    #[error("the image has {0} bytes, at most {MAX_ENCODED_BYTES} are taken")]
    Encoded(usize),
    /// None of the four formats.
    #[error("expected a PNG, JPEG, WebP or GIF image, found {0}")]
    Format(String),
    /// A side of too many pixels, or of none.
    #[error("the image is {0}x{1} pixels, each side may have 1 to {MAX_SIDE}")]
    Side(u32, u32),
    /// Too many pixels.
    #[error("the image is {0}x{1} pixels, together at most {MAX_PIXELS} are taken")]
    Pixels(u32, u32),
    /// A JPEG that goes over its pixels too often.
    #[error(
        "the JPEG image has {scans} scans over {pixels} pixels, at most {MAX_SCANS} scans and {MAX_SCANNED_PIXELS} pixels in all are taken"
    )]
    Scans {
        /// Scans.
        scans: usize,
        /// Pixels of the picture.
        pixels: u64,
    },
    /// The decoder gave up.
    #[error("the {format} image is damaged or not supported: {reason}")]
    Damaged {
        /// What the bytes say they are.
        format: Format,
        /// The decoder's words.
        reason: String,
    },
    /// The resampler refused sizes that the checks let through.
    #[error("the image cannot be resampled: {0}")]
    Resample(String),
}

/// Checks the sides of a picture.
pub(crate) fn check_sides(width: u32, height: u32) -> Result<(), ImageError> {
    let fits = |side: u32| (1..=MAX_SIDE).contains(&side);
    if !fits(width) || !fits(height) {
        return Err(ImageError::Side(width, height));
    }
    if u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(ImageError::Pixels(width, height));
    }
    Ok(())
}
