//! Every package of the build, whatever features it has, has a licence that `deny.toml` allows.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

pub(crate) fn check(root: &Path) -> Result<()> {
    let deny = std::fs::read_to_string(root.join("deny.toml"))?;
    let allowed = allow_list(&deny);
    let out = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--locked", "--all-features"])
        .current_dir(root)
        .output()
        .context("cannot start cargo metadata")?;
    if !out.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&out.stderr));
    }
    let metadata: serde_json::Value = serde_json::from_slice(&out.stdout)?;
    let mut refused = Vec::new();
    for package in metadata["packages"].as_array().context("cargo metadata has no packages")? {
        let licence = package["license"].as_str().unwrap_or("none given");
        if !allows(licence, &allowed) {
            refused.push(format!("{} {}: {licence}", package["name"], package["version"]));
        }
    }
    if !refused.is_empty() {
        bail!("licences outside deny.toml:\n  {}", refused.join("\n  "));
    }
    Ok(())
}

/// The quoted strings of the `allow` array.
fn allow_list(deny: &str) -> Vec<&str> {
    let list =
        deny.split_once("allow = [").map_or("", |(_, rest)| rest.split_once(']').map_or(rest, |(l, _)| l));
    list.split('"').skip(1).step_by(2).collect()
}

/// Is an SPDX expression satisfied? `OR` needs one side, `AND` both; a slash is an old spelling of `OR`.
fn allows(expression: &str, allowed: &[&str]) -> bool {
    let text = expression.replace('/', " OR ").replace(['(', ')'], " ");
    // AND binds tighter than OR in SPDX; parentheses only occur around ORs in practice, so every AND term must hold
    // and each is a choice.
    text.split(" AND ").all(|term| term.split(" OR ").any(|licence| allowed.contains(&licence.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions() {
        let allowed = ["MIT", "Apache-2.0", "Unicode-3.0"];
        assert!(allows("MIT OR Apache-2.0", &allowed));
        assert!(allows("MIT/GPL-3.0", &allowed));
        assert!(allows("(MIT OR Apache-2.0) AND Unicode-3.0", &allowed));
        assert!(!allows("(MIT OR Apache-2.0) AND OpenSSL", &allowed));
        assert!(!allows("GPL-3.0-only", &allowed));
        assert!(!allows("none given", &allowed));
    }

    #[test]
    fn list_is_read() {
        assert_eq!(allow_list("x\nallow = [\n \"MIT\", # why\n \"ISC\",\n]\ny = [\"no\"]"), ["MIT", "ISC"]);
    }
}
