//! What the engine thread and everybody else share: the inbox, the figures, and how far the engine is from its end.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
    thread::Thread,
    time::{Duration, Instant},
};

use crossbeam_queue::ArrayQueue;
use muser_backend::ExecutorInfo;

use crate::{
    Limits, Request, RequestError, Submission, SubmitError, admission, metrics::Metrics, slot_view::SlotCell,
    submission::Ring, task::Job,
};

/// Time since the engine's start; tests move it.
pub(crate) type Clock = Box<dyn Fn() -> Duration + Send>;

/// What every part of a turn may look at.
#[derive(Clone, Copy)]
pub(crate) struct Env<'a> {
    pub(crate) clock: &'a dyn Fn() -> Duration,
    pub(crate) metrics: &'a Metrics,
}

impl Env<'_> {
    pub(crate) fn now(&self) -> Duration {
        (self.clock)()
    }
}

/// What all threads share.
pub(crate) struct Shared {
    pub(crate) inbox: ArrayQueue<Job>,
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
    pub(crate) slots: Box<[SlotCell]>,
    pub(crate) info: ExecutorInfo,
    /// Requests accepted and not ended.
    in_flight: Arc<AtomicUsize>,
    /// 0 run, 1 finish what is there, 2 cancel everything.
    pub(crate) stopping: AtomicU8,
    /// The engine thread reads the inbox no more.
    stopped: AtomicBool,
    /// Known prefixes are to be forgotten.
    forget: AtomicBool,
    queue_timeout: Option<Duration>,
    epoch: Instant,
    next_id: AtomicU64,
    pub(crate) thread: OnceLock<Thread>,
    /// Why no step can succeed any more.
    pub(crate) lost: OnceLock<String>,
}

impl Shared {
    pub(crate) fn new(limits: Limits, info: ExecutorInfo, queue_timeout: Option<Duration>) -> Self {
        Self {
            inbox: ArrayQueue::new(limits.max_in_flight.max(1)),
            metrics: Metrics::default(),
            slots: (0..limits.parallel).map(|_| SlotCell::default()).collect(),
            info,
            in_flight: Arc::new(AtomicUsize::new(0)),
            stopping: AtomicU8::new(0),
            stopped: AtomicBool::new(false),
            forget: AtomicBool::new(false),
            queue_timeout,
            epoch: Instant::now(),
            next_id: AtomicU64::new(1),
            thread: OnceLock::new(),
            lost: OnceLock::new(),
            limits,
        }
    }

    /// Checks a request and puts it into the inbox. `now` is the time since the engine's start.
    pub(crate) fn submit(
        &self,
        request: Request,
        engine: &Thread,
        now: Duration,
    ) -> Result<Submission, SubmitError> {
        let admitted = self.admit(request, engine, now);
        let counter =
            if admitted.is_ok() { &self.metrics.requests_accepted } else { &self.metrics.requests_refused };
        Metrics::add(counter, 1);
        admitted
    }

    fn admit(&self, mut request: Request, engine: &Thread, now: Duration) -> Result<Submission, SubmitError> {
        admission::check(&request, &self.limits)?;
        if request.sampling.top_k as usize >= self.limits.vocab {
            // All there are is no filter, and must draw as none does.
            request.sampling.top_k = 0;
        }
        if self.stopping.load(Ordering::SeqCst) != 0 {
            return Err(SubmitError::ShuttingDown);
        }
        let limit = self.limits.max_in_flight;
        let before = self.in_flight.fetch_add(1, Ordering::SeqCst);
        if before >= limit {
            self.in_flight.fetch_sub(1, Ordering::SeqCst);
            return Err(SubmitError::QueueFull {
                waiting: before.saturating_sub(self.limits.parallel),
                limit: limit - self.limits.parallel,
            });
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let seed = request.seed.unwrap_or_else(admission::random_seed);
        // Room for the events of every choice's last step and end, whatever the setting says.
        let capacity = self.limits.event_ring.max(8 + 8 * request.n as usize);
        let ring = Arc::new(Ring::new(capacity, engine.clone()));
        let submission = Submission::new(Arc::clone(&ring), id, seed);
        let in_flight = Arc::clone(&self.in_flight);
        let job = Job::new(request, id, seed, ring, now, self.queue_timeout, in_flight);
        if self.inbox.push(job).is_err() {
            // Cannot happen: the inbox is as large as the limit. Refusing is right all the same.
            return Err(SubmitError::QueueFull { waiting: limit, limit });
        }
        if self.stopped.load(Ordering::SeqCst) {
            self.refuse_inbox();
        }
        engine.unpark();
        Ok(submission)
    }

    /// The engine thread has ended or is about to: nobody will take what is in the inbox.
    pub(crate) fn stop(&self) {
        self.stopping.fetch_max(2, Ordering::SeqCst);
        self.stopped.store(true, Ordering::SeqCst);
        self.refuse_inbox();
    }

    fn refuse_inbox(&self) {
        while let Some(job) = self.inbox.pop() {
            job.task.fail(RequestError::ShutDown);
        }
    }

    /// Known prefixes are to be forgotten before any request is taken in that comes from now on.
    pub(crate) fn ask_to_forget(&self) {
        self.forget.store(true, Ordering::SeqCst);
    }

    /// Are known prefixes to be forgotten? Asked once.
    pub(crate) fn is_to_forget(&self) -> bool {
        self.forget.load(Ordering::SeqCst) && self.forget.swap(false, Ordering::SeqCst)
    }

    /// The device is gone; the first reason is the one that counts.
    pub(crate) fn note_lost(&self, why: String) {
        let _ = self.lost.set(why);
    }

    /// Time since the engine's start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// Requests accepted and not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }
}
