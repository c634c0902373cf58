//! Reference counts and the free list of one group.
//!
//! A block is *used* (references > 0), *cached* (no references, but the tree knows its content) or *free*. The three
//! always add up to the total.

use crate::BlockId;

#[derive(Clone, Copy, Debug, Default)]
struct Meta {
    refs: u32,
    known: bool,
}

#[derive(Debug)]
pub(crate) struct Pool {
    meta: Vec<Meta>,
    free: Vec<BlockId>,
    cached: u32,
}

impl Pool {
    pub(crate) fn new(blocks: u32) -> Self {
        Self {
            meta: vec![Meta::default(); blocks as usize],
            free: (0..blocks).rev().map(BlockId).collect(),
            cached: 0,
        }
    }

    pub(crate) fn total(&self) -> u32 {
        self.meta.len() as u32
    }

    pub(crate) fn cached(&self) -> u32 {
        self.cached
    }

    pub(crate) fn free(&self) -> u32 {
        self.free.len() as u32
    }

    pub(crate) fn used(&self) -> u32 {
        self.total() - self.cached - self.free()
    }

    #[cfg(test)]
    pub(crate) fn refs(&self, block: BlockId) -> u32 {
        self.meta[block.0 as usize].refs
    }

    pub(crate) fn is_cached(&self, block: BlockId) -> bool {
        let meta = self.meta[block.0 as usize];
        meta.refs == 0 && meta.known
    }

    /// A free block with one reference; evicting is the caller's business.
    pub(crate) fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        self.meta[block.0 as usize] = Meta { refs: 1, known: false };
        Some(block)
    }

    pub(crate) fn add_ref(&mut self, block: BlockId) {
        let meta = &mut self.meta[block.0 as usize];
        if meta.refs == 0 {
            debug_assert!(meta.known, "only a known block may come back to life");
            self.cached -= 1;
        }
        meta.refs += 1;
    }

    pub(crate) fn drop_ref(&mut self, block: BlockId) {
        let meta = &mut self.meta[block.0 as usize];
        meta.refs -= 1;
        if meta.refs == 0 {
            if meta.known {
                self.cached += 1;
            } else {
                self.free.push(block);
            }
        }
    }

    /// Tells whether the tree knows the block. A block that nobody uses and the tree forgets is free.
    pub(crate) fn set_known(&mut self, block: BlockId, known: bool) {
        let meta = &mut self.meta[block.0 as usize];
        if meta.known == known {
            return;
        }
        meta.known = known;
        if meta.refs == 0 {
            debug_assert!(!known, "a free block has no content to know");
            self.cached -= 1;
            self.free.push(block);
        }
    }
}
