//! The older log-probability object, of text completions: parallel lists, alternatives by text, and the place of each token
//! in the text.

use serde_json::{Map, Value, json};

use super::chat::answer::finite;
use crate::answer::{PromptToken, TokenLogprob};

/// One entry.
#[derive(Debug, Clone)]
pub struct Entry {
    bytes: Vec<u8>,
    logprob: Option<f32>,
    top: Vec<(Vec<u8>, f32)>,
    /// Not part of the text, as the token that begins every text is.
    hidden: bool,
}

impl From<&TokenLogprob> for Entry {
    fn from(token: &TokenLogprob) -> Self {
        let top = token.top.iter().map(|(_, bytes, logprob)| (bytes.clone(), *logprob)).collect();
        Self { bytes: token.bytes.clone(), logprob: Some(token.logprob), top, hidden: false }
    }
}

/// The entries of a prompt, with at most `top` alternatives each. `begins`: the first token was put before a text.
pub fn of_prompt(prompt: &[PromptToken], top: usize, begins: bool) -> Vec<Entry> {
    let entry = |(at, token): (usize, &PromptToken)| Entry {
        bytes: token.bytes.clone(),
        logprob: token.known.map(|(logprob, _)| logprob),
        top: token.top.iter().take(top).map(|(_, bytes, logprob)| (bytes.clone(), *logprob)).collect(),
        hidden: begins && at == 0,
    };
    prompt.iter().enumerate().map(entry).collect()
}

/// A token as text. One that is not whole characters is written so that no two look the same.
fn shown(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
            text
        }),
    }
}

/// Where the next token begins, in characters.
#[derive(Debug, Clone, Copy, Default)]
pub struct Place(usize);

impl Place {
    fn take(&mut self, entry: &Entry) -> usize {
        if entry.hidden {
            return self.0;
        }
        let begins = |byte: &&u8| **byte & 0xc0 != 0x80;
        // A token that goes on with a character begins where that one does.
        let inside = entry.bytes.first().is_some_and(|byte| !begins(&byte));
        let place = self.0 - usize::from(inside).min(self.0);
        self.0 += entry.bytes.iter().filter(begins).count();
        place
    }
}

/// The object; null without entries. `place` runs on from call to call.
pub fn object(entries: &[Entry], place: &mut Place) -> Value {
    if entries.is_empty() {
        return Value::Null;
    }
    let (mut tokens, mut values, mut top, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for entry in entries {
        offsets.push(place.take(entry));
        tokens.push(shown(&entry.bytes));
        values.push(entry.logprob.map(finite));
        top.push(entry.logprob.map(|logprob| {
            let mut map = Map::new();
            // The token itself is always among its alternatives.
            map.insert(shown(&entry.bytes), finite(logprob).into());
            for (bytes, logprob) in &entry.top {
                map.entry(shown(bytes)).or_insert_with(|| finite(*logprob).into());
            }
            map
        }));
    }
    json!({"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(bytes: &[u8]) -> Entry {
        Entry { bytes: bytes.to_vec(), logprob: Some(-1.0), top: vec![(b"z".to_vec(), -0.5)], hidden: false }
    }

    #[test]
    fn offsets_count_characters_and_run_on() {
        let mut place = Place::default();
        let beginning = Entry { hidden: true, logprob: None, top: Vec::new(), ..token(b"<|begin|>") };
        let first = object(&[beginning, token("ä".as_bytes()), token(&[0xf0, 0x9f])], &mut place);
        assert_eq!(first["text_offset"], json!([0, 0, 1]));
        assert_eq!(first["token_logprobs"], json!([null, -1.0, -1.0]));
        assert_eq!(first["top_logprobs"][0], Value::Null);
        assert_eq!(first["top_logprobs"][1], json!({"ä": -1.0, "z": -0.5}));
        assert_eq!(first["tokens"], json!(["<|begin|>", "ä", "bytes:\\xf0\\x9f"]));
        // The second half of the character, then what follows it.
        let rest = object(&[token(&[0x98, 0x80]), token(b"b")], &mut place);
        assert_eq!(rest["text_offset"], json!([1, 2]));
        assert_eq!(object(&[], &mut place), Value::Null);
    }
}
