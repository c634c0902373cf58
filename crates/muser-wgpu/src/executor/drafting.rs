//! Taking a draft in, and its rounds: what the executor does for [`crate::draft`].

use muser_backend::{DraftBatch, DraftExecutor, ExecError, KvCapacity, check_draft, draft_mark};
use muser_kv::BlockId;
use muser_model::Draft;

use super::WgpuExecutor;
use super::results::{RANK_BYTES, id_of, rank_at};
use crate::WgpuError;
use crate::draft::{self, DRAFT_ROUTE, Drafter, Target};
use crate::weights;

impl WgpuExecutor {
    fn take(&mut self, draft: &Draft) -> Result<(), WgpuError> {
        draft::check(draft)?;
        let device = &self.gpu.device;
        let (needed, available) = (weights::bytes_of(draft.matrices()), device.available());
        if needed > available {
            return Err(WgpuError::OutOfMemory { what: "the draft's weights".into(), needed, available });
        }
        if self.weights.embedding.is_none() {
            // Its rows are looked up here; where there is no embedding the table has not been needed.
            self.weights.load_table(device, &self.model)?;
        }
        let drafter = Drafter::new(device, draft, self.digits, self.info.max_rows, self.top_rows)?;
        self.info.draft = Some(drafter.info());
        self.drafter = Some(drafter);
        let planes = draft.layers.len() * self.layer_bytes(self.layer_count());
        self.info.sliding_block_bytes += planes;
        self.info.route = format!("{}+{DRAFT_ROUTE}-{}", self.info.route, draft_mark(draft));
        self.note_room();
        Ok(())
    }

    fn check_round(&self, batch: &DraftBatch) -> Result<(), ExecError> {
        let Some(drafter) = &self.drafter else {
            return Err(ExecError::InvalidBatch("no draft model is attached".into()));
        };
        batch.validate(drafter.info(), self.info.vocab, self.capacity)
    }

    /// Logits of all proposals, or with `ids` the largest alone.
    fn rounds(
        &mut self,
        batch: &DraftBatch,
        logits: &mut Vec<f32>,
        mut ids: Option<&mut Vec<Option<u32>>>,
    ) -> Result<(), WgpuError> {
        let vocab = self.info.vocab;
        match &mut ids {
            Some(ids) => ids.clear(),
            None => logits.resize(batch.proposals() * vocab, 0.0),
        }
        let whole = ids.is_none();
        self.make_staging(self.top_rows * (RANK_BYTES + if whole { 4 * vocab } else { 0 }))?;
        let (Some(drafter), Some(staging)) = (&mut self.drafter, &self.staging) else { return Ok(()) };
        let target =
            Target { device: &self.gpu.device, geometry: &self.model.geometry, scratch: &self.scratch };
        let (mut first, mut at) = (0, 0);
        while first < batch.seqs().len() {
            first = drafter.round(target, batch, first)?;
            let proposals = drafter.data.top().len();
            for from in (0..proposals).step_by(self.top_rows) {
                let count = self.top_rows.min(proposals - from);
                drafter.propose(target, from, count, whole, staging)?;
                target.device.fetch(staging, |data| {
                    if let Some(ids) = &mut ids {
                        ids.extend((0..count).map(|row| id_of(rank_at(data, row))));
                    } else {
                        let to = &mut logits[at..at + count * vocab];
                        let bytes = bytemuck::cast_slice_mut::<f32, u8>(to);
                        bytes.copy_from_slice(&data[RANK_BYTES * count..][..bytes.len()]);
                    }
                })?;
                at += count * vocab;
            }
        }
        Ok(())
    }
}

impl DraftExecutor for WgpuExecutor {
    fn attach_draft(&mut self, draft: Draft) -> Result<(), ExecError> {
        let unsupported = |what: &str| Err(ExecError::Unsupported { backend: "wgpu", what: what.into() });
        if self.drafter.is_some() {
            return unsupported("a second draft model");
        }
        if self.capacity != (KvCapacity { full: 0, sliding: 0 }) {
            return unsupported("a draft model after KV blocks were allocated");
        }
        if !self.range.has_output() {
            return unsupported("a draft model without the output layer");
        }
        check_draft(&draft, &self.model, "wgpu")?;
        self.take(&draft).map_err(|error| self.fail(error))
    }

    fn draft(&mut self, batch: &DraftBatch, logits: &mut Vec<f32>) -> Result<(), ExecError> {
        self.check_round(batch)?;
        self.rounds(batch, logits, None).map_err(|error| self.fail(error))
    }

    fn draft_largest(
        &mut self,
        batch: &DraftBatch,
        scratch: &mut Vec<f32>,
        ids: &mut Vec<Option<u32>>,
    ) -> Result<(), ExecError> {
        self.check_round(batch)?;
        self.rounds(batch, scratch, Some(ids)).map_err(|error| self.fail(error))
    }

    fn has_draft_context(&self, block: BlockId, row: usize) -> bool {
        self.drafter.as_ref().is_none_or(|drafter| drafter.rows.has(block, row))
    }
}
