//! A store in a folder of this machine, which several processes may use at once.
//!
//! ```text
//! packs/ab/abcd…      objects, in 256 folders an area
//! segments/ab/…
//! records/ab/…
//! partial/            objects that are being written; unlinked once they have their name
//! quarantine/         objects that were refused
//! catalog             the catalog's records
//! lock/catalog        held while the catalog is read or changed
//! lock/usage          bytes held (u64), then 1 while they change; held while they are counted
//! lock/activity       shared while packs are read or written, exclusive while garbage is collected
//! ```
//!
//! An object is written to `partial/`, synced, and linked under its name: a link never replaces. All locks are the
//! kernel's (`flock`), so they end with their process, however it ends, and no clock is involved.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::{Activity, CatalogStamp, CatalogStore, Listed, LockedCatalog, PackStore, Put, ReadAt, Usage};
use crate::kill_point::reached;
use crate::name::{hex, parse_hex};
use crate::store::durable::{Act, note};
use crate::{Area, ObjectName, PackError, Refusal};

/// Most refused objects that are kept to be looked at.
const MAX_QUARANTINED: usize = 8;

/// The store.
#[derive(Debug)]
pub struct DirStore {
    dir: PathBuf,
    budget_bytes: Option<u64>,
    /// Nothing can be written here: what is there is read.
    read_only: bool,
    /// Folders with entries that a power cut could still take back.
    unsynced: Mutex<BTreeSet<PathBuf>>,
    next_partial: AtomicU64,
}

impl DirStore {
    /// Opens the store in `dir`, which is created (for its owner only) if it does not exist. It will hold at most
    /// `budget_bytes`, whatever else uses the folder.
    pub fn open(dir: impl Into<PathBuf>, budget_bytes: Option<u64>) -> Result<Self, PackError> {
        let dir = dir.into();
        for folder in ["packs", "segments", "records", "partial", "quarantine", "lock"] {
            create_private_dir(&dir.join(folder))?;
        }
        let unsynced = Mutex::new(BTreeSet::from([dir.clone()]));
        let mut store =
            Self { dir, budget_bytes, read_only: false, unsynced, next_partial: AtomicU64::new(0) };
        store.read_only = !store.lock_file("usage")?.1;
        Ok(store)
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn path(&self, name: &ObjectName) -> PathBuf {
        let hex = hex(&name.id);
        self.dir.join(name.area.folder()).join(&hex[..2]).join(hex)
    }

    /// A file to lock, and whether it can be written. In a folder that cannot be, others' locks are still respected.
    fn lock_file(&self, name: &str) -> Result<(File, bool), PackError> {
        open_or_read(&self.dir.join("lock").join(name))
    }

    /// Changes the count of held bytes while nobody else does. `change` gets it and returns the new one.
    fn count<T>(&self, change: impl FnOnce(u64) -> Result<(u64, T), PackError>) -> Result<T, PackError> {
        let (mut file, _) = self.lock_file("usage")?;
        let failed = |action| move |error| PackError::io(action, "lock/usage", error);
        file.lock().map_err(failed("lock"))?;
        let held = self.counted(&mut file)?;
        let mut bytes = [0; 9];
        let mut write = |held: u64, changing: bool| {
            bytes[..8].copy_from_slice(&held.to_le_bytes());
            bytes[8] = u8::from(changing);
            let written = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&bytes));
            written.map_err(|error| disk_error("write", Path::new("lock/usage"), 9, error))
        };
        write(held, true)?;
        let changed = change(held);
        // What failed has changed nothing.
        write(changed.as_ref().map_or(held, |(new, _)| *new), false)?;
        changed.map(|(_, outcome)| outcome)
    }

    /// Reads the count, or counts.
    fn counted(&self, file: &mut File) -> Result<u64, PackError> {
        let mut bytes = [0; 9];
        match file.read_exact(&mut bytes) {
            Ok(()) if bytes[8] == 0 => Ok(u64::from_le_bytes(std::array::from_fn(|i| bytes[i]))),
            // Never counted, or whoever was changing something died before he could count it.
            _ => self.measure(),
        }
    }

    fn reserve(&self, bytes: u64) -> Result<(), PackError> {
        self.count(|held| match self.budget_bytes {
            Some(budget) if held + bytes > budget => {
                Err(PackError::Full { needed_bytes: bytes, detail: format!("{held} of {budget} are in use") })
            }
            _ => Ok((held + bytes, ())),
        })
    }

    fn unreserve(&self, bytes: u64) -> Result<(), PackError> {
        self.count(|held| Ok((held.saturating_sub(bytes), ())))
    }

    /// Bytes of all files that count.
    fn measure(&self) -> Result<u64, PackError> {
        let mut held = 0;
        for area in Area::ALL {
            held += self.list(area)?.iter().map(|listed| listed.bytes).sum::<u64>();
        }
        for folder in ["partial", "quarantine"] {
            for (_, meta) in entries(&self.dir.join(folder))? {
                held += meta.len();
            }
        }
        Ok(held)
    }

    /// Removes what was put aside, of one object or of all.
    fn remove_aside(&self, of: Option<&ObjectName>) -> Result<(usize, u64), PackError> {
        let suffix = of.map(|name| format!("-{}-{}", name.area.folder(), hex(&name.id)));
        let ours = |path: &Path| {
            let name = path.file_name().and_then(|name| name.to_str());
            suffix.as_ref().is_none_or(|suffix| name.is_some_and(|name| name.ends_with(suffix)))
        };
        let (mut count, mut freed) = (0, 0);
        for (path, meta) in entries(&self.dir.join("quarantine"))? {
            if ours(&path) && fs::remove_file(&path).is_ok() {
                self.unreserve(meta.len())?;
                (count, freed) = (count + 1, freed + meta.len());
            }
        }
        if count > 0 {
            self.unsynced(&self.dir.join("quarantine"));
        }
        Ok((count, freed))
    }

    fn unsynced(&self, dir: &Path) {
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner).insert(dir.to_owned());
    }

    fn write_partial(&self, path: &Path, parts: &[&[u8]], bytes: u64) -> Result<(), PackError> {
        let failed = |action: &'static str| move |error| disk_error(action, path, bytes, error);
        let mut file = private().write(true).create_new(true).open(path).map_err(failed("create"))?;
        reached("partial created");
        // The file is there before its bytes are counted: whoever finds it knows that the count may be wrong.
        self.reserve(bytes)?;
        reached("bytes counted");
        let write = |part: &&[u8]| {
            let written = file.write_all(part);
            reached("a part written");
            note(Act::Wrote, path);
            written
        };
        let written = parts.iter().try_for_each(write).map_err(failed("write")).and_then(|()| {
            reached("object written");
            sync(&file, path).map_err(failed("sync"))
        });
        reached("object synced");
        if written.is_err() {
            self.unreserve(bytes)?;
        }
        written
    }
}

impl PackStore for DirStore {
    fn describe(&self) -> String {
        self.dir.display().to_string()
    }

    fn place(&self) -> String {
        self.dir.canonicalize().unwrap_or_else(|_| self.dir.clone()).display().to_string()
    }

    fn replace(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<(), PackError> {
        self.quarantine(name)?;
        self.put(name, parts).map(drop)
    }

    fn empty_quarantine(&self) -> Result<(usize, u64), PackError> {
        self.remove_aside(None)
    }

    fn put(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<Put, PackError> {
        let path = self.path(name);
        if path.exists() {
            return Ok(Put::Exists);
        }
        let bytes = parts.iter().map(|part| part.len() as u64).sum();
        let folder = path.parent().unwrap_or(&self.dir);
        if !folder.exists() {
            create_private_dir(folder)?;
            note(Act::Named, folder);
            self.unsynced(folder.parent().unwrap_or(&self.dir));
        }
        let number = self.next_partial.fetch_add(1, Ordering::Relaxed);
        // Several stores of one process, and processes with equal numbers in containers, meet in one folder.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let own = std::ptr::from_ref(self).addr();
        let partial = format!("{}-{own:x}-{number}-{now}", std::process::id());
        let partial = self.dir.join("partial").join(partial);
        let outcome =
            self.write_partial(&partial, parts, bytes).and_then(|()| match fs::hard_link(&partial, &path) {
                Ok(()) => {
                    reached("object linked");
                    note(Act::Named, &path);
                    Ok(Put::Stored)
                }
                Err(error) => {
                    self.unreserve(bytes)?;
                    if error.kind() == io::ErrorKind::AlreadyExists {
                        return Ok(Put::Exists);
                    }
                    Err(disk_error("publish", &path, bytes, error))
                }
            });
        // What cannot be removed now is removed by the next cleaning.
        let _ = fs::remove_file(&partial);
        reached("partial unlinked");
        self.unsynced(folder);
        outcome
    }

    fn open(&self, name: &ObjectName) -> Result<Option<Box<dyn ReadAt>>, PackError> {
        let path = self.path(name);
        // A pipe in an object's place is opened without waiting for its writer, and is no object, as a link is none.
        match plain_file(&path, OpenOptions::new().read(true)) {
            Ok(Some(file)) => Ok(Some(Box::new(OpenedFile { name: *name, path, file }))),
            Ok(None) => Err(PackError::refused(name, Refusal::NotAPack)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(PackError::io("open", path, error)),
        }
    }

    fn contains(&self, name: &ObjectName) -> Result<bool, PackError> {
        let path = self.path(name);
        path.try_exists().map_err(|error| PackError::io("look for", path, error))
    }

    fn delete(&self, name: &ObjectName) -> Result<bool, PackError> {
        let path = self.path(name);
        let failed = |error| PackError::io("delete", &path, error);
        let deleted = self.count(|held| {
            let bytes = match fs::symlink_metadata(&path) {
                Ok(meta) => meta.len(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((held, false)),
                Err(error) => return Err(failed(error)),
            };
            match fs::remove_file(&path) {
                Ok(()) => {
                    reached("object deleted");
                    Ok((held.saturating_sub(bytes), true))
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok((held, false)),
                Err(error) => Err(failed(error)),
            }
        })?;
        self.remove_aside(Some(name))?;
        if deleted && let Some(folder) = path.parent() {
            reached("deletion counted");
            self.unsynced(folder);
        }
        Ok(deleted)
    }

    fn quarantine(&self, name: &ObjectName) -> Result<(), PackError> {
        let path = self.path(name);
        let folder = self.dir.join("quarantine");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let to = folder.join(format!("{now}-{}-{}", name.area.folder(), hex(&name.id)));
        match fs::rename(&path, &to) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(PackError::io("put aside", path, error)),
        }
        let mut kept = entries(&folder)?;
        kept.sort_by(|a, b| a.0.cmp(&b.0));
        let too_many = kept.len().saturating_sub(MAX_QUARANTINED);
        for (path, meta) in kept.into_iter().take(too_many) {
            if fs::remove_file(&path).is_ok() {
                self.unreserve(meta.len())?;
            }
        }
        Ok(())
    }

    fn list(&self, area: Area) -> Result<Vec<Listed>, PackError> {
        let mut listed = Vec::new();
        let folder = self.dir.join(area.folder());
        let failed = |error| PackError::io("list", &folder, error);
        for group in fs::read_dir(&folder).map_err(failed)? {
            let group = group.map_err(failed)?;
            if !group.file_type().map_err(failed)?.is_dir() {
                continue;
            }
            for (path, meta) in entries(&group.path())? {
                // Other files are none of ours.
                let id = path.file_name().and_then(|name| parse_hex(name.to_str()?));
                let Some(id) = id.filter(|_| meta.is_file()) else { continue };
                let used = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
                let used_unix_ns = used.map_or(0, |time| time.as_nanos() as u64);
                listed.push(Listed { name: ObjectName { area, id }, bytes: meta.len(), used_unix_ns });
            }
        }
        Ok(listed)
    }

    fn touch(&self, name: &ObjectName) {
        if let Ok(Some(file)) = plain_file(&self.path(name), OpenOptions::new().read(true)) {
            let _ = file.set_modified(SystemTime::now());
        }
    }

    fn flush(&self) -> Result<(), PackError> {
        // Held throughout: who comes second must not return before the folders of his objects are synced.
        let mut dirs = self.unsynced.lock().unwrap_or_else(PoisonError::into_inner);
        reached("before folders are synced");
        while let Some(dir) = dirs.first() {
            sync_dir(dir)?;
            reached("a folder synced");
            dirs.pop_first();
        }
        Ok(())
    }

    fn usage(&self) -> Result<Usage, PackError> {
        let (mut file, _) = self.lock_file("usage")?;
        file.lock().map_err(|error| PackError::io("lock", "lock/usage", error))?;
        let held_bytes = self.counted(&mut file)?;
        Ok(Usage { held_bytes, budget_bytes: self.budget_bytes })
    }

    fn clean(&self) -> Result<u64, PackError> {
        let left = entries(&self.dir.join("partial"))?;
        if left.is_empty() {
            return Ok(0);
        }
        self.count(|_| {
            let mut freed = 0;
            for (path, meta) in left {
                if fs::remove_file(&path).is_ok() {
                    // An object that has its name already keeps its bytes.
                    freed += if links(&meta) > 1 { 0 } else { meta.len() };
                }
            }
            Ok((self.measure()?, freed))
        })
    }

    fn activity(&self) -> Result<Option<Box<dyn Activity>>, PackError> {
        let (file, _) = self.lock_file("activity")?;
        match file.try_lock_shared() {
            Ok(()) => Ok(Some(Box::new(ActivityLock { _file: file }))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(PackError::io("lock", "lock/activity", error)),
        }
    }

    fn quiet(&self) -> Result<Option<Box<dyn Activity>>, PackError> {
        let (file, writable) = self.lock_file("activity")?;
        // Nothing can be collected here.
        if !writable {
            return Ok(None);
        }
        match file.try_lock() {
            Ok(()) => Ok(Some(Box::new(ActivityLock { _file: file }))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(PackError::io("lock", "lock/activity", error)),
        }
    }

    fn catalog(&self) -> Option<&dyn CatalogStore> {
        Some(self)
    }
}

impl CatalogStore for DirStore {
    fn lock(&self) -> Result<Box<dyn LockedCatalog + '_>, PackError> {
        let (lock, _) = self.lock_file("catalog")?;
        lock.lock().map_err(|error| PackError::io("lock", "lock/catalog", error))?;
        let path = self.dir.join("catalog");
        let is_new = !path.exists();
        let (file, _) = open_or_read(&path)?;
        if is_new {
            sync_dir(&self.dir)?;
        }
        Ok(Box::new(LockedFile { store: self, path, file, _lock: lock }))
    }

    fn stamp(&self) -> Result<Option<CatalogStamp>, PackError> {
        let path = self.dir.join("catalog");
        match fs::metadata(&path) {
            Ok(meta) => {
                let changed = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
                Ok(Some(CatalogStamp {
                    bytes: meta.len(),
                    file: inode(&meta),
                    changed_unix_ns: changed.map_or(0, |time| time.as_nanos() as u64),
                }))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(PackError::io("look at", path, error)),
        }
    }
}

struct OpenedFile {
    name: ObjectName,
    path: PathBuf,
    file: File,
}

impl ReadAt for OpenedFile {
    fn len(&self) -> Result<u64, PackError> {
        let meta = self.file.metadata().map_err(|error| PackError::io("look at", &self.path, error))?;
        Ok(meta.len())
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), PackError> {
        match read_exact_at(&self.file, offset, out) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let (expected, found) = (offset + out.len() as u64, self.len()?);
                Err(PackError::refused(self.name, Refusal::Truncated { expected, found }))
            }
            Err(error) => Err(PackError::io("read", &self.path, error)),
        }
    }
}

/// Ends with the file.
struct ActivityLock {
    _file: File,
}

impl Activity for ActivityLock {}

struct LockedFile<'a> {
    store: &'a DirStore,
    path: PathBuf,
    file: File,
    _lock: File,
}

impl LockedFile<'_> {
    fn failed(&self, action: &'static str) -> impl Fn(io::Error) -> PackError + use<> {
        let path = self.path.clone();
        move |error| disk_error(action, &path, 128, error)
    }
}

impl LockedCatalog for LockedFile<'_> {
    fn len(&mut self) -> Result<u64, PackError> {
        self.file.metadata().map(|meta| meta.len()).map_err(self.failed("look at"))
    }

    fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, PackError> {
        let there = self.len()?.saturating_sub(offset).min(len);
        let mut bytes = vec![0; there as usize];
        read_exact_at(&self.file, offset, &mut bytes).map_err(self.failed("read"))?;
        Ok(bytes)
    }

    fn truncate(&mut self, len: u64) -> Result<(), PackError> {
        // Readers stop at the last whole record anyway.
        if self.store.read_only {
            return Ok(());
        }
        self.file.set_len(len).map_err(self.failed("truncate"))
    }

    fn append(&mut self, record: &[u8]) -> Result<(), PackError> {
        let before = self.file.seek(SeekFrom::End(0)).map_err(self.failed("extend"))?;
        let written = self.file.write_all(record).and_then(|()| {
            reached("catalog record written");
            note(Act::Catalogued, &self.path);
            sync(&self.file, &self.path)
        });
        reached("catalog record synced");
        written.map_err(|error| {
            // Half a record is cut off now or, failing that, by the next reader.
            let _ = self.file.set_len(before);
            self.failed("extend")(error)
        })
    }

    fn replace(&mut self, records: &[u8]) -> Result<(), PackError> {
        let partial = self.store.dir.join("catalog.new");
        let mut options = private();
        let file = options.read(true).write(true).create(true).truncate(true).open(&partial);
        let mut file = file.map_err(self.failed("create"))?;
        let written = file.write_all(records).and_then(|()| {
            note(Act::Wrote, &partial);
            sync(&file, &partial)
        });
        written.map_err(self.failed("write"))?;
        reached("new catalog written");
        fs::rename(&partial, &self.path).map_err(self.failed("replace"))?;
        reached("catalog replaced");
        note(Act::Named, &self.path);
        self.file = file;
        sync_dir(&self.store.dir)
    }
}

/// Opens a file without following a link or waiting for anybody; `None` if it is no plain file.
fn plain_file(path: &Path, options: &mut OpenOptions) -> io::Result<Option<File>> {
    #[cfg(unix)]
    {
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        std::os::unix::fs::OpenOptionsExt::custom_flags(options, flags.bits() as i32);
    }
    let file = match options.open(path) {
        Ok(file) => file,
        #[cfg(unix)]
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    Ok(file.metadata()?.is_file().then_some(file))
}

/// Opens a file that may be new, to read it only where it cannot be written; says which.
fn open_or_read(path: &Path) -> Result<(File, bool), PackError> {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    match plain_file(path, private().read(true).write(true).create(true).truncate(false)) {
        Ok(Some(file)) => Ok((file, true)),
        Ok(None) => Err(PackError::refused(path.display(), Refusal::NotAPack)),
        Err(error) if matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem) => {
            // Where it cannot be read either, the first reason is the better one.
            let file = File::open(path).map_err(|_| PackError::io("open", path, error))?;
            Ok((file, false))
        }
        Err(error) => Err(PackError::io("open", path, error)),
    }
}

/// For files that are their owner's alone.
pub(crate) fn private() -> OpenOptions {
    #[allow(unused_mut, reason = "no mode outside Unix")]
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

pub(crate) fn create_private_dir(path: &Path) -> Result<(), PackError> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path).map_err(|error| PackError::io("create", path, error))
}

/// What was written is on the disk.
fn sync(file: &File, path: &Path) -> io::Result<()> {
    file.sync_data()?;
    note(Act::Synced, path);
    Ok(())
}

pub(crate) fn sync_dir(path: &Path) -> Result<(), PackError> {
    // Folders cannot be synced (nor need to be) elsewhere.
    if cfg!(unix) {
        let synced = File::open(path).and_then(|dir| dir.sync_all());
        synced.map_err(|error| PackError::io("sync", path, error))?;
    }
    note(Act::FolderSynced, path);
    Ok(())
}

/// The entries of a folder; what vanishes meanwhile is not among them.
fn entries(folder: &Path) -> Result<Vec<(PathBuf, fs::Metadata)>, PackError> {
    let failed = |error| PackError::io("list", folder, error);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if let Ok(meta) = entry.metadata() {
            found.push((entry.path(), meta));
        }
    }
    Ok(found)
}

#[cfg(unix)]
fn inode(meta: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(meta)
}

#[cfg(not(unix))]
fn inode(_: &fs::Metadata) -> u64 {
    0
}

#[cfg(unix)]
fn links(meta: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::nlink(meta)
}

#[cfg(not(unix))]
fn links(_: &fs::Metadata) -> u64 {
    1
}

#[cfg(unix)]
pub(crate) fn read_exact_at(file: &File, offset: u64, out: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(not(unix))]
pub(crate) fn read_exact_at(file: &File, offset: u64, out: &mut [u8]) -> io::Result<()> {
    // A second handle, so that threads do not move each other's place.
    let mut file = file.try_clone()?;
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(out)
}

/// A full disk is a full store, not a broken one.
fn disk_error(action: &'static str, path: &Path, needed_bytes: u64, error: io::Error) -> PackError {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    match error.kind() {
        StorageFull | QuotaExceeded | FileTooLarge => {
            PackError::Full { needed_bytes, detail: format!("{error}") }
        }
        _ => PackError::io(action, path, error),
    }
}
