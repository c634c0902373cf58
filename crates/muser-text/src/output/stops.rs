//! Stop strings: found in text that comes in pieces, and never shown, not even their beginning.
//!
//! Each stop string is matched byte by byte with its failure table (Knuth, Morris, Pratt), so the work per byte is the
//! number of stop strings. The match that *ends* first wins, which does not depend on how the text was cut. Text that
//! could be the beginning of a match is held back until it is one or cannot become one.

use std::sync::Arc;

use crate::error::TextError;

/// Stop strings of one stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopStrings {
    matchers: Vec<Matcher>,
    held: String,
}

#[derive(Clone, Debug)]
struct Matcher {
    pattern: Arc<[u8]>,
    /// Length of the longest proper prefix of `pattern[..=i]` that is also its suffix. Shared by all choices of a request.
    failure: Arc<[u32]>,
    matched: usize,
}

/// More stop strings than anyone needs; each costs time on every byte.
const MAX_STOPS: usize = 64;

/// Longest stop string in bytes: what could be its beginning is held back and kept.
const MAX_STOP_BYTES: usize = 4096;

impl StopStrings {
    pub(crate) fn new(stops: &[String]) -> Result<StopStrings, TextError> {
        if stops.len() > MAX_STOPS {
            return Err(TextError::request(
                "stop",
                format!("at most {MAX_STOPS} strings"),
                stops.len().to_string(),
            ));
        }
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(TextError::request(format!("stop[{index}]"), "a string that is not empty", "\"\""));
        }
        if let Some(index) = stops.iter().position(|stop| stop.len() > MAX_STOP_BYTES) {
            return Err(TextError::request(
                format!("stop[{index}]"),
                format!("at most {MAX_STOP_BYTES} bytes"),
                stops[index].len().to_string(),
            ));
        }
        let matchers = stops.iter().map(|stop| Matcher::new(stop.as_bytes())).collect();
        Ok(StopStrings { matchers, held: String::new() })
    }

    /// Takes text and gives on what is safe to show. The index of the stop string that was found: nothing may follow.
    pub(crate) fn push(&mut self, text: &str, give: impl FnOnce(&str)) -> Option<usize> {
        if self.matchers.is_empty() {
            give(text);
            return None;
        }
        let from = self.held.len();
        self.held.push_str(text);
        if let Some(Found { index, end, len }) = find(&mut self.matchers, text) {
            give(&self.held[..from + end - len]);
            self.held.clear();
            return Some(index);
        }
        let keep = self.matchers.iter().map(|matcher| matcher.matched).max().unwrap_or(0);
        let safe = self.held.len() - keep;
        give(&self.held[..safe]);
        self.held.drain(..safe);
        None
    }

    /// Like [`Self::push`] where nobody reads: keeps no text.
    pub(crate) fn watch(&mut self, text: &str) -> Option<usize> {
        find(&mut self.matchers, text).map(|found| found.index)
    }

    /// The text ends here: what was held back is shown after all.
    pub(crate) fn flush(&mut self, give: impl FnOnce(&str)) {
        for matcher in &mut self.matchers {
            matcher.matched = 0;
        }
        give(&self.held);
        self.held.clear();
    }
}

/// A stop string in a piece of text.
struct Found {
    index: usize,
    /// Bytes of the piece up to its end.
    end: usize,
    /// Bytes that it has.
    len: usize,
}

/// The stop string that ends first; of several that end together the longest: it begins first.
fn find(matchers: &mut [Matcher], text: &str) -> Option<Found> {
    for (at, &byte) in text.as_bytes().iter().enumerate() {
        let mut found: Option<Found> = None;
        for (index, matcher) in matchers.iter_mut().enumerate() {
            let len = matcher.pattern.len();
            if matcher.step(byte) && found.as_ref().is_none_or(|best| len > best.len) {
                found = Some(Found { index, end: at + 1, len });
            }
        }
        if found.is_some() {
            return found;
        }
    }
    None
}

impl Matcher {
    fn new(pattern: &[u8]) -> Matcher {
        let mut failure = vec![0_u32; pattern.len()];
        let mut len = 0;
        for at in 1..pattern.len() {
            while len > 0 && pattern[at] != pattern[len] {
                len = failure[len - 1] as usize;
            }
            if pattern[at] == pattern[len] {
                len += 1;
            }
            failure[at] = len as u32;
        }
        Matcher { pattern: pattern.into(), failure: failure.into(), matched: 0 }
    }

    /// Takes one byte; true if the pattern ends with it.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.pattern[self.matched] != byte {
            self.matched = self.failure[self.matched - 1] as usize;
        }
        if self.pattern[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.pattern.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Shown text and the stop string found, with the text cut into pieces of `size` characters.
    fn run(stops: &[&str], text: &str, size: usize) -> (String, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let mut stream = StopStrings::new(&stops).expect("valid");
        let mut watch = stream.clone();
        let mut shown = String::new();
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(size) {
            let piece: String = piece.iter().collect();
            let stopped = stream.push(&piece, |text| shown.push_str(text));
            assert_eq!(watch.watch(&piece), stopped, "with and without a reader");
            if stopped.is_some() {
                return (shown, stopped);
            }
        }
        stream.flush(|text| shown.push_str(text));
        (shown, None)
    }

    fn check(stops: &[&str], text: &str, shown: &str, stopped: Option<usize>) {
        for size in 1..=text.chars().count().max(1) {
            assert_eq!(run(stops, text, size), (shown.to_owned(), stopped), "{stops:?} {text:?} by {size}");
        }
    }

    #[test]
    fn length_and_number_are_limited() {
        let fits = |stops: &[String]| StopStrings::new(stops).is_ok();
        assert!(fits(&["a".repeat(MAX_STOP_BYTES)]) && fits(&vec!["a".into(); MAX_STOPS]));
        assert!(!fits(&["a".repeat(MAX_STOP_BYTES + 1)]) && !fits(&vec!["a".into(); MAX_STOPS + 1]));
        assert!(!fits(&["ä".repeat(MAX_STOP_BYTES)]), "bytes are counted");
    }

    #[test]
    fn nothing_from_the_stop_on_is_shown() {
        check(&["DEFGHIJ"], "ABCDEFGHIJK", "ABC", Some(0));
        check(&["DEFGHIJ"], "ABCDEFGHIX", "ABCDEFGHIX", None);
        check(&["\n"], "answer\nmore", "answer", Some(0));
        check(&["\n\n"], "answer\n", "answer\n", None);
        check(&["aab"], "aaaab", "aa", Some(0));
        check(&["abcd", "bc"], "xabcd", "xa", Some(1));
        check(&["c", "abc"], "xabc", "x", Some(1));
        check(&["界!"], "你好世界!x", "你好世", Some(0));
        check(&[], "text", "text", None);
    }

    #[test]
    fn useless_stops_are_refused() {
        let error = StopStrings::new(&["a".into(), String::new()]).expect_err("empty");
        assert!(error.to_string().starts_with("stop[1]"), "{error}");
        assert!(StopStrings::new(&vec!["a".to_owned(); 65]).is_err());
    }

    #[test]
    fn what_was_flushed_begins_no_stop() {
        let mut stream = StopStrings::new(&["ab".into()]).expect("valid");
        let mut shown = String::new();
        for text in ["xa", "b", "ab"] {
            let stopped = stream.push(text, |text| shown.push_str(text));
            assert_eq!(stopped.is_some(), text == "ab", "{text}");
            stream.flush(|text| shown.push_str(text));
        }
        assert_eq!(shown, "xab");
    }

    proptest! {
        #[test]
        fn as_a_search_for_the_match_that_ends_first(
            stops in proptest::collection::vec("[ab]{1,4}", 1..4), text in "[abc]{0,30}", size in 1..5_usize,
        ) {
            let first = (0..=text.len()).find_map(|end| {
                let ending = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
                ending.map(String::len).max().map(|len| end - len)
            });
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (shown, stopped) = run(&stops, &text, size);
            prop_assert_eq!(stopped.is_some(), first.is_some());
            prop_assert_eq!(shown, &text[..first.unwrap_or(text.len())]);
        }
    }
}
