//! The tensors of a model, looked up by name, checked against the geometry and bound to the mapped file.

use std::sync::Arc;

use muser_gguf::{GgmlType, GgufFile};

use crate::Geometry;

/// A weight matrix in the mapped file: `rows` output rows of `cols` inputs, each row whole blocks of `ty`.
#[derive(Clone)]
pub struct Matrix {
    /// Name in the file.
    pub name: String,
    /// Block type.
    pub ty: GgmlType,
    /// Output rows (`ne[1]`).
    pub rows: usize,
    /// Inputs (`ne[0]`).
    pub cols: usize,
    /// Factor on the product (NVFP4's per-tensor `<stem>.scale`); 1 when the file has none.
    pub scale: f32,
    pub(crate) file: Arc<GgufFile>,
    pub(crate) shard: usize,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

impl Matrix {
    /// All bytes, row after row.
    pub fn bytes(&self) -> &[u8] {
        &self.file.shard_bytes(self.shard)[self.offset..][..self.len]
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.len / self.rows
    }

    /// Bytes of row `row`.
    pub fn row(&self, row: usize) -> &[u8] {
        &self.bytes()[row * self.row_bytes()..][..self.row_bytes()]
    }
}

/// Weights of one layer. Norm vectors are copied out as f32.
#[derive(Clone)]
#[expect(missing_docs, reason = "the names are those of the file; the formula is in spec section 1.2")]
pub struct LayerWeights {
    pub attn_norm: Vec<f32>,
    pub attn_q: Matrix,
    pub attn_k: Matrix,
    pub attn_v: Matrix,
    pub attn_gate: Matrix,
    pub attn_q_norm: Vec<f32>,
    pub attn_k_norm: Vec<f32>,
    pub attn_output: Matrix,
    pub post_attention_norm: Vec<f32>,
    pub ffn_norm: Vec<f32>,
    pub ffn_gate: Matrix,
    pub ffn_up: Matrix,
    pub ffn_down: Matrix,
    pub post_ffw_norm: Vec<f32>,
}

/// A checked model over a mapped file. Cheap to clone: weights stay in the map.
#[derive(Clone)]
pub struct Model {
    /// The file(s).
    pub file: Arc<GgufFile>,
    /// Shape and constants.
    pub geometry: Geometry,
    /// Embedding table, `vocab` rows of `hidden`.
    pub token_embd: Matrix,
    /// Norm before the vocabulary matrix.
    pub output_norm: Vec<f32>,
    /// Vocabulary matrix, `vocab` rows of `hidden`.
    pub output: Matrix,
    /// Layers in order.
    pub layers: Vec<LayerWeights>,
}
