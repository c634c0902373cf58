//! A store in memory: for tests, and for packs that shall not outlive the process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Activity, CatalogStamp, CatalogStore, Listed, LockedCatalog, PackStore, Put, ReadAt, Usage};
use crate::{Area, ObjectName, PackError, Refusal};

/// The store. Clones share their content.
#[derive(Clone, Default)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    budget_bytes: Option<u64>,
    state: Mutex<State>,
    catalog: Mutex<Vec<u8>>,
    /// How many are active; `usize::MAX` while garbage is collected.
    active: Arc<Mutex<usize>>,
}

#[derive(Default)]
struct State {
    objects: HashMap<ObjectName, Object>,
    held_bytes: u64,
    tick: u64,
}

struct Object {
    bytes: Arc<Vec<u8>>,
    used: u64,
}

impl MemoryStore {
    /// A store without a limit.
    pub fn new() -> Self {
        Self::default()
    }

    /// A store of at most so many bytes.
    pub fn with_budget(budget_bytes: u64) -> Self {
        Self { shared: Arc::new(Shared { budget_bytes: Some(budget_bytes), ..Shared::default() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code path panics while it holds the lock; the state is whole either way.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces an object's bytes: how tests play an attacker or a bad disk.
    pub fn tamper(&self, name: &ObjectName, bytes: Vec<u8>) {
        let mut state = self.state();
        state.held_bytes += bytes.len() as u64;
        if let Some(old) = state.objects.insert(*name, Object { bytes: Arc::new(bytes), used: 0 }) {
            state.held_bytes -= old.bytes.len() as u64;
        }
    }

    /// An object's bytes.
    pub fn bytes(&self, name: &ObjectName) -> Option<Vec<u8>> {
        self.state().objects.get(name).map(|object| object.bytes.to_vec())
    }

    /// Replaces the catalog's bytes.
    pub fn tamper_catalog(&self, bytes: Vec<u8>) {
        *self.shared.catalog.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
    }

    /// The catalog's bytes.
    pub fn catalog_bytes(&self) -> Vec<u8> {
        self.shared.catalog.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl PackStore for MemoryStore {
    fn describe(&self) -> String {
        "memory".into()
    }

    fn put(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<Put, PackError> {
        let needed_bytes = parts.iter().map(|part| part.len() as u64).sum();
        let mut state = self.state();
        if state.objects.contains_key(name) {
            return Ok(Put::Exists);
        }
        if let Some(budget) = self.shared.budget_bytes
            && state.held_bytes + needed_bytes > budget
        {
            let detail = format!("{} of {budget} are in use", state.held_bytes);
            return Err(PackError::Full { needed_bytes, detail });
        }
        state.tick += 1;
        let object = Object { bytes: Arc::new(parts.concat()), used: state.tick };
        state.objects.insert(*name, object);
        state.held_bytes += needed_bytes;
        Ok(Put::Stored)
    }

    fn open(&self, name: &ObjectName) -> Result<Option<Box<dyn ReadAt>>, PackError> {
        let state = self.state();
        let Some(object) = state.objects.get(name) else { return Ok(None) };
        Ok(Some(Box::new(Opened { name: *name, bytes: Arc::clone(&object.bytes) })))
    }

    fn delete(&self, name: &ObjectName) -> Result<bool, PackError> {
        let mut state = self.state();
        let Some(object) = state.objects.remove(name) else { return Ok(false) };
        state.held_bytes -= object.bytes.len() as u64;
        Ok(true)
    }

    fn quarantine(&self, name: &ObjectName) -> Result<(), PackError> {
        self.delete(name).map(drop)
    }

    fn replace(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<(), PackError> {
        self.delete(name)?;
        self.put(name, parts).map(drop)
    }

    fn list(&self, area: Area) -> Result<Vec<Listed>, PackError> {
        let state = self.state();
        let listed = |(name, object): (&ObjectName, &Object)| Listed {
            name: *name,
            bytes: object.bytes.len() as u64,
            used_unix_ns: object.used,
        };
        Ok(state.objects.iter().filter(|(name, _)| name.area == area).map(listed).collect())
    }

    fn touch(&self, name: &ObjectName) {
        let mut state = self.state();
        state.tick += 1;
        let now = state.tick;
        if let Some(object) = state.objects.get_mut(name) {
            object.used = now;
        }
    }

    fn flush(&self) -> Result<(), PackError> {
        Ok(())
    }

    fn usage(&self) -> Result<Usage, PackError> {
        Ok(Usage { held_bytes: self.state().held_bytes, budget_bytes: self.shared.budget_bytes })
    }

    fn clean(&self) -> Result<u64, PackError> {
        Ok(0)
    }

    fn activity(&self) -> Result<Option<Box<dyn Activity>>, PackError> {
        let active = Arc::clone(&self.shared.active);
        let mut count = active.lock().unwrap_or_else(PoisonError::into_inner);
        if *count == usize::MAX {
            return Ok(None);
        }
        *count += 1;
        drop(count);
        Ok(Some(Box::new(Active { count: active })))
    }

    fn quiet(&self) -> Result<Option<Box<dyn Activity>>, PackError> {
        let active = Arc::clone(&self.shared.active);
        let mut count = active.lock().unwrap_or_else(PoisonError::into_inner);
        if *count != 0 {
            return Ok(None);
        }
        *count = usize::MAX;
        drop(count);
        Ok(Some(Box::new(Active { count: active })))
    }

    fn catalog(&self) -> Option<&dyn CatalogStore> {
        Some(self)
    }
}

impl CatalogStore for MemoryStore {
    fn lock(&self) -> Result<Box<dyn LockedCatalog + '_>, PackError> {
        Ok(Box::new(Locked { bytes: self.shared.catalog.lock().unwrap_or_else(PoisonError::into_inner) }))
    }

    fn stamp(&self) -> Result<Option<CatalogStamp>, PackError> {
        Ok(None)
    }
}

struct Opened {
    name: ObjectName,
    bytes: Arc<Vec<u8>>,
}

impl ReadAt for Opened {
    fn len(&self) -> Result<u64, PackError> {
        Ok(self.bytes.len() as u64)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), PackError> {
        read_slice(self.name, &self.bytes, offset, out)
    }
}

/// [`ReadAt::read_at`] of an object that is in memory.
pub(super) fn read_slice(
    name: ObjectName,
    object: &[u8],
    offset: u64,
    out: &mut [u8],
) -> Result<(), PackError> {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let end = start.saturating_add(out.len());
    let Some(bytes) = object.get(start..end) else {
        let (expected, found) = (end as u64, object.len() as u64);
        return Err(PackError::refused(name, Refusal::Truncated { expected, found }));
    };
    out.copy_from_slice(bytes);
    Ok(())
}

/// One active user, or the collector.
pub(super) struct Active {
    pub(super) count: Arc<Mutex<usize>>,
}

impl Activity for Active {}

impl Drop for Active {
    fn drop(&mut self) {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        *count = if *count == usize::MAX { 0 } else { *count - 1 };
    }
}

struct Locked<'a> {
    bytes: MutexGuard<'a, Vec<u8>>,
}

impl LockedCatalog for Locked<'_> {
    fn len(&mut self) -> Result<u64, PackError> {
        Ok(self.bytes.len() as u64)
    }

    fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, PackError> {
        let rest = self.bytes.get(offset as usize..).unwrap_or_default();
        Ok(rest[..rest.len().min(len as usize)].to_vec())
    }

    fn truncate(&mut self, len: u64) -> Result<(), PackError> {
        self.bytes.truncate(len as usize);
        Ok(())
    }

    fn append(&mut self, record: &[u8]) -> Result<(), PackError> {
        self.bytes.extend_from_slice(record);
        Ok(())
    }

    fn replace(&mut self, records: &[u8]) -> Result<(), PackError> {
        *self.bytes = records.to_vec();
        Ok(())
    }
}
