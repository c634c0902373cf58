//! A tier in host memory for blocks that left a device: content by chain hash, a byte budget, least recently used out.
//!
//! What stands in it is bytes, so it lives here and not with the block tables, which know only ids.

use std::collections::{BTreeMap, HashMap};

use muser_kv::HostKey;

/// The tier. Never holds more than its budget.
#[derive(Debug, Default)]
pub(crate) struct HostTier {
    budget_bytes: usize,
    held_bytes: usize,
    tick: u64,
    blocks: HashMap<HostKey, (Box<[u8]>, u64)>,
    by_use: BTreeMap<u64, HostKey>,
}

impl HostTier {
    /// A tier of at most `budget_bytes`; 0 stores nothing.
    pub(crate) fn new(budget_bytes: usize) -> Self {
        Self { budget_bytes, ..Self::default() }
    }

    /// Bytes held.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Stores a block, dropping older ones. A block larger than the budget is not stored.
    pub(crate) fn put(&mut self, key: HostKey, bytes: Box<[u8]>) {
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
    #[cfg(test)]
    pub(crate) fn get(&mut self, key: &HostKey) -> Option<&[u8]> {
        let (bytes, used) = self.blocks.get_mut(key)?;
        self.tick += 1;
        self.by_use.remove(used);
        *used = self.tick;
        self.by_use.insert(self.tick, *key);
        Some(bytes)
    }

    /// Takes a block out.
    pub(crate) fn take(&mut self, key: &HostKey) -> Option<Box<[u8]>> {
        let (bytes, used) = self.blocks.remove(key)?;
        self.by_use.remove(&used);
        self.held_bytes -= bytes.len();
        Some(bytes)
    }

    /// Does it store anything at all?
    pub(crate) fn is_enabled(&self) -> bool {
        self.budget_bytes > 0
    }

    /// Is it stored?
    pub(crate) fn contains(&self, key: &HostKey) -> bool {
        self.blocks.contains_key(key)
    }

    /// Drops a block.
    pub(crate) fn remove(&mut self, key: &HostKey) {
        drop(self.take(key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use muser_kv::KvGroup;

    #[test]
    fn the_host_tier_keeps_its_budget() {
        let mut tier = HostTier::new(1000);
        let key = |i: u8| HostKey { hash: [i; 32], group: KvGroup::Full };
        for i in 0..50 {
            tier.put(key(i), vec![i; 300].into());
            assert!(tier.held_bytes() <= 1000);
            if i >= 1 {
                assert!(tier.get(&key(1)).is_some(), "used ones stay");
            }
        }
        assert!(tier.contains(&key(49)) && !tier.contains(&key(2)));
        tier.put(key(60), vec![0; 1001].into());
        assert!(!tier.contains(&key(60)));
        tier.remove(&key(49));
        assert_eq!(tier.held_bytes(), 600);
    }
}
