//! Resampling to the grid: Lanczos in 8 bits, first the width, then the height, bytes between the two passes.
//!
//! `fast_image_resize` has the reference's arithmetic (16-bit weights, one precision for an axis) and in one call does the
//! height first, which changes up to 46 of 255 levels. So it is called once for each axis; an axis that keeps its size is left
//! alone.

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};

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

/// One pass; the sides are (width, height). The pixel's type is a parameter: the library's own choice at run time would compile its
/// filters for all fourteen types.
fn pass(rgb: &[u8], from: (u32, u32), to: (u32, u32)) -> Result<Vec<u8>, ImageError> {
    let wrong = |error: &dyn std::fmt::Display| ImageError::Resample(error.to_string());
    let source = TypedImageRef::<U8x3>::from_buffer(from.0, from.1, rgb).map_err(|e| wrong(&e))?;
    let mut bytes = vec![0; to.0 as usize * to.1 as usize * 3];
    let mut target = TypedImage::<U8x3>::from_buffer(to.0, to.1, &mut bytes).map_err(|e| wrong(&e))?;
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::Lanczos3));
    Resizer::new().resize_typed(&source, &mut target, &options).map_err(|e| wrong(&e))?;
    Ok(bytes)
}
