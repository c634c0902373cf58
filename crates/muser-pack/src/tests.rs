//! Identities, key files, fingerprints.

use std::path::Path;

use muser_kv::BLOCK_LEN;
use proptest::prelude::*;

use crate::testing::{identity, library, prompt, publish};
use crate::{
    Adapter, DraftModel, FileStamp, FingerprintCache, Identity, KeyFile, KeyRing, LayerKind, Media,
    MemoryStore, Refusal, TensorBytes, WeightsRoot,
};

type Change = (&'static str, fn(&mut Identity));

/// One mutation at least of everything that is bound.
const CHANGES: &[Change] = &[
    ("weights", |of| of.weights[0] ^= 1),
    ("weights", |of| of.weights[31] ^= 0x80),
    ("architecture", |of| of.architecture.push(0)),
    ("architecture", |of| of.architecture[0] ^= 1),
    ("quantisation", |of| of.quantisation.push('!')),
    ("quantisation", |of| of.quantisation = "Q8_0; activations Q8".into()),
    ("adapters", |of| of.adapters.push(Adapter { digest: [0; 32], scale_bits: 0 })),
    ("adapters", |of| of.adapters = vec![Adapter { digest: [0; 32], scale_bits: 1 }]),
    ("adapters", |of| of.adapters = vec![Adapter { digest: [1; 32], scale_bits: 0 }]),
    ("adapters", |of| {
        let one = |n| Adapter { digest: [n; 32], scale_bits: 0 };
        of.adapters = vec![one(1), one(2)];
    }),
    ("adapters", |of| {
        let one = |n| Adapter { digest: [n; 32], scale_bits: 0 };
        of.adapters = vec![one(2), one(1)];
    }),
    ("tokenizer", |of| of.tokenizer[7] ^= 2),
    ("chat template", |of| of.template[9] ^= 4),
    ("positions", |of| of.positions.rotary_base_bits ^= 1),
    ("positions", |of| of.positions.pairing = "interleaved".into()),
    ("positions", |of| of.positions.scaling = "linear 2".into()),
    ("positions", |of| of.positions.rotating[0] ^= true),
    ("positions", |of| of.positions.rotating.push(false)),
    ("positions", |of| of.positions.origin = 1),
    ("geometry", |of| of.geometry.window = 511),
    ("geometry", |of| of.geometry.layers.swap(0, 1)),
    ("geometry", |of| of.geometry.layers.push(LayerKind::Full)),
    ("geometry", |of| of.geometry.layers[1] = LayerKind::Full),
    ("geometry", |of| of.geometry.kv_heads = 2),
    ("geometry", |of| of.geometry.head_dim = 16),
    ("scalars", |of| of.scalars[0].1 ^= 1),
    ("scalars", |of| of.scalars[0].0.push('2')),
    ("scalars", |of| of.scalars.push(("soft cap".into(), 0))),
    ("scalars", |of| of.scalars.clear()),
    ("context policy", |of| of.context_policy = "shift 1/2".into()),
    ("media", |of| of.media = Some(Media { projector: [0; 32], preprocessing: [0; 32] })),
    ("media", |of| of.media = Some(Media { projector: [1; 32], preprocessing: [0; 32] })),
    ("media", |of| of.media = Some(Media { projector: [0; 32], preprocessing: [1; 32] })),
    ("draft model", |of| of.draft = Some(DraftModel { weights: [0; 32], layers: 1, window: 64 })),
    ("draft model", |of| of.draft = Some(DraftModel { weights: [1; 32], layers: 1, window: 64 })),
    ("draft model", |of| of.draft = Some(DraftModel { weights: [0; 32], layers: 2, window: 64 })),
    ("draft model", |of| of.draft = Some(DraftModel { weights: [0; 32], layers: 1, window: 65 })),
    ("numeric route", |of| of.representation.route = "scalar-2".into()),
    ("KV type", |of| of.representation.kv_type = "bf16".into()),
    ("layout", |of| of.representation.layout = "planes-2".into()),
    ("row bytes", |of| of.representation.row_bytes = 32),
    ("full block bytes", |of| of.representation.full_block_bytes = 4096),
    ("sliding block bytes", |of| of.representation.sliding_block_bytes = 8192),
];

#[test]
fn every_part_of_an_identity_is_bound() {
    let (store, keys) = (MemoryStore::new(), KeyRing::generate().expect("random"));
    let library = library(&store, &keys);
    let base = identity();
    let scope = library.scope(base.clone(), "");
    let units = prompt(2 * BLOCK_LEN, 0, 1);
    let id = publish(&library, &scope, &units).expect("published").id;
    let mut digests = vec![base.digest()];
    assert!(CHANGES.len() >= 30);
    for (field, change) in CHANGES {
        let mut changed = base.clone();
        change(&mut changed);
        digests.push(changed.digest());
        assert_eq!(Identity::decode(&changed.encode()).as_ref(), Ok(&changed), "{field}");
        assert_eq!(base.first_difference(&changed), Some(*field));
        let how =
            ["numeric route", "KV type", "layout", "row bytes", "full block bytes", "sliding block bytes"];
        assert_eq!(base.semantic() == changed.semantic(), how.contains(field), "{field}");
        let scope = library.scope(changed, "");
        assert!(library.longest(&scope, &units, units.len(), false).is_none(), "{field}");
        let refused = library.plan_of(&scope, id).expect_err(field);
        assert_eq!(refused.refusal(), Some(&Refusal::ForeignModel { field }));
        assert!(refused.to_string().contains(field), "{refused}");
    }
    let count = digests.len();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), count, "two identities have equal digests");
    assert!(library.longest(&scope, &units, units.len(), false).is_some());
    assert_eq!(base.first_difference(&base), None);
}

#[test]
fn identities_are_decoded_strictly() {
    let mut full = identity();
    full.adapters.push(Adapter { digest: [4; 32], scale_bits: 5 });
    full.media = Some(Media { projector: [6; 32], preprocessing: [7; 32] });
    full.draft = Some(DraftModel { weights: [8; 32], layers: 1, window: 64 });
    let good = full.encode();
    assert_eq!(Identity::decode(&good), Ok(full));
    for len in 0..good.len() {
        assert!(Identity::decode(&good[..len]).is_err(), "{len} bytes");
    }
    assert!(Identity::decode(&[&good[..], &[0]].concat()).is_err());
    for offset in 0..good.len() {
        for bit in 0..8 {
            let mut bytes = good.clone();
            bytes[offset] ^= 1 << bit;
            if let Ok(decoded) = Identity::decode(&bytes) {
                assert!(decoded.encode() == bytes, "byte {offset}, bit {bit} has two encodings");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// The same text cut differently into neighbouring fields is another identity.
    #[test]
    fn field_boundaries_are_bound(text in "[ab]{0,12}", cuts in prop::array::uniform4(0_usize..13), other in prop::array::uniform4(0_usize..13)) {
        let cut = |mut cuts: [usize; 4]| {
            cuts.sort_unstable();
            let at = cuts.map(|cut| cut.min(text.len()));
            let mut of = identity();
            of.architecture = text.as_bytes()[..at[0]].to_vec();
            of.quantisation = text[at[0]..at[1]].into();
            of.positions.pairing = text[at[1]..at[2]].into();
            of.positions.scaling = text[at[2]..at[3]].into();
            of.scalars = vec![(text[at[3]..].into(), 0)];
            of
        };
        let (a, b) = (cut(cuts), cut(other));
        prop_assert_eq!(a == b, a.digest() == b.digest());
        prop_assert_eq!(a == b, a.semantic() == b.semantic());
    }

    /// Arbitrary bytes are refused without harm.
    #[test]
    fn arbitrary_bytes_are_no_identity(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Identity::decode(&bytes).is_err());
        prop_assert!(crate::manifest::Manifest::decode(&bytes).is_err());
    }
}

/// Changed encodings: most of it is as it should be, so that decoders get far. Ten million with `MUSER_TEST_LONG=1`.
#[test]
fn changed_bytes_are_refused_or_mean_themselves() {
    let inputs = if muser_testkit::is_long() { 10_000_000 } else { 20_000 };
    let scope_of = |identity: Identity| {
        let units: Vec<[u8; 8]> = (0..300_u64).map(u64::to_le_bytes).collect();
        let block = |i: u8| crate::manifest::Block {
            key: [i; 32],
            full: crate::SegmentId([i; 32]),
            sliding: (i > 0).then_some(crate::SegmentId([9; 32])),
        };
        crate::manifest::Manifest {
            tenant: [3; 16],
            identity,
            created_unix_s: 5,
            root: [4; 32],
            units,
            blocks: vec![block(0), block(1)],
        }
    };
    let identity = identity();
    let encodings = [identity.encode(), scope_of(identity).encode()];
    let mut state = 1_u64;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize) % below
    };
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        status
            .lines()
            .find(|line| line.starts_with("VmHWM"))?
            .split_whitespace()
            .nth(1)?
            .parse::<usize>()
            .ok()
    };
    let before_kib = resident();
    let mut bytes = Vec::new();
    for _ in 0..inputs {
        let which = random(2);
        bytes.clear();
        bytes.extend_from_slice(&encodings[which]);
        for _ in 0..=random(4) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] ^= 1 << random(8),
                1 => bytes[at] = [0, 1, 0x7F, 0xFF][random(4)],
                2 => bytes.truncate(at.max(1)),
                _ => bytes.insert(at, random(256) as u8),
            }
        }
        // There is exactly one encoding of everything.
        if which == 0 {
            if let Ok(identity) = Identity::decode(&bytes) {
                assert_eq!(identity.encode(), bytes);
            }
        } else if let Ok(manifest) = crate::manifest::Manifest::decode(&bytes) {
            assert_eq!(manifest.encode(), bytes);
        }
    }
    if let (Some(before), Some(after)) = (before_kib, resident()) {
        assert!(after - before < 16 << 10, "{} KiB more", after - before);
    }
}

/// What is checked is what is read: whoever swaps the file meanwhile gets a refusal or nothing.
#[cfg(unix)]
#[test]
fn a_key_file_that_is_swapped_while_it_is_opened_is_never_believed() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let keys = KeyFile::open_or_create(&at("good")).expect("created");
    KeyFile::open_or_create(&at("others")).expect("created");
    std::fs::set_permissions(at("others"), std::fs::Permissions::from_mode(0o644)).expect("chmod");
    let path = at("packs.key");
    std::fs::hard_link(at("good"), &path).expect("a link");
    let over = std::sync::atomic::AtomicBool::new(false);
    let (mut opened, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let put = |next: &Path| std::fs::rename(next, &path).expect("renamed");
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                // A link to somebody's readable keys, those keys themselves, and the good file again.
                symlink(at("others"), at("next")).expect("a link");
                put(&at("next"));
                std::fs::copy(at("others"), at("next")).expect("a copy");
                put(&at("next"));
                std::fs::hard_link(at("good"), at("next")).expect("a link");
                put(&at("next"));
            }
        });
        let begun = std::time::Instant::now();
        while (opened < 50 || refused < 50) && begun.elapsed().as_secs() < 30 {
            match KeyFile::open(&path) {
                Ok(found) => {
                    assert_eq!(found.id(), keys.id(), "somebody else's keys are believed");
                    opened += 1;
                }
                Err(_) => refused += 1,
            }
        }
        over.store(true, std::sync::atomic::Ordering::SeqCst);
    });
    assert!(opened >= 50 && refused >= 50, "{opened} opened, {refused} refused");
}

#[cfg(unix)]
#[test]
fn key_files_are_private_regular_and_whole() {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    let folder = tempfile::tempdir().expect("a folder");
    let path = KeyFile::default_path(folder.path());
    assert!(KeyFile::open(&path).is_err(), "there is none yet");
    let keys = KeyFile::open_or_create(&path).expect("created");
    let mode = |path: &Path| std::fs::metadata(path).expect("metadata").permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(path.parent().expect("a folder")), 0o700);
    assert_eq!(KeyFile::open_or_create(&path).expect("opened").id(), keys.id());
    let leftovers = std::fs::read_dir(path.parent().expect("a folder")).expect("list").count();
    assert_eq!(leftovers, 2, "the key and its lock");
    fn refused(path: &Path, expected: &str) {
        let error = KeyFile::open(path).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
        // Refused, not replaced.
        KeyFile::open_or_create(path).expect_err(expected);
    }
    let set = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("chmod");
    for loose in [0o640, 0o604, 0o660, 0o700 | 0o001] {
        set(loose);
        refused(&path, "others must have no access");
    }
    set(0o600);
    let link = folder.path().join("link");
    symlink(&path, &link).expect("a link");
    refused(&link, "symbolic link");
    refused(folder.path(), "not a regular file");
    let good = std::fs::read(&path).expect("read");
    for len in 0..good.len() {
        std::fs::write(&path, &good[..len]).expect("write");
        refused(&path, "");
    }
    for offset in 0..good.len() {
        let mut bytes = good.clone();
        bytes[offset] ^= 1 << (offset % 8);
        std::fs::write(&path, &bytes).expect("write");
        refused(&path, "");
    }
    std::fs::write(&path, [&good[..], &[0]].concat()).expect("write");
    refused(&path, "appended");
    std::fs::write(&path, &good).expect("write");
    let (rotated, epoch) = KeyFile::update(&path, KeyRing::rotate).expect("rotated");
    assert_eq!((rotated.id(), epoch), (keys.id(), 2));
    let (revoked, ()) = KeyFile::update(&path, |keys| keys.revoke(1)).expect("revoked");
    assert_eq!(KeyFile::open(&path).expect("opened").epochs(), revoked.epochs());
    assert_eq!(mode(&path), 0o600);
    let now = std::fs::read(&path).expect("read");
    let secret = &good[56 + 16..56 + 48];
    assert!(!now.windows(32).any(|bytes| bytes == secret), "a revoked secret is still in the file");
    assert!(KeyFile::update(&path, |keys| keys.revoke(2)).is_err());
    assert_eq!(std::fs::read(&path).expect("read"), now);
}

#[test]
fn processes_that_start_together_make_one_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys").join("packs.key");
    let ids: Vec<String> = std::thread::scope(|scope| {
        let open = || KeyFile::open_or_create(&path).expect("a key").id();
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(ids.iter().all(|id| *id == ids[0]));
}

#[test]
fn a_fingerprint_depends_on_every_tensor_and_not_on_their_order() {
    let tensor = |name, bytes| TensorBytes { name, kind: 2, dims: &[4, 2], bytes };
    let (a, b) = (tensor("a", &[1, 2, 3][..]), tensor("b", &[4, 5][..]));
    let root = WeightsRoot::of(&[a, b], 2);
    assert_eq!(root, WeightsRoot::of(&[b, a], 1));
    let others = [
        WeightsRoot::of(&[a], 1),
        WeightsRoot::of(&[a, b, b], 1),
        WeightsRoot::of(&[tensor("a", &[1, 2, 4]), b], 1),
        WeightsRoot::of(&[tensor("c", &[1, 2, 3]), b], 1),
        WeightsRoot::of(&[tensor("a", &[4, 5]), tensor("b", &[1, 2, 3])], 1),
        WeightsRoot::of(&[TensorBytes { kind: 3, ..a }, b], 1),
        WeightsRoot::of(&[TensorBytes { dims: &[2, 4], ..a }, b], 1),
    ];
    assert!(others.iter().all(|other| *other != root));
}

#[test]
fn remembered_fingerprints_are_those_of_unchanged_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = KeyRing::generate().expect("random");
    let model = folder.path().join("model");
    std::fs::write(&model, b"one").expect("write");
    let cache = FingerprintCache::new(folder.path().join("cache"), &keys);
    let stamp = FileStamp::of(&[&std::fs::File::open(&model).expect("opened")]).expect("a stamp");
    assert_eq!(cache.get(&stamp), None);
    let root = WeightsRoot([7; 32]);
    cache.put(&stamp, root).expect("put");
    assert_eq!(
        cache.get(&FileStamp::of(&[&std::fs::File::open(&model).expect("opened")]).expect("a stamp")),
        Some(root)
    );
    let other = FingerprintCache::new(folder.path().join("cache"), &KeyRing::generate().expect("random"));
    assert_eq!(other.get(&stamp), None);
    for entry in std::fs::read_dir(folder.path().join("cache")).expect("list") {
        let path = entry.expect("entry").path();
        let mut bytes = std::fs::read(&path).expect("read");
        bytes[3] ^= 1;
        std::fs::write(&path, bytes).expect("write");
    }
    assert_eq!(cache.get(&stamp), None, "a changed record is believed");
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(&model, b"two").expect("write");
    assert_ne!(FileStamp::of(&[&std::fs::File::open(&model).expect("opened")]).expect("a stamp"), stamp);
}

/// The table of what is met names every requirement once, and tests that exist.
#[test]
fn the_status_page_is_complete_and_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/formats/kvpack-status.md")).expect("the page");
    let groups = [
        ("ID", 5),
        ("FMT", 7),
        ("INT", 5),
        ("PUB", 7),
        ("PFX", 6),
        ("RST", 5),
        ("HND", 12),
        ("RPL", 5),
        ("PRV", 4),
        ("ENC", 6),
        ("SEC", 4),
        ("CDC", 3),
        ("OBS", 3),
        ("PERF", 7),
    ];
    let ids =
        groups.iter().flat_map(|(group, count)| (1..=*count).map(move |number| format!("{group}-{number}")));
    let mut sources = String::new();
    let mut left: Vec<_> = [
        "muser-pack",
        "muser-kv-connector",
        "muser-engine",
        "muser-handoff",
        "muser-kv",
        "muser-node",
        "muser-text",
        "muser/tests",
    ]
    .map(|name| root.join("crates").join(name))
    .into();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(std::fs::read_dir(&path).expect("list").map(|entry| entry.expect("entry").path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push_str(&std::fs::read_to_string(&path).expect("a source file"));
        }
    }
    for id in ids {
        let start = format!("| {id} |");
        let rows: Vec<_> = page.lines().filter(|line| line.starts_with(&start)).collect();
        let [row] = rows[..] else { panic!("{id} has {} rows", rows.len()) };
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, _, tests, state] = cells[..] else { panic!("{row}") };
        let known = ["met", "part", "not met"].iter().any(|known| state.starts_with(known));
        assert!(known, "{row}");
        let tests: Vec<_> =
            tests.split(',').map(|test| test.trim().trim_matches('`')).filter(|t| !t.is_empty()).collect();
        assert!(!tests.is_empty() || !state.starts_with("met"), "{id} is met without a test");
        for test in tests {
            let exists = sources.contains(&format!("fn {test}("))
                || root.join(format!("crates/muser-bench/benches/{test}.rs")).exists();
            assert!(exists, "{id} names {test}, which does not exist");
        }
    }
}

#[cfg(unix)]
#[test]
fn what_a_killed_writer_of_keys_left_is_removed_and_only_that() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("packs.key");
    let keys = KeyFile::open_or_create(&path).expect("created");
    let left = folder.path().join("packs.1234-5678.new");
    let others = ["packs.notes.new", "packs.12-x.new", "other.1-2.new", "packs.new"]
        .map(|name| folder.path().join(name));
    for place in others.iter().chain([&left]) {
        std::fs::write(place, "secrets").expect("written");
    }
    KeyFile::update(&path, KeyRing::rotate).expect("rotated");
    assert!(!left.exists(), "a copy of all secrets is left");
    assert!(others.iter().all(|place| place.exists()));
    // Also when a key is made, and a change that fails leaves nothing.
    std::fs::write(&left, "secrets").expect("written");
    std::fs::rename(&path, folder.path().join("aside")).expect("renamed");
    assert_ne!(KeyFile::open_or_create(&path).expect("created").id(), keys.id());
    assert!(!left.exists());
    KeyFile::update(&path, |keys| keys.revoke(99)).expect_err("there is no such epoch");
    let new = std::fs::read_dir(folder.path())
        .expect("list")
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(".new"));
    assert_eq!(new.count(), others.len());
}

#[cfg(unix)]
#[test]
fn only_the_file_that_was_read_is_overwritten_and_only_after_a_revocation() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("packs.key");
    KeyFile::open_or_create(&path).expect("created");
    let backup = folder.path().join("backup");
    // A rotation drops no secret: a second name of the old file goes on being a backup.
    std::fs::hard_link(&path, &backup).expect("linked");
    let before = std::fs::read(&backup).expect("read");
    KeyFile::update(&path, KeyRing::rotate).expect("rotated");
    assert_eq!(std::fs::read(&backup).expect("read"), before);
    // A revocation would leave its secret there, and says so.
    std::fs::remove_file(&backup).expect("removed");
    std::fs::hard_link(&path, &backup).expect("linked");
    let error = KeyFile::update(&path, |keys| keys.revoke(1)).expect_err("two names").to_string();
    assert!(error.contains("second name"), "{error}");
    assert!(!KeyFile::open(&path).expect("unchanged").epochs()[0].revoked);
    std::fs::remove_file(&backup).expect("removed");
    // Whoever swaps the name meanwhile does not get another file overwritten.
    let victim = folder.path().join("victim");
    std::fs::write(&victim, "precious").expect("written");
    let mut old = std::fs::File::open(&path).expect("opened");
    KeyFile::update(&path, |keys| {
        std::fs::rename(&path, folder.path().join("moved")).expect("renamed");
        std::os::unix::fs::symlink(&victim, &path).expect("linked");
        keys.revoke(1)
    })
    .expect("revoked");
    assert_eq!(std::fs::read_to_string(&victim).expect("read"), "precious");
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut old, &mut bytes).expect("read");
    assert!(!bytes.is_empty() && bytes.iter().all(|&byte| byte == 0), "the old secret is still there");
}

#[cfg(unix)]
#[test]
fn keys_are_read_whole_while_they_are_revoked() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("packs.key");
    let id = KeyFile::open_or_create(&path).expect("created").id();
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::SeqCst) {
                    assert_eq!(KeyFile::open(&path).expect("whole at every moment").id(), id);
                }
            });
        }
        for epoch in 1..60 {
            KeyFile::update(&path, KeyRing::rotate).expect("rotated");
            KeyFile::update(&path, |keys| keys.revoke(epoch)).expect("revoked");
        }
        over.store(true, std::sync::atomic::Ordering::SeqCst);
    });
}

/// What core files and other processes of the user would show: keys and prompts in plain.
#[cfg(target_os = "linux")]
#[test]
fn a_process_keeps_itself_out_of_core_files() {
    use rustix::process::{DumpableBehavior, dumpable_behavior};
    crate::keep_out_of_dumps().expect("Linux has it");
    assert_eq!(dumpable_behavior().expect("Linux has it"), DumpableBehavior::NotDumpable);
}
