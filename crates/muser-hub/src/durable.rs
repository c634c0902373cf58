//! Writes, syncs and renames whose order decides what a power cut leaves. A killed process leaves what it wrote; what was
//! not synced is lost only with the power. So tests look at the order itself (`recorded`).

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

/// Something that happened to a file or a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// Bytes were written; they may be lost.
    Wrote,
    /// The bytes are on the disk.
    Synced,
    /// What was written has this name now; the name may be lost.
    Named,
    /// The names of a folder are on the disk.
    FolderSynced,
    /// The name is gone, or was not there.
    Removed,
}

/// Appends to an open file; `path` is its name.
pub(crate) fn write(file: &mut File, path: &Path, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    note(Act::Wrote, path);
    Ok(())
}

/// Forces the bytes of a file to the disk, and its length.
pub(crate) fn sync_data(file: &File, path: &Path) -> io::Result<()> {
    file.sync_data()?;
    note(Act::Synced, path);
    Ok(())
}

/// Forces the bytes of a file to the disk, and all that is known of it.
pub(crate) fn sync_all(file: &File, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    note(Act::Synced, path);
    Ok(())
}

/// Renames a file, over another one perhaps.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::rename(from, to)?;
    note(Act::Named, to);
    Ok(())
}

/// Forces the names in a folder to the disk, where the system can.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) {
        File::open(folder).and_then(|folder| folder.sync_all())?;
    }
    note(Act::FolderSynced, folder);
    Ok(())
}

/// Removes a file if it is there.
pub(crate) fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(source),
        _ => {}
    }
    note(Act::Removed, path);
    Ok(())
}

#[cfg(not(test))]
#[inline]
fn note(_act: Act, _path: &Path) {}

#[cfg(test)]
thread_local! {
    static RECORD: std::cell::RefCell<Option<Vec<(Act, std::path::PathBuf)>>> = const { std::cell::RefCell::new(None) };
}

#[cfg(test)]
fn note(act: Act, path: &Path) {
    RECORD.with_borrow_mut(|record| {
        if let Some(record) = record {
            record.push((act, path.to_owned()));
        }
    });
}

/// The acts of this thread while `work` runs.
#[cfg(test)]
pub(crate) fn recorded(work: impl FnOnce()) -> Vec<(Act, std::path::PathBuf)> {
    RECORD.set(Some(Vec::new()));
    work();
    RECORD.take().unwrap_or_default()
}
