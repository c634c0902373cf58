//! The threads that bring segments from the store into the engine's hands.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use muser_engine::{BlockPlace, Delivery, RestoreFailure};
use muser_pack::{PackError, Place, Plan, Refusal, Segment};

use crate::source::Shared;

/// One restore. Threads take its segments in order; when the last one that helps lets go, the delivery ends.
pub(crate) struct FetchJob {
    segments: Vec<Segment>,
    next: AtomicUsize,
    /// Keeps the segments from being removed.
    _leases: Mutex<Vec<Plan>>,
    delivery: Mutex<Option<Delivery>>,
    delivered: AtomicUsize,
    /// When it has taken too long, and how long that is.
    until: Option<Instant>,
    limit_ms: u64,
}

impl FetchJob {
    pub(crate) fn new(
        segments: Vec<Segment>,
        leases: Vec<Plan>,
        delivery: Delivery,
        limit: Option<Duration>,
    ) -> Self {
        Self {
            until: limit.and_then(|limit| Instant::now().checked_add(limit)),
            limit_ms: limit.map_or(0, |limit| limit.as_millis() as u64),
            segments,
            next: AtomicUsize::new(0),
            _leases: Mutex::new(leases),
            delivery: Mutex::new(Some(delivery)),
            delivered: AtomicUsize::new(0),
        }
    }

    fn delivery(&self) -> Option<Delivery> {
        self.delivery.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn end(&self) {
        drop(self.delivery.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Fetches until the queue closes.
pub(crate) fn run(shared: &Arc<Shared>) {
    while let Some(job) = shared.fetches.take() {
        if catch_unwind(AssertUnwindSafe(|| work(shared, &job))).is_err() {
            job.end();
        }
        drop(job);
        shared.fetches.done();
    }
}

fn work(shared: &Shared, job: &FetchJob) {
    let Some(delivery) = job.delivery() else { return };
    loop {
        let Some(segment) = job.segments.get(job.next.fetch_add(1, Ordering::Relaxed)) else { return };
        let given_up = || delivery.is_cancelled() || shared.closed.load(Ordering::Relaxed);
        let cancel = delivery.cancel_flag();
        let outcome = if job.until.is_some_and(|until| Instant::now() >= until) {
            Err(PackError::Limit { what: "time of a restore", limit: job.limit_ms, needed: None })
        } else if let Some(place) = delivery.place(segment.group, segment.index) {
            let fetched = shared.library.fetch_into(&shared.scope, segment, &mut InPlace(&place), cancel);
            fetched.map(|()| delivery.filled(place))
        } else {
            let Some(mut buffer) = shared.buffers.take(segment.bytes, given_up) else {
                job.end();
                return;
            };
            let fetched = shared.library.fetch_unless(&shared.scope, segment, &mut buffer.bytes, cancel);
            fetched.map(|()| delivery.give(segment.group, segment.index, Box::new(buffer)))
        };
        match outcome {
            Ok(()) => {
                if job.delivered.fetch_add(1, Ordering::Relaxed) + 1 == job.segments.len() {
                    job.end();
                }
            }
            Err(PackError::Cancelled) => {
                job.end();
                return;
            }
            Err(error) => {
                tracing::warn!(reason = error.counter_name(), "a stored prefix is computed instead: {error}");
                delivery.fail(reason(&error), Some((segment.group, segment.index)));
                job.end();
                return;
            }
        }
    }
}

/// The engine's memory as the store's readers see it.
struct InPlace<'a>(&'a BlockPlace);

impl Place for InPlace<'_> {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn lend(&mut self, range: Range<usize>, fill: &mut dyn FnMut(&mut [u8])) -> bool {
        self.0.write(range, fill)
    }
}

fn reason(error: &PackError) -> RestoreFailure {
    match error {
        PackError::Refused { reason: Refusal::MissingSegment, .. } | PackError::NotFound { .. } => {
            RestoreFailure::Missing
        }
        PackError::Refused { .. } => RestoreFailure::Invalid,
        PackError::Limit { .. } => RestoreFailure::Slow,
        _ => RestoreFailure::Store,
    }
}
