//! A Python wheel that carries the executable: `pip install muser` gives the command.

use std::fmt::Write as _;
use std::io::{Cursor, Write as _};

use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use flate2::Compression;
use sha2::{Digest as _, Sha256};
use zip::write::SimpleFileOptions;

use super::contents::{Contents, EXECUTABLE, Entry, SBOM};
use super::sbom;

/// Name of the file, and its bytes.
pub(crate) fn make(contents: &Contents, level: Compression) -> Result<(String, Vec<u8>)> {
    let version = python_version(&contents.version)?;
    let tags = tags(contents)?;
    let name = format!("muser-{version}-py3-none-{}.whl", tags.join("."));
    let info = format!("muser-{version}.dist-info");
    let data = format!("muser-{version}.data");
    let mut files = Vec::new();
    let mut licences = Vec::new();
    for entry in &contents.entries {
        let place = match entry.place.as_str() {
            EXECUTABLE => format!("{data}/scripts/muser"),
            SBOM => format!("{info}/sboms/muser.cdx.json"),
            other => match other.strip_prefix("share/doc/muser/") {
                Some(name) if name.starts_with("LICENSE") || name.starts_with("THIRD-PARTY") => {
                    licences.push(name);
                    format!("{info}/licenses/{name}")
                }
                // The page is the description; the unit is for a program of the system, which a wheel is none of.
                Some(_) => continue,
                None if other.starts_with("share/muser/systemd/") => continue,
                None => format!("{data}/data/{other}"),
            },
        };
        files.push(Entry { place, ..entry.clone() });
    }
    let readme = contents.entries.iter().find(|entry| entry.place.ends_with("/README.md"));
    let readme = readme.map(|entry| String::from_utf8_lossy(&entry.bytes).into_owned()).unwrap_or_default();
    let mut metadata = format!(
        "Metadata-Version: 2.4\nName: muser\nVersion: {version}\nSummary: Runs Muse Glimmer models (GGUF) on your own \
         machine\nLicense-Expression: Apache-2.0 OR MIT\nRequires-Python: >=3.8\nClassifier: Environment :: \
         Console\nClassifier: Programming Language :: Rust\nDescription-Content-Type: text/markdown\n"
    );
    licences.sort_unstable();
    for name in licences {
        let _ = writeln!(metadata, "License-File: {name}");
    }
    let _ = write!(metadata, "\n{readme}");
    files.push(Entry::new(&format!("{info}/METADATA"), 0o644, metadata.into_bytes()));
    let mut wheel =
        "Wheel-Version: 1.0\nGenerator: muser (cargo xtask dist)\nRoot-Is-Purelib: false\n".to_owned();
    for tag in &tags {
        let _ = writeln!(wheel, "Tag: py3-none-{tag}");
    }
    files.push(Entry::new(&format!("{info}/WHEEL"), 0o644, wheel.into_bytes()));
    // Files about the wheel come last, and the list of all at the very end, as tools that read from the end like it.
    files.sort_by_key(|file| (file.place.starts_with(&info), file.place.clone()));
    files.push(record(&files, &info));
    Ok((name, zipped(&files, contents.time, level)?))
}

/// Where it may be installed. On Linux that is what the executable itself needs.
fn tags(contents: &Contents) -> Result<Vec<String>> {
    let python = contents.target.python;
    if contents.target.debian.is_none() {
        return Ok(vec![python.to_owned()]);
    }
    let (major, minor) =
        contents.glibc.context("the executable names no version of glibc: no tag fits it")?;
    // Rust itself needs 2.17, the oldest version that tools know by number.
    let minor = if major == 2 { minor.max(17) } else { minor };
    Ok(vec![format!("manylinux_{major}_{minor}_{python}")])
}

/// `1.2.3-rc.1` is `1.2.3rc1` there.
fn python_version(version: &str) -> Result<String> {
    let (numbers, rest) = version.split_once('-').unwrap_or((version, ""));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let suffix = match rest.split_once('.') {
        None if rest.is_empty() => Some(String::new()),
        Some((kind, number)) if is_number(number) => [("alpha", "a"), ("beta", "b"), ("rc", "rc")]
            .iter()
            .find(|(name, _)| *name == kind)
            .map(|(_, short)| format!("{short}{number}")),
        _ => None,
    };
    match suffix {
        Some(suffix) if numbers.split('.').count() == 3 && numbers.split('.').all(is_number) => {
            Ok(format!("{numbers}{suffix}"))
        }
        _ => bail!("version {version}: expected 1.2.3, or that with -alpha.N, -beta.N or -rc.N, for a wheel"),
    }
}

/// Every file with its hash and size; itself without.
fn record(files: &[Entry], info: &str) -> Entry {
    let mut lines = String::new();
    for file in files {
        let hash = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(Sha256::digest(&file.bytes));
        let _ = writeln!(lines, "{},sha256={hash},{}", file.place, file.bytes.len());
    }
    let place = format!("{info}/RECORD");
    let _ = writeln!(lines, "{place},,");
    Entry::new(&place, 0o644, lines.into_bytes())
}

fn zipped(files: &[Entry], time: u64, level: Compression) -> Result<Vec<u8>> {
    let (year, month, day) = sbom::date(time);
    let of_day = time % 86_400;
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let time = zip::DateTime::from_date_and_time(
        u16::try_from(year)?,
        month as u8,
        day as u8,
        hour as u8,
        minute as u8,
        second as u8,
    );
    let time = time.map_err(|e| anyhow::anyhow!("the commit's time is none of zip's: {e}"))?;
    let method =
        if level.level() == 0 { zip::CompressionMethod::Stored } else { zip::CompressionMethod::Deflated };
    let options = SimpleFileOptions::default().last_modified_time(time).compression_method(method);
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for file in files {
        let options = options.unix_permissions(file.mode);
        let level = (method == zip::CompressionMethod::Deflated).then(|| i64::from(level.level()));
        zip.start_file(&*file.place, options.compression_level(level))?;
        zip.write_all(&file.bytes)?;
    }
    Ok(zip.finish()?.into_inner())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read as _;

    use super::*;
    use crate::dist::contents::tests::some;
    use crate::dist::options::TARGETS;

    fn files(bytes: &[u8]) -> BTreeMap<String, (Vec<u8>, u32)> {
        let mut archive = zip::ZipArchive::new(Cursor::new(bytes)).expect("a zip");
        (0..archive.len())
            .map(|at| {
                let mut file = archive.by_index(at).expect("a file");
                let mut bytes = Vec::new();
                file.read_to_end(&mut bytes).expect("readable");
                (file.name().expect("a name").into_owned(), (bytes, file.unix_mode().unwrap_or_default()))
            })
            .collect()
    }

    #[test]
    fn the_record_names_every_file() {
        for level in [Compression::none(), Compression::best()] {
            let (name, bytes) = make(&some(Some((2, 28))), level).expect("a wheel");
            assert_eq!(name, "muser-1.2.3-py3-none-manylinux_2_28_x86_64.whl");
            assert_eq!(make(&some(Some((2, 28))), level).expect("a wheel").1, bytes, "the same again");
            let files = files(&bytes);
            assert_eq!(files["muser-1.2.3.data/scripts/muser"].1 & 0o7777, 0o755);
            assert_eq!(files["muser-1.2.3.dist-info/METADATA"].1 & 0o7777, 0o644);
            assert!(files.contains_key("muser-1.2.3.data/data/share/man/man1/muser.1"));
            assert!(files.contains_key("muser-1.2.3.dist-info/sboms/muser.cdx.json"));
            assert!(!files.keys().any(|name| name.contains("systemd")));
            let metadata = String::from_utf8_lossy(&files["muser-1.2.3.dist-info/METADATA"].0).into_owned();
            assert!(metadata.contains("\nLicense-File: LICENSE-MIT\n"), "{metadata}");
            let wheel = String::from_utf8_lossy(&files["muser-1.2.3.dist-info/WHEEL"].0).into_owned();
            assert!(wheel.contains("\nTag: py3-none-manylinux_2_28_x86_64\n"));
            let record = String::from_utf8_lossy(&files["muser-1.2.3.dist-info/RECORD"].0).into_owned();
            assert_eq!(record.lines().count(), files.len());
            for line in record.lines() {
                let parts: Vec<&str> = line.split(',').collect();
                let (bytes, _) = &files[parts[0]];
                if parts[0].ends_with("/RECORD") {
                    assert_eq!(parts[1..], ["", ""]);
                    continue;
                }
                assert_eq!(parts[2], bytes.len().to_string());
                let hash = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(Sha256::digest(bytes));
                assert_eq!(parts[1], format!("sha256={hash}"));
            }
        }
    }

    #[test]
    fn tags_say_what_the_executable_needs() {
        let tags = |target: usize, glibc| {
            let mut contents = some(glibc);
            contents.target = &TARGETS[target];
            tags(&contents).ok().map(|tags| tags.join("."))
        };
        assert_eq!(tags(0, Some((2, 36))).as_deref(), Some("manylinux_2_36_x86_64"));
        assert_eq!(tags(1, Some((2, 9))).as_deref(), Some("manylinux_2_17_aarch64"));
        assert_eq!(tags(2, None).as_deref(), Some("macosx_11_0_arm64"));
        assert_eq!(tags(0, None), None);
    }

    #[test]
    fn versions_are_pythons() {
        for (ours, theirs) in [("1.2.3", "1.2.3"), ("1.2.3-rc.1", "1.2.3rc1"), ("0.1.0-alpha.12", "0.1.0a12")]
        {
            assert_eq!(python_version(ours).expect(ours), theirs);
        }
        for bad in ["1.2", "1.2.3-x.1", "1.2.3-rc", "1.2.3+a", "", "1.2.3-rc.x"] {
            assert!(python_version(bad).is_err(), "{bad}");
        }
    }
}
