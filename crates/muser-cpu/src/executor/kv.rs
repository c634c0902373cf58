//! Memory of the KV blocks.
//!
//! A block of a group holds all layers of the group, one after the other; a layer holds K of all key heads, then V
//! (`kernels::attention` draws one head). The layers of a draft model come last in the sliding group, with heads of their
//! own. What [`KvStore::export`] writes is this memory as it is.
#![allow(unsafe_code, reason = "copies blocks out of and into raw memory")]
#![allow(
    clippy::cast_ptr_alignment,
    reason = "buffers are aligned to 2 MiB and blocks are whole cache lines"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use muser_backend::{ExecError, KvCapacity, LentBlock};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Geometry;

use crate::kernels::attention::KvView;
use crate::memory::HugeBuffer;

/// Where a layer's KV lies.
#[derive(Clone, Copy)]
struct LayerPlace {
    group: KvGroup,
    /// f16 values of a block before this layer's.
    at: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// Blocks of both groups.
pub(crate) struct KvStore {
    places: Vec<LayerPlace>,
    /// f16 values of a block of the full group.
    full_values: usize,
    sliding_values: usize,
    capacity: KvCapacity,
    full: Option<Arc<HugeBuffer>>,
    sliding: Option<Arc<HugeBuffer>>,
    loans: Arc<Loans>,
}

/// Which blocks are lent: while they are, their bytes are the borrowers'.
#[derive(Default)]
struct Loans {
    count: AtomicUsize,
    full: Box<[AtomicBool]>,
    sliding: Box<[AtomicBool]>,
}

impl Loans {
    fn of(&self, group: KvGroup) -> &[AtomicBool] {
        match group {
            KvGroup::Full => &self.full,
            KvGroup::Sliding => &self.sliding,
        }
    }

    fn is_lent(&self, group: KvGroup, block: BlockId) -> bool {
        // The count is there so that steps, which name many blocks, look at one word.
        self.count.load(Ordering::Acquire) > 0
            && self.of(group).get(block.0 as usize).is_some_and(|lent| lent.load(Ordering::Acquire))
    }
}

/// A block in somebody else's hands.
struct Loan {
    /// Outlives the executor if need be.
    buffer: Arc<HugeBuffer>,
    loans: Arc<Loans>,
    group: KvGroup,
    block: usize,
    bytes: usize,
}

impl LentBlock for Loan {
    fn bytes(&mut self) -> &mut [u8] {
        let at = self.buffer.ptr().wrapping_add(self.block * self.bytes);
        // SAFETY: the block lies inside the buffer, whose memory is zeroed when it is mapped. Its flag is set, so that the
        // store neither touches nor lends it again before this is dropped, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(at, self.bytes) }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.loans.of(self.group)[self.block].store(false, Ordering::Release);
        self.loans.count.fetch_sub(1, Ordering::Release);
    }
}

impl KvStore {
    /// No blocks yet.
    pub(crate) fn new(geometry: &Geometry) -> Self {
        let mut store = Self {
            places: Vec::new(),
            full_values: 0,
            sliding_values: 0,
            capacity: KvCapacity { full: 0, sliding: 0 },
            full: None,
            sliding: None,
            loans: Arc::default(),
        };
        for &sliding in &geometry.sliding {
            let group = if sliding { KvGroup::Sliding } else { KvGroup::Full };
            store.add_layer(group, geometry.kv_heads, geometry.head_dim);
        }
        store
    }

    /// Adds a layer behind the others; before memory is allocated.
    pub(crate) fn add_layer(&mut self, group: KvGroup, kv_heads: usize, head_dim: usize) {
        let values = match group {
            KvGroup::Full => &mut self.full_values,
            KvGroup::Sliding => &mut self.sliding_values,
        };
        self.places.push(LayerPlace { group, at: *values, kv_heads, head_dim });
        *values += layer_values(kv_heads, head_dim);
    }

    /// f16 values of a block of `group`.
    fn block_values(&self, group: KvGroup) -> usize {
        match group {
            KvGroup::Full => self.full_values,
            KvGroup::Sliding => self.sliding_values,
        }
    }

    /// Bytes of a block of `group`.
    pub(crate) fn block_bytes(&self, group: KvGroup) -> usize {
        self.block_values(group) * 2
    }

    /// Blocks that there is memory for.
    pub(crate) fn capacity(&self) -> KvCapacity {
        self.capacity
    }

    /// Replaces all blocks by zeroed ones.
    pub(crate) fn allocate(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        self.capacity = KvCapacity { full: 0, sliding: 0 };
        (self.full, self.sliding) = (None, None);
        let map = |group, blocks: u32| {
            let bytes = self.block_bytes(group).checked_mul(blocks as usize).unwrap_or(usize::MAX / 4);
            HugeBuffer::new(bytes, true, "KV blocks")
        };
        let (full, sliding) = (map(KvGroup::Full, capacity.full)?, map(KvGroup::Sliding, capacity.sliding)?);
        (self.full, self.sliding) = (Some(Arc::new(full)), Some(Arc::new(sliding)));
        let none_lent = |blocks: u32| (0..blocks).map(|_| AtomicBool::new(false)).collect();
        self.loans = Arc::new(Loans {
            count: AtomicUsize::new(0),
            full: none_lent(capacity.full),
            sliding: none_lent(capacity.sliding),
        });
        self.capacity = capacity;
        Ok(())
    }

    /// K and V of one key head of one layer.
    pub(crate) fn view(&self, layer: usize, kv_head: usize) -> KvView {
        let place = self.places[layer];
        let buffer = match place.group {
            KvGroup::Full => &self.full,
            KvGroup::Sliding => &self.sliding,
        };
        let base = buffer.as_ref().map_or(std::ptr::null_mut(), |buffer| buffer.ptr()).cast::<u16>();
        let layer = base.wrapping_add(place.at);
        head_view(layer, kv_head, place.kv_heads, place.head_dim, self.block_values(place.group))
    }

    /// Refuses blocks that are lent.
    pub(crate) fn check_ours(&self, group: KvGroup, blocks: &[BlockId]) -> Result<(), ExecError> {
        if self.loans.count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        match blocks.iter().find(|&&block| self.loans.is_lent(group, block)) {
            None => Ok(()),
            Some(block) => Err(ExecError::InvalidBatch(format!(
                "{group:?} block {} is lent, and somebody else is filling it",
                block.0
            ))),
        }
    }

    /// Lends a block; `None` if there is none, or it is lent already.
    pub(crate) fn lend(&self, group: KvGroup, block: BlockId) -> Option<Box<dyn LentBlock>> {
        let buffer = match group {
            KvGroup::Full => &self.full,
            KvGroup::Sliding => &self.sliding,
        };
        let buffer = Arc::clone(buffer.as_ref()?);
        let flag = self.loans.of(group).get(block.0 as usize)?;
        if flag.swap(true, Ordering::AcqRel) {
            return None;
        }
        self.loans.count.fetch_add(1, Ordering::AcqRel);
        let (loans, bytes) = (Arc::clone(&self.loans), self.block_bytes(group));
        Some(Box::new(Loan { buffer, loans, group, block: block.0 as usize, bytes }))
    }

    /// Writes zeros as K and V of rows `rows` of a block, from layer `layer` of its group on, which is not the first.
    pub(crate) fn clear_context(&mut self, layer: usize, block: BlockId, rows: std::ops::Range<usize>) {
        for layer in layer..self.places.len() {
            let LayerPlace { kv_heads, head_dim, .. } = self.places[layer];
            for kv_head in 0..kv_heads {
                let view = self.view(layer, kv_head);
                let at = block.0 as usize * view.block_stride;
                // SAFETY: the caller has checked the block, `rows` lie inside it, and nobody reads it while `self` is
                // borrowed mutably.
                unsafe {
                    for d in 0..head_dim {
                        view.k.add(at + d * BLOCK_LEN + rows.start).write_bytes(0, rows.len());
                    }
                    view.v.add(at + rows.start * head_dim).write_bytes(0, rows.len() * head_dim);
                }
            }
        }
    }

    /// Is V of a row all zeros, in the first head of a layer? Not known, and so not said, of a block that is lent.
    pub(crate) fn is_zero_row(&self, layer: usize, block: BlockId, row: usize) -> bool {
        let LayerPlace { group, head_dim, .. } = self.places[layer];
        if self.loans.is_lent(group, block) {
            return false;
        }
        let count = match group {
            KvGroup::Full => self.capacity.full,
            KvGroup::Sliding => self.capacity.sliding,
        };
        if block.0 >= count || row >= BLOCK_LEN {
            return true;
        }
        let view = self.view(layer, 0);
        let v = view.v.wrapping_add(block.0 as usize * view.block_stride + row * head_dim);
        // SAFETY: block and row lie inside the buffer; steps write only while `self` is borrowed mutably elsewhere, and a
        // block is lent only so: while `self` is borrowed here, this one stays with us.
        unsafe { std::slice::from_raw_parts(v, head_dim) }.iter().all(|&value| value == 0)
    }

    /// First byte of a block, and its length.
    fn block(&self, group: KvGroup, block: BlockId, bytes: usize) -> Result<*mut u8, ExecError> {
        self.check_ours(group, &[block])?;
        let (buffer, count) = match group {
            KvGroup::Full => (&self.full, self.capacity.full),
            KvGroup::Sliding => (&self.sliding, self.capacity.sliding),
        };
        let size = self.block_bytes(group);
        match buffer {
            Some(buffer) if block.0 < count && bytes == size => {
                Ok(buffer.ptr().wrapping_add(block.0 as usize * size))
            }
            _ => Err(ExecError::InvalidBatch(format!(
                "copy of {group:?} block {} with {bytes} bytes, there are {count} blocks of {size}",
                block.0
            ))),
        }
    }

    /// Copies a block out.
    pub(crate) fn export(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        let from = self.block(group, block, dst.len())?;
        // SAFETY: the block lies inside the buffer, nobody writes it while `self` is borrowed outside a step.
        unsafe { std::ptr::copy_nonoverlapping(from, dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    /// Zeroes the rows from `rows` on in the bytes of a block.
    pub(crate) fn clear_rows(&self, group: KvGroup, rows: usize, bytes: &mut [u8]) {
        let rows = rows.min(BLOCK_LEN);
        for place in self.places.iter().filter(|place| place.group == group) {
            let head_bytes = place.head_dim * BLOCK_LEN * 2;
            let k_bytes = place.kv_heads * head_bytes;
            let Some(layer) = bytes.get_mut(place.at * 2..place.at * 2 + 2 * k_bytes) else { return };
            let (k, v) = layer.split_at_mut(k_bytes);
            // Of K a row is a column.
            k.chunks_exact_mut(BLOCK_LEN * 2).for_each(|positions| positions[rows * 2..].fill(0));
            v.chunks_exact_mut(head_bytes).for_each(|head| head[rows * place.head_dim * 2..].fill(0));
        }
    }

    /// Copies a block in.
    pub(crate) fn import(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        let to = self.block(group, block, src.len())?;
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), to, src.len()) };
        Ok(())
    }
}

/// f16 values of one layer of one block.
pub(crate) fn layer_values(kv_heads: usize, head_dim: usize) -> usize {
    2 * kv_heads * head_dim * BLOCK_LEN
}

/// One key head of a layer that begins at `layer` in the first block.
pub(crate) fn head_view(
    layer: *mut u16,
    kv_head: usize,
    kv_heads: usize,
    head_dim: usize,
    block_stride: usize,
) -> KvView {
    let head = head_dim * BLOCK_LEN;
    let k = layer.wrapping_add(kv_head * head);
    KvView { k, v: k.wrapping_add(kv_heads * head), block_stride, head_dim }
}
