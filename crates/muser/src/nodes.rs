//! Nodes for the commands that compute: whom prompts are handed to, and who may hand prompts to this one.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use muser_backend::ExecutorInfo;
use muser_engine::{EngineHandle, KvConnector, Sources};
use muser_handoff::{Facts, Fit, Node, NodeConfig, PeerState, Peers as _, Serving, known_names};
use muser_kv_connector::{identity_of, weights_root, without_draft};
use muser_model::{Draft, Model};
use muser_node::{
    Auditor, NodeOptions, NodeSource, NodeUse, NotServing, Producer, ProducerOptions, facts as facts_of,
};
use muser_pack::{FingerprintCache, KeyFile};
use muser_server::dashboard::NodePart;
use muser_server::nodes::{Handoff, KnownNodes, NodeTotals};

use crate::env_vars;
use crate::node_notes::{Notes, Ours};
use crate::node_watch::{NodeWatch, Watched};
use crate::output::{Console, HintExt as _, usage_error};

/// How long a start waits for the first connection to a node: prompts that come before are read here.
const FIRST_CONNECTION: Duration = Duration::from_millis(1500);

/// What the command line says about nodes.
#[derive(Clone, Debug, Default)]
pub struct NodeWish {
    /// Who is handed prompts.
    pub use_of: NodeChoice,
    /// Where to listen for nodes that hand prompts to this one.
    pub listen: Option<SocketAddr>,
    /// It runs for long: nodes are shown to compute the same bits before they are asked.
    pub proves: bool,
    /// Nothing else is done here: there are no clients that other nodes' requests would come after.
    pub serves_alone: bool,
}

/// Which nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NodeChoice {
    /// None.
    #[default]
    Off,
    /// All that are known.
    All,
    /// These.
    Named(Vec<String>),
}

impl NodeChoice {
    /// What `--nodes` says.
    pub fn from_flag(flag: &str) -> Self {
        match flag {
            "off" => Self::Off,
            "all" => Self::All,
            names => Self::Named(names.split(',').map(|name| name.trim().to_owned()).collect()),
        }
    }
}

impl NodeWish {
    /// Is there anything to do?
    pub fn is_none(&self) -> bool {
        self.use_of == NodeChoice::Off && self.listen.is_none()
    }
}

/// The node of this process. Dropping it ends its connections.
pub struct Nodes {
    node: Arc<Node>,
    facts: Facts,
    producer: Option<Arc<Producer>>,
    handle: Option<NodeUse>,
    auditor: Option<Auditor>,
    watch: Option<NodeWatch>,
    home: PathBuf,
    proves: bool,
    runtime: Option<tokio::runtime::Runtime>,
}

/// Starts the node of an engine that will compute `model` on an executor with these facts; `prefixes` is asked before nodes are.
pub fn open(
    wish: &NodeWish,
    model: &Model,
    draft: Option<&Draft>,
    info: &ExecutorInfo,
    context: usize,
    prefixes: Option<Box<dyn KvConnector>>,
    console: &Console,
) -> anyhow::Result<(Option<Box<dyn KvConnector>>, Nodes)> {
    let home = env_vars::muser_home()
        .ok_or_else(|| anyhow::anyhow!("no home folder is known"))
        .hint("nodes are kept in MUSER_HOME")?;
    let only = names(wish, &home)?;
    let keys = KeyFile::open_or_create(&KeyFile::default_path(&home))?;
    let cache = FingerprintCache::new(home.join("fingerprints"), &keys);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let root = weights_root(&model.file, Some(&cache), threads, |_| {});
    let of_draft = draft.map(|draft| (draft, weights_root(&draft.file, Some(&cache), threads, |_| {})));
    let whole = identity_of(model, root, of_draft, info)?;
    let target = identity_of(model, root, None, &without_draft(info, model))?;
    let positions = u32::try_from(context).unwrap_or(u32::MAX);
    let facts = facts_of(model, draft, &target, &whole, info, positions)?;

    let mut options = ProducerOptions::default();
    if wish.serves_alone {
        options.priority = 0;
    }
    let producer = wish.listen.map(|_| Arc::new(Producer::new(facts.clone(), options)));
    let serving: Arc<dyn Serving> = match &producer {
        Some(producer) => Arc::clone(producer) as _,
        None => Arc::new(NotServing(facts.clone())),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads.clamp(1, 4))
        .thread_name("muser-node")
        .enable_all()
        .build()?;
    let ours = Ours::of(&facts);
    if let Err(error) = Notes::update(&home, |notes| notes.ours = Some(ours)) {
        tracing::warn!("what is computed here is not kept for `muser node list`: {error}");
    }
    let config = NodeConfig { home: home.clone(), listen: wish.listen.into_iter().collect(), dial: true };
    let node = runtime.block_on(Node::start(config, serving)).context("the node of this process")?;
    for address in node.addresses() {
        console.note(format!("nodes may hand prompts over at {address}; its key is {}", node.key()));
    }
    let proves = wish.proves;
    let (handle, auditor, watch, runtime) = (None, None, None, Some(runtime));
    let mut nodes = Nodes { node, facts, producer, handle, auditor, watch, home, proves, runtime };
    if wish.use_of == NodeChoice::Off {
        return Ok((prefixes, nodes));
    }
    let options = NodeOptions { only, ..NodeOptions::default() };
    let peers = Arc::clone(&nodes.node) as _;
    let (source, handle) = NodeSource::start(peers, nodes.facts.clone(), options)?;
    nodes.handle = Some(handle);
    nodes.wait_for_one();
    let source: Box<dyn KvConnector> = match prefixes {
        Some(packs) => Box::new(Sources::new(packs, Box::new(source))),
        None => Box::new(source),
    };
    Ok((Some(source), nodes))
}

/// The names of the nodes to use; all of them must be known.
fn names(wish: &NodeWish, home: &Path) -> anyhow::Result<Option<Vec<String>>> {
    if wish.use_of == NodeChoice::Off {
        return Ok(None);
    }
    let known = known_names(home)?;
    if known.is_empty() {
        return Err(usage_error("--nodes: no node is known here"))
            .hint("`muser node invite` there and `muser node add` here make two nodes know each other");
    }
    let NodeChoice::Named(names) = &wish.use_of else { return Ok(None) };
    match names.iter().find(|name| !known.contains(*name)) {
        Some(name) => {
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            Err(usage_error(format!("--nodes: no node is called `{name}`, known are {}", known.join(", "))))
        }
        None => Ok(Some(names.clone())),
    }
}

impl Nodes {
    /// The engine is there: requests of nodes go to it, and what nodes bring is looked after.
    pub fn attach(&mut self, engine: &EngineHandle) -> std::io::Result<()> {
        if let Some(producer) = &self.producer {
            producer.attach(engine.clone());
        }
        if let Some(handle) = &self.handle {
            self.auditor = Some(Auditor::start(handle, engine.clone(), &self.facts)?);
            self.watch = Some(NodeWatch::start(Watched {
                home: self.home.clone(),
                node: Arc::clone(&self.node),
                facts: self.facts.clone(),
                handle: handle.clone(),
                engine: engine.clone(),
                prove: self.proves,
            })?);
        }
        Ok(())
    }

    /// The node, for whoever asks others.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// What it says of itself.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The folder that they are known in.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// What the server is told of them.
    pub fn known(&self) -> impl KnownNodes + use<> {
        Known {
            node: Arc::clone(&self.node),
            facts: self.facts.clone(),
            handle: self.handle.clone(),
            producer: self.producer.clone(),
        }
    }

    fn wait_for_one(&self) {
        let until = std::time::Instant::now() + FIRST_CONNECTION;
        let connected = || self.node.list().iter().any(|peer| peer.connected && peer.hello.is_some());
        while !connected() && std::time::Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Says what went wrong with nodes, if something did.
    pub fn remarks(&self, console: &Console) {
        let Some(handle) = &self.handle else { return };
        let figures = handle.figures();
        tracing::info!(?figures, "prompts that nodes read");
        if figures.given_up > 0 {
            console.note("a node did not come to its end with a prompt: the rest of it was read here");
        }
    }

    /// Requests of other nodes that go on.
    pub fn going(&self) -> u32 {
        self.producer.as_ref().map_or(0, |producer| producer.going())
    }

    /// Takes nothing new; what goes on may end.
    pub fn drain(&self) {
        if let Some(producer) = &self.producer {
            producer.drain();
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        self.auditor = None;
        self.watch = None;
        self.node.stop();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// See [`Nodes::known`].
struct Known {
    node: Arc<Node>,
    facts: Facts,
    handle: Option<NodeUse>,
    producer: Option<Arc<Producer>>,
}

impl Known {
    /// `ready`, or why a node is not asked.
    fn state_of(&self, peer: &PeerState) -> &'static str {
        let (name, handle) = (&peer.peer.name, self.handle.as_ref());
        let Some(hello) = peer.hello.as_ref().filter(|_| peer.connected) else { return "unreachable" };
        let fits = Fit::of(&self.facts, hello) == Fit::Exact && hello.window >= self.facts.window;
        let draining = peer.load.as_ref().is_some_and(|(load, _)| load.draining);
        if handle.is_some_and(|handle| handle.is_rejected(name)) {
            "aside"
        } else if !hello.serves_prefill {
            "no_prompts"
        } else if !fits {
            "unlike"
        } else if draining {
            "draining"
        } else if handle.is_some_and(|handle| !handle.may_be_asked(name, &hello.build)) {
            "unproven"
        } else {
            "ready"
        }
    }

    fn part_of(&self, peer: PeerState) -> NodePart {
        let state = self.state_of(&peer);
        let aside = state == "aside";
        NodePart {
            name: peer.peer.name.to_string(),
            state: state.to_owned(),
            connected: peer.connected,
            reads_for_us: !aside && peer.hello.is_some_and(|hello| hello.serves_prefill),
            round_trip_s: peer.round_trip.map(|time| time.as_secs_f64()),
            bytes_per_s: peer.link_rate,
            fetching: peer.fetching,
            giving: peer.giving,
            fault: if aside { Some("it gave other bits".to_owned()) } else { peer.last_fault },
        }
    }
}

impl KnownNodes for Known {
    fn states(&self) -> Vec<NodePart> {
        self.node.list().into_iter().map(|peer| self.part_of(peer)).collect()
    }

    fn totals(&self) -> NodeTotals {
        let of_wire = self.node.figures();
        let taken = self.handle.as_ref().map(NodeUse::figures).unwrap_or_default();
        let given = self.producer.as_ref().map(|producer| producer.figures()).unwrap_or_default();
        NodeTotals {
            outcomes: vec![
                ("handed", taken.installed),
                ("given_up", taken.given_up.saturating_sub(taken.overtaken)),
                ("overtaken", taken.overtaken),
                ("local_sooner", taken.local_sooner),
                ("no_node", taken.no_node),
            ],
            continued: vec![("same", taken.resumed), ("another", taken.moved)],
            audits: vec![
                ("equal", taken.audited.saturating_sub(taken.unequal)),
                ("different", taken.unequal),
            ],
            served: vec![
                ("given", given.given),
                ("refused", given.busy),
                ("gone", given.gone),
                ("cancelled", given.cancelled),
            ],
            positions_given: given.given_positions,
            bytes: vec![("in", of_wire.bytes.0), ("out", of_wire.bytes.1)],
            refusals: of_wire.refusals,
            handshakes_failed: of_wire.handshakes_failed.into_iter().collect(),
            quotes: taken.quote_time,
            transfers: taken.transfer_time,
        }
    }

    fn handoffs(&self) -> Vec<Handoff> {
        let running = self.handle.as_ref().map(NodeUse::running).unwrap_or_default();
        let shown = |one: muser_node::RunningHandoff| Handoff {
            node: one.node,
            positions: one.positions,
            rows: one.rows,
            bytes: one.bytes,
        };
        running.into_iter().map(shown).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_flag_names() {
        assert_eq!(NodeChoice::from_flag("off"), NodeChoice::Off);
        assert_eq!(NodeChoice::from_flag("all"), NodeChoice::All);
        assert_eq!(NodeChoice::from_flag("a, b"), NodeChoice::Named(vec!["a".into(), "b".into()]));
        assert!(NodeWish::default().is_none());
        let listen = "127.0.0.1:0".parse().ok();
        assert!(!NodeWish { listen, ..NodeWish::default() }.is_none());
    }
}
