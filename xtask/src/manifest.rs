//! The dependencies that the workspace's manifests name. The subset of TOML that they are written in, one dependency a line.

use crate::tree::File;

/// A line of a `dependencies` table.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Dependency<'a> {
    pub(crate) name: &'a str,
    /// Only for tests, examples and benchmarks.
    pub(crate) dev: bool,
    /// The comment on the line above, if there is one.
    pub(crate) comment: &'a str,
}

/// What the tables of a manifest name whose heads end with `dependencies`.
pub(crate) fn dependencies(manifest: &str) -> Vec<Dependency<'_>> {
    let mut found = Vec::new();
    let (mut inside, mut dev, mut comment) = (false, false, "");
    for line in manifest.lines().map(str::trim) {
        if let Some(head) = line.strip_prefix('[') {
            let head = head.trim_end_matches(']');
            inside = head.ends_with("dependencies");
            dev = head.ends_with("dev-dependencies");
        } else if let Some(text) = line.strip_prefix('#') {
            comment = text.trim();
            continue;
        } else if inside && let Some((name, _)) = line.split_once(['=', '.', ' ']) {
            found.push(Dependency { name, dev, comment });
        }
        comment = "";
    }
    found
}

/// Name of the crate, folder and text of each manifest below the root's.
pub(crate) fn crates(files: &[File]) -> impl Iterator<Item = (&str, &str, &str)> {
    files.iter().filter_map(|file| {
        let folder = file.name.strip_suffix("/Cargo.toml")?;
        Some((folder.rsplit('/').next().unwrap_or(folder), folder, file.text.as_str()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_all_tables_are_read() {
        let text = "[package]\nname = \"x\"\n[dependencies]\na.workspace = true\n# Why.\nb = { workspace = true }\n\n\
                    [target.'cfg(unix)'.dependencies]\nc = \"1\"\n[dev-dependencies]\nd.workspace = true\n[lints]\ne = 1\n";
        let found: Vec<_> = dependencies(text).into_iter().map(|d| (d.name, d.dev, d.comment)).collect();
        assert_eq!(found, [("a", false, ""), ("b", false, "Why."), ("c", false, ""), ("d", true, "")]);
    }
}
