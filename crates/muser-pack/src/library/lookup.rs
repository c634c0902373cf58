//! Lookup: the furthest place at which a prefix can be resumed.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use muser_kv::{BLOCK_LEN, KvGroup, PositionKey};

use super::{Lease, Library, Scope, Segment};
use crate::counters::add;
use crate::manifest::chain;
use crate::{PackError, PackId, Refusal, SegmentId};

/// What to fetch to resume a prefix. While it lives, nothing of it is removed by this process, and no process collects
/// garbage.
#[derive(Clone)]
pub struct Plan {
    /// Where the sequence resumes.
    pub positions: usize,
    /// Full segments from position 0 on, then the sliding ones that the window reaches, ascending; a segment of an
    /// unfinished block is the last of its group. Rows of it from `positions` on are not to be used.
    pub segments: Vec<Segment>,
    /// The pack that was found.
    pub pack: PackId,
    _lease: Arc<Lease>,
}

impl Plan {
    /// Whole blocks that are resumed; [`Plan::positions`] is beyond them if an unfinished block is used.
    pub fn boundary(&self) -> usize {
        self.positions / BLOCK_LEN
    }

    /// Bytes of all segments.
    pub fn bytes(&self) -> usize {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plan")
            .field("positions", &self.positions)
            .field("segments", &self.segments.len())
            .finish()
    }
}

impl Library {
    /// The furthest place, at most `most` positions, at which the prefix can be resumed: all its full segments and the
    /// sliding ones that the window reaches are stored. `None`: nowhere.
    ///
    /// To have logits at least one row must be computed: pass at most the prompt's length less one. With `whole_blocks`
    /// only block boundaries count.
    pub fn longest(
        &self,
        scope: &Scope,
        units: &[PositionKey],
        most: usize,
        whole_blocks: bool,
    ) -> Option<Plan> {
        let most = if whole_blocks { most.min(units.len()) / BLOCK_LEN * BLOCK_LEN } else { most };
        let most = most.min(units.len());
        let keys = scope.chain(&units[..most]);
        self.shared.counters.lookups.fetch_add(1, Relaxed);
        let mut lease = match Lease::new(&self.shared) {
            Ok(lease) => lease?,
            Err(error) => {
                self.shared.counters.failed(error);
                return None;
            }
        };
        let mut index = self.shared.index();
        let first = |position| scope.first_sliding_block(position);
        let found = index.longest(&scope.root, &keys, &units[..most], most, whole_blocks, first);
        let Some(found) = found else {
            let first = &units[..units.len().min(BLOCK_LEN)];
            let key_of = |root| chain(&scope.tenant.prefix, root, first)[0];
            let unlike = first.len() == BLOCK_LEN
                && index.is_under_another_root(scope.tenant_id(), &scope.root, key_of);
            add(&self.shared.counters.unlike, u64::from(unlike));
            // The lease is dropped without the lock that its drop takes.
            drop(index);
            return None;
        };
        let segment = |group, index, positions, id: SegmentId| Segment {
            group,
            index,
            positions,
            id,
            bytes: scope.block_bytes(group),
        };
        let blocks: Vec<_> = keys[..found.boundary].iter().map(|key| index.block(key)).collect();
        let mut segments = Vec::with_capacity(2 + 2 * found.boundary);
        for (i, block) in blocks.iter().enumerate() {
            let (full, _) = (*block)?;
            segments.push(segment(KvGroup::Full, i, BLOCK_LEN, full));
        }
        if let Some((_, stored, full, _)) = found.tail {
            segments.push(segment(KvGroup::Full, found.boundary, stored, full));
        }
        for (i, block) in blocks.iter().enumerate().skip(found.first_sliding) {
            let sliding = (*block)?.1?;
            segments.push(segment(KvGroup::Sliding, i, BLOCK_LEN, sliding));
        }
        if let Some((_, stored, _, sliding)) = found.tail {
            segments.push(segment(KvGroup::Sliding, found.boundary, stored, sliding));
        }
        for segment in &segments {
            lease.add(&mut index, segment.id, false);
        }
        let positions = found.boundary * BLOCK_LEN + found.tail.map_or(0, |(rows, ..)| rows);
        index.touch(found.pack);
        drop(index);
        self.shared.store.touch(&found.pack.object());
        add(&self.shared.counters.hits, 1);
        add(&self.shared.counters.hit_positions, positions as u64);
        Some(Plan { positions, segments, pack: found.pack, _lease: Arc::new(lease) })
    }

    /// For each whole block of a prefix, by chain key from [`Scope::chain`]: are its full and its sliding segment
    /// stored? For callers that have some blocks elsewhere; nothing is leased.
    pub fn stored(&self, keys: &[crate::ChainKey]) -> Vec<(bool, bool)> {
        let index = self.shared.index();
        let of = |key| index.block(key).map_or((false, false), |(_, sliding)| (true, sliding.is_some()));
        keys.iter().map(of).collect()
    }

    /// The prefix of a pack and the plan to resume at its furthest place, for a caller that has only the pack's name.
    ///
    /// # Errors
    /// [`Refusal::ForeignModel`] if the pack was computed under another identity or for another tenant.
    pub fn plan_of(&self, scope: &Scope, id: PackId) -> Result<(Vec<PositionKey>, Plan), PackError> {
        let (manifest, _) = self.shared.read_visible(&self.writer(), id)?;
        let refuse = |reason| self.shared.counters.failed(PackError::refused(id.object(), reason));
        if let Some(field) = manifest.identity.first_difference(&scope.identity) {
            return Err(refuse(Refusal::ForeignModel { field }));
        }
        if manifest.tenant != scope.tenant.id {
            return Err(refuse(Refusal::ForeignModel { field: "tenant" }));
        }
        let units: Vec<PositionKey> =
            manifest.units.iter().map(|unit| PositionKey::from_le_bytes(*unit)).collect();
        let plan = self.longest(scope, &units, units.len(), false);
        plan.map(|plan| (units, plan)).ok_or_else(|| refuse(Refusal::MissingSegment))
    }

    /// A plan of the caller's choice: the full segments `full` and the sliding segments `sliding` (block ranges) of a
    /// prefix, resuming at block `boundary`. `None` if one is not stored (any more).
    pub fn plan(
        &self,
        keys: &[crate::ChainKey],
        scope: &Scope,
        boundary: usize,
        full: std::ops::Range<usize>,
        sliding: std::ops::Range<usize>,
    ) -> Option<Plan> {
        let mut lease = match Lease::new(&self.shared) {
            Ok(lease) => lease?,
            Err(error) => {
                self.shared.counters.failed(error);
                return None;
            }
        };
        let mut index = self.shared.index();
        let mut segments = Vec::with_capacity(full.len() + sliding.len());
        let mut complete = true;
        let ranges = [(KvGroup::Full, full), (KvGroup::Sliding, sliding)];
        for (group, i) in ranges.into_iter().flat_map(|(group, range)| range.map(move |i| (group, i))) {
            let block = keys.get(i).and_then(|key| index.block(key));
            let id = match group {
                KvGroup::Full => block.map(|(full, _)| full),
                KvGroup::Sliding => block.and_then(|(_, sliding)| sliding),
            };
            let Some(id) = id else {
                complete = false;
                break;
            };
            segments.push(Segment {
                group,
                index: i,
                positions: BLOCK_LEN,
                id,
                bytes: scope.block_bytes(group),
            });
        }
        let pack = boundary.checked_sub(1).and_then(|last| index.latest_pack(keys.get(last)?));
        if let (true, Some(pack)) = (complete, pack) {
            for segment in &segments {
                lease.add(&mut index, segment.id, false);
            }
            index.touch(pack);
            drop(index);
            self.shared.store.touch(&pack.object());
            return Some(Plan { positions: boundary * BLOCK_LEN, segments, pack, _lease: Arc::new(lease) });
        }
        // The lease is dropped without the lock that its drop takes.
        drop(index);
        None
    }
}
