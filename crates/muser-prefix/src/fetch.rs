//! The threads that bring segments from the store into the engine's hands.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use muser_engine::{Delivery, RestoreFailure};
use muser_pack::{PackError, Plan, Refusal, Segment};

use crate::source::Shared;

/// One restore. Threads take its segments in order; when the last one that helps lets go, the delivery ends.
pub(crate) struct FetchJob {
    segments: Vec<Segment>,
    next: AtomicUsize,
    /// Keeps the segments from being removed.
    _leases: Mutex<Vec<Plan>>,
    delivery: Mutex<Option<Delivery>>,
    delivered: AtomicUsize,
}

impl FetchJob {
    pub(crate) fn new(segments: Vec<Segment>, leases: Vec<Plan>, delivery: Delivery) -> Self {
        Self {
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
        let Some(mut buffer) = shared.buffers.take(segment.bytes, given_up) else {
            job.end();
            return;
        };
        let cancel = delivery.cancel_flag();
        match shared.library.fetch_unless(&shared.scope, segment, &mut buffer.bytes, cancel) {
            Ok(()) => {
                delivery.give(segment.group, segment.index, Box::new(buffer));
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

fn reason(error: &PackError) -> RestoreFailure {
    match error {
        PackError::Refused { reason: Refusal::MissingSegment, .. } | PackError::NotFound { .. } => {
            RestoreFailure::Missing
        }
        PackError::Refused { .. } => RestoreFailure::Invalid,
        _ => RestoreFailure::Store,
    }
}
