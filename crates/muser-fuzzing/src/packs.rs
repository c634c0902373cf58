//! Packs: what lies in a store, in a bundle and in a key file. Codes are made good, so that what stands behind them is reached.

use std::sync::{Arc, LazyLock};

use muser_kv::{BLOCK_LEN, PositionKey};
use muser_pack::{Area, Identity, KeyRing, Library, LibraryOptions, MemoryStore, PackStore, fuzzing};

use crate::{Target, check_message, folder};

/// A manifest and an identity: what is read has one encoding.
pub const PACK_MANIFEST: Target = Target {
    name: "pack_manifest",
    about: "manifest and identity: what is read is written as the same bytes",
    run: manifest,
    seeds: manifest_seeds,
    words: &["muser pack manifest", "muser pack identity", "\\x00\\x01\\x00\\x00"],
    max_len: 4096,
    memory: (64 << 10, 256),
    millis: (50, 10),
};

fn manifest(data: &[u8]) {
    match fuzzing::manifest(data) {
        Ok(again) => assert_eq!(again, data, "one encoding"),
        Err(refusal) => check_message(&refusal.to_string()),
    }
    match Identity::decode(data) {
        Ok(identity) => {
            assert_eq!(identity.encode(), data, "one encoding");
            assert_eq!(identity.first_difference(&identity.clone()), None);
        }
        Err(refusal) => check_message(&refusal.to_string()),
    }
}

fn manifest_seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![Identity::example().encode(), Identity::example_full_size().encode()];
    let (_, objects) = &*STORE;
    let payloads = objects.iter().filter(|(area, _)| *area == Area::Packs);
    seeds.extend(payloads.filter_map(|(area, bytes)| fuzzing::object(*area, bytes.clone()).ok()));
    seeds
}

/// Packs of a store in memory, under the fuzzer's keys: the catalog's bytes, and some objects.
type Objects = Vec<(Area, Vec<u8>)>;
static STORE: LazyLock<(Vec<u8>, Objects)> = LazyLock::new(|| {
    let store = MemoryStore::new();
    let library = open(&store);
    publish(&library, 300, 1);
    let id = publish(&library, 600, 2);
    library.set_pinned(id, true).expect("there");
    library.put_record("session", "a", b"messages").expect("written");
    let mut objects = Vec::new();
    for area in Area::ALL {
        let listed = store.list(area).expect("a list");
        let some = listed.iter().take(3).filter_map(|one| store.bytes(&one.name));
        objects.extend(some.map(|bytes| (area, bytes)));
    }
    (store.catalog_bytes(), objects)
});

fn options() -> LibraryOptions {
    LibraryOptions { chunk_bytes: 4096, encrypt: false, ..LibraryOptions::default() }
}

fn open(store: &MemoryStore) -> Library {
    Library::open(Arc::new(store.clone()), fuzzing::keys(), options()).expect("an honest store opens")
}

fn publish(library: &Library, len: u32, seed: u32) -> muser_pack::PackId {
    let scope = library.scope(Identity::example(), "");
    let units: Vec<PositionKey> = (0..len).map(|i| PositionKey::token(i.wrapping_mul(seed))).collect();
    let mut publication = library.begin_publish(&scope, &units).expect("begun");
    for wanted in publication.wanted() {
        let rows = vec![seed as u8; scope.block_bytes(wanted.group)];
        publication.put(wanted.group, wanted.index, &rows).expect("put");
    }
    publication.commit(false).expect("published").id
}

/// An object with a good code: it opens, or is refused with a reason.
pub const PACK_OBJECT: Target = Target {
    name: "pack_object",
    about: "segments, manifests and records whose header's code is good: payload as long as was said, or a reason",
    run: object,
    seeds: object_seeds,
    words: &["MUSRPACK", "\\x00\\x10\\x00\\x00", "\\x00\\x20\\x00\\x00"],
    max_len: 16_384,
    memory: (64 << 10, 64),
    millis: (50, 10),
};

fn object(data: &[u8]) {
    let Some((area, bytes)) = data.split_first() else { return };
    let area = Area::ALL[usize::from(*area) % 3];
    match fuzzing::object(area, bytes.to_vec()) {
        Ok(payload) => {
            assert!(payload.len() < bytes.len(), "a header stands before it");
            assert_eq!(fuzzing::object(area, bytes.to_vec()).ok(), Some(payload));
        }
        Err(error) => check_message(&error.to_string()),
    }
}

fn object_seeds() -> Vec<Vec<u8>> {
    let (_, objects) = &*STORE;
    let small = objects.iter().filter(|(_, bytes)| bytes.len() <= 16_000);
    small.map(|(area, bytes)| [&[*area as u8][..], bytes].concat()).collect()
}

/// A catalog whose records have good codes: the library opens or says why not, twice the same, and goes on from there.
pub const PACK_CATALOG: Target = Target {
    name: "pack_catalog",
    about: "catalog records with good codes in any order: opens twice the same; what is published then is found",
    run: catalog,
    seeds: catalog_seeds,
    words: &["MPCT"],
    max_len: 2048,
    memory: (1 << 20, 1024),
    millis: (200, 100),
};

fn catalog(data: &[u8]) {
    let Some((mend, bytes)) = data.split_first() else { return };
    let mut bytes = bytes.to_vec();
    if mend & 1 == 1 {
        fuzzing::mend_catalog(&mut bytes);
    }
    let store = MemoryStore::new();
    store.tamper_catalog(bytes.clone());
    let look = || {
        let opened = Library::open(Arc::new(store.clone()), fuzzing::keys(), options());
        opened.map(|library| {
            (
                library.packs().len(),
                library.suspended().map(|r| r.to_string()),
                library.damaged_records(),
                library,
            )
        })
    };
    match look() {
        Ok((packs, suspended, damaged, library)) => {
            // Nothing is stored, whatever the catalog says.
            assert_eq!(packs, 0);
            drop(library);
            let (again, suspended_again, damaged_again, library) = look().expect("it opened before");
            assert_eq!((packs, &suspended), (again, &suspended_again));
            assert!(damaged_again <= damaged.max(1), "{damaged} then {damaged_again}");
            if suspended.is_none() && mend & 2 == 2 {
                let id = publish(&library, 300, 3);
                assert!(library.pack(id).is_some());
                drop(library);
                let (packs, ..) = look().expect("it opened before");
                assert_eq!(packs, 1, "what was published is found by the next process");
            }
        }
        Err(error) => check_message(&error.to_string()),
    }
}

fn catalog_seeds() -> Vec<Vec<u8>> {
    let (catalog, _) = &*STORE;
    [0, 1, 2, 3].iter().map(|how| [&[*how][..], catalog].concat()).collect()
}

/// A bundle's table and objects.
pub const PACK_BUNDLE: Target = Target {
    name: "pack_bundle",
    about: "importing a changed bundle: what is imported is whole, else nothing is left",
    run: bundle,
    seeds: bundle_seeds,
    words: &["MUSRBNDL", "MUSRPACK"],
    max_len: 65_536,
    memory: (1 << 20, 64),
    millis: (200, 20),
};

/// A bundle of this process, its keys, and a folder.
static BUNDLE: LazyLock<(Vec<u8>, KeyRing, tempfile::TempDir)> = LazyLock::new(|| {
    let store = MemoryStore::new();
    let library = open(&store);
    let id = publish(&library, 300, 7);
    let mut bytes = Vec::new();
    let (_, keys) = library.export(id, &mut bytes).expect("exported");
    (bytes, keys, folder())
});

fn bundle(data: &[u8]) {
    let (_, keys, folder) = &*BUNDLE;
    let path = folder.path().join("bundle");
    std::fs::write(&path, data).expect("a folder in memory");
    let store = MemoryStore::new();
    let library = open(&store);
    match library.import(&path, keys, "", false) {
        Ok(published) => {
            let report = library.verify(published.id, &mut |_| {}).expect("it is there");
            std::hint::black_box(report);
            assert_eq!(library.packs().len(), 1);
        }
        Err(error) => {
            check_message(&error.to_string());
            assert!(library.packs().is_empty());
            assert_eq!(store.usage().expect("usage").held_bytes, 0, "nothing is left of what was refused");
        }
    }
}

fn bundle_seeds() -> Vec<Vec<u8>> {
    let (bytes, ..) = &*BUNDLE;
    vec![bytes.clone(), bytes[..BLOCK_LEN.min(bytes.len())].to_vec()]
}

/// A key file.
pub const KEY_FILE: Target = Target {
    name: "key_file",
    about: "a key file with a good code: what is read is written as the same bytes",
    run: key_file,
    seeds: key_file_seeds,
    words: &["MUSRKEYS"],
    max_len: 1024,
    memory: (160 << 10, 256),
    millis: (50, 10),
};

fn key_file(data: &[u8]) {
    let mut bytes = data.to_vec();
    fuzzing::mend_key_file(&mut bytes);
    for bytes in [data, &bytes] {
        match fuzzing::key_file(bytes) {
            Ok(again) => assert!(again == bytes, "one encoding"),
            Err(refusal) => check_message(&refusal.to_string()),
        }
    }
}

fn key_file_seeds() -> Vec<Vec<u8>> {
    vec![fuzzing::example_key_file()]
}
