//! Which rows of the sliding blocks lack the draft's context: known on the host, so that asking costs no copy.

use std::collections::HashSet;

use muser_backend::StepBatch;
use muser_kv::{BLOCK_LEN, BlockId};

/// Rows whose context some step left out.
#[derive(Debug, Default)]
pub(crate) struct ContextRows {
    without: HashSet<(u32, usize)>,
}

impl ContextRows {
    /// All blocks are new.
    pub(crate) fn reset(&mut self) {
        self.without.clear();
    }

    /// Takes in a validated step.
    pub(crate) fn note_step(&mut self, batch: &StepBatch) {
        if batch.wants_draft_context() && self.without.is_empty() {
            return;
        }
        for seq in batch.seqs() {
            let table = batch.sliding_table(seq);
            for position in (seq.start_pos..seq.start_pos + seq.n_rows).map(|position| position as usize) {
                let block = table[position / BLOCK_LEN - seq.sliding_first as usize];
                self.note(block, position % BLOCK_LEN, batch.wants_draft_context());
            }
        }
    }

    /// Takes in a block that was copied in; `scales` are those of the keys of a draft's first layer and head, `[256]` f32.
    pub(crate) fn note_import(&mut self, block: BlockId, scales: &[u8]) {
        // A computed key has been normalised, so its scale is not zero.
        for (row, scale) in scales.chunks_exact(size_of::<f32>()).take(BLOCK_LEN).enumerate() {
            self.note(block, row, scale.iter().any(|byte| *byte != 0));
        }
    }

    /// Has a row that some step computed its context?
    pub(crate) fn has(&self, block: BlockId, row: usize) -> bool {
        !self.without.contains(&(block.0, row))
    }

    fn note(&mut self, block: BlockId, row: usize, has_context: bool) {
        if has_context {
            self.without.remove(&(block.0, row));
        } else {
            self.without.insert((block.0, row));
        }
    }
}

#[cfg(test)]
mod tests {
    use muser_backend::{Row, RowInput, RowWants};

    use super::*;

    #[test]
    fn rows_are_told_apart() {
        let mut rows = ContextRows::default();
        let mut batch = StepBatch::default();
        let mut step = |rows: &mut ContextRows, start: u32, count: u32, skip: bool| {
            batch.clear();
            if skip {
                batch.skip_draft_context();
            }
            batch.push_seq(start, &[], 0, &[BlockId(2), BlockId(0)]);
            for _ in 0..count {
                batch.push_row(Row { input: RowInput::Token(0), wants: RowWants::default() });
            }
            rows.note_step(&batch);
        };
        step(&mut rows, 0, 300, false);
        step(&mut rows, 254, 4, true);
        step(&mut rows, 255, 1, false);
        let without = |rows: &ContextRows, block: u32| -> Vec<usize> {
            (0..BLOCK_LEN).filter(|row| !rows.has(BlockId(block), *row)).collect()
        };
        assert_eq!((without(&rows, 2), without(&rows, 0)), (vec![254], vec![0, 1]));
        let mut scales = 0.5f32.to_le_bytes().repeat(BLOCK_LEN);
        scales[20..24].fill(0);
        rows.note_import(BlockId(0), &scales);
        assert_eq!(without(&rows, 0), [5]);
        rows.reset();
        assert!(rows.has(BlockId(2), 254));
    }
}
