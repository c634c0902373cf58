//! The ends of a request ([`Submission`] and the engine's ring) and of a fetch (`BlockReceiver`, with blocks in their place and as
//! bytes), in every order of what two threads do: the files of the product over a model of the standard library. Each model
//! finds the fault that is put in.
#![allow(dead_code, reason = "the files are compiled for what is modelled of them")]
#![allow(unreachable_pub, reason = "as in the product, where they are handed on")]
#![allow(clippy::arc_with_non_send_sync, reason = "the threads of a model take turns on one")]
#![allow(unsafe_code, reason = "cells that the models read and write")]

#[path = "../src/prefix/delivery.rs"]
mod delivery;
#[path = "../src/submission.rs"]
mod submission;

mod prefix {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RestoreFailure {
        Store,
        Damaged,
    }
}

mod sync {
    pub(crate) use muser_testkit::model::*;
}

use std::sync::Arc;

use delivery::{BlockReceiver, DeliveryCell};
use muser_backend::LentBlock;
use muser_kv::KvGroup;
use muser_testkit::model::{Seed, UnsafeCell, check, current, finds, park, spawn};
use submission::{Ring, Submission};

/// What the ring carries here.
#[derive(Debug, PartialEq)]
pub struct Event(u32);

/// A ring of one place: the engine waits for room before each event, the reader for events.
fn slow_reader() {
    const EVENTS: u32 = 2;
    let ring = Arc::new(Ring::new(1, current()));
    let mut submission = Submission::new(Arc::clone(&ring), 1, 1);
    let reader = spawn(move || {
        let read: Vec<_> = std::iter::from_fn(|| submission.recv()).collect();
        assert_eq!(read, (0..EVENTS).map(Event).collect::<Vec<_>>());
    });
    for event in 0..EVENTS {
        while ring.room() == 0 {
            // Told first and looked again, as the scheduler does.
            ring.starve();
            if ring.room() == 0 {
                park();
            }
        }
        ring.send(Event(event));
    }
    ring.close();
    reader.join().expect("ends");
}

/// A reader that leaves is heard of by an engine that has nothing else to do.
fn reader_that_leaves() {
    let ring = Arc::new(Ring::new(1, current()));
    let submission = Submission::new(Arc::clone(&ring), 1, 1);
    let reader = spawn(move || drop(submission));
    while !ring.is_cancelled() {
        park();
    }
    reader.join().expect("ends");
}

/// The engine's side of a fetch: what has arrived, until as much is there or it failed.
fn arrivals(cell: &DeliveryCell, wanted: usize) -> Result<usize, usize> {
    let mut found = 0;
    loop {
        while let Some(delivered) = cell.arrived.pop() {
            assert_eq!(delivered.index, found, "in order");
            found += 1;
        }
        if found == wanted {
            return Ok(found);
        }
        if cell.failure().is_some() {
            return Err(found);
        }
        park();
    }
}

/// A source gives two blocks of `wanted` and goes.
fn given(wanted: usize) {
    let (delivery, cell) = BlockReceiver::new(wanted);
    let source = spawn(move || {
        for index in 0..2 {
            delivery.give(KvGroup::Full, index, Box::new([7_u8]));
        }
    });
    // A source that has given everything has not failed; one that goes before has, once all it gave was taken.
    assert_eq!(arrivals(&cell, wanted), if wanted == 2 { Ok(2) } else { Err(2) });
    source.join().expect("ends");
}

/// The engine's memory: the cell tells of every use.
struct Memory {
    used: Arc<UnsafeCell<()>>,
    bytes: [u8; 1],
}

// SAFETY: the model finds it where two threads use the cell at once.
unsafe impl Send for Memory {}

impl LentBlock for Memory {
    fn bytes(&mut self) -> &mut [u8] {
        self.used.with_mut(|_| ());
        &mut self.bytes
    }
}

/// A block is written in its place. The engine uses the memory when it hears that it is filled, or after it took it back.
fn in_place(takes_back: bool) {
    let (delivery, cell) = BlockReceiver::new(1);
    let used = Arc::new(UnsafeCell::new(()));
    delivery.add_place(KvGroup::Full, 0, Box::new(Memory { used: Arc::clone(&used), bytes: [0] }));
    let source = spawn(move || {
        if let Some(place) = delivery.place(KvGroup::Full, 0) {
            let _ = place.write(0..1, &mut |bytes| bytes[0] = 7);
            delivery.filled(place);
        }
    });
    if takes_back {
        cell.cancel();
    } else {
        assert_eq!(arrivals(&cell, 1), Ok(1));
    }
    used.with_mut(|_| ());
    source.join().expect("ends");
}

/// The end is told once, whether the source asks before it or after.
fn told() {
    let (delivery, cell) = BlockReceiver::new(1);
    let (tell, heard) = std::sync::mpsc::channel();
    let source = spawn(move || delivery.on_end(move |imported| tell.send(imported).expect("heard")));
    cell.end(true);
    source.join().expect("ends");
    assert_eq!(heard.try_iter().count(), 1);
}

#[test]
fn requests_end_in_every_order() {
    check(3, slow_reader);
    check(3, reader_that_leaves);
}

#[test]
fn fetches_end_in_every_order() {
    check(3, || given(2));
    check(3, || given(3));
    check(3, || in_place(false));
    check(3, || in_place(true));
    check(3, told);
}

/// Without them no model would be worth anything.
#[test]
fn faults_are_found() {
    std::panic::set_hook(Box::new(|_| {}));
    let unlooked = || {
        // An engine that parks without having asked to be woken.
        let ring = Arc::new(Ring::new(1, current()));
        let mut submission = Submission::new(Arc::clone(&ring), 1, 1);
        ring.send(Event(0));
        // A reader that leaves would wake it.
        let reader = spawn(move || (submission.recv(), std::mem::forget(submission)));
        if ring.room() == 0 {
            park();
        }
        reader.join().expect("ends");
    };
    assert!(finds(Seed::Right, 3, unlooked), "an engine that is never woken");
    let early = || {
        // Memory that is used while a source may write it.
        let (delivery, cell) = BlockReceiver::new(1);
        let used = Arc::new(UnsafeCell::new(()));
        delivery.add_place(KvGroup::Full, 0, Box::new(Memory { used: Arc::clone(&used), bytes: [0] }));
        let source = spawn(move || {
            let place = delivery.place(KvGroup::Full, 0).expect("there");
            assert!(place.write(0..1, &mut |bytes| bytes[0] = 7));
        });
        used.with_mut(|_| ());
        source.join().expect("ends");
        cell.cancel();
    };
    assert!(finds(Seed::Right, 3, early), "memory used by two");
}
