//! The kinds of objects: each has keys, limits and an area of its own.

/// What an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Describes a pack.
    Manifest = 1,
    /// Rows of the full layers of a block.
    Full = 2,
    /// Rows of the sliding layers of a block.
    Sliding = 3,
    /// Bytes under a name.
    Record = 4,
}
