//! What lies in `packaging/`, by the programs that read such files: each is asked where it is installed, and named where not.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::tools;

/// The most that `systemd-analyze security` may find, in tenths: 0 is sealed, 10 (100) is open.
const EXPOSURE: &str = "--threshold=20";

pub(crate) fn check(root: &Path) -> Result<()> {
    let packaging = root.join("packaging");
    let mut faults = Vec::new();
    let mut ask = |tool: &str, args: &[&str], judge: fn(bool, &str) -> Option<String>| -> Result<()> {
        let Some(program) = tools::find(root, tool) else {
            println!("SKIPPED: {tool} {} was not asked: it is not installed", args.join(" "));
            return Ok(());
        };
        let out = Command::new(&program)
            .args(args)
            .current_dir(&packaging)
            .output()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let said =
            [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        if let Some(fault) = judge(out.status.success(), &said) {
            faults.push(format!("{tool} {}:\n{fault}", args.join(" ")));
        }
        Ok(())
    };
    ask("systemd-analyze", &["verify", "systemd/muser.service"], unit_faults)?;
    ask("systemd-analyze", &["security", "--offline=yes", EXPOSURE, "systemd/muser.service"], failed)?;
    ask("hadolint", &["container/Containerfile"], failed)?;
    let mut manifests = vec!["--strict".to_owned(), "--quiet".to_owned()];
    manifests.extend(files_of(&packaging, "kubernetes")?);
    ask("kubernetes-validate", &words(&manifests), failed)?;
    ask("promtool", &["check", "rules", "prometheus/alerts.yml"], failed)?;
    ask("promtool", &["test", "rules", "prometheus/alerts.test.yml"], failed)?;
    // The key's file is another machine's.
    ask("promtool", &["check", "config", "--syntax-only", "prometheus/prometheus.yml"], failed)?;
    let mut scripts = vec!["install.sh".to_owned()];
    scripts.extend(files_of(&packaging, "debian")?);
    ask("shellcheck", &words(&scripts), failed)?;
    // Workflows for a hosted CI: their form by the published schema, and what they give away. Neither asks a network.
    let workflows = files_of(&packaging, "../.github/workflows")?;
    let schema = ["--builtin-schema", "vendor.github-workflows"].map(str::to_owned);
    ask("check-jsonschema", &words(&[&schema[..], &workflows[..]].concat()), failed)?;
    let zizmor = ["--offline", "--no-progress", "--strict-collection"].map(str::to_owned);
    ask("zizmor", &words(&[&zizmor[..], &workflows[..]].concat()), failed)?;
    if !faults.is_empty() {
        bail!("\n{}", faults.join("\n"));
    }
    Ok(())
}

fn words(list: &[String]) -> Vec<&str> {
    list.iter().map(String::as_str).collect()
}

/// The files of a folder of `packaging`, by name.
fn files_of(packaging: &Path, folder: &str) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(packaging.join(folder)).with_context(|| folder.to_owned())?;
    let names = entries.map(|entry| Ok(format!("{folder}/{}", entry?.file_name().to_string_lossy())));
    let mut names: Vec<String> = names.collect::<Result<_>>()?;
    names.sort();
    Ok(names)
}

/// By the checker's own judgement.
fn failed(success: bool, said: &str) -> Option<String> {
    (!success).then(|| said.to_owned())
}

/// What is said of the unit, whatever the end: unknown keys are a warning to systemd, and ignored sandboxing is none. That the
/// program is not installed here is no fault of the unit.
fn unit_faults(success: bool, said: &str) -> Option<String> {
    let of_us: Vec<_> = said.lines().filter(|line| line.contains("muser.service")).collect();
    let faults: Vec<_> = of_us.iter().filter(|line| !line.contains("is not executable")).copied().collect();
    if success || !of_us.is_empty() {
        return (!faults.is_empty()).then(|| faults.join("\n"));
    }
    Some(said.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_judged_by_what_is_said_of_it() {
        let missing = "muser.service: Command /usr/bin/muser is not executable: No such file or directory\n";
        let unknown = "/x/muser.service:41: Unknown key 'ProtectHoome' in section [Service], ignoring.\n";
        assert_eq!(unit_faults(true, ""), None);
        assert_eq!(unit_faults(false, missing), None);
        assert_eq!(unit_faults(true, "other.service: broken"), None);
        assert_eq!(unit_faults(true, unknown).as_deref(), Some(unknown.trim_end()));
        assert_eq!(unit_faults(false, &(missing.to_owned() + unknown)).as_deref(), Some(unknown.trim_end()));
        assert!(unit_faults(false, "cannot read").is_some());
        assert!(failed(false, "").is_some() && failed(true, "words").is_none());
    }
}
