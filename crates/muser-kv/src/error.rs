//! Why the cache could not do what it was asked.

use crate::KvGroup;

/// Errors of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// No block is free and none can be evicted: all are in use by sequences.
    #[error("all {total} blocks of the {group:?} group are in use")]
    OutOfBlocks {
        /// Which group.
        group: KvGroup,
        /// Blocks there are.
        total: u32,
    },
    /// An import names more blocks than it brings units for.
    #[error("an import of {blocks} blocks needs {needed} positions, {found} were given")]
    ShortImport {
        /// Blocks to import.
        blocks: usize,
        /// Positions in them.
        needed: usize,
        /// Positions given.
        found: usize,
    },
}
