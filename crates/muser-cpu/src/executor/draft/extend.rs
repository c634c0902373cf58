//! What a step does for the draft: from the target's residual stream of a row to the draft's K and V of its position.
//!
//! ```text
//! features = residual stream at the input of the target layers, one after the other      tapped on the way
//! g        = rms(fc features) * enc.output_norm
//! K, V     = rope(rms_head(Wk g) * attn_k_norm), Wv g       for every draft layer, into the sliding blocks
//! ```
//!
//! Four phases, which a step runs beside its own of the layer with the last tap, so that they need no barriers of their
//! own. About one per cent of the target's own products. Every row gets them, also those of a long prompt that no draft will
//! ever look back at: a block may be resumed at any of its positions later.
#![allow(unsafe_code, reason = "threads write disjoint parts of shared buffers")]

use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::{DflashConfig, Draft};

use super::Drafter;
use crate::executor::kv::KvStore;
use crate::executor::panels::PanelPointers;
use crate::executor::rows::{STORE_ROWS, StepRows, angles};
use crate::executor::share::ProductSet;
use crate::kernels::Kernels;
use crate::kernels::matmul::{Input, MatrixView};

/// The draft's part of one step.
pub(crate) struct Extend<'a> {
    model: &'a Draft,
    fc: MatrixView,
    first_layer: usize,
    inverse_frequencies: &'a [f64],
    max_rows: usize,
    /// Null where features are quantised as they are tapped.
    features: *mut f32,
    feature_panels: PanelPointers,
    context: *mut f32,
    context_panels: PanelPointers,
    k: *mut f32,
    v: *mut f32,
    /// Null where the target's angles are the same.
    rope: *mut f32,
    products: &'a [(MatrixView, *mut f32, usize)],
}

impl Drafter {
    /// Pointers and shapes for the threads of a step.
    pub(crate) fn extend(&mut self) -> Extend<'_> {
        let b = &mut self.extend;
        let pointer = |values: &mut Vec<f32>| {
            if values.is_empty() { std::ptr::null_mut() } else { values.as_mut_ptr() }
        };
        Extend {
            model: &self.model,
            fc: self.fc,
            first_layer: self.first_layer,
            inverse_frequencies: &self.inverse_frequencies,
            max_rows: b.max_rows,
            features: pointer(&mut b.features),
            feature_panels: b.feature_panels.pointers(),
            context: b.context.as_mut_ptr(),
            context_panels: b.context_panels.pointers(),
            k: b.k.as_mut_ptr(),
            v: b.v.as_mut_ptr(),
            rope: pointer(&mut b.rope),
            products: &b.products,
        }
    }
}

impl Drafter {
    /// There are so many sliding blocks, all zeros.
    pub(crate) fn note_blocks(&mut self, blocks: u32) {
        self.extend.zero_from = vec![0; blocks as usize];
    }

    /// A row of a block gets its context, or one that came from elsewhere may have.
    pub(crate) fn note_context(&mut self, block: BlockId, row: usize) {
        if let Some(zero_from) = self.extend.zero_from.get_mut(block.0 as usize) {
            *zero_from = (*zero_from).max(row as u16 + 1);
        }
    }

    /// Sees to it that a row of a block has zeros as K and V, for a step that leaves the context out. What lies behind it is
    /// of no use any more and gets zeros too, so that the next row has nothing to do: keys of a position are scattered over as
    /// many cache lines as a head has values.
    pub(crate) fn blank(&mut self, kv: &mut KvStore, block: BlockId, row: usize) {
        let Some(zero_from) = self.extend.zero_from.get_mut(block.0 as usize) else { return };
        let from = usize::from(std::mem::replace(zero_from, (*zero_from).min(row as u16)));
        if row < from {
            kv.clear_context(self.first_layer, block, row..from);
        }
    }

    /// Has a row its context?
    pub(crate) fn has_context(&self, kv: &KvStore, block: BlockId, row: usize) -> bool {
        let zero_from = self.extend.zero_from.get(block.0 as usize).copied().unwrap_or(0);
        row < usize::from(zero_from) && !kv.is_blank_row(self.first_layer, block, row)
    }
}

impl Extend<'_> {
    fn config(&self) -> &DflashConfig {
        &self.model.config
    }

    /// Called for each row when it is placed.
    ///
    /// # Safety
    /// The row belongs to the caller's item.
    pub(crate) unsafe fn place(&self, row: usize, position: usize) {
        if !self.rope.is_null() {
            let dim = self.config().head_dim;
            // SAFETY: by contract; the buffer has a row of `dim` values for each row of a step.
            let rope = unsafe { std::slice::from_raw_parts_mut(self.rope.add(row * dim), dim) };
            angles(self.inverse_frequencies, position, rope);
        }
    }

    /// Called for each row with the residual stream at the input of `layer`, layers ascending.
    ///
    /// # Safety
    /// The row belongs to the caller's item; `h` is valid for `hidden` values.
    pub(crate) unsafe fn tap(&self, kernels: &Kernels, layer: usize, row: usize, rows: usize, h: *const f32) {
        let c = self.config();
        let Some(slot) = c.target_layers.iter().position(|&l| l == layer) else { return };
        let width = c.target_layers.len() * c.hidden;
        let target = self.feature_panels.target(width, rows);
        let from = slot * c.hidden;
        // SAFETY: by contract, and the buffers have room for `max_rows` rows of `width` values. In the second case only
        // values `from ..` of a row that would begin at `h - from` are read, which are those at `h`.
        unsafe {
            if self.features.is_null() {
                (kernels.quantize)(h.wrapping_sub(from), row, from, from + c.hidden, &target);
                return;
            }
            let features = self.features.add(row * width);
            std::ptr::copy_nonoverlapping(h, features.add(from), c.hidden);
            if slot + 1 == c.target_layers.len() {
                (kernels.quantize)(features, row, 0, width, &target);
            }
        }
    }

    /// Layers that are tapped, in the order of [`muser_backend::Crossing::features`].
    pub(crate) fn taps(&self) -> &[usize] {
        &self.config().target_layers
    }

    /// The layer whose input is the last one tapped.
    pub(crate) fn last_tap(&self) -> usize {
        self.config().target_layers.iter().copied().max().unwrap_or(0)
    }

    /// First phase, of `rows` rows: from all features to what is normed, the product and its input.
    pub(crate) fn fc(&self, rows: usize) -> (Input, [(MatrixView, *mut f32, usize); 1]) {
        let c = self.config();
        let width = c.target_layers.len() * c.hidden;
        (self.feature_panels.input(width, rows, self.features), [(self.fc, self.context, c.hidden)])
    }

    /// Second phase: norm of one row.
    pub(crate) fn norm(&self, step: &StepRows<'_>, row: usize) {
        let c = self.config();
        let target = self.context_panels.target(c.hidden, step.places.len());
        // SAFETY: the row belongs to the caller's item, the weight has `hidden` values.
        unsafe {
            let g = self.context.add(row * c.hidden);
            let weight = self.model.enc_output_norm.as_ptr();
            (step.kernels.rms_norm)(g, weight, c.rms_eps, g, c.hidden);
            (step.kernels.quantize)(g, row, 0, c.hidden, &target);
        }
    }

    /// Third phase: K and V of all layers, of `rows` rows.
    pub(crate) fn keys_and_values(&self, rows: usize) -> ProductSet<'_> {
        let input = self.context_panels.input(self.config().hidden, rows, self.context);
        ProductSet::plain(input, self.products)
    }

    /// Items of the fourth phase, of `rows` rows.
    pub(crate) fn stores(&self, rows: usize) -> usize {
        let c = self.config();
        self.model.layers.len() * c.kv_heads * rows.div_ceil(STORE_ROWS)
    }

    /// Fourth phase: head norm, RoPE and KV of some rows of one key head of one layer.
    pub(crate) fn store(&self, step: &StepRows<'_>, item: usize) {
        let c = self.config();
        let per_layer = c.kv_heads * step.places.len().div_ceil(STORE_ROWS);
        let (layer, item) = (item / per_layer, item % per_layer);
        self.store_head(step, layer, item % c.kv_heads, item / c.kv_heads * STORE_ROWS);
    }

    fn store_head(&self, step: &StepRows<'_>, layer: usize, kv_head: usize, first: usize) {
        let c = self.config();
        let norm = self.model.layers[layer].attn_k_norm.as_ptr();
        let view = step.kv.view(self.first_layer + layer, kv_head);
        let angles = if self.rope.is_null() { step.rope } else { self.rope.cast_const() };
        for row in first..(first + STORE_ROWS).min(step.places.len()) {
            let place = &step.places[row];
            let id = step.block(place, true);
            let at = (layer * self.max_rows + row) * c.kv_width() + kv_head * c.head_dim;
            // SAFETY: this head of this row, and this position of this plane, belong to this item.
            unsafe {
                let (k, rope) = (self.k.add(at), angles.add(row * c.head_dim));
                (step.kernels.head_norm_rope_halves)(k, norm, c.rms_eps, c.head_dim, rope);
                (step.kernels.store_kv)(&view, id, place.position % BLOCK_LEN, k, self.v.add(at));
            }
        }
    }
}
