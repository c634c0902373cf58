//! Bytes in and out between steps, in slices that no decode step notices, and what the source is told.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use muser_backend::Executor;
use muser_kv::{BLOCK_LEN, KvGroup};

use super::{
    ExportError, KvConnector, LocalPace, PrefixExport, QueryTerms,
    lookup::Fetching,
    offer::{ExportQueue, ExportWork},
};
use crate::{memory::Memory, metrics::Metrics, sequence::Sequence, shared::Env, slots::Slots};

/// Time for copies between two steps while others compute; a tenth of a step is fine too where steps are long.
const SLICE: Duration = Duration::from_millis(2);
/// The most that a tenth of a step may be.
const LONGEST_SLICE: Duration = Duration::from_millis(30);
/// Time for copies before the inbox is looked at again when nobody computes.
const IDLE_SLICE: Duration = Duration::from_millis(20);

/// The source, if there is one, and what is on its way from and to it.
pub(crate) struct Transfers {
    source: Option<Box<dyn KvConnector>>,
    /// How long a request waits for the source's answer.
    timeout: Duration,
    exports: Arc<ExportQueue>,
}

impl Transfers {
    pub(crate) fn new(source: Option<Box<dyn KvConnector>>, timeout: Duration) -> Self {
        Self { source, timeout, exports: Arc::new(ExportQueue::new()) }
    }

    pub(crate) fn set_source(&mut self, source: Option<Box<dyn KvConnector>>) {
        self.source = source;
    }

    /// Asks the source about a new sequence, which computing here would take as long as `pace` says.
    pub(crate) fn ask(
        &mut self,
        sequence: &mut Sequence,
        memory: &Memory,
        pace: Arc<LocalPace>,
        env: Env<'_>,
    ) {
        let Some(source) = &mut self.source else { return };
        let now = env.now();
        let terms = QueryTerms {
            priority: sequence.task.priority,
            time_left: sequence.task.deadline.map(|deadline| deadline.saturating_sub(now)),
            is_for_peer: sequence.task.is_for_peer,
            pace,
        };
        if let Some(query) = memory.query(sequence, terms, now + self.timeout) {
            Metrics::add(&env.metrics.external_queries, query.units().len() as u64);
            guard(|| source.look_up(query));
        }
    }

    /// Copies blocks in and out; `true` if there was something.
    pub(crate) fn pump(
        &mut self,
        executor: &mut dyn Executor,
        slots: &mut Slots,
        memory: &mut Memory,
        last_step: Duration,
        env: Env<'_>,
    ) -> bool {
        if self.source.is_none() && self.exports.work.is_empty() {
            return false;
        }
        let computing = slots.running().any(|sequence| sequence.blocks.kv().is_some());
        self.exports.computing.store(computing, Ordering::Relaxed);
        let slice = if computing { SLICE.max((last_step / 10).min(LONGEST_SLICE)) } else { IDLE_SLICE };
        let began = Instant::now();
        let in_time = || began.elapsed() < slice;
        let imported = import_arrived(executor, slots, &in_time, env);
        self.export_requested(executor, memory, &in_time, env.metrics) || imported
    }

    /// Copies held blocks out for whoever asked. At least one, if one is asked for.
    fn export_requested(
        &self,
        executor: &dyn Executor,
        memory: &mut Memory,
        in_time: &dyn Fn() -> bool,
        metrics: &Metrics,
    ) -> bool {
        let mut worked = false;
        while !worked || in_time() {
            let Some(work) = self.exports.work.pop() else { break };
            worked = true;
            match work {
                ExportWork::Release { hold } => memory.unpin(hold),
                ExportWork::Copy { hold, group, index, rows, mut buffer, done } => {
                    let started = Instant::now();
                    let result = copy_out(executor, memory, hold, group, index, &mut buffer);
                    if result.is_ok() && rows < BLOCK_LEN {
                        executor.clear_rows(group, rows, &mut buffer);
                    }
                    if result.is_ok() {
                        Metrics::add(&metrics.exported_blocks, 1);
                        metrics.export_time.record(started.elapsed());
                    }
                    guard(|| done(buffer, result));
                }
            }
        }
        worked
    }

    /// Offers the prompts that have been read since the last turn. Only now, when their first token is out.
    pub(crate) fn offer_prompts(&mut self, slots: &mut Slots, memory: &mut Memory) {
        for sequence in slots.running_mut() {
            if sequence.offered.take_due() {
                let end = sequence.computed() / BLOCK_LEN * BLOCK_LEN;
                self.offer(sequence, end, false, memory);
            }
        }
    }

    /// Tells the outlets of sequences how far those have come.
    pub(crate) fn tell_outlets(&self, slots: &mut Slots, memory: &mut Memory) {
        for sequence in slots.running_mut() {
            self.tell_outlet(sequence, memory);
        }
    }

    /// Tells the outlet of a sequence, if it has one, how far that has come.
    pub(crate) fn tell_outlet(&self, sequence: &mut Sequence, memory: &mut Memory) {
        let end = sequence.computed();
        let Some(outlet) = &mut sequence.outlet else { return };
        if sequence.blocks.kv().is_none() || sequence.blocks.awaits_copies() {
            return;
        }
        if outlet.told.is_none() {
            outlet.told = Some(0);
            guard(|| outlet.outlet.admitted(end));
        }
        if outlet.told.is_some_and(|told| end <= told) {
            return;
        }
        let is_stop = end > 0 && outlet.outlet.next_stop(end - 1) == Some(end);
        let windows = is_stop || end == sequence.text.len();
        let Some((hold, sliding)) = memory.pin(sequence, true, windows) else { return };
        let units = sequence.text.units()[..end].to_vec();
        let offer =
            PrefixExport::new(sequence.task.scope, units, sliding, hold, Arc::downgrade(&self.exports));
        if let Some(outlet) = &mut sequence.outlet {
            outlet.told = Some(end);
            guard(|| outlet.outlet.grown(offer));
        }
    }

    /// Offers what a sequence has computed that has ended; afterwards it may give its blocks back.
    pub(crate) fn offer_ended(&mut self, sequence: &mut Sequence, memory: &mut Memory) {
        if !sequence.blocks.awaits_copies() {
            let end = sequence.computed();
            self.offer(sequence, end, true, memory);
        }
    }

    /// `tail`: with the unfinished block at its end.
    fn offer(&mut self, sequence: &mut Sequence, end: usize, tail: bool, memory: &mut Memory) {
        let Some(source) = &mut self.source else { return };
        if !sequence.task.cache || end < BLOCK_LEN || !sequence.offered.grows_to(end) {
            return;
        }
        let Some((hold, sliding)) = memory.pin(sequence, tail, true) else { return };
        let units = sequence.text.units()[..end.min(sliding.len() * BLOCK_LEN)].to_vec();
        let offer =
            PrefixExport::new(sequence.task.scope, units, sliding, hold, Arc::downgrade(&self.exports));
        guard(|| source.offer(offer));
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        self.exports.close();
    }
}

/// Begins fetches: from here on other threads may write into their blocks.
pub(crate) fn begin_fetches(executor: &mut dyn Executor, fetches: &mut Vec<Fetching>) {
    for Fetching { prefix, wanted, delivery } in fetches.drain(..) {
        if delivery.is_cancelled() {
            continue;
        }
        for block in &wanted {
            if let Some(lent) = executor.lend_block(block.group, block.block) {
                delivery.add_place(block.group, block.index, lent);
            }
        }
        let wanted = wanted.iter().map(|block| (block.group, block.index)).collect();
        guard(|| prefix.fetch(wanted, delivery));
    }
}

/// Takes delivered blocks into reserved memory. At least one, if there is one.
fn import_arrived(
    executor: &mut dyn Executor,
    slots: &mut Slots,
    in_time: &dyn Fn() -> bool,
    env: Env<'_>,
) -> bool {
    let now = env.now();
    let mut worked = false;
    for sequence in slots.running_mut() {
        let Some(restoring) = sequence.blocks.fetching_mut() else { continue };
        while !worked || in_time() {
            let Some(delivered) = restoring.cell.arrived.pop() else { break };
            worked = true;
            let Some(target) = restoring.take_target(&delivered) else { continue };
            let size = executor.info().block_bytes(target.group);
            let mut import = |bytes: &[u8]| {
                let import = AssertUnwindSafe(|| executor.import_block(target.group, target.block, bytes));
                bytes.len() == size && matches!(catch_unwind(import), Ok(Ok(())))
            };
            let imported = delivered.bytes.as_ref().is_none_or(|bytes| import((**bytes).as_ref()));
            if !imported {
                restoring.refuse(target);
                break;
            }
            restoring.note_progress(now);
            Metrics::add(&env.metrics.external_blocks, 1);
            Metrics::add(&env.metrics.external_bytes, size as u64);
        }
    }
    worked
}

fn copy_out(
    executor: &dyn Executor,
    memory: &Memory,
    hold: u64,
    group: KvGroup,
    index: usize,
    buffer: &mut Vec<u8>,
) -> Result<(), ExportError> {
    let block = memory.held_block(hold, group, index).ok_or(ExportError::Gone)?;
    buffer.resize(executor.info().block_bytes(group), 0);
    match catch_unwind(AssertUnwindSafe(|| executor.export_block(group, block, buffer))) {
        Ok(Ok(())) => Ok(()),
        _ => Err(ExportError::Device),
    }
}

/// A source that panics is a bug, but not a reason to stop.
fn guard(call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        tracing::error!("a prefix source panicked");
    }
}
