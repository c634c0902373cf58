//! Memory of the KV blocks.
//!
//! A block of a group holds all layers of the group, one after the other; a layer holds K of all key heads, then V
//! (`kernels::attention` draws one head). What [`KvStore::export`] writes is this memory as it is.
#![allow(unsafe_code, reason = "copies blocks out of and into raw memory")]
#![allow(
    clippy::cast_ptr_alignment,
    reason = "buffers are aligned to 2 MiB and blocks are whole cache lines"
)]

use muser_backend::{ExecError, KvCapacity};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Geometry;

use crate::kernels::attention::KvView;
use crate::memory::HugeBuffer;

/// Where a layer's KV lies.
#[derive(Clone, Copy)]
struct LayerPlace {
    group: KvGroup,
    /// Number of the layer in its group.
    index: usize,
}

/// Blocks of both groups.
pub(crate) struct KvStore {
    places: Vec<LayerPlace>,
    head_dim: usize,
    kv_heads: usize,
    full_layers: usize,
    sliding_layers: usize,
    capacity: KvCapacity,
    full: Option<HugeBuffer>,
    sliding: Option<HugeBuffer>,
}

impl KvStore {
    /// No blocks yet.
    pub(crate) fn new(geometry: &Geometry) -> Self {
        let (mut full_layers, mut sliding_layers) = (0, 0);
        let places = geometry
            .sliding
            .iter()
            .map(|&sliding| {
                let (group, count) = if sliding {
                    (KvGroup::Sliding, &mut sliding_layers)
                } else {
                    (KvGroup::Full, &mut full_layers)
                };
                *count += 1;
                LayerPlace { group, index: *count - 1 }
            })
            .collect();
        Self {
            places,
            head_dim: geometry.head_dim,
            kv_heads: geometry.kv_heads,
            full_layers,
            sliding_layers,
            capacity: KvCapacity { full: 0, sliding: 0 },
            full: None,
            sliding: None,
        }
    }

    /// f16 values of one layer of one block.
    fn layer_values(&self) -> usize {
        2 * self.kv_heads * self.head_dim * BLOCK_LEN
    }

    /// Bytes of a block of `group`.
    pub(crate) fn block_bytes(&self, group: KvGroup) -> usize {
        let layers = match group {
            KvGroup::Full => self.full_layers,
            KvGroup::Sliding => self.sliding_layers,
        };
        layers * self.layer_values() * 2
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
        (self.full, self.sliding) = (Some(full), Some(sliding));
        self.capacity = capacity;
        Ok(())
    }

    /// K and V of one key head of one layer.
    pub(crate) fn view(&self, layer: usize, kv_head: usize) -> KvView {
        let place = self.places[layer];
        let (buffer, layers) = match place.group {
            KvGroup::Full => (&self.full, self.full_layers),
            KvGroup::Sliding => (&self.sliding, self.sliding_layers),
        };
        let base = buffer.as_ref().map_or(std::ptr::null_mut(), HugeBuffer::ptr).cast::<u16>();
        let head = self.head_dim * BLOCK_LEN;
        let k = base.wrapping_add(place.index * self.layer_values() + kv_head * head);
        KvView {
            k,
            v: k.wrapping_add(self.kv_heads * head),
            block_stride: layers * self.layer_values(),
            head_dim: self.head_dim,
        }
    }

    /// First byte of a block, and its length.
    fn block(&self, group: KvGroup, block: BlockId, bytes: usize) -> Result<*mut u8, ExecError> {
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

    /// Copies a block in.
    pub(crate) fn import(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        let to = self.block(group, block, src.len())?;
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), to, src.len()) };
        Ok(())
    }
}
