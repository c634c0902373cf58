//! Sets of numbers, and plans, against what they mean.

use std::collections::BTreeSet;

use muser_backend::arith::attention::Digits;
use muser_kv::KvGroup;
use muser_testkit::Rng;

use super::{plane, span};
use crate::{Component, Plan, Plane, Planes, RangeSet, Span};

fn random(rng: &mut Rng) -> (RangeSet, BTreeSet<u32>) {
    let (mut set, mut numbers) = (RangeSet::default(), BTreeSet::new());
    for _ in 0..rng.below(12) {
        let start = rng.below(60) as u32;
        let range = start..start + rng.below(9) as u32;
        numbers.extend(range.clone());
        set.insert(range);
    }
    (set, numbers)
}

#[test]
fn sets_are_sets() {
    let mut rng = Rng(1);
    for _ in 0..3000 {
        let ((a, x), (b, y)) = (random(&mut rng), random(&mut rng));
        assert!(a.iter().eq(x.iter().copied()));
        assert!(a.union(&b).iter().eq(x.union(&y).copied()));
        assert!(a.minus(&b).iter().eq(x.difference(&y).copied()));
        assert_eq!((a.len(), a.is_empty()), (x.len() as u64, x.is_empty()));
        assert!((0..80).all(|number| a.contains(number) == x.contains(&number)));
        // One encoding: no empty range, none that touches the next.
        assert!(a.ranges().iter().all(|range| !range.is_empty()));
        assert!(a.ranges().windows(2).all(|pair| pair[0].end < pair[1].start));
    }
}

#[test]
fn every_chunk_of_a_plan_has_one_number() {
    let mut rng = Rng(2);
    for case in 0..200 {
        let large =
            Plane { heads: 4, dim: 128, digits: Digits::Two, ..plane(KvGroup::Full, Component::Target, 2) };
        let full = if case % 3 == 0 { large } else { plane(KvGroup::Full, Component::Target, 2) };
        let mut table = vec![full, plane(KvGroup::Sliding, Component::Target, 3)];
        if case % 2 == 0 {
            table.push(plane(KvGroup::Sliding, Component::Draft, 1));
        }
        let cut = 1 + rng.below(3000) as u32;
        let stages: Vec<u32> =
            (1..cut.div_ceil(256)).filter(|_| rng.one_in(3)).map(|block| block * 256).collect();
        let plan = Plan::new(Planes::new(table).expect("planes"), span(cut, &stages)).expect("a plan");
        let mut places = Vec::new();
        let mut bytes = 0;
        for number in 0..plan.chunks() {
            let place = plan.place(number).expect("there are so many");
            assert_eq!(plan.number(&place), Ok(number));
            bytes += plan.payload_bytes(&place);
            assert!(plan.payload_bytes(&place) <= crate::MAX_CHUNK_BYTES);
            assert!(plan.block(place.group, place.block).contains(&number));
            places.push(place);
        }
        assert!(places.is_sorted_by(|a, b| a < b), "the canonical order");
        assert_eq!(plan.place(plan.chunks()), None);
        // All rows of the full group, each once.
        let rows: u64 = u64::from(cut) * 2 * full.row_bytes() as u64;
        let of_full: u64 = places
            .iter()
            .filter(|place| place.group == KvGroup::Full)
            .map(|place| plan.payload_bytes(place) as u64)
            .sum();
        assert_eq!(of_full, rows);
        assert!(bytes as u64 >= rows);
        // A resumption at a boundary needs all full blocks and the window's.
        for &boundary in stages.iter().chain([&cut]) {
            let needed = plan.needed_at(boundary);
            for (number, place) in places.iter().enumerate() {
                let first = match place.group {
                    KvGroup::Full => 0,
                    KvGroup::Sliding => (boundary + 1).saturating_sub(super::WINDOW) / 256,
                };
                let is_needed = (first..boundary.div_ceil(256)).contains(&place.block);
                assert_eq!(needed.contains(number as u32), is_needed, "{place:?} at {boundary}");
            }
        }
        let of_all = RangeSet::from(0..plan.chunks());
        assert_eq!(plan.needed_for(&stages), of_all);
        assert_eq!(plan.bytes_of(&of_all), bytes as u64);
    }
}

#[test]
fn spans_that_nobody_asks_for_are_refused() {
    let bad = [
        Span { cut: 0, stages: vec![], window: 1 },
        Span { cut: 1, stages: vec![], window: 0 },
        Span { cut: 600, stages: vec![100], window: 1 },
        Span { cut: 600, stages: vec![512, 256], window: 1 },
        Span { cut: 600, stages: vec![256, 256], window: 1 },
        Span { cut: 512, stages: vec![512], window: 1 },
        Span { cut: crate::MAX_POSITIONS + 1, stages: vec![], window: 1 },
        Span { cut: 1, stages: vec![], window: crate::MAX_POSITIONS + 1 },
        Span { cut: 100_000, stages: (1..66).map(|block| block * 256).collect(), window: 1 },
    ];
    for span in bad {
        assert!(span.check().is_err(), "{span:?}");
    }
}
