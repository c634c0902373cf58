//! K and V of the reference executor: one flat array per layer, positions found through block ids.
//!
//! Layout of a layer's array: `[block][position in block][K: kv_heads x head_dim, V: the same]`. An exported block is
//! the layers of its group in order, each `[256][K, V]`, in the storage type, little-endian.

use half::f16;
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::Geometry;

use super::ops;
use crate::{ExecError, KvCapacity, KvType};

pub(super) struct KvStore {
    kv_type: KvType,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    sliding: Vec<bool>,
    capacity: KvCapacity,
    /// One array per layer; always f32 in memory, rounded through f16 on writing when that is the storage type.
    layers: Vec<Vec<f32>>,
}

impl KvStore {
    pub(super) fn new(g: &Geometry, kv_type: KvType) -> Self {
        Self {
            kv_type,
            heads: g.heads,
            kv_heads: g.kv_heads,
            head_dim: g.head_dim,
            sliding: g.sliding.clone(),
            capacity: KvCapacity { full: 0, sliding: 0 },
            layers: vec![Vec::new(); g.layers()],
        }
    }

    pub(super) fn capacity(&self) -> KvCapacity {
        self.capacity
    }

    pub(super) fn block_bytes(&self, group: KvGroup) -> usize {
        self.group_layers(group).count() * BLOCK_LEN * self.row_len() * self.kv_type.size()
    }

    pub(super) fn allocate(&mut self, capacity: KvCapacity) {
        self.capacity = capacity;
        let row_len = self.row_len();
        for (layer, sliding) in self.layers.iter_mut().zip(&self.sliding) {
            let blocks = if *sliding { capacity.sliding } else { capacity.full };
            *layer = vec![0.0; blocks as usize * BLOCK_LEN * row_len];
        }
    }

    /// Stores the K and V of one position.
    pub(super) fn write(&mut self, layer: usize, place: (BlockId, usize), k: &[f32], v: &[f32]) {
        let at = self.row_at(place);
        let kv_type = self.kv_type;
        let row = &mut self.layers[layer][at..][..k.len() + v.len()];
        for (dst, src) in row.iter_mut().zip(k.iter().chain(v)) {
            *dst = match kv_type {
                KvType::F32 => *src,
                KvType::F16 => f16::from_f32(src.clamp(-65504.0, 65504.0)).to_f32(),
            };
        }
    }

    /// `out = softmax(q k / sqrt(head_dim)) v` over `positions` for every query head of one row.
    pub(super) fn attend(
        &self,
        layer: usize,
        positions: std::ops::Range<usize>,
        place: impl Fn(usize) -> (BlockId, usize),
        q: &[f32],
        out: &mut [f32],
    ) {
        let d = self.head_dim;
        let rows: Vec<&[f32]> =
            positions.map(|p| &self.layers[layer][self.row_at(place(p))..][..self.row_len()]).collect();
        for (head, (q, out)) in q.chunks(d).zip(out.chunks_mut(d)).enumerate() {
            let k_at = head / (self.heads / self.kv_heads) * d;
            let v_at = self.kv_heads * d + k_at;
            let scores: Vec<f64> =
                rows.iter().map(|r| f64::from(ops::dot(q, &r[k_at..][..d])) / (d as f64).sqrt()).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut acc = vec![0.0f64; d];
            for (w, row) in weights.iter().zip(&rows) {
                acc.iter_mut().zip(&row[v_at..][..d]).for_each(|(a, v)| *a += w * f64::from(*v));
            }
            out.iter_mut().zip(acc).for_each(|(o, a)| *o = (a / sum) as f32);
        }
    }

    pub(super) fn export(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        self.check(group, block, dst.len())?;
        let values = BLOCK_LEN * self.row_len();
        let size = self.kv_type.size();
        for (layer, dst) in self.group_layers(group).zip(dst.chunks_mut(values * size)) {
            let src = &self.layers[layer][block.0 as usize * values..][..values];
            for (v, dst) in src.iter().zip(dst.chunks_mut(size)) {
                match self.kv_type {
                    KvType::F32 => dst.copy_from_slice(&v.to_le_bytes()),
                    KvType::F16 => dst.copy_from_slice(&f16::from_f32(*v).to_le_bytes()),
                }
            }
        }
        Ok(())
    }

    pub(super) fn import(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        self.check(group, block, src.len())?;
        let values = BLOCK_LEN * self.row_len();
        let kv_type = self.kv_type;
        let layers: Vec<usize> = self.group_layers(group).collect();
        for (layer, src) in layers.into_iter().zip(src.chunks(values * kv_type.size())) {
            let dst = &mut self.layers[layer][block.0 as usize * values..][..values];
            for (v, src) in dst.iter_mut().zip(src.chunks(kv_type.size())) {
                *v = match kv_type {
                    KvType::F32 => f32::from_le_bytes([src[0], src[1], src[2], src[3]]),
                    KvType::F16 => f16::from_le_bytes([src[0], src[1]]).to_f32(),
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
        let wanted = group == KvGroup::Sliding;
        self.sliding.iter().enumerate().filter(move |(_, s)| **s == wanted).map(|(i, _)| i)
    }

    /// Values of one position in one layer: K of all heads, then V of all heads.
    fn row_len(&self) -> usize {
        2 * self.kv_heads * self.head_dim
    }

    fn row_at(&self, (block, row): (BlockId, usize)) -> usize {
        (block.0 as usize * BLOCK_LEN + row) * self.row_len()
    }
}
