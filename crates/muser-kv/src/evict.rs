//! What goes when memory is needed: the least recently used, but what a resume needs stays longest.
//!
//! Full blocks go from the ends of paths, since a block is worth nothing without those before it. Sliding blocks go in
//! two classes: first those that no likely resume point needs, then the others. Likely resume points are the ends of
//! paths, the places where paths part, and the ends of prompts; each needs the window's blocks before it. In the middle
//! of a long prefix only full blocks stay, and nothing is lost by it.

use crate::{BLOCK_LEN, BlockId, Evicted, HostKey, KvCache, KvGroup};

impl KvCache {
    /// Drops one full block (and the sliding block of the same positions). `false` if all are in use.
    pub(crate) fn evict_full(&mut self) -> bool {
        let victim = self
            .tree
            .iter()
            .filter(|&block| self.full.is_cached(block) && self.tree.child_count(block) == 0)
            .min_by_key(|&block| self.tree.last_used(block));
        let Some(victim) = victim else { return false };
        if let Some(sliding) = self.tree.sliding(victim) {
            self.record(victim, KvGroup::Sliding, sliding);
        }
        self.record(victim, KvGroup::Full, victim);
        self.forget(victim);
        self.evicted += 1;
        true
    }

    /// Drops one sliding block. `false` if all are in use.
    pub(crate) fn evict_sliding(&mut self) -> bool {
        let victim = (0..self.sliding.total())
            .map(BlockId)
            .filter(|&block| self.sliding.is_cached(block))
            .min_by_key(|&block| {
                let owner = self.sliding_owner[block.0 as usize];
                (self.needed_to_resume(owner), self.tree.last_used(owner))
            });
        let Some(victim) = victim else { return false };
        let owner = self.sliding_owner[victim.0 as usize];
        self.record(owner, KvGroup::Sliding, victim);
        self.tree.set_sliding(owner, None);
        self.sliding.set_known(victim, false);
        self.evicted += 1;
        true
    }

    fn record(&mut self, node: BlockId, group: KvGroup, block: BlockId) {
        if let Some(evictions) = &mut self.evictions
            && self.tree.is_full(node)
        {
            evictions.push(Evicted { key: HostKey { hash: *self.tree.hash(node), group }, block });
        }
    }

    /// Is a likely resume point near enough after this block to read it?
    fn needed_to_resume(&self, mut block: BlockId) -> bool {
        // One more than a boundary needs, for points inside the block after.
        for _ in 0..=self.window.div_ceil(BLOCK_LEN) {
            if self.tree.child_count(block) != 1 || self.tree.hint(block) {
                return true;
            }
            match self.tree.children(Some(block)).next() {
                Some(child) => block = child,
                None => return true,
            }
        }
        false
    }
}
