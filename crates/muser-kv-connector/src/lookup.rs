//! The thread that answers how far a prompt is stored.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use muser_engine::{BlockReceiver, Found, PrefixQuery, RestoreFailure, StoredPrefix};
use muser_kv::{BLOCK_LEN, KvGroup};
use muser_pack::{ChainKey, Plan, Scope, Segment};

use crate::figures::Counters;
use crate::job::FetchJob;
use crate::shared::Shared;

/// Answers until the queue closes.
pub(crate) fn run(shared: &Arc<Shared>) {
    while let Some(query) = shared.queries.take() {
        let began = Instant::now();
        let _ = catch_unwind(AssertUnwindSafe(|| answer(shared, query)));
        Counters::add(&shared.counters.lookups, 1);
        Counters::add(&shared.counters.lookup_us, began.elapsed().as_micros() as u64);
        shared.queries.done();
    }
}

fn answer(shared: &Arc<Shared>, query: PrefixQuery) {
    if !query.is_wanted() {
        return;
    }
    let units = query.units();
    // Another process may have published it.
    shared.library.keep_up();
    let scope = shared.scope_of(query.scope());
    let plan = shared.library.longest(&scope, units, units.len(), false);
    let known = query.known();
    let keys = scope.chain(&units[..units.len() / BLOCK_LEN * BLOCK_LEN]);
    let stored = shared.library.stored(&keys);
    let further = reaches_further(&stored, plan.as_ref().map(|plan| plan.positions), known);
    let found: Found = further.then(|| {
        let prefix: Arc<dyn StoredPrefix> =
            Arc::new(PackedPrefix { shared: Arc::clone(shared), scope, keys, stored, plan });
        prefix
    });
    query.answer(found);
}

/// Whether the store has something beyond the `known` positions that memory has: a full block may be of use together with
/// what memory has, also where the store alone could not resume.
fn reaches_further(stored: &[(bool, bool)], resumable: Option<usize>, known: usize) -> bool {
    stored.iter().skip(known / BLOCK_LEN).any(|(full, _)| *full)
        || resumable.is_some_and(|positions| positions > known)
}

/// A block by group and index.
type Block = (KvGroup, usize);

/// A prompt as far as the store has it.
struct PackedPrefix {
    shared: Arc<Shared>,
    scope: Scope,
    keys: Vec<ChainKey>,
    /// Full and sliding segment of each whole block.
    stored: Vec<(bool, bool)>,
    /// What the store alone offers; it also keeps those segments from being removed.
    plan: Option<Plan>,
}

impl PackedPrefix {
    /// The block in which the store's resume point lies, if it is inside one.
    fn tail_block(&self) -> Option<usize> {
        let plan = self.plan.as_ref()?;
        (!plan.positions.is_multiple_of(BLOCK_LEN)).then_some(plan.positions / BLOCK_LEN)
    }

    /// The segment of the unfinished block at `index`, unless the whole block is stored too: that has the same rows and more, and
    /// is what is meant where a fetch reaches behind the tail.
    fn tail_segment(&self, group: KvGroup, index: usize) -> Option<Segment> {
        let is_tail = self.tail_block() == Some(index) && !self.has(group, index);
        let plan = self.plan.as_ref().filter(|_| is_tail)?;
        plan.segments.iter().find(|segment| segment.group == group && segment.index == index).copied()
    }

    /// The segments of the wanted blocks, and what keeps them from being removed.
    fn segments(&self, wanted: &[Block]) -> Result<(Vec<Segment>, Vec<Plan>), Option<Block>> {
        let (mut segments, mut leases) = (Vec::with_capacity(wanted.len()), Vec::new());
        leases.extend(self.plan.clone());
        for group in [KvGroup::Full, KvGroup::Sliding] {
            let mut blocks: Vec<usize> =
                wanted.iter().filter(|(of, _)| *of == group).map(|(_, index)| *index).collect();
            blocks.sort_unstable();
            if let Some(&last) = blocks.last()
                && let Some(tail) = self.tail_segment(group, last)
            {
                segments.push(tail);
                blocks.pop();
            }
            for run in blocks.chunk_by(|a, b| a + 1 == *b) {
                let range = run[0]..run[0] + run.len();
                let (full, sliding) = match group {
                    KvGroup::Full => (range.clone(), 0..0),
                    KvGroup::Sliding => (0..0, range.clone()),
                };
                let library = &self.shared.library;
                let plan = library.plan(&self.keys, &self.scope, range.end, full, sliding);
                let Some(plan) = plan else { return Err(self.first_gone(group, run)) };
                segments.extend(&plan.segments);
                leases.push(plan);
            }
        }
        Ok((segments, leases))
    }

    fn first_gone(&self, group: KvGroup, run: &[usize]) -> Option<Block> {
        let stored = self.shared.library.stored(&self.keys);
        let there = |index: usize| {
            stored.get(index).is_some_and(|(full, sliding)| match group {
                KvGroup::Full => *full,
                KvGroup::Sliding => *sliding,
            })
        };
        run.iter().find(|&&index| !there(index)).map(|&index| (group, index))
    }
}

impl StoredPrefix for PackedPrefix {
    fn has(&self, group: KvGroup, index: usize) -> bool {
        let (full, sliding) = self.stored.get(index).copied().unwrap_or_default();
        match group {
            KvGroup::Full => full,
            KvGroup::Sliding => sliding,
        }
    }

    fn tail(&self) -> Option<usize> {
        self.tail_block().and(self.plan.as_ref()).map(|plan| plan.positions)
    }

    fn alone(&self) -> usize {
        self.plan.as_ref().map_or(0, |plan| plan.positions)
    }

    fn fetch(&self, wanted: Vec<(KvGroup, usize)>, delivery: BlockReceiver) {
        match self.segments(&wanted) {
            Ok((segments, leases)) => {
                let options = &self.shared.options;
                let bytes = segments.iter().map(|segment| segment.bytes).fold(0, usize::saturating_add);
                if options.restore_bytes.is_some_and(|most| bytes > most) {
                    delivery.fail(RestoreFailure::NoMemory, None);
                    return;
                }
                let job = Arc::new(FetchJob::new(segments, leases, delivery, options.restore_time));
                // One place in the queue for each thread that may help.
                for _ in 0..self.shared.options.fetch_threads.max(1) {
                    drop(self.shared.fetches.push(Arc::clone(&job)));
                }
            }
            Err(gone) => delivery.fail(RestoreFailure::Missing, gone),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_store_is_asked_for_whatever_memory_lacks() {
        const BOTH: (bool, bool) = (true, true);
        const FULL: (bool, bool) = (true, false);
        const SLIDING: (bool, bool) = (false, true);
        const NONE: (bool, bool) = (false, false);
        let check = |stored: &[(bool, bool)], resumable: Option<usize>, known: usize, expected: bool| {
            let found = reaches_further(stored, resumable, known);
            assert_eq!(found, expected, "{stored:?}, resumable at {resumable:?}, {known} known");
        };
        // The block right behind what memory knows, whose sliding rows only memory may have.
        check(&[BOTH, FULL], None, 256, true);
        check(&[BOTH, FULL], Some(256), 256, true);
        check(&[FULL], None, 0, true);
        check(&[FULL, FULL, FULL], None, 512, true);
        // Memory knows a part of it only.
        check(&[BOTH, FULL], None, 511, true);
        check(&[BOTH, FULL], None, 257, true);
        // Behind a block that only memory may have.
        check(&[BOTH, NONE, FULL], None, 256, true);
        // Nothing that memory lacks, or nothing to continue from.
        check(&[BOTH, BOTH], Some(512), 512, false);
        check(&[BOTH, SLIDING], None, 256, false);
        check(&[BOTH, NONE], Some(256), 256, false);
        check(&[], None, 0, false);
        // A resume point inside a block, as exact as it is.
        check(&[BOTH], Some(299), 299, false);
        check(&[BOTH], Some(300), 299, true);
        check(&[], Some(1), 0, true);
    }
}
