//! Who has which KV blocks: the cache's bookkeeping, the host tier behind it, and what is held for export.
//!
//! Nothing here touches a byte: what is to happen to bytes is said in [`BlockMove`]s, and the step does it in that order.
//! A sequence's [`Blocks`] change their state here and nowhere else, so no path forgets to give blocks back.

mod host_tier;
mod pins;

use std::{sync::atomic::Ordering, time::Duration};

pub(crate) use host_tier::HostTier;
use muser_kv::{
    BLOCK_LEN, BlockCopy, BlockId, CacheScope, Evicted, HostKey, KvCache, KvGroup, KvSeq, KvStats,
    PositionKey,
};
use pins::Pins;

use crate::{
    prefix::{BlockReceiver, Fetching, FoundPrefix, PrefixQuery, QueryTerms, Restoring, StoreLookup},
    sequence::{Blocks, Sequence},
    slots::Slots,
};

/// Something that happens to a block's bytes before the step.
pub(crate) enum BlockMove {
    /// To another block.
    Copy(BlockCopy),
    /// Out to host memory, since its place is about to be taken.
    Spill(Evicted),
    /// Back from host memory.
    Restore(KvGroup, BlockId, Box<[u8]>),
}

/// Figures that do not change.
#[derive(Clone, Debug)]
pub(crate) struct MemoryConfig {
    /// Most positions of a sequence, by context and by memory.
    pub(crate) most_positions: usize,
    /// Rows of the largest step: tables have room for them.
    pub(crate) max_rows: usize,
    pub(crate) sliding_per_sequence: usize,
    /// Positions beyond the prompt that must have memory at admission.
    pub(crate) lookahead: usize,
}

/// How an attempt to begin a fetch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// There is nothing worth fetching.
    Nothing,
    /// Under way.
    Fetching,
    /// There is no memory now.
    NoMemory,
}

/// What a fetch has brought.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Brought {
    pub(crate) positions: usize,
    /// Of these, computed by a peer.
    pub(crate) handed: usize,
    pub(crate) took: Duration,
}

/// The blocks and who has them.
pub(crate) struct Memory {
    kv: KvCache,
    host: HostTier,
    holds: Pins,
    pub(crate) config: MemoryConfig,
    copies: Vec<BlockCopy>,
}

impl Memory {
    pub(crate) fn new(mut kv: KvCache, host: HostTier, config: MemoryConfig) -> Self {
        if host.is_enabled() {
            kv.record_evictions();
        }
        Self { kv, host, holds: Pins::default(), config, copies: Vec::new() }
    }

    pub(crate) fn stats(&self) -> KvStats {
        self.kv.stats()
    }

    pub(crate) fn host_bytes_held(&self) -> usize {
        self.host.held_bytes()
    }

    /// What an admission depends on: while it does not change there is no use in trying again.
    pub(crate) fn state(&self) -> [u32; 4] {
        let stats = self.kv.stats();
        [stats.full.free, stats.full.cached, stats.sliding.free, stats.sliding.cached]
    }

    /// Positions of a prefix that need not be computed.
    pub(crate) fn known(&self, scope: CacheScope, units: &[PositionKey]) -> usize {
        self.kv.known(scope, units, units.len())
    }

    /// Rows of a sequence have been computed.
    pub(crate) fn commit(&mut self, kv: &mut KvSeq, units: &[PositionKey]) {
        self.kv.commit(kv, units);
    }

    /// Requests may want to resume where the sequence is now.
    pub(crate) fn mark_resume(&mut self, kv: &mut KvSeq) {
        self.kv.mark_resume(kv);
    }

    /// A block has left the device.
    pub(crate) fn put_into_host(&mut self, key: HostKey, bytes: Box<[u8]>) {
        self.host.put(key, bytes);
    }

    /// Forgets all prefixes that nobody is using.
    pub(crate) fn forget(&mut self) {
        self.kv.clear();
        // What they held goes nowhere.
        self.kv.take_evicted().for_each(drop);
    }

    /// Gives a sequence its known blocks if after that there is memory for what it and all that run are promised.
    pub(crate) fn begin(
        &mut self,
        sequence: &mut Sequence,
        slots: &Slots,
        moves: &mut Vec<BlockMove>,
    ) -> bool {
        let (scope, cache) = (sequence.task.scope, sequence.task.cache);
        let text = &sequence.text;
        let max_reuse = if cache { reusable(sequence) } else { 0 };
        let most = self.config.most_positions.max(text.len());
        let capacity = text.capacity().min(most) + self.config.max_rows;
        if self.host.is_enabled() {
            self.restore(scope, &text.units()[..max_reuse], moves);
        }
        let mut copies = std::mem::take(&mut self.copies);
        let kv = self.kv.begin(scope, text.units(), max_reuse, capacity, cache, &mut copies);
        self.note_evictions(moves);
        // Any move of this plan may have been for its blocks, also one made for a request before it.
        let copies_pending = !copies.is_empty() || !moves.is_empty();
        sequence.blocks = Blocks::Live { kv, copies_pending };
        let fits = self.fits(sequence, slots);
        if fits {
            moves.extend(copies.drain(..).map(BlockMove::Copy));
        } else if let Blocks::Live { kv, .. } = std::mem::take(&mut sequence.blocks) {
            if copies.is_empty() {
                self.kv.release(kv);
            } else {
                self.kv.release_broken(kv);
            }
        }
        copies.clear();
        self.copies = copies;
        fits
    }

    /// Takes a sequence's blocks back; a fetch is given up.
    pub(crate) fn give_back(&mut self, sequence: &mut Sequence) {
        match std::mem::take(&mut sequence.blocks) {
            Blocks::None => {}
            Blocks::Fetching(restoring) => self.kv.abort_import(restoring.into_import()),
            Blocks::Live { kv, copies_pending: true } => self.kv.release_broken(kv),
            Blocks::Live { kv, copies_pending: false } => self.kv.release(kv),
        }
        sequence.draft.leave_blocks();
    }

    /// Memory for the rows of a sequence up to `end`.
    pub(crate) fn reserve(&mut self, kv: &mut KvSeq, end: usize, moves: &mut Vec<BlockMove>) -> bool {
        let reserved = self.kv.reserve(kv, end).is_ok();
        self.note_evictions(moves);
        reserved
    }

    /// Is there memory for what a sequence about to run and all running ones are promised? What is held for export gives
    /// way.
    pub(crate) fn fits(&mut self, sequence: &Sequence, slots: &Slots) -> bool {
        let (mut full, mut sliding) = self.outstanding(sequence);
        for other in slots.running() {
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

    /// Blocks of both groups that a sequence is promised beyond those it holds.
    fn outstanding(&self, sequence: &Sequence) -> (usize, usize) {
        let (has_full, has_sliding) = match &sequence.blocks {
            Blocks::None => return (0, 0),
            Blocks::Fetching(restoring) => restoring.held_blocks(),
            Blocks::Live { kv, .. } => (kv.full().len(), kv.sliding().len()),
        };
        let ahead = sequence.tokens_left().min(self.config.lookahead);
        let positions = (sequence.text.len() + ahead).min(self.config.most_positions);
        let blocks = positions.div_ceil(BLOCK_LEN);
        let most_sliding = self.config.sliding_per_sequence.min(blocks);
        (blocks.saturating_sub(has_full), most_sliding.saturating_sub(has_sliding))
    }

    /// Brings back what host memory has of a prefix, if that lets a sequence resume further along.
    fn restore(&mut self, scope: CacheScope, units: &[PositionKey], moves: &mut Vec<BlockMove>) {
        let hashes = self.kv.chain_hashes(scope, units);
        let in_host = |group, index: usize| self.host.contains(&HostKey { hash: hashes[index], group });
        let boundary = self.kv.resumable_with(scope, units, hashes.len(), in_host);
        if boundary * BLOCK_LEN <= self.known(scope, units) {
            return;
        }
        let Ok(import) = self.kv.begin_import(scope, units, boundary) else { return };
        self.note_evictions(moves);
        let mut brought = Vec::new();
        for wanted in import.blocks() {
            let key = HostKey { hash: hashes[wanted.index], group: wanted.group };
            let Some(bytes) = self.host.take(&key) else { break };
            brought.push(BlockMove::Restore(wanted.group, wanted.block, bytes));
        }
        if brought.len() == import.blocks().count() {
            moves.append(&mut brought);
            self.kv.finish_import(import);
        } else {
            self.kv.abort_import(import);
        }
    }

    /// What has just been evicted goes to host memory before anything else happens to its block.
    fn note_evictions(&mut self, moves: &mut Vec<BlockMove>) {
        moves.extend(self.kv.take_evicted().map(BlockMove::Spill));
    }
}

/// Prefixes on their way out.
impl Memory {
    /// The sequence's blocks are held from now on, with `tail` the unfinished one too; `None` if it has none. Of each block:
    /// is its sliding part held, too? Without `windows` none is: that would keep what the window has left.
    pub(crate) fn pin(&mut self, sequence: &Sequence, tail: bool, windows: bool) -> Option<(u64, Vec<bool>)> {
        let mut held = self.kv.pin_sequence(sequence.blocks.kv()?, tail);
        if !windows {
            self.kv.unpin_sliding(&mut held);
        }
        if held.blocks.is_empty() {
            return None;
        }
        let sliding = held.blocks.iter().map(|block| block.sliding.is_some()).collect();
        Some((self.holds.put(held), sliding))
    }

    /// A block of a held prefix.
    pub(crate) fn held_block(&self, hold: u64, group: KvGroup, index: usize) -> Option<BlockId> {
        let block = self.holds.get(hold)?.blocks.get(index)?;
        match group {
            KvGroup::Full => Some(block.full),
            KvGroup::Sliding => block.sliding,
        }
    }

    pub(crate) fn unpin(&mut self, hold: u64) {
        if let Some(held) = self.holds.take(hold) {
            self.kv.unpin(held);
        }
    }

    /// Sequences need the memory: what waits to be copied out may be evicted. `false` if nothing was held.
    pub(crate) fn let_all_go(&mut self) -> bool {
        let mut any = false;
        while let Some(held) = self.holds.take_oldest() {
            self.kv.unpin(held);
            any = true;
        }
        any
    }
}

/// Positions of a sequence that need not be computed, wherever they come from: the last one must be.
fn reusable(sequence: &Sequence) -> usize {
    (sequence.text.len() - 1).min(sequence.task.most_reused)
}

/// Prefixes on their way in.
impl Memory {
    /// Makes the question that a new sequence has for the source, unless memory knows as much as a source could.
    pub(crate) fn query(
        &self,
        sequence: &mut Sequence,
        terms: QueryTerms,
        until: Duration,
    ) -> Option<PrefixQuery> {
        let units = &sequence.text.units()[..reusable(sequence)];
        if !sequence.task.cache || units.len() < BLOCK_LEN {
            return None;
        }
        let scope = sequence.task.scope;
        let known = self.known(scope, units);
        if known == units.len() {
            return None;
        }
        let (query, cell) = PrefixQuery::new(scope, units.into(), known, terms);
        sequence.stored = StoreLookup::Asked { cell, until };
        Some(query)
    }

    /// Begins to fetch what the source has of the sequence's prompt, if that lets it resume further along.
    pub(crate) fn begin_fetch(
        &mut self,
        sequence: &mut Sequence,
        now: Duration,
        moves: &mut Vec<BlockMove>,
        fetches: &mut Vec<Fetching>,
    ) -> Begun {
        let Some(found) = sequence.stored.found() else { return Begun::Nothing };
        let units = &sequence.text.units()[..reusable(sequence)];
        let scope = sequence.task.scope;
        let hashes = if self.host.is_enabled() { self.kv.chain_hashes(scope, units) } else { Vec::new() };
        let in_host = |group, index: usize| {
            hashes.get(index).is_some_and(|&hash| self.host.contains(&HostKey { hash, group }))
        };
        let there = |group, index| in_host(group, index) || found.has(group, index);
        let known = self.known(scope, units);
        let stage = found.prefix.stop_after(known).filter(|&stage| stage < units.len());
        let staged = stage.map(|stage| self.end_of_fetch(scope, &units[..stage], found, &there));
        let end = match staged.filter(|&end| end > known) {
            Some(end) => end,
            None => self.end_of_fetch(scope, units, found, &there),
        };
        if end <= known {
            return Begun::Nothing;
        }
        let Ok(import) = self.kv.begin_import_of(scope, &units[..end]) else { return Begun::NoMemory };
        let prefix = std::sync::Arc::clone(&found.prefix);
        self.note_evictions(moves);
        let (delivery, cell) = BlockReceiver::new(import.blocks().count());
        let restoring = Restoring::new(import, cell, known, now);
        let mut wanted = Vec::with_capacity(restoring.missing().len());
        for block in restoring.missing() {
            let key = hashes.get(block.index).map(|&hash| HostKey { hash, group: block.group });
            match key.and_then(|key| self.host.take(&key)) {
                Some(bytes) => delivery.give(block.group, block.index, Box::new(bytes)),
                None => wanted.push(*block),
            }
        }
        sequence.blocks = Blocks::Fetching(Box::new(restoring));
        fetches.push(Fetching { prefix, wanted, delivery });
        Begun::Fetching
    }

    /// How far of `units` could be resumed at with what is `there` besides what memory has.
    fn end_of_fetch(
        &self,
        scope: CacheScope,
        units: &[PositionKey],
        found: &FoundPrefix,
        there: &dyn Fn(KvGroup, usize) -> bool,
    ) -> usize {
        let end = self.kv.resumable_with(scope, units, units.len() / BLOCK_LEN, there) * BLOCK_LEN;
        let Some(tail) = found.prefix.tail().filter(|&tail| end < tail && tail <= units.len()) else {
            return end;
        };
        let last = tail / BLOCK_LEN;
        let tail_is_there =
            [KvGroup::Full, KvGroup::Sliding].iter().all(|&group| !found.is_excluded(group, last));
        let there = |group, index| index == last || there(group, index);
        if tail_is_there && self.kv.reachable_with(scope, units, tail, there) { tail } else { end }
    }

    /// A fetch has brought everything: its prefix becomes known.
    pub(crate) fn finish_fetch(&mut self, sequence: &mut Sequence, now: Duration) -> Option<Brought> {
        let Blocks::Fetching(mut restoring) = std::mem::take(&mut sequence.blocks) else { return None };
        let (positions, took) = (restoring.brings(), now.saturating_sub(restoring.began()));
        let task = &sequence.task;
        task.restored_tokens.fetch_add(positions as u32, Ordering::Relaxed);
        let handed = if restoring.cell.is_handed() { positions } else { 0 };
        task.handed_tokens.fetch_add(handed as u32, Ordering::Relaxed);
        task.restore_us.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
        self.kv.finish_import(restoring.take_imported());
        // Only now is the source told.
        drop(restoring);
        Some(Brought { positions, handed, took })
    }
}
