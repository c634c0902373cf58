//! Keys that may change while the library is open: the key file is looked at again.
//!
//! Before anything is sealed, always, so that nothing is written under an epoch that was revoked a moment ago; otherwise
//! every second, so that what was revoked is not read for longer than that.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::key_file::KeyStamp;
use crate::keys::KeyRing;
use crate::{KeyFile, PackError, Refusal};

/// How long a ring is read with before the file is looked at again.
const INTERVAL: Duration = Duration::from_secs(1);

/// The keys in use, the file that they are from, and when it was looked at.
#[derive(Debug)]
pub(super) struct WatchedKeys {
    keys: RwLock<Arc<KeyRing>>,
    path: Option<PathBuf>,
    last: Mutex<(Instant, Option<KeyStamp>)>,
}

impl WatchedKeys {
    pub(super) fn new(keys: KeyRing, path: Option<PathBuf>) -> Self {
        // The ring was read before this: one that changed in between is read again with the first use.
        Self { keys: RwLock::new(Arc::new(keys)), path, last: Mutex::new((Instant::now(), None)) }
    }

    /// The keys as they were read last.
    pub(super) fn ring(&self) -> Arc<KeyRing> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the file again if it is another one by now; it is looked at if that is due, or `now`.
    pub(super) fn look(&self, now: bool) -> Result<(), PackError> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if !now && last.0.elapsed() < INTERVAL {
            return Ok(());
        }
        last.0 = Instant::now();
        let stamp = KeyStamp::of(path)?;
        if last.1.as_ref() == Some(&stamp) {
            return Ok(());
        }
        // A file that is replaced meanwhile has another stamp and is read again.
        self.set(KeyFile::open(path)?)?;
        last.1 = Some(stamp);
        Ok(())
    }

    /// Uses these keys from now on. They must have the same base secret.
    pub(super) fn set(&self, keys: KeyRing) -> Result<(), PackError> {
        let mut current = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        if current.key_id() != keys.key_id() {
            let (expected, found) = (current.id(), keys.id());
            return Err(PackError::refused("the new key ring", Refusal::ForeignKey { expected, found }));
        }
        *current = Arc::new(keys);
        Ok(())
    }
}
