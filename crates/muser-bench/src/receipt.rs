//! Receipts: what was measured, kept as a file that documents can point at.
//!
//! A receipt is the whole report of a benchmark with the command, the commit, the date and the state of the tree. Figures
//! in `README.md` and `docs/` must be found in one (`cargo xtask bench-report` builds the page, a test of `xtask` checks
//! the figures); a receipt is never edited, only withdrawn by adding a reason.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use muser_gguf::GgufFile;
use serde::Serialize;

/// A receipt around any report.
#[derive(Debug, Serialize)]
pub struct Receipt<'a, Report> {
    /// Name, unique among receipts; documents refer to it.
    pub name: &'a str,
    /// When it was written, UTC.
    pub date: String,
    /// The command line.
    pub command: Vec<String>,
    /// Commit that the program was built from.
    pub commit: &'static str,
    /// Were there uncommitted changes in the checkout that it ran in?
    pub tree: &'static str,
    /// Why its figures must no longer be quoted; null while they may be.
    pub withdrawn: Option<String>,
    /// Everything that was measured.
    pub report: &'a Report,
}

/// What identifies a model in a report.
#[derive(Clone, Debug, Serialize)]
pub struct ModelFacts {
    /// File name, or what the program calls it.
    pub file: String,
    /// Bytes of all its files.
    pub bytes: u64,
    /// BLAKE3 of the headers and of up to 4 KiB of every tensor: tells models apart without reading them whole.
    pub fingerprint: String,
}

impl ModelFacts {
    /// Of an open file or split set.
    pub fn of(file: &GgufFile, label: &str) -> Self {
        let mut hash = blake3::Hasher::new();
        let mut bytes = 0;
        for shard in 0..file.shard_count() {
            let all = file.shard_bytes(shard);
            bytes += all.len() as u64;
            hash.update(&all[..file.data_start(shard).min(all.len())]);
        }
        for tensor in file.tensors() {
            let data = file.tensor_data(tensor);
            hash.update(&data[..data.len().min(4096)]);
        }
        let name = Path::new(label).file_name().map_or_else(|| label.into(), |n| n.to_string_lossy());
        Self { file: name.into_owned(), bytes, fingerprint: hash.finalize().to_hex()[..32].to_owned() }
    }
}

/// Writes `report` of a program built from `commit` as receipt `name`, written at `date`; returns where.
pub fn write<Report: Serialize>(
    name: &str,
    home: Option<&Path>,
    commit: &'static str,
    date: String,
    report: &Report,
) -> Result<PathBuf> {
    check_name(name)?;
    let here = Path::new("receipts");
    let folder = match home {
        _ if here.is_dir() => here.to_owned(),
        Some(home) => home.join("receipts"),
        None => bail!(
            "no folder for receipts: there is no ./receipts, and neither MUSER_HOME nor a home folder is known"
        ),
    };
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let path = folder.join(format!("{name}.json"));
    if path.exists() {
        bail!("{} is already there: receipts are not overwritten", path.display());
    }
    let command = std::env::args().collect();
    let receipt = Receipt { name, date, command, commit, tree: tree_state(), withdrawn: None, report };
    let mut text = serde_json::to_string_pretty(&receipt)?;
    text.push('\n');
    std::fs::write(&path, text).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// A name that is a file name and a reference in a document.
pub fn check_name(name: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    if name.is_empty() || name.len() > 80 || name.starts_with('.') || !name.chars().all(fits) {
        bail!("receipt name \"{name}\": expected up to 80 lower-case letters, digits, '-' and '.'");
    }
    Ok(())
}

fn tree_state() -> &'static str {
    let out =
        std::process::Command::new("git").args(["status", "--porcelain", "--untracked-files=no"]).output();
    match out {
        Ok(out) if out.status.success() && out.stdout.is_empty() => "clean",
        Ok(out) if out.status.success() => "modified",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain() {
        assert!(check_name("cpu-1b-decode.2").is_ok());
        for bad in ["", "A", "a/b", "..", "a b", "ä"] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
