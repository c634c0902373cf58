//! `cargo xtask nightly`: what takes too long for every change. Cut into parts of less than an hour each; a part that lacks
//! something says so. Each writes its line of a report, which is committed under `receipts/nightly/` by hand.

mod fuzz;
mod gateways;
mod job;
mod long;
mod report;
mod soak;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use job::Job;
use report::{Line, Report};

/// What a part may take, whatever it does.
const LIMIT: Duration = Duration::from_hours(1);

/// What was asked for.
pub(super) struct Context {
    root: PathBuf,
    /// For fuzzers, all together, and for the soak.
    time: Duration,
    /// Cargo's profile for tests and for the server.
    profile: String,
    /// Where parts keep what they build and say.
    folder: PathBuf,
    /// Fuzz these targets alone.
    targets: Vec<String>,
}

/// How a part ended, if it did not fail.
enum Outcome {
    Passed(Value),
    /// What it lacks.
    Skipped(String),
}

type Run = Box<dyn Fn(&Context) -> Result<Outcome>>;

struct Part {
    name: &'static str,
    what: String,
    run: Run,
}

fn part(name: &'static str, what: &str, run: impl Fn(&Context) -> Result<Outcome> + 'static) -> Part {
    Part { name, what: what.to_owned(), run: Box::new(run) }
}

fn parts() -> Vec<Part> {
    let mut parts: Vec<Part> = long::PROOFS
        .iter()
        .map(|proof| {
            part(proof.name, &format!("MUSER_TEST_LONG=1: {}", proof.what), |context| {
                long::run(context, proof)
            })
        })
        .collect();
    parts.extend([
        part("clients", "client libraries, agents and a browser (MUSER_TEST_CLIENTS=all)", clients),
        part("fuzz", "every program of fuzz/, for --hours all together", |context| fuzz::run(context, false)),
        part("fuzz-asan", "the same under the address sanitiser", |context| fuzz::run(context, true)),
        part(
            "soak",
            "muser serve under mixed load for --hours: memory flat, no 5xx, equal answers",
            soak::run,
        ),
        part(
            "gateways",
            "vllm-router, smg, sglang-router and HAProxy before three servers, one killed and back",
            gateways::run,
        ),
        part(
            "miri",
            "undefined behaviour: what Miri can run of muser-kv, muser-gguf and muser-handoff",
            miri,
        ),
        part("asan", "address sanitiser: tests of muser-kv, muser-gguf and muser-cpu", asan),
    ]);
    parts
}

const USAGE: &str = "usage: cargo xtask nightly --all | --part NAME... [--hours H] [--profile NAME] [--target NAME...] [--report FILE]";

pub(crate) fn main(root: &Path, args: &[String]) -> Result<ExitCode> {
    let target = crate::target_dir();
    let folder = target.join("nightly");
    let (mut wanted, mut report, mut all) = (Vec::new(), folder.join("report.json"), false);
    let mut context = Context {
        root: root.canonicalize()?,
        time: Duration::from_mins(50),
        profile: "release".to_owned(),
        folder,
        targets: Vec::new(),
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().with_context(|| format!("{arg} wants a value\n{USAGE}"));
        match arg.as_str() {
            "--all" => all = true,
            "--part" => wanted.push(value()?.clone()),
            "--hours" => {
                let hours: f64 = value()?.parse().context("--hours wants a number")?;
                if !(hours > 0.0 && hours < 1.0) {
                    bail!("--hours: more than 0 and less than 1, for a part has an hour; found {hours}");
                }
                context.time = Duration::from_secs_f64(hours * 3600.0);
            }
            "--profile" => context.profile.clone_from(value()?),
            "--target" => context.targets.push(value()?.clone()),
            "--report" => report = value()?.into(),
            _ => bail!("{arg} is not known\n{USAGE}"),
        }
    }
    let parts = parts();
    if let Some(unknown) = wanted.iter().find(|name| parts.iter().all(|part| part.name != **name)) {
        bail!("there is no part {unknown}: cargo xtask nightly prints the list");
    }
    if wanted.is_empty() && !all {
        println!("{USAGE}\n");
        parts.iter().for_each(|part| println!("  {:14} {}", part.name, part.what));
        return Ok(ExitCode::from(2));
    }
    std::fs::create_dir_all(&context.folder)?;
    let mut report = Report::open(&report, &context)?;
    let mut failed = Vec::new();
    for part in parts.iter().filter(|part| all || wanted.iter().any(|name| name == part.name)) {
        println!("==> {}: {}", part.name, part.what);
        let start = Instant::now();
        let outcome = (part.run)(&context);
        let seconds = start.elapsed().as_secs();
        let line = match outcome {
            Ok(Outcome::Passed(detail)) => Line::new(part.name, "passed", seconds, detail),
            Ok(Outcome::Skipped(why)) => Line::new(part.name, "skipped", seconds, json!({ "why": why })),
            Err(error) => {
                failed.push(part.name);
                Line::new(part.name, "failed", seconds, json!({ "why": format!("{error:#}") }))
            }
        };
        println!("==> {line}");
        report.add(line)?;
    }
    println!("{}: commit it under receipts/nightly/", report.path().display());
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("failed: {}", failed.join(", "));
    Ok(ExitCode::FAILURE)
}

fn clients(context: &Context) -> Result<Outcome> {
    let lacking: Vec<_> = ["python3", "npm", "chromedriver"]
        .into_iter()
        .filter(|name| crate::tools::find(&context.root, name).is_none())
        .collect();
    if !lacking.is_empty() {
        return Ok(Outcome::Skipped(format!("there is no {}", lacking.join(", no "))));
    }
    let mut job = Job::cargo(context, "clients");
    job.env("MUSER_TEST_CLIENTS", "all");
    job.args(["test", "-p", "muser-server", "--test", "clients", "--", "--nocapture", "--test-threads=1"]);
    job.run().map(|said| Outcome::Passed(said.tests()))
}

/// Crates without code of others below them that Miri cannot run, by the tests that end within minutes there.
fn miri(context: &Context) -> Result<Outcome> {
    if let Some(lacking) = job::lacks_nightly(context, Some("miri")) {
        return Ok(Outcome::Skipped(lacking));
    }
    let mut all = Vec::new();
    for (name, args) in MIRI {
        let mut job = Job::cargo(context, name);
        // Seeds from the clock and files of the tree; few cases, for each costs a hundred times as much.
        job.env("MIRIFLAGS", "-Zmiri-disable-isolation").env("PROPTEST_CASES", "4");
        job.env("CARGO_TARGET_DIR", context.folder.join("miri"));
        job.args(["+nightly", "miri", "test"]).args(args.iter().copied());
        all.push(job.run()?.tests());
    }
    Ok(Outcome::Passed(all.into()))
}

const MIRI: &[(&str, &[&str])] = &[
    ("miri-kv", &["-p", "muser-kv", "--lib", "--", "--skip", "random_lives", "--skip", "distinct_prompts"]),
    // Files are mapped, which Miri does not do; the block formats are all arithmetic.
    ("miri-gguf", &["-p", "muser-gguf", "--test", "dequant"]),
    (
        "miri-handoff",
        &["-p", "muser-handoff", "--lib", "--", "headers_that", "sets_are", "every_chunk", "spans_that"],
    ),
];

fn asan(context: &Context) -> Result<Outcome> {
    if let Some(lacking) = job::lacks_nightly(context, None) {
        return Ok(Outcome::Skipped(lacking));
    }
    let mut job = Job::cargo(context, "asan");
    job.env("RUSTFLAGS", "-Zsanitizer=address").env("ASAN_OPTIONS", "detect_leaks=0");
    job.env("CARGO_TARGET_DIR", context.folder.join("asan"));
    job.args(["+nightly", "test", "--target", job::HOST, "--lib", "--tests"]);
    job.args(["-p", "muser-kv", "-p", "muser-gguf", "-p", "muser-cpu"]);
    job.run().map(|said| Outcome::Passed(said.tests()))
}
