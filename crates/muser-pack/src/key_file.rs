//! Where the secrets are kept: one file that only its owner can read, outside the folder of the packs.
//!
//! ```text
//!   0  8  magic "MUSRKEYS"        24 32  base secret
//!   8  2  version, 1              56  …  epochs, 48 bytes each: number u32, revoked u8, 3 zeros,
//!  10  2  zeros                          made at u64 (seconds since 1970), secret 32 (zeros if revoked)
//!  12  4  epochs                  end-32 keyed BLAKE3 over everything before it
//!  16  4  oldest readable epoch
//!  20  4  zeros
//! ```
//!
//! Everything is checked on the opened descriptor, and what is overwritten after a revocation is that same file, so nothing
//! can be put in its place between check and use.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use crate::encode::Reader;
use crate::keys::{Epoch, KeyRing, MAX_EPOCHS, Secret, derive};
use crate::store::{create_private_dir, private, sync_dir};
use crate::{PackError, Refusal};

const MAGIC: &[u8; 8] = b"MUSRKEYS";
const VERSION: u16 = 1;
const EPOCH_BYTES: usize = 48;
/// How often a file may be replaced while it is read.
const REPLACED_TRIES: usize = 8;
const MAX_BYTES: usize = 56 + MAX_EPOCHS * EPOCH_BYTES + 32;

/// Functions on key files.
#[derive(Debug)]
pub struct KeyFile;

impl KeyFile {
    /// Where the key of the default store lies in muser's folder.
    pub fn default_path(muser_home: &Path) -> PathBuf {
        muser_home.join("keys").join("packs.key")
    }

    /// Reads a key file.
    ///
    /// # Errors
    /// [`PackError::KeyFile`] unless it is a regular file (no link), belongs to the caller, nobody else may read it, and
    /// it is whole.
    pub fn open(path: &Path) -> Result<KeyRing, PackError> {
        // A file that was replaced and wiped between being opened and being read is the old one: the new one is read.
        for _ in 0..REPLACED_TRIES {
            let mut file = open_checked(path, false)?;
            match read(path, &mut file) {
                Err(_) if KeyStamp::of(path)? != KeyStamp::of_file(path, &file)? => {}
                read => return read,
            }
        }
        Err(PackError::KeyFile { path: path.to_owned(), reason: "it is replaced all the time".into() })
    }

    /// Writes keys into a new file: those of a bundle, for whoever gets it.
    ///
    /// # Errors
    /// If there is a file of this name, or it cannot be written.
    pub fn create(path: &Path, keys: &KeyRing) -> Result<(), PackError> {
        write_new(path, keys)
    }

    /// Reads a key file, or makes one with fresh secrets.
    pub fn open_or_create(path: &Path) -> Result<KeyRing, PackError> {
        match fs::symlink_metadata(path) {
            Ok(_) => return Self::open(path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(PackError::io("look at", path, error)),
        }
        let folder = folder(path);
        create_private_dir(folder)?;
        let _lock = lock(path)?;
        remove_partials(path)?;
        let partial = partial(path);
        write_new(&partial, &KeyRing::generate()?)?;
        // A link never replaces: of two processes that start together one wins, and both use its key.
        let linked = fs::hard_link(&partial, path);
        let _ = fs::remove_file(&partial);
        match linked {
            Ok(()) => sync_dir(folder)?,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(PackError::io("create", path, error)),
        }
        Self::open(path)
    }

    /// Changes a key file: [`KeyRing::rotate`], [`KeyRing::revoke`], [`KeyRing::set_minimum_epoch`]. The new content
    /// replaces the old in one step. If a secret was dropped, the old bytes are then overwritten, as far as the file system
    /// lets them be.
    ///
    /// # Errors
    /// [`PackError::KeyFile`] also if a secret is to be dropped and the file has a second name, under which it would live on.
    pub fn update<T>(
        path: &Path,
        change: impl FnOnce(&mut KeyRing) -> Result<T, PackError>,
    ) -> Result<(KeyRing, T), PackError> {
        let _lock = lock(path)?;
        remove_partials(path)?;
        // The descriptor that was checked and read is the one that is overwritten, whatever its name is by then.
        let mut old = open_checked(path, true)?;
        let mut keys = read(path, &mut old)?;
        let secrets = |keys: &KeyRing| keys.epochs.iter().filter(|epoch| epoch.secret.is_some()).count();
        let before = secrets(&keys);
        let outcome = change(&mut keys)?;
        let dropped = secrets(&keys) < before;
        let meta = old.metadata().map_err(|error| PackError::io("look at", path, error))?;
        if dropped && links(&meta) > 1 {
            let reason =
                "it has a second name (a hard link), under which the revoked secret would live on".into();
            return Err(PackError::KeyFile { path: path.to_owned(), reason });
        }
        let partial = partial(path);
        let replaced = write_new(&partial, &keys)
            .and_then(|()| fs::rename(&partial, path).map_err(|error| PackError::io("replace", path, error)));
        if replaced.is_err() {
            let _ = fs::remove_file(&partial);
        }
        replaced?;
        sync_dir(folder(path))?;
        if dropped {
            let zeros = vec![0; meta.len() as usize];
            let wiped = old
                .seek(SeekFrom::Start(0))
                .and_then(|_| old.write_all(&zeros))
                .and_then(|()| old.sync_data());
            wiped.map_err(|error| PackError::io("overwrite the replaced", path, error))?;
        }
        Ok((keys, outcome))
    }
}

/// Keeps this process's memory, where keys and prompts are in plain, out of files that the system writes when it crashes,
/// and from other processes of the same user. Nothing is done where the system has no such thing.
pub fn keep_out_of_dumps() -> std::io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    Ok(())
}

/// What tells whether a key file has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyStamp {
    file: (u64, u64),
    bytes: u64,
    changed_ns: (i128, i128),
}

impl KeyStamp {
    /// Looks at the file of this name.
    pub fn of(path: &Path) -> Result<Self, PackError> {
        let failed = |error| PackError::io("look at", path, error);
        Ok(Self::of_meta(&fs::symlink_metadata(path).map_err(failed)?))
    }

    fn of_file(path: &Path, file: &File) -> Result<Self, PackError> {
        Ok(Self::of_meta(&file.metadata().map_err(|error| PackError::io("look at", path, error))?))
    }

    #[cfg(unix)]
    fn of_meta(meta: &fs::Metadata) -> Self {
        use std::os::unix::fs::MetadataExt as _;
        let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        Self {
            file: (meta.dev(), meta.ino()),
            bytes: meta.len(),
            changed_ns: (ns(meta.mtime(), meta.mtime_nsec()), ns(meta.ctime(), meta.ctime_nsec())),
        }
    }

    #[cfg(not(unix))]
    fn of_meta(meta: &fs::Metadata) -> Self {
        let changed = meta.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        Self {
            file: (0, 0),
            bytes: meta.len(),
            changed_ns: (changed.map_or(0, |time| time.as_nanos() as i128), 0),
        }
    }
}

/// Opens a key file, and refuses it unless it is a regular file (no link) of the caller's that nobody else may read.
fn open_checked(path: &Path, write: bool) -> Result<File, PackError> {
    let refuse = |reason: String| PackError::KeyFile { path: path.to_owned(), reason };
    let mut options = OpenOptions::new();
    options.read(true).write(write);
    #[cfg(unix)]
    {
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags.bits() as i32);
    }
    let file = options.open(path).map_err(|error| refuse(open_failure(&error)))?;
    let meta = file.metadata().map_err(|error| refuse(error.to_string()))?;
    check_owner(&meta).map_err(refuse)?;
    Ok(file)
}

fn read(path: &Path, file: &mut File) -> Result<KeyRing, PackError> {
    let refuse = |reason: String| PackError::KeyFile { path: path.to_owned(), reason };
    let len = file.metadata().map_err(|error| refuse(error.to_string()))?.len();
    if len > MAX_BYTES as u64 {
        return Err(refuse(format!("it has {len} bytes, at most {MAX_BYTES} expected")));
    }
    let mut bytes = Zeroizing::new(vec![0; len as usize]);
    file.read_exact(&mut bytes).map_err(|error| refuse(error.to_string()))?;
    decode(&bytes).map_err(|reason| refuse(reason.to_string()))
}

/// One process at a time makes or changes a key file.
fn lock(path: &Path) -> Result<File, PackError> {
    let lock_path = path.with_extension("lock");
    let lock = private().write(true).create(true).truncate(false).open(&lock_path);
    let lock = lock.map_err(|error| PackError::io("open", &lock_path, error))?;
    lock.lock().map_err(|error| PackError::io("lock", &lock_path, error))?;
    Ok(lock)
}

/// Removes what a killed process left half written: it holds all secrets. The caller has the lock.
fn remove_partials(path: &Path) -> Result<(), PackError> {
    let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) else { return Ok(()) };
    let folder = folder(path);
    let Ok(entries) = fs::read_dir(folder) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let middle =
            name.to_str().and_then(|name| name.strip_prefix(stem)?.strip_prefix('.')?.strip_suffix(".new"));
        let numbers = middle.and_then(|middle| middle.split_once('-'));
        let ours = numbers.is_some_and(|(process, time)| {
            [process, time]
                .iter()
                .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
        });
        if ours {
            let left = entry.path();
            fs::remove_file(&left).map_err(|error| PackError::io("remove the unfinished", left, error))?;
        }
    }
    Ok(())
}

pub(crate) fn encode(keys: &KeyRing) -> Zeroizing<Vec<u8>> {
    // Room for everything at once: a growing buffer would leave copies of secrets behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_BYTES));
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[0; 2]);
    bytes.extend_from_slice(&(keys.epochs.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&keys.minimum_epoch.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&keys.base[..]);
    for epoch in &keys.epochs {
        bytes.extend_from_slice(&epoch.number.to_le_bytes());
        bytes.extend_from_slice(&[u8::from(epoch.secret.is_none()), 0, 0, 0]);
        bytes.extend_from_slice(&epoch.created_unix_s.to_le_bytes());
        bytes.extend_from_slice(epoch.secret.as_ref().map_or(&[0; 32][..], |secret| &secret[..]));
    }
    let code = code(&keys.base, &bytes);
    bytes.extend_from_slice(code.as_bytes());
    bytes
}

pub(crate) fn decode(bytes: &[u8]) -> Result<KeyRing, Refusal> {
    let malformed = |field, found: u64| Refusal::Malformed { field, found };
    let mut of = Reader::new(bytes);
    if of.fixed(8)? != MAGIC {
        return Err(malformed("magic number of a key file", 0));
    }
    let version = of.u16()?;
    if version != VERSION {
        return Err(Refusal::Version { expected: VERSION, found: version });
    }
    let reserved = of.u16()?;
    let count = of.u32()?;
    let minimum_epoch = of.u32()?;
    let reserved = of.u32()? | u32::from(reserved);
    if reserved != 0 {
        return Err(malformed("reserved field", u64::from(reserved)));
    }
    if count == 0 || count as usize > MAX_EPOCHS {
        return Err(malformed("epochs", u64::from(count)));
    }
    let base: Secret = Zeroizing::new(of.array()?);
    // Room for all at once: a growing list would leave copies of secrets behind.
    let mut epochs: Vec<Epoch> = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let number = of.u32()?;
        if epochs.last().is_some_and(|last| last.number >= number) {
            return Err(malformed("order of epochs", u64::from(number)));
        }
        let flags = of.u32()?;
        if flags > 1 {
            return Err(malformed("epoch flags", u64::from(flags)));
        }
        let created_unix_s = of.u64()?;
        let secret: Secret = Zeroizing::new(of.array()?);
        epochs.push(Epoch { number, created_unix_s, secret: (flags == 0).then_some(secret) });
    }
    let covered = bytes.len().saturating_sub(32);
    let found = blake3::Hash::from_bytes(of.array()?);
    of.finish()?;
    if code(&base, &bytes[..covered]) != found {
        return Err(Refusal::Header);
    }
    let last_is_usable =
        epochs.last().is_some_and(|last| last.secret.is_some() && last.number >= minimum_epoch);
    if !last_is_usable {
        return Err(malformed("current epoch", u64::from(minimum_epoch)));
    }
    Ok(KeyRing::from_parts(base, epochs, minimum_epoch))
}

/// Makes the code of an encoding good, for fuzzers. The base secret stands behind the counts.
pub(crate) fn mend(bytes: &mut [u8]) {
    let covered = bytes.len().saturating_sub(32);
    let Some(base) = bytes.get(24..56).and_then(|base| <[u8; 32]>::try_from(base).ok()) else { return };
    let good = code(&Zeroizing::new(base), &bytes[..covered]);
    let behind = &mut bytes[covered..];
    behind.copy_from_slice(&good.as_bytes()[..behind.len()]);
}

fn code(base: &Secret, covered: &[u8]) -> blake3::Hash {
    let key = derive("muser pack v1 key file", &[&base[..]]);
    blake3::keyed_hash(&key, covered)
}

fn write_new(path: &Path, keys: &KeyRing) -> Result<(), PackError> {
    let failed = |error| PackError::io("write", path, error);
    let mut file: File = private().write(true).create_new(true).open(path).map_err(failed)?;
    file.write_all(&encode(keys)).and_then(|()| file.sync_all()).map_err(failed)
}

fn partial(path: &Path) -> PathBuf {
    let nanos =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_nanos());
    path.with_extension(format!("{}-{nanos}.new", std::process::id()))
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn open_failure(error: &std::io::Error) -> String {
    #[cfg(unix)]
    if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) {
        return "it is a symbolic link, a regular file is expected".into();
    }
    error.to_string()
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
fn check_owner(meta: &fs::Metadata) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt as _;
    if !meta.is_file() {
        return Err("it is not a regular file".into());
    }
    let own = rustix::process::geteuid().as_raw();
    if meta.uid() != own {
        return Err(format!("it belongs to user {}, user {own} is expected", meta.uid()));
    }
    let mode = meta.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(format!("its mode is {mode:o}, others must have no access (chmod 600)"));
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_owner(meta: &fs::Metadata) -> Result<(), String> {
    if meta.is_file() { Ok(()) } else { Err("it is not a regular file".into()) }
}
