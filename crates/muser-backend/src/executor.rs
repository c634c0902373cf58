//! What stands between the engine and a device: [`Executor`], with a trait each for drafts and for pictures.
//!
//! No method has a body here. An executor that lacks a faculty says so ([`crate::no_drafts`], [`crate::no_tower`]), and one that
//! wraps another forwards by name ([`crate::delegate_executor`]): a method that is forgotten does not compile.

use std::time::Duration;

use muser_kv::{BlockId, KvGroup};
use muser_model::{Draft, Projector};

use crate::arith::vision::PositionRule;
use crate::{
    DraftBatch, DraftInfo, ExecError, KvCapacity, KvType, StepBatch, StepOutput, TowerImage, TowerInfo,
};

/// What an executor is and how its blocks look from outside.
#[derive(Clone, Debug)]
pub struct ExecutorInfo {
    /// `scalar`, `cpu`, `cuda`, ...
    pub backend: &'static str,
    /// The device in words, such as `AMD EPYC, 2 threads, AVX-512 VNNI`.
    pub device: String,
    /// Numeric route: backend arithmetic, kernel revision and KV type. Equal routes give equal bits; a KV block may be
    /// reused only by the route that wrote it.
    pub route: String,
    /// Storage type of K and V.
    pub kv_type: KvType,
    /// Bytes of one block of the full group (all its layers), as [`Executor::export_block`] writes it.
    pub full_block_bytes: usize,
    /// Bytes of one block of the sliding group.
    pub sliding_block_bytes: usize,
    /// Most rows that one step takes.
    pub max_rows: usize,
    /// Values per row in [`StepOutput::logits`].
    pub vocab: usize,
    /// Values per row in [`StepOutput::hidden`].
    pub hidden: usize,
    /// Set once [`DraftExecutor::attach_draft`] has succeeded.
    pub draft: Option<DraftInfo>,
    /// Bytes that the device's own memory has left for KV blocks, less a reserve; `None` where blocks lie in host memory. Less
    /// after something was attached.
    pub kv_room: Option<u64>,
    /// Rows of a prompt that a step should have where nobody else waits for it, because fewer take about as long; 0 where time grows with
    /// rows. It may change from step to step.
    pub prompt_rows: usize,
}

impl ExecutorInfo {
    /// Bytes of one block of `group`.
    pub fn block_bytes(&self, group: KvGroup) -> usize {
        match group {
            KvGroup::Full => self.full_block_bytes,
            KvGroup::Sliding => self.sliding_block_bytes,
        }
    }
}

/// The memory of one KV block, lent to whoever fills it. Dropping it gives the block back.
pub trait LentBlock: Send {
    /// The block, in the layout of [`Executor::export_block`]; until it is written it holds whatever was there.
    fn bytes(&mut self) -> &mut [u8];
}

/// A loaded model on a device, with the memory of its KV blocks.
///
/// One thread drives an executor. A failed step leaves the executor usable; the KV rows that the step was writing are
/// undefined afterwards, everything else is untouched.
pub trait Executor: DraftExecutor + TowerExecutor + Send {
    /// Facts that do not change while the executor lives.
    fn info(&self) -> &ExecutorInfo;

    /// Allocates the KV blocks, dropping earlier ones. Called before the first step.
    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError>;

    /// Runs one step: writes K and V of every row into the blocks named by the tables, fills `out`.
    ///
    /// Rows of one sequence are consecutive positions and see each other causally.
    fn step(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError>;

    /// Most of a row's largest logits that [`crate::RowWants::candidates`] may ask for, if that is less work than handing out
    /// the row; 0 if it is not.
    fn most_candidates(&self) -> usize;

    /// Bytes per second that a plain read of the device's own memory reaches right now: what steps of few rows are
    /// measured against. `None` where the device computes from the host's memory.
    fn read_bandwidth(&self) -> Result<Option<f64>, ExecError>;

    /// Copies a block out. `dst` has [`ExecutorInfo::block_bytes`] bytes; its layout belongs to the route.
    fn export_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError>;

    /// Zeroes the rows from `rows` on in the bytes of an exported block, where they hold what another sequence left there:
    /// whoever keeps the bytes must not keep that. What remains equals what a fresh executor would have exported after the
    /// same rows ([`crate::conformance::cleared_rows_tell_nothing`]).
    fn clear_rows(&self, group: KvGroup, rows: usize, bytes: &mut [u8]);

    /// Copies a block in, as written by [`Executor::export_block`] of the same route.
    fn import_block(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError>;

    /// Lends a block so that another thread can fill it in place of [`Executor::import_block`]. Until the loan is dropped,
    /// whatever names the block (steps, drafts, copies, another loan) is refused. `None` where the memory cannot be written
    /// from outside, or the block is lent already.
    fn lend_block(&mut self, group: KvGroup, block: BlockId) -> Option<Box<dyn LentBlock>>;
}

/// The faculty to draft with a second, small model.
pub trait DraftExecutor {
    /// Takes a draft model in. Called before [`Executor::allocate_kv`], because from then on a sliding block also holds the
    /// draft's K and V of its positions (`sliding_block_bytes` and `route` change): every step computes them for every
    /// row, and so prefix reuse, export and import carry the draft's state along.
    ///
    /// # Errors
    /// [`ExecError::Unsupported`] where the backend cannot draft or has no kernel for the file.
    fn attach_draft(&mut self, draft: Draft) -> Result<(), ExecError>;

    /// Proposes tokens. `logits` gets one row of vocabulary size for each proposal wanted, sequence by sequence: row `i`
    /// of a sequence is about position `pos + 1 + i`. Scale and soft cap are the target's, so that the distributions are
    /// comparable. No KV changes.
    ///
    /// Proposals need not be exact, so executors may compute them in any way they like; here too, though, rows do not
    /// depend on other sequences.
    fn draft(&mut self, batch: &DraftBatch, logits: &mut Vec<f32>) -> Result<(), ExecError>;

    /// The same as [`Self::draft`], but only the id of each proposal's largest logit ([`crate::argmax`]), for proposals that nobody shapes or
    /// draws from. `scratch` is memory for an executor that has the logits on the host anyway.
    fn draft_largest(
        &mut self,
        batch: &DraftBatch,
        scratch: &mut Vec<f32>,
        ids: &mut Vec<Option<u32>>,
    ) -> Result<(), ExecError>;

    /// Has this row of a sliding block, computed by some step, its draft context? `false` where the step left it out
    /// ([`StepBatch::skip_draft_context`]), however the block has got here since. `true` where that is not known.
    fn has_draft_context(&self, block: BlockId, row: usize) -> bool;
}

/// The faculty to make rows of pictures with a vision tower.
pub trait TowerExecutor {
    /// Takes a vision tower in, or another one in place of the last. Steps are as before; KV and its route do not change.
    ///
    /// # Errors
    /// [`ExecError::Unsupported`] where the backend has no tower or no kernel for the file.
    fn attach_projector(&mut self, projector: Projector, rule: PositionRule) -> Result<(), ExecError>;

    /// The attached tower.
    fn tower(&self) -> Option<&TowerInfo>;

    /// Begins the rows of a picture, dropping what an earlier one had begun. One picture is in work at a time.
    fn begin_image(&mut self, image: &TowerImage) -> Result<(), ExecError>;

    /// Goes on with the picture in work, for about `time` and at least one slice; steps may come between two calls. `true` when
    /// `rows` holds its rows (tokens in raster order, [`TowerInfo::width`] values each) and nothing is in work any more. An
    /// error ends the work, too.
    fn encode_image(&mut self, time: Duration, rows: &mut Vec<f32>) -> Result<bool, ExecError>;

    /// Gives the picture in work up.
    fn drop_image(&mut self);
}

/// [`DraftExecutor::draft_largest`] for an executor that has the logits on the host anyway.
pub fn largest_of_draft(
    executor: &mut dyn Executor,
    batch: &DraftBatch,
    scratch: &mut Vec<f32>,
    ids: &mut Vec<Option<u32>>,
) -> Result<(), ExecError> {
    executor.draft(batch, scratch)?;
    ids.clear();
    ids.extend(scratch.chunks_exact(executor.info().vocab).map(crate::argmax));
    Ok(())
}
