//! Prefixes held for export.

use std::collections::VecDeque;

use muser_kv::Held;

/// Prefixes held for export, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    held: VecDeque<(u64, Held)>,
    next: u64,
}

impl Holds {
    /// Keeps a prefix; by the number it can be asked for and be taken.
    pub(crate) fn put(&mut self, held: Held) -> u64 {
        self.next += 1;
        self.held.push_back((self.next, held));
        self.next
    }

    pub(crate) fn get(&self, hold: u64) -> Option<&Held> {
        self.held.iter().find(|(id, _)| *id == hold).map(|(_, held)| held)
    }

    pub(crate) fn take(&mut self, hold: u64) -> Option<Held> {
        let at = self.held.iter().position(|(id, _)| *id == hold)?;
        self.held.remove(at).map(|(_, held)| held)
    }

    pub(crate) fn take_oldest(&mut self) -> Option<Held> {
        self.held.pop_front().map(|(_, held)| held)
    }
}
