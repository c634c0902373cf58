//! The unfinished file: `NAME.part` beside its journal `NAME.part.json`, and the lock that keeps others out.
//!
//! Invariant: the journal never claims more than is on disk. A checkpoint first forces the bytes out, then replaces the
//! journal atomically, and the journal carries the hash of exactly those bytes; so after a crash, a power cut or a
//! stranger's edit, a resumed pull starts from bytes that were proven, or from nothing.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aws_lc_rs::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};

use crate::digest::{Sha256, hash_exactly};
use crate::durable;
use crate::error::HubError;

/// Bytes, and time, between two checkpoints: at most so much is fetched again after a crash.
const CHECKPOINT_BYTES: u64 = 32 << 20;
const CHECKPOINT_TIME: Duration = Duration::from_secs(5);

/// Longest journal that is read.
const MAX_JOURNAL_BYTES: u64 = 64 << 10;

/// What is known of the unfinished file, kept beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Journal {
    /// Format; 1.
    version: u32,
    /// Address it comes from, without its query.
    pub(crate) url: String,
    /// Strong or weak `ETag` of the body.
    pub(crate) etag: Option<String>,
    /// `Last-Modified` of the body.
    pub(crate) last_modified: Option<String>,
    /// The hub's identity of the content.
    pub(crate) linked_etag: Option<String>,
    /// Whether the hub itself said so.
    #[serde(default)]
    pub(crate) vouched: bool,
    /// Bytes of the whole file.
    pub(crate) size: Option<u64>,
    /// Bytes on disk at the last checkpoint.
    bytes: u64,
    /// SHA-256 of exactly those bytes.
    prefix_sha256: String,
}

/// The unfinished file, open, locked, with the running hash of all its bytes.
pub(crate) struct Part {
    path: PathBuf,
    journal_path: PathBuf,
    file: File,
    _lock: File,
    hash: Context,
    len: u64,
    checkpointed: u64,
    checkpointed_at: Instant,
    pub(crate) journal: Journal,
}

impl Part {
    /// Opens or creates the unfinished file of `name` in `dir`. Bytes that the journal does not prove are dropped.
    ///
    /// `seen` hears how many bytes have been hashed.
    pub(crate) fn open(
        dir: &Path,
        name: &str,
        url: &str,
        seen: &mut dyn FnMut(u64),
    ) -> Result<Self, HubError> {
        let lock = lock(dir, name)?;
        let path = dir.join(format!("{name}.part"));
        let journal_path = dir.join(format!("{name}.part.json"));
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(HubError::io(&path))?;
        let fresh = Journal { version: 1, url: url.to_owned(), ..Journal::default() };
        let earlier =
            read_journal(&journal_path).filter(|journal| journal.version == 1 && journal.url == url);
        let mut hash = Context::new(&SHA256);
        let mut len = 0;
        let mut journal = fresh;
        if let Some(earlier) = earlier {
            let got = hash_exactly(&mut file, earlier.bytes, &mut hash, seen).map_err(HubError::io(&path))?;
            if got == earlier.bytes && Sha256::of_context(&hash).to_string() == earlier.prefix_sha256 {
                len = got;
                journal = earlier;
            } else {
                hash = Context::new(&SHA256);
            }
        }
        file.set_len(len).map_err(HubError::io(&path))?;
        file.seek(SeekFrom::Start(len)).map_err(HubError::io(&path))?;
        Ok(Self {
            path,
            journal_path,
            file,
            _lock: lock,
            hash,
            len,
            checkpointed: len,
            checkpointed_at: Instant::now(),
            journal,
        })
    }

    /// Bytes so far.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The first bytes, at most so many.
    pub(crate) fn beginning(&self, most: usize) -> Result<Vec<u8>, HubError> {
        let mut bytes = Vec::new();
        let file = File::open(&self.path).map_err(HubError::io(&self.path))?;
        file.take(self.len.min(most as u64)).read_to_end(&mut bytes).map_err(HubError::io(&self.path))?;
        Ok(bytes)
    }

    /// Hash of the bytes so far.
    pub(crate) fn sha256(&self) -> Sha256 {
        Sha256::of_context(&self.hash)
    }

    /// Appends bytes; makes a checkpoint now and then.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        durable::write(&mut self.file, &self.path, bytes).map_err(HubError::io(&self.path))?;
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        let due = self.len - self.checkpointed >= CHECKPOINT_BYTES
            || self.checkpointed_at.elapsed() >= CHECKPOINT_TIME;
        if due { self.checkpoint() } else { Ok(()) }
    }

    /// Drops all bytes and what was known of them.
    pub(crate) fn reset(&mut self) -> Result<(), HubError> {
        self.file.set_len(0).map_err(HubError::io(&self.path))?;
        self.file.seek(SeekFrom::Start(0)).map_err(HubError::io(&self.path))?;
        self.hash = Context::new(&SHA256);
        (self.len, self.checkpointed) = (0, 0);
        self.journal =
            Journal { version: 1, url: std::mem::take(&mut self.journal.url), ..Journal::default() };
        self.write_journal()
    }

    /// Forces the bytes to disk and notes them in the journal.
    pub(crate) fn checkpoint(&mut self) -> Result<(), HubError> {
        durable::sync_data(&self.file, &self.path).map_err(HubError::io(&self.path))?;
        self.checkpointed = self.len;
        self.checkpointed_at = Instant::now();
        self.write_journal()
    }

    /// Makes the complete file appear under its name, or not at all.
    pub(crate) fn finish(self, target: &Path) -> Result<(), HubError> {
        durable::sync_all(&self.file, &self.path).map_err(HubError::io(&self.path))?;
        durable::rename(&self.path, target).map_err(HubError::io(target))?;
        if let Some(folder) = target.parent() {
            // A rename is durable once its folder is.
            durable::sync_folder(folder).map_err(HubError::io(folder))?;
        }
        remove_if_there(&self.journal_path)
    }

    /// Deletes the unfinished file and its journal.
    pub(crate) fn delete(self) -> Result<(), HubError> {
        remove_if_there(&self.path)?;
        remove_if_there(&self.journal_path)
    }

    fn write_journal(&mut self) -> Result<(), HubError> {
        self.journal.bytes = self.checkpointed;
        self.journal.prefix_sha256 = self.sha256().to_string();
        let text = serde_json::to_vec_pretty(&self.journal).expect("a struct of strings and numbers");
        write_atomically(&self.journal_path, &text)
    }
}

/// Writes a small file so that a reader sees the old or the new content.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let write = || {
        let mut file = File::create(&new)?;
        durable::write(&mut file, &new, bytes)?;
        durable::sync_all(&file, &new)?;
        durable::rename(&new, path)
    };
    write().map_err(HubError::io(path))
}

fn read_journal(path: &Path) -> Option<Journal> {
    // A journal that cannot be read proves nothing: the pull starts from zero.
    let len = std::fs::metadata(path).ok()?.len();
    if len > MAX_JOURNAL_BYTES {
        return None;
    }
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// One pull of a file at a time. The lock files stay: removing one that another process has just opened would let two in.
fn lock(dir: &Path, name: &str) -> Result<File, HubError> {
    let folder = dir.join(".locks");
    std::fs::create_dir_all(&folder).map_err(HubError::io(&folder))?;
    let path = folder.join(name);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(HubError::io(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(HubError::Busy { name: name.to_owned(), lock: path }),
        Err(TryLockError::Error(source)) => Err(HubError::Io { path, source }),
    }
}

fn remove_if_there(path: &Path) -> Result<(), HubError> {
    durable::remove_if_there(path).map_err(HubError::io(path))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::durable::{Act, recorded};

    fn open(dir: &Path) -> Part {
        Part::open(dir, "m", "http://h/m", &mut |_| {}).unwrap()
    }

    #[test]
    fn only_bytes_that_the_journal_proves_survive() {
        let dir = tempfile::tempdir().unwrap();
        let mut part = open(dir.path());
        part.append(b"proven").unwrap();
        part.checkpoint().unwrap();
        part.append(b"not yet").unwrap();
        drop(part);
        assert_eq!(std::fs::metadata(dir.path().join("m.part")).unwrap().len(), 13);
        assert_eq!(open(dir.path()).len(), 6);

        // Another address, an edited part, a part that is too short, a broken journal: from zero.
        assert_eq!(Part::open(dir.path(), "m", "http://h/other", &mut |_| {}).unwrap().len(), 0);
        for (part_bytes, journal) in
            [(&b"prOven"[..], None), (&b"prov"[..], None), (&b"proven"[..], Some("{\"bytes\": 6}"))]
        {
            let mut part = open(dir.path());
            part.reset().unwrap();
            part.append(b"proven").unwrap();
            part.checkpoint().unwrap();
            drop(part);
            std::fs::write(dir.path().join("m.part"), part_bytes).unwrap();
            if let Some(journal) = journal {
                std::fs::write(dir.path().join("m.part.json"), journal).unwrap();
            }
            assert_eq!(open(dir.path()).len(), 0);
        }
    }

    #[test]
    fn a_second_pull_of_the_same_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(dir.path());
        assert!(matches!(Part::open(dir.path(), "m", "u", &mut |_| {}), Err(HubError::Busy { .. })));
        assert!(Part::open(dir.path(), "other", "u", &mut |_| {}).is_ok());
        drop(first);
        assert!(Part::open(dir.path(), "m", "u", &mut |_| {}).is_ok());
    }

    /// Plays the acts on a disk that forgets what was not synced. Answers what got a name, in order.
    fn play(acts: &[(Act, PathBuf)]) -> Vec<&Path> {
        let (mut lost, mut lost_names) = (BTreeSet::<&Path>::new(), BTreeSet::<&Path>::new());
        let mut named = Vec::new();
        for (act, path) in acts {
            match act {
                Act::Wrote => drop(lost.insert(path)),
                Act::Synced => drop(lost.remove(path.as_path())),
                Act::Named => {
                    assert!(lost.is_empty(), "{} has its name, and not synced is {lost:?}", path.display());
                    lost_names.insert(path);
                    named.push(path.as_path());
                }
                Act::FolderSynced => lost_names.retain(|name| name.parent() != Some(path)),
                // The journal is what an unfinished file is continued with.
                Act::Removed => {
                    assert!(lost.is_empty() && lost_names.is_empty(), "not synced: {lost:?}, {lost_names:?}");
                }
            }
        }
        named
    }

    #[test]
    fn the_journal_speaks_only_of_what_a_power_cut_leaves() {
        let dir = tempfile::tempdir().unwrap();
        let journal = dir.path().join("m.part.json");
        let mut part = open(dir.path());
        let acts = recorded(|| {
            part.append(b"proven").unwrap();
            part.append(b", too").unwrap();
            part.checkpoint().unwrap();
        });
        assert_eq!(play(&acts), [&journal]);
        // A checkpoint that falls due by itself, neither a byte earlier nor later.
        let acts = recorded(|| {
            part.append(&vec![0; CHECKPOINT_BYTES as usize - 1]).unwrap();
        });
        assert_eq!(play(&acts), <[&Path; 0]>::default());
        let acts = recorded(|| part.append(b"1").unwrap());
        assert_eq!(play(&acts), [&journal]);
        // What was dropped is not spoken of either.
        let acts = recorded(|| {
            part.append(b"more").unwrap();
            part.checkpoint().unwrap();
            part.reset().unwrap();
        });
        assert_eq!(play(&acts), [&journal, &journal]);
        // The whole file: its bytes, its name, the name's folder, and only then is the journal gone.
        let target = dir.path().join("m");
        let path = dir.path().join("m.part");
        let acts = recorded(|| {
            part.append(b"all of it").unwrap();
            part.finish(&target).unwrap();
        });
        play(&acts);
        let expected = [
            (Act::Wrote, path.clone()),
            (Act::Synced, path),
            (Act::Named, target),
            (Act::FolderSynced, dir.path().to_owned()),
            (Act::Removed, journal),
        ];
        assert_eq!(acts, expected);
    }

    #[test]
    #[should_panic(expected = "not synced is")]
    fn a_journal_that_is_early_is_found() {
        play(&[(Act::Wrote, "m.part".into()), (Act::Named, "m.part.json".into())]);
    }
}
