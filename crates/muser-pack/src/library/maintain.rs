//! Keeping a store in order: pin, remove, evict, collect garbage, verify.

use std::collections::HashSet;

use muser_kv::KvGroup;

use super::catalog::{Entry, View};
use super::{Library, Shared};
use crate::counters::add;
use crate::object::content_id;
use crate::store::{CatalogStore, LockedCatalog};
use crate::{Area, PackError, PackId, Refusal, SegmentId};

/// What a verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Manifests and segments that were read whole.
    pub objects: usize,
    /// Plain bytes that were checked.
    pub bytes: u64,
    /// What was refused, and why.
    pub refused: Vec<(String, Refusal)>,
}

impl Library {
    /// Pins or unpins a pack. A pinned one is never dropped to make room.
    pub fn set_pinned(&self, id: PackId, pinned: bool) -> Result<(), PackError> {
        self.locked(|shared, view, locked| {
            if shared.index().pack(id).is_none() {
                return Err(PackError::NotFound { object: id.object().to_string() });
            }
            shared.set_pinned_locked(view, locked, id, pinned)
        })
    }

    /// Removes a pack and every segment that no other pack needs. Plans that use them keep them until they are dropped.
    pub fn remove(&self, id: PackId) -> Result<(), PackError> {
        self.locked(|shared, view, locked| {
            // One that is not believed can be removed as well.
            if shared.index().pack(id).is_none() && !view.packs.contains_key(&id) {
                return Err(PackError::NotFound { object: id.object().to_string() });
            }
            shared.remove_locked(view, locked, id)
        })
    }

    /// Drops the least recently used packs until at most `bytes` are held. Returns how many were dropped.
    pub fn shrink_to(&self, bytes: u64) -> Result<usize, PackError> {
        let mut dropped = 0;
        while self.shared.store.usage()?.held_bytes > bytes && self.shared.lock_and_drop_oldest()? {
            dropped += 1;
        }
        Ok(dropped)
    }

    /// Deletes what no visible pack needs: what a killed process left, what was removed while it was read. Returns
    /// objects and bytes. Does nothing while anybody reads or writes packs.
    pub fn collect_garbage(&self) -> Result<(usize, u64), PackError> {
        self.locked(|shared, view, locked| {
            let Some(_quiet) = shared.store.quiet()? else { return Err(PackError::Busy) };
            if let Some(&index) = view.damaged.first() {
                // What the lost record named is not garbage.
                return Err(PackError::refused("the pack catalog", Refusal::Catalog { index }));
            }
            let (objects, bytes) = shared.collect(view, locked.is_some())?;
            let (aside, aside_bytes) = shared.store.empty_quarantine()?;
            Ok((objects + aside, bytes + aside_bytes))
        })
    }

    /// Deletes what killed processes left, so that it does not drive out packs and what was deleted is gone. Only at a quiet
    /// moment, and only where a whole catalog tells what is needed. If nobody can say that the catalog has not lost its end
    /// (the store was not seen before), a manifest or a record that it merely does not name stays, with its segments.
    pub(super) fn sweep(&self) -> Result<(), PackError> {
        self.locked(|shared, view, locked| {
            if locked.is_none() || !view.damaged.is_empty() {
                return Ok(());
            }
            match shared.store.quiet()? {
                Some(_quiet) if view.vouched => shared.collect(view, true).map(drop),
                Some(_quiet) => shared.sweep(view),
                None => Ok(()),
            }
        })
    }

    /// Reads a pack whole: manifest, every segment, and whether each content has the name that it should have.
    pub fn verify(&self, id: PackId, seen: &mut dyn FnMut(u64)) -> Result<VerifyReport, PackError> {
        let mut report = VerifyReport::default();
        let manifest = self.shared.read_visible(&self.writer(), id);
        let manifest = match manifest {
            Ok((manifest, _)) => manifest,
            Err(error) => return report.with(error, &id.object().to_string()),
        };
        report.objects += 1;
        let keys = self.keys();
        for (group, index, segment) in manifest.segments() {
            let name = segment.object();
            let read = || {
                let opened = self.shared.open_object(&keys, name)?;
                Ok((opened.header.spec, opened.read_all()?))
            };
            match read() {
                Ok((spec, bytes)) => {
                    report.objects += 1;
                    report.bytes += bytes.len() as u64;
                    seen(bytes.len() as u64);
                    let representation = &manifest.identity.representation;
                    let expected = match group {
                        KvGroup::Full => representation.full_block_bytes,
                        KvGroup::Sliding => representation.sliding_block_bytes,
                    };
                    let fits = bytes.len() == expected as usize
                        && spec.positions as usize == manifest.positions(index);
                    let named = |tenant: &crate::keys::TenantKeys| {
                        SegmentId(content_id(&keys, &tenant.content, &spec, &bytes)) == segment
                    };
                    // Only the default tenant's label is known here; others are checked by their codes alone.
                    let default = keys.tenant("");
                    if !fits || (default.id == manifest.tenant && !named(&default)) {
                        report.refused.push((name.to_string(), Refusal::Swapped));
                    }
                }
                Err(error) => report = report.with(error, &name.to_string())?,
            }
        }
        Ok(report)
    }

    /// Runs `work` with everything locked and up to date.
    pub(super) fn locked<T>(
        &self,
        work: impl FnOnce(&Shared, &mut View, Option<&mut dyn LockedCatalog>) -> Result<T, PackError>,
    ) -> Result<T, PackError> {
        let mut view = self.writer();
        let mut locked = self.shared.store.catalog().map(CatalogStore::lock).transpose()?;
        if let Some(locked) = &mut locked {
            self.shared.refresh_locked(&mut view, &mut **locked)?;
        }
        let locked = locked.as_mut().map(|locked| &mut **locked as &mut dyn LockedCatalog);
        work(&self.shared, &mut view, locked).map_err(|error| self.shared.counters.failed(error))
    }
}

impl VerifyReport {
    /// A refusal is a finding, anything else a failure.
    fn with(mut self, error: PackError, object: &str) -> Result<Self, PackError> {
        match error {
            PackError::Refused { reason, .. } => self.refused.push((object.to_owned(), reason)),
            error => return Err(error),
        }
        Ok(self)
    }
}

impl Shared {
    /// Deletes only what the catalog says was removed or replaced, and segments that no manifest names. The caller holds the
    /// store quiet.
    fn sweep(&self, view: &View) -> Result<(), PackError> {
        let keys = self.keys();
        let obsolete =
            view.obsolete.iter().map(|(name, revision)| super::records::object_id(&keys, name, *revision));
        let obsolete: HashSet<[u8; 32]> = obsolete.collect();
        let mut needed = self.needed_segments();
        let mut some_unreadable = self.some_unreadable(view);
        for listed in self.store.list(Area::Packs)? {
            let id = PackId(listed.name.id);
            if view.removed.contains(&id) {
                self.store.delete(&listed.name)?;
            } else if !view.packs.contains_key(&id) {
                match self.read_manifest(id, None) {
                    Ok((manifest, _)) => needed.extend(manifest.segments().map(|(.., id)| id.0)),
                    Err(_) => some_unreadable = true,
                }
            }
        }
        for listed in self.store.list(Area::Segments)? {
            if !some_unreadable && !needed.contains(&listed.name.id) {
                self.store.delete(&listed.name)?;
            }
        }
        for listed in self.store.list(Area::Records)? {
            if obsolete.contains(&listed.name.id) {
                self.store.delete(&listed.name)?;
            }
        }
        self.store.flush()
    }

    /// Segments of every pack that is visible.
    fn needed_segments(&self) -> HashSet<[u8; 32]> {
        let mut segments = HashSet::new();
        for (_, entry) in self.index().packs() {
            for block in &entry.blocks {
                segments.extend(std::iter::once(block.full).chain(block.sliding).map(|id| id.0));
            }
        }
        segments
    }

    /// Objects that nothing visible needs are deleted; how many, and their bytes. The caller holds the store quiet.
    fn collect(&self, view: &View, has_catalog: bool) -> Result<(usize, u64), PackError> {
        // Segments of packs that cannot be read (with this key) are not known: none is touched then.
        let some_unreadable = self.some_unreadable(view);
        let segments = self.needed_segments();
        let records: HashSet<[u8; 32]> = {
            let keys = self.keys();
            let current = view.records.iter();
            current.map(|(name, (_, revision))| super::records::object_id(&keys, name, *revision)).collect()
        };
        let mut freed = (0, self.store.clean()?);
        for area in Area::ALL {
            for listed in self.store.list(area)? {
                let needed = match area {
                    Area::Packs => !has_catalog || view.packs.contains_key(&PackId(listed.name.id)),
                    Area::Segments => some_unreadable || segments.contains(&listed.name.id),
                    Area::Records => !has_catalog || records.contains(&listed.name.id),
                };
                if !needed && self.store.delete(&listed.name)? {
                    freed = (freed.0 + 1, freed.1 + listed.bytes);
                }
            }
        }
        self.store.flush()?;
        Ok(freed)
    }

    /// Does the catalog name a pack that is not believed?
    fn some_unreadable(&self, view: &View) -> bool {
        let index = self.index();
        view.packs.keys().any(|id| index.pack(*id).is_none())
    }

    pub(super) fn set_pinned_locked(
        &self,
        view: &mut View,
        locked: Option<&mut (dyn LockedCatalog + '_)>,
        id: PackId,
        pinned: bool,
    ) -> Result<(), PackError> {
        if let Some(locked) = locked {
            view.append(&self.keys(), locked, Entry::Pin { pack: id, pinned })?;
        }
        self.index().set_pinned(id, pinned);
        Ok(())
    }

    /// First the record, then the bytes.
    pub(super) fn remove_locked(
        &self,
        view: &mut View,
        locked: Option<&mut (dyn LockedCatalog + '_)>,
        id: PackId,
    ) -> Result<(), PackError> {
        if let Some(locked) = locked
            && view.packs.contains_key(&id)
        {
            let entry = Entry::Remove { pack: id };
            match view.append(&self.keys(), locked, entry) {
                // A full disk has no room to say that there shall be more: without its manifest the pack is gone too.
                Err(PackError::Full { .. }) => {
                    self.store.delete(&id.object())?;
                    view.append(&self.keys(), locked, entry)?;
                }
                other => other?,
            }
        }
        self.store.delete(&id.object())?;
        let unused = self.index().remove(id);
        self.delete_segments(&unused);
        Ok(())
    }

    /// Drops the least recently used pack; `false` if there is none to drop.
    pub(super) fn drop_oldest(
        &self,
        view: &mut View,
        locked: Option<&mut (dyn LockedCatalog + '_)>,
    ) -> Result<bool, PackError> {
        let Some(oldest) = self.index().oldest() else { return Ok(false) };
        self.remove_locked(view, locked, oldest)?;
        add(&self.counters.evicted_packs, 1);
        Ok(true)
    }

    pub(super) fn lock_and_drop_oldest(&self) -> Result<bool, PackError> {
        let mut view = self.writer.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut locked = self.store.catalog().map(CatalogStore::lock).transpose()?;
        if let Some(locked) = &mut locked {
            self.refresh_locked(&mut view, &mut **locked)?;
        }
        self.drop_oldest(&mut view, locked.as_deref_mut())
    }
}
