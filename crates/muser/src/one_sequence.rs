//! One sequence through an executor, without engine and sampler: for comparisons of logits.

use muser_backend::{Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::Geometry;

/// Reads `tokens` from position 0 in steps of `chunk` rows; `took` gets the number of rows and the logits of each step.
/// Drops what KV the executor had.
pub fn read_through(
    executor: &mut dyn Executor,
    geometry: &Geometry,
    tokens: &[u32],
    chunk: usize,
    took: &mut dyn FnMut(usize, &[f32]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let tables = Tables::new(geometry, tokens.len(), chunk);
    executor.allocate_kv(tables.capacity())?;
    let (mut batch, mut output) = (StepBatch::default(), StepOutput::default());
    for (index, rows) in tokens.chunks(chunk).enumerate() {
        tables.fill(&mut batch, geometry, index * chunk, rows);
        executor.step(&batch, &mut output)?;
        took(rows.len(), &output.logits)?;
    }
    Ok(())
}

/// Block tables of one sequence. Full blocks are never given up; sliding ones are a ring as long as a window and a step.
struct Tables {
    full: Vec<BlockId>,
    ring: u32,
}

impl Tables {
    fn new(geometry: &Geometry, positions: usize, chunk: usize) -> Self {
        let blocks = positions.div_ceil(BLOCK_LEN);
        // A step touches positions from the first one its first row sees to its last row; one block more at either end
        // because that stretch need not begin at a block.
        let ring = ((geometry.window + chunk).div_ceil(BLOCK_LEN) + 1).min(blocks);
        Self { full: (0..blocks as u32).map(BlockId).collect(), ring: ring as u32 }
    }

    fn capacity(&self) -> KvCapacity {
        KvCapacity { full: self.full.len() as u32, sliding: self.ring }
    }

    fn fill(&self, batch: &mut StepBatch, geometry: &Geometry, start: usize, tokens: &[u32]) {
        let end = (start + tokens.len()).div_ceil(BLOCK_LEN) as u32;
        let first = (geometry.first_visible(start) / BLOCK_LEN) as u32;
        let sliding: Vec<_> = (first..end).map(|block| BlockId(block % self.ring)).collect();
        batch.clear();
        batch.push_seq(start as u32, &self.full, first, &sliding);
        let wants = RowWants { logits: true, ..RowWants::default() };
        for &token in tokens {
            batch.push_row(Row { input: RowInput::Token(token), wants });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_never_holds_two_blocks_in_one_place() {
        let geometry = muser_model::synth::Preset::Tiny.geometry();
        let mut batch = StepBatch::default();
        for chunk in [1, 31, 256, 300] {
            let positions = 3000;
            let tables = Tables::new(&geometry, positions, chunk);
            for start in (0..positions).step_by(chunk) {
                let rows = vec![1; chunk.min(positions - start)];
                tables.fill(&mut batch, &geometry, start, &rows);
                batch.validate(&geometry, tables.capacity(), chunk).expect("every table is complete");
                let seq = batch.seqs()[0];
                let mut ids = batch.sliding_table(&seq).to_vec();
                ids.sort();
                ids.dedup();
                assert_eq!(ids.len(), batch.sliding_table(&seq).len(), "chunk {chunk} at {start}");
            }
        }
    }
}
