//! Memory between store and engine ([`Buffers`]) and the queue that its threads wait at ([`WorkQueue`]), in every order of what two
//! or three threads do: the files of the product over a model of the standard library. Each model finds the fault that is put in.
#![allow(dead_code, reason = "the files are compiled for what is modelled of them")]

#[path = "../src/buffers.rs"]
mod buffers;
#[path = "../src/queue.rs"]
mod queue;

mod sync {
    pub(crate) use std::sync::PoisonError;

    pub(crate) use muser_testkit::model::*;
}

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use buffers::Buffers;
use muser_testkit::model::{Seed, check, finds, spawn};
use queue::WorkQueue;

/// Threads take so many of ten bytes each; what is out together stays within ten, but for one that is larger alone. Counted outside
/// the model, whose threads take turns.
fn memory(sizes: &[usize]) {
    let (buffers, out) = (Buffers::new(10), Arc::new(AtomicUsize::new(0)));
    let take = |size: usize| {
        let (buffers, out) = (Arc::clone(&buffers), Arc::clone(&out));
        move || {
            let buffer = buffers.take(size, || false).expect("nobody gives up");
            assert_eq!(buffer.as_ref().len(), size);
            let now = out.fetch_add(size, SeqCst) + size;
            assert!(now <= 10 || now == size, "{now} bytes are out");
            out.fetch_sub(size, SeqCst);
        }
    };
    let others: Vec<_> = sizes[1..].iter().map(|&size| spawn(take(size))).collect();
    take(sizes[0])();
    others.into_iter().for_each(|other| other.join().expect("ends"));
    assert_eq!(Arc::strong_count(&buffers), 1, "every buffer has gone back");
}

/// One publishes two things, one works, and the first waits until all is done before it closes.
fn work() {
    let queue = Arc::new(WorkQueue::new(1));
    let done = Arc::new(AtomicUsize::new(0));
    let worker = {
        let (queue, done) = (Arc::clone(&queue), Arc::clone(&done));
        spawn(move || {
            while let Some(item) = queue.take() {
                done.fetch_add(item, SeqCst);
                queue.done();
            }
        })
    };
    let mut taken = 0;
    for item in [1, 2] {
        // A full queue hands the item back, and it is published the next time.
        taken += if queue.push(item).is_ok() { item } else { 0 };
    }
    assert!(queue.wait_until_empty(Duration::ZERO));
    assert_eq!((done.load(SeqCst), queue.depth()), (taken, 0), "all that was taken is done");
    queue.close();
    worker.join().expect("ends");
}

/// Whoever waits when the queue is closed goes, and so does what waits in it.
fn closing() {
    let queue = Arc::new(WorkQueue::new(2));
    let workers = [(); 2].map(|()| {
        let queue = Arc::clone(&queue);
        spawn(move || while queue.take().is_some() {})
    });
    let item = Arc::new(());
    let _ = queue.push(Arc::clone(&item));
    queue.close();
    workers.into_iter().for_each(|worker| worker.join().expect("ends"));
    assert!(queue.push(Arc::clone(&item)).is_err());
    assert_eq!(Arc::strong_count(&item), 1, "nothing is kept");
}

#[test]
fn memory_is_bounded_and_had_in_every_order() {
    check(3, || memory(&[6, 6]));
    check(2, || memory(&[6, 4, 6]));
    check(3, || memory(&[20, 4]));
}

#[test]
fn work_is_done_once_and_waited_for_in_every_order() {
    check(3, work);
    check(2, closing);
}

/// Without them no model would be worth anything.
#[test]
fn faults_are_found() {
    std::panic::set_hook(Box::new(|_| {}));
    assert!(finds(Seed::LostWakes, 3, || memory(&[6, 6])), "memory that comes back unheard");
    assert!(finds(Seed::LostWakes, 3, work), "work that is announced to nobody");
    assert!(finds(Seed::LostWakes, 2, closing), "a queue that is closed in silence");
    let lost = || {
        let buffers = Buffers::new(10);
        std::mem::forget(buffers.take(6, || false));
        buffers.take(6, || false).expect("never");
    };
    assert!(finds(Seed::Right, 2, lost), "memory that never comes back");
    let idle = || {
        let queue = WorkQueue::new(1);
        assert!(queue.push(()).is_ok() && queue.take().is_some());
        queue.wait_until_empty(Duration::ZERO);
    };
    assert!(finds(Seed::Right, 2, idle), "work that is never called done");
}
