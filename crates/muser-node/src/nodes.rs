//! The handle that everybody but the engine has: figures, and which nodes are not asked any more.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use muser_handoff::Place;
use muser_kv::CacheScope;

use crate::NodeFigures;
use crate::figures::Counters;
use crate::progress::Progress;
use crate::told::JobId;

/// The handle that everybody else has.
#[derive(Clone, Default)]
pub struct NodeUse {
    pub(crate) counters: Arc<Counters>,
    pub(crate) audits: Audits,
    /// Nodes that gave wrong bits: not asked any more.
    pub(crate) rejected: Arc<Mutex<HashSet<Arc<str>>>>,
    /// Only those are asked that have been shown to compute the same bits.
    proof: Arc<AtomicBool>,
    /// Those that have, and the program that they did it with.
    proven: Arc<Mutex<HashMap<Arc<str>, String>>>,
    running: Arc<Mutex<BTreeMap<JobId, Running>>>,
}

/// A hand-off that goes on.
struct Running {
    node: Arc<str>,
    positions: u32,
    progress: Arc<Progress>,
}

/// A hand-off that goes on, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningHandoff {
    /// The node that reads.
    pub node: String,
    /// Positions of the prompt.
    pub positions: u32,
    /// Of these, computed there.
    pub rows: u32,
    /// Bytes that came.
    pub bytes: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NodeUse {
    /// The figures now.
    pub fn figures(&self) -> NodeFigures {
        self.counters.snapshot()
    }

    /// A node gives other bits than computing here: it is not asked any more.
    pub fn reject(&self, node: &str) {
        tracing::error!(node, "a node gives other bits than computing here: it is not asked any more");
        lock(&self.rejected).insert(node.into());
    }

    /// From now on only those nodes are asked that [`NodeUse::note_proven`] names.
    pub fn require_proof(&self) {
        self.proof.store(true, Ordering::Relaxed);
    }

    /// A node that had been put aside has been shown to compute the same bits after all.
    pub fn pardon(&self, node: &str) {
        lock(&self.rejected).remove(node);
    }

    /// A node has been shown to compute the same bits, with this program.
    pub fn note_proven(&self, node: &str, build: &str) {
        lock(&self.proven).insert(node.into(), build.to_owned());
    }

    /// May a node that runs this program be asked?
    pub fn may_be_asked(&self, node: &str, build: &str) -> bool {
        let shown = || lock(&self.proven).get(node).is_some_and(|with| with == build);
        !self.is_rejected(node) && (!self.proof.load(Ordering::Relaxed) || shown())
    }

    /// Hand-offs that go on, the oldest first.
    pub fn running(&self) -> Vec<RunningHandoff> {
        let shown = |running: &Running| {
            let (rows, bytes) = running.progress.now();
            let Running { node, positions, .. } = running;
            RunningHandoff {
                node: node.to_string(),
                positions: *positions,
                rows: rows.min(*positions),
                bytes,
            }
        };
        lock(&self.running).values().map(shown).collect()
    }

    pub(crate) fn note_running(&self, job: JobId, node: &Arc<str>, positions: u32, progress: &Arc<Progress>) {
        let (node, progress) = (Arc::clone(node), Arc::clone(progress));
        lock(&self.running).insert(job, Running { node, positions, progress });
    }

    pub(crate) fn note_over(&self, job: JobId) {
        lock(&self.running).remove(&job);
    }

    /// Has it been rejected?
    pub fn is_rejected(&self, node: &str) -> bool {
        lock(&self.rejected).contains(node)
    }
}

/// A hand-off to be looked at.
pub(crate) struct Audit {
    pub(crate) node: Arc<str>,
    pub(crate) ids: Arc<[u32]>,
    pub(crate) scope: CacheScope,
    /// Rows that came of its beginning, to be compared with those computed from there; or else the stage to compute from.
    pub(crate) from: AuditFrom,
}

/// Where an audit begins to compute.
pub(crate) enum AuditFrom {
    /// At the beginning, of which these rows came: its window has mostly left memory.
    Start(Vec<(Place, Box<[u8]>)>),
    /// Behind a stage, whose window is in memory as long as nobody needed the place.
    Stage(usize),
}

/// Where audits go once there is somebody to do them.
pub(crate) type Audits = Arc<Mutex<Option<Sender<Audit>>>>;
