//! Prefixes held for export.

use std::collections::VecDeque;

use muser_kv::Pin;

/// Prefixes held for export, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    held: VecDeque<(u64, Pin)>,
    next: u64,
}

impl Pins {
    /// Keeps a prefix; by the number it can be asked for and be taken.
    pub(crate) fn put(&mut self, held: Pin) -> u64 {
        self.next += 1;
        self.held.push_back((self.next, held));
        self.next
    }

    pub(crate) fn get(&self, hold: u64) -> Option<&Pin> {
        self.held.iter().find(|(id, _)| *id == hold).map(|(_, held)| held)
    }

    pub(crate) fn take(&mut self, hold: u64) -> Option<Pin> {
        let at = self.held.iter().position(|(id, _)| *id == hold)?;
        self.held.remove(at).map(|(_, held)| held)
    }

    pub(crate) fn take_oldest(&mut self) -> Option<Pin> {
        self.held.pop_front().map(|(_, held)| held)
    }
}
