//! A process of a part: what it says goes to a file, and it ends in time.

use std::ffi::OsStr;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::{Context, LIMIT};

/// The only target that sanitisers are asked for here.
pub(super) const HOST: &str = "x86_64-unknown-linux-gnu";

pub(super) struct Job {
    command: Command,
    log: PathBuf,
    limit: Duration,
}

/// What a process has said.
pub(super) struct Said {
    pub(super) text: String,
}

/// What a nightly toolchain lacks here, with this component.
pub(super) fn lacks_nightly(context: &Context, component: Option<&str>) -> Option<String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Some(format!("it is made for {HOST}"));
    }
    let works = |args: &[&str]| {
        let asked = Command::new("cargo").args(args).current_dir(&context.root).output();
        asked.is_ok_and(|out| out.status.success())
    };
    if !works(&["+nightly", "--version"]) {
        return Some("there is no nightly toolchain".to_owned());
    }
    let component = component.filter(|name| !works(&["+nightly", name, "--version"]))?;
    Some(format!("the nightly toolchain has no {component}"))
}

impl Job {
    /// Cargo in the root.
    pub(super) fn cargo(context: &Context, name: &str) -> Self {
        Self::of(context, name, "cargo")
    }

    pub(super) fn of(context: &Context, name: &str, program: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(program);
        command.current_dir(&context.root).env("CARGO_INCREMENTAL", "0").env_remove("RUSTUP_TOOLCHAIN");
        // Cargo tells its children which one it is; a nightly one is to be found anew.
        command.env_remove("CARGO").env_remove("RUSTC");
        Self { command, log: context.folder.join(format!("{name}.log")), limit: LIMIT }
    }

    pub(super) fn env(&mut self, name: &str, value: impl AsRef<OsStr>) -> &mut Self {
        self.command.env(name, value);
        self
    }

    pub(super) fn args<S: AsRef<OsStr>>(&mut self, args: impl IntoIterator<Item = S>) -> &mut Self {
        self.command.args(args);
        self
    }

    pub(super) fn folder(&mut self, folder: PathBuf) -> &mut Self {
        self.command.current_dir(folder);
        self
    }

    /// Runs it to its end. An exit other than 0 is an error with the last lines.
    pub(super) fn run(&mut self) -> Result<Said> {
        let (ended, said) = self.run_to_end()?;
        if !ended {
            let lines: Vec<&str> = said.text.lines().collect();
            let last = &lines[lines.len().saturating_sub(12)..];
            bail!("{} (all of it in {})", last.join(" / "), self.log.display());
        }
        Ok(said)
    }

    /// Runs it to its end, whatever that is. `false`: it failed.
    pub(super) fn run_to_end(&mut self) -> Result<(bool, Said)> {
        let mut child = self.start()?;
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if start.elapsed() > self.limit {
                stop(&mut child);
                bail!("not done within {} minutes ({})", self.limit.as_secs() / 60, self.log.display());
            }
            std::thread::sleep(Duration::from_millis(200));
        };
        let text = String::from_utf8_lossy(&std::fs::read(&self.log)?).into_owned();
        Ok((status.success(), Said { text }))
    }

    fn start(&mut self) -> Result<Child> {
        let log = File::create(&self.log).with_context(|| self.log.display().to_string())?;
        self.command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // A group of its own, so that what cargo has started ends with it.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut self.command, 0);
        self.command.spawn().with_context(|| format!("cannot start {:?}", self.command))
    }
}

/// Ends a process and what it has started.
fn stop(child: &mut Child) {
    let group = format!("-{}", child.id());
    let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
    let _ = child.kill();
    let _ = child.wait();
}

impl Said {
    /// Tests that passed, and those that said that they did not run.
    pub(super) fn tests(&self) -> Value {
        let passed: u64 = self.text.lines().filter_map(passed).sum();
        let skipped = self.text.lines().filter(|line| line.starts_with("SKIPPED")).count();
        json!({ "tests": passed, "skipped_tests": skipped })
    }

    /// The number behind a word.
    pub(super) fn number(&self, word: &str) -> Option<u64> {
        let line = self.text.lines().rev().find_map(|line| line.trim().strip_prefix(word))?;
        line.trim().parse().ok()
    }
}

/// `test result: ok. 12 passed; …`
fn passed(line: &str) -> Option<u64> {
    let rest = line.trim().strip_prefix("test result: ")?;
    rest.split_once(". ")?.1.split_once(" passed")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read() {
        let text = "running 3 tests\nSKIPPED (card) x: none\ntest result: ok. 12 passed; 0 failed\n\ntest result: FAILED. 3 passed; 1 failed\n\
                    stat::number_of_executed_units: 77\n";
        let said = Said { text: text.to_owned() };
        assert_eq!(said.tests(), json!({ "tests": 15, "skipped_tests": 1 }));
        assert_eq!(said.number("stat::number_of_executed_units:"), Some(77));
        assert_eq!(said.number("stat::other:"), None);
    }
}
