//! How far hand-offs are.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// How far a hand-off is, for people.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    rows: AtomicU32,
    bytes: AtomicU64,
}

impl Progress {
    pub(crate) fn note_rows(&self, rows: u32) {
        self.rows.fetch_max(rows, Ordering::Relaxed);
    }

    pub(crate) fn note_bytes(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Rows that the node has computed, and bytes that came.
    pub(crate) fn now(&self) -> (u32, u64) {
        (self.rows.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}
