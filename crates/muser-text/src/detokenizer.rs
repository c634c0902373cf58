//! From ids back to text, as they come.

use crate::tokenizer::{Markers, Tokenizer};
use crate::utf8::Utf8Joiner;
use std::sync::Arc;

/// Incremental detokenizer: push ids, get text that is always whole characters.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    markers: Markers,
    joiner: Utf8Joiner,
}

impl Detokenizer {
    /// A fresh stream.
    pub fn new(tokenizer: Arc<Tokenizer>, markers: Markers) -> Detokenizer {
        Detokenizer { tokenizer, markers, joiner: Utf8Joiner::default() }
    }

    /// Text that this id completes; may be empty. Unknown ids are nothing.
    pub fn push(&mut self, id: u32) -> String {
        let mut out = String::new();
        self.tokenizer.join(id, self.markers, &mut self.joiner, &mut out);
        out
    }

    /// The end: what was held back, with a half character as U+FFFD.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.joiner.flush(&mut out);
        out
    }
}
