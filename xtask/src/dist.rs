//! `cargo xtask dist`: what a release consists of, from one executable. An archive, a Debian package, a Python wheel, the bill of
//! materials, the install script and the checksums of all.
//!
//! Invariant: bytes depend on the commit and on nothing else. Times are the commit's, owners are root, orders are sorted, and no
//! file has a path of the machine that made it.

mod archive;
mod build;
mod check;
mod contents;
mod deb;
mod dependencies;
mod elf;
mod notices;
mod options;
mod sbom;
mod wheel;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

pub(crate) use check::check;
use contents::Contents;
use options::Options;

pub(crate) const USAGE: &str = options::USAGE;

/// `cargo xtask dist …`.
pub(crate) fn command(root: &Path, arguments: &[String]) -> Result<()> {
    let options = Options::parse(arguments)?;
    let executable = match &options.from {
        Some(path) => std::path::absolute(path)?,
        None => build::executable(root, options.target)?,
    };
    let out = options.out.clone().unwrap_or_else(|| crate::target_dir().join("packages"));
    let care = if options.local { Care::ForTest } else { Care::ForRelease };
    let made = pack(root, &options, &executable, &out, care)?;
    for path in made {
        let size = std::fs::metadata(&path)?.len();
        println!("{size:>12} {}", path.display());
    }
    if options.check { check::check_packed(root, &out, care) } else { Ok(()) }
}

/// How much is asked of an executable.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Care {
    /// Small files, no machine path anywhere, an old C library.
    ForRelease,
    /// An executable that was built for this machine; nothing is compressed.
    ForTest,
}

/// Writes everything of one target into `out`; returns the files.
fn pack(root: &Path, options: &Options, executable: &Path, out: &Path, care: Care) -> Result<Vec<PathBuf>> {
    let contents = Contents::gather(root, options, executable)?;
    contents.check(root, care)?;
    std::fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    let level = flate2::Compression::new(if care == Care::ForRelease { 9 } else { 0 });
    let mut made = Vec::new();
    let mut write = |name: String, bytes: &[u8]| -> Result<()> {
        let path = out.join(name);
        std::fs::write(&path, bytes).with_context(|| path.display().to_string())?;
        made.push(path);
        Ok(())
    };
    let stem = contents.stem();
    write(format!("{stem}.tar.gz"), &archive::tarball(&contents, level)?)?;
    write(format!("{stem}.cdx.json"), contents.bytes_of(contents::SBOM)?)?;
    let (name, bytes) = wheel::make(&contents, level)?;
    write(name, &bytes)?;
    if options.target.debian.is_some() {
        let (name, bytes) = deb::make(root, &contents, &options.maintainer, level)?;
        write(name, &bytes)?;
    }
    write("install.sh".to_owned(), &install_script(root, options.url.as_deref())?)?;
    write("SHA256SUMS".to_owned(), checksums(out)?.as_bytes())?;
    Ok(made)
}

/// The script, with the place of this release where one is given.
fn install_script(root: &Path, url: Option<&str>) -> Result<Vec<u8>> {
    const PLACE: &str = "from=''\n";
    let script =
        std::fs::read_to_string(root.join("packaging/install.sh")).context("packaging/install.sh")?;
    let Some(url) = url else { return Ok(script.into_bytes()) };
    if !url.starts_with("https://") || url.contains(|c: char| c.is_whitespace() || c == '\'') {
        bail!("--url {url}: expected an address with https:// and without blanks or quotes");
    }
    if script.matches(PLACE).count() != 1 {
        bail!("packaging/install.sh: expected one line {PLACE:?}, which is where the address goes");
    }
    Ok(script.replace(PLACE, &format!("from='{url}'\n")).into_bytes())
}

/// As `sha256sum` writes them, of all other files of a folder.
fn checksums(folder: &Path) -> Result<String> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_file() && name != "SHA256SUMS" {
            names.push(name);
        }
    }
    names.sort();
    let mut lines = String::new();
    for name in names {
        let bytes = std::fs::read(folder.join(&name))?;
        let _ = writeln!(lines, "{}  {name}", sha256(&bytes));
    }
    Ok(lines)
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_takes_an_address_and_nothing_else() {
        let root = crate::root();
        let script = |url| install_script(&root, url);
        let with =
            String::from_utf8(script(Some("https://host.example/v1")).expect("an address")).expect("text");
        assert!(with.contains("\nfrom='https://host.example/v1'\n"));
        let without = String::from_utf8(script(None).expect("the script")).expect("text");
        assert!(without.contains("\nfrom=''\n"));
        for bad in ["http://host.example/", "https://a b", "https://a'$(id)", "ftp://x"] {
            assert!(script(Some(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn checksums_are_those_of_sha256sum() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("b"), b"abc").expect("written");
        std::fs::write(folder.path().join("a"), b"").expect("written");
        std::fs::write(folder.path().join("SHA256SUMS"), b"old").expect("written");
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(checksums(folder.path()).expect("sums"), format!("{empty}  a\n{abc}  b\n"));
    }
}
