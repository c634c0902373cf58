//! Who gets a slot, who computes which rows next: a pure function of its state, what the rings say, and the time.
//!
//! - **Slots** go by priority, then age. A request gets one when memory for its prompt and its next tokens is there
//!   after what the running ones have been promised; nobody overtakes it meanwhile, so a large request is not starved.
//! - **Rows**: how many each sequence gets is the planner's decision ([`crate::planner`]); whether its reader and memory
//!   let it have them is decided here.
//! - **Memory**: a sequence that cannot get its next block takes one from the last in rank, which goes back to the queue
//!   and later reads again what it has lost (mostly from the prefix cache). Rows are pure functions of the prefix, so
//!   nobody sees a difference but in time.
//! - **Choices** of one request: the first reads the prompt, the others start when it has, and find it known.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use muser_kv::{BLOCK_LEN, BlockCopy, BlockId, CacheScope, Evicted, HostKey, KvCache, KvGroup, Unit};

use crate::{
    FinishReason, RequestError, RestoreFailure,
    host_tier::HostTier,
    planner::{self, Candidate, Candidates, Pace, RowLimits, Work},
    prefix::{Begun, External, Fetching, Holds},
    sequence::Sequence,
};

/// Longest prefill step while another sequence is being fetched: its blocks are taken in between steps.
const FETCHING_STEP: Duration = Duration::from_millis(100);

/// Figures that do not change.
#[derive(Clone, Debug)]
pub(crate) struct SchedulerConfig {
    pub(crate) parallel: usize,
    /// Most positions of a sequence, by context and by memory.
    pub(crate) most_positions: usize,
    pub(crate) prefill_rows: usize,
    pub(crate) mixed_rows: usize,
    pub(crate) prefill_step: Duration,
    pub(crate) mixed_step: Duration,
    pub(crate) max_rows: usize,
    /// Most rows of a prompt in a step whose logits are all wanted: they are long.
    pub(crate) logit_rows: usize,
    pub(crate) sliding_per_sequence: usize,
    pub(crate) slow_reader_timeout: Duration,
    /// How long a fetch may go without a block.
    pub(crate) restore_stall: Duration,
    /// Positions beyond the prompt that must have memory at admission.
    pub(crate) lookahead: usize,
}

/// Rows of one sequence in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlanItem {
    pub(crate) slot: usize,
    /// Position of the first row.
    pub(crate) start: usize,
    /// Rows from the sequence's tokens.
    pub(crate) rows: usize,
    /// Rows from its drafts after those.
    pub(crate) drafts: usize,
    /// Do the rows reach the end of its tokens?
    pub(crate) to_end: bool,
}

/// Why a sequence leaves without a step.
#[derive(Debug)]
pub(crate) enum End {
    Finish(FinishReason),
    Fail(RequestError),
    /// Another choice of its request has failed; everything has been said.
    Silent,
}

/// Something that happens to a block's bytes before the step.
pub(crate) enum BlockMove {
    /// To another block.
    Copy(BlockCopy),
    /// Out to host memory, since its place is about to be taken.
    Spill(Evicted),
    /// Back from host memory.
    Restore(KvGroup, BlockId, Box<[u8]>),
}

/// What the next step is. Reused from step to step.
#[derive(Default)]
pub(crate) struct StepPlan {
    pub(crate) items: Vec<PlanItem>,
    /// What happens to blocks before the step, in this order.
    pub(crate) moves: Vec<BlockMove>,
    pub(crate) ended: Vec<(Sequence, End)>,
    pub(crate) preempted: u64,
    /// Prefixes that a source did not bring after all.
    pub(crate) restore_failures: Vec<RestoreFailure>,
    /// Prefixes that a source brought: positions and time.
    pub(crate) restored: Vec<(u64, Duration)>,
    /// Fetches that begin when the moves have been made.
    pub(crate) fetches: Vec<Fetching>,
    /// Something happened beside the items (an admission), so plan again soon.
    pub(crate) changed: bool,
    /// When to look again though nothing happens.
    pub(crate) wake_at: Option<Duration>,
}

impl StepPlan {
    fn clear(&mut self) {
        self.items.clear();
        self.moves.clear();
        self.ended.clear();
        self.preempted = 0;
        self.restore_failures.clear();
        self.restored.clear();
        self.fetches.clear();
        self.changed = false;
        self.wake_at = None;
    }

    pub(crate) fn wake_by(&mut self, at: Option<Duration>) {
        if let Some(at) = at {
            self.wake_at = Some(self.wake_at.map_or(at, |before| before.min(at)));
        }
    }
}

/// What an admission was last refused for: while nothing of it changes there is no use in trying again.
type Blocked = ((i64, u64, u32), [u32; 4], usize);

pub(crate) struct Scheduler {
    pub(crate) kv: KvCache,
    pub(crate) slots: Vec<Option<Sequence>>,
    /// In order of rank.
    pub(crate) waiting: VecDeque<Sequence>,
    pub(crate) config: SchedulerConfig,
    /// Whose turn it is at the front of those that read prompts.
    turn: usize,
    blocked: Option<Blocked>,
    pub(crate) pace: Pace,
    pub(crate) host: HostTier,
    copies: Vec<BlockCopy>,
    pub(crate) holds: Holds,
}

impl Scheduler {
    pub(crate) fn new(mut kv: KvCache, host: HostTier, config: SchedulerConfig) -> Self {
        if host.is_enabled() {
            kv.record_evictions();
        }
        Self {
            kv,
            slots: (0..config.parallel).map(|_| None).collect(),
            waiting: VecDeque::new(),
            config,
            turn: 0,
            blocked: None,
            pace: Pace::default(),
            host,
            copies: Vec::new(),
            holds: Holds::default(),
        }
    }

    /// Puts a sequence into the queue at its place.
    pub(crate) fn enqueue(&mut self, sequence: Sequence) {
        let at = self.waiting.partition_point(|other| other.rank() < sequence.rank());
        self.waiting.insert(at, sequence);
    }

    /// Is there nobody?
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.slots.iter().all(Option::is_none)
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = &Sequence> {
        self.slots.iter().flatten()
    }

    /// Takes a sequence out of its slot and gives its blocks back.
    pub(crate) fn vacate(&mut self, slot: usize) -> Option<Sequence> {
        let mut sequence = self.slots[slot].take()?;
        self.abort_restore(&mut sequence);
        if let Some(kv) = sequence.kv.take() {
            if sequence.awaits_copy {
                self.kv.release_broken(kv);
            } else {
                self.kv.release(kv);
            }
        }
        sequence.awaits_copy = false;
        sequence.drafts.clear();
        (sequence.draft_gap_end, sequence.draft_gap_known) = (0, false);
        Some(sequence)
    }

    /// Sends a sequence back to the queue; it reads again what it loses.
    pub(crate) fn requeue(&mut self, slot: usize) {
        if let Some(sequence) = self.vacate(slot) {
            self.enqueue(sequence);
        }
    }

    /// Plans the next step. `cancel_all` ends everything.
    pub(crate) fn plan(&mut self, now: Duration, cancel_all: bool, plan: &mut StepPlan) {
        plan.clear();
        self.end_what_is_over(now, cancel_all, plan);
        self.settle_restores(now, plan);
        self.admit(now, plan);
        for sequence in self.slots.iter().flatten() {
            sequence.task.planned_events.store(0, Ordering::Relaxed);
        }
        self.plan_rows(now, plan);
        self.guard_against_stall(plan);
    }

    fn end_what_is_over(&mut self, now: Duration, cancel_all: bool, plan: &mut StepPlan) {
        let end_of = |sequence: &Sequence| {
            let task = &sequence.task;
            if task.failed.load(Ordering::Relaxed) {
                Some(End::Silent)
            } else if cancel_all || task.ring.is_cancelled() {
                Some(End::Finish(FinishReason::Cancelled))
            } else if task.deadline.is_some_and(|deadline| now >= deadline) {
                Some(End::Finish(FinishReason::Deadline))
            } else {
                None
            }
        };
        for slot in 0..self.slots.len() {
            let Some(sequence) = &self.slots[slot] else { continue };
            let timeout = self.config.slow_reader_timeout;
            let slow_at = sequence.paused_since.map(|since| since + timeout);
            let end = end_of(sequence).or_else(|| {
                let slow = slow_at.is_some_and(|at| now >= at);
                slow.then_some(End::Finish(FinishReason::SlowReader))
            });
            if let Some(end) = end {
                if let Some(sequence) = self.vacate(slot) {
                    plan.ended.push((sequence, end));
                }
            } else {
                plan.wake_by(sequence.task.deadline);
                plan.wake_by(slow_at);
            }
        }
        let mut at = 0;
        while let Some(sequence) = self.waiting.get(at) {
            let queue_until =
                sequence.task.queue_until.filter(|_| !sequence.task.admitted.load(Ordering::Relaxed));
            let end = end_of(sequence).or_else(|| {
                let waited = now.saturating_sub(sequence.task.submitted_at);
                let over = queue_until.is_some_and(|until| now >= until);
                over.then_some(End::Fail(RequestError::QueueTimeout { waited_ms: waited.as_millis() as u64 }))
            });
            if let Some(end) = end {
                if let Some(sequence) = self.waiting.remove(at) {
                    plan.ended.push((sequence, end));
                }
            } else {
                plan.wake_by(sequence.task.deadline);
                plan.wake_by(queue_until);
                at += 1;
            }
        }
    }

    fn admit(&mut self, now: Duration, plan: &mut StepPlan) {
        let mut at = 0;
        while let Some(slot) = self.slots.iter().position(Option::is_none) {
            let Some(candidate) = self.waiting.get(at) else { return };
            if self.waits_for_sibling(candidate) || self.waits_for_source(at, now, plan) {
                at += 1;
                continue;
            }
            let Some(candidate) = self.waiting.get(at) else { return };
            let key = (candidate.rank(), self.memory(), self.running().count());
            if self.blocked == Some(key) {
                return;
            }
            let Some(mut sequence) = self.waiting.remove(at) else { return };
            if !self.try_begin(&mut sequence, now, plan) {
                self.blocked = Some((sequence.rank(), self.memory(), self.running().count()));
                self.waiting.insert(at, sequence);
                return;
            }
            sequence.owes_cached |= !sequence.task.admitted.swap(true, Ordering::Relaxed);
            sequence.note_cached();
            sequence.admitted_at.get_or_insert(now);
            sequence.paused_since = None;
            self.slots[slot] = Some(sequence);
            plan.changed = true;
        }
    }

    /// The prompt of a request with several choices is read once: the others wait for it.
    fn waits_for_sibling(&self, candidate: &Sequence) -> bool {
        let sibling = |other: &Sequence| Arc::ptr_eq(&other.task, &candidate.task);
        candidate.task.n > 1
            && candidate.task.cache
            && candidate.computed() == 0
            && (self.running().any(|other| sibling(other) && other.tokens.len() - other.computed() > 1)
                || self.waiting.iter().any(|other| {
                    sibling(other)
                        && other.index < candidate.index
                        && !matches!(other.external, External::None)
                }))
    }

    fn memory(&self) -> [u32; 4] {
        let stats = self.kv.stats();
        [stats.full.free, stats.full.cached, stats.sliding.free, stats.sliding.cached]
    }

    /// Positions that a sequence is promised memory for.
    fn promised(&self, sequence: &Sequence) -> usize {
        let left = sequence.task.max_tokens.saturating_sub(sequence.generated) as usize;
        (sequence.tokens.len() + left.min(self.config.lookahead)).min(self.config.most_positions)
    }

    /// Blocks of both groups that a sequence is promised beyond those it holds.
    fn outstanding(&self, sequence: &Sequence) -> (usize, usize) {
        let (has_full, has_sliding) = match (&sequence.kv, &sequence.restoring) {
            (Some(kv), _) => (kv.full().len(), kv.sliding().len()),
            (None, Some(restoring)) => restoring.held_blocks(),
            (None, None) => return (0, 0),
        };
        let blocks = self.promised(sequence).div_ceil(BLOCK_LEN);
        let most_sliding = self.config.sliding_per_sequence.min(blocks);
        (blocks.saturating_sub(has_full), most_sliding.saturating_sub(has_sliding))
    }

    /// Gives a sequence its known blocks, or begins to fetch them, if after that there is memory for what it is promised.
    pub(crate) fn try_begin(&mut self, sequence: &mut Sequence, now: Duration, plan: &mut StepPlan) -> bool {
        match self.begin_restore(sequence, now, plan) {
            Begun::Fetching if self.fits(sequence) => return true,
            Begun::Fetching | Begun::NoMemory => {
                self.abort_restore(sequence);
                if self.running().next().is_some() {
                    return false;
                }
                // Alone it would wait for ever: what cannot be fetched may still be computed.
                sequence.external = External::None;
                plan.restore_failures.push(RestoreFailure::NoMemory);
            }
            Begun::Nothing => {}
        }
        let max_reuse = if sequence.task.cache { sequence.tokens.len() - 1 } else { 0 };
        let most = self.config.most_positions.max(sequence.tokens.len());
        let capacity = sequence.tokens.capacity().min(most) + self.config.max_rows;
        if self.host.is_enabled() {
            self.restore(sequence.task.scope, &sequence.units[..max_reuse], plan);
        }
        let mut copies = std::mem::take(&mut self.copies);
        let (scope, cache) = (sequence.task.scope, sequence.task.cache);
        let kv = self.kv.begin(scope, &sequence.units, max_reuse, capacity, cache, &mut copies);
        self.note_evictions(plan);
        sequence.kv = Some(kv);
        // Any move of this plan may have been for its blocks, also one made for a request before it.
        sequence.awaits_copy = !copies.is_empty() || !plan.moves.is_empty();
        let fits = self.fits(sequence);
        if fits {
            plan.moves.extend(copies.drain(..).map(BlockMove::Copy));
        } else if let Some(kv) = sequence.kv.take() {
            if copies.is_empty() {
                self.kv.release(kv);
            } else {
                self.kv.release_broken(kv);
            }
            sequence.awaits_copy = false;
        }
        copies.clear();
        self.copies = copies;
        fits
    }

    /// Is there memory for what a sequence about to run and all running ones are promised? What is held for export gives
    /// way.
    fn fits(&mut self, sequence: &Sequence) -> bool {
        let (mut full, mut sliding) = self.outstanding(sequence);
        for other in self.slots.iter().flatten() {
            let (more_full, more_sliding) = self.outstanding(other);
            full += more_full;
            sliding += more_sliding;
        }
        loop {
            let fits = full <= self.kv.available(KvGroup::Full) as usize
                && sliding <= self.kv.available(KvGroup::Sliding) as usize;
            if fits || !self.let_all_go() {
                return fits;
            }
        }
    }

    /// Brings back what host memory has of a prefix, if that lets a sequence resume further along.
    fn restore(&mut self, scope: CacheScope, units: &[Unit], plan: &mut StepPlan) {
        let hashes = self.kv.chain_hashes(scope, units);
        let in_host = |group, index: usize| self.host.contains(&HostKey { hash: hashes[index], group });
        let boundary = self.kv.resumable_with(scope, units, hashes.len(), in_host);
        if boundary * BLOCK_LEN <= self.kv.known(scope, units, units.len()) {
            return;
        }
        let Ok(import) = self.kv.begin_import(scope, units, boundary) else { return };
        self.note_evictions(plan);
        let mut moves = Vec::new();
        for wanted in import.blocks() {
            let key = HostKey { hash: hashes[wanted.index], group: wanted.group };
            let Some(bytes) = self.host.take(&key) else { break };
            moves.push(BlockMove::Restore(wanted.group, wanted.block, bytes));
        }
        if moves.len() == import.blocks().count() {
            plan.moves.append(&mut moves);
            self.kv.finish_import(import);
        } else {
            self.kv.abort_import(import);
        }
    }

    /// What has just been evicted goes to host memory before anything else happens to its block.
    pub(crate) fn note_evictions(&mut self, plan: &mut StepPlan) {
        plan.moves.extend(self.kv.take_evicted().map(BlockMove::Spill));
    }

    /// Gives out the rows of the step.
    fn plan_rows(&mut self, now: Duration, plan: &mut StepPlan) {
        let mut rest = self.candidates();
        planner::sort(&mut rest, self.turn);
        self.turn = self.turn.wrapping_add(1);
        let limits = self.row_limits();
        let mut given = planner::Given::default();
        while !rest.is_empty() {
            let rows = planner::divide(&rest, given, limits);
            let mut served = 0;
            for (candidate, &rows) in rest.iter().zip(&rows) {
                let got = if rows > 0 { self.give_rows(candidate, rows, now, plan) } else { 0 };
                given.note(candidate, got);
                served += 1;
                if got < rows {
                    break;
                }
            }
            rest.drain(..served);
            // Whoever had to leave for the memory of others wants no rows.
            rest.retain(|candidate| self.slots[candidate.slot].is_some());
        }
    }

    fn row_limits(&self) -> RowLimits {
        let config = &self.config;
        let fetching = self.running().any(|sequence| sequence.restoring.is_some());
        let alone = if fetching { FETCHING_STEP.min(config.prefill_step) } else { config.prefill_step };
        RowLimits {
            most: config.max_rows,
            mixed: self.pace.rows_within(config.mixed_step, config.mixed_rows),
            prefill: self.pace.rows_within(alone, config.prefill_rows),
        }
    }

    /// What everybody could compute, in order of rank.
    fn candidates(&mut self) -> Candidates {
        let mut candidates = Candidates::new();
        for slot in self.slots_by_rank() {
            let Some(sequence) = &mut self.slots[slot] else { continue };
            if sequence.restoring.is_some() || sequence.awaits_mask && !sequence.mask_is_ready(Duration::ZERO)
            {
                continue;
            }
            let depth = sequence.computed();
            let work = if sequence.is_decoding() {
                // A draft beyond the limits would be computed for nothing.
                let tokens = sequence.task.max_tokens.saturating_sub(sequence.generated).max(1) as usize;
                let positions = self.config.most_positions.saturating_sub(sequence.tokens.len()).max(1);
                Work::Decode { proposals: sequence.drafts.len().min(tokens - 1).min(positions - 1) }
            } else {
                let mut rows = sequence.tokens.len() - depth;
                if sequence.prompt_rows_from().is_some() {
                    rows = rows.min(self.config.logit_rows);
                }
                // Rows of a picture that are not there yet: others go on meanwhile.
                Work::Prefill { ready: sequence.ready_until(depth + rows).saturating_sub(depth) }
            };
            if work != (Work::Prefill { ready: 0 }) {
                candidates.push(Candidate { slot, depth, work });
            }
        }
        candidates
    }

    /// Puts rows of a sequence into the step, as far as its reader and memory let it; answers how many.
    fn give_rows(&mut self, candidate: &Candidate, rows: usize, now: Duration, plan: &mut StepPlan) -> usize {
        let slot = candidate.slot;
        let Some(sequence) = &mut self.slots[slot] else { return 0 };
        let timeout = self.config.slow_reader_timeout;
        let start = candidate.depth;
        if matches!(candidate.work, Work::Decode { .. }) {
            // A proposal more than its reader has room for is no reason to pause.
            let drafts = (rows - 1).min(sequence.task.room().saturating_sub(2));
            let paused = !pause_unless(sequence, drafts as u32 + 2, now, timeout, plan);
            if paused || !self.reserve(slot, start + 1 + drafts, plan) {
                return 0;
            }
            plan.items.push(PlanItem { slot, start, rows: 1, drafts, to_end: true });
            return 1 + drafts;
        }
        let pending = sequence.tokens.len() - start;
        let mut rows = rows;
        // The last rows of a prompt bring events: a start, a token, perhaps a shift and an embedding, or what is known
        // of the prompt.
        if rows == pending && !pause_unless(sequence, 4, now, timeout, plan) {
            rows -= 1;
        }
        if rows > 0 && !self.reserve(slot, start + rows, plan) {
            let kv = self.slots[slot].as_ref().and_then(|sequence| sequence.kv.as_ref());
            rows = kv.map_or(0, |kv| kv.reserved().saturating_sub(start).min(rows));
        }
        if rows > 0 {
            plan.items.push(PlanItem { slot, start, rows, drafts: 0, to_end: rows == pending });
        }
        rows
    }

    /// Slots of the running sequences, first in rank first.
    fn slots_by_rank(&self) -> smallvec::SmallVec<[usize; 16]> {
        let rank = |slot: usize| self.slots[slot].as_ref().map(Sequence::rank);
        let mut slots: smallvec::SmallVec<[usize; 16]> =
            (0..self.slots.len()).filter(|&slot| self.slots[slot].is_some()).collect();
        slots.sort_unstable_by_key(|&slot| rank(slot));
        slots
    }

    /// Memory for the rows of `slot` up to `end`, taken if need be from the last in rank that is not part of the step
    /// yet. When that is the sequence itself, it goes back to the queue.
    fn reserve(&mut self, slot: usize, end: usize, plan: &mut StepPlan) -> bool {
        loop {
            let Some(sequence) = &mut self.slots[slot] else { return false };
            let rank = sequence.rank();
            let start = sequence.computed();
            let Some(kv) = &mut sequence.kv else { return false };
            let reserved = self.kv.reserve(kv, end).is_ok();
            let ready = kv.reserved();
            self.note_evictions(plan);
            if reserved {
                return true;
            }
            if self.let_all_go() {
                continue;
            }
            if ready > start {
                // Part of a prompt can go on; nobody must leave for the rest.
                return false;
            }
            let planned = |slot: usize| plan.items.iter().any(|item| item.slot == slot);
            let victim = (0..self.slots.len())
                .filter(|&other| other != slot && !planned(other))
                .filter_map(|other| self.slots[other].as_ref().map(|sequence| (sequence.rank(), other)))
                .max();
            match victim {
                Some((other_rank, other)) if other_rank > rank => {
                    self.requeue(other);
                    plan.preempted += 1;
                }
                // Others before it go on and will end.
                _ if self.running().count() > 1 => {
                    if plan.items.is_empty() && victim.is_some() {
                        // Nobody has a row yet and those before it are paused or starved of memory themselves:
                        // stepping aside frees memory for them.
                        self.requeue(slot);
                        plan.preempted += 1;
                    }
                    return false;
                }
                _ => return false,
            }
        }
    }

    /// Alone, with nothing to step aside for, and still without memory: blocks are held from outside (export, import).
    /// Waiting would wait for ever.
    fn guard_against_stall(&mut self, plan: &mut StepPlan) {
        if !plan.items.is_empty() || plan.preempted > 0 || self.running().count() != 1 {
            return;
        }
        let Some(slot) = self.slots.iter().position(Option::is_some) else { return };
        let starved = self.slots[slot].as_ref().is_some_and(|sequence| {
            let waits = sequence.ready_until(sequence.tokens.len()) == sequence.computed();
            let waits = waits || sequence.awaits_mask;
            sequence.paused_since.is_none() && sequence.restoring.is_none() && !waits
        });
        if starved && let Some(sequence) = self.vacate(slot) {
            let error = RequestError::Capacity { positions: sequence.tokens.len() };
            plan.ended.push((sequence, End::Fail(error)));
        }
    }
}

/// Sets aside room for `events` or pauses the sequence until its reader has made room.
fn pause_unless(
    sequence: &mut Sequence,
    events: u32,
    now: Duration,
    timeout: Duration,
    plan: &mut StepPlan,
) -> bool {
    let room = sequence.task.plan_events(events);
    if room {
        sequence.paused_since = None;
    } else {
        let since = *sequence.paused_since.get_or_insert(now);
        plan.wake_by(Some(since + timeout));
    }
    room
}
