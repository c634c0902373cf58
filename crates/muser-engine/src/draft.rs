//! Draft rounds: proposals for every decoding sequence at once, from the draft model that the executor holds.
//!
//! A proposal costs a row in the next step and nothing else: the target's own sampler draws each token from the target's
//! own logits, and a proposal counts only if it is that token. So the text is that of plain decoding, greedy or sampled.
//! The draft's state lies in the sliding blocks, so reuse, copies and imports carry it along, and rolling back is forgetting
//! rows that were never committed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use muser_backend::{DraftBatch, ExecutorInfo};
use muser_kv::BLOCK_LEN;

use crate::{EngineConfig, driver::Driver, metrics::Metrics, sampler};

/// Buffers and settings of draft rounds.
#[derive(Debug, Default)]
pub(crate) struct DraftRounds {
    /// Proposals per sequence and round; 0 when there is no draft.
    proposals: u32,
    batch: DraftBatch,
    logits: Vec<f32>,
    slots: Vec<usize>,
}

impl DraftRounds {
    pub(crate) fn new(info: &ExecutorInfo, config: &EngineConfig) -> Self {
        let most = info.draft.map_or(0, |draft| draft.max_proposals);
        Self { proposals: config.draft_tokens.min(most) as u32, ..Self::default() }
    }
}

impl Driver {
    /// Asks for proposals for the sequences that decode and have none.
    pub(crate) fn draft_round(&mut self) {
        if self.draft.proposals == 0 {
            return;
        }
        let draft = &mut self.draft;
        draft.batch.clear();
        draft.slots.clear();
        for (slot, sequence) in self.scheduler.slots.iter().enumerate() {
            let Some(sequence) = sequence else { continue };
            let ready =
                sequence.is_decoding() && sequence.drafts.is_empty() && sequence.paused_since.is_none();
            let (Some(kv), Some(&anchor)) = (&sequence.kv, sequence.tokens.last()) else { continue };
            // The step takes the anchor and the proposals of all sequences.
            let left = sequence.task.max_tokens.saturating_sub(sequence.generated).saturating_sub(1);
            let proposals = draft.proposals.min(left);
            if !ready || proposals == 0 {
                continue;
            }
            let position = kv.len();
            let blocks = position.div_ceil(BLOCK_LEN).saturating_sub(kv.sliding_first());
            let table = &kv.sliding()[..blocks.min(kv.sliding().len())];
            draft.batch.push(anchor, position as u32, proposals, kv.sliding_first() as u32, table);
            draft.slots.push(slot);
        }
        if draft.slots.is_empty() {
            return;
        }
        let executor = &mut self.executor;
        let result = catch_unwind(AssertUnwindSafe(|| executor.draft(&draft.batch, &mut draft.logits)));
        if !matches!(result, Ok(Ok(()))) {
            // Text does not depend on drafts: go on without them.
            Metrics::add(&self.shared.metrics.draft_errors, 1);
            tracing::error!("a draft round failed, drafting is off from now on");
            draft.proposals = 0;
            return;
        }
        let mut rows = draft.logits.chunks_exact(self.vocab);
        for (&slot, seq) in draft.slots.iter().zip(draft.batch.seqs()) {
            let Some(sequence) = &mut self.scheduler.slots[slot] else { continue };
            for row in rows.by_ref().take(seq.proposals as usize) {
                sequence.drafts.extend(sampler::most_probable(row));
            }
        }
    }
}
