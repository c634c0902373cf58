//! Buffers and queue with real threads; in every order of what they do in `tests/models.rs`, which compiles their files itself.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use std::time::Duration;

use crate::buffers::{Buffers, MOST_SPARE};
use crate::queue::WorkQueue;

#[test]
fn many_threads_together_stay_within_the_limit() {
    let buffers = Buffers::new(1000);
    let most = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (buffers, most) = (&buffers, &most);
            scope.spawn(move || {
                for i in 0..200 {
                    let buffer = buffers.take(100 + (i * 37 + thread) % 300, || false).expect("wanted");
                    assert!(buffer.as_ref().len() >= 100);
                    most.fetch_max(buffers.census().0, SeqCst);
                }
            });
        }
    });
    assert!((100..=1000).contains(&most.into_inner()));
    let (bytes_out, spare) = buffers.census();
    assert!(bytes_out == 0 && spare <= MOST_SPARE);
}

#[test]
fn one_that_is_larger_than_all_is_had_alone_and_who_gives_up_waits_no_longer() {
    let buffers = Buffers::new(10);
    let large = buffers.take(5000, || false).expect("alone");
    assert!(buffers.take(1, || true).is_none());
    let looks = AtomicUsize::new(0);
    assert!(
        buffers.take(1, || looks.fetch_add(1, SeqCst) > 2).is_none(),
        "no room while the large one is out"
    );
    drop(large);
    assert!(buffers.take(1, || false).is_some());
}

#[test]
fn a_queue_is_bounded_waited_for_and_closed() {
    let queue = WorkQueue::new(2);
    assert_eq!((queue.push(1), queue.push(2), queue.push(3)), (Ok(()), Ok(()), Err(3)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut sum = 0;
            while let Some(item) = queue.take() {
                sum += item;
                queue.done();
            }
            assert_eq!(sum, 3);
        });
        assert!(queue.wait_until_empty(Duration::from_secs(20)));
        assert_eq!(queue.depth(), 0);
        queue.close();
    });
    assert_eq!((queue.push(4), queue.take()), (Err(4), None));
}

#[test]
fn work_in_hand_counts_as_waiting() {
    let queue = WorkQueue::new(2);
    assert!(queue.push(1).is_ok() && queue.take().is_some());
    assert!(!queue.wait_until_empty(Duration::from_millis(5)));
    queue.done();
    assert!(queue.wait_until_empty(Duration::ZERO));
}
