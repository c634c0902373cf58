//! Whom this node asks, and whom it serves.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use muser_backend::arith::attention::Digits;
use muser_handoff::{
    Answer, Component, Digest, Facts, Fetch, Fetching, Hello, Limits, Load, NodeKey, Nonce, Peer, PeerState,
    Peers, Plane, Planes, Quote, Reason, Sink,
};
use muser_kv::{BLOCK_LEN, CacheScope, KvGroup};

use crate::consumer::Consumer;
use crate::seats::{MOST_HASHES, Shared};
use crate::{NodeOptions, NodeUse, ProducerOptions};

fn facts() -> Facts {
    let plane = |group| Plane {
        group,
        component: Component::Target,
        layers: 1,
        heads: 1,
        dim: 32,
        digits: Digits::One,
    };
    Facts {
        serves_prefill: true,
        serves_sessions: false,
        max_positions: 10_000,
        identity: [7; 32],
        draft: [0; 32],
        semantic: [9; 32],
        window: 2048,
        planes: Planes::new(vec![plane(KvGroup::Full), plane(KvGroup::Sliding)]).expect("a table"),
        route: "exact-1/kv8".into(),
        build: "muser test".into(),
        parts: Vec::new(),
    }
}

fn peer(number: u8) -> Peer {
    Peer { name: format!("n{number}").into(), key: NodeKey([number; 32]) }
}

struct Known(Vec<PeerState>);

impl Peers for Known {
    fn list(&self) -> Vec<PeerState> {
        self.0.clone()
    }

    fn tenant(&self, _: &CacheScope) -> Digest {
        [0; 32]
    }

    fn quote(&self, _: &str, _: Quote, _: Answer) {}

    fn fetch(&self, _: &str, _: Fetch, _: Arc<dyn Sink>) -> Arc<dyn Fetching> {
        unreachable!("nobody is chosen")
    }
}

/// A peer that could read a prompt, with so many rows before it, but for what `change` does.
fn state(number: u8, queued_rows: u32, change: impl FnOnce(&mut PeerState, &mut Hello)) -> PeerState {
    let limits = Limits { may_prefill: true, transfers: 1, rows_a_minute: 0 };
    let mut hello = facts().hello(Nonce([1; 16]), (0, 1), limits, NodeKey([0; 32]));
    let mut state = PeerState {
        peer: peer(number),
        address: None,
        may_prefill: true,
        connected: true,
        hello: None,
        load: Some((Load { queued_rows, ..Load::default() }, Duration::ZERO)),
        round_trip: None,
        link_rate: None,
        fetching: 0,
        giving: 0,
        last_fault: None,
    };
    change(&mut state, &mut hello);
    state.hello = Some(Arc::new(hello));
    state
}

/// Names of those that are asked about a prompt of 10,000 positions.
fn asked(peers: Vec<PeerState>, options: NodeOptions, rejected: Option<&str>) -> Vec<String> {
    let nodes = NodeUse::default();
    rejected.inspect(|name| nodes.reject(name));
    let (tell, _hear) = mpsc::channel();
    let consumer = Consumer::new(Arc::new(Known(peers)), facts(), options, nodes, tell);
    let chosen = consumer.nodes_for(10_000, Instant::now());
    chosen.iter().map(|state| state.peer.name.to_string()).collect()
}

#[test]
fn the_least_busy_are_asked_first_and_no_more_than_so_many() {
    let peers = || vec![state(1, 500, |_, _| ()), state(2, 0, |_, _| ()), state(3, 70, |_, _| ())];
    assert_eq!(asked(peers(), NodeOptions::default(), None), ["n2", "n3", "n1"]);
    let two = NodeOptions { most_nodes: 2, ..NodeOptions::default() };
    assert_eq!(asked(peers(), two, None), ["n2", "n3"]);
}

#[test]
fn each_thing_that_a_node_lacks_is_enough_not_to_ask_it() {
    let all = NodeOptions::default;
    assert_eq!(asked(vec![state(1, 0, |_, _| ())], all(), None), ["n1"], "nothing is lacking");
    type Change = fn(&mut PeerState, &mut Hello);
    let cases: [(&str, Change); 6] = [
        ("a connection", |state, _| state.connected = false),
        ("time", |state, _| {
            state.load = Some((Load { draining: true, ..Load::default() }, Duration::ZERO));
        }),
        ("the right", |_, hello| hello.serves_prefill = false),
        ("room", |_, hello| hello.max_positions = 9_999),
        ("a draft's window", |_, hello| hello.window = 2047),
        ("the same weights", |_, hello| hello.identity = [8; 32]),
    ];
    for (what, change) in cases {
        assert!(asked(vec![state(1, 0, change)], all(), None).is_empty(), "without {what}");
    }
    assert!(asked(vec![state(1, 0, |_, _| ())], all(), Some("n1")).is_empty(), "wrong bits");
    let others = NodeOptions { only: Some(vec!["n2".into()]), ..all() };
    assert_eq!(asked(vec![state(1, 0, |_, _| ()), state(2, 9, |_, _| ())], others, None), ["n2"]);
}

fn shared(most: u32, most_of_a_peer: u32) -> Arc<Shared> {
    Arc::new(Shared {
        engine: OnceLock::new(),
        facts: facts(),
        options: ProducerOptions { most, most_of_a_peer, ..ProducerOptions::default() },
        counters: crate::figures::Counters::default(),
        places: AtomicU32::new(0),
        draining: AtomicBool::new(false),
        state: std::sync::Mutex::default(),
    })
}

#[test]
fn places_are_as_many_as_the_limits_say_and_come_back() {
    let shared = shared(3, 2);
    let begin = |number, series| shared.begin(&peer(number), Nonce([series; 16]));
    let take = |number, series| begin(number, series).unwrap_or_else(|reason| panic!("{reason:?}"));
    let mut seats = vec![take(1, 1), take(1, 2)];
    assert_eq!(begin(1, 3).err(), Some(Reason::Limit), "of one peer");
    seats.push(take(2, 1));
    for _ in 0..5 {
        assert_eq!(begin(2, 2).err(), Some(Reason::Busy), "of all");
    }
    assert_eq!(shared.places.load(Ordering::Relaxed), 3, "what was refused takes no place");
    seats.remove(0);
    // The series goes on: what it had begun before gives way.
    seats.push(take(1, 2));
    let replaced: Vec<bool> = seats.iter().map(|seat| seat.replaced.load(Ordering::Relaxed)).collect();
    assert_eq!(replaced, [true, false, false]);
    seats.clear();
    assert_eq!(shared.places.load(Ordering::Relaxed), 0);
    shared.draining.store(true, Ordering::Relaxed);
    assert_eq!(begin(3, 1).err(), Some(Reason::Draining));
}

#[test]
fn what_was_read_longest_ago_is_forgotten_and_is_nobody_elses() {
    let shared = shared(1, 1);
    let hash = |number: usize| {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.to_le_bytes());
        hash
    };
    let known = |number, hashes: &[usize]| {
        let hashes: Vec<Digest> = hashes.iter().map(|&number| hash(number)).collect();
        shared.known(NodeKey([number; 32]), &hashes)
    };
    shared.remember(NodeKey([1; 32]), (0..MOST_HASHES).map(hash).collect());
    assert_eq!(known(1, &[0, 1, MOST_HASHES - 1]), 3 * BLOCK_LEN);
    assert_eq!(known(2, &[0]), 0, "another peer's");
    shared.remember(NodeKey([1; 32]), vec![hash(MOST_HASHES)]);
    assert_eq!((known(1, &[0]), known(1, &[1, MOST_HASHES])), (0, 2 * BLOCK_LEN));
}
