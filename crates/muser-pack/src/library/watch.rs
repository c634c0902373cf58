//! What other processes publish in the same store, seen without being asked to.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::PackError;
use crate::store::{CatalogStamp, CatalogStore};

/// How long what was seen counts where looking is a question to the file system.
const INTERVAL: Duration = Duration::from_millis(250);
/// The same where all objects have to be listed.
const LISTING_INTERVAL: Duration = Duration::from_secs(30);

/// When the store was looked at, and what its catalog was like.
#[derive(Debug, Default)]
pub(super) struct StoreWatch {
    last: Mutex<Option<(Instant, Option<CatalogStamp>)>>,
}

impl StoreWatch {
    /// The catalog has been read to its end, and its lock is held.
    pub(super) fn seen(&self, catalog: Option<&dyn CatalogStore>) {
        let stamp = catalog.and_then(|catalog| catalog.stamp().ok().flatten());
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), stamp));
    }

    /// Is it time to look again, and has anything changed?
    pub(super) fn is_behind(&self, catalog: Option<&dyn CatalogStore>) -> Result<bool, PackError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let interval = if catalog.is_some() { INTERVAL } else { LISTING_INTERVAL };
        let Some((looked, seen)) = last.as_mut().filter(|(looked, _)| looked.elapsed() >= interval) else {
            return Ok(false);
        };
        *looked = Instant::now();
        let Some(catalog) = catalog else { return Ok(true) };
        let now = catalog.stamp()?;
        Ok(now.is_none() || now != *seen)
    }
}
