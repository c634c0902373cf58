//! A Debian package: program, pages, completions, unit and account.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use flate2::Compression;
use md5::{Digest as _, Md5};

use super::contents::{Contents, EXECUTABLE, Entry, MAN};
use super::{archive, elf, hex, sbom};

/// Configuration that people edit, and that an upgrade asks about.
const CONFIGURATION: &str = "etc/muser/muser.env";

/// Name of the file, and its bytes.
pub(crate) fn make(
    root: &Path,
    contents: &Contents,
    maintainer: &str,
    level: Compression,
) -> Result<(String, Vec<u8>)> {
    let architecture = contents.target.debian.context("Debian has no such target")?;
    // A version before the release sorts before it.
    let version = contents.version.replace('-', "~");
    let files = files(contents, maintainer, &version)?;
    let mut sums = String::new();
    for file in files.iter().filter(|file| file.place != CONFIGURATION) {
        let _ = writeln!(sums, "{}  {}", hex(&Md5::digest(&file.bytes)), file.place);
    }
    let size: usize = files.iter().map(|file| file.bytes.len().div_ceil(1024)).sum();
    let control = control(contents, maintainer, &version, architecture, size)?;
    let mut parts = vec![
        Entry::new("control", 0o644, control.into_bytes()),
        Entry::new("md5sums", 0o644, sums.into_bytes()),
        Entry::new("conffiles", 0o644, format!("/{CONFIGURATION}\n").into_bytes()),
    ];
    for name in ["postinst", "prerm", "postrm"] {
        let path = root.join("packaging/debian").join(name);
        parts.push(Entry::new(
            name,
            0o755,
            std::fs::read(&path).with_context(|| path.display().to_string())?,
        ));
    }
    let control = archive::tar_gz(&parts, "./", contents.time, Compression::best())?;
    let data = archive::tar_gz(&files, "./", contents.time, level)?;
    let members: [(&str, &[u8]); 3] =
        [("debian-binary", b"2.0\n"), ("control.tar.gz", &control), ("data.tar.gz", &data)];
    Ok((format!("muser_{version}_{architecture}.deb"), archive::ar(&members, contents.time)))
}

fn control(
    contents: &Contents,
    maintainer: &str,
    version: &str,
    architecture: &str,
    size: usize,
) -> Result<String> {
    let executable = contents.bytes_of(EXECUTABLE)?;
    let mut depends = Vec::new();
    if let Some((major, minor)) = contents.glibc {
        depends.push(format!("libc6 (>= {major}.{minor})"));
    }
    if elf::mentions(executable, "libgcc_s.so.1") {
        depends.push("libgcc-s1".to_owned());
    }
    Ok(format!(
        "Package: muser\nVersion: {version}\nArchitecture: {architecture}\nMaintainer: {maintainer}\nInstalled-Size: \
         {size}\nDepends: {}\nSuggests: libvulkan1\nSection: science\nPriority: optional\nDescription: inference engine for \
         Muse Glimmer models\n Answers prompts, chats, and serves models over HTTP in the shapes of OpenAI,\n Anthropic, Ollama and \
         llama-server, on CPUs and on GPUs with CUDA or Vulkan.\n A small model comes with it. The service is not started by \
         itself.\n",
        depends.join(", ")
    ))
}

/// The same files where Debian wants them, and what it wants besides.
fn files(contents: &Contents, maintainer: &str, version: &str) -> Result<Vec<Entry>> {
    let mut files = Vec::new();
    for entry in &contents.entries {
        let (place, mode) = match entry.place.as_str() {
            page if page.starts_with(MAN) => {
                files.push(Entry::new(&format!("usr/{page}.gz"), 0o644, archive::gzip(&entry.bytes)?));
                continue;
            }
            "share/zsh/site-functions/_muser" => {
                ("usr/share/zsh/vendor-completions/_muser".to_owned(), 0o644)
            }
            "share/muser/systemd/muser.service" => ("usr/lib/systemd/system/muser.service".to_owned(), 0o644),
            "share/muser/systemd/muser.sysusers.conf" => ("usr/lib/sysusers.d/muser.conf".to_owned(), 0o644),
            "share/muser/systemd/muser.env" => (CONFIGURATION.to_owned(), 0o640),
            // They are in `copyright`.
            "share/doc/muser/LICENSE-APACHE" | "share/doc/muser/LICENSE-MIT" => continue,
            other => (format!("usr/{other}"), entry.mode),
        };
        files.push(Entry::new(&place, mode, entry.bytes.clone()));
    }
    let mit = String::from_utf8_lossy(contents.bytes_of("share/doc/muser/LICENSE-MIT")?).into_owned();
    let copyright = format!(
        "Copyright {} the authors of muser.\n\nmuser is licensed under the Apache License 2.0, whose text is in\n\
         /usr/share/common-licenses/Apache-2.0, or under the following terms, at your choice.\nWhat others have written in it: /usr/share/doc/muser/THIRD-PARTY.txt.\n\n{mit}",
        sbom::date(contents.time).0
    );
    files.push(Entry::new("usr/share/doc/muser/copyright", 0o644, copyright.into_bytes()));
    let changelog = format!(
        "muser ({version}) unstable; urgency=medium\n\n  * See /usr/share/doc/muser/CHANGELOG.md.\n\n -- {maintainer}  {}\n",
        mail_date(contents.time)
    );
    files.push(Entry::new("usr/share/doc/muser/changelog.gz", 0o644, archive::gzip(changelog.as_bytes())?));
    files.sort_by(|a, b| a.place.cmp(&b.place));
    Ok(files)
}

/// `Tue, 14 Nov 2023 22:13:20 +0000`.
fn mail_date(seconds: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (year, month, day) = sbom::date(seconds);
    let time = &sbom::timestamp(seconds)[11..19];
    let (weekday, month) = (DAYS[(seconds / 86_400 % 7) as usize], MONTHS[(month - 1) as usize]);
    format!("{weekday}, {day:02} {month} {year} {time} +0000")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read as _;

    use super::*;
    use crate::dist::contents::tests::some;

    fn member<'a>(deb: &'a [u8], name: &str) -> &'a [u8] {
        let mut at = 8;
        while at < deb.len() {
            let header = std::str::from_utf8(&deb[at..at + 60]).expect("a header");
            let size: usize = header[48..58].trim().parse().expect("a size");
            if header[..16].trim() == name {
                return &deb[at + 60..at + 60 + size];
            }
            at += 60 + size + size % 2;
        }
        panic!("no {name}")
    }

    fn unpacked(tar_gz: &[u8]) -> BTreeMap<String, (u32, Vec<u8>)> {
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(tar_gz));
        let entries = archive.entries().expect("entries");
        let files = entries.map(|entry| {
            let mut entry = entry.expect("an entry");
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).expect("readable");
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            (name, (entry.header().mode().expect("a mode"), bytes))
        });
        files.collect()
    }

    #[test]
    fn everything_is_where_debian_looks() {
        let root = crate::root();
        let maintainer = "A <a@b.invalid>";
        let (name, deb) =
            make(&root, &some(Some((2, 28))), maintainer, Compression::fast()).expect("a package");
        assert_eq!(name, "muser_1.2.3_amd64.deb");
        assert_eq!(make(&root, &some(Some((2, 28))), maintainer, Compression::fast()).expect("again").1, deb);
        assert_eq!(member(&deb, "debian-binary"), b"2.0\n");
        let control = unpacked(member(&deb, "control.tar.gz"));
        let text = String::from_utf8_lossy(&control["./control"].1).into_owned();
        assert!(
            text.contains("\nDepends: libc6 (>= 2.28), libgcc-s1\n")
                && text.contains("\nMaintainer: A <a@b.invalid>\n")
        );
        assert_eq!(control["./postinst"].0, 0o755);
        assert_eq!(control["./conffiles"].1, b"/etc/muser/muser.env\n");
        let data = unpacked(member(&deb, "data.tar.gz"));
        assert_eq!(data["./usr/bin/muser"].0, 0o755);
        assert_eq!(data["./etc/muser/muser.env"].0, 0o640);
        for place in [
            "./usr/lib/systemd/system/muser.service",
            "./usr/lib/sysusers.d/muser.conf",
            "./usr/share/man/man1/muser.1.gz",
            "./usr/share/doc/muser/copyright",
            "./usr/share/doc/muser/changelog.gz",
            "./usr/share/muser/systemd/muser.service.d/cuda.conf",
        ] {
            assert!(data.contains_key(place), "{place}: {:?}", data.keys());
        }
        let sums = String::from_utf8_lossy(&control["./md5sums"].1).into_owned();
        let files = data.iter().filter(|(name, _)| !name.ends_with('/')).count();
        assert_eq!(sums.lines().count(), files - 1, "all but the configuration");
        for line in sums.lines() {
            let (sum, name) = line.split_once("  ").expect("two columns");
            assert_eq!(sum, hex(&Md5::digest(&data[&format!("./{name}")].1)), "{name}");
        }
    }

    #[test]
    fn versions_before_a_release_sort_before_it() {
        let mut contents = some(Some((2, 28)));
        contents.version = "1.0.0-rc.1".to_owned();
        let (name, _) =
            make(&crate::root(), &contents, "A <a@b.invalid>", Compression::none()).expect("a package");
        assert_eq!(name, "muser_1.0.0~rc.1_amd64.deb");
    }

    #[test]
    fn dates_are_those_of_mail() {
        assert_eq!(mail_date(1_700_000_000), "Tue, 14 Nov 2023 22:13:20 +0000");
        assert_eq!(mail_date(0), "Thu, 01 Jan 1970 00:00:00 +0000");
    }
}
