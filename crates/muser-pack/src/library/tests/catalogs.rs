//! Catalogs that were changed, cut, emptied, lost or put back: nothing that verifies is ever deleted for it, and the store
//! opens and says what is wrong.

use std::fs;

use super::*;
use crate::{Area, DirStore, ObjectName};

/// A store with three packs, the first pinned, and two sessions.
struct Victim {
    store: MemoryStore,
    keys: KeyRing,
    prompts: [Vec<PositionKey>; 3],
    ids: [PackId; 3],
    good: Vec<u8>,
}

impl Victim {
    fn new() -> Self {
        let (store, keys) = (MemoryStore::new(), keys());
        let library = library(&store, &keys);
        let scope = library.scope(identity(), "");
        let prompts = [1, 2, 3].map(|seed| prompt(300, 0, seed));
        let ids = [0, 1, 2].map(|i| publish(&library, &scope, &prompts[i]).expect("published").id);
        library.set_pinned(ids[0], true).expect("pinned");
        library.put_record("session", "a", b"first").expect("written");
        library.put_record("session", "a", b"second").expect("written");
        library.put_record("session", "b", b"other").expect("written");
        drop(library);
        let good = store.catalog_bytes();
        assert_eq!(good.len(), 8 * 128);
        Self { store, keys, prompts, ids, good }
    }

    fn open(&self) -> Library {
        library(&self.store, &self.keys)
    }

    fn with_catalog(&self, bytes: Vec<u8>) -> Library {
        self.store.tamper_catalog(bytes);
        self.open()
    }

    /// Names and sizes of all objects.
    fn objects(&self) -> Vec<(ObjectName, u64)> {
        let list = |area| self.store.list(area).expect("list").into_iter().map(|one| (one.name, one.bytes));
        let mut all: Vec<_> = Area::ALL.into_iter().flat_map(list).collect();
        all.sort();
        all
    }

    fn found(&self, library: &Library) -> Vec<bool> {
        let scope = library.scope(identity(), "");
        self.prompts.iter().map(|units| library.longest(&scope, units, 300, false).is_some()).collect()
    }

    fn session(library: &Library, name: &str) -> Option<Vec<u8>> {
        library.record("session", name).expect("readable").map(|(bytes, _)| bytes)
    }
}

#[test]
fn no_catalog_ever_leads_to_deletion() {
    let noise = |len: usize| (0..len).map(|i| (i * 97 % 251) as u8).collect::<Vec<u8>>();
    type Change = fn(&[u8]) -> Vec<u8>;
    let cases: [(&str, Change, Option<&str>); 6] = [
        ("empty", |_| Vec::new(), Some("catalog_missing")),
        ("a part of the first record", |good| good[..100].to_vec(), Some("catalog_missing")),
        ("only the first record", |good| good[..128].to_vec(), None),
        ("three records", |good| good[..3 * 128].to_vec(), None),
        ("zeros", |good| vec![0; good.len()], Some("not_a_pack")),
        ("without its first record", |good| good[128..].to_vec(), Some("catalog")),
    ];
    for (what, change, reason) in cases {
        let victim = Victim::new();
        let objects = victim.objects();
        let library = victim.with_catalog(change(&victim.good));
        assert_eq!(library.suspended().as_ref().map(Refusal::name), reason, "{what}");
        assert_eq!(victim.objects(), objects, "{what}: opening deleted something");
        let Some(reason) = reason else { continue };
        assert_eq!(victim.found(&library), [false; 3], "{what}");
        let scope = library.scope(identity(), "");
        let errors = [
            publish(&library, &scope, &prompt(600, 0, 9)).err(),
            library.put_record("session", "c", b"x").err(),
            library.remove_record("session", "a").err(),
            library.remove(victim.ids[0]).err(),
            library.collect_garbage().err(),
            library.refresh().err(),
        ];
        for error in errors {
            assert_eq!(error.expect("nothing is written").counter_name(), reason, "{what}");
        }
        // It is looked at again: a catalog that comes back counts at once.
        victim.store.tamper_catalog(victim.good.clone());
        library.refresh().expect("as it was");
        assert_eq!(library.suspended(), None);
        assert_eq!(victim.found(&library), [true; 3], "{what}");
    }
    let victim = Victim::new();
    let objects = victim.objects();
    let library = victim.with_catalog(noise(victim.good.len()));
    assert_eq!(library.suspended().as_ref().map(Refusal::name), Some("not_a_pack"));
    assert_eq!(victim.objects(), objects);
}

#[test]
fn another_keys_objects_are_not_touched_either() {
    let victim = Victim::new();
    let objects = victim.objects();
    victim.store.tamper_catalog(Vec::new());
    let other = library(&victim.store, &keys());
    assert_eq!(other.suspended().as_ref().map(Refusal::name), Some("catalog_missing"));
    assert_eq!(other.recover().expect("nothing is ours").packs, 0);
    assert_eq!(victim.objects(), objects);
}

#[test]
fn recovery_rebuilds_the_catalog_from_what_verifies() {
    let victim = Victim::new();
    let library = victim.with_catalog(Vec::new());
    let recovered = library.recover().expect("recovered");
    assert_eq!((recovered.packs, recovered.records, recovered.refused), (3, 2, Vec::new()));
    for library in [library, victim.open()] {
        assert_eq!(library.suspended(), None);
        assert_eq!(victim.found(&library), [true; 3]);
        assert_eq!(Victim::session(&library, "a").as_deref(), Some(&b"second"[..]));
        assert_eq!(Victim::session(&library, "b").as_deref(), Some(&b"other"[..]));
    }
    // What does not verify stays where it is and is named; a pack with a gap is not taken in.
    let victim = Victim::new();
    let mut bytes = victim.store.bytes(&victim.ids[1].object()).expect("there");
    bytes[200] ^= 1;
    victim.store.tamper(&victim.ids[1].object(), bytes);
    let plan = victim.open();
    let scope = plan.scope(identity(), "");
    let segment = plan.longest(&scope, &victim.prompts[2], 300, false).expect("found").segments[0].id;
    victim.store.delete(&segment.object()).expect("deleted");
    let library = victim.with_catalog(Vec::new());
    let recovered = library.recover().expect("recovered");
    assert_eq!((recovered.packs, recovered.records, recovered.refused.len()), (1, 2, 2));
    assert_eq!(victim.found(&library), [true, false, false]);
    assert!(victim.store.contains(&victim.ids[1].object()).expect("contains"), "nothing is deleted");
    // Of a catalog that can be read in part, pins are kept.
    let victim = Victim::new();
    let mut bytes = victim.good.clone();
    bytes[6 * 128 + 70] ^= 1;
    let library = victim.with_catalog(bytes);
    assert_eq!(library.damaged_records(), 1);
    library.recover().expect("recovered");
    assert!(library.pack(victim.ids[0]).expect("there").pinned);
    assert_eq!(library.damaged_records(), 0);
    assert_eq!(Victim::session(&library, "a").as_deref(), Some(&b"second"[..]));
}

#[test]
fn a_flipped_bit_costs_its_record_and_not_the_start() {
    // Records: head, three packs, a pin, session a twice, session b.
    for offset in 0..8 * 128 {
        let victim = Victim::new_shared();
        let objects = victim.objects();
        let mut bytes = victim.good.clone();
        bytes[offset] ^= 1 << (offset % 8);
        let library = victim.with_catalog(bytes);
        let (index, in_code) = (offset / 128, offset % 128 >= 96);
        let counted = library.counters().snapshot().refused().any(|(name, _)| name == "catalog");
        assert_eq!(victim.objects(), objects, "byte {offset}: something was deleted");
        if index == 0 && !in_code {
            // Without its head nobody knows which store it is.
            assert!(library.suspended().is_some(), "byte {offset}");
            continue;
        }
        assert_eq!(library.suspended(), None, "byte {offset}");
        let found = victim.found(&library);
        let (a, b) = (Victim::session(&library, "a"), Victim::session(&library, "b"));
        // The next record vouches for the content of one whose code alone was changed.
        if in_code && index < 7 {
            assert_eq!((found, counted), (vec![true; 3], false), "byte {offset}");
            assert_eq!(a.as_deref(), Some(&b"second"[..]), "byte {offset}");
            continue;
        }
        assert!(counted && library.damaged_records() == 1, "byte {offset}");
        let expected: Vec<bool> = (1..4).map(|pack| pack != index).collect();
        assert_eq!(found, expected, "byte {offset}");
        assert_eq!(b.is_some(), index != 7, "byte {offset}");
        if index != 5 && index != 6 {
            assert_eq!(a.as_deref(), Some(&b"second"[..]), "byte {offset}");
        }
        assert_ne!(a.as_deref(), Some(&b"first"[..]), "byte {offset}: an old revision");
        // It goes on being used, and what the lost record named is not taken for garbage.
        let scope = library.scope(identity(), "");
        let id = publish(&library, &scope, &prompt(300, 0, 77)).expect("published").id;
        assert_eq!(library.collect_garbage().expect_err("not now").counter_name(), "catalog");
        let again = victim.open();
        assert!(again.pack(id).is_some(), "byte {offset}");
        assert_eq!(again.damaged_records(), 1, "byte {offset}");
        again.remove(id).expect("removed");
    }
}

impl Victim {
    /// One victim for all rounds of a test: publishing takes longer than opening.
    fn new_shared() -> Self {
        thread_local! {
            static SHARED: std::cell::OnceCell<Victim> = const { std::cell::OnceCell::new() };
        }
        SHARED.with(|shared| {
            let victim = shared.get_or_init(Self::new);
            let (store, keys) = (victim.store.clone(), victim.keys.clone());
            Self { store, keys, prompts: victim.prompts.clone(), ids: victim.ids, good: victim.good.clone() }
        })
    }
}

#[test]
fn records_left_out_repeated_or_reordered_add_nothing() {
    let victim = Victim::new();
    let objects = victim.objects();
    let record = |i: usize| victim.good[i * 128..(i + 1) * 128].to_vec();
    for order in [&[0, 2][..], &[0, 2, 1], &[0, 1, 1], &[0, 0, 1, 2], &[0, 1, 3, 2, 4]] {
        let library = victim.with_catalog(order.iter().flat_map(|&i| record(i)).collect());
        assert!(library.damaged_records() > 0, "{order:?}");
        assert!(library.packs().len() < order.len(), "{order:?}");
        assert_eq!(victim.objects(), objects, "{order:?}");
    }
    // What a killed writer left is cut off.
    for torn in 1..128 {
        let library = victim.with_catalog([&victim.good[..], &record(1)[..torn]].concat());
        assert_eq!((library.packs().len(), library.damaged_records()), (3, 0));
        assert_eq!(victim.store.catalog_bytes(), victim.good);
    }
}

#[test]
fn what_the_catalog_says_is_gone_is_swept_and_what_it_does_not_name_is_not() {
    let victim = Victim::new();
    let library = victim.open();
    let (manifest, old_session) = (victim.ids[1].object(), victim.store.list(Area::Records).expect("list"));
    let bytes: Vec<_> = old_session.iter().map(|one| victim.store.bytes(&one.name).expect("there")).collect();
    let manifest_bytes = victim.store.bytes(&manifest).expect("there");
    library.remove(victim.ids[1]).expect("removed");
    library.put_record("session", "a", b"third").expect("written");
    library.remove_record("session", "b").expect("removed");
    let clean = victim.objects();
    drop(library);
    // As if the process had been killed before it could delete.
    victim.store.tamper(&manifest, manifest_bytes);
    for (one, bytes) in old_session.iter().zip(bytes) {
        victim.store.tamper(&one.name, bytes);
    }
    let library = victim.open();
    assert_eq!(victim.objects(), clean);
    assert_eq!(Victim::session(&library, "a").as_deref(), Some(&b"third"[..]));
    // A manifest that was stored and never entered: it and its segments stay until garbage is collected.
    let scope = library.scope(identity(), "");
    let before = victim.store.catalog_bytes();
    publish(&library, &scope, &prompt(300, 0, 50)).expect("published");
    drop(library);
    let all = victim.objects();
    let library = victim.with_catalog(before);
    assert_eq!(victim.objects(), all, "an end that was lost costs nothing yet");
    assert!(library.collect_garbage().expect("collected").0 >= 3);
    assert_eq!(victim.objects(), clean);
}

#[test]
fn an_old_copy_another_store_and_an_emptied_one_are_recognised() {
    let folder = tempfile::tempdir().expect("a folder");
    let anchor = folder.path().join("packs.seen");
    let with_anchor = LibraryOptions { anchor: Some(anchor.clone()), ..options() };
    let victim = Victim::new();
    let open_of = |store: &MemoryStore| {
        Library::open(Arc::new(store.clone()), victim.keys.clone(), with_anchor.clone()).expect("opens")
    };
    let open = || open_of(&victim.store);
    let reason = |library: &Library| library.suspended().as_ref().map(Refusal::name);
    let library = open();
    library.remove(victim.ids[0]).expect("removed");
    assert_eq!(open().packs().len(), 2);
    let new = victim.store.catalog_bytes();
    // An old copy, for a new process and under a running one, however often it looks.
    victim.store.tamper_catalog(victim.good.clone());
    for _ in 0..2 {
        assert_eq!(reason(&open()), Some("rolled_back"));
        assert_eq!(library.refresh().expect_err("rolled back").counter_name(), "rolled_back");
        assert!(library.packs().is_empty());
    }
    victim.store.tamper_catalog(new.clone());
    library.refresh().expect("as it was");
    assert_eq!(library.packs().len(), 2);
    // Emptying it, letting somebody open it and putting the old copy back was a way around.
    let objects = victim.objects();
    victim.store.tamper_catalog(Vec::new());
    assert_eq!(reason(&open()), Some("catalog_missing"));
    assert_eq!(library.refresh().expect_err("emptied").counter_name(), "catalog_missing");
    assert!(victim.store.catalog_bytes().is_empty(), "no new store is begun");
    victim.store.tamper_catalog(victim.good.clone());
    assert_eq!(reason(&open()), Some("rolled_back"));
    assert_eq!(victim.objects(), objects);
    // A store that was forked from an old copy and written to is as long, and another one.
    victim.store.tamper_catalog(victim.good.clone());
    let fork = super::library(&victim.store, &victim.keys);
    fork.set_pinned(victim.ids[1], true).expect("pinned");
    assert_eq!(victim.store.catalog_bytes().len(), new.len());
    assert_eq!(reason(&open()), Some("rolled_back"));
    // Another store of the same key, never seen, in this place.
    let other = MemoryStore::new();
    super::library(&other, &victim.keys);
    assert_eq!(reason(&open_of(&other)), Some("unknown_store"));
    // Somebody looked and says that it shall be so.
    let taken = open_of(&other);
    taken.accept_as_it_is().expect("accepted");
    assert_eq!(reason(&taken), None);
    assert_eq!(reason(&open_of(&other)), None);
    // The first one is still known, as far as it had been seen.
    victim.store.tamper_catalog(victim.good.clone());
    assert_eq!(reason(&open()), Some("rolled_back"));
    victim.store.tamper_catalog(new);
    assert_eq!(reason(&open()), None);
    // The anchor is authenticated: without the key nobody can set it to anything.
    fs::write(&anchor, [0; 80]).expect("written");
    victim.store.tamper_catalog(victim.good.clone());
    assert_eq!(reason(&open()), None, "a worthless anchor is as good as none");
}

#[test]
fn what_was_put_back_is_erased_where_the_catalog_is_known_to_be_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let victim = Victim::new();
    let with_anchor = LibraryOptions { anchor: Some(folder.path().join("seen")), ..options() };
    let open = || {
        Library::open(Arc::new(victim.store.clone()), victim.keys.clone(), with_anchor.clone())
            .expect("opens")
    };
    let name = victim.ids[0].object();
    let old = victim.store.bytes(&name).expect("there");
    open().remove(victim.ids[0]).expect("removed");
    let clean = victim.objects();
    victim.store.tamper(&name, old);
    let library = open();
    assert_eq!(victim.objects(), clean);
    assert!(library.counters().snapshot().refused().any(|(name, _)| name == "replayed"));
}

#[test]
fn two_stores_of_one_key_do_not_make_each_other_old() {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = keys();
    let options = LibraryOptions { anchor: Some(folder.path().join("keys.seen")), ..options() };
    let open = |name: &str| {
        let store = DirStore::open(folder.path().join(name), None).expect("a folder");
        Library::open(Arc::new(store), keys.clone(), options.clone()).expect("opens")
    };
    let (one, two) = (open("one"), open("two"));
    for round in 0..3 {
        for library in [&one, &two] {
            library.put_record("session", "a", &[round]).expect("written");
        }
    }
    let copy = fs::read(folder.path().join("one/catalog")).expect("there");
    one.put_record("session", "a", b"later").expect("written");
    drop((one, two));
    assert_eq!((open("one").suspended(), open("two").suspended()), (None, None));
    fs::write(folder.path().join("one/catalog"), copy).expect("written");
    assert_eq!(open("one").suspended().as_ref().map(Refusal::name), Some("rolled_back"));
    assert_eq!(open("two").suspended(), None);
    // By another path it is the same place.
    let linked = folder.path().join("linked");
    std::os::unix::fs::symlink(folder.path().join("two"), linked).expect("linked");
    assert_eq!(open("linked").suspended(), None);
}

#[test]
fn what_cannot_be_remembered_is_counted() {
    let folder = tempfile::tempdir().expect("a folder");
    let anchor = Some(folder.path().join("missing").join("keys.seen"));
    let options = LibraryOptions { anchor, ..options() };
    let library = Library::open(Arc::new(MemoryStore::new()), keys(), options).expect("opens all the same");
    library.put_record("session", "a", b"x").expect("written");
    library.refresh().expect("refreshed");
    assert!(library.counters().snapshot().anchor_failures >= 1);
}

#[test]
fn packs_that_another_process_publishes_are_found_without_asking() {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = keys();
    let open = || {
        let store = DirStore::open(folder.path(), None).expect("a folder");
        Library::open(Arc::new(store), keys.clone(), options()).expect("opens")
    };
    let (one, two) = (open(), open());
    let scope = one.scope(identity(), "");
    let units = prompt(600, 0, 1);
    let id = publish(&one, &scope, &units).expect("published").id;
    let soon = |wanted: bool| {
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            two.keep_up();
            if two.longest(&scope, &units, 600, false).is_some() == wanted {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    };
    assert!(soon(true), "what was published");
    one.remove(id).expect("removed");
    assert!(soon(false), "what was removed");
    publish(&one, &scope, &units).expect("published again");
    assert!(soon(true));
}
