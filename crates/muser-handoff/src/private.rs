//! Files that nobody else may read: keys, rights, invitations. Everything is checked on the opened descriptor.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::Path;

use zeroize::Zeroizing;

use crate::NodeError;

/// What tells whether a file was replaced or written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    file: (u64, u64),
    bytes: u64,
    changed: (i64, i64),
    mode: u32,
}

impl Stamp {
    /// Of the file of this name; `None` if there is none.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        std::fs::symlink_metadata(path).ok().map(|meta| Self::of_meta(&meta))
    }

    #[cfg(unix)]
    fn of_meta(meta: &Metadata) -> Self {
        use std::os::unix::fs::MetadataExt as _;
        Self {
            file: (meta.dev(), meta.ino()),
            bytes: meta.len(),
            changed: (meta.mtime(), meta.mtime_nsec()),
            mode: meta.mode(),
        }
    }

    #[cfg(not(unix))]
    fn of_meta(meta: &Metadata) -> Self {
        let changed = meta.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        let changed = changed.map_or((0, 0), |time| (time.as_secs() as i64, i64::from(time.subsec_nanos())));
        Self { file: (0, 0), bytes: meta.len(), changed, mode: 0 }
    }
}

/// Reads a private file; `None` if there is none.
///
/// # Errors
/// If others could have written or read it, or it has more bytes than `limit`.
pub fn read(path: &Path, limit: u64) -> Result<Option<Zeroizing<Vec<u8>>>, NodeError> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags.bits() as i32);
    }
    let mut file = match options.open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(NodeError::file(path, error)),
    };
    let meta = file.metadata().map_err(|error| NodeError::file(path, error))?;
    check_owner(&meta).map_err(|reason| NodeError::file(path, reason))?;
    if meta.len() > limit {
        return Err(NodeError::file(
            path,
            format!("it has {} bytes, at most {limit} are expected", meta.len()),
        ));
    }
    let mut bytes = Zeroizing::new(Vec::with_capacity(meta.len() as usize));
    (&mut file).take(limit).read_to_end(&mut bytes).map_err(|error| NodeError::file(path, error))?;
    Ok(Some(bytes))
}

/// Replaces a private file in one step. After a power cut it is what it was or what it is to be.
///
/// # Errors
/// If it cannot be written.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), NodeError> {
    replace(path, bytes, File::sync_all)
}

/// `sync` forces a file, or the names in a folder, to the disk.
fn replace(path: &Path, bytes: &[u8], sync: impl Fn(&File) -> std::io::Result<()>) -> Result<(), NodeError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    create_folder(folder)?;
    let mut random = [0; 8];
    aws_lc_rs::rand::fill(&mut random).map_err(|_| NodeError::System("no random bytes".into()))?;
    let partial = path.with_extension(format!("{:016x}.new", u64::from_le_bytes(random)));
    let written = private().write(true).create_new(true).open(&partial).and_then(|mut file| {
        file.write_all(bytes)?;
        sync(&file)?;
        std::fs::rename(&partial, path)
    });
    match written {
        Err(_) => drop(std::fs::remove_file(&partial)),
        // The name, too: a code that was used up, or a node that was removed, does not come back with the power. Not every
        // system opens folders.
        Ok(()) => drop(File::open(folder).and_then(|folder| sync(&folder))),
    }
    written.map_err(|error| NodeError::file(path, error))
}

/// One process at a time changes what this file stands for.
///
/// # Errors
/// If there cannot be a lock.
pub fn lock(path: &Path) -> Result<File, NodeError> {
    create_folder(path.parent().unwrap_or(Path::new(".")))?;
    let path = path.with_extension("lock");
    let lock = private().write(true).create(true).truncate(false).open(&path);
    let lock = lock.map_err(|error| NodeError::file(&path, error))?;
    lock.lock().map_err(|error| NodeError::file(&path, error))?;
    Ok(lock)
}

fn create_folder(folder: &Path) -> Result<(), NodeError> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder).map_err(|error| NodeError::file(folder, error))
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

#[cfg(unix)]
fn check_owner(meta: &Metadata) -> Result<(), String> {
    use std::os::unix::fs::MetadataExt as _;
    if !meta.is_file() {
        return Err("it is not a regular file".into());
    }
    let own = rustix::process::geteuid().as_raw();
    if meta.uid() != own {
        return Err(format!("it belongs to user {}, user {own} is expected", meta.uid()));
    }
    let mode = meta.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!("its mode is {mode:o}, others may read or write it; `chmod 600` mends that"));
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_owner(meta: &Metadata) -> Result<(), String> {
    if meta.is_file() { Ok(()) } else { Err("it is not a regular file".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_its_name_only_when_it_is_on_the_disk_and_then_the_name_is_put_there() {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().join("node.file");
        write(&path, b"old").expect("written");
        let seen = std::cell::RefCell::new(Vec::new());
        let look = |file: &File| {
            let shown = String::from_utf8(std::fs::read(&path)?).map_err(std::io::Error::other)?;
            seen.borrow_mut().push((file.metadata()?.is_dir(), shown));
            Ok(())
        };
        replace(&path, b"new", look).expect("written");
        let expected = if cfg!(unix) { 2 } else { 1 };
        assert_eq!(*seen.borrow(), [(false, "old".into()), (true, "new".into())][..expected]);
        replace(&path, b"lost", |_| Err(std::io::Error::other("no disk"))).expect_err("not synced");
        assert_eq!(std::fs::read(&path).expect("read"), b"new");
        assert_eq!(std::fs::read_dir(home.path()).expect("listed").count(), 1, "nothing is left beside it");
    }
}
