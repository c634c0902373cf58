//! A tier in host memory for blocks that left a device: content by chain hash, a byte budget, least recently used out.
//!
//! On the CPU the blocks themselves are in host memory, so the tier stays empty there.

use std::collections::{BTreeMap, HashMap};

use crate::{BlockHash, KvGroup};

/// What a stored block is: its place in the hash chain and its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostKey {
    /// Chain hash of the block.
    pub hash: BlockHash,
    /// Which group's rows.
    pub group: KvGroup,
}

/// The tier. Never holds more than its budget.
#[derive(Debug, Default)]
pub struct HostTier {
    budget_bytes: usize,
    held_bytes: usize,
    tick: u64,
    blocks: HashMap<HostKey, (Box<[u8]>, u64)>,
    by_use: BTreeMap<u64, HostKey>,
}

impl HostTier {
    /// A tier of at most `budget_bytes`; 0 stores nothing.
    pub fn new(budget_bytes: usize) -> Self {
        Self { budget_bytes, ..Self::default() }
    }

    /// Bytes held.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Stores a block, dropping older ones. A block larger than the budget is not stored.
    pub fn put(&mut self, key: HostKey, bytes: Box<[u8]>) {
        self.remove(&key);
        if bytes.len() > self.budget_bytes {
            return;
        }
        while self.held_bytes + bytes.len() > self.budget_bytes {
            let Some((_, oldest)) = self.by_use.pop_first() else { break };
            if let Some((bytes, _)) = self.blocks.remove(&oldest) {
                self.held_bytes -= bytes.len();
            }
        }
        self.tick += 1;
        self.held_bytes += bytes.len();
        self.by_use.insert(self.tick, key);
        self.blocks.insert(key, (bytes, self.tick));
    }

    /// A stored block, which counts as used now.
    pub fn get(&mut self, key: &HostKey) -> Option<&[u8]> {
        let (bytes, used) = self.blocks.get_mut(key)?;
        self.tick += 1;
        self.by_use.remove(used);
        *used = self.tick;
        self.by_use.insert(self.tick, *key);
        Some(bytes)
    }

    /// Takes a block out.
    pub fn take(&mut self, key: &HostKey) -> Option<Box<[u8]>> {
        let (bytes, used) = self.blocks.remove(key)?;
        self.by_use.remove(&used);
        self.held_bytes -= bytes.len();
        Some(bytes)
    }

    /// Does it store anything at all?
    pub fn is_enabled(&self) -> bool {
        self.budget_bytes > 0
    }

    /// Is it stored?
    pub fn contains(&self, key: &HostKey) -> bool {
        self.blocks.contains_key(key)
    }

    /// Drops a block.
    pub fn remove(&mut self, key: &HostKey) {
        drop(self.take(key));
    }
}
