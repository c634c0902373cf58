//! Keys that may change while the library is open: the key file is looked at again.
//!
//! Before anything is sealed, always, so that nothing is written under an epoch that was revoked a moment ago; otherwise
//! every second, so that what was revoked is not read for longer than that.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Library, Shared};
use crate::key_file::KeyStamp;
use crate::keys::KeyRing;
use crate::{KeyFile, PackError, Refusal};

/// How long a ring is read with before the file is looked at again.
const INTERVAL: Duration = Duration::from_secs(1);

/// The file, and when it was looked at.
#[derive(Debug)]
pub(super) struct KeyWatch {
    path: Option<PathBuf>,
    last: Mutex<(Instant, Option<KeyStamp>)>,
}

impl KeyWatch {
    pub(super) fn new(path: Option<PathBuf>) -> Self {
        // The ring was read before this: one that changed in between is read again with the first use.
        Self { path, last: Mutex::new((Instant::now(), None)) }
    }
}

impl Shared {
    /// The keys to read with.
    pub(super) fn keys(&self) -> Arc<KeyRing> {
        if let Err(error) = self.look_at_key_file(false) {
            // What is there can still be read; the next thing that is written says what is wrong.
            self.counters.failed(error);
        }
        self.ring()
    }

    /// The keys to seal with: those that the file has now.
    pub(super) fn sealing_keys(&self) -> Result<Arc<KeyRing>, PackError> {
        self.look_at_key_file(true)?;
        Ok(self.ring())
    }

    fn ring(&self) -> Arc<KeyRing> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn look_at_key_file(&self, now: bool) -> Result<(), PackError> {
        let Some(path) = &self.watch.path else { return Ok(()) };
        let mut last = self.watch.last.lock().unwrap_or_else(PoisonError::into_inner);
        if !now && last.0.elapsed() < INTERVAL {
            return Ok(());
        }
        last.0 = Instant::now();
        let stamp = KeyStamp::of(path)?;
        if last.1.as_ref() == Some(&stamp) {
            return Ok(());
        }
        // A file that is replaced meanwhile has another stamp and is read again.
        self.use_keys(KeyFile::open(path)?)?;
        last.1 = Some(stamp);
        Ok(())
    }

    fn use_keys(&self, keys: KeyRing) -> Result<(), PackError> {
        let mut current = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        if current.key_id() != keys.key_id() {
            let (expected, found) = (current.id(), keys.id());
            return Err(PackError::refused("the new key ring", Refusal::ForeignKey { expected, found }));
        }
        *current = Arc::new(keys);
        Ok(())
    }
}

impl Library {
    /// Uses these keys from now on: after a rotation. They must have the same base secret.
    pub fn set_keys(&self, keys: KeyRing) -> Result<(), PackError> {
        self.shared.use_keys(keys)
    }
}
