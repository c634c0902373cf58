//! One pack in one file, to carry it to another store.
//!
//! ```text
//!   0  8  magic "MUSRBNDL"
//!   8  2  version, 1
//!  10  2  zeros
//!  12  4  objects, the manifest first
//!  16  …  one entry an object: area u8 (0 pack, 1 segment), 7 zeros, bytes u64, name 32
//!   …  …  zeros to a multiple of 4,096
//!   …  …  the objects as they lie in a store, each begun at a multiple of 4,096, zeros between
//! ```
//!
//! The objects stay sealed, so a bundle is as private as a store. It needs no code of its own: the manifest names every
//! segment, and each object is authenticated by itself. An import reads them with the key of the store they come from and
//! publishes them anew under the key of the store they go to.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use muser_kv::{KvGroup, Unit};

use super::{Library, Published};
use crate::encode::{Reader, Writer};
use crate::keys::KeyRing;
use crate::manifest::{MAX_POSITIONS, Manifest};
use crate::object::{ALIGNMENT, OpenedObject};
use crate::store::{ReadAt, read_exact_at};
use crate::{Area, ObjectName, PackError, PackId, Refusal};

const MAGIC: &[u8; 8] = b"MUSRBNDL";
const VERSION: u16 = 1;
const ENTRY_BYTES: usize = 48;
/// A manifest and two segments for each block.
const MAX_OBJECTS: u32 = 1 + 2 * MAX_POSITIONS / muser_kv::BLOCK_LEN as u32;

impl Library {
    /// Writes a pack into a bundle and returns the bundle's bytes.
    pub fn export(&self, id: PackId, out: &mut dyn Write) -> Result<u64, PackError> {
        let outcome = self.export_objects(id, out);
        outcome.map_err(|error| self.shared.counters.failed(error))
    }

    /// Publishes the pack of a bundle. `source` are the keys of the store that it comes from, `tenant` is the label it was
    /// published under there and will have here.
    pub fn import(
        &self,
        bundle: &Path,
        source: &KeyRing,
        tenant: &str,
        pinned: bool,
    ) -> Result<Published, PackError> {
        let outcome = self.import_objects(bundle, source, tenant, pinned);
        outcome.map_err(|error| self.shared.counters.failed(error))
    }

    fn export_objects(&self, id: PackId, out: &mut dyn Write) -> Result<u64, PackError> {
        let Some(_active) = self.shared.store.activity()? else { return Err(PackError::Busy) };
        let (manifest, _) = self.shared.read_visible(&self.writer(), id)?;
        let keys = self.keys();
        // Blocks with equal rows share a segment.
        let mut seen = HashSet::new();
        let names = std::iter::once(id.object()).chain(manifest.segments().map(|(.., id)| id.object()));
        let mut objects = Vec::new();
        for name in names.filter(|name| seen.insert(*name)) {
            objects.push((name, self.shared.open_object(&keys, name)?));
        }
        let mut writer = Writer::default();
        writer.fixed(MAGIC);
        writer.u16(VERSION);
        writer.u16(0);
        writer.u32(objects.len() as u32);
        for (name, opened) in &objects {
            writer.fixed(&[u8::from(name.area == Area::Segments), 0, 0, 0, 0, 0, 0, 0]);
            writer.u64(opened.bytes());
            writer.fixed(&name.id);
        }
        let failed = |source| PackError::io("write", "the bundle", source);
        let head = writer.into_bytes();
        let mut written = head.len() as u64;
        out.write_all(&head).map_err(failed)?;
        let mut buffer = vec![0; 1 << 20];
        for (_, opened) in &objects {
            let padding = written.next_multiple_of(ALIGNMENT as u64) - written;
            out.write_all(&vec![0; padding as usize]).map_err(failed)?;
            written += padding;
            let mut offset = 0;
            while offset < opened.bytes() {
                let len = (opened.bytes() - offset).min(buffer.len() as u64) as usize;
                opened.read_raw(offset, &mut buffer[..len])?;
                out.write_all(&buffer[..len]).map_err(failed)?;
                offset += len as u64;
            }
            written += offset;
        }
        out.flush().map_err(failed)?;
        Ok(written)
    }

    fn import_objects(
        &self,
        bundle: &Path,
        source: &KeyRing,
        tenant: &str,
        pinned: bool,
    ) -> Result<Published, PackError> {
        let bundle = Bundle::open(bundle)?;
        let manifest_name = bundle.first;
        let opened = bundle.object(source, self.shared.options.encrypt, manifest_name)?;
        let refuse = |reason| PackError::refused(manifest_name, reason);
        let manifest = Manifest::decode(&opened.read_all()?).map_err(refuse)?;
        if manifest.tenant != source.tenant(tenant).id {
            return Err(refuse(Refusal::ForeignModel { field: "tenant" }));
        }
        let scope = self.scope(manifest.identity.clone(), tenant);
        let units: Vec<Unit> = manifest.units.iter().map(|unit| Unit::from_le_bytes(*unit)).collect();
        let mut publication = self.begin_publish(&scope, &units)?;
        for wanted in publication.wanted() {
            let block = &manifest.blocks[wanted.index];
            let segment = match wanted.group {
                KvGroup::Full => Some(block.full),
                KvGroup::Sliding => block.sliding,
            };
            let Some(segment) = segment else { continue };
            let opened = bundle.object(source, self.shared.options.encrypt, segment.object())?;
            let spec = &opened.header.spec;
            let sliding = wanted.group == KvGroup::Sliding;
            let fits = (spec.kind == crate::object::Kind::Sliding) == sliding
                && spec.positions as usize == wanted.positions
                && opened.header.payload_bytes == scope.block_bytes(wanted.group) as u64;
            if !fits {
                return Err(PackError::refused(segment.object(), Refusal::Swapped));
            }
            publication.put(wanted.group, wanted.index, &opened.read_all()?)?;
        }
        publication.commit(pinned)
    }
}

struct Bundle {
    file: Arc<File>,
    first: ObjectName,
    /// Offset and length.
    objects: HashMap<ObjectName, (u64, u64)>,
}

impl Bundle {
    /// Reads the table. Every size is compared with the file's before anything is allocated by it.
    fn open(path: &Path) -> Result<Self, PackError> {
        let failed = |source| PackError::io("read", path, source);
        let refuse = |reason| PackError::refused(format!("bundle {}", path.display()), reason);
        let file = File::open(path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?.len();
        let mut head = vec![0; found.min(16) as usize];
        read_exact_at(&file, 0, &mut head).map_err(failed)?;
        if !head.starts_with(MAGIC) {
            return Err(refuse(Refusal::NotAPack));
        }
        let count = read_head(&head).map_err(refuse)?;
        let table_bytes = count as usize * ENTRY_BYTES;
        let expected = 16 + table_bytes as u64;
        if found < expected {
            return Err(refuse(Refusal::Truncated { expected, found }));
        }
        let mut table = vec![0; table_bytes];
        read_exact_at(&file, 16, &mut table).map_err(failed)?;
        let mut of = Reader::new(&table);
        let mut objects = HashMap::with_capacity(count as usize);
        let (mut at, mut first) = (expected, None);
        for _ in 0..count {
            let (name, bytes) = read_entry(&mut of).map_err(refuse)?;
            let offset = at.next_multiple_of(ALIGNMENT as u64);
            at = offset.saturating_add(bytes);
            if objects.insert(name, (offset, bytes)).is_some() {
                return Err(refuse(Refusal::Malformed { field: "repeated object", found: offset }));
            }
            first.get_or_insert(name);
        }
        let Some(first) = first.filter(|first| first.area == Area::Packs) else {
            return Err(refuse(Refusal::Malformed { field: "first object", found: u64::from(count) }));
        };
        if found < at {
            return Err(refuse(Refusal::Truncated { expected: at, found }));
        }
        if found > at {
            return Err(refuse(Refusal::Trailing { expected: at, found }));
        }
        Ok(Self { file: Arc::new(file), first, objects })
    }

    fn object(&self, keys: &KeyRing, sealed_only: bool, name: ObjectName) -> Result<OpenedObject, PackError> {
        let Some(&(offset, bytes)) = self.objects.get(&name) else {
            return Err(PackError::refused(name, Refusal::MissingSegment));
        };
        let part = Part { file: Arc::clone(&self.file), name, offset, bytes };
        OpenedObject::open(keys, sealed_only, name, Box::new(part))
    }
}

fn read_head(head: &[u8]) -> Result<u32, Refusal> {
    let mut of = Reader::new(head);
    of.fixed(8)?;
    let version = of.u16()?;
    if version != VERSION {
        return Err(Refusal::Version { expected: VERSION, found: version });
    }
    let reserved = of.u16()?;
    if reserved != 0 {
        return Err(Refusal::Malformed { field: "reserved field", found: u64::from(reserved) });
    }
    let count = of.u32()?;
    if count > MAX_OBJECTS {
        let (limit, found) = (u64::from(MAX_OBJECTS), u64::from(count));
        return Err(Refusal::OverLimit { field: "objects", limit, found });
    }
    Ok(count)
}

fn read_entry(of: &mut Reader<'_>) -> Result<(ObjectName, u64), Refusal> {
    let kind: [u8; 8] = of.array()?;
    let area = match kind {
        [0, 0, 0, 0, 0, 0, 0, 0] => Area::Packs,
        [1, 0, 0, 0, 0, 0, 0, 0] => Area::Segments,
        _ => return Err(Refusal::Malformed { field: "area", found: u64::from_le_bytes(kind) }),
    };
    let bytes = of.u64()?;
    Ok((ObjectName { area, id: of.array()? }, bytes))
}

/// An object inside a bundle.
struct Part {
    file: Arc<File>,
    name: ObjectName,
    offset: u64,
    bytes: u64,
}

impl ReadAt for Part {
    fn len(&self) -> Result<u64, PackError> {
        Ok(self.bytes)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), PackError> {
        let end = offset.saturating_add(out.len() as u64);
        if end > self.bytes {
            let reason = Refusal::Truncated { expected: end, found: self.bytes };
            return Err(PackError::refused(self.name, reason));
        }
        let read = read_exact_at(&self.file, self.offset + offset, out);
        read.map_err(|error| PackError::io("read", "the bundle", error))
    }
}
