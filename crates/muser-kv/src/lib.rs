//! KV cache bookkeeping: which block holds which positions of which prefix.
//!
//! Host data only. A backend owns the memory behind a block, this crate owns its meaning: ids, reference counts,
//! hashes, eviction. Nothing here knows a device, a file or a request.

mod ids;

pub use ids::{BLOCK_LEN, BlockId, KvGroup};
