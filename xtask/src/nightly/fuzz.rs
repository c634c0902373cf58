//! The programs of `fuzz/`: built, run for a time, their inputs counted.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Map, Value, json};

use super::job::{HOST, Job, lacks_nightly};
use super::{Context, Outcome};

/// What makes the compiler tell libFuzzer where a program goes.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares";

const EXECUTED: &str = "stat::number_of_executed_units:";

pub(super) fn run(context: &Context, asan: bool) -> Result<Outcome> {
    if let Some(lacking) = lacks_nightly(context, None) {
        return Ok(Outcome::Skipped(lacking));
    }
    if crate::tools::find(&context.root, "c++").is_none() {
        return Ok(Outcome::Skipped("there is no C++ compiler, which libFuzzer wants".to_owned()));
    }
    let programs = build(context, asan)?;
    let corpus = context.folder.join("corpus");
    let mut seeds = Job::cargo(context, "fuzz-seeds");
    seeds.args(["run", "--quiet", "-p", "muser-fuzzing", "--example", "seeds", "--"]).args([&corpus]);
    let listed = seeds.run()?.text;
    let targets: Vec<(&str, &str)> = listed.lines().filter_map(|line| line.split_once(' ')).collect();
    let wanted = |name: &str| context.targets.is_empty() || context.targets.iter().any(|one| one == name);
    let targets: Vec<_> = targets.into_iter().filter(|(name, _)| wanted(name)).collect();
    if targets.is_empty() {
        bail!("no target of {:?}", context.targets);
    }
    let time = context.time / targets.len() as u32;
    let (mut counted, mut total, mut findings) = (Map::new(), 0, Vec::new());
    for (name, longest) in targets {
        let one = Run { context, programs: &programs, corpus: &corpus, name, longest, time, asan };
        let (inputs, finding) = one.run()?;
        total += inputs;
        counted.insert(name.to_owned(), inputs.into());
        findings.extend(finding);
    }
    if !findings.is_empty() {
        bail!("{total} inputs, findings: {}", findings.join("; "));
    }
    Ok(Outcome::Passed(json!({ "inputs": total, "targets": Value::Object(counted) })))
}

fn build(context: &Context, asan: bool) -> Result<PathBuf> {
    let folder = context.root.join("fuzz");
    // The versions that everything else is built with; only libFuzzer's own crates come to them.
    std::fs::copy(context.root.join("Cargo.lock"), folder.join("Cargo.lock")).context("fuzz/Cargo.lock")?;
    let target = context.folder.join(if asan { "fuzz-asan" } else { "fuzz" });
    let flags = if asan { format!("{COVERAGE} -Zsanitizer=address") } else { COVERAGE.to_owned() };
    let mut job = Job::cargo(context, "fuzz-build");
    job.folder(folder).env("RUSTFLAGS", flags).env("CARGO_TARGET_DIR", &target);
    // The compiler does not instrument those of C, whose libraries would want a runtime of their own.
    job.args(["+nightly", "build", "--release", "--target", HOST]);
    job.run()?;
    Ok(target.join(HOST).join("release"))
}

/// One target for its time.
struct Run<'a> {
    context: &'a Context,
    programs: &'a Path,
    corpus: &'a Path,
    name: &'a str,
    longest: &'a str,
    time: Duration,
    asan: bool,
}

impl Run<'_> {
    /// Inputs, and what was found.
    fn run(&self) -> Result<(u64, Option<String>)> {
        let found = self.context.folder.join("findings");
        std::fs::create_dir_all(&found)?;
        let mut job = Job::of(self.context, &format!("fuzz-{}", self.name), self.programs.join(self.name));
        job.args([self.corpus.join(self.name)]);
        job.args([
            format!("-dict={}", self.corpus.join(format!("{}.dict", self.name)).display()),
            format!("-max_len={}", self.longest),
            format!("-max_total_time={}", self.time.as_secs().max(1)),
            format!("-artifact_prefix={}/{}-", found.display(), self.name),
            // The sanitiser keeps a byte of its own for eight, and what was freed for a while.
            format!("-rss_limit_mb={}", if self.asan { 4096 } else { 2048 }),
            "-timeout=60".to_owned(),
            "-detect_leaks=0".to_owned(),
            "-print_final_stats=1".to_owned(),
            "-close_fd_mask=1".to_owned(),
        ]);
        let (ended_well, said) = job.run_to_end()?;
        let inputs = said.number(EXECUTED).unwrap_or(0);
        println!("    {:15} {inputs} inputs in {} s", self.name, self.time.as_secs());
        if ended_well {
            return Ok((inputs, None));
        }
        let finding = said.text.lines().find(|line| line.contains("FINDING") || line.contains("ERROR: "));
        let line: String = finding.unwrap_or("it ended early").chars().take(300).collect();
        Ok((inputs, Some(format!("{}: {line}", self.name))))
    }
}
