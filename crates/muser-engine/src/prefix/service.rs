//! The driver's part: bytes in and out between steps, in slices that no decode step notices.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use muser_kv::{BLOCK_LEN, KvGroup};

use super::{ExportError, ExportWork, Fetching, PrefixOffer, PrefixSource};
use crate::{driver::Driver, metrics::Metrics, sequence::Sequence};

/// Time for copies between two steps while others compute; a tenth of a step is fine too where steps are long.
const SLICE: Duration = Duration::from_millis(2);
/// The most that a tenth of a step may be.
const LONGEST_SLICE: Duration = Duration::from_millis(30);
/// Time for copies before the inbox is looked at again when nobody computes.
const IDLE_SLICE: Duration = Duration::from_millis(20);

impl Driver {
    /// Asks the source about a new sequence.
    pub(crate) fn ask_source(&mut self, sequence: &mut Sequence) {
        let Some(source) = &mut self.source else { return };
        let until = (self.clock)() + self.source_timeout;
        if let Some(query) = self.scheduler.query(sequence, until) {
            Metrics::add(&self.shared.metrics.external_queries, query.units().len() as u64);
            guard(|| source.look_up(query));
        }
    }

    /// Copies blocks out and in; `true` if there was something.
    pub(crate) fn move_prefixes(&mut self) -> bool {
        if self.source.is_none() {
            return false;
        }
        let computing = self.scheduler.running().any(|sequence| sequence.kv.is_some());
        self.door.computing.store(computing, Ordering::Relaxed);
        let slice = if computing { SLICE.max((self.last_step / 10).min(LONGEST_SLICE)) } else { IDLE_SLICE };
        let began = Instant::now();
        let brought = self.bring_in(began, slice);
        self.carry_out(began, slice) || brought
    }

    /// Begins the fetches of this turn's plan: from here on other threads may write into their blocks.
    pub(crate) fn begin_fetches(&mut self) {
        for Fetching { prefix, wanted, delivery } in self.plan.fetches.drain(..) {
            if delivery.is_cancelled() {
                continue;
            }
            for block in &wanted {
                if let Some(lent) = self.executor.lend_block(block.group, block.block) {
                    delivery.add_place(block.group, block.index, lent);
                }
            }
            let wanted = wanted.iter().map(|block| (block.group, block.index)).collect();
            guard(|| prefix.fetch(wanted, delivery));
        }
    }

    /// Takes delivered blocks into reserved memory. At least one, if there is one.
    fn bring_in(&mut self, began: Instant, slice: Duration) -> bool {
        let now = self.now();
        let mut worked = false;
        for sequence in self.scheduler.slots.iter_mut().flatten() {
            let Some(restoring) = sequence.restoring.as_deref_mut() else { continue };
            while !worked || began.elapsed() < slice {
                let Some(delivered) = restoring.cell.arrived.pop() else { break };
                worked = true;
                let Some(target) = restoring.take_target(&delivered) else { continue };
                let executor = &mut self.executor;
                let size = executor.info().block_bytes(target.group);
                let mut import = |bytes: &[u8]| {
                    let (group, block) = (target.group, target.block);
                    let import = AssertUnwindSafe(|| executor.import_block(group, block, bytes));
                    bytes.len() == size && matches!(catch_unwind(import), Ok(Ok(())))
                };
                let imported = delivered.bytes.as_ref().is_none_or(|bytes| import((**bytes).as_ref()));
                if !imported {
                    restoring.device_failed = true;
                    restoring.missing.push(target);
                    break;
                }
                restoring.last_progress = now;
                Metrics::add(&self.shared.metrics.external_blocks, 1);
                Metrics::add(&self.shared.metrics.external_bytes, size as u64);
            }
        }
        worked
    }

    /// Copies held blocks out for whoever asked. At least one, if one is asked for.
    fn carry_out(&mut self, began: Instant, slice: Duration) -> bool {
        let mut worked = false;
        while !worked || began.elapsed() < slice {
            let Some(work) = self.door.work.pop() else { break };
            worked = true;
            match work {
                ExportWork::Release { hold } => self.scheduler.let_go(hold),
                ExportWork::Copy { hold, group, index, rows, mut buffer, done } => {
                    let started = Instant::now();
                    let result = self.copy_out(hold, group, index, &mut buffer);
                    if result.is_ok() && rows < BLOCK_LEN {
                        self.executor.clear_rows(group, rows, &mut buffer);
                    }
                    if result.is_ok() {
                        Metrics::add(&self.shared.metrics.exported_blocks, 1);
                        self.shared.metrics.export_time.record(started.elapsed());
                    }
                    guard(|| done(buffer, result));
                }
            }
        }
        worked
    }

    fn copy_out(
        &mut self,
        hold: u64,
        group: KvGroup,
        index: usize,
        buffer: &mut Vec<u8>,
    ) -> Result<(), ExportError> {
        let held = self.scheduler.holds.get(hold).and_then(|held| held.blocks.get(index));
        let block = match group {
            KvGroup::Full => held.map(|block| block.full),
            KvGroup::Sliding => held.and_then(|block| block.sliding),
        };
        let block = block.ok_or(ExportError::Gone)?;
        buffer.resize(self.executor.info().block_bytes(group), 0);
        let executor = &self.executor;
        match catch_unwind(AssertUnwindSafe(|| executor.export_block(group, block, buffer))) {
            Ok(Ok(())) => Ok(()),
            _ => Err(ExportError::Device),
        }
    }

    /// Offers the prompts that have been read since the last turn. Only now, when their first token is out.
    pub(crate) fn offer_prompts(&mut self) {
        if self.source.is_none() {
            return;
        }
        for slot in 0..self.scheduler.slots.len() {
            let due = self.scheduler.slots[slot].as_mut().is_some_and(|s| std::mem::take(&mut s.offer_due));
            if due && let Some(mut sequence) = self.scheduler.slots[slot].take() {
                self.offer(&mut sequence, false);
                self.scheduler.slots[slot] = Some(sequence);
            }
        }
    }

    /// Takes a sequence that has ended out of its slot; what it computed is offered first.
    pub(crate) fn vacate_and_offer(&mut self, slot: usize) -> Option<Sequence> {
        if self.source.is_some()
            && let Some(mut sequence) = self.scheduler.slots[slot].take()
        {
            if !sequence.awaits_copy {
                self.offer(&mut sequence, true);
            }
            self.scheduler.slots[slot] = Some(sequence);
        }
        self.scheduler.vacate(slot)
    }

    fn offer(&mut self, sequence: &mut Sequence, ended: bool) {
        let computed = sequence.computed();
        let end = if ended { computed } else { computed / BLOCK_LEN * BLOCK_LEN };
        if !sequence.task.cache || end < BLOCK_LEN || end <= sequence.offered {
            return;
        }
        sequence.offered = end;
        let (Some(source), Some((hold, sliding))) = (&mut self.source, self.scheduler.hold(sequence, ended))
        else {
            return;
        };
        let units = sequence.units[..end.min(sliding.len() * BLOCK_LEN)].to_vec();
        let offer = PrefixOffer::new(sequence.task.scope, units, sliding, hold, Arc::downgrade(&self.door));
        guard(|| source.offer(offer));
    }

    /// Counts what the plan says about fetches that have ended.
    pub(crate) fn note_restores(&mut self) {
        let metrics = &self.shared.metrics;
        for failure in self.plan.restore_failures.drain(..) {
            metrics.restore_failed(failure);
        }
        for (tokens, took) in self.plan.restored.drain(..) {
            Metrics::add(&metrics.external_hits, tokens);
            metrics.restore_time.record(took);
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.door.close();
    }
}

/// A source that panics is a bug, but not a reason to stop.
fn guard(call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        tracing::error!("a prefix source panicked");
    }
}

/// What a driver needs to have a source.
pub(crate) type Source = Option<Box<dyn PrefixSource>>;
