//! A range of a model's layers on a card: what comes over the cut before it, and what goes over the one behind it.
//!
//! Copies wait: before a step's graph is replayed the rows are there, after it they are fetched.

use muser_backend::{
    Crossing, ExecError, HostLayers, LayerRange, LayerStreamer, PartExecutor, StepBatch, StepOutput,
};

use super::CudaExecutor;
use crate::CudaError;
use crate::driver::Buffer;
use crate::forward::ContextDraft as _;
use crate::step_data::{StepData, StepShape};
use crate::taps::Taps;

impl CudaExecutor {
    /// Taps that the crossing of a step has room for.
    fn taps_of(&self, batch: &StepBatch) -> usize {
        let of_draft = self.drafter.as_ref().map_or(0, |drafter| drafter.target_layers().len());
        if batch.wants_draft_context() { of_draft.max(self.taps.layers.len()) } else { 0 }
    }

    /// Puts in what came over the cut: what a draft reads, rows, the factors of their norms.
    pub(super) fn take_over(
        &self,
        data: &StepData,
        shape: StepShape,
        crossing: &Crossing,
    ) -> Result<(), CudaError> {
        let values = shape.n * self.geometry.hidden;
        if let Some(drafter) = self.drafter.as_ref().filter(|_| shape.context) {
            // Through the place of the rows, one after the other: each is read before the next is written.
            for (tap, layer) in drafter.target_layers().iter().enumerate() {
                if *layer < self.range.first() {
                    self.scratch.h.write(0, &crossing.features[tap * values..][..values])?;
                    drafter.tap(&self.walk(data, shape), *layer)?;
                    self.stream.synchronize()?;
                }
            }
        }
        self.scratch.h.write(0, &crossing.rows)?;
        self.scratch.cut.write(0, &crossing.factors)
    }

    /// Brings rows, factors and features to the host.
    pub(super) fn hand_over(&self, shape: StepShape, crossing: &mut Crossing) -> Result<(), CudaError> {
        self.stream.synchronize()?;
        self.scratch.h.read(0, &mut crossing.rows)?;
        self.scratch.cut.read(0, &mut crossing.factors)?;
        let values = shape.n * self.geometry.hidden;
        for (tap, layer) in self.taps.layers.iter().enumerate().filter(|_| shape.context) {
            if self.range.layers().contains(layer)
                && let Some((features, at)) = self.taps.place(*layer, self.geometry.hidden)
            {
                features.read(at, &mut crossing.features[tap * values..][..values])?;
            }
        }
        Ok(())
    }
}

impl PartExecutor for CudaExecutor {
    fn range(&self) -> LayerRange {
        self.range
    }

    fn tap_features(&mut self, layers: &[usize]) -> Result<(), ExecError> {
        // Graphs name the old memory.
        self.graphs.clear();
        self.taps = Taps::default();
        if layers.is_empty() {
            return Ok(());
        }
        let most_rows = self.options.max_rows;
        let len = layers.len() * most_rows * self.geometry.hidden;
        let features = Buffer::new(&self.context, len, "features of a draft").map_err(|e| self.fail(e))?;
        self.taps = Taps { layers: layers.to_vec(), features: Some(features), most_rows };
        self.note_room().map_err(|e| self.fail(e))
    }

    fn step_part(
        &mut self,
        batch: &StepBatch,
        crossing: &mut Crossing,
        out: &mut StepOutput,
    ) -> Result<(), ExecError> {
        self.check_batch(batch)?;
        if !self.range.is_whole() {
            crossing.check(batch.rows().len(), self.geometry.hidden, self.taps_of(batch))?;
        }
        self.compute(batch, crossing, out)
    }

    fn as_host(&mut self) -> Option<&mut dyn HostLayers> {
        None
    }

    fn as_streamer(&mut self) -> Option<&mut dyn LayerStreamer> {
        Some(self)
    }
}
