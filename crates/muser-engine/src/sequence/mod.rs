//! One choice of one request while it lives. Each part owns its state; the sequence says what follows from them together.

mod blocks;
mod progress;
mod text;

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use muser_kv::KvSeq;

pub(crate) use blocks::Blocks;
pub(crate) use progress::Progress;
pub(crate) use text::Text;

use crate::{
    Constraint, Event, FinishReason, Finished, PromptLogprobs, RequestError, SlotState, StopWatch, Timings,
    Usage,
    draft::DraftState,
    image::ready_until,
    metrics::Metrics,
    prefix::{Offered, Outlet, StoreLookup},
    sampler::TokenCounts,
    task::{Choice, Job, Task},
};

/// The live state. The positions before [`Sequence::computed`] are in the blocks, the rest of the text is to be computed:
/// during prefill many, while decoding exactly one (the token sampled last).
pub(crate) struct Sequence {
    pub(crate) task: Arc<Task>,
    pub(crate) index: u32,
    pub(crate) text: Text,
    pub(crate) blocks: Blocks,
    /// What a source has of it.
    pub(crate) stored: StoreLookup,
    /// What of it has been offered to the source.
    pub(crate) offered: Offered,
    /// Who hears how far its prompt is final.
    pub(crate) outlet: Option<Outlet>,
    pub(crate) draft: DraftState,
    pub(crate) rules: Rules,
    pub(crate) known: PromptFindings,
    pub(crate) wait: Wait,
    pub(crate) progress: Progress,
    /// Its request reports how many positions of this choice were known, and has not said so.
    cached_unreported: bool,
}

/// What decides about its next tokens besides the logits.
pub(crate) struct Rules {
    pub(crate) counts: Option<TokenCounts>,
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    pub(crate) stop_watch: Option<Box<dyn StopWatch>>,
}

/// What reading the prompt brings, where it was asked for.
pub(crate) struct PromptFindings {
    /// Of the prompt's own tokens, so far.
    pub(crate) logprobs: Option<PromptLogprobs>,
    /// Sum of hidden states so far.
    pub(crate) hidden_sum: Vec<f64>,
}

/// What a sequence with a slot waits for besides its turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Wait {
    #[default]
    Nothing,
    /// Its reader has to make room for events.
    Reader { since: Duration },
    /// The mask for its next token was not there in time: its last step is as if it had not been.
    Mask,
}

/// How a sequence ends.
#[derive(Debug)]
pub(crate) enum End {
    Finish(FinishReason),
    Fail(RequestError),
    /// Another choice of its request has failed; everything has been said.
    Silent,
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
        let text = Text::new(prompt, context_policy, capacity, hidden);
        let counts = task.sampling.has_penalties().then(|| {
            let mut counts = TokenCounts::new(vocab, capacity);
            text.units().iter().filter_map(|unit| unit.as_token()).for_each(|id| counts.push_prompt(id));
            counts
        });
        let logprobs = task.prompt_logprobs.filter(|_| index == 0);
        Self {
            task: Arc::clone(task),
            index,
            text,
            blocks: Blocks::None,
            stored: StoreLookup::None,
            offered: Offered::default(),
            outlet: choice.outlet,
            draft: DraftState::new(),
            rules: Rules { counts, constraint: choice.constraint, stop_watch: choice.stop_watch },
            known: PromptFindings {
                logprobs: logprobs
                    .map(|k| PromptLogprobs { top_each: usize::from(k), ..PromptLogprobs::default() }),
                hidden_sum: Vec::new(),
            },
            wait: Wait::Nothing,
            progress: Progress::default(),
            cached_unreported: false,
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
        self.blocks.kv().map_or(0, KvSeq::len)
    }

    /// Positions whose KV does not.
    pub(crate) fn pending(&self) -> usize {
        self.text.len() - self.computed()
    }

    /// Where rows that can be computed now end, of those before `end`: a picture may have to be waited for.
    pub(crate) fn ready_until(&self, end: usize) -> usize {
        ready_until(self.text.images(), self.computed(), end)
    }

    /// Is it past its prompt, with one token to compute?
    pub(crate) fn is_decoding(&self) -> bool {
        self.progress.generated() > 0 && self.pending() == 1
    }

    /// Tokens that it may still sample.
    pub(crate) fn tokens_left(&self) -> usize {
        self.task.max_tokens.saturating_sub(self.progress.generated()) as usize
    }

    /// May the logits of the next token be changed by anything, a constraint included?
    pub(crate) fn shapes_logits(&self) -> bool {
        self.rules.counts.is_some()
            || self.rules.constraint.is_some()
            || !self.task.sampling.logit_bias.is_empty()
    }

    /// How many ids may not be drawn, if that is all that is done to the logits; `None` if there is more.
    pub(crate) fn only_forbids(&self) -> Option<usize> {
        let forbidden = self.task.sampling.forbidden()?;
        (self.rules.counts.is_none() && self.rules.constraint.is_none()).then_some(forbidden)
    }

    /// First row whose logits tell of a prompt token that has not been reported, if there is one.
    pub(crate) fn prompt_rows_from(&self) -> Option<usize> {
        let known = self.known.logprobs.as_ref()?.tokens.len();
        (known + 1 < self.task.prompt_tokens as usize).then_some(known)
    }

    /// Appends a sampled token.
    pub(crate) fn push(&mut self, id: u32) {
        self.text.push(id);
        if let Some(counts) = &mut self.rules.counts {
            counts.push_output(id);
        }
    }

    /// Takes in what has been written already, as if it had been sampled here.
    pub(crate) fn take_written(&mut self, written: &[u32], most_positions: usize) {
        for &id in written {
            self.push(id);
            self.progress.note_written();
            if let Some(watch) = &mut self.rules.stop_watch {
                watch.push(id);
            }
            if let Some(constraint) = &mut self.rules.constraint
                && let Err(why) = constraint.commit(id)
            {
                self.task.fail(RequestError::Constraint(why));
                return;
            }
            if self.text.len() >= most_positions {
                self.text.shift(most_positions);
            }
        }
    }

    /// Drops what the request lets go of a text that has filled `limit` positions, and says so. `false`: nothing may go.
    pub(crate) fn shift(&mut self, limit: usize) -> bool {
        let dropped = self.text.shift(limit);
        if let Some(dropped) = dropped {
            self.task.ring.send(Event::Shifted { index: self.index, dropped_tokens: dropped as u32 });
        }
        dropped.is_some()
    }

    /// It has a slot; the first choice that does reports how many positions were known.
    pub(crate) fn note_admitted(&mut self, now: Duration) {
        self.cached_unreported |= !self.task.admitted.swap(true, Ordering::Relaxed);
        self.note_cached();
        self.progress.note_admitted(now);
        if matches!(self.wait, Wait::Reader { .. }) {
            self.wait = Wait::Nothing;
        }
    }

    /// Reports the positions that need not be computed, once they are known.
    pub(crate) fn note_cached(&mut self) {
        if let Some(kv) = self.blocks.kv()
            && std::mem::take(&mut self.cached_unreported)
        {
            self.task.cached_tokens.store(kv.len() as u32, Ordering::Relaxed);
        }
    }

    /// Is the mask for its next token there within `most`?
    pub(crate) fn mask_is_ready(&mut self, most: Duration) -> bool {
        let ready = self.rules.constraint.as_mut().is_none_or(|constraint| constraint.wait(most));
        if !ready {
            self.wait = Wait::Mask;
        } else if self.wait == Wait::Mask {
            self.wait = Wait::Nothing;
        }
        ready
    }

    /// Sets aside room for `events`, or pauses the sequence until its reader has made room.
    pub(crate) fn has_room_for(&mut self, events: u32, now: Duration) -> bool {
        let room = self.task.plan_events(events);
        self.wait = match self.wait {
            Wait::Reader { .. } if room => Wait::Nothing,
            Wait::Nothing | Wait::Mask if !room => Wait::Reader { since: now },
            as_before => as_before,
        };
        room
    }

    /// When it will have waited too long for its reader.
    pub(crate) fn paused_until(&self, timeout: Duration) -> Option<Duration> {
        if let Wait::Reader { since } = self.wait { Some(since + timeout) } else { None }
    }

    pub(crate) fn state(&self) -> SlotState {
        if matches!(self.wait, Wait::Reader { .. }) {
            SlotState::Paused
        } else if self.is_decoding() {
            SlotState::Decode
        } else {
            SlotState::Prefill
        }
    }

    /// Says its last words.
    pub(crate) fn say_end(&self, end: &End, now: Duration, metrics: &Metrics) {
        let task = &self.task;
        match end {
            End::Finish(reason) => {
                metrics.finished(*reason);
                if let Some(admitted_at) = self.progress.admitted_at() {
                    metrics.note_turnaround(now.saturating_sub(admitted_at));
                }
                task.remaining.fetch_sub(1, Ordering::Relaxed);
                task.ring.send(Event::Finished(self.finished(*reason, now)));
            }
            End::Fail(error) => {
                if task.fail(error.clone()) {
                    Metrics::add(&metrics.requests_failed, 1);
                }
            }
            End::Silent => {}
        }
    }

    /// The end's figures.
    fn finished(&self, reason: FinishReason, now: Duration) -> Finished {
        let task = &self.task;
        Finished {
            index: self.index,
            reason,
            usage: Usage {
                prompt_tokens: task.prompt_tokens,
                cached_tokens: task.cached_tokens.load(Ordering::Relaxed),
                restored_tokens: task.restored_tokens.load(Ordering::Relaxed),
                handed_tokens: task.handed_tokens.load(Ordering::Relaxed),
                ..self.progress.usage()
            },
            timings: Timings {
                restore: Duration::from_micros(task.restore_us.load(Ordering::Relaxed)),
                ..self.progress.timings(task.submitted_at, now)
            },
        }
    }
}
