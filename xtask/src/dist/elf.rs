//! What an executable needs of the machine it will run on, and what it gives away of the one that made it.

/// The newest version of the C library whose symbols are bound, as (major, minor): versions are strings `GLIBC_2.N` in the table of
/// names, so the whole file is searched for them. `None` where there are none: no glibc, or a static program.
pub(crate) fn newest_glibc(executable: &[u8]) -> Option<(u32, u32)> {
    const MARK: &[u8] = b"GLIBC_";
    let versions = positions(executable, MARK).filter_map(|at| {
        let rest = &executable[at + MARK.len()..];
        let end = rest.iter().position(|&byte| byte == 0).filter(|&end| end < 16)?;
        let mut numbers = std::str::from_utf8(&rest[..end]).ok()?.split('.').map(str::parse::<u32>);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    versions.max()
}

/// Is this word in there?
pub(crate) fn mentions(bytes: &[u8], word: &str) -> bool {
    positions(bytes, word.as_bytes()).next().is_some()
}

fn positions<'a>(bytes: &'a [u8], word: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let first = word.first().copied();
    bytes
        .iter()
        .enumerate()
        .filter_map(move |(at, byte)| (Some(*byte) == first && bytes[at..].starts_with(word)).then_some(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_counts_by_number() {
        let file = b"\x7fELF\0GLIBC_2.9\0GLIBC_2.28\0GLIBC_2.2.5\0GLIBC_PRIVATE\0GLIBC_2.99";
        assert_eq!(newest_glibc(file), Some((2, 28)));
        assert_eq!(newest_glibc(b"\x7fELF\0nothing"), None);
        assert_eq!(newest_glibc(b""), None);
    }

    #[test]
    fn words_are_found_anywhere() {
        assert!(mentions(b"ab/home/x/src", "/home/x"));
        assert!(!mentions(b"ab/home/y/src", "/home/x"));
        assert!(mentions(b"aab", "ab") && !mentions(b"a", "ab"));
    }
}
