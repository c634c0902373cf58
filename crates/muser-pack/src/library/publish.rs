//! Publication: segments first, each written once whoever needs it; then the manifest; then, in one step, the catalog.

use std::sync::Arc;
use std::time::Instant;

use muser_kv::{BLOCK_LEN, KvGroup, PositionKey};

use super::catalog::{Entry, View};
use super::{Lease, Library, Scope, Shared};
use crate::counters::{add, add_time};
use crate::keys::now_unix_s;
use crate::kind::Kind;
use crate::manifest::{Block, ChainKey, MAX_POSITIONS, Manifest};
use crate::object::{SealedObject, Spec, chunk_bytes, content_id, seal};
use crate::store::{LockedCatalog, Put};
use crate::{ObjectName, PackError, PackId, Refusal, SegmentId};

/// A segment that a publication does not find in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Which layers' rows.
    pub group: KvGroup,
    /// Which block.
    pub index: usize,
    /// Positions that have rows in it; 256 but in an unfinished last block.
    pub positions: usize,
}

/// What became of a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Its name.
    pub id: PackId,
    /// It was there before, the same in every byte that matters.
    pub existed: bool,
}

/// A pack in the making. Dropping it leaves nothing behind.
#[must_use = "a publication does nothing until it is committed"]
pub struct Publication {
    shared: Arc<Shared>,
    scope: Scope,
    units: Vec<[u8; 8]>,
    keys: Vec<ChainKey>,
    full: Vec<Option<SegmentId>>,
    sliding: Vec<Option<SegmentId>>,
    lease: Lease,
}

impl Library {
    /// Begins to publish the state after `units`. Segments that are stored already are found and kept from removal;
    /// [`Publication::wanted`] names the others.
    pub fn begin_publish(&self, scope: &Scope, units: &[PositionKey]) -> Result<Publication, PackError> {
        if units.is_empty() || units.len() > MAX_POSITIONS as usize {
            return Err(PackError::Caller {
                what: "positions of a pack",
                expected: format!("1 to {MAX_POSITIONS}"),
                found: units.len().to_string(),
            });
        }
        let keys = scope.chain(units);
        let Some(mut lease) = Lease::new(&self.shared)? else { return Err(PackError::Busy) };
        let (mut full, mut sliding) = (vec![None; keys.len()], vec![None; keys.len()]);
        let whole = units.len() / BLOCK_LEN;
        let mut index = self.shared.index();
        for (i, key) in keys[..whole].iter().enumerate() {
            if let Some((known, known_sliding)) = index.block(key) {
                (full[i], sliding[i]) = (Some(known), known_sliding);
            }
        }
        if whole < keys.len() {
            let before = whole.checked_sub(1).map_or(scope.root, |last| keys[last]);
            if let Some((tail_full, tail_sliding)) = index.tail(&before, &units[whole * BLOCK_LEN..]) {
                (full[whole], sliding[whole]) = (Some(tail_full), Some(tail_sliding));
            }
        }
        for id in full.iter().chain(&sliding).flatten() {
            lease.add(&mut index, *id, false);
            add(&self.shared.counters.shared_segments, 1);
        }
        drop(index);
        // A pack that cannot fit must not drive out all others first.
        let missing = full.iter().filter(|id| id.is_none()).count() as u64;
        let needed_bytes = missing * scope.block_bytes(KvGroup::Full) as u64;
        if let Some(budget) = self.shared.store.usage()?.budget_bytes
            && needed_bytes > budget
        {
            let detail = format!("the pack alone is larger than the budget of {budget}");
            return Err(self.shared.counters.failed(PackError::Full { needed_bytes, detail }));
        }
        Ok(Publication {
            shared: Arc::clone(&self.shared),
            scope: scope.clone(),
            units: units.iter().map(|unit| unit.to_le_bytes()).collect(),
            keys,
            full,
            sliding,
            lease,
        })
    }
}

impl Publication {
    /// Segments that are not stored: every full one must be put, sliding ones as far as the caller has them. A place can
    /// be resumed at only if the sliding segments that its window reaches are there.
    pub fn wanted(&self) -> Vec<Wanted> {
        let of = |group, ids: &[Option<SegmentId>]| {
            let missing = ids.iter().enumerate().filter(|(_, id)| id.is_none());
            let wanted = missing.map(|(index, _)| Wanted { group, index, positions: self.positions(index) });
            wanted.collect::<Vec<_>>()
        };
        let mut wanted = of(KvGroup::Full, &self.full);
        wanted.extend(of(KvGroup::Sliding, &self.sliding));
        wanted
    }

    /// Seals and stores the rows of a block, in the layout that the scope's identity names. Older packs are dropped to
    /// make room.
    pub fn put(&mut self, group: KvGroup, index: usize, bytes: &[u8]) -> Result<(), PackError> {
        let outcome = self.put_segment(group, index, bytes);
        outcome.map_err(|error| self.shared.counters.failed(error))
    }

    /// Makes the pack visible.
    ///
    /// # Errors
    /// [`PackError::Caller`] if a full segment is missing or no place of the prefix could be resumed at.
    pub fn commit(mut self, pinned: bool) -> Result<Published, PackError> {
        self.commit_checked(pinned).map_err(|error| self.shared.counters.failed(error))
    }

    fn positions(&self, index: usize) -> usize {
        (self.units.len() - index * BLOCK_LEN).min(BLOCK_LEN)
    }

    fn put_segment(&mut self, group: KvGroup, index: usize, bytes: &[u8]) -> Result<(), PackError> {
        let started = Instant::now();
        let expected = self.scope.block_bytes(group);
        if index >= self.keys.len() || bytes.len() != expected {
            return Err(PackError::Caller {
                what: "segment to put",
                expected: format!("block below {} with {expected} bytes", self.keys.len()),
                found: format!("block {index} with {} bytes", bytes.len()),
            });
        }
        let row_bytes = self.scope.identity.representation.row_bytes.max(1);
        let spec = Spec {
            kind: match group {
                KvGroup::Full => Kind::Full,
                KvGroup::Sliding => Kind::Sliding,
            },
            row_bytes,
            positions: self.positions(index) as u32,
            chunk_bytes: chunk_bytes(row_bytes, self.shared.options.chunk_bytes),
        };
        let keys = self.shared.sealing_keys()?;
        let id = SegmentId(content_id(&keys, &self.scope.tenant.content, &spec, bytes));
        let known = {
            let mut index = self.shared.index();
            let known = index.knows_segment(id);
            if known {
                self.lease.add(&mut index, id, false);
            }
            known
        };
        if known {
            add(&self.shared.counters.shared_segments, 1);
        } else {
            let sealed = seal(&keys, self.shared.options.encrypt, spec, id.0, bytes)?;
            self.shared.put_object(id.object(), &sealed, None, |shared| {
                shared.holds_content(id, &spec, &self.scope)
            })?;
            self.lease.add(&mut self.shared.index(), id, true);
            add(&self.shared.counters.published_segments, 1);
            add(&self.shared.counters.published_bytes, bytes.len() as u64);
        }
        let place = match group {
            KvGroup::Full => &mut self.full[index],
            KvGroup::Sliding => &mut self.sliding[index],
        };
        *place = Some(id);
        add_time(&self.shared.counters.publish_ns, started.elapsed());
        Ok(())
    }

    fn commit_checked(&mut self, pinned: bool) -> Result<Published, PackError> {
        let mut blocks = Vec::with_capacity(self.keys.len());
        for (index, key) in self.keys.iter().enumerate() {
            let Some(full) = self.full[index] else {
                return Err(PackError::Caller {
                    what: "pack to commit",
                    expected: "every full segment put".into(),
                    found: format!("none for block {index}"),
                });
            };
            blocks.push(Block { key: *key, full, sliding: self.sliding[index] });
        }
        if !self.can_be_resumed() {
            return Err(PackError::Caller {
                what: "pack to commit",
                expected: "the sliding segments of one window at least".into(),
                found: "no place where a sequence could resume".into(),
            });
        }
        let manifest = Manifest {
            tenant: self.scope.tenant.id,
            identity: (*self.scope.identity).clone(),
            created_unix_s: now_unix_s(),
            root: self.scope.root,
            // Megabytes for a long prefix, and not needed any more.
            units: std::mem::take(&mut self.units),
            blocks,
        };
        let id = manifest.id(&self.scope.tenant);
        self.shared.publish_manifest(id, &manifest, pinned)
    }

    fn can_be_resumed(&self) -> bool {
        let block_end = |index: usize| index * BLOCK_LEN + self.positions(index);
        let reached = |index: usize| {
            let position = block_end(index);
            let first = self.scope.first_sliding_block(position).min(index + 1);
            self.sliding[first..=index].iter().all(Option::is_some)
        };
        (0..self.keys.len()).any(reached)
    }
}

impl std::fmt::Debug for Publication {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publication").field("positions", &self.units.len()).finish_non_exhaustive()
    }
}

impl Shared {
    /// Stores an object, dropping older packs to make room. If one of this name exists, `same` must find it equal; one
    /// that is not what it should be is replaced. One that only cannot be read here (a failing disk, another version or
    /// key) is left alone, and so is what cannot be told apart from it.
    pub(super) fn put_object(
        &self,
        name: ObjectName,
        sealed: &SealedObject,
        mut held: Option<(&mut View, &mut dyn LockedCatalog)>,
        same: impl Fn(&Self) -> Result<bool, PackError>,
    ) -> Result<Put, PackError> {
        let parts = [&sealed.header[..], &sealed.body[..]];
        let mut differs = false;
        loop {
            let put = if differs {
                self.store.replace(&name, &parts).map(|()| Put::Stored)
            } else {
                self.store.put(&name, &parts)
            };
            match put {
                Ok(Put::Stored) => return Ok(Put::Stored),
                Ok(Put::Exists) => {
                    let equal = same(self);
                    differs = match &equal {
                        Ok(equal) => !equal,
                        Err(error) => error.refusal().is_some_and(Refusal::may_be_replaced),
                    };
                    if !differs {
                        return equal.map(|_| Put::Exists);
                    }
                    self.counters.failed(PackError::refused(name, Refusal::Conflict));
                }
                Err(full @ PackError::Full { .. }) => {
                    let dropped = match &mut held {
                        Some((view, locked)) => self.drop_oldest(view, Some(&mut **locked))?,
                        None => self.lock_and_drop_oldest()?,
                    };
                    if !dropped {
                        return Err(full);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Does the store have this very content under its name?
    fn holds_content(&self, id: SegmentId, spec: &Spec, scope: &Scope) -> Result<bool, PackError> {
        let keys = self.keys();
        let bytes = self.open_object(&keys, id.object())?.read_all()?;
        Ok(content_id(&keys, &scope.tenant.content, spec, &bytes) == id.0)
    }

    fn publish_manifest(
        self: &Arc<Self>,
        id: PackId,
        manifest: &Manifest,
        pinned: bool,
    ) -> Result<Published, PackError> {
        let mut view = self.writer.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut locked = self.store.catalog().map(crate::store::CatalogStore::lock).transpose()?;
        if let Some(locked) = &mut locked {
            self.refresh_locked(&mut view, &mut **locked)?;
        }
        if let Some(known) = self.index().pack(id).map(|entry| entry.pinned) {
            if pinned && !known {
                self.set_pinned_locked(&mut view, locked.as_deref_mut(), id, true)?;
            }
            return Ok(Published { id, existed: true });
        }
        // Another process may have dropped a segment that was there when this publication began.
        for (_, _, segment) in manifest.segments() {
            if !self.store.contains(&segment.object())? {
                self.index().set_bad(segment);
                return Err(PackError::refused(segment.object(), Refusal::MissingSegment));
            }
        }
        let keys = self.sealing_keys()?;
        let sealed =
            seal(&keys, self.options.encrypt, Spec::plain(Kind::Manifest), id.0, &manifest.encode())?;
        let timeless = |manifest: &Manifest| Manifest { created_unix_s: 0, ..manifest.clone() };
        // A manifest that was stored before its process died, and then not entered into the catalog, is as good.
        let found = std::cell::Cell::new(None);
        let same = |shared: &Self| {
            let (there, digest) = shared.read_manifest(id, None)?;
            found.set(Some(digest));
            Ok(timeless(&there) == timeless(manifest))
        };
        let held = locked.as_deref_mut().map(|locked| (&mut *view, locked as &mut dyn LockedCatalog));
        let put = self.put_object(id.object(), &sealed, held, same)?;
        let digest = match (put, found.get()) {
            (Put::Exists, Some(digest)) => digest,
            _ => sealed.storage_digest(),
        };
        // Bytes before authority.
        self.store.flush()?;
        if let Some(locked) = &mut locked {
            view.append(&keys, &mut **locked, Entry::Add { pack: id, digest, pinned })?;
        }
        let superseded = {
            let mut index = self.index();
            index.insert(id, manifest, pinned);
            if self.options.supersede { index.superseded_by(manifest, id) } else { Vec::new() }
        };
        add(&self.counters.published_packs, 1);
        for other in superseded {
            self.remove_locked(&mut view, locked.as_deref_mut(), other)?;
        }
        if let Some(locked) = &mut locked
            && let Some((records, compacted)) = view.compacted(&keys)
        {
            locked.replace(&records)?;
            view.adopt(&keys, compacted);
        }
        Ok(Published { id, existed: false })
    }
}
