//! Environment variables: what a document names is read somewhere, and what is read is in a document.

use std::collections::BTreeMap;

use crate::tree::{File, words};

const PREFIX: &str = "MUSER_";

pub(super) fn faults(files: &[File]) -> Vec<String> {
    let mut documented = BTreeMap::new();
    let mut read = BTreeMap::new();
    for file in files {
        // What was true of an older version may stay in its chronicle.
        let is_document = file.has_extension(&["md", "service", "yaml", "yml", "env"])
            || file.name.starts_with("packaging/");
        let is_code = file.has_extension(&["rs", "py"]) || file.name.starts_with(".ci/");
        if is_document && file.name != "CHANGELOG.md" {
            for name in words(&file.text, &[]).filter(|word| is_variable(word)) {
                documented.entry(name).or_insert(&file.name);
            }
        } else if is_code && !file.name.starts_with("xtask/") {
            for name in file.text.split('"').filter(|part| is_variable(part)) {
                read.entry(name).or_insert(&file.name);
            }
        }
    }
    let unread = documented.iter().filter(|(name, _)| !read.contains_key(*name));
    let unread = unread.map(|(name, file)| format!("{file}: names {name}, which nothing reads"));
    let unknown = read.iter().filter(|(name, _)| !documented.contains_key(*name));
    let unknown = unknown.map(|(name, file)| {
        format!("{file}: {name} is in no document (users' are in docs/cli.md, others in CONTRIBUTING.md)")
    });
    unread.chain(unknown).collect()
}

fn is_variable(word: &str) -> bool {
    word.strip_prefix(PREFIX).is_some_and(|rest| {
        !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_and_code_name_the_same() {
        let check = |document: &str, code: &str, faulty: &[&str]| {
            let file = |name: &str, text: &str| File { name: name.to_owned(), text: text.to_owned() };
            let found = faults(&[file("docs/a.md", document), file("crates/a/src/lib.rs", code)]);
            assert_eq!(found.len(), faulty.len(), "{document} {code}: {found:?}");
            for (fault, part) in found.iter().zip(faulty) {
                assert!(fault.contains(part), "{fault}");
            }
        };
        check("set `MUSER_A=1`", "var(\"MUSER_A\")", &[]);
        check(
            "set `MUSER_A=1`",
            "var(\"MUSER_B\")",
            &["docs/a.md: names MUSER_A", "MUSER_B is in no document"],
        );
        check("`MUSER_*`", "// MUSER_A", &[]);
        check("", "x(\"MUSER_A=1\")", &[]);
    }
}
