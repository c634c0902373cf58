//! Where objects are kept: a small trait, and one conformance suite for everything behind it.
//!
//! A store moves bytes and knows nothing of keys or formats. It promises four things: an object is either absent or
//! complete; an existing object is never replaced; it never holds more than its budget, whoever writes at the same
//! time; and a catalog, where it has one, is changed by one writer at a time and durably.

pub mod conformance;
mod dir;
pub(crate) mod durable;
mod memory;
#[cfg(feature = "object-store")]
mod object;

pub use dir::DirStore;
pub(crate) use dir::{create_private_dir, private, read_exact_at, sync_dir};
pub use memory::MemoryStore;
#[cfg(feature = "object-store")]
pub use object::{BucketOptions, BucketStore};

use std::path::Path;
use std::sync::Arc;

use crate::{Area, ObjectName, PackError};

/// Opens the store that `place` names: `s3://BUCKET/PREFIX` (endpoint and credentials as the environment says, with the
/// feature `object-store`), or else a folder that will hold at most `budget_bytes`.
pub fn open_place(place: &Path, budget_bytes: Option<u64>) -> Result<Arc<dyn PackStore>, PackError> {
    match place.to_str().and_then(|place| place.strip_prefix("s3://")) {
        Some(bucket) => open_bucket(bucket),
        None => Ok(Arc::new(DirStore::open(place, budget_bytes)?)),
    }
}

#[cfg(feature = "object-store")]
fn open_bucket(place: &str) -> Result<Arc<dyn PackStore>, PackError> {
    let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
    let options = BucketOptions {
        bucket: bucket.into(),
        prefix: prefix.trim_matches('/').into(),
        endpoint: None,
        credentials: None,
        request_timeout: std::time::Duration::from_secs(30),
        retries: 4,
    };
    Ok(Arc::new(BucketStore::open(&options)?))
}

#[cfg(not(feature = "object-store"))]
fn open_bucket(place: &str) -> Result<Arc<dyn PackStore>, PackError> {
    Err(PackError::Caller {
        what: "store in a bucket",
        expected: "a build with the feature object-store".into(),
        found: format!("s3://{place} in one without it"),
    })
}

/// Outcome of [`PackStore::put`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// Stored now.
    Stored,
    /// An object of this name was there and is unchanged.
    Exists,
}

/// An object in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: ObjectName,
    /// Its size.
    pub bytes: u64,
    /// When it was last used, in nanoseconds since 1970; 0 if unknown. Only eviction looks at it.
    pub used_unix_ns: u64,
}

/// An opened object. It stays readable after the object was deleted.
pub trait ReadAt: Send + Sync {
    /// Size of the object.
    fn len(&self) -> Result<u64, PackError>;

    /// Is it empty?
    fn is_empty(&self) -> Result<bool, PackError> {
        Ok(self.len()? == 0)
    }

    /// Fills `out` from `offset` on; an object that ends before that is [`crate::Refusal::Truncated`].
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), PackError>;
}

/// A place for objects.
pub trait PackStore: Send + Sync {
    /// Says what and where it is, for people.
    fn describe(&self) -> String;

    /// The same for comparisons: two names of one folder are one place.
    fn place(&self) -> String {
        self.describe()
    }

    /// Stores an object made of `parts`, durably and all at once, unless one of this name exists.
    ///
    /// # Errors
    /// [`PackError::Full`] beyond the byte budget or with a full disk; nothing is left behind then.
    fn put(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<Put, PackError>;

    /// Opens an object; `None` if there is none.
    fn open(&self, name: &ObjectName) -> Result<Option<Box<dyn ReadAt>>, PackError>;

    /// Is it there?
    fn contains(&self, name: &ObjectName) -> Result<bool, PackError> {
        Ok(self.open(name)?.is_some())
    }

    /// Removes an object, and what was put aside of it; `false` if there was none in its place.
    fn delete(&self, name: &ObjectName) -> Result<bool, PackError>;

    /// Takes an object that was refused out of use without destroying it. A store that others read as well, or that can
    /// keep nothing aside, leaves it where it is: what one reader refused may be good for the next.
    fn quarantine(&self, name: &ObjectName) -> Result<(), PackError>;

    /// Stores an object in the place of one of this name that is not what it should be; readers have the one or the other.
    ///
    /// # Errors
    /// As [`PackStore::put`].
    fn replace(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<(), PackError>;

    /// Deletes what was put aside; objects and bytes.
    fn empty_quarantine(&self) -> Result<(usize, u64), PackError> {
        Ok((0, 0))
    }

    /// All objects of an area, in no particular order.
    fn list(&self, area: Area) -> Result<Vec<Listed>, PackError>;

    /// Remembers that an object was used now. Losing this only makes eviction less apt.
    fn touch(&self, name: &ObjectName);

    /// Makes earlier puts and deletes survive a power cut.
    fn flush(&self) -> Result<(), PackError>;

    /// Bytes held and the budget.
    fn usage(&self) -> Result<Usage, PackError>;

    /// Forgets what a killed process left half done; the caller has [`PackStore::quiet`]. Returns the bytes freed.
    fn clean(&self) -> Result<u64, PackError>;

    /// Marks that packs are being read or written, so that nobody collects garbage; `None` while somebody does.
    fn activity(&self) -> Result<Option<Box<dyn Activity>>, PackError>;

    /// The right to collect garbage; `None` while anybody, this process included, is active.
    fn quiet(&self) -> Result<Option<Box<dyn Activity>>, PackError>;

    /// The catalog, if the store can keep one.
    fn catalog(&self) -> Option<&dyn CatalogStore>;
}

/// A mark that ends when dropped.
pub trait Activity: Send + Sync {}

/// Bytes of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Held, unfinished objects included.
    pub held_bytes: u64,
    /// Most it may hold; `None`: no limit.
    pub budget_bytes: Option<u64>,
}

/// Where the catalog's records are kept.
pub trait CatalogStore: Send + Sync {
    /// Waits until no other process changes the catalog.
    fn lock(&self) -> Result<Box<dyn LockedCatalog + '_>, PackError>;

    /// Tells whether the catalog has changed, without waiting for anybody; `None` where that cannot be told.
    fn stamp(&self) -> Result<Option<CatalogStamp>, PackError>;
}

/// Equal stamps: nothing was appended or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CatalogStamp {
    /// Bytes.
    pub bytes: u64,
    /// Which file it is, where files are replaced.
    pub file: u64,
    /// When it was changed, in nanoseconds since 1970.
    pub changed_unix_ns: u64,
}

/// The catalog while nobody else changes it.
pub trait LockedCatalog {
    /// Bytes of all records.
    fn len(&mut self) -> Result<u64, PackError>;

    /// Is it empty?
    fn is_empty(&mut self) -> Result<bool, PackError> {
        Ok(self.len()? == 0)
    }

    /// At most `len` bytes from `offset` on; fewer at the end.
    fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, PackError>;

    /// Cuts off what is behind `len`: the rest of a record that was never finished.
    fn truncate(&mut self, len: u64) -> Result<(), PackError>;

    /// Appends a record durably.
    fn append(&mut self, record: &[u8]) -> Result<(), PackError>;

    /// Replaces the whole catalog, durably and all at once.
    fn replace(&mut self, records: &[u8]) -> Result<(), PackError>;
}

#[cfg(test)]
mod tests;
