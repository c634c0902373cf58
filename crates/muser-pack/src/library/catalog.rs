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
//! was never finished (its writer was killed) is cut off by the next writer; anything else that does not verify is
//! refused, because it was not an accident of ours. A catalog of the same store that is older than what was last seen of
//! it, by this process or (through [`Anchor`]) by an earlier one, is *rolled back*.

use std::collections::HashMap;
use std::path::PathBuf;

use aws_lc_rs::rand::{SecureRandom as _, SystemRandom};

use crate::keys::KeyRing;
use crate::store::LockedCatalog;
use crate::{PackError, PackId, Refusal};

pub(super) const RECORD_BYTES: usize = 128;
const MAGIC: [u8; 4] = *b"MPCT";

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Add { pack: PackId, digest: [u8; 32], pinned: bool },
    Remove { pack: PackId },
    Pin { pack: PackId, pinned: bool },
    RecordWritten { name: [u8; 32], digest: [u8; 32], revision: u64 },
    RecordRemoved { name: [u8; 32] },
}

/// How far the catalog has been read, and what it says so far.
#[derive(Debug, Default)]
pub(super) struct View {
    /// The head record, by which a replaced catalog is recognised.
    head: Option<[u8; RECORD_BYTES]>,
    anchor: Anchor,
    last_code: [u8; 32],
    pub(super) read: u64,
    pub(super) packs: HashMap<PackId, ([u8; 32], bool)>,
    pub(super) records: HashMap<[u8; 32], ([u8; 32], u64)>,
}

/// What changed since the last look.
pub(super) enum Changes {
    /// These entries came.
    Entries(Vec<Entry>),
    /// The catalog is another one: everything is to be looked at again.
    Replaced,
}

impl View {
    /// Nothing read yet; with an anchor an older catalog than an earlier process saw is refused.
    pub(super) fn new(anchor: Option<PathBuf>) -> Self {
        Self { anchor: Anchor(anchor), ..Self::default() }
    }

    /// Reads what is new. Creates the catalog if there is none.
    pub(super) fn refresh(
        &mut self,
        keys: &KeyRing,
        catalog: &mut dyn LockedCatalog,
    ) -> Result<Changes, PackError> {
        let before = self.head.is_some().then(|| self.seen());
        let changes = self.read_new(keys, catalog)?;
        let seen = self.seen();
        let known = before.or_else(|| self.anchor.load(keys));
        if let Some(known) = known
            && seen.is_older_than(&known)
        {
            let reason = Refusal::RolledBack { expected: known.records, found: seen.records };
            // Looked at again from the beginning next time.
            *self = Self::new(self.anchor.0.take());
            return Err(PackError::refused("the pack catalog", reason));
        }
        if before != Some(seen) {
            self.anchor.save(keys, &seen);
        }
        Ok(changes)
    }

    fn seen(&self) -> Seen {
        let mut seen = Seen { store: [0; 32], generation: 0, records: self.read };
        if let Some(head) = &self.head {
            seen.store.copy_from_slice(&head[64..96]);
            seen.generation = u64::from_le_bytes(std::array::from_fn(|i| head[16 + i]));
        }
        seen
    }

    fn start_over(&mut self) {
        *self = Self::new(self.anchor.0.take());
    }

    fn read_new(&mut self, keys: &KeyRing, catalog: &mut dyn LockedCatalog) -> Result<Changes, PackError> {
        let mut len = catalog.len()?;
        let torn = len % RECORD_BYTES as u64;
        if torn > 0 {
            len -= torn;
            catalog.truncate(len)?;
        }
        if len == 0 {
            let replaced = self.head.is_some();
            self.start_over();
            let mut store = [0; 32];
            SystemRandom::new().fill(&mut store).map_err(|_| PackError::Random)?;
            let record = self.head_record(keys, 0, &store);
            catalog.append(&record)?;
            self.accept(&record);
            return Ok(if replaced { Changes::Replaced } else { Changes::Entries(Vec::new()) });
        }
        let mut replaced = false;
        if let Some(head) = &self.head {
            let read_bytes = self.read * RECORD_BYTES as u64;
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
        let bytes = catalog.read(self.read * RECORD_BYTES as u64, len)?;
        let mut entries = Vec::new();
        for bytes in bytes.chunks_exact(RECORD_BYTES) {
            let mut record = [0; RECORD_BYTES];
            record.copy_from_slice(bytes);
            let index = self.read;
            let decoded = self.decode(keys, &record);
            let entry = decoded.map_err(|reason| {
                let reason = reason.unwrap_or(Refusal::Catalog { index });
                PackError::refused("the pack catalog", reason)
            })?;
            self.accept(&record);
            if let Some(entry) = entry {
                self.apply(entry);
                entries.push(entry);
            }
        }
        Ok(if replaced { Changes::Replaced } else { Changes::Entries(entries) })
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
        self.anchor.save(keys, &self.seen());
        Ok(())
    }

    /// A catalog with only what is visible now, or `None` if that is not much shorter.
    pub(super) fn compacted(&self, keys: &KeyRing) -> Option<(Vec<u8>, Self)> {
        let visible = self.packs.len() + self.records.len();
        if (self.read as usize) < 64 + 4 * visible {
            return None;
        }
        let mut view = Self::new(self.anchor.0.clone());
        let seen = self.seen();
        let head = view.head_record(keys, seen.generation + 1, &seen.store);
        view.accept(&head);
        let mut bytes = head.to_vec();
        let packs = self.packs.iter().map(|(&pack, &(digest, pinned))| Entry::Add { pack, digest, pinned });
        let records = self.records.iter();
        let records =
            records.map(|(&name, &(digest, revision))| Entry::RecordWritten { name, digest, revision });
        for entry in packs.chain(records) {
            let record = view.encode(keys, entry);
            bytes.extend_from_slice(&record);
            view.accept(&record);
            view.apply(entry);
        }
        Some((bytes, view))
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
        record[8..16].copy_from_slice(&self.read.to_le_bytes());
        record[16..24].copy_from_slice(&value.to_le_bytes());
        record[32..64].copy_from_slice(id);
        record[64..96].copy_from_slice(digest);
        let code = self.code(keys, &record);
        record[96..].copy_from_slice(code.as_bytes());
        record
    }

    fn code(&self, keys: &KeyRing, record: &[u8; RECORD_BYTES]) -> blake3::Hash {
        let mut covered = [0; 32 + 96];
        covered[..32].copy_from_slice(&self.last_code);
        covered[32..].copy_from_slice(&record[..96]);
        blake3::keyed_hash(keys.catalog_key(), &covered)
    }

    /// `Err(None)`: the record does not verify.
    fn decode(&self, keys: &KeyRing, record: &[u8; RECORD_BYTES]) -> Result<Option<Entry>, Option<Refusal>> {
        fn array<const N: usize>(record: &[u8; RECORD_BYTES], at: usize) -> [u8; N] {
            let mut out = [0; N];
            out.copy_from_slice(&record[at..at + N]);
            out
        }
        if record[..4] != MAGIC {
            return Err((self.read == 0).then_some(Refusal::NotAPack));
        }
        let id: [u8; 32] = array(record, 32);
        if self.read == 0 && id[..16] != *keys.key_id() {
            let (expected, found) = (keys.id(), crate::name::hex(&id[..16]));
            return Err(Some(Refusal::ForeignKey { expected, found }));
        }
        if self.code(keys, record) != blake3::Hash::from_bytes(array(record, 96)) {
            return Err(None);
        }
        let digest = array(record, 64);
        let value = u64::from_le_bytes(array(record, 16));
        let number = u64::from_le_bytes(array(record, 8));
        if number != self.read || (record[4] == 1) != (number == 0) {
            return Err(None);
        }
        Ok(match record[4] {
            1 => None,
            2 => Some(Entry::Add { pack: PackId(id), digest, pinned: value == 1 }),
            3 => Some(Entry::Remove { pack: PackId(id) }),
            4 => Some(Entry::Pin { pack: PackId(id), pinned: true }),
            5 => Some(Entry::Pin { pack: PackId(id), pinned: false }),
            6 => Some(Entry::RecordWritten { name: id, digest, revision: value }),
            7 => Some(Entry::RecordRemoved { name: id }),
            _ => return Err(None),
        })
    }

    fn accept(&mut self, record: &[u8; RECORD_BYTES]) {
        self.last_code.copy_from_slice(&record[96..]);
        if self.read == 0 {
            self.head = Some(*record);
        }
        self.read += 1;
    }

    fn apply(&mut self, entry: Entry) {
        match entry {
            Entry::Add { pack, digest, pinned } => {
                self.packs.insert(pack, (digest, pinned));
            }
            Entry::Remove { pack } => {
                self.packs.remove(&pack);
            }
            Entry::Pin { pack, pinned } => {
                if let Some((_, is_pinned)) = self.packs.get_mut(&pack) {
                    *is_pinned = pinned;
                }
            }
            Entry::RecordWritten { name, digest, revision } => {
                self.records.insert(name, (digest, revision));
            }
            Entry::RecordRemoved { name } => {
                self.records.remove(&name);
            }
        }
    }
}

/// How much of a store's catalog was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    store: [u8; 32],
    generation: u64,
    records: u64,
}

impl Seen {
    /// Another store is not an older one.
    fn is_older_than(&self, other: &Self) -> bool {
        self.store == other.store && (self.generation, self.records) < (other.generation, other.records)
    }
}

/// A small file outside the store that remembers how much of the catalog was seen, so that a whole store put back from an
/// old copy is noticed. Losing it loses only that.
#[derive(Debug, Default)]
struct Anchor(Option<PathBuf>);

impl Anchor {
    fn load(&self, keys: &KeyRing) -> Option<Seen> {
        let bytes: [u8; 80] = std::fs::read(self.0.as_ref()?).ok()?.try_into().ok()?;
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let seen =
            Seen { store: std::array::from_fn(|i| bytes[i]), generation: u64_at(32), records: u64_at(40) };
        (Self::encode(keys, &seen) == bytes).then_some(seen)
    }

    fn save(&self, keys: &KeyRing, seen: &Seen) {
        let Some(path) = &self.0 else { return };
        // Written under the catalog's lock, after the catalog itself: it never runs ahead.
        let partial = path.with_extension("new");
        let saved =
            std::fs::write(&partial, Self::encode(keys, seen)).and_then(|()| std::fs::rename(&partial, path));
        drop(saved);
    }

    fn encode(keys: &KeyRing, seen: &Seen) -> [u8; 80] {
        let mut bytes = [0; 80];
        bytes[..32].copy_from_slice(&seen.store);
        bytes[32..40].copy_from_slice(&seen.generation.to_le_bytes());
        bytes[40..48].copy_from_slice(&seen.records.to_le_bytes());
        let key = blake3::derive_key("muser pack v1 catalog anchor", keys.catalog_key());
        let code = blake3::keyed_hash(&key, &bytes[..48]);
        bytes[48..].copy_from_slice(code.as_bytes());
        bytes
    }
}
