//! What happened, counted: every figure is measured, none is a constant.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::{PackError, Refusal};

/// Running totals of a library.
#[derive(Debug, Default)]
pub struct Counters {
    pub(crate) lookups: AtomicU64,
    pub(crate) hits: AtomicU64,
    pub(crate) unlike: AtomicU64,
    pub(crate) hit_positions: AtomicU64,
    pub(crate) fetched_segments: AtomicU64,
    pub(crate) fetched_bytes: AtomicU64,
    pub(crate) fetch_ns: AtomicU64,
    pub(crate) published_packs: AtomicU64,
    pub(crate) published_segments: AtomicU64,
    pub(crate) published_bytes: AtomicU64,
    pub(crate) shared_segments: AtomicU64,
    pub(crate) publish_ns: AtomicU64,
    pub(crate) evicted_packs: AtomicU64,
    pub(crate) full: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) anchor_failures: AtomicU64,
    pub(crate) refusals: [AtomicU64; Refusal::NAMES.len()],
}

/// The totals at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CountersSnapshot {
    /// Lookups.
    pub lookups: u64,
    /// Lookups that found something.
    pub hits: u64,
    /// Lookups that found nothing of a prompt which the same tenant has under another identity: another KV type, numeric route
    /// or model.
    pub unlike: u64,
    /// Positions found, in sum.
    pub hit_positions: u64,
    /// Segments read and believed.
    pub fetched_segments: u64,
    /// Their bytes.
    pub fetched_bytes: u64,
    /// Time of reading them, summed over threads.
    pub fetch_ns: u64,
    /// Packs that became visible.
    pub published_packs: u64,
    /// Segments written.
    pub published_segments: u64,
    /// Their bytes.
    pub published_bytes: u64,
    /// Segments that were there already when a pack needed them.
    pub shared_segments: u64,
    /// Time of hashing, sealing and writing segments.
    pub publish_ns: u64,
    /// Packs dropped to make room.
    pub evicted_packs: u64,
    /// Publications given up because nothing more could be dropped.
    pub full: u64,
    /// Failures of the store itself.
    pub failures: u64,
    /// How often what was seen of the catalog could not be remembered outside the store: until it can, an old copy of the
    /// store would be believed at the next start.
    pub anchor_failures: u64,
    /// Refusals by reason, in the order of [`Refusal::NAMES`].
    pub refusals: [u64; Refusal::NAMES.len()],
}

impl Counters {
    /// The totals now.
    pub fn snapshot(&self) -> CountersSnapshot {
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        CountersSnapshot {
            lookups: of(&self.lookups),
            hits: of(&self.hits),
            unlike: of(&self.unlike),
            hit_positions: of(&self.hit_positions),
            fetched_segments: of(&self.fetched_segments),
            fetched_bytes: of(&self.fetched_bytes),
            fetch_ns: of(&self.fetch_ns),
            published_packs: of(&self.published_packs),
            published_segments: of(&self.published_segments),
            published_bytes: of(&self.published_bytes),
            shared_segments: of(&self.shared_segments),
            publish_ns: of(&self.publish_ns),
            evicted_packs: of(&self.evicted_packs),
            full: of(&self.full),
            failures: of(&self.failures),
            anchor_failures: of(&self.anchor_failures),
            refusals: std::array::from_fn(|i| of(&self.refusals[i])),
        }
    }

    /// Counts a failure by its reason and hands it on.
    pub(crate) fn failed(&self, error: PackError) -> PackError {
        match &error {
            PackError::Refused { reason, .. } => add(&self.refusals[reason.number()], 1),
            PackError::Full { .. } => add(&self.full, 1),
            PackError::Cancelled | PackError::Changed { .. } | PackError::Busy | PackError::Caller { .. } => {
            }
            _ => add(&self.failures, 1),
        }
        error
    }
}

impl CountersSnapshot {
    /// Refusals by name, those that happened.
    pub fn refused(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Refusal::NAMES.into_iter().zip(self.refusals).filter(|(_, count)| *count > 0)
    }
}

pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Relaxed);
}

pub(crate) fn add_time(counter: &AtomicU64, time: Duration) {
    add(counter, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
}
