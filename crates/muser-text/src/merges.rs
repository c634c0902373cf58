//! Merge rules: which two neighbours join, into what, and how urgent that is.
//!
//! The priority is the position in the file's list and not the id of the result: in many vocabularies the two differ.

use hashbrown::HashMap;

/// What a pair of neighbours becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Merge {
    /// Position in the list of merges: the lowest goes first.
    pub(crate) rank: u32,
    /// Id of the joined token.
    pub(crate) result: u32,
}

/// The list of merges as a table.
#[derive(Debug, Default)]
pub(crate) struct Merges {
    table: HashMap<u64, Merge>,
    /// Merges of two single bytes, by the bytes: every piece that is not a token starts with these.
    byte_pairs: Vec<Option<Merge>>,
}

impl Merges {
    pub(crate) fn with_capacity(count: usize) -> Merges {
        Merges { table: HashMap::with_capacity(count), byte_pairs: vec![None; 1 << 16] }
    }

    /// Adds a rule; false if the pair has one already.
    pub(crate) fn insert(&mut self, left: u32, right: u32, rank: u32, result: u32) -> bool {
        self.table.insert(key(left, right), Merge { rank, result }).is_none()
    }

    /// Says what the tokens of two bytes become.
    pub(crate) fn set_byte_pair(&mut self, left: u8, right: u8, merge: Option<Merge>) {
        self.byte_pairs[usize::from(left) << 8 | usize::from(right)] = merge;
    }

    /// The rule for two neighbours.
    #[inline]
    pub(crate) fn get(&self, left: u32, right: u32) -> Option<Merge> {
        self.table.get(&key(left, right)).copied()
    }

    /// The rule for the tokens of two neighbouring bytes.
    #[inline]
    pub(crate) fn of_bytes(&self, left: u8, right: u8) -> Option<Merge> {
        self.byte_pairs[usize::from(left) << 8 | usize::from(right)]
    }
}

#[inline]
fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}
