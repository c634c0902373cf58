//! Memory of quantised activation rows, in the forms that matrices of a model read.

use muser_backend::arith::nvfp4;

use crate::bounds::Reach;
use crate::kernels::matmul::{Input, PANEL, Panels, SUPER_SUMS};
use crate::kernels::rows::QuantTarget;

/// Panels for products with super-block types and with small-block types; each is empty if no matrix needs it.
pub(crate) struct PanelBuffers {
    super_q: Vec<u8>,
    super_d: Vec<f32>,
    super_sums: Vec<i32>,
    small_q: Vec<u8>,
    small_d: Vec<f32>,
    small_sums: Vec<i32>,
}

impl PanelBuffers {
    /// Room for rows of up to `width` values.
    pub(crate) fn new(rows: usize, width: usize, super_blocks: bool, small_blocks: bool) -> Self {
        let rows = rows.next_multiple_of(PANEL);
        let values = rows * width;
        let blocks = if super_blocks { rows * width.div_ceil(256) } else { 0 };
        let large = if super_blocks { values } else { 0 };
        let small = if small_blocks { values } else { 0 };
        Self {
            super_q: vec![0; large],
            super_d: vec![0.0; blocks],
            super_sums: vec![0; blocks * SUPER_SUMS],
            small_q: vec![0; small],
            small_d: vec![0.0; small / 32],
            small_sums: vec![0; small / 32],
        }
    }

    /// Raw pointers, for the threads of a step.
    pub(crate) fn pointers(&mut self) -> PanelPointers {
        PanelPointers {
            super_blocks: Panels {
                q: self.super_q.as_mut_ptr(),
                d: self.super_d.as_mut_ptr(),
                sums: self.super_sums.as_mut_ptr(),
                reach: Reach::of(self.super_q.len()),
            },
            small_blocks: Panels {
                q: self.small_q.as_mut_ptr(),
                d: self.small_d.as_mut_ptr(),
                sums: self.small_sums.as_mut_ptr(),
                reach: Reach::of(self.small_q.len()),
            },
            has_super: !self.super_q.is_empty(),
            has_small: !self.small_q.is_empty(),
        }
    }
}

/// See [`PanelBuffers`].
#[derive(Clone, Copy)]
pub(crate) struct PanelPointers {
    super_blocks: Panels,
    small_blocks: Panels,
    has_super: bool,
    has_small: bool,
}

impl PanelPointers {
    /// Only the forms that are wanted: rows are quantised for nothing else.
    pub(crate) fn only(self, super_blocks: bool, small_blocks: bool) -> Self {
        Self { has_super: self.has_super && super_blocks, has_small: self.has_small && small_blocks, ..self }
    }

    /// Target for `rows` rows of `k` values.
    pub(crate) fn target(&self, k: usize, rows: usize) -> QuantTarget {
        QuantTarget {
            // A matrix of such a type has inputs of whole blocks (NVFP4 the smallest), so inputs of another length need no
            // such form.
            super_blocks: (self.has_super && k.is_multiple_of(nvfp4::BLOCK)).then_some(self.super_blocks),
            small_blocks: (self.has_small && k.is_multiple_of(32)).then_some(self.small_blocks),
            k,
            rows,
        }
    }

    /// The same as an input; `float` is the row buffer it was quantised from.
    pub(crate) fn input(&self, k: usize, rows: usize, float: *const f32) -> Input {
        Input { rows, k, super_blocks: self.super_blocks, small_blocks: self.small_blocks, float }
    }
}
