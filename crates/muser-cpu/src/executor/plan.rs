//! How a step's attention is cut into pieces of work. No cut changes a bit of the result.

use muser_backend::StepBatch;

use crate::kernels::query_tile::TILE_QUERIES;

/// Some rows of one sequence and one key head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionTile {
    pub(crate) seq: usize,
    /// First row of the tile within the sequence's rows.
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) kv_head: usize,
}

/// All tiles of a step.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) tiles: Vec<AttentionTile>,
    /// Blocks of a piece when tiles are also cut along the KV, because there are fewer tiles than threads.
    pub(crate) split_blocks: Option<usize>,
    /// Most pieces of a tile, when cut.
    pub(crate) pieces: usize,
    /// Most blocks that a tile sees.
    pub(crate) max_blocks: usize,
}

impl Plan {
    /// Plans `batch`; reuses memory.
    pub(crate) fn make(
        &mut self,
        batch: &StepBatch,
        heads_per_group: usize,
        kv_heads: usize,
        threads: usize,
    ) {
        self.tiles.clear();
        self.max_blocks = 0;
        let rows_per_tile = (TILE_QUERIES / heads_per_group).max(1);
        for (seq, rows) in batch.seqs().iter().enumerate() {
            let end = (rows.start_pos + rows.n_rows) as usize;
            self.max_blocks = self.max_blocks.max(end.div_ceil(muser_kv::BLOCK_LEN));
            // The longest first, so that the last pieces of work are short.
            let mut left = rows.n_rows as usize;
            while left > 0 {
                let row = (left - 1) / rows_per_tile * rows_per_tile;
                for kv_head in 0..kv_heads {
                    self.tiles.push(AttentionTile { seq, row, rows: left - row, kv_head });
                }
                left = row;
            }
        }
        let few = self.tiles.len() < threads && self.max_blocks > 1;
        // About two pieces a thread.
        let pieces = (2 * threads).div_ceil(self.tiles.len().max(1)).min(self.max_blocks.max(1));
        self.split_blocks = few.then(|| self.max_blocks.div_ceil(pieces));
        self.pieces = self.split_blocks.map_or(1, |blocks| self.max_blocks.div_ceil(blocks));
    }
}
