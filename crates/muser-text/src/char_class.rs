//! Character classes of the pre-split rule, as a two-stage table over all of Unicode.
//!
//! The table is computed once per process (about a millisecond) from the Unicode tables of `regex-syntax`, so there is
//! no generated file to go stale, and the classes are those of the regular expressions that the rule is written in.

use regex_syntax::hir::{Class as HirClass, HirKind};
use std::sync::LazyLock;

/// Class of a character. The discriminants are small since the table stores them as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Class {
    /// Nothing of the following: punctuation, symbols, controls, unassigned.
    Other = 0,
    /// Upper or title case letter (Lu, Lt).
    Upper = 1,
    /// Lower case letter (Ll).
    Lower = 2,
    /// Letter without case (Lm, Lo): goes with upper and with lower case.
    Caseless = 3,
    /// Combining mark (M): goes with letters but is none.
    Mark = 4,
    /// Number (N).
    Number = 5,
    /// White space that is not a line break.
    Space = 6,
    /// Carriage return or line feed.
    LineBreak = 7,
}

impl Class {
    /// Letters and marks that can stand in the upper-case part of a word.
    pub(crate) fn in_upper_run(self) -> bool {
        matches!(self, Class::Upper | Class::Caseless | Class::Mark)
    }

    /// Letters and marks that can stand in the lower-case part of a word.
    pub(crate) fn in_lower_run(self) -> bool {
        matches!(self, Class::Lower | Class::Caseless | Class::Mark)
    }

    /// Letters and marks without case.
    pub(crate) fn in_both_runs(self) -> bool {
        matches!(self, Class::Caseless | Class::Mark)
    }

    /// May stand in front of a word: not a letter, a number or a line break.
    pub(crate) fn can_lead(self) -> bool {
        matches!(self, Class::Other | Class::Mark | Class::Space)
    }

    /// White space of any kind.
    pub(crate) fn is_space(self) -> bool {
        matches!(self, Class::Space | Class::LineBreak)
    }

    /// Neither white space, letter nor number.
    pub(crate) fn is_symbol(self) -> bool {
        matches!(self, Class::Other | Class::Mark)
    }
}

const BLOCK: usize = 256;
const BLOCKS: usize = 0x11_0000 / BLOCK;

/// The classes of all characters.
pub(crate) struct ClassTable {
    ascii: [Class; 128],
    block_of: Vec<u16>,
    blocks: Vec<Class>,
}

static TABLE: LazyLock<ClassTable> = LazyLock::new(ClassTable::build);

impl ClassTable {
    /// The one table of the process.
    pub(crate) fn get() -> &'static ClassTable {
        &TABLE
    }

    /// Class of the character that starts at `at`, and the position after it. `at` must be a character boundary
    /// before the end.
    #[inline]
    pub(crate) fn at(&self, text: &str, at: usize) -> Option<(Class, usize)> {
        let byte = *text.as_bytes().get(at)?;
        if byte < 128 {
            return Some((self.ascii[usize::from(byte)], at + 1));
        }
        let c = text[at..].chars().next()?;
        Some((self.of(c), at + c.len_utf8()))
    }

    /// Class of a character.
    #[inline]
    pub(crate) fn of(&self, c: char) -> Class {
        let code = c as usize;
        self.blocks[usize::from(self.block_of[code / BLOCK]) * BLOCK + code % BLOCK]
    }

    fn build() -> ClassTable {
        let mut flat = vec![Class::Other; 0x11_0000];
        let classes = [
            (r"[\p{Lu}\p{Lt}]", Class::Upper),
            (r"\p{Ll}", Class::Lower),
            (r"[\p{Lm}\p{Lo}]", Class::Caseless),
            (r"\p{M}", Class::Mark),
            (r"\p{N}", Class::Number),
            (r"\s", Class::Space),
            (r"[\r\n]", Class::LineBreak),
        ];
        for (pattern, class) in classes {
            for (first, last) in ranges(pattern) {
                flat[first as usize..=last as usize].fill(class);
            }
        }
        let mut table = ClassTable {
            ascii: std::array::from_fn(|code| flat[code]),
            block_of: Vec::with_capacity(BLOCKS),
            blocks: Vec::new(),
        };
        for block in flat.chunks_exact(BLOCK) {
            let known = table.blocks.chunks_exact(BLOCK).position(|other| other == block);
            let index = known.unwrap_or_else(|| {
                table.blocks.extend_from_slice(block);
                table.blocks.len() / BLOCK - 1
            });
            table.block_of.push(index as u16);
        }
        table
    }
}

/// The code points that a one-character pattern matches.
fn ranges(pattern: &str) -> Vec<(char, char)> {
    let hir = regex_syntax::parse(pattern)
        .expect("the patterns above are valid and the Unicode tables compiled in");
    match hir.into_kind() {
        HirKind::Class(HirClass::Unicode(class)) => {
            class.iter().map(|range| (range.start(), range.end())).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_characters() {
        let table = ClassTable::get();
        let cases = [
            ('A', Class::Upper),
            ('ǅ', Class::Upper),
            ('ß', Class::Lower),
            ('ª', Class::Caseless),
            ('你', Class::Caseless),
            ('\u{301}', Class::Mark),
            ('\u{93f}', Class::Mark),
            ('7', Class::Number),
            ('Ⅷ', Class::Number),
            ('\t', Class::Space),
            ('\u{3000}', Class::Space),
            ('\u{a0}', Class::Space),
            ('\r', Class::LineBreak),
            ('\n', Class::LineBreak),
            ('_', Class::Other),
            ('🙂', Class::Other),
            ('\u{10ffff}', Class::Other),
        ];
        for (c, class) in cases {
            assert_eq!(table.of(c), class, "{c:?}");
        }
    }

    #[test]
    fn the_table_is_small() {
        assert!(ClassTable::get().blocks.len() < 100_000, "{}", ClassTable::get().blocks.len());
    }
}
