//! What every store must do, as functions that panic with the reason. Each store's tests run all of it.

use std::sync::Arc;

use super::{PackStore, Put};
use crate::{Area, ObjectName, PackError};

/// How to make an empty store with this byte budget.
pub type Make<'a> = dyn Fn(Option<u64>) -> Arc<dyn PackStore> + 'a;

/// Runs every check.
pub fn check_all(make: &Make<'_>) {
    objects_are_whole_and_never_replaced(make);
    deleting_leaves_open_readers_alone(make);
    listings_are_exact(make);
    quarantined_objects_are_out_of_use(make);
    the_budget_is_exact(make);
    the_budget_holds(make, 16);
    the_catalog_keeps_what_was_appended(make);
    activity_and_quiet_exclude_each_other(make);
}

/// An object is what was put, until it is deleted.
pub fn objects_are_whole_and_never_replaced(make: &Make<'_>) {
    let store = make(None);
    for area in Area::ALL {
        let one = name(area, 1);
        assert!(open(&*store, &one).is_none(), "an empty store has {one}");
        assert_eq!(put(&*store, &one, &[b"head", b"", b"body"]).expect("put"), Put::Stored);
        assert_eq!(put(&*store, &one, &[b"other"]).expect("put again"), Put::Exists);
        assert_eq!(open(&*store, &one).as_deref(), Some(&b"headbody"[..]));
        assert!(store.contains(&one).expect("contains"));
        assert!(!store.contains(&name(area, 2)).expect("contains"));
        let reader = store.open(&one).expect("open").expect("it is there");
        let mut middle = [0; 4];
        reader.read_at(2, &mut middle).expect("read");
        assert_eq!(&middle, b"adbo");
        let beyond = reader.read_at(5, &mut middle).expect_err("a read beyond the end must fail");
        assert_eq!(beyond.counter_name(), "truncated");
    }
    store.flush().expect("flush");
}

/// Who has an object open reads it to its end.
pub fn deleting_leaves_open_readers_alone(make: &Make<'_>) {
    let store = make(None);
    let one = name(Area::Segments, 1);
    put(&*store, &one, &[&[7; 10_000]]).expect("put");
    let reader = store.open(&one).expect("open").expect("it is there");
    assert!(store.delete(&one).expect("delete"));
    assert!(!store.delete(&one).expect("delete again"));
    assert!(open(&*store, &one).is_none());
    let mut bytes = vec![0; 10_000];
    reader.read_at(0, &mut bytes).expect("an open object can be read after its deletion");
    assert_eq!(bytes, [7; 10_000]);
    assert_eq!(put(&*store, &one, &[b"new"]).expect("put"), Put::Stored);
}

/// Listings name each object once, with its size.
pub fn listings_are_exact(make: &Make<'_>) {
    let store = make(None);
    for i in 0..50 {
        put(&*store, &name(Area::Segments, i), &[&vec![i as u8; 100 + i]]).expect("put");
    }
    put(&*store, &name(Area::Packs, 7), &[b"pack"]).expect("put");
    store.delete(&name(Area::Segments, 13)).expect("delete");
    store.touch(&name(Area::Segments, 14));
    let mut listed = store.list(Area::Segments).expect("list");
    listed.sort_by_key(|one| one.bytes);
    let found: Vec<_> = listed.iter().map(|one| (one.name, one.bytes)).collect();
    let expected: Vec<_> =
        (0..50).filter(|i| *i != 13).map(|i| (name(Area::Segments, i), 100 + i as u64)).collect();
    assert_eq!(found, expected);
    assert_eq!(store.list(Area::Packs).expect("list").len(), 1);
    assert_eq!(store.list(Area::Records).expect("list").len(), 0);
}

/// A refused object does not come back and its name is free; or it is left as it is, for others. Replacing it gives the new
/// one either way, and deleting the name leaves nothing.
pub fn quarantined_objects_are_out_of_use(make: &Make<'_>) {
    let store = make(None);
    let one = name(Area::Segments, 1);
    for round in 0..12 {
        store.replace(&one, &[&[round; 60], &[round; 40]]).expect("replace");
        assert_eq!(open(&*store, &one), Some(vec![round; 100]));
        store.quarantine(&one).expect("quarantine");
        assert!(open(&*store, &one).is_none_or(|left| left == [round; 100]));
    }
    store.quarantine(&one).expect("quarantine again");
    assert!(store.usage().expect("usage").held_bytes <= 12 * 100);
    store.delete(&one).expect("delete");
    store.quarantine(&one).expect("quarantine of nothing");
    assert_eq!(store.usage().expect("usage").held_bytes, 0, "of a deleted name nothing is kept aside");
    assert_eq!(store.empty_quarantine().expect("empty"), (0, 0));
    // Aside is only what was not deleted.
    let two = name(Area::Segments, 2);
    put(&*store, &two, &[b"two"]).expect("put");
    store.quarantine(&two).expect("quarantine");
    let aside = open(&*store, &two).is_none() && store.usage().expect("usage").held_bytes > 0;
    let emptied = store.empty_quarantine().expect("empty");
    assert_eq!(emptied, if aside { (1, 3) } else { (0, 0) });
}

/// An object of exactly the budget is taken, one byte more is not, and what is left over is exactly that.
pub fn the_budget_is_exact(make: &Make<'_>) {
    let store = make(Some(1000));
    if store.usage().expect("usage").budget_bytes.is_none() {
        return;
    }
    let full = |number, bytes| {
        let bytes: Vec<u8> = vec![1; bytes];
        matches!(put(&*store, &name(Area::Segments, number), &[&bytes]), Err(PackError::Full { .. }))
    };
    assert!(full(1, 1001), "more than the budget");
    assert!(!full(2, 600) && full(3, 401), "one byte more than is left");
    assert!(!full(4, 400), "exactly what is left");
    assert!(full(5, 1));
    assert_eq!(store.usage().expect("usage").held_bytes, 1000);
}

/// Many writers at once never hold more than the budget, and get as much of it as fits.
pub fn the_budget_holds(make: &Make<'_>, writers: usize) {
    const OBJECT: usize = 1000;
    const FIT: usize = 20;
    let budget = (FIT * OBJECT + OBJECT / 2) as u64;
    let store = make(Some(budget));
    if store.usage().expect("usage").budget_bytes.is_none() {
        return;
    }
    let stored: usize = std::thread::scope(|scope| {
        let write = |writer: usize| {
            let store = &store;
            move || {
                let mut stored = 0;
                for i in 0..10 {
                    match put(&**store, &name(Area::Segments, writer * 100 + i), &[&[1; OBJECT]]) {
                        Ok(put) => stored += usize::from(put == Put::Stored),
                        Err(PackError::Full { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                    assert!(store.usage().expect("usage").held_bytes <= budget, "over the budget");
                }
                stored
            }
        };
        let writers: Vec<_> = (0..writers).map(|writer| scope.spawn(write(writer))).collect();
        writers.into_iter().map(|writer| writer.join().expect("a writer")).sum()
    });
    assert!(stored <= FIT, "{stored} objects were stored where {FIT} fit");
    // A store may count objects that are being written, and so refuse one that would have fitted a moment later.
    let listed = store.list(Area::Segments).expect("list");
    assert_eq!(listed.len(), stored);
    assert_eq!(store.usage().expect("usage").held_bytes, (stored * OBJECT) as u64);
    for one in &listed {
        store.delete(&one.name).expect("delete");
    }
    assert_eq!(store.usage().expect("usage").held_bytes, 0);
    for i in 0..FIT {
        put(&*store, &name(Area::Packs, i), &[&[1; OBJECT]]).expect("there is room again");
    }
}

/// Records stay in order, the rest of a torn one can be cut off, all can be replaced at once.
pub fn the_catalog_keeps_what_was_appended(make: &Make<'_>) {
    let store = make(None);
    let Some(catalog) = store.catalog() else { return };
    {
        let mut locked = catalog.lock().expect("lock");
        assert!(locked.is_empty().expect("empty"));
        locked.append(b"one,").expect("append");
        locked.append(b"two,").expect("append");
        assert_eq!(locked.len().expect("len"), 8);
        assert_eq!(locked.read(4, 100).expect("read"), b"two,");
        assert_eq!(locked.read(0, 4).expect("read"), b"one,");
    }
    let mut locked = catalog.lock().expect("lock again");
    locked.append(b"thr").expect("append");
    locked.truncate(8).expect("truncate");
    locked.append(b"four").expect("append");
    assert_eq!(locked.read(0, 100).expect("read"), b"one,two,four");
    locked.replace(b"all new").expect("replace");
    assert_eq!(locked.read(0, 100).expect("read"), b"all new");
    locked.append(b"!").expect("append after a replacement");
    assert_eq!(locked.read(0, 100).expect("read"), b"all new!");
    drop(locked);
    // One at a time: a counter that would lose steps otherwise.
    catalog.lock().expect("lock").replace(&0_u64.to_le_bytes()).expect("replace");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    let mut locked = catalog.lock().expect("lock");
                    let mut bytes = [0; 8];
                    bytes.copy_from_slice(&locked.read(0, 8).expect("read"));
                    let next = u64::from_le_bytes(bytes) + 1;
                    locked.replace(&next.to_le_bytes()).expect("replace");
                }
            });
        }
    });
    let bytes = catalog.lock().expect("lock").read(0, 8).expect("read");
    assert_eq!(bytes, 100_u64.to_le_bytes());
}

/// Garbage is collected only while nobody is active.
pub fn activity_and_quiet_exclude_each_other(make: &Make<'_>) {
    let store = make(None);
    let first = store.activity().expect("activity").expect("nobody collects");
    let second = store.activity().expect("activity").expect("nobody collects");
    assert!(store.quiet().expect("quiet").is_none(), "quiet although two are active");
    drop(first);
    assert!(store.quiet().expect("quiet").is_none(), "quiet although one is active");
    drop(second);
    let quiet = store.quiet().expect("quiet").expect("nobody is active");
    assert!(store.activity().expect("activity").is_none(), "active although garbage is collected");
    drop(quiet);
    assert!(store.activity().expect("activity").is_some());
}

/// A name, for tests.
pub fn name(area: Area, number: usize) -> ObjectName {
    ObjectName { area, id: *blake3::hash(&number.to_le_bytes()).as_bytes() }
}

fn put(store: &dyn PackStore, name: &ObjectName, parts: &[&[u8]]) -> Result<Put, PackError> {
    store.put(name, parts)
}

fn open(store: &dyn PackStore, name: &ObjectName) -> Option<Vec<u8>> {
    let object = store.open(name).expect("open")?;
    let mut bytes = vec![0; object.len().expect("len") as usize];
    object.read_at(0, &mut bytes).expect("read");
    Some(bytes)
}
