//! The source that the engine gets, and the handle that everybody else has.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muser_engine::{KvConnector, PrefixExport, PrefixQuery};
use muser_kv::{CacheScope, KvGroup, PositionKey};
use muser_pack::{Library, PackId, Scope};

use crate::PackFigures;
use crate::buffers::Buffers;
use crate::fetch;
use crate::figures::Counters;
use crate::lookup;
use crate::publish;
use crate::queue::WorkQueue;
use crate::shared::{PackOptions, Shared};

/// Prefixes that may wait to be published. Each holds memory in the engine, so not many.
const MOST_OFFERS: usize = 32;
/// Questions and fetches that may wait: more than requests that an engine takes.
const MOST_REQUESTS: usize = 4096;

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

impl KvConnector for PackSource {
    fn look_up(&mut self, query: PrefixQuery) {
        // A question that finds no place is answered by being dropped.
        drop(self.shared.queries.push(query));
    }

    fn offer(&mut self, offer: PrefixExport) {
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
    pub fn find(&self, units: &[PositionKey]) -> Option<(PackId, usize)> {
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
