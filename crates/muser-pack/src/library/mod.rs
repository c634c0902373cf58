//! The way in: packs by prefix.
//!
//! Two locks, always taken in this order: *writer* (the catalog's view; held while something is made visible or removed,
//! with its disk syncs) and *index* (held for moments, never across a file access). Lookups take only the second, so
//! that a publication in the background never delays one.

mod anchor;
mod bundle;
mod catalog;
mod index;
mod key_watch;
mod lookup;
mod maintain;
mod publish;
mod records;
mod recover;
mod reseal;
mod restore;
mod watch;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use muser_kv::{CacheScope, KvGroup, PositionKey};

use crate::counters::add;
use crate::identity::Digest;
use crate::keys::{KeyRing, TenantKeys};
use crate::kind::Kind;
use crate::manifest::{ChainKey, Manifest, chain, chain_root};
use crate::object::OpenedObject;
use crate::store::{Activity, CatalogStore, PackStore};
use crate::{Counters, Identity, ObjectName, PackError, PackId, Refusal, SegmentId};

use anchor::Anchor;
use catalog::{Changes, Entry, View};
use index::Index;
use key_watch::WatchedKeys;
use watch::StoreWatch;

pub use lookup::Plan;
pub use maintain::VerifyReport;
pub use publish::{Publication, Published, Wanted};
pub use records::{Expect, RecordInfo};
pub use recover::Recovered;
pub use reseal::Resealed;
pub use restore::Place;

/// How a library behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryOptions {
    /// Encrypt what is written and refuse what is not encrypted. Without it bytes are still authenticated.
    pub encrypt: bool,
    /// Most bytes of a chunk; smaller only in tests.
    pub chunk_bytes: u32,
    /// Remove packs whose whole content is in the one that is being published.
    pub supersede: bool,
    /// A file outside the store (beside the key) by which an old copy of the whole store is recognised.
    pub anchor: Option<PathBuf>,
    /// The file that the keys are from: it is looked at again, so that a rotation or a revocation reaches an open library.
    pub key_file: Option<PathBuf>,
}

impl Default for LibraryOptions {
    fn default() -> Self {
        Self {
            encrypt: true,
            chunk_bytes: crate::object::USUAL_CHUNK_BYTES,
            supersede: true,
            anchor: None,
            key_file: None,
        }
    }
}

/// See [`crate::fuzzing`].
pub(crate) fn mend_catalog(keys: &KeyRing, bytes: &mut [u8]) {
    catalog::mend(keys, bytes);
}

/// The packs of a store. Clones share everything.
#[derive(Clone)]
pub struct Library {
    shared: Arc<Shared>,
}

struct Shared {
    store: Arc<dyn PackStore>,
    keys: WatchedKeys,
    options: LibraryOptions,
    writer: Mutex<View>,
    index: Mutex<Index>,
    counters: Counters,
    others: StoreWatch,
    /// What is known of records, by place in the catalog and revision, so that listing them reads each only once.
    record_infos: Mutex<HashMap<[u8; 32], RecordInfo>>,
    /// Buffers for chunks on their way in.
    scratch: Mutex<Vec<Vec<u8>>>,
}

/// One tenant's prefixes under one identity: what lookups and publications are about.
#[derive(Clone)]
pub struct Scope {
    identity: Arc<Identity>,
    digest: Digest,
    tenant: TenantKeys,
    root: ChainKey,
    /// Keys that a row sees in the sliding layers of target or draft.
    window: usize,
}

/// A segment of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Which layers' rows.
    pub group: KvGroup,
    /// Which block: positions `256 index ..`.
    pub index: usize,
    /// Positions that have rows in it; 256 but in an unfinished block.
    pub positions: usize,
    /// Its name.
    pub id: SegmentId,
    /// Its size in plain.
    pub bytes: usize,
}

/// A pack, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackInfo {
    /// Its name.
    pub id: PackId,
    /// Positions it covers.
    pub positions: usize,
    /// Segments of the full group and of the sliding group.
    pub segments: (usize, usize),
    /// Plain bytes of its segments, shared ones included.
    pub bytes: u64,
    /// Kept until somebody removes it.
    pub pinned: bool,
    /// When it was published, in seconds since 1970.
    pub created_unix_s: u64,
    /// Digest of what it was computed with.
    pub identity: Digest,
    /// Public id of its tenant.
    pub tenant: [u8; 16],
}

impl Library {
    /// Opens a store. What a killed process left half done is forgotten; packs that are not believed are counted and not
    /// used. A store whose catalog is missing, older than what was seen of it, or not to be believed from its first record
    /// on is opened too, so that whoever serves goes on: [`Library::suspended`] says why nothing is found or written in it.
    ///
    /// # Errors
    /// Only if the store cannot be used at all: its files fail, or it has another key.
    pub fn open(
        store: Arc<dyn PackStore>,
        keys: KeyRing,
        options: LibraryOptions,
    ) -> Result<Self, PackError> {
        let anchor = Anchor::new(options.anchor.clone(), store.place());
        let shared = Shared {
            store,
            keys: WatchedKeys::new(keys, options.key_file.clone()),
            writer: Mutex::new(View::new(anchor)),
            others: StoreWatch::default(),
            options,
            index: Mutex::default(),
            counters: Counters::default(),
            record_infos: Mutex::default(),
            scratch: Mutex::default(),
        };
        let library = Self { shared: Arc::new(shared) };
        if let Some(_quiet) = library.shared.store.quiet()? {
            library.shared.store.clean()?;
        }
        match library.refresh() {
            Ok(()) => library.sweep()?,
            Err(_) if library.suspended().is_some() => {}
            Err(error) => return Err(error),
        }
        Ok(library)
    }

    /// The scope of one tenant's prefixes under `identity`. The label `""` is the only tenant of a single user.
    pub fn scope(&self, identity: Identity, tenant: &str) -> Scope {
        let tenant = self.keys().tenant(tenant);
        let digest = identity.digest();
        let draft = identity.draft.as_ref().map_or(0, |draft| draft.window);
        let window = identity.geometry.window.max(draft) as usize;
        let root = chain_root(&tenant.prefix, &digest);
        Scope { identity: Arc::new(identity), digest, tenant, root, window }
    }

    /// The scope of what an engine computes for one of its own scopes: a tenant for each, `""` for everybody's.
    pub fn scope_for(&self, identity: Identity, scope: CacheScope) -> Scope {
        let bytes = if scope.is_default() { &[][..] } else { scope.as_bytes() };
        self.scope(identity, &crate::name::hex(bytes))
    }

    /// Sees what other processes have published and removed since.
    pub fn refresh(&self) -> Result<(), PackError> {
        let mut writer = self.writer();
        self.shared.refresh(&mut writer).map_err(|error| self.shared.counters.failed(error))
    }

    /// Takes in what other processes have published and removed, if that is due: at most four times a second, and at the
    /// price of one question to the file system while nothing has changed. It never waits for a publication of this process.
    pub fn keep_up(&self) {
        if let Err(error) = self.shared.keep_up() {
            self.shared.counters.failed(error);
        }
    }

    /// All packs, oldest first.
    pub fn packs(&self) -> Vec<PackInfo> {
        let index = self.shared.index();
        let mut packs: Vec<PackInfo> = index.packs().map(|(id, entry)| info(id, entry)).collect();
        packs.sort_by_key(|pack| (pack.created_unix_s, pack.id));
        packs
    }

    /// One pack.
    pub fn pack(&self, id: PackId) -> Option<PackInfo> {
        let index = self.shared.index();
        index.pack(id).map(|entry| info(id, entry))
    }

    /// What a pack was computed with, and its prefix.
    pub fn contents(&self, id: PackId) -> Result<(Identity, Vec<PositionKey>), PackError> {
        let (manifest, _) = self.shared.read_visible(&self.writer(), id)?;
        let units = manifest.units.iter().map(|unit| PositionKey::from_le_bytes(*unit)).collect();
        Ok((manifest.identity, units))
    }

    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// The store behind.
    pub fn store(&self) -> &Arc<dyn PackStore> {
        &self.shared.store
    }

    /// The keys in use.
    pub fn keys(&self) -> Arc<KeyRing> {
        self.shared.keys()
    }

    /// Uses these keys from now on: after a rotation. They must have the same base secret.
    pub fn set_keys(&self, keys: KeyRing) -> Result<(), PackError> {
        self.shared.keys.set(keys)
    }

    fn writer(&self) -> MutexGuard<'_, View> {
        self.shared.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("store", &self.shared.store.describe()).finish_non_exhaustive()
    }
}

impl Scope {
    /// What the bytes mean.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Digest of identity and representation.
    pub fn digest(&self) -> &Digest {
        &self.digest
    }

    /// Public id of the tenant, as [`PackInfo::tenant`] has it.
    pub fn tenant_id(&self) -> &[u8; 16] {
        &self.tenant.id
    }

    /// Chain keys of a prefix's blocks, an unfinished last block included.
    pub fn chain(&self, units: &[PositionKey]) -> Vec<ChainKey> {
        chain(&self.tenant.prefix, self.root, units)
    }

    /// Bytes of a block of `group`.
    pub fn block_bytes(&self, group: KvGroup) -> usize {
        let representation = &self.identity.representation;
        match group {
            KvGroup::Full => representation.full_block_bytes as usize,
            KvGroup::Sliding => representation.sliding_block_bytes as usize,
        }
    }

    /// First block of the sliding group that a row at `position` reads.
    pub fn first_sliding_block(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window.max(1)) / muser_kv::BLOCK_LEN
    }
}

impl std::fmt::Debug for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("identity", &crate::name::hex(&self.digest)).finish_non_exhaustive()
    }
}

impl Shared {
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keys to read with.
    fn keys(&self) -> Arc<KeyRing> {
        if let Err(error) = self.keys.look(false) {
            // What is there can still be read; the next thing that is written says what is wrong.
            self.counters.failed(error);
        }
        self.keys.ring()
    }

    /// The keys to seal with: those that the file has now.
    fn sealing_keys(&self) -> Result<Arc<KeyRing>, PackError> {
        self.keys.look(true)?;
        Ok(self.keys.ring())
    }

    fn keep_up(&self) -> Result<(), PackError> {
        if !self.others.is_behind(self.store.catalog())? {
            return Ok(());
        }
        let mut view = match self.writer.try_lock() {
            Ok(view) => view,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Whoever holds it has just looked.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        self.refresh(&mut view)
    }

    /// Brings view and index up to date.
    fn refresh(&self, view: &mut View) -> Result<(), PackError> {
        match self.store.catalog() {
            Some(catalog) => {
                let mut locked = catalog.lock()?;
                self.refresh_locked(view, &mut *locked)
            }
            None => self.refresh_from_listing(),
        }
    }

    fn refresh_locked(
        &self,
        view: &mut View,
        locked: &mut dyn crate::store::LockedCatalog,
    ) -> Result<(), PackError> {
        let (first_look, damaged) = (view.read() == 0, view.damaged.len());
        let looked = view.refresh(&self.keys(), locked, &|| self.count_objects());
        self.others.seen(self.store.catalog());
        add(&self.counters.anchor_failures, std::mem::take(&mut view.anchor_failures));
        for &index in view.damaged.get(damaged..).unwrap_or_default() {
            self.counters.failed(PackError::refused("the pack catalog", Refusal::Catalog { index }));
        }
        let changes = match looked {
            Ok(changes) => changes,
            Err(error) => {
                if view.suspended.is_some() {
                    self.forget_all();
                }
                return Err(error);
            }
        };
        match changes {
            Changes::Entries(entries) if !first_look => {
                for entry in entries {
                    match entry {
                        Entry::Add { pack, digest, pinned } => self.take_in(pack, Some(digest), pinned),
                        Entry::Remove { pack } => {
                            // Whoever removed the pack removed its segments.
                            self.index().remove(pack);
                        }
                        Entry::Pin { pack, pinned } => self.index().set_pinned(pack, pinned),
                        Entry::RecordWritten { .. } | Entry::RecordRemoved { .. } => {}
                    }
                }
            }
            Changes::Entries(_) | Changes::Replaced => {
                return self.index_anew(view);
            }
        }
        Ok(())
    }

    /// Brings the index to what the whole view says.
    fn index_anew(&self, view: &View) -> Result<(), PackError> {
        let gone: Vec<PackId> = {
            let index = self.index();
            let all = index.packs().map(|(id, _)| id);
            all.filter(|id| !view.packs.contains_key(id)).collect()
        };
        for id in gone {
            self.index().remove(id);
        }
        let mut used = HashMap::new();
        for listed in self.store.list(crate::Area::Packs)? {
            let id = PackId(listed.name.id);
            if !view.packs.contains_key(&id) {
                // Put back by somebody, or left by a process that was killed before it could enter it.
                self.counters.failed(PackError::refused(listed.name, Refusal::Replayed));
            }
            used.insert(id, listed.used_unix_ns);
        }
        // Least recently used first, so that the order of eviction survives a restart.
        let mut packs: Vec<_> = view.packs.iter().map(|(id, of)| (*id, *of)).collect();
        packs.sort_by_key(|(id, _)| (used.get(id).copied().unwrap_or(0), *id));
        for (id, (digest, pinned)) in packs {
            self.take_in(id, Some(digest), pinned);
            self.index().set_pinned(id, pinned);
        }
        self.check_presence()
    }

    /// Nothing is found from now on.
    fn forget_all(&self) {
        let all: Vec<PackId> = self.index().packs().map(|(id, _)| id).collect();
        for id in all {
            self.index().remove(id);
        }
    }

    /// Without a catalog a manifest that verifies is visible.
    fn refresh_from_listing(&self) -> Result<(), PackError> {
        self.others.seen(None);
        let mut listed = self.store.list(crate::Area::Packs)?;
        listed.sort_by_key(|listed| (listed.used_unix_ns, listed.name));
        let there: std::collections::HashSet<PackId> =
            listed.iter().map(|listed| PackId(listed.name.id)).collect();
        let gone: Vec<PackId> = {
            let index = self.index();
            index.packs().map(|(id, _)| id).filter(|id| !there.contains(id)).collect()
        };
        for id in gone {
            self.index().remove(id);
        }
        for listed in listed {
            self.take_in(PackId(listed.name.id), None, false);
        }
        self.check_presence()
    }

    /// Segments that are not there are not found.
    fn check_presence(&self) -> Result<(), PackError> {
        let listed = self.store.list(crate::Area::Segments)?;
        let there: std::collections::HashSet<[u8; 32]> = listed.iter().map(|one| one.name.id).collect();
        let missing = self.index().missing(|id| there.contains(&id.0));
        for id in missing {
            self.index().set_bad(id);
            let missing = PackError::refused(id.object(), Refusal::MissingSegment);
            self.counters.failed(missing);
        }
        Ok(())
    }

    /// Reads a manifest into the index. One that is not believed is counted and left out.
    fn take_in(&self, id: PackId, digest: Option<[u8; 32]>, pinned: bool) {
        if self.index().pack(id).is_some() {
            return;
        }
        match self.read_manifest(id, digest) {
            Ok((manifest, _)) => self.index().insert(id, &manifest, pinned),
            Err(error) => {
                self.counters.failed(error);
            }
        }
    }

    /// The manifest of a pack that the catalog knows.
    fn read_visible(&self, view: &View, id: PackId) -> Result<(Manifest, [u8; 32]), PackError> {
        let has_catalog = self.store.catalog().is_some();
        let digest = view.packs.get(&id).map(|(digest, _)| *digest);
        if has_catalog && digest.is_none() {
            let put_back = self.store.contains(&id.object())?;
            return Err(if put_back {
                self.counters.failed(PackError::refused(id.object(), Refusal::Replayed))
            } else {
                PackError::NotFound { object: id.object().to_string() }
            });
        }
        self.read_manifest(id, digest).map_err(|error| self.counters.failed(error))
    }

    /// Reads and checks a manifest. With a storage digest it must be the one that the catalog speaks of.
    fn read_manifest(&self, id: PackId, digest: Option<[u8; 32]>) -> Result<(Manifest, [u8; 32]), PackError> {
        let keys = self.keys();
        let name = id.object();
        let opened = self.open_object(&keys, name)?;
        if digest.is_some_and(|digest| digest != opened.storage_digest) {
            return Err(PackError::refused(name, Refusal::Replayed));
        }
        let refuse = |reason| PackError::refused(name, reason);
        if opened.header.spec.kind != Kind::Manifest {
            return Err(refuse(Refusal::Swapped));
        }
        let payload = opened.read_all()?;
        let manifest = Manifest::decode(&payload).map_err(refuse)?;
        Ok((manifest, opened.storage_digest))
    }

    fn open_object(&self, keys: &KeyRing, name: ObjectName) -> Result<OpenedObject, PackError> {
        let Some(file) = self.store.open(&name)? else {
            return Err(match name.area {
                crate::Area::Segments => PackError::refused(name, Refusal::MissingSegment),
                _ => PackError::NotFound { object: name.to_string() },
            });
        };
        OpenedObject::open(keys, self.options.encrypt, name, file)
    }

    /// Deletes segments that this process does not need any more, unless another one has published a pack with them
    /// meanwhile.
    fn delete_unused(&self, mut ids: Vec<SegmentId>) {
        let mut delete = || {
            let mut view = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
            let mut locked = self.store.catalog().map(CatalogStore::lock).transpose()?;
            if let Some(locked) = &mut locked {
                self.refresh_locked(&mut view, &mut **locked)?;
            }
            {
                let index = self.index();
                ids.retain(|id| !index.needs_segment(*id));
            }
            self.delete_segments(&ids);
            Ok(())
        };
        if let Err(error) = delete() {
            self.counters.failed(error);
        }
    }

    /// Deletes segments that nobody needs. A failure leaves garbage, which `gc` finds.
    fn delete_segments(&self, ids: &[SegmentId]) {
        for id in ids {
            if let Err(error) = self.store.delete(&id.object()) {
                self.counters.failed(error);
            }
        }
    }
}

/// Segments in use: they stay until the last lease on them ends.
pub(crate) struct Lease {
    shared: Arc<Shared>,
    ids: Vec<SegmentId>,
    /// Keeps everybody from collecting garbage.
    _activity: Box<dyn Activity>,
}

impl Lease {
    fn new(shared: &Arc<Shared>) -> Result<Option<Self>, PackError> {
        let Some(activity) = shared.store.activity()? else { return Ok(None) };
        Ok(Some(Self { shared: Arc::clone(shared), ids: Vec::new(), _activity: activity }))
    }

    fn add(&mut self, index: &mut Index, id: SegmentId, stored_now: bool) {
        index.lease(id, stored_now);
        self.ids.push(id);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut unused = Vec::new();
        let mut index = self.shared.index();
        for &id in &self.ids {
            if index.unlease(id) {
                unused.push(id);
            }
        }
        drop(index);
        if !unused.is_empty() {
            self.shared.delete_unused(unused);
        }
    }
}

fn info(id: PackId, entry: &index::PackEntry) -> PackInfo {
    let sliding = entry.blocks.iter().filter(|block| block.sliding.is_some()).count();
    PackInfo {
        id,
        positions: entry.positions,
        segments: (entry.blocks.len(), sliding),
        bytes: entry.bytes,
        pinned: entry.pinned,
        created_unix_s: entry.created_unix_s,
        identity: entry.identity,
        tenant: entry.tenant,
    }
}

#[cfg(test)]
mod tests;
