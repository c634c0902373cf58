//! Work on the prefix cache between steps: the door through which blocks leave for packs and peers and come back.
//!
//! The engine knows nothing of packs. It lends the cache's bookkeeping and the executor, which holds the bytes, to a
//! closure that runs between two steps; afterwards the scheduler just sees a longer known prefix.

use std::panic::{AssertUnwindSafe, catch_unwind};

use muser_backend::{ExecError, Executor};
use muser_kv::{BLOCK_LEN, CacheScope, KvCache, KvGroup, Unit};

use crate::driver::Driver;

/// Pieces of work that may wait.
pub(crate) const CACHE_WORK_LIMIT: usize = 64;

pub(crate) type CacheWork = Box<dyn FnOnce(CacheAccess<'_>) + Send>;

/// The work was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheWorkError {
    /// Too much of it is waiting.
    #[error("{CACHE_WORK_LIMIT} pieces of cache work are waiting already")]
    Busy,
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

/// The cache and the memory behind it, for the length of a call.
pub struct CacheAccess<'a> {
    kv: &'a mut KvCache,
    executor: &'a mut dyn Executor,
}

impl CacheAccess<'_> {
    /// The bookkeeping.
    pub fn kv(&mut self) -> &mut KvCache {
        self.kv
    }

    /// Positions of this prefix that a request would not have to compute.
    pub fn known(&self, units: &[Unit]) -> usize {
        self.kv.known(CacheScope::EVERYBODY, units, units.len())
    }

    /// Calls `take` for every block needed to resume at the last known block boundary of this prefix (full blocks from
    /// 0, then the sliding blocks of the window) and returns that boundary in blocks. The bytes are those of
    /// [`Executor::export_block`].
    pub fn export(
        &mut self,
        units: &[Unit],
        mut take: impl FnMut(KvGroup, usize, &[u8]),
    ) -> Result<usize, ExecError> {
        let held = self.kv.hold(CacheScope::EVERYBODY, units);
        let first_sliding = |blocks: usize| self.kv.first_sliding_block(blocks * BLOCK_LEN).min(blocks);
        let window_is_there = |&blocks: &usize| {
            held.blocks[first_sliding(blocks)..blocks].iter().all(|block| block.sliding.is_some())
        };
        let blocks = (0..=held.blocks.len()).rev().find(window_is_there).unwrap_or(0);
        let result = self.export_held(&held.blocks[..blocks], first_sliding(blocks), &mut take);
        self.kv.unhold(held);
        result.map(|()| blocks)
    }

    fn export_held(
        &self,
        blocks: &[muser_kv::HeldBlock],
        first_sliding: usize,
        take: &mut impl FnMut(KvGroup, usize, &[u8]),
    ) -> Result<(), ExecError> {
        let info = self.executor.info();
        let mut bytes = vec![0; info.full_block_bytes.max(info.sliding_block_bytes)];
        for (index, block) in blocks.iter().enumerate() {
            let bytes = &mut bytes[..info.full_block_bytes];
            self.executor.export_block(KvGroup::Full, block.full, bytes)?;
            take(KvGroup::Full, index, bytes);
        }
        for (index, block) in blocks.iter().enumerate().skip(first_sliding) {
            let Some(sliding) = block.sliding else { continue };
            let bytes = &mut bytes[..info.sliding_block_bytes];
            self.executor.export_block(KvGroup::Sliding, sliding, bytes)?;
            take(KvGroup::Sliding, index, bytes);
        }
        Ok(())
    }

    /// Makes the prefix known up to block boundary `blocks` with bytes from `give` (asked only for what is missing, by
    /// group and block index). When `give` has none or memory runs out nothing becomes known and the answer is `false`.
    ///
    /// The caller vouches for the bytes: same model, same numeric route, same prefix.
    pub fn import(
        &mut self,
        units: &[Unit],
        blocks: usize,
        mut give: impl FnMut(KvGroup, usize) -> Option<Vec<u8>>,
    ) -> Result<bool, ExecError> {
        let Ok(import) = self.kv.begin_import(CacheScope::EVERYBODY, units, blocks) else { return Ok(false) };
        let mut complete = true;
        let mut result = Ok(());
        for block in import.blocks() {
            let bytes = give(block.group, block.index);
            let wanted = self.executor.info().block_bytes(block.group);
            match bytes.filter(|bytes| bytes.len() == wanted) {
                Some(bytes) => result = self.executor.import_block(block.group, block.block, &bytes),
                None => complete = false,
            }
            if !complete || result.is_err() {
                break;
            }
        }
        if complete && result.is_ok() {
            self.kv.finish_import(import);
        } else {
            self.kv.abort_import(import);
        }
        result.map(|()| complete)
    }
}

impl Driver {
    /// Does what waits; `true` if there was something.
    pub(crate) fn do_cache_work(&mut self) -> bool {
        let mut worked = false;
        while let Some(work) = self.shared.cache_work.pop() {
            worked = true;
            let access = CacheAccess { kv: &mut self.scheduler.kv, executor: self.executor.as_mut() };
            if catch_unwind(AssertUnwindSafe(|| work(access))).is_err() {
                tracing::error!("work on the prefix cache panicked");
            }
            // Their blocks may have been written since: what made room for an import does not go to host memory.
            self.scheduler.kv.take_evicted().for_each(drop);
        }
        worked
    }
}
