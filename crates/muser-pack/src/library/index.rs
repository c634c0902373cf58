//! What is stored, in memory: from chain keys to segments, and who needs which segment.
//!
//! Every operation on a pack costs its own number of blocks times a logarithm at most; nothing walks all packs.

use std::collections::{BTreeSet, HashMap};

use muser_kv::{BLOCK_LEN, KvGroup, PositionKey};

use crate::manifest::{Block, ChainKey, Manifest};
use crate::{PackId, SegmentId};

/// Two packs of one block's place disagree only if arithmetic was not exact; the first one counts then.
#[derive(Debug)]
struct BlockEntry {
    full: SegmentId,
    full_refs: u32,
    sliding: Option<SegmentId>,
    sliding_refs: u32,
    /// The latest pack that has the block.
    pack: PackId,
}

/// An unfinished last block.
#[derive(Debug)]
struct Tail {
    pack: PackId,
    units: Box<[[u8; 8]]>,
    full: SegmentId,
    sliding: SegmentId,
}

#[derive(Debug, Default)]
struct Held {
    refs: u32,
    leases: u32,
    /// Refused or gone: not found until somebody stores it again.
    bad: bool,
}

/// A pack that is in the store and believed.
#[derive(Debug)]
pub(super) struct PackEntry {
    pub(super) pinned: bool,
    pub(super) created_unix_s: u64,
    pub(super) used: u64,
    pub(super) positions: usize,
    /// Plain bytes of its segments.
    pub(super) bytes: u64,
    pub(super) identity: [u8; 32],
    pub(super) tenant: [u8; 16],
    pub(super) root: ChainKey,
    pub(super) blocks: Vec<Block>,
}

#[derive(Debug, Default)]
pub(super) struct Index {
    blocks: HashMap<ChainKey, BlockEntry>,
    /// By the key of the block before.
    tails: HashMap<ChainKey, Vec<Tail>>,
    /// Packs by the key of their last whole block.
    ends: HashMap<ChainKey, Vec<PackId>>,
    packs: HashMap<PackId, PackEntry>,
    segments: HashMap<SegmentId, Held>,
    by_use: BTreeSet<(u64, PackId)>,
    /// Packs by the root of their chain keys (of identity and tenant), for each tenant.
    roots: HashMap<[u8; 16], HashMap<ChainKey, usize>>,
    tick: u64,
}

/// Where a prefix can be resumed.
pub(super) struct Found {
    pub(super) boundary: usize,
    pub(super) first_sliding: usize,
    /// Usable rows of an unfinished block behind the boundary, all its rows, its segments.
    pub(super) tail: Option<(usize, usize, SegmentId, SegmentId)>,
    pub(super) pack: PackId,
}

/// Most unfinished blocks (and most ends) remembered after one block. Older ones are not found any more, which costs
/// the rows of less than one block.
const MAX_SIBLINGS: usize = 64;

impl Index {
    pub(super) fn packs(&self) -> impl Iterator<Item = (PackId, &PackEntry)> {
        self.packs.iter().map(|(id, entry)| (*id, entry))
    }

    pub(super) fn pack(&self, id: PackId) -> Option<&PackEntry> {
        self.packs.get(&id)
    }

    /// Has the tenant the first block of these units, with what its chain key is for `key_of`, under another root?
    pub(super) fn is_under_another_root(
        &self,
        tenant: &[u8; 16],
        root: &ChainKey,
        key_of: impl Fn(ChainKey) -> ChainKey,
    ) -> bool {
        let roots = self.roots.get(tenant).into_iter().flat_map(HashMap::keys);
        roots.filter(|other| *other != root).any(|other| self.blocks.contains_key(&key_of(*other)))
    }

    /// The usable segments of a whole block.
    pub(super) fn block(&self, key: &ChainKey) -> Option<(SegmentId, Option<SegmentId>)> {
        let entry = self.blocks.get(key).filter(|entry| self.knows_segment(entry.full))?;
        Some((entry.full, entry.sliding.filter(|id| self.knows_segment(*id))))
    }

    /// The segments of an unfinished block with exactly these units.
    pub(super) fn tail(&self, before: &ChainKey, units: &[PositionKey]) -> Option<(SegmentId, SegmentId)> {
        let same =
            |tail: &&Tail| tail.units.len() == units.len() && common(&tail.units, units) == units.len();
        let tail = self.tails.get(before)?.iter().find(same)?;
        self.usable(tail).then_some((tail.full, tail.sliding))
    }

    /// Is it there and not known to be bad?
    pub(super) fn knows_segment(&self, id: SegmentId) -> bool {
        self.segments.get(&id).is_some_and(|held| !held.bad)
    }

    /// Does anybody here need it, good or bad?
    pub(super) fn needs_segment(&self, id: SegmentId) -> bool {
        self.segments.contains_key(&id)
    }

    /// A segment turned out to be bad or gone: no lookup finds it until it is stored again.
    pub(super) fn set_bad(&mut self, id: SegmentId) {
        if let Some(held) = self.segments.get_mut(&id) {
            held.bad = true;
        }
    }

    /// Needed segments that `there` does not have.
    pub(super) fn missing(&self, there: impl Fn(SegmentId) -> bool) -> Vec<SegmentId> {
        let needed = self.segments.iter().filter(|(_, held)| held.refs > 0 && !held.bad);
        needed.map(|(id, _)| *id).filter(|id| !there(*id)).collect()
    }

    fn usable(&self, tail: &Tail) -> bool {
        self.knows_segment(tail.full) && self.knows_segment(tail.sliding)
    }

    /// The furthest place at which a prefix with these chain keys can be resumed, at most `most` positions.
    pub(super) fn longest(
        &self,
        root: &ChainKey,
        keys: &[ChainKey],
        units: &[PositionKey],
        most: usize,
        whole_blocks: bool,
        first_sliding: impl Fn(usize) -> usize,
    ) -> Option<Found> {
        let whole = most.min(units.len()) / BLOCK_LEN;
        // For each known block: how many blocks up to and with it have their sliding segment.
        let mut runs: Vec<u32> = Vec::with_capacity(whole);
        for key in &keys[..whole.min(keys.len())] {
            let Some((_, sliding)) = self.block(key) else { break };
            let before = runs.last().copied().unwrap_or(0);
            runs.push(if sliding.is_some() { before + 1 } else { 0 });
        }
        let reaches = |boundary: usize, position: usize| {
            let first = first_sliding(position).min(boundary);
            let run = boundary.checked_sub(1).map_or(0, |last| runs[last] as usize);
            (run >= boundary - first).then_some(first)
        };
        for boundary in (0..=runs.len()).rev() {
            let start = boundary * BLOCK_LEN;
            let before = boundary.checked_sub(1).map_or(*root, |last| keys[last]);
            let rest = &units[start..most.min(units.len())];
            let tails = self.tails.get(&before).filter(|_| !whole_blocks).map_or(&[][..], Vec::as_slice);
            let best = tails
                .iter()
                .map(|tail| (common(&tail.units, rest), tail))
                .filter(|(rows, tail)| *rows > 0 && self.usable(tail))
                .filter_map(|(rows, tail)| Some((rows, reaches(boundary, start + rows)?, tail)))
                .max_by_key(|(rows, ..)| *rows);
            if let Some((rows, first_sliding, tail)) = best {
                let tail_found = Some((rows, tail.units.len(), tail.full, tail.sliding));
                return Some(Found { boundary, first_sliding, tail: tail_found, pack: tail.pack });
            }
            if boundary > 0
                && let Some(first_sliding) = reaches(boundary, start)
            {
                let pack = self.blocks[&keys[boundary - 1]].pack;
                return Some(Found { boundary, first_sliding, tail: None, pack });
            }
        }
        None
    }

    /// The latest pack that has a block.
    pub(super) fn latest_pack(&self, key: &ChainKey) -> Option<PackId> {
        self.blocks.get(key).map(|entry| entry.pack)
    }

    /// A pack was used now.
    pub(super) fn touch(&mut self, id: PackId) {
        self.tick += 1;
        let now = self.tick;
        if let Some(entry) = self.packs.get_mut(&id) {
            self.by_use.remove(&(entry.used, id));
            entry.used = now;
            self.by_use.insert((now, id));
        }
    }

    /// The least recently used pack that may go.
    pub(super) fn oldest(&self) -> Option<PackId> {
        let unpinned = |id: &PackId| self.packs.get(id).is_some_and(|entry| !entry.pinned);
        self.by_use.iter().map(|(_, id)| *id).find(unpinned)
    }

    /// Pinned packs are kept out of the order of eviction.
    pub(super) fn set_pinned(&mut self, id: PackId, pinned: bool) {
        if let Some(entry) = self.packs.get_mut(&id) {
            entry.pinned = pinned;
            self.by_use.remove(&(entry.used, id));
            if !pinned {
                self.by_use.insert((entry.used, id));
            }
        }
    }

    /// Adds a pack; its segments get a reference each.
    pub(super) fn insert(&mut self, id: PackId, manifest: &Manifest, pinned: bool) {
        if self.packs.contains_key(&id) {
            return;
        }
        self.tick += 1;
        let used = self.tick;
        for (_, _, segment) in manifest.segments() {
            let held = self.segments.entry(segment).or_default();
            held.refs += 1;
            // Whoever published it has just stored or read it.
            held.bad = false;
        }
        let whole = manifest.cut() / BLOCK_LEN;
        for block in &manifest.blocks[..whole] {
            let entry = self.blocks.entry(block.key).or_insert_with(|| BlockEntry {
                full: block.full,
                full_refs: 0,
                sliding: block.sliding,
                sliding_refs: 0,
                pack: id,
            });
            entry.pack = id;
            entry.full_refs += u32::from(entry.full == block.full);
            if let Some(sliding) = block.sliding {
                let known = *entry.sliding.get_or_insert(sliding);
                entry.sliding_refs += u32::from(known == sliding);
            }
        }
        let end = whole.checked_sub(1).map_or(manifest.root, |last| manifest.blocks[last].key);
        if let Some(block) = manifest.blocks.get(whole) {
            // Without its sliding rows an unfinished block is of no use.
            if let Some(sliding) = block.sliding {
                let units = manifest.units[whole * BLOCK_LEN..].into();
                let tail = Tail { pack: id, units, full: block.full, sliding };
                push(self.tails.entry(end).or_default(), tail);
            }
        }
        push(self.ends.entry(end).or_default(), id);
        if !pinned {
            self.by_use.insert((used, id));
        }
        let entry = PackEntry {
            pinned,
            created_unix_s: manifest.created_unix_s,
            used,
            positions: manifest.cut(),
            bytes: plain_bytes(manifest),
            identity: manifest.identity.digest(),
            tenant: manifest.tenant,
            root: manifest.root,
            blocks: manifest.blocks.clone(),
        };
        *self.roots.entry(entry.tenant).or_default().entry(entry.root).or_default() += 1;
        self.packs.insert(id, entry);
    }

    fn forget_root(&mut self, entry: &PackEntry) {
        let Some(roots) = self.roots.get_mut(&entry.tenant) else { return };
        if let Some(packs) = roots.get_mut(&entry.root) {
            *packs -= 1;
            if *packs == 0 {
                roots.remove(&entry.root);
            }
        }
        if roots.is_empty() {
            self.roots.remove(&entry.tenant);
        }
    }

    /// Takes a pack out and returns the segments that nobody needs any more.
    pub(super) fn remove(&mut self, id: PackId) -> Vec<SegmentId> {
        let Some(entry) = self.packs.remove(&id) else { return Vec::new() };
        self.forget_root(&entry);
        self.by_use.remove(&(entry.used, id));
        let whole = entry.positions / BLOCK_LEN;
        for block in &entry.blocks[..whole] {
            let Some(known) = self.blocks.get_mut(&block.key) else { continue };
            known.full_refs -= u32::from(known.full == block.full);
            if block.sliding.is_some() && block.sliding == known.sliding {
                known.sliding_refs -= 1;
                if known.sliding_refs == 0 {
                    known.sliding = None;
                }
            }
            if known.full_refs == 0 {
                self.blocks.remove(&block.key);
            }
        }
        let end = whole.checked_sub(1).map_or(entry.root, |last| entry.blocks[last].key);
        retain(&mut self.tails, &end, |tail| tail.pack != id);
        retain(&mut self.ends, &end, |pack| *pack != id);
        let mut unused = Vec::new();
        for block in &entry.blocks {
            for segment in std::iter::once(block.full).chain(block.sliding) {
                let Some(held) = self.segments.get_mut(&segment) else { continue };
                held.refs = held.refs.saturating_sub(1);
                if held.refs == 0 && held.leases == 0 {
                    self.segments.remove(&segment);
                    unused.push(segment);
                }
            }
        }
        unused
    }

    /// Somebody needs a segment now; if he has just stored it, it is good (again).
    pub(super) fn lease(&mut self, id: SegmentId, stored_now: bool) {
        let held = self.segments.entry(id).or_default();
        held.leases += 1;
        held.bad &= !stored_now;
    }

    /// Returns whether the segment's memory may go now.
    pub(super) fn unlease(&mut self, id: SegmentId) -> bool {
        let Some(held) = self.segments.get_mut(&id) else { return false };
        held.leases = held.leases.saturating_sub(1);
        let unused = held.refs == 0 && held.leases == 0;
        if unused {
            self.segments.remove(&id);
        }
        unused
    }

    /// Unpinned packs whose whole content is also in this one.
    pub(super) fn superseded_by(&self, manifest: &Manifest, id: PackId) -> Vec<PackId> {
        let before = std::iter::once(manifest.root).chain(manifest.blocks.iter().map(|block| block.key));
        let mut superseded = Vec::new();
        for key in before {
            for &other in self.ends.get(&key).map_or(&[][..], Vec::as_slice) {
                let Some(entry) = self.packs.get(&other) else { continue };
                if other != id && !entry.pinned && self.contains(manifest, other, entry) {
                    superseded.push(other);
                }
            }
        }
        superseded
    }

    fn contains(&self, manifest: &Manifest, other: PackId, entry: &PackEntry) -> bool {
        let whole = entry.positions / BLOCK_LEN;
        let same = |(old, new): (&Block, &Block)| {
            old.key == new.key
                && old.full == new.full
                && (old.sliding.is_none() || old.sliding == new.sliding)
        };
        if entry.positions > manifest.cut() || entry.identity != manifest.identity.digest() {
            return false;
        }
        if !entry.blocks[..whole].iter().zip(&manifest.blocks).all(same) {
            return false;
        }
        if entry.positions.is_multiple_of(BLOCK_LEN) {
            return true;
        }
        // Its unfinished block went on in ours: then ours has all its rows.
        let end = whole.checked_sub(1).map_or(entry.root, |last| entry.blocks[last].key);
        let tails = self.tails.get(&end).map_or(&[][..], Vec::as_slice);
        let tail = tails.iter().find(|tail| tail.pack == other);
        let ours = manifest.units.get(whole * BLOCK_LEN..).unwrap_or_default();
        let goes_on = |tail: &Tail| ours.len() >= tail.units.len() && ours[..tail.units.len()] == *tail.units;
        tail.is_none_or(goes_on) && manifest.blocks.get(whole).is_some_and(|block| block.sliding.is_some())
    }
}

fn plain_bytes(manifest: &Manifest) -> u64 {
    let representation = &manifest.identity.representation;
    let of = |group| match group {
        KvGroup::Full => u64::from(representation.full_block_bytes),
        KvGroup::Sliding => u64::from(representation.sliding_block_bytes),
    };
    manifest.segments().map(|(group, ..)| of(group)).sum()
}

fn common(stored: &[[u8; 8]], units: &[PositionKey]) -> usize {
    stored.iter().zip(units).take_while(|(a, b)| **a == b.to_le_bytes()).count()
}

fn push<T>(list: &mut Vec<T>, item: T) {
    if list.len() == MAX_SIBLINGS {
        list.remove(0);
    }
    list.push(item);
}

fn retain<T>(map: &mut HashMap<ChainKey, Vec<T>>, key: &ChainKey, keep: impl Fn(&T) -> bool) {
    if let Some(list) = map.get_mut(key) {
        list.retain(keep);
        if list.is_empty() {
            map.remove(key);
        }
    }
}

#[cfg(test)]
mod tests;
