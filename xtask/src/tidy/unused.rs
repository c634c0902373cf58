//! Dependencies that no source names, and those of tests that everybody has to build.

use crate::manifest::{self, Dependency};
use crate::tree::File;

/// Begins the comment above a dependency that is there for its features or its build alone.
const NOT_BY_NAME: &str = "Not used by name";

pub(super) fn faults(files: &[File]) -> Vec<String> {
    let mut faults = Vec::new();
    let mut taken = Vec::new();
    for (name, folder, text) in manifest::crates(files) {
        for dependency in manifest::dependencies(text) {
            taken.push(dependency.name);
            if let Some(fault) = fault_of(&dependency, folder, files) {
                faults.push(format!("{folder}/Cargo.toml: {name} {fault}"));
            }
        }
    }
    let table = files.iter().find(|file| file.name == "Cargo.toml").map_or("", |file| &file.text);
    for dependency in manifest::dependencies(table) {
        if !taken.contains(&dependency.name) && !dependency.name.starts_with("muser-") {
            faults.push(format!("Cargo.toml: no crate takes {} from the table", dependency.name));
        }
    }
    faults
}

fn fault_of(dependency: &Dependency<'_>, folder: &str, files: &[File]) -> Option<String> {
    if dependency.comment.starts_with(NOT_BY_NAME) {
        return None;
    }
    let name = dependency.name.replace('-', "_");
    let own = |file: &&File| {
        file.name.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
            && file.has_extension(&["rs"])
    };
    let mut users = files.iter().filter(own).filter(|file| names(&file.text, &name)).peekable();
    if users.peek().is_none() {
        return Some(format!("depends on {}, which its sources never name", dependency.name));
    }
    (!dependency.dev && users.all(|file| is_test(&file.name[folder.len()..])))
        .then(|| format!("needs {} for tests only: it belongs under dev-dependencies", dependency.name))
}

/// Is a path below a crate's folder one of tests, examples or benchmarks?
fn is_test(path: &str) -> bool {
    let (folders, file) = path.rsplit_once('/').unwrap_or(("", path));
    let in_folder = folders.split('/').any(|part| ["tests", "examples", "benches"].contains(&part));
    in_folder || file == "tests.rs" || file.ends_with("_tests.rs")
}

/// Does code (no comment) name a crate: `name::` or `use name`?
fn names(text: &str, name: &str) -> bool {
    text.lines().map(str::trim_start).filter(|line| !line.starts_with("//")).any(|line| {
        line.match_indices(name).any(|(at, _)| {
            let (before, after) = (&line[..at], &line[at + name.len()..]);
            let whole = !before.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':')
                || before.ends_with(" ::");
            whole && (after.starts_with("::") || before.ends_with("use ") && after.starts_with([';', ' ']))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_is_named_in_code() {
        let check = |line: &str, named: bool| assert_eq!(names(line, "serde"), named, "{line}");
        check("use serde::Deserialize;", true);
        check("    let x: serde::de::Error;", true);
        check("use serde;", true);
        check("use serde as s;", true);
        check("// serde::x", false);
        check("use serde_json::Value;", false);
        check("use my_serde::Value;", false);
        check("use crate::serde::x;", false);
        check("let serde = 1;", false);
    }

    #[test]
    fn what_nobody_names_is_a_fault() {
        let check = |manifest: &str, path: &str, faulty: usize| {
            let file = |name: &str, text: &str| File { name: name.to_owned(), text: text.to_owned() };
            let files = [
                file("Cargo.toml", "[workspace.dependencies]\nserde = \"1\"\n"),
                file("crates/a/Cargo.toml", manifest),
                file(path, "use serde::x;"),
            ];
            let found = faults(&files);
            assert_eq!(found.len(), faulty, "{manifest} {path}: {found:?}");
        };
        let normal = "[dependencies]\nserde.workspace = true\n";
        check(normal, "crates/a/src/lib.rs", 0);
        check(normal, "crates/ab/src/lib.rs", 1);
        check(normal, "crates/a/tests/x.rs", 1);
        check(normal, "crates/a/src/x/tests.rs", 1);
        check("[dev-dependencies]\nserde.workspace = true\n", "crates/a/tests/x.rs", 0);
        check("[dependencies]\n# Not used by name: why.\nserde.workspace = true\n", "crates/b/src/lib.rs", 0);
        check("[dependencies]\n", "crates/a/src/lib.rs", 1);
    }
}
