//! `muser logits`: the logits of every position, for comparisons between backends and engines.
//!
//! Drives an executor directly, without engine and sampler: one sequence from position 0 in steps of `--chunk` rows. Rows
//! go to disk step by step, so memory is a chunk of logits (32 x 202,048 x 4 bytes is 26 MB), not all of them.

use std::fs::File;
use std::io::BufWriter;

use anyhow::Context as _;
use muser_backend::{Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::Geometry;

use crate::cli::LogitsArgs;
use crate::model_file::ModelSource;
use crate::npy::NpyWriter;
use crate::output::{Console, Progress, usage_error};
use crate::{executor, ids};

/// Runs the command.
pub fn run(args: LogitsArgs, console: &Console) -> anyhow::Result<()> {
    let tokens = ids::read_ids(&args.ids)?;
    if tokens.is_empty() {
        return Err(usage_error(format!("{}: no ids", args.ids.display())));
    }
    let source = ModelSource::choose(args.model.model.as_deref(), console)?;
    let model = source.load()?;
    let geometry = model.geometry.clone();
    check_ids(&tokens, &geometry)?;
    let mut executor = executor::build(model, &args.model, args.kv)?;
    let chunk = usize::from(args.chunk).min(executor.info().max_rows);
    let tables = Tables::new(&geometry, tokens.len(), chunk);
    executor.allocate_kv(tables.capacity())?;

    let file = File::create(&args.out).with_context(|| args.out.display().to_string())?;
    let mut npy = NpyWriter::new(BufWriter::new(file), tokens.len(), geometry.vocab)?;
    let progress = Progress::steps(console, "logits", tokens.len() as u64, "positions");
    let (mut batch, mut output) = (StepBatch::default(), StepOutput::default());
    for (index, rows) in tokens.chunks(chunk).enumerate() {
        tables.fill(&mut batch, &geometry, index * chunk, rows);
        executor.step(&batch, &mut output)?;
        npy.write_rows(&output.logits).with_context(|| args.out.display().to_string())?;
        progress.advance(rows.len() as u64);
    }
    progress.finish();
    npy.finish().with_context(|| args.out.display().to_string())?;
    console.note(format!(
        "{}: {} x {} logits by {}",
        args.out.display(),
        tokens.len(),
        geometry.vocab,
        executor.info().device
    ));
    Ok(())
}

fn check_ids(tokens: &[u32], geometry: &Geometry) -> anyhow::Result<()> {
    if let Some(at) = tokens.iter().position(|&id| id as usize >= geometry.vocab) {
        anyhow::bail!("id {at} is {}, the vocabulary ends at {}", tokens[at], geometry.vocab - 1);
    }
    anyhow::ensure!(
        tokens.len() <= geometry.context,
        "{} ids, the context of the model is {}",
        tokens.len(),
        geometry.context
    );
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
