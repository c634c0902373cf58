//! Pictures on their way to a vision tower: decoding under limits, the grid of tokens, and the resampled bytes that the
//! reference processor (transformers 5.24 with torchvision 0.27 on the CPU) would make of the same picture.
//!
//! Everything is a pure function of the encoded bytes and the cap on tokens; [`PREPROCESSING`] names that function, and belongs
//! into whatever is derived from its results. Nothing here trusts a file: what it is is told by its content, its figures are
//! checked against the [limits] before anything is decoded, and a decoder's panic is a bad picture.

#![forbid(unsafe_code)]

mod colour;
mod decode;
mod error;
mod format;
mod grid;
pub mod limits;
mod resize;
mod scans;

pub use decode::{Header, Picture, decode, probe};
pub use error::ImageError;
pub use format::Format;
pub use grid::Grid;
pub use resize::Resized;

/// Names decoding, grid rule, resampling and compositing as they are. Changes when the bytes that come out change.
pub const PREPROCESSING: &str = "muse-glimmer-1";
