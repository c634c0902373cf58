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
//! - **Fetches** from a source: a sequence waits in the queue for the answer, and aside, with its memory and without a slot, for
//!   the blocks.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use muser_kv::BLOCK_LEN;

use crate::{
    FinishReason, RequestError, RestoreFailure,
    memory::{Begun, Memory},
    plan::{PlanItem, StepPlan},
    planner::{self, Candidate, Candidates, CostModel, Load, RowLimits, Work},
    prefix::{LocalPace, StoreLookup, Waiting},
    sequence::{End, Sequence, Wait},
    slots::Slots,
};

/// Longest prefill step while another sequence is being fetched: its blocks are taken in between steps.
const FETCHING_STEP: Duration = Duration::from_millis(100);

/// Figures that do not change.
#[derive(Clone, Debug)]
pub(crate) struct SchedulerConfig {
    pub(crate) parallel: usize,
    pub(crate) prefill_rows: usize,
    pub(crate) mixed_rows: usize,
    pub(crate) prefill_step: Duration,
    pub(crate) mixed_step: Duration,
    /// Most rows of a prompt in a step whose logits are all wanted: they are long.
    pub(crate) logit_rows: usize,
    pub(crate) slow_reader_timeout: Duration,
    /// How long a fetch may go without a block.
    pub(crate) restore_stall: Duration,
}

/// What an admission was last refused for: while nothing of it changes there is no use in trying again.
type Blocked = ((i64, u64, u32), [u32; 4], usize);

/// The queue, the slots, and the memory of those in them.
pub(crate) struct Scheduler {
    pub(crate) memory: Memory,
    pub(crate) slots: Slots,
    pub(crate) cost: CostModel,
    /// Rows that a prompt's step should have, as the executor says ([`muser_backend::ExecutorInfo::prompt_rows`]).
    pub(crate) prompt_rows: usize,
    /// In order of rank.
    waiting: VecDeque<Sequence>,
    config: SchedulerConfig,
    /// Whose turn it is at the front of those that read prompts.
    turn: usize,
    blocked: Option<Blocked>,
}

impl Scheduler {
    pub(crate) fn new(memory: Memory, config: SchedulerConfig) -> Self {
        Self {
            memory,
            slots: Slots::new(config.parallel),
            cost: CostModel::default(),
            prompt_rows: 0,
            waiting: VecDeque::new(),
            config,
            turn: 0,
            blocked: None,
        }
    }

    /// Those that wait for a slot, first in rank first.
    pub(crate) fn waiting(&self) -> &VecDeque<Sequence> {
        &self.waiting
    }

    /// Puts a sequence into the queue at its place.
    pub(crate) fn enqueue(&mut self, sequence: Sequence) {
        let at = self.waiting.partition_point(|other| other.rank() < sequence.rank());
        self.waiting.insert(at, sequence);
    }

    /// Is no sequence queued or running?
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.slots.is_empty()
    }

    /// Takes a sequence out of its slot and gives its blocks back.
    pub(crate) fn vacate(&mut self, slot: usize) -> Option<Sequence> {
        let mut sequence = self.slots.take(slot)?;
        self.memory.give_back(&mut sequence);
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
        self.end_running(now, cancel_all, plan);
        self.end_waiting(now, cancel_all, plan);
        self.settle_fetches(now, plan);
        self.admit(now, plan);
        for sequence in self.slots.running() {
            sequence.task.planned_events.store(0, Ordering::Relaxed);
        }
        self.plan_rows(now, plan);
        self.guard_against_stall(plan);
    }

    fn end_running(&mut self, now: Duration, cancel_all: bool, plan: &mut StepPlan) {
        for slot in 0..self.slots.len() {
            let Some(sequence) = self.slots.get(slot) else { continue };
            let slow_at = sequence.paused_until(self.config.slow_reader_timeout);
            let end = end_of(sequence, now, cancel_all).or_else(|| {
                let slow = slow_at.is_some_and(|at| now >= at);
                slow.then_some(End::Finish(FinishReason::SlowReader))
            });
            if let Some(end) = end {
                plan.ended.extend(self.vacate(slot).map(|sequence| (sequence, end)));
            } else {
                plan.wake_by(sequence.task.deadline);
                plan.wake_by(slow_at);
            }
        }
    }

    fn end_waiting(&mut self, now: Duration, cancel_all: bool, plan: &mut StepPlan) {
        let mut at = 0;
        while let Some(sequence) = self.waiting.get(at) {
            let queue_until =
                sequence.task.queue_until.filter(|_| !sequence.task.admitted.load(Ordering::Relaxed));
            let end = end_of(sequence, now, cancel_all).or_else(|| {
                let waited = now.saturating_sub(sequence.task.submitted_at);
                let over = queue_until.is_some_and(|until| now >= until);
                over.then_some(End::Fail(RequestError::QueueTimeout { waited_ms: waited.as_millis() as u64 }))
            });
            if let Some(end) = end {
                plan.ended.extend(self.waiting.remove(at).map(|sequence| (sequence, end)));
            } else {
                plan.wake_by(sequence.task.deadline);
                plan.wake_by(queue_until);
                at += 1;
            }
        }
    }

    fn admit(&mut self, now: Duration, plan: &mut StepPlan) {
        self.seat_ready(plan);
        let mut at = 0;
        while let Some(candidate) = self.waiting.get(at) {
            let (slot, aside) = (self.slots.free(), self.slots.free_aside());
            if slot.is_none() && (aside.is_none() || candidate.stored.is_none()) {
                // Behind those that want to compute there may be some that only want to fetch.
                let fetches = |sequence: &Sequence| !sequence.stored.is_none();
                match aside.and_then(|_| self.waiting.iter().skip(at).position(fetches)) {
                    Some(behind) => at += behind,
                    None => return,
                }
                continue;
            }
            if self.waits_for_sibling(candidate) || self.waits_for_source(at, now, plan) {
                at += 1;
                continue;
            }
            let Some(mut sequence) = self.waiting.remove(at) else { return };
            let begun = if self.blocked == Some(self.admission_key(&sequence)) {
                None
            } else {
                self.try_begin(&mut sequence, Places { slot, aside }, now, plan)
            };
            let Some(place) = begun else {
                self.blocked = Some(self.admission_key(&sequence));
                self.waiting.insert(at, sequence);
                return;
            };
            sequence.note_admitted(now);
            self.slots.put(place, sequence);
            plan.changed = true;
        }
    }

    /// Those that have what they fetched take the slots that have become free.
    fn seat_ready(&mut self, plan: &mut StepPlan) {
        while let Some(slot) = self.slots.free()
            && let Some(ready) = self.slots.ready()
            && let Some(sequence) = self.slots.take(ready)
        {
            self.slots.put(slot, sequence);
            plan.changed = true;
        }
    }

    fn admission_key(&self, sequence: &Sequence) -> Blocked {
        (sequence.rank(), self.memory.state(), self.slots.running().count())
    }

    /// The prompt of a request with several choices is read once: the others wait for it.
    fn waits_for_sibling(&self, candidate: &Sequence) -> bool {
        let sibling = |other: &Sequence| Arc::ptr_eq(&other.task, &candidate.task);
        candidate.task.n > 1
            && candidate.task.cache
            && candidate.computed() == 0
            && (self.slots.running().any(|other| sibling(other) && other.pending() > 1)
                || self
                    .waiting
                    .iter()
                    .any(|other| sibling(other) && other.index < candidate.index && !other.stored.is_none()))
    }

    /// Must the waiting sequence at `at` wait for a source: for its answer, or for a fetch of the same blocks by another?
    fn waits_for_source(&mut self, at: usize, now: Duration, plan: &mut StepPlan) -> bool {
        let Some(sequence) = self.waiting.get_mut(at) else { return false };
        match sequence.stored.look(now) {
            Waiting::Until(until) => {
                plan.wake_by(Some(until));
                return true;
            }
            Waiting::GivenUp => plan.restore_failures.push(RestoreFailure::Slow),
            Waiting::Over => {}
        }
        if sequence.stored.found().is_none() {
            return false;
        }
        // What another is fetching need not be fetched twice.
        let (scope, units) = (sequence.task.scope, sequence.text.units());
        let fetching = self.slots.running().filter(|other| other.task.scope == scope);
        fetching.filter_map(|other| other.blocks.fetching()).any(|other| {
            let common = units.iter().zip(other.units()).take_while(|(a, b)| a == b).count();
            common / BLOCK_LEN * BLOCK_LEN > self.memory.known(scope, &units[..common])
        })
    }

    /// Gives a sequence its known blocks, or begins to fetch them, if after that there is memory for what it is promised, and a
    /// place. Answers with the place.
    fn try_begin(
        &mut self,
        sequence: &mut Sequence,
        places: Places,
        now: Duration,
        plan: &mut StepPlan,
    ) -> Option<usize> {
        if let Some(aside) = places.aside {
            match self.memory.begin_fetch(sequence, now, &mut plan.moves, &mut plan.fetches) {
                Begun::Fetching if self.memory.fits(sequence, &self.slots) => return Some(aside),
                Begun::Fetching | Begun::NoMemory => {
                    self.memory.give_back(sequence);
                    if !self.slots.is_empty() {
                        return None;
                    }
                    // Alone it would wait for ever: what cannot be fetched may still be computed.
                    sequence.stored = StoreLookup::None;
                    plan.restore_failures.push(RestoreFailure::NoMemory);
                }
                Begun::Nothing => {}
            }
        }
        places.slot.filter(|_| self.memory.begin(sequence, &self.slots, &mut plan.moves))
    }

    /// Looks which fetches have ended, and begins their sequences.
    fn settle_fetches(&mut self, now: Duration, plan: &mut StepPlan) {
        let stall = self.config.restore_stall;
        for slot in 0..self.slots.len() {
            let fetching = self.slots.get_mut(slot).and_then(|sequence| sequence.blocks.fetching_mut());
            let Some(fetching) = fetching else { continue };
            let Some(end) = fetching.end(now, stall) else {
                plan.wake_by(Some(fetching.stalls_at(stall)));
                continue;
            };
            let Some(mut sequence) = self.slots.take(slot) else { continue };
            match end {
                Ok(()) => plan.restored.extend(self.memory.finish_fetch(&mut sequence, now)),
                Err(failed) => {
                    plan.restore_failures.push(failed.0);
                    self.memory.give_back(&mut sequence);
                    sequence.stored.exclude(failed);
                }
            }
            plan.changed = true;
            // Where no slot is free it keeps its blocks aside until one is.
            let places = Places { slot: self.slots.free().or(Some(slot)), aside: Some(slot) };
            match self.try_begin(&mut sequence, places, now, plan) {
                Some(place) => {
                    sequence.note_cached();
                    self.slots.put(place, sequence);
                }
                None => self.enqueue(sequence),
            }
        }
    }

    /// Gives out the rows of the step.
    fn plan_rows(&mut self, now: Duration, plan: &mut StepPlan) {
        let mut rest = self.candidates();
        planner::sort(&mut rest, self.turn);
        self.turn = self.turn.wrapping_add(1);
        let limits = self.row_limits(&rest);
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
            rest.retain(|candidate| self.slots.get(candidate.slot).is_some());
        }
    }

    /// What computing a new sequence would take.
    pub(crate) fn pace(&self, sequence: &Sequence) -> Arc<LocalPace> {
        let before = self.waiting.iter().filter(|other| other.rank() < sequence.rank());
        let ahead = self.slots.running().chain(before).filter(|other| other.blocks.fetching().is_none());
        let seconds = ahead.filter_map(|other| {
            let rows = other.pending();
            (rows > 1).then(|| self.cost.expected(Load::of(rows, other.computed())))?
        });
        let ahead = Duration::try_from_secs_f64(seconds.sum()).unwrap_or(Duration::MAX);
        let rows = self.config.prefill_rows.min(self.memory.config.max_rows);
        Arc::new(LocalPace::new(&self.cost, rows, ahead))
    }

    /// Rows of prompts that are to be computed, of all requests.
    pub(crate) fn queued_rows(&self) -> usize {
        self.slots.running().chain(&self.waiting).map(Sequence::pending).filter(|&rows| rows > 1).sum()
    }

    fn row_limits(&self, candidates: &[Candidate]) -> RowLimits {
        let config = &self.config;
        let (mut decoding, mut depth) = (Load::default(), 0);
        for candidate in candidates {
            match candidate.work {
                Work::Decode { proposals } => {
                    decoding = decoding.and(Load::of(1 + proposals, candidate.depth));
                }
                Work::Prefill { .. } => depth = depth.max(candidate.depth),
            }
        }
        // A tenth is left for what lies between two tokens besides the step: sampling, events, the network.
        let mixed_step = config.mixed_step.mul_f64(0.9);
        let fetching = self.slots.running().any(|sequence| sequence.blocks.fetching().is_some());
        let alone = if fetching { FETCHING_STEP.min(config.prefill_step) } else { config.prefill_step };
        RowLimits {
            most: self.memory.config.max_rows,
            mixed: (decoding.rows + self.cost.rows_within(mixed_step, decoding, depth, config.mixed_rows))
                .min(config.mixed_rows),
            prefill: self
                .cost
                .rows_alone(alone, depth, config.prefill_rows)
                .max(self.prompt_rows.min(config.prefill_rows)),
        }
    }

    /// What everybody could compute, in order of rank.
    fn candidates(&mut self) -> Candidates {
        let mut candidates = Candidates::new();
        for slot in self.slots.by_rank() {
            let Some(sequence) = self.slots.get_mut(slot) else { continue };
            let waits = sequence.wait == Wait::Mask && !sequence.mask_is_ready(Duration::ZERO);
            if waits || sequence.blocks.kv().is_none() {
                continue;
            }
            let depth = sequence.computed();
            let work = if sequence.is_decoding() {
                // A draft beyond the limits would be computed for nothing.
                let tokens = sequence.tokens_left().saturating_sub(1);
                let positions = self.memory.config.most_positions.saturating_sub(sequence.text.len() + 1);
                Work::Decode { proposals: sequence.draft.proposals().len().min(tokens).min(positions) }
            } else {
                let mut rows = sequence.pending();
                if sequence.prompt_rows_from().is_some() {
                    rows = rows.min(self.config.logit_rows);
                }
                if let Some(stop) = sequence.outlet.as_ref().and_then(|outlet| outlet.outlet.next_stop(depth))
                {
                    rows = rows.min(stop.saturating_sub(depth).max(1));
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
        let (slot, start) = (candidate.slot, candidate.depth);
        if let Work::Decode { .. } = candidate.work {
            let Some(sequence) = self.slots.get(slot) else { return 0 };
            // A proposal more than its reader has room for is no reason to pause.
            let drafts = (rows - 1).min(sequence.task.room().saturating_sub(2));
            let goes_on = self.has_room_for(slot, drafts as u32 + 2, now, plan);
            if !goes_on || !self.reserve(slot, start + 1 + drafts, plan) {
                return 0;
            }
            plan.items.push(PlanItem { slot, start, rows: 1, drafts, to_end: true });
            return 1 + drafts;
        }
        let pending = self.slots.get(slot).map_or(0, Sequence::pending);
        let mut rows = rows;
        // The last rows of a prompt bring events: a start, a token, perhaps a shift and an embedding, or what is known
        // of the prompt.
        if rows == pending && !self.has_room_for(slot, 4, now, plan) {
            rows -= 1;
        }
        if rows > 0 && !self.reserve(slot, start + rows, plan) {
            let kv = self.slots.get(slot).and_then(|sequence| sequence.blocks.kv());
            rows = kv.map_or(0, |kv| kv.reserved().saturating_sub(start).min(rows));
        }
        if rows > 0 {
            plan.items.push(PlanItem { slot, start, rows, drafts: 0, to_end: rows == pending });
        }
        rows
    }

    /// Sets aside room for a sequence's events, or pauses it.
    fn has_room_for(&mut self, slot: usize, events: u32, now: Duration, plan: &mut StepPlan) -> bool {
        let Some(sequence) = self.slots.get_mut(slot) else { return false };
        let room = sequence.has_room_for(events, now);
        if !room {
            plan.wake_by(sequence.paused_until(self.config.slow_reader_timeout));
        }
        room
    }

    /// Memory for the rows of `slot` up to `end`, taken if need be from the last in rank that is not part of the step
    /// yet. When that is the sequence itself, it goes back to the queue.
    fn reserve(&mut self, slot: usize, end: usize, plan: &mut StepPlan) -> bool {
        loop {
            let Some(sequence) = self.slots.get_mut(slot) else { return false };
            let (rank, start) = (sequence.rank(), sequence.computed());
            let Some(kv) = sequence.blocks.kv_mut() else { return false };
            if self.memory.reserve(kv, end, &mut plan.moves) {
                return true;
            }
            let ready = kv.reserved();
            if self.memory.let_all_go() {
                continue;
            }
            if ready > start {
                // Part of a prompt can go on; nobody must leave for the rest.
                return false;
            }
            let others = self.slots.iter().filter(|&(other, _)| other != slot && !plan.includes(other));
            let victim = others.map(|(other, sequence)| (sequence.rank(), other)).max();
            match victim {
                Some((other_rank, other)) if other_rank > rank => {
                    self.requeue(other);
                    plan.preempted += 1;
                }
                // Others before it go on and will end.
                _ if self.slots.running().count() > 1 => {
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
        if !plan.items.is_empty() || plan.preempted > 0 || self.slots.running().count() != 1 {
            return;
        }
        let Some((slot, sequence)) = self.slots.iter().next() else { return };
        let waits_for_rows = sequence.ready_until(sequence.text.len()) == sequence.computed();
        let fetching = sequence.blocks.fetching().is_some();
        if sequence.wait == Wait::Nothing && !fetching && !waits_for_rows {
            let error = RequestError::Capacity { positions: sequence.text.len() };
            plan.ended.extend(self.vacate(slot).map(|sequence| (sequence, End::Fail(error))));
        }
    }
}

/// Where a sequence may go: to compute, and to fetch.
#[derive(Clone, Copy)]
struct Places {
    slot: Option<usize>,
    aside: Option<usize>,
}

/// Has a request been ended by anything but its own text?
fn end_of(sequence: &Sequence, now: Duration, cancel_all: bool) -> Option<End> {
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
}
