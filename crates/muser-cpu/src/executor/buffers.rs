//! Working memory of a step, allocated once for the largest step.

use muser_model::{DflashConfig, Geometry};

use super::panels::{PanelBuffers, PanelPointers};
use crate::bounds::Reach;
use crate::kernels::matmul::Input;
use crate::kernels::rows::QuantTarget;

/// Widths of the row buffers; those of a model, or the larger ones of a model and its draft.
#[derive(Clone, Copy)]
pub(crate) struct Widths {
    pub(crate) hidden: usize,
    pub(crate) ffn: usize,
    pub(crate) q: usize,
    pub(crate) kv: usize,
    pub(crate) head_dim: usize,
}

impl Widths {
    /// Those of a model.
    pub(crate) fn of(g: &Geometry) -> Self {
        Self { hidden: g.hidden, ffn: g.ffn, q: g.q_width(), kv: g.kv_width(), head_dim: g.head_dim }
    }

    /// Those of a draft.
    pub(crate) fn of_draft(c: &DflashConfig) -> Self {
        Self { hidden: c.hidden, ffn: c.ffn, q: c.q_width(), kv: c.kv_width(), head_dim: c.head_dim }
    }

    /// Room for a draft's rows too.
    pub(crate) fn or_draft(self, c: &DflashConfig) -> Self {
        let draft = Self::of_draft(c);
        Self {
            hidden: self.hidden.max(draft.hidden),
            ffn: self.ffn.max(draft.ffn),
            q: self.q.max(draft.q),
            kv: self.kv.max(draft.kv),
            head_dim: self.head_dim.max(draft.head_dim),
        }
    }
}

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
    panels: PanelBuffers,
    widths: Widths,
    rows: usize,
}

impl Buffers {
    /// For steps of up to `rows` rows; the panels only for the kinds of types that there are.
    pub(crate) fn new(w: Widths, rows: usize, super_blocks: bool, small_blocks: bool) -> Self {
        let of = |width: usize| vec![0.0f32; rows * width];
        let widest = w.hidden.max(w.ffn).max(w.q);
        Self {
            h: of(w.hidden),
            a: of(w.hidden),
            q: of(w.q),
            k: of(w.kv),
            v: of(w.kv),
            gate: of(w.q),
            o: of(w.q),
            projected: of(w.hidden),
            ffn_gate: of(w.ffn),
            ffn_up: of(w.ffn),
            rope: of(w.head_dim),
            panels: PanelBuffers::new(rows, widest, super_blocks, small_blocks),
            widths: w,
            rows,
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
            panels: self.panels.pointers(),
            widths: self.widths,
            rows: self.rows,
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
    panels: PanelPointers,
    widths: Widths,
    rows: usize,
}

impl Pointers {
    /// There is room for `rows` rows of these widths.
    pub(crate) fn holds(&self, rows: usize, widths: Widths) {
        let (w, room) = (widths, self.widths);
        Reach::of(self.rows).holds(rows);
        for (width, room) in [
            (w.hidden, room.hidden),
            (w.ffn, room.ffn),
            (w.q, room.q),
            (w.kv, room.kv),
            (w.head_dim, room.head_dim),
        ] {
            Reach::of(room).holds(width);
        }
    }

    /// The same with panels only for super-block types, or small-block types, or both.
    pub(crate) fn only(self, super_blocks: bool, small_blocks: bool) -> Self {
        Self { panels: self.panels.only(super_blocks, small_blocks), ..self }
    }

    /// Target for `rows` rows of `k` values.
    pub(crate) fn target(&self, k: usize, rows: usize) -> QuantTarget {
        self.panels.target(k, rows)
    }

    /// The same as an input; `float` is the row buffer it was quantised from.
    pub(crate) fn input(&self, k: usize, rows: usize, float: *const f32) -> Input {
        self.panels.input(k, rows, float)
    }
}
