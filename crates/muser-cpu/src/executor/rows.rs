//! The rows of a step, as the step and its draft know them.

use muser_backend::{ExecError, StepBatch, arith};
use muser_kv::{BLOCK_LEN, BlockId};

use super::kv::KvStore;
use crate::kernels::Kernels;

/// Rows that a thread takes at a time when K and V are stored: a cache line of transposed K.
pub(crate) const STORE_ROWS: usize = 32;

/// Where a row is and what it puts out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowPlace {
    pub(crate) seq: usize,
    pub(crate) position: usize,
    /// Number among the rows that need logits.
    pub(crate) logits: Option<usize>,
    pub(crate) hidden: Option<usize>,
}

/// Where the rows of a step are, and what writes them there.
#[derive(Clone, Copy)]
pub(crate) struct StepRows<'a> {
    pub(crate) batch: &'a StepBatch,
    pub(crate) places: &'a [RowPlace],
    pub(crate) kv: &'a KvStore,
    pub(crate) kernels: &'static Kernels,
    /// cos, then sin, of each row.
    pub(crate) rope: *const f32,
}

impl StepRows<'_> {
    /// The block of a group that a row writes to.
    pub(crate) fn block(&self, place: &RowPlace, sliding: bool) -> BlockId {
        let seq = &self.batch.seqs()[place.seq];
        let block = place.position / BLOCK_LEN;
        if sliding {
            self.batch.sliding_table(seq)[block - seq.sliding_first as usize]
        } else {
            self.batch.full_table(seq)[block]
        }
    }
}

/// cos of all pairs of a head at `position`, then sin.
pub(crate) fn angles(inverse_frequencies: &[f64], position: usize, rope: &mut [f32]) {
    let half = inverse_frequencies.len();
    for (t, &frequency) in inverse_frequencies.iter().enumerate() {
        (rope[t], rope[half + t]) = arith::rotation(position, frequency);
    }
}

/// Refuses norm weights whose scores the arithmetic of digits cannot hold: `bounds` of the layers of what is called `whose`.
pub(crate) fn check_scores(
    whose: &str,
    bounds: impl Iterator<Item = f32>,
    most: f32,
) -> Result<(), ExecError> {
    for (layer, bound) in bounds.enumerate() {
        if bound.is_nan() || bound >= most {
            let what = format!(
                "{whose}layer {layer}: attn_q_norm and attn_k_norm allow attention scores up to 2^{bound}, expected below \
                 2^{most}"
            );
            return Err(ExecError::Unsupported { backend: "cpu", what });
        }
    }
    Ok(())
}
