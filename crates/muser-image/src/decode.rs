//! From encoded bytes to RGB.

use std::fmt;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::codecs::{gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder};
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, Limits, RgbImage};

use crate::error::check_sides;
use crate::format::Format;
use crate::limits::{MAX_ENCODED_BYTES, MAX_METADATA_BYTES, MAX_SIDE};
use crate::{ImageError, colour, scans};

fn format_of(bytes: &[u8]) -> Result<Format, ImageError> {
    match image::guess_format(bytes) {
        Ok(ImageFormat::Png) => Ok(Format::Png),
        Ok(ImageFormat::Jpeg) => Ok(Format::Jpeg),
        Ok(ImageFormat::WebP) => Ok(Format::WebP),
        Ok(ImageFormat::Gif) => Ok(Format::Gif),
        Ok(other) => {
            let name = other.extensions_str().first().unwrap_or(&"another kind");
            Err(ImageError::Format(name.to_uppercase()))
        }
        Err(_) => Err(ImageError::Format(other_kind(bytes).into())),
    }
}

/// Names for what people send that is not one of the formats.
fn other_kind(bytes: &[u8]) -> &'static str {
    let brand = bytes.get(4..12).unwrap_or_default();
    let begins = |with: &[u8]| bytes.starts_with(with);
    if begins(b"%PDF-") {
        "PDF"
    } else if begins(b"<svg") || begins(b"<?xml") {
        "SVG or other XML"
    } else if begins(b"<") {
        "HTML or other markup"
    } else if brand.starts_with(b"ftyphe") || brand.starts_with(b"ftypmif1") {
        "HEIC"
    } else if brand.starts_with(b"ftyp") {
        "a video"
    } else {
        "bytes of none of these"
    }
}

/// What a picture says of itself, checked against the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub format: Format,
    /// Pixels of a row, the way up in which it is shown.
    pub width: u32,
    /// Rows, the way up in which it is shown.
    pub height: u32,
    /// Bytes that decoding and resampling hold at once, at most.
    pub memory: u64,
}

/// A decoded picture: RGB of 8 bits, the way up in which it is shown, over white where it was transparent.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    /// Pixels of a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Bytes in the order [row, column, colour].
    pub rgb: Vec<u8>,
}

impl fmt::Debug for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Picture({}x{})", self.width, self.height)
    }
}

/// Reads the header alone and checks it against the limits.
pub fn probe(bytes: &[u8]) -> Result<Header, ImageError> {
    Ok(open(bytes)?.header)
}

/// Decodes a picture. The header is checked before anything of the picture's size is allocated.
pub fn decode(bytes: &[u8]) -> Result<Picture, ImageError> {
    let Open { header, orientation, decoder } = open(bytes)?;
    let (width, height) = decoder.dimensions();
    let color = decoder.color_type();
    let samples = guarded(header.format, move || {
        let mut samples = vec![0; decoder.total_bytes() as usize];
        decoder.read_image_boxed(&mut samples).map(|()| samples)
    })?;
    let damaged = |reason: String| ImageError::Damaged { format: header.format, reason };
    let rgb = colour::to_rgb(samples, color)
        .and_then(|rgb| RgbImage::from_raw(width, height, rgb))
        .ok_or_else(|| damaged(format!("samples of the unexpected type {color:?}")))?;
    let mut picture = DynamicImage::ImageRgb8(rgb);
    picture.apply_orientation(orientation);
    let rgb = picture.into_rgb8();
    Ok(Picture { width: rgb.width(), height: rgb.height(), rgb: rgb.into_raw() })
}

struct Open<'a> {
    header: Header,
    orientation: Orientation,
    decoder: Box<dyn ImageDecoder + 'a>,
}

fn open(bytes: &[u8]) -> Result<Open<'_>, ImageError> {
    if bytes.is_empty() {
        return Err(ImageError::Empty);
    }
    if bytes.len() > MAX_ENCODED_BYTES {
        return Err(ImageError::Encoded(bytes.len()));
    }
    let format = format_of(bytes)?;
    if let (Format::Png, Some((width, height))) = (format, png_sides(bytes)) {
        // The decoder counts a line against the limit for metadata, which says less.
        check_sides(width, height)?;
    }
    let (mut decoder, orientation) = guarded(format, || {
        let reader = Cursor::new(bytes);
        let mut decoder: Box<dyn ImageDecoder + '_> = match format {
            Format::Png => Box::new(PngDecoder::with_limits(reader, metadata_limits())?),
            Format::Jpeg => Box::new(JpegDecoder::new(reader)?),
            Format::WebP => Box::new(WebPDecoder::new(reader)?),
            Format::Gif => Box::new(GifDecoder::new(reader)?),
        };
        // A picture with a damaged note on its orientation is shown as it is stored. The decoder takes memory for as much of
        // a WebP's as it claims, up to 4 GiB.
        let fits = format != Format::WebP || webp_note_fits(bytes);
        let orientation = fits.then(|| decoder.orientation().ok()).flatten();
        let orientation = orientation.unwrap_or(Orientation::NoTransforms);
        Ok((decoder, orientation))
    })?;
    let (width, height) = decoder.dimensions();
    check_sides(width, height)?;
    if format == Format::Jpeg {
        scans::check(bytes, width, height)?;
    }
    let mut limits = Limits::no_limits();
    (limits.max_image_width, limits.max_image_height) = (Some(MAX_SIDE), Some(MAX_SIDE));
    // Beside the result: a frame of its own (GIF, WebP), coefficients and planes (JPEG).
    limits.max_alloc = Some(MAX_METADATA_BYTES + 16 * u64::from(width) * u64::from(height));
    guarded(format, || decoder.set_limits(limits))?;
    let memory = memory(format, bytes.len(), &*decoder);
    let turned = matches!(
        orientation,
        Orientation::Rotate90
            | Orientation::Rotate270
            | Orientation::Rotate90FlipH
            | Orientation::Rotate270FlipH
    );
    let (width, height) = if turned { (height, width) } else { (width, height) };
    Ok(Open { header: Header { format, width, height, memory }, orientation, decoder })
}

/// The first chunk of a PNG is its header, which begins with the sides.
fn png_sides(bytes: &[u8]) -> Option<(u32, u32)> {
    let (sides, _) = bytes.get(16..)?.as_chunks::<4>();
    Some((u32::from_be_bytes(*sides.first()?), u32::from_be_bytes(*sides.get(1)?)))
}

/// Does the first EXIF chunk of a WebP end inside the file?
fn webp_note_fits(bytes: &[u8]) -> bool {
    let mut rest = bytes.get(12..).unwrap_or_default();
    while let Some((kind, behind)) = rest.split_first_chunk::<4>() {
        let Some((size, behind)) = behind.split_first_chunk::<4>() else { return true };
        let size = u32::from_le_bytes(*size) as usize;
        if kind == b"EXIF" {
            return size <= behind.len();
        }
        rest = behind.get(size.saturating_add(size & 1)..).unwrap_or_default();
    }
    true
}

/// For the chunks before the pixels: an inflated profile or text may not take more.
fn metadata_limits() -> Limits {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(MAX_METADATA_BYTES);
    limits
}

/// The decoder's samples, its own planes, RGB, and RGB once more where it is turned or resampled.
fn memory(format: Format, encoded: usize, decoder: &dyn ImageDecoder) -> u64 {
    let (width, height) = decoder.dimensions();
    let pixels = u64::from(width) * u64::from(height);
    let planes = match format {
        Format::Png => 0,
        Format::Jpeg => 9,
        Format::WebP | Format::Gif => 4,
    };
    encoded as u64 + decoder.total_bytes() + pixels * (planes + 6)
}

/// Runs a decoder on a stranger's bytes: its error and its panic are the picture's fault.
fn guarded<T>(format: Format, f: impl FnOnce() -> image::ImageResult<T>) -> Result<T, ImageError> {
    let damaged = |reason: String| ImageError::Damaged { format, reason };
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(damaged(error.to_string())),
        Err(_) => Err(damaged("the decoder gave up".into())),
    }
}
