//! A pack written when the format was settled: every later build reads it, and so does a decoder in another language.
//!
//! `MUSER_UPDATE_GOLDEN=1` writes it anew, which is right only with a new version of the format.

use std::path::{Path, PathBuf};

use super::*;
use crate::KeyFile;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn units() -> Vec<Unit> {
    prompt(300, 0, 77)
}

/// The key as a private file: a checkout does not keep modes.
fn private_key(folder: &Path) -> PathBuf {
    let path = folder.join("packs.key");
    std::fs::copy(golden("kvpack-v1.key"), &path).expect("copied");
    #[cfg(unix)]
    {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, mode).expect("chmod");
    }
    path
}

#[test]
fn the_golden_pack_is_read() {
    let folder = tempfile::tempdir().expect("a folder");
    if std::env::var_os("MUSER_UPDATE_GOLDEN").is_some() {
        let path = folder.path().join("new.key");
        KeyFile::open_or_create(&path).expect("a key");
        let (keys, _) = KeyFile::update(&path, KeyRing::rotate).expect("rotated");
        let library = library(&MemoryStore::new(), &keys);
        let id = publish(&library, &library.scope(identity(), ""), &units()).expect("published").id;
        let mut bundle = Vec::new();
        library.export(id, &mut bundle).expect("exported");
        std::fs::create_dir_all(golden("")).expect("a folder");
        std::fs::write(golden("kvpack-v1.bundle"), bundle).expect("written");
        std::fs::copy(path, golden("kvpack-v1.key")).expect("copied");
    }
    let keys = KeyFile::open(&private_key(folder.path())).expect("the golden key");
    let library = library(&MemoryStore::new(), &keys);
    let published = library.import(&golden("kvpack-v1.bundle"), &keys, "", false).expect("the golden pack");
    // The name of the first object of the bundle: what is written today has the name that it had then.
    let bundle = std::fs::read(golden("kvpack-v1.bundle")).expect("read");
    assert_eq!(published.id.0[..], bundle[32..64]);
    let scope = library.scope(identity(), "");
    let plan = library.longest(&scope, &units(), 300, false).expect("found");
    assert_eq!(plan.positions, 300);
    restore(&library, &scope, &units(), &plan).expect("restored");
}

#[test]
fn a_decoder_in_another_language_agrees() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats/kvpack_decode.py");
    let decode = |bundle: &Path| {
        let mut python = std::process::Command::new("python3");
        python.args(["-B".as_ref(), script.as_os_str(), bundle.as_os_str()]);
        python.arg(golden("kvpack-v1.key")).output()
    };
    let decoded = match decode(&golden("kvpack-v1.bundle")) {
        Ok(decoded) => decoded,
        Err(error) => {
            eprintln!("SKIPPED: python3 does not start: {error}");
            return;
        }
    };
    assert!(decoded.status.success(), "{}", String::from_utf8_lossy(&decoded.stderr));
    let json = String::from_utf8(decoded.stdout).expect("text");
    let folder = tempfile::tempdir().expect("a folder");
    let keys = KeyFile::open(&private_key(folder.path())).expect("the golden key");
    let library = library(&MemoryStore::new(), &keys);
    let scope = library.scope(identity(), "");
    let mut tokens = blake3::Hasher::new();
    for unit in units() {
        tokens.update(&unit.to_le_bytes());
    }
    let mut expected = vec![tokens.finalize().to_hex().to_string(), crate::name::hex(scope.digest())];
    for (group, name) in [(KvGroup::Full, "full"), (KvGroup::Sliding, "sliding")] {
        for index in 0..2 {
            let rows = blake3::hash(&crate::testing::rows(&scope, &units(), group, index)).to_hex();
            expected.push(format!("{{\"group\": \"{name}\", \"block\": {index}, \"rows\": \"{rows}\"}}"));
        }
    }
    for part in &expected {
        assert!(json.contains(part), "{part} is missing in {json}");
    }
    // The same, authenticated only.
    let options = LibraryOptions { encrypt: false, ..LibraryOptions::default() };
    let plain = Library::open(Arc::new(MemoryStore::new()), keys.clone(), options).expect("opened");
    let id = publish(&plain, &plain.scope(identity(), ""), &units()).expect("published").id;
    let mut bundle = Vec::new();
    plain.export(id, &mut bundle).expect("exported");
    let path = folder.path().join("plain");
    std::fs::write(&path, &bundle).expect("written");
    let decoded = decode(&path).expect("python3");
    assert!(decoded.status.success(), "{}", String::from_utf8_lossy(&decoded.stderr));
    let json = String::from_utf8(decoded.stdout).expect("text");
    for part in &expected {
        assert!(json.contains(part), "{part} is missing in {json}");
    }
    let last = bundle.len() - 1;
    bundle[last] ^= 1;
    std::fs::write(&path, &bundle).expect("written");
    assert!(!decode(&path).expect("python3").status.success(), "plain bytes are not checked");
    // It is strict as well: one changed bit anywhere but in the gaps.
    let bundle = std::fs::read(golden("kvpack-v1.bundle")).expect("read");
    for offset in [3, 20, 40, 4096 + 17, 4096 + 70, 8192 + 100, bundle.len() - 1] {
        let mut bytes = bundle.clone();
        bytes[offset] ^= 4;
        let path = folder.path().join("changed");
        std::fs::write(&path, bytes).expect("written");
        assert!(!decode(&path).expect("python3").status.success(), "byte {offset} is not checked");
    }
}
