//! The real thing: nodes on loopback, TLS with pinned keys, and a relay in between that does what networks do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muser_handoff::testing::{Faults, Relay};
use muser_handoff::{Entry, Facts, Node, NodeConfig, Peers, Registry, Rights, Secrets, Serving};
use muser_node::NotServing;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// A consumer and those that it knows.
pub(crate) struct Net {
    pub(crate) consumer: Arc<Node>,
    pub(crate) producers: Vec<Arc<Node>>,
    pub(crate) relays: Vec<Relay>,
    runtime: Option<Runtime>,
    _homes: Vec<TempDir>,
}

fn config(home: &TempDir, listen: bool) -> NodeConfig {
    let listen = if listen { vec!["127.0.0.1:0".parse().expect("an address")] } else { Vec::new() };
    NodeConfig { home: home.path().into(), listen, dial: true }
}

fn enrol(home: &TempDir, entry: Entry) {
    Registry::update(home.path(), |registry| registry.add(entry)).expect("it is new");
}

impl Net {
    /// Nodes that know each other; the consumer reaches each through a relay of its own.
    pub(crate) fn new(facts: Facts, givers: Vec<Arc<dyn Serving>>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let home = || tempfile::tempdir().expect("a folder");
        let ours = home();
        let our_key = Secrets::open_or_create(ours.path()).expect("a key").current.key();
        let rights = Rights { prefill: true, sessions: false };
        let (mut producers, mut relays, mut homes) = (Vec::new(), Vec::new(), Vec::new());
        for (index, giver) in givers.into_iter().enumerate() {
            let theirs = home();
            let mut entry = Entry::new("consumer", None, our_key, rights);
            entry.transfers = 32;
            enrol(&theirs, entry);
            let node = runtime.block_on(Node::start(config(&theirs, true), giver)).expect("it starts");
            let relay =
                runtime.block_on(Relay::start(node.addresses()[0], Faults::default())).expect("a relay");
            let name = ["first", "second", "third"][index];
            let address = Some(relay.address().to_string());
            enrol(&ours, Entry::new(name, address, node.key(), Rights::default()));
            producers.push(node);
            relays.push(relay);
            homes.push(theirs);
        }
        let serving = Arc::new(NotServing(facts));
        let consumer = runtime.block_on(Node::start(config(&ours, false), serving)).expect("it starts");
        homes.push(ours);
        let net = Self { consumer, producers, relays, runtime: Some(runtime), _homes: homes };
        net.wait_until_connected();
        net
    }

    pub(crate) fn wait_until_connected(&self) {
        let until = Instant::now() + Duration::from_secs(90);
        while !self.consumer.list().iter().all(|peer| peer.connected && peer.hello.is_some()) {
            assert!(Instant::now() < until, "no connection: {:?}", self.consumer.list());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.consumer.stop();
        self.producers.iter().for_each(|node| node.stop());
        self.relays.clear();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
