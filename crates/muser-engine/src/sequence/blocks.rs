//! Where a sequence's KV is.

use muser_kv::KvSeq;

use crate::prefix::Restoring;

/// Where a sequence's KV is. Only [`crate::memory::Memory`] takes it from one state to another: it counts the blocks.
#[derive(Default)]
pub(crate) enum Blocks {
    /// It waits for a slot and has none.
    #[default]
    None,
    /// Its slot's blocks are being fetched; it has no rows in any step.
    Fetching(Box<Restoring>),
    /// It has a slot and its blocks.
    Live {
        kv: KvSeq,
        /// Copies into them are planned and not made: what is in them means nothing yet.
        copies_pending: bool,
    },
}

impl Blocks {
    pub(crate) fn kv(&self) -> Option<&KvSeq> {
        if let Self::Live { kv, .. } = self { Some(kv) } else { None }
    }

    pub(crate) fn kv_mut(&mut self) -> Option<&mut KvSeq> {
        if let Self::Live { kv, .. } = self { Some(kv) } else { None }
    }

    pub(crate) fn fetching(&self) -> Option<&Restoring> {
        if let Self::Fetching(restoring) = self { Some(restoring) } else { None }
    }

    pub(crate) fn fetching_mut(&mut self) -> Option<&mut Restoring> {
        if let Self::Fetching(restoring) = self { Some(restoring) } else { None }
    }

    pub(crate) fn awaits_copies(&self) -> bool {
        matches!(self, Self::Live { copies_pending: true, .. })
    }

    /// The step that made the copies has succeeded.
    pub(crate) fn copies_made(&mut self) {
        if let Self::Live { copies_pending, .. } = self {
            *copies_pending = false;
        }
    }
}
