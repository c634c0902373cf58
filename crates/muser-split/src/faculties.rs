//! Drafts and pictures: each in one part.

use std::time::Duration;

use muser_backend::arith::vision::PositionRule;
use muser_backend::{DraftBatch, DraftExecutor, ExecError, TowerExecutor, TowerImage, TowerInfo, no_tower};
use muser_kv::BlockId;
use muser_model::{Draft, Projector};

use crate::executor::SplitExecutor;
use crate::part::Part;

impl SplitExecutor {
    /// Has what lies before the last part write down what a draft reads of these layers.
    fn tap(&mut self, layers: &[usize]) -> Result<(), ExecError> {
        let before = &self.parts[..self.parts.len() - 1];
        before.iter().try_for_each(|part| part.lock().tap_features(layers))
    }

    fn tower_part(&self) -> Result<&Part, ExecError> {
        self.tower.as_ref().map(|(at, _)| &self.parts[*at]).ok_or_else(no_tower)
    }
}

/// The draft is where the output is: its rows are multiplied with the vocabulary matrix.
impl DraftExecutor for SplitExecutor {
    fn attach_draft(&mut self, draft: Draft) -> Result<(), ExecError> {
        if self.info.draft.is_some() {
            return self.last().lock().attach_draft(draft);
        }
        let layers = draft.config.target_layers.clone();
        let attached = self.tap(&layers).and_then(|()| self.last().lock().attach_draft(draft));
        match attached {
            Ok(()) => self.taps = layers,
            // The part that refused has said why.
            Err(_) => self.tap(&[])?,
        }
        self.gather();
        attached
    }

    fn draft(&mut self, batch: &DraftBatch, logits: &mut Vec<f32>) -> Result<(), ExecError> {
        self.last().lock().draft(batch, logits)
    }

    fn draft_largest(
        &mut self,
        batch: &DraftBatch,
        scratch: &mut Vec<f32>,
        ids: &mut Vec<Option<u32>>,
    ) -> Result<(), ExecError> {
        self.last().lock().draft_largest(batch, scratch, ids)
    }

    fn has_draft_context(&self, block: BlockId, row: usize) -> bool {
        self.last().lock().has_draft_context(block, row)
    }
}

/// The tower is in the first part that has kernels and room for it.
impl TowerExecutor for SplitExecutor {
    fn attach_projector(&mut self, projector: Projector, rule: PositionRule) -> Result<(), ExecError> {
        let mut result = Err(no_tower());
        // One that takes the place of another is where that was.
        let order = self.tower.as_ref().map(|(at, _)| *at).into_iter().chain(0..self.parts.len());
        for at in order.collect::<Vec<_>>() {
            let mut part = self.parts[at].lock();
            result = part.attach_projector(projector.clone(), rule);
            let tower = part.tower().cloned();
            drop(part);
            match (&result, tower) {
                (Ok(()), Some(tower)) => {
                    self.tower = Some((at, tower));
                    break;
                }
                (Err(ExecError::Unsupported { .. } | ExecError::OutOfMemory { .. }), _) => {}
                _ => break,
            }
        }
        self.gather();
        result
    }

    fn tower(&self) -> Option<&TowerInfo> {
        self.tower.as_ref().map(|(_, info)| info)
    }

    fn begin_image(&mut self, image: &TowerImage) -> Result<(), ExecError> {
        self.tower_part()?.lock().begin_image(image)
    }

    fn encode_image(&mut self, time: Duration, rows: &mut Vec<f32>) -> Result<bool, ExecError> {
        self.tower_part()?.lock().encode_image(time, rows)
    }

    fn drop_image(&mut self) {
        if let Ok(part) = self.tower_part() {
            part.lock().drop_image();
        }
    }
}
