//! Finding markers such as `<|eot|>` in text.
//!
//! Only asked for where the text is trusted to hold markers: a rendered template, a raw prompt. The leftmost match wins
//! and of several there the longest, as in the model's own tokenizer.

use crate::error::TextError;
use crate::vocabulary::{TOKENS_KEY, TokenKind, Vocabulary};
use aho_corasick::{AhoCorasick, MatchKind};
use hashbrown::{HashMap, HashSet};

/// There are as many noncharacters to stand for them in shielded text.
const MAX_START_CHARS: usize = 28;

/// All markers of a vocabulary.
#[derive(Debug)]
pub(crate) struct SpecialTokens {
    automaton: AhoCorasick,
    /// Id of each pattern of the automaton.
    ids: Vec<u32>,
    by_text: HashMap<String, u32>,
    /// The first two characters of every marker (or its one).
    starts: HashSet<(char, Option<char>)>,
    /// The different first characters, in the order of their markers.
    start_chars: Vec<char>,
}

/// A stretch of text between markers, or a marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segment<'a> {
    Plain(&'a str),
    Special(u32),
}

impl SpecialTokens {
    pub(crate) fn collect(vocabulary: &Vocabulary) -> Result<SpecialTokens, TextError> {
        let mut ids = Vec::new();
        let mut texts = Vec::new();
        let mut by_text = HashMap::new();
        let mut starts = HashSet::new();
        let mut start_chars = Vec::new();
        for id in 0..vocabulary.len() as u32 {
            if !matches!(vocabulary.kind(id), Some(TokenKind::Control | TokenKind::UserDefined)) {
                continue;
            }
            let bytes = vocabulary.token_bytes(id).unwrap_or_default();
            let text = String::from_utf8_lossy(bytes).into_owned();
            if let Some(first) = by_text.insert(text.clone(), id) {
                return Err(TextError::vocabulary(
                    format!("{TOKENS_KEY}[{id}]"),
                    "a marker that is not there yet",
                    format!("{text:?}, the same as token {first}"),
                ));
            }
            let mut chars = text.chars();
            if let Some(first) = chars.next() {
                starts.insert((first, chars.next()));
                if !start_chars.contains(&first) {
                    start_chars.push(first);
                }
                if start_chars.len() > MAX_START_CHARS {
                    return Err(TextError::vocabulary(
                        TOKENS_KEY,
                        format!("markers that start with at most {MAX_START_CHARS} different characters"),
                        format!("one more, {text:?} at {id}"),
                    ));
                }
            }
            ids.push(id);
            texts.push(text);
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .kind(Some(aho_corasick::AhoCorasickKind::ContiguousNFA))
            .build(&texts)
            .map_err(|e| {
                TextError::vocabulary(TOKENS_KEY, "markers that fit one automaton", e.to_string())
            })?;
        Ok(SpecialTokens { automaton, ids, by_text, starts, start_chars })
    }

    /// The marker of exactly this text.
    pub(crate) fn find(&self, text: &str) -> Option<u32> {
        self.by_text.get(text).copied()
    }

    /// Cuts `text` at its markers.
    pub(crate) fn segments<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Segment<'a>> {
        let mut at = 0;
        let mut matches = self.automaton.find_iter(text);
        let mut pending = None;
        std::iter::from_fn(move || {
            loop {
                if let Some(segment) = pending.take() {
                    return Some(segment);
                }
                let (plain, special) = match matches.next() {
                    Some(found) => {
                        let plain = &text[at..found.start()];
                        at = found.end();
                        (plain, Some(Segment::Special(self.ids[found.pattern().as_usize()])))
                    }
                    None if at < text.len() => (&text[std::mem::replace(&mut at, text.len())..], None),
                    None => return None,
                };
                pending = special;
                if !plain.is_empty() {
                    return Some(Segment::Plain(plain));
                }
            }
        })
    }

    /// Could a marker start with the first character of `text`, given only what `text` shows of it?
    pub(crate) fn may_start(&self, text: &str) -> bool {
        let mut chars = text.chars();
        let Some(first) = chars.next() else { return false };
        if !self.start_chars.contains(&first) {
            return false;
        }
        match chars.next() {
            Some(second) => {
                self.starts.contains(&(first, Some(second))) || self.starts.contains(&(first, None))
            }
            None => true,
        }
    }

    /// Which of the first characters of markers this is.
    pub(crate) fn start_index(&self, first: char) -> Option<u32> {
        self.start_chars.iter().position(|c| *c == first).map(|index| index as u32)
    }

    /// The first character of markers with this index.
    pub(crate) fn start_char(&self, index: u32) -> Option<char> {
        self.start_chars.get(index as usize).copied()
    }
}
