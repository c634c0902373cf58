//! What requests of peers share: the engine, the places, and what was read lately.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use muser_engine::EngineHandle;
use muser_handoff::{Digest, Facts, NodeKey, Nonce, Peer, Reason};
use muser_kv::BLOCK_LEN;

use crate::figures::Counters;

/// Block hashes of prompts that were read lately: as many as 64 prompts of 131,072 positions have.
pub(crate) const MOST_HASHES: usize = 32_768;
/// Depth of the engine's second rate.
pub(crate) const DEEP: u32 = 32_768;

/// How peers are served.
#[derive(Clone, Debug)]
pub struct ProducerOptions {
    /// Most requests of peers at once.
    pub most: u32,
    /// Most of one peer.
    pub most_of_a_peer: u32,
    /// Priority of a peer's most urgent request: below that of clients (0) unless told otherwise.
    pub priority: i32,
}

impl Default for ProducerOptions {
    fn default() -> Self {
        Self { most: 16, most_of_a_peer: 8, priority: -100 }
    }
}

pub(crate) struct Shared {
    /// Set once the engine is there: the node may listen before.
    pub(crate) engine: OnceLock<EngineHandle>,
    pub(crate) facts: Facts,
    pub(crate) options: ProducerOptions,
    pub(crate) counters: Counters,
    pub(crate) places: AtomicU32,
    pub(crate) draining: AtomicBool,
    pub(crate) state: Mutex<State>,
}

#[derive(Default)]
pub(crate) struct State {
    /// Requests of each peer that go on, and how a later one of the same series ends an earlier one.
    going: HashMap<NodeKey, Vec<(Nonce, Arc<AtomicBool>)>>,
    known: HashSet<(NodeKey, Digest)>,
    order: VecDeque<(NodeKey, Digest)>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time of so many rows behind `depth` positions; `None` before anything was measured.
    pub(crate) fn time(&self, rows: u64, depth: u64) -> Option<Duration> {
        let now = self.engine.get()?.metrics();
        let shallow = now.prefill_rate.max(1);
        let deep = now.deep_prefill_rate.clamp(1, shallow);
        // A row's time grows with what it attends to, in a line.
        let slope = (1.0 / deep as f64 - 1.0 / shallow as f64) / f64::from(DEEP);
        let middle = depth as f64 + rows as f64 / 2.0;
        let seconds = rows as f64 * (1.0 / shallow as f64 + slope * middle);
        if now.prefill_rate == 0 { None } else { Duration::try_from_secs_f64(seconds).ok() }
    }

    /// A peer's prompt has been read as far as these hashes go.
    pub(crate) fn remember(&self, peer: NodeKey, hashes: Vec<Digest>) {
        let mut state = self.lock();
        for hash in hashes.into_iter().map(|hash| (peer, hash)) {
            if state.known.insert(hash) {
                state.order.push_back(hash);
            }
        }
        while state.order.len() > MOST_HASHES {
            if let Some(oldest) = state.order.pop_front() {
                state.known.remove(&oldest);
            }
        }
    }

    /// Positions of a prompt that were read lately for this peer: what others have asked is none of its business.
    pub(crate) fn known(&self, peer: NodeKey, hashes: &[Digest]) -> usize {
        let state = self.lock();
        hashes.iter().take_while(|hash| state.known.contains(&(peer, **hash))).count() * BLOCK_LEN
    }

    /// A place for a request. An earlier one of the same series gives way.
    pub(crate) fn begin(self: &Arc<Self>, peer: &Peer, series: Nonce) -> Result<Seat, Reason> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Reason::Draining);
        }
        let mut state = self.lock();
        let going = state.going.entry(peer.key).or_default();
        let before = going.iter().filter(|(other, _)| *other == series);
        before.for_each(|(_, replaced)| replaced.store(true, Ordering::Relaxed));
        let others = going.iter().filter(|(other, _)| *other != series).count();
        if others >= self.options.most_of_a_peer as usize {
            return Err(Reason::Limit);
        }
        if self.places.fetch_add(1, Ordering::Relaxed) >= self.options.most {
            self.places.fetch_sub(1, Ordering::Relaxed);
            return Err(Reason::Busy);
        }
        let replaced = Arc::new(AtomicBool::new(false));
        going.push((series, Arc::clone(&replaced)));
        Ok(Seat { shared: Arc::clone(self), peer: peer.key, replaced })
    }
}

/// A place among the requests that go on; dropping it gives it back.
pub(crate) struct Seat {
    pub(crate) shared: Arc<Shared>,
    pub(crate) peer: NodeKey,
    /// A later request of the same series has come.
    pub(crate) replaced: Arc<AtomicBool>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.shared.places.fetch_sub(1, Ordering::Relaxed);
        let mut state = self.shared.lock();
        if let Some(going) = state.going.get_mut(&self.peer) {
            going.retain(|(_, replaced)| !Arc::ptr_eq(replaced, &self.replaced));
            if going.is_empty() {
                state.going.remove(&self.peer);
            }
        }
    }
}
