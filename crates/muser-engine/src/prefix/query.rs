//! The question how much of a prompt a source has.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::Thread,
    time::Duration,
};

use muser_kv::{CacheScope, PositionKey};

use super::{Found, LocalPace};

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

/// What a request says about how it is to be served, as far as a source needs it.
#[derive(Clone, Debug)]
pub(crate) struct QueryTerms {
    pub(crate) priority: i32,
    pub(crate) time_left: Option<Duration>,
    pub(crate) is_for_peer: bool,
    pub(crate) pace: Arc<LocalPace>,
}

/// Who takes the answer instead of the engine.
type Taker = Box<dyn FnOnce(Found) + Send>;

/// A prompt about to be computed. Dropping it answers that nothing of it is stored.
pub struct PrefixQuery {
    scope: CacheScope,
    units: Arc<[PositionKey]>,
    known: usize,
    terms: QueryTerms,
    cell: Arc<QueryCell>,
    taker: Option<Taker>,
    /// Somebody else has the question now.
    passed_on: bool,
}

impl PrefixQuery {
    pub(crate) fn new(
        scope: CacheScope,
        units: Arc<[PositionKey]>,
        known: usize,
        terms: QueryTerms,
    ) -> (Self, Arc<QueryCell>) {
        let cell = Arc::new(QueryCell {
            answer: OnceLock::new(),
            given_up: AtomicBool::new(false),
            engine: std::thread::current(),
        });
        let for_engine = Arc::clone(&cell);
        (Self { scope, units, known, terms, cell, taker: None, passed_on: false }, for_engine)
    }

    /// The question to be asked of a source before others: `take` gets its answer and the question, to ask it again or answer it.
    pub(crate) fn before(mut self, take: impl FnOnce(Self, Found) + Send + 'static) -> Self {
        let asked = self.again();
        self.taker = Some(Box::new(move |found| take(asked, found)));
        self
    }

    /// The same question, for a source that is to reach beyond `known`.
    pub(crate) fn beyond(mut self, known: usize) -> Self {
        self.known = self.known.max(known);
        self
    }

    /// The question once more; this one will not answer it, unless by what takes its answer.
    fn again(&mut self) -> Self {
        self.passed_on = true;
        Self {
            scope: self.scope,
            units: Arc::clone(&self.units),
            known: self.known,
            terms: self.terms.clone(),
            cell: Arc::clone(&self.cell),
            taker: None,
            passed_on: false,
        }
    }

    /// Whose prompt it is: what other scopes have stored is not for it.
    pub fn scope(&self) -> CacheScope {
        self.scope
    }

    /// The prompt, as far as it may be taken from elsewhere: without its last position, which must be computed.
    pub fn units(&self) -> &Arc<[PositionKey]> {
        &self.units
    }

    /// Positions that memory knows: only what reaches further is of use.
    pub fn known(&self) -> usize {
        self.known
    }

    /// Its request's priority: higher goes first.
    pub fn priority(&self) -> i32 {
        self.terms.priority
    }

    /// What is left of its request's time, if that is limited.
    pub fn time_left(&self) -> Option<Duration> {
        self.terms.time_left
    }

    /// Is it computed for a peer? Then no other peer is to be asked: none would be the last.
    pub fn is_for_peer(&self) -> bool {
        self.terms.is_for_peer
    }

    /// What computing it here would take.
    pub fn pace(&self) -> &LocalPace {
        &self.terms.pace
    }

    /// Is there still somebody who waits for the answer?
    pub fn is_wanted(&self) -> bool {
        !self.cell.given_up.load(Ordering::Relaxed)
    }

    /// Answers.
    pub fn answer(mut self, found: Found) {
        self.settle(found);
    }

    fn settle(&mut self, found: Found) {
        if let Some(take) = self.taker.take() {
            take(found);
        } else if !self.passed_on {
            let _ = self.cell.answer.set(found);
            self.cell.engine.unpark();
        }
    }
}

impl Drop for PrefixQuery {
    fn drop(&mut self) {
        self.settle(None);
    }
}

impl std::fmt::Debug for PrefixQuery {
    // No ids: queries end up in logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefixQuery").field("positions", &self.units.len()).finish_non_exhaustive()
    }
}
