//! What publishing and restoring need beyond the state itself, seen by the system: the highest resident size.
//!
//! One test, alone in its process. `MUSER_TEST_LONG=1` takes 8 GiB instead of 200 MB.

#![cfg(target_os = "linux")]

use std::sync::{Arc, Mutex};

use muser_kv::{KvGroup, PositionKey};
use muser_pack::{DirStore, Identity, KeyRing, Library, LibraryOptions, Scope};

use muser_testkit::{peak_resident_bytes, reset_peak, resident_bytes};

const MIB: usize = 1 << 20;

/// Runs `work` and says by how much the resident size was higher meanwhile than before.
fn peak_of(work: impl FnOnce()) -> usize {
    assert!(reset_peak(), "this is Linux");
    let before = resident_bytes().expect("it says so");
    work();
    peak_resident_bytes().expect("it says so").saturating_sub(before) as usize
}

fn publish(library: &Library, scope: &Scope, units: &[PositionKey]) {
    let mut publication = library.begin_publish(scope, units).expect("begun");
    let mut bytes = vec![0_u8; scope.block_bytes(KvGroup::Sliding)];
    let first_sliding = scope.first_sliding_block(units.len());
    for wanted in publication.wanted() {
        if wanted.group == KvGroup::Sliding && wanted.index < first_sliding {
            continue;
        }
        let bytes = &mut bytes[..scope.block_bytes(wanted.group)];
        bytes.fill((wanted.index % 251) as u8);
        // No two segments are the same.
        bytes[..8].copy_from_slice(&(wanted.index as u64).to_le_bytes());
        publication.put(wanted.group, wanted.index, bytes).expect("put");
    }
    publication.commit(false).expect("committed");
}

#[test]
fn publishing_and_restoring_need_little_beyond_the_state() {
    let long = muser_testkit::is_long();
    let blocks = if long { 2_500 } else { 32 };
    let folder = tempfile::tempdir().expect("a folder");
    let store = Arc::new(DirStore::open(folder.path(), None).expect("a store"));
    let options = LibraryOptions::default();
    let library = Library::open(store, KeyRing::generate().expect("random"), options).expect("it opens");
    let scope = library.scope(Identity::example_full_size(), "");
    let units: Vec<_> = (0..blocks * 256).map(|i| PositionKey::token(i as u32)).collect();
    let publishing = peak_of(|| publish(&library, &scope, &units));
    let plan = library.longest(&scope, &units, units.len(), true).expect("found");
    let bytes = plan.bytes();
    eprintln!("published {} MiB with {} MiB", bytes / MIB, publishing / MIB);
    // The block in the caller's hands and its sealed copy are 10 MiB each.
    assert!(publishing < 32 * MIB, "{publishing} bytes");
    // What the engine has for it; pieces of it are written again and again, so that the long run needs no 8 GiB.
    let mut memory = vec![1_u8; bytes.min(256 * MIB)];
    let restoring = peak_of(|| {
        let mut at = 0;
        while at < plan.segments.len() {
            let (mut jobs, mut rest) = (Vec::new(), &mut memory[..]);
            while let Some(segment) = plan.segments.get(at).filter(|segment| segment.bytes <= rest.len()) {
                let (out, left) = rest.split_at_mut(segment.bytes);
                jobs.push((segment, out));
                rest = left;
                at += 1;
            }
            let jobs = Mutex::new(jobs.into_iter());
            let next = || jobs.lock().expect("no panic").next();
            std::thread::scope(|threads| {
                for _ in 0..4 {
                    threads.spawn(|| {
                        while let Some((segment, out)) = next() {
                            library.fetch(&scope, segment, out).expect("restored");
                        }
                    });
                }
            });
        }
    });
    eprintln!("restored {} MiB with {} KiB beyond them", bytes / MIB, restoring / 1024);
    assert!(restoring < 8 * MIB, "{restoring} bytes");
}
