//! The step loop's body: inbox, scheduler, executor, sampler, events.
//!

use std::{sync::Arc, sync::atomic::Ordering, time::Duration};

use muser_backend::{Executor, KvCapacity, Row, RowInput, RowWants, StepBatch, StepOutput};
use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::Geometry;

use crate::{
    EngineConfig, EngineError, Event, FinishReason, Finished, Limits, RequestError, Started, Timings, Token,
    TopLogprobs, Usage,
    handle::{Job, Shared},
};

/// What a turn of the loop did.
pub(crate) enum Turn {
    /// There may be more to do at once.
    Worked,
    /// Nothing to do until woken or until this time.
    Idle { until: Option<Duration> },
    /// The engine is done.
    Stopped,
}

pub(crate) struct Driver {
    executor: Box<dyn Executor>,
    shared: Arc<Shared>,
    blocks: Vec<BlockId>,
    batch: StepBatch,
    out: StepOutput,
    max_rows: usize,
}

impl Driver {
    pub(crate) fn new(
        mut executor: Box<dyn Executor>,
        geometry: Geometry,
        config: EngineConfig,
    ) -> Result<(Self, Arc<Shared>), EngineError> {
        let info = executor.info().clone();
        let context = config.context.unwrap_or(geometry.context).min(geometry.context);
        let blocks = context.div_ceil(BLOCK_LEN);
        executor.allocate_kv(KvCapacity { full: blocks as u32, sliding: blocks as u32 })?;
        let limits = Limits {
            parallel: config.parallel,
            context,
            vocab: geometry.vocab,
            hidden: geometry.hidden,
            full_blocks: blocks,
            sliding_blocks: blocks,
            kv_bytes: (blocks * (info.full_block_bytes + info.sliding_block_bytes)) as u64,
            max_in_flight: config.parallel + config.max_waiting,
            event_ring: config.event_ring,
        };
        let max_rows = config.prefill_rows.min(info.max_rows);
        let shared = Arc::new(Shared::new(limits, info));
        let driver = Self {
            executor,
            shared: Arc::clone(&shared),
            blocks: (0..blocks as u32).map(BlockId).collect(),
            batch: StepBatch::default(),
            out: StepOutput::default(),
            max_rows,
        };
        Ok((driver, shared))
    }

    pub(crate) fn turn(&mut self, now: Duration) -> Turn {
        let Some(job) = self.shared.inbox.pop() else {
            return if self.shared.stopping.load(Ordering::SeqCst) == 0 {
                Turn::Idle { until: None }
            } else {
                Turn::Stopped
            };
        };
        let event = match self.run(&job, now) {
            Ok((reason, usage)) => {
                Event::Finished(Finished { index: 0, reason, usage, timings: Timings::default() })
            }
            Err(error) => Event::Failed(error),
        };
        while job.ring.room() == 0 && !job.ring.is_cancelled() {
            std::thread::yield_now();
        }
        if job.ring.room() > 0 {
            job.ring.send(event);
        }
        job.ring.close();
        self.shared.in_flight.fetch_sub(1, Ordering::SeqCst);
        Turn::Worked
    }

    fn run(&mut self, job: &Job, now: Duration) -> Result<(FinishReason, Usage), RequestError> {
        let mut tokens = job.request.prompt.tokens.clone();
        let prompt_tokens = tokens.len() as u32;
        let mut usage = Usage { prompt_tokens, ..Usage::default() };
        let max = job.request.max_tokens.map_or(usize::MAX, |n| n as usize);
        let mut done = 0;
        loop {
            while done < tokens.len() {
                let end = tokens.len().min(done + self.max_rows);
                self.batch.clear();
                self.batch.push_seq(done as u32, &self.blocks, 0, &self.blocks);
                for (i, &token) in tokens.iter().enumerate().take(end).skip(done) {
                    let wants = RowWants { logits: i + 1 == tokens.len(), ..RowWants::default() };
                    self.batch.push_row(Row { input: RowInput::Token(token), wants });
                }
                self.executor
                    .step(&self.batch, &mut self.out)
                    .map_err(|error| RequestError::Device(error.to_string()))?;
                done = end;
            }
            if usage.completion_tokens == 0 {
                job.ring.send(Event::Started(Started {
                    prompt_tokens,
                    cached_tokens: 0,
                    queue_time: now.saturating_sub(job.submitted_at),
                    prefill_time: Duration::ZERO,
                    seed: job.seed,
                }));
            }
            if usage.completion_tokens as usize >= max {
                return Ok((FinishReason::Length, usage));
            }
            if tokens.len() >= self.shared.limits.context {
                return Ok((FinishReason::Context, usage));
            }
            let mut best = 0;
            for (i, &value) in self.out.logits.iter().enumerate() {
                if value > self.out.logits[best] {
                    best = i;
                }
            }
            let id = best as u32;
            usage.completion_tokens += 1;
            if job.request.stop_ids.contains(&id) {
                return Ok((FinishReason::Stop(id), usage));
            }
            while job.ring.room() == 0 && !job.ring.is_cancelled() {
                std::thread::yield_now();
            }
            if job.ring.is_cancelled() {
                return Ok((FinishReason::Cancelled, usage));
            }
            job.ring.send(Event::Token(Token {
                index: 0,
                id,
                logprob: None,
                top: TopLogprobs::default(),
                logit_hash: None,
            }));
            tokens.push(id);
        }
    }
}
