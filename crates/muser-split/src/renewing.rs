//! A split that outlives its devices: when one is lost, its layers go to the others.

use std::time::Duration;

use muser_backend::arith::vision::PositionRule;
use muser_backend::{
    DraftBatch, DraftExecutor, ExecError, Executor, ExecutorInfo, KvCapacity, LentBlock, StepBatch,
    StepOutput, TowerExecutor, TowerImage, TowerInfo, no_tower,
};
use muser_kv::{BlockId, KvGroup};
use muser_model::{Draft, Projector};

use crate::executor::SplitExecutor;

/// Makes a split of the devices that are left, when that part of the last one was lost. It takes as many rows in a step as the first.
pub type Renew = Box<dyn FnMut(usize) -> Result<SplitExecutor, ExecError> + Send>;

/// A split, and how to make the next one. What a step says that loses a device is [`ExecError::Renewed`] where that worked.
pub struct RenewingExecutor {
    /// Why there is none, if there is none.
    split: Result<SplitExecutor, String>,
    info: ExecutorInfo,
    renew: Renew,
    // What the next split gets, too.
    capacity: KvCapacity,
    draft: Option<Draft>,
    projector: Option<(Projector, PositionRule)>,
}

impl RenewingExecutor {
    /// Of the first split.
    pub fn new(split: SplitExecutor, renew: Renew) -> Self {
        let (info, capacity) = (split.info().clone(), KvCapacity { full: 0, sliding: 0 });
        Self { split: Ok(split), info, renew, capacity, draft: None, projector: None }
    }

    fn there(&self) -> Result<&SplitExecutor, ExecError> {
        self.split.as_ref().map_err(|why| gone(why))
    }

    fn there_mut(&mut self) -> Result<&mut SplitExecutor, ExecError> {
        self.split.as_mut().map_err(|why| gone(why))
    }

    /// After a step has failed: where a device was lost, the others get its layers.
    fn after(&mut self, error: ExecError) -> ExecError {
        let ExecError::Lost { device, what } = error else { return error };
        let Some(part) = self.split.as_ref().ok().and_then(SplitExecutor::lost) else {
            return ExecError::Lost { device, what };
        };
        tracing::warn!(%device, %what, "a device is lost: its layers go to the others");
        // Its memory first.
        self.split = Err(format!("{device}: {what}"));
        match self.made_anew(part) {
            Ok(split) => {
                self.info = split.info().clone();
                self.split = Ok(split);
                ExecError::Renewed { device, what }
            }
            Err(error) => {
                tracing::error!(%error, "the others cannot have its layers");
                ExecError::Lost { device, what: format!("{what}; without it: {error}") }
            }
        }
    }

    fn made_anew(&mut self, lost: usize) -> Result<SplitExecutor, ExecError> {
        let mut split = (self.renew)(lost)?;
        if let Some(draft) = &self.draft {
            split.attach_draft(draft.clone())?;
        }
        if let Some((projector, rule)) = &self.projector {
            split.attach_projector(projector.clone(), *rule)?;
        }
        let (now, before) = (split.info(), &self.info);
        let bytes = |info: &ExecutorInfo| (info.full_block_bytes, info.sliding_block_bytes);
        if bytes(now) != bytes(before) || now.route != before.route || now.max_rows < before.max_rows {
            return Err(ExecError::Unsupported {
                backend: "split",
                what: "steps as they were before".into(),
            });
        }
        split.allocate_kv(self.capacity)?;
        Ok(split)
    }
}

fn gone(why: &str) -> ExecError {
    ExecError::Lost { device: "split".into(), what: why.into() }
}

/// A loss that no step has found yet: the next one does, and sees to it.
fn soon(error: ExecError) -> ExecError {
    match error {
        ExecError::Lost { device, what } => ExecError::Device { device, what },
        other => other,
    }
}

impl Executor for RenewingExecutor {
    fn info(&self) -> &ExecutorInfo {
        self.split.as_ref().map_or(&self.info, Executor::info)
    }

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        self.there_mut()?.allocate_kv(capacity)?;
        self.capacity = capacity;
        Ok(())
    }

    fn step(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        let stepped = self.there_mut().and_then(|split| split.step(batch, out));
        stepped.map_err(|error| self.after(error))
    }

    fn most_candidates(&self) -> usize {
        self.split.as_ref().map_or(0, Executor::most_candidates)
    }

    fn read_bandwidth(&self) -> Result<Option<f64>, ExecError> {
        self.there()?.read_bandwidth()
    }

    fn export_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        self.there()?.export_block(group, block, dst).map_err(soon)
    }

    fn clear_rows(&self, group: KvGroup, rows: usize, bytes: &mut [u8]) {
        if let Ok(split) = &self.split {
            split.clear_rows(group, rows, bytes);
        }
    }

    fn import_block(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        self.there_mut()?.import_block(group, block, src).map_err(soon)
    }

    fn lend_block(&mut self, group: KvGroup, block: BlockId) -> Option<Box<dyn LentBlock>> {
        self.split.as_mut().ok()?.lend_block(group, block)
    }
}

impl DraftExecutor for RenewingExecutor {
    fn attach_draft(&mut self, draft: Draft) -> Result<(), ExecError> {
        let split = self.there_mut()?;
        split.attach_draft(draft.clone())?;
        self.info = split.info().clone();
        self.draft = Some(draft);
        Ok(())
    }

    fn draft(&mut self, batch: &DraftBatch, logits: &mut Vec<f32>) -> Result<(), ExecError> {
        self.there_mut()?.draft(batch, logits).map_err(soon)
    }

    fn draft_largest(
        &mut self,
        batch: &DraftBatch,
        scratch: &mut Vec<f32>,
        ids: &mut Vec<Option<u32>>,
    ) -> Result<(), ExecError> {
        self.there_mut()?.draft_largest(batch, scratch, ids).map_err(soon)
    }

    fn has_draft_context(&self, block: BlockId, row: usize) -> bool {
        self.split.as_ref().is_ok_and(|split| split.has_draft_context(block, row))
    }
}

impl TowerExecutor for RenewingExecutor {
    fn attach_projector(&mut self, projector: Projector, rule: PositionRule) -> Result<(), ExecError> {
        let split = self.there_mut()?;
        split.attach_projector(projector.clone(), rule)?;
        self.info = split.info().clone();
        self.projector = Some((projector, rule));
        Ok(())
    }

    fn tower(&self) -> Option<&TowerInfo> {
        self.split.as_ref().ok()?.tower()
    }

    fn begin_image(&mut self, image: &TowerImage) -> Result<(), ExecError> {
        self.split.as_mut().map_err(|_| no_tower())?.begin_image(image).map_err(soon)
    }

    fn encode_image(&mut self, time: Duration, rows: &mut Vec<f32>) -> Result<bool, ExecError> {
        self.split.as_mut().map_err(|_| no_tower())?.encode_image(time, rows).map_err(soon)
    }

    fn drop_image(&mut self) {
        if let Ok(split) = &mut self.split {
            split.drop_image();
        }
    }
}
