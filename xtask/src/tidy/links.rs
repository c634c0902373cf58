//! What documents point at is there: links and their headings, paths in backticks, commits.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use crate::tree::{File, words};

/// Paths in backticks are looked at if they begin with one of these.
const ROOTS: &[&str] = &["crates/", "docs/", "packaging/", "xtask/", "receipts/", "models/", "bench/"];

pub(super) fn faults(root: &Path, files: &[File], names: &[String]) -> Vec<String> {
    let documents: Vec<&File> = files.iter().filter(|file| file.has_extension(&["md"])).collect();
    let headings = documents.iter().map(|file| (file.name.as_str(), headings(&file.text))).collect();
    let mut known: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    for name in names {
        known.extend(name.match_indices('/').map(|(at, _)| &name[..at]));
    }
    let mut faults = Vec::new();
    for file in &documents {
        faults.extend(link_faults(file, &known, &headings));
        for path in file.text.split('`').skip(1).step_by(2) {
            let is_path = ROOTS.iter().any(|root| path.starts_with(root))
                && !path.contains(|c: char| c.is_whitespace() || "{*<".contains(c));
            // A word in capitals stands for any name.
            let is_pattern =
                words(path, &[]).any(|word| word.len() > 2 && word.bytes().all(|b| b.is_ascii_uppercase()));
            if is_path && !is_pattern && !known.contains(path.trim_end_matches('/')) {
                faults.push(format!("{}: there is no {path}", file.name));
            }
        }
        for commit in commits(&file.text).filter(|commit| !has_commit(root, commit)) {
            faults.push(format!("{}: commit {commit} is not in this history", file.name));
        }
    }
    faults
}

fn link_faults(
    file: &File,
    known: &BTreeSet<&str>,
    headings: &BTreeMap<&str, BTreeSet<String>>,
) -> Vec<String> {
    let mut faults = Vec::new();
    let targets = file.text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    for (target, _) in
        targets.filter(|(target, _)| !target.contains("://") && !target.contains(char::is_whitespace))
    {
        let (path, heading) = target.split_once('#').unwrap_or((target, ""));
        let place = if path.is_empty() { Some(file.name.clone()) } else { resolve(&file.name, path) };
        let Some(place) = place.filter(|place| known.contains(place.as_str())) else {
            faults.push(format!("{}: the link to {target} leads nowhere", file.name));
            continue;
        };
        if !heading.is_empty() && headings.get(place.as_str()).is_some_and(|known| !known.contains(heading)) {
            faults.push(format!("{}: {place} has no heading for {target}", file.name));
        }
    }
    faults
}

/// A relative path from the document's folder; nothing if it leaves the tree.
fn resolve(from: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
        if part == ".." {
            parts.pop()?;
        } else {
            parts.push(part);
        }
    }
    Some(parts.join("/"))
}

/// The anchors that headings get: small letters, hyphens for spaces, nothing else but letters and digits.
fn headings(page: &str) -> BTreeSet<String> {
    let lines = page
        .lines()
        .filter_map(|line| line.trim_start_matches('#').strip_prefix(' ').filter(|_| line.starts_with('#')));
    let anchor = |line: &str| {
        line.chars()
            .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c))
            .flat_map(char::to_lowercase)
            .map(|c| if c == ' ' { '-' } else { c })
            .collect()
    };
    lines.map(str::trim).map(anchor).collect()
}

/// What follows the word "commit" and looks like one.
fn commits(page: &str) -> impl Iterator<Item = &str> {
    page.split("commit ").skip(1).filter_map(|rest| {
        let word = words(rest, &[]).next()?;
        let is_hash = (7..=40).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_hexdigit());
        (is_hash && rest.starts_with(word) && word.bytes().any(|b| b.is_ascii_digit())).then_some(word)
    })
}

/// Does the history have it? A history that was cut short is not asked.
fn has_commit(root: &Path, commit: &str) -> bool {
    let git = |args: &[&str]| Command::new("git").args(args).current_dir(root).output();
    let shallow =
        git(&["rev-parse", "--is-shallow-repository"]).is_ok_and(|out| out.stdout.starts_with(b"true"));
    shallow || git(&["cat-file", "-e", &format!("{commit}^{{commit}}")]).is_ok_and(|out| out.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_a_fault() {
        let check = |text: &str, faulty: usize| {
            let file = |name: &str, text: &str| File { name: name.to_owned(), text: text.to_owned() };
            let files = [file("docs/a.md", text), file("docs/b.md", "# One `two`, three\n\n## It's")];
            let names = ["docs/a.md", "docs/b.md", "crates/x/src/lib.rs"].map(str::to_owned);
            let found = faults(Path::new(env!("CARGO_MANIFEST_DIR")), &files, &names);
            assert_eq!(found.len(), faulty, "{text}: {found:?}");
        };
        check(
            "[x](b.md) [x](../docs/b.md#its) [x](b.md#one-two-three) [x](../crates/x) [x](https://host.example/)",
            0,
        );
        check("[x](c.md)", 1);
        check("[x](../../b.md)", 1);
        check("[x](b.md#two)", 1);
        check("# Here\n[x](#here) [x](#there)", 1);
        check("`crates/x/src/` `crates/x/src/lib.rs` `crates/NAME/src/z.rs` `src/z.rs`", 0);
        check("`crates/x/src/z.rs`", 1);
        check("at commit 0000000000000000000000000000000000000001,", 1);
        check("a commit is one change; commit deadbee", 0);
    }
}
