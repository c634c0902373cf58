//! Flags of `muser` that files for operators name exist.

use std::collections::BTreeSet;

use crate::tree::File;

/// Generated from the argument tables.
const REFERENCE: &str = "docs/cli.md";

pub(super) fn faults(files: &[File]) -> Vec<String> {
    let reference = files.iter().find(|file| file.name == REFERENCE).map_or("", |file| &file.text);
    // A row of the reference begins with "| `-m, --model <…>`".
    let rows = reference.lines().filter_map(|line| line.strip_prefix("| `"));
    let names = rows.map(|row| row.split_once('`').map_or("", |(names, _)| names));
    let known: BTreeSet<&str> = names.flat_map(flags).collect();
    let mut faults = Vec::new();
    for file in files {
        let text = &file.text;
        let named: Vec<&str> = if file.has_extension(&["service", "env", "yaml"]) {
            text.lines().filter(|line| !line.contains("docker ")).flat_map(flags).collect()
        } else if file.name.starts_with("docs/") && file.has_extension(&["md"]) && file.name != REFERENCE {
            // `--flag` alone; other programs' commands name theirs behind a word.
            text.match_indices("`--").filter_map(|(at, _)| flags(&text[at + 1..]).next()).collect()
        } else {
            continue;
        };
        let is_other = |flag: &str| OTHERS.contains(&flag) || flag.contains('.');
        let unknown = named.into_iter().filter(|flag| !known.contains(flag) && !is_other(flag));
        faults.extend(unknown.map(|flag| format!("{}: muser has no flag {flag}", file.name)));
    }
    faults
}

/// Flags of other programs in the glossary and in comparisons.
const OTHERS: &[&str] = &[
    "--help",
    "--test",
    "--json-schema",
    "--max-num-seqs",
    "--max-model-len",
    "--ctx-size",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
    "--api-key",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--ssl-cert-file",
    "--ssl-key-file",
    "--kv-transfer-config",
    "--slot-save-path",
    "--cache-type-k",
    "--cache-type-v",
    "--served-model-name",
    "--alias",
    "--api-key-file",
];

/// Words that begin with two hyphens and a letter, without their values.
fn flags(text: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    text.split(move |c: char| !is_part(c)).map(|word| word.trim_end_matches(['.', '-'])).filter(|word| {
        word.strip_prefix("--").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_that_is_not_in_the_reference_is_a_fault() {
        let check = |name: &str, text: &str, faulty: usize| {
            let file = |name: &str, text: &str| File { name: name.to_owned(), text: text.to_owned() };
            let files = [file(REFERENCE, "| `-m, --model <PATH>` | as `--other` says |\n"), file(name, text)];
            let found = faults(&files);
            assert_eq!(found.len(), faulty, "{text}: {found:?}");
        };
        check("packaging/a.service", "ExecStart=/usr/bin/muser serve --model x", 0);
        check("packaging/a.service", "ExecStart=/usr/bin/muser serve --other", 1);
        check("packaging/a.yaml", "- --model=x\n- --config.file=y\n---\n", 0);
        check("packaging/a.yaml", "- --modell=x", 1);
        check("docs/a.md", "`--model` and `cargo x --locked` and `--gone`.", 1);
        check("README.md", "`--gone`", 0);
    }
}
