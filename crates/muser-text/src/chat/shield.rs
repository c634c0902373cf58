//! Keeping what a conversation says from becoming a control token.
//!
//! The prompt is one string in which the template's own markers must be recognised and a user's `<|eot|>` must not. So,
//! before rendering, every place in a conversation's strings where a marker could start is rewritten with a
//! noncharacter, and the plain stretches of the rendered prompt are rewritten back before they are encoded. The model
//! sees exactly the user's characters, as ordinary text.
//!
//! It is places and not whole markers that are rewritten, since two harmless strings, or a string and the template's
//! text after it, may join to a marker. Text such as `</think>` that no marker starts with stays as it is, for templates
//! that look for it.
//!
//! The place of an image is written with the same escape, after the conversation was rewritten: so no text can make one.
//!
//! Code: `ESCAPE` + U+FDD1 + k stands for the k-th of the characters that markers start with, `ESCAPE` + `OWN` for an
//! `ESCAPE` of the conversation itself.

use crate::special_tokens::SpecialTokens;
use serde_json::{Map, Value};
use std::borrow::Cow;

const ESCAPE: char = '\u{fdd0}';
const FIRST_CODE: u32 = 0xfdd1;
const OWN: char = '\u{fdef}';
/// After `ESCAPE`: an image, whose number follows as a character from [`FIRST_NUMBER`] on.
const IMAGE: char = '\u{fdee}';
const FIRST_NUMBER: u32 = 0xf_0000;

/// Rewrites strings for one vocabulary.
pub(crate) struct Shield<'a> {
    specials: &'a SpecialTokens,
}

impl<'a> Shield<'a> {
    pub(crate) fn new(specials: &'a SpecialTokens) -> Shield<'a> {
        Shield { specials }
    }

    /// A copy in which no string, key or value, can start a marker.
    pub(crate) fn cover(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.cover_text(text).into_owned()),
            Value::Array(items) => items.iter().map(|item| self.cover(item)).collect(),
            Value::Object(fields) => Value::Object(
                fields
                    .iter()
                    .map(|(key, value)| (self.cover_text(key).into_owned(), self.cover(value)))
                    .collect::<Map<_, _>>(),
            ),
            other => other.clone(),
        }
    }

    fn cover_text<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut out = String::new();
        let mut copied = 0;
        for (at, c) in text.char_indices() {
            let code = if c == ESCAPE {
                OWN
            } else if self.specials.may_start(&text[at..]) {
                match self.specials.start_index(c).and_then(|index| char::from_u32(FIRST_CODE + index)) {
                    Some(code) => code,
                    None => continue,
                }
            } else {
                continue;
            };
            out.push_str(&text[copied..at]);
            out.push(ESCAPE);
            out.push(code);
            copied = at + c.len_utf8();
        }
        if copied == 0 {
            return Cow::Borrowed(text);
        }
        out.push_str(&text[copied..]);
        Cow::Owned(out)
    }

    /// What stands for image `number` of a conversation. To be put beside covered text.
    pub(crate) fn image(number: usize) -> String {
        let number = char::from_u32(FIRST_NUMBER + number as u32).unwrap_or(OWN);
        [ESCAPE, IMAGE, number].iter().collect()
    }

    /// Covered text up to the next image, the image's number, and what follows. `None`: no image.
    pub(crate) fn split_image(text: &str) -> Option<(&str, usize, &str)> {
        let mark = [ESCAPE, IMAGE].iter().collect::<String>();
        let at = text.find(&mark)?;
        let behind = &text[at + mark.len()..];
        let number = behind.chars().next()?;
        let index = (number as u32).checked_sub(FIRST_NUMBER)?;
        Some((&text[..at], index as usize, &behind[number.len_utf8()..]))
    }

    /// The original of covered text.
    pub(crate) fn lift(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find(ESCAPE) {
            out.push_str(&rest[..at]);
            rest = &rest[at + ESCAPE.len_utf8()..];
            let original = rest.chars().next().and_then(|code| match code {
                OWN => Some(ESCAPE),
                code => {
                    (code as u32).checked_sub(FIRST_CODE).and_then(|index| self.specials.start_char(index))
                }
            });
            // A template that cuts strings may have separated the two: then there is nothing to restore.
            if let Some(original) = original {
                out.push(original);
                rest = &rest[OWN.len_utf8()..];
            }
        }
        out.push_str(rest);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::special_tokens::Segment;
    use crate::test_support::tiny_tokenizer;
    use proptest::prelude::*;

    fn text() -> impl Strategy<Value = String> {
        let parts = [
            "<|eot|>",
            "<|start|>",
            "<",
            "|",
            "<|",
            "eot|>",
            "\u{fdd0}",
            "\u{fdd1}",
            "\u{fdef}",
            "a",
            "é",
            "<<|",
        ];
        proptest::collection::vec(proptest::sample::select(parts.to_vec()), 0..12)
            .prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn covered_text_lifts_to_itself_and_holds_no_marker(one in text(), two in text()) {
            let specials = tiny_tokenizer().specials();
            let shield = Shield::new(specials);
            let covered = format!("{}{}", shield.cover_text(&one), shield.cover_text(&two));
            let no_marker = specials.segments(&covered).all(|segment| matches!(segment, Segment::Plain(_)));
            prop_assert!(no_marker, "{:?}", covered);
            prop_assert_eq!(shield.lift(&covered), format!("{one}{two}"));
            // What follows from the template cannot complete a marker.
            let followed = format!("{covered}|eot|>");
            let no_marker = specials.segments(&followed).all(|segment| matches!(segment, Segment::Plain(_)));
            prop_assert!(no_marker, "{:?}", followed);
        }
    }

    #[test]
    fn other_angle_brackets_stay() {
        let shield = Shield::new(tiny_tokenizer().specials());
        assert_eq!(shield.cover_text("a < b </think> <x>"), "a < b </think> <x>");
    }
}
