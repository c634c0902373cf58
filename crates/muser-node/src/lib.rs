//! The engine's side of hand-off: a prompt is read on another node, and goes on here bit for bit.
//!
//! [`NodeSource`] is a [`muser_engine::KvConnector`]. For a prompt that memory does not know it asks the nodes that fit how
//! soon they would have read it (hashes and counts, no ids), compares that with computing here, and fetches from the soonest.
//! What arrives is written into the engine's reserved memory, and becomes known a stage at a time when the giving node has
//! bound it. Whatever goes wrong ends in the same series of chunks being asked for again, there or elsewhere, or in the prompt
//! being computed from the last stage: no fault of a node is an error to a client.
//!
//! That a node computes the same bits is promised by its identity and shown by a [`canary`] when it is added, and by audits of
//! what it brings ([`Auditor`]).
//!
//! [`Producer`] is the other side: what a peer asks for is an engine request that samples nothing, whose blocks leave while
//! later rows are computed.
//!
//! Frames, TLS and the registry of nodes are `muser-handoff`'s. Nothing here knows a socket, and nothing there an engine.

mod audit;
mod canary;
mod choose;
mod circuit;
mod consumer;
mod facts;
mod figures;
mod give;
mod job;
mod landing;
mod nodes;
mod options;
mod producer;
mod progress;
mod quotes;
mod seats;
mod source;
mod state;
mod sync;
#[cfg(test)]
mod tests;
mod told;

pub use audit::Auditor;
pub use canary::{CanaryError, CanaryReport, canary};
pub use facts::{FactsError, facts};
pub use figures::NodeFigures;
pub use nodes::{NodeUse, RunningHandoff};
pub use options::{NodeOptions, Preference};
pub use producer::{NotServing, Producer};
pub use seats::ProducerOptions;
pub use source::NodeSource;
