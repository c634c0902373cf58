//! No two files of a crate know each other, neither directly nor around a corner: whoever opens one need not know the other.
//! A module's `pub use` of its children is no knowledge, and tests may know everything.

use std::collections::{BTreeMap, BTreeSet};

use crate::manifest;
use crate::tree::File;

/// A module's path inside its crate.
type Module = Vec<String>;

pub(crate) fn faults(files: &[File]) -> Vec<String> {
    manifest::crates(files).flat_map(|(name, ..)| faults_of(name, files)).collect()
}

fn faults_of(name: &str, files: &[File]) -> Vec<String> {
    let prefix = format!("crates/{name}/src/");
    let sources = files.iter().filter_map(|file| {
        let path = file.name.strip_prefix(&prefix)?.strip_suffix(".rs")?;
        let of_tests = path.split('/').any(|part| part.contains("test"));
        (!of_tests).then(|| (module(path), product_text(&file.text)))
    });
    let sources: BTreeMap<Module, String> = sources.collect();
    let known: BTreeMap<&Module, BTreeSet<Module>> =
        sources.iter().map(|(module, text)| (module, known_to(module, text, &sources))).collect();
    let mut faults = Vec::new();
    for from in sources.keys() {
        for to in &known[from] {
            if reaches(to, from, &known) {
                let (from, to) = (from.join("::"), to.join("::"));
                faults.push(format!(
                    "{name}: {from} uses {to}, which (by others, perhaps) uses {from}: a circle of files"
                ));
            }
        }
    }
    faults
}

fn module(path: &str) -> Module {
    let mut parts: Module = path.split('/').map(str::to_owned).collect();
    if parts.last().is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main")) {
        parts.pop();
    }
    parts
}

/// The text without comments and without the tests at its end.
fn product_text(text: &str) -> String {
    let ends = ["\nmod tests {", "\npub mod tests {"].map(|start| text.find(start));
    let product = &text[..ends.into_iter().flatten().min().unwrap_or(text.len())];
    product.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Modules whose items a module uses.
fn known_to(module: &Module, text: &str, sources: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let (_, rest) = uses(text);
    let mut paths: Vec<String> =
        uses(text).0.into_iter().filter(|(public, _)| !public).map(|(_, path)| path).collect();
    paths.extend(words(&rest).filter(|word| word.contains("::")).map(str::to_owned));
    let targets = paths.iter().filter_map(|path| target(module, path, sources));
    targets
        .map(|path| resolve(&path, sources, 0))
        .filter(|found| !found.is_empty() && found != module)
        .collect()
}

/// Paths in code.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'))
}

/// Every `use`: is it public, and each path in it; and the text without them.
fn uses(text: &str) -> (Vec<(bool, String)>, String) {
    let (mut found, mut rest) = (Vec::new(), String::new());
    let mut left = text;
    while let Some(at) = left.find("use ") {
        let line = left[..at].rsplit('\n').next().unwrap_or_default().trim();
        let is_use = line.is_empty() || line.starts_with("pub") && !line.contains(' ');
        let end = left[at..].find(';').map(|end| at + end).filter(|_| is_use);
        let Some(end) = end else {
            rest.push_str(&left[..at + 4]);
            left = &left[at + 4..];
            continue;
        };
        rest.push_str(&left[..at]);
        let tree: String = left[at + 4..end].split_whitespace().collect::<Vec<_>>().join(" ");
        found.extend(expand(&tree).into_iter().map(|path| (!line.is_empty(), path)));
        left = &left[end + 1..];
    }
    rest.push_str(left);
    (found, rest)
}

/// `a::{b, c::{d, e as f}}` as paths.
fn expand(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some((head, body)) = tree.split_once('{') else {
        return vec![tree.split(" as ").next().unwrap_or_default().trim().to_owned()];
    };
    let body = body.strip_suffix('}').unwrap_or(body);
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for c in body.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        match (c, parts.last_mut()) {
            (',', _) if depth == 0 => parts.push(String::new()),
            (_, Some(part)) => part.push(c),
            _ => {}
        }
    }
    let parts = parts.iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(|part| expand(part)).map(|path| format!("{}{path}", head.trim())).collect()
}

/// A path from the crate's root, if it is one of this crate's.
fn target(module: &Module, path: &str, sources: &BTreeMap<Module, String>) -> Option<Module> {
    let mut parts: Vec<&str> = path.split("::").filter(|part| !part.is_empty()).collect();
    let mut base = module.clone();
    match *parts.first()? {
        "crate" => base.clear(),
        "self" => {}
        "super" => {
            while parts.first() == Some(&"super") {
                base.pop();
                parts.remove(0);
            }
            parts.insert(0, "");
        }
        child => {
            base.push(child.to_owned());
            sources.contains_key(&base).then_some(())?;
        }
    }
    base.extend(parts.into_iter().skip(1).map(str::to_owned));
    Some(base)
}

/// The module in whose file the item at `path` stands, whatever names it under another.
fn resolve(path: &[String], sources: &BTreeMap<Module, String>, depth: usize) -> Module {
    let end = (0..=path.len()).rev().find(|&end| sources.contains_key(&path[..end])).unwrap_or(0);
    let (base, item) = (path[..end].to_vec(), path.get(end));
    let text = sources.get(&base);
    let (Some(item), Some(text)) = (item.filter(|_| depth < 8), text) else { return base };
    let renamed =
        uses(text).0.into_iter().find(|(public, path)| *public && path.rsplit("::").next() == Some(item));
    match renamed.and_then(|(_, path)| target(&base, &path, sources)) {
        Some(mut further) if further != path => {
            further.extend_from_slice(&path[end + 1..]);
            resolve(&further, sources, depth + 1)
        }
        _ => base,
    }
}

fn reaches(from: &Module, to: &Module, known: &BTreeMap<&Module, BTreeSet<Module>>) -> bool {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(module) = open.pop() {
        if module == to {
            return true;
        }
        if seen.insert(module) {
            open.extend(known.get(module).into_iter().flatten());
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(files: &[(&str, &str)], expected: usize) {
        let files: Vec<File> = files
            .iter()
            .map(|(name, text)| File {
                name: format!("crates/muser-kv/src/{name}"),
                text: (*text).to_owned(),
            })
            .collect();
        let found = faults_of("muser-kv", &files);
        assert_eq!(found.len(), expected, "{found:?}");
    }

    #[test]
    fn circles_are_found_around_corners_and_through_other_names() {
        let lib =
            ("lib.rs", "mod a;\nmod b;\nmod c;\npub use a::A;\npub(crate) use b::{inner::B, C as D};\n");
        check(&[lib, ("a.rs", "use crate::b::C;"), ("b.rs", "struct C;")], 0);
        check(&[lib, ("a.rs", "use crate::b::C;"), ("b.rs", "use crate::{c::X, A};")], 2);
        check(
            &[
                lib,
                ("a.rs", "use crate::b::C;"),
                ("b.rs", "fn f(x: crate::c::X) {}"),
                ("c.rs", "use crate::A;"),
            ],
            3,
        );
        // A parent that hands on its children's names does not use them; one that uses them does.
        check(&[lib, ("b/mod.rs", "mod inner;\npub use inner::B;"), ("b/inner.rs", "use super::C;")], 0);
        check(&[lib, ("b/mod.rs", "mod inner;\nfn f() { inner::go() }"), ("b/inner.rs", "use super::C;")], 2);
        // Tests and comments may speak of everything.
        let tests = "// crate::b::C\nstruct A;\n#[cfg(test)]\nmod tests {\n    use crate::b::C;\n}\n";
        check(&[lib, ("a.rs", tests), ("b.rs", "use crate::A;")], 0);
    }
}
