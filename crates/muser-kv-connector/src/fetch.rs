//! The threads that bring segments from the store into the engine's hands.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use muser_engine::{BlockPlace, RestoreFailure};
use muser_pack::{PackError, Place, Refusal};

use crate::job::FetchJob;
use crate::shared::Shared;

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
