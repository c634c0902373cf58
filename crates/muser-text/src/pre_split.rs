//! Cutting text into the pieces that are encoded one by one.
//!
//! The rule is the o200k pattern, tried alternative by alternative at each position as a backtracking regular
//! expression does:
//!
//! ```text
//! 1  [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
//! 2  [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
//! 3  \p{N}{1,3}
//! 4  [ ]?[^\s\p{L}\p{N}]+[\r\n/]*
//! 5  \s*[\r\n]+
//! 6  \s+(?!\S)
//! 7  \s+
//! ```
//!
//! Written by hand over a class table it runs several times faster than a regular expression, and in linear time: a
//! stretch of text is looked at a bounded number of times whatever it is. The tests compare it with a backtracking
//! engine on the pattern itself.
//!
//! Why this pattern and not the rewritten one of llama.cpp: with combining marks the two differ, and the model was
//! trained on this one.

use crate::char_class::{Class, ClassTable};

/// Cuts `text` into pieces. Their concatenation is `text`; none is empty.
pub(crate) struct Pieces<'a> {
    text: &'a str,
    at: usize,
    table: &'static ClassTable,
}

impl<'a> Pieces<'a> {
    pub(crate) fn new(text: &'a str) -> Pieces<'a> {
        Pieces { text, at: 0, table: ClassTable::get() }
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a str;

    #[inline]
    fn next(&mut self) -> Option<&'a str> {
        let start = self.at;
        let (class, after) = self.table.at(self.text, start)?;
        let end = self
            .word(class, start, after)
            .or_else(|| self.number(class, after))
            .or_else(|| self.symbols(class, start, after))
            .unwrap_or_else(|| self.spaces(start));
        self.at = end;
        Some(&self.text[start..end])
    }
}

impl Pieces<'_> {
    /// Alternatives 1 and 2. `class` is that of the character from `start` to `after`.
    fn word(&self, class: Class, start: usize, after: usize) -> Option<usize> {
        let letters = if class.can_lead() { after } else { start };
        // The upper-case part, greedily, remembering the end of its last caseless character.
        let mut end = letters;
        let mut last_caseless_end = None;
        while let Some((class, next)) = self.table.at(self.text, end) {
            if class.in_upper_run() {
                end = next;
                if class.in_both_runs() {
                    last_caseless_end = Some(end);
                }
            } else if class == Class::Lower {
                return Some(self.contraction(self.lower_run(next)));
            } else {
                break;
            }
        }
        // The lower-case part needs one character: backtracking gives back the upper-case part down to its last
        // caseless character, and what was given back is all upper case, so that the piece ends there.
        if let Some(end) = last_caseless_end {
            return Some(self.contraction(end));
        }
        // Next, backtracking gives back the leading character: a mark is a word of its own.
        if class == Class::Mark {
            return Some(self.contraction(after));
        }
        // Alternative 2: upper case only.
        (end > letters).then(|| self.contraction(end))
    }

    fn lower_run(&self, mut end: usize) -> usize {
        while let Some((class, next)) = self.table.at(self.text, end) {
            if !class.in_lower_run() {
                break;
            }
            end = next;
        }
        end
    }

    /// The end of an English contraction that starts at `end`, else `end`.
    fn contraction(&self, end: usize) -> usize {
        let rest = &self.text.as_bytes()[end..];
        let letter = |at: usize| rest.get(at).map(u8::to_ascii_lowercase);
        if rest.first() != Some(&b'\'') {
            return end;
        }
        match (letter(1), letter(2)) {
            (Some(b's' | b't' | b'm' | b'd'), _) => end + 2,
            (Some(b'r' | b'v'), Some(b'e')) | (Some(b'l'), Some(b'l')) => end + 3,
            // The long s folds to s.
            _ if rest[1..].starts_with("ſ".as_bytes()) => end + 3,
            _ => end,
        }
    }

    /// Alternative 3.
    fn number(&self, class: Class, after: usize) -> Option<usize> {
        if class != Class::Number {
            return None;
        }
        let mut end = after;
        for _ in 1..3 {
            match self.table.at(self.text, end) {
                Some((Class::Number, next)) => end = next,
                _ => break,
            }
        }
        Some(end)
    }

    /// Alternative 4.
    fn symbols(&self, class: Class, start: usize, after: usize) -> Option<usize> {
        let first = if self.text.as_bytes()[start] == b' ' { after } else { start };
        let mut end = first;
        while let Some((class, next)) = self.table.at(self.text, end) {
            if !class.is_symbol() {
                break;
            }
            end = next;
        }
        debug_assert!(class.is_symbol() || class.is_space());
        if end == first {
            return None;
        }
        let tail = &self.text.as_bytes()[end..];
        Some(end + tail.iter().take_while(|byte| matches!(byte, b'\r' | b'\n' | b'/')).count())
    }

    /// Alternatives 5, 6 and 7: `start` is white space.
    fn spaces(&self, start: usize) -> usize {
        let mut end = start;
        let mut last_start = start;
        let mut last_break_end = None;
        while let Some((class, next)) = self.table.at(self.text, end) {
            if !class.is_space() {
                break;
            }
            last_start = end;
            end = next;
            if class == Class::LineBreak {
                last_break_end = Some(end);
            }
        }
        if let Some(end) = last_break_end {
            end
        } else if end < self.text.len() && last_start > start {
            // Text follows: the last white space belongs to it.
            last_start
        } else {
            end
        }
    }
}

#[cfg(test)]
mod tests;
