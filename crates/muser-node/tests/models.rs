//! Where the rows of a prefix land ([`Landing`]): a stream writes into memory that the engine has lent and may take back at any
//! moment. In every order of what stream and engine do: the files of the product, with the engine's end of a fetch, over a model of the
//! standard library. Each model finds the fault that is put in.
#![allow(dead_code, reason = "the files are compiled for what is modelled of them")]
#![allow(unreachable_pub, reason = "as in the product, where they are handed on")]
#![allow(clippy::arc_with_non_send_sync, reason = "the threads of a model take turns on one")]
#![allow(unsafe_code, reason = "cells that the models read and write")]

#[path = "../../muser-engine/src/prefix/delivery.rs"]
mod delivery;
#[path = "../src/landing.rs"]
mod landing;

mod prefix {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RestoreFailure {
        Store,
        Damaged,
    }
}

mod sync {
    pub(crate) use std::sync::PoisonError;

    pub(crate) use muser_testkit::model::*;

    pub(crate) use crate::delivery::{BlockPlace, BlockReceiver};
}

use std::mem::ManuallyDrop;
use std::sync::Arc;

use delivery::{BlockReceiver, DeliveryCell};
use landing::Landing;
use muser_backend::LentBlock;
use muser_backend::arith::attention::Digits;
use muser_handoff::{Component, Place, Plane, Planes};
use muser_kv::KvGroup;
use muser_testkit::model::{Seed, UnsafeCell, check, finds, spawn};

const BLOCK: (KvGroup, usize) = (KvGroup::Full, 0);

/// One layer of one head of four values: a block has 256 rows of 16 bytes, and behind them as many of a draft if there is one.
fn planes(with_draft: bool) -> Planes {
    let plane = |component| Plane {
        group: KvGroup::Full,
        component,
        layers: 1,
        heads: 1,
        dim: 4,
        digits: Digits::One,
    };
    let components: &[_] =
        if with_draft { &[Component::Target, Component::Draft] } else { &[Component::Target] };
    Planes::new(components.iter().map(|&component| plane(component)).collect()).expect("planes")
}

/// Rows of the block's layer.
fn rows(first_row: u16, rows: u16) -> Place {
    Place { group: KvGroup::Full, block: 0, component: Component::Target, layer: 0, first_row, rows }
}

/// The engine's memory: the cell tells of every use.
struct Memory {
    used: Arc<UnsafeCell<()>>,
    bytes: Vec<u8>,
    /// What it holds in the end.
    left: Arc<std::sync::Mutex<Vec<u8>>>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        *self.left.lock().expect("no panic") = std::mem::take(&mut self.bytes);
    }
}

// SAFETY: the model finds it where two threads use the cell at once.
unsafe impl Send for Memory {}

impl LentBlock for Memory {
    fn bytes(&mut self) -> &mut [u8] {
        self.used.with_mut(|_| ());
        &mut self.bytes
    }
}

/// Left as it is when a model has found something: ends that are dropped tell each other, in a model that is over.
struct Fetch {
    landing: Arc<Landing>,
    delivery: BlockReceiver,
    cell: Arc<DeliveryCell>,
    used: Arc<UnsafeCell<()>>,
    left: Arc<std::sync::Mutex<Vec<u8>>>,
    block_bytes: usize,
}

impl Fetch {
    /// Of one block; the engine lends its memory or takes bytes.
    fn new(lent: bool, most_early: usize) -> ManuallyDrop<Self> {
        Self::of(planes(false), lent, most_early)
    }

    /// Memory that is lent holds what another sequence left there.
    fn of(planes: Planes, lent: bool, most_early: usize) -> ManuallyDrop<Self> {
        let (delivery, cell) = BlockReceiver::new(1);
        let used = Arc::new(UnsafeCell::new(()));
        let left = Arc::default();
        let block_bytes = planes.block_bytes(KvGroup::Full);
        if lent {
            let (used, left) = (Arc::clone(&used), Arc::clone(&left));
            let memory = Memory { used, left, bytes: vec![9; block_bytes] };
            delivery.add_place(BLOCK.0, BLOCK.1, Box::new(memory));
        }
        let landing = Arc::new(Landing::with_early(planes, most_early));
        ManuallyDrop::new(Self { landing, delivery, cell, used, left, block_bytes })
    }

    /// A stream that brings the block in two halves; `true` if both were taken.
    fn stream(&self) -> muser_testkit::model::JoinHandle<bool> {
        let (landing, half) = (Arc::clone(&self.landing), vec![7; self.block_bytes / 2]);
        spawn(move || landing.take(&rows(0, 128), &half) && landing.take(&rows(128, 128), &half))
    }

    fn open(&self) {
        self.landing.open(&[BLOCK], None, false, &self.delivery);
    }

    /// The engine's memory once it is the engine's again.
    fn looks(&self) {
        self.used.with_mut(|_| ());
    }
}

/// Rows may come before there is memory for them: they wait in a list, or, where that has no room, the stream does.
fn arrives(lent: bool, most_early: usize) {
    let fetch = Fetch::new(lent, most_early);
    let stream = fetch.stream();
    fetch.open();
    assert!(stream.join().expect("ends"), "all rows are taken");
    fetch.landing.deliver();
    let delivered = fetch.cell.arrived.pop().expect("the block");
    assert_eq!((delivered.group, delivered.index), BLOCK);
    match delivered.bytes {
        Some(bytes) => assert!(!lent && (*bytes).as_ref().iter().all(|byte| *byte == 7), "every row"),
        None => fetch.looks(),
    }
    assert!(fetch.cell.failure().is_none());
    drop(ManuallyDrop::into_inner(fetch));
}

/// The engine loses interest while rows come: from then on the memory is its own.
fn taken_back() {
    let fetch = Fetch::new(true, 0);
    fetch.open();
    let stream = fetch.stream();
    fetch.cell.cancel();
    fetch.looks();
    stream.join().expect("ends");
    // What is called full now is not.
    fetch.landing.deliver();
    fetch.looks();
    drop(ManuallyDrop::into_inner(fetch));
}

/// A hand-off that ends before there was memory: whoever waits for it is let go.
fn closed() {
    let fetch = Fetch::new(true, 0);
    let stream = fetch.stream();
    fetch.landing.close();
    assert!(!stream.join().expect("ends"), "nobody wants them");
    fetch.landing.deliver();
    assert!(fetch.cell.arrived.is_empty());
    drop(ManuallyDrop::into_inner(fetch));
}

/// Half of the target's rows come for a block with a draft's rows in it; what lies where nothing came.
fn stale(unfinished: bool, with_draft: bool) -> [u8; 2] {
    let fetch = Fetch::of(planes(true), true, 0);
    let half = fetch.block_bytes / 4;
    fetch.landing.open(&[BLOCK], unfinished.then_some(BLOCK.1), with_draft, &fetch.delivery);
    assert!(fetch.landing.take(&rows(0, 128), &vec![7; half]));
    fetch.landing.deliver();
    fetch.cell.arrived.pop().expect("the block");
    let left = fetch.left.lock().expect("no panic").clone();
    let (target, draft) = left.split_at(2 * half);
    let (came, others): (Vec<u8>, Vec<u8>) = target.iter().partition(|byte| **byte == 7);
    assert_eq!(came.len(), half, "what came");
    let other = others[0];
    assert!(
        target.iter().all(|byte| [7, other].contains(byte)) && draft.iter().all(|byte| *byte == draft[0])
    );
    let found = [other, draft[0]];
    drop(ManuallyDrop::into_inner(fetch));
    found
}

/// Zeros say that a position has nothing there. Where all rows come nobody writes zeros first.
#[test]
fn what_another_sequence_left_is_not_handed_on() {
    for (unfinished, with_draft, wanted) in
        [(true, true, [0, 0]), (true, false, [0, 0]), (false, false, [9, 0]), (false, true, [9, 9])]
    {
        check(1, move || assert_eq!(stale(unfinished, with_draft), wanted, "{unfinished} {with_draft}"));
    }
}

#[test]
fn rows_land_in_every_order() {
    check(3, || arrives(true, 1 << 20));
    check(3, || arrives(false, 1 << 20));
    check(3, || arrives(true, 0));
}

#[test]
fn memory_that_is_taken_back_is_left_alone_in_every_order() {
    check(3, taken_back);
    check(3, closed);
}

/// Without them no model would be worth anything.
#[test]
fn faults_are_found() {
    std::panic::set_hook(Box::new(|_| {}));
    assert!(finds(Seed::LostWakes, 3, || arrives(true, 0)), "memory that comes unheard");
    assert!(finds(Seed::LostWakes, 3, closed), "an end that nobody hears of");
    let early = || {
        let fetch = Fetch::new(true, 0);
        fetch.open();
        let stream = fetch.stream();
        // Without having taken it back.
        fetch.looks();
        stream.join().expect("ends");
    };
    assert!(finds(Seed::Right, 3, early), "memory used by two");
    let unfinished = || {
        // Given to the engine before all rows have come.
        let fetch = Fetch::new(false, 1 << 20);
        let stream = fetch.stream();
        fetch.open();
        fetch.landing.deliver();
        stream.join().expect("ends");
        let bytes = fetch.cell.arrived.pop().and_then(|delivered| delivered.bytes).expect("the block");
        assert!((*bytes).as_ref().iter().all(|byte| *byte == 7));
    };
    assert!(finds(Seed::Right, 3, unfinished), "a block with rows missing");
}
