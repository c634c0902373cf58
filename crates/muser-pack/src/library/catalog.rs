//! The catalog: which packs are visible, in a chain of authenticated records.
//!
//! ```text
//!   0  4  magic "MPCT"
//!   4  1  kind: 1 head, 2 add, 3 remove, 4 pin, 5 unpin, 6 record written, 7 record removed
//!   5  3  zeros
//!   8  8  number of the record, from 0
//!  16  8  value: add 1 if pinned; record written: revision; head: how often the catalog was rewritten
//!  24  8  zeros
//!  32 32  id: pack or record; head: key id, then zeros
//!  64 32  storage digest; head: the store's random id
//!  96 32  keyed BLAKE3 over the code of the record before (zeros before the first) and the 96 bytes above
//! ```
//!
//! A manifest is believed only if the catalog has its storage digest: an old one put back is *replayed*. A record that
//! was never finished (its writer was killed) is cut off by the next writer. A whole record that does not verify costs what
//! it said and nothing else: the next one tells whether its content or its code was changed, and from then on nothing is
//! deleted for not being named, until the catalog is rebuilt from the objects ([`super::Library::recover`]).
//!
//! A catalog that is missing where there are objects, that is not ours from its first record on, or that is older than what
//! was last seen of it by this process or (through [`super::anchor`]) by an earlier one, *suspends* the store: nothing is
//! found, written or deleted until somebody has looked at it.

use std::collections::{HashMap, HashSet};

use super::anchor::{Anchor, Seen};
use crate::keys::KeyRing;
use crate::store::LockedCatalog;
use crate::{PackError, PackId, Refusal};

pub(super) const RECORD_BYTES: usize = 128;
const MAGIC: [u8; 4] = *b"MPCT";
/// A catalog of a million packs has half of it; nothing larger is read into memory.
const MAX_BYTES: u64 = 256 << 20;

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Add { pack: PackId, digest: [u8; 32], pinned: bool },
    Remove { pack: PackId },
    Pin { pack: PackId, pinned: bool },
    RecordWritten { name: [u8; 32], digest: [u8; 32], revision: u64 },
    RecordRemoved { name: [u8; 32] },
}

/// What a record that verifies says.
#[derive(Clone, Copy, Debug)]
enum Said {
    /// That it is the first.
    Head,
    Entry(Entry),
}

/// How far the catalog has been read, and what it says so far.
#[derive(Debug, Default)]
pub(super) struct View {
    /// The head record, by which a replaced catalog is recognised.
    head: Option<[u8; RECORD_BYTES]>,
    anchor: Anchor,
    /// The most that this process has seen of the store.
    known: Option<Seen>,
    /// Code of each record that was read.
    codes: Vec<[u8; 32]>,
    /// The last record, if it did not verify: the next one may tell why.
    doubtful: Option<Doubtful>,
    /// Records that were lost.
    pub(super) damaged: Vec<u64>,
    /// Why nothing of the store may be used.
    pub(super) suspended: Option<Refusal>,
    /// The catalog goes on from what was seen of it before, so none of its records is lost.
    pub(super) vouched: bool,
    /// How often what was seen could not be remembered since this was last asked.
    pub(super) anchor_failures: u64,
    pub(super) packs: HashMap<PackId, ([u8; 32], bool)>,
    pub(super) records: HashMap<[u8; 32], ([u8; 32], u64)>,
    /// Packs and revisions that the catalog says are gone: what is left of them may be deleted.
    pub(super) removed: HashSet<PackId>,
    pub(super) obsolete: HashSet<([u8; 32], u64)>,
}

/// A record that does not verify, and the code that it would have if its content were good.
#[derive(Debug)]
struct Doubtful {
    record: [u8; RECORD_BYTES],
    code: [u8; 32],
}

/// What changed since the last look.
pub(super) enum Changes {
    /// These entries came.
    Entries(Vec<Entry>),
    /// The catalog is another one: everything is to be looked at again.
    Replaced,
}

impl View {
    /// Nothing read yet.
    pub(super) fn new(anchor: Anchor) -> Self {
        Self { anchor, ..Self::default() }
    }

    /// Records read so far.
    pub(super) fn read(&self) -> u64 {
        self.codes.len() as u64
    }

    /// Reads what is new. Creates the catalog if there is none and there never was one: `objects` counts what the store
    /// has.
    ///
    /// # Errors
    /// With [`View::suspended`] set if the store as a whole is not believed.
    pub(super) fn refresh(
        &mut self,
        keys: &KeyRing,
        catalog: &mut dyn LockedCatalog,
        objects: &dyn Fn() -> Result<u64, PackError>,
    ) -> Result<Changes, PackError> {
        let looked = self.look(keys, catalog, objects, false);
        self.note_suspension(&looked);
        looked
    }

    /// Takes the store as it is now, whatever was seen of it before. An empty one begins anew.
    pub(super) fn accept_as_it_is(
        &mut self,
        keys: &KeyRing,
        catalog: &mut dyn LockedCatalog,
        objects: &dyn Fn() -> Result<u64, PackError>,
    ) -> Result<(), PackError> {
        self.known = None;
        self.start_over();
        let looked = self.look(keys, catalog, objects, true);
        self.note_suspension(&looked);
        looked.map(drop)
    }

    fn note_suspension(&mut self, looked: &Result<Changes, PackError>) {
        let reason = match looked {
            Err(error) => error.refusal().filter(|reason| suspends(reason)).cloned(),
            Ok(_) => None,
        };
        if reason.is_some() {
            // Looked at again from the beginning next time.
            self.start_over();
        }
        self.suspended = reason;
    }

    fn look(
        &mut self,
        keys: &KeyRing,
        catalog: &mut dyn LockedCatalog,
        objects: &dyn Fn() -> Result<u64, PackError>,
        accept: bool,
    ) -> Result<Changes, PackError> {
        let refuse = |reason| PackError::refused("the pack catalog", reason);
        let len = catalog.len()?;
        if len < RECORD_BYTES as u64 {
            let known = self.known.is_some() || self.anchor.load(keys, None).at_place.is_some();
            let objects = objects()?;
            if objects > 0 || (known && !accept) {
                return Err(refuse(Refusal::CatalogMissing { objects }));
            }
            catalog.truncate(0)?;
            self.begin(keys, catalog)?;
            return Ok(Changes::Replaced);
        }
        let changes = self.read_new(keys, catalog)?;
        if !accept {
            self.vouched = self.judge(keys).map_err(refuse)?;
        }
        self.remember(keys);
        Ok(changes)
    }

    /// Starts a new store's catalog.
    fn begin(&mut self, keys: &KeyRing, catalog: &mut dyn LockedCatalog) -> Result<(), PackError> {
        self.start_over();
        let store = *crate::keys::random_secret()?;
        let record = self.head_record(keys, 0, &store);
        catalog.append(&record)?;
        self.accept(&record);
        self.remember(keys);
        Ok(())
    }

    /// Is this the store that was here, and no older? `false`: no process had seen it before this one.
    fn judge(&self, keys: &KeyRing) -> Result<bool, Refusal> {
        let seen = self.seen();
        let (before, vouched) = match self.known {
            Some(known) if known.store == seen.store => (Some(known), self.vouched),
            Some(_) => return Err(Refusal::UnknownStore),
            None => {
                let memory = self.anchor.load(keys, Some(&seen.store));
                if memory.of_store.is_none() && memory.at_place.is_some() {
                    return Err(Refusal::UnknownStore);
                }
                (memory.of_store, true)
            }
        };
        let Some(before) = before else { return Ok(false) };
        let rolled_back = Refusal::RolledBack { expected: before.records, found: seen.records };
        if seen.is_older_than(&before) {
            return Err(rolled_back);
        }
        // Of one generation a longer catalog continues the shorter one.
        let last = before.records.checked_sub(1);
        let code = last.and_then(|last| self.codes.get(last as usize));
        let same = code.is_none_or(|code| *code == before.code) || before.code == [0; 32];
        let damaged = last.is_some_and(|last| self.damaged.contains(&last));
        if seen.generation == before.generation && !same && !damaged {
            return Err(rolled_back);
        }
        Ok(vouched)
    }

    /// Keeps in mind, here and outside the store, how much was seen.
    fn remember(&mut self, keys: &KeyRing) {
        let seen = self.seen();
        if self.known == Some(seen) {
            return;
        }
        self.known = Some(seen);
        if self.anchor.save(keys, &seen).is_err() {
            self.anchor_failures += 1;
        }
    }

    /// What there was of the store before, as far as anybody knows: its id and a generation that is larger than all.
    pub(super) fn successor(&self, keys: &KeyRing) -> ([u8; 32], u64) {
        let seen = self.head.is_some().then(|| self.seen());
        let memory = self.anchor.load(keys, seen.as_ref().map(|seen| &seen.store));
        let all = [self.known, seen, memory.at_place, memory.of_store];
        let last = all.into_iter().flatten().max_by_key(|seen| seen.generation);
        last.map_or(([0; 32], 0), |seen| (seen.store, seen.generation + 1))
    }

    fn seen(&self) -> Seen {
        let code = self.codes.last().copied().unwrap_or_default();
        let mut seen = Seen { store: [0; 32], generation: 0, records: self.read(), code };
        if let Some(head) = &self.head {
            seen.store.copy_from_slice(&head[64..96]);
            seen.generation = u64::from_le_bytes(std::array::from_fn(|i| head[16 + i]));
        }
        seen
    }

    fn start_over(&mut self) {
        let (anchor, known) = (std::mem::take(&mut self.anchor), self.known);
        let (suspended, anchor_failures) = (self.suspended.take(), self.anchor_failures);
        *self = Self { anchor, known, suspended, anchor_failures, ..Self::default() };
    }

    fn read_new(&mut self, keys: &KeyRing, catalog: &mut dyn LockedCatalog) -> Result<Changes, PackError> {
        let refuse = |reason| PackError::refused("the pack catalog", reason);
        let mut len = catalog.len()?;
        if len > MAX_BYTES {
            return Err(refuse(Refusal::OverLimit { field: "catalog bytes", limit: MAX_BYTES, found: len }));
        }
        let torn = len % RECORD_BYTES as u64;
        if torn > 0 {
            len -= torn;
            catalog.truncate(len)?;
        }
        let mut replaced = false;
        if let Some(head) = &self.head {
            let read_bytes = self.read() * RECORD_BYTES as u64;
            // Equal heads and at least our length: the catalog is a continuation of what was read.
            let same_head = catalog.read(0, RECORD_BYTES as u64)? == head[..];
            if same_head && len == read_bytes {
                return Ok(Changes::Entries(Vec::new()));
            }
            if !same_head || len < read_bytes {
                self.start_over();
                replaced = true;
            }
        }
        let bytes = catalog.read(self.read() * RECORD_BYTES as u64, len)?;
        let (records, _) = bytes.as_chunks::<RECORD_BYTES>();
        let mut entries = Vec::new();
        for record in records {
            self.take_in(keys, record, &mut entries).map_err(refuse)?;
        }
        if self.damaged.first() == Some(&0) {
            return Err(refuse(self.head_reason(keys)));
        }
        Ok(if replaced { Changes::Replaced } else { Changes::Entries(entries) })
    }

    /// Reads the next record. One that does not verify is passed over, unless it is the first.
    fn take_in(
        &mut self,
        keys: &KeyRing,
        record: &[u8; RECORD_BYTES],
        entries: &mut Vec<Entry>,
    ) -> Result<(), Refusal> {
        let index = self.read();
        let before = self.codes.last().copied().unwrap_or_default();
        let mut read = decode(keys, record, index, &before);
        let doubtful = self.doubtful.take();
        if read.is_none()
            && let Some(Doubtful { record: last, code }) = doubtful
        {
            read = decode(keys, record, index, &code);
            // This record vouches for the content of the last one: only that one's code was changed.
            if read.is_some() {
                self.damaged.pop();
                if index == 1 {
                    self.head = Some(last);
                }
                if let Some(Said::Entry(entry)) = parse(&last) {
                    self.apply(entry);
                    entries.push(entry);
                }
            }
        }
        match read {
            Some(_) if self.damaged.first() == Some(&0) => return Err(Refusal::Catalog { index: 0 }),
            Some(Said::Head) => self.accept(record),
            Some(Said::Entry(entry)) => {
                self.accept(record);
                self.apply(entry);
                entries.push(entry);
            }
            // Neither the first nor the second: this is no catalog of ours.
            None if self.damaged.first() == Some(&0) => return Err(self.head_reason(keys)),
            None => {
                let code = *code_of(keys, record, &before).as_bytes();
                self.damaged.push(index);
                self.doubtful = Some(Doubtful { record: *record, code });
                self.accept(record);
                self.lose(record);
            }
        }
        Ok(())
    }

    /// Appends an entry durably.
    pub(super) fn append(
        &mut self,
        keys: &KeyRing,
        catalog: &mut dyn LockedCatalog,
        entry: Entry,
    ) -> Result<(), PackError> {
        let record = self.encode(keys, entry);
        catalog.append(&record)?;
        self.accept(&record);
        self.apply(entry);
        self.remember(keys);
        Ok(())
    }

    /// A catalog with only what is visible now, or `None` if that is not much shorter. One with lost records stays as it
    /// is, so that nobody forgets that they are lost.
    pub(super) fn compacted(&self, keys: &KeyRing) -> Option<(Vec<u8>, Self)> {
        let visible = self.packs.len() + self.records.len();
        if (self.read() as usize) < 64 + 4 * visible || !self.damaged.is_empty() {
            return None;
        }
        let seen = self.seen();
        let packs = self.packs.iter().map(|(&pack, &(digest, pinned))| Entry::Add { pack, digest, pinned });
        let records = self.records.iter();
        let records =
            records.map(|(&name, &(digest, revision))| Entry::RecordWritten { name, digest, revision });
        Some(self.rewritten(keys, &seen.store, seen.generation + 1, packs.chain(records)))
    }

    /// A catalog of these entries.
    pub(super) fn rewritten(
        &self,
        keys: &KeyRing,
        store: &[u8; 32],
        generation: u64,
        entries: impl Iterator<Item = Entry>,
    ) -> (Vec<u8>, Self) {
        let mut view = Self::new(self.anchor.clone());
        let head = view.head_record(keys, generation, store);
        view.accept(&head);
        let mut bytes = head.to_vec();
        for entry in entries {
            let record = view.encode(keys, entry);
            bytes.extend_from_slice(&record);
            view.accept(&record);
            view.apply(entry);
        }
        (bytes, view)
    }

    /// The store has the catalog of [`View::rewritten`] now.
    pub(super) fn adopt(&mut self, keys: &KeyRing, rewritten: Self) {
        let anchor_failures = self.anchor_failures;
        *self = Self { anchor_failures, ..rewritten };
        self.remember(keys);
    }

    fn head_record(&self, keys: &KeyRing, generation: u64, store: &[u8; 32]) -> [u8; RECORD_BYTES] {
        let mut id = [0; 32];
        id[..16].copy_from_slice(keys.key_id());
        self.record(keys, 1, generation, &id, store)
    }

    fn encode(&self, keys: &KeyRing, entry: Entry) -> [u8; RECORD_BYTES] {
        let none = [0; 32];
        match entry {
            Entry::Add { pack, digest, pinned } => self.record(keys, 2, u64::from(pinned), &pack.0, &digest),
            Entry::Remove { pack } => self.record(keys, 3, 0, &pack.0, &none),
            Entry::Pin { pack, pinned } => self.record(keys, if pinned { 4 } else { 5 }, 0, &pack.0, &none),
            Entry::RecordWritten { name, digest, revision } => self.record(keys, 6, revision, &name, &digest),
            Entry::RecordRemoved { name } => self.record(keys, 7, 0, &name, &none),
        }
    }

    fn record(
        &self,
        keys: &KeyRing,
        kind: u8,
        value: u64,
        id: &[u8; 32],
        digest: &[u8; 32],
    ) -> [u8; RECORD_BYTES] {
        let mut record = [0; RECORD_BYTES];
        record[..4].copy_from_slice(&MAGIC);
        record[4] = kind;
        record[8..16].copy_from_slice(&self.read().to_le_bytes());
        record[16..24].copy_from_slice(&value.to_le_bytes());
        record[32..64].copy_from_slice(id);
        record[64..96].copy_from_slice(digest);
        let before = self.codes.last().copied().unwrap_or_default();
        let code = code_of(keys, &record, &before);
        record[96..].copy_from_slice(code.as_bytes());
        record
    }

    /// Why a first record that does not verify is none.
    fn head_reason(&self, keys: &KeyRing) -> Refusal {
        match &self.head {
            Some(head) if head[..4] != MAGIC => Refusal::NotAPack,
            Some(head) if head[4] == 1 && head[32..48] != *keys.key_id() => {
                let (expected, found) = (keys.id(), crate::name::hex(&head[32..48]));
                Refusal::ForeignKey { expected, found }
            }
            _ => Refusal::Catalog { index: 0 },
        }
    }

    fn accept(&mut self, record: &[u8; RECORD_BYTES]) {
        if self.codes.is_empty() {
            self.head = Some(*record);
        }
        self.codes.push(array(record, 96));
    }

    /// What a lost record may have ended does not go on as if nothing had been said: a removed pack, an earlier revision.
    fn lose(&mut self, record: &[u8; RECORD_BYTES]) {
        let id = array(record, 32);
        if record[4] == 3 {
            self.packs.remove(&PackId(id));
        }
        self.records.remove(&id);
    }

    fn apply(&mut self, entry: Entry) {
        match entry {
            Entry::Add { pack, digest, pinned } => {
                self.removed.remove(&pack);
                self.packs.insert(pack, (digest, pinned));
            }
            Entry::Remove { pack } => {
                self.removed.insert(pack);
                self.packs.remove(&pack);
            }
            Entry::Pin { pack, pinned } => {
                if let Some((_, is_pinned)) = self.packs.get_mut(&pack) {
                    *is_pinned = pinned;
                }
            }
            Entry::RecordWritten { name, digest, revision } => {
                self.obsolete.remove(&(name, revision));
                if let Some((_, before)) = self.records.insert(name, (digest, revision))
                    && before != revision
                {
                    self.obsolete.insert((name, before));
                }
            }
            Entry::RecordRemoved { name } => {
                if let Some((_, before)) = self.records.remove(&name) {
                    self.obsolete.insert((name, before));
                }
            }
        }
    }
}

/// Does this reason say that the store as a whole is not to be believed? (Another key's store is simply not ours.)
fn suspends(reason: &Refusal) -> bool {
    matches!(
        reason,
        Refusal::CatalogMissing { .. }
            | Refusal::UnknownStore
            | Refusal::RolledBack { .. }
            | Refusal::NotAPack
            | Refusal::Catalog { .. }
            | Refusal::OverLimit { .. }
    )
}

fn array<const N: usize>(record: &[u8; RECORD_BYTES], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&record[at..at + N]);
    out
}

fn code_of(keys: &KeyRing, record: &[u8; RECORD_BYTES], before: &[u8; 32]) -> blake3::Hash {
    let mut covered = [0; 32 + 96];
    covered[..32].copy_from_slice(before);
    covered[32..].copy_from_slice(&record[..96]);
    blake3::keyed_hash(keys.catalog_key(), &covered)
}

/// What record `index` says, the first one nothing; `None` if it does not verify as the one after a record with the code
/// `before`.
fn decode(keys: &KeyRing, record: &[u8; RECORD_BYTES], index: u64, before: &[u8; 32]) -> Option<Said> {
    let number = u64::from_le_bytes(array(record, 8));
    let in_place = record[..4] == MAGIC && number == index && (record[4] == 1) == (index == 0);
    let authentic = code_of(keys, record, before) == blake3::Hash::from_bytes(array(record, 96));
    if in_place && authentic { parse(record) } else { None }
}

/// Makes magic, numbers and codes of records good, for fuzzers.
pub(super) fn mend(keys: &KeyRing, bytes: &mut [u8]) {
    let (records, _) = bytes.as_chunks_mut::<RECORD_BYTES>();
    let mut before = [0; 32];
    for (index, record) in records.iter_mut().enumerate() {
        record[..4].copy_from_slice(&MAGIC);
        record[8..16].copy_from_slice(&(index as u64).to_le_bytes());
        before = *code_of(keys, record, &before).as_bytes();
        record[96..].copy_from_slice(&before);
    }
}

fn parse(record: &[u8; RECORD_BYTES]) -> Option<Said> {
    let (id, digest) = (array(record, 32), array(record, 64));
    let value = u64::from_le_bytes(array(record, 16));
    Some(Said::Entry(match record[4] {
        1 => return Some(Said::Head),
        2 => Entry::Add { pack: PackId(id), digest, pinned: value == 1 },
        3 => Entry::Remove { pack: PackId(id) },
        4 => Entry::Pin { pack: PackId(id), pinned: true },
        5 => Entry::Pin { pack: PackId(id), pinned: false },
        6 => Entry::RecordWritten { name: id, digest, revision: value },
        7 => Entry::RecordRemoved { name: id },
        _ => return None,
    }))
}
