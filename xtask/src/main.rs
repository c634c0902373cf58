//! Project chores. `cargo xtask ci` is everything that CI checks; each step can be run alone by its name.

#![expect(clippy::print_stdout, reason = "a command-line tool")]

mod bench_report;
mod cross;
mod dashboards;
mod deny;
mod dist;
mod licences;
mod manifest;
mod metrics;
mod nightly;
mod packaging;
mod step_picture;
mod supply;
mod test_report;
mod tidy;
mod tools;
mod tree;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

/// Code behind features is linted and tested with everything else; `first-run` builds without. Every step that compiles the
/// workspace names the same features: with others the dependencies would be compiled again for that step alone.
const FEATURES: &str = "--features=muser/object-store";

/// Examples that check what they show.
const EXAMPLES: [&str; 3] = ["embed", "executor", "prefix_store"];

/// A step of `ci`: its name, what it is for, and what it does.
type Step = (&'static str, &'static str, fn() -> Result<()>);

/// Steps without a compiler: what `quick` runs.
const QUICK: &[&str] = &["fmt", "tidy", "supply", "licences", "deny", "packaging", "receipts"];

const STEPS: &[Step] = &[
    ("fmt", "formatting is rustfmt's", || cargo(&["fmt", "--all", "--check"])),
    ("tidy", "size of the tree, words, file lengths, what pages say of crates, variables and ids", || {
        tidy::check(&root())
    }),
    ("supply", "every dependency comes from the public registry, with its hash", || supply::check(&root())),
    ("licences", "every dependency has a licence of deny.toml", || licences::check(&root())),
    ("deny", "cargo-deny, where it is installed: bans, sources, licences, advisories", || {
        deny::check(&root())
    }),
    (
        "packaging",
        "unit, container file, manifests, alerts, scripts and workflows, by the checkers that are installed",
        || packaging::check(&root()),
    ),
    ("receipts", "the benchmark page is current, every quoted figure has a receipt", || {
        bench_report::check(&root())
    }),
    ("clippy", "no warnings in any target", || {
        cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            FEATURES,
            "--locked",
            "--quiet",
            "--keep-going",
            "--",
            "-D",
            "warnings",
        ])
    }),
    (
        "cross",
        "the processor's crates compile for Apple's processors, where that target is installed",
        || cross::check(&root()),
    ),
    ("test", "unit, property, golden and command tests", test),
    ("doc", "documentation builds, links resolve, examples run", doc),
    ("first-run", "the README's first command answers", first_run),
    ("packages", "what `dist` makes of that executable is installed and answers", || dist::check(&root())),
];

/// What writes a file of the tree: its name, the file, the function.
type Writer = (&'static str, &'static str, fn(&Path) -> Result<()>);

const WRITERS: &[Writer] = &[
    ("bench-report", "writes docs/benchmarks.md from receipts/", bench_report::write),
    ("dashboards", "writes packaging/grafana/ from the server's metrics", dashboards::write),
];

fn main() -> ExitCode {
    let name = std::env::args().nth(1).unwrap_or_default();
    if name == "nightly" {
        let more: Vec<String> = std::env::args().skip(2).collect();
        return nightly::main(&root(), &more).unwrap_or_else(|e| {
            println!("nightly: {e:#}");
            ExitCode::FAILURE
        });
    }
    if name == "dist" {
        let arguments: Vec<String> = std::env::args().skip(2).collect();
        return match dist::command(&root(), &arguments) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                println!("dist: {e:#}");
                ExitCode::FAILURE
            }
        };
    }
    if let Some((_, _, write)) = WRITERS.iter().find(|writer| writer.0 == name) {
        return match write(&root()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                println!("{name}: {e:#}");
                ExitCode::FAILURE
            }
        };
    }
    let steps: Vec<&Step> = STEPS
        .iter()
        .filter(|s| name == "ci" || s.0 == name || name == "quick" && QUICK.contains(&s.0))
        .collect();
    if steps.is_empty() {
        println!(
            "usage: cargo xtask ci | quick (the steps that compile nothing) | nightly | STEP | WRITER\n"
        );
        STEPS.iter().for_each(|(name, what, _)| println!("  {name:12} {what}"));
        println!("\n  {}\n", dist::USAGE);
        WRITERS.iter().for_each(|(name, what, _)| println!("  {name:12} {what}"));
        return ExitCode::from(2);
    }
    let mut failed = Vec::new();
    for (name, what, run) in steps {
        println!("==> {name}: {what}");
        let start = Instant::now();
        match run() {
            Ok(()) => println!("==> {name}: ok, {:.1} s", start.elapsed().as_secs_f64()),
            Err(e) => {
                println!("==> {name}: FAILED after {:.1} s: {e:#}", start.elapsed().as_secs_f64());
                failed.push(*name);
            }
        }
    }
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("failed: {}", failed.join(", "));
    ExitCode::FAILURE
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

fn cargo(args: &[&str]) -> Result<()> {
    run(Command::new("cargo").args(args))
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.current_dir(root()).status().with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}

fn has_nextest() -> bool {
    Command::new("cargo").args(["nextest", "--version"]).output().is_ok_and(|o| o.status.success())
}

/// Tests through nextest where it is installed (faster, one process each), else through cargo's own runner.
fn test() -> Result<()> {
    if has_nextest() {
        let result = cargo(&[
            "nextest",
            "run",
            "--workspace",
            "--lib",
            "--bins",
            "--tests",
            FEATURES,
            "--locked",
            "--status-level",
            "slow",
            "--final-status-level",
            "slow",
        ]);
        test_report::print(&target_dir().join("nextest/default/junit.xml"));
        result
    } else {
        cargo(&["test", "--workspace", FEATURES, "--locked", "--quiet", "--lib", "--bins", "--tests"])
    }
}

fn doc() -> Result<()> {
    run(Command::new("cargo")
        .args(["doc", "--workspace", FEATURES, "--no-deps", "--locked", "--quiet"])
        .env("RUSTDOCFLAGS", "-D warnings"))?;
    cargo(&["test", "--workspace", FEATURES, "--locked", "--quiet", "--doc"])?;
    EXAMPLES
        .iter()
        .try_for_each(|name| cargo(&["run", "--locked", "--quiet", "-p", "muser-engine", "--example", name]))
}

/// `cargo run --release -- run "…"` as a newcomer types it, but short.
fn first_run() -> Result<()> {
    let out = Command::new("cargo")
        .args(["run", "--release", "--locked", "--quiet", "--", "run", "-n", "32", "--temp", "0"])
        .arg("Write a short story about a fox.")
        .current_dir(root())
        .output()
        .context("cannot start cargo")?;
    let text = String::from_utf8_lossy(&out.stdout);
    if !out.status.success() || text.split_whitespace().count() < 10 {
        bail!("{}\nstdout: {text}\nstderr: {}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    println!("{}", text.trim());
    Ok(())
}
