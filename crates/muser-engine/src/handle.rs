//! Starting an engine and talking to it: submit requests, read figures, shut down.
//!
//! Two crossing points between threads: the inbox (requests in) and each submission's ring (events out). Both are
//! lock-free and bounded.

use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    thread::{JoinHandle, Thread},
    time::{Duration, Instant},
};

use muser_backend::{Executor, ExecutorInfo};
use muser_model::Geometry;

use crate::{
    EngineConfig, EngineError, KvConnector, Limits, MetricsSnapshot, Request, SlotView, Submission,
    SubmitError,
    driver::{Driver, Turn},
    shared::Shared,
};

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
        source: Option<Box<dyn KvConnector>>,
    ) -> Result<EngineHandle, EngineError> {
        let mut driver = Driver::new(executor, &geometry, &config)?;
        driver.set_source(source);
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

    /// Forgets all known prefixes that no running request uses, and returns at once: requests handed in from now on find
    /// nothing of what came before. What a [`KvConnector`] has stays there.
    pub fn forget_prefixes(&self) {
        self.owner.shared.ask_to_forget();
        self.owner.thread().unpark();
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
