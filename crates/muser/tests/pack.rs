//! `muser pack` on a store that the test fills.

mod support;

use std::path::Path;
use std::sync::Arc;

use muser_kv::{KvGroup, PositionKey};
use muser_pack::{DirStore, Identity, KeyFile, Library, LibraryOptions};
use serde_json::Value;
use support::Home;

/// Publishes packs of these lengths in the default store of a home.
fn fill(home: &Home, lengths: &[usize]) -> Vec<String> {
    let keys = KeyFile::open_or_create(&home.path("keys").join("packs.key")).expect("keys");
    let store = DirStore::open(home.path("packs"), None).expect("a folder");
    let library = Library::open(Arc::new(store), keys, LibraryOptions::default()).expect("open");
    let scope = library.scope(Identity::example(), "");
    let publish = |len: &usize| {
        let units: Vec<_> = (0..*len).map(|i| PositionKey::token((i * 31 + len) as u32)).collect();
        let mut publication = library.begin_publish(&scope, &units).expect("begun");
        for wanted in publication.wanted() {
            let fill = (len + 2 * wanted.index) as u8 ^ u8::from(wanted.group == KvGroup::Full);
            let bytes = vec![fill; scope.block_bytes(wanted.group)];
            publication.put(wanted.group, wanted.index, &bytes).expect("put");
        }
        publication.commit(false).expect("committed").id.to_string()
    };
    lengths.iter().map(publish).collect()
}

fn listed(home: &Home) -> Vec<Value> {
    serde_json::from_str(&home.run(["pack", "ls", "--json"]).success()).expect("an array")
}

#[test]
fn an_empty_home_has_no_packs_and_stays_empty() {
    let home = Home::new();
    assert_eq!(home.run(["pack", "ls"]).success(), "");
    assert_eq!(home.run(["pack", "ls", "--json"]).success(), "[]\n");
    assert!(home.run(["pack", "ls"]).stderr().contains("no packs"));
    home.run(["pack", "gc"]).success();
    assert!(home.run(["pack", "show", "ab"]).failure(1).contains("no packs"));
    assert!(!home.path("packs").exists() && !home.path("keys").exists());
}

#[test]
fn packs_are_listed_shown_pinned_and_removed() {
    let home = Home::new();
    let ids = fill(&home, &[300, 700, 1000]);
    let text = home.run(["pack", "ls"]).success();
    assert_eq!(text.lines().count(), 3);
    for id in &ids {
        assert!(text.contains(&id[..16]), "{text}");
    }
    let mut positions: Vec<_> = listed(&home).iter().map(|pack| pack["positions"].as_u64()).collect();
    positions.sort_unstable();
    assert_eq!(positions, [Some(300), Some(700), Some(1000)]);
    let shown = home.run(["pack", "show", &ids[1][..10]]).success();
    for part in [&ids[1][..], "700", "3 full, 3 sliding", "Q4_K_M", "scalar-1", "0101010101010101"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(!shown.contains("731"), "token ids are shown only when asked for");
    let json = home.run(["pack", "show", "--json", "--tokens", &ids[1]]).success();
    let json: Value = serde_json::from_str(&json).expect("an object");
    assert_eq!(json["tokens"][1], 731);
    assert_eq!(json["computed_with"]["numeric route"], "scalar-1");
    home.run(["pack", "pin", &ids[0]]).success();
    let pinned = |home: &Home| listed(home).iter().filter(|pack| pack["pinned"] == true).count();
    assert_eq!(pinned(&home), 1);
    let note = home.run(["pack", "gc", "--max-gb", "0"]).stderr();
    assert!(note.contains("2 packs dropped"), "{note}");
    assert_eq!(listed(&home)[0]["id"], ids[0]);
    home.run(["pack", "pin", "--off", &ids[0]]).success();
    assert_eq!(pinned(&home), 0);
    home.run(["pack", "rm", &ids[0][..8]]).success();
    assert_eq!(listed(&home).len(), 0);
    assert!(home.run(["pack", "rm", &ids[0]]).failure(1).contains("not in the store"));
    assert!(home.run(["pack", "show", "zz"]).failure(1).contains("no pack begins with zz"));
    home.run(["pack", "rm"]).failure(2);
    home.run(["pack", "gc", "--max-gb", "-1"]).failure(2);
}

#[test]
fn damage_is_found_and_named() {
    let home = Home::new();
    let ids = fill(&home, &[600]);
    assert!(home.run(["pack", "verify"]).stderr().contains("1 packs are whole"));
    let segment = first_file(&home.path("packs").join("segments"));
    let mut bytes = std::fs::read(&segment).expect("read");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&segment, &bytes).expect("write");
    let ran = home.run(["pack", "verify", &ids[0]]);
    assert_eq!(ran.code(), Some(1));
    assert!(ran.stdout().contains("does not match its authentication code"), "{}", ran.stdout());
    assert!(ran.stderr().contains("1 packs are damaged"), "{}", ran.stderr());
}

#[test]
fn packs_travel_between_homes() {
    let (home, other) = (Home::new(), Home::new());
    let ids = fill(&home, &[600]);
    let bundle = home.path("bundle");
    let bundle = bundle.to_str().expect("a path");
    home.run(["pack", "export", &ids[0], bundle]).success();
    assert!(home.run(["pack", "export", &ids[0], bundle]).failure(1).contains("cannot create"));
    let refused = other.run(["pack", "import", bundle]);
    assert!(refused.stderr().contains("--source-key"), "{}", refused.stderr());
    assert!(refused.failure(1).contains("foreign key"));
    // The key of the file opens nothing else, the store's key does not open the file, and both are for their owner alone.
    let store_key = home.path("keys").join("packs.key");
    let store_key = store_key.to_str().expect("a path");
    assert!(
        other
            .run(["pack", "import", "--trust", "--source-key", store_key, bundle])
            .failure(1)
            .contains("foreign key")
    );
    let key = format!("{bundle}.key");
    #[cfg(unix)]
    for file in [bundle, &key] {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = std::fs::metadata(file).expect("there").permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{file}");
    }
    let packs = home.path("packs");
    let with_its_key =
        other.run(["pack", "ls", "--packs", packs.to_str().expect("a path"), "--pack-key-file", &key]);
    assert!(with_its_key.failure(1).contains("foreign key"));
    // What somebody else has sealed is not taken by accident.
    let untrusted = other.run(["pack", "import", "--source-key", &key, bundle]);
    assert!(untrusted.stderr().contains("model file"), "{}", untrusted.stderr());
    assert!(untrusted.failure(2).contains("--trust"));
    let imported = other.run(["pack", "import", "--trust", "--pin", "--source-key", &key, bundle]).success();
    let packs = listed(&other);
    assert_eq!(packs.len(), 1);
    assert_eq!(packs[0]["id"], imported.trim());
    assert_eq!(packs[0]["pinned"], true);
    assert_ne!(packs[0]["id"], ids[0], "names are keyed");
    assert!(other.run(["pack", "verify"]).stderr().contains("1 packs are whole"));
    // A store looked at with another store's key.
    let packs = home.path("packs");
    let foreign = other.run(["pack", "ls", "--packs", packs.to_str().expect("a path")]);
    assert!(foreign.stderr().contains("--pack-key-file"), "{}", foreign.stderr());
    assert!(foreign.failure(1).contains("foreign key"));
}

#[test]
fn keys_rotate_and_are_revoked() {
    let home = Home::new();
    let id = fill(&home, &[600]).remove(0);
    let shown = home.run(["pack", "key", "show"]).success();
    assert!(shown.contains("epoch  1") && shown.contains("seals"), "{shown}");
    home.run(["pack", "key", "rotate"]).success();
    home.run(["pack", "verify", &id]).success();
    let revoked = home.run(["pack", "key", "revoke", "1"]);
    assert!(revoked.stderr().contains("never be read again"), "{}", revoked.stderr());
    assert!(revoked.success().contains("revoked"));
    let ran = home.run(["pack", "ls"]);
    assert!(ran.stderr().contains("1 refused: revoked_key"), "{}", ran.stderr());
    assert_eq!(ran.success(), "");
    home.run(["pack", "rm", &id]).success();
    assert_eq!(fill(&home, &[600]), [id], "names do not depend on epochs");
    home.run(["pack", "key", "minimum", "2"]).success();
    assert!(home.run(["pack", "key", "revoke", "2"]).failure(1).contains("epoch to revoke"));
}

#[test]
fn a_store_that_is_sealed_anew_survives_a_revocation() {
    let home = Home::new();
    let id = fill(&home, &[600]).remove(0);
    let rotated = home.run(["pack", "key", "rotate", "--reseal"]);
    assert!(rotated.stderr().contains("1 packs and 0 sessions"), "{}", rotated.stderr());
    home.run(["pack", "key", "revoke", "1"]).success();
    assert_eq!(listed(&home)[0]["id"], id);
    assert!(home.run(["pack", "verify"]).stderr().contains("1 packs are whole"));
}

#[test]
fn a_store_without_its_catalog_is_said_kept_and_recovered() {
    let home = Home::new();
    let ids = fill(&home, &[600, 700]);
    let catalog = home.path("packs").join("catalog");
    std::fs::write(&catalog, "").expect("write");
    for arguments in [&["pack", "ls"][..], &["pack", "verify"], &["pack", "gc"], &["pack", "rm", "--all"]] {
        let ran = home.run(arguments.iter().copied());
        assert!(ran.stderr().contains("muser pack recover"), "{arguments:?}: {}", ran.stderr());
    }
    let recovered = home.run(["pack", "recover"]);
    assert!(recovered.stderr().contains("2 packs"), "{}", recovered.stderr());
    let mut found: Vec<_> = listed(&home).iter().map(|pack| pack["id"].to_string()).collect();
    let mut expected: Vec<_> = ids.iter().map(|id| format!("\"{id}\"")).collect();
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
    assert!(home.run(["pack", "verify"]).stderr().contains("2 packs are whole"));
    // An old copy, in any folder and with any key file.
    let old = std::fs::read(&catalog).expect("read");
    home.run(["pack", "rm", &ids[0]]).success();
    std::fs::write(&catalog, old).expect("write");
    let ran = home.run(["pack", "ls"]);
    assert!(ran.stderr().contains("rolled back"), "{}", ran.stderr());
    assert_eq!(ran.success(), "");
    home.run(["pack", "accept"]).success();
    assert_eq!(listed(&home).len(), 1);
}

/// The first file below a folder, by name.
fn first_file(folder: &Path) -> std::path::PathBuf {
    let mut paths: Vec<_> =
        std::fs::read_dir(folder).expect("list").map(|entry| entry.expect("entry").path()).collect();
    paths.sort();
    if paths[0].is_dir() { first_file(&paths[0]) } else { paths.remove(0) }
}
