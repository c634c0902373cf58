//! Both local stores against the conformance suite, and what only a folder can do.

use std::sync::Arc;

use super::conformance::{check_all, name, the_budget_holds};
use super::{DirStore, MemoryStore, PackStore};
use crate::Area;

#[test]
fn memory_store_conforms() {
    check_all(&|budget| match budget {
        Some(bytes) => Arc::new(MemoryStore::with_budget(bytes)),
        None => Arc::new(MemoryStore::new()),
    });
}

#[test]
fn dir_store_conforms() {
    let root = tempfile::tempdir().expect("a folder");
    let next = std::sync::atomic::AtomicUsize::new(0);
    check_all(&|budget| {
        let number = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Arc::new(DirStore::open(root.path().join(number.to_string()), budget).expect("open"))
    });
}

/// Stores on one folder, as in several processes, share the budget.
#[test]
fn a_budget_is_shared_by_everybody_on_the_folder() {
    let root = tempfile::tempdir().expect("a folder");
    the_budget_holds(
        &|budget| {
            let open = || DirStore::open(root.path(), budget).expect("open");
            Arc::new(RoundRobin { stores: [open(), open(), open()], next: 0.into() })
        },
        16,
    );
}

#[test]
fn left_over_partial_files_are_cleaned_and_not_counted() {
    let root = tempfile::tempdir().expect("a folder");
    let store = DirStore::open(root.path(), Some(10_000)).expect("open");
    store.put(&name(Area::Packs, 1), &[&[0; 1000]]).expect("put");
    std::fs::write(root.path().join("partial").join("1-2"), [0; 5000]).expect("write");
    // As a killed writer leaves it: counted, and neither linked nor uncounted.
    std::fs::write(root.path().join("lock").join("usage"), 9000_u128.to_le_bytes()).expect("write");
    assert_eq!(store.usage().expect("usage").held_bytes, 9000);
    assert_eq!(store.clean().expect("clean"), 5000);
    assert_eq!(store.usage().expect("usage").held_bytes, 1000);
}

#[cfg(unix)]
#[test]
fn files_and_folders_are_the_owners_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let root = tempfile::tempdir().expect("a folder");
    let dir = root.path().join("packs");
    let store = DirStore::open(&dir, None).expect("open");
    store.put(&name(Area::Packs, 1), &[b"x"]).expect("put");
    let mut left = vec![dir];
    while let Some(path) = left.pop() {
        let meta = std::fs::metadata(&path).expect("metadata");
        let expected = if meta.is_dir() { 0o700 } else { 0o600 };
        assert_eq!(meta.permissions().mode() & 0o777, expected, "{}", path.display());
        if meta.is_dir() {
            left.extend(std::fs::read_dir(&path).expect("list").map(|entry| entry.expect("entry").path()));
        }
    }
}

#[test]
fn a_place_is_a_folder_or_a_bucket() {
    let root = tempfile::tempdir().expect("a folder");
    let store = super::open_place(&root.path().join("packs"), Some(1000)).expect("a folder");
    assert_eq!(store.usage().expect("usage").budget_bytes, Some(1000));
    let bucket = super::open_place("s3://bucket/some/where".as_ref(), None);
    if cfg!(feature = "object-store") {
        assert_eq!(bucket.map(|store| store.describe()).ok().as_deref(), Some("bucket bucket/some/where"));
    } else {
        let error = bucket.err().expect("no such feature").to_string();
        assert!(error.contains("object-store"), "{error}");
    }
    assert!(!std::path::Path::new("s3:").exists());
}

/// Uses several stores in turn.
struct RoundRobin {
    stores: [DirStore; 3],
    next: std::sync::atomic::AtomicUsize,
}

impl RoundRobin {
    fn store(&self) -> &DirStore {
        &self.stores[self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 3]
    }
}

impl PackStore for RoundRobin {
    fn describe(&self) -> String {
        self.store().describe()
    }
    fn put(&self, name: &crate::ObjectName, parts: &[&[u8]]) -> Result<super::Put, crate::PackError> {
        self.store().put(name, parts)
    }
    fn open(&self, name: &crate::ObjectName) -> Result<Option<Box<dyn super::ReadAt>>, crate::PackError> {
        self.store().open(name)
    }
    fn delete(&self, name: &crate::ObjectName) -> Result<bool, crate::PackError> {
        self.store().delete(name)
    }
    fn quarantine(&self, name: &crate::ObjectName) -> Result<(), crate::PackError> {
        self.store().quarantine(name)
    }
    fn replace(&self, name: &crate::ObjectName, parts: &[&[u8]]) -> Result<(), crate::PackError> {
        self.store().replace(name, parts)
    }
    fn list(&self, area: Area) -> Result<Vec<super::Listed>, crate::PackError> {
        self.store().list(area)
    }
    fn touch(&self, name: &crate::ObjectName) {
        self.store().touch(name);
    }
    fn flush(&self) -> Result<(), crate::PackError> {
        self.store().flush()
    }
    fn usage(&self) -> Result<super::Usage, crate::PackError> {
        self.store().usage()
    }
    fn clean(&self) -> Result<u64, crate::PackError> {
        self.store().clean()
    }
    fn activity(&self) -> Result<Option<Box<dyn super::Activity>>, crate::PackError> {
        self.store().activity()
    }
    fn quiet(&self) -> Result<Option<Box<dyn super::Activity>>, crate::PackError> {
        self.store().quiet()
    }
    fn catalog(&self) -> Option<&dyn super::CatalogStore> {
        None
    }
}
