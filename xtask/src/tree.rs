//! The text files that git tracks, and reading them by words.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// A tracked file that is text.
pub(crate) struct File {
    /// Path from the root, with slashes.
    pub(crate) name: String,
    pub(crate) text: String,
}

impl File {
    pub(crate) fn has_extension(&self, wanted: &[&str]) -> bool {
        Path::new(&self.name).extension().is_some_and(|found| wanted.iter().any(|one| found == *one))
    }
}

/// What git tracks.
pub(crate) struct Tree {
    /// Those that are text.
    pub(crate) files: Vec<File>,
    /// Paths of all.
    pub(crate) names: Vec<String>,
    /// Size of all.
    pub(crate) bytes: u64,
}

pub(crate) fn read(root: &Path) -> Result<Tree> {
    let out = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root)
        .output()
        .context("cannot start git")?;
    if !out.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&out.stderr));
    }
    let mut files = Vec::new();
    let (mut names, mut total) = (Vec::new(), 0);
    for name in String::from_utf8_lossy(&out.stdout).split('\0').filter(|name| !name.is_empty()) {
        // A file that was removed and not yet committed is no fault of the tree.
        let Ok(bytes) = std::fs::read(root.join(name)) else { continue };
        total += bytes.len() as u64;
        names.push(name.to_owned());
        if let Ok(text) = String::from_utf8(bytes) {
            files.push(File { name: name.to_owned(), text });
        }
    }
    Ok(Tree { files, names, bytes: total })
}

/// The words of a text: runs of letters, digits and underscores, and of `extra`.
pub(crate) fn words<'a>(text: &'a str, extra: &'a [char]) -> impl Iterator<Item = &'a str> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || extra.contains(&c)))
        .filter(|word| !word.is_empty())
}

/// The cells of a row of a Markdown table; nothing for lines that are none, headings and rules included.
pub(crate) fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    let cells: Vec<_> = inner.split('|').map(str::trim).collect();
    let is_rule = cells.iter().all(|cell| cell.chars().all(|c| c == '-' || c == ':'));
    (!is_rule).then_some(cells)
}
