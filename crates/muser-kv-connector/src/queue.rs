//! A queue that threads wait at, and that can be closed.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    closed: bool,
    /// Threads that have taken an item and not said that they are done with it.
    busy: usize,
}

/// The queue. Bounded: a full one hands the item back.
#[derive(Debug)]
pub(crate) struct WorkQueue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    limit: usize,
}

impl<T> WorkQueue<T> {
    pub(crate) fn new(limit: usize) -> Self {
        let state = State { items: VecDeque::new(), closed: false, busy: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new(), limit }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an item, unless the queue is full or closed.
    pub(crate) fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.lock();
        if state.closed || state.items.len() >= self.limit {
            return Err(item);
        }
        state.items.push_back(item);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for an item; `None` once the queue is closed. Whoever has taken one says [`WorkQueue::done`] afterwards.
    pub(crate) fn take(&self) -> Option<T> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(item) = state.items.pop_front() {
                state.busy += 1;
                return Some(item);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn done(&self) {
        self.lock().busy -= 1;
        self.changed.notify_all();
    }

    /// Items that wait or are being worked on.
    pub(crate) fn depth(&self) -> usize {
        let state = self.lock();
        state.items.len() + state.busy
    }

    /// Waits until nothing waits and nobody works; `false` if that took too long.
    pub(crate) fn wait_until_empty(&self, timeout: Duration) -> bool {
        let state = self.lock();
        let busy = |state: &mut State<T>| !state.items.is_empty() || state.busy > 0;
        let waited = self.changed.wait_timeout_while(state, timeout, busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Lets every waiting thread go and drops what waits.
    pub(crate) fn close(&self) {
        let items = {
            let mut state = self.lock();
            state.closed = true;
            std::mem::take(&mut state.items)
        };
        self.changed.notify_all();
        drop(items);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
