//! Whether what comes is a model file: the first bytes say, long before the last ones are there.

/// Bytes of the smallest GGUF head: magic, version, two counts.
pub(crate) const HEAD_BYTES: usize = 24;

/// Versions that exist.
const VERSIONS: std::ops::RangeInclusive<u32> = 1..=3;

/// What the bytes look like if they do not begin a GGUF file. `all`: nothing comes after them.
pub(crate) fn fault(head: &[u8], all: bool) -> Option<String> {
    const MAGIC: &[u8] = b"GGUF";
    let text = String::from_utf8_lossy(head.get(..HEAD_BYTES.min(head.len())).unwrap_or_default());
    let text = text.trim_start_matches(['\u{feff}', ' ', '\t', '\r', '\n']);
    let found = if head.is_empty() {
        "an empty file"
    } else if text.starts_with('<') {
        "a web page"
    } else if text.starts_with("version https") {
        "a pointer to a file that is kept elsewhere (Git LFS)"
    } else if text.starts_with(['{', '[', '"']) {
        "a JSON text, probably an error"
    } else if !head.starts_with(MAGIC) {
        "other bytes"
    } else if head.len() < HEAD_BYTES {
        "a GGUF file that ends in its head"
    } else {
        let version = head[4..8].iter().rev().fold(0_u32, |version, byte| version << 8 | u32::from(*byte));
        // The other byte order is a GGUF file too, if one that nothing here can read.
        return (!VERSIONS.contains(&version) && !VERSIONS.contains(&version.swap_bytes()))
            .then(|| format!("a GGUF file of version {version}"));
    };
    // Too few bytes to tell may be the beginning of the right ones.
    let may_go_on =
        !all && head.len() < HEAD_BYTES && (head.is_empty() || MAGIC.starts_with(&head[..head.len().min(4)]));
    (!may_go_on).then(|| found.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_model_is_called_by_its_name() {
        let check = |head: &[u8], sign: &str| {
            let found = fault(head, true).unwrap_or_default();
            assert!(found.contains(sign), "{head:?}: {found}");
        };
        check(b"", "empty");
        check(b"<!doctype html><html><head>", "web page");
        check(b"\n\n  <html>", "web page");
        check(b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS");
        check(b"{\"error\": \"not found\"}", "JSON");
        check(b"\xef\xbb\xbf[]", "JSON");
        check(b"GGUF\x03\0\0\0", "ends in its head");
        check(b"GGUF\x09\0\0\0................", "version 9");
        check(b"PK\x03\x04........................", "other bytes");
        let good = b"GGUF\x03\0\0\0................";
        assert_eq!((fault(good, true), fault(good, false)), (None, None));
        for few in 0..good.len() {
            assert_eq!(fault(&good[..few], false), None, "{few} bytes");
        }
        assert!(fault(b"<", false).is_some());
    }
}
