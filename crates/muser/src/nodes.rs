//! Nodes for the commands that compute: whom prompts are handed to, and who may hand prompts to this one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use muser_backend::ExecutorInfo;
use muser_engine::{EngineHandle, KvConnector, Sources};
use muser_handoff::{Node, NodeConfig, PeerState, Peers as _, Serving, known_names};
use muser_kv_connector::{identity_of, weights_root, without_draft};
use muser_model::{Draft, Model};
use muser_node::{
    Auditor, NodeOptions, NodeSource, NodeUse, NotServing, Producer, ProducerOptions, facts as facts_of,
};
use muser_pack::{FingerprintCache, KeyFile};
use muser_server::dashboard::NodePart;

use crate::env_vars;
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
    facts: muser_handoff::Facts,
    producer: Option<Arc<Producer>>,
    handle: Option<NodeUse>,
    auditor: Option<Auditor>,
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
    let config = NodeConfig { home, listen: wish.listen.into_iter().collect(), dial: true };
    let node = runtime.block_on(Node::start(config, serving)).context("the node of this process")?;
    for address in node.addresses() {
        console.note(format!("nodes may hand prompts over at {address}; its key is {}", node.key()));
    }
    let mut nodes = Nodes { node, facts, producer, handle: None, auditor: None, runtime: Some(runtime) };
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
fn names(wish: &NodeWish, home: &std::path::Path) -> anyhow::Result<Option<Vec<String>>> {
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
        }
        Ok(())
    }

    /// The node, for whoever asks others.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// What it says of itself.
    pub fn facts(&self) -> &muser_handoff::Facts {
        &self.facts
    }

    /// Says for the dashboard how the nodes are, whenever it is asked.
    pub fn states(&self) -> impl Fn() -> Vec<NodePart> + Send + Sync + use<> {
        let (node, handle) = (Arc::clone(&self.node), self.handle.clone());
        move || {
            let state = |peer: PeerState| {
                let rejected = handle.as_ref().is_some_and(|handle| handle.is_rejected(&peer.peer.name));
                NodePart {
                    name: peer.peer.name.to_string(),
                    connected: peer.connected,
                    reads_for_us: !rejected && peer.hello.is_some_and(|hello| hello.serves_prefill),
                    round_trip_s: peer.round_trip.map(|time| time.as_secs_f64()),
                    bytes_per_s: peer.link_rate,
                    fetching: peer.fetching,
                    giving: peer.giving,
                    fault: if rejected { Some("it gave other bits".to_owned()) } else { peer.last_fault },
                }
            };
            node.list().into_iter().map(state).collect()
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
        self.node.stop();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
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
