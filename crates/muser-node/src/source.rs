//! The source that the engine gets, and how it is to work.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use muser_engine::{Delivery, PrefixOffer, PrefixQuery, PrefixSource, StoredPrefix};
use muser_handoff::{Facts, FetchEnd, Peers, Quoted, Series};
use muser_kv::{BLOCK_LEN, KvGroup};

use crate::NodeFigures;
use crate::consumer::Consumer;
use crate::figures::Counters;
use crate::landing::Block;

/// When nodes are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preference {
    /// Where that is sooner than computing here.
    #[default]
    Soonest,
    /// Wherever there is one.
    Nodes,
}

/// How nodes are used.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Names of those that may be asked; `None` for all that are known.
    pub only: Option<Vec<String>>,
    /// When.
    pub preference: Preference,
    /// Most nodes asked about one prompt.
    pub most_nodes: usize,
    /// Longest time spent asking.
    pub ask_for: Duration,
    /// A prompt that computing here takes no longer for is not asked about.
    pub least_local: Duration,
    /// Positions between two stages; each carries a window, so they are far apart.
    pub stage_every: u32,
    /// The longest hand-off, unless its request has less time.
    pub budget: Duration,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            only: None,
            preference: Preference::Soonest,
            most_nodes: 8,
            ask_for: Duration::from_millis(50),
            least_local: Duration::from_millis(100),
            stage_every: 8192,
            budget: Duration::from_mins(10),
        }
    }
}

/// A hand-off, by a number of its own.
pub(crate) type JobId = u64;

/// What the consumer's thread hears of.
pub(crate) enum Told {
    Asked(PrefixQuery),
    /// A node's answer; `None`: it has none.
    Quoted {
        question: u32,
        node: Arc<str>,
        quoted: Option<Quoted>,
    },
    /// The engine has memory for a stage.
    Fetch {
        job: JobId,
        wanted: Vec<Block>,
        delivery: Delivery,
    },
    /// The engine's end of a stage.
    StageEnded {
        job: JobId,
        stage: u32,
        imported: bool,
    },
    /// The engine has lost the prefix.
    Forgotten {
        job: JobId,
    },
    /// A node has admitted a request and will give these stages.
    Begun {
        job: JobId,
        turn: u32,
        stages: Vec<u32>,
    },
    /// Everything up to a boundary is written and bound.
    Ready {
        job: JobId,
        turn: u32,
        boundary: u32,
    },
    /// What a node says of the time that it still needs.
    Rest {
        job: JobId,
        turn: u32,
        rest: Duration,
    },
    /// A request is over.
    Ended {
        job: JobId,
        turn: u32,
        series: Box<Series>,
        end: FetchEnd,
    },
    Close,
}

/// The engine's end of the nodes' use. When the engine drops it, the thread ends.
pub struct NodeSource {
    tell: Sender<Told>,
}

/// The handle that everybody else has.
#[derive(Clone)]
pub struct NodeUse {
    counters: Arc<Counters>,
    rejected: Rejected,
}

/// Nodes that gave wrong bits: not asked any more.
pub(crate) type Rejected = Arc<Mutex<HashSet<Arc<str>>>>;

impl NodeUse {
    /// The figures now.
    pub fn figures(&self) -> NodeFigures {
        self.counters.snapshot()
    }

    /// A node gives other bits than computing here: it is not asked any more.
    pub fn reject(&self, node: &str) {
        tracing::error!(node, "a node gives other bits than computing here: it is not asked any more");
        self.rejected.lock().unwrap_or_else(PoisonError::into_inner).insert(node.into());
    }

    /// Has it been rejected?
    pub fn is_rejected(&self, node: &str) -> bool {
        self.rejected.lock().unwrap_or_else(PoisonError::into_inner).contains(node)
    }
}

impl NodeSource {
    /// Starts the thread that asks and chooses. `facts` are those of the engine that gets the source.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(
        peers: Arc<dyn Peers>,
        facts: Facts,
        options: NodeOptions,
    ) -> std::io::Result<(Self, NodeUse)> {
        let (tell, hear): (Sender<Told>, Receiver<Told>) = channel();
        let counters = Arc::new(Counters::default());
        let rejected = Rejected::default();
        let handle = NodeUse { counters: Arc::clone(&counters), rejected: Arc::clone(&rejected) };
        let mut consumer = Consumer::new(peers, facts, options, counters, rejected, tell.clone());
        std::thread::Builder::new().name("node-fetch".into()).spawn(move || {
            loop {
                let now = Instant::now();
                let until = consumer.work(now);
                let wait = until.map_or(Duration::from_mins(1), |until| until.saturating_duration_since(now));
                match hear.recv_timeout(wait) {
                    Ok(Told::Close) | Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                    Ok(told) => consumer.take(told, Instant::now()),
                    Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                }
            }
            consumer.close();
        })?;
        Ok((Self { tell }, handle))
    }
}

impl PrefixSource for NodeSource {
    fn look_up(&mut self, query: PrefixQuery) {
        let _ = self.tell.send(Told::Asked(query));
    }

    fn offer(&mut self, offer: PrefixOffer) {
        drop(offer);
    }
}

impl Drop for NodeSource {
    fn drop(&mut self) {
        let _ = self.tell.send(Told::Close);
    }
}

/// A prompt that a node will read.
pub(crate) struct HandedPrefix {
    pub(crate) job: JobId,
    pub(crate) positions: usize,
    pub(crate) stages: Vec<u32>,
    pub(crate) tell: Mutex<Sender<Told>>,
}

impl HandedPrefix {
    fn tell(&self, told: Told) {
        let _ = self.tell.lock().unwrap_or_else(PoisonError::into_inner).send(told);
    }
}

impl StoredPrefix for HandedPrefix {
    fn has(&self, _: KvGroup, index: usize) -> bool {
        index < self.positions / BLOCK_LEN
    }

    fn tail(&self) -> Option<usize> {
        (!self.positions.is_multiple_of(BLOCK_LEN)).then_some(self.positions)
    }

    fn stop_after(&self, known: usize) -> Option<usize> {
        self.stages.iter().map(|&stage| stage as usize).find(|&stage| stage > known)
    }

    fn alone(&self) -> usize {
        self.positions
    }

    fn fetch(&self, wanted: Vec<(KvGroup, usize)>, delivery: Delivery) {
        self.tell(Told::Fetch { job: self.job, wanted, delivery });
    }
}

impl Drop for HandedPrefix {
    fn drop(&mut self) {
        self.tell(Told::Forgotten { job: self.job });
    }
}

/// Numbers from 1.
pub(crate) struct Numbers(AtomicU64);

impl Numbers {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(1))
    }

    pub(crate) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}
