//! Nodes of a running process: which of them have been shown to compute the same bits, and what is to be remembered of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muser_engine::EngineHandle;
use muser_handoff::{BUILD, Facts, Fit, Hello, Node, PeerState, Peers as _};
use muser_node::{CanaryError, NodeUse, canary};

use crate::node_notes::{Canary, Notes, hex};

const LOOK: Duration = Duration::from_millis(250);
/// How often rates and faults are written down.
const WRITE: Duration = Duration::from_secs(10);
/// A node whose canary did not come to its end is tried again after this.
const AGAIN: Duration = Duration::from_secs(30);

/// The thread that looks; dropping it ends it.
pub struct NodeWatch {
    stop: Arc<AtomicBool>,
    /// A canary is on its way, which may take a minute.
    busy: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What is looked after.
pub struct Watched {
    pub home: PathBuf,
    pub node: Arc<Node>,
    pub facts: Facts,
    pub handle: NodeUse,
    pub engine: EngineHandle,
    /// Nodes that have not been shown to compute the same bits are shown to, and are not asked before.
    pub prove: bool,
}

impl NodeWatch {
    /// # Errors
    /// The system gives no thread.
    pub fn start(watched: Watched) -> std::io::Result<Self> {
        if watched.prove {
            watched.handle.require_proof();
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, busy) = (Arc::clone(&stop), Arc::<AtomicBool>::default());
        let mut watch = Watch {
            identity: hex(watched.facts.identity),
            watched,
            busy: Arc::clone(&busy),
            aside: BTreeSet::new(),
            tried: BTreeMap::new(),
            written: Instant::now(),
        };
        let run = move || {
            while !stopped.load(Ordering::Relaxed) {
                watch.look();
                std::thread::sleep(LOOK);
            }
            watch.write();
        };
        let thread = std::thread::Builder::new().name("node-watch".into()).spawn(run)?;
        Ok(Self { stop, busy, thread: Some(thread) })
    }
}

impl Drop for NodeWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Nobody waits for a canary: it ends with the node and the engine.
        let thread = self.thread.take().filter(|_| !self.busy.load(Ordering::Relaxed));
        thread.map(JoinHandle::join);
    }
}

struct Watch {
    watched: Watched,
    identity: String,
    busy: Arc<AtomicBool>,
    /// Nodes that were put aside, and of which that is written down.
    aside: BTreeSet<String>,
    /// When a canary did not come to its end.
    tried: BTreeMap<String, Instant>,
    written: Instant,
}

impl Watch {
    fn look(&mut self) {
        let peers = self.watched.node.list();
        let mut notes = None;
        for peer in &peers {
            let name = &*peer.peer.name;
            let Some(hello) = peer.hello.as_ref().filter(|hello| peer.connected && hello.serves_prefill)
            else {
                continue;
            };
            let fits = Fit::of(&self.watched.facts, hello) == Fit::Exact;
            if !fits || hello.window < self.watched.facts.window {
                continue;
            }
            let rejected = self.watched.handle.is_rejected(name);
            if rejected && self.aside.insert(name.to_owned()) {
                self.keep(peer, hello, false, Some("an audit found other bits".into()));
                notes = None;
            }
            let notes = notes.get_or_insert_with(|| Notes::read(&self.watched.home));
            let verdict = notes.verdict(name, peer.peer.key, &hello.build, &self.identity).cloned();
            self.judge(peer, hello, verdict.as_ref());
        }
        if self.written.elapsed() >= WRITE {
            self.write();
        }
    }

    /// Does what a verdict on a node says.
    fn judge(&mut self, peer: &PeerState, hello: &Hello, verdict: Option<&Canary>) {
        let (name, handle) = (&*peer.peer.name, &self.watched.handle);
        match verdict {
            Some(Canary { equal: true, .. }) => {
                // Shown by another process since.
                if self.aside.remove(name) {
                    handle.pardon(name);
                }
                if !handle.may_be_asked(name, &hello.build) {
                    handle.note_proven(name, &hello.build);
                }
            }
            Some(_) => {
                if self.aside.insert(name.to_owned()) {
                    handle.reject(name);
                }
            }
            None => {
                // What was found of another program says nothing of this one.
                if self.aside.remove(name) {
                    handle.pardon(name);
                }
                let waits = self.tried.get(name).is_some_and(|at| at.elapsed() < AGAIN);
                if self.watched.prove && !waits {
                    self.prove(peer, hello);
                }
            }
        }
    }

    fn prove(&mut self, peer: &PeerState, hello: &Hello) {
        let (name, watched) = (&*peer.peer.name, &self.watched);
        self.busy.store(true, Ordering::Relaxed);
        let shown = canary(&*watched.node, name, &watched.facts, &watched.engine);
        self.busy.store(false, Ordering::Relaxed);
        match shown {
            Ok(report) => {
                tracing::info!(node = name, bytes = report.bytes, "every byte of a canary is equal");
                self.keep(peer, hello, true, None);
                self.watched.handle.note_proven(name, &hello.build);
            }
            Err(error @ CanaryError::Unlike { .. }) => {
                self.keep(peer, hello, false, Some(error.to_string()));
                self.aside.insert(name.to_owned());
                self.watched.handle.reject(name);
            }
            Err(error) => {
                tracing::warn!(node = name, "not shown to compute the same bits yet: {error}");
                self.tried.insert(name.to_owned(), Instant::now());
            }
        }
    }

    fn keep(&self, peer: &PeerState, hello: &Hello, equal: bool, found: Option<String>) {
        let canary = canary_note(hello, &self.identity, equal, found);
        let kept = Notes::update(&self.watched.home, |notes| {
            notes.of(&peer.peer.name, peer.peer.key).canary = Some(canary);
        });
        if let Err(error) = kept {
            tracing::warn!("what was found of {} is not kept: {error}", peer.peer.name);
        }
    }

    fn write(&mut self) {
        self.written = Instant::now();
        let peers = self.watched.node.list();
        let kept = Notes::update(&self.watched.home, |notes| {
            notes.nodes.retain(|name, _| peers.iter().any(|peer| *peer.peer.name == **name));
            for peer in peers {
                let note = notes.of(&peer.peer.name, peer.peer.key);
                note.bytes_per_s = peer.link_rate.map(f64::round).or(note.bytes_per_s);
                note.last_fault = peer.last_fault;
            }
        });
        if let Err(error) = kept {
            tracing::warn!("how nodes are is not kept: {error}");
        }
    }
}

/// What is kept of a comparison with a node that says this of itself.
pub fn canary_note(hello: &Hello, identity: &str, equal: bool, found: Option<String>) -> Canary {
    Canary {
        equal,
        found,
        theirs: hello.build.clone(),
        ours: BUILD.to_owned(),
        identity: identity.to_owned(),
    }
}
