//! Rotation, revocation, foreign keys.

use super::*;
use crate::ObjectName;

fn published(keys: &KeyRing) -> (MemoryStore, Library, Vec<PositionKey>, PackId) {
    let store = MemoryStore::new();
    let library = library(&store, keys);
    let units = prompt(600, 0, 0);
    let id = publish(&library, &library.scope(identity(), ""), &units).expect("published").id;
    (store, library, units, id)
}

#[test]
fn rotation_changes_no_name_and_loses_nothing() {
    let mut keys = keys();
    let (store, library, units, id) = published(&keys);
    let scope = library.scope(identity(), "");
    let before = library.longest(&scope, &units, 512, true).expect("found").segments.clone();
    let old_bytes = store.bytes(&before[0].id.object()).expect("there");
    assert_eq!(keys.rotate().expect("rotated"), 2);
    library.set_keys(keys.clone()).expect("the same base secret");
    let plan = library.longest(&scope, &units, 600, false).expect("found");
    restore(&library, &scope, &units, &plan).expect("an old epoch is read");
    drop(plan);
    library.remove(id).expect("removed");
    assert_eq!(publish(&library, &scope, &units).expect("published").id, id);
    let after = library.longest(&scope, &units, 512, true).expect("found").segments.clone();
    assert_eq!(before, after);
    let new_bytes = store.bytes(&after[0].id.object()).expect("there");
    assert_ne!(old_bytes[16..20], new_bytes[16..20], "the epoch in the header");
    let same = old_bytes[4096..].iter().zip(&new_bytes[4096..]).filter(|(a, b)| a == b).count();
    assert!(same < 8192 / 64, "{same} of 8,192 bytes are the same under another key");
}

#[test]
fn revoked_old_and_unknown_epochs_have_reasons_of_their_own() {
    let mut keys = keys();
    let (store, library, units, id) = published(&keys);
    let scope = library.scope(identity(), "");
    let segment = library.longest(&scope, &units, 512, true).expect("found").segments[0];
    keys.rotate().expect("rotated");
    let check = |keys: &KeyRing, reason: &str| {
        library.set_keys(keys.clone()).expect("the same base secret");
        let mut out = vec![0; segment.bytes];
        let refused = library.fetch(&scope, &segment, &mut out).expect_err(reason);
        assert_eq!(refused.counter_name(), reason);
        assert_eq!(out, vec![0; segment.bytes]);
        let again = super::library(&store, keys);
        assert!(again.longest(&scope, &units, 512, true).is_none());
        assert_eq!(again.counters().snapshot().refused().collect::<Vec<_>>(), [(reason, 1)]);
    };
    let mut at_least_two = keys.clone();
    at_least_two.set_minimum_epoch(2).expect("set");
    check(&at_least_two, "epoch_too_old");
    assert!(at_least_two.set_minimum_epoch(1).is_err(), "never lowered");
    assert!(keys.revoke(2).is_err(), "the current epoch");
    keys.revoke(1).expect("revoked");
    check(&keys, "revoked_key");
    let epochs: Vec<_> =
        keys.epochs().iter().map(|epoch| (epoch.number, epoch.revoked, epoch.readable)).collect();
    assert_eq!(epochs, [(1, true, false), (2, false, true)]);
    // Bytes are not at fault: nothing was put aside.
    assert!(store.bytes(&id.object()).is_some());
    assert!(store.bytes(&segment.id.object()).is_some());
    // Such a pack can be removed and made anew.
    library.remove(id).expect("removed");
    publish(&library, &scope, &units).expect("published");
    let plan = library.longest(&scope, &units, 600, false).expect("found");
    restore(&library, &scope, &units, &plan).expect("restored");
}

#[test]
fn a_store_of_another_key_is_refused_as_such() {
    let (store, library, units, _) = published(&keys());
    let other = keys();
    let refused = Library::open(Arc::new(store.clone()), other.clone(), options()).expect_err("foreign");
    assert_eq!(refused.counter_name(), "foreign_key");
    assert!(refused.to_string().contains(&other.id()), "{refused}");
    assert_eq!(library.set_keys(other.clone()).expect_err("foreign").counter_name(), "foreign_key");
    // Objects of another key in our store.
    let scope = library.scope(identity(), "");
    let segment = library.longest(&scope, &units, 512, true).expect("found").segments[0];
    let spec = crate::object::Spec { kind: Kind::Full, row_bytes: 16, positions: 256, chunk_bytes: 4096 };
    let sealed = crate::object::seal(&other, true, spec, segment.id.0, &[0; 8192]).expect("sealed");
    store.tamper(&segment.id.object(), [sealed.header, sealed.body].concat());
    let mut out = vec![0; segment.bytes];
    let refused = library.fetch(&scope, &segment, &mut out).expect_err("foreign");
    assert_eq!(refused.counter_name(), "foreign_key");
}

#[test]
fn every_purpose_has_a_key_of_its_own() {
    let keys = keys();
    let epoch = keys.epoch(1).expect("readable");
    let (a, b) = (keys.tenant(""), keys.tenant("B"));
    let mut all: Vec<[u8; 32]> = vec![
        *keys.chunk_key(),
        *keys.namespace_key(),
        *keys.catalog_key(),
        *epoch.authentication(),
        *a.prefix,
        *a.content,
        *a.pack,
        *b.prefix,
        *b.content,
        *b.pack,
    ];
    all.extend(epoch.secrets_for_tests());
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), count);
    assert!(!format!("{keys:?}").contains(&crate::name::hex(&keys.base[..])));
}

#[test]
fn equal_payloads_never_have_equal_ciphertexts() {
    let keys = keys();
    let spec = crate::object::Spec { kind: Kind::Full, row_bytes: 16, positions: 256, chunk_bytes: 4096 };
    let mut seen = std::collections::HashSet::new();
    // `MUSER_TEST_LONG=1`: a million chunks.
    let long = muser_testkit::is_long();
    for _ in 0..if long { 500_000 } else { 500 } {
        let sealed = crate::object::seal(&keys, true, spec, [9; 32], &[0; 8192]).expect("sealed");
        for chunk in sealed.body.chunks(4096) {
            assert!(
                seen.insert(<[u8; 16]>::try_from(&chunk[..16]).expect("16 bytes")),
                "a key and a nonce were used twice"
            );
        }
    }
}

#[test]
fn keys_rotate_under_load_and_no_restore_fails() {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
    let mut keys = keys();
    let (_, library, units, _) = published(&keys);
    let scope = library.scope(identity(), "");
    let (over, restored) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|threads| {
        for thread in 0..3_u64 {
            let (library, scope, units) = (&library, &scope, &units);
            let (over, restored) = (&over, &restored);
            threads.spawn(move || {
                for round in 0.. {
                    if over.load(SeqCst) {
                        break;
                    }
                    let plan = library.longest(scope, units, 600, false).expect("found in any epoch");
                    restore(library, scope, units, &plan).expect("restored in any epoch");
                    // New packs are sealed in the epoch of the moment.
                    let fresh = prompt(300, 0, 1000 + 100_000 * thread + round);
                    publish(library, scope, &fresh).expect("published");
                    let plan = library.longest(scope, &fresh, 300, false).expect("found");
                    restore(library, scope, &fresh, &plan).expect("restored");
                    restored.fetch_add(2, SeqCst);
                }
            });
        }
        for epoch in 2..=12 {
            assert_eq!(keys.rotate().expect("rotated"), epoch);
            library.set_keys(keys.clone()).expect("the same base secret");
            let so_far = restored.load(SeqCst);
            while restored.load(SeqCst) < so_far + 6 {
                std::thread::yield_now();
            }
        }
        over.store(true, SeqCst);
    });
    let refused: Vec<_> = library.counters().snapshot().refused().collect();
    assert_eq!(refused, [], "{} restores", restored.load(SeqCst));
}

#[test]
#[cfg(unix)]
fn a_revocation_reaches_an_open_library() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("packs.key");
    let keys = crate::KeyFile::open_or_create(&path).expect("keys");
    let store = MemoryStore::new();
    let options = LibraryOptions { key_file: Some(path.clone()), ..options() };
    let library = Library::open(Arc::new(store.clone()), keys.clone(), options).expect("opens");
    let scope = library.scope(identity(), "");
    let units = prompt(600, 0, 0);
    publish(&library, &scope, &units).expect("published");
    library.put_record("session", "a", b"one").expect("written");
    let epoch_of = |name: &ObjectName| store.bytes(name).map(|bytes| bytes[16]);
    // Another process rotates and revokes; nobody tells this one.
    crate::KeyFile::update(&path, KeyRing::rotate).expect("rotated");
    library.put_record("session", "a", b"two").expect("written");
    let sealed = store.list(crate::Area::Records).expect("list");
    assert_eq!(sealed.iter().map(|one| epoch_of(&one.name)).collect::<Vec<_>>(), [Some(2)], "at once");
    crate::KeyFile::update(&path, |keys| keys.revoke(1)).expect("revoked");
    let fresh = prompt(300, 0, 8);
    publish(&library, &scope, &fresh).expect("published");
    let segment = library.longest(&scope, &fresh, 300, false).expect("found").segments[0];
    assert_eq!(epoch_of(&segment.id.object()), Some(2));
    // What was sealed in the revoked epoch is read for a second longer at most.
    std::thread::sleep(Duration::from_millis(1100));
    let segment = library.longest(&scope, &units, 600, false).expect("still known").segments[0];
    let refused = library.fetch(&scope, &segment, &mut vec![0; segment.bytes]).expect_err("revoked");
    assert_eq!(refused.counter_name(), "revoked_key");
    // It is made anew, and nothing that was written since is lost with a restart.
    publish(&library, &scope, &units).expect("published");
    let ring = crate::KeyFile::open(&path).expect("keys");
    let again = super::library(&store, &ring);
    assert_eq!(
        again.record("session", "a").expect("readable").map(|(bytes, _)| bytes),
        Some(b"two".to_vec())
    );
    assert!(again.longest(&scope, &fresh, 300, false).is_some());
    // Without its key file nothing is sealed; what is there is read.
    std::fs::remove_file(&path).expect("removed");
    assert!(library.put_record("session", "a", b"three").is_err());
    assert!(library.record("session", "a").expect("readable").is_some());
}

#[test]
fn what_was_sealed_anew_survives_a_revocation() {
    let mut keys = keys();
    let (store, library, units, id) = published(&keys);
    library.set_pinned(id, true).expect("pinned");
    library.put_record("session", "a", b"one").expect("written");
    let scope = library.scope(identity(), "");
    keys.rotate().expect("rotated");
    library.set_keys(keys.clone()).expect("the same base secret");
    let written = library.records("session").expect("listed")[0].written_unix_s;
    let done = library.reseal().expect("sealed anew");
    assert_eq!((done.packs, done.records, done.left), (1, 1, 0));
    assert_eq!(library.reseal().expect("nothing to do"), Resealed::default());
    let plan = library.longest(&scope, &units, 600, false).expect("found");
    restore(&library, &scope, &units, &plan).expect("by the library that did it");
    drop(plan);
    keys.revoke(1).expect("revoked");
    let again = super::library(&store, &keys);
    let plan = again.longest(&scope, &units, 600, false).expect("found");
    restore(&again, &scope, &units, &plan).expect("restored");
    assert!(again.pack(id).expect("there").pinned);
    assert_eq!(
        again.record("session", "a").expect("readable").map(|(bytes, _)| bytes),
        Some(b"one".to_vec())
    );
    assert_eq!(again.records("session").expect("listed")[0].written_unix_s, written);
    assert_eq!(again.counters().snapshot().refused().collect::<Vec<_>>(), []);
}
