//! The caller's end of a request: a bounded ring of events, readable from a plain thread or an async task.
//!
//! The engine never waits for a reader. It only schedules a sequence when the ring has room for what the step may
//! produce, so a slow reader pauses its own sequence and nobody else's. Dropping the [`Submission`] cancels.

use std::{
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    time::{Duration, Instant},
};

use crate::Event;
use crate::sync::{ArrayQueue, AtomicBool, AtomicU32, AtomicWaker, Ordering, Thread, current, park};

/// What both ends share.
pub(crate) struct Ring {
    events: ArrayQueue<Event>,
    waker: AtomicWaker,
    /// The engine will send no more.
    closed: AtomicBool,
    /// The caller wants no more.
    cancelled: AtomicBool,
    /// The engine paused a sequence for lack of room and wants to be woken by the next read.
    starved: AtomicBool,
    prefilled: AtomicU32,
    engine: Thread,
}

impl Ring {
    pub(crate) fn new(capacity: usize, engine: Thread) -> Self {
        Self {
            events: ArrayQueue::new(capacity.max(1)),
            waker: AtomicWaker::new(),
            closed: AtomicBool::new(false),
            cancelled: AtomicBool::new(false),
            starved: AtomicBool::new(false),
            prefilled: AtomicU32::new(0),
            engine,
        }
    }

    /// Events that can be sent now. Only grows until the engine sends.
    pub(crate) fn room(&self) -> usize {
        self.events.capacity() - self.events.len()
    }

    /// Asks to be woken by the next read.
    pub(crate) fn starve(&self) {
        self.starved.store(true, Ordering::SeqCst);
    }

    /// Sends an event; the caller has checked [`Ring::room`].
    pub(crate) fn send(&self, event: Event) {
        let refused = self.events.push(event);
        debug_assert!(refused.is_ok(), "the scheduler checks for room before it schedules");
        self.waker.wake();
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(crate) fn set_prefilled(&self, positions: u32) {
        self.prefilled.store(positions, Ordering::Relaxed);
    }
}

/// A request that the engine has taken. Reading events drives nothing: the engine runs by itself.
pub struct Submission {
    ring: Arc<Ring>,
    id: u64,
    seed: u64,
}

impl Submission {
    pub(crate) fn new(ring: Arc<Ring>, id: u64, seed: u64) -> Self {
        Self { ring, id, seed }
    }

    /// Number of this request within the engine, from 1.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The seed in use: repeat the request with it and the same text comes.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Prompt positions read so far (known ones included), for progress displays.
    pub fn prefilled(&self) -> u32 {
        self.ring.prefilled.load(Ordering::Relaxed)
    }

    /// The next event if there is one now.
    pub fn try_recv(&mut self) -> Option<Event> {
        let event = self.ring.events.pop();
        if event.is_some() && self.ring.starved.swap(false, Ordering::SeqCst) {
            self.ring.engine.unpark();
        }
        event
    }

    /// The next event; `Ready(None)` after the last one. For async readers; no runtime is assumed.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        if let Some(event) = self.try_recv() {
            return Poll::Ready(Some(event));
        }
        self.ring.waker.register(context.waker());
        // The order matters: `closed` is read before the last look at the ring, so that nothing sent before the close
        // is missed.
        let closed = self.ring.closed.load(Ordering::SeqCst);
        match self.try_recv() {
            Some(event) => Poll::Ready(Some(event)),
            None if closed => Poll::Ready(None),
            None => Poll::Pending,
        }
    }

    /// Waits for the next event; `None` after the last one. For plain threads.
    pub fn recv(&mut self) -> Option<Event> {
        let waker = Waker::from(Arc::new(ThreadWaker(current())));
        loop {
            match self.poll_recv(&mut Context::from_waker(&waker)) {
                Poll::Ready(event) => return event,
                Poll::Pending => park(),
            }
        }
    }

    /// Like [`Submission::recv`] with a limit; `Err` when the time is over.
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Event>, TimedOut> {
        let waker = Waker::from(Arc::new(ThreadWaker(current())));
        let end = Instant::now() + timeout;
        loop {
            if let Poll::Ready(event) = self.poll_recv(&mut Context::from_waker(&waker)) {
                return Ok(event);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TimedOut);
            }
            std::thread::park_timeout(left);
        }
    }

    /// Asks the engine to stop at its next step. Events already sent, and the `Finished` that follows, stay readable.
    pub fn cancel(&self) {
        self.ring.cancelled.store(true, Ordering::Relaxed);
        self.ring.engine.unpark();
    }
}

impl futures_util::Stream for Submission {
    type Item = Event;

    fn poll_next(self: std::pin::Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.get_mut().poll_recv(context)
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl std::fmt::Debug for Submission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Submission").field("id", &self.id).finish_non_exhaustive()
    }
}

/// No event came in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no event came in time")]
pub struct TimedOut;

struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
