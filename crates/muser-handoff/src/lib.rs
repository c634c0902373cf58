//! Hand-off: one node reads a prompt, another one goes on from it, bit for bit.
//!
//! This crate knows frames, what both sides may do when ([`consumer`] and [`producer`], without sockets or clocks), TLS, and who may talk to whom. It knows no engine: `muser-node` glues it to one.
//!
//! **A consumer** lists its [`Peers`], asks some for a [`Quote`], makes a [`Series`] of what it lacks and hands it to
//! [`Peers::fetch`] with a [`Sink`]. Chunks come in any order and are written where they belong; [`Sink::ready`] says that a
//! stage (or at the end the cut) is complete and bound by the producer, the consumer switches and answers
//! [`Fetching::installed`]. Whatever goes wrong ends in [`Sink::ended`] with the series and what it has: the same series may be
//! given to the next node, which sends only what lacks. Full, delta and resumption are one request with different holdings.
//!
//! **A producer** implements [`Serving`]. A request that may be asked comes with an [`Outlet`]: it is admitted with
//! [`Outlet::begin`], blocks are given as they become final ([`Outlet::block`] waits for the consumer's room, so memory is
//! bounded), and STAGE and SEAL go by themselves when their chunks are sent.
//!
//! Nothing unsolicited is ever taken: a frame belongs to a transfer that was asked for with a fresh nonce, on this connection,
//! and is not over. So there is no ledger of what was seen. The format is `docs/formats/handoff.md`.

mod conn;
pub mod consumer;
mod dial;
mod digest;
mod encode;
mod enrol;
mod error;
pub mod frame;
#[doc(hidden)]
pub mod fuzzing;
mod ids;
pub mod link;
mod node;
mod peers;
mod plan;
mod planes;
mod private;
pub mod producer;
mod ranges;
mod refusal;
mod registry;
mod secret;
mod series;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tls;

pub use dial::{Visit, visit};
pub use digest::{SeriesKey, prefix_digest};
pub use enrol::{CODE_TIME, Code, add, invite};
pub use error::NodeError;
pub use frame::{BUILD, Hello, Load, Part, Quote, Quoted, Reason, Request};
pub use ids::{Digest, NodeKey, Nonce, TransferId};
pub use node::{Node, NodeConfig, NodeFigures, known_names};
pub use peers::{
    Answer, Ended, Facts, Fetch, FetchEnd, Fetching, Fit, Limits, Outlet, Peer, PeerState, Peers, RESUMPTION,
    SILENCE, Serving, Sink,
};
pub use plan::{MAX_POSITIONS, MAX_STAGES, Place, Plan, Span};
pub use planes::{Component, MAX_CHUNK_BYTES, Plane, Planes};
pub use private::{lock as lock_private, read as read_private, write as write_private};
pub use ranges::{MAX_RANGES, RangeSet};
pub use refusal::{Refusal, Refusals};
pub use registry::{Entry, Registry, Rights, check_address};
pub use secret::{Secret, Secrets};
pub use series::{Series, Wanted};
pub use tls::{ALPN, ENROL_ALPN};

#[cfg(test)]
mod tests;
