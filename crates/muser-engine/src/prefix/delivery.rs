//! Blocks on their way in.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::Thread,
};

use crossbeam_queue::SegQueue;
use muser_kv::KvGroup;

use crate::prefix::RestoreFailure;

/// The bytes of a block, in the layout of [`muser_backend::Executor::export_block`]. Dropped by the engine as soon as they
/// have been copied: a source that bounds its memory counts on that.
pub type BlockBytes = Box<dyn AsRef<[u8]> + Send>;

/// A block that has arrived.
pub(crate) struct Delivered {
    pub(crate) group: KvGroup,
    pub(crate) index: usize,
    pub(crate) bytes: BlockBytes,
}

/// What went wrong and, if it was about one block, with which.
pub(crate) type Failed = (RestoreFailure, Option<(KvGroup, usize)>);

pub(crate) struct DeliveryCell {
    pub(crate) arrived: SegQueue<Delivered>,
    failed: OnceLock<Failed>,
    closed: AtomicBool,
    cancelled: AtomicBool,
    engine: Thread,
}

impl DeliveryCell {
    /// The failure, once there is nothing left to take.
    pub(crate) fn failure(&self) -> Option<Failed> {
        // The order matters: whoever closes has given everything before.
        let closed = self.closed.load(Ordering::SeqCst);
        match self.failed.get() {
            Some(failed) => Some(*failed),
            None if closed && self.arrived.is_empty() => Some((RestoreFailure::Store, None)),
            None => None,
        }
    }

    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        while self.arrived.pop().is_some() {}
    }
}

/// Closes when the last clone of a delivery goes.
struct Closing(Arc<DeliveryCell>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::SeqCst);
        self.0.engine.unpark();
    }
}

/// The source's end of a fetch. Clones may be used on several threads.
#[derive(Clone)]
pub struct Delivery(Arc<Closing>);

impl Delivery {
    pub(crate) fn new() -> (Self, Arc<DeliveryCell>) {
        let cell = Arc::new(DeliveryCell {
            arrived: SegQueue::new(),
            failed: OnceLock::new(),
            closed: AtomicBool::new(false),
            cancelled: AtomicBool::new(false),
            engine: std::thread::current(),
        });
        (Self(Arc::new(Closing(Arc::clone(&cell)))), cell)
    }

    /// Has the engine lost interest? Then whatever is given is dropped.
    pub fn is_cancelled(&self) -> bool {
        self.0.0.cancelled.load(Ordering::Relaxed)
    }

    /// The flag behind [`Delivery::is_cancelled`], for readers that look at one.
    pub fn cancel_flag(&self) -> &AtomicBool {
        &self.0.0.cancelled
    }

    /// Hands over a block. The caller vouches for the bytes: same model, same numeric route, same prefix.
    pub fn give(&self, group: KvGroup, index: usize, bytes: BlockBytes) {
        let cell = &self.0.0;
        cell.arrived.push(Delivered { group, index, bytes });
        if self.is_cancelled() {
            cell.cancel();
        }
        cell.engine.unpark();
    }

    /// Gives up, naming the block that was to blame if there is one: the engine then asks for a prefix that does without.
    pub fn fail(&self, failure: RestoreFailure, block: Option<(KvGroup, usize)>) {
        let _ = self.0.0.failed.set((failure, block));
        self.0.0.engine.unpark();
    }
}

impl std::fmt::Debug for Delivery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Delivery").field("cancelled", &self.is_cancelled()).finish_non_exhaustive()
    }
}
