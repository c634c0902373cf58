//! Records: small sealed blobs under a name that may change, such as the messages of a session.
//!
//! Each change is a new object; the catalog says which revision counts, so an older one put back is refused. Names are
//! inside the sealed bytes; outside there are keyed hashes.

use super::catalog::Entry;
use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};

use super::{Library, Shared};
use crate::encode::{Reader, Writer};
use crate::keys::KeyRing;
use crate::kind::Kind;
use crate::object::{Spec, seal};
use crate::store::Put;
use crate::{Area, ObjectName, PackError, Refusal};

const DOMAIN: &str = "muser pack record";
const MAX_NAME_BYTES: usize = 256;

/// A record in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordInfo {
    /// Its kind.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// How often it was written.
    pub revision: u64,
    /// When, in seconds since 1970.
    pub written_unix_s: u64,
    /// Bytes of its content.
    pub bytes: usize,
}

/// Of which state a writer of a record knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Whatever there is.
    Anything,
    /// There is none of this name.
    Absent,
    /// This revision is the last one.
    Revision(u64),
}

impl Library {
    /// Writes a record and returns its revision, which is one more than before. `kind` separates name spaces.
    pub fn put_record(&self, kind: &str, name: &str, bytes: &[u8]) -> Result<u64, PackError> {
        self.put_record_if(kind, name, bytes, Expect::Anything)
    }

    /// The same, if the record is still as the caller knows it, whichever process may have written it meanwhile.
    ///
    /// # Errors
    /// [`PackError::Changed`] if it is not; then nothing is written.
    pub fn put_record_if(
        &self,
        kind: &str,
        name: &str,
        bytes: &[u8],
        expect: Expect,
    ) -> Result<u64, PackError> {
        self.put_record_at(kind, name, bytes, expect, crate::keys::now_unix_s())
    }

    pub(super) fn put_record_at(
        &self,
        kind: &str,
        name: &str,
        bytes: &[u8],
        expect: Expect,
        written_unix_s: u64,
    ) -> Result<u64, PackError> {
        check_name(kind, name)?;
        let keys = self.shared.sealing_keys()?;
        let key = record_key(&keys, kind, name);
        self.locked(|shared, view, locked| {
            let locked = locked.ok_or_else(no_catalog)?;
            let Some(_active) = shared.store.activity()? else { return Err(PackError::Busy) };
            let before = view.records.get(&key).map(|(_, revision)| *revision);
            let as_known = match expect {
                Expect::Anything => true,
                Expect::Absent => before.is_none(),
                Expect::Revision(revision) => before == Some(revision),
            };
            if !as_known {
                return Err(PackError::Changed { what: "the record" });
            }
            let revision = before.unwrap_or(0) + 1;
            let mut writer = Writer::for_domain(DOMAIN);
            writer.string(kind);
            writer.string(name);
            writer.u64(revision);
            writer.u64(written_unix_s);
            writer.bytes(bytes);
            let payload = writer.into_bytes();
            let id = object_id(&keys, &key, revision);
            let object = ObjectName { area: Area::Records, id };
            let sealed = seal(&keys, shared.options.encrypt, Spec::plain(Kind::Record), id, &payload)?;
            // What a killed process left under this name was never committed.
            let put = shared.put_object(object, &sealed, Some((view, &mut *locked)), |_| Ok(false))?;
            debug_assert_eq!(put, Put::Stored);
            shared.store.flush()?;
            let digest = sealed.storage_digest();
            view.append(&keys, locked, Entry::RecordWritten { name: key, digest, revision })?;
            if let Some(before) = before {
                let id = object_id(&keys, &key, before);
                shared.store.delete(&ObjectName { area: Area::Records, id })?;
            }
            Ok(revision)
        })
    }

    /// A record's content and revision; `None` if there is none of this name.
    pub fn record(&self, kind: &str, name: &str) -> Result<Option<(Vec<u8>, u64)>, PackError> {
        let found = self.record_with_info(kind, name)?;
        Ok(found.map(|(info, bytes)| (bytes, info.revision)))
    }

    /// The same with all that is known of it.
    pub fn record_with_info(
        &self,
        kind: &str,
        name: &str,
    ) -> Result<Option<(RecordInfo, Vec<u8>)>, PackError> {
        self.refresh()?;
        let key = record_key(&self.keys(), kind, name);
        let (known, damaged) = {
            let view = self.writer();
            (view.records.get(&key).copied(), !view.damaged.is_empty())
        };
        let Some(known) = known else { return Ok(None) };
        match self.read_record(&key, known) {
            Ok(found) => Ok(Some(found)),
            // What the catalog said after this revision is lost.
            Err(PackError::NotFound { .. }) if damaged => Ok(None),
            Err(error) => Err(self.shared.counters.failed(error)),
        }
    }

    /// All records of a kind, by name. Those that are not believed are counted and left out.
    pub fn records(&self, kind: &str) -> Result<Vec<RecordInfo>, PackError> {
        self.refresh()?;
        let known: Vec<_> = self.writer().records.iter().map(|(key, of)| (*key, *of)).collect();
        let mut infos = {
            let mut infos = self.record_infos();
            let current: HashMap<_, _> = known.iter().map(|(key, of)| (*key, of.1)).collect();
            infos.retain(|key, info| current.get(key) == Some(&info.revision));
            infos.clone()
        };
        let mut records = Vec::new();
        for (key, of) in known {
            let info = match infos.remove(&key) {
                Some(info) => Ok(info),
                None => self.read_record(&key, of).map(|(info, _)| {
                    self.record_infos().insert(key, info.clone());
                    info
                }),
            };
            match info {
                Ok(info) if info.kind == kind => records.push(info),
                Ok(_) => {}
                Err(error) => {
                    self.shared.counters.failed(error);
                }
            }
        }
        records.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(records)
    }

    /// Removes a record; `false` if there was none.
    pub fn remove_record(&self, kind: &str, name: &str) -> Result<bool, PackError> {
        let keys = self.keys();
        let key = record_key(&keys, kind, name);
        self.locked(|shared, view, locked| {
            let Some((_, revision)) = view.records.get(&key).copied() else { return Ok(false) };
            view.append(&keys, locked.ok_or_else(no_catalog)?, Entry::RecordRemoved { name: key })?;
            let id = object_id(&keys, &key, revision);
            shared.store.delete(&ObjectName { area: Area::Records, id })?;
            Ok(true)
        })
    }

    fn record_infos(&self) -> MutexGuard<'_, HashMap<[u8; 32], RecordInfo>> {
        self.shared.record_infos.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn read_record(
        &self,
        key: &[u8; 32],
        (digest, revision): ([u8; 32], u64),
    ) -> Result<(RecordInfo, Vec<u8>), PackError> {
        let keys = self.keys();
        let object = ObjectName { area: Area::Records, id: object_id(&keys, key, revision) };
        let opened = self.shared.open_object(&keys, object)?;
        let refuse = |reason| PackError::refused(object, reason);
        if opened.storage_digest != digest {
            return Err(refuse(Refusal::Replayed));
        }
        let payload = opened.read_all()?;
        let (info, content) = decode(&payload).map_err(refuse)?;
        if info.revision != revision {
            return Err(refuse(Refusal::OldRevision { expected: revision, found: info.revision }));
        }
        Ok((info, content))
    }
}

fn decode(payload: &[u8]) -> Result<(RecordInfo, Vec<u8>), Refusal> {
    let mut of = Reader::new(payload);
    if of.string("record domain")? != DOMAIN {
        return Err(Refusal::Malformed { field: "record domain", found: 0 });
    }
    let (kind, name) = (of.string("record kind")?.to_owned(), of.string("record name")?.to_owned());
    let (revision, written_unix_s) = (of.u64()?, of.u64()?);
    let bytes = of.bytes()?.to_vec();
    of.finish()?;
    Ok((RecordInfo { kind, name, revision, written_unix_s, bytes: bytes.len() }, bytes))
}

impl Shared {
    /// Whatever revision of whatever record an object holds: place in the catalog, storage digest, revision.
    pub(super) fn read_any_record(&self, object: ObjectName) -> Result<([u8; 32], [u8; 32], u64), PackError> {
        let keys = self.keys();
        let opened = self.open_object(&keys, object)?;
        let refuse = |reason| PackError::refused(object, reason);
        let (info, _) = decode(&opened.read_all()?).map_err(refuse)?;
        let key = record_key(&keys, &info.kind, &info.name);
        if object_id(&keys, &key, info.revision) != object.id {
            return Err(refuse(Refusal::Swapped));
        }
        Ok((key, opened.storage_digest, info.revision))
    }
}

/// The record's place in the catalog.
fn record_key(keys: &KeyRing, kind: &str, name: &str) -> [u8; 32] {
    let mut writer = Writer::for_domain("record name");
    writer.string(kind);
    writer.string(name);
    *blake3::keyed_hash(keys.namespace_key(), &writer.into_bytes()).as_bytes()
}

/// The object of a revision.
pub(super) fn object_id(keys: &KeyRing, record: &[u8; 32], revision: u64) -> [u8; 32] {
    let mut writer = Writer::for_domain("record object");
    writer.fixed(record);
    writer.u64(revision);
    *blake3::keyed_hash(keys.namespace_key(), &writer.into_bytes()).as_bytes()
}

fn check_name(kind: &str, name: &str) -> Result<(), PackError> {
    if kind.len() <= MAX_NAME_BYTES && (1..=MAX_NAME_BYTES).contains(&name.len()) {
        return Ok(());
    }
    Err(PackError::Caller {
        what: "name of a record",
        expected: format!("1 to {MAX_NAME_BYTES} bytes"),
        found: format!("{}", name.len()),
    })
}

pub(super) fn no_catalog() -> PackError {
    PackError::Caller {
        what: "store for records",
        expected: "one with a catalog".into(),
        found: "one without".into(),
    }
}
