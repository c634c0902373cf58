//! Draft rounds: proposals for every decoding sequence at once, from the draft model that the executor holds.
//!
//! A proposal costs a row in the next step and a share of a draft, and the target's own sampler has the last word on every
//! token (see [`crate::sampler::DraftSampling`]): greedy text is that of plain decoding bit for bit, and so is sampled text
//! unless rejection sampling was asked for. Rolling back is forgetting rows that were never committed, and the draft's
//! state lies in the sliding blocks, so reuse, copies and imports carry it along.
//!
//! How many proposals a sequence gets follows measured costs and acceptance ([`lengths`]). Where drafting does not pay, plain
//! steps also leave out the draft's context, so that an idle draft costs nothing; what was read as a prompt has it always.

mod acceptance;
mod cost;
mod lengths;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use muser_backend::{DraftBatch, ExecutorInfo};
use muser_kv::BLOCK_LEN;

pub(crate) use acceptance::{Acceptance, MOST_PROPOSALS};
use lengths::{Drafting, Lengths};

use crate::{
    DraftLength, EngineConfig, TokenMask,
    driver::Driver,
    metrics::Metrics,
    sampler::{DraftSampling, DrawKey, Sampler},
    sequence::Sequence,
};

/// Rounds without proposals after which plain steps leave the draft's context out.
const REST_AFTER: u32 = 16;
/// Plain steps with the draft's context before a draft is tried again after a rest.
const WAKING_STEPS: u32 = 8;

/// Buffers, settings and experience of draft rounds.
pub(crate) struct DraftRounds {
    /// Most proposals per sequence and round; 0 when there is no draft (any more).
    most: usize,
    pub(crate) length: DraftLength,
    pub(crate) sampling: DraftSampling,
    lengths: Lengths,
    acceptance: Acceptance,
    batch: DraftBatch,
    /// Logits of all proposals of the round, shaped: what proposals were really drawn from.
    logits: Vec<f32>,
    /// The proposals of a round in which nobody needs these.
    largest: Vec<Option<u32>>,
    /// Who decodes, and for how many proposals.
    slots: Vec<usize>,
    drafting: Vec<Drafting>,
    chosen: Vec<usize>,
    /// Seconds that the draft and the step of this round should take, and what the draft took.
    forecast: Option<f64>,
    drafted_in: Option<Duration>,
    context: Context,
    /// Does the step to come leave the draft's context out?
    skips_context: bool,
}

/// How complete the draft's state is for what is being decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Context {
    /// Complete but for single steps; this many rounds in a row had no proposals.
    Complete(u32),
    /// Plain steps leave it out.
    Resting,
    /// Plain steps compute it again, this many before the next draft.
    Waking(u32),
}

impl DraftRounds {
    pub(crate) fn new(info: &ExecutorInfo, config: &EngineConfig) -> Self {
        Self {
            most: info.draft.map_or(0, |draft| draft.max_proposals).min(MOST_PROPOSALS),
            length: config.draft_length,
            sampling: config.draft_sampling,
            lengths: Lengths::new(),
            acceptance: Acceptance::of_all(),
            batch: DraftBatch::default(),
            logits: Vec::new(),
            largest: Vec::new(),
            slots: Vec::with_capacity(config.parallel),
            drafting: Vec::with_capacity(config.parallel),
            chosen: Vec::with_capacity(config.parallel),
            forecast: None,
            drafted_in: None,
            context: Context::Complete(0),
            skips_context: false,
        }
    }

    /// The shaped logits that proposal `k` of a sequence was drawn from.
    pub(crate) fn row(&self, sequence: &Sequence, k: usize, vocab: usize) -> Option<&[f32]> {
        self.logits.get((sequence.draft_row + k) * vocab..)?.get(..vocab)
    }

    /// Takes in how a sequence's proposals fared.
    pub(crate) fn note_proposals(&mut self, sequence: &mut Sequence, proposed: usize, accepted: usize) {
        sequence.acceptance.note(proposed, accepted);
        self.acceptance.note(proposed, accepted);
    }

    /// Can a step in which only these rounds' sequences are, and no prompt, leave the draft's context out?
    pub(crate) fn skips_context(&self) -> bool {
        self.skips_context
    }

    /// Takes in what a step of decoding sequences alone took, proposals among its rows.
    pub(crate) fn note_step(&mut self, rows: usize, took: Duration, metrics: &Metrics) {
        let drafted = self.drafted_in.is_some();
        if self.most == 0 || self.length != DraftLength::Auto || !(drafted || self.skips_context) {
            // Plain steps that keep the context complete are not what plain decoding costs.
            return;
        }
        self.lengths.step.note(rows, took);
        if let (Some(forecast), Some(drafted_in)) = (self.forecast, self.drafted_in) {
            Metrics::add(&metrics.forecast_ns, (forecast * 1e9) as u64);
            Metrics::add(&metrics.forecast_rounds_ns, (drafted_in + took).as_nanos() as u64);
        }
    }

    /// Decides who gets how many proposals. `false`: nobody.
    fn decide(&mut self, sequences: &[Option<Sequence>], most_positions: usize, most_rows: usize) -> bool {
        self.slots.clear();
        self.drafting.clear();
        self.chosen.clear();
        self.forecast = None;
        self.drafted_in = None;
        self.skips_context = self.length == DraftLength::Fixed(0);
        for (slot, sequence) in sequences.iter().enumerate() {
            let Some(sequence) = sequence.as_ref().filter(|s| s.is_decoding() && s.paused_since.is_none())
            else {
                continue;
            };
            // Beyond the limits proposals would be computed for nothing: the last token is never read again.
            let tokens = sequence.task.max_tokens.saturating_sub(sequence.generated).saturating_sub(1);
            let positions = most_positions.saturating_sub(sequence.tokens.len());
            let most = self.most.min(tokens as usize).min(positions);
            self.slots.push(slot);
            self.drafting.push(Drafting { most, rates: sequence.acceptance.rates_among(&self.acceptance) });
            self.chosen.push(0);
        }
        if self.slots.is_empty() {
            return false;
        }
        match self.length {
            DraftLength::Fixed(n) => {
                let mut left = most_rows.saturating_sub(self.slots.len());
                for (chosen, drafting) in self.chosen.iter_mut().zip(&self.drafting) {
                    *chosen = n.min(drafting.most).min(left);
                    left -= *chosen;
                }
            }
            DraftLength::Auto => self.decide_by_cost(most_rows),
        }
        self.chosen.iter().any(|&n| n > 0)
    }

    fn decide_by_cost(&mut self, most_rows: usize) {
        if let Context::Waking(steps) = self.context {
            self.context = if steps > 1 { Context::Waking(steps - 1) } else { Context::Complete(0) };
            return;
        }
        let forecast = self.lengths.choose(&self.drafting, most_rows, &mut self.chosen);
        let drafts = self.chosen.iter().any(|&n| n > 0);
        if drafts && self.context == Context::Resting {
            // The draft has not seen the last tokens, and what it proposed now would be held against it.
            self.chosen.fill(0);
            self.context = Context::Waking(WAKING_STEPS);
            return;
        }
        self.context = match self.context {
            _ if drafts => Context::Complete(0),
            Context::Complete(rounds) if rounds < REST_AFTER => Context::Complete(rounds + 1),
            _ => Context::Resting,
        };
        // A plain step that is to show what plain decoding costs is one without the context.
        let measures = forecast.is_none_or(|forecast| forecast.tried);
        self.skips_context = !drafts && (measures || self.context == Context::Resting);
        if let Some(forecast) = forecast {
            self.lengths.settle(&forecast);
            self.forecast = drafts.then_some(forecast.seconds);
        }
    }
}

impl Driver {
    /// Asks for proposals for the sequences that decode.
    pub(crate) fn draft_round(&mut self) {
        if self.draft.most == 0 {
            return;
        }
        for sequence in self.scheduler.slots.iter_mut().flatten() {
            // Proposals that no step has taken are void: their rows of logits are about to be written over.
            sequence.drafts.clear();
        }
        let most_rows = self.scheduler.config.max_rows;
        if !self.draft.decide(&self.scheduler.slots, self.most_positions, most_rows) {
            return;
        }
        let started = self.now();
        let draft = &mut self.draft;
        draft.batch.clear();
        for (&slot, &proposals) in draft.slots.iter().zip(&draft.chosen) {
            let Some(sequence) = self.scheduler.slots[slot].as_mut().filter(|_| proposals > 0) else {
                continue;
            };
            let (Some(kv), Some(&anchor)) = (&sequence.kv, sequence.tokens.last()) else { continue };
            let position = kv.len();
            let blocks = position.div_ceil(BLOCK_LEN).saturating_sub(kv.sliding_first());
            let table = &kv.sliding()[..blocks.min(kv.sliding().len())];
            sequence.draft_row = draft.batch.proposals();
            draft.batch.push(anchor, position as u32, proposals as u32, kv.sliding_first() as u32, table);
        }
        let executor = &mut self.executor;
        let exact = draft.sampling == DraftSampling::Exact;
        // Nobody shapes the logits of a proposal or draws from them: then the largest are enough.
        let largest_alone =
            draft.slots.iter().zip(&draft.chosen).filter(|(_, n)| **n > 0).all(|(&slot, _)| {
                let sequence = self.scheduler.slots[slot].as_ref();
                sequence.is_none_or(|s| !s.shapes_logits() && (exact || s.task.sampling.is_greedy()))
            });
        let result = catch_unwind(AssertUnwindSafe(|| {
            if largest_alone {
                executor.draft_largest(&draft.batch, &mut draft.logits, &mut draft.largest)
            } else {
                executor.draft(&draft.batch, &mut draft.logits)
            }
        }));
        if !matches!(result, Ok(Ok(()))) {
            // Text does not depend on drafts: go on without them.
            Metrics::add(&self.shared.metrics.draft_errors, 1);
            tracing::error!("a draft round failed, drafting is off from now on");
            draft.most = 0;
            draft.forecast = None;
            return;
        }
        for (&slot, &proposals) in draft.slots.iter().zip(&draft.chosen) {
            if let Some(sequence) = self.scheduler.slots[slot].as_mut().filter(|_| proposals > 0) {
                if largest_alone {
                    take_proposals(sequence, &draft.largest[sequence.draft_row..][..proposals]);
                    continue;
                }
                let rows = &mut draft.logits[sequence.draft_row * self.vocab..][..proposals * self.vocab];
                propose(sequence, &mut self.sampler, &mut self.mask, draft.sampling, rows, self.vocab);
            }
        }
        let rows = draft.batch.proposals() + draft.batch.seqs().len();
        let took = self.now().saturating_sub(started);
        let draft = &mut self.draft;
        draft.drafted_in = Some(took);
        if draft.length == DraftLength::Auto {
            draft.lengths.draft.note(rows, took);
        }
        self.shared.metrics.draft_time.record(took);
    }
}

/// Takes a sequence's proposals as they are.
fn take_proposals(sequence: &mut Sequence, ids: &[Option<u32>]) {
    for &id in ids {
        let Some(id) = id else { break };
        sequence.drafts.push(id);
        if sequence.task.stop_ids.contains(&id) {
            break;
        }
    }
}

/// Draws a sequence's proposals from the rows of the draft, which are shaped in place as the target's will be.
fn propose(
    sequence: &mut Sequence,
    sampler: &mut Sampler,
    mask: &mut TokenMask,
    how: DraftSampling,
    rows: &mut [f32],
    vocab: usize,
) {
    let task = &sequence.task;
    let mut new_to_counts: smallvec::SmallVec<[bool; 32]> = smallvec::SmallVec::new();
    for (k, row) in rows.chunks_exact_mut(vocab).enumerate() {
        // A constraint knows what may follow the anchor; behind a proposal it has not been yet.
        let masked = match &mut sequence.constraint {
            Some(constraint) if k == 0 => {
                mask.clear();
                constraint.mask(mask)
            }
            _ => false,
        };
        Sampler::shape(&task.sampling, sequence.counts.as_ref(), masked.then_some(&*mask), row);
        let key = DrawKey {
            seed: task.seed,
            index: sequence.index,
            position: u64::from(task.prompt_tokens) + u64::from(sequence.generated) + k as u64,
        };
        let Some(id) = sampler.propose(how, &task.sampling, row, key) else { break };
        sequence.drafts.push(id);
        if task.stop_ids.contains(&id) {
            break;
        }
        if let Some(counts) = &mut sequence.counts {
            new_to_counts.push(counts.push_output(id));
        }
    }
    if let Some(counts) = &mut sequence.counts {
        for (&id, &was_new) in sequence.drafts.iter().zip(&new_to_counts).rev() {
            counts.take_back_output(id, was_new);
        }
    }
}
