//! What the bridge's threads share, and how they are to work.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use muser_engine::{PrefixExport, PrefixQuery};
use muser_kv::CacheScope;
use muser_pack::{Library, Scope};

use crate::WeightsFiles;
use crate::buffers::Buffers;
use crate::figures::Counters;
use crate::job::FetchJob;
use crate::queue::WorkQueue;

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
    pub(crate) scopes: Mutex<HashMap<CacheScope, Scope>>,
    pub(crate) options: PackOptions,
    pub(crate) queries: WorkQueue<PrefixQuery>,
    pub(crate) fetches: WorkQueue<Arc<FetchJob>>,
    pub(crate) offers: WorkQueue<PrefixExport>,
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
