//! Prefixes that outlive the engine's memory: the door to packs and peers.
//!
//! The engine knows no files, keys or networks. A [`KvConnector`] is told of every prompt that memory does not know to
//! its end, and of every prefix that has been computed. What it gives back arrives block by block in memory that nobody can
//! see; when the last block is there the prefix becomes known, and the scheduler just sees a longer one. When anything
//! goes wrong on the way, the prompt is computed: nobody but the clock notices.
//!
//! Three conversations, each an object whose loss is an answer too:
//!
//! - [`PrefixQuery`]: how far could this prompt be had? Unanswered in time means not at all.
//! - [`BlockReceiver`]: the blocks that the engine wants. Dropped early means failure; [`BlockReceiver::is_cancelled`] says that
//!   the engine no longer waits.
//! - [`PrefixExport`]: a prefix is final; its blocks can be copied out one at a time, between steps. They are held until
//!   the offer is dropped, or until sequences need the memory.
//!
//! A prefix may still be growing where it is ([`StoredPrefix::stop_after`]), and sources may stand one behind the other
//! ([`Sources`]). Who gives a prompt away while it is computed puts a [`PrefixOutlet`] into the request.

mod delivery;
mod lookup;
mod offer;
mod outlet;
mod pace;
mod query;
mod sources;
mod transfers;

pub use delivery::{BlockBytes, BlockPlace, BlockReceiver};
pub(crate) use lookup::{Fetching, FoundPrefix, Offered, Restoring, StoreLookup, Waiting};
pub use offer::{ExportError, PrefixExport};
pub(crate) use outlet::Outlet;
pub use outlet::PrefixOutlet;
pub use pace::LocalPace;
pub use query::PrefixQuery;
pub(crate) use query::QueryTerms;
pub use sources::Sources;
pub(crate) use transfers::{Transfers, begin_fetches};

use std::sync::Arc;

use muser_kv::KvGroup;

/// Where prefixes are kept that outlive the engine's memory.
///
/// Both methods are called on the engine's thread between steps and return at once: reading, hashing and waiting happen on
/// other threads.
pub trait KvConnector: Send {
    /// A prompt waits for a place, and memory does not know all of it.
    fn look_up(&mut self, query: PrefixQuery);

    /// A prefix has been computed and may be copied.
    fn offer(&mut self, offer: PrefixExport);
}

/// A prefix that a source has found, as far as its blocks go.
pub trait StoredPrefix: Send + Sync {
    /// Can the block with these positions be had?
    fn has(&self, group: KvGroup, index: usize) -> bool;

    /// Position inside an unfinished last block up to which both groups' rows can be had, if such a block is stored: a
    /// fetch of that block's index then means this one.
    fn tail(&self) -> Option<usize> {
        None
    }

    /// Where the next fetch is to end, for a prefix that comes in stages, when `known` positions are there: behind them, at a
    /// place that can be resumed at. What has come to that place stays, whatever becomes of the stages behind it. `None`: as
    /// far as can be had.
    fn stop_after(&self, known: usize) -> Option<usize> {
        let _ = known;
        None
    }

    /// How many positions could be resumed at with what is here alone: what others are asked for reaches further.
    fn alone(&self) -> usize {
        0
    }

    /// Begins to fetch blocks (by group and index) and returns at once. They are delivered in any order, from any thread,
    /// and only after they have been proven to be what was stored for this very prefix.
    fn fetch(&self, wanted: Vec<(KvGroup, usize)>, delivery: BlockReceiver);
}

/// Found (or not): what a source answers.
pub type Found = Option<Arc<dyn StoredPrefix>>;

/// Why a prefix was computed although a source seemed to have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RestoreFailure {
    /// A block was not there any more.
    Missing,
    /// A block was not what had been stored: damaged, foreign, or sealed with another key.
    Invalid,
    /// The store failed.
    Store,
    /// Nothing came in time.
    Slow,
    /// There was no memory for it.
    NoMemory,
    /// The device refused the bytes.
    Device,
}

impl RestoreFailure {
    /// Every reason.
    pub const ALL: [Self; 6] =
        [Self::Missing, Self::Invalid, Self::Store, Self::Slow, Self::NoMemory, Self::Device];

    /// A word for metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Invalid => "invalid",
            Self::Store => "store",
            Self::Slow => "slow",
            Self::NoMemory => "no_memory",
            Self::Device => "device",
        }
    }
}
