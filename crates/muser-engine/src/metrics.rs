//! Counters, gauges and histograms of an engine.
//!
//! Writers and readers share atomics only: a scrape never makes the engine wait. A snapshot is therefore not one
//! instant's truth across figures, but each figure is exact.
//!
//! Times here are those of the engine's own work: steps, drafts, blocks on their way. How long a request waited and was
//! computed comes with its events, and is counted by whoever answers clients.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::{FinishReason, RestoreFailure};

/// Upper bounds of the latency buckets in seconds; the last bucket is unbounded.
pub const LATENCY_BOUNDS_S: [f64; 22] = [
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0,
    20.0, 40.0, 80.0, 160.0,
];

/// A latency histogram that any thread writes and reads.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; LATENCY_BOUNDS_S.len() + 1],
    sum_ns: AtomicU64,
}

impl Histogram {
    /// Takes in one observation.
    pub fn record(&self, value: Duration) {
        let seconds = value.as_secs_f64();
        let bucket = LATENCY_BOUNDS_S.partition_point(|&bound| bound < seconds);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(value.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Its figures so far.
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            counts: std::array::from_fn(|i| self.buckets[i].load(Ordering::Relaxed)),
            sum_s: self.sum_ns.load(Ordering::Relaxed) as f64 * 1e-9,
        }
    }
}

/// A histogram's figures.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HistogramSnapshot {
    /// Observations per bucket (not cumulative): bucket `i` holds values up to [`LATENCY_BOUNDS_S`]`[i]`.
    pub counts: [u64; LATENCY_BOUNDS_S.len() + 1],
    /// Sum of all observations in seconds.
    pub sum_s: f64,
}

impl HistogramSnapshot {
    /// Number of observations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// Most proposals of a round and sequence, and so the length of figures by place.
pub const MOST_PROPOSALS: usize = crate::draft::MOST_PROPOSALS;

/// Counters by the place of a proposal in its round, the first one first.
#[derive(Debug, Default)]
pub(crate) struct ByPlace([AtomicU64; MOST_PROPOSALS]);

impl ByPlace {
    /// Counts one for each of the first `n` places.
    pub(crate) fn add_first(&self, n: usize) {
        self.0.iter().take(n).for_each(|counter| Metrics::add(counter, 1));
    }

    fn snapshot(&self) -> [u64; MOST_PROPOSALS] {
        std::array::from_fn(|place| self.0[place].load(Ordering::Relaxed))
    }
}

macro_rules! metrics {
    (
        $(#[$doc:meta] $name:ident),* ;
        $(#[$hdoc:meta] $hist:ident),* ;
        $(#[$pdoc:meta] $place:ident),* $(,)?
    ) => {
        /// The live figures.
        #[derive(Debug, Default)]
        pub(crate) struct Metrics {
            $(pub(crate) $name: AtomicU64,)*
            $(pub(crate) $hist: Histogram,)*
            $(pub(crate) $place: ByPlace,)*
        }

        /// The figures at one moment.
        #[derive(Clone, Debug, PartialEq)]
        pub struct MetricsSnapshot {
            $(#[$doc] pub $name: u64,)*
            $(#[$hdoc] pub $hist: HistogramSnapshot,)*
            $(#[$pdoc] pub $place: [u64; MOST_PROPOSALS],)*
        }

        impl Metrics {
            pub(crate) fn snapshot(&self) -> MetricsSnapshot {
                MetricsSnapshot {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    $($hist: self.$hist.snapshot(),)*
                    $($place: self.$place.snapshot(),)*
                }
            }
        }
    };
}

metrics! {
    /// Requests taken at the door.
    requests_accepted,
    /// Requests refused at the door.
    requests_refused,
    /// Requests that failed after they were accepted.
    requests_failed,
    /// Choices that ended with a stop id or their stop watch.
    finished_stop,
    /// Choices that ended at `max_tokens` or with a full context.
    finished_length,
    /// Choices that were cancelled, timed out or dropped for a slow reader.
    finished_aborted,
    /// Prompt positions of admitted requests.
    prompt_tokens,
    /// Of these, taken from known blocks.
    cached_tokens,
    /// Positions computed for prompts (after preemption or shift, again).
    prefill_rows,
    /// Positions computed to decode.
    decode_rows,
    /// Tokens sampled.
    generated_tokens,
    /// Drafts verified: one for each sequence with proposals in a step.
    drafts,
    /// Proposals in them.
    drafted_tokens,
    /// Proposals accepted.
    accepted_tokens,
    /// Nanoseconds that adaptive rounds with proposals were expected to take, draft and step together.
    forecast_ns,
    /// Nanoseconds that these rounds took.
    forecast_rounds_ns,
    /// Draft rounds that failed; the first one turns drafting off.
    draft_errors,
    /// Steps run.
    steps,
    /// Steps that failed with a device error.
    step_errors,
    /// Steps that panicked.
    step_panics,
    /// Sequences put back into the queue because memory ran out.
    preemptions,
    /// Blocks dropped from the prefix cache to make room.
    evicted_blocks,
    /// Blocks copied so that a request could continue inside one.
    copied_blocks,
    /// Blocks brought back from host memory.
    restored_blocks,
    /// Prompt positions about which a prefix source was asked.
    external_queries,
    /// Of these, brought by it.
    external_hits,
    /// Blocks that a prefix source brought.
    external_blocks,
    /// Bytes of these.
    external_bytes,
    /// Of the positions that it brought, those that a peer computed.
    handed_tokens,
    /// Blocks copied out for a prefix source.
    exported_blocks,
    /// Restores that ended because a block was not there any more.
    restores_missing,
    /// Restores that ended because a block was not what had been stored.
    restores_invalid,
    /// Restores that ended because the store failed.
    restores_store,
    /// Restores, and questions what there is to restore, that ended because nothing came in time.
    restores_slow,
    /// Restores for which there was no memory.
    restores_no_memory,
    /// Restores whose bytes the device refused.
    restores_device,
    /// Pictures that the tower has made rows of.
    images_encoded,
    /// Rows made.
    image_rows_encoded,
    /// Pictures whose rows were still kept.
    image_cache_hits,
    /// Pictures that could not be encoded.
    image_errors,
    /// Microseconds that the tower took.
    tower_us,
    /// Bytes of rows kept (gauge).
    image_cache_bytes,
    /// Bytes of blocks kept in host memory (gauge).
    host_bytes_held,
    /// Requests in the waiting queue (gauge).
    waiting,
    /// Sequences with a slot (gauge).
    running,
    /// Sequences whose prefix is on its way from a source: they hold memory and no slot, and count as waiting (gauge).
    fetching,
    /// Rows of prompts that wait to be computed (gauge).
    queued_rows,
    /// Rows of a prompt that a second computes at its beginning, by measured steps (gauge); 0 before the first.
    prefill_rate,
    /// The same behind 32,768 positions.
    deep_prefill_rate,
    /// Blocks of the full group in use by sequences (gauge).
    full_blocks_used,
    /// Blocks of the full group kept for reuse (gauge).
    full_blocks_cached,
    /// Blocks of the full group in all (gauge).
    full_blocks_total,
    /// Blocks of the sliding group in use by sequences (gauge).
    sliding_blocks_used,
    /// Blocks of the sliding group kept for reuse (gauge).
    sliding_blocks_cached,
    /// Blocks of the sliding group in all (gauge).
    sliding_blocks_total,
    /// Bytes of all blocks in use or kept (gauge).
    kv_bytes_held,
    /// Bytes of all blocks (gauge); the budget is never less.
    kv_bytes_total,
    /// Time from a slot to the end of choices that ended lately, a mean that forgets, in microseconds (gauge); 0 before the first.
    turnaround_us;
    /// One step of the executor.
    step_time,
    /// Bringing a prefix from a prefix source.
    restore_time,
    /// Copying one block out for a prefix source: what a step may be delayed by.
    export_time,
    /// One draft for all sequences, their proposals drawn.
    draft_time;
    /// Proposals in verified drafts, by place.
    drafted_by_place,
    /// Proposals accepted, by place.
    accepted_by_place,
}

impl Metrics {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn set(gauge: &AtomicU64, value: u64) {
        gauge.store(value, Ordering::Relaxed);
    }

    pub(crate) fn restore_failed(&self, failure: RestoreFailure) {
        let counter = match failure {
            RestoreFailure::Missing => &self.restores_missing,
            RestoreFailure::Invalid => &self.restores_invalid,
            RestoreFailure::Store => &self.restores_store,
            RestoreFailure::Slow => &self.restores_slow,
            RestoreFailure::NoMemory => &self.restores_no_memory,
            RestoreFailure::Device => &self.restores_device,
        };
        Self::add(counter, 1);
    }

    /// A choice ended so long after it had got its slot.
    pub(crate) fn note_turnaround(&self, took: Duration) {
        let took = took.as_micros().min(u128::from(u64::MAX / 8)) as u64;
        let before = self.turnaround_us.load(Ordering::Relaxed);
        // Only the engine writes it.
        let mean = if before == 0 { took } else { before - before / 8 + took / 8 };
        self.turnaround_us.store(mean.max(1), Ordering::Relaxed);
    }

    pub(crate) fn finished(&self, reason: FinishReason) {
        let counter = match reason {
            FinishReason::Stop(_) | FinishReason::StopWatch => &self.finished_stop,
            FinishReason::Length | FinishReason::Context => &self.finished_length,
            FinishReason::Cancelled | FinishReason::Deadline | FinishReason::SlowReader => {
                &self.finished_aborted
            }
        };
        Self::add(counter, 1);
    }
}

impl MetricsSnapshot {
    /// Prefixes that were computed although a source seemed to have them, by reason.
    pub fn restore_failures(&self, reason: RestoreFailure) -> u64 {
        match reason {
            RestoreFailure::Missing => self.restores_missing,
            RestoreFailure::Invalid => self.restores_invalid,
            RestoreFailure::Store => self.restores_store,
            RestoreFailure::Slow => self.restores_slow,
            RestoreFailure::NoMemory => self.restores_no_memory,
            RestoreFailure::Device => self.restores_device,
        }
    }
}
