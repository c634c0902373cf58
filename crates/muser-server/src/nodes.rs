//! What the server is told of other nodes. It hands nothing over itself: the engine does, through its door to prefixes.

use muser_engine::HistogramSnapshot;

use crate::dashboard::NodePart;

/// Totals since the start; without nodes all are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeTotals {
    /// Prompts that nodes were asked about, by what became of them.
    pub outcomes: Vec<(&'static str, u64)>,
    /// Requests that went on after a fault, on the same node or on another one.
    pub continued: Vec<(&'static str, u64)>,
    /// Hand-offs that were looked after, by what was found.
    pub audits: Vec<(&'static str, u64)>,
    /// Requests of other nodes, by what became of them.
    pub served: Vec<(&'static str, u64)>,
    /// Positions of prompts that were read for other nodes.
    pub positions_given: u64,
    /// Bytes of rows, by direction.
    pub bytes: Vec<(&'static str, u64)>,
    /// Frames that were refused, by name.
    pub refusals: Vec<(&'static str, u64)>,
    /// Connections that came to nothing, by reason.
    pub handshakes_failed: Vec<(&'static str, u64)>,
    /// From asking to choosing.
    pub quotes: HistogramSnapshot,
    /// Of hand-offs that came to their end.
    pub transfers: HistogramSnapshot,
}

/// A prompt that a node reads for this server now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Handoff {
    /// The node's name here.
    pub node: String,
    /// Positions of the prompt.
    pub positions: u32,
    /// Of these, computed there.
    pub rows: u32,
    /// Bytes that came.
    pub bytes: u64,
}

/// Other nodes, as the server sees them.
pub trait KnownNodes: Send + Sync {
    /// How each of them is.
    fn states(&self) -> Vec<NodePart>;

    /// Totals since the start.
    fn totals(&self) -> NodeTotals;

    /// Prompts that they read for this server now.
    fn handoffs(&self) -> Vec<Handoff>;
}
