//! Gateways of other programs before three real servers with one pack store, one of which is killed and comes back.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::job::Job;
use super::{Context, Outcome};

/// Each in an environment of its own: two of them install a command of the same name.
const FROM_PYPI: [(&str, &str); 3] =
    [("vllm-router", "0.1.17"), ("smg", "1.13.0"), ("sglang-router", "0.3.2")];

pub(super) fn run(context: &Context) -> Result<Outcome> {
    if crate::tools::find(&context.root, "python3").is_none() {
        return Ok(Outcome::Skipped("there is no python3".to_owned()));
    }
    let mut build = Job::cargo(context, "gateways-build");
    build.args(["build", "-p", "muser", "--profile", &context.profile]).run()?;
    let built = if context.profile == "dev" { "debug" } else { &context.profile };
    let program = crate::target_dir().join(built).join("muser");
    let (mut found, mut lacking) = (Vec::new(), Vec::new());
    for (name, version) in FROM_PYPI {
        let environment = context.folder.join(format!("venv-{name}"));
        if install(context, &environment, &format!("{name}=={version}"))? {
            found.push(fleet(context, &program, name, &environment.join("bin/python"))?);
        } else {
            lacking.push(name);
        }
    }
    if crate::tools::find(&context.root, "haproxy").is_some() {
        found.push(fleet(context, &program, "haproxy", Path::new("python3"))?);
    } else {
        lacking.push("haproxy");
    }
    if found.is_empty() {
        return Ok(Outcome::Skipped(format!("there is no {}", lacking.join(", no "))));
    }
    Ok(Outcome::Passed(serde_json::json!({ "gateways": found, "lacking": lacking })))
}

/// Is the package there? Without a network it is not.
fn install(context: &Context, environment: &Path, package: &str) -> Result<bool> {
    let made =
        Command::new("python3").args(["-m", "venv"]).arg(environment).current_dir(&context.root).status()?;
    let pip = || Command::new(environment.join("bin/pip")).args(["install", "-q", package]).status();
    Ok(made.success() && pip()?.success())
}

fn fleet(context: &Context, program: &Path, gateway: &str, python: &Path) -> Result<Value> {
    let mut job = Job::of(context, &format!("gateways-{gateway}"), "python3");
    job.args(["bench/fleet/fleet.py", "--gateway", gateway]).args([Path::new("--muser"), program]);
    job.args([Path::new("--python"), python]);
    let said = job.run().with_context(|| gateway.to_owned())?;
    let Some(report) = said.text.lines().rev().find(|line| line.starts_with('{')) else {
        bail!("{gateway}: no report");
    };
    Ok(serde_json::from_str(report)?)
}
