//! A part as the split holds it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use muser_backend::{LayerRange, PartExecutor};

/// A part, which a thread of the pipeline may be using.
pub(crate) type Shared = Arc<Mutex<Box<dyn PartExecutor>>>;

/// What is known of a part without asking it.
pub(crate) struct Part {
    pub(crate) executor: Shared,
    pub(crate) range: LayerRange,
    /// Bytes of weights that a token reads.
    pub(crate) weights: u64,
    /// The part that computes its layers in steps of many rows.
    pub(crate) streamer: Option<usize>,
}

impl Part {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Box<dyn PartExecutor>> {
        lock(&self.executor)
    }
}

/// A part that panicked may be used again: its own state is what its errors say.
pub(crate) fn lock(part: &Shared) -> MutexGuard<'_, Box<dyn PartExecutor>> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}
