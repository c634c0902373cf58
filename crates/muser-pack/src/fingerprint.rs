//! Which weights a model has: a root over the digests of its tensors.
//!
//! Hashing gigabytes takes seconds, so the result is kept for files that have not changed since (same device, inode, size
//! and both times). The record is authenticated: whoever can write files but has no key cannot claim another model.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use crate::encode::Writer;
use crate::identity::Digest;
use crate::keys::{KeyRing, Secret, derive};
use crate::name::hex;

/// A tensor as it lies in the file.
#[derive(Clone, Copy, Debug)]
pub struct TensorBytes<'a> {
    /// Its name.
    pub name: &'a str,
    /// Number of its type.
    pub kind: u32,
    /// Its sizes.
    pub dims: &'a [u64],
    /// Its values.
    pub bytes: &'a [u8],
}

/// Root over a model's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightsRoot(pub Digest);

impl WeightsRoot {
    /// Hashes every tensor, `threads` at a time. The order in which they are given does not matter.
    pub fn of(tensors: &[TensorBytes<'_>], threads: usize) -> Self {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut digests = Vec::new();
            while let Some(tensor) = tensors.get(next.fetch_add(1, Ordering::Relaxed)) {
                digests.push((tensor.name.to_owned(), tensor_digest(tensor)));
            }
            digests
        };
        let mut digests: Vec<(String, Digest)> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
            let join =
                |worker: std::thread::ScopedJoinHandle<'_, _>| worker.join().expect("hashing does not panic");
            workers.into_iter().flat_map(join).collect()
        });
        digests.sort();
        let mut writer = Writer::for_domain("muser weights root");
        writer.u32(digests.len() as u32);
        for (name, digest) in &digests {
            writer.string(name);
            writer.fixed(digest);
        }
        Self(blake3::derive_key("muser pack v1 weights root", &writer.into_bytes()))
    }
}

fn tensor_digest(tensor: &TensorBytes<'_>) -> Digest {
    let mut writer = Writer::for_domain("muser tensor");
    writer.u32(tensor.kind);
    writer.u32(tensor.dims.len() as u32);
    for &dim in tensor.dims {
        writer.u64(dim);
    }
    writer.u64(tensor.bytes.len() as u64);
    let mut hasher = blake3::Hasher::new_derive_key("muser pack v1 tensor");
    hasher.update(&writer.into_bytes()).update(tensor.bytes);
    *hasher.finalize().as_bytes()
}

/// What tells whether a file has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileStamp {
    encoded: Vec<u8>,
    /// Sizes and modification times: what tells of content alone. (Renaming a file over this one changes its other times.)
    content: Vec<(u64, Option<SystemTime>)>,
}

impl FileStamp {
    /// Looks at the opened files of a model, in order: what is mapped may have another name by now, and its name may be
    /// another file's.
    pub fn of(files: &[&File]) -> std::io::Result<Self> {
        let mut writer = Writer::for_domain("muser file stamp");
        writer.u32(files.len() as u32);
        let mut content = Vec::with_capacity(files.len());
        for file in files {
            let meta = file.metadata()?;
            writer.u64(meta.len());
            stamp(&mut writer, &meta);
            content.push((meta.len(), meta.modified().ok()));
        }
        Ok(Self { encoded: writer.into_bytes(), content })
    }

    /// Has nobody written to the files between these two looks?
    pub fn has_the_content_of(&self, earlier: &Self) -> bool {
        self.content == earlier.content
    }
}

#[cfg(unix)]
fn stamp(writer: &mut Writer, meta: &std::fs::Metadata) {
    use std::os::unix::fs::MetadataExt as _;
    for value in [meta.dev(), meta.ino()] {
        writer.u64(value);
    }
    // The change time cannot be set back by the file's owner, unlike the modification time.
    for value in [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()] {
        writer.u64(value as u64);
    }
}

#[cfg(not(unix))]
fn stamp(writer: &mut Writer, meta: &std::fs::Metadata) {
    let modified = meta.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
    writer.u64(modified.map_or(0, |time| time.as_nanos() as u64));
}

/// Roots of files that were hashed before.
#[derive(Clone, Debug)]
pub struct FingerprintCache {
    dir: PathBuf,
    key: Secret,
}

impl FingerprintCache {
    /// The cache in a folder, which is created with the first entry.
    pub fn new(dir: impl Into<PathBuf>, keys: &KeyRing) -> Self {
        let key = derive("muser pack v1 fingerprint cache", &[keys.namespace_key()]);
        Self { dir: dir.into(), key }
    }

    /// The root of the files with this stamp, if it is known.
    pub fn get(&self, stamp: &FileStamp) -> Option<WeightsRoot> {
        let bytes: [u8; 64] = std::fs::read(self.path(stamp)).ok()?.try_into().ok()?;
        let mut root = [0; 32];
        root.copy_from_slice(&bytes[..32]);
        (self.code(stamp, &root) == bytes[32..]).then_some(WeightsRoot(root))
    }

    /// Remembers a root. The stamp must have been taken before the file was hashed.
    pub fn put(&self, stamp: &FileStamp, root: WeightsRoot) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.dir)?;
        let path = self.path(stamp);
        let partial = path.with_extension(format!("partial-{}", std::process::id()));
        let _ = std::fs::remove_file(&partial);
        let mut file = File::create_new(&partial)?;
        file.write_all(&root.0)?;
        file.write_all(self.code(stamp, &root.0).as_bytes())?;
        std::fs::rename(partial, path)
    }

    fn path(&self, stamp: &FileStamp) -> PathBuf {
        let name = blake3::keyed_hash(&self.key, &stamp.encoded);
        self.dir.join(hex(&name.as_bytes()[..16]))
    }

    fn code(&self, stamp: &FileStamp, root: &Digest) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(root).update(&stamp.encoded);
        hasher.finalize()
    }
}
