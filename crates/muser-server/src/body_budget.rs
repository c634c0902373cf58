//! One budget of memory for the bodies of all connections.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::error::ApiError;

/// Longest time that a body waits for memory.
const BUDGET_WAIT: Duration = Duration::from_secs(10);

/// Unit of the budget.
const UNIT_BYTES: usize = 1 << 10;

/// Memory for the bodies of all connections.
#[derive(Debug, Clone)]
pub(crate) struct BodyBudget(Arc<Semaphore>, usize);

impl BodyBudget {
    /// So many bytes in all.
    pub(crate) fn new(bytes: usize) -> Self {
        let units = (bytes / UNIT_BYTES).clamp(1, Semaphore::MAX_PERMITS >> 1);
        Self(Arc::new(Semaphore::new(units)), units)
    }

    /// Takes some of it; waits a little if others have it.
    pub(crate) async fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        // A request that needs more than there is gets all of it, when nobody else has any.
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES).min(self.1)).unwrap_or(u32::MAX);
        let taken = timeout(BUDGET_WAIT, Arc::clone(&self.0).acquire_many_owned(units)).await;
        taken.ok().and_then(Result::ok).ok_or_else(ApiError::bodies_full)
    }
}
