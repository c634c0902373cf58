//! A pack written when the format was settled: every later build reads it, and so does a decoder in another language.
//!
//! `MUSER_UPDATE_GOLDEN=1` writes it anew, which is right only with a new version of the format.

use std::path::{Path, PathBuf};

use super::*;
use crate::manifest::Block;
use crate::{Adapter, DraftModel, KeyFile, LayerKind, Media};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn units() -> Vec<PositionKey> {
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
    let decode_with = |bundle: &Path, key: &Path| {
        let mut python = std::process::Command::new("python3");
        python.args(["-B".as_ref(), script.as_os_str(), bundle.as_os_str()]);
        python.arg(key).output()
    };
    let decode = |bundle: &Path| decode_with(bundle, &golden("kvpack-v1.key"));
    let decoded = match decode(&golden("kvpack-v1.bundle")) {
        Ok(decoded) => decoded,
        Err(error) => {
            muser_testkit::skip(muser_testkit::Need::Python, format!("python3 does not start: {error}"));
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
    let (_, once) = plain.export(id, &mut bundle).expect("exported");
    let (path, key) = (folder.path().join("plain"), folder.path().join("plain.key"));
    std::fs::write(&path, &bundle).expect("written");
    KeyFile::create(&key, &once).expect("written");
    let decoded = decode_with(&path, &key).expect("python3");
    assert!(decoded.status.success(), "{}", String::from_utf8_lossy(&decoded.stderr));
    let json = String::from_utf8(decoded.stdout).expect("text");
    for part in &expected {
        assert!(json.contains(part), "{part} is missing in {json}");
    }
    let last = bundle.len() - 1;
    bundle[last] ^= 1;
    std::fs::write(&path, &bundle).expect("written");
    assert!(!decode_with(&path, &key).expect("python3").status.success(), "plain bytes are not checked");
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

/// A manifest with everything in it that can vary.
fn generated(seed: u64) -> Manifest {
    let mut state = seed;
    let mut next = |below: u64| {
        state += 1;
        crate::testing::mix(state ^ seed << 40) % below
    };
    let digest = |n: u64| *blake3::hash(&n.to_le_bytes()).as_bytes();
    let mut of = identity();
    of.weights = digest(next(u64::MAX));
    of.architecture = (0..next(300)).map(|i| (i * seed) as u8).collect();
    of.quantisation = "Ä\u{1F98A}|".repeat(next(9) as usize);
    of.adapters = (0..next(4)).map(|i| Adapter { digest: digest(i), scale_bits: seed as u32 }).collect();
    of.positions.rotary_base_bits = next(u64::MAX);
    of.positions.rotating = (0..next(60)).map(|i| i % 3 == 1).collect();
    of.positions.origin = next(u64::MAX);
    let kind = |i: u64| if i % 4 == 3 { LayerKind::Full } else { LayerKind::Sliding };
    of.geometry.layers = (0..next(60)).map(kind).collect();
    of.geometry.window = next(1 << 32) as u32;
    of.scalars = (0..next(5)).map(|i| (format!("scalar {i}"), i ^ seed)).collect();
    of.media = (next(2) == 1).then(|| Media { projector: digest(1), preprocessing: digest(seed) });
    of.draft =
        (next(2) == 1).then(|| DraftModel { weights: digest(seed), layers: next(9) as u32, window: 512 });
    of.representation.route = format!("route {}", next(1000));
    of.representation.full_block_bytes = next(1 << 32) as u32;
    let units: Vec<_> = (0..=next(600)).map(|i| (i ^ seed << 50).to_le_bytes()).collect();
    let block = |i: u64, sliding| Block {
        key: digest(i),
        full: SegmentId(digest(i ^ seed)),
        sliding: if sliding { Some(SegmentId(digest(seed))) } else { None },
    };
    Manifest {
        tenant: std::array::from_fn(|i| i as u8 ^ seed as u8),
        identity: of,
        created_unix_s: next(u64::MAX),
        root: digest(seed + 1),
        blocks: (0..units.len().div_ceil(BLOCK_LEN) as u64).map(|i| block(i, next(2) == 1)).collect(),
        units,
    }
}

/// Two encoders, one in another language, write the same bytes for a thousand objects.
#[test]
fn an_encoder_in_another_language_agrees() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats/kvpack_decode.py");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("manifests");
    let mut bytes = Vec::new();
    for seed in 1..=1000 {
        let manifest = generated(seed);
        let encoded = manifest.encode();
        assert_eq!(Manifest::decode(&encoded).as_ref(), Ok(&manifest));
        bytes.extend_from_slice(&(encoded.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&encoded);
        bytes.extend_from_slice(&manifest.identity.digest());
    }
    let run = |bytes: &[u8]| {
        std::fs::write(&path, bytes).expect("written");
        let mut python = std::process::Command::new("python3");
        python.args(["-B".as_ref(), script.as_os_str(), "--encode".as_ref(), path.as_os_str()]).output()
    };
    let ran = match run(&bytes) {
        Ok(ran) => ran,
        Err(error) => {
            muser_testkit::skip(muser_testkit::Need::Python, format!("python3 does not start: {error}"));
            return;
        }
    };
    assert_eq!(
        String::from_utf8_lossy(&ran.stdout).trim(),
        "1000",
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    assert!(!run(&bytes).expect("python3").status.success(), "a digest is not compared");
}
