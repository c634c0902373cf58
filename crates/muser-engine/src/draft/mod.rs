//! Draft rounds: proposals for every decoding sequence at once, from the draft model that the executor holds.
//!
//! A proposal costs a row in the next step and a share of a draft, and the target's own sampler has the last word on every
//! token (see [`crate::sampler::DraftSampling`]): greedy text is that of plain decoding bit for bit, and so is sampled text
//! unless rejection sampling was asked for. Rolling back is forgetting rows that were never committed, and the draft's
//! state lies in the sliding blocks, so reuse, copies and imports carry it along.
//!
//! How many proposals a sequence gets follows measured costs and acceptance ([`lengths`]). Where drafting does not pay it
//! sleeps ([`rest`]), and steps leave out the draft's context, so that an idle draft costs nothing. Rows without context are
//! zeros, which no computed row is, so they can be told wherever their block has been meanwhile: a sequence drafts again once
//! its latest rows have context, and what it proposes with a gap close behind is not held against the draft in general.

mod acceptance;
mod backoff;
mod cost;
mod lengths;
mod state;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use muser_backend::{DraftBatch, Executor, ExecutorInfo};
use muser_kv::{BLOCK_LEN, BlockId};

use acceptance::Acceptance;
pub(crate) use acceptance::MOST_PROPOSALS;
use lengths::{Drafting, Lengths};
pub(crate) use state::DraftState;

use crate::{
    DraftLength, EngineConfig,
    metrics::Metrics,
    sampler::{DraftSampling, DrawKey, Sampler, Tools},
    sequence::{Sequence, Wait},
    shared::Env,
    slots::Slots,
};

/// Rows with context, up to the end of its text, that a sequence needs to draft.
const CONTEXT_TO_DRAFT: usize = backoff::WARMUP_ROUNDS as usize;
/// Rows with context after which a gap before them no longer shows in what is proposed.
const CONTEXT_TO_LEARN: usize = 128;
/// Fewer rows without context in a row are no gap: single steps are measured without.
const GAP: usize = 8;

/// Most time that a round waits for masks in all.
const MASKS_A_ROUND: Duration = Duration::from_millis(5);

/// What bounds a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundLimits {
    /// Positions of a sequence.
    pub(crate) positions: usize,
    /// Rows of the step that verifies the proposals.
    pub(crate) rows: usize,
}

/// Buffers, settings and experience of draft rounds.
pub(crate) struct DraftRounds {
    /// Most proposals per sequence and round; 0 when there is no draft (any more).
    most: usize,
    length: DraftLength,
    sampling: DraftSampling,
    vocab: usize,
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
    /// Has a draft been computed? The first one touches weights for the first time and says nothing about costs.
    has_drafted: bool,
    context: ContextPolicy,
}

/// What the step to come does about the draft's context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ContextPolicy {
    #[default]
    Computed,
    /// Left out where nobody reads a prompt, to see what a plain step costs.
    Measuring,
    /// Left out where nobody reads a prompt: drafting sleeps.
    Skipped,
    /// Left out for prompts as well: it sleeps for single sequences, too.
    SkippedForAll,
}

impl DraftRounds {
    /// `sliding_per_sequence`: most blocks that a draft reads of a sequence.
    pub(crate) fn new(info: &ExecutorInfo, config: &EngineConfig, sliding_per_sequence: usize) -> Self {
        let most = info.draft.map_or(0, |draft| draft.max_proposals).min(MOST_PROPOSALS);
        Self {
            most,
            length: config.draft_length,
            sampling: config.draft_sampling,
            vocab: info.vocab,
            lengths: Lengths::new(),
            acceptance: Acceptance::of_all(),
            batch: roomy_batch(config.parallel, most, sliding_per_sequence),
            // Room for the largest round; what is never written costs addresses, not memory.
            logits: Vec::with_capacity(config.parallel * most * info.vocab),
            largest: Vec::with_capacity(config.parallel * most),
            slots: Vec::with_capacity(config.parallel),
            drafting: Vec::with_capacity(config.parallel),
            chosen: Vec::with_capacity(config.parallel),
            forecast: None,
            drafted_in: None,
            has_drafted: false,
            context: ContextPolicy::Computed,
        }
    }

    /// The shaped logits that proposal `k` of a sequence was drawn from.
    pub(crate) fn row(&self, sequence: &Sequence, k: usize) -> Option<&[f32]> {
        self.logits.get((sequence.draft.first_row + k) * self.vocab..)?.get(..self.vocab)
    }

    /// How proposals are drawn and judged.
    pub(crate) fn sampling(&self) -> DraftSampling {
        self.sampling
    }

    /// Proposals of all sequences that were judged.
    #[cfg(test)]
    pub(crate) fn judged(&self) -> f32 {
        self.acceptance.tries()
    }

    #[cfg(test)]
    pub(crate) fn set_length(&mut self, length: DraftLength) {
        self.length = length;
    }

    #[cfg(test)]
    pub(crate) fn set_sampling(&mut self, sampling: DraftSampling) {
        self.sampling = sampling;
    }

    /// Takes in how a sequence's proposals fared: of `drafted` ones the first `judged` say something, and the first `accepted`
    /// were right.
    pub(crate) fn note_proposals(
        &mut self,
        sequence: &mut Sequence,
        drafted: usize,
        judged: usize,
        accepted: usize,
        metrics: &Metrics,
    ) {
        Metrics::add(&metrics.drafts, 1);
        Metrics::add(&metrics.drafted_tokens, drafted as u64);
        Metrics::add(&metrics.accepted_tokens, accepted as u64);
        metrics.drafted_by_place.add_first(drafted);
        metrics.accepted_by_place.add_first(accepted);
        sequence.progress.note_proposals(drafted, accepted);
        sequence.draft.acceptance.note(judged, accepted);
        if sequence.draft.context(sequence.computed()) >= CONTEXT_TO_LEARN {
            self.acceptance.note(judged, accepted);
        }
    }

    /// Does the step to come leave the draft's context out? `decodes_only`: it reads no prompt.
    pub(crate) fn skips_context(&self, decodes_only: bool) -> bool {
        match self.context {
            ContextPolicy::Computed => false,
            ContextPolicy::Measuring | ContextPolicy::Skipped => decodes_only,
            ContextPolicy::SkippedForAll => true,
        }
    }

    /// Are rows that a step leaves without the draft's context a gap? Single ones are not.
    pub(crate) fn leaves_gaps(&self) -> bool {
        self.context != ContextPolicy::Measuring
    }

    /// Takes in what a step of decoding sequences alone took, proposals among its rows.
    pub(crate) fn note_step(&mut self, rows: usize, took: Duration, metrics: &Metrics) {
        let drafted = self.drafted_in.is_some();
        if self.most == 0 || self.length != DraftLength::Auto || !(drafted || self.skips_context(true)) {
            // Plain steps that keep the context complete are not what plain decoding costs.
            return;
        }
        if drafted && !self.has_drafted {
            self.has_drafted = true;
            return;
        }
        self.lengths.step.note(rows, took);
        if let (Some(forecast), Some(drafted_in)) = (self.forecast, self.drafted_in) {
            Metrics::add(&metrics.forecast_ns, (forecast * 1e9) as u64);
            Metrics::add(&metrics.forecast_rounds_ns, (drafted_in + took).as_nanos() as u64);
        }
    }

    /// Decides who gets how many proposals. `false`: nobody.
    fn decide(&mut self, slots: &Slots, limits: RoundLimits) -> bool {
        self.slots.clear();
        self.drafting.clear();
        self.chosen.clear();
        self.forecast = None;
        self.drafted_in = None;
        let decodes = |s: &Sequence| s.is_decoding() && !matches!(s.wait, Wait::Reader { .. });
        let is_auto = self.length == DraftLength::Auto;
        self.context = match self.length {
            DraftLength::Fixed(0) => ContextPolicy::SkippedForAll,
            DraftLength::Auto if self.lengths.is_deep_asleep(1) => ContextPolicy::SkippedForAll,
            DraftLength::Fixed(_) | DraftLength::Auto => ContextPolicy::Computed,
        };
        let count = slots.seated().filter(|(_, sequence)| decodes(sequence)).count();
        if count == 0 || self.length == DraftLength::Fixed(0) {
            return false;
        }
        if is_auto {
            let is_for_all = self.context == ContextPolicy::SkippedForAll;
            self.context = match self.lengths.is_deep_asleep(count) {
                true if is_for_all => ContextPolicy::SkippedForAll,
                true => ContextPolicy::Skipped,
                false => ContextPolicy::Computed,
            };
            if self.lengths.skips_round(count) {
                return false;
            }
        }
        for (slot, sequence) in slots.seated().filter(|(_, sequence)| decodes(sequence)) {
            // Beyond the limits proposals would be computed for nothing: the last token is never read again.
            let tokens = sequence.tokens_left().saturating_sub(1);
            let positions = limits.positions.saturating_sub(sequence.text.len());
            let mut most = self.most.min(tokens).min(positions);
            if is_auto && sequence.draft.context(sequence.computed()) < CONTEXT_TO_DRAFT {
                most = 0;
            }
            self.slots.push(slot);
            self.drafting
                .push(Drafting { most, rates: sequence.draft.acceptance.rates_among(&self.acceptance) });
            self.chosen.push(0);
        }
        match self.length {
            DraftLength::Fixed(n) => {
                let mut left = limits.rows.saturating_sub(self.slots.len());
                for (chosen, drafting) in self.chosen.iter_mut().zip(&self.drafting) {
                    *chosen = n.min(drafting.most).min(left);
                    left -= *chosen;
                }
            }
            DraftLength::Auto => self.decide_by_cost(limits.rows),
        }
        self.chosen.iter().any(|&n| n > 0)
    }

    fn decide_by_cost(&mut self, most_rows: usize) {
        let forecast = self.lengths.choose(&self.drafting, most_rows, &mut self.chosen);
        let drafts = self.chosen.iter().any(|&n| n > 0);
        if !drafts && forecast.is_none_or(|forecast| forecast.tried) {
            // A plain step that is to show what plain decoding costs is one without the context.
            self.context = ContextPolicy::Measuring;
        }
        self.forecast = forecast.filter(|_| drafts).map(|forecast| forecast.seconds);
    }
}

/// A batch whose buffers hold the largest round.
fn roomy_batch(parallel: usize, most: usize, sliding_per_sequence: usize) -> DraftBatch {
    let mut batch = DraftBatch::default();
    let table = vec![BlockId(0); sliding_per_sequence];
    for _ in 0..if most > 0 { parallel } else { 0 } {
        batch.push(0, 0, most as u32, 0, &table);
    }
    batch.clear();
    batch
}

impl DraftRounds {
    /// Asks for proposals for the sequences that decode.
    pub(crate) fn round(
        &mut self,
        executor: &mut dyn Executor,
        slots: &mut Slots,
        limits: RoundLimits,
        tools: &mut Tools,
        env: Env<'_>,
    ) {
        if self.most == 0 {
            return;
        }
        for sequence in slots.running_mut() {
            // Proposals that no step has taken are void: their rows of logits are about to be written over.
            sequence.draft.clear();
        }
        if self.length == DraftLength::Auto {
            slots.running_mut().for_each(|sequence| find_gaps(sequence, executor));
        }
        if !self.decide(slots, limits) {
            return;
        }
        let started = env.now();
        self.fill_batch(slots);
        let largest_alone = self.needs_largest_alone(slots);
        let result = catch_unwind(AssertUnwindSafe(|| {
            if largest_alone {
                executor.draft_largest(&self.batch, &mut self.logits, &mut self.largest)
            } else {
                executor.draft(&self.batch, &mut self.logits)
            }
        }));
        if !matches!(result, Ok(Ok(()))) {
            // Text does not depend on drafts: go on without them.
            Metrics::add(&env.metrics.draft_errors, 1);
            tracing::error!("a draft round failed, drafting is off from now on");
            self.most = 0;
            self.forecast = None;
            return;
        }
        self.take(slots, largest_alone, tools, env);
        let rows = self.batch.proposals() + self.batch.seqs().len();
        let took = env.now().saturating_sub(started);
        self.drafted_in = Some(took);
        if self.length == DraftLength::Auto && self.has_drafted {
            self.lengths.draft.note(rows, took);
        }
        env.metrics.draft_time.record(took);
    }

    /// Who gets proposals, and how many.
    fn chosen(&self) -> impl Iterator<Item = (usize, usize)> {
        self.slots.iter().copied().zip(self.chosen.iter().copied()).filter(|(_, proposals)| *proposals > 0)
    }

    fn fill_batch(&mut self, slots: &mut Slots) {
        self.batch.clear();
        for (&slot, &proposals) in self.slots.iter().zip(&self.chosen) {
            let Some(sequence) = slots.get_mut(slot).filter(|_| proposals > 0) else { continue };
            let (Some(kv), Some(&anchor)) = (sequence.blocks.kv(), sequence.text.tokens().last()) else {
                continue;
            };
            let position = kv.len();
            let blocks = position.div_ceil(BLOCK_LEN).saturating_sub(kv.sliding_first());
            let table = &kv.sliding()[..blocks.min(kv.sliding().len())];
            sequence.draft.first_row = self.batch.proposals();
            self.batch.push(anchor, position as u32, proposals as u32, kv.sliding_first() as u32, table);
        }
    }

    /// Does nobody shape the logits of a proposal or draw from them? Then the largest are enough.
    fn needs_largest_alone(&self, slots: &Slots) -> bool {
        let exact = self.sampling == DraftSampling::Exact;
        self.chosen()
            .filter_map(|(slot, _)| slots.get(slot))
            .all(|sequence| !sequence.shapes_logits() && (exact || sequence.task.sampling.is_greedy()))
    }

    fn take(&mut self, slots: &mut Slots, largest_alone: bool, tools: &mut Tools, env: Env<'_>) {
        let masks_by = env.now() + MASKS_A_ROUND;
        for (&slot, &proposals) in self.slots.iter().zip(&self.chosen) {
            let Some(sequence) = slots.get_mut(slot).filter(|_| proposals > 0) else { continue };
            let first = sequence.draft.first_row;
            if largest_alone {
                take_proposals(sequence, &self.largest[first..][..proposals]);
                continue;
            }
            let rows = &mut self.logits[first * self.vocab..][..proposals * self.vocab];
            let wait = || masks_by.saturating_sub(env.now());
            propose(sequence, tools, &wait, self.sampling, rows, self.vocab);
        }
    }
}

/// Takes a sequence's proposals as they are.
fn take_proposals(sequence: &mut Sequence, ids: &[Option<u32>]) {
    for &id in ids {
        let Some(id) = id else { break };
        sequence.draft.proposals.push(id);
        if sequence.task.stop_ids.contains(&id) {
            break;
        }
    }
}

/// Looks for gaps in the draft's context in what a sequence did not compute itself: blocks of earlier requests, and of
/// earlier runs.
fn find_gaps(sequence: &mut Sequence, executor: &dyn Executor) {
    if !sequence.is_decoding() || !sequence.draft.looks_for_gaps() {
        return;
    }
    let Some(kv) = sequence.blocks.kv() else { return };
    let first = kv.sliding_first() * BLOCK_LEN;
    let row_is_there = |position: usize| {
        let block = kv.sliding().get(position / BLOCK_LEN - kv.sliding_first());
        block.is_none_or(|&block| executor.has_draft_context(block, position % BLOCK_LEN))
    };
    let mut without = 0;
    for position in (first..kv.len()).rev() {
        without = if row_is_there(position) { 0 } else { without + 1 };
        if without >= GAP.min(kv.len()) {
            sequence.draft.note_gap(position + without);
            break;
        }
    }
}

/// Draws a sequence's proposals from the rows of the draft, which are shaped in place as the target's will be.
fn propose(
    sequence: &mut Sequence,
    tools: &mut Tools,
    wait: &dyn Fn() -> Duration,
    how: DraftSampling,
    rows: &mut [f32],
    vocab: usize,
) {
    let Tools { sampler, mask } = tools;
    let task = &sequence.task;
    let mut new_to_counts: smallvec::SmallVec<[bool; 32]> = smallvec::SmallVec::new();
    let mut ahead = None;
    let wanted = rows.len() / vocab;
    for (k, row) in rows.chunks_exact_mut(vocab).enumerate() {
        // The constraint itself knows what may follow the anchor; a copy of it goes ahead with the proposals.
        let mut constraint = if k == 0 { sequence.rules.constraint.as_mut() } else { ahead.as_mut() };
        if constraint.as_mut().is_some_and(|constraint| !constraint.wait(wait())) {
            // What its mask would refuse is not worth a row.
            break;
        }
        let masked = constraint.is_some_and(|constraint| {
            mask.clear();
            constraint.mask(mask)
        });
        Sampler::apply_processors(
            &task.sampling,
            sequence.rules.counts.as_ref(),
            masked.then_some(&*mask),
            row,
        );
        let key = DrawKey {
            seed: task.seed,
            index: sequence.index,
            position: u64::from(task.prompt_tokens) + u64::from(sequence.progress.generated()) + k as u64,
        };
        let Some(id) = sampler.propose(how, &task.sampling, row, key) else { break };
        sequence.draft.proposals.push(id);
        if task.stop_ids.contains(&id) || k + 1 == wanted {
            break;
        }
        if k == 0 {
            ahead = sequence.rules.constraint.as_ref().and_then(|constraint| constraint.fork());
        }
        if ahead.as_mut().is_some_and(|ahead| ahead.commit(id).is_err()) {
            break;
        }
        if let Some(counts) = &mut sequence.rules.counts {
            new_to_counts.push(counts.push_output(id));
        }
    }
    if let Some(counts) = &mut sequence.rules.counts {
        for (&id, &was_new) in sequence.draft.proposals.iter().zip(&new_to_counts).rev() {
            counts.take_back_output(id, was_new);
        }
    }
}
