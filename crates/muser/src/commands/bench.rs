//! `muser bench`: how fast this machine runs this model, and how fast it could.
//!
//! Machines drift, so nothing is measured once: the tests take turns in every repetition, the read bandwidth of the
//! memory is probed before, between and after them by the same program, another program is run in turn with ours, and
//! every repetition notes what else the machine did. The figure of a test is a median of medians.

mod drafting;

use std::io::Write as _;
use std::time::Instant;

use anyhow::{Context as _, Result};
use muser_backend::{Executor, KvType, ReferenceExecutor};
use muser_bench::bandwidth;
use muser_bench::compare::{self, Comparison};
use muser_bench::noise::{self, Counters};
use muser_bench::plan::{self, Test};
use muser_bench::receipt::{self, ModelFacts};
use muser_bench::report::{Expectation, Report};
use muser_bench::results::{Rep, TestResult};
use muser_bench::stats::{median, round, spread};
use muser_bench::subject::Subject;
use muser_cpu::{CpuExecutor, CpuOptions, Repack};
use muser_gguf::GgmlType;
use muser_model::Model;
use muser_model::cost::{Cost, CostOptions};

use crate::cli::{BackendChoice, BenchArgs, CompanionChoice, RepackChoice};
use crate::devices::Planned;
use crate::env_vars;
use crate::executor::Found;
use crate::model_file::ModelSource;
use crate::output::{Console, Progress, usage_error};

/// Runs the command.
pub fn run(args: BenchArgs, console: &Console) -> Result<()> {
    if let Some(name) = &args.receipt {
        receipt::check_name(name).map_err(usage_error)?;
    }
    if args.reload && args.compare.is_none() {
        return Err(usage_error(
            "--reload drops the model while the program of --compare runs, which is not given",
        ));
    }
    let source = ModelSource::choose(args.model.model.as_deref(), console)?;
    let report = measure(&args, &source, console)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        write!(out, "{}", report.table())?;
    }
    if let Some(name) = &args.receipt {
        let path = receipt::write(
            name,
            env_vars::muser_home().as_deref(),
            crate::COMMIT,
            muser_text::utc_now(),
            &report,
        )?;
        console.note(format!("receipt: {}", path.display()));
    }
    Ok(())
}

fn measure(args: &BenchArgs, source: &ModelSource, console: &Console) -> Result<Report> {
    let tests = plan::tests(&args.prompt, args.gen_tokens, &args.depth, &args.rows, &args.draft_rows);
    let date = muser_text::utc_now();
    let load_before = noise::load_average();
    let Loaded { subject, model, repacked_bytes, expected, load_s, first_token_s } =
        load(args, source, &tests, console)?;
    let mut subject = Some(subject);
    let facts = ModelFacts::of(&model.file, &source.label());
    let threads = args
        .model
        .threads
        .map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), usize::from);
    let mut probe = None;
    let mut probed = |subject: &Subject| {
        bandwidth::of_executor(subject.executor(), &mut probe, args.model.threads.map(usize::from))
            .map(|bytes_per_s| bytes_per_s / 1e9)
    };

    let names: Vec<String> = tests.iter().map(Test::to_string).collect();
    let command = args
        .compare
        .as_deref()
        .map(|c| compare::command_line(c, &source.label(), &names, threads, args.gen_tokens));
    let info = subject.as_ref().context("bug: the model is loaded")?.info().clone();
    let bar = Progress::steps(console, "bench", u64::from(args.reps) * tests.len() as u64, "measurements");
    let mut results: Vec<TestResult> =
        names.iter().map(|test| TestResult { test: test.clone(), ..TestResult::default() }).collect();
    let mut rounds = Vec::new();
    let mut probes = Vec::new();
    for rep in 0..args.reps {
        if subject.is_none() {
            subject = Some(load(args, source, &tests, console)?.subject);
        }
        let running = subject.as_mut().context("bug: the model is loaded")?;
        if rep == 0 || args.reload {
            warm_up(running, &tests)?;
        }
        let mut before = probed(running)?;
        probes.push(before);
        for (test, result) in tests.iter().zip(&mut results) {
            let counters = Counters::now();
            let times = running.run(*test, test.steps(args.gen_tokens))?;
            let noise = Counters::now().since(&counters);
            let after = probed(running)?;
            probes.push(after);
            let ms: Vec<f64> = times.iter().map(|t| t.as_secs_f64() * 1e3).collect();
            let median_ms = median(&ms).context("bug: a test has steps")?;
            result.quiet_reps += usize::from(noise.quiet());
            result.reps.push(Rep {
                tok_s: round(f64::from(test.tokens_per_step()) * 1e3 / median_ms, 3),
                median_ms: round(median_ms, 4),
                best_ms: round(ms.iter().copied().fold(f64::MAX, f64::min), 4),
                steps: ms.len(),
                bandwidth: round(f64::midpoint(before, after), 2),
                others: noise.others.map(|share| round(share, 4)),
                steal: noise.steal.map(|share| round(share, 4)),
                load_average: noise::load_average(),
            });
            before = after;
            bar.advance(1);
        }
        if let Some(command) = &command {
            if args.reload {
                subject = None;
            }
            match compare::run_once(command) {
                Ok(report) => rounds.push(report),
                // What was measured so far is worth more than a clean stop.
                Err(error) if !rounds.is_empty() => {
                    console.warning(format!("the comparison ends after {rep} rounds: {error:#}"));
                    break;
                }
                Err(error) => return Err(error),
            }
        }
    }
    bar.finish();

    let kv_type = match info.kv_type {
        KvType::F32 => GgmlType::F32,
        KvType::F16 | KvType::Int16 => GgmlType::F16,
        KvType::Int8 => GgmlType::Q8_0,
    };
    // The middle of the timed positions stands for all of them.
    let cost = |depth: u32| {
        let context = u64::from(depth) + u64::from(args.gen_tokens) / 2;
        Cost::of_file(
            &model.file,
            &model.geometry,
            CostOptions { context, kv_type, ..CostOptions::default() },
        )
    };
    for (test, result) in tests.iter().zip(&mut results) {
        summarize(*test, result, &cost(test.depth()));
    }
    let compare = command.map(|command| Comparison::new(command, &results, rounds));
    // The model that was measured so far makes room for the two that are compared.
    drop(subject);
    let drafting = if args.draft == CompanionChoice::Off && args.draft_accept.is_none() {
        None
    } else {
        let (drafting, lines) = drafting::compare(args, source, console)?;
        results.extend(lines);
        Some(drafting)
    };
    Ok(Report {
        engine: concat!("muser ", env!("CARGO_PKG_VERSION")).to_owned(),
        commit: crate::COMMIT,
        device: info.device,
        backend: info.backend.to_owned(),
        route: info.route,
        threads,
        repack: format!("{:?}", args.repack).to_lowercase(),
        repacked_bytes,
        model: facts,
        weight_bytes_per_token: cost(0).streamed_bytes,
        date,
        load_s: round(load_s, 3),
        first_token_s: round(first_token_s, 3),
        bandwidth: round(median(&probes).unwrap_or(0.0), 2),
        bandwidth_probes: probes.iter().map(|p| round(*p, 2)).collect(),
        load_average: (load_before, noise::load_average()),
        tests: results,
        expected,
        compare,
        drafting,
    })
}

/// A model that is ready to run.
struct Loaded {
    subject: Subject,
    model: Model,
    repacked_bytes: u64,
    expected: Option<Expectation>,
    /// Seconds from opening the file to a ready executor.
    load_s: f64,
    /// Seconds from opening the file to the logits of a first token.
    first_token_s: f64,
}

/// Opens the model, builds the executor and its KV.
fn load(args: &BenchArgs, source: &ModelSource, tests: &[Test], console: &Console) -> Result<Loaded> {
    let start = Instant::now();
    let model = source.load()?;
    for test in tests {
        let end = test.end(test.steps(args.gen_tokens)) as usize;
        if end > model.geometry.context {
            let context = model.geometry.context;
            return Err(usage_error(format!(
                "{test} reaches position {end}, the model's context is {context}"
            )));
        }
    }
    let (executor, repacked_bytes, expected) = executor(args, model.clone(), console)?;
    let most = executor.info().max_rows as u32;
    if let Some(test) = tests.iter().find(|t| !matches!(t, Test::Prompt(_)) && t.tokens_per_step() > most) {
        return Err(usage_error(format!(
            "{test} has more rows than the {most} that this backend takes in a step"
        )));
    }
    let load_s = start.elapsed().as_secs_f64();
    let mut subject = Subject::new(executor, model.geometry.clone(), tests, args.gen_tokens)?;
    subject.run(Test::Generate { depth: 0 }, 1)?;
    let first_token_s = start.elapsed().as_secs_f64();
    Ok(Loaded { subject, model, repacked_bytes, expected, load_s, first_token_s })
}

/// The executor, the bytes of its repacked copy of the weights, and what was expected of it.
fn executor(
    args: &BenchArgs,
    model: Model,
    console: &Console,
) -> Result<(Box<dyn Executor>, u64, Option<Expectation>)> {
    if let Some(list) = &args.model.devices {
        let planned = crate::devices::build(&model, list, &args.model, Some(1), console)?;
        return Ok(of_plan(planned, &model));
    }
    let kv = crate::executor::kv_type(&args.model)?;
    if args.model.backend == BackendChoice::Auto {
        match crate::executor::auto(&model, &args.model, Some(1), console) {
            Found::Card(card) => return Ok((card, 0, None)),
            Found::Shared(planned) => return Ok(of_plan(planned, &model)),
            Found::Processor => {}
        }
    }
    match args.model.backend {
        // In 16 bits unless something else was asked for, as the fast backends.
        BackendChoice::Scalar => {
            let kv = if args.model.kv.is_some() { kv } else { KvType::F16 };
            Ok((Box::new(ReferenceExecutor::new(model, kv)?), 0, None))
        }
        BackendChoice::Cuda => Ok((crate::executor::cuda(&model, args.model.prefill, kv)?, 0, None)),
        BackendChoice::Wgpu => Ok((crate::executor::wgpu(&model, &args.model, kv)?, 0, None)),
        BackendChoice::Cpu | BackendChoice::Auto => {
            let repack = match args.repack {
                RepackChoice::Auto => Repack::Auto,
                RepackChoice::On => Repack::On,
                RepackChoice::Off => Repack::Off,
            };
            let threads = args.model.threads.map(usize::from);
            let executor =
                CpuExecutor::new(model, CpuOptions { threads, repack, kv, ..CpuOptions::default() })?;
            let repacked = executor.describe().repacked_bytes as u64;
            Ok((Box::new(executor), repacked, None))
        }
    }
}

fn of_plan(planned: Planned, model: &Model) -> (Box<dyn Executor>, u64, Option<Expectation>) {
    let expected = planned.expectation(model);
    (planned.executor, 0, Some(expected))
}

/// Touches every weight and every code path once.
fn warm_up(subject: &mut Subject, tests: &[Test]) -> Result<()> {
    let shortest = tests.iter().filter(|t| matches!(t, Test::Prompt(_))).min_by_key(|t| t.tokens_per_step());
    for test in tests.iter().filter(|t| !matches!(t, Test::Prompt(_))).chain(shortest) {
        subject.run(*test, 2.min(test.steps(2)))?;
    }
    Ok(())
}

fn summarize(test: Test, result: &mut TestResult, cost: &Cost) {
    let of = |pick: fn(&Rep) -> f64| result.reps.iter().map(pick).collect::<Vec<_>>();
    let speeds = of(|rep| rep.tok_s);
    result.tok_s = round(median(&speeds).unwrap_or(0.0), 3);
    result.spread = round(spread(&speeds).unwrap_or(0.0), 4);
    result.median_ms = round(median(&of(|rep| rep.median_ms)).unwrap_or(0.0), 4);
    if matches!(test, Test::Prompt(_)) || result.median_ms <= 0.0 {
        return;
    }
    // Every sequence reads its own KV; the rows of a draft read one sequence's once.
    let bytes = (cost.streamed_bytes + u64::from(test.sequences()) * cost.kv.slot_bytes()) as f64;
    result.gb_s = Some(round(bytes / 1e6 / result.median_ms, 2));
    let shares: Vec<f64> = result
        .reps
        .iter()
        .map(|rep| bytes / 1e6 / rep.median_ms / rep.bandwidth.max(f64::MIN_POSITIVE))
        .collect();
    result.of_bandwidth = median(&shares).map(|share| round(share, 4));
}

#[cfg(test)]
mod tests;
