//! The engine thread's state and one turn of its loop: inbox, plan, step, events, figures.
//!
//! A turn takes the time from a clock that tests replace, and drives the executor it was given. While sequences only
//! decode, a turn allocates nothing and takes no lock. The driver composes parts that do not know it: what the scheduler
//! plans, the stepper, the draft, the tower and the transfers carry out, and what ends is ended here.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use muser_backend::{ExecError, Executor, KvType};
use muser_kv::{CacheConfig, KvCache};
use muser_model::Geometry;

use crate::{
    EngineConfig, EngineError, KvConnector, Limits, RequestError, capacity,
    draft::{DraftRounds, RoundLimits},
    error::panic_text,
    figures,
    image::Images,
    memory::{BlockMove, HostTier, Memory, MemoryConfig},
    metrics::Metrics,
    plan::StepPlan,
    prefix::{Transfers, begin_fetches},
    sampler::Tools,
    scheduler::{Scheduler, SchedulerConfig},
    sequence::{End, Sequence, Wait},
    shared::{Clock, Env, Shared},
    step::{After, Parts, Stepper, decodes_only},
};

/// How long an engine that has nothing else to do waits for a mask before it looks around again.
const MASK_LOOK: Duration = Duration::from_millis(1);

/// Most logits that a step asks for on behalf of a prompt whose tokens' log-probabilities are wanted: 64 MiB.
const LOGITS_AT_ONCE: usize = 16 << 20;

/// What a turn of the loop did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// There may be more to do at once.
    Worked,
    /// Nothing to do until woken or until this time.
    Idle {
        /// Since the engine's start.
        until: Option<Duration>,
    },
    /// The engine is done.
    Stopped,
}

pub(crate) struct Driver {
    executor: Box<dyn Executor>,
    pub(crate) scheduler: Scheduler,
    plan: StepPlan,
    pub(crate) stepper: Stepper,
    pub(crate) draft: DraftRounds,
    tools: Tools,
    images: Images,
    transfers: Transfers,
    shared: Arc<Shared>,
    clock: Clock,
    /// How long the last step took.
    last_step: Duration,
}

impl Driver {
    /// Allocates the KV blocks.
    pub(crate) fn new(
        mut executor: Box<dyn Executor>,
        geometry: &Geometry,
        config: &EngineConfig,
    ) -> Result<Self, EngineError> {
        let info = executor.info().clone();
        let context = config.context.unwrap_or(geometry.context).min(geometry.context);
        config.check(context, info.max_rows)?;
        // A draft may look further back than the target; its state lies in the sliding blocks too.
        let mut reach = geometry.clone();
        reach.window = reach.window.max(info.draft.map_or(0, |draft| draft.window));
        let blocks = capacity::split(&reach, &info, config, context)?;
        executor.allocate_kv(blocks)?;
        let kv = KvCache::new(&CacheConfig {
            full_blocks: blocks.full,
            sliding_blocks: blocks.sliding,
            window: reach.window,
            slack: config.window_slack,
            min_copy: config.min_copy_tokens,
            identity: identity(config, &info.route, info.kv_type),
        });
        let bytes = |count: u32, bytes: usize| u64::from(count) * bytes as u64;
        let limits = Limits {
            parallel: config.parallel,
            context,
            vocab: geometry.vocab,
            hidden: geometry.hidden,
            tower: executor.tower().cloned(),
            full_blocks: blocks.full as usize,
            sliding_blocks: blocks.sliding as usize,
            kv_bytes: bytes(blocks.full, info.full_block_bytes)
                + bytes(blocks.sliding, info.sliding_block_bytes),
            max_in_flight: config.parallel + config.max_waiting,
            event_ring: config.event_ring,
        };
        let sliding_per_sequence = capacity::sliding_per_sequence(&reach, config);
        let memory = Memory::new(
            kv,
            HostTier::new(config.host_bytes),
            MemoryConfig {
                most_positions: context.min(blocks.full as usize * muser_kv::BLOCK_LEN),
                max_rows: info.max_rows,
                sliding_per_sequence,
                lookahead: muser_kv::BLOCK_LEN,
            },
        );
        let scheduler = Scheduler::new(
            memory,
            SchedulerConfig {
                parallel: config.parallel,
                prefill_rows: config.prefill_rows,
                mixed_rows: config.mixed_rows,
                prefill_step: config.prefill_step,
                mixed_step: config.mixed_step,
                logit_rows: (LOGITS_AT_ONCE / geometry.vocab.max(1)).max(1),
                slow_reader_timeout: config.slow_reader_timeout,
                restore_stall: config.restore_stall,
            },
        );
        let driver = Self {
            stepper: Stepper::new(executor.as_ref(), config.parallel, geometry.hidden, blocks),
            executor,
            scheduler,
            plan: StepPlan::default(),
            draft: DraftRounds::new(&info, config, sliding_per_sequence),
            tools: Tools::new(geometry.vocab),
            images: Images::new(config.image_cache_bytes, geometry.hidden),
            transfers: Transfers::new(None, config.source_timeout),
            shared: Arc::new(Shared::new(limits, info, config.queue_timeout)),
            clock: Box::new(|| Duration::ZERO),
            last_step: Duration::ZERO,
        };
        figures::publish(&driver.scheduler, &driver.shared);
        Ok(driver)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn set_clock(&mut self, clock: Clock) {
        self.clock = clock;
    }

    pub(crate) fn set_source(&mut self, source: Option<Box<dyn KvConnector>>) {
        self.transfers.set_source(source);
    }

    fn now(&self) -> Duration {
        (self.clock)()
    }

    pub(crate) fn turn(&mut self) -> Turn {
        let now = self.now();
        self.empty_inbox();
        let worked = self.work_between_steps();
        let stopping = self.shared.stopping.load(Ordering::SeqCst);
        self.scheduler.prompt_rows = self.executor.info().prompt_rows;
        self.scheduler.plan(now, stopping >= 2, &mut self.plan);
        self.note_plan(now);
        // Whoever has just been admitted hears of it before a step that may be long.
        self.transfers.tell_outlets(&mut self.scheduler.slots, &mut self.scheduler.memory);
        let steps = self.plan.has_step();
        // A block that is spilled to host memory must be so before somebody else writes into it.
        if self.plan.moves.is_empty() {
            begin_fetches(self.executor.as_mut(), &mut self.plan.fetches);
        }
        if steps {
            self.run_step();
        }
        let encoded = self.work_on_images(steps);
        begin_fetches(self.executor.as_mut(), &mut self.plan.fetches);
        figures::publish(&self.scheduler, &self.shared);
        if steps || worked || encoded || self.plan.changed || self.plan.preempted > 0 {
            return Turn::Worked;
        }
        let mut running = self.scheduler.slots.running_mut();
        if let Some(waiting) = running.find(|sequence| sequence.wait == Wait::Mask) {
            // Nobody else has anything to do; new requests are looked for meanwhile.
            waiting.mask_is_ready(MASK_LOOK);
            return Turn::Worked;
        }
        drop(running);
        if !self.shared.inbox.is_empty() {
            Turn::Worked
        } else if stopping > 0 && self.scheduler.is_empty() {
            Turn::Stopped
        } else {
            Turn::Idle { until: self.plan.wake_at }
        }
    }

    /// Takes in the requests that have come.
    fn empty_inbox(&mut self) {
        let env = Env { clock: &*self.clock, metrics: &self.shared.metrics };
        let (vocab, hidden) = (self.shared.limits.vocab, self.shared.limits.hidden);
        let most_positions = self.scheduler.memory.config.most_positions;
        loop {
            let job = self.shared.inbox.pop();
            // After the look at the inbox: who comes after a wish to forget finds that it was granted.
            if self.shared.is_to_forget() {
                self.scheduler.memory.forget();
            }
            let Some(mut job) = job else { return };
            for (index, choice) in std::mem::take(&mut job.choices).into_iter().enumerate() {
                let mut sequence = Sequence::new(&job, index as u32, choice, most_positions, vocab, hidden);
                sequence.take_written(&job.written, most_positions);
                if sequence.text.len() >= most_positions {
                    sequence.shift(most_positions);
                }
                if index == 0 {
                    let pace = self.scheduler.pace(&sequence);
                    self.transfers.ask(&mut sequence, &self.scheduler.memory, pace, env);
                }
                self.scheduler.enqueue(sequence);
            }
            Metrics::add(&env.metrics.prompt_tokens, u64::from(job.task.prompt_tokens));
        }
    }

    /// Transfers and drafts; `true` if bytes were moved.
    fn work_between_steps(&mut self) -> bool {
        let env = Env { clock: &*self.clock, metrics: &self.shared.metrics };
        let executor = self.executor.as_mut();
        let Scheduler { slots, memory, .. } = &mut self.scheduler;
        // Told first: what they ask for at once leaves now, while nothing is computed.
        self.transfers.tell_outlets(slots, memory);
        let moved = self.transfers.pump(executor, slots, memory, self.last_step, env);
        self.transfers.offer_prompts(slots, memory);
        let limits = RoundLimits { positions: memory.config.most_positions, rows: memory.config.max_rows };
        self.draft.round(executor, slots, limits, &mut self.tools, env);
        moved
    }

    /// Says what the plan has decided already.
    fn note_plan(&mut self, now: Duration) {
        let metrics = &self.shared.metrics;
        Metrics::add(&metrics.preemptions, self.plan.preempted);
        for failure in self.plan.restore_failures.drain(..) {
            metrics.restore_failed(failure);
        }
        for brought in self.plan.restored.drain(..) {
            Metrics::add(&metrics.external_hits, brought.positions as u64);
            Metrics::add(&metrics.handed_tokens, brought.handed as u64);
            metrics.restore_time.record(brought.took);
        }
        while let Some((sequence, end)) = self.plan.ended.pop() {
            sequence.say_end(&end, now, metrics);
        }
    }

    /// Runs the planned step. Everything that can fail in here fails for the sequences it was done for and nobody else.
    fn run_step(&mut self) {
        let started = Instant::now();
        let before = self.now();
        self.stepper.build(&self.plan, &self.scheduler.slots, &self.draft);
        let error = self.compute();
        let now = self.now();
        let metrics = &self.shared.metrics;
        self.last_step = started.elapsed();
        metrics.step_time.record(self.last_step);
        self.images.note_step(now.saturating_sub(before));
        let decodes_only = decodes_only(&self.plan, &self.scheduler.slots);
        self.scheduler.cost.note(self.plan.load(), now.saturating_sub(before));
        Metrics::add(&metrics.steps, 1);
        match error {
            None => {}
            Some(Failed::Memory(error)) => {
                self.shed_newest(&error, now);
                return;
            }
            Some(Failed::Step(error)) => {
                self.fail_step(&error, now);
                return;
            }
            Some(Failed::Renewed(error)) => {
                self.begin_anew(&error, now);
                return;
            }
        }
        for sequence in self.scheduler.slots.running_mut() {
            sequence.blocks.copies_made();
        }
        self.take_results(now);
        if decodes_only {
            // With the sampling of its rows: proposals cost that, too.
            let took = self.now().saturating_sub(before);
            self.draft.note_step(self.stepper.rows(), took, &self.shared.metrics);
        }
    }

    /// Has the executor do the step; answers what went wrong.
    fn compute(&mut self) -> Option<Failed> {
        let Self { stepper, executor, plan, scheduler, shared, .. } = self;
        let metrics = &shared.metrics;
        // A panic leaves the executor usable by its contract (as a failed step does), and everything else that the
        // closure touches is scratch.
        let step = || stepper.run(executor.as_mut(), plan, &mut scheduler.memory, metrics);
        match catch_unwind(AssertUnwindSafe(step)) {
            Ok(Ok(())) => None,
            Ok(Err(error)) => {
                Metrics::add(&metrics.step_errors, 1);
                tracing::error!(%error, "a step failed");
                if matches!(error, ExecError::Lost { .. }) {
                    shared.note_lost(error.to_string());
                }
                let told = RequestError::Device(error.to_string());
                Some(match error {
                    ExecError::OutOfMemory { .. } => Failed::Memory(told),
                    ExecError::Renewed { .. } => Failed::Renewed(told),
                    _ => Failed::Step(told),
                })
            }
            Err(panic) => {
                Metrics::add(&metrics.step_panics, 1);
                Some(Failed::Step(RequestError::Panic(panic_text(panic.as_ref()))))
            }
        }
    }

    /// Memory ran out in a step: the newest request of it ends, and the others, whose rows have not counted, are planned again in what
    /// it leaves. Where blocks were on the move nobody knows which have arrived: that step fails for all.
    fn shed_newest(&mut self, error: &RequestError, now: Duration) {
        if !self.plan.moves.is_empty() {
            self.fail_step(error, now);
            return;
        }
        let slots = &self.scheduler.slots;
        let planned = (0..slots.len()).filter(|slot| self.plan.includes(*slot));
        let newest = planned.filter_map(|slot| Some((slots.get(slot)?.task.id, slot))).max();
        if let Some(sequence) = newest.and_then(|(_, slot)| self.scheduler.vacate(slot)) {
            tracing::warn!(request = sequence.task.id, "ended, so that the others have its memory");
            sequence.say_end(&End::Fail(error.clone()), now, &self.shared.metrics);
        }
    }

    /// Ends the requests whose rows or copies were part of the step; all others go on.
    fn fail_step(&mut self, error: &RequestError, now: Duration) {
        for slot in 0..self.scheduler.slots.len() {
            let broken = self.scheduler.slots.get(slot).is_some_and(|s| s.blocks.awaits_copies());
            if (self.plan.includes(slot) || broken)
                && let Some(sequence) = self.scheduler.vacate(slot)
            {
                sequence.say_end(&End::Fail(error.clone()), now, &self.shared.metrics);
            }
        }
        if self.plan.moves.iter().any(|block_move| !matches!(block_move, BlockMove::Spill(_))) {
            // A block may be known whose bytes never came. Whoever might be using it has just been ended.
            self.scheduler.memory.forget();
        }
    }

    /// The bytes of all blocks are gone. The step's requests end; others read again what they lose, and what was held for others, or was
    /// on its way here, is given up.
    fn begin_anew(&mut self, error: &RequestError, now: Duration) {
        self.fail_step(error, now);
        for slot in 0..self.scheduler.slots.len() {
            self.scheduler.requeue(slot);
        }
        self.scheduler.memory.let_all_go();
        self.scheduler.memory.forget();
        self.stepper.set_most_candidates(self.executor.most_candidates());
    }

    /// Takes in the results of a step, sequence by sequence.
    fn take_results(&mut self, now: Duration) {
        let begun = self.now();
        self.stepper.begin_taking(begun);
        for index in 0..self.plan.items.len() {
            let item = self.plan.items[index];
            let env = Env { clock: &*self.clock, metrics: &self.shared.metrics };
            let Self { stepper, scheduler: Scheduler { slots, memory, .. }, draft, tools, .. } = self;
            // Another choice may have failed for the whole request a moment ago; the plan will clear this one away.
            let Some(sequence) = slots.get_mut(item.slot).filter(|sequence| !sequence.has_failed()) else {
                continue;
            };
            let mut parts = Parts { memory, draft, tools, now, env };
            let take = || stepper.take(index, item, sequence, &mut parts);
            let after = catch_unwind(AssertUnwindSafe(take)).unwrap_or_else(|panic| {
                Metrics::add(&env.metrics.step_panics, 1);
                After::Ended(End::Fail(RequestError::Panic(panic_text(panic.as_ref()))))
            });
            match after {
                After::GoesOn => {}
                After::ReadsAgain => self.scheduler.requeue(item.slot),
                After::Ended(end) => self.end(item.slot, &end, now),
            }
        }
    }

    /// Ends a sequence; what it has computed is offered first.
    fn end(&mut self, slot: usize, end: &End, now: Duration) {
        let Scheduler { slots, memory, .. } = &mut self.scheduler;
        if let Some(sequence) = slots.get_mut(slot) {
            self.transfers.tell_outlet(sequence, memory);
            self.transfers.offer_ended(sequence, memory);
        }
        if let Some(sequence) = self.scheduler.vacate(slot) {
            sequence.say_end(end, now, &self.shared.metrics);
        }
    }

    /// Gives the tower its time. `busy`: there was a step.
    fn work_on_images(&mut self, busy: bool) -> bool {
        let env = Env { clock: &*self.clock, metrics: &self.shared.metrics };
        let work = self.images.work(self.executor.as_mut(), &mut self.scheduler.slots, busy, env);
        if let Some(why) = work.lost {
            self.shared.note_lost(why);
        }
        let now = self.now();
        if let Some((slots, error)) = work.failed {
            for slot in slots {
                if let Some(sequence) = self.scheduler.vacate(slot) {
                    sequence.say_end(&End::Fail(error.clone()), now, &self.shared.metrics);
                }
            }
        }
        work.worked
    }
}

/// Why a step came to nothing.
enum Failed {
    /// There was not enough memory for it: fewer requests may do with less.
    Memory(RequestError),
    /// The executor is another one now, whose blocks are empty.
    Renewed(RequestError),
    /// Anything else.
    Step(RequestError),
}

/// What separates prefixes that must not be taken for each other, unambiguously concatenated.
fn identity(config: &EngineConfig, route: &str, kv_type: KvType) -> Vec<u8> {
    let mut identity = (config.identity.len() as u64).to_le_bytes().to_vec();
    identity.extend_from_slice(&config.identity);
    identity.extend_from_slice(format!("{kv_type:?} {route}").as_bytes());
    identity
}
