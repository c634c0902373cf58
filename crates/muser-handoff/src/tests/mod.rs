//! A made-up engine's memory, and both sides over it.

mod codec;
mod deliveries;
mod interleavings;
mod malformed;
mod network;
mod papers;
mod sets;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use muser_backend::arith::attention::Digits;
use muser_kv::{BLOCK_LEN, KvGroup};
use muser_testkit::Rng;

use crate::frame::{ChunkHead, Frame, Hello};
use crate::link::{Doing, Link};
use crate::producer::Wants;
use crate::{
    Component, Digest, Facts, Fetch, Limits, Load, NodeKey, Nonce, Part, Place, Plan, Plane, Planes,
    RangeSet, Series, Span, TransferId, Wanted,
};

#[global_allocator]
static ALLOCATOR: muser_testkit::CountingAllocator = muser_testkit::CountingAllocator;

pub(crate) const IDENTITY: Digest = [7; 32];
pub(crate) const DRAFT: Digest = [8; 32];
pub(crate) const WINDOW: u32 = 300;

pub(crate) fn plane(group: KvGroup, component: Component, layers: u16) -> Plane {
    Plane { group, component, layers, heads: 1, dim: 4, digits: Digits::One }
}

pub(crate) fn planes(draft: bool) -> Planes {
    let mut all =
        vec![plane(KvGroup::Full, Component::Target, 2), plane(KvGroup::Sliding, Component::Target, 3)];
    if draft {
        all.push(Plane { heads: 2, ..plane(KvGroup::Sliding, Component::Draft, 1) });
    }
    Planes::new(all).expect("a table")
}

pub(crate) fn facts(draft: bool) -> Arc<Facts> {
    Arc::new(Facts {
        serves_prefill: true,
        serves_sessions: false,
        max_positions: 100_000,
        identity: IDENTITY,
        draft: if draft { DRAFT } else { [0; 32] },
        semantic: [9; 32],
        window: WINDOW,
        planes: planes(draft),
        route: "exact-1/kv8".into(),
        build: "muser test".into(),
        parts: vec![Part { name: "weights".into(), shown: String::new(), digest: [1; 32] }],
    })
}

pub(crate) fn hello_of(facts: &Facts) -> Hello {
    facts.hello(Nonce([3; 16]), (0, 1), LIMITS, NodeKey([5; 32]))
}

pub(crate) const LIMITS: Limits = Limits { may_prefill: true, transfers: 16, rows_a_minute: 0 };

/// Two ends that have said HELLO.
pub(crate) fn links(consumer_draft: bool, producer_draft: bool) -> (Link, Link) {
    let (ours, theirs) = (facts(consumer_draft), facts(producer_draft));
    let mut a = Link::new(Arc::clone(&ours), LIMITS, Duration::ZERO);
    let mut b = Link::new(Arc::clone(&theirs), LIMITS, Duration::ZERO);
    a.frame(Frame::Hello(Box::new(hello_of(&theirs))), Duration::ZERO);
    b.frame(Frame::Hello(Box::new(hello_of(&ours))), Duration::ZERO);
    (a, b)
}

pub(crate) fn ids(count: u32) -> Arc<[u32]> {
    (0..count).map(|i| i * 7919 % 50_000).collect()
}

pub(crate) fn span(cut: u32, stages: &[u32]) -> Span {
    Span { cut, stages: stages.to_vec(), window: WINDOW }
}

pub(crate) fn series(cut: u32, stages: &[u32], draft: bool, has: impl Fn(KvGroup, u32) -> bool) -> Series {
    let wanted = Wanted {
        identity: IDENTITY,
        draft: if draft { DRAFT } else { [0; 32] },
        tenant: [0; 32],
        ids: ids(cut),
        planes: planes(draft),
        span: span(cut, stages),
    };
    Series::new(Nonce([11; 16]), wanted, has).expect("a series")
}

pub(crate) fn fetch_of(series: Series) -> Fetch {
    Fetch { series, budget: Duration::from_hours(1), priority: 128 }
}

/// The bytes of a layer of a block as an engine has them: rows behind the prefix's end are zero.
pub(crate) fn layer_bytes(plane: &Plane, place: &Place, rows: usize) -> Vec<u8> {
    let group = u64::from(place.group == KvGroup::Sliding);
    let seed =
        group << 48 | u64::from(place.block) << 20 | u64::from(place.layer) << 2 | place.component as u64;
    let mut rng = Rng(seed);
    let whole: Vec<u8> = (0..plane.layer_bytes()).map(|_| rng.next_u64() as u8 | 1).collect();
    let mut packed = Vec::new();
    plane.gather(&whole, 0..rows, &mut packed);
    let mut layer = vec![0; plane.layer_bytes()];
    plane.scatter(&packed, &mut layer, 0..rows);
    layer
}

/// The rows of a chunk as the producer sends them.
pub(crate) fn rows_of(plan: &Plan, place: &Place) -> Vec<u8> {
    let plane = plan.planes().plane(place.group, place.component).expect("a plane");
    let layer = layer_bytes(plane, place, plan.block_rows(place.group, place.block));
    let mut rows = Vec::new();
    plane.gather(&layer, place.row_range(), &mut rows);
    rows
}

/// Layers that a consumer has written, by group, block, component, layer.
pub(crate) type Memory = BTreeMap<(KvGroup, u32, Component, u16), Vec<u8>>;

pub(crate) fn write(memory: &mut Memory, plan: &Plan, place: &Place, rows: &[u8]) {
    let plane = plan.planes().plane(place.group, place.component).expect("a plane");
    let key = (place.group, place.block, place.component, place.layer);
    let layer = memory.entry(key).or_insert_with(|| vec![0; plane.layer_bytes()]);
    plane.scatter(rows, layer, place.row_range());
}

/// Does the memory have exactly what lacked, byte for byte?
pub(crate) fn assert_complete(memory: &Memory, plan: &Plan, sent: &RangeSet) {
    let mut expected = Memory::new();
    for number in sent.iter() {
        let place = plan.place(number).expect("a chunk");
        write(&mut expected, plan, &place, &rows_of(plan, &place));
    }
    assert_eq!(*memory, expected);
    for ((group, block, component, layer), bytes) in memory {
        let plane = plan.planes().plane(*group, *component).expect("a plane");
        let place = Place {
            group: *group,
            block: *block,
            component: *component,
            layer: *layer,
            first_row: 0,
            rows: 0,
        };
        assert_eq!(*bytes, layer_bytes(plane, &place, plan.block_rows(*group, *block)));
    }
}

/// The producer's next chunk, if it may send one: frames that go with it come behind.
pub(crate) fn give(
    link: &mut Link,
    transfer: TransferId,
    number: u32,
) -> (Option<(ChunkHead, Vec<u8>)>, Vec<Doing>) {
    let Some(producer) = link.producer(transfer) else { return (None, Vec::new()) };
    let wants = producer.wants(number);
    if matches!(wants, Wants::Nothing | Wants::Wait) {
        return (None, Vec::new());
    }
    let plan = Arc::clone(producer.plan());
    let place = plan.place(number).expect("a chunk");
    let rows = rows_of(&plan, &place);
    let digest = producer.key().chunk(&place, &rows);
    let head = producer.head(number, digest).expect("a head");
    let doing = link.with_producer(transfer, |producer| producer.sent(number, digest, Duration::ZERO));
    ((wants == Wants::Rows).then_some((head, rows)), doing)
}

/// Takes a chunk as the transport does.
pub(crate) fn take(
    link: &mut Link,
    memory: &mut Memory,
    head: &ChunkHead,
    rows: &[u8],
    now: Duration,
) -> Vec<Doing> {
    let number = match link.admit(head, rows.len(), now) {
        Ok(Some(number)) => number,
        Ok(None) => return Vec::new(),
        Err(doing) => return doing,
    };
    let consumer = link.consumer(head.transfer).expect("it was admitted");
    let plan = Arc::clone(consumer.plan());
    if consumer.key().chunk(&head.place, rows) != head.digest {
        return link.with_consumer(head.transfer, |consumer| consumer.refuse(crate::Refusal::ChunkDigest));
    }
    write(memory, &plan, &head.place, rows);
    link.with_consumer(head.transfer, |consumer| consumer.written(number, head.digest, now))
}

pub(crate) fn sends(doing: &[Doing]) -> Vec<Frame> {
    let sent = doing
        .iter()
        .filter_map(|doing| if let Doing::Send(frame) = doing { Some(frame.clone()) } else { None });
    sent.collect()
}

pub(crate) fn refusals(doing: &[Doing]) -> Vec<&'static str> {
    let refused = doing
        .iter()
        .filter_map(|doing| if let Doing::Refused(why) = doing { Some(why.name()) } else { None });
    refused.collect()
}

pub(crate) fn load() -> Load {
    Load { running: 1, places: 4, rates: vec![(0, 1000), (8192, 700)], ..Load::default() }
}

#[test]
fn rows_are_taken_out_of_a_layer_and_put_back() {
    let mut rng = Rng(5);
    for plane in [
        plane(KvGroup::Full, Component::Target, 1),
        Plane { heads: 3, dim: 12, digits: Digits::Two, ..plane(KvGroup::Full, Component::Target, 1) },
    ] {
        let whole: Vec<u8> = (0..plane.layer_bytes()).map(|_| rng.next_u64() as u8).collect();
        for _ in 0..50 {
            let mut cuts = [rng.below(BLOCK_LEN + 1), rng.below(BLOCK_LEN + 1)];
            cuts.sort_unstable();
            let mut again = vec![0; whole.len()];
            let mut bytes = 0;
            for rows in [0..cuts[0], cuts[0]..cuts[1], cuts[1]..BLOCK_LEN] {
                let mut packed = Vec::new();
                plane.gather(&whole, rows.clone(), &mut packed);
                assert_eq!(packed.len(), rows.len() * plane.row_bytes());
                bytes += packed.len();
                plane.scatter(&packed, &mut again, rows);
            }
            assert_eq!((bytes, &again), (whole.len(), &whole));
        }
    }
}

#[test]
fn a_layer_of_the_30b_model_is_one_chunk_and_larger_ones_are_cut_by_rows() {
    let of = |heads, digits| Plane { heads, dim: 128, digits, ..plane(KvGroup::Full, Component::Target, 13) };
    assert_eq!((of(2, Digits::Two).layer_bytes(), of(2, Digits::Two).chunk_rows()), (266_240, 256));
    assert_eq!((of(2, Digits::One).layer_bytes(), of(2, Digits::One).chunk_rows()), (135_168, 256));
    assert_eq!((of(4, Digits::Two).chunk_rows(), of(8, Digits::Two).chunk_rows()), (128, 64));
    assert!(64 * of(8, Digits::Two).row_bytes() <= crate::MAX_CHUNK_BYTES);
}
