//! One restore, on which several threads work.

use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use muser_engine::BlockReceiver;
use muser_pack::{Plan, Segment};

/// One restore. Threads take its segments in order; when the last one that helps lets go, the delivery ends.
pub(crate) struct FetchJob {
    pub(crate) segments: Vec<Segment>,
    pub(crate) next: AtomicUsize,
    /// Keeps the segments from being removed.
    _leases: Mutex<Vec<Plan>>,
    delivery: Mutex<Option<BlockReceiver>>,
    pub(crate) delivered: AtomicUsize,
    /// When it has taken too long, and how long that is.
    pub(crate) until: Option<Instant>,
    pub(crate) limit_ms: u64,
}

impl FetchJob {
    pub(crate) fn new(
        segments: Vec<Segment>,
        leases: Vec<Plan>,
        delivery: BlockReceiver,
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

    pub(crate) fn delivery(&self) -> Option<BlockReceiver> {
        self.delivery.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn end(&self) {
        drop(self.delivery.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}
