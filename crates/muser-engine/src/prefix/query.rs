//! The question how much of a prompt a source has.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::Thread,
};

use muser_kv::{CacheScope, Unit};

use crate::prefix::Found;

/// What both ends share.
pub(crate) struct QueryCell {
    answer: OnceLock<Found>,
    given_up: AtomicBool,
    engine: Thread,
}

impl QueryCell {
    /// `None` as long as there is no answer.
    pub(crate) fn answer(&self) -> Option<&Found> {
        self.answer.get()
    }

    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }
}

/// A prompt about to be computed. Dropping it answers that nothing of it is stored.
pub struct PrefixQuery {
    scope: CacheScope,
    units: Arc<[Unit]>,
    known: usize,
    cell: Arc<QueryCell>,
}

impl PrefixQuery {
    pub(crate) fn new(scope: CacheScope, units: Arc<[Unit]>, known: usize) -> (Self, Arc<QueryCell>) {
        let cell = Arc::new(QueryCell {
            answer: OnceLock::new(),
            given_up: AtomicBool::new(false),
            engine: std::thread::current(),
        });
        (Self { scope, units, known, cell: Arc::clone(&cell) }, cell)
    }

    /// Whose prompt it is: what other scopes have stored is not for it.
    pub fn scope(&self) -> CacheScope {
        self.scope
    }

    /// The prompt, as far as it may be taken from elsewhere: without its last position, which must be computed.
    pub fn units(&self) -> &Arc<[Unit]> {
        &self.units
    }

    /// Positions that memory knows: only what reaches further is of use.
    pub fn known(&self) -> usize {
        self.known
    }

    /// Is there still somebody who waits for the answer?
    pub fn is_wanted(&self) -> bool {
        !self.cell.given_up.load(Ordering::Relaxed)
    }

    /// Answers.
    pub fn answer(self, found: Found) {
        let _ = self.cell.answer.set(found);
    }
}

impl Drop for PrefixQuery {
    fn drop(&mut self) {
        let _ = self.cell.answer.set(None);
        self.cell.engine.unpark();
    }
}

impl std::fmt::Debug for PrefixQuery {
    // No ids: queries end up in logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefixQuery").field("positions", &self.units.len()).finish_non_exhaustive()
    }
}
