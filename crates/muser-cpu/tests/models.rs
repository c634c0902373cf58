//! The pool and the loans of blocks, whose `unsafe` rests on what threads see of each other, in every order of two or three
//! threads: the files of the product over a model of the standard library. Each model finds the fault that is put in.
#![allow(dead_code, reason = "the files are compiled for what is modelled of them")]
#![allow(clippy::unused_self, reason = "as what it stands in for")]
#![allow(unsafe_code, reason = "the pool's, and cells that the models read and write")]

#[path = "../src/executor/loans.rs"]
mod loans;
#[path = "../src/pool.rs"]
mod pool;
#[path = "../src/thread_count.rs"]
mod thread_count;

mod sync {
    use std::time::Duration;

    pub(crate) use muser_testkit::model::*;

    // No time passes, so that the model does the same every time.
    pub(crate) struct Instant;

    impl Instant {
        pub(crate) fn elapsed(&self) -> Duration {
            Duration::ZERO
        }
    }

    pub(crate) fn now() -> Instant {
        Instant
    }

    // To spin and then park is to park, with more orders to try.
    pub(crate) fn spin(_: u32, done: impl Fn() -> bool) -> bool {
        done()
    }

    pub(crate) fn spin_for(_: Duration, done: impl Fn() -> bool) -> bool {
        done()
    }
}

mod topology {
    pub(crate) struct Topology {
        pub(crate) processors: Vec<usize>,
        pub(crate) threads: usize,
    }

    impl Topology {
        pub(crate) fn detect() -> Self {
            Self { processors: Vec::new(), threads: 1 }
        }
    }

    pub(crate) struct Pinned;

    impl Pinned {
        pub(crate) fn undo(self) {}
    }

    pub(crate) fn pin_to(_: usize) -> Pinned {
        Pinned
    }
}

use loans::Loans;
use muser_kv::KvGroup;
use muser_testkit::model::{Arc, AtomicUsize, Ordering, Seed, UnsafeCell, check, finds, spawn};
use pool::{Broken, Pool, Worker};

/// A cell of each thread, which the others may look at behind a barrier.
struct Cells(Vec<UnsafeCell<usize>>);

// SAFETY: the model finds it where two threads use a cell at once.
unsafe impl Sync for Cells {}

impl Cells {
    fn new(count: usize) -> Self {
        Self((0..count).map(|_| UnsafeCell::new(0)).collect())
    }

    fn set(&self, at: usize, value: usize) {
        // SAFETY: as above.
        self.0[at].with_mut(|cell| unsafe { *cell = value });
    }

    fn get(&self, at: usize) -> usize {
        // SAFETY: as above.
        self.0[at].with(|cell| unsafe { *cell })
    }
}

/// A pool that a model which has found something leaves as it is: its threads cannot be waited for any more.
struct Owned(Option<Pool>);

impl Owned {
    fn new(threads: usize) -> Self {
        Self(Some(Pool::new(Some(threads)).expect("threads start")))
    }

    fn run(&mut self, job: &(dyn Fn(&Worker<'_>) -> Result<(), Broken> + Sync)) -> Result<(), String> {
        self.0.as_mut().expect("there").run(job)
    }

    fn run_on(&mut self, threads: usize, job: &(dyn Fn(&Worker<'_>) -> Result<(), Broken> + Sync)) {
        self.0.as_mut().expect("there").run_on(threads, job).expect("no panic");
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget(self.0.take());
        }
    }
}

/// In each job the first so many threads write their cell; behind the barrier all see all of them; items are given out once in each
/// phase.
fn phases(jobs: &[usize]) {
    let most = jobs.iter().copied().max().expect("a job");
    let mut pool = Owned::new(most);
    let (cells, items) = (Cells::new(most), AtomicUsize::new(0));
    for (job, &threads) in (1..).zip(jobs) {
        pool.run_on(threads, &|worker| {
            assert_eq!(worker.threads(), threads);
            cells.set(worker.index, job);
            worker.barrier()?;
            worker.share(1, |_| {
                items.fetch_add(1, Ordering::Relaxed);
            });
            for other in 0..worker.threads() {
                assert_eq!(cells.get(other), job);
            }
            Ok(())
        });
        // What a job wrote its caller sees, and nobody who was left out is in it.
        (0..most).for_each(|at| cells.set(at, 0));
    }
    assert_eq!(items.load(Ordering::SeqCst), jobs.len());
}

/// A worker that panics breaks the barrier for the other, and the next job runs.
fn a_panic() {
    let mut pool = Owned::new(2);
    let failed = pool.run(&|worker| {
        if worker.index == 1 {
            std::panic::resume_unwind(Box::new("fails"));
        }
        worker.barrier()
    });
    assert_eq!(failed, Err("fails".to_owned()));
    pool.run(&|_| Ok::<(), Broken>(())).expect("works again");
}

/// Two blocks are filled elsewhere; whoever finds one not lent sees its bytes, and may lend it again.
fn loans() {
    let (loans, bytes) = (Arc::new(Loans::none_of(2, 0)), Arc::new(Cells::new(2)));
    let threads: Vec<_> = (0..2)
        .map(|block| {
            assert!(loans.lend(KvGroup::Full, block));
            assert!(!loans.lend(KvGroup::Full, block), "once");
            let (loans, bytes) = (Arc::clone(&loans), Arc::clone(&bytes));
            spawn(move || {
                bytes.set(block, 7);
                loans.give_back(KvGroup::Full, block);
            })
        })
        .collect();
    for block in 0..2 {
        if !loans.is_lent(KvGroup::Full, block) {
            assert_eq!(bytes.get(block), 7);
            assert!(loans.lend(KvGroup::Full, block));
            loans.give_back(KvGroup::Full, block);
        }
    }
    threads.into_iter().for_each(|thread| thread.join().expect("ends"));
    assert!(!loans.any(), "all are back");
}

#[test]
fn jobs_and_barriers_hold_in_every_order() {
    check(2, || phases(&[2, 2]));
    check(1, || phases(&[3]));
    // Threads that are left out of jobs, and come back.
    check(2, || phases(&[1, 2]));
    check(2, || phases(&[2, 1, 2]));
    check(1, || phases(&[2, 3]));
}

#[test]
fn a_panic_comes_back_in_every_order() {
    // What panics says is no news.
    std::panic::set_hook(Box::new(|_| {}));
    check(2, a_panic);
}

#[test]
fn lent_blocks_are_the_borrowers_in_every_order() {
    check(3, loans);
}

/// Without them no model would be worth anything.
#[test]
fn faults_are_found() {
    std::panic::set_hook(Box::new(|_| {}));
    assert!(finds(Seed::Relaxed, 2, || phases(&[2])), "a cell read before it is written");
    assert!(finds(Seed::NoTotalOrder, 2, || phases(&[2])), "a thread that parks for ever");
    assert!(finds(Seed::NoTotalOrder, 2, a_panic), "a thread that parks for ever");
    assert!(finds(Seed::Relaxed, 2, loans), "bytes read before they are written");
}
