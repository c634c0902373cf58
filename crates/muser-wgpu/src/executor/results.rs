//! What is wanted of a step's rows, and nothing else, on its way to the host.

use muser_backend::{RowWants, StepBatch, StepOutput};

use super::WgpuExecutor;
use crate::WgpuError;
use crate::device::Buffer;

/// Bytes of a rank: key and id.
pub(super) const RANK_BYTES: usize = 8;

/// The rank of a row among others.
pub(super) fn rank_at(data: &[u8], row: usize) -> [u32; 2] {
    let word = |at: usize| u32::from_le_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]]);
    [word(row * RANK_BYTES), word(row * RANK_BYTES + 4)]
}

/// The id of a rank; `None` if a logit of its row was not finite.
pub(crate) fn id_of(rank: [u32; 2]) -> Option<u32> {
    (rank[0] != u32::MAX).then_some(rank[1])
}

impl WgpuExecutor {
    pub(super) fn collect(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), WgpuError> {
        let (vocab, hidden) = (self.info.vocab, self.info.hidden);
        let count_of =
            |wanted: fn(&RowWants) -> bool| batch.rows().iter().filter(|r| wanted(&r.wants)).count();
        out.logits.resize(count_of(|w| w.logits) * vocab, 0.0);
        out.hidden.resize(count_of(|w| w.hidden) * hidden, 0.0);
        out.argmax.clear();
        out.candidates.clear();
        let (mut logits_at, mut hidden_at) = (0, 0);
        let total = self.step.top().len();
        for from in (0..total).step_by(self.top_rows) {
            let count = self.top_rows.min(total - from);
            let wants: Vec<RowWants> = self.step.top()[from..from + count]
                .iter()
                .map(|row| batch.rows()[*row as usize].wants)
                .collect();
            let ranks = self.compute_top(from, &wants)?;
            let staging = self.staging.as_ref();
            let Some(staging) = staging else { continue };
            let argmax = &mut out.argmax;
            let logits = &mut out.logits[logits_at..];
            let hiddens = &mut out.hidden[hidden_at..];
            let (mut logit_rows, mut hidden_rows) = (0, 0);
            self.gpu.device.fetch(staging, |data| {
                let mut at = ranks;
                for _ in wants.iter().filter(|want| want.logits) {
                    let to = &mut logits[logit_rows * vocab..][..vocab];
                    bytemuck::cast_slice_mut::<f32, u8>(to).copy_from_slice(&data[at..at + 4 * vocab]);
                    at += 4 * vocab;
                    logit_rows += 1;
                }
                for _ in wants.iter().filter(|want| want.hidden) {
                    let to = &mut hiddens[hidden_rows * hidden..][..hidden];
                    bytemuck::cast_slice_mut::<f32, u8>(to).copy_from_slice(&data[at..at + 4 * hidden]);
                    at += 4 * hidden;
                    hidden_rows += 1;
                }
                let wanted = wants.iter().enumerate().filter(|(_, want)| want.argmax);
                argmax.extend(wanted.map(|(row, _)| id_of(rank_at(data, row))));
            })?;
            logits_at += logit_rows * vocab;
            hidden_at += hidden_rows * hidden;
        }
        Ok(())
    }

    /// Norm, logits and the best of them for some top rows; copies what is wanted to the staging buffer, first the ranks of all,
    /// whose bytes are returned.
    fn compute_top(&mut self, from: usize, wants: &[RowWants]) -> Result<usize, WgpuError> {
        let (vocab, hidden) = (self.info.vocab, self.info.hidden);
        let ranks = wants.len() * RANK_BYTES;
        let logit_rows = wants.iter().filter(|want| want.logits).count();
        let hidden_rows = wants.iter().filter(|want| want.hidden).count();
        self.make_staging(ranks + 4 * (logit_rows * vocab + hidden_rows * hidden))?;
        let (Some(program), Some(staging)) = (&self.program, &self.staging) else { return Ok(ranks) };
        self.step.upload_top(&self.gpu.device, from, wants.len())?;
        let mut recorder = self.gpu.device.recorder();
        let needs_logits = wants.iter().any(|want| want.needs_logits());
        program.top(&mut recorder, wants.len() as u32, needs_logits);
        recorder.copy(&self.scratch.chosen, 0, staging, 0, ranks as u64);
        let mut at = ranks as u64;
        let mut copy = |from: &Buffer, row: usize, values: usize| {
            let bytes = 4 * values as u64;
            recorder.copy(from, row as u64 * bytes, staging, at, bytes);
            at += bytes;
        };
        for (row, _) in wants.iter().enumerate().filter(|(_, want)| want.logits) {
            copy(&self.scratch.logits, row, vocab);
        }
        for (row, _) in wants.iter().enumerate().filter(|(_, want)| want.hidden) {
            copy(&self.scratch.hidden, row, hidden);
        }
        self.gpu.device.submit(recorder)?;
        Ok(ranks)
    }

    /// Memory for so many bytes of results; kept from step to step.
    pub(super) fn make_staging(&mut self, bytes: usize) -> Result<(), WgpuError> {
        if self.staging.as_ref().is_none_or(|staging| staging.size() < bytes as u64) {
            self.staging = None;
            self.staging = Some(self.gpu.device.staging((bytes as u64).next_power_of_two())?);
        }
        Ok(())
    }
}
