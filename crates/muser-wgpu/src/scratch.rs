//! Working memory of a step.

use muser_model::Geometry;

use crate::WgpuError;
use crate::activations::Activations;
use crate::device::{Buffer, Device};
use crate::eight::FEW_ROWS;
use crate::weights::Weights;

/// Most rows whose logits are computed at a time.
pub(crate) const TOP_ROWS: usize = 64;

/// Memory for up to so many rows.
pub(crate) struct Scratch {
    /// Residual stream.
    pub(crate) h: Buffer,
    pub(crate) q: Buffer,
    pub(crate) k: Buffer,
    pub(crate) v: Buffer,
    pub(crate) gate: Buffer,
    /// Digits of queries, and the factors of their scores.
    pub(crate) queries: Buffer,
    pub(crate) query_factors: Buffer,
    pub(crate) part_o: Buffer,
    pub(crate) part_l: Buffer,
    /// Output of the attention and down projections.
    pub(crate) projected: Buffer,
    pub(crate) ffn_gate: Buffer,
    pub(crate) ffn_up: Buffer,
    /// Output of the vocabulary matrix, and what is made of it.
    pub(crate) top: Buffer,
    pub(crate) logits: Buffer,
    pub(crate) hidden: Buffer,
    pub(crate) best: Buffer,
    pub(crate) chosen: Buffer,
    /// Factors of norms of rows, and of top rows.
    pub(crate) factors: Buffer,
    pub(crate) embeddings: Buffer,
    /// cos and sin for each row.
    pub(crate) angles: Buffer,
    /// For bindings that a kernel does not use.
    pub(crate) nothing: Buffer,
    /// The same for those that are written.
    pub(crate) sink: Buffer,
    pub(crate) act_hidden: Activations,
    pub(crate) act_attention: Activations,
    pub(crate) act_ffn: Activations,
    pub(crate) act_top: Activations,
}

/// Values of the widest row of the scratch memory.
fn widest(g: &Geometry) -> usize {
    g.hidden.max(g.ffn).max(g.q_width()).max(g.kv_width())
}

/// Rows of the top that are computed at a time: no more than a binding holds.
pub(crate) fn top_rows(g: &Geometry, binding: u64) -> usize {
    TOP_ROWS.min((binding / (16 * g.vocab.max(g.hidden) as u64)) as usize)
}

/// Rows of a step that fit a binding.
pub(crate) fn step_rows(g: &Geometry, binding: u64) -> usize {
    let fit = (binding / (4 * widest(g) as u64)) as usize;
    // A step of few rows needs four times its rows ([`few_rows`]).
    if fit >= 4 * FEW_ROWS as usize { fit } else { fit / 4 }
}

/// Rows of a product's output: where a step has few, each may leave up to four sums for it.
pub(crate) fn few_rows(rows: usize) -> usize {
    rows.max(4 * rows.min(FEW_ROWS as usize))
}

impl Scratch {
    pub(crate) fn new(
        device: &Device,
        g: &Geometry,
        weights: &Weights,
        rows: usize,
        top: usize,
        split: u32,
    ) -> Result<Self, WgpuError> {
        let of = |values: usize, what: &str| device.buffer(values as u64 * 4, what);
        let rows_of = |width: usize| of(few_rows(rows) * width, "a step's rows");
        let parts = rows + split as usize;
        // Readers of the same rows, for all layers.
        let readers = |pick: fn(&crate::weights::LayerOnDevice) -> Vec<&crate::weights::Weight>| {
            weights.layers.iter().flat_map(pick).collect::<Vec<_>>()
        };
        let hidden = readers(|l| vec![&l.attn_q, &l.attn_k, &l.attn_v, &l.attn_gate, &l.ffn_gate, &l.ffn_up]);
        let attention = readers(|l| vec![&l.attn_output]);
        let ffn = readers(|l| vec![&l.ffn_down]);
        let activations = |rows: usize, readers: &[&_]| Activations::new(device, rows as u32, readers);
        Ok(Self {
            h: rows_of(g.hidden)?,
            q: rows_of(g.q_width())?,
            k: rows_of(g.kv_width())?,
            v: rows_of(g.kv_width())?,
            gate: rows_of(g.q_width())?,
            queries: of(rows * g.q_width() / 2, "queries")?,
            query_factors: rows_of(g.heads)?,
            part_o: of(parts * g.q_width(), "attention")?,
            part_l: of(parts * g.heads, "attention")?,
            projected: rows_of(g.hidden)?,
            ffn_gate: rows_of(g.ffn)?,
            ffn_up: rows_of(g.ffn)?,
            top: of(few_rows(top) * g.vocab, "logits")?,
            logits: of(top * g.vocab, "logits")?,
            hidden: of(top * g.hidden, "hidden states")?,
            best: of(top * g.vocab.div_ceil(256) * 2, "logits")?,
            chosen: of(top * 2, "logits")?,
            factors: rows_of(2)?,
            embeddings: rows_of(g.hidden)?,
            angles: rows_of(g.head_dim)?,
            nothing: of(4, "nothing")?,
            sink: of(4, "nothing")?,
            act_hidden: activations(rows, &hidden)?,
            act_attention: activations(rows, &attention)?,
            act_ffn: activations(rows, &ffn)?,
            act_top: activations(top, &weights.output.iter().collect::<Vec<_>>())?,
        })
    }
}
