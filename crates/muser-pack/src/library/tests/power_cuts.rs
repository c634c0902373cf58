//! What a power cut leaves: a disk forgets what was not synced, bytes and names alike. So whatever the catalog speaks of must have
//! been synced before the catalog says so, bytes before their name.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use muser_kv::BLOCK_LEN;

use super::keys;
use crate::store::DirStore;
use crate::store::durable::{Act, recorded};
use crate::testing::{identity, options, prompt, publish};
use crate::{Library, PackStore as _};

/// Plays the acts on a disk that forgets. Answers how many names were made and how often the catalog grew.
fn check(acts: &[(Act, PathBuf)]) -> (usize, usize) {
    let (mut bytes, mut names) = (BTreeSet::<&Path>::new(), BTreeSet::<&Path>::new());
    let (mut named, mut catalogued) = (0, 0);
    for (at, (act, path)) in acts.iter().enumerate() {
        match act {
            Act::Wrote => drop(bytes.insert(path)),
            Act::Synced => drop(bytes.remove(path.as_path())),
            Act::Named => {
                assert!(
                    bytes.is_empty(),
                    "act {at}: {} has a name before its bytes are synced",
                    path.display()
                );
                names.insert(path);
                named += 1;
            }
            Act::FolderSynced => names.retain(|name| name.parent() != Some(path)),
            Act::Catalogued => {
                assert!(bytes.is_empty(), "act {at}: {bytes:?} is not synced");
                assert!(
                    names.is_empty(),
                    "act {at}: the catalog speaks of names that may be lost: {names:?}"
                );
                bytes.insert(path);
                catalogued += 1;
            }
        }
    }
    assert!(bytes.is_empty() && names.is_empty(), "at the end {bytes:?} and {names:?} are not synced");
    (named, catalogued)
}

#[test]
fn nothing_counts_before_it_is_on_the_disk() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = Arc::new(DirStore::open(folder.path(), None).expect("a store"));
    let library = Library::open(store.clone(), keys(), options()).expect("opens");
    let scope = library.scope(identity(), "");
    let units = prompt(3 * BLOCK_LEN + 40, 0, 1);
    let publication = recorded(|| assert!(publish(&library, &scope, &units).is_ok()));
    let (named, catalogued) = check(&publication);
    // Segments and a manifest, and the folders that they are the first in.
    assert!(named > 5 && catalogued >= 1, "{named} {catalogued}");
    for bytes in [b"one".as_slice(), b"another"] {
        let record = recorded(|| assert!(library.put_record("session", "a", bytes).is_ok()));
        let (named, catalogued) = check(&record);
        assert!(named >= 1 && catalogued == 1, "{named} {catalogued}");
    }
    // A catalog that is written anew.
    let mut catalog = store.catalog().expect("it has one").lock().expect("nobody has it");
    let replaced = recorded(|| catalog.replace(b"").expect("replaced"));
    assert_eq!(check(&replaced).0, 1);
}

#[test]
#[should_panic(expected = "before its bytes are synced")]
fn a_name_for_bytes_that_may_be_lost_is_found() {
    check(&[(Act::Wrote, "a".into()), (Act::Named, "b/a".into())]);
}

#[test]
#[should_panic(expected = "names that may be lost")]
fn a_catalog_that_is_early_is_found() {
    let acts = [Act::Wrote, Act::Synced].map(|act| (act, PathBuf::from("a")));
    let late = [(Act::Named, "b/a".into()), (Act::Catalogued, "c".into()), (Act::FolderSynced, "b".into())];
    check(&[acts.as_slice(), &late].concat());
}
