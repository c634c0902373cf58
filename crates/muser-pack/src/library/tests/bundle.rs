//! Packs carried from store to store in a file.

use super::*;

fn exported(library: &Library, id: PackId) -> (Vec<u8>, KeyRing) {
    let mut bundle = Vec::new();
    let (bytes, keys) = library.export(id, &mut bundle).expect("exported");
    assert_eq!(bytes, bundle.len() as u64);
    (bundle, keys)
}

fn import(library: &Library, bundle: &[u8], keys: &KeyRing, tenant: &str) -> Result<Published, PackError> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("pack");
    std::fs::write(&path, bundle).expect("written");
    library.import(&path, keys, tenant, false)
}

#[test]
fn a_pack_moves_to_a_store_with_another_key() {
    let (here, there) = (keys(), keys());
    let source = library(&MemoryStore::new(), &here);
    let scope = source.scope(identity(), "");
    let units = prompt(1500, 0, 3);
    let id = publish_with(&source, &scope, &units, false, |index| index != 2).expect("published").id;
    let (bundle, once) = exported(&source, id);
    let target = library(&MemoryStore::new(), &there);
    for wrong in [&there, &here] {
        let refused = import(&target, &bundle, wrong, "").expect_err("the wrong key");
        assert_eq!(refused.counter_name(), "foreign_key");
    }
    // Its keys open nothing else: neither the store nor a second bundle of the same pack.
    assert_ne!(once.id(), here.id());
    let (second, _) = exported(&source, id);
    assert_eq!(
        import(&target, &second, &once, "").expect_err("another bundle").counter_name(),
        "foreign_key"
    );
    let names = |bytes: &[u8]| (0..6).map(|i| bytes[32 + 48 * i..64 + 48 * i].to_vec()).collect::<Vec<_>>();
    assert!(names(&bundle).iter().all(|name| !names(&second).contains(name)), "names tell nothing either");
    let published = import(&target, &bundle, &once, "").expect("imported");
    assert_ne!(published.id, id, "names are keyed");
    let scope = target.scope(identity(), "");
    let plan = target.longest(&scope, &units, 1500, false).expect("found");
    assert_eq!(plan.positions, 1500);
    restore(&target, &scope, &units, &plan).expect("restored");
    assert!(import(&target, &bundle, &once, "").expect("imported again").existed);
    let for_b = import(&target, &bundle, &once, "B").expect("imported for another tenant");
    assert!(!for_b.existed && for_b.id != published.id);
    let same = library(&MemoryStore::new(), &here);
    assert_eq!(import(&same, &bundle, &once, "").expect("imported").id, id);
}

#[test]
fn changed_bundles_are_refused() {
    let keys = keys();
    let source = library(&MemoryStore::new(), &keys);
    let id = publish(&source, &source.scope(identity(), ""), &prompt(300, 0, 3)).expect("published").id;
    let (bundle, keys) = exported(&source, id);
    let refused = |bytes: &[u8]| {
        let target = library(&MemoryStore::new(), &keys);
        let error = import(&target, bytes, &keys, "").expect_err("a changed bundle is taken");
        assert_eq!(target.packs(), []);
        assert_eq!(target.store().usage().expect("usage").held_bytes, 0, "something was left behind");
        error.refusal().unwrap_or_else(|| panic!("{error}")).name()
    };
    for len in (0..bundle.len()).step_by(37) {
        let expected = if len < 8 { "not_a_pack" } else { "truncated" };
        assert_eq!(refused(&bundle[..len]), expected, "{len} bytes");
    }
    assert_eq!(refused(&[&bundle[..], &[0]].concat()), "trailing");
    let padding = 16 + 5 * 48..4096;
    for offset in (0..bundle.len()).step_by(41).filter(|offset| !padding.contains(offset)) {
        let mut bytes = bundle.clone();
        bytes[offset] ^= 1 << (offset % 8);
        let in_gap = import(&library(&MemoryStore::new(), &keys), &bytes, &keys, "").is_ok();
        // Only zeros between objects belong to nobody.
        assert!(!in_gap || bundle[offset] == 0, "byte {offset} is not checked");
        if !in_gap {
            refused(&bytes);
        }
    }
}
