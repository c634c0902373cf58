//! What was last seen of stores, in a small file beside the key: so that an old copy of a store, another store in its
//! place, or none, is noticed.
//!
//! ```text
//!   0  8  magic "MUSRSEEN"      12  4  entries
//!   8  2  version, 1            16  …  entries, 112 bytes each: store 32, place 32, generation u64, records u64,
//!  10  2  zeros                        code of the last record 32; the one seen last comes last
//! end-32  keyed BLAKE3 over everything before it
//! ```
//!
//! A place is a keyed hash of a folder's path. Losing the file loses the protection and nothing else.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::encode::Reader;
use crate::keys::{KeyRing, Secret, derive};
use crate::store::private;
use crate::{PackError, Refusal};

const MAGIC: &[u8; 8] = b"MUSRSEEN";
const VERSION: u16 = 1;
const ENTRY_BYTES: usize = 112;
/// More are forgotten, oldest first.
const MAX_ENTRIES: usize = 1024;
/// The file before it knew places: one store.
const FIRST_FORMAT_BYTES: usize = 80;

/// How much of a store's catalog was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) store: [u8; 32],
    pub(super) generation: u64,
    pub(super) records: u64,
    /// Code of the last record; zeros where it is not known.
    pub(super) code: [u8; 32],
}

impl Seen {
    /// Of the same store: is this less than what was known?
    pub(super) fn is_older_than(&self, known: &Self) -> bool {
        (self.generation, self.records) < (known.generation, known.records)
    }
}

/// The file and where the store is.
#[derive(Clone, Debug, Default)]
pub(super) struct Anchor {
    path: Option<PathBuf>,
    place: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Remembered {
    place: [u8; 32],
    seen: Seen,
}

/// What the file says about one place and one store.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    /// The store that was last seen at this place.
    pub(super) at_place: Option<Seen>,
    /// What was last seen of the store in question: at this place, or else the most anywhere.
    pub(super) of_store: Option<Seen>,
}

impl Anchor {
    pub(super) fn new(path: Option<PathBuf>, place: String) -> Self {
        Self { path, place }
    }

    /// What is known of this place and of `store`. A file that is not authentic is as good as none.
    pub(super) fn load(&self, keys: &KeyRing, store: Option<&[u8; 32]>) -> Memory {
        let Some(path) = &self.path else { return Memory::default() };
        let entries = read(path, keys);
        let place = self.place(keys);
        let at_place = entries.iter().rev().find(|entry| entry.place == place).map(|entry| entry.seen);
        let of = |entry: &&Remembered| Some(&entry.seen.store) == store;
        let here =
            entries.iter().rev().find(|entry| entry.place == place && of(entry)).map(|entry| entry.seen);
        let anywhere = entries.iter().filter(of).map(|entry| entry.seen);
        let most = anywhere.max_by_key(|seen| (seen.generation, seen.records));
        Memory { at_place, of_store: here.or(most) }
    }

    /// Remembers what was seen here. Called under the catalog's lock, after the catalog itself: it never runs ahead.
    ///
    /// # Errors
    /// If the file cannot be written: then the next start may believe an older store.
    pub(super) fn save(&self, keys: &KeyRing, seen: &Seen) -> Result<(), PackError> {
        let Some(path) = &self.path else { return Ok(()) };
        // Stores of one key share the file.
        let lock_path = path.with_extension("seen-lock");
        let lock = private().write(true).create(true).truncate(false).open(&lock_path);
        let lock = lock.map_err(|error| PackError::io("open", &lock_path, error))?;
        lock.lock().map_err(|error| PackError::io("lock", &lock_path, error))?;
        let mut entries = read(path, keys);
        let place = self.place(keys);
        // One entry of the first format, of the same store, becomes this one.
        entries.retain(|entry| {
            entry.seen.store != seen.store || (entry.place != place && entry.place != [0; 32])
        });
        entries.push(Remembered { place, seen: *seen });
        let too_many = entries.len().saturating_sub(MAX_ENTRIES);
        write(path, &encode(keys, &entries[too_many..])).map_err(|error| PackError::io("write", path, error))
    }

    fn place(&self, keys: &KeyRing) -> [u8; 32] {
        *blake3::keyed_hash(&key(keys), self.place.as_bytes()).as_bytes()
    }
}

fn key(keys: &KeyRing) -> Secret {
    derive("muser pack v1 catalog anchor", &[keys.catalog_key()])
}

fn read(path: &Path, keys: &KeyRing) -> Vec<Remembered> {
    let most = 16 + MAX_ENTRIES * ENTRY_BYTES + 32;
    match fs::read(path) {
        Ok(bytes) if bytes.len() <= most => decode(keys, &bytes).unwrap_or_default(),
        _ => Vec::new(),
    }
}

fn decode(keys: &KeyRing, bytes: &[u8]) -> Result<Vec<Remembered>, Refusal> {
    let covered = bytes.len().checked_sub(32).ok_or(Refusal::Header)?;
    let code = blake3::keyed_hash(&key(keys), &bytes[..covered]);
    let mut found = [0; 32];
    found.copy_from_slice(&bytes[covered..]);
    if code != blake3::Hash::from_bytes(found) {
        return Err(Refusal::Header);
    }
    let mut of = Reader::new(&bytes[..covered]);
    if bytes.len() == FIRST_FORMAT_BYTES && !bytes.starts_with(MAGIC) {
        let seen = Seen { store: of.array()?, generation: of.u64()?, records: of.u64()?, code: [0; 32] };
        return Ok(vec![Remembered { place: [0; 32], seen }]);
    }
    if of.fixed(8)? != MAGIC || of.u16()? != VERSION || of.u16()? != 0 {
        return Err(Refusal::NotAPack);
    }
    let count = of.count("entries", MAX_ENTRIES as u32, ENTRY_BYTES)?;
    let mut entries = Vec::with_capacity(count);
    for _ in 0..count {
        let (store, place) = (of.array()?, of.array()?);
        let seen = Seen { store, generation: of.u64()?, records: of.u64()?, code: of.array()? };
        entries.push(Remembered { place, seen });
    }
    of.finish()?;
    Ok(entries)
}

fn encode(keys: &KeyRing, entries: &[Remembered]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[0; 2]);
    bytes.extend_from_slice(&(entries.len() as u32).to_le_bytes());
    for Remembered { place, seen } in entries {
        bytes.extend_from_slice(&seen.store);
        bytes.extend_from_slice(place);
        bytes.extend_from_slice(&seen.generation.to_le_bytes());
        bytes.extend_from_slice(&seen.records.to_le_bytes());
        bytes.extend_from_slice(&seen.code);
    }
    let code = blake3::keyed_hash(&key(keys), &bytes);
    bytes.extend_from_slice(code.as_bytes());
    bytes
}

fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let partial = path.with_extension("seen-new");
    // Left by a process that was killed; the lock is ours.
    let _ = fs::remove_file(&partial);
    let mut file = private().write(true).create_new(true).open(&partial)?;
    file.write_all(bytes).and_then(|()| file.sync_all())?;
    fs::rename(&partial, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}
