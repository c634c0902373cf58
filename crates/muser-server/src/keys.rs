//! Keys: held as SHA-256 digests and compared in constant time, all of them on every request, so that neither the place of a
//! difference nor the number of the matching key shows in the time taken.

use subtle::{Choice, ConstantTimeEq as _};

use crate::owner::Owner;

/// The accepted keys.
#[derive(Debug, Clone, Default)]
pub struct Keys {
    digests: Vec<[u8; 32]>,
    shortest: usize,
}

impl Keys {
    /// Keys from text: one a line, blank lines and lines that start with `#` left out.
    pub fn from_lines(text: &str) -> Self {
        // Editors of some systems put a byte order mark before the first line.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let mut keys = Self { digests: Vec::new(), shortest: usize::MAX };
        for line in lines {
            keys.digests.push(digest(line.as_bytes()));
            keys.shortest = keys.shortest.min(line.len());
        }
        keys
    }

    /// Length of the shortest key in bytes.
    pub fn shortest(&self) -> usize {
        self.shortest
    }

    /// Whether no key is asked for.
    pub fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }

    /// Whether `candidate` is one of the keys.
    pub fn accept(&self, candidate: &[u8]) -> bool {
        self.owner_of(candidate).is_some()
    }

    /// Who has this key, if it is one.
    pub fn owner_of(&self, candidate: &[u8]) -> Option<Owner> {
        let candidate = digest(candidate);
        let mut found = Choice::from(0);
        for known in &self.digests {
            found |= known.ct_eq(&candidate);
        }
        bool::from(found).then(|| Owner::of_key(&candidate))
    }
}

/// What is kept of a key.
pub(crate) fn digest(bytes: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes).as_ref());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_whole_lines_only() {
        let keys = Keys::from_lines("# comment\n alpha \n\nbeta\n");
        assert!(keys.accept(b"alpha") && keys.accept(b"beta"));
        for wrong in [&b"alph"[..], b"alphabet", b"", b"# comment", b"ALPHA"] {
            assert!(!keys.accept(wrong));
        }
    }

    #[test]
    fn every_byte_of_a_digest_counts() {
        for (byte, bit) in (0..32).flat_map(|byte| [(byte, 1), (byte, 0x80)]) {
            let mut keys = Keys::from_lines("alpha\n");
            keys.digests[0][byte] ^= bit;
            assert!(!keys.accept(b"alpha"), "byte {byte}, bit {bit}");
        }
    }

    #[test]
    fn a_byte_order_mark_is_not_part_of_a_key() {
        assert!(Keys::from_lines("\u{feff}alpha\r\nbeta\r\n").accept(b"alpha"));
        assert!(Keys::from_lines("\u{feff}# only a comment\n").is_empty());
    }
}
