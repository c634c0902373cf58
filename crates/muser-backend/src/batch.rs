//! One step's work: rows of several sequences, their positions and their block tables.
//!
//! All buffers are flat and reused: building a batch of the same size again allocates nothing.

use std::ops::Range;

use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::Geometry;

use crate::{ExecError, KvCapacity};

/// What a row puts in at the bottom of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowInput {
    /// A token id; its embedding row is looked up and normalised.
    Token(u32),
    /// Row `i` of [`StepBatch::embeddings`] (an image position); normalised like a token's row.
    Embedding(u32),
}

/// What is wanted of a row at the top.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowWants {
    /// Logits over the vocabulary (scaled and soft-capped).
    pub logits: bool,
    /// Final hidden state after the output norm (embeddings).
    pub hidden: bool,
    /// The id of the largest logit alone: a device need not hand out the row for a greedy choice.
    pub argmax: bool,
    /// As many of the largest logits: for a choice among these. At most [`crate::Executor::most_candidates`].
    pub candidates: u16,
}

impl RowWants {
    /// Must the vocabulary matrix be applied to the row?
    pub fn needs_logits(self) -> bool {
        self.logits || self.argmax || self.candidates > 0
    }
}

/// One token position of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Input at the bottom.
    pub input: RowInput,
    /// Outputs wanted at the top.
    pub wants: RowWants,
}

/// The consecutive rows of one sequence in a step, and where its block tables lie in the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqRows {
    /// Index of the first row in [`StepBatch::rows`].
    pub first_row: u32,
    /// Number of rows.
    pub n_rows: u32,
    /// Position of the first row; row `i` is at `start_pos + i`.
    pub start_pos: u32,
    full: (u32, u32),
    sliding: (u32, u32),
    /// Absolute block index (position / 256) of the first entry of the sliding table.
    pub sliding_first: u32,
}

/// The work of one step. Build it with [`StepBatch::push_seq`] and [`StepBatch::push_row`], reuse it with
/// [`StepBatch::clear`].
#[derive(Clone, Debug, Default)]
pub struct StepBatch {
    rows: Vec<Row>,
    seqs: Vec<SeqRows>,
    full_blocks: Vec<BlockId>,
    sliding_blocks: Vec<BlockId>,
    embeddings: Vec<f32>,
    skip_draft_context: bool,
}

impl StepBatch {
    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.seqs.clear();
        self.full_blocks.clear();
        self.sliding_blocks.clear();
        self.embeddings.clear();
        self.skip_draft_context = false;
    }

    /// Nobody is going to draft soon: an attached draft's K and V of these rows need not be computed. They are stored as
    /// zeros, so that what earlier owners of a block left there never shows. The rows' results do not change.
    pub fn skip_draft_context(&mut self) {
        self.skip_draft_context = true;
    }

    /// Are the draft's K and V of all rows wanted?
    pub fn wants_draft_context(&self) -> bool {
        !self.skip_draft_context
    }

    /// Begins a sequence: the rows pushed next are at `start_pos`, `start_pos + 1`, ...
    ///
    /// `full[i]` holds positions `[256 i, 256 (i + 1))`; `sliding[i]` holds those of block `sliding_first + i`. Both
    /// tables reach to the last pushed row; the sliding one begins early enough for the first row's window.
    pub fn push_seq(&mut self, start_pos: u32, full: &[BlockId], sliding_first: u32, sliding: &[BlockId]) {
        let full_at = self.full_blocks.len() as u32;
        let sliding_at = self.sliding_blocks.len() as u32;
        self.full_blocks.extend_from_slice(full);
        self.sliding_blocks.extend_from_slice(sliding);
        self.seqs.push(SeqRows {
            first_row: self.rows.len() as u32,
            n_rows: 0,
            start_pos,
            full: (full_at, full.len() as u32),
            sliding: (sliding_at, sliding.len() as u32),
            sliding_first,
        });
    }

    /// Adds a row to the sequence begun last.
    pub fn push_row(&mut self, row: Row) {
        let seq = self.seqs.last_mut().expect("push_seq comes before push_row");
        seq.n_rows += 1;
        self.rows.push(row);
    }

    /// Adds one embedding row (hidden size values) and returns the index for [`RowInput::Embedding`].
    pub fn push_embedding(&mut self, values: &[f32]) -> u32 {
        let index = if values.is_empty() { 0 } else { self.embeddings.len() / values.len() };
        self.embeddings.extend_from_slice(values);
        index as u32
    }

    /// Makes this the step of some adjacent rows of another one, which computes the same for them if what comes before them has
    /// been computed. `hidden` is the width of an embedding row.
    pub fn take_rows(&mut self, from: &StepBatch, rows: Range<usize>, hidden: usize) {
        self.clear();
        self.skip_draft_context = from.skip_draft_context;
        for seq in &from.seqs {
            let first = seq.first_row as usize;
            let own = rows.start.max(first)..rows.end.min(first + seq.n_rows as usize);
            if own.is_empty() {
                continue;
            }
            let start = seq.start_pos + (own.start - first) as u32;
            self.push_seq(start, from.full_table(seq), seq.sliding_first, from.sliding_table(seq));
            for row in &from.rows[own] {
                let input = match row.input {
                    RowInput::Token(id) => RowInput::Token(id),
                    RowInput::Embedding(e) => {
                        let values = &from.embeddings[e as usize * hidden..][..hidden];
                        RowInput::Embedding(self.push_embedding(values))
                    }
                };
                self.push_row(Row { input, wants: row.wants });
            }
        }
    }

    /// All rows, sequence by sequence.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The sequences of this step.
    pub fn seqs(&self) -> &[SeqRows] {
        &self.seqs
    }

    /// Embedding rows, hidden size values each.
    pub fn embeddings(&self) -> &[f32] {
        &self.embeddings
    }

    /// Block table of `seq` for the full-attention layers, from position 0.
    pub fn full_table(&self, seq: &SeqRows) -> &[BlockId] {
        &self.full_blocks[seq.full.0 as usize..][..seq.full.1 as usize]
    }

    /// Block table of `seq` for the sliding layers, from block [`SeqRows::sliding_first`].
    pub fn sliding_table(&self, seq: &SeqRows) -> &[BlockId] {
        &self.sliding_blocks[seq.sliding.0 as usize..][..seq.sliding.1 as usize]
    }

    /// Checks every index an executor is going to follow, so that kernels need not.
    pub fn validate(
        &self,
        geometry: &Geometry,
        capacity: KvCapacity,
        max_rows: usize,
    ) -> Result<(), ExecError> {
        let bad = |what: String| Err(ExecError::InvalidBatch(what));
        if self.rows.is_empty() || self.rows.len() > max_rows {
            return bad(format!("{} rows, expected 1 to {max_rows}", self.rows.len()));
        }
        for (i, row) in self.rows.iter().enumerate() {
            match row.input {
                RowInput::Token(id) if id as usize >= geometry.vocab => {
                    return bad(format!("row {i}: token {id}, vocabulary is {}", geometry.vocab));
                }
                RowInput::Embedding(e) if (e as usize + 1) * geometry.hidden > self.embeddings.len() => {
                    return bad(format!("row {i}: embedding row {e} is missing"));
                }
                _ => {}
            }
        }
        for (i, seq) in self.seqs.iter().enumerate() {
            if seq.n_rows == 0 {
                return bad(format!("sequence {i} has no rows"));
            }
            let end = seq.start_pos as usize + seq.n_rows as usize;
            if end > geometry.context {
                return bad(format!("sequence {i} ends at {end}, context is {}", geometry.context));
            }
            let blocks = end.div_ceil(BLOCK_LEN);
            let full = self.full_table(seq);
            if full.len() < blocks {
                return bad(format!("sequence {i}: {} full blocks, needs {blocks}", full.len()));
            }
            let first = geometry.first_visible(seq.start_pos as usize) / BLOCK_LEN;
            let sliding = self.sliding_table(seq);
            let sliding_first = seq.sliding_first as usize;
            if sliding_first > first || sliding_first + sliding.len() < blocks {
                return bad(format!(
                    "sequence {i}: sliding table covers blocks {sliding_first}..{}, needs {first}..{blocks}",
                    sliding_first + sliding.len()
                ));
            }
            if full.iter().any(|b| b.0 >= capacity.full) || sliding.iter().any(|b| b.0 >= capacity.sliding) {
                return bad(format!("sequence {i}: a block id is beyond the allocated blocks"));
            }
        }
        Ok(())
    }
}

/// Results of a step, in the order of the rows that asked for them. Reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// One row of vocabulary size for every row that wants logits.
    pub logits: Vec<f32>,
    /// One row of hidden size for every row that wants its final hidden state.
    pub hidden: Vec<f32>,
    /// [`argmax`] of the logits of every row that wants it.
    pub argmax: Vec<Option<u32>>,
    /// Ids and logits of the largest logits of every row that wants candidates: as many as it wants (or as there are), the
    /// largest first, the lowest id first among equals. The first is NaN if any logit of the row is not finite.
    pub candidates: Vec<(u32, f32)>,
}

impl StepOutput {
    /// For executors whose logits are on the host anyway. `logits` comes with a row for every row of the batch that
    /// [`RowWants::needs_logits`]; the largest are written down, and the rows that nobody wants whole are dropped.
    pub fn reduce_to_argmax(&mut self, batch: &StepBatch, vocab: usize) {
        self.argmax.clear();
        self.candidates.clear();
        if !batch.rows().iter().any(|row| row.wants.argmax || row.wants.candidates > 0) {
            return;
        }
        let (mut from, mut to) = (0, 0);
        for row in batch.rows().iter().filter(|row| row.wants.needs_logits()) {
            if row.wants.argmax {
                self.argmax.push(argmax(&self.logits[from..from + vocab]));
            }
            if row.wants.candidates > 0 {
                let largest = candidates(&self.logits[from..from + vocab], row.wants.candidates.into());
                self.candidates.extend(largest);
            }
            if row.wants.logits {
                self.logits.copy_within(from..from + vocab, to);
                to += vocab;
            }
            from += vocab;
        }
        self.logits.truncate(to);
    }
}

/// The index of the largest value, the lowest among equals; `None` if a value is not finite (or there is none).
pub fn argmax(logits: &[f32]) -> Option<u32> {
    // Without branches, in lanes: a value that is not finite survives in a sum of zero products.
    let (mut lanes, mut poison) = ([f32::NEG_INFINITY; 16], [0.0f32; 16]);
    let chunks = logits.chunks_exact(16);
    for (i, &value) in chunks.remainder().iter().enumerate() {
        lanes[i] = value;
        poison[i] = value * 0.0;
    }
    for chunk in chunks {
        for ((best, poison), &value) in lanes.iter_mut().zip(&mut poison).zip(chunk) {
            *best = if value > *best { value } else { *best };
            *poison += value * 0.0;
        }
    }
    if poison.iter().any(|lane| !lane.is_finite()) {
        return None;
    }
    let best = lanes.iter().fold(f32::NEG_INFINITY, |best, &value| if value > best { value } else { best });
    logits.iter().position(|&value| value == best).map(|at| at as u32)
}

/// The `count` largest logits, the largest first, the lowest id first among equals; a first one of NaN if any is not finite.
/// Sorts them all: for checks, not for speed.
pub fn candidates(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    // Zeros of either sign are equal.
    all.sort_by(|a, b| (b.1 + 0.0).total_cmp(&(a.1 + 0.0)).then(a.0.cmp(&b.0)));
    all.truncate(count);
    if let Some(first) = all.first_mut().filter(|_| logits.iter().any(|v| !v.is_finite())) {
        first.1 = f32::NAN;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_are_the_largest_in_order() {
        let check = |logits: &[f32], count: usize, expected: &[(u32, f32)]| {
            assert_eq!(candidates(logits, count), expected, "{logits:?}");
        };
        check(&[1.0, 3.0, 2.0, 3.0], 3, &[(1, 3.0), (3, 3.0), (2, 2.0)]);
        check(&[-0.0, 0.0, -1.0], 2, &[(0, 0.0), (1, 0.0)]);
        check(&[1.0], 5, &[(0, 1.0)]);
        assert!(candidates(&[1.0, f32::NEG_INFINITY], 1)[0].1.is_nan());
    }

    #[test]
    fn argmax_takes_the_first_of_equals_and_refuses_what_is_not_finite() {
        let check =
            |logits: &[f32], expected: Option<u32>| assert_eq!(argmax(logits), expected, "{logits:?}");
        check(&[1.0, 3.0, 3.0, 2.0], Some(1));
        check(&[-0.0, 0.0], Some(0));
        check(&[-5.0], Some(0));
        check(&[], None);
        check(&[1.0, f32::NAN, 2.0], None);
        check(&[1.0, f32::INFINITY], None);
        check(&[f32::NEG_INFINITY, 1.0], None);
    }

    #[test]
    fn some_rows_of_a_step_are_a_step() {
        let mut whole = StepBatch::default();
        let wants = RowWants { logits: true, ..RowWants::default() };
        whole.push_seq(300, &[BlockId(4), BlockId(5)], 1, &[BlockId(6)]);
        for token in 0..3 {
            whole.push_row(Row { input: RowInput::Token(token), wants });
        }
        whole.push_seq(7, &[BlockId(1)], 0, &[BlockId(2)]);
        for value in 0..3 {
            let input = RowInput::Embedding(whole.push_embedding(&[value as f32, 0.5]));
            whole.push_row(Row { input, wants: RowWants::default() });
        }
        whole.skip_draft_context();
        let mut some = StepBatch::default();
        some.take_rows(&whole, 2..5, 2);
        let seqs: Vec<_> = some.seqs().iter().map(|s| (s.first_row, s.n_rows, s.start_pos)).collect();
        assert_eq!(seqs, [(0, 1, 302), (1, 2, 7)]);
        assert_eq!(some.full_table(&some.seqs()[0]), [BlockId(4), BlockId(5)]);
        assert_eq!(
            (some.sliding_table(&some.seqs()[1]), some.seqs()[0].sliding_first),
            (&[BlockId(2)][..], 1)
        );
        let inputs: Vec<_> = some.rows().iter().map(|row| row.input).collect();
        assert_eq!(inputs, [RowInput::Token(2), RowInput::Embedding(0), RowInput::Embedding(1)]);
        assert_eq!(some.embeddings(), [0.0, 0.5, 1.0, 0.5]);
        assert!(some.rows()[0].wants.logits && !some.wants_draft_context());
        // Cut in two, nothing is lost and nothing is there twice.
        some.take_rows(&whole, 0..2, 2);
        assert_eq!((some.rows().len(), some.seqs().len(), some.embeddings().len()), (2, 1, 0));
        some.take_rows(&whole, 0..6, 2);
        assert_eq!((some.rows(), some.seqs()), (whole.rows(), whole.seqs()));
    }

    #[test]
    fn only_the_rows_that_are_wanted_whole_stay() {
        let mut batch = StepBatch::default();
        batch.push_seq(0, &[], 0, &[]);
        for (logits, argmax) in [(true, false), (false, true), (false, false), (true, true), (false, true)] {
            let wants = RowWants { logits, argmax, ..RowWants::default() };
            batch.push_row(Row { input: RowInput::Token(0), wants });
        }
        let mut out =
            StepOutput { logits: vec![9.0, 1.0, 2.0, 3.0, 5.0, 4.0, 7.0, 8.0], ..StepOutput::default() };
        out.reduce_to_argmax(&batch, 2);
        assert_eq!(out.logits, [9.0, 1.0, 5.0, 4.0]);
        assert_eq!(out.argmax, [Some(1), Some(0), Some(1)]);
    }
}
