//! What the bridge has done, counted.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Live counters.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) offered: AtomicU64,
    pub(crate) overrun: AtomicU64,
    pub(crate) known: AtomicU64,
    pub(crate) published: AtomicU64,
    pub(crate) gone: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) publish_us: AtomicU64,
    pub(crate) lookup_us: AtomicU64,
    pub(crate) lookups: AtomicU64,
}

/// The figures at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackFigures {
    /// Prefixes that the engine has offered.
    pub offered: u64,
    /// Of these, not looked at because too many waited.
    pub overrun: u64,
    /// Of these, stored before.
    pub known: u64,
    /// Of these, published.
    pub published: u64,
    /// Of these, given up because the engine needed their memory.
    pub gone: u64,
    /// Of these, given up because the store failed or was full.
    pub failed: u64,
    /// Prefixes that wait to be published or are being published now.
    pub waiting: u64,
    /// Time of publications, pauses included, in microseconds.
    pub publish_us: u64,
    /// Questions answered.
    pub lookups: u64,
    /// Time of these, in microseconds.
    pub lookup_us: u64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Relaxed);
    }

    pub(crate) fn snapshot(&self, waiting: usize) -> PackFigures {
        PackFigures {
            offered: self.offered.load(Relaxed),
            overrun: self.overrun.load(Relaxed),
            known: self.known.load(Relaxed),
            published: self.published.load(Relaxed),
            gone: self.gone.load(Relaxed),
            failed: self.failed.load(Relaxed),
            waiting: waiting as u64,
            publish_us: self.publish_us.load(Relaxed),
            lookups: self.lookups.load(Relaxed),
            lookup_us: self.lookup_us.load(Relaxed),
        }
    }
}
