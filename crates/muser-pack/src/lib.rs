//! KV packs: prefixes that were computed once, kept durably, sealed, and found again.
//!
//! A pack is the state of a model at one cut of one prefix: a sealed manifest and the segments it names, one for each
//! block of 256 positions and each group of layers. Segments are named by their content and shared between packs.
//!
//! [`Library`] is the way in: it finds the furthest place at which a prefix can be resumed ([`Library::longest`]), brings
//! segments into the caller's memory ([`Library::fetch`]) and takes new ones ([`Library::begin_publish`]). What it keeps
//! them in is a [`PackStore`]; what its secrets are is a [`KeyRing`]; what a block's bytes mean is an [`Identity`].
//!
//! The crate knows neither engines nor models. Its invariants:
//!
//! - Nothing that was read is visible to a caller before its authentication code was checked.
//! - A pack is absent or complete: bytes are durable before the catalog's record makes them visible.
//! - No token and no text is in a name, a log or a plain byte of a sealed store.
//! - Whatever goes wrong is an error with a reason; a caller can always go on without packs.

mod counters;
mod encode;
mod error;
mod fingerprint;
#[doc(hidden)]
pub mod fuzzing;
mod identity;
mod key_file;
mod keys;
mod kill_point;
mod kind;
mod library;
mod manifest;
mod name;
mod object;
pub mod store;
#[cfg(test)]
mod testing;

pub use counters::{Counters, CountersSnapshot};
pub use error::{PackError, Refusal};
pub use fingerprint::{FileStamp, FingerprintCache, TensorBytes, WeightsRoot};
pub use identity::{
    Adapter, Digest, DraftModel, Geometry, Identity, LayerKind, Media, Positions, Representation,
};
pub use key_file::{KeyFile, KeyStamp, keep_out_of_dumps};
pub use keys::{EpochInfo, KeyRing, MAX_EPOCHS};
pub use library::{
    Expect, Library, LibraryOptions, PackInfo, Place, Plan, Publication, Published, RecordInfo, Recovered,
    Resealed, Scope, Segment, VerifyReport, Wanted,
};
pub use manifest::{ChainKey, MAX_POSITIONS};
pub use name::{Area, ObjectName, PackId, SegmentId};
pub use object::{ALIGNMENT, MAGIC, MAX_CHUNK_BYTES, MAX_MANIFEST_BYTES, MAX_SEGMENT_BYTES, VERSION};
pub use store::{DirStore, MemoryStore, PackStore};

#[cfg(test)]
mod tests;
