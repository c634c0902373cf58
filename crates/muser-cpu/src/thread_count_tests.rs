//! The choice of threads on machines that are told: how long a job takes with each number, and how long threads are parked in it.

use std::time::Duration;

use crate::thread_count::ThreadCount;

/// Runs jobs for so long; returns the time that jobs took with each number of threads (from 1), and how many jobs there were.
fn run(
    count: &mut ThreadCount,
    seconds: f64,
    mut machine: impl FnMut(usize) -> (f64, f64),
) -> (Vec<f64>, usize) {
    let (mut with, mut jobs) = (Vec::new(), 0);
    while with.iter().sum::<f64>() < seconds {
        let threads = count.threads();
        let (took, parked) = machine(threads);
        with.resize(with.len().max(threads), 0.0);
        with[threads - 1] += took;
        jobs += 1;
        count.note(1, Duration::from_secs_f64(took), Duration::from_secs_f64(parked));
    }
    (with, jobs)
}

/// Nobody waits: nothing is tried.
#[test]
fn a_quiet_machine_keeps_all_its_threads() {
    let mut count = ThreadCount::new(4);
    let (with, _) = run(&mut count, 10.0, |threads| (0.004 / threads as f64, 0.0));
    assert!(with[..3].iter().all(|&time| time == 0.0), "{with:?}");
}

/// Two processors and a program that never rests on one of them: one thread is faster than two, until the program ends.
#[test]
fn beside_a_program_that_never_rests_there_are_fewer_and_afterwards_all_again() {
    let mut count = ThreadCount::new(2);
    let busy = |threads: usize| if threads == 2 { (0.0016, 0.0008) } else { (0.001, 0.0) };
    let (with, jobs) = run(&mut count, 4.0, busy);
    assert!(with[1] < 0.1 * with[0], "it goes on with one: {with:?}");
    // Within a tenth of what one thread alone would have done.
    assert!(jobs > 3600, "{jobs} of 4000");
    let quiet = |threads: usize| (0.001 / threads as f64, 0.0);
    run(&mut count, 2.0, quiet);
    let (with, _) = run(&mut count, 1.0, quiet);
    assert_eq!(with[0], 0.0, "all are back: {with:?}");
}

/// Threads wait, but more are faster all the same: hardly anything is lost by trying.
#[test]
fn threads_that_wait_are_kept_where_they_pay() {
    let mut count = ThreadCount::new(8);
    let machine = |threads: usize| (0.008 / threads as f64, 0.001);
    let (_, jobs) = run(&mut count, 20.0, machine);
    assert!(jobs > 19_000, "{jobs} of 20000");
    assert_eq!(count.threads(), 8);
}

/// Of sixteen processors five are taken, so eleven threads are fastest: it comes near, and back.
#[test]
fn many_threads_become_fewer_in_steps() {
    let mut count = ThreadCount::new(16);
    let busy = |threads: usize| {
        let own = threads.min(11) as f64;
        // One that shares its processor holds all up.
        if threads > 11 { (0.032 / own, 0.02) } else { (0.016 / own, 0.0) }
    };
    run(&mut count, 3.0, busy);
    let (mut with, _) = run(&mut count, 5.0, busy);
    with.resize(16, 0.0);
    let most = (1..=16).max_by(|&a, &b| with[a - 1].total_cmp(&with[b - 1])).expect("sixteen");
    assert!((9..=11).contains(&most), "{most} threads: {with:?}");
    run(&mut count, 8.0, |threads| (0.016 / threads as f64, 0.0));
    assert_eq!(count.threads(), 16);
}

/// Steps of two sizes in turn are compared with their like.
#[test]
fn jobs_of_other_sizes_are_not_mistaken_for_slow_ones() {
    let mut count = ThreadCount::new(2);
    let mut turn = 0;
    for _ in 0..4000 {
        turn += 1;
        let (rows, alone) = if turn % 2 == 0 { (1, 0.001) } else { (64, 0.02) };
        let took = alone / count.threads() as f64;
        // They wait now and then, so trials are made.
        count.note(rows, Duration::from_secs_f64(took), Duration::from_secs_f64(0.2 * took));
    }
    assert_eq!(count.threads(), 2);
}
