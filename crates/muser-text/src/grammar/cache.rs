//! What was compiled, by its content.
//!
//! Agents send the same tools with every request, and the choices of one request share a grammar. Compiling happens once,
//! also when several ask at the same time; what has not been asked for longest goes when the memory is used up.

use super::clean::Remark;
use super::token_constraint::TokenConstraint;
use crate::error::TextError;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Memory for compiled grammars, as far as it can be told from their texts.
const MAX_BYTES: usize = 256 << 20;

/// What a small grammar takes: tables of its lexer and the first masks.
const BASE_BYTES: usize = 128 << 10;

/// What a byte of a grammar's text takes once it is compiled: 120 in a long enumeration, 300 in a chain of rules.
const BYTES_PER_BYTE: usize = 256;

/// A constraint that nobody has used yet, and what is known about it.
pub(super) struct Compiled {
    constraint: Mutex<TokenConstraint>,
    /// What of a tool's schema is not kept.
    pub(super) left_out: Vec<Remark>,
    /// Tokens of the shortest call.
    pub(super) least_tokens: usize,
}

impl Compiled {
    pub(super) fn new(constraint: TokenConstraint, left_out: Vec<Remark>, least_tokens: usize) -> Compiled {
        Compiled { constraint: Mutex::new(constraint), left_out, least_tokens }
    }

    /// A constraint at the start of its text, with tables of its own: what one text makes of them is no burden to others.
    pub(super) fn fresh(&self) -> TokenConstraint {
        // A copy is made without changing what is copied, so a panic while it was made left nothing half done.
        self.constraint.lock().unwrap_or_else(PoisonError::into_inner).deep_copy()
    }
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiled").field("left_out", &self.left_out).finish_non_exhaustive()
    }
}

type Outcome = Result<Arc<Compiled>, TextError>;

/// Compiled grammars by their text.
#[derive(Default)]
pub(super) struct Cache {
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    by_text: HashMap<Arc<str>, Entry>,
    bytes: usize,
    clock: u64,
}

struct Entry {
    outcome: Arc<OnceLock<Outcome>>,
    bytes: usize,
    used: u64,
}

impl Cache {
    /// What `text` compiles to. Refusals are kept too: a client that repeats itself costs nothing.
    pub(super) fn get(&self, text: String, compile: impl FnOnce() -> Result<Compiled, TextError>) -> Outcome {
        let outcome = self.entries.lock().unwrap_or_else(PoisonError::into_inner).entry(text);
        outcome.get_or_init(|| compile().map(Arc::new)).clone()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).by_text.len()
    }
}

impl Entries {
    fn entry(&mut self, text: String) -> Arc<OnceLock<Outcome>> {
        self.clock += 1;
        if let Some(entry) = self.by_text.get_mut(text.as_str()) {
            entry.used = self.clock;
            return Arc::clone(&entry.outcome);
        }
        let bytes = BASE_BYTES + text.len().saturating_mul(BYTES_PER_BYTE);
        let outcome = Arc::new(OnceLock::new());
        let entry = Entry { outcome: Arc::clone(&outcome), bytes, used: self.clock };
        self.bytes += bytes;
        self.by_text.insert(text.into(), entry);
        self.make_room();
        outcome
    }

    /// Whoever uses an entry that goes keeps what it holds; it is only not found again.
    fn make_room(&mut self) {
        if self.bytes <= MAX_BYTES {
            return;
        }
        let mut oldest: Vec<(u64, Arc<str>)> =
            self.by_text.iter().map(|(text, entry)| (entry.used, Arc::clone(text))).collect();
        oldest.sort_unstable_by_key(|(used, _)| *used);
        // Some more than needed, so that not every new entry sorts all of them.
        for (_, text) in oldest {
            if self.bytes <= MAX_BYTES / 4 * 3 {
                break;
            }
            if let Some(entry) = self.by_text.remove(&text) {
                self.bytes -= entry.bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_lately_stays() {
        let mut entries = Entries::default();
        let text = |index: usize| format!("{index}{}", "x".repeat(100_000));
        for index in 0..9 {
            entries.entry(text(index));
            entries.entry(text(0));
        }
        assert!(entries.by_text.len() < 10 && entries.bytes <= MAX_BYTES);
        for index in 9..60 {
            entries.entry(text(index));
            entries.entry(text(0));
            assert!(
                entries.by_text.contains_key(text(0).as_str())
                    && entries.by_text.contains_key(text(index).as_str())
            );
            assert!(entries.bytes <= MAX_BYTES);
        }
        let sum: usize = entries.by_text.values().map(|entry| entry.bytes).sum();
        assert_eq!(sum, entries.bytes);
    }

    #[test]
    fn refusals_are_kept() {
        let cache = Cache::default();
        let refuse = || Err(TextError::Grammar { kind: "x", what: "y".into() });
        assert!(cache.get("a".into(), refuse).is_err());
        assert!(cache.get("a".into(), || panic!("compiled again")).is_err());
    }
}
