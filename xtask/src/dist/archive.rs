//! The containers that packages are: tar with gzip, `ar`, and their reproducible headers.

use std::io::Write as _;

use anyhow::{Context as _, Result};
use flate2::Compression;
use flate2::write::GzEncoder;

use super::contents::{Contents, Entry};

/// The archive of a release: everything below one folder.
pub(crate) fn tarball(contents: &Contents, level: Compression) -> Result<Vec<u8>> {
    let stem = contents.stem();
    tar_gz(&contents.entries, &format!("{stem}/"), contents.time, level)
}

/// A compressed tar of these files, sorted, with the folders that they need; all owned by root.
pub(crate) fn tar_gz(entries: &[Entry], prefix: &str, time: u64, level: Compression) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), level));
    let header = |kind: tar::EntryType, mode: u32, size: usize| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(size as u64);
        header.set_mtime(time);
        header.set_uid(0);
        header.set_gid(0);
        header
    };
    let mut folders = std::collections::BTreeSet::new();
    let mut sorted: Vec<&Entry> = entries.iter().collect();
    sorted.sort_by(|a, b| a.place.cmp(&b.place));
    for entry in sorted {
        let name = format!("{prefix}{}", entry.place);
        for (at, _) in name.match_indices('/').filter(|(at, _)| *at > 0) {
            let folder = &name[..=at];
            if folders.insert(folder.to_owned()) {
                let mut header = header(tar::EntryType::Directory, 0o755, 0);
                append(&mut tar, &mut header, folder, &[])?;
            }
        }
        let mut header = header(tar::EntryType::Regular, entry.mode, entry.bytes.len());
        append(&mut tar, &mut header, &name, &entry.bytes)?;
    }
    Ok(tar.into_inner()?.finish()?)
}

/// Names as they are: the library's own way would take a leading `./` away, which Debian's tools expect.
fn append(
    tar: &mut tar::Builder<GzEncoder<Vec<u8>>>,
    header: &mut tar::Header,
    name: &str,
    bytes: &[u8],
) -> Result<()> {
    let field = &mut header.as_old_mut().name;
    if name.len() >= field.len() {
        return tar.append_data(header, name, bytes).with_context(|| name.to_owned());
    }
    field[..name.len()].copy_from_slice(name.as_bytes());
    header.set_cksum();
    tar.append(header, bytes).with_context(|| name.to_owned())
}

pub(crate) fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut out = GzEncoder::new(Vec::new(), Compression::best());
    out.write_all(bytes)?;
    Ok(out.finish()?)
}

/// Debian's outer container: members in order, each behind 60 bytes, on even offsets.
pub(crate) fn ar(members: &[(&str, &[u8])], time: u64) -> Vec<u8> {
    let mut out = b"!<arch>\n".to_vec();
    for (name, bytes) in members {
        let header = format!("{name:<16}{time:<12}{:<6}{:<6}{:<8}{:<10}`\n", 0, 0, 100_644, bytes.len());
        debug_assert_eq!(header.len(), 60);
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(bytes);
        if bytes.len() % 2 == 1 {
            out.push(b'\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn order_of_entries_and_clock_do_not_matter() {
        let entry = |place: &str, mode| Entry::new(place, mode, place.as_bytes().to_vec());
        let one = [entry("bin/a", 0o755), entry("share/doc/a/b", 0o644)];
        let other = [entry("share/doc/a/b", 0o644), entry("bin/a", 0o755)];
        let make =
            |entries: &[Entry]| tar_gz(entries, "x/", 1_700_000_000, Compression::best()).expect("a tar");
        assert_eq!(make(&one), make(&other));
        let bytes = make(&one);
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(&*bytes));
        let mut seen = Vec::new();
        for file in archive.entries().expect("entries") {
            let mut file = file.expect("an entry");
            let mut text = String::new();
            file.read_to_string(&mut text).expect("text");
            let header = file.header();
            assert_eq!((header.uid().ok(), header.gid().ok()), (Some(0), Some(0)));
            assert_eq!(header.mtime().ok(), Some(1_700_000_000));
            let name = String::from_utf8_lossy(&file.path_bytes()).into_owned();
            seen.push((name, header.mode().expect("a mode"), text));
        }
        let names: Vec<&str> = seen.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(
            names,
            ["x/", "x/bin/", "x/bin/a", "x/share/", "x/share/doc/", "x/share/doc/a/", "x/share/doc/a/b"]
        );
        assert_eq!((seen[2].1, seen[2].2.as_str()), (0o755, "bin/a"));
    }

    #[test]
    fn long_names_survive() {
        let place = format!("share/{}/file", "n".repeat(150));
        let bytes = tar_gz(&[Entry::new(&place, 0o644, vec![1])], "", 0, Compression::none()).expect("a tar");
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(&*bytes));
        let last = archive.entries().expect("entries").last().expect("one").expect("good");
        assert_eq!(last.path().expect("a path").display().to_string(), place);
    }

    #[test]
    fn members_start_on_even_offsets() {
        let bytes = ar(&[("a", b"x"), ("b", b"yz")], 7);
        assert_eq!(bytes.len(), 8 + 60 + 2 + 60 + 2);
        assert_eq!(&bytes[8..24], b"a               ");
        assert_eq!(&bytes[66..70], b"`\nx\n");
        assert_eq!(&bytes[70..72], b"b ");
    }
}
