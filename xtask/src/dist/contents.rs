//! What is installed, as files below a prefix: the same in every package.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::options::{Options, Target};
use super::{Care, build, dependencies, elf, notices, sbom};

pub(crate) const EXECUTABLE: &str = "bin/muser";
pub(crate) const SBOM: &str = "share/doc/muser/sbom.cdx.json";
pub(crate) const MAN: &str = "share/man/man1/";

/// Model files that lie beside the executable; `find_beside` of the command looks for them there.
const MODELS: [&str; 2] = ["muse-tiny-dflash-Q8_0.gguf.zst", "mmproj-muse-tiny-Q8_0.gguf.zst"];
pub(crate) const BUNDLED: &str = "muse-tiny-Q4_K_M.gguf";

/// Shells, and where each looks for completions below a prefix. PowerShell looks nowhere.
const SHELLS: [(&str, &str); 4] = [
    ("bash", "share/bash-completion/completions/muser"),
    ("zsh", "share/zsh/site-functions/_muser"),
    ("fish", "share/fish/vendor_completions.d/muser.fish"),
    ("powershell", "share/muser/completions/muser.ps1"),
];

/// For the executable, of which 19,940,992 bytes are Muse Tiny: a guard against growth that nobody looked at.
const MOST_BYTES: usize = 47_000_000;

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Below the prefix, with slashes.
    pub(crate) place: String,
    pub(crate) mode: u32,
    pub(crate) bytes: Vec<u8>,
}

impl Entry {
    pub(crate) fn new(place: &str, mode: u32, bytes: Vec<u8>) -> Self {
        Self { place: place.to_owned(), mode, bytes }
    }
}

/// All of it, for one target.
#[derive(Debug)]
pub(crate) struct Contents {
    pub(crate) version: String,
    pub(crate) target: &'static Target,
    /// The commit's time, in seconds.
    pub(crate) time: u64,
    /// The C library that the executable needs, where it needs glibc.
    pub(crate) glibc: Option<(u32, u32)>,
    pub(crate) entries: Vec<Entry>,
}

impl Contents {
    pub(crate) fn gather(root: &Path, options: &Options, executable: &Path) -> Result<Self> {
        let describe = options.describe_with.as_deref().unwrap_or(executable);
        let read = |path: &Path| std::fs::read(path).with_context(|| path.display().to_string());
        let bytes = read(executable)?;
        let version = version(describe)?;
        let glibc = elf::newest_glibc(&bytes);
        let time = commit_time(root)?;
        let mut entries = vec![Entry::new(EXECUTABLE, 0o755, bytes)];
        let mut add = |place: &str, bytes: Vec<u8>| entries.push(Entry::new(place, 0o644, bytes));
        for name in MODELS {
            add(&format!("share/muser/{name}"), read(&root.join("models").join(name))?);
        }
        for (shell, place) in SHELLS {
            add(place, ask(describe, &["completions", shell])?);
        }
        for (name, page) in manual(describe)? {
            add(&format!("{MAN}{name}"), page);
        }
        for name in ["LICENSE-APACHE", "LICENSE-MIT", "README.md", "CHANGELOG.md"] {
            add(&format!("share/doc/muser/{name}"), read(&root.join(name))?);
        }
        for name in ["muser.service", "muser.service.d/cuda.conf", "muser.sysusers.conf", "muser.env"] {
            add(&format!("share/muser/systemd/{name}"), read(&root.join("packaging/systemd").join(name))?);
        }
        let packages = dependencies::shipped(root, options.target)?;
        add("share/doc/muser/THIRD-PARTY.txt", notices::text(root, &packages)?.into_bytes());
        add(SBOM, sbom::document(root, &version, options.target, time, &packages)?);
        entries.sort_by(|a, b| a.place.cmp(&b.place));
        Ok(Self { version, target: options.target, time, glibc, entries })
    }

    /// Name of the archive and of its only folder.
    pub(crate) fn stem(&self) -> String {
        format!("muser-{}-{}", self.version, self.target.triple)
    }

    pub(crate) fn bytes_of(&self, place: &str) -> Result<&[u8]> {
        let entry = self.entries.iter().find(|entry| entry.place == place);
        Ok(&entry.with_context(|| format!("{place} is not among the files"))?.bytes)
    }

    /// What must be true of these files before anybody gets them.
    pub(crate) fn check(&self, root: &Path, care: Care) -> Result<()> {
        let mut faults = self.faults(&build::machine_paths(root)?, care);
        if care == Care::ForRelease
            && self.target.debian.is_some()
            && self.glibc.is_none_or(|has| has > build::GLIBC)
        {
            let (major, minor) = build::GLIBC;
            faults.push(match self.glibc {
                Some((a, b)) => format!(
                    "{EXECUTABLE} needs glibc {a}.{b}, at most {major}.{minor}: link with cargo-zigbuild (docs/install.md)"
                ),
                None => format!("{EXECUTABLE} is not bound to glibc"),
            });
        }
        if !faults.is_empty() {
            bail!("what was packed cannot be shipped:\n  {}", faults.join("\n  "));
        }
        Ok(())
    }

    fn faults(&self, machine_paths: &[String], care: Care) -> Vec<String> {
        let mut faults = Vec::new();
        for entry in &self.entries {
            let is_program = entry.place == EXECUTABLE;
            if is_program && care == Care::ForTest {
                continue;
            }
            for path in machine_paths.iter().filter(|path| elf::mentions(&entry.bytes, path)) {
                faults.push(format!("{} has the path {path} of this machine", entry.place));
            }
            if is_program && entry.bytes.len() > MOST_BYTES {
                faults.push(format!("{} has {} bytes, at most {MOST_BYTES}", entry.place, entry.bytes.len()));
            }
        }
        faults
    }
}

/// The version that the executable says it has.
fn version(executable: &Path) -> Result<String> {
    let said = String::from_utf8(ask(executable, &["--version"])?)?;
    let version = said.trim().strip_prefix("muser ").unwrap_or_default();
    let good = |c: char| c.is_ascii_alphanumeric() || ".-+".contains(c);
    if version.is_empty() || !version.chars().all(good) {
        bail!("{} --version said {said:?}, expected \"muser VERSION\"", executable.display());
    }
    Ok(version.to_owned())
}

fn manual(executable: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let folder = std::env::temp_dir().join(format!("muser-man-{}", std::process::id()));
    let place = folder.to_str().context("the folder for temporary files has no name in UTF-8")?;
    ask(executable, &["man", place])?;
    let mut pages = Vec::new();
    for entry in std::fs::read_dir(&folder)? {
        let entry = entry?;
        pages.push((entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path())?));
    }
    std::fs::remove_dir_all(&folder)?;
    if pages.is_empty() {
        bail!("{} man wrote no pages", executable.display());
    }
    Ok(pages)
}

/// What it writes to standard output, in an environment that changes nothing of it.
fn ask(executable: &Path, arguments: &[&str]) -> Result<Vec<u8>> {
    let shown = format!("{} {}", executable.display(), arguments.join(" "));
    let out = Command::new(executable).args(arguments).env_clear().output();
    let out =
        out.with_context(|| format!("cannot start {shown} (--describe-with names one that runs here)"))?;
    if !out.status.success() {
        bail!("{shown} ended with {}: {}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    Ok(out.stdout)
}

/// `SOURCE_DATE_EPOCH`, or when the commit was made.
fn commit_time(root: &Path) -> Result<u64> {
    if let Ok(set) = std::env::var("SOURCE_DATE_EPOCH") {
        return set.parse().with_context(|| format!("SOURCE_DATE_EPOCH is {set:?}, expected seconds"));
    }
    let out = Command::new("git").args(["log", "-1", "--format=%ct"]).current_dir(root).output()?;
    let said = String::from_utf8_lossy(&out.stdout);
    said.trim().parse().context("git does not say when the commit was made: set SOURCE_DATE_EPOCH")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::dist::options::TARGETS;

    pub(crate) fn some(glibc: Option<(u32, u32)>) -> Contents {
        let entry = |place: &str, mode, text: &str| Entry::new(place, mode, text.as_bytes().to_vec());
        Contents {
            version: "1.2.3".to_owned(),
            target: &TARGETS[0],
            time: 1_700_000_000,
            glibc,
            entries: vec![
                entry(EXECUTABLE, 0o755, "\x7fELF libgcc_s.so.1 /home/builder/src/x.rs"),
                entry("share/doc/muser/CHANGELOG.md", 0o644, "# Changelog\n"),
                entry("share/doc/muser/LICENSE-MIT", 0o644, "MIT\n"),
                entry(SBOM, 0o644, "{}"),
                entry("share/man/man1/muser.1", 0o644, ".TH muser 1\n"),
                entry("share/muser/completions/muser.ps1", 0o644, "# x\n"),
                entry("share/muser/systemd/muser.env", 0o644, "# env\n"),
                entry("share/muser/systemd/muser.service", 0o644, "[Unit]\n"),
                entry("share/muser/systemd/muser.service.d/cuda.conf", 0o644, "[Service]\n"),
                entry("share/muser/systemd/muser.sysusers.conf", 0o644, "u muser\n"),
            ],
        }
    }

    #[test]
    fn paths_of_the_machine_are_found_in_every_file() {
        let mut contents = some(Some((2, 28)));
        let paths = ["/home/builder".to_owned()];
        assert_eq!(contents.faults(&paths, Care::ForRelease).len(), 1);
        assert!(contents.faults(&paths, Care::ForTest).is_empty(), "an executable of this machine has them");
        contents.entries[2].bytes = b"see /home/builder/x".to_vec();
        assert_eq!(contents.faults(&paths, Care::ForTest).len(), 1);
        assert_eq!(contents.faults(&paths, Care::ForRelease).len(), 2);
        assert!(contents.faults(&["/elsewhere".to_owned()], Care::ForRelease).is_empty());
    }

    #[test]
    fn a_release_is_small_and_runs_on_old_systems() {
        let root = crate::root();
        assert!(some(Some((2, 28))).check(&root, Care::ForRelease).is_ok());
        for glibc in [Some((2, 36)), Some((3, 0)), None] {
            assert!(some(glibc).check(&root, Care::ForRelease).is_err(), "{glibc:?}");
            assert!(some(glibc).check(&root, Care::ForTest).is_ok(), "{glibc:?}");
        }
        let mut large = some(Some((2, 17)));
        large.entries[0].bytes = vec![0; MOST_BYTES + 1];
        assert!(large.check(&root, Care::ForRelease).is_err());
        large.entries[0].bytes.pop();
        assert!(large.check(&root, Care::ForRelease).is_ok());
    }
}
