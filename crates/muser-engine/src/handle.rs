//! Starting an engine and talking to it: submit requests, read figures, shut down.
//!
//! Two crossing points between threads: the inbox (requests in) and each submission's ring (events out). Both are
//! lock-free and bounded.

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{JoinHandle, Thread},
    time::{Duration, Instant},
};

use crossbeam_queue::ArrayQueue;
use muser_backend::{Executor, ExecutorInfo};
use muser_model::Geometry;

use crate::{
    EngineConfig, EngineError, MetricsSnapshot, PrefixSource, Request, RequestError, SlotView, Submission,
    SubmitError,
    admission::{self, Limits},
    cache_work::{CACHE_WORK_LIMIT, CacheAccess, CacheWork, CacheWorkError},
    driver::{Driver, Turn},
    metrics::Metrics,
    slots::SlotCell,
    submission::Ring,
    task::Job,
};

/// What all threads share.
pub(crate) struct Shared {
    pub(crate) inbox: ArrayQueue<Job>,
    pub(crate) cache_work: ArrayQueue<CacheWork>,
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
    pub(crate) slots: Box<[SlotCell]>,
    /// Requests accepted and not ended.
    in_flight: Arc<AtomicUsize>,
    /// 0 run, 1 finish what is there, 2 cancel everything.
    pub(crate) stopping: AtomicU8,
    /// The engine thread reads the inbox no more.
    stopped: AtomicBool,
    queue_timeout: Option<Duration>,
    info: ExecutorInfo,
    epoch: Instant,
    next_id: AtomicU64,
    thread: OnceLock<Thread>,
    /// Why no step can succeed any more.
    pub(crate) lost: OnceLock<String>,
}

impl Shared {
    pub(crate) fn new(limits: Limits, info: ExecutorInfo, queue_timeout: Option<Duration>) -> Self {
        Self {
            inbox: ArrayQueue::new(limits.max_in_flight.max(1)),
            cache_work: ArrayQueue::new(CACHE_WORK_LIMIT),
            metrics: Metrics::default(),
            slots: (0..limits.parallel).map(|_| SlotCell::default()).collect(),
            in_flight: Arc::new(AtomicUsize::new(0)),
            stopping: AtomicU8::new(0),
            stopped: AtomicBool::new(false),
            queue_timeout,
            info,
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
        // Dropped work tells whoever waits for it by dropping its end of whatever it would have answered through.
        while self.cache_work.pop().is_some() {}
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

/// How to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Take no new requests, finish those that are there.
    Finish,
    /// Take no new requests, end those that are there with [`crate::FinishReason::Cancelled`].
    Cancel,
}

/// The engine; see [`Engine::spawn`].
#[derive(Debug)]
pub struct Engine;

impl Engine {
    /// Allocates the KV blocks and starts the engine thread.
    pub fn spawn(
        executor: Box<dyn Executor>,
        geometry: Geometry,
        config: EngineConfig,
    ) -> Result<EngineHandle, EngineError> {
        Self::spawn_with(executor, geometry, config, None)
    }

    /// [`Engine::spawn`] with a place where prefixes are kept that outlive the engine's memory.
    #[expect(clippy::needless_pass_by_value, reason = "an engine is made once, from values made for it")]
    pub fn spawn_with(
        executor: Box<dyn Executor>,
        geometry: Geometry,
        config: EngineConfig,
        source: Option<Box<dyn PrefixSource>>,
    ) -> Result<EngineHandle, EngineError> {
        let mut driver = Driver::new(executor, &geometry, &config)?;
        driver.source = source;
        let shared = Arc::clone(driver.shared());
        let for_thread = Arc::clone(&shared);
        let clock = Arc::clone(&shared);
        driver.set_clock(Box::new(move || clock.elapsed()));
        let thread = std::thread::Builder::new()
            .name("muser-engine".into())
            .spawn(move || {
                // Also when the loop panics: no reader may wait for ever.
                let _stop = StopGuard(Arc::clone(&for_thread));
                loop {
                    match driver.turn() {
                        Turn::Worked => {}
                        Turn::Idle { until: None } => std::thread::park(),
                        Turn::Idle { until: Some(until) } => {
                            std::thread::park_timeout(until.saturating_sub(for_thread.elapsed()));
                        }
                        Turn::Stopped => break,
                    }
                }
            })
            .map_err(EngineError::Thread)?;
        shared.thread.get_or_init(|| thread.thread().clone());
        let owner = Owner { shared: Arc::clone(&shared), join: Mutex::new(Some(thread)) };
        Ok(EngineHandle { owner: Arc::new(owner) })
    }
}

struct StopGuard(Arc<Shared>);

impl Drop for StopGuard {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Talks to a running engine; clones talk to the same one. When the last clone goes, the engine cancels what runs and
/// stops.
#[derive(Clone)]
pub struct EngineHandle {
    owner: Arc<Owner>,
}

struct Owner {
    shared: Arc<Shared>,
    join: Mutex<Option<JoinHandle<()>>>,
}

impl Owner {
    fn thread(&self) -> Thread {
        self.shared.thread.get().expect("set before the handle was handed out").clone()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.stopping.store(2, Ordering::SeqCst);
        self.thread().unpark();
    }
}

impl EngineHandle {
    /// Hands in a request. Returns at once: with a submission, or with the reason why not.
    pub fn submit(&self, request: Request) -> Result<Submission, SubmitError> {
        let shared = &self.owner.shared;
        shared.submit(request, &self.owner.thread(), shared.elapsed())
    }

    /// The figures now.
    pub fn metrics(&self) -> MetricsSnapshot {
        self.owner.shared.metrics.snapshot()
    }

    /// Why every request fails from now on until the process is started anew: the device is gone. `None` as long as it
    /// works.
    pub fn lost(&self) -> Option<&str> {
        self.owner.shared.lost.get().map(String::as_str)
    }

    /// What each slot is doing.
    pub fn slots(&self) -> Vec<SlotView> {
        self.owner.shared.slots.iter().enumerate().map(|(i, cell)| cell.read(i)).collect()
    }

    /// Runs `work` on the engine's thread before its next step, with the cache and the blocks' memory in its hands: to
    /// export, import, pin or inspect known prefixes. No step runs meanwhile, so keep it short and do files and networks
    /// elsewhere. If the engine stops first, `work` is dropped without having run.
    pub fn with_cache(
        &self,
        work: impl FnOnce(CacheAccess<'_>) + Send + 'static,
    ) -> Result<(), CacheWorkError> {
        let shared = &self.owner.shared;
        if shared.stopped.load(Ordering::SeqCst) {
            return Err(CacheWorkError::Stopped);
        }
        shared.cache_work.push(Box::new(work)).map_err(|_| CacheWorkError::Busy)?;
        if shared.stopped.load(Ordering::SeqCst) {
            shared.refuse_inbox();
        }
        self.owner.thread().unpark();
        Ok(())
    }

    /// What a request may be.
    pub fn limits(&self) -> &Limits {
        &self.owner.shared.limits
    }

    /// The executor's facts.
    pub fn info(&self) -> &ExecutorInfo {
        &self.owner.shared.info
    }

    /// Requests accepted and not ended.
    pub fn in_flight(&self) -> usize {
        self.owner.shared.in_flight()
    }

    /// Is the engine thread alive and taking requests?
    pub fn is_running(&self) -> bool {
        let alive = match self.owner.join.lock() {
            Ok(join) => join.as_ref().is_some_and(|thread| !thread.is_finished()),
            Err(_) => false,
        };
        alive && self.owner.shared.stopping.load(Ordering::SeqCst) == 0
    }

    /// Takes no more requests and begins to stop; returns at once. `Cancel` after `Finish` hurries.
    pub fn shut_down(&self, how: Shutdown) {
        let level = match how {
            Shutdown::Finish => 1,
            Shutdown::Cancel => 2,
        };
        self.owner.shared.stopping.fetch_max(level, Ordering::SeqCst);
        self.owner.thread().unpark();
    }

    /// Waits until the engine thread has ended, at most `timeout`. `true` if it has.
    pub fn join(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        loop {
            let Ok(mut join) = self.owner.join.lock() else { return true };
            match join.as_ref() {
                None => return true,
                Some(thread) if thread.is_finished() => {
                    // A panic of the engine thread has been printed by the hook; there is nothing to add.
                    let _ = join.take().map(JoinHandle::join);
                    return true;
                }
                Some(_) => {}
            }
            drop(join);
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHandle").field("limits", &self.owner.shared.limits).finish_non_exhaustive()
    }
}
