//! Working memory of a step, allocated once for the largest step.

use muser_model::Geometry;

use crate::kernels::matmul::{Input, Panels, SUPER_SUMS};
use crate::kernels::rows::QuantTarget;

/// Row buffers are `[max_rows][width]`; names follow the formula of the model.
pub(crate) struct Buffers {
    /// Residual stream.
    pub(crate) h: Vec<f32>,
    /// Normalised input of a product.
    pub(crate) a: Vec<f32>,
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    /// Attention gate.
    pub(crate) gate: Vec<f32>,
    /// Attention output.
    pub(crate) o: Vec<f32>,
    /// Output of the two projections back to the residual stream.
    pub(crate) projected: Vec<f32>,
    pub(crate) ffn_gate: Vec<f32>,
    pub(crate) ffn_up: Vec<f32>,
    /// cos of all pairs, then sin, per row.
    pub(crate) rope: Vec<f32>,
    super_q: Vec<u8>,
    super_d: Vec<f32>,
    super_sums: Vec<i32>,
    small_q: Vec<u8>,
    small_d: Vec<f32>,
    small_sums: Vec<i32>,
}

impl Buffers {
    /// For steps of up to `rows` rows; the panels only for the kinds of types that the model has.
    pub(crate) fn new(g: &Geometry, rows: usize, super_blocks: bool, small_blocks: bool) -> Self {
        let widest = g.hidden.max(g.ffn).max(g.q_width());
        let of = |width: usize| vec![0.0f32; rows * width];
        let large = if super_blocks { rows * widest } else { 0 };
        let small = if small_blocks { rows * widest } else { 0 };
        Self {
            h: of(g.hidden),
            a: of(g.hidden),
            q: of(g.q_width()),
            k: of(g.kv_width()),
            v: of(g.kv_width()),
            gate: of(g.q_width()),
            o: of(g.q_width()),
            projected: of(g.hidden),
            ffn_gate: of(g.ffn),
            ffn_up: of(g.ffn),
            rope: of(g.head_dim),
            super_q: vec![0; large],
            super_d: vec![0.0; large / 256],
            super_sums: vec![0; large / 256 * SUPER_SUMS],
            small_q: vec![0; small],
            small_d: vec![0.0; small / 32],
            small_sums: vec![0; small / 32 * 3],
        }
    }

    /// Raw pointers to everything, for the threads of a step.
    pub(crate) fn pointers(&mut self) -> Pointers {
        Pointers {
            h: self.h.as_mut_ptr(),
            a: self.a.as_mut_ptr(),
            q: self.q.as_mut_ptr(),
            k: self.k.as_mut_ptr(),
            v: self.v.as_mut_ptr(),
            gate: self.gate.as_mut_ptr(),
            o: self.o.as_mut_ptr(),
            projected: self.projected.as_mut_ptr(),
            ffn_gate: self.ffn_gate.as_mut_ptr(),
            ffn_up: self.ffn_up.as_mut_ptr(),
            rope: self.rope.as_mut_ptr(),
            super_blocks: Panels {
                q: self.super_q.as_mut_ptr(),
                d: self.super_d.as_mut_ptr(),
                sums: self.super_sums.as_mut_ptr(),
            },
            small_blocks: Panels {
                q: self.small_q.as_mut_ptr(),
                d: self.small_d.as_mut_ptr(),
                sums: self.small_sums.as_mut_ptr(),
            },
            has_super: !self.super_q.is_empty(),
            has_small: !self.small_q.is_empty(),
        }
    }
}

/// See [`Buffers`].
#[derive(Clone, Copy)]
pub(crate) struct Pointers {
    pub(crate) h: *mut f32,
    pub(crate) a: *mut f32,
    pub(crate) q: *mut f32,
    pub(crate) k: *mut f32,
    pub(crate) v: *mut f32,
    pub(crate) gate: *mut f32,
    pub(crate) o: *mut f32,
    pub(crate) projected: *mut f32,
    pub(crate) ffn_gate: *mut f32,
    pub(crate) ffn_up: *mut f32,
    pub(crate) rope: *mut f32,
    super_blocks: Panels,
    small_blocks: Panels,
    has_super: bool,
    has_small: bool,
}

impl Pointers {
    /// Target for `rows` rows of `k` values.
    pub(crate) fn target(&self, k: usize, rows: usize) -> QuantTarget {
        QuantTarget {
            // A matrix of such a type has inputs of whole blocks, so inputs of another length need no such form.
            super_blocks: (self.has_super && k.is_multiple_of(256)).then_some(self.super_blocks),
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
