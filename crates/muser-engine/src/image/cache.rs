//! Rows of pictures by digest, within a budget of bytes.

use std::{collections::HashMap, sync::Arc};

/// Keeps the rows that were used last.
pub(crate) struct RowCache {
    budget: usize,
    held: usize,
    entries: HashMap<[u8; 32], Entry>,
    clock: u64,
}

struct Entry {
    rows: Arc<[f32]>,
    used: u64,
}

impl RowCache {
    pub(crate) fn new(budget: usize) -> Self {
        Self { budget, held: 0, entries: HashMap::new(), clock: 0 }
    }

    /// Bytes kept.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    pub(crate) fn get(&mut self, digest: &[u8; 32]) -> Option<Arc<[f32]>> {
        self.clock += 1;
        let entry = self.entries.get_mut(digest)?;
        entry.used = self.clock;
        Some(Arc::clone(&entry.rows))
    }

    /// Keeps rows if they fit into the budget at all; what was used longest ago makes room.
    pub(crate) fn put(&mut self, digest: [u8; 32], rows: Arc<[f32]>) {
        let bytes = size_of_val(&*rows);
        if bytes > self.budget {
            return;
        }
        self.remove(&digest);
        while self.held + bytes > self.budget {
            let Some(oldest) = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(d, _)| *d)
            else {
                return;
            };
            self.remove(&oldest);
        }
        self.clock += 1;
        self.held += bytes;
        self.entries.insert(digest, Entry { rows, used: self.clock });
    }

    fn remove(&mut self, digest: &[u8; 32]) {
        if let Some(entry) = self.entries.remove(digest) {
            self.held -= size_of_val(&*entry.rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_longest_ago_makes_room() {
        let rows = |n: usize| -> Arc<[f32]> { vec![0.0; n].into() };
        let mut cache = RowCache::new(40);
        cache.put([1; 32], rows(4));
        cache.put([2; 32], rows(4));
        assert!(cache.get(&[1; 32]).is_some());
        cache.put([3; 32], rows(6));
        assert!(cache.get(&[2; 32]).is_none(), "it was used before the first");
        assert!(cache.get(&[1; 32]).is_some() && cache.get(&[3; 32]).is_some());
        assert_eq!(cache.held(), 40);
        // One that does not fit at all drives nobody out.
        cache.put([4; 32], rows(11));
        assert_eq!((cache.held(), cache.get(&[4; 32]).is_none()), (40, true));
        // The same digest again takes the place of the first.
        cache.put([1; 32], rows(2));
        assert_eq!(cache.held(), 32);
        let mut none = RowCache::new(0);
        none.put([1; 32], rows(1));
        assert!(none.get(&[1; 32]).is_none());
    }
}
