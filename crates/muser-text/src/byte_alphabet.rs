//! The printable alphabet in which byte-level vocabularies store bytes.
//!
//! Every byte has one character: printable Latin-1 bytes stand for themselves, the other 68 take the characters from
//! U+0100 on in byte order. So a space is `Ġ` (U+0120) and a newline `Ċ` (U+010A). The map is a bijection: two entries
//! with different text are different bytes.

/// Characters above this one are outside the alphabet.
const ALPHABET_END: usize = 0x100 + 68;

/// Is the byte its own character?
const fn stands_for_itself(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// Character code to byte; 0xffff for characters outside the alphabet.
const BYTE_OF: [u16; ALPHABET_END] = {
    let mut table = [0xffff_u16; ALPHABET_END];
    let mut next = 0x100;
    let mut byte = 0;
    while byte < 256 {
        if stands_for_itself(byte as u8) {
            table[byte] = byte as u16;
        } else {
            table[next] = byte as u16;
            next += 1;
        }
        byte += 1;
    }
    table
};

/// Appends the bytes that `text` spells to `out`; the first character outside the alphabet is the error.
pub(crate) fn decode_into(text: &str, out: &mut Vec<u8>) -> Result<(), char> {
    for c in text.chars() {
        match BYTE_OF.get(c as usize) {
            Some(&byte) if byte != 0xffff => out.push(byte as u8),
            _ => return Err(c),
        }
    }
    Ok(())
}

/// The spelling of `bytes` in the alphabet.
pub fn spell_bytes(bytes: &[u8]) -> String {
    let mut others = Vec::new();
    for byte in 0..=255_u8 {
        if !stands_for_itself(byte) {
            others.push(byte);
        }
    }
    bytes
        .iter()
        .map(|&byte| {
            if stands_for_itself(byte) {
                char::from(byte)
            } else {
                let index = others.binary_search(&byte).unwrap_or_default() as u32;
                char::from_u32(0x100 + index).unwrap_or(char::REPLACEMENT_CHARACTER)
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_survive_the_round_trip() {
        let bytes: Vec<u8> = (0..=255).collect();
        let text = spell_bytes(&bytes);
        assert_eq!(text.chars().count(), 256);
        let mut back = Vec::new();
        assert_eq!(decode_into(&text, &mut back), Ok(()));
        assert_eq!(back, bytes);
    }

    #[test]
    fn known_characters() {
        assert_eq!(spell_bytes(b" a\n"), "ĠaĊ");
        assert_eq!(decode_into("a b", &mut Vec::new()), Err(' '));
        assert_eq!(decode_into("日", &mut Vec::new()), Err('日'));
    }
}
