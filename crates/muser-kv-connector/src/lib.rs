//! Between engine and packs: what was computed once is kept, and what is kept is not computed again.
//!
//! The engine knows no files and the packs know no engine; this crate is the [`muser_engine::KvConnector`] that joins
//! them. Nothing here runs on the engine's thread but handing over:
//!
//! - one thread answers how far a prompt is stored (an index in memory),
//! - a few threads fetch and verify segments, at most a fixed number of bytes ahead of the engine,
//! - one thread publishes. While the engine computes it works one part in fifty of the time, so that nobody who waits
//!   for tokens notices; when the engine rests, or is asked to flush, it goes as fast as it can.
//!
//! Invariant: bytes reach the engine only after they were authenticated as the rows of this very prefix under this very
//! [`muser_pack::Identity`]. Everything else ends in the prompt being computed.

mod buffers;
mod fetch;
mod figures;
mod identity;
mod job;
mod lookup;
mod publish;
mod queue;
mod shared;
mod source;
mod sync;
#[cfg(test)]
mod tests;

pub use figures::PackFigures;
pub use identity::{IdentityError, WeightsFiles, identity_of, weights_root, without_draft};
pub use shared::PackOptions;
pub use source::{PackSource, PackUse};
