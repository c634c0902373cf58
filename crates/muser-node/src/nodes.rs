//! The handle that everybody but the engine has: figures, and which nodes are not asked any more.

use std::collections::HashSet;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use muser_handoff::Place;
use muser_kv::CacheScope;

use crate::NodeFigures;
use crate::figures::Counters;

/// The handle that everybody else has.
#[derive(Clone)]
pub struct NodeUse {
    pub(crate) counters: Arc<Counters>,
    pub(crate) audits: Audits,
    /// Nodes that gave wrong bits: not asked any more.
    pub(crate) rejected: Arc<Mutex<HashSet<Arc<str>>>>,
}

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
