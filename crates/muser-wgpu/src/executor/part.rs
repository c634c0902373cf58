//! A range of a model's layers: what comes over the cut before it, and what goes over the one behind it.

use muser_backend::{
    Crossing, ExecError, HostLayers, LayerRange, LayerStreamer, PartExecutor, StepBatch, StepOutput,
};

use super::WgpuExecutor;
use crate::WgpuError;
use crate::step_data::Shape;
use crate::taps::{Taps, bytes_of_tap};

impl WgpuExecutor {
    /// Layers of the range.
    pub(super) fn layer_count(&self) -> usize {
        self.range.count()
    }

    /// Taps that the crossing of a step has room for.
    fn taps_of(&self, batch: &StepBatch) -> usize {
        let of_draft = self.drafter.as_ref().map_or(0, |drafter| drafter.config.target_layers.len());
        let tapped = self.taps.as_ref().map_or(0, |taps| taps.layers.len());
        if batch.wants_draft_context() { of_draft.max(tapped) } else { 0 }
    }

    /// Puts in what came over the cut: what a draft reads, rows, the factors of their norms.
    pub(super) fn take_over(
        &mut self,
        batch: &StepBatch,
        crossing: &Crossing,
        shape: Shape,
    ) -> Result<(), WgpuError> {
        let device = &self.gpu.device;
        let values = batch.rows().len() * self.info.hidden;
        if let Some(drafter) = self.drafter.as_ref().filter(|_| batch.wants_draft_context()) {
            // Through the place of the rows, one after the other: each is read before the next is written.
            for (tap, layer) in drafter.config.target_layers.iter().enumerate() {
                if *layer < self.range.first() {
                    let features = &crossing.features[tap * values..][..values];
                    device.write(&self.scratch.h, 0, bytemuck::cast_slice(features))?;
                    let mut recorder = device.recorder();
                    drafter.tap(&mut recorder, *layer, shape.rows);
                    device.submit(recorder)?;
                }
            }
        }
        device.write(&self.scratch.h, 0, bytemuck::cast_slice(&crossing.rows))?;
        let factors: Vec<[f32; 2]> = crossing.factors.iter().map(|factor| [0.0, *factor]).collect();
        device.write(&self.scratch.factors, 0, bytemuck::cast_slice(&factors))
    }

    /// Brings rows, factors and features to the host.
    pub(super) fn hand_over(&mut self, batch: &StepBatch, crossing: &mut Crossing) -> Result<(), WgpuError> {
        let count = batch.rows().len();
        let tap_bytes = count * self.info.hidden * 4;
        let wanted = batch.wants_draft_context();
        let own = |taps: &Taps| {
            let own = |(tap, layer): (usize, &usize)| self.range.layers().contains(layer).then_some(tap);
            taps.layers.iter().enumerate().filter_map(own).collect::<Vec<_>>()
        };
        let own = self.taps.as_ref().filter(|_| wanted).map(own).unwrap_or_default();
        self.make_staging(tap_bytes * (1 + own.len()) + count * 8)?;
        let Some(staging) = &self.staging else { return Ok(()) };
        let mut recorder = self.gpu.device.recorder();
        recorder.copy(&self.scratch.h, 0, staging, 0, tap_bytes as u64);
        recorder.copy(&self.scratch.factors, 0, staging, tap_bytes as u64, count as u64 * 8);
        let mut at = (tap_bytes + count * 8) as u64;
        if let Some(taps) = &self.taps {
            let step = bytes_of_tap(taps.features.size(), taps.layers.len());
            for tap in &own {
                recorder.copy(&taps.features, *tap as u64 * step, staging, at, tap_bytes as u64);
                at += tap_bytes as u64;
            }
        }
        self.gpu.device.submit(recorder)?;
        self.gpu.device.fetch(staging, |data| {
            let (rows, rest) = data.split_at(tap_bytes);
            copy(rows, &mut crossing.rows);
            let (factors, rest) = rest.split_at(count * 8);
            let pairs = factors.chunks_exact(8);
            for (to, pair) in crossing.factors.iter_mut().zip(pairs) {
                copy(&pair[4..], std::slice::from_mut(to));
            }
            let values = tap_bytes / 4;
            for (tap, bytes) in own.iter().zip(rest.chunks_exact(tap_bytes)) {
                copy(bytes, &mut crossing.features[tap * values..][..values]);
            }
        })
    }
}

fn copy(from: &[u8], to: &mut [f32]) {
    bytemuck::cast_slice_mut::<f32, u8>(to).copy_from_slice(from);
}

impl PartExecutor for WgpuExecutor {
    fn range(&self) -> LayerRange {
        self.range
    }

    fn tap_features(&mut self, layers: &[usize]) -> Result<(), ExecError> {
        self.taps = None;
        if layers.is_empty() {
            return Ok(());
        }
        let bytes = layers.len() * self.info.max_rows * self.info.hidden * 4;
        let features = self.gpu.device.buffer(bytes as u64, "features of a draft");
        let features = features.map_err(|error| self.fail(error))?;
        self.taps = Some(Taps { layers: layers.to_vec(), features });
        self.note_room();
        Ok(())
    }

    fn step_part(
        &mut self,
        batch: &StepBatch,
        crossing: &mut Crossing,
        out: &mut StepOutput,
    ) -> Result<(), ExecError> {
        self.check_batch(batch)?;
        if !self.range.is_whole() {
            crossing.check(batch.rows().len(), self.info.hidden, self.taps_of(batch))?;
        }
        self.run(batch, crossing, out).map_err(|error| self.fail(error))
    }

    fn as_host(&mut self) -> Option<&mut dyn HostLayers> {
        None
    }

    fn as_streamer(&mut self) -> Option<&mut dyn LayerStreamer> {
        None
    }
}
