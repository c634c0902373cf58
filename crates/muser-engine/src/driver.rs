//! The engine thread's state and one turn of its loop: inbox, plan, step, events, figures.
//!
//! A turn takes the time from a clock that tests replace, and drives the executor it was given. While sequences only
//! decode, a turn allocates nothing and takes no lock.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use muser_backend::{
    Executor, ExecutorInfo, KvCapacity, KvType, Row, RowInput, RowWants, StepBatch, StepOutput,
};
use muser_kv::{BlockId, CacheConfig, GroupStats, KvCache};
use muser_model::Geometry;

use crate::{
    EngineConfig, EngineError, Event, Limits, MOST_PROPOSALS, SlotView, TokenMask, capacity,
    draft::DraftRounds,
    handle::Shared,
    host_tier::HostTier,
    image::Images,
    metrics::Metrics,
    prefix::{Door, Source},
    sampler::Sampler,
    scheduler::{End, Scheduler, SchedulerConfig, StepPlan},
    sequence::Sequence,
    task::Job,
};

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
    pub(crate) executor: Box<dyn Executor>,
    pub(crate) scheduler: Scheduler,
    pub(crate) plan: StepPlan,
    pub(crate) batch: StepBatch,
    pub(crate) out: StepOutput,
    pub(crate) sampler: Sampler,
    pub(crate) mask: TokenMask,
    /// How long masks are waited for, since the engine's start.
    pub(crate) masks_by: Duration,
    /// Bytes of a block on its way from one place to another.
    pub(crate) copy_buffer: Vec<u8>,
    pub(crate) draft: DraftRounds,
    pub(crate) images: Images,
    pub(crate) hidden: usize,
    pub(crate) vocab: usize,
    /// How many of a row's largest logits the executor can tell by themselves.
    pub(crate) most_candidates: usize,
    pub(crate) most_positions: usize,
    pub(crate) shared: Arc<Shared>,
    pub(crate) clock: Box<dyn Fn() -> Duration + Send>,
    pub(crate) source: Source,
    pub(crate) source_timeout: Duration,
    pub(crate) door: Arc<Door>,
    /// How long the last step took.
    pub(crate) last_step: Duration,
    block_bytes: (u64, u64),
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
        check_config(config, context, info.max_rows)?;
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
        let block_bytes = (info.full_block_bytes as u64, info.sliding_block_bytes as u64);
        let limits = Limits {
            parallel: config.parallel,
            context,
            vocab: geometry.vocab,
            hidden: geometry.hidden,
            tower: executor.tower().cloned(),
            full_blocks: blocks.full as usize,
            sliding_blocks: blocks.sliding as usize,
            kv_bytes: u64::from(blocks.full) * block_bytes.0 + u64::from(blocks.sliding) * block_bytes.1,
            max_in_flight: config.parallel + config.max_waiting,
            event_ring: config.event_ring,
        };
        let most_positions = context.min(blocks.full as usize * muser_kv::BLOCK_LEN);
        let scheduler = Scheduler::new(
            kv,
            HostTier::new(config.host_bytes),
            SchedulerConfig {
                parallel: config.parallel,
                most_positions,
                prefill_rows: config.prefill_rows,
                mixed_rows: config.mixed_rows,
                prefill_step: config.prefill_step,
                mixed_step: config.mixed_step,
                max_rows: info.max_rows,
                logit_rows: (LOGITS_AT_ONCE / geometry.vocab.max(1)).max(1),
                sliding_per_sequence: capacity::sliding_per_sequence(&reach, config),
                slow_reader_timeout: config.slow_reader_timeout,
                restore_stall: config.restore_stall,
                lookahead: muser_kv::BLOCK_LEN,
            },
        );
        let driver = Self {
            most_candidates: executor.most_candidates(),
            executor,
            scheduler,
            plan: StepPlan::default(),
            batch: roomy_batch(config.parallel, info.max_rows, blocks),
            out: roomy_output(&info, config.parallel),
            sampler: Sampler::new(),
            mask: TokenMask::new(geometry.vocab),
            masks_by: Duration::ZERO,
            copy_buffer: Vec::new(),
            draft: DraftRounds::new(&info, config, capacity::sliding_per_sequence(&reach, config)),
            images: Images::new(config.image_cache_bytes),
            hidden: geometry.hidden,
            vocab: geometry.vocab,
            most_positions,
            shared: Arc::new(Shared::new(limits, info, config.queue_timeout)),
            clock: Box::new(|| Duration::ZERO),
            source: None,
            source_timeout: config.source_timeout,
            door: Arc::new(Door::new()),
            last_step: Duration::ZERO,
            block_bytes,
        };
        driver.publish_figures();
        Ok(driver)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn set_clock(&mut self, clock: Box<dyn Fn() -> Duration + Send>) {
        self.clock = clock;
    }

    pub(crate) fn now(&self) -> Duration {
        (self.clock)()
    }

    pub(crate) fn turn(&mut self) -> Turn {
        let now = self.now();
        while let Some(job) = self.shared.inbox.pop() {
            self.take_in(job);
        }
        let mut worked = self.do_cache_work();
        worked |= self.move_prefixes();
        self.offer_prompts();
        self.draft_round();
        let stopping = self.shared.stopping.load(Ordering::SeqCst);
        self.scheduler.plan(now, stopping >= 2, &mut self.plan);
        Metrics::add(&self.shared.metrics.preemptions, self.plan.preempted);
        self.note_restores();
        while let Some((sequence, end)) = self.plan.ended.pop() {
            self.end(&sequence, &end, now);
        }
        let works = !self.plan.items.is_empty() || !self.plan.moves.is_empty();
        // A block that is spilled to host memory must be so before somebody else writes into it.
        if self.plan.moves.is_empty() {
            self.begin_fetches();
        }
        if works {
            self.run_step();
        }
        worked |= self.work_on_images(works);
        self.begin_fetches();
        self.publish_figures();
        if works || worked || self.plan.changed || self.plan.preempted > 0 {
            Turn::Worked
        } else if let Some(waiting) = self.scheduler.slots.iter_mut().flatten().find(|s| s.awaits_mask) {
            // Nobody else has anything to do; new requests are looked for meanwhile.
            waiting.mask_is_ready(MASK_LOOK);
            Turn::Worked
        } else if stopping > 0 && self.scheduler.is_empty() && self.shared.inbox.is_empty() {
            Turn::Stopped
        } else {
            Turn::Idle { until: self.plan.wake_at }
        }
    }

    fn take_in(&mut self, mut job: Job) {
        for (index, choice) in std::mem::take(&mut job.choices).into_iter().enumerate() {
            let index = index as u32;
            let mut sequence =
                Sequence::new(&job, index, choice, self.most_positions, self.vocab, self.hidden);
            if sequence.tokens.len() >= self.most_positions
                && let Some(dropped) = sequence.shift(self.most_positions)
            {
                job.task.ring.send(Event::Shifted { index, dropped_tokens: dropped as u32 });
            }
            if index == 0 {
                self.ask_source(&mut sequence);
            }
            self.scheduler.enqueue(sequence);
        }
        Metrics::add(&self.shared.metrics.prompt_tokens, u64::from(job.task.prompt_tokens));
    }

    /// Says the last words of a sequence that has left its slot.
    pub(crate) fn end(&self, sequence: &Sequence, end: &End, now: Duration) {
        let metrics = &self.shared.metrics;
        let task = &sequence.task;
        match end {
            End::Finish(reason) => {
                let finished = sequence.finished(*reason, now);
                metrics.finished(*reason);
                task.remaining.fetch_sub(1, Ordering::Relaxed);
                task.ring.send(Event::Finished(finished));
            }
            End::Fail(error) => {
                if task.fail(error.clone()) {
                    Metrics::add(&metrics.requests_failed, 1);
                }
            }
            End::Silent => {}
        }
    }

    fn publish_figures(&self) {
        let metrics = &self.shared.metrics;
        let stats = self.scheduler.kv.stats();
        let held = |group: GroupStats| u64::from(group.used + group.cached);
        Metrics::set(&metrics.waiting, (self.scheduler.waiting.len() + self.shared.inbox.len()) as u64);
        Metrics::set(&metrics.running, self.scheduler.running().count() as u64);
        Metrics::set(&metrics.full_blocks_used, u64::from(stats.full.used));
        Metrics::set(&metrics.full_blocks_cached, u64::from(stats.full.cached));
        Metrics::set(&metrics.full_blocks_total, u64::from(stats.full.total));
        Metrics::set(&metrics.sliding_blocks_used, u64::from(stats.sliding.used));
        Metrics::set(&metrics.sliding_blocks_cached, u64::from(stats.sliding.cached));
        Metrics::set(&metrics.sliding_blocks_total, u64::from(stats.sliding.total));
        Metrics::set(&metrics.evicted_blocks, stats.evicted);
        Metrics::set(&metrics.host_bytes_held, self.scheduler.host.held_bytes() as u64);
        let (full, sliding) = self.block_bytes;
        Metrics::set(&metrics.kv_bytes_held, held(stats.full) * full + held(stats.sliding) * sliding);
        Metrics::set(&metrics.kv_bytes_total, self.shared.limits.kv_bytes);
        for (slot, cell) in self.shared.slots.iter().enumerate() {
            match &self.scheduler.slots[slot] {
                None => cell.clear(),
                Some(sequence) => cell.write(&SlotView {
                    slot,
                    state: sequence.state(),
                    request: sequence.task.id,
                    index: sequence.index,
                    prompt_tokens: sequence.task.prompt_tokens,
                    cached_tokens: sequence.task.cached_tokens.load(Ordering::Relaxed),
                    computed_tokens: sequence.computed() as u32,
                    generated_tokens: sequence.generated,
                }),
            }
        }
    }
}

/// Most time that a step, or a round of drafts, waits for masks in all. Whose mask is not there then sits steps out.
pub(crate) const MASKS_A_STEP: Duration = Duration::from_millis(5);

/// How long an engine that has nothing else to do waits for a mask before it looks around again.
const MASK_LOOK: Duration = Duration::from_millis(1);

/// Most logits that a step asks for on behalf of a prompt whose tokens' log-probabilities are wanted: 64 MiB.
const LOGITS_AT_ONCE: usize = 16 << 20;

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

/// What separates prefixes that must not be taken for each other, unambiguously concatenated.
fn identity(config: &EngineConfig, route: &str, kv_type: KvType) -> Vec<u8> {
    let mut identity = (config.identity.len() as u64).to_le_bytes().to_vec();
    identity.extend_from_slice(&config.identity);
    identity.extend_from_slice(format!("{kv_type:?} {route}").as_bytes());
    identity
}

fn check_config(config: &EngineConfig, context: usize, max_rows: usize) -> Result<(), EngineError> {
    let check = |key: &'static str, value: usize, expected: &str, good: bool| {
        if good {
            Ok(())
        } else {
            Err(EngineError::Config { key, expected: expected.into(), found: value.to_string() })
        }
    };
    check("parallel", config.parallel, "1 to 16", (1..=16).contains(&config.parallel))?;
    check("context", context, "at least 2", context >= 2)?;
    check("prefill_rows", config.prefill_rows, "at least 1", config.prefill_rows >= 1)?;
    check("mixed_rows", config.mixed_rows, "at least 1", config.mixed_rows >= 1)?;
    check("event_ring", config.event_ring, "at least 1", config.event_ring >= 1)?;
    let rows_for_all = max_rows >= config.parallel;
    check("parallel", config.parallel, "at most the rows of a step on this device", rows_for_all)
}
