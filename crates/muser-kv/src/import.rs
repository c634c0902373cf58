//! Blocks that come from outside (a pack, a peer) and blocks that go there.
//!
//! An import is a sequence whose rows somebody else has computed: memory is reserved, filled by the caller, and becomes
//! known all at once or not at all.

use crate::{BLOCK_LEN, BlockHash, BlockId, CacheScope, KvCache, KvError, KvGroup, KvSeq, PositionKey};

/// A block that an import wants filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImportBlock {
    /// Its group.
    pub group: KvGroup,
    /// Which positions: `[256 index, 256 (index + 1))`.
    pub index: usize,
    /// Where to write them.
    pub block: BlockId,
}

/// Memory reserved for an import; end it with [`KvCache::finish_import`] or [`KvCache::abort_import`].
#[derive(Debug, Default)]
#[must_use = "an import must be finished or aborted"]
pub struct Import {
    /// Everything up to the end; the last block may be unfinished.
    units: Vec<PositionKey>,
    scope: CacheScope,
    /// Full blocks from position 0: known ones first, then new ones.
    full: Vec<BlockId>,
    known: usize,
    /// Sliding blocks of the window before the end; `true`: new.
    sliding: Vec<(BlockId, bool)>,
    sliding_first: usize,
}

impl Import {
    /// What becomes known.
    pub fn units(&self) -> &[PositionKey] {
        &self.units
    }

    /// For whom.
    pub fn scope(&self) -> CacheScope {
        self.scope
    }

    /// Blocks that it holds in both groups, known ones included.
    pub fn held_blocks(&self) -> (usize, usize) {
        (self.full.len(), self.sliding.len())
    }

    /// The blocks to fill.
    pub fn blocks(&self) -> impl Iterator<Item = ImportBlock> + '_ {
        let full = self.full.iter().enumerate().skip(self.known);
        let full = full.map(|(index, &block)| ImportBlock { group: KvGroup::Full, index, block });
        let sliding = self.sliding.iter().enumerate().filter(|(_, (_, new))| *new);
        let first = self.sliding_first;
        let sliding = sliding.map(move |(i, &(block, _))| ImportBlock {
            group: KvGroup::Sliding,
            index: first + i,
            block,
        });
        full.chain(sliding)
    }
}

/// A known full block on the way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedBlock {
    /// Its place in the hash chain; of no meaning for an unfinished block.
    pub hash: BlockHash,
    /// The block of the full group.
    pub full: BlockId,
    /// The block of the sliding group, if it is still there.
    pub sliding: Option<BlockId>,
}

/// A prefix held for export: nothing of it is evicted until [`KvCache::unpin`].
#[derive(Debug)]
#[must_use = "held blocks must be let go"]
pub struct Pin {
    /// The blocks, from position 0.
    pub blocks: Vec<PinnedBlock>,
}

impl KvCache {
    /// Reserves what is missing to resume at block boundary `blocks` of this prefix.
    pub fn begin_import(
        &mut self,
        scope: CacheScope,
        units: &[PositionKey],
        blocks: usize,
    ) -> Result<Import, KvError> {
        let end = blocks * BLOCK_LEN;
        let Some(units) = units.get(..end) else {
            return Err(KvError::ShortImport { blocks, needed: end, found: units.len() });
        };
        self.begin_import_of(scope, units)
    }

    /// Reserves what is missing to resume after the last of these units, which may be inside a block: of that block only
    /// the first rows need content.
    pub fn begin_import_of(&mut self, scope: CacheScope, units: &[PositionKey]) -> Result<Import, KvError> {
        let end = units.len();
        let blocks = end.div_ceil(BLOCK_LEN);
        self.tick += 1;
        let full = self.walk(scope, units, end);
        for &block in &full {
            self.full.add_ref(block);
            self.tree.touch(block, self.tick);
        }
        let mut import = Import {
            units: units.to_vec(),
            scope,
            known: full.len(),
            full,
            sliding: Vec::new(),
            sliding_first: self.first_sliding_block(end).min(blocks),
        };
        // Known sliding blocks first, so that making room does not evict them.
        for index in import.sliding_first..blocks {
            let known = import.full.get(index).and_then(|&block| self.tree.sliding(block));
            if let Some(block) = known {
                self.sliding.add_ref(block);
            }
            import.sliding.push((known.unwrap_or(BlockId(u32::MAX)), known.is_none()));
        }
        for i in 0..import.sliding.len() {
            if import.sliding[i].1 {
                match self.allocate(KvGroup::Sliding) {
                    Ok(block) => import.sliding[i].0 = block,
                    Err(error) => {
                        self.abort_import(import);
                        return Err(error);
                    }
                }
            }
        }
        while import.full.len() < blocks {
            match self.allocate(KvGroup::Full) {
                Ok(block) => import.full.push(block),
                Err(error) => {
                    self.abort_import(import);
                    return Err(error);
                }
            }
        }
        Ok(import)
    }

    /// The caller has filled every block of [`Import::blocks`]: all become known.
    pub fn finish_import(&mut self, import: Import) {
        self.tick += 1;
        let mut parent = None;
        let root = self.tree.root(import.scope);
        for (index, &block) in import.full.iter().enumerate() {
            let sliding = index.checked_sub(import.sliding_first).map(|i| import.sliding[i].0);
            let units = &import.units[index * BLOCK_LEN..];
            let units = &units[..units.len().min(BLOCK_LEN)];
            // Somebody may have computed the same block meanwhile.
            let twin = (units.len() == BLOCK_LEN)
                .then(|| self.tree.hash_after(parent.map_or(&root, |p| self.tree.hash(p)), units))
                .and_then(|hash| self.tree.find_full(parent, &hash, None));
            let at = if let Some(known) = twin {
                if let (None, Some(sliding)) = (self.tree.sliding(known), sliding) {
                    self.own_sliding(known, sliding);
                }
                known
            } else {
                self.publish(block, parent, sliding, import.scope);
                for &unit in units {
                    self.tree.push(block, unit);
                }
                block
            };
            self.tree.touch(at, self.tick);
            parent = Some(at);
        }
        if let Some(end) = parent {
            self.tree.set_hint(end);
        }
        self.abort_import(import);
    }

    /// Gives up an import; nothing becomes known.
    pub fn abort_import(&mut self, import: Import) {
        for (block, _) in import.sliding {
            if block.0 != u32::MAX {
                self.sliding.drop_ref(block);
            }
        }
        for block in import.full {
            self.full.drop_ref(block);
        }
    }

    /// Pins the known full blocks of a prefix, as many as there are.
    pub fn pin(&mut self, scope: CacheScope, units: &[PositionKey]) -> Pin {
        self.tick += 1;
        let path = self.walk(scope, units, units.len());
        let mut blocks = Vec::with_capacity(path.len());
        for full in path {
            self.full.add_ref(full);
            self.tree.touch(full, self.tick);
            let sliding = self.tree.sliding(full);
            if let Some(sliding) = sliding {
                self.sliding.add_ref(sliding);
            }
            blocks.push(PinnedBlock { hash: *self.tree.hash(full), full, sliding });
        }
        Pin { blocks }
    }

    /// Pins the known blocks of a sequence, which may go on or end meanwhile: the whole ones, and with `tail` the
    /// unfinished last one too, whose rows so far never change. Nothing for a sequence that is not published.
    pub fn pin_sequence(&mut self, seq: &KvSeq, tail: bool) -> Pin {
        let end = if tail { seq.len.div_ceil(BLOCK_LEN) } else { seq.len / BLOCK_LEN };
        let end = if seq.publish { end } else { 0 };
        let mut blocks = Vec::with_capacity(end);
        for &full in &seq.full[..end] {
            if !self.tree.contains(full) {
                break;
            }
            self.full.add_ref(full);
            let sliding = self.tree.sliding(full);
            if let Some(sliding) = sliding {
                self.sliding.add_ref(sliding);
            }
            blocks.push(PinnedBlock { hash: *self.tree.hash(full), full, sliding });
        }
        Pin { blocks }
    }

    /// Lets the sliding blocks of a held prefix go.
    pub fn unpin_sliding(&mut self, held: &mut Pin) {
        for block in &mut held.blocks {
            if let Some(sliding) = block.sliding.take() {
                self.sliding.drop_ref(sliding);
            }
        }
    }

    /// Lets held blocks go.
    pub fn unpin(&mut self, held: Pin) {
        for block in held.blocks {
            if let Some(sliding) = block.sliding {
                self.sliding.drop_ref(sliding);
            }
            self.full.drop_ref(block.full);
        }
    }
}
