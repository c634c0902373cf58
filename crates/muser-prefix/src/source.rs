//! The source that the engine gets, and the handle that everybody else has.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muser_engine::{PrefixOffer, PrefixQuery, PrefixSource};
use muser_kv::{CacheScope, KvGroup, Unit};
use muser_pack::{Library, PackId, Scope};

use crate::buffers::Buffers;
use crate::fetch::{self, FetchJob};
use crate::figures::Counters;
use crate::lookup;
use crate::publish;
use crate::queue::WorkQueue;
use crate::{PackFigures, WeightsFiles};

/// Prefixes that may wait to be published. Each holds memory in the engine, so not many.
const MOST_OFFERS: usize = 32;
/// Questions and fetches that may wait: more than requests that an engine takes.
const MOST_REQUESTS: usize = 4096;
/// Tenants whose keys are remembered; deriving them again is cheap.
const MOST_SCOPES: usize = 1024;

/// How the bridge works.
#[derive(Clone, Debug)]
pub struct PackOptions {
    /// Threads that fetch and verify.
    pub fetch_threads: usize,
    /// Most bytes between store and engine, where the engine's memory cannot be written in place. Two blocks for each thread are used at most: buffers that are used again are
    /// in the processor's caches, and fresh pages would cost more than the copy into them.
    pub ahead_bytes: usize,
    /// Most bytes that one restore may fetch; what would need more is computed. `None`: as many as the engine has memory for.
    pub restore_bytes: Option<usize>,
    /// Longest time of a restore; one that has not ended by then is given up. `None`: as long as it gets on.
    pub restore_time: Option<Duration>,
    /// Keep what is computed. Without it only what is there is used.
    pub publish: bool,
    /// Shortest prefix worth keeping (positions).
    pub least_positions: usize,
    /// While the engine computes, publishing rests this many times as long as it works.
    pub rest: u32,
    /// The files of the weights, draft included: nothing is published once one of them was written to.
    pub weights: Vec<Arc<WeightsFiles>>,
}

impl Default for PackOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        Self {
            fetch_threads: cores.clamp(1, 4),
            ahead_bytes: 48 << 20,
            restore_bytes: None,
            restore_time: None,
            publish: true,
            least_positions: muser_kv::BLOCK_LEN,
            rest: 49,
            weights: Vec::new(),
        }
    }
}

/// What all threads share.
pub(crate) struct Shared {
    pub(crate) library: Library,
    /// Everybody's scope.
    pub(crate) scope: Scope,
    /// Those of others that were used lately.
    scopes: Mutex<HashMap<CacheScope, Scope>>,
    pub(crate) options: PackOptions,
    pub(crate) queries: WorkQueue<PrefixQuery>,
    pub(crate) fetches: WorkQueue<Arc<FetchJob>>,
    pub(crate) offers: WorkQueue<PrefixOffer>,
    pub(crate) buffers: Arc<Buffers>,
    pub(crate) counters: Counters,
    /// Somebody waits for publications: go on without rests.
    pub(crate) hurries: AtomicUsize,
    pub(crate) closed: AtomicBool,
}

impl Shared {
    /// The packs' scope of a scope of the engine: a tenant of its own, under the same identity.
    pub(crate) fn scope_of(&self, scope: CacheScope) -> Scope {
        if scope.is_default() {
            return self.scope.clone();
        }
        let mut scopes = self.scopes.lock().unwrap_or_else(PoisonError::into_inner);
        if scopes.len() >= MOST_SCOPES {
            scopes.clear();
        }
        let tenant = || self.library.scope_for(self.scope.identity().clone(), scope);
        scopes.entry(scope).or_insert_with(tenant).clone()
    }
}

/// The engine's end. When the engine drops it, all threads end.
pub struct PackSource {
    shared: Arc<Shared>,
}

/// The handle: figures, and waiting for publications.
#[derive(Clone)]
pub struct PackUse {
    shared: Arc<Shared>,
    threads: Arc<Vec<JoinHandle<()>>>,
}

impl PackSource {
    /// Starts the threads. Give the source to [`muser_engine::Engine::spawn_with`], and the scope's digest to
    /// [`muser_engine::EngineConfig::identity`].
    ///
    /// # Errors
    /// The system gives no threads.
    pub fn start(library: Library, scope: Scope, options: PackOptions) -> std::io::Result<(Self, PackUse)> {
        let block_bytes = scope.block_bytes(KvGroup::Full).max(scope.block_bytes(KvGroup::Sliding));
        let ahead_bytes = options.ahead_bytes.min(2 * options.fetch_threads.max(1) * block_bytes);
        let shared = Arc::new(Shared {
            library,
            scope,
            scopes: Mutex::default(),
            queries: WorkQueue::new(MOST_REQUESTS),
            fetches: WorkQueue::new(MOST_REQUESTS),
            offers: WorkQueue::new(MOST_OFFERS),
            buffers: Buffers::new(ahead_bytes),
            counters: Counters::default(),
            hurries: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            options,
        });
        // Made first: if a thread cannot be had, its drop ends those that were.
        let source = Self { shared: Arc::clone(&shared) };
        let mut threads = Vec::new();
        let mut spawn = |name: String, work: fn(&Arc<Shared>)| -> std::io::Result<()> {
            let shared = Arc::clone(&shared);
            threads.push(std::thread::Builder::new().name(name).spawn(move || work(&shared))?);
            Ok(())
        };
        spawn("pack-lookup".into(), lookup::run)?;
        spawn("pack-publish".into(), publish::run)?;
        for i in 0..shared.options.fetch_threads.max(1) {
            spawn(format!("pack-fetch-{i}"), fetch::run)?;
        }
        let handle = PackUse { shared, threads: Arc::new(threads) };
        Ok((source, handle))
    }
}

impl PrefixSource for PackSource {
    fn look_up(&mut self, query: PrefixQuery) {
        // A question that finds no place is answered by being dropped.
        drop(self.shared.queries.push(query));
    }

    fn offer(&mut self, offer: PrefixOffer) {
        let shared = &self.shared;
        if !shared.options.publish || offer.units().len() < shared.options.least_positions {
            return;
        }
        Counters::add(&shared.counters.offered, 1);
        if shared.offers.push(offer).is_err() {
            Counters::add(&shared.counters.overrun, 1);
        }
    }
}

impl Drop for PackSource {
    fn drop(&mut self) {
        self.shared.closed.store(true, Relaxed);
        self.shared.queries.close();
        self.shared.fetches.close();
        self.shared.offers.close();
    }
}

impl PackUse {
    /// The packs.
    pub fn library(&self) -> &Library {
        &self.shared.library
    }

    /// Everybody's prefixes, under the identity of what is computed.
    pub fn scope(&self) -> &Scope {
        &self.shared.scope
    }

    /// The same for one scope of the engine.
    pub fn scope_of(&self, scope: CacheScope) -> Scope {
        self.shared.scope_of(scope)
    }

    /// The figures now.
    pub fn figures(&self) -> PackFigures {
        self.shared.counters.snapshot(self.shared.offers.depth())
    }

    /// Waits until everything that was offered has been published or given up; `false` if that took too long. Call it
    /// while the engine still runs: it copies the blocks out.
    pub fn flush(&self, timeout: Duration) -> bool {
        self.shared.hurries.fetch_add(1, Relaxed);
        let done = self.shared.offers.wait_until_empty(timeout);
        self.shared.hurries.fetch_sub(1, Relaxed);
        done
    }

    /// The pack with the longest part of this prefix, and how many positions of it can be resumed.
    pub fn find(&self, units: &[Unit]) -> Option<(PackId, usize)> {
        let plan = self.shared.library.longest(&self.shared.scope, units, units.len(), false)?;
        Some((plan.pack, plan.positions))
    }

    /// Waits until all threads have ended, after the engine has dropped its end; `false` if that took too long.
    pub fn join(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        while !self.threads.iter().all(JoinHandle::is_finished) {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

impl std::fmt::Debug for PackUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PackUse").field("library", &self.shared.library).finish_non_exhaustive()
    }
}
