//! The pool on real threads; in every order they are tried in `tests/models.rs`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::pool::{Pool, SPIN};

#[test]
fn every_item_once_in_every_phase() {
    for threads in [1, 2, 5] {
        let mut pool = Pool::new(Some(threads)).expect("threads start");
        let counts: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..50 {
            pool.run(&|worker| {
                for _ in 0..7 {
                    worker.share(counts.len(), |i| {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    });
                    worker.barrier()?;
                }
                Ok(())
            })
            .expect("no panic");
        }
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 350));
    }
}

#[test]
fn writes_before_a_barrier_are_seen_after_it() {
    let mut pool = Pool::new(Some(3)).expect("threads start");
    let cells: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
    pool.run(&|worker| {
        for round in 1..1000 {
            cells[worker.index].store(round, Ordering::Relaxed);
            worker.barrier()?;
            assert!(cells.iter().all(|c| c.load(Ordering::Relaxed) == round));
            worker.barrier()?;
        }
        Ok(())
    })
    .expect("no panic");
}

#[test]
fn panics_come_back_and_the_pool_lives_on() {
    let mut pool = Pool::new(Some(3)).expect("threads start");
    for bad in 0..3 {
        let result = pool.run(&|worker| {
            worker.barrier()?;
            assert!(worker.index != bad, "worker {bad} fails");
            worker.barrier()
        });
        assert_eq!(result.expect_err("a panic"), format!("worker {bad} fails"));
        pool.run(&|worker| worker.barrier()).expect("works again");
    }
}

#[test]
fn wakes_parked_threads() {
    let mut pool = Pool::new(Some(2)).expect("threads start");
    for _ in 0..3 {
        std::thread::sleep(SPIN * 3);
        let count = AtomicUsize::new(0);
        pool.run(&|_| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
        .expect("no panic");
        assert_eq!(count.load(Ordering::Relaxed), 2);
    }
}

/// An engine's thread is woken by whoever hands in a request; while it waits for its workers it sleeps in the same way.
#[test]
fn a_caller_who_was_woken_for_something_else_hears_of_it() {
    let mut pool = Pool::new(Some(2)).expect("threads");
    let caller = std::thread::current();
    pool.run(&|worker| {
        if worker.index == 1 {
            std::thread::sleep(Duration::from_millis(100));
            caller.unpark();
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    })
    .expect("runs");
    let start = std::time::Instant::now();
    std::thread::park_timeout(Duration::from_secs(20));
    assert!(start.elapsed() < Duration::from_secs(10), "the wish was swallowed");
}
