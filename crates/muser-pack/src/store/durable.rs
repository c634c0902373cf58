//! Acts whose order decides what a power cut leaves. Kill points show what a killed process leaves, whose bytes the system
//! still has; what was not synced is lost only with the power. So tests look at the order itself (`recorded`).

use std::path::Path;

/// Something that happens to a file or a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// Bytes were written; they may be lost.
    Wrote,
    /// The bytes are on the disk.
    Synced,
    /// A name was made in a folder, for what was written last; it may be lost.
    Named,
    /// The names of a folder are on the disk.
    FolderSynced,
    /// Bytes were added to the catalog: from here on they count.
    Catalogued,
}

#[cfg(not(test))]
#[inline]
pub(crate) fn note(_act: Act, _path: &Path) {}

#[cfg(test)]
pub(crate) fn note(act: Act, path: &Path) {
    RECORD.with_borrow_mut(|record| {
        if let Some(record) = record {
            record.push((act, path.to_owned()));
        }
    });
}

#[cfg(test)]
thread_local! {
    static RECORD: std::cell::RefCell<Option<Vec<(Act, std::path::PathBuf)>>> = const { std::cell::RefCell::new(None) };
}

/// The acts of this thread while `work` runs.
#[cfg(test)]
pub(crate) fn recorded(work: impl FnOnce()) -> Vec<(Act, std::path::PathBuf)> {
    RECORD.set(Some(Vec::new()));
    work();
    RECORD.take().unwrap_or_default()
}
