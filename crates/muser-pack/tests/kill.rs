//! A process that publishes is killed at random moments: what was published before is whole, and the store opens without
//! help. Ten kills by default, 200 with `MUSER_TEST_LONG=1`.

#![cfg(unix)]

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use muser_kv::{KvGroup, Unit};
use muser_pack::{
    DirStore, Geometry, Identity, KeyFile, LayerKind, Library, LibraryOptions, PackError, Positions,
    Representation, Scope,
};

const BUDGET_BYTES: u64 = 24 << 20;
const FOLDER: &str = "MUSER_TEST_PACK_FOLDER";

fn identity() -> Identity {
    Identity {
        weights: [1; 32],
        architecture: Vec::new(),
        quantisation: String::new(),
        adapters: Vec::new(),
        tokenizer: [2; 32],
        template: [3; 32],
        positions: Positions {
            rotary_base_bits: 0,
            pairing: "neox".into(),
            scaling: "none".into(),
            rotating: vec![false, true],
            origin: 0,
        },
        geometry: Geometry {
            layers: vec![LayerKind::Full, LayerKind::Sliding],
            window: 512,
            kv_heads: 2,
            head_dim: 128,
            block_len: 256,
        },
        scalars: Vec::new(),
        context_policy: "refuse".into(),
        media: None,
        draft: None,
        representation: Representation {
            route: "test".into(),
            kv_type: "f16".into(),
            layout: "planes".into(),
            row_bytes: 512,
            full_block_bytes: 256 << 10,
            sliding_block_bytes: 512 << 10,
        },
    }
}

fn open(folder: &Path) -> (Library, Scope) {
    let keys = KeyFile::open_or_create(&folder.join("keys").join("packs.key")).expect("keys");
    let store = DirStore::open(folder.join("packs"), Some(BUDGET_BYTES)).expect("the folder");
    let options =
        LibraryOptions { anchor: Some(folder.join("keys").join("seen")), ..LibraryOptions::default() };
    let library = Library::open(Arc::new(store), keys, options).expect("the store opens unaided");
    let scope = library.scope(identity(), "");
    (library, scope)
}

/// Prompts share their beginnings, as those of a conversation do.
fn prompt(number: u64) -> Vec<Unit> {
    let len = 300 + (number % 5) as usize * 200;
    (0..len)
        .map(|i| Unit::token(if i < 256 { i as u32 } else { (number as u32 + 1) * 7919 + i as u32 }))
        .collect()
}

fn rows(scope: &Scope, units: &[Unit], group: KvGroup, index: usize) -> Vec<u8> {
    let end = ((index + 1) * 256).min(units.len());
    let mut hasher = blake3::Hasher::new_keyed(&scope.chain(&units[..end])[index]);
    hasher.update(&[u8::from(group == KvGroup::Full)]);
    let mut bytes = vec![0; scope.block_bytes(group)];
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

fn publish(library: &Library, scope: &Scope, units: &[Unit], pinned: bool) -> Result<(), PackError> {
    let mut publication = library.begin_publish(scope, units)?;
    for wanted in publication.wanted() {
        publication.put(wanted.group, wanted.index, &rows(scope, units, wanted.group, wanted.index))?;
    }
    publication.commit(pinned).map(drop)
}

/// Every pack of the store is whole, and a lookup restores what was computed.
fn check(folder: &Path, number: u64) {
    let (library, scope) = open(folder);
    let refused: Vec<_> =
        library.counters().snapshot().refused().filter(|(name, _)| *name != "replayed").collect();
    assert!(refused.is_empty(), "after a kill: {refused:?}");
    let usage = library.store().usage().expect("usage");
    assert!(usage.held_bytes <= BUDGET_BYTES, "{usage:?}");
    let units = prompt(number);
    let plan = library.longest(&scope, &units, units.len(), false).expect("the pack that was acknowledged");
    assert_eq!(plan.positions, units.len(), "prompt {number}");
    for segment in &plan.segments {
        let mut bytes = vec![0; segment.bytes];
        library.fetch(&scope, segment, &mut bytes).expect("whole");
        // An unfinished block may be another prompt's that goes on.
        if segment.index * 256 + segment.positions <= units.len() {
            assert!(bytes == rows(&scope, &units, segment.group, segment.index));
        }
    }
    drop(plan);
    for pack in library.packs() {
        let report = library.verify(pack.id, &mut |_| {}).expect("readable");
        assert_eq!(report.refused, []);
    }
}

/// Publishes for ever and says what it has published; run by the test below in a process of its own.
#[test]
fn publisher() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let (library, scope) = open(Path::new(&folder));
    let first: u64 = std::env::var("MUSER_TEST_FIRST").expect("a number").parse().expect("a number");
    for number in first.. {
        match publish(&library, &scope, &prompt(number), false) {
            // The test reads this line: from here on the pack must survive.
            Ok(()) => println!("published {number}"),
            Err(error) => assert_eq!(error.counter_name(), "full", "{error}"),
        }
    }
}

#[test]
fn killed_publishers_never_harm_what_was_published() {
    let long = std::env::var_os("MUSER_TEST_LONG").is_some_and(|value| value == "1");
    let kills = if long { 200 } else { 10 };
    let folder = tempfile::tempdir().expect("a folder");
    let mut next = 0_u64;
    let mut random = 0x1234_5678_u64;
    for kill in 0..kills {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "publisher", "--nocapture"])
            .env(FOLDER, folder.path())
            .env("MUSER_TEST_FIRST", next.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the publisher starts");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (send, receive) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The harness prints its own words before the first.
                if let Some((_, number)) = line.split_once("published ") {
                    let _ = send.send(number.trim().parse::<u64>().expect("a number"));
                }
            }
        });
        let mut last = receive.recv_timeout(Duration::from_mins(1)).expect("something is published");
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        std::thread::sleep(Duration::from_micros(random >> 40 & 0xffff));
        child.kill().expect("killed");
        child.wait().expect("gone");
        reader.join().expect("no panic");
        last = receive.try_iter().last().unwrap_or(last);
        check(folder.path(), last);
        next = last + 1;
        assert!(folder.path().join("packs").exists(), "kill {kill}");
    }
    let (library, _) = open(folder.path());
    library.collect_garbage().expect("nobody is active");
    assert!(!library.packs().is_empty());
    let partial = std::fs::read_dir(folder.path().join("packs").join("partial")).expect("list").count();
    assert_eq!(partial, 0);
}
