//! Reading prompts for peers: each request is an engine request that samples nothing.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use muser_engine::EngineHandle;
use muser_handoff::{
    Answer, Digest, Ended, Facts, Load, NodeKey, Outlet, Peer, Quote, Quoted, Reason, Serving,
};
use muser_kv::CacheScope;

use crate::NodeFigures;
use crate::figures::Counters;
use crate::give::{Giving, give};
use crate::seats::{DEEP, ProducerOptions, Shared};

/// The giving side.
pub struct Producer {
    shared: Arc<Shared>,
}

impl Producer {
    /// Serves peers with an engine that has these facts, once there is one: a node says who it is before that.
    pub fn new(facts: Facts, options: ProducerOptions) -> Self {
        let shared = Shared {
            engine: OnceLock::new(),
            facts: Facts { serves_prefill: true, ..facts },
            options,
            counters: Counters::default(),
            places: AtomicU32::new(0),
            draining: AtomicBool::new(false),
            state: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The engine is there.
    pub fn attach(&self, engine: EngineHandle) {
        let _ = self.shared.engine.set(engine);
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
    /// And within a peer's those of one of its tenants, as it keeps them apart itself.
    pub fn scope_of(peer: &NodeKey, tenant: &Digest) -> CacheScope {
        CacheScope::of(&[b"peer", &peer.0, tenant])
    }
}

/// A node that reads no prompts for others.
pub struct NotServing(pub Facts);

impl Serving for NotServing {
    fn facts(&self) -> Facts {
        Facts { serves_prefill: false, ..self.0.clone() }
    }

    fn load(&self) -> Load {
        Load::default()
    }

    fn quote(&self, _: &Peer, quote: Quote, answer: Answer) {
        let refused = Some(Reason::NotAllowed);
        answer(Quoted { question: quote.question, known: 0, wait_ms: 0, compute_ms: 0, refused });
    }

    fn request(&self, _: &Peer, _: Arc<muser_handoff::Request>, outlet: Arc<dyn Outlet>) {
        outlet.give_up(Reason::NotAllowed);
    }
}

impl Serving for Producer {
    fn facts(&self) -> Facts {
        self.shared.facts.clone()
    }

    fn load(&self) -> Load {
        let Some(engine) = self.shared.engine.get() else { return Load::default() };
        let now = engine.metrics();
        let rate = |rate: u64| u32::try_from(rate).unwrap_or(u32::MAX);
        let rates = [(0, rate(now.prefill_rate)), (DEEP, rate(now.deep_prefill_rate))];
        let info = engine.info();
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

    fn quote(&self, peer: &Peer, quote: Quote, answer: Answer) {
        let shared = &self.shared;
        let engine = shared.engine.get();
        let busy = engine.is_none() || shared.places.load(Ordering::Relaxed) >= shared.options.most;
        let refused = if shared.draining.load(Ordering::Relaxed) {
            Some(Reason::Draining)
        } else if quote.identity != shared.facts.identity {
            Some(Reason::Unlike)
        } else if quote.positions > shared.facts.max_positions {
            Some(Reason::TooLong)
        } else {
            busy.then_some(Reason::Busy)
        };
        let known = shared.known(peer.key, &quote.hashes).min(quote.positions as usize);
        let rows = u64::from(quote.positions) - known as u64;
        let ms = |time: Option<Duration>| {
            time.map_or(0, |time| u32::try_from(time.as_millis()).unwrap_or(u32::MAX))
        };
        answer(Quoted {
            question: quote.question,
            known: known as u32,
            wait_ms: ms(engine.and_then(|engine| shared.time(engine.metrics().queued_rows, 0))),
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
        let scope = Self::scope_of(&peer.key, &request.tenant);
        let positions = u64::from(request.span.cut);
        let giving = Giving { request, outlet: Arc::clone(&outlet), scope, seat };
        let started = std::thread::Builder::new().name("node-give".into()).spawn(move || {
            let shared = Arc::clone(&giving.seat.shared);
            let counter = match give(giving) {
                Ended::Acknowledged => {
                    Counters::add(&shared.counters.given_positions, positions);
                    &shared.counters.given
                }
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
