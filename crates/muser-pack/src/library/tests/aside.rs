//! What is put aside, what is left alone, and what becomes of it.

use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::store::{Activity, Listed, PackStore, Put, ReadAt, Usage};
use crate::{Area, DirStore, ObjectName};

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![folder.to_owned()];
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(&path).expect("list").map(|entry| entry.expect("entry").path()));
        } else {
            found.push(path);
        }
    }
    found
}

#[test]
fn what_was_put_aside_goes_with_its_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = |keys: &KeyRing| {
        let store = DirStore::open(folder.path(), None).expect("a folder");
        Library::open(Arc::new(store), keys.clone(), options()).expect("opens")
    };
    let keys = keys();
    let library = open(&keys);
    let scope = library.scope(identity(), "");
    let units = prompt(300, 0, 1);
    let id = publish(&library, &scope, &units).expect("published").id;
    let plan = library.longest(&scope, &units, 300, false).expect("found");
    let segment = plan.segments[0];
    drop(plan);
    // One flipped bit in a tag: everything else of the object is there and could be decrypted.
    let path = files(&folder.path().join("segments"));
    let path = path.iter().find(|path| path.ends_with(segment.id.to_string())).expect("its file");
    let mut bytes = fs::read(path).expect("read");
    bytes[4096 + 100] ^= 1;
    fs::write(path, bytes).expect("written");
    let mut out = vec![0; segment.bytes];
    library.fetch(&scope, &segment, &mut out).expect_err("changed");
    let aside = folder.path().join("quarantine");
    assert_eq!(files(&aside).len(), 1);
    library.remove(id).expect("removed");
    assert_eq!(files(&aside), Vec::<PathBuf>::new(), "a removed pack is gone, what was put aside too");
    for area in ["packs", "segments", "records"] {
        assert_eq!(files(&folder.path().join(area)), Vec::<PathBuf>::new(), "{area}");
    }
    // What is aside of packs that stay goes with the garbage.
    publish(&library, &scope, &units).expect("published");
    let plan = library.longest(&scope, &units, 300, false).expect("found");
    let name = plan.segments[0].id.object();
    drop(plan);
    library.store().quarantine(&name).expect("put aside");
    assert_eq!(library.collect_garbage().expect("collected").0, 1);
    assert_eq!(files(&aside), Vec::<PathBuf>::new());
    let there: u64 = ["packs", "segments", "records"]
        .iter()
        .flat_map(|area| files(&folder.path().join(area)))
        .map(|path| fs::metadata(path).expect("there").len())
        .sum();
    assert_eq!(library.store().usage().expect("usage").held_bytes, there);
}

#[test]
fn a_pipe_or_a_link_in_an_objects_place_is_refused_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = DirStore::open(folder.path(), None).expect("a folder");
    let name = ObjectName { area: Area::Segments, id: [7; 32] };
    store.put(&name, &[b"x"]).expect("put");
    let path = files(&folder.path().join("segments")).remove(0);
    fs::remove_file(&path).expect("removed");
    let status = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo runs");
    assert!(status.success());
    let refused = store.open(&name).err().expect("a pipe is no object");
    assert_eq!(refused.counter_name(), "not_a_pack");
    store.touch(&name);
    fs::remove_file(&path).expect("removed");
    std::os::unix::fs::symlink("/etc/hostname", &path).expect("linked");
    let refused = store.open(&name).err().expect("a link is no object");
    assert_eq!(refused.counter_name(), "not_a_pack");
}

/// A store whose reads fail as a bad cable's would.
struct Failing {
    inner: MemoryStore,
    broken: AtomicBool,
}

impl PackStore for Failing {
    fn describe(&self) -> String {
        "failing".into()
    }
    fn put(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<Put, PackError> {
        self.inner.put(name, parts)
    }
    fn open(&self, name: &ObjectName) -> Result<Option<Box<dyn ReadAt>>, PackError> {
        if self.broken.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(PackError::io("open", "object", std::io::Error::from_raw_os_error(5)));
        }
        self.inner.open(name)
    }
    fn contains(&self, name: &ObjectName) -> Result<bool, PackError> {
        self.inner.contains(name)
    }
    fn delete(&self, name: &ObjectName) -> Result<bool, PackError> {
        self.inner.delete(name)
    }
    fn quarantine(&self, name: &ObjectName) -> Result<(), PackError> {
        self.inner.quarantine(name)
    }
    fn replace(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<(), PackError> {
        self.inner.replace(name, parts)
    }
    fn list(&self, area: Area) -> Result<Vec<Listed>, PackError> {
        self.inner.list(area)
    }
    fn touch(&self, name: &ObjectName) {
        self.inner.touch(name);
    }
    fn flush(&self) -> Result<(), PackError> {
        self.inner.flush()
    }
    fn usage(&self) -> Result<Usage, PackError> {
        self.inner.usage()
    }
    fn clean(&self) -> Result<u64, PackError> {
        self.inner.clean()
    }
    fn activity(&self) -> Result<Option<Box<dyn Activity>>, PackError> {
        self.inner.activity()
    }
    fn quiet(&self) -> Result<Option<Box<dyn Activity>>, PackError> {
        self.inner.quiet()
    }
    fn catalog(&self) -> Option<&dyn CatalogStore> {
        self.inner.catalog()
    }
}

#[test]
fn an_object_that_cannot_be_read_here_is_left_alone() {
    let (memory, keys) = (MemoryStore::new(), keys());
    let first = library(&memory, &keys);
    let scope = first.scope(identity(), "");
    let units = prompt(256, 0, 1);
    publish(&first, &scope, &units).expect("published");
    let plan = first.longest(&scope, &units, 256, true).expect("found");
    let segment = plan.segments[0].id;
    let good = memory.bytes(&segment.object()).expect("there");
    drop(plan);
    // A second library that does not know the pack, and whose reads fail: it must not take the object for a bad one.
    let failing = Arc::new(Failing { inner: memory.clone(), broken: false.into() });
    let second = crate::testing::open(Arc::clone(&failing) as Arc<dyn PackStore>, &keys);
    second.shared.index().set_bad(segment);
    failing.broken.store(true, std::sync::atomic::Ordering::SeqCst);
    let error = publish(&second, &scope, &units).expect_err("the disk fails");
    assert_eq!(error.counter_name(), "io");
    assert_eq!(memory.bytes(&segment.object()).as_ref(), Some(&good));
    failing.broken.store(false, std::sync::atomic::Ordering::SeqCst);
    // Of a newer version, or sealed in an epoch that this process does not know yet: nothing for us to judge.
    for (at, value, reason) in [(8, 9, "version"), (16, 7, "unknown_epoch")] {
        let mut bytes = good.clone();
        bytes[at] = value;
        memory.tamper(&segment.object(), bytes.clone());
        second.shared.index().set_bad(segment);
        let error = publish(&second, &scope, &units).expect_err("not ours to replace");
        assert_eq!(error.counter_name(), reason);
        assert_eq!(memory.bytes(&segment.object()), Some(bytes.clone()), "{reason}");
        let fetched = second.fetch(
            &scope,
            &Segment {
                group: KvGroup::Full,
                index: 0,
                positions: 256,
                id: segment,
                bytes: scope.block_bytes(KvGroup::Full),
            },
            &mut vec![0; scope.block_bytes(KvGroup::Full)],
        );
        assert_eq!(fetched.expect_err("refused").counter_name(), reason);
        assert_eq!(memory.bytes(&segment.object()), Some(bytes), "{reason}: not put aside");
    }
    // Damaged bytes are replaced.
    memory.tamper(&segment.object(), good[..5000].to_vec());
    second.shared.index().set_bad(segment);
    publish(&second, &scope, &units).expect("published");
    assert_eq!(memory.bytes(&segment.object()).map(|bytes| bytes.len()), Some(good.len()));
}
