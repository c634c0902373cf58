//! The column "knows" of ARCHITECTURE.md is what the manifests say: a new edge between crates is written down, or refused.

use std::collections::{BTreeMap, BTreeSet};

use crate::manifest;
use crate::tree::{File, cells};

const PAGE: &str = "ARCHITECTURE.md";

type Edges<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

pub(super) fn faults(files: &[File]) -> Vec<String> {
    let page = files.iter().find(|file| file.name == PAGE).map_or("", |file| &file.text);
    compare(&written(page), &built(files))
}

/// Edges by the manifests, without those of tests. Names are short: `kv` is `muser-kv`.
fn built(files: &[File]) -> Edges<'_> {
    manifest::crates(files)
        .filter(|(name, ..)| *name != "xtask")
        .map(|(name, _, text)| {
            let known = manifest::dependencies(text).into_iter().filter(|d| !d.dev);
            (short(name), known.filter_map(|d| d.name.strip_prefix("muser-")).collect())
        })
        .collect()
}

/// Edges by the page's table of crates.
fn written(page: &str) -> Edges<'_> {
    let rows = page.lines().skip_while(|line| !line.starts_with("| crate |")).skip(1);
    rows.take_while(|line| line.starts_with('|'))
        .filter_map(cells)
        .filter(|row| row[0] != "`xtask`")
        .map(|row| {
            let known = row.get(2).copied().unwrap_or_default();
            let known = known.split(',').map(str::trim).filter(|name| !name.is_empty() && *name != "–");
            (short(row[0].trim_matches('`')), known.collect())
        })
        .collect()
}

fn short(name: &str) -> &str {
    name.strip_prefix("muser-").unwrap_or(name)
}

fn compare(written: &Edges<'_>, built: &Edges<'_>) -> Vec<String> {
    let names: BTreeSet<_> = written.keys().chain(built.keys()).collect();
    let mut faults = Vec::new();
    for name in names {
        match (written.get(name), built.get(name)) {
            (Some(said), Some(is)) if said != is => {
                let list = |set: &BTreeSet<&str>| set.iter().copied().collect::<Vec<_>>().join(", ");
                faults.push(format!(
                    "{PAGE}: the table says that {name} knows \"{}\", its manifest says \"{}\"",
                    list(said),
                    list(is)
                ));
            }
            (None, _) => faults.push(format!("{PAGE}: the table of crates lacks {name}")),
            (_, None) => faults.push(format!("{PAGE}: the table of crates has {name}, which is no crate")),
            _ => {}
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_says_something_else_is_a_fault() {
        let file = |name: &str, text: &str| File { name: name.to_owned(), text: text.to_owned() };
        let check = |rows: &str, faulty: &[&str]| {
            let files = [
                file(
                    PAGE,
                    &format!("x\n| crate | holds | knows |\n|---|---|---|\n{rows}\nend\n| `z` | z | z |\n"),
                ),
                file(
                    "crates/muser-a/Cargo.toml",
                    "[dependencies]\nserde = \"1\"\n[dev-dependencies]\nmuser-b.workspace = true\n",
                ),
                file("crates/muser-b/Cargo.toml", "[dependencies]\nmuser-a.workspace = true\n"),
                file("xtask/Cargo.toml", "[dependencies]\n"),
            ];
            let found = faults(&files);
            assert_eq!(found.len(), faulty.len(), "{rows}: {found:?}");
            for (fault, part) in found.iter().zip(faulty) {
                assert!(fault.contains(part), "{fault}");
            }
        };
        check("| `muser-a` | x | – |\n| `muser-b` | y | a |", &[]);
        check("| `muser-a` | x | b |\n| `muser-b` | y | a |", &["that a knows \"b\""]);
        check("| `muser-a` | x | – |\n| `muser-b` | y | – |", &["its manifest says \"a\""]);
        check("| `muser-a` | x | – |", &["lacks b"]);
        check("| `muser-a` | x | – |\n| `muser-b` | y | a |\n| `muser-c` | y | a |", &["has c"]);
    }
}
