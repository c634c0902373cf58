//! Facts about the tree itself: its size, words that must not be in it, files too long to read in one sitting.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

const MAX_TREE_BYTES: u64 = 40_000_000;
const MAX_LINES: usize = 800;

/// Words that name a machine or a place outside the clone. Split, so that this file does not contain them.
const FORBIDDEN: &[&str] =
    &[concat!("/wo", "rk/"), concat!("../sha", "red"), concat!("/ro", "ot/"), concat!("todo", "!(")];

pub(crate) fn check(root: &Path) -> Result<()> {
    let out = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root)
        .output()
        .context("cannot start git")?;
    if !out.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&out.stderr));
    }
    let mut faults = Vec::new();
    let mut total = 0;
    for name in String::from_utf8_lossy(&out.stdout).split('\0').filter(|n| !n.is_empty()) {
        let path = root.join(name);
        let Ok(bytes) = std::fs::read(&path) else { continue };
        total += bytes.len() as u64;
        let Ok(text) = String::from_utf8(bytes) else { continue };
        for word in FORBIDDEN {
            if let Some(line) = text.lines().position(|l| l.contains(word)) {
                faults.push(format!("{name}:{}: contains {word}", line + 1));
            }
        }
        let source = ["rs", "cu", "wgsl", "py"].iter().any(|e| path.extension().is_some_and(|x| x == *e));
        let lines = text.lines().count();
        if source && lines > MAX_LINES && !text.contains("@generated") {
            faults.push(format!("{name}: {lines} lines, at most {MAX_LINES}: split it by subject"));
        }
        // A `tests.rs` is about the module beside it.
        let has_subject =
            text.starts_with("//!") || text.contains("@generated") || name.ends_with("/tests.rs");
        if path.extension().is_some_and(|x| x == "rs") && !has_subject {
            faults.push(format!("{name}: does not open with a //! comment"));
        }
    }
    if total > MAX_TREE_BYTES {
        faults.push(format!("the tracked tree has {total} bytes, at most {MAX_TREE_BYTES}"));
    }
    if !faults.is_empty() {
        bail!("\n  {}", faults.join("\n  "));
    }
    Ok(())
}
