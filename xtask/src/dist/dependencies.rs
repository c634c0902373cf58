//! The packages of which code is in the executable, by asking cargo.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::build;
use super::options::Target;

/// A package.
#[derive(Clone, Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) authors: String,
    /// An SPDX expression.
    pub(crate) licence: String,
    /// Where its files are.
    pub(crate) folder: PathBuf,
    /// Is it of this tree?
    pub(crate) ours: bool,
    /// Hash of its archive, by the lock file.
    pub(crate) sha256: Option<String>,
    /// What it needs of the others, as they are called in [`Package::reference`].
    pub(crate) needs: BTreeSet<String>,
}

impl Package {
    /// A package URL.
    pub(crate) fn reference(&self) -> String {
        format!("pkg:cargo/{}@{}", self.name, self.version)
    }
}

/// The command's package and all that it is built of, in the order of their references. What only compiles or runs at build time
/// (build scripts' needs) is not in the executable and not in the list; macros are in it, because their output is.
pub(crate) fn shipped(root: &Path, target: &Target) -> Result<Vec<Package>> {
    let out = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", target.triple])
        .args(["--no-default-features", "--features", build::FEATURES])
        .current_dir(root.join("crates/muser"))
        .output()
        .context("cannot start cargo metadata")?;
    if !out.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&out.stderr));
    }
    let lock = std::fs::read_to_string(root.join("Cargo.lock")).context("Cargo.lock")?;
    reachable(&serde_json::from_slice(&out.stdout)?, &lock)
}

fn reachable(metadata: &Value, lock: &str) -> Result<Vec<Package>> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut packages: BTreeMap<String, Package> = BTreeMap::new();
    for package in list(&metadata["packages"]) {
        let (name, version) = (text(&package["name"]), text(&package["version"]));
        let sha256 = checksum(lock, &name, &version);
        let licence = package["license"].as_str().unwrap_or("NOASSERTION").replace('/', " OR ");
        let folder =
            Path::new(&text(&package["manifest_path"])).parent().map(Path::to_owned).unwrap_or_default();
        let ours = package["source"].is_null();
        let authors: Vec<String> = list(&package["authors"]).iter().map(text).collect();
        let authors = authors.join(", ");
        let needs = BTreeSet::new();
        packages.insert(
            text(&package["id"]),
            Package { name, version, authors, licence, folder, ours, sha256, needs },
        );
    }
    let mut edges: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for node in list(&metadata["resolve"]["nodes"]) {
        let normal = |dep: &&Value| list(&dep["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
        let needs = list(&node["deps"]).iter().filter(normal).map(|dep| text(&dep["pkg"])).collect();
        edges.insert(text(&node["id"]), needs);
    }
    let first = packages.iter().find(|(_, package)| package.ours && package.name == "muser");
    let mut open = vec![first.context("cargo metadata does not name the package muser")?.0.clone()];
    let mut seen = BTreeSet::new();
    while let Some(id) = open.pop() {
        if seen.insert(id.clone()) {
            open.extend(edges.get(&id).cloned().unwrap_or_default());
        }
    }
    let references: BTreeMap<String, String> =
        packages.iter().map(|(id, package)| (id.clone(), package.reference())).collect();
    let mut found = Vec::new();
    for id in seen {
        let mut package = packages.remove(&id).with_context(|| format!("{id} is not described"))?;
        let needs = edges.get(&id).into_iter().flatten();
        package.needs = needs.filter_map(|id| references.get(id).cloned()).collect();
        if !package.ours && package.sha256.is_none() {
            bail!("{} {} has no checksum in Cargo.lock", package.name, package.version);
        }
        found.push(package);
    }
    found.sort_by_key(Package::reference);
    Ok(found)
}

fn checksum(lock: &str, name: &str, version: &str) -> Option<String> {
    let wanted = format!("\nname = \"{name}\"\nversion = \"{version}\"\n");
    let package = lock.split("[[package]]").find(|package| package.starts_with(&wanted))?;
    let (_, rest) = package.split_once("checksum = \"")?;
    rest.split('"').next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_only_builds_or_tests_is_left_out() {
        let package = |name: &str, source: Value| {
            json!({"id": name, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0", "source": source,
                   "manifest_path": format!("/src/{name}/Cargo.toml")})
        };
        let dep = |name: &str, kind: Value| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let metadata = json!({
            "packages": [package("muser", Value::Null), package("used", json!("registry")), package("deep", json!("registry")),
                         package("built", json!("registry")), package("tested", json!("registry"))],
            "resolve": {"nodes": [
                {"id": "muser", "deps": [dep("used", Value::Null), dep("built", json!("build")), dep("tested", json!("dev"))]},
                {"id": "used", "deps": [dep("deep", Value::Null)]},
                {"id": "deep", "deps": []}]},
        });
        let lock = "[[package]]\nname = \"used\"\nversion = \"1.0.0\"\nsource = \"r\"\nchecksum = \"aa\"\n\n[[package]]\nname = \
                    \"deep\"\nversion = \"1.0.0\"\nsource = \"r\"\nchecksum = \"bb\"\n";
        let found = reachable(&metadata, lock).expect("a graph");
        let names: Vec<&str> = found.iter().map(|package| package.name.as_str()).collect();
        assert_eq!(names, ["deep", "muser", "used"]);
        assert_eq!(found[0].sha256.as_deref(), Some("bb"));
        assert_eq!(found[2].needs.iter().collect::<Vec<_>>(), ["pkg:cargo/deep@1.0.0"]);
        assert_eq!(found[2].licence, "MIT OR Apache-2.0");
        let short = lock.split("[[package]]\nname = \"deep\"").next().expect("a beginning");
        assert!(reachable(&metadata, short).is_err(), "a hash is missing");
    }
}
