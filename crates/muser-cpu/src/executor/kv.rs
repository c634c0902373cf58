//! Memory of the KV blocks.
//!
//! A block of a group holds all layers of the group, one after the other. In digits a layer holds its heads
//! ([`muser_backend::kv_layout`]); in f16 it holds K of all key heads, then V (`kernels::attention` draws one head). The layers
//! of a draft model come last in the sliding group, with heads of their own. What [`KvStore::export`] writes is this memory as
//! it is.
#![allow(unsafe_code, reason = "copies blocks out of and into raw memory")]
#![allow(
    clippy::cast_ptr_alignment,
    reason = "buffers are aligned to 2 MiB and blocks are whole cache lines"
)]

use std::ops::Range;
use std::sync::Arc;

use muser_backend::kv_layout::HeadLayout;
use muser_backend::{ExecError, KvCapacity, KvType, LayerRange, LentBlock};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Geometry;

use super::loans::Loans;
use crate::bounds::Reach;
use crate::kernels::attention::FloatKv;
use crate::kernels::exact::DigitKv;
use crate::kernels::kv::KvView;
use crate::memory::HugeBuffer;

/// Where a layer's KV lies.
#[derive(Clone, Copy)]
struct LayerPlace {
    group: KvGroup,
    /// Bytes of a block before this layer's.
    at: usize,
    heads: Heads,
}

/// The heads of a layer of one block.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) kv_type: KvType,
    pub(crate) count: usize,
    pub(crate) dim: usize,
}

/// Where a head lies in a layer.
enum Head {
    /// First bytes of K and of V.
    Float(usize, usize),
    Digits(usize, HeadLayout),
}

impl Heads {
    /// Bytes of the layer.
    pub(crate) fn bytes(&self) -> usize {
        match self.kv_type.digits() {
            None => 4 * self.count * self.dim * BLOCK_LEN,
            Some(digits) => self.count * HeadLayout { dim: self.dim, digits }.bytes(),
        }
    }

    fn head(&self, head: usize) -> Head {
        match self.kv_type.digits() {
            None => {
                let bytes = 2 * self.dim * BLOCK_LEN;
                Head::Float(head * bytes, (self.count + head) * bytes)
            }
            Some(digits) => {
                let layout = HeadLayout { dim: self.dim, digits };
                Head::Digits(head * layout.bytes(), layout)
            }
        }
    }

    /// One key head of a layer that begins at `layer` in the first of `blocks` blocks, which are `block_stride` bytes apart.
    pub(crate) fn view(&self, layer: *mut u8, head: usize, block_stride: usize, blocks: usize) -> KvView {
        let blocks = Reach::of(blocks);
        match self.head(head) {
            Head::Float(k, v) => KvView::Float(FloatKv {
                k: layer.wrapping_add(k).cast(),
                v: layer.wrapping_add(v).cast(),
                block_stride: block_stride / 2,
                blocks,
                head_dim: self.dim,
                scale: 1.0 / (self.dim as f32).sqrt(),
            }),
            Head::Digits(at, head) => KvView::Digits(DigitKv {
                first: layer.wrapping_add(at),
                block_stride,
                blocks,
                head,
                bounded: true,
            }),
        }
    }

    /// Makes some rows of a layer those of a block that nothing was written to.
    fn clear(&self, layer: &mut [u8], rows: Range<usize>) {
        for head in 0..self.count {
            match self.head(head) {
                Head::Float(k, v) => {
                    // Of K a row is a column.
                    layer[k..k + 2 * self.dim * BLOCK_LEN]
                        .chunks_exact_mut(2 * BLOCK_LEN)
                        .for_each(|positions| positions[2 * rows.start..2 * rows.end].fill(0));
                    layer[v + 2 * rows.start * self.dim..v + 2 * rows.end * self.dim].fill(0);
                }
                Head::Digits(at, layout) => layout.clear(&mut layer[at..at + layout.bytes()], rows.clone()),
            }
        }
    }

    /// Has nothing been written to a row? In f16 V tells it, in digits the scale of K; in the first head.
    fn is_blank(&self, layer: &[u8], row: usize) -> bool {
        let bytes = match self.head(0) {
            Head::Float(_, v) => &layer[v + 2 * row * self.dim..][..2 * self.dim],
            Head::Digits(at, layout) => &layer[at + layout.k_scales() + 4 * row..][..4],
        };
        bytes.iter().all(|&byte| byte == 0)
    }
}

/// Blocks of both groups.
pub(crate) struct KvStore {
    kv_type: KvType,
    places: Vec<LayerPlace>,
    /// Bytes of a block of the full group.
    full_bytes: usize,
    sliding_bytes: usize,
    capacity: KvCapacity,
    full: Option<Arc<HugeBuffer>>,
    sliding: Option<Arc<HugeBuffer>>,
    loans: Arc<Loans>,
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
        self.loans.give_back(self.group, self.block);
    }
}

impl KvStore {
    /// Of the layers of a range, which are numbered from 0 here; no blocks yet.
    pub(crate) fn new(geometry: &Geometry, range: LayerRange, kv_type: KvType) -> Self {
        let mut store = Self {
            kv_type,
            places: Vec::new(),
            full_bytes: 0,
            sliding_bytes: 0,
            capacity: KvCapacity { full: 0, sliding: 0 },
            full: None,
            sliding: None,
            loans: Arc::new(Loans::none_of(0, 0)),
        };
        for &sliding in &geometry.sliding[range.layers()] {
            let group = if sliding { KvGroup::Sliding } else { KvGroup::Full };
            store.add_layer(group, geometry.kv_heads, geometry.head_dim);
        }
        store
    }

    /// Adds a layer behind the others; before memory is allocated.
    pub(crate) fn add_layer(&mut self, group: KvGroup, kv_heads: usize, head_dim: usize) {
        let bytes = match group {
            KvGroup::Full => &mut self.full_bytes,
            KvGroup::Sliding => &mut self.sliding_bytes,
        };
        let heads = Heads { kv_type: self.kv_type, count: kv_heads, dim: head_dim };
        self.places.push(LayerPlace { group, at: *bytes, heads });
        *bytes += heads.bytes();
    }

    /// Layers.
    pub(crate) fn layers(&self) -> usize {
        self.places.len()
    }

    /// Bytes of a block of `group`.
    pub(crate) fn block_bytes(&self, group: KvGroup) -> usize {
        match group {
            KvGroup::Full => self.full_bytes,
            KvGroup::Sliding => self.sliding_bytes,
        }
    }

    /// Type of all values.
    pub(crate) fn kv_type(&self) -> KvType {
        self.kv_type
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
        self.loans = Arc::new(Loans::none_of(capacity.full, capacity.sliding));
        self.capacity = capacity;
        Ok(())
    }

    /// K and V of one key head of one layer.
    pub(crate) fn view(&self, layer: usize, kv_head: usize) -> KvView {
        let place = self.places[layer];
        let (buffer, blocks) = match place.group {
            KvGroup::Full => (&self.full, self.capacity.full),
            KvGroup::Sliding => (&self.sliding, self.capacity.sliding),
        };
        let base = buffer.as_ref().map_or(std::ptr::null_mut(), |buffer| buffer.ptr());
        let stride = self.block_bytes(place.group);
        place.heads.view(base.wrapping_add(place.at), kv_head, stride, blocks as usize)
    }

    /// Refuses blocks that are lent.
    pub(crate) fn check_ours(&self, group: KvGroup, blocks: &[BlockId]) -> Result<(), ExecError> {
        if !self.loans.any() {
            return Ok(());
        }
        match blocks.iter().find(|&&block| self.loans.is_lent(group, block.0 as usize)) {
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
        let block = block.0 as usize;
        self.loans.lend(group, block).then(|| {
            let (loans, bytes) = (Arc::clone(&self.loans), self.block_bytes(group));
            Box::new(Loan { buffer, loans, group, block, bytes }) as Box<dyn LentBlock>
        })
    }

    /// One layer of a block, which the caller has checked.
    fn layer_bytes(&self, layer: usize, block: BlockId) -> (*mut u8, usize) {
        let LayerPlace { group, at, heads } = self.places[layer];
        let buffer = match group {
            KvGroup::Full => &self.full,
            KvGroup::Sliding => &self.sliding,
        };
        let base = buffer.as_ref().map_or(std::ptr::null_mut(), |buffer| buffer.ptr());
        (base.wrapping_add(block.0 as usize * self.block_bytes(group) + at), heads.bytes())
    }

    /// Blanks rows `rows` of a block, from layer `layer` of its group on, which is not the first.
    pub(crate) fn clear_context(&mut self, layer: usize, block: BlockId, rows: Range<usize>) {
        for layer in layer..self.places.len() {
            let (bytes, len) = self.layer_bytes(layer, block);
            // SAFETY: the caller has checked the block, and nobody reads it while `self` is borrowed mutably.
            let bytes = unsafe { std::slice::from_raw_parts_mut(bytes, len) };
            self.places[layer].heads.clear(bytes, rows.clone());
        }
    }

    /// Is a row of a layer as if nothing had been written to it? Not known, and so not said, of a block that is lent.
    pub(crate) fn is_blank_row(&self, layer: usize, block: BlockId, row: usize) -> bool {
        let LayerPlace { group, heads, .. } = self.places[layer];
        if self.loans.is_lent(group, block.0 as usize) {
            return false;
        }
        let count = match group {
            KvGroup::Full => self.capacity.full,
            KvGroup::Sliding => self.capacity.sliding,
        };
        if block.0 >= count || row >= BLOCK_LEN {
            return true;
        }
        let (bytes, len) = self.layer_bytes(layer, block);
        // SAFETY: block and row lie inside the buffer; steps write only while `self` is borrowed mutably elsewhere, and a
        // block is lent only so: while `self` is borrowed here, this one stays with us.
        heads.is_blank(unsafe { std::slice::from_raw_parts(bytes, len) }, row)
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

    /// One layer of a block; `layer` counts from the first that is here.
    pub(crate) fn layer(&self, layer: usize, block: BlockId) -> Result<&[u8], ExecError> {
        let (from, len) = self.layer_place(layer, block)?;
        // SAFETY: the layer lies inside the block, which nobody writes while `self` is borrowed outside a step.
        Ok(unsafe { std::slice::from_raw_parts(from, len) })
    }

    /// The same to write.
    pub(crate) fn layer_mut(&mut self, layer: usize, block: BlockId) -> Result<&mut [u8], ExecError> {
        let (to, len) = self.layer_place(layer, block)?;
        // SAFETY: as above, and `self` is borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(to, len) })
    }

    fn layer_place(&self, layer: usize, block: BlockId) -> Result<(*mut u8, usize), ExecError> {
        let place = self
            .places
            .get(layer)
            .ok_or_else(|| ExecError::InvalidBatch(format!("layer {layer} of {} here", self.places.len())))?;
        let first = self.block(place.group, block, self.block_bytes(place.group))?;
        Ok((first.wrapping_add(place.at), place.heads.bytes()))
    }

    /// Zeroes the rows from `rows` on in the bytes of a block.
    pub(crate) fn clear_rows(&self, group: KvGroup, rows: usize, bytes: &mut [u8]) {
        let rows = rows.min(BLOCK_LEN);
        for place in self.places.iter().filter(|place| place.group == group) {
            let Some(layer) = bytes.get_mut(place.at..place.at + place.heads.bytes()) else { return };
            place.heads.clear(layer, rows..BLOCK_LEN);
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
