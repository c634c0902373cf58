//! Quantised activations: memory for the rows of a step, as `shaders/quant.wgsl` lays them out.

use crate::WgpuError;
use crate::device::{Buffer, Device};
use crate::weights::{Weight, form_of};

/// Inputs of some products.
pub(crate) struct Activations {
    pub(crate) codes: Buffer,
    pub(crate) figures: Buffer,
    pub(crate) floats: Buffer,
    /// Blocks of 256 values of a row.
    pub(crate) blocks: u32,
    pub(crate) forms: u32,
    /// Word where codes with a scale per 32 values begin.
    pub(crate) small_at: u32,
}

impl Activations {
    /// For up to `rows` rows of `blocks` blocks in the forms that `readers` want.
    pub(crate) fn new(device: &Device, rows: u32, readers: &[&Weight]) -> Result<Self, WgpuError> {
        let blocks = readers.first().map_or(0, |weight| weight.blocks);
        debug_assert!(readers.iter().all(|weight| weight.blocks == blocks), "readers of one row");
        let forms = readers.iter().fold(0, |forms, weight| forms | form_of(weight.ty));
        let values = u64::from(rows) * u64::from(blocks) * 256;
        let kinds = u64::from(forms & 1) + u64::from(forms >> 1 & 1);
        let buffer = |bytes: u64| device.buffer(bytes, "activations");
        Ok(Self {
            codes: buffer(values * kinds)?,
            figures: buffer(if kinds > 0 { u64::from(rows) * u64::from(blocks) * 17 * 4 } else { 0 })?,
            floats: buffer(if forms & 4 != 0 { values * 4 } else { 0 })?,
            blocks,
            forms,
            small_at: if forms & 1 != 0 { (values / 4) as u32 } else { 0 },
        })
    }
}
