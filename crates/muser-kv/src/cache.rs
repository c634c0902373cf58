//! Pools and prefix tree together: begin, reserve, commit, release.

use crate::{
    BLOCK_LEN, BlockHash, BlockId, CacheScope, KvError, KvGroup, KvSeq, PositionKey, pool::Pool, tree::Tree,
};

/// Sizes and identity of a cache.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Blocks of the full group.
    pub full_blocks: u32,
    /// Blocks of the sliding group.
    pub sliding_blocks: u32,
    /// Keys that a sliding layer sees, the query's own included.
    pub window: usize,
    /// Positions behind the window that a live sequence keeps nevertheless.
    pub slack: usize,
    /// Shortest part of a block worth a copy (positions).
    pub min_copy: usize,
    /// Salts every hash: model fingerprint, tokenizer, KV type, numeric route.
    pub identity: Vec<u8>,
}

/// A copy to make before the next step: block `to` gets the content of block `from`. Copies are made in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Group of both.
    pub group: KvGroup,
    /// Source.
    pub from: BlockId,
    /// Destination.
    pub to: BlockId,
}

/// Block counts of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// All.
    pub total: u32,
    /// In use by sequences.
    pub used: u32,
    /// Unused, kept for reuse, evictable.
    pub cached: u32,
    /// Without content.
    pub free: u32,
}

/// Block counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Full group.
    pub full: GroupStats,
    /// Sliding group.
    pub sliding: GroupStats,
    /// Cached blocks dropped to make room, ever.
    pub evicted: u64,
}

/// The bookkeeping of all KV blocks of an engine.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) window: usize,
    slack: usize,
    min_copy: usize,
    pub(crate) full: Pool,
    pub(crate) sliding: Pool,
    pub(crate) tree: Tree,
    /// For each sliding block that the tree knows: the full block whose node names it.
    pub(crate) sliding_owner: Vec<BlockId>,
    pub(crate) tick: u64,
    pub(crate) evicted: u64,
    /// Full blocks' worth of content that lost its memory since [`KvCache::take_evicted`], if anyone wants to know.
    pub(crate) evictions: Option<Vec<Evicted>>,
}

/// What the content of a block is, wherever its bytes are kept: its place in the hash chain and its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostKey {
    /// Chain hash of the block.
    pub hash: BlockHash,
    /// Which group's rows.
    pub group: KvGroup,
}

/// Content that has lost its memory. Until the block is written again its bytes are still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// What it was.
    pub key: HostKey,
    /// Where it still is.
    pub block: BlockId,
}

/// Where a new sequence can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Resume {
    at: usize,
    /// Block to go on inside, unless `at` is a boundary.
    inside: Option<BlockId>,
}

impl KvCache {
    /// An empty cache.
    pub fn new(config: &CacheConfig) -> Self {
        Self {
            window: config.window.max(1),
            slack: config.slack,
            min_copy: config.min_copy.max(1),
            full: Pool::new(config.full_blocks),
            sliding: Pool::new(config.sliding_blocks),
            tree: Tree::new(config.full_blocks, &config.identity),
            sliding_owner: vec![BlockId(0); config.sliding_blocks as usize],
            tick: 0,
            evicted: 0,
            evictions: None,
        }
    }

    /// First block of the sliding group that a row at `position` reads.
    pub fn first_sliding_block(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window) / BLOCK_LEN
    }

    /// Blocks that could be handed out now: free ones and evictable ones.
    pub fn available(&self, group: KvGroup) -> u32 {
        let pool = self.pool(group);
        pool.free() + pool.cached()
    }

    /// Block counts.
    pub fn stats(&self) -> KvStats {
        let of = |pool: &Pool| GroupStats {
            total: pool.total(),
            used: pool.used(),
            cached: pool.cached(),
            free: pool.free(),
        };
        KvStats { full: of(&self.full), sliding: of(&self.sliding), evicted: self.evicted }
    }

    /// Keeps a list of what is evicted from now on.
    pub fn record_evictions(&mut self) {
        let most = self.full.total() as usize + self.sliding.total() as usize;
        self.evictions.get_or_insert_with(|| Vec::with_capacity(most));
    }

    /// Empties the list of evictions, oldest first. Only content of whole blocks is in it: the rest has no hash.
    pub fn take_evicted(&mut self) -> impl Iterator<Item = Evicted> + '_ {
        self.evictions.iter_mut().flat_map(|evictions| evictions.drain(..))
    }

    /// Hashes of the whole blocks of a prefix.
    pub fn chain_hashes(&self, scope: CacheScope, units: &[PositionKey]) -> Vec<BlockHash> {
        let mut before = self.tree.root(scope);
        let hashes = units.chunks_exact(BLOCK_LEN).map(|block| {
            before = self.tree.hash_after(&before, block);
            before
        });
        hashes.collect()
    }

    /// How far a prompt could be resumed, in blocks of its first `blocks`, if the blocks that `elsewhere` has (by group and
    /// index) were here too.
    pub fn resumable_with(
        &self,
        scope: CacheScope,
        units: &[PositionKey],
        blocks: usize,
        elsewhere: impl Fn(KvGroup, usize) -> bool,
    ) -> usize {
        let path = self.walk(scope, units, blocks * BLOCK_LEN);
        let full = (path.len()..blocks).find(|&index| !elsewhere(KvGroup::Full, index)).unwrap_or(blocks);
        let window_is_there = |&boundary: &usize| {
            let first = self.first_sliding_block(boundary * BLOCK_LEN).min(boundary);
            (first..boundary).rev().all(|index| {
                let here = path.get(index).is_some_and(|&block| self.tree.sliding(block).is_some());
                here || elsewhere(KvGroup::Sliding, index)
            })
        };
        (0..=full).rev().find(window_is_there).unwrap_or(0)
    }

    /// Can a row at `position` be computed if `elsewhere`'s blocks were here too? Needs every full block before it and the
    /// sliding blocks of its window, the unfinished block at the end included.
    pub fn reachable_with(
        &self,
        scope: CacheScope,
        units: &[PositionKey],
        position: usize,
        elsewhere: impl Fn(KvGroup, usize) -> bool,
    ) -> bool {
        let whole = position / BLOCK_LEN;
        let blocks = position.div_ceil(BLOCK_LEN);
        let path = self.walk(scope, units, whole * BLOCK_LEN);
        let first = self.first_sliding_block(position).min(blocks);
        (path.len()..blocks).all(|index| elsewhere(KvGroup::Full, index))
            && (first..blocks).all(|index| {
                let here = path.get(index).is_some_and(|&block| self.tree.sliding(block).is_some());
                here || elsewhere(KvGroup::Sliding, index)
            })
    }

    /// How far a prompt is known: the length that [`KvCache::begin`] would reuse now.
    pub fn known(&self, scope: CacheScope, units: &[PositionKey], max_reuse: usize) -> usize {
        let path = self.walk(scope, units, max_reuse);
        self.find_resume(scope, &path, units, max_reuse).at
    }

    /// Starts a sequence of `scope` whose input begins with `units`, reusing at most `max_reuse` positions of them.
    ///
    /// `capacity` is the number of positions the sequence may ever have, so that its tables never grow. With `publish`
    /// its blocks become known to others. Copies that must be made before its first row is computed are appended to
    /// `copies`; the sources may be overwritten by the step after that.
    ///
    /// To have logits, at least one row must be computed: pass at most the prompt's length less one.
    pub fn begin(
        &mut self,
        scope: CacheScope,
        units: &[PositionKey],
        max_reuse: usize,
        capacity: usize,
        publish: bool,
        copies: &mut Vec<BlockCopy>,
    ) -> KvSeq {
        self.tick += 1;
        let path = self.walk(scope, units, max_reuse);
        let resume = self.find_resume(scope, &path, units, max_reuse);
        let boundary = resume.at / BLOCK_LEN;
        let mut seq = KvSeq {
            full: Vec::with_capacity(capacity.div_ceil(BLOCK_LEN) + 1),
            sliding: Vec::with_capacity(self.window.div_ceil(BLOCK_LEN) + 8),
            sliding_first: self.first_sliding_block(resume.at).min(boundary),
            len: boundary * BLOCK_LEN,
            publish,
            scope,
        };
        for (i, &block) in path[..boundary].iter().enumerate() {
            self.full.add_ref(block);
            self.tree.touch(block, self.tick);
            seq.full.push(block);
            if i >= seq.sliding_first {
                let sliding = self.tree.sliding(block).expect("find_resume checked the window's blocks");
                self.sliding.add_ref(sliding);
                seq.sliding.push(sliding);
            }
        }
        if let Some(source) = resume.inside {
            let rows = resume.at % BLOCK_LEN;
            if publish && self.can_take_over(source, rows) {
                self.take_over(&mut seq, source);
            } else {
                self.copy_rows(&mut seq, source, rows, copies);
            }
        }
        seq
    }

    /// Makes sure that rows up to `end` (exclusive) have blocks. On failure what was got stays with the sequence.
    pub fn reserve(&mut self, seq: &mut KvSeq, end: usize) -> Result<(), KvError> {
        let blocks = end.div_ceil(BLOCK_LEN);
        while seq.sliding_first + seq.sliding.len() < blocks {
            let block = self.allocate(KvGroup::Sliding)?;
            seq.sliding.push(block);
        }
        while seq.full.len() < blocks {
            let block = self.allocate(KvGroup::Full)?;
            seq.full.push(block);
        }
        Ok(())
    }

    /// The rows at `seq.len() ..` have been computed with these inputs and are final: they become part of the prefix.
    /// Sliding blocks that no later row reads are given back.
    pub fn commit(&mut self, seq: &mut KvSeq, units: &[PositionKey]) {
        for &unit in units {
            let index = seq.len / BLOCK_LEN;
            seq.len += 1;
            if !seq.publish {
                continue;
            }
            let block = seq.full[index];
            if !self.tree.contains(block) {
                let parent = index.checked_sub(1).map(|i| seq.full[i]);
                self.publish(block, parent, Some(seq.sliding[index - seq.sliding_first]), seq.scope);
            }
            if self.tree.push(block, unit) == BLOCK_LEN {
                self.merge_duplicate(seq, index);
            }
        }
        self.leave_window(seq);
    }

    /// Marks the sequence's end as a place where later requests are likely to resume (the end of a prompt): its window
    /// is evicted last.
    pub fn mark_resume(&mut self, seq: &KvSeq) {
        if seq.publish && seq.len > 0 {
            self.tree.set_hint(seq.full[(seq.len - 1) / BLOCK_LEN]);
        }
    }

    /// Ends a sequence. What it published stays known until its memory is needed.
    pub fn release(&mut self, seq: KvSeq) {
        self.tick += 1;
        for block in seq.sliding {
            self.sliding.drop_ref(block);
        }
        for block in seq.full {
            if self.tree.contains(block) {
                self.tree.touch(block, self.tick);
            }
            self.full.drop_ref(block);
        }
    }

    /// Ends a sequence whose unfinished last block has undefined content (a copy into it failed): that block is
    /// forgotten, everything before it is good.
    pub fn release_broken(&mut self, seq: KvSeq) {
        if seq.publish && !seq.len.is_multiple_of(BLOCK_LEN) {
            let block = seq.full[seq.len / BLOCK_LEN];
            if self.tree.contains(block) && self.tree.child_count(block) == 0 {
                self.forget(block);
            }
        }
        self.release(seq);
    }

    /// Forgets everything that no sequence uses.
    pub fn clear(&mut self) {
        while self.evict_full() {}
        while self.evict_sliding() {}
    }

    pub(crate) fn pool(&self, group: KvGroup) -> &Pool {
        match group {
            KvGroup::Full => &self.full,
            KvGroup::Sliding => &self.sliding,
        }
    }

    /// A block with one reference, from the free list or by evicting.
    pub(crate) fn allocate(&mut self, group: KvGroup) -> Result<BlockId, KvError> {
        let taken = match group {
            KvGroup::Full => {
                if self.full.free() == 0 {
                    self.evict_full();
                }
                self.full.take()
            }
            KvGroup::Sliding => {
                if self.sliding.free() == 0 {
                    self.evict_sliding();
                }
                self.sliding.take()
            }
        };
        taken.ok_or(KvError::OutOfBlocks { group, total: self.pool(group).total() })
    }

    /// Known full blocks of the prefix, at most up to `max_reuse` positions.
    pub(crate) fn walk(&self, scope: CacheScope, units: &[PositionKey], max_reuse: usize) -> Vec<BlockId> {
        let mut path = Vec::new();
        let mut before = self.tree.root(scope);
        for block in units[..max_reuse.min(units.len())].chunks_exact(BLOCK_LEN) {
            let parent = path.last().copied();
            before = self.tree.hash_after(&before, block);
            match self.tree.find_full(parent, &before, None) {
                Some(found) => path.push(found),
                None => break,
            }
        }
        path
    }

    /// Do the sliding blocks exist that a row at `at` reads before block `boundary`?
    fn window_known(&self, path: &[BlockId], boundary: usize, at: usize) -> bool {
        let first = self.first_sliding_block(at).min(boundary);
        path[first..boundary].iter().all(|&block| self.tree.sliding(block).is_some())
    }

    fn find_resume(
        &self,
        scope: CacheScope,
        path: &[BlockId],
        units: &[PositionKey],
        max_reuse: usize,
    ) -> Resume {
        let units = &units[..max_reuse.min(units.len())];
        for boundary in (0..=path.len()).rev() {
            let start = boundary * BLOCK_LEN;
            let mut best = None;
            if self.window_known(path, boundary, start) {
                best = Some(Resume { at: start, inside: None });
            }
            let parent = boundary.checked_sub(1).map(|i| path[i]);
            for child in self.tree.children_in(parent, scope) {
                let known = self.tree.units(child).iter().zip(&units[start..]);
                let rows = known.take_while(|(a, b)| a == b).count().min(BLOCK_LEN - 1);
                let at = start + rows;
                let worthwhile = rows >= self.min_copy || (rows > 0 && self.can_take_over(child, rows));
                if worthwhile
                    && best.is_none_or(|best: Resume| at > best.at)
                    && self.tree.sliding(child).is_some()
                    && self.window_known(path, boundary, at)
                {
                    best = Some(Resume { at, inside: Some(child) });
                }
            }
            if let Some(best) = best {
                return best;
            }
        }
        Resume { at: 0, inside: None }
    }

    /// May a sequence go on writing in this block after its first `rows` rows? Only if those are all it has and nobody
    /// else uses it.
    fn can_take_over(&self, block: BlockId, rows: usize) -> bool {
        self.tree.len(block) == rows && rows < BLOCK_LEN && self.full.is_cached(block)
    }

    fn take_over(&mut self, seq: &mut KvSeq, block: BlockId) {
        let sliding = self.tree.sliding(block).expect("find_resume checked it");
        self.full.add_ref(block);
        self.sliding.add_ref(sliding);
        self.tree.touch(block, self.tick);
        seq.full.push(block);
        seq.sliding.push(sliding);
        seq.len += self.tree.len(block);
    }

    /// Copies the first rows of `source` into fresh blocks of `seq`. Without memory for that the sequence simply starts
    /// at the boundary.
    fn copy_rows(&mut self, seq: &mut KvSeq, source: BlockId, rows: usize, copies: &mut Vec<BlockCopy>) {
        let source_sliding = self.tree.sliding(source).expect("find_resume checked it");
        // Held meanwhile, so that making room does not evict the source itself.
        self.full.add_ref(source);
        self.sliding.add_ref(source_sliding);
        self.tree.touch(source, self.tick);
        let sliding = self.allocate(KvGroup::Sliding);
        let full = if sliding.is_ok() { self.allocate(KvGroup::Full) } else { sliding };
        self.full.drop_ref(source);
        self.sliding.drop_ref(source_sliding);
        match (full, sliding) {
            (Ok(full), Ok(sliding)) => {
                copies.push(BlockCopy { group: KvGroup::Full, from: source, to: full });
                copies.push(BlockCopy { group: KvGroup::Sliding, from: source_sliding, to: sliding });
                let parent = seq.full.last().copied();
                seq.full.push(full);
                seq.sliding.push(sliding);
                seq.len += rows;
                if seq.publish {
                    self.publish(full, parent, Some(sliding), seq.scope);
                    for i in 0..rows {
                        let unit = self.tree.units(source)[i];
                        self.tree.push(full, unit);
                    }
                }
            }
            (_, sliding) => {
                if let Ok(sliding) = sliding {
                    self.sliding.drop_ref(sliding);
                }
                // The window of the boundary may reach further back than that of the position inside the block.
                self.retreat(seq);
            }
        }
    }

    /// Moves the start of a sequence that has just begun back to the last boundary whose window it can have.
    fn retreat(&mut self, seq: &mut KvSeq) {
        for boundary in (0..=seq.full.len()).rev() {
            let first = self.first_sliding_block(boundary * BLOCK_LEN).min(boundary);
            if !seq.full[first..boundary].iter().all(|&block| self.tree.sliding(block).is_some()) {
                continue;
            }
            for block in seq.sliding.drain(..) {
                self.sliding.drop_ref(block);
            }
            for block in seq.full.drain(boundary..) {
                self.full.drop_ref(block);
            }
            for &block in &seq.full[first..] {
                let sliding = self.tree.sliding(block).expect("just checked");
                self.sliding.add_ref(sliding);
                seq.sliding.push(sliding);
            }
            seq.sliding_first = first;
            seq.len = boundary * BLOCK_LEN;
            return;
        }
    }

    /// Makes `block` known under `parent`, with no rows yet.
    pub(crate) fn publish(
        &mut self,
        block: BlockId,
        parent: Option<BlockId>,
        sliding: Option<BlockId>,
        scope: CacheScope,
    ) {
        self.tree.insert(block, parent, sliding, scope, self.tick);
        self.full.set_known(block, true);
        if let Some(sliding) = sliding {
            self.own_sliding(block, sliding);
        }
    }

    pub(crate) fn own_sliding(&mut self, block: BlockId, sliding: BlockId) {
        self.tree.set_sliding(block, Some(sliding));
        self.sliding.set_known(sliding, true);
        self.sliding_owner[sliding.0 as usize] = block;
    }

    /// Takes a childless block out of the tree.
    pub(crate) fn forget(&mut self, block: BlockId) {
        if let Some(sliding) = self.tree.sliding(block) {
            self.sliding.set_known(sliding, false);
        }
        self.tree.remove(block);
        self.full.set_known(block, false);
    }

    /// If another sequence has published the same block before, use that one: rows are a pure function of the prefix,
    /// so the bytes are equal.
    fn merge_duplicate(&mut self, seq: &mut KvSeq, index: usize) {
        let own = seq.full[index];
        let parent = self.tree.parent(own);
        let Some(other) = self.tree.find_full(parent, self.tree.hash(own), Some(own)) else { return };
        let own_sliding = seq.sliding[index - seq.sliding_first];
        let hint = self.tree.hint(own);
        self.forget(own);
        self.full.add_ref(other);
        self.full.drop_ref(own);
        seq.full[index] = other;
        self.tree.touch(other, self.tick);
        if hint {
            self.tree.set_hint(other);
        }
        match self.tree.sliding(other) {
            Some(theirs) => {
                self.sliding.add_ref(theirs);
                self.sliding.drop_ref(own_sliding);
                seq.sliding[index - seq.sliding_first] = theirs;
            }
            None => self.own_sliding(other, own_sliding),
        }
    }

    fn leave_window(&mut self, seq: &mut KvSeq) {
        let first = (seq.len + 1).saturating_sub(self.window + self.slack) / BLOCK_LEN;
        while seq.sliding_first < first && !seq.sliding.is_empty() {
            let block = seq.sliding.remove(0);
            self.sliding.drop_ref(block);
            seq.sliding_first += 1;
        }
    }
}
