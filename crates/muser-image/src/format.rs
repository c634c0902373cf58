//! The formats of pictures.

use std::fmt;

/// What is decoded. Told by content, never by a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// PNG; of an animated one the default picture.
    Png,
    /// JPEG.
    Jpeg,
    /// WebP, lossy and lossless; of an animated one the first frame.
    WebP,
    /// GIF, the first frame.
    Gif,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Png => "PNG",
            Format::Jpeg => "JPEG",
            Format::WebP => "WebP",
            Format::Gif => "GIF",
        })
    }
}

impl Format {
    /// Media type, as in a data URL.
    pub fn media_type(self) -> &'static str {
        match self {
            Format::Png => "image/png",
            Format::Jpeg => "image/jpeg",
            Format::WebP => "image/webp",
            Format::Gif => "image/gif",
        }
    }
}
