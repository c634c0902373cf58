//! One step: copies, rows to the executor, logits to tokens, tokens to events.
//!
//! [`Stepper::run`] computes, [`Stepper::take`] takes in the results of one sequence. Nothing here knows the queue or the
//! slots: who ends and who goes back to the queue is said in an [`After`].

mod outputs;
mod sample;

use std::{sync::atomic::Ordering, time::Duration};

use muser_backend::{
    ExecError, Executor, ExecutorInfo, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput,
};
use muser_kv::{BLOCK_LEN, BlockId};
use outputs::{Facts, Needs, OutputRows};
#[cfg(test)]
pub(crate) use sample::hash_logits;

use crate::{
    Event, FinishReason, MOST_PROPOSALS, RequestError, RequestKind, Started, Token,
    draft::DraftRounds,
    image::row,
    memory::{BlockMove, Memory},
    metrics::Metrics,
    plan::{PlanItem, StepPlan},
    sampler::Tools,
    sequence::{End, Sequence},
    shared::Env,
    slots::Slots,
};

/// Most time that a step, or a round of drafts, waits for masks in all. Whose mask is not there then sits steps out.
pub(crate) const MASKS_A_STEP: Duration = Duration::from_millis(5);

/// What becomes of a sequence after a step.
#[derive(Debug)]
pub(crate) enum After {
    /// It has its slot and wants more.
    GoesOn,
    /// It reads what is left of its text as if that had been its prompt.
    ReadsAgain,
    /// It is over.
    Ended(End),
}

/// What taking in results changes besides the sequence.
pub(crate) struct Parts<'a> {
    pub(crate) memory: &'a mut Memory,
    pub(crate) draft: &'a mut DraftRounds,
    pub(crate) tools: &'a mut Tools,
    /// When the step had ended.
    pub(crate) now: Duration,
    pub(crate) env: Env<'a>,
}

/// What is asked for on behalf of an item of the plan, and where it begins in the outputs.
#[derive(Clone, Copy, Debug)]
struct Asked {
    at: OutputRows,
    needs: Needs,
}

/// The buffers of a step.
pub(crate) struct Stepper {
    facts: Facts,
    batch: StepBatch,
    out: StepOutput,
    /// For each item of the plan.
    asked: Vec<Asked>,
    /// Bytes of a block on its way from one place to another.
    copy_buffer: Vec<u8>,
    /// How long masks are waited for, since the engine's start.
    masks_by: Duration,
}

impl Stepper {
    /// For steps of `parallel` sequences.
    pub(crate) fn new(executor: &dyn Executor, parallel: usize, hidden: usize, blocks: KvCapacity) -> Self {
        let info = executor.info();
        Self {
            facts: Facts { hidden, vocab: info.vocab, most_candidates: executor.most_candidates() },
            batch: roomy_batch(parallel, info.max_rows, blocks),
            out: roomy_output(info, parallel),
            asked: Vec::with_capacity(parallel),
            copy_buffer: Vec::new(),
            masks_by: Duration::ZERO,
        }
    }

    /// How many of a row's largest logits the executor is taken to tell.
    pub(crate) fn set_most_candidates(&mut self, most: usize) {
        self.facts.most_candidates = most;
    }

    /// Rows of the step.
    pub(crate) fn rows(&self) -> usize {
        self.batch.rows().len()
    }

    /// Writes down the rows of the step and what is asked of each.
    pub(crate) fn build(&mut self, plan: &StepPlan, slots: &Slots, draft: &DraftRounds) {
        self.batch.clear();
        self.asked.clear();
        if draft.skips_context(decodes_only(plan, slots)) {
            self.batch.skip_draft_context();
        }
        let mut at = OutputRows::default();
        for &item in &plan.items {
            let Some(sequence) = slots.get(item.slot) else {
                self.asked.push(Asked { at, needs: Needs::Logits });
                continue;
            };
            let needs = self.facts.needs(sequence, item.drafts, draft.sampling());
            let wanted = outputs::wanted(sequence, item, needs);
            self.asked.push(Asked { at, needs });
            at = at.behind(wanted);
            self.push_rows(sequence, item, wanted);
        }
    }

    fn push_rows(&mut self, sequence: &Sequence, item: PlanItem, wanted: OutputRows) {
        let Some(kv) = sequence.blocks.kv() else { return };
        let end = item.start + item.rows + item.drafts;
        let full = &kv.full()[..end.div_ceil(BLOCK_LEN)];
        self.batch.push_seq(item.start as u32, full, kv.sliding_first() as u32, kv.sliding());
        let text = &sequence.text;
        for position in item.start..end {
            let input = match text.tokens().get(position) {
                Some(&token) => match row(text.images(), position) {
                    Some(values) => RowInput::Embedding(self.batch.push_embedding(values)),
                    None => RowInput::Token(token),
                },
                None => RowInput::Token(sequence.draft.proposals()[position - text.len()]),
            };
            self.batch.push_row(Row { input, wants: wanted.wants(end - position) });
        }
    }

    /// Moves the blocks of the plan and computes the rows.
    pub(crate) fn run(
        &mut self,
        executor: &mut dyn Executor,
        plan: &StepPlan,
        memory: &mut Memory,
        metrics: &Metrics,
    ) -> Result<(), ExecError> {
        for block_move in &plan.moves {
            self.move_block(block_move, executor, memory, metrics)?;
        }
        if self.batch.rows().is_empty() {
            return Ok(());
        }
        executor.step(&self.batch, &mut self.out)
    }

    fn move_block(
        &mut self,
        block_move: &BlockMove,
        executor: &mut dyn Executor,
        memory: &mut Memory,
        metrics: &Metrics,
    ) -> Result<(), ExecError> {
        match block_move {
            BlockMove::Copy(copy) => {
                let bytes = executor.info().block_bytes(copy.group);
                if self.copy_buffer.len() < bytes {
                    self.copy_buffer.resize(bytes, 0);
                }
                let buffer = &mut self.copy_buffer[..bytes];
                executor.export_block(copy.group, copy.from, buffer)?;
                executor.import_block(copy.group, copy.to, buffer)?;
                Metrics::add(&metrics.copied_blocks, 1);
            }
            BlockMove::Spill(evicted) => {
                let group = evicted.key.group;
                let mut bytes = vec![0; executor.info().block_bytes(group)].into_boxed_slice();
                executor.export_block(group, evicted.block, &mut bytes)?;
                memory.put_into_host(evicted.key, bytes);
            }
            BlockMove::Restore(group, block, bytes) => {
                executor.import_block(*group, *block, bytes)?;
                Metrics::add(&metrics.restored_blocks, 1);
            }
        }
        Ok(())
    }

    /// From now on masks are waited for.
    pub(crate) fn begin_taking(&mut self, now: Duration) {
        self.masks_by = now + MASKS_A_STEP;
    }

    /// Takes in the results of the plan's item `index` for its sequence.
    pub(crate) fn take(
        &mut self,
        index: usize,
        item: PlanItem,
        sequence: &mut Sequence,
        parts: &mut Parts<'_>,
    ) -> After {
        if item.to_end && !sequence.mask_is_ready(self.masks_by.saturating_sub(parts.env.now())) {
            // Nothing of its rows is noted: they are computed again, to the same bits, when the mask is there.
            return After::GoesOn;
        }
        let asked = self.asked[index];
        let ended = match self.take_prompt(item, asked, sequence, parts) {
            Ok(Reads::On) => return After::GoesOn,
            Ok(Reads::Tokens(asked)) => {
                sequence.progress.note_step();
                self.take_tokens(item, asked, sequence, parts)
            }
            Err(end) => Some(end),
        };
        match ended {
            Some(end) => After::Ended(end),
            None => prepare_next(sequence, parts.memory.config.most_positions),
        }
    }

    /// Notes the rows as computed and what they tell of the prompt.
    fn take_prompt(
        &mut self,
        item: PlanItem,
        mut asked: Asked,
        sequence: &mut Sequence,
        parts: &mut Parts<'_>,
    ) -> Result<Reads, End> {
        let metrics = parts.env.metrics;
        let was_decoding = sequence.is_decoding();
        let rows = if was_decoding { &metrics.decode_rows } else { &metrics.prefill_rows };
        Metrics::add(rows, (item.rows + item.drafts) as u64);
        let end = item.start + item.rows;
        let Some(kv) = sequence.blocks.kv_mut() else { return Ok(Reads::On) };
        parts.memory.commit(kv, &sequence.text.units()[item.start..end]);
        if !self.batch.wants_draft_context() && parts.draft.leaves_gaps() {
            sequence.draft.note_gap(kv.len());
        }
        if !was_decoding {
            sequence.task.ring.set_prefilled(end.min(sequence.task.prompt_tokens as usize) as u32);
        }
        if sequence.task.kind == RequestKind::Embed {
            self.sum_hidden(item, asked.at, &mut sequence.known.hidden_sum);
        }
        if let Some(first) = sequence.prompt_rows_from() {
            let count = end.saturating_sub(first).min(item.rows);
            let vocab = self.facts.vocab;
            let rows = self.out.logits[asked.at.logits * vocab..][..count * vocab].chunks_exact(vocab);
            sample::note_prompt(sequence, &mut parts.tools.sampler, rows, end - count).map_err(End::Fail)?;
            // The token is drawn from the last of them.
            asked.at.logits += count.saturating_sub(1);
        }
        if !item.to_end {
            return Ok(Reads::On);
        }
        if !was_decoding && let Some(kv) = sequence.blocks.kv_mut() {
            parts.memory.mark_resume(kv);
            sequence.offered.note_prompt();
        }
        tell_start(sequence, parts.now, metrics);
        if sequence.tokens_left() == 0 {
            return Err(End::Finish(FinishReason::Length));
        }
        Ok(Reads::Tokens(asked))
    }

    fn sum_hidden(&self, item: PlanItem, at: OutputRows, sums: &mut Vec<f64>) {
        let width = self.facts.hidden;
        if item.start == 0 {
            sums.clear();
            sums.resize(width, 0.0);
        }
        for row in self.out.hidden[at.hidden * width..].chunks_exact(width).take(item.rows) {
            sums.iter_mut().zip(row).for_each(|(sum, &value)| *sum += f64::from(value));
        }
    }

    /// Samples the row at the end of the tokens and, as long as the proposals are accepted, those after it.
    fn take_tokens(
        &mut self,
        item: PlanItem,
        asked: Asked,
        sequence: &mut Sequence,
        parts: &mut Parts<'_>,
    ) -> Option<End> {
        let mut accepted = 0;
        let mut end = None;
        for k in 0..=item.drafts {
            if k > 0 && !sequence.mask_is_ready(self.masks_by.saturating_sub(parts.env.now())) {
                // The proposals from here on are as good as refused.
                break;
            }
            let (token, is_proposal) = match self.draw(item, asked, k, sequence, parts) {
                Ok(drawn) => drawn,
                Err(error) => {
                    end = Some(End::Fail(error));
                    break;
                }
            };
            Metrics::add(&parts.env.metrics.generated_tokens, 1);
            sequence.progress.note_token(parts.now);
            if k > 0
                && let Some(kv) = sequence.blocks.kv_mut()
            {
                // The row that gave these logits had the proposal as input, and the proposal was accepted.
                let last = sequence.text.len() - 1;
                parts.memory.commit(kv, &sequence.text.units()[last..]);
            }
            sequence.push(token.id);
            accepted += usize::from(is_proposal);
            end = send_token(sequence, token);
            if end.is_some() || !is_proposal {
                break;
            }
        }
        if item.drafts > 0 {
            // The end of a text says nothing about proposals behind it.
            let judged = if end.is_some() { accepted } else { item.drafts };
            parts.draft.note_proposals(sequence, item.drafts, judged, accepted, parts.env.metrics);
        }
        end
    }

    /// The token of the row `k` behind the first one with a token, and whether it is the proposal for its place.
    fn draw(
        &mut self,
        item: PlanItem,
        asked: Asked,
        k: usize,
        sequence: &mut Sequence,
        parts: &mut Parts<'_>,
    ) -> Result<(Token, bool), RequestError> {
        let position = (item.start + item.rows - 1 + k) as u32;
        let proposal = sequence.draft.proposals().get(k).copied().filter(|_| k < item.drafts);
        let id = match asked.needs {
            Needs::Largest => {
                let id = self.out.argmax.get(asked.at.largest + k).copied().flatten();
                id.ok_or(RequestError::NotFinite { position })?
            }
            Needs::Candidates(n) => {
                let highest = &self.out.candidates[asked.at.candidates + k * n..][..n];
                sample::draw_among(sequence, &mut parts.tools.sampler, highest, position)?
            }
            Needs::Logits => {
                let vocab = self.facts.vocab;
                let logits = &mut self.out.logits[(asked.at.logits + k) * vocab..][..vocab];
                // Where only the proposal was asked for, nothing reads its logits.
                let proposal = proposal.map(|id| (id, parts.draft.row(sequence, k).unwrap_or_default()));
                return sample::sample(
                    sequence,
                    parts.tools,
                    logits,
                    position,
                    proposal,
                    parts.draft.sampling(),
                );
            }
        };
        Ok((sample::bare_token(sequence, id), Some(id) == proposal))
    }
}

/// What the rows of a prompt lead to.
enum Reads {
    /// There is more to read.
    On,
    /// A token is to be drawn.
    Tokens(Asked),
}

/// Does the step go on with texts and nothing else?
pub(crate) fn decodes_only(plan: &StepPlan, slots: &Slots) -> bool {
    let decodes = |item: &PlanItem| slots.get(item.slot).is_some_and(Sequence::is_decoding);
    plan.moves.is_empty() && plan.items.iter().all(decodes)
}

/// Sends what is known once a prompt has been read.
fn tell_start(sequence: &mut Sequence, now: Duration, metrics: &Metrics) {
    if let Some(known) = sequence.known.logprobs.take() {
        sequence.task.ring.send(Event::Prompt(known));
    }
    let task = &sequence.task;
    if !task.started.swap(true, Ordering::Relaxed) {
        let cached_tokens = task.cached_tokens.load(Ordering::Relaxed);
        let admitted = sequence.progress.admitted_at().unwrap_or(now);
        Metrics::add(&metrics.cached_tokens, u64::from(cached_tokens));
        task.ring.send(Event::Started(Started {
            prompt_tokens: task.prompt_tokens,
            cached_tokens,
            queue_time: admitted.saturating_sub(task.submitted_at),
            prefill_time: now.saturating_sub(admitted),
            seed: task.seed,
        }));
    }
    if task.kind == RequestKind::Embed {
        let n = sequence.text.len() as f64;
        let mean = sequence.known.hidden_sum.iter().map(|sum| (sum / n) as f32).collect();
        task.ring.send(Event::Embedding(mean));
    }
}

/// Sends the token and looks for reasons to stop.
fn send_token(sequence: &mut Sequence, token: Token) -> Option<End> {
    let task = &sequence.task;
    if task.stop_ids.contains(&token.id) {
        return Some(End::Finish(FinishReason::Stop(token.id)));
    }
    task.ring.send(Event::Token(token));
    if sequence.rules.stop_watch.as_mut().is_some_and(|watch| watch.push(token.id)) {
        return Some(End::Finish(FinishReason::StopWatch));
    }
    (sequence.tokens_left() == 0).then_some(End::Finish(FinishReason::Length))
}

/// Makes room if the context is full.
fn prepare_next(sequence: &mut Sequence, most_positions: usize) -> After {
    sequence.draft.clear();
    if sequence.text.len() < most_positions {
        After::GoesOn
    } else if sequence.shift(most_positions) {
        After::ReadsAgain
    } else {
        After::Ended(End::Finish(FinishReason::Context))
    }
}

/// A batch whose buffers hold the largest step: tables grow while sequences do, and a step must not allocate for that.
fn roomy_batch(parallel: usize, max_rows: usize, blocks: KvCapacity) -> StepBatch {
    let mut batch = StepBatch::default();
    let full = vec![BlockId(0); blocks.full as usize];
    let sliding = vec![BlockId(0); blocks.sliding as usize];
    for _ in 0..parallel {
        // Shared blocks stand in the tables of all their sequences.
        batch.push_seq(0, &full, 0, &sliding);
    }
    for _ in 0..max_rows {
        batch.push_row(Row { input: RowInput::Token(0), wants: RowWants::default() });
    }
    batch.clear();
    batch
}

/// Outputs with room for the largest step of decoding sequences, every row of which wants its logits. What is never written
/// costs addresses, not memory.
fn roomy_output(info: &ExecutorInfo, parallel: usize) -> StepOutput {
    let rows = parallel * (1 + info.draft.map_or(0, |draft| draft.max_proposals.min(MOST_PROPOSALS)));
    StepOutput {
        logits: Vec::with_capacity(rows * info.vocab),
        argmax: Vec::with_capacity(rows),
        ..StepOutput::default()
    }
}
