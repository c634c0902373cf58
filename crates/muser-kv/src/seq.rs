//! A sequence's hold on its blocks.

use crate::{BLOCK_LEN, BlockId, CacheScope};

/// The block tables of one live sequence. Made by [`crate::KvCache::begin`], given back by [`crate::KvCache::release`];
/// dropping it instead leaks its blocks.
#[derive(Debug)]
#[must_use = "a sequence's blocks must be released"]
pub struct KvSeq {
    pub(crate) full: Vec<BlockId>,
    pub(crate) sliding: Vec<BlockId>,
    pub(crate) sliding_first: usize,
    pub(crate) len: usize,
    pub(crate) publish: bool,
    pub(crate) scope: CacheScope,
}

impl KvSeq {
    /// Positions whose KV is in the blocks and final. The next row goes to this position.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Has it no position yet?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Block table of the full group, from position 0.
    pub fn full(&self) -> &[BlockId] {
        &self.full
    }

    /// Block table of the sliding group, from block [`KvSeq::sliding_first`].
    pub fn sliding(&self) -> &[BlockId] {
        &self.sliding
    }

    /// Absolute index (position / 256) of the first entry of [`KvSeq::sliding`].
    pub fn sliding_first(&self) -> usize {
        self.sliding_first
    }

    /// Rows before this position have blocks in both groups.
    pub fn reserved(&self) -> usize {
        self.full.len().min(self.sliding_first + self.sliding.len()) * BLOCK_LEN
    }
}
