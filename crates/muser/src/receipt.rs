//! Receipts: what was measured, kept as a file that documents can point at.
//!
//! A receipt is the whole report of a benchmark with the command, the commit, the date and the state of the tree. Figures
//! in `README.md` and `docs/` must be found in one (`cargo xtask bench-report` builds the page, a test of `xtask` checks
//! the figures); a receipt is never edited, only withdrawn by adding a reason.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use muser_gguf::GgufFile;
use serde::Serialize;

/// Commit that this program was built from.
pub const COMMIT: &str = env!("MUSER_COMMIT");

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

/// Writes `report` as receipt `name`; returns where.
pub fn write<Report: Serialize>(name: &str, home: Option<&Path>, report: &Report) -> Result<PathBuf> {
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
    let receipt = Receipt {
        name,
        date: utc_now(),
        command,
        commit: COMMIT,
        tree: tree_state(),
        withdrawn: None,
        report,
    };
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

/// Now, such as `2026-11-29T14:03:05Z`.
pub fn utc_now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    utc(seconds)
}

fn utc(seconds: u64) -> String {
    // Days since 0000-03-01 in 400-year cycles of 146,097 days: leap days come last in years that begin in March.
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (cycle, day_of_cycle) = (days / 146_097, days % 146_097);
    let year = (day_of_cycle - day_of_cycle / 1_460 + day_of_cycle / 36_524 - day_of_cycle / 146_096) / 365;
    let day_of_year = day_of_cycle - (365 * year + year / 4 - year / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = cycle * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
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
    fn dates_are_civil() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), expected);
        }
    }

    #[test]
    fn names_are_plain() {
        assert!(check_name("cpu-1b-decode.2").is_ok());
        for bad in ["", "A", "a/b", "..", "a b", "ä"] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
