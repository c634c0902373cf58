//! What of a model takes memory and time, from its header.

use muser_backend::{KvType, LayerRange};
use muser_gguf::{GgmlType, GgufFile};
use muser_model::synth::{self, Mix, Preset, SynthOptions};
use muser_model::{Geometry, ModelError};

/// Positions of a block of K and V.
const BLOCK: u64 = muser_model::cost::KV_BLOCK;
/// Positions beyond the window that a sequence may hold for rows in flight, as the engine has it.
const WINDOW_SLACK: u64 = 16;

/// Weights of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerSize {
    /// Bytes, all of which a token reads.
    pub bytes: u64,
    /// Floating-point operations of its matrices for one token.
    pub flops: u64,
}

/// Sizes of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSize {
    /// Shape and constants.
    pub geometry: Geometry,
    /// Layers in order.
    pub layers: Vec<LayerSize>,
    /// The embedding table, of which a token reads one row.
    pub table: u64,
    /// Final norm and vocabulary matrix.
    pub output: LayerSize,
}

impl ModelSize {
    /// From an open file, of which nothing but the header is read.
    pub fn of_file(file: &GgufFile, geometry: &Geometry) -> Self {
        let table = file.tensors().iter();
        Self::of_table(
            table.map(|tensor| (tensor.name.as_str(), tensor.dims.as_slice(), tensor.ty)),
            geometry,
        )
    }

    /// From names, dimensions and types. What the text model does not use counts nowhere.
    pub fn of_table<'a>(
        table: impl IntoIterator<Item = (&'a str, &'a [u64], GgmlType)>,
        geometry: &Geometry,
    ) -> Self {
        let mut size = Self {
            geometry: geometry.clone(),
            layers: vec![LayerSize::default(); geometry.layers()],
            table: 0,
            output: LayerSize::default(),
        };
        for (name, dims, ty) in table {
            let values = dims.iter().fold(1_u64, |product, dim| product.saturating_mul(*dim));
            let bytes = (values / ty.block_len() as u64).saturating_mul(ty.block_bytes() as u64);
            let place = match name.split('.').collect::<Vec<_>>()[..] {
                ["token_embd", ..] => {
                    size.table = size.table.saturating_add(bytes);
                    continue;
                }
                ["output" | "output_norm", ..] => &mut size.output,
                ["blk", layer, ..] => {
                    let layer = layer.parse().ok().and_then(|layer: usize| size.layers.get_mut(layer));
                    let Some(layer) = layer else { continue };
                    layer
                }
                _ => continue,
            };
            place.bytes = place.bytes.saturating_add(bytes);
            if dims.len() > 1 {
                place.flops = place.flops.saturating_add(values.saturating_mul(2));
            }
        }
        size
    }

    /// The released model in its usual types, for when no file is here.
    ///
    /// # Errors
    /// None that could be seen: the table is made of constants.
    pub fn released() -> Result<Self, ModelError> {
        let table = synth::table(&SynthOptions::new(Preset::B30, Mix::Medium(GgmlType::Q4_K)))?;
        let table = table.iter().map(|(name, dims, ty)| (name.as_str(), dims.as_slice(), *ty));
        Ok(Self::of_table(table, &Geometry::released()))
    }

    /// Bytes of all weights.
    pub fn bytes(&self) -> u64 {
        self.table + self.streamed(LayerRange::whole(self.layers.len()))
    }

    /// Bytes of a range that a token reads.
    pub fn streamed(&self, range: LayerRange) -> u64 {
        let layers: u64 = self.layers[range.layers()].iter().map(|layer| layer.bytes).sum();
        layers + if range.has_output() { self.output.bytes } else { 0 }
    }

    /// Floating-point operations of a range for one token.
    pub fn flops(&self, range: LayerRange) -> u64 {
        let layers: u64 = self.layers[range.layers()].iter().map(|layer| layer.flops).sum();
        layers + if range.has_output() { self.output.flops } else { 0 }
    }

    /// Bytes of K and V that a range keeps for `sequences` of `context` positions: whole blocks, and of layers with a window those
    /// that it may lie across.
    pub fn kv_bytes(&self, range: LayerRange, context: u32, sequences: u32, kv: KvType) -> u64 {
        let blocks = u64::from(context).div_ceil(BLOCK);
        let window = (self.geometry.window as u64 + WINDOW_SLACK).div_ceil(BLOCK) + 2;
        let full = blocks * BLOCK;
        self.kv_positions(range, |sliding| if sliding { window * BLOCK } else { full })
            * u64::from(sequences)
            * self.row_bytes(kv)
    }

    /// Bytes of K and V of a range that one token at position `position` reads.
    pub fn kv_read(&self, range: LayerRange, position: u32, kv: KvType) -> u64 {
        let all = u64::from(position);
        let window = all.min(self.geometry.window as u64);
        self.kv_positions(range, |sliding| if sliding { window } else { all }) * self.row_bytes(kv)
    }

    /// Bytes of K and V of one layer.
    pub(crate) fn kv_of_layer(&self, positions: u64, kv: KvType) -> u64 {
        positions * self.row_bytes(kv)
    }

    fn kv_positions(&self, range: LayerRange, of_layer: impl Fn(bool) -> u64) -> u64 {
        self.geometry.sliding[range.layers()].iter().map(|sliding| of_layer(*sliding)).sum()
    }

    fn row_bytes(&self, kv: KvType) -> u64 {
        (self.geometry.kv_heads * kv.head_bytes(self.geometry.head_dim)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_released_model_to_the_byte() {
        let model = ModelSize::released().expect("constants");
        let whole = LayerRange::whole(52);
        assert_eq!(model.bytes(), 16_743_567_360);
        assert_eq!(model.streamed(whole), 15_987_099_648);
        assert_eq!((model.table, model.output.bytes), (756_467_712, 924_571_648 + 4 * 6656));
        // Its parts are the whole, wherever it is cut.
        for cut in 1..52 {
            let [a, b] = [0..cut, cut..52].map(|layers| LayerRange::new(layers, 52).expect("inside"));
            assert_eq!(model.streamed(a) + model.streamed(b), model.streamed(whole));
            assert_eq!(model.flops(a) + model.flops(b), model.flops(whole));
            let kv = |range| model.kv_bytes(range, 32_768, 3, KvType::Int16);
            assert_eq!(kv(a) + kv(b), kv(whole));
        }
        // 13 full layers of 128 blocks, 39 of 11 blocks, 1,040 bytes a position.
        let expected = (13 * 128 + 39 * 11) * 256 * 1040;
        assert_eq!(model.kv_bytes(whole, 32_768, 1, KvType::Int16), expected);
        assert_eq!(model.kv_read(whole, 4096, KvType::Int8), (13 * 4096 + 39 * 2048) * 528);
    }

    #[test]
    fn a_table_that_makes_no_sense_counts_nowhere() {
        let geometry = Geometry::released();
        let dims = [u64::MAX, u64::MAX];
        let table = ["blk.52.attn_q.weight", "blk.x.attn_q.weight", "rope.weight", "v.blk.0.weight"];
        let table = table.map(|name| (name, &dims[..], GgmlType::Q4_K));
        assert_eq!(ModelSize::of_table(table, &geometry).bytes(), 0);
        let odd = [("blk.3.attn_q.weight", &dims[..], GgmlType::Q4_K)];
        assert!(ModelSize::of_table(odd, &geometry).layers[3].bytes > 1 << 60, "saturated");
    }
}
