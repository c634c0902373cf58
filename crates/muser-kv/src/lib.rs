//! KV cache bookkeeping: which block holds which positions of which prefix.
//!
//! Host data only. A backend owns the memory behind a block, this crate owns its meaning: ids, reference counts,
//! hashes, eviction. Nothing here knows a device, a file or a request.
//!
//! The heart is [`KvCache`]: a pool of blocks for each of the two groups, and a tree over the blocks of the full group
//! in which every path from the root is a known prefix. A sequence ([`KvSeq`]) is a path of its own through that tree,
//! growing at its end:
//!
//! - Blocks are append-only until full and never written again while anyone can see them, so sharing needs no
//!   copy-on-write.
//! - A prefix belongs to a [`CacheScope`]: what one scope has is not there for another.
//! - A sequence that ends leaves its blocks in the tree (reference count 0, *cached*) until memory is needed.
//! - A new sequence takes every known block of its prompt. To resume at a position it needs the full blocks before it
//!   and only those sliding blocks that the window reaches; the furthest such position is taken.
//! - Inside a block it can go on too: at the end of an unfinished block nobody uses it takes that block over, anywhere
//!   else the block is copied ([`BlockCopy`]) and its first rows serve.

mod cache;
mod error;
mod evict;
mod ids;
mod import;
mod pool;
mod position_key;
mod scope;
mod seq;
mod tree;

pub use cache::{BlockCopy, CacheConfig, Evicted, GroupStats, HostKey, KvCache, KvStats};
pub use error::KvError;
pub use ids::{BLOCK_LEN, BlockId, KvGroup};
pub use import::{Import, ImportBlock, Pin, PinnedBlock};
pub use position_key::PositionKey;
pub use scope::CacheScope;
pub use seq::KvSeq;
pub use tree::BlockHash;

#[cfg(test)]
mod tests;
