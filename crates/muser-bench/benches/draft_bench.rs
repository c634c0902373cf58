//! Times what speculation costs on the executor alone: a draft round, a step of an anchor and its proposals, and what the
//! draft's context adds to a step.
//!
//! `draft_bench MODEL DRAFT [--threads N] [--depth N] [--proposals 1,3,7] [--sequences 1] [--tokens 32] [--reps 5]`.
//! Prints the median of the repetitions. Steps without a draft at all, with and without its context take turns, so that a
//! machine that is disturbed disturbs all. What proposals are worth is not measured here.
#![allow(clippy::print_stdout, reason = "a command")]

use muser_backend::DraftExecutor as _;
use muser_bench::middle;
use std::time::Instant;

use muser_backend::{DraftBatch, Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_kv::BlockId;
use muser_model::{Draft, Model};

struct Session {
    executor: CpuExecutor,
    sequences: usize,
    blocks: usize,
    batch: StepBatch,
    out: StepOutput,
    round: DraftBatch,
    logits: Vec<f32>,
}

impl Session {
    fn table(&self, sequence: usize) -> Vec<BlockId> {
        (0..self.blocks).map(|block| BlockId((sequence * self.blocks + block) as u32)).collect()
    }

    /// `rows` rows of every sequence from `pos`; seconds.
    fn step(&mut self, pos: usize, rows: usize, logits: bool, context: bool) -> f64 {
        self.batch.clear();
        if !context {
            self.batch.skip_draft_context();
        }
        let vocab = self.executor.info().vocab;
        for sequence in 0..self.sequences {
            let table = self.table(sequence);
            self.batch.push_seq(pos as u32, &table, 0, &table);
            for i in 0..rows {
                let id = ((pos + i + sequence) * 7919 + 13) % vocab.min(100_000);
                let wants = RowWants { logits, ..RowWants::default() };
                self.batch.push_row(Row { input: RowInput::Token(id as u32), wants });
            }
        }
        let start = Instant::now();
        self.executor.step(&self.batch, &mut self.out).expect("step");
        start.elapsed().as_secs_f64()
    }

    fn draft(&mut self, pos: usize, proposals: usize) -> f64 {
        self.round.clear();
        for sequence in 0..self.sequences {
            let table = self.table(sequence);
            self.round.push(5 + sequence as u32, pos as u32, proposals as u32, 0, &table);
        }
        let start = Instant::now();
        self.executor.draft(&self.round, &mut self.logits).expect("draft");
        start.elapsed().as_secs_f64()
    }
}

fn main() {
    let mut args = muser_bench::arguments();
    let (model, draft) = (args.next().expect("a model file"), args.next().expect("a draft file"));
    let (mut threads, mut depth, mut reps, mut tokens, mut sequences) = (None, 256, 5, 32, 1);
    let mut proposals = vec![1, 3, 7];
    while let Some(arg) = args.next() {
        let value = args.next().expect("a value");
        let number = || value.parse::<usize>().expect("a number");
        match arg.as_str() {
            "--threads" => threads = Some(number()),
            "--depth" => depth = number(),
            "--tokens" => tokens = number(),
            "--reps" => reps = number(),
            "--sequences" => sequences = number(),
            "--proposals" => proposals = value.split(',').map(|n| n.parse().expect("a number")).collect(),
            other => panic!("unknown argument {other}"),
        }
    }
    let session = |draft: Option<&str>| {
        let model = Model::load(&model).expect("model");
        let mut executor =
            CpuExecutor::new(model, CpuOptions { threads, ..CpuOptions::default() }).expect("executor");
        if let Some(draft) = draft {
            executor.attach_draft(Draft::load(draft).expect("draft")).expect("a draft that fits");
        }
        let blocks = (depth + 300).div_ceil(256);
        let all = (blocks * sequences) as u32;
        executor.allocate_kv(KvCapacity { full: all, sliding: all }).expect("KV memory");
        let mut session = Session {
            executor,
            sequences,
            blocks,
            batch: StepBatch::default(),
            out: StepOutput::default(),
            round: DraftBatch::default(),
            logits: Vec::new(),
        };
        for from in (0..depth).step_by(128) {
            let rows = 128.min(depth - from).min(session.executor.info().max_rows / sequences);
            (from..(from + 128).min(depth)).step_by(rows).for_each(|pos| {
                session.step(pos, rows.min(depth - pos), false, true);
            });
        }
        session
    };
    let (mut s, mut bare, mut bare_again) = (session(Some(&draft)), session(None), session(None));
    println!("{}, {sequences} sequences at depth {depth}", s.executor.info().device);
    let mut times = [const { Vec::new() }; 4];
    for _ in 0..reps {
        // Runs of steps, so that each of them finds in the caches what it left there.
        for _ in 0..tokens {
            times[0].push(bare.step(depth, 1, true, true));
        }
        for _ in 0..tokens {
            times[1].push(bare_again.step(depth, 1, true, true));
        }
        for _ in 0..tokens {
            times[2].push(s.step(depth + 1, 1, true, false));
        }
        for _ in 0..tokens {
            times[3].push(s.step(depth, 1, true, true));
        }
    }
    let [none, none_again, plain, with] = times.map(|times| middle(&times));
    let ms = |seconds: f64| 1e3 * seconds;
    println!(
        "step without a draft {:.3} ms, again {:.3} ms, {:+.1} %",
        ms(none),
        ms(none_again),
        100.0 * (none_again / none - 1.0)
    );
    println!(
        "with an idle draft {:.3} ms, {:+.1} %; with the draft's context {:.3} ms, {:+.1} % of that",
        ms(plain),
        100.0 * (plain / none - 1.0),
        ms(with),
        100.0 * (with / plain - 1.0)
    );
    for &k in &proposals {
        let (mut rounds, mut checks) = (Vec::new(), Vec::new());
        for _ in 0..(reps * tokens).div_ceil(k) {
            rounds.push(s.draft(depth, k));
            checks.push(s.step(depth, k + 1, true, true));
        }
        let (round, check) = (middle(&rounds), middle(&checks));
        println!(
            "{k} proposals: draft {:.3} ms, step of {} rows {:.3} ms, together {:.2} plain steps",
            ms(round),
            k + 1,
            ms(check),
            (round + check) / plain
        );
    }
}
