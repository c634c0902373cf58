//! Reading prompts for peers: each request is an engine request that samples nothing.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use muser_engine::EngineHandle;
use muser_handoff::{
    Answer, Digest, Ended, Facts, Load, NodeKey, Nonce, Outlet, Peer, Quote, Quoted, Reason, Serving,
};
use muser_kv::{BLOCK_LEN, CacheScope};

use crate::NodeFigures;
use crate::figures::Counters;
use crate::give::{Giving, give};

/// Block hashes of prompts that were read lately: as many as 64 prompts of 131,072 positions have.
const MOST_HASHES: usize = 32_768;
/// Depth of the engine's second rate.
const DEEP: u32 = 32_768;

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

/// The giving side.
pub struct Producer {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) engine: EngineHandle,
    pub(crate) facts: Facts,
    pub(crate) options: ProducerOptions,
    pub(crate) counters: Counters,
    places: AtomicU32,
    draining: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Requests of each peer that go on, and how a later one of the same series ends an earlier one.
    going: HashMap<NodeKey, Vec<(Nonce, Arc<AtomicBool>)>>,
    known: HashSet<Digest>,
    order: VecDeque<Digest>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time of so many rows behind `depth` positions; `None` before anything was measured.
    pub(crate) fn time(&self, rows: u64, depth: u64) -> Option<Duration> {
        let now = self.engine.metrics();
        let shallow = now.prefill_rate.max(1);
        let deep = now.deep_prefill_rate.clamp(1, shallow);
        // A row's time grows with what it attends to, in a line.
        let slope = (1.0 / deep as f64 - 1.0 / shallow as f64) / f64::from(DEEP);
        let middle = depth as f64 + rows as f64 / 2.0;
        let seconds = rows as f64 * (1.0 / shallow as f64 + slope * middle);
        if now.prefill_rate == 0 { None } else { Duration::try_from_secs_f64(seconds).ok() }
    }

    /// The prompt has been read as far as these hashes go.
    pub(crate) fn remember(&self, hashes: Vec<Digest>) {
        let mut state = self.lock();
        for hash in hashes {
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

    /// Positions of a prompt that were read lately.
    fn known(&self, hashes: &[Digest]) -> usize {
        let state = self.lock();
        hashes.iter().take_while(|hash| state.known.contains(*hash)).count() * BLOCK_LEN
    }

    /// A place for a request. An earlier one of the same series gives way.
    fn begin(self: &Arc<Self>, peer: &Peer, series: Nonce) -> Result<Seat, Reason> {
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
    peer: NodeKey,
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

impl Producer {
    /// Serves peers with `engine`, whose facts these are.
    pub fn new(engine: EngineHandle, facts: Facts, options: ProducerOptions) -> Self {
        let shared = Shared {
            engine,
            facts: Facts { serves_prefill: true, ..facts },
            options,
            counters: Counters::default(),
            places: AtomicU32::new(0),
            draining: AtomicBool::new(false),
            state: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Takes no new requests.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Relaxed);
    }

    /// Requests of peers that go on.
    pub fn going(&self) -> u32 {
        self.shared.places.load(Ordering::Relaxed)
    }

    /// The figures now.
    pub fn figures(&self) -> NodeFigures {
        self.shared.counters.snapshot()
    }

    /// Whose prefixes a peer's prompts are: its own, so that no peer learns by time what others have asked.
    pub fn scope_of(peer: &NodeKey) -> CacheScope {
        CacheScope::of(&[b"peer", &peer.0])
    }
}

impl Serving for Producer {
    fn facts(&self) -> Facts {
        self.shared.facts.clone()
    }

    fn load(&self) -> Load {
        let now = self.shared.engine.metrics();
        let rate = |rate: u64| u32::try_from(rate).unwrap_or(u32::MAX);
        let rates = [(0, rate(now.prefill_rate)), (DEEP, rate(now.deep_prefill_rate))];
        let info = self.shared.engine.info();
        let free = now.full_blocks_total.saturating_sub(now.full_blocks_used) * info.full_block_bytes as u64
            + now.sliding_blocks_total.saturating_sub(now.sliding_blocks_used)
                * info.sliding_block_bytes as u64;
        Load {
            queued_rows: rate(now.queued_rows),
            running: u16::try_from(now.running).unwrap_or(u16::MAX),
            places: u16::try_from(self.shared.options.most).unwrap_or(u16::MAX),
            free_bytes: free,
            rates: rates.into_iter().filter(|(_, rate)| *rate > 0).collect(),
            draining: self.shared.draining.load(Ordering::Relaxed),
            ..Load::default()
        }
    }

    fn quote(&self, _: &Peer, quote: Quote, answer: Answer) {
        let shared = &self.shared;
        let busy = shared.places.load(Ordering::Relaxed) >= shared.options.most;
        let refused = if shared.draining.load(Ordering::Relaxed) {
            Some(Reason::Draining)
        } else if quote.identity != shared.facts.identity {
            Some(Reason::Unlike)
        } else if quote.positions > shared.facts.max_positions {
            Some(Reason::TooLong)
        } else {
            busy.then_some(Reason::Busy)
        };
        let known = shared.known(&quote.hashes).min(quote.positions as usize);
        let rows = u64::from(quote.positions) - known as u64;
        let ms = |time: Option<Duration>| {
            time.map_or(0, |time| u32::try_from(time.as_millis()).unwrap_or(u32::MAX))
        };
        answer(Quoted {
            question: quote.question,
            known: known as u32,
            wait_ms: ms(shared.time(shared.engine.metrics().queued_rows, 0)),
            compute_ms: ms(shared.time(rows, known as u64)),
            refused,
        });
    }

    fn request(&self, peer: &Peer, request: Arc<muser_handoff::Request>, outlet: Arc<dyn Outlet>) {
        let shared = &self.shared;
        let fits = request.identity == shared.facts.identity
            && request.span.window <= shared.facts.window
            && (!request.wants_draft() || request.draft == shared.facts.draft);
        let seat = if fits { shared.begin(peer, request.series) } else { Err(Reason::Unlike) };
        let seat = match seat {
            Ok(seat) => seat,
            Err(reason) => {
                Counters::add(&shared.counters.busy, 1);
                outlet.give_up(reason);
                return;
            }
        };
        Counters::add(&shared.counters.served, 1);
        let giving = Giving { request, outlet: Arc::clone(&outlet), scope: Self::scope_of(&peer.key), seat };
        let started = std::thread::Builder::new().name("node-give".into()).spawn(move || {
            let shared = Arc::clone(&giving.seat.shared);
            let counter = match give(giving) {
                Ended::Acknowledged => &shared.counters.given,
                Ended::Aborted(Reason::Gone) => &shared.counters.gone,
                Ended::Aborted(_) | Ended::Lost => &shared.counters.cancelled,
            };
            Counters::add(counter, 1);
        });
        if started.is_err() {
            outlet.give_up(Reason::Internal);
        }
    }
}
