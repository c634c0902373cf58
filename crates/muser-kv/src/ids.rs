//! The vocabulary that the cache and the backends share.

/// Positions in a block. Blocks are aligned to absolute positions: block `i` covers `[i * 256, (i + 1) * 256)`.
pub const BLOCK_LEN: usize = 256;

/// Index of a block in the pool of its group. The two groups count separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// Layers whose KV lives and dies together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KvGroup {
    /// Layers that attend to every earlier position. Their blocks live as long as their sequence.
    Full,
    /// Layers that attend to a window. A block is released once the window (plus draft slack) has left it.
    Sliding,
}
