//! Which rows of the sliding blocks have the draft's context: known on the host, so that asking costs no copy.

use muser_kv::{BLOCK_LEN, BlockId};

use crate::StepBatch;

/// One bit for every row of every sliding block: its context was left out.
#[derive(Debug, Default)]
pub struct ContextRows {
    without: Vec<[u64; BLOCK_LEN / 64]>,
}

impl ContextRows {
    /// So many new blocks.
    pub fn reset(&mut self, blocks: u32) {
        self.without = vec![[0; BLOCK_LEN / 64]; blocks as usize];
    }

    /// Takes in a validated step.
    pub fn note_step(&mut self, batch: &StepBatch) {
        let computed = batch.wants_draft_context();
        for seq in batch.seqs() {
            let table = batch.sliding_table(seq);
            for position in (seq.start_pos..seq.start_pos + seq.n_rows).map(|p| p as usize) {
                let block = table[position / BLOCK_LEN - seq.sliding_first as usize];
                self.note(block, position % BLOCK_LEN, computed);
            }
        }
    }

    /// Takes in a block that was copied in; `scales` are those of the keys of a draft's first layer and head, `[256]` f32.
    pub fn note_import(&mut self, block: BlockId, scales: &[u8]) {
        // A computed key has been normalised, so its scale is not zero.
        for (row, scale) in scales.chunks_exact(size_of::<f32>()).take(BLOCK_LEN).enumerate() {
            self.note(block, row, scale.iter().any(|&byte| byte != 0));
        }
    }

    /// Has a row that some step computed its context?
    pub fn has(&self, block: BlockId, row: usize) -> bool {
        self.without.get(block.0 as usize).is_none_or(|rows| rows[row / 64] >> (row % 64) & 1 == 0)
    }

    fn note(&mut self, block: BlockId, row: usize, has_context: bool) {
        if let Some(rows) = self.without.get_mut(block.0 as usize) {
            let bit = 1 << (row % 64);
            rows[row / 64] = if has_context { rows[row / 64] & !bit } else { rows[row / 64] | bit };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Row, RowInput, RowWants};

    #[test]
    fn rows_are_told_apart() {
        let mut rows = ContextRows::default();
        assert!(rows.has(BlockId(7), 3), "what is not known has it");
        rows.reset(3);
        let mut batch = StepBatch::default();
        let mut step = |start: u32, count: u32, skip: bool| {
            batch.clear();
            if skip {
                batch.skip_draft_context();
            }
            batch.push_seq(start, &[], 0, &[BlockId(2), BlockId(0)]);
            (0..count).for_each(|_| {
                batch.push_row(Row { input: RowInput::Token(0), wants: RowWants::default() });
            });
            rows.note_step(&batch);
        };
        step(0, 300, false);
        step(250, 10, true);
        step(252, 1, false);
        let without = |rows: &ContextRows, block: u32| -> Vec<usize> {
            (0..BLOCK_LEN).filter(|&row| !rows.has(BlockId(block), row)).collect()
        };
        assert_eq!(without(&rows, 2), [250, 251, 253, 254, 255]);
        assert_eq!(without(&rows, 0), [0, 1, 2, 3]);
        assert!(without(&rows, 1).is_empty());
        let mut scales = 0.5f32.to_le_bytes().repeat(BLOCK_LEN);
        scales[5 * 4..6 * 4].fill(0);
        rows.note_import(BlockId(0), &scales);
        assert_eq!(without(&rows, 0), [5]);
    }
}
