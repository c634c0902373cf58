//! Engines over Muse Tiny on the CPU, and what their memory holds.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::net::Net;
use crate::wire::Wire;
use muser_backend::{Executor, KvType};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{
    Engine, EngineConfig, EngineHandle, Event, KvConnector, PrefixExport, PrefixOutlet, Request,
    SamplingParams, Usage,
};
use muser_handoff::{Component, Facts, Peers};
use muser_kv::{BLOCK_LEN, CacheScope, KvGroup};
use muser_model::Model;
use muser_node::{NodeFigures, NodeOptions, NodeSource, NodeUse, Preference, Producer, ProducerOptions};
use muser_pack::WeightsRoot;

pub(crate) fn model() -> Arc<Model> {
    Arc::new(Model::load(muser_testkit::muse_tiny()).expect("the bundled model loads"))
}

/// An executor of its own.
pub(crate) fn executor() -> CpuExecutor {
    executor_of(Model::load(muser_testkit::muse_tiny()).expect("it loads"))
}

pub(crate) fn executor_of(model: Model) -> CpuExecutor {
    let options = CpuOptions { threads: Some(1), max_rows: 512, kv: KvType::Int16, ..CpuOptions::default() };
    CpuExecutor::new(model, options).expect("an executor")
}

pub(crate) fn facts() -> Facts {
    let (model, executor) = (model(), executor());
    let identity =
        muser_kv_connector::identity_of(&model, WeightsRoot([7; 32]), None, executor.info()).expect("fits");
    muser_node::facts(&model, None, &identity, &identity, executor.info(), 100_000).expect("in digits")
}

pub(crate) fn engine(config: EngineConfig, source: Option<Box<dyn KvConnector>>) -> EngineHandle {
    engine_of(executor(), config, source)
}

pub(crate) fn engine_of(
    executor: CpuExecutor,
    config: EngineConfig,
    source: Option<Box<dyn KvConnector>>,
) -> EngineHandle {
    let geometry = model().geometry.clone();
    Engine::spawn_with(Box::new(executor), geometry, config, source).expect("an engine")
}

pub(crate) fn config() -> EngineConfig {
    EngineConfig {
        context: Some(4400),
        parallel: 4,
        prefill_rows: 512,
        source_timeout: Duration::from_secs(5),
        ..EngineConfig::default()
    }
}

/// Ids and logits' hashes of an answer, and what it took.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) tokens: Vec<(u32, u64)>,
    pub(crate) usage: Usage,
}

pub(crate) fn ask(engine: &EngineHandle, prompt: &[u32], tokens: u32) -> Said {
    ask_as(engine, prompt, tokens, CacheScope::EVERYBODY)
}

pub(crate) fn ask_as(engine: &EngineHandle, prompt: &[u32], tokens: u32, scope: CacheScope) -> Said {
    let request = Request {
        scope,
        max_tokens: Some(tokens),
        sampling: SamplingParams::greedy(),
        hash_logits: true,
        ..Request::new(prompt.to_vec(), Vec::new())
    };
    let mut submission = engine.submit(request).expect("it is taken");
    let mut said = Said { tokens: Vec::new(), usage: Usage::default() };
    loop {
        match submission.recv_timeout(Duration::from_mins(2)).expect("it goes on") {
            Some(Event::Token(token)) => said.tokens.push((token.id, token.logit_hash.unwrap_or(0))),
            Some(Event::Finished(finished)) => said.usage = finished.usage,
            Some(Event::Failed(error)) => panic!("{error}"),
            Some(_) => {}
            None => return said,
        }
    }
}

struct Hash(Mutex<Sender<PrefixExport>>);

impl PrefixOutlet for Hash {
    fn grown(&mut self, offer: PrefixExport) {
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).send(offer);
    }
}

/// Digest of all K and V that an engine has of a prompt: all of the full group, and the last window of the sliding one.
pub(crate) fn state_digest(engine: &EngineHandle, prompt: &[u32], window: usize) -> [u8; 32] {
    let (send, receive) = channel();
    let request = Request {
        max_tokens: Some(0),
        sampling: SamplingParams::greedy(),
        outlet: Some(Box::new(Hash(Mutex::new(send)))),
        ..Request::new(prompt.to_vec(), Vec::new())
    };
    let mut submission = engine.submit(request).expect("it is taken");
    while submission.recv().is_some() {}
    let offers: Vec<PrefixExport> = receive.try_iter().collect();
    let offer = offers.iter().find(|offer| offer.units().len() == prompt.len()).expect("all of it");
    let mut hasher = blake3::Hasher::new();
    let mut buffer = Vec::new();
    let first = (prompt.len() + 1).saturating_sub(window) / BLOCK_LEN;
    for index in 0..offer.blocks() {
        for group in [KvGroup::Full, KvGroup::Sliding] {
            if group == KvGroup::Sliding && index < first {
                continue;
            }
            let (bytes, result) = offer.copy_out_blocking(group, index, buffer);
            result.expect("it is in memory");
            hasher.update(&bytes);
            buffer = bytes;
        }
    }
    *hasher.finalize().as_bytes()
}

/// Random ids.
pub(crate) fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut rng = muser_testkit::Rng(seed);
    (0..len).map(|_| 300 + rng.below(700) as u32).collect()
}

/// Nobody uses a block.
pub(crate) fn assert_idle(engine: &EngineHandle) {
    let until = std::time::Instant::now() + Duration::from_secs(20);
    loop {
        let now = engine.metrics();
        if (now.full_blocks_used, now.sliding_blocks_used, engine.in_flight()) == (0, 0, 0) {
            return;
        }
        assert!(std::time::Instant::now() < until, "blocks are not given back: {now:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A consumer with its nodes, and an engine that has none.
pub(crate) struct Bench {
    pub(crate) local: EngineHandle,
    pub(crate) consumer: EngineHandle,
    pub(crate) producers: Vec<EngineHandle>,
    pub(crate) givers: Vec<Arc<Producer>>,
    /// Connections without sockets, or sockets.
    pub(crate) wire: Option<Arc<Wire>>,
    pub(crate) net: Option<Net>,
    pub(crate) nodes: NodeUse,
}

impl Bench {
    pub(crate) fn new(stage_every: u32, nodes: usize) -> Self {
        Self::with(always(stage_every), nodes, false)
    }

    /// The same over TLS.
    pub(crate) fn tls(stage_every: u32, nodes: usize) -> Self {
        Self::with(always(stage_every), nodes, true)
    }

    pub(crate) fn wire(&self) -> &Wire {
        self.wire.as_ref().expect("without sockets")
    }

    pub(crate) fn net(&self) -> &Net {
        self.net.as_ref().expect("with sockets")
    }

    pub(crate) fn peers(&self) -> Arc<dyn Peers> {
        match (&self.wire, &self.net) {
            (Some(wire), _) => Arc::clone(wire) as _,
            (_, Some(net)) => Arc::clone(&net.consumer) as _,
            _ => unreachable!("one of them"),
        }
    }

    pub(crate) fn with(options: NodeOptions, nodes: usize, tls: bool) -> Self {
        let producers = (0..nodes).map(|_| engine(config(), None)).collect();
        Self::of(options, producers, tls)
    }

    pub(crate) fn of(options: NodeOptions, producers: Vec<EngineHandle>, tls: bool) -> Self {
        let facts = facts();
        let giver = |engine: &EngineHandle| {
            let options = ProducerOptions { most_of_a_peer: 16, ..ProducerOptions::default() };
            let giver = Producer::new(facts.clone(), options);
            giver.attach(engine.clone());
            Arc::new(giver)
        };
        let givers: Vec<Arc<Producer>> = producers.iter().map(giver).collect();
        let (wire, net) = if tls {
            let givers = givers.iter().map(|giver| Arc::clone(giver) as _).collect();
            (None, Some(Net::new(facts.clone(), givers)))
        } else {
            let names = ["first", "second", "third"].into_iter().zip(&givers);
            let all = names.map(|(name, giver)| (name, Arc::clone(giver) as _)).collect();
            (Some(Wire::new(facts.clone(), all)), None)
        };
        let peers: Arc<dyn Peers> = match (&wire, &net) {
            (Some(wire), _) => Arc::clone(wire) as _,
            (_, Some(net)) => Arc::clone(&net.consumer) as _,
            _ => unreachable!("one of them"),
        };
        let (source, nodes) = NodeSource::start(peers, facts, options).expect("a thread");
        Self {
            local: engine(config(), None),
            consumer: engine(config(), Some(Box::new(source))),
            producers,
            givers,
            wire,
            net,
            nodes,
        }
    }

    /// Requests of peers that came to their end.
    pub(crate) fn given(&self) -> u64 {
        self.givers.iter().map(|giver| giver.figures().given).sum()
    }

    /// The figures once every hand-off has come to its end.
    pub(crate) fn settled(&self) -> NodeFigures {
        let until = std::time::Instant::now() + Duration::from_secs(20);
        loop {
            let now = self.nodes.figures();
            if now.begun <= now.installed + now.given_up {
                return now;
            }
            assert!(std::time::Instant::now() < until, "a hand-off never ends: {now:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Nobody holds anything any more.
    pub(crate) fn assert_idle(&self) {
        [&self.local, &self.consumer].into_iter().chain(&self.producers).for_each(assert_idle);
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while self.givers.iter().any(|giver| giver.going() > 0) {
            assert!(std::time::Instant::now() < until, "a request of a peer never ends");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Nodes wherever there is one.
pub(crate) fn always(stage_every: u32) -> NodeOptions {
    NodeOptions {
        preference: Preference::Nodes,
        stage_every,
        ask_for: Duration::from_secs(2),
        ..NodeOptions::default()
    }
}

/// Positions that a row of a sliding layer reads.
pub(crate) fn window() -> usize {
    facts().window as usize
}

/// Bytes of the rows behind `held`, and of the window before `cut`.
pub(crate) fn bytes_of_rows(held: usize, cut: usize) -> usize {
    let facts = facts();
    let row = |group| -> usize {
        let planes = facts.planes.of_group(group).filter(|plane| plane.component == Component::Target);
        planes.map(|plane| usize::from(plane.layers) * plane.row_bytes()).sum()
    };
    let window = (cut + 1).saturating_sub(facts.window as usize) / BLOCK_LEN * BLOCK_LEN;
    (cut - held) * row(KvGroup::Full) + (cut - window.max(held)) * row(KvGroup::Sliding)
}

/// Has an engine read a prompt by itself, for whoever has the scope.
pub(crate) fn read(engine: &EngineHandle, prompt: &[u32], scope: CacheScope) {
    let request = Request {
        max_tokens: Some(0),
        sampling: SamplingParams::greedy(),
        for_peer: true,
        scope,
        ..Request::new(prompt.to_vec(), Vec::new())
    };
    let mut submission = engine.submit(request).expect("it is taken");
    while submission.recv().is_some() {}
}

/// The same for everybody.
pub(crate) fn read_here(engine: &EngineHandle, prompt: &[u32]) {
    read(engine, prompt, CacheScope::EVERYBODY);
}
