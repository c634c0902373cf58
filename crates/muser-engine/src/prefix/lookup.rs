//! What a sequence knows of its prompt elsewhere, and a fetch under way.
//!
//! A sequence that fetches has its memory and no slot. Whatever ends the fetch, the sequence then
//! begins as any other: with the longest prefix that memory knows.

use std::{sync::Arc, time::Duration};

use muser_kv::{Import, ImportBlock, KvGroup, PositionKey};
use smallvec::SmallVec;

use super::{
    BlockReceiver, Found, RestoreFailure, StoredPrefix,
    delivery::{Delivered, DeliveryCell, Failed},
    query::QueryCell,
};

/// Fetches of one sequence that may fail before its prompt is simply computed.
const MOST_ATTEMPTS: u32 = 3;

/// What a sequence knows about its prompt elsewhere.
#[derive(Default)]
pub(crate) enum StoreLookup {
    /// Nothing, or nothing any more.
    #[default]
    None,
    /// The source has been asked.
    Asked {
        cell: Arc<QueryCell>,
        /// When to wait no longer.
        until: Duration,
    },
    /// The source has something.
    Found(FoundPrefix),
}

/// A prefix that the source has.
#[derive(Clone)]
pub(crate) struct FoundPrefix {
    pub(crate) prefix: Arc<dyn StoredPrefix>,
    /// Blocks that turned out not to be had.
    excluded: SmallVec<[(KvGroup, usize); MOST_ATTEMPTS as usize]>,
    attempts: u32,
}

impl FoundPrefix {
    /// Can the block be had, as far as is known?
    pub(crate) fn has(&self, group: KvGroup, index: usize) -> bool {
        !self.is_excluded(group, index) && self.prefix.has(group, index)
    }

    pub(crate) fn is_excluded(&self, group: KvGroup, index: usize) -> bool {
        self.excluded.contains(&(group, index))
    }
}

/// What a look at a lookup says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// There is nothing to wait for.
    Over,
    /// For an answer, until then.
    Until(Duration),
    /// For no answer any more: it took too long.
    GivenUp,
}

impl StoreLookup {
    /// Takes an answer, or gives up on it.
    pub(crate) fn look(&mut self, now: Duration) -> Waiting {
        let Self::Asked { cell, until } = self else { return Waiting::Over };
        let (found, waiting) = match cell.answer() {
            None if now < *until => return Waiting::Until(*until),
            None => {
                cell.give_up();
                (Self::None, Waiting::GivenUp)
            }
            Some(Found::None) => (Self::None, Waiting::Over),
            Some(Some(prefix)) => {
                let prefix = Arc::clone(prefix);
                let found = FoundPrefix { prefix, excluded: SmallVec::new(), attempts: 0 };
                (Self::Found(found), Waiting::Over)
            }
        };
        *self = found;
        waiting
    }

    pub(crate) fn found(&self) -> Option<&FoundPrefix> {
        if let Self::Found(found) = self { Some(found) } else { None }
    }

    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Remembers what a fetch failed of, so that the next one does without; after some there is no next.
    pub(crate) fn exclude(&mut self, (_, block): Failed) {
        let Self::Found(found) = self else { return };
        found.attempts += 1;
        match block.filter(|_| found.attempts < MOST_ATTEMPTS) {
            Some(block) => found.excluded.push(block),
            None => *self = Self::None,
        }
    }
}

/// A fetch under way.
pub(crate) struct Restoring {
    import: Import,
    /// The blocks still to come.
    missing: Vec<ImportBlock>,
    pub(crate) cell: Arc<DeliveryCell>,
    /// Positions that memory knew before.
    known: usize,
    began: Duration,
    last_progress: Duration,
    /// The executor refused a block.
    device_failed: bool,
    /// Everything has come and is about to be known.
    imported: bool,
}

impl Restoring {
    pub(crate) fn new(import: Import, cell: Arc<DeliveryCell>, known: usize, now: Duration) -> Self {
        let missing = import.blocks().collect();
        Self {
            import,
            missing,
            cell,
            known,
            began: now,
            last_progress: now,
            device_failed: false,
            imported: false,
        }
    }

    pub(crate) fn held_blocks(&self) -> (usize, usize) {
        self.import.held_blocks()
    }

    pub(crate) fn units(&self) -> &[PositionKey] {
        self.import.units()
    }

    /// Positions that it brings.
    pub(crate) fn brings(&self) -> usize {
        self.units().len() - self.known
    }

    pub(crate) fn began(&self) -> Duration {
        self.began
    }

    pub(crate) fn missing(&self) -> &[ImportBlock] {
        &self.missing
    }

    /// The block that these bytes are for, which is then no longer missing.
    pub(crate) fn take_target(&mut self, delivered: &Delivered) -> Option<ImportBlock> {
        let at = self
            .missing
            .iter()
            .position(|block| block.group == delivered.group && block.index == delivered.index)?;
        Some(self.missing.swap_remove(at))
    }

    /// A block has arrived.
    pub(crate) fn note_progress(&mut self, now: Duration) {
        self.last_progress = now;
    }

    /// The device refused a block: it is missing for good.
    pub(crate) fn refuse(&mut self, target: ImportBlock) {
        self.device_failed = true;
        self.missing.push(target);
    }

    /// When it will have gone too long without a block.
    pub(crate) fn stalls_at(&self, stall: Duration) -> Duration {
        self.last_progress + stall
    }

    /// How it ended, if it has. What has arrived whole has arrived, whatever is said afterwards.
    pub(crate) fn end(&mut self, now: Duration, stall: Duration) -> Option<Result<(), Failed>> {
        if self.missing.is_empty() {
            return Some(Ok(()));
        }
        if self.device_failed {
            return Some(Err((RestoreFailure::Device, None)));
        }
        if self.cell.take_alive() {
            self.last_progress = now;
        }
        let slow = now >= self.stalls_at(stall);
        self.cell.failure().or_else(|| slow.then_some((RestoreFailure::Slow, None))).map(Err)
    }

    /// The import, all of which has come.
    pub(crate) fn take_imported(&mut self) -> Import {
        self.imported = true;
        std::mem::take(&mut self.import)
    }

    /// The import, to be ended; nothing more is taken in.
    pub(crate) fn into_import(mut self) -> Import {
        std::mem::take(&mut self.import)
    }
}

impl Drop for Restoring {
    fn drop(&mut self) {
        self.cell.end(self.imported);
    }
}

/// A fetch that begins with this turn, once nothing more is copied out of its blocks.
pub(crate) struct Fetching {
    pub(crate) prefix: Arc<dyn StoredPrefix>,
    pub(crate) wanted: Vec<ImportBlock>,
    pub(crate) delivery: BlockReceiver,
}

/// What of a sequence has been offered to the source.
#[derive(Debug, Default)]
pub(crate) struct Offered {
    /// Its prompt has been read and not been offered.
    due: bool,
    positions: usize,
}

impl Offered {
    /// The prompt has been read.
    pub(crate) fn note_prompt(&mut self) {
        self.due = true;
    }

    /// Is the prompt to be offered? Asked once.
    pub(crate) fn take_due(&mut self) -> bool {
        std::mem::take(&mut self.due)
    }

    /// Is a prefix of so many positions more than what was offered before? It counts as offered then.
    pub(crate) fn grows_to(&mut self, positions: usize) -> bool {
        let grows = positions > self.positions;
        self.positions = self.positions.max(positions);
        grows
    }
}
