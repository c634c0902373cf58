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
//! The objects are sealed anew for each bundle, with keys that were made for it alone: whoever gets bundle and keys has
//! this pack and nothing else of the store. It needs no code of its own: the manifest names every segment, and each object
//! is authenticated by itself. An import reads them with the bundle's keys and publishes them under the key of the store
//! they go to. Nothing can tell whether K and V are what the model computes for the tokens; whoever holds the keys could
//! have chosen them.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use muser_kv::{KvGroup, PositionKey};

use super::{Library, Published};
use crate::encode::{Reader, Writer};
use crate::keys::{KeyRing, TenantKeys};
use crate::kind::Kind;
use crate::manifest::{Block, MAX_POSITIONS, Manifest, chain, chain_root};
use crate::object::{ALIGNMENT, OpenedObject, SealedObject, Spec, content_id, seal};
use crate::store::{ReadAt, read_exact_at};
use crate::{Area, ObjectName, PackError, PackId, Refusal, SegmentId};

const MAGIC: &[u8; 8] = b"MUSRBNDL";
const VERSION: u16 = 1;
const ENTRY_BYTES: usize = 48;
/// A manifest and two segments for each block.
const MAX_OBJECTS: u32 = 1 + 2 * MAX_POSITIONS / muser_kv::BLOCK_LEN as u32;

impl Library {
    /// Writes a pack into a bundle, and returns the bundle's bytes and the keys that open it.
    pub fn export(&self, id: PackId, out: &mut dyn Write) -> Result<(u64, KeyRing), PackError> {
        let outcome = self.export_objects(id, out);
        outcome.map_err(|error| self.shared.counters.failed(error))
    }

    /// Publishes the pack of a bundle for the tenant with this label. `source` are the bundle's keys (or, for one of the
    /// first format, those of the store that it comes from).
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

    fn export_objects(&self, id: PackId, out: &mut dyn Write) -> Result<(u64, KeyRing), PackError> {
        let Some(_active) = self.shared.store.activity()? else { return Err(PackError::Busy) };
        let (manifest, _) = self.shared.read_visible(&self.writer(), id)?;
        let (keys, fresh) = (self.keys(), KeyRing::generate()?);
        let tenant = fresh.tenant("");
        // Names first, as the table with all of them comes first. Blocks with equal rows share a segment.
        let mut renamed: HashMap<SegmentId, SegmentId> = HashMap::new();
        let mut segments = Vec::new();
        for (.., segment) in manifest.segments() {
            if renamed.contains_key(&segment) {
                continue;
            }
            let opened = self.shared.open_object(&keys, segment.object())?;
            let name =
                SegmentId(content_id(&fresh, &tenant.content, &opened.header.spec, &opened.read_all()?));
            renamed.insert(segment, name);
            segments.push((segment, name, opened.bytes()));
        }
        let manifest = manifest_for(&manifest, &tenant, &renamed);
        let name = manifest.id(&tenant).object();
        let sealed = seal(
            &fresh,
            self.shared.options.encrypt,
            Spec::plain(Kind::Manifest),
            name.id,
            &manifest.encode(),
        )?;
        let mut bundle = BundleWriter { out, written: 0 };
        let mut head = Writer::default();
        head.fixed(MAGIC);
        head.u16(VERSION);
        head.u16(0);
        head.u32(1 + segments.len() as u32);
        write_entry(&mut head, &name, sealed.bytes());
        for (_, name, bytes) in &segments {
            write_entry(&mut head, &name.object(), *bytes);
        }
        bundle.put(&head.into_bytes())?;
        bundle.put_object(&sealed)?;
        for (segment, name, bytes) in segments {
            let opened = self.shared.open_object(&keys, segment.object())?;
            let sealed =
                seal(&fresh, self.shared.options.encrypt, opened.header.spec, name.0, &opened.read_all()?)?;
            debug_assert_eq!(sealed.bytes(), bytes, "sealing does not change a size");
            bundle.put_object(&sealed)?;
        }
        bundle.out.flush().map_err(write_failed)?;
        Ok((bundle.written, fresh))
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
        // Whoever can open the bundle has its content; only a pack of another tenant of one store stays where it is.
        if manifest.tenant != source.tenant("").id && manifest.tenant != source.tenant(tenant).id {
            return Err(refuse(Refusal::ForeignModel { field: "tenant" }));
        }
        let scope = self.scope(manifest.identity.clone(), tenant);
        let units: Vec<PositionKey> =
            manifest.units.iter().map(|unit| PositionKey::from_le_bytes(*unit)).collect();
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
            let fits = (spec.kind == Kind::Sliding) == sliding
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

/// The same manifest under other keys.
fn manifest_for(
    manifest: &Manifest,
    tenant: &TenantKeys,
    renamed: &HashMap<SegmentId, SegmentId>,
) -> Manifest {
    let units: Vec<PositionKey> =
        manifest.units.iter().map(|unit| PositionKey::from_le_bytes(*unit)).collect();
    let root = chain_root(&tenant.prefix, &manifest.identity.digest());
    let name = |id: &SegmentId| renamed.get(id).copied().unwrap_or(*id);
    let keys = chain(&tenant.prefix, root, &units);
    let blocks = keys.into_iter().zip(&manifest.blocks);
    let blocks = blocks.map(|(key, block)| Block {
        key,
        full: name(&block.full),
        sliding: block.sliding.as_ref().map(name),
    });
    Manifest { tenant: tenant.id, root, blocks: blocks.collect(), ..manifest.clone() }
}

fn write_entry(writer: &mut Writer, name: &ObjectName, bytes: u64) {
    writer.fixed(&[u8::from(name.area == Area::Segments), 0, 0, 0, 0, 0, 0, 0]);
    writer.u64(bytes);
    writer.fixed(&name.id);
}

fn write_failed(source: std::io::Error) -> PackError {
    PackError::io("write", "the bundle", source)
}

struct BundleWriter<'a> {
    out: &'a mut dyn Write,
    written: u64,
}

impl BundleWriter<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), PackError> {
        self.out.write_all(bytes).map_err(write_failed)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// At the next multiple of a page.
    fn put_object(&mut self, sealed: &SealedObject) -> Result<(), PackError> {
        let padding = self.written.next_multiple_of(ALIGNMENT as u64) - self.written;
        self.put(&vec![0; padding as usize])?;
        self.put(&sealed.header)?;
        self.put(&sealed.body)
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
