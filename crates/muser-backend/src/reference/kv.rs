//! K and V of the reference executor: one flat array per layer, positions found through block ids.
//!
//! Layout of a layer's array: `[block][position in block][K: kv_heads x head_dim, V: the same]`. An exported block is
//! the layers of its group in order, each `[256][K, V]`, in the storage type, little-endian.

use half::f16;
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};

use super::ops;
use crate::{ExecError, KvCapacity, KvType};

/// Heads of one layer, and the group it belongs to.
#[derive(Clone, Copy)]
pub(super) struct LayerShape {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) group: KvGroup,
}

impl LayerShape {
    /// Values of one position: K of all heads, then V of all heads.
    fn row_len(self) -> usize {
        2 * self.kv_heads * self.head_dim
    }

    fn row_at(self, (block, row): (BlockId, usize)) -> usize {
        (block.0 as usize * BLOCK_LEN + row) * self.row_len()
    }
}

/// K and V of one position in one layer.
pub(super) type KvRow<'a> = (&'a [f32], &'a [f32]);

pub(super) struct KvStore {
    kv_type: KvType,
    shapes: Vec<LayerShape>,
    capacity: KvCapacity,
    /// One array per layer; always f32 in memory, rounded through f16 on writing when that is the storage type.
    layers: Vec<Vec<f32>>,
}

impl KvStore {
    pub(super) fn new(shapes: Vec<LayerShape>, kv_type: KvType) -> Self {
        let layers = vec![Vec::new(); shapes.len()];
        Self { kv_type, shapes, capacity: KvCapacity { full: 0, sliding: 0 }, layers }
    }

    /// Adds a layer behind the others; only before memory is allocated.
    pub(super) fn add_layer(&mut self, shape: LayerShape) {
        self.shapes.push(shape);
        self.layers.push(Vec::new());
    }

    pub(super) fn capacity(&self) -> KvCapacity {
        self.capacity
    }

    pub(super) fn block_bytes(&self, group: KvGroup) -> usize {
        let row_bytes = |layer: usize| self.shapes[layer].row_len() * self.kv_type.size();
        BLOCK_LEN * self.group_layers(group).map(row_bytes).sum::<usize>()
    }

    pub(super) fn allocate(&mut self, capacity: KvCapacity) {
        self.capacity = capacity;
        for (layer, shape) in self.layers.iter_mut().zip(&self.shapes) {
            let blocks = match shape.group {
                KvGroup::Full => capacity.full,
                KvGroup::Sliding => capacity.sliding,
            };
            *layer = vec![0.0; blocks as usize * BLOCK_LEN * shape.row_len()];
        }
    }

    /// Stores the K and V of one position.
    pub(super) fn write(&mut self, layer: usize, place: (BlockId, usize), k: &[f32], v: &[f32]) {
        let at = self.shapes[layer].row_at(place);
        let kv_type = self.kv_type;
        let row = &mut self.layers[layer][at..][..k.len() + v.len()];
        for (dst, src) in row.iter_mut().zip(k.iter().chain(v)) {
            *dst = match kv_type {
                KvType::F32 => *src,
                // Digits are refused by `ReferenceExecutor::new`.
                _ => f16::from_f32(src.clamp(-65504.0, 65504.0)).to_f32(),
            };
        }
    }

    /// The stored K and V of one position.
    pub(super) fn row(&self, layer: usize, place: (BlockId, usize)) -> KvRow<'_> {
        let shape = self.shapes[layer];
        self.layers[layer][shape.row_at(place)..][..shape.row_len()].split_at(shape.kv_heads * shape.head_dim)
    }

    /// `out = softmax(q k / sqrt(head_dim)) v` over `rows` for every query head of one row.
    pub(super) fn attend(&self, layer: usize, rows: &[KvRow<'_>], q: &[f32], out: &mut [f32]) {
        let LayerShape { heads, kv_heads, head_dim: d, .. } = self.shapes[layer];
        for (head, (q, out)) in q.chunks(d).zip(out.chunks_mut(d)).enumerate() {
            let at = head / (heads / kv_heads) * d;
            let scores: Vec<f64> =
                rows.iter().map(|(k, _)| f64::from(ops::dot(q, &k[at..][..d])) / (d as f64).sqrt()).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut acc = vec![0.0f64; d];
            for (w, (_, v)) in weights.iter().zip(rows) {
                acc.iter_mut().zip(&v[at..][..d]).for_each(|(a, v)| *a += w * f64::from(*v));
            }
            out.iter_mut().zip(acc).for_each(|(o, a)| *o = (a / sum) as f32);
        }
    }

    pub(super) fn export(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        self.check(group, block, dst.len())?;
        let size = self.kv_type.size();
        let mut dst = dst.chunks_mut(size);
        for layer in self.group_layers(group) {
            let values = BLOCK_LEN * self.shapes[layer].row_len();
            let src = &self.layers[layer][block.0 as usize * values..][..values];
            for (v, dst) in src.iter().zip(dst.by_ref()) {
                match self.kv_type {
                    KvType::F32 => dst.copy_from_slice(&v.to_le_bytes()),
                    _ => dst.copy_from_slice(&f16::from_f32(*v).to_le_bytes()),
                }
            }
        }
        Ok(())
    }

    /// Zeroes the rows from `rows` on in the bytes of an exported block.
    pub(super) fn clear_rows(&self, group: KvGroup, rows: usize, bytes: &mut [u8]) {
        let mut rest = bytes;
        for layer in self.group_layers(group) {
            let row_bytes = self.shapes[layer].row_len() * self.kv_type.size();
            let Some((block, behind)) = rest.split_at_mut_checked(BLOCK_LEN * row_bytes) else { return };
            block[rows.min(BLOCK_LEN) * row_bytes..].fill(0);
            rest = behind;
        }
    }

    pub(super) fn import(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        self.check(group, block, src.len())?;
        let kv_type = self.kv_type;
        let layers: Vec<usize> = self.group_layers(group).collect();
        let mut src = src.chunks(kv_type.size());
        for layer in layers {
            let values = BLOCK_LEN * self.shapes[layer].row_len();
            let dst = &mut self.layers[layer][block.0 as usize * values..][..values];
            for (v, src) in dst.iter_mut().zip(src.by_ref()) {
                *v = match kv_type {
                    KvType::F32 => f32::from_le_bytes([src[0], src[1], src[2], src[3]]),
                    _ => f16::from_le_bytes([src[0], src[1]]).to_f32(),
                };
            }
        }
        Ok(())
    }

    fn check(&self, group: KvGroup, block: BlockId, len: usize) -> Result<(), ExecError> {
        let blocks = match group {
            KvGroup::Full => self.capacity.full,
            KvGroup::Sliding => self.capacity.sliding,
        };
        if block.0 >= blocks || len != self.block_bytes(group) {
            return Err(ExecError::InvalidBatch(format!(
                "block {} of {blocks} in group {group:?} with {len} bytes, a block has {}",
                block.0,
                self.block_bytes(group)
            )));
        }
        Ok(())
    }

    fn group_layers(&self, group: KvGroup) -> impl Iterator<Item = usize> + '_ {
        self.shapes.iter().enumerate().filter(move |(_, shape)| shape.group == group).map(|(i, _)| i)
    }
}
