//! What was compiled, by its content.
//!
//! Agents send the same tools with every request, and the choices of one request share a grammar. Compiling happens once,
//! also when several ask at the same time; what has not been asked for longest goes when the memory is used up. What whoever
//! compiles gives up, because its client has left, the next one who waits takes over.

use super::Wanted;
use super::clean::Remark;
use super::token_constraint::TokenConstraint;
use crate::error::TextError;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Memory for compiled grammars.
const MAX_BYTES: usize = 128 << 20;

/// What a small grammar takes: its rules, the first masks.
const BASE_BYTES: usize = 96 << 10;

/// What a byte of a grammar's text takes as key and in rules. The lexer's tables are counted by themselves: those of a short
/// text can be large.
const BYTES_PER_BYTE: usize = 24;

/// A constraint that nobody has used yet, and what is known about it.
pub(super) struct Compiled {
    constraint: Mutex<TokenConstraint>,
    /// Bytes of its lexers' tables.
    bytes: usize,
    /// What of a tool's schema is not kept.
    pub(super) left_out: Vec<Remark>,
    /// Tokens of the shortest call.
    pub(super) least_tokens: usize,
}

impl Compiled {
    pub(super) fn new(
        constraint: TokenConstraint,
        bytes: usize,
        left_out: Vec<Remark>,
        least_tokens: usize,
    ) -> Compiled {
        Compiled { constraint: Mutex::new(constraint), bytes, left_out, least_tokens }
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
    /// Whether the tables are among the bytes.
    weighed: bool,
    used: u64,
}

impl Cache {
    /// What `text` compiles to. Refusals are kept too: a client that repeats itself costs nothing.
    pub(super) fn get(
        &self,
        text: &str,
        wanted: Wanted<'_>,
        compile: impl Fn() -> Result<Compiled, TextError>,
    ) -> Outcome {
        loop {
            let entry = self.entries().entry(text);
            let outcome = entry.get_or_init(|| {
                let made = compile().map(Arc::new);
                // Whatever compiling came to that was given up says nothing of the grammar.
                if wanted() { made } else { Err(TextError::Abandoned) }
            });
            match outcome {
                Err(TextError::Abandoned) => self.entries().forget(text, &entry),
                Ok(compiled) => {
                    self.entries().weigh(text, &entry, compiled.bytes);
                    return outcome.clone();
                }
                Err(_) => return outcome.clone(),
            }
            if !wanted() {
                return Err(TextError::Abandoned);
            }
        }
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries().by_text.len()
    }

    /// Bytes of all that is kept, as they are counted.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.entries().bytes
    }
}

impl Entries {
    fn entry(&mut self, text: &str) -> Arc<OnceLock<Outcome>> {
        self.clock += 1;
        if let Some(entry) = self.by_text.get_mut(text) {
            entry.used = self.clock;
            return Arc::clone(&entry.outcome);
        }
        let bytes = BASE_BYTES + text.len().saturating_mul(BYTES_PER_BYTE);
        let outcome = Arc::new(OnceLock::new());
        let entry = Entry { outcome: Arc::clone(&outcome), bytes, weighed: false, used: self.clock };
        self.bytes += bytes;
        self.by_text.insert(text.into(), entry);
        self.make_room();
        outcome
    }

    /// Counts the tables of an entry, now that they are there.
    fn weigh(&mut self, text: &str, outcome: &Arc<OnceLock<Outcome>>, tables: usize) {
        let Some(entry) = self.by_text.get_mut(text) else { return };
        if Arc::ptr_eq(&entry.outcome, outcome) && !entry.weighed {
            entry.weighed = true;
            entry.bytes += tables;
            self.bytes += tables;
            self.make_room();
        }
    }

    /// Takes an entry out that came to nothing.
    fn forget(&mut self, text: &str, outcome: &Arc<OnceLock<Outcome>>) {
        if self.by_text.get(text).is_some_and(|entry| Arc::ptr_eq(&entry.outcome, outcome))
            && let Some(entry) = self.by_text.remove(text)
        {
            self.bytes -= entry.bytes;
        }
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
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn what_was_used_lately_stays() {
        let mut entries = Entries::default();
        let text = |index: usize| format!("{index}{}", "x".repeat(500_000));
        for index in 0..9 {
            entries.entry(&text(index));
            entries.entry(&text(0));
        }
        assert!(entries.by_text.len() < 10 && entries.bytes <= MAX_BYTES);
        for index in 9..60 {
            entries.entry(&text(index));
            entries.entry(&text(0));
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
        assert!(cache.get("a", &|| true, refuse).is_err());
        assert!(cache.get("a", &|| true, || panic!("compiled again")).is_err());
    }

    /// What the one who compiled gave up is no refusal: nothing is kept, and whoever else waits compiles it.
    #[test]
    fn what_was_given_up_is_taken_over() {
        let cache = Cache::default();
        let refuse = || Err(TextError::Grammar { kind: "x", what: "y".into() });
        assert_eq!(cache.get("a", &|| false, refuse).err(), Some(TextError::Abandoned));
        assert_eq!((cache.len(), cache.bytes()), (0, 0));
        let (begun, goes_on) = (Barrier::new(2), AtomicBool::new(true));
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                cache.get("a", &|| goes_on.load(Ordering::SeqCst), || {
                    begun.wait();
                    // The other one waits for this by now, or will find it gone.
                    std::thread::sleep(Duration::from_millis(50));
                    goes_on.store(false, Ordering::SeqCst);
                    Err(TextError::Abandoned)
                })
            });
            begun.wait();
            let other = cache.get("a", &|| true, refuse).expect_err("refused");
            assert!(matches!(other, TextError::Grammar { .. }), "{other}");
            assert_eq!(first.join().expect("ends").err(), Some(TextError::Abandoned));
        });
        assert_eq!(cache.len(), 1);
    }
}
