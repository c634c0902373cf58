//! The thing that is measured: an executor with sequences of its own, filled to a depth by real prefill.
//!
//! Sequences are filled once and rewound by starting again at an earlier position: what a repetition writes over has the
//! same size and the same cost, and values never change the time. Further sequences get copies of the first one's
//! blocks, in memory of their own.

use std::time::{Duration, Instant};

use anyhow::Result;
use muser_backend::{Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Geometry;

use crate::plan::Test;

/// An executor and its sequences.
pub struct Subject {
    executor: Box<dyn Executor>,
    geometry: Geometry,
    /// Blocks of each sequence: all full ones, and a ring of sliding ones.
    sequences: Vec<(Vec<BlockId>, Vec<BlockId>)>,
    /// Positions of the first sequence that hold KV; the others as far as they were copied.
    filled: Vec<u32>,
    batch: StepBatch,
    out: StepOutput,
}

impl Subject {
    /// Allocates KV for everything that `tests` reach.
    pub fn new(
        mut executor: Box<dyn Executor>,
        geometry: Geometry,
        tests: &[Test],
        gen_tokens: u32,
    ) -> Result<Self> {
        let end = tests.iter().map(|t| t.end(t.steps(gen_tokens))).max().unwrap_or(1).max(1) as usize;
        let count = tests.iter().map(|t| t.sequences()).max().unwrap_or(1);
        let full = end.div_ceil(BLOCK_LEN) as u32;
        // A step's rows and the window before them never meet themselves in the ring.
        let ring = (geometry.window + executor.info().max_rows).div_ceil(BLOCK_LEN) as u32 + 2;
        let sliding = ring.min(full);
        executor.allocate_kv(KvCapacity { full: full * count, sliding: sliding * count })?;
        let blocks = |n: u32, per: u32| (n * per..(n + 1) * per).map(BlockId).collect::<Vec<_>>();
        let sequences = (0..count).map(|n| (blocks(n, full), blocks(n, sliding))).collect();
        Ok(Self {
            executor,
            geometry,
            sequences,
            filled: vec![0; count as usize],
            batch: StepBatch::default(),
            out: StepOutput::default(),
        })
    }

    /// The executor's facts.
    pub fn info(&self) -> &muser_backend::ExecutorInfo {
        self.executor.info()
    }

    /// What computes.
    pub fn executor(&self) -> &dyn Executor {
        self.executor.as_ref()
    }

    /// Runs `steps` steps of `test`; returns the time of each.
    pub fn run(&mut self, test: Test, steps: u32) -> Result<Vec<Duration>> {
        self.fill(test.sequences(), test.depth())?;
        let mut times = Vec::with_capacity(steps as usize);
        for step in 0..steps {
            times.push(match test {
                Test::Prompt(n) => self.prompt(n)?,
                Test::Generate { depth } => self.step(1, depth + step, 1)?,
                Test::Rows { rows, depth } => self.step(rows, depth + step, 1)?,
                Test::Draft { rows, depth } => self.step(1, depth, rows)?,
            });
        }
        let first = self.filled[0].max(test.end(steps));
        self.filled[0] = first;
        Ok(times)
    }

    /// Makes sure that the first `count` sequences have KV for `depth` positions.
    fn fill(&mut self, count: u32, depth: u32) -> Result<()> {
        if self.filled[0] < depth {
            let from = self.filled[0];
            self.prefill(0, from, depth, false)?;
            self.filled[0] = depth;
        }
        for n in 1..count as usize {
            if self.filled[n] < depth {
                self.copy_first_to(n)?;
                self.filled[n] = self.filled[0];
            }
        }
        Ok(())
    }

    fn copy_first_to(&mut self, n: usize) -> Result<()> {
        for group in [KvGroup::Full, KvGroup::Sliding] {
            let mut bytes = vec![0; self.executor.info().block_bytes(group)];
            let pick = |blocks: &(Vec<BlockId>, Vec<BlockId>)| match group {
                KvGroup::Full => blocks.0.clone(),
                KvGroup::Sliding => blocks.1.clone(),
            };
            for (from, to) in pick(&self.sequences[0]).into_iter().zip(pick(&self.sequences[n])) {
                self.executor.export_block(group, from, &mut bytes)?;
                self.executor.import_block(group, to, &bytes)?;
            }
        }
        Ok(())
    }

    fn prompt(&mut self, n: u32) -> Result<Duration> {
        let start = Instant::now();
        self.prefill(0, 0, n, true)?;
        Ok(start.elapsed())
    }

    /// Positions `from..to` of a sequence in the largest steps that the executor takes.
    fn prefill(&mut self, sequence: usize, from: u32, to: u32, last_logits: bool) -> Result<()> {
        let most = self.executor.info().max_rows as u32;
        let mut at = from;
        while at < to {
            let rows = most.min(to - at);
            self.batch.clear();
            self.push(sequence, at, rows, |row| last_logits && at + row + 1 == to);
            self.executor.step(&self.batch, &mut self.out)?;
            at += rows;
        }
        Ok(())
    }

    /// One step of `count` sequences with `rows` rows each from position `at`, logits of every row.
    fn step(&mut self, count: u32, at: u32, rows: u32) -> Result<Duration> {
        self.batch.clear();
        for n in 0..count as usize {
            self.push(n, at, rows, |_| true);
        }
        let start = Instant::now();
        self.executor.step(&self.batch, &mut self.out)?;
        Ok(start.elapsed())
    }

    fn push(&mut self, sequence: usize, at: u32, rows: u32, logits: impl Fn(u32) -> bool) {
        let (full, ring) = &self.sequences[sequence];
        let first = self.geometry.first_visible(at as usize) / BLOCK_LEN;
        let end = ((at + rows) as usize).div_ceil(BLOCK_LEN);
        let sliding: Vec<_> = (first..end).map(|block| ring[block % ring.len()]).collect();
        self.batch.push_seq(at, &full[..end], first as u32, &sliding);
        for row in 0..rows {
            let id = token(sequence as u32, at + row, self.geometry.vocab);
            let wants = RowWants { logits: logits(row), ..RowWants::default() };
            self.batch.push_row(Row { input: RowInput::Token(id), wants });
        }
    }
}

/// Any token: which one does not matter, only that embedding rows are not all the same.
fn token(sequence: u32, position: u32, vocab: usize) -> u32 {
    let mixed = (u64::from(sequence) << 32 | u64::from(position)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((mixed >> 32) % vocab.max(1) as u64) as u32
}
