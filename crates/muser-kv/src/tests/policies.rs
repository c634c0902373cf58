//! Policies that give no wrong answer when they are wrong, only a slow one: who is evicted, what is kept, what is asked for.

use super::*;

/// Blocks of `units` whose sliding part is still there.
fn with_sliding(bench: &mut Bench, units: &[PositionKey]) -> Vec<usize> {
    let held = bench.cache.pin(CacheScope::EVERYBODY, units);
    let there = held.blocks.iter().enumerate().filter(|(_, block)| block.sliding.is_some());
    let there = there.map(|(index, _)| index).collect();
    bench.cache.unpin(held);
    there
}

#[test]
fn the_block_used_longest_ago_is_evicted() {
    let known =
        |bench: &Bench, units: &[PositionKey]| bench.cache.known(CacheScope::EVERYBODY, units, units.len());
    let prompts: Vec<_> = (0..5).map(|i| tokens(i * 1000..i * 1000 + 256)).collect();
    let mut bench = Bench::new(2, 2, 256);
    for prompt in &prompts[..3] {
        assert_eq!(run(&mut bench, prompt), 0);
    }
    assert_eq!(prompts[..3].iter().map(|p| known(&bench, p)).collect::<Vec<_>>(), [0, 256, 256]);

    let mut bench = Bench::new(3, 3, 256);
    for prompt in &prompts[..3] {
        run(&mut bench, prompt);
    }
    // The oldest is used again: now the second is the oldest, and then the third.
    let longer: Vec<_> = prompts[0].iter().copied().chain(tokens(9..10)).collect();
    let live = bench.begin(&longer, 256, true);
    assert_eq!(live.kv.len(), 256);
    bench.cache.release(live.kv);
    run(&mut bench, &prompts[3]);
    assert_eq!(prompts[..4].iter().map(|p| known(&bench, p)).collect::<Vec<_>>(), [256, 0, 256, 256]);
    run(&mut bench, &prompts[4]);
    assert_eq!(prompts.iter().map(|p| known(&bench, p)).collect::<Vec<_>>(), [256, 0, 0, 256, 256]);
}

#[test]
fn under_pressure_the_window_before_an_end_keeps_its_sliding_blocks() {
    // A window of two blocks, and one more for points inside the block after.
    let mut bench = Bench::new(40, 12, 512);
    let first = tokens(0..10 * 256);
    run(&mut bench, &first);
    assert_eq!(with_sliding(&mut bench, &first), (0..10).collect::<Vec<_>>());
    // Ten blocks for another, as its window passes over them: two are free, the rest come from what nobody can resume with,
    // those of the first prompt and then its own.
    run_in_chunks(&mut bench, &tokens(50_000..50_000 + 10 * 256), 256);
    assert_eq!(with_sliding(&mut bench, &first), [7, 8, 9]);
    assert_eq!(bench.cache.known(CacheScope::EVERYBODY, &first, first.len()), first.len());
}

#[test]
fn a_prefix_is_resumable_where_all_of_its_window_can_be_had() {
    for window in [256, 257, 512, 700, 768, 769] {
        let bench = Bench::new(1, 1, window);
        let units = tokens(0..6 * 256);
        for missing in 0..6 {
            let elsewhere = |group, index| group == KvGroup::Full || index != missing;
            // A row at a boundary sees `window` positions, itself included.
            let all_there = |boundary: &usize| {
                let position = boundary * BLOCK_LEN;
                let first = (position + 1).saturating_sub(window) / BLOCK_LEN;
                !(first..*boundary).contains(&missing)
            };
            let expected = (0..=6).rev().find(all_there).expect("0 is one");
            let found = bench.cache.resumable_with(CacheScope::EVERYBODY, &units, 6, elsewhere);
            assert_eq!(found, expected, "window {window}, sliding block {missing} missing");
            let no_full = |group, index| group == KvGroup::Sliding || index != missing;
            assert_eq!(bench.cache.resumable_with(CacheScope::EVERYBODY, &units, 6, no_full), missing);
        }
    }
}

#[test]
fn a_place_inside_a_block_is_reachable_with_that_block_only() {
    let bench = Bench::new(1, 1, 512);
    let units = tokens(0..600);
    let lacking = |lacks: Option<(KvGroup, usize)>| {
        bench
            .cache
            .reachable_with(CacheScope::EVERYBODY, &units, 600, |group, index| lacks != Some((group, index)))
    };
    assert!(lacking(None));
    for index in 0..3 {
        assert!(!lacking(Some((KvGroup::Full, index))), "full {index}");
        // The row at 600 sees positions 89 to 600: all three.
        assert!(!lacking(Some((KvGroup::Sliding, index))), "sliding {index}");
    }
    assert!(lacking(Some((KvGroup::Full, 3))));
    // The row at 767 sees 256 to 767: not block 0.
    let units = tokens(0..800);
    let at = |position, lacks| {
        bench.cache.reachable_with(CacheScope::EVERYBODY, &units, position, |group, index| {
            group == KvGroup::Full || index != lacks
        })
    };
    assert!(at(767, 0) && !at(766, 0) && !at(767, 1) && !at(767, 2) && at(768, 0));
}
