//! Facts about the tree itself: its size, words that must not be in it, files too long to read in one sitting, and what its
//! pages say of crates, variables, ids and findings.

mod circles;
mod edges;
mod findings;
mod flags;
mod ids;
mod links;
mod unused;
mod variables;

use std::path::Path;

use anyhow::{Result, bail};

use crate::tree;

const MAX_TREE_BYTES: u64 = 40_000_000;
const MAX_LINES: usize = 800;

/// Words that name a machine or a place outside the clone. Split, so that this file does not contain them.
const FORBIDDEN: &[&str] =
    &[concat!("/wo", "rk/"), concat!("../sha", "red"), concat!("/ro", "ot/"), concat!("todo", "!(")];

pub(crate) fn check(root: &Path) -> Result<()> {
    let tree::Tree { files, names, bytes: total } = tree::read(root)?;
    let mut faults = Vec::new();
    for file in &files {
        let (name, text) = (&file.name, &file.text);
        for word in FORBIDDEN {
            if let Some(line) = text.lines().position(|l| l.contains(word)) {
                faults.push(format!("{name}:{}: contains {word}", line + 1));
            }
        }
        let lines = text.lines().count();
        let generated = text.contains("@generated");
        if file.has_extension(&["rs", "cu", "wgsl", "py"]) && lines > MAX_LINES && !generated {
            faults.push(format!("{name}: {lines} lines, at most {MAX_LINES}: split it by subject"));
        }
        // A `tests.rs` is about the module beside it.
        let has_subject = text.starts_with("//!") || generated || name.ends_with("/tests.rs");
        if file.has_extension(&["rs"]) && !has_subject {
            faults.push(format!("{name}: does not open with a //! comment"));
        }
    }
    for check in [
        circles::faults,
        edges::faults,
        findings::faults,
        flags::faults,
        ids::faults,
        unused::faults,
        variables::faults,
    ] {
        faults.extend(check(&files));
    }
    faults.extend(links::faults(root, &files, &names));
    faults.extend(crate::dashboards::faults(root, &files)?);
    if total > MAX_TREE_BYTES {
        faults.push(format!("the tracked tree has {total} bytes, at most {MAX_TREE_BYTES}"));
    }
    if !faults.is_empty() {
        bail!("\n  {}", faults.join("\n  "));
    }
    Ok(())
}
