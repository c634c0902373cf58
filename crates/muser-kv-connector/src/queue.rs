//! A queue that threads wait at, and that can be closed.

use std::collections::VecDeque;
use std::time::Duration;

use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};

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
