//! Resampling to the grid: Lanczos in 8 bits, first the width, then the height, bytes between the two passes.
//!
//! `fast_image_resize` has the reference's arithmetic (16-bit weights, one precision for an axis) and in one call does the
//! height first, which changes up to 46 of 255 levels. So it is called once for each axis; an axis that keeps its size is left
//! alone.

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};

use crate::{Grid, ImageError, Picture};

/// A picture resampled to whole tokens.
#[derive(Clone, PartialEq, Eq)]
pub struct Resized {
    /// Rows and columns of tokens.
    pub grid: Grid,
    /// Pixels of a token's side.
    pub unit: u32,
    /// Bytes in the order [row, column, colour].
    pub rgb: Vec<u8>,
}

impl std::fmt::Debug for Resized {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Resized({}x{} tokens of {} pixels)", self.grid.rows, self.grid.cols, self.unit)
    }
}

impl Picture {
    /// Resamples the picture to the grid of [`Grid::choose`].
    pub fn resize(&self, unit: u32, cap: u32) -> Result<Resized, ImageError> {
        let grid = Grid::choose(self.width, self.height, unit, cap);
        let (width, height) = (grid.cols * unit, grid.rows * unit);
        let mut rgb = None;
        if width != self.width {
            rgb = Some(pass(&self.rgb, (self.width, self.height), (width, self.height))?);
        }
        if height != self.height {
            rgb = Some(pass(rgb.as_ref().unwrap_or(&self.rgb), (width, self.height), (width, height))?);
        }
        Ok(Resized { grid, unit, rgb: rgb.unwrap_or_else(|| self.rgb.clone()) })
    }
}

/// One pass; the sides are (width, height).
fn pass(rgb: &[u8], from: (u32, u32), to: (u32, u32)) -> Result<Vec<u8>, ImageError> {
    let wrong = |error: &dyn std::fmt::Display| ImageError::Resample(error.to_string());
    let source = ImageRef::new(from.0, from.1, rgb, PixelType::U8x3).map_err(|e| wrong(&e))?;
    let mut target = Image::new(to.0, to.1, PixelType::U8x3);
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Lanczos3));
    Resizer::new().resize(&source, &mut target, &options).map_err(|e| wrong(&e))?;
    Ok(target.into_vec())
}
