//! Bytes to text, as they come.
//!
//! A character may be cut between tokens, so bytes that could still become one are held back until they are complete or
//! cannot become one any more. Invalid bytes are replaced as the Unicode standard recommends (and as browsers and
//! Python do): one U+FFFD for each longest prefix of a valid sequence, one for each other byte.

/// Joins byte strings to text. It allocates nothing by itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Utf8Joiner {
    /// The start of a character, at most three bytes; the fourth is that which completes it.
    held: [u8; 4],
    len: usize,
}

impl Utf8Joiner {
    /// Adds bytes; what is complete is appended to `out`.
    pub fn push(&mut self, mut bytes: &[u8], out: &mut String) {
        while self.len > 0 {
            let Some((&next, rest)) = bytes.split_first() else { return };
            self.held[self.len] = next;
            match std::str::from_utf8(&self.held[..=self.len]) {
                Ok(character) => {
                    out.push_str(character);
                    self.len = 0;
                    bytes = rest;
                }
                Err(error) if error.error_len().is_none() => {
                    self.len += 1;
                    bytes = rest;
                }
                // The byte is none of this character: the start alone is replaced, and the byte looked at again.
                Err(_) => self.flush(out),
            }
        }
        let rest = append_valid(bytes, out);
        self.held[..rest.len()].copy_from_slice(rest);
        self.len = rest.len();
    }

    /// The stream ends, or a marker follows: a half character becomes U+FFFD.
    pub fn flush(&mut self, out: &mut String) {
        if self.len > 0 {
            out.push(char::REPLACEMENT_CHARACTER);
            self.len = 0;
        }
    }
}

/// Appends all of `bytes` but an incomplete character at the end, which is returned.
fn append_valid<'a>(mut bytes: &'a [u8], out: &mut String) -> &'a [u8] {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(text) => {
                out.push_str(text);
                return &[];
            }
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                out.push_str(&String::from_utf8_lossy(valid));
                match error.error_len() {
                    None => return rest,
                    Some(len) => {
                        out.push(char::REPLACEMENT_CHARACTER);
                        bytes = &rest[len..];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(bytes: &[u8], expected: &str) {
        assert_eq!(
            String::from_utf8_lossy(bytes),
            expected,
            "the standard library agrees with the expectation"
        );
        for cut in 0..=bytes.len() {
            let mut joiner = Utf8Joiner::default();
            let mut out = String::new();
            joiner.push(&bytes[..cut], &mut out);
            joiner.push(&bytes[cut..], &mut out);
            joiner.flush(&mut out);
            assert_eq!(out, expected, "cut at {cut}");
        }
    }

    #[test]
    fn invalid_bytes_are_replaced_as_recommended() {
        check(&[0xed, 0xa0, 0x80], "\u{fffd}\u{fffd}\u{fffd}");
        check(&[0xf0, 0x80, 0x80, 0x41], "\u{fffd}\u{fffd}\u{fffd}A");
        check(&[0xe2, 0x80, 0x41], "\u{fffd}A");
        check(&[0xf0, 0x9f, 0x98], "\u{fffd}");
        check("a🙂é你".as_bytes(), "a🙂é你");
    }

    /// A half character before a marker is replaced once, and forgotten.
    #[test]
    fn a_flushed_half_is_forgotten() {
        let mut joiner = Utf8Joiner::default();
        let mut out = String::new();
        joiner.push(&[0xf0, 0x9f], &mut out);
        joiner.flush(&mut out);
        joiner.flush(&mut out);
        joiner.push(b"x", &mut out);
        joiner.push(&[0x99, 0x82], &mut out);
        joiner.flush(&mut out);
        assert_eq!(out, "\u{fffd}x\u{fffd}\u{fffd}");
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(bytes in proptest::collection::vec(any::<u8>(), 0..40), size in 1..6_usize) {
            let mut joiner = Utf8Joiner::default();
            let mut out = String::new();
            for chunk in bytes.chunks(size) {
                joiner.push(chunk, &mut out);
                prop_assert!(joiner.len < 4);
            }
            joiner.flush(&mut out);
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn a_half_character_is_forgotten_where_it_was_replaced() {
        for half in [&b"\xF0\x9F"[..], b"\xF0", b"\xE7\x95", b"\xC3"] {
            let (mut joiner, mut out) = (Utf8Joiner::default(), String::new());
            joiner.push(half, &mut out);
            assert_eq!(out, "");
            // A marker comes: what could have become a character cannot any more.
            joiner.flush(&mut out);
            joiner.flush(&mut out);
            joiner.push(b"x", &mut out);
            joiner.flush(&mut out);
            assert_eq!(out, "\u{FFFD}x", "{half:?}");
        }
    }
}
