//! The scheduler's part: who waits for a source, what is fetched, when a fetch has ended and how.
//!
//! A sequence that fetches has a slot and its memory, but no rows in any step. Whatever ends the fetch, the sequence then
//! begins as any other: with the longest prefix that memory knows.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use muser_kv::{BLOCK_LEN, Held, HostKey, Import, ImportBlock, KvGroup, Unit};
use smallvec::SmallVec;

use super::{
    Delivery, Found, PrefixQuery, RestoreFailure, StoredPrefix,
    delivery::{Delivered, DeliveryCell, Failed},
    query::QueryCell,
};
use crate::{
    scheduler::{Scheduler, StepPlan},
    sequence::Sequence,
};

/// Fetches of one sequence that may fail before its prompt is simply computed.
const MOST_ATTEMPTS: u32 = 3;

/// What a sequence knows about its prompt elsewhere.
#[derive(Default)]
pub(crate) enum External {
    /// Nothing, or nothing any more.
    #[default]
    None,
    /// The source has been asked.
    Asked {
        cell: Arc<QueryCell>,
        /// When to wait no longer.
        until: Duration,
    },
    /// The source has something.
    Found {
        prefix: Arc<dyn StoredPrefix>,
        /// Blocks that turned out not to be had.
        lacking: SmallVec<[(KvGroup, usize); MOST_ATTEMPTS as usize]>,
        attempts: u32,
    },
}

/// A fetch under way.
pub(crate) struct Restoring {
    import: Import,
    /// The blocks still to come.
    pub(crate) missing: Vec<ImportBlock>,
    pub(crate) cell: Arc<DeliveryCell>,
    /// Positions that memory knew before.
    known: usize,
    began: Duration,
    pub(crate) last_progress: Duration,
    /// Set by the driver when the executor refused a block.
    pub(crate) device_failed: bool,
}

impl Restoring {
    pub(crate) fn held_blocks(&self) -> (usize, usize) {
        self.import.held_blocks()
    }

    pub(crate) fn units(&self) -> &[Unit] {
        self.import.units()
    }

    /// The block that these bytes are for, which is then no longer missing.
    pub(crate) fn take_target(&mut self, delivered: &Delivered) -> Option<ImportBlock> {
        let at = self
            .missing
            .iter()
            .position(|block| block.group == delivered.group && block.index == delivered.index)?;
        Some(self.missing.swap_remove(at))
    }

    /// The import, to be ended; nothing more is taken in.
    fn into_import(mut self) -> Import {
        std::mem::take(&mut self.import)
    }

    fn failure(&self, now: Duration, stall: Duration) -> Option<Failed> {
        if self.device_failed {
            return Some((RestoreFailure::Device, None));
        }
        let slow = now >= self.last_progress + stall;
        self.cell.failure().or_else(|| slow.then_some((RestoreFailure::Slow, None)))
    }
}

impl Drop for Restoring {
    fn drop(&mut self) {
        self.cell.cancel();
    }
}

/// A fetch that begins with this turn, once nothing more is copied out of its blocks.
pub(crate) struct Fetching {
    pub(crate) prefix: Arc<dyn StoredPrefix>,
    pub(crate) wanted: Vec<ImportBlock>,
    pub(crate) delivery: Delivery,
}

/// How an attempt to begin a fetch ended.
pub(crate) enum Begun {
    /// There is nothing worth fetching.
    Nothing,
    /// Under way.
    Fetching,
    /// There is no memory now.
    NoMemory,
}

/// Prefixes held for export, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    held: VecDeque<(u64, Held)>,
    next: u64,
}

impl Holds {
    pub(crate) fn get(&self, hold: u64) -> Option<&Held> {
        self.held.iter().find(|(id, _)| *id == hold).map(|(_, held)| held)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}

impl Scheduler {
    /// The sequence's blocks are held from now on, with `tail` the unfinished one too; `None` if it has none.
    pub(crate) fn hold(&mut self, sequence: &Sequence, tail: bool) -> Option<(u64, Vec<bool>)> {
        let held = self.kv.hold_sequence(sequence.kv.as_ref()?, tail);
        if held.blocks.is_empty() {
            return None;
        }
        let sliding = held.blocks.iter().map(|block| block.sliding.is_some()).collect();
        self.holds.next += 1;
        let id = self.holds.next;
        self.holds.held.push_back((id, held));
        Some((id, sliding))
    }

    pub(crate) fn let_go(&mut self, hold: u64) {
        if let Some(at) = self.holds.held.iter().position(|(id, _)| *id == hold)
            && let Some((_, held)) = self.holds.held.remove(at)
        {
            self.kv.unhold(held);
        }
    }

    /// Sequences need the memory: what waits to be copied out may be evicted. `false` if nothing was held.
    pub(crate) fn let_all_go(&mut self) -> bool {
        let any = !self.holds.is_empty();
        while let Some((_, held)) = self.holds.held.pop_front() {
            self.kv.unhold(held);
        }
        any
    }

    /// Makes the question that a new sequence has for the source, unless memory knows as much as a source could.
    pub(crate) fn query(&self, sequence: &mut Sequence, until: Duration) -> Option<PrefixQuery> {
        let units = &sequence.units[..sequence.tokens.len() - 1];
        if !sequence.task.cache || units.len() < BLOCK_LEN {
            return None;
        }
        let scope = sequence.task.scope;
        let known = self.kv.known(scope, units, units.len());
        if known == units.len() {
            return None;
        }
        let (query, cell) = PrefixQuery::new(scope, units.into(), known);
        sequence.external = External::Asked { cell, until };
        Some(query)
    }

    /// Must the waiting sequence at `at` wait for a source: for its answer, or for a fetch of the same blocks by another?
    pub(crate) fn waits_for_source(&mut self, at: usize, now: Duration, plan: &mut StepPlan) -> bool {
        let Some(sequence) = self.waiting.get_mut(at) else { return false };
        if let External::Asked { cell, until } = &sequence.external {
            let (cell, until) = (Arc::clone(cell), *until);
            sequence.external = match cell.answer() {
                Some(Found::Some(prefix)) => {
                    External::Found { prefix: Arc::clone(prefix), lacking: SmallVec::new(), attempts: 0 }
                }
                Some(None) => External::None,
                None if now < until => {
                    plan.wake_by(Some(until));
                    return true;
                }
                None => {
                    cell.give_up();
                    plan.restore_failures.push(RestoreFailure::Slow);
                    External::None
                }
            };
        }
        let sequence = &self.waiting[at];
        if !matches!(sequence.external, External::Found { .. }) {
            return false;
        }
        // What another is fetching need not be fetched twice.
        let scope = sequence.task.scope;
        let fetching = self.slots.iter().flatten().filter(|other| other.task.scope == scope);
        fetching.filter_map(|other| other.restoring.as_deref()).any(|other| {
            let pairs = sequence.units.iter().zip(other.units());
            let common = pairs.take_while(|(a, b)| a == b).count();
            common / BLOCK_LEN * BLOCK_LEN > self.kv.known(scope, &sequence.units, common)
        })
    }

    /// Begins to fetch what the source has of the sequence's prompt, if that lets it resume further along.
    pub(crate) fn begin_restore(
        &mut self,
        sequence: &mut Sequence,
        now: Duration,
        plan: &mut StepPlan,
    ) -> Begun {
        let External::Found { prefix, lacking, .. } = &sequence.external else { return Begun::Nothing };
        let prefix = Arc::clone(prefix);
        let units = &sequence.units[..sequence.tokens.len() - 1];
        let scope = sequence.task.scope;
        let hashes = if self.host.is_enabled() { self.kv.chain_hashes(scope, units) } else { Vec::new() };
        let in_host = |group, index: usize| {
            hashes.get(index).is_some_and(|&hash| self.host.contains(&HostKey { hash, group }))
        };
        let there = |group, index| {
            in_host(group, index) || (!lacking.contains(&(group, index)) && prefix.has(group, index))
        };
        let known = self.kv.known(scope, units, units.len());
        let mut end = self.kv.resumable_with(scope, units, units.len() / BLOCK_LEN, there) * BLOCK_LEN;
        if let Some(tail) = prefix.tail().filter(|&tail| end < tail && tail <= units.len()) {
            let last = tail / BLOCK_LEN;
            let not_lacking = |&group: &KvGroup| !lacking.contains(&(group, last));
            let tail_is_there = [KvGroup::Full, KvGroup::Sliding].iter().all(not_lacking);
            let there = |group, index| index == last || there(group, index);
            if tail_is_there && self.kv.reachable_with(scope, units, tail, there) {
                end = tail;
            }
        }
        if end <= known {
            return Begun::Nothing;
        }
        let Ok(import) = self.kv.begin_import_of(scope, &units[..end]) else { return Begun::NoMemory };
        self.note_evictions(plan);
        let missing: Vec<ImportBlock> = import.blocks().collect();
        let (delivery, cell) = Delivery::new(missing.len());
        let mut wanted = Vec::with_capacity(missing.len());
        for block in &missing {
            let key = hashes.get(block.index).map(|&hash| HostKey { hash, group: block.group });
            match key.and_then(|key| self.host.take(&key)) {
                Some(bytes) => delivery.give(block.group, block.index, Box::new(bytes)),
                None => wanted.push(*block),
            }
        }
        sequence.restoring = Some(Box::new(Restoring {
            import,
            missing,
            cell,
            known,
            began: now,
            last_progress: now,
            device_failed: false,
        }));
        plan.fetches.push(Fetching { prefix, wanted, delivery });
        Begun::Fetching
    }

    /// Gives up a fetch.
    pub(crate) fn abort_restore(&mut self, sequence: &mut Sequence) {
        if let Some(restoring) = sequence.restoring.take() {
            self.kv.abort_import(restoring.into_import());
        }
    }

    /// Looks which fetches have ended, and begins their sequences.
    pub(crate) fn settle_restores(&mut self, now: Duration, plan: &mut StepPlan) {
        for slot in 0..self.slots.len() {
            let Some(restoring) = self.slots[slot].as_ref().and_then(|s| s.restoring.as_deref()) else {
                continue;
            };
            let failure = restoring.failure(now, self.config.restore_stall);
            if !restoring.missing.is_empty() && failure.is_none() {
                plan.wake_by(Some(restoring.last_progress + self.config.restore_stall));
                continue;
            }
            // What has arrived whole has arrived, whatever is said afterwards.
            let failure = failure.filter(|_| !restoring.missing.is_empty());
            let Some(mut sequence) = self.slots[slot].take() else { continue };
            match failure {
                None => self.finish_restore(&mut sequence, now, plan),
                Some(failure) => {
                    plan.restore_failures.push(failure.0);
                    self.abort_restore(&mut sequence);
                    sequence.external.blame(failure);
                }
            }
            plan.changed = true;
            if self.try_begin(&mut sequence, now, plan) {
                sequence.note_cached();
                self.slots[slot] = Some(sequence);
            } else {
                self.enqueue(sequence);
            }
        }
    }

    fn finish_restore(&mut self, sequence: &mut Sequence, now: Duration, plan: &mut StepPlan) {
        let Some(restoring) = sequence.restoring.take() else { return };
        let took = now.saturating_sub(restoring.began);
        let tokens = restoring.units().len() - restoring.known;
        plan.restored.push((tokens as u64, took));
        let task = &sequence.task;
        task.restored_tokens.fetch_add(tokens as u32, Ordering::Relaxed);
        task.restore_us.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
        self.kv.finish_import(restoring.into_import());
    }
}

impl External {
    /// Remembers what a fetch failed of, so that the next one does without; after some there is no next.
    fn blame(&mut self, (_, block): Failed) {
        let External::Found { lacking, attempts, .. } = self else { return };
        *attempts += 1;
        let Some(block) = block.filter(|_| *attempts < MOST_ATTEMPTS) else {
            *self = External::None;
            return;
        };
        lacking.push(block);
    }
}
