//! Where dependencies come from, by reading `Cargo.lock` and the manifests: works offline, in milliseconds.
//!
//! Every package that is not ours comes from the one public registry and is pinned by the hash of its archive; no manifest
//! takes a dependency from a folder outside the tree, from git, or in any version; what `deny.toml` bans is not there.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

pub(crate) fn check(root: &Path) -> Result<()> {
    let lock = std::fs::read_to_string(root.join("Cargo.lock")).context("Cargo.lock")?;
    let deny = std::fs::read_to_string(root.join("deny.toml")).context("deny.toml")?;
    let mut ours = Vec::new();
    let mut faults = Vec::new();
    for manifest in manifests(root)? {
        let text = std::fs::read_to_string(&manifest).with_context(|| manifest.display().to_string())?;
        let shown = manifest.strip_prefix(root).unwrap_or(&manifest).display().to_string();
        ours.extend(value_of(&text, "name").map(str::to_owned));
        faults.extend(manifest_faults(&text).into_iter().map(|fault| format!("{shown}: {fault}")));
    }
    faults.extend(lock_faults(&lock, &ours, &banned(&deny)));
    if !faults.is_empty() {
        bail!("dependencies:\n  {}", faults.join("\n  "));
    }
    Ok(())
}

/// The workspace's own manifests.
fn manifests(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![root.join("Cargo.toml"), root.join("xtask/Cargo.toml")];
    for entry in std::fs::read_dir(root.join("crates")).context("crates")? {
        found.push(entry?.path().join("Cargo.toml"));
    }
    found.retain(|path| path.is_file());
    found.sort();
    Ok(found)
}

/// What is wrong with the packages of a lock file.
fn lock_faults(lock: &str, ours: &[String], banned: &[&str]) -> Vec<String> {
    let mut faults = Vec::new();
    let packages = lock.split("[[package]]").skip(1);
    if packages.clone().count() == 0 {
        faults.push("Cargo.lock: no packages are found in it".to_owned());
    }
    for package in packages {
        let name = value_of(package, "name").unwrap_or("?");
        let version = value_of(package, "version").unwrap_or("?");
        let mut fault = |what: String| faults.push(format!("Cargo.lock: {name} {version}: {what}"));
        match value_of(package, "source") {
            None if ours.iter().any(|own| own == name) => {}
            None => fault("comes from a folder that is not part of this tree".to_owned()),
            Some(REGISTRY) => {
                let hash = value_of(package, "checksum").unwrap_or_default();
                if hash.len() != 64 || !hash.bytes().all(|b| b.is_ascii_hexdigit()) {
                    fault("has no checksum".to_owned());
                }
                if ours.iter().any(|own| own == name) {
                    fault("has the name of a package of this tree".to_owned());
                }
            }
            Some(other) => fault(format!("comes from {other}, not from the public registry")),
        }
        if banned.contains(&name) {
            fault("is banned by deny.toml".to_owned());
        }
    }
    faults
}

/// Dependencies of a manifest that are not pinned to the registry and a version.
fn manifest_faults(text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let mut in_dependencies = false;
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            in_dependencies = section.contains("dependencies");
            if section.starts_with("patch") || section.starts_with("replace") {
                faults.push(format!("{line} replaces what the registry has"));
            }
            continue;
        }
        let Some((name, value)) = line.split_once('=').filter(|_| in_dependencies && !line.starts_with('#'))
        else {
            continue;
        };
        let (name, value) = (name.trim(), value.trim());
        let has = |key: &str| value.contains(&format!("{key} =")) || value.contains(&format!("{key}="));
        if has("git") || has("registry") {
            faults.push(format!("{name} does not come from the public registry"));
        }
        if value.contains("\"*\"") {
            faults.push(format!("{name} takes any version"));
        }
        if has("path") && value.contains("../..") {
            faults.push(format!("{name} is a folder outside of this tree"));
        }
    }
    faults
}

/// Names in `deny = [` of `[bans]`.
fn banned(deny: &str) -> Vec<&str> {
    let bans = deny.split_once("[bans]").map_or("", |(_, rest)| rest);
    let list = bans
        .split_once("deny = [")
        .map_or("", |(_, rest)| rest.split_once(']').map_or(rest, |(list, _)| list));
    list.split('"').skip(1).step_by(2).collect()
}

/// The string of a `key = "value"` line.
fn value_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let value = line.trim().strip_prefix(key)?.trim_start().strip_prefix('=')?.trim();
        value.strip_prefix('"')?.split('"').next()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, source: &str, checksum: &str) -> String {
        let line = |key: &str, value: &str| {
            if value.is_empty() { String::new() } else { format!("{key} = \"{value}\"\n") }
        };
        format!(
            "[[package]]\nname = \"{name}\"\nversion = \"1.0.0\"\n{}{}\n",
            line("source", source),
            line("checksum", checksum)
        )
    }

    #[test]
    fn a_lock_file_names_one_registry_and_every_hash() {
        let hash = "a".repeat(64);
        let check = |lock: String, faults: usize| {
            let found = lock_faults(&lock, &["muser".to_owned()], &["openssl"]);
            assert_eq!(found.len(), faults, "{lock}: {found:?}");
        };
        check(package("a", REGISTRY, &hash) + &package("muser", "", ""), 0);
        check(package("a", REGISTRY, ""), 1);
        check(package("a", REGISTRY, "abc"), 1);
        check(package("a", "git+https://host.example/a", ""), 1);
        check(package("a", "registry+https://mirror.example/index", &hash), 1);
        check(package("a", "", ""), 1);
        check(package("muser", REGISTRY, &hash), 1);
        check(package("openssl", REGISTRY, &hash), 1);
        check(String::new(), 1);
    }

    #[test]
    fn manifests_pin_what_they_take() {
        let check = |line: &str, faults: usize| {
            let text = format!(
                "[package]\nname = \"x\"\nversion = \"*\"\n[dependencies]\n{line}\n[lints]\ngit = \"y\"\n"
            );
            assert_eq!(manifest_faults(&text).len(), faults, "{line}");
        };
        check("a = \"1\"", 0);
        check("a.workspace = true", 0);
        check("a = { path = \"../a\" }", 0);
        check("a = \"*\"", 1);
        check("a = { version = \"*\", features = [] }", 1);
        check("a = { git = \"https://host.example/a\" }", 1);
        check("a = { path = \"../../../a\" }", 1);
        check("a = { version = \"1\", registry = \"other\" }", 1);
        check("# a = \"*\"", 0);
        assert_eq!(manifest_faults("[patch.crates-io]\na = { path = \"b\" }").len(), 1);
    }

    #[test]
    fn bans_are_read() {
        assert_eq!(
            banned("[licenses]\ndeny = [\"MIT\"]\n[bans]\nx = 1\ndeny = [\n \"a\", # why\n \"b\",\n]\n"),
            ["a", "b"]
        );
        assert!(banned("[bans]\n").is_empty());
    }
}
