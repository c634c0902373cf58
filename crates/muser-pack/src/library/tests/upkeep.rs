//! Eviction, pins, leases, garbage, several libraries on one store, records.

use super::*;
use crate::Area;
use crate::Expect;
use crate::store::{DirStore, PackStore as _};

/// Bytes on disk of a pack of `blocks` blocks in the tests' geometry, but for its manifest.
fn segment_bytes(blocks: u64) -> u64 {
    blocks * (8_192 + 10_240 + 2 * 4096)
}

#[test]
fn the_least_recently_used_pack_goes_first_and_pinned_ones_stay() {
    let keys = keys();
    let store = MemoryStore::with_budget(4 * segment_bytes(4) + 60_000);
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let prompts: Vec<_> = (0..6).map(|seed| prompt(1024, 0, seed + 1)).collect();
    let ids: Vec<_> = prompts[..4]
        .iter()
        .enumerate()
        .map(|(i, units)| publish_with(&library, &scope, units, i == 0, |_| true).expect("published").id)
        .collect();
    assert!(library.longest(&scope, &prompts[1], 1024, true).is_some(), "used now");
    publish(&library, &scope, &prompts[4]).expect("published");
    let there = |units: &Vec<PositionKey>| library.longest(&scope, units, 1024, true).is_some();
    let found: Vec<_> = prompts.iter().map(there).collect();
    assert_eq!(found, [true, true, false, true, true, false], "the third was unused for longest");
    assert!(library.pack(ids[0]).expect("there").pinned);
    assert_eq!(library.counters().snapshot().evicted_packs, 1);
    library.set_pinned(ids[0], false).expect("unpinned");
    assert_eq!(library.shrink_to(0).expect("shrunk"), 4);
    assert_eq!(store.usage().expect("usage").held_bytes, 0);
}

#[test]
fn a_store_full_of_pins_does_not_take_more() {
    let keys = keys();
    let store = MemoryStore::with_budget(segment_bytes(4) + 20_000);
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(1024, 0, 1);
    publish_with(&library, &scope, &units, true, |_| true).expect("published");
    let full = publish(&library, &scope, &prompt(1024, 0, 2)).expect_err("full");
    assert_eq!(full.counter_name(), "full");
    assert_eq!(library.counters().snapshot().full, 1);
    let plan = library.longest(&scope, &units, 1024, true).expect("still there");
    restore(&library, &scope, &units, &plan).expect("restored");
}

#[test]
fn a_pack_that_cannot_fit_drives_nobody_out() {
    let keys = keys();
    let store = MemoryStore::with_budget(segment_bytes(4) + 20_000);
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(512, 0, 1);
    publish(&library, &scope, &units).expect("published");
    let full = publish(&library, &scope, &prompt(16 * BLOCK_LEN, 0, 2)).expect_err("full");
    assert_eq!(full.counter_name(), "full");
    assert!(library.longest(&scope, &units, 512, true).is_some(), "still there");
}

/// What one process gives up may have become part of another one's pack.
#[test]
fn an_abandoned_publication_takes_nothing_from_others() {
    let root = tempfile::tempdir().expect("a folder");
    let keys = keys();
    let open = || crate::testing::open(Arc::new(DirStore::open(root.path(), None).expect("open")), &keys);
    let (a, b) = (open(), open());
    let scope = a.scope(identity(), "");
    let units = prompt(600, 0, 1);
    let mut abandoned = a.begin_publish(&scope, &units).expect("begun");
    for wanted in abandoned.wanted() {
        let rows = crate::testing::rows(&scope, &units, wanted.group, wanted.index);
        abandoned.put(wanted.group, wanted.index, &rows).expect("put");
    }
    publish(&b, &scope, &units).expect("published with the same segments");
    drop(abandoned);
    let plan = b.longest(&scope, &units, 600, false).expect("found");
    restore(&b, &scope, &units, &plan).expect("whole");
}

#[test]
fn a_plan_keeps_its_segments_until_it_is_dropped() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(1024, 0, 1);
    let id = publish(&library, &scope, &units).expect("published").id;
    let plan = library.longest(&scope, &units, 1024, true).expect("found");
    library.remove(id).expect("removed");
    assert!(library.longest(&scope, &units, 1024, true).is_none(), "nobody finds it");
    restore(&library, &scope, &units, &plan).expect("but who has it reads it");
    assert_eq!(library.collect_garbage().expect_err("somebody reads").counter_name(), "busy");
    // Published anew meanwhile, its segments are needed again.
    publish(&library, &scope, &units).expect("published");
    drop(plan);
    let plan = library.longest(&scope, &units, 1024, true).expect("found");
    restore(&library, &scope, &units, &plan).expect("restored");
    library.remove(id).expect("removed");
    drop(plan);
    assert_eq!(store.list(Area::Segments).expect("list"), []);
}

#[test]
fn two_processes_share_a_folder() {
    let root = tempfile::tempdir().expect("a folder");
    let keys = keys();
    let open = || crate::testing::open(Arc::new(DirStore::open(root.path(), None).expect("open")), &keys);
    let (a, b) = (open(), open());
    let scope = a.scope(identity(), "");
    let units = prompt(2000, 2000, 1);
    let id = publish(&a, &scope, &units).expect("published").id;
    assert!(b.longest(&scope, &units, 1999, true).is_none());
    b.refresh().expect("refreshed");
    let plan = b.longest(&scope, &units, 1999, true).expect("found");
    restore(&b, &scope, &units, &plan).expect("restored");
    drop(plan);
    let longer = prompt(3000, 2000, 2);
    publish(&b, &scope, &longer).expect("published");
    assert_eq!(b.counters().snapshot().published_segments, 2 * 5, "seven blocks were there");
    a.set_pinned(id, true).expect_err("superseded meanwhile");
    a.refresh().expect("refreshed");
    assert_eq!(a.packs(), b.packs());
    // Enough changes that the catalog is rewritten; the other one notices.
    for seed in 0..60 {
        let units = prompt(256, 0, 100 + seed);
        let id = publish(&a, &scope, &units).expect("published").id;
        a.remove(id).expect("removed");
    }
    let records = std::fs::metadata(root.path().join("catalog")).expect("metadata").len() / 128;
    assert!(records < 80, "{records} records");
    b.refresh().expect("refreshed");
    assert_eq!(a.packs(), b.packs());
    let plan = open().longest(&scope, &longer, 3000, false).expect("found after a restart");
    assert_eq!(plan.positions, 3000);
}

#[test]
fn concurrent_publications_and_lookups_agree() {
    let root = tempfile::tempdir().expect("a folder");
    let keys = keys();
    let budget = segment_bytes(40);
    let open =
        || crate::testing::open(Arc::new(DirStore::open(root.path(), Some(budget)).expect("open")), &keys);
    let libraries = [open(), open()];
    let scope = libraries[0].scope(identity(), "");
    std::thread::scope(|threads| {
        for writer in 0..16 {
            let (library, scope) = (&libraries[writer % 2], &scope);
            threads.spawn(move || {
                for round in 0..4 {
                    let units = prompt(700 + 100 * round, 256 * round, writer as u64 % 5);
                    match publish(library, scope, &units) {
                        Ok(_) => {}
                        // Segments that were there may be dropped by somebody else meanwhile.
                        Err(error) => {
                            let name = error.counter_name();
                            assert!(matches!(name, "full" | "missing_segment"), "{error}");
                        }
                    }
                    if let Some(plan) = library.longest(scope, &units, units.len(), false) {
                        match restore(library, scope, &units, &plan) {
                            Ok(()) => {}
                            Err(error) => assert_eq!(error.counter_name(), "missing_segment", "{error}"),
                        }
                    }
                    let usage = library.store().usage().expect("usage");
                    assert!(usage.held_bytes <= budget, "{usage:?}");
                }
            });
        }
    });
    let last = open();
    for pack in last.packs() {
        let report = last.verify(pack.id, &mut |_| {}).expect("verified");
        assert_eq!(report.refused, []);
    }
}

#[test]
fn garbage_is_what_no_pack_needs() {
    let root = tempfile::tempdir().expect("a folder");
    let keys = keys();
    let store = Arc::new(DirStore::open(root.path(), None).expect("open"));
    let library = crate::testing::open(store.clone(), &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(600, 0, 1);
    publish(&library, &scope, &units).expect("published");
    library.put_record("note", "one", b"text").expect("written");
    let held = store.usage().expect("usage").held_bytes;
    assert_eq!(library.collect_garbage().expect("collected"), (0, 0));
    for area in Area::ALL {
        store.put(&crate::store::conformance::name(area, 1), &[&[0; 5000]]).expect("put");
    }
    std::fs::write(root.path().join("partial").join("old"), [0; 700]).expect("write");
    assert_eq!(library.collect_garbage().expect("collected"), (3, 15_700));
    assert_eq!(store.usage().expect("usage").held_bytes, held);
    let plan = library.longest(&scope, &units, 600, false).expect("found");
    restore(&library, &scope, &units, &plan).expect("restored");
    assert_eq!(library.record("note", "one").expect("read"), Some((b"text".to_vec(), 1)));
}

#[test]
fn verification_finds_what_a_lookup_would_not() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(600, 0, 1);
    let id = publish(&library, &scope, &units).expect("published").id;
    let report = library.verify(id, &mut |_| {}).expect("verified");
    assert_eq!((report.objects, report.refused.len()), (7, 0));
    assert_eq!(report.bytes, 3 * (8_192 + 10_240));
    let segment = library.longest(&scope, &units, 600, false).expect("found").segments[1].id.object();
    let mut bytes = store.bytes(&segment).expect("there");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    store.tamper(&segment, bytes);
    let report = library.verify(id, &mut |_| {}).expect("verified");
    assert_eq!(report.refused, [(segment.to_string(), Refusal::Chunk { index: 1 })]);
}

#[test]
fn records_keep_their_last_revision() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    assert_eq!(library.record("session", "a").expect("read"), None);
    assert_eq!(library.put_record("session", "a", b"first").expect("written"), 1);
    let old = store.list(Area::Records).expect("list")[0].name;
    let old_bytes = store.bytes(&old).expect("there");
    assert_eq!(library.put_record("session", "a", b"second").expect("written"), 2);
    assert_eq!(library.put_record("session", "b", &vec![7; 300_000]).expect("written"), 1);
    assert_eq!(library.put_record("other", "a", b"other").expect("written"), 1);
    assert_eq!(library.record("session", "a").expect("read"), Some((b"second".to_vec(), 2)));
    // The old revision put back in its place or in the new one's.
    store.tamper(&old, old_bytes.clone());
    let again = super::library(&store, &keys);
    assert_eq!(again.record("session", "a").expect("read"), Some((b"second".to_vec(), 2)));
    let names: Vec<_> =
        again.records("session").expect("list").into_iter().map(|r| (r.name, r.bytes)).collect();
    assert_eq!(names, [("a".to_owned(), 6), ("b".to_owned(), 300_000)]);
    let new = store.list(Area::Records).expect("list");
    let new =
        new.iter().find(|one| one.bytes < 10_000 && one.name != old && again_is(&store, one.name, &keys));
    let new = new.expect("there").name;
    store.tamper(&new, old_bytes);
    assert_eq!(again.record("session", "a").expect_err("swapped").counter_name(), "swapped");
    assert!(library.remove_record("session", "a").expect("removed"));
    assert!(!library.remove_record("session", "a").expect("removed"));
    assert_eq!(library.record("session", "a").expect("read"), None);
    assert_eq!(library.put_record("session", "", b"x").expect_err("no name").counter_name(), "caller");
}

/// Is this the object of the second revision of ("session", "a")?
fn again_is(store: &MemoryStore, name: ObjectName, keys: &KeyRing) -> bool {
    let Ok(Some(file)) = store.open(&name) else { return false };
    let opened = OpenedObject::open(keys, true, name, file).expect("authentic");
    let payload = opened.read_all().expect("authentic");
    payload.windows(6).any(|bytes| bytes == b"second")
}

/// Nothing in the files or their names tells what the prompts were, or what the model computed.
#[test]
fn a_sealed_folder_tells_nothing() {
    let root = tempfile::tempdir().expect("a folder");
    let keys = keys();
    let library = crate::testing::open(Arc::new(DirStore::open(root.path(), None).expect("open")), &keys);
    let scope = library.scope(identity(), "tenant-marker");
    let mut prompts = Vec::new();
    for seed in 0..20 {
        let units = prompt(600, 0, 1000 + seed);
        publish(&library, &scope, &units).expect("published");
        library.put_record("session", &format!("marker-{seed}"), b"marker-text").expect("written");
        prompts.push(units);
    }
    let mut needles: Vec<Vec<u8>> =
        ["marker", "Q4_K_M", "scalar-1", "planes-1", "neox"].map(|text| text.as_bytes().to_vec()).into();
    for units in &prompts {
        for four in units.chunks_exact(4).step_by(10) {
            needles.push(four.iter().flat_map(|unit| unit.to_le_bytes()).collect());
            let ids = four.iter().map(|unit| unit.as_token().expect("a token"));
            needles.push(ids.clone().flat_map(u32::to_le_bytes).collect());
            needles.push(ids.map(|id| id.to_string()).collect::<Vec<_>>().join(",").into_bytes());
        }
        needles.push(crate::testing::rows(&scope, units, KvGroup::Full, 0)[..32].to_vec());
    }
    let mut left = vec![root.path().to_owned()];
    let mut haystack = Vec::new();
    while let Some(path) = left.pop() {
        haystack.extend_from_slice(path.file_name().expect("a name").as_encoded_bytes());
        if path.is_dir() {
            left.extend(std::fs::read_dir(&path).expect("list").map(|entry| entry.expect("entry").path()));
        } else {
            haystack.extend(std::fs::read(&path).expect("read"));
        }
    }
    assert!(haystack.len() > 20 * 40_000, "{} bytes were looked at", haystack.len());
    let mut found = std::collections::HashSet::new();
    let by_start: HashMap<[u8; 4], Vec<&[u8]>> = needles.iter().fold(HashMap::new(), |mut map, needle| {
        let start = [needle[0], needle[1], needle[2], needle[3]];
        map.entry(start).or_insert_with(Vec::new).push(needle);
        map
    });
    for at in 0..haystack.len() - 4 {
        let start = [haystack[at], haystack[at + 1], haystack[at + 2], haystack[at + 3]];
        for needle in by_start.get(&start).into_iter().flatten() {
            if haystack[at..].starts_with(needle) {
                found.insert(needle.to_vec());
            }
        }
    }
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_record_is_written_only_as_its_writer_knows_it() {
    let (store, keys) = (MemoryStore::new(), keys());
    let (one, two) = (library(&store, &keys), library(&store, &keys));
    let put = |library: &Library, bytes: &[u8], expect| library.put_record_if("session", "a", bytes, expect);
    assert_eq!(put(&one, b"1", Expect::Absent).expect("new"), 1);
    assert_eq!(
        put(&two, b"2", Expect::Absent).expect_err("another process has it").counter_name(),
        "changed"
    );
    assert_eq!(put(&two, b"2", Expect::Revision(1)).expect("as known"), 2);
    assert_eq!(put(&one, b"3", Expect::Revision(1)).expect_err("old").counter_name(), "changed");
    assert_eq!(put(&one, b"3", Expect::Anything).expect("whatever"), 3);
    assert!(one.remove_record("session", "a").expect("removed"));
    assert_eq!(put(&two, b"4", Expect::Revision(3)).expect_err("gone").counter_name(), "changed");
    assert_eq!(two.records("session").expect("listed"), []);
    // Listings follow every change, though each revision is read only once.
    put(&one, b"55", Expect::Absent).expect("new again");
    let listed = |library: &Library| {
        library.records("session").expect("listed").iter().map(|r| (r.revision, r.bytes)).collect::<Vec<_>>()
    };
    assert_eq!((listed(&one), listed(&two)), (vec![(1, 2)], vec![(1, 2)]));
    put(&two, b"666", Expect::Anything).expect("written");
    assert_eq!((listed(&one), listed(&two)), (vec![(2, 3)], vec![(2, 3)]));
}
