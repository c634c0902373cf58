//! The prefix tree: one node per known block of the full group, a path from the root is a prefix.
//!
//! A node has the id of its full block, so there is nothing to keep in step. Everything is preallocated: links are
//! intrusive lists, the units of all blocks lie in one flat buffer.

use crate::{BLOCK_LEN, BlockId, CacheScope, PositionKey};

/// Position in the keyed hash chain: stands for the content of a block and everything before it.
pub type BlockHash = [u8; 32];

const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Node {
    parent: u32,
    first_child: u32,
    next: u32,
    previous: u32,
    children: u32,
    sliding: Option<BlockId>,
    len: u16,
    in_tree: bool,
    /// A sequence's prompt ended here: a likely place to resume.
    hint: bool,
    last_used: u64,
    /// Valid once `len` is [`BLOCK_LEN`].
    hash: BlockHash,
    /// Whose path it is on.
    scope: CacheScope,
}

const EMPTY: Node = Node {
    parent: NONE,
    first_child: NONE,
    next: NONE,
    previous: NONE,
    children: 0,
    sliding: None,
    len: 0,
    in_tree: false,
    hint: false,
    last_used: 0,
    hash: [0; 32],
    scope: CacheScope::EVERYBODY,
};

#[derive(Debug)]
pub(crate) struct Tree {
    nodes: Vec<Node>,
    units: Vec<PositionKey>,
    first_root: u32,
    key: [u8; 32],
    root_hash: BlockHash,
}

impl Tree {
    pub(crate) fn new(blocks: u32, identity: &[u8]) -> Self {
        let key = blake3::derive_key("muser kv prefix chain v1", identity);
        Self {
            nodes: vec![EMPTY; blocks as usize],
            units: vec![PositionKey::default(); blocks as usize * BLOCK_LEN],
            first_root: NONE,
            key,
            root_hash: *blake3::keyed_hash(&key, b"root").as_bytes(),
        }
    }

    /// What stands before the first block of a scope's prefixes.
    pub(crate) fn root(&self, scope: CacheScope) -> BlockHash {
        if scope.is_default() {
            return self.root_hash;
        }
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(b"root of").update(scope.as_bytes());
        *hasher.finalize().as_bytes()
    }

    /// Hash of a full block with this content after the one with the hash `before`, or after [`Tree::root`].
    pub(crate) fn hash_after(&self, before: &BlockHash, units: &[PositionKey]) -> BlockHash {
        debug_assert_eq!(units.len(), BLOCK_LEN);
        let mut bytes = [0; BLOCK_LEN * 8];
        for (to, unit) in bytes.chunks_exact_mut(8).zip(units) {
            to.copy_from_slice(&unit.to_le_bytes());
        }
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(before).update(&bytes);
        *hasher.finalize().as_bytes()
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        self.nodes[block.0 as usize].in_tree
    }

    pub(crate) fn units(&self, block: BlockId) -> &[PositionKey] {
        &self.units[block.0 as usize * BLOCK_LEN..][..self.len(block)]
    }

    pub(crate) fn len(&self, block: BlockId) -> usize {
        usize::from(self.nodes[block.0 as usize].len)
    }

    pub(crate) fn is_full(&self, block: BlockId) -> bool {
        self.len(block) == BLOCK_LEN
    }

    pub(crate) fn hash(&self, block: BlockId) -> &BlockHash {
        &self.nodes[block.0 as usize].hash
    }

    pub(crate) fn sliding(&self, block: BlockId) -> Option<BlockId> {
        self.nodes[block.0 as usize].sliding
    }

    pub(crate) fn set_sliding(&mut self, block: BlockId, sliding: Option<BlockId>) {
        self.nodes[block.0 as usize].sliding = sliding;
    }

    pub(crate) fn parent(&self, block: BlockId) -> Option<BlockId> {
        some(self.nodes[block.0 as usize].parent)
    }

    pub(crate) fn child_count(&self, block: BlockId) -> u32 {
        self.nodes[block.0 as usize].children
    }

    pub(crate) fn children(&self, parent: Option<BlockId>) -> impl Iterator<Item = BlockId> + '_ {
        let mut at = parent.map_or(self.first_root, |block| self.nodes[block.0 as usize].first_child);
        std::iter::from_fn(move || {
            let block = some(at)?;
            at = self.nodes[block.0 as usize].next;
            Some(block)
        })
    }

    /// The children of `parent`, or the beginnings of a scope's prefixes.
    pub(crate) fn children_in(
        &self,
        parent: Option<BlockId>,
        scope: CacheScope,
    ) -> impl Iterator<Item = BlockId> + '_ {
        self.children(parent).filter(move |child| self.scope(*child) == scope)
    }

    pub(crate) fn scope(&self, block: BlockId) -> CacheScope {
        self.nodes[block.0 as usize].scope
    }

    pub(crate) fn last_used(&self, block: BlockId) -> u64 {
        self.nodes[block.0 as usize].last_used
    }

    pub(crate) fn touch(&mut self, block: BlockId, tick: u64) {
        self.nodes[block.0 as usize].last_used = tick;
    }

    pub(crate) fn hint(&self, block: BlockId) -> bool {
        self.nodes[block.0 as usize].hint
    }

    pub(crate) fn set_hint(&mut self, block: BlockId) {
        self.nodes[block.0 as usize].hint = true;
    }

    /// The full child of `parent` with this hash, other than `but`.
    pub(crate) fn find_full(
        &self,
        parent: Option<BlockId>,
        hash: &BlockHash,
        but: Option<BlockId>,
    ) -> Option<BlockId> {
        self.children(parent)
            .find(|&child| Some(child) != but && self.is_full(child) && self.hash(child) == hash)
    }

    /// Adds `block` under `parent`, empty.
    pub(crate) fn insert(
        &mut self,
        block: BlockId,
        parent: Option<BlockId>,
        sliding: Option<BlockId>,
        scope: CacheScope,
        tick: u64,
    ) {
        let first = parent.map_or(self.first_root, |p| self.nodes[p.0 as usize].first_child);
        self.nodes[block.0 as usize] = Node {
            parent: parent.map_or(NONE, |p| p.0),
            next: first,
            sliding,
            in_tree: true,
            last_used: tick,
            scope,
            ..EMPTY
        };
        if let Some(first) = some(first) {
            self.nodes[first.0 as usize].previous = block.0;
        }
        self.set_first(parent, block.0);
        if let Some(parent) = parent {
            self.nodes[parent.0 as usize].children += 1;
        }
    }

    /// Appends a unit and returns the new length; at [`BLOCK_LEN`] the hash is set.
    pub(crate) fn push(&mut self, block: BlockId, unit: PositionKey) -> usize {
        let at = block.0 as usize;
        let len = self.len(block);
        self.units[at * BLOCK_LEN + len] = unit;
        self.nodes[at].len += 1;
        if len + 1 == BLOCK_LEN {
            let before = self.parent(block).map_or_else(|| self.root(self.scope(block)), |p| *self.hash(p));
            self.nodes[at].hash = self.hash_after(&before, self.units(block));
        }
        len + 1
    }

    /// Takes `block` out. It has no children.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let node = std::mem::replace(&mut self.nodes[block.0 as usize], EMPTY);
        debug_assert!(node.in_tree && node.children == 0);
        if let Some(next) = some(node.next) {
            self.nodes[next.0 as usize].previous = node.previous;
        }
        match some(node.previous) {
            Some(previous) => self.nodes[previous.0 as usize].next = node.next,
            None => self.set_first(some(node.parent), node.next),
        }
        if let Some(parent) = some(node.parent) {
            self.nodes[parent.0 as usize].children -= 1;
        }
    }

    /// All blocks in the tree.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        (0..self.nodes.len() as u32).map(BlockId).filter(|&block| self.contains(block))
    }

    fn set_first(&mut self, parent: Option<BlockId>, first: u32) {
        match parent {
            Some(parent) => self.nodes[parent.0 as usize].first_child = first,
            None => self.first_root = first,
        }
    }
}

fn some(index: u32) -> Option<BlockId> {
    (index != NONE).then_some(BlockId(index))
}
