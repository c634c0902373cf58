//! Which rows and tiles a round has, and the memory for them.

use muser_backend::{DraftSeq, KvType};
use muser_kv::BLOCK_LEN;
use muser_model::DflashConfig;

use crate::executor::kv::Heads;
use crate::kernels::query_tile::{STATE_HEAD, TILE_QUERIES};

/// One row of a round.
#[derive(Clone, Copy)]
pub(super) struct RoundRow {
    /// Number of the sequence in the batch.
    pub(super) seq: usize,
    /// Number of its block in the round's memory.
    pub(super) slot: usize,
    /// Row inside the block; 0 is the anchor's.
    pub(super) index: usize,
    /// Number among the proposals.
    pub(super) logits: Option<usize>,
}

/// Some rows of one sequence and one key head.
#[derive(Clone, Copy)]
pub(super) struct RoundTile {
    pub(super) seq: usize,
    pub(super) slot: usize,
    /// First row of the tile, in the round and inside the sequence's block.
    pub(super) row: usize,
    pub(super) index: usize,
    pub(super) rows: usize,
    pub(super) kv_head: usize,
}

/// What a round needs besides the row buffers of a step.
pub(super) struct RoundPlan {
    pub(super) rows: Vec<RoundRow>,
    pub(super) tiles: Vec<RoundTile>,
    /// Proposals of the rows planned.
    pub(super) logit_rows: usize,
    /// The heads of a block of the round.
    pub(super) heads: Heads,
    /// K and V of the rows of the round, `[slot]` of a layer.
    pub(super) block_kv: Vec<u64>,
    /// Attention of single blocks, for each thread.
    pub(super) partial: Vec<f32>,
    pub(super) partial_size: usize,
}

impl RoundPlan {
    pub(super) fn new(c: &DflashConfig, kv_type: KvType, threads: usize) -> Self {
        // A window may lie across one block more than it fills; then the block of the round.
        let blocks = c.window / BLOCK_LEN + 3;
        let partial_size = blocks * TILE_QUERIES * (STATE_HEAD + c.head_dim);
        Self {
            rows: Vec::new(),
            tiles: Vec::new(),
            logit_rows: 0,
            heads: Heads { kv_type, count: c.kv_heads, dim: c.head_dim },
            block_kv: Vec::new(),
            partial: vec![0.0; threads * partial_size],
            partial_size,
        }
    }

    /// Plans as many sequences from `first` on as fit into `max_rows` rows; returns the first that does not.
    pub(super) fn plan(
        &mut self,
        c: &DflashConfig,
        seqs: &[DraftSeq],
        first: usize,
        max_rows: usize,
        threads: usize,
    ) -> usize {
        self.rows.clear();
        self.tiles.clear();
        self.logit_rows = 0;
        let mut end = first;
        while end < seqs.len() && self.rows.len() + (seqs[end].proposals as usize) < max_rows {
            for index in 0..=seqs[end].proposals as usize {
                let logits = (index > 0).then(|| self.logit_rows + index - 1);
                self.rows.push(RoundRow { seq: end, slot: end - first, index, logits });
            }
            self.logit_rows += seqs[end].proposals as usize;
            end += 1;
        }
        // With few tiles each takes fewer rows, so that all threads have some.
        let parts = (2 * threads).div_ceil(((end - first) * c.kv_heads).max(1));
        let most = (TILE_QUERIES / (c.heads / c.kv_heads)).max(1);
        let mut row = 0;
        for (slot, seq) in seqs[first..end].iter().enumerate() {
            let total = seq.proposals as usize + 1;
            let rows_per_tile = total.div_ceil(parts).min(most);
            for index in (0..total).step_by(rows_per_tile) {
                let rows = rows_per_tile.min(total - index);
                self.tiles.extend((0..c.kv_heads).map(|kv_head| RoundTile {
                    seq: first + slot,
                    slot,
                    row: row + index,
                    index,
                    rows,
                    kv_head,
                }));
            }
            row += total;
        }
        let words = ((end - first) * self.heads.bytes()).div_ceil(8);
        if self.block_kv.len() < words {
            self.block_kv.resize(words, 0);
        }
        end
    }
}
