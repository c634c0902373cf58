//! What only a person decides: to rebuild the catalog from the objects, or to take a store as it is.

use std::collections::{HashMap, HashSet};

use super::catalog::Entry;
use super::{Library, Shared, records};
use crate::{Area, PackError, PackId, Refusal};

/// What a recovery found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Packs that are visible now.
    pub packs: usize,
    /// Records (sessions) that are.
    pub records: usize,
    /// Objects that stay where they are and are not visible: what was refused, and why.
    pub refused: Vec<(String, Refusal)>,
}

impl Library {
    /// Why nothing of the store is found, written or deleted; `None` if all is well.
    pub fn suspended(&self) -> Option<Refusal> {
        self.writer().suspended.clone()
    }

    /// Records of the catalog that were lost. While there are any, nothing is deleted for not being named.
    pub fn damaged_records(&self) -> usize {
        self.writer().damaged.len()
    }

    /// Rebuilds the catalog from every manifest and record that verifies, and deletes nothing. What had been removed and
    /// whose objects are back is visible again: nothing tells it apart.
    pub fn recover(&self) -> Result<Recovered, PackError> {
        let shared = &self.shared;
        let mut view = self.writer();
        let catalog = shared.store.catalog().ok_or_else(records::no_catalog)?;
        let Some(_quiet) = shared.store.quiet()? else { return Err(PackError::Busy) };
        let mut locked = catalog.lock()?;
        // As much as can be read of the old one: which packs were pinned.
        match shared.refresh_locked(&mut view, &mut *locked) {
            Ok(()) | Err(PackError::Refused { .. }) => {}
            Err(error) => return Err(shared.counters.failed(error)),
        }
        if let Some(reason @ Refusal::ForeignKey { .. }) = foreign(shared, &mut *locked)? {
            return Err(PackError::refused("the pack catalog", reason));
        }
        let mut recovered = Recovered::default();
        let entries =
            shared.entries_of_objects(&mut recovered, |id| view.packs.get(&id).is_some_and(|of| of.1))?;
        let keys = shared.keys();
        let (mut store, generation) = view.successor(&keys);
        if store == [0; 32] {
            store = *crate::keys::random_secret()?;
        }
        let (bytes, rewritten) = view.rewritten(&keys, &store, generation, entries.into_iter());
        locked.replace(&bytes)?;
        view.adopt(&keys, rewritten);
        shared.forget_all();
        shared.index_anew(&view)?;
        Ok(recovered)
    }

    /// Takes the store as it is, though it is older than what was seen, or another one. One without any object begins
    /// anew; objects without a catalog need [`Library::recover`].
    pub fn accept_as_it_is(&self) -> Result<(), PackError> {
        let shared = &self.shared;
        let mut view = self.writer();
        let mut locked = shared.store.catalog().ok_or_else(records::no_catalog)?.lock()?;
        let accepted = view.accept_as_it_is(&shared.keys(), &mut *locked, &|| shared.count_objects());
        shared.forget_all();
        accepted.map_err(|error| shared.counters.failed(error))?;
        shared.index_anew(&view)
    }
}

/// The store of another key is not ours to rewrite.
fn foreign(
    shared: &Shared,
    locked: &mut dyn crate::store::LockedCatalog,
) -> Result<Option<Refusal>, PackError> {
    let mut view = super::catalog::View::default();
    match view.refresh(&shared.keys(), locked, &|| Ok(1)) {
        Err(PackError::Refused { reason, .. }) => Ok(Some(reason)),
        Err(error) => Err(error),
        Ok(_) => Ok(None),
    }
}

impl Shared {
    /// Objects of all areas.
    pub(super) fn count_objects(&self) -> Result<u64, PackError> {
        let mut count = 0;
        for area in Area::ALL {
            count += self.store.list(area)?.len() as u64;
        }
        Ok(count)
    }

    /// A catalog's entries for everything that verifies: whole packs, and the last revision of each record.
    fn entries_of_objects(
        &self,
        recovered: &mut Recovered,
        pinned: impl Fn(PackId) -> bool,
    ) -> Result<Vec<Entry>, PackError> {
        let segments = self.store.list(Area::Segments)?;
        let segments: HashSet<[u8; 32]> = segments.iter().map(|listed| listed.name.id).collect();
        let mut entries = Vec::new();
        let mut refuse = |object: String, error: PackError| match error {
            PackError::Refused { reason, .. } => {
                recovered.refused.push((object, reason));
                Ok(())
            }
            PackError::NotFound { .. } => Ok(()),
            error => Err(error),
        };
        for listed in self.store.list(Area::Packs)? {
            let id = PackId(listed.name.id);
            match self.read_manifest(id, None) {
                Ok((manifest, _)) if manifest.segments().any(|(.., id)| !segments.contains(&id.0)) => {
                    refuse(
                        listed.name.to_string(),
                        PackError::refused(listed.name, Refusal::MissingSegment),
                    )?;
                }
                Ok((_, digest)) => entries.push(Entry::Add { pack: id, digest, pinned: pinned(id) }),
                Err(error) => refuse(listed.name.to_string(), error)?,
            }
        }
        let packs = entries.len();
        let mut last: HashMap<[u8; 32], ([u8; 32], u64)> = HashMap::new();
        for listed in self.store.list(Area::Records)? {
            match self.read_any_record(listed.name) {
                Ok((name, digest, revision)) => {
                    let known = last.entry(name).or_insert((digest, revision));
                    if revision > known.1 {
                        *known = (digest, revision);
                    }
                }
                Err(error) => refuse(listed.name.to_string(), error)?,
            }
        }
        (recovered.packs, recovered.records) = (packs, last.len());
        let record = |(name, (digest, revision))| Entry::RecordWritten { name, digest, revision };
        entries.extend(last.into_iter().map(record));
        Ok(entries)
    }
}
