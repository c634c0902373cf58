//! One choice of one request while it lives: its tokens, its blocks, what it has produced.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use muser_kv::{KvSeq, Unit};

use crate::{
    Constraint, ContextPolicy, FinishReason, Finished, PromptLogprobs, ShiftPlan, SlotState, StopWatch,
    Timings, Usage,
    draft::{Acceptance, MOST_PROPOSALS},
    image::{self, PlacedImage},
    prefix::{External, Restoring},
    sampler::TokenCounts,
    task::{Choice, Job, Task},
};

/// The live state. `tokens[..kv.len()]` are in the blocks, the rest is to be computed: during prefill many, while
/// decoding exactly one (the token sampled last).
pub(crate) struct Sequence {
    pub(crate) task: Arc<Task>,
    pub(crate) index: u32,
    pub(crate) tokens: Vec<u32>,
    pub(crate) units: Vec<Unit>,
    pub(crate) images: Vec<PlacedImage>,
    /// `None` while it waits for a slot.
    pub(crate) kv: Option<KvSeq>,
    /// What a source has of it.
    pub(crate) external: External,
    /// Its blocks are being fetched; then `kv` is `None`.
    pub(crate) restoring: Option<Box<Restoring>>,
    /// It is the one whose known positions the request reports, and has not said how many.
    pub(crate) owes_cached: bool,
    /// Its prompt has been read and not been offered to the source.
    pub(crate) offer_due: bool,
    /// Positions that have been offered.
    pub(crate) offered: usize,
    /// Copies into its blocks are planned and not made.
    pub(crate) awaits_copy: bool,
    /// Proposals of a draft for the positions after `tokens`.
    pub(crate) drafts: Vec<u32>,
    /// First of their rows among the draft's logits.
    pub(crate) draft_row: usize,
    /// How its proposals have fared.
    pub(crate) acceptance: Acceptance,
    /// Position behind the last rows whose draft context was left out; 0 if there are none.
    pub(crate) draft_gap_end: usize,
    /// Have the blocks that it did not fill itself been looked at for such rows?
    pub(crate) draft_gap_known: bool,
    pub(crate) generated: u32,
    pub(crate) counts: Option<TokenCounts>,
    pub(crate) stop_watch: Option<Box<dyn StopWatch>>,
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    /// What is known of the prompt's own tokens so far, if it was asked for.
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
    /// Sum of hidden states so far.
    pub(crate) hidden_sum: Vec<f64>,
    pub(crate) paused_since: Option<Duration>,
    /// The mask for its next token was not there in time: its last step is as if it had not been.
    pub(crate) awaits_mask: bool,
    pub(crate) admitted_at: Option<Duration>,
    pub(crate) first_token_at: Option<Duration>,
    pub(crate) decode_steps: u32,
    pub(crate) drafted: u32,
    pub(crate) accepted: u32,
    shift: Option<ShiftPlan>,
}

impl Sequence {
    /// `most_positions` bounds what the sequence may ever hold; buffers are sized for it, so that decoding allocates
    /// nothing.
    pub(crate) fn new(
        job: &Job,
        index: u32,
        choice: Choice,
        most_positions: usize,
        vocab: usize,
        hidden: usize,
    ) -> Self {
        let Job { task, prompt, context_policy, .. } = job;
        let wanted = prompt.tokens.len().saturating_add(task.max_tokens as usize).saturating_add(1);
        let capacity = wanted.min(most_positions.max(prompt.tokens.len()) + 1);
        let mut tokens = Vec::with_capacity(capacity);
        tokens.extend_from_slice(&prompt.tokens);
        let mut units = Vec::with_capacity(capacity);
        units.extend(prompt.tokens.iter().map(|&id| Unit::token(id)));
        for image in &prompt.images {
            let positions = image.positions(hidden);
            if let Some(start) = image.at.checked_sub(1)
                && let Some(token) = units[start].as_token()
            {
                units[start] = Unit::media_start(&image.digest, token);
            }
            for (row, unit) in units[image.at..][..positions].iter_mut().enumerate() {
                *unit = Unit::media(&image.digest, row as u32);
            }
        }
        let counts = task.sampling.has_penalties().then(|| {
            let mut counts = TokenCounts::new(vocab, capacity);
            units.iter().filter_map(|unit| unit.as_token()).for_each(|id| counts.push_prompt(id));
            counts
        });
        let shift = match context_policy {
            ContextPolicy::Error => None,
            ContextPolicy::Shift(plan) => Some(plan.clone()),
        };
        Self {
            task: Arc::clone(task),
            index,
            tokens,
            units,
            images: prompt.images.iter().map(|image| PlacedImage::of(image, hidden)).collect(),
            kv: None,
            external: External::None,
            restoring: None,
            owes_cached: false,
            offer_due: false,
            offered: 0,
            awaits_copy: false,
            drafts: Vec::with_capacity(MOST_PROPOSALS),
            draft_row: 0,
            acceptance: Acceptance::of_sequence(),
            draft_gap_end: 0,
            draft_gap_known: false,
            generated: 0,
            counts,
            stop_watch: choice.stop_watch,
            constraint: choice.constraint,
            prompt_logprobs: task
                .prompt_logprobs
                .filter(|_| index == 0)
                .map(|k| PromptLogprobs { top_each: usize::from(k), ..PromptLogprobs::default() }),
            hidden_sum: Vec::new(),
            paused_since: None,
            awaits_mask: false,
            admitted_at: None,
            first_token_at: None,
            decode_steps: 0,
            drafted: 0,
            accepted: 0,
            shift,
        }
    }

    /// Service order; see [`Task::rank`].
    pub(crate) fn rank(&self) -> (i64, u64, u32) {
        let (priority, id) = self.task.rank();
        (priority, id, self.index)
    }

    /// Has another choice failed for the whole request?
    pub(crate) fn has_failed(&self) -> bool {
        self.task.failed.load(Ordering::Relaxed)
    }

    /// Positions whose KV exists.
    pub(crate) fn computed(&self) -> usize {
        self.kv.as_ref().map_or(0, KvSeq::len)
    }

    /// Where rows that can be computed now end, of those before `end`: a picture may have to be waited for.
    pub(crate) fn ready_until(&self, end: usize) -> usize {
        image::ready_until(&self.images, self.computed(), end)
    }

    /// Rows with draft context at the end of its text, without a gap; without bound if there is no gap at all.
    pub(crate) fn draft_context(&self) -> usize {
        if self.draft_gap_end == 0 { usize::MAX } else { self.computed().saturating_sub(self.draft_gap_end) }
    }

    /// Reports the positions that need not be computed, once they are known.
    pub(crate) fn note_cached(&mut self) {
        if let Some(kv) = &self.kv
            && std::mem::take(&mut self.owes_cached)
        {
            self.task.cached_tokens.store(kv.len() as u32, Ordering::Relaxed);
        }
    }

    /// Is the mask for its next token there within `most`?
    pub(crate) fn mask_is_ready(&mut self, most: Duration) -> bool {
        self.awaits_mask = self.constraint.as_mut().is_some_and(|constraint| !constraint.wait(most));
        !self.awaits_mask
    }

    /// May the logits of the next token be changed by anything, a constraint included?
    pub(crate) fn shapes_logits(&self) -> bool {
        self.counts.is_some() || self.constraint.is_some() || !self.task.sampling.logit_bias.is_empty()
    }

    /// Is it past its prompt, with one token to compute?
    pub(crate) fn is_decoding(&self) -> bool {
        self.generated > 0 && self.tokens.len() - self.computed() == 1
    }

    /// Does it still want a token sampled?
    pub(crate) fn wants_token(&self) -> bool {
        self.generated < self.task.max_tokens
    }

    /// First row whose logits tell of a prompt token that has not been reported, if there is one.
    pub(crate) fn prompt_rows_from(&self) -> Option<usize> {
        let known = self.prompt_logprobs.as_ref()?.tokens.len();
        (known + 1 < self.task.prompt_tokens as usize).then_some(known)
    }

    /// Appends a sampled token.
    pub(crate) fn push(&mut self, id: u32) {
        self.tokens.push(id);
        self.units.push(Unit::token(id));
        if let Some(counts) = &mut self.counts {
            counts.push_output(id);
        }
    }

    /// Drops what the request lets go, to make room for text within `limit` positions; returns how many positions went.
    /// `None` when nothing may go or it would not make room for one more token.
    pub(crate) fn shift(&mut self, limit: usize) -> Option<usize> {
        let plan = self.shift.as_mut()?;
        let range = plan.leaving(self.tokens.len(), limit)?;
        let dropped = range.len();
        self.tokens.drain(range.clone());
        self.units.drain(range.clone());
        // No turn boundary cuts an image; that was checked at the door.
        self.images.retain(|image| !range.contains(&image.at));
        for image in &mut self.images {
            if image.at >= range.end {
                image.at -= dropped;
            }
        }
        Some(dropped)
    }

    pub(crate) fn state(&self) -> SlotState {
        if self.paused_since.is_some() {
            SlotState::Paused
        } else if self.is_decoding() {
            SlotState::Decode
        } else {
            SlotState::Prefill
        }
    }

    /// The end's figures.
    pub(crate) fn finished(&self, reason: FinishReason, now: Duration) -> Finished {
        let admitted = self.admitted_at.unwrap_or(now);
        let first = self.first_token_at.unwrap_or(now);
        Finished {
            index: self.index,
            reason,
            usage: Usage {
                prompt_tokens: self.task.prompt_tokens,
                cached_tokens: self.task.cached_tokens.load(Ordering::Relaxed),
                completion_tokens: self.generated,
                restored_tokens: self.task.restored_tokens.load(Ordering::Relaxed),
                decode_steps: self.decode_steps,
                drafted_tokens: self.drafted,
                accepted_tokens: self.accepted,
            },
            timings: Timings {
                queue: admitted.saturating_sub(self.task.submitted_at),
                prefill: first.saturating_sub(admitted),
                restore: Duration::from_micros(self.task.restore_us.load(Ordering::Relaxed)),
                decode: now.saturating_sub(first),
            },
        }
    }
}
