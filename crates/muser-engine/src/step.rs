//! One step: copies, rows to the executor, logits to tokens, tokens to events.
//!
//! Everything that can fail in here fails for the sequences it was done for and nobody else.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use muser_backend::{ExecError, Row, RowInput, RowWants};
use muser_kv::BLOCK_LEN;

use crate::{
    Event, FinishReason, RequestError, RequestKind, Started, Token, TopLogprobs,
    driver::{Driver, MASKS_A_STEP},
    image,
    metrics::Metrics,
    sampler::{DraftSampling, DrawKey, Sampler, Verdict, check_finite},
    scheduler::{BlockMove, End, PlanItem},
    sequence::Sequence,
};

impl Driver {
    /// Runs the planned step.
    pub(crate) fn run_step(&mut self) {
        let started = Instant::now();
        let before = self.now();
        self.build_batch();
        // A panic leaves the executor usable by its contract (as a failed step does), and everything else that the
        // closure touches is scratch.
        let result = catch_unwind(AssertUnwindSafe(|| self.move_and_step()));
        let error = match result {
            Ok(Ok(())) => None,
            Ok(Err(error)) => {
                Metrics::add(&self.shared.metrics.step_errors, 1);
                tracing::error!(%error, "a step failed");
                if matches!(error, ExecError::Lost { .. }) {
                    // Set once: the first reason is the one that counts.
                    let _ = self.shared.lost.set(error.to_string());
                }
                Some(RequestError::Device(error.to_string()))
            }
            Err(panic) => {
                Metrics::add(&self.shared.metrics.step_panics, 1);
                Some(RequestError::Panic(panic_text(panic.as_ref())))
            }
        };
        let now = self.now();
        self.last_step = started.elapsed();
        self.shared.metrics.step_time.record(self.last_step);
        self.images.note_step(now.saturating_sub(before));
        let decodes_only = self.decodes_only();
        self.scheduler.pace.note(self.batch.rows().len(), now.saturating_sub(before));
        Metrics::add(&self.shared.metrics.steps, 1);
        if let Some(error) = error {
            self.fail_step(&error, now);
            return;
        }
        for sequence in self.scheduler.slots.iter_mut().flatten() {
            sequence.awaits_copy = false;
        }
        let mut next = OutputRows::default();
        self.masks_by = self.now() + MASKS_A_STEP;
        for i in 0..self.plan.items.len() {
            let item = self.plan.items[i];
            let (at, count) = (next, self.wanted_rows(item));
            next.logits += count.logits;
            next.largest += count.largest;
            next.candidates += count.candidates * count.candidate_rows;
            next.hidden += count.hidden;
            let over = self.scheduler.slots[item.slot].as_ref().is_none_or(Sequence::has_failed);
            if over {
                // Another choice has failed for the whole request a moment ago; the plan will clear this one away.
                continue;
            }
            let handled = catch_unwind(AssertUnwindSafe(|| {
                if item.to_end && !self.mask_is_ready(item.slot) {
                    // Nothing of its rows is noted: they are computed again, to the same bits, when the mask is there.
                    return None;
                }
                self.handle(item, at, now)
            }));
            let end = match handled {
                Ok(end) => end,
                Err(panic) => {
                    Metrics::add(&self.shared.metrics.step_panics, 1);
                    Some(End::Fail(RequestError::Panic(panic_text(panic.as_ref()))))
                }
            };
            if let Some(end) = end
                && let Some(sequence) = self.vacate_and_offer(item.slot)
            {
                self.end(&sequence, &end, now);
            }
        }
        if decodes_only {
            // With the sampling of its rows: proposals cost that, too.
            let took = self.now().saturating_sub(before);
            self.draft.note_step(self.batch.rows().len(), took, &self.shared.metrics);
        }
    }

    /// Is the mask for a sequence's next token there, or soon enough?
    fn mask_is_ready(&mut self, slot: usize) -> bool {
        let left = self.masks_by.saturating_sub(self.now());
        self.scheduler.slots[slot].as_mut().is_none_or(|sequence| sequence.mask_is_ready(left))
    }

    /// Does the step go on with texts and nothing else?
    fn decodes_only(&self) -> bool {
        let decodes =
            |item: &PlanItem| self.scheduler.slots[item.slot].as_ref().is_some_and(Sequence::is_decoding);
        self.plan.moves.is_empty() && self.plan.items.iter().all(decodes)
    }

    /// Rows of an item that come with logits, with the largest logits alone, and with hidden states.
    fn wanted_rows(&self, item: PlanItem) -> OutputRows {
        let none = OutputRows::default();
        let Some(sequence) = &self.scheduler.slots[item.slot] else { return none };
        match sequence.task.kind {
            RequestKind::Embed => OutputRows { hidden: item.rows, ..none },
            // From the first row that tells of a prompt token to the last one of the item.
            RequestKind::Generate if sequence.prompt_rows_from().is_some() => {
                let from = sequence.prompt_rows_from().unwrap_or(0);
                OutputRows { logits: (item.start + item.rows).saturating_sub(from).min(item.rows), ..none }
            }
            RequestKind::Generate if item.to_end && sequence.wants_token() => {
                let rows = 1 + item.drafts;
                match self.needs(sequence, item) {
                    Needs::Logits => OutputRows { logits: rows, ..none },
                    Needs::Largest => OutputRows { largest: rows, ..none },
                    Needs::Candidates(n) => OutputRows { candidates: n, candidate_rows: rows, ..none },
                }
            }
            RequestKind::Generate => none,
        }
    }

    /// What the next tokens are taken from.
    fn needs(&self, sequence: &Sequence, item: PlanItem) -> Needs {
        let sampling = &sequence.task.sampling;
        let task = &sequence.task;
        let rejects = item.drafts > 0 && self.draft.sampling == DraftSampling::Rejection;
        let logprobs = task.logprobs.or(task.prompt_logprobs).is_some();
        if sequence.shapes_logits() || logprobs || task.hash_logits {
            Needs::Logits
        } else if sampling.is_greedy() {
            Needs::Largest
        } else if (1..=self.most_candidates).contains(&(sampling.top_k as usize)) && !rejects {
            Needs::Candidates((sampling.top_k as usize).min(self.vocab))
        } else {
            Needs::Logits
        }
    }

    fn build_batch(&mut self) {
        self.batch.clear();
        if self.draft.skips_context(self.decodes_only()) {
            self.batch.skip_draft_context();
        }
        for i in 0..self.plan.items.len() {
            let item = self.plan.items[i];
            let count = self.wanted_rows(item);
            let Some(sequence) = &self.scheduler.slots[item.slot] else { continue };
            let Some(kv) = &sequence.kv else { continue };
            let end = item.start + item.rows + item.drafts;
            let full = &kv.full()[..end.div_ceil(BLOCK_LEN)];
            self.batch.push_seq(item.start as u32, full, kv.sliding_first() as u32, kv.sliding());
            for position in item.start..end {
                let input = match sequence.tokens.get(position) {
                    Some(&token) => match image::row(&sequence.images, position) {
                        Some(values) => RowInput::Embedding(self.batch.push_embedding(values)),
                        None => RowInput::Token(token),
                    },
                    None => RowInput::Token(sequence.drafts[position - sequence.tokens.len()]),
                };
                let wants = RowWants {
                    logits: end - position <= count.logits,
                    argmax: end - position <= count.largest,
                    candidates: if end - position <= count.candidate_rows {
                        count.candidates as u16
                    } else {
                        0
                    },
                    hidden: count.hidden > 0,
                };
                self.batch.push_row(Row { input, wants });
            }
        }
    }

    fn move_and_step(&mut self) -> Result<(), ExecError> {
        for i in 0..self.plan.moves.len() {
            self.move_block(i)?;
        }
        if self.batch.rows().is_empty() {
            return Ok(());
        }
        self.executor.step(&self.batch, &mut self.out)
    }

    fn move_block(&mut self, i: usize) -> Result<(), ExecError> {
        match &self.plan.moves[i] {
            BlockMove::Copy(copy) => {
                let bytes = self.executor.info().block_bytes(copy.group);
                if self.copy_buffer.len() < bytes {
                    self.copy_buffer.resize(bytes, 0);
                }
                let buffer = &mut self.copy_buffer[..bytes];
                self.executor.export_block(copy.group, copy.from, buffer)?;
                self.executor.import_block(copy.group, copy.to, buffer)?;
                Metrics::add(&self.shared.metrics.copied_blocks, 1);
            }
            BlockMove::Spill(evicted) => {
                let group = evicted.key.group;
                let mut bytes = vec![0; self.executor.info().block_bytes(group)].into_boxed_slice();
                self.executor.export_block(group, evicted.block, &mut bytes)?;
                self.scheduler.host.put(evicted.key, bytes);
            }
            BlockMove::Restore(group, block, bytes) => {
                self.executor.import_block(*group, *block, bytes)?;
                Metrics::add(&self.shared.metrics.restored_blocks, 1);
            }
        }
        Ok(())
    }

    /// Ends the requests whose rows or copies were part of the step; all others go on.
    fn fail_step(&mut self, error: &RequestError, now: Duration) {
        for slot in 0..self.scheduler.slots.len() {
            let in_step = self.plan.items.iter().any(|item| item.slot == slot);
            let broken = self.scheduler.slots[slot].as_ref().is_some_and(|sequence| sequence.awaits_copy);
            if (in_step || broken)
                && let Some(sequence) = self.scheduler.vacate(slot)
            {
                self.end(&sequence, &End::Fail(error.clone()), now);
            }
        }
        if self.plan.moves.iter().any(|block_move| !matches!(block_move, BlockMove::Spill(_))) {
            // A block may be known whose bytes never came. Whoever might be using it has just been ended.
            self.scheduler.kv.clear();
            self.scheduler.kv.take_evicted().for_each(drop);
        }
    }

    /// Takes in the results for one sequence. `Some` when it has ended.
    fn handle(&mut self, item: PlanItem, at: OutputRows, now: Duration) -> Option<End> {
        let metrics = &self.shared.metrics;
        let sequence = self.scheduler.slots[item.slot].as_mut()?;
        let was_decoding = sequence.is_decoding();
        let rows = if was_decoding { &metrics.decode_rows } else { &metrics.prefill_rows };
        Metrics::add(rows, (item.rows + item.drafts) as u64);
        let kv = sequence.kv.as_mut()?;
        let end = item.start + item.rows;
        self.scheduler.kv.commit(kv, &sequence.units[item.start..end]);
        if !self.batch.wants_draft_context() && self.draft.leaves_gaps() {
            sequence.draft_gap_end = kv.len();
        }
        if !was_decoding {
            sequence.task.ring.set_prefilled(end.min(sequence.task.prompt_tokens as usize) as u32);
        }
        if sequence.task.kind == RequestKind::Embed {
            let rows = self.out.hidden[at.hidden * self.hidden..].chunks_exact(self.hidden).take(item.rows);
            if item.start == 0 {
                sequence.hidden_sum.clear();
                sequence.hidden_sum.resize(self.hidden, 0.0);
            }
            for row in rows {
                sequence.hidden_sum.iter_mut().zip(row).for_each(|(sum, &value)| *sum += f64::from(value));
            }
        }
        let mut at = at;
        if let Some(first) = sequence.prompt_rows_from() {
            let count = end.saturating_sub(first).min(item.rows);
            let rows =
                self.out.logits[at.logits * self.vocab..][..count * self.vocab].chunks_exact(self.vocab);
            if let Err(error) = note_prompt(sequence, &mut self.sampler, rows, end - count) {
                return Some(End::Fail(error));
            }
            // The token is drawn from the last of them.
            at.logits += count.saturating_sub(1);
        }
        if !item.to_end {
            return None;
        }
        let kv = sequence.kv.as_mut()?;
        if !was_decoding {
            self.scheduler.kv.mark_resume(kv);
            sequence.offer_due = true;
        }
        if let Some(known) = sequence.prompt_logprobs.take() {
            sequence.task.ring.send(Event::Prompt(known));
        }
        if !sequence.task.started.swap(true, Ordering::Relaxed) {
            let task = &sequence.task;
            let cached_tokens = task.cached_tokens.load(Ordering::Relaxed);
            let admitted = sequence.admitted_at.unwrap_or(now);
            let queue_time = admitted.saturating_sub(task.submitted_at);
            let prefill_time = now.saturating_sub(admitted);
            Metrics::add(&metrics.cached_tokens, u64::from(cached_tokens));
            task.ring.send(Event::Started(Started {
                prompt_tokens: task.prompt_tokens,
                cached_tokens,
                queue_time,
                prefill_time,
                seed: task.seed,
            }));
        }
        if sequence.task.kind == RequestKind::Embed {
            let n = sequence.tokens.len() as f64;
            let mean = sequence.hidden_sum.iter().map(|sum| (sum / n) as f32).collect();
            sequence.task.ring.send(Event::Embedding(mean));
        }
        if !sequence.wants_token() {
            return Some(End::Finish(FinishReason::Length));
        }
        sequence.decode_steps += 1;
        self.take_tokens(item, at, now)
    }

    /// Samples the row at the end of the tokens and, as long as the proposals are accepted, those after it.
    fn take_tokens(&mut self, item: PlanItem, at: OutputRows, now: Duration) -> Option<End> {
        let mut accepted = 0;
        let end = self.take_rows(item, at, now, &mut accepted);
        if item.drafts > 0 {
            let metrics = &self.shared.metrics;
            Metrics::add(&metrics.drafts, 1);
            Metrics::add(&metrics.drafted_tokens, item.drafts as u64);
            Metrics::add(&metrics.accepted_tokens, accepted as u64);
            metrics.drafted_by_place.add_first(item.drafts);
            metrics.accepted_by_place.add_first(accepted);
            if let Some(sequence) = &mut self.scheduler.slots[item.slot] {
                sequence.drafted += item.drafts as u32;
                sequence.accepted += accepted as u32;
                // The end of a text says nothing about proposals behind it.
                let known = if end.is_some() { accepted } else { item.drafts };
                self.draft.note_proposals(sequence, known, accepted);
            }
        }
        end.or_else(|| self.prepare_next(item.slot))
    }

    fn take_rows(
        &mut self,
        item: PlanItem,
        at: OutputRows,
        now: Duration,
        accepted: &mut usize,
    ) -> Option<End> {
        let needs = self.needs(self.scheduler.slots[item.slot].as_ref()?, item);
        for k in 0..=item.drafts {
            if k > 0 && !self.mask_is_ready(item.slot) {
                // The proposals from here on are as good as refused.
                break;
            }
            let sequence = self.scheduler.slots[item.slot].as_mut()?;
            let position = (item.start + item.rows - 1 + k) as u32;
            let proposal = sequence.drafts.get(k).copied().filter(|_| k < item.drafts);
            let sampled = match needs {
                Needs::Largest => {
                    let id = self.out.argmax.get(at.largest + k).copied().flatten();
                    let id = id.ok_or(RequestError::NotFinite { position });
                    id.map(|id| (bare_token(sequence, id), Some(id) == proposal))
                }
                Needs::Candidates(n) => {
                    let highest = &self.out.candidates[at.candidates + k * n..][..n];
                    let id = draw_among(sequence, &mut self.sampler, highest, position);
                    id.map(|id| (bare_token(sequence, id), Some(id) == proposal))
                }
                Needs::Logits => {
                    let logits = &mut self.out.logits[(at.logits + k) * self.vocab..][..self.vocab];
                    // Where only the proposal was asked for, nothing reads its logits.
                    let proposal =
                        proposal.map(|id| (id, self.draft.row(sequence, k, self.vocab).unwrap_or_default()));
                    let how = self.draft.sampling;
                    sample(sequence, &mut self.sampler, &mut self.mask, logits, position, proposal, how)
                }
            };
            let (token, is_proposal) = match sampled {
                Ok(sampled) => sampled,
                Err(error) => return Some(End::Fail(error)),
            };
            let id = token.id;
            let metrics = &self.shared.metrics;
            Metrics::add(&metrics.generated_tokens, 1);
            sequence.first_token_at.get_or_insert(now);
            sequence.generated += 1;
            if k > 0 {
                // The row that gave these logits had the proposal as input, and the proposal was accepted.
                let unit = sequence.units.len() - 1;
                if let Some(kv) = sequence.kv.as_mut() {
                    self.scheduler.kv.commit(kv, &sequence.units[unit..]);
                }
            }
            sequence.push(id);
            *accepted += usize::from(is_proposal);
            if let Some(end) = self.after_token(item.slot, token) {
                return Some(end);
            }
            if !is_proposal {
                break;
            }
        }
        None
    }

    /// Sends the token and looks for reasons to stop.
    fn after_token(&mut self, slot: usize, token: Token) -> Option<End> {
        let sequence = self.scheduler.slots[slot].as_mut()?;
        let task = &sequence.task;
        if task.stop_ids.contains(&token.id) {
            return Some(End::Finish(FinishReason::Stop(token.id)));
        }
        task.ring.send(Event::Token(token));
        if sequence.stop_watch.as_mut().is_some_and(|watch| watch.push(token.id)) {
            return Some(End::Finish(FinishReason::StopWatch));
        }
        if sequence.generated >= task.max_tokens {
            return Some(End::Finish(FinishReason::Length));
        }
        None
    }

    /// Makes room if the context is full.
    fn prepare_next(&mut self, slot: usize) -> Option<End> {
        let sequence = self.scheduler.slots[slot].as_mut()?;
        sequence.drafts.clear();
        if sequence.tokens.len() >= self.most_positions {
            let Some(dropped) = sequence.shift(self.most_positions) else {
                return Some(End::Finish(FinishReason::Context));
            };
            let event = Event::Shifted { index: sequence.index, dropped_tokens: dropped as u32 };
            sequence.task.ring.send(event);
            // It reads the shortened text as if that had been its prompt.
            self.scheduler.requeue(slot);
            return None;
        }
        None
    }
}

/// Rows in the outputs of a step: how many, or where they begin.
#[derive(Clone, Copy, Debug, Default)]
struct OutputRows {
    logits: usize,
    /// Rows of which the executor tells the largest logit alone.
    largest: usize,
    /// Logits that it tells of a row, where it tells the largest ones, and rows of which it does; or where they begin.
    candidates: usize,
    candidate_rows: usize,
    hidden: usize,
}

/// What a token is taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    /// All logits.
    Logits,
    /// The largest.
    Largest,
    /// As many of the largest.
    Candidates(usize),
}

/// Takes in the logits of consecutive rows of a prompt, the first one at position `first`: each tells of the token after it.
fn note_prompt(
    sequence: &mut Sequence,
    sampler: &mut Sampler,
    rows: std::slice::ChunksExact<'_, f32>,
    first: usize,
) -> Result<(), RequestError> {
    let prompt = &sequence.tokens[..(sequence.task.prompt_tokens as usize).min(sequence.tokens.len())];
    let Some(known) = &mut sequence.prompt_logprobs else { return Ok(()) };
    for (position, logits) in (first..).zip(rows) {
        let Some(&id) = prompt.get(position + 1) else { break };
        check_finite(logits, position as u32)?;
        let (log_sum, top) = sampler.logprobs(logits, known.top_each);
        let value = logits[id as usize];
        let rank = 1 + logits.iter().filter(|&&other| other > value).count() as u32;
        known.tokens.push(((f64::from(value) - log_sum) as f32, rank));
        known.top.extend_from_slice(top.as_slice());
    }
    Ok(())
}

/// A token of which nothing else is known.
fn bare_token(sequence: &Sequence, id: u32) -> Token {
    Token { index: sequence.index, id, logprob: None, top: TopLogprobs::default(), logit_hash: None }
}

/// A token from the highest logits of a row.
fn draw_among(
    sequence: &Sequence,
    sampler: &mut Sampler,
    highest: &[(u32, f32)],
    position: u32,
) -> Result<u32, RequestError> {
    let finite = highest.first().is_some_and(|best| best.1.is_finite());
    let token = sampler.draw_among(&sequence.task.sampling, highest, draw_key(sequence));
    token.filter(|_| finite).ok_or(RequestError::NotFinite { position })
}

/// Which random number draws a sequence's next token.
fn draw_key(sequence: &Sequence) -> DrawKey {
    let task = &sequence.task;
    DrawKey {
        seed: task.seed,
        index: sequence.index,
        position: u64::from(task.prompt_tokens) + u64::from(sequence.generated),
    }
}

/// One token from one row of logits, and whether it is the proposal that was made for it. A proposal comes with the shaped
/// logits that it was drawn from.
fn sample(
    sequence: &mut Sequence,
    sampler: &mut Sampler,
    mask: &mut crate::TokenMask,
    logits: &mut [f32],
    position: u32,
    proposal: Option<(u32, &[f32])>,
    how: DraftSampling,
) -> Result<(Token, bool), RequestError> {
    check_finite(logits, position)?;
    let task = &sequence.task;
    let logit_hash = task.hash_logits.then(|| hash_logits(logits));
    // The token's own log-probability needs its logit from before the filters, and the token from after them.
    let logprobs = task.logprobs.map(|k| sampler.logprobs(logits, usize::from(k)));
    let masked = match &mut sequence.constraint {
        Some(constraint) => {
            mask.clear();
            constraint.mask(mask)
        }
        None => false,
    };
    let key = draw_key(sequence);
    let shapes = masked || sequence.counts.is_some() || !task.sampling.logit_bias.is_empty();
    if shapes {
        if logprobs.is_some() {
            sampler.keep(logits);
        }
        Sampler::shape(&task.sampling, sequence.counts.as_ref(), masked.then_some(&*mask), logits);
    }
    let verdict = match proposal {
        Some((id, draft_logits)) => sampler.verify(how, &task.sampling, logits, draft_logits, id, key),
        None => sampler.draw(&task.sampling, logits, key).map(|token| Verdict { token, accepted: false }),
    };
    let Verdict { token: id, accepted } =
        verdict.ok_or_else(|| RequestError::Constraint("no token is allowed".into()))?;
    let (logprob, top) = match logprobs {
        None => (None, TopLogprobs::default()),
        Some((log_sum, top)) => {
            let value = if shapes { sampler.kept(id) } else { logits[id as usize] };
            (Some((f64::from(value) - log_sum) as f32), top)
        }
    };
    if let Some(constraint) = &mut sequence.constraint {
        constraint.commit(id).map_err(RequestError::Constraint)?;
    }
    Ok((Token { index: sequence.index, id, logprob, top, logit_hash }, accepted))
}

/// First 8 bytes of BLAKE3 over the logits.
pub(crate) fn hash_logits(logits: &[f32]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    let mut bytes = [0; 1024];
    for chunk in logits.chunks(256) {
        for (to, value) in bytes.chunks_exact_mut(4).zip(chunk) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        hasher.update(&bytes[..chunk.len() * 4]);
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first)
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
