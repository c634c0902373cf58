//! The library against a plain model of what it promises.

#[cfg(unix)]
mod aside;
mod bundle;
#[cfg(unix)]
mod catalogs;
mod golden;
mod hostile;
mod keys;
#[cfg(unix)]
mod kills;
#[cfg(unix)]
mod power_cuts;
mod upkeep;

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use muser_kv::{BLOCK_LEN, KvGroup, PositionKey};
use proptest::prelude::*;

use super::*;
use crate::KeyRing;
use crate::store::MemoryStore;
use crate::testing::{identity, library, options, prompt, publish, publish_with, restore};

fn keys() -> KeyRing {
    KeyRing::generate().expect("random bytes")
}

#[test]
fn what_was_published_is_found_and_restored_after_a_restart() {
    let (store, keys) = (MemoryStore::new(), keys());
    let first = library(&store, &keys);
    let scope = first.scope(identity(), "");
    let units = prompt(5 * BLOCK_LEN, 0, 1);
    assert!(first.longest(&scope, &units, units.len(), true).is_none());
    let published = publish(&first, &scope, &units).expect("published");
    assert!(!published.existed);
    drop(first);
    let again = library(&store, &keys);
    let scope = again.scope(identity(), "");
    let plan = again.longest(&scope, &units, units.len() - 1, true).expect("found");
    assert_eq!(plan.positions, 4 * BLOCK_LEN);
    // A row at 1,024 sees the 511 positions before it: all of block 3 and all but one of block 2.
    let expected: Vec<_> =
        (0..4).map(|i| (KvGroup::Full, i)).chain((2..4).map(|i| (KvGroup::Sliding, i))).collect();
    let found: Vec<_> = plan.segments.iter().map(|segment| (segment.group, segment.index)).collect();
    assert_eq!(found, expected);
    restore(&again, &scope, &units, &plan).expect("restored");
    let counters = again.counters().snapshot();
    assert_eq!((counters.lookups, counters.hits, counters.hit_positions), (1, 1, 1024));
    assert_eq!(counters.fetched_segments, 6);
    assert_eq!(again.packs().len(), 1);
    assert_eq!(again.pack(published.id).expect("there").positions, 5 * BLOCK_LEN);
}

#[test]
fn a_prompt_that_diverges_gets_the_common_part() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    publish(&library, &scope, &prompt(20_000, 0, 0)).expect("published");
    let other = prompt(15_000, 10_000, 7);
    let plan = library.longest(&scope, &other, other.len() - 1, true).expect("found");
    assert_eq!(plan.positions, 9_984);
    restore(&library, &scope, &other, &plan).expect("restored");
}

#[test]
fn an_unfinished_block_serves_whoever_begins_with_its_rows() {
    let (store, keys) = (MemoryStore::new(), keys());
    let first = library(&store, &keys);
    let scope = first.scope(identity(), "");
    let units = prompt(10_001, 0, 0);
    publish(&first, &scope, &units).expect("published");
    drop(first);
    let library = library(&store, &keys);
    fn check(library: &Library, scope: &Scope, units: &[PositionKey], most: usize, expected: usize) {
        let plan = library.longest(scope, units, most, false).expect("found");
        assert_eq!(plan.positions, expected, "most {most}");
        restore(library, scope, units, &plan).expect("restored");
        let whole = library.longest(scope, units, most, true).expect("found");
        assert_eq!(whole.positions, 9_984);
        let (last, stored) = (plan.segments.last().expect("segments"), 17);
        assert_eq!((last.index, last.positions), (39, stored));
    }
    check(&library, &scope, &units, 10_001, 10_001);
    check(&library, &scope, &units, 10_000, 10_000);
    check(&library, &scope, &prompt(12_000, 10_001, 3), 11_999, 10_001);
    check(&library, &scope, &prompt(12_000, 9_990, 3), 11_999, 9_990);
}

#[test]
fn a_pack_is_found_by_its_name_too() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(700, 0, 9);
    let id = publish(&library, &scope, &units).expect("published").id;
    let (found, plan) = library.plan_of(&scope, id).expect("a plan");
    assert_eq!((found, plan.positions), (units, 700));
    let mut other = identity();
    other.tokenizer[0] ^= 1;
    let refused = library.plan_of(&library.scope(other, ""), id).expect_err("another tokenizer");
    assert_eq!(refused.refusal(), Some(&Refusal::ForeignModel { field: "tokenizer" }));
    let refused = library.plan_of(&library.scope(identity(), "B"), id).expect_err("another tenant");
    assert_eq!(refused.refusal(), Some(&Refusal::ForeignModel { field: "tenant" }));
    assert_eq!(PackId::parse(&id.to_string()), Some(id));
}

#[test]
fn segments_are_written_once_whoever_needs_them() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(8192, 0, 0);
    let mut cuts = 0;
    for cut in (2048..=8192).step_by(BLOCK_LEN) {
        publish(&library, &scope, &units[..cut]).expect("published");
        cuts += 1;
    }
    let counters = library.counters().snapshot();
    assert_eq!(counters.published_packs, cuts);
    assert_eq!(counters.published_segments, 2 * 32);
    let unique = 32 * (8_192 + 10_240);
    assert_eq!(counters.published_bytes, unique);
    // Each pack held all of the one before.
    assert_eq!(library.packs().len(), 1);
    for boundary in [1, 2, 3, 17, 32] {
        let most = boundary * BLOCK_LEN;
        let plan = library.longest(&scope, &units, most, true).expect("found");
        assert_eq!(plan.positions, most);
        restore(&library, &scope, &units, &plan).expect("restored");
    }
}

#[test]
fn publishing_again_changes_nothing() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(1000, 0, 0);
    let first = publish(&library, &scope, &units).expect("published");
    let held = store.usage().expect("usage").held_bytes;
    for _ in 0..100 {
        let again = publish(&library, &scope, &units).expect("published");
        assert_eq!(again, Published { id: first.id, existed: true });
    }
    assert_eq!(store.usage().expect("usage").held_bytes, held);
    assert_eq!(library.packs().len(), 1);
    library.remove(first.id).expect("removed");
    assert_eq!(store.usage().expect("usage").held_bytes, 0);
}

#[test]
fn a_publication_that_is_dropped_leaves_nothing() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(1000, 0, 0);
    let mut publication = library.begin_publish(&scope, &units).expect("begun");
    let wanted = publication.wanted();
    assert_eq!(wanted.len(), 8);
    assert_eq!(wanted[3], Wanted { group: KvGroup::Full, index: 3, positions: 1000 - 768 });
    publication.put(KvGroup::Full, 0, &vec![1; 8192]).expect("put");
    assert!(store.usage().expect("usage").held_bytes > 8192);
    assert_eq!(
        publication.put(KvGroup::Full, 4, &vec![1; 8192]).expect_err("no such block").counter_name(),
        "caller"
    );
    assert_eq!(
        publication.put(KvGroup::Full, 1, &[1; 8191]).expect_err("too short").counter_name(),
        "caller"
    );
    assert_eq!(publication.commit(false).expect_err("incomplete").counter_name(), "caller");
    assert_eq!(store.usage().expect("usage").held_bytes, 0);
}

#[test]
fn a_pack_without_any_window_is_not_published() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(2048, 0, 0);
    let refused = publish_with(&library, &scope, &units, false, |_| false).expect_err("useless");
    assert_eq!(refused.counter_name(), "caller");
    publish_with(&library, &scope, &units, false, |index| index >= 6).expect("the last window is enough");
    let plan = library.longest(&scope, &units, 2048, true).expect("found");
    assert_eq!((plan.positions, plan.segments.len()), (2048, 10));
    assert!(library.longest(&scope, &units, 2047, true).is_none());
}

#[test]
fn tenants_and_representations_do_not_see_each_other() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "A");
    let units = prompt(1024, 0, 0);
    publish(&library, &scope, &units).expect("published");
    assert!(library.longest(&scope, &units, 1024, true).is_some());
    assert!(library.longest(&library.scope(identity(), "B"), &units, 1024, true).is_none());
    assert!(library.longest(&library.scope(identity(), ""), &units, 1024, true).is_none());
    let mut eight_bit = identity();
    eight_bit.representation.kv_type = "q8_0".into();
    assert_eq!(eight_bit.semantic(), identity().semantic());
    assert_ne!(eight_bit.digest(), identity().digest());
    let unlike = || library.counters().snapshot().unlike;
    assert_eq!(unlike(), 0, "other tenants' packs are nobody's business");
    assert!(library.longest(&library.scope(eight_bit.clone(), "A"), &units, 1024, true).is_none());
    assert_eq!(unlike(), 1, "the tenant has it, in another KV type");
    assert!(library.longest(&library.scope(eight_bit, "A"), &prompt(1024, 0, 9), 1024, true).is_none());
    assert_eq!(unlike(), 1, "another prompt is simply not there");
    // What one tenant stores is not shared with another: presence would tell.
    let before = library.counters().snapshot().published_segments;
    publish(&library, &library.scope(identity(), "B"), &units).expect("published");
    assert_eq!(library.counters().snapshot().published_segments, before + 8);
}

#[test]
fn a_caller_may_choose_the_segments_it_lacks() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(8 * BLOCK_LEN, 0, 0);
    publish_with(&library, &scope, &units, false, |index| index != 1).expect("published");
    let chain = scope.chain(&units);
    let stored = library.stored(&chain);
    let expected: Vec<_> = (0..8).map(|index| (true, index != 1)).collect();
    assert_eq!(stored, expected);
    let plan = library.plan(&chain, &scope, 8, 5..8, 6..8).expect("a plan");
    assert_eq!(plan.segments.len(), 5);
    restore(&library, &scope, &units, &plan).expect("restored");
    assert!(library.plan(&chain, &scope, 8, 0..8, 0..8).is_none(), "a sliding segment is missing");
    assert!(library.plan(&chain, &scope, 9, 0..9, 8..8).is_none(), "there is no ninth block");
}

/// Several threads fetch a plan's segments into their places in `memory`, until the first failure of each.
fn fetch_all(
    library: &Library,
    scope: &Scope,
    plan: &Plan,
    memory: &mut [u8],
    cancel: &AtomicBool,
) -> Result<(), PackError> {
    let mut rest = memory;
    let mut jobs = Vec::new();
    for segment in &plan.segments {
        let (out, left) = rest.split_at_mut(segment.bytes);
        rest = left;
        jobs.push((segment, out));
    }
    let share = jobs.len().div_ceil(4);
    std::thread::scope(|threads| {
        let fetching: Vec<_> = jobs
            .chunks_mut(share)
            .map(|jobs| {
                threads.spawn(move || {
                    jobs.iter_mut()
                        .try_for_each(|(segment, out)| library.fetch_unless(scope, segment, out, cancel))
                })
            })
            .collect();
        fetching.into_iter().try_for_each(|one| one.join().expect("no panic"))
    })
}

#[test]
fn many_segments_are_fetched_by_several_threads_and_can_be_stopped() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(32 * BLOCK_LEN, 0, 0);
    publish(&library, &scope, &units).expect("published");
    let plan = library.longest(&scope, &units, units.len(), true).expect("found");
    let mut memory = vec![0; plan.bytes()];
    let never = AtomicBool::new(false);
    fetch_all(&library, &scope, &plan, &mut memory, &never).expect("fetched");
    let mut at = 0;
    for segment in &plan.segments {
        let expected = crate::testing::rows(&scope, &units, segment.group, segment.index);
        assert!(memory[at..at + segment.bytes] == expected);
        at += segment.bytes;
    }
    // Who has cancelled gets nothing.
    memory.fill(0x5a);
    let cancelled = AtomicBool::new(true);
    let stopped = fetch_all(&library, &scope, &plan, &mut memory, &cancelled).expect_err("stopped");
    assert_eq!(stopped.counter_name(), "cancelled");
    assert!(memory.iter().all(|byte| *byte == 0x5a));
    let last = plan.segments[30].id.object();
    store.delete(&last).expect("deleted");
    let failed = fetch_all(&library, &scope, &plan, &mut memory, &never).expect_err("one is missing");
    assert_eq!(failed.refusal(), Some(&Refusal::MissingSegment));
}

#[test]
fn a_restore_stops_within_50_ms_at_any_moment() {
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(32 * BLOCK_LEN, 0, 0);
    publish(&library, &scope, &units).expect("published");
    let plan = library.longest(&scope, &units, units.len(), true).expect("found");
    let mut memory = vec![0; plan.bytes()];
    // Cancelled at any moment of restores that follow each other.
    for delay_us in [0, 100, 1_000, 3_000, 10_000, 30_000] {
        let cancel = AtomicBool::new(false);
        let took = std::thread::scope(|threads| {
            let (library, scope, plan, memory, cancel) = (&library, &scope, &plan, &mut memory, &cancel);
            let restores = threads.spawn(move || {
                while fetch_all(library, scope, plan, memory, cancel).is_ok() {}
                Instant::now()
            });
            std::thread::sleep(Duration::from_micros(delay_us));
            cancel.store(true, std::sync::atomic::Ordering::SeqCst);
            let cancelled = Instant::now();
            restores.join().expect("no panic").saturating_duration_since(cancelled)
        });
        assert!(took < Duration::from_millis(50), "{took:?}");
    }
}

#[test]
fn a_restore_is_cancelled_between_two_chunks() {
    /// Has its restore cancelled by the first chunk that comes.
    struct Cancelling<'a> {
        bytes: usize,
        lent: Vec<std::ops::Range<usize>>,
        cancel: &'a AtomicBool,
    }
    impl Place for Cancelling<'_> {
        fn bytes(&self) -> usize {
            self.bytes
        }

        fn lend(&mut self, range: std::ops::Range<usize>, fill: &mut dyn FnMut(&mut [u8])) -> bool {
            fill(&mut vec![0; range.len()]);
            self.lent.push(range);
            self.cancel.store(true, std::sync::atomic::Ordering::SeqCst);
            true
        }
    }
    let (store, keys) = (MemoryStore::new(), keys());
    let library = library(&store, &keys);
    let scope = library.scope(identity(), "");
    let units = prompt(BLOCK_LEN, 0, 0);
    publish(&library, &scope, &units).expect("published");
    let plan = library.longest(&scope, &units, units.len(), true).expect("found");
    let segment = plan.segments[0];
    assert!(segment.bytes > 4096, "it has several chunks");
    let cancel = AtomicBool::new(false);
    let mut place = Cancelling { bytes: segment.bytes, lent: Vec::new(), cancel: &cancel };
    let failed = library.fetch_into(&scope, &segment, &mut place, &cancel).expect_err("cancelled");
    assert_eq!(failed.counter_name(), "cancelled");
    assert_eq!(place.lent.len(), 1);
    assert_eq!(place.lent[0], 0..4096);
}

#[derive(Clone, Debug)]
struct Plot {
    /// Length, position of divergence, seed, sliding blocks that are kept.
    published: Vec<(usize, usize, u64, u32)>,
    queries: Vec<(usize, usize, u64)>,
}

fn plot() -> impl Strategy<Value = Plot> {
    let one = (300_usize..3000, 0_usize..3000, 0_u64..4);
    let published = prop::collection::vec((one.clone(), any::<u32>()), 1..8);
    let published = published.prop_map(|list| {
        list.into_iter().map(|((len, from, seed), keep)| (len, from / 256 * 200, seed, keep)).collect()
    });
    let queries = prop::collection::vec(one, 1..12)
        .prop_map(|list| list.into_iter().map(|(len, from, seed)| (len, from / 256 * 200, seed)).collect());
    (published, queries).prop_map(|(published, queries)| Plot { published, queries })
}

/// The furthest place that the promise allows, by looking at everything.
fn expected(stored: &[(Vec<PositionKey>, u32)], query: &[PositionKey], tails: bool, window: usize) -> usize {
    let has = |index: usize, sliding: bool| {
        let end = (index + 1) * BLOCK_LEN;
        let shares =
            |units: &[PositionKey]| units.len() >= end && query.len() >= end && units[..end] == query[..end];
        stored.iter().any(|(units, keep)| shares(units) && (!sliding || keep >> index & 1 == 1))
    };
    let whole = (0..query.len() / BLOCK_LEN).take_while(|&index| has(index, false)).count();
    let window_is_there = |boundary: usize, position: usize| {
        let first = ((position + 1).saturating_sub(window) / BLOCK_LEN).min(boundary);
        (first..boundary).all(|index| has(index, true))
    };
    let mut best = 0;
    for boundary in 0..=whole {
        let start = boundary * BLOCK_LEN;
        if window_is_there(boundary, start) {
            best = best.max(start);
        }
        for (units, keep) in stored {
            let is_tail = units.len() / BLOCK_LEN == boundary && units[..start] == query[..start];
            if tails && is_tail && keep >> boundary & 1 == 1 {
                let same = units[start..].iter().zip(&query[start..]).take_while(|(a, b)| a == b).count();
                if same > 0 && window_is_there(boundary, start + same) {
                    best = best.max(start + same);
                }
            }
        }
    }
    best
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Lookups find exactly the furthest place, restarts change nothing, and what is restored is what was computed.
    #[test]
    fn lookups_find_the_furthest_place(plot in plot(), supersede: bool) {
        let (store, keys) = (MemoryStore::new(), keys());
        let options = LibraryOptions { supersede, ..options() };
        let open = || Library::open(Arc::new(store.clone()), keys.clone(), options.clone()).expect("open");
        let library = open();
        let scope = library.scope(identity(), "");
        let mut stored: Vec<(Vec<PositionKey>, u32)> = Vec::new();
        for (len, from, seed, keep) in plot.published {
            let units = prompt(len, from, seed);
            let kept = |index: usize| keep >> index & 1 == 1;
            match publish_with(&library, &scope, &units, false, kept) {
                Ok(_) => stored.push((units, keep)),
                Err(error) => prop_assert_eq!(error.counter_name(), "caller"),
            }
        }
        let tails = !supersede;
        for library in [library, open()] {
            for (len, from, seed) in &plot.queries {
                let query = prompt(*len, *from, *seed);
                let plan = library.longest(&scope, &query, query.len(), !tails);
                let found = plan.as_ref().map_or(0, |plan| plan.positions);
                prop_assert_eq!(found, expected(&stored, &query, tails, 512));
                if let Some(plan) = plan {
                    restore(&library, &scope, &query, &plan).expect("restored");
                }
            }
        }
    }
}
