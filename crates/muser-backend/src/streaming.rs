//! What a step is where layers are streamed to a device ([`crate::LayerStreamer`]): with many rows the way of the weights over the bus is
//! shorter than the arithmetic is on the processor.
//!
//! Nothing moves for good. Blocks of K and V go to the device for a step and those that were written come back at its end, so a
//! step that fails leaves host memory as it was, and the part that the layers belong to may compute it after all.

use std::collections::HashMap;

use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Model;

use crate::{ExecError, KvCapacity, LayerRange, Row, RowInput, RowWants, StepBatch};

/// A step over copies of the blocks that it reads and writes, numbered from 0 in each group.
#[derive(Default)]
pub struct StreamedStep {
    batch: StepBatch,
    blocks: [Vec<BlockId>; 2],
    written: [Vec<usize>; 2],
    numbers: [HashMap<BlockId, u32>; 2],
    rows: Vec<f32>,
}

impl StreamedStep {
    /// Renumbers the blocks of `from`. Ids become rows of the embedding table where the range begins with it, for the table is not
    /// where the layers are computed.
    ///
    /// # Errors
    /// A batch that does not fit the model.
    pub fn make(
        &mut self,
        from: &StepBatch,
        model: &Model,
        range: LayerRange,
        capacity: KvCapacity,
        max_rows: usize,
    ) -> Result<(), ExecError> {
        let g = &model.geometry;
        from.validate(g, capacity, max_rows)?;
        self.batch.clear();
        if !from.wants_draft_context() {
            self.batch.skip_draft_context();
        }
        self.blocks.iter_mut().for_each(Vec::clear);
        self.written.iter_mut().for_each(Vec::clear);
        self.numbers.iter_mut().for_each(HashMap::clear);
        if range.has_embedding() {
            look_up(from, model, &mut self.rows)?;
        }
        let (mut full, mut sliding) = (Vec::new(), Vec::new());
        for seq in from.seqs() {
            let (start, end) = (seq.start_pos as usize, (seq.start_pos + seq.n_rows) as usize);
            let first_visible = g.first_visible(start) / BLOCK_LEN;
            let behind = first_visible - seq.sliding_first as usize;
            let count = end.div_ceil(BLOCK_LEN);
            self.number(KvGroup::Full, &from.full_table(seq)[..count], start / BLOCK_LEN, &mut full);
            let visible = &from.sliding_table(seq)[behind..count - seq.sliding_first as usize];
            self.number(KvGroup::Sliding, visible, start / BLOCK_LEN - first_visible, &mut sliding);
            self.batch.push_seq(seq.start_pos, &full, first_visible as u32, &sliding);
            for row in seq.first_row..seq.first_row + seq.n_rows {
                let input = if range.has_embedding() {
                    let values = &self.rows[row as usize * g.hidden..][..g.hidden];
                    RowInput::Embedding(self.batch.push_embedding(values))
                } else {
                    RowInput::Token(0)
                };
                self.batch.push_row(Row { input, wants: RowWants::default() });
            }
        }
        Ok(())
    }

    /// Numbers of the blocks of a table, those from `first_written` on being written.
    fn number(
        &mut self,
        group: KvGroup,
        table: &[BlockId],
        first_written: usize,
        numbers: &mut Vec<BlockId>,
    ) {
        numbers.clear();
        let at = index(group);
        for (place, block) in table.iter().enumerate() {
            let next = self.blocks[at].len() as u32;
            let number = *self.numbers[at].entry(*block).or_insert(next);
            if number == next {
                self.blocks[at].push(*block);
            }
            if place >= first_written {
                self.written[at].push(number as usize);
            }
            numbers.push(BlockId(number));
        }
    }

    /// The step with the new numbers, in which nothing is wanted of any row.
    pub fn batch(&self) -> &StepBatch {
        &self.batch
    }

    /// The blocks by their new numbers.
    pub fn blocks(&self, group: KvGroup) -> &[BlockId] {
        &self.blocks[index(group)]
    }

    /// New numbers of the blocks that the step writes.
    pub fn written(&self, group: KvGroup) -> &[usize] {
        &self.written[index(group)]
    }
}

fn index(group: KvGroup) -> usize {
    usize::from(group == KvGroup::Sliding)
}

/// Rows of the embedding table and of pictures, in the order of the batch.
fn look_up(batch: &StepBatch, model: &Model, rows: &mut Vec<f32>) -> Result<(), ExecError> {
    let hidden = model.geometry.hidden;
    rows.resize(batch.rows().len() * hidden, 0.0);
    let one = |(row, values): (&Row, &mut [f32])| match row.input {
        RowInput::Token(id) => model
            .token_embd
            .look_up(id as usize, values)
            .map_err(|error| ExecError::InvalidBatch(format!("token {id}: {error}"))),
        RowInput::Embedding(e) => {
            values.copy_from_slice(&batch.embeddings()[e as usize * hidden..][..hidden]);
            Ok(())
        }
    };
    // Decoding the rows of a long step takes one thread as long as a layer takes the device.
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(8);
    let share = batch.rows().len().div_ceil(threads).max(64);
    std::thread::scope(|scope| {
        let parts = batch.rows().chunks(share).zip(rows.chunks_mut(share * hidden));
        let threads: Vec<_> = parts
            .map(|(some, values)| {
                scope.spawn(move || some.iter().zip(values.chunks_exact_mut(hidden)).try_for_each(one))
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

#[cfg(test)]
mod tests {
    use muser_model::synth::{self, Mix, Preset, SynthOptions};

    use super::*;

    fn model() -> Model {
        let mix = Mix::from_name("q8_0").expect("a mix");
        let bytes = synth::to_bytes(&SynthOptions::new(Preset::Tiny, mix)).expect("a model");
        let file = muser_gguf::GgufFile::from_bytes(bytes).expect("a file");
        Model::from_gguf(file.into()).expect("a model")
    }

    fn ids(blocks: &[u32]) -> Vec<BlockId> {
        blocks.iter().copied().map(BlockId).collect()
    }

    #[test]
    fn blocks_are_numbered_once_and_those_with_new_rows_come_back() {
        let model = model();
        let g = &model.geometry;
        let (len, layers) = (BLOCK_LEN as u32, g.layers());
        let capacity = KvCapacity { full: 50, sliding: 50 };
        let mut from = StepBatch::default();
        // Two sequences with a common beginning; the second one's table has blocks that nobody reads yet.
        from.push_seq(len + 5, &ids(&[40, 7]), 0, &ids(&[3, 9]));
        from.push_row(Row {
            input: RowInput::Token(5),
            wants: RowWants { logits: true, ..RowWants::default() },
        });
        from.push_seq(2 * len - 1, &ids(&[40, 8, 30, 31]), 0, &ids(&[3, 1, 2, 20]));
        let picture: Vec<f32> = (0..g.hidden).map(|i| i as f32).collect();
        let embedding = from.push_embedding(&picture);
        from.push_row(Row { input: RowInput::Embedding(embedding), wants: RowWants::default() });
        from.push_row(Row { input: RowInput::Token(9), wants: RowWants::default() });

        let mut step = StreamedStep::default();
        let range = LayerRange::new(0..2, layers).expect("inside");
        for _ in 0..2 {
            step.make(&from, &model, range, capacity, 16).expect("a step");
            assert_eq!(step.blocks(KvGroup::Full), ids(&[40, 7, 8, 30]));
            assert_eq!(step.written(KvGroup::Full), [1, 2, 3]);
            // Its window begins behind the first block.
            assert_eq!(g.first_visible(2 * BLOCK_LEN - 1) / BLOCK_LEN, 1);
            assert_eq!(step.blocks(KvGroup::Sliding), ids(&[3, 9, 1, 2]));
            assert_eq!(step.written(KvGroup::Sliding), [1, 2, 3]);
            let batch = step.batch();
            let few = KvCapacity { full: 4, sliding: 4 };
            batch.validate(g, few, 16).expect("the new numbers are a step, too");
            assert_eq!(batch.full_table(&batch.seqs()[1]), ids(&[0, 2, 3]));
            assert!(batch.rows().iter().all(|row| row.wants == RowWants::default()));
            let mut row = vec![0.0; g.hidden];
            model.token_embd.look_up(9, &mut row).expect("a row");
            assert_eq!(batch.embeddings()[2 * g.hidden..], row);
            assert_eq!(batch.embeddings()[g.hidden..2 * g.hidden], picture);
        }
        // Behind a cut ids mean nothing.
        let range = LayerRange::new(1..2, layers).expect("inside");
        step.make(&from, &model, range, capacity, 16).expect("a step");
        assert!(step.batch().embeddings().is_empty());
        step.make(&from, &model, range, KvCapacity { full: 40, sliding: 50 }, 16).expect_err("no such block");
        step.make(&from, &model, range, capacity, 2).expect_err("too many rows");
    }

    #[test]
    fn blocks_behind_the_window_stay_where_they_are() {
        let model = model();
        let g = &model.geometry;
        let start = g.window + 3 * BLOCK_LEN;
        let count = start / BLOCK_LEN + 1;
        let table: Vec<BlockId> = (0..count as u32).map(BlockId).collect();
        let first = g.first_visible(start) / BLOCK_LEN;
        assert!(first > 1, "{first}");
        let mut from = StepBatch::default();
        from.push_seq(start as u32, &table, 1, &table[1..]);
        from.push_row(Row { input: RowInput::Token(1), wants: RowWants::default() });
        let mut step = StreamedStep::default();
        let range = LayerRange::new(1..2, g.layers()).expect("inside");
        let capacity = KvCapacity { full: count as u32, sliding: count as u32 };
        step.make(&from, &model, range, capacity, 16).expect("a step");
        assert_eq!(step.blocks(KvGroup::Sliding), &table[first..]);
        assert_eq!(step.written(KvGroup::Sliding), [count - first - 1]);
        assert_eq!(step.written(KvGroup::Full), [count - 1]);
        step.batch().validate(g, capacity, 16).expect("a step");
    }
}
