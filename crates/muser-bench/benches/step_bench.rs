//! Times the executor alone, for tuning kernels: prefill, decode at depths, several rows per step.
//!
//! `step_bench MODEL [--threads N] [--prompt 512,2048] [--depth 0,2048] [--gen 32] [--rows 1,8] [--reps 3] [--repack
//! auto|on|off] [--kv f16,16,8] [--probe] [--cpu-time]`. Types of KV take turns in every repetition; the first is what the
//! others are compared with. With `--cpu-time` (and one thread) rates count processor time, which other
//! programs disturb less. Prints one line per test: median and best. `muser bench` is the command for figures that are
//! quoted.
#![allow(clippy::print_stdout, reason = "a command")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use muser_backend::{Executor, KvCapacity, KvType, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_bench::middle;
use muser_cpu::{BandwidthProbe, CpuExecutor, CpuOptions, Repack};
use muser_kv::BlockId;
use muser_model::Model;
use rustix::time::{ClockId, clock_gettime};

struct Session {
    executor: CpuExecutor,
    table: Vec<BlockId>,
    vocab: usize,
    batch: StepBatch,
    out: StepOutput,
}

impl Session {
    /// One step of `rows` rows from position `pos`; only the last row wants logits unless `all`.
    fn step(&mut self, pos: usize, rows: usize, all: bool) {
        self.batch.clear();
        self.batch.push_seq(pos as u32, &self.table, 0, &self.table);
        for i in 0..rows {
            let id = ((pos + i) * 7919 + 13) % self.vocab.min(100_000);
            let wants = RowWants { logits: all || i + 1 == rows, ..RowWants::default() };
            self.batch.push_row(Row { input: RowInput::Token(id as u32), wants });
        }
        self.executor.step(&self.batch, &mut self.out).expect("step");
    }

    fn prefill(&mut self, len: usize) {
        let max = self.executor.info().max_rows;
        for from in (0..len).step_by(max) {
            self.step(from, max.min(len - from), false);
        }
    }
}

fn main() {
    let mut args = muser_bench::arguments();
    let path = args.next().expect("a model file");
    let (mut threads, mut repack, mut reps, mut tokens, mut probe) = (None, Repack::Auto, 3, 32, false);
    let (mut prompts, mut depths, mut rows) = (vec![], vec![], vec![]);
    let mut kinds = vec![KvType::F16];
    let list =
        |text: String| text.split(',').map(|n| n.parse::<usize>().expect("a number")).collect::<Vec<_>>();
    while let Some(arg) = args.next() {
        let mut value = || args.next().expect("a value");
        match arg.as_str() {
            "--threads" => threads = Some(value().parse().expect("a number")),
            "--prompt" => prompts = list(value()),
            "--depth" => depths = list(value()),
            "--rows" => rows = list(value()),
            "--gen" => tokens = value().parse().expect("a number"),
            "--reps" => reps = value().parse().expect("a number"),
            "--kv" => {
                kinds = value().split(',').map(kind).collect();
            }
            "--probe" => probe = true,
            "--cpu-time" => CPU_TIME.store(true, Ordering::Relaxed),
            "--repack" => {
                repack = match value().as_str() {
                    "on" => Repack::On,
                    "off" => Repack::Off,
                    _ => Repack::Auto,
                }
            }
            other => panic!("unknown argument {other}"),
        }
    }
    let start = Instant::now();
    let model = Model::load(path).expect("model");
    let bytes = decode_bytes(&model);
    let vocab = model.geometry.vocab;
    let positions =
        prompts.iter().copied().chain(depths.iter().map(|d| d + tokens + 32)).max().unwrap_or(0).max(512);
    let blocks = positions.div_ceil(256) as u32 + 1;
    let mut sessions: Vec<Session> = kinds
        .iter()
        .map(|&kv| {
            let options = CpuOptions { threads, repack, kv, ..CpuOptions::default() };
            let executor = CpuExecutor::new(model.clone(), options).expect("executor");
            println!("{}, KV {}, {:?}", executor.info().device, kv.name(), executor.describe());
            let mut s = Session {
                executor,
                table: (0..blocks).map(BlockId).collect(),
                vocab,
                batch: StepBatch::default(),
                out: StepOutput::default(),
            };
            s.executor.allocate_kv(KvCapacity { full: blocks, sliding: blocks }).expect("KV memory");
            s.step(0, 1, true);
            s
        })
        .collect();
    println!("first token after {:.2} s", start.elapsed().as_secs_f64());
    let mut probe = probe.then(|| BandwidthProbe::new(1 << 30, threads, true).expect("probe"));
    let mut bandwidth = || probe.as_mut().map_or(0.0, |p| p.measure(3).expect("probe").best() / 1e9);
    let best = |values: &[f64]| values.iter().copied().fold(f64::MIN, f64::max);
    let tell = |what: String, rates: Vec<Vec<f64>>, more: &dyn Fn(f64) -> String| {
        for (kv, of_kind) in kinds.iter().zip(&rates) {
            let (mid, best) = (middle(of_kind), best(of_kind));
            // Of the times of one repetition, so that what slows both down is not in it.
            let ratios: Vec<f64> = rates[0].iter().zip(of_kind).map(|(first, this)| first / this).collect();
            let ratio = middle(&ratios);
            let kv = kv.name();
            println!("{what} KV {kv}: {mid:.2}/s (best {best:.2}), time x{ratio:.3}{}", more(mid));
        }
    };
    let mut rounds = |f: &mut dyn FnMut(&mut Session) -> f64| {
        let mut rates = vec![vec![]; kinds.len()];
        for _ in 0..reps {
            rates.iter_mut().zip(&mut sessions).for_each(|(rates, s)| rates.push(f(s)));
        }
        rates
    };
    for &n in &prompts {
        let rates = rounds(&mut |s| timed(|| s.prefill(n), n));
        tell(format!("pp{n}"), rates, &|_| String::new());
    }
    for &depth in &depths {
        rounds(&mut |s| {
            s.prefill(depth);
            0.0
        });
        let mut around = vec![];
        let rates = rounds(&mut |s| {
            around.push(bandwidth());
            timed(|| (0..tokens).for_each(|i| s.step(depth + i, 1, true)), tokens)
        });
        let bw = middle(&around);
        tell(format!("tg{tokens}@{depth}"), rates, &|mid| {
            let (read, share) = (mid * bytes as f64 / 1e9, mid * bytes as f64 / 1e7 / bw);
            format!(", {read:.2} GB/s of weights, probe {bw:.2} GB/s: {share:.0} %")
        });
    }
    for &n in &rows {
        let rates = rounds(&mut |s| timed(|| (0..8).for_each(|_| s.step(0, n, true)), 8));
        tell(format!("steps of {n} rows"), rates, &|_| String::new());
    }
}

fn kind(name: &str) -> KvType {
    [KvType::F16, KvType::Int16, KvType::Int8]
        .into_iter()
        .find(|kv| kv.name() == name)
        .unwrap_or_else(|| panic!("KV {name}, expected f16, 16 or 8"))
}

static CPU_TIME: AtomicBool = AtomicBool::new(false);

/// Units per second of `f`, which does `units` of them.
fn timed(f: impl FnOnce(), units: usize) -> f64 {
    let start = now();
    f();
    units as f64 / (now() - start)
}

/// Seconds on the chosen clock.
fn now() -> f64 {
    let clock = if CPU_TIME.load(Ordering::Relaxed) { ClockId::ProcessCPUTime } else { ClockId::Monotonic };
    let t = clock_gettime(clock);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// Weight bytes that a token reads.
fn decode_bytes(model: &Model) -> usize {
    let layers: usize = model
        .layers
        .iter()
        .flat_map(|l| {
            [
                &l.attn_q,
                &l.attn_k,
                &l.attn_v,
                &l.attn_gate,
                &l.attn_output,
                &l.ffn_gate,
                &l.ffn_up,
                &l.ffn_down,
            ]
        })
        .map(|m| m.bytes().len())
        .sum();
    layers + model.output.bytes().len()
}
