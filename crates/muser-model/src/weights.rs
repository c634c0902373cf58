//! The tensors of a model, looked up by name, checked against the geometry and bound to the mapped file.
//!
//! Tolerated: trailing dimensions of 1, norm vectors in F16 or BF16, a factor (`<stem>.scale` or `<stem>.weight.scale`) beside
//! any matrix, tensors that the architecture does not have unless they are factors: one that is left out gives garbage. Refused: everything else, also files without `attn_q_norm` and `attn_k_norm`
//! (some converters leave them out), since such files may also have the rows of Q and K in another order, which no key
//! tells.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use muser_gguf::{GgmlType, GgufError, GgufFile, TensorInfo, dequantize_row};

use crate::{Geometry, ModelError};

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
    /// Factor on the product, and on rows that are looked up (NVFP4's per-tensor `<stem>.scale`), finite and above zero; 1 when
    /// the file has none.
    pub scale: f32,
    pub(crate) file: Arc<GgufFile>,
    pub(crate) shard: usize,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} [{}, {}]", self.name, self.ty.name(), self.cols, self.rows)
    }
}

impl Matrix {
    /// All bytes, row after row.
    pub fn bytes(&self) -> &[u8] {
        &self.file.shard_bytes(self.shard)[self.offset..][..self.len]
    }

    /// Says that `bytes` of [`Self::bytes`] will be read once, soon.
    pub fn will_read(&self, bytes: Range<usize>) {
        self.file.will_read(self.shard, self.offset + bytes.start..self.offset + bytes.end.min(self.len));
    }

    /// Says that `bytes` of [`Self::bytes`] have been read and are not needed for now.
    pub fn has_read(&self, bytes: Range<usize>) {
        self.file.has_read(self.shard, self.offset + bytes.start..self.offset + bytes.end.min(self.len));
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.len / self.rows
    }

    /// Bytes of row `row`.
    pub fn row(&self, row: usize) -> &[u8] {
        &self.bytes()[row * self.row_bytes()..][..self.row_bytes()]
    }

    /// Row `row` as it is looked up in a table: decoded, times the factor.
    pub fn look_up(&self, row: usize, out: &mut [f32]) -> Result<(), GgufError> {
        dequantize_row(self.ty, self.row(row), out)?;
        if self.scale != 1.0 {
            out.iter_mut().for_each(|value| *value *= self.scale);
        }
        Ok(())
    }

    /// Reads the block scales of some rows of a 4-bit float type, and refuses what no quantiser writes: a NaN, a sign. Other
    /// types have nothing to check. To be called where the bytes are read anyway.
    pub fn check_scales(&self, rows: Range<usize>) -> Result<(), ModelError> {
        let (bad, scales): (fn(&[u8]) -> bool, usize) = match self.ty {
            GgmlType::NVFP4 => (no_scales, 4),
            GgmlType::MXFP4 => (|block| block[0] == 0xFF, 1),
            _ => return Ok(()),
        };
        let (block, len) = (self.ty.block_bytes(), self.ty.block_len());
        for row in rows {
            let Some(at) = self.row(row).chunks_exact(block).position(bad) else { continue };
            let found = &self.row(row)[at * block..][..scales];
            let (first, last) = (at * len, (at + 1) * len - 1);
            let found = format!("bytes {found:02X?} in row {row}, inputs {first} to {last}: a damaged file");
            return Err(wrong(&self.name, "block scales that are numbers of zero or more", found));
        }
        Ok(())
    }
}

/// Has one of the four scales of an NVFP4 block a sign, or is one a NaN (all bits but the sign set)?
fn no_scales(block: &[u8]) -> bool {
    const TOPS: u32 = 0x8080_8080;
    let word = u32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    // Without signs nothing is carried from byte to byte.
    word & TOPS != 0 || (word + 0x0101_0101) & TOPS != 0
}

/// The matrix that a tensor of this name is the factor of: `<stem>.scale` is what most programs write, some
/// `<stem>.weight.scale`.
pub(crate) fn owner_of_factor(name: &str) -> Option<String> {
    let stem = name.strip_suffix(".scale")?;
    Some(format!("{}.weight", stem.strip_suffix(".weight").unwrap_or(stem)))
}

/// Refuses a factor of something that is no matrix of `bound`: leaving it out would give garbage without a word.
pub(crate) fn check_factors<'a>(
    file: &GgufFile,
    bound: impl IntoIterator<Item = &'a Matrix>,
) -> Result<(), ModelError> {
    let names: HashSet<&str> = bound.into_iter().map(|matrix| matrix.name.as_str()).collect();
    for tensor in file.tensors() {
        if let Some(owner) = owner_of_factor(&tensor.name)
            && !names.contains(owner.as_str())
        {
            let expected = format!("no factor, since this model has no matrix {owner}");
            return Err(wrong(&tensor.name, expected, format!("shape {:?}", tensor.dims)));
        }
    }
    Ok(())
}

/// Weights of one layer. Norm vectors are copied out as f32.
#[derive(Clone)]
#[expect(missing_docs, reason = "the names are those of the file; the formula is muser_backend::reference")]
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

impl Model {
    /// Opens a file or split set and binds its weights.
    pub fn load(path: impl AsRef<Path>) -> Result<Model, ModelError> {
        Model::from_gguf(Arc::new(GgufFile::open(path)?))
    }

    /// Checks an open file against the contract of the architecture and binds its weights.
    pub fn from_gguf(file: Arc<GgufFile>) -> Result<Model, ModelError> {
        let geometry = Geometry::from_gguf(&file)?;
        let g = &geometry;
        let binder = Binder { file: &file };
        let token_embd = binder.matrix("token_embd", g.hidden, g.vocab)?;
        let output_norm = binder.vector("output_norm", g.hidden)?;
        let output = binder.matrix("output", g.hidden, g.vocab)?;
        let layers = (0..g.layers()).map(|layer| binder.layer(g, layer)).collect::<Result<Vec<_>, _>>()?;
        let model = Model { file, geometry, token_embd, output_norm, output, layers };
        check_factors(&model.file, model.matrices())?;
        Ok(model)
    }

    /// All matrices: the table, those of the layers, the vocabulary matrix.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let of_layers = self.matrices_of(0..self.layers.len());
        std::iter::once(&self.token_embd).chain(of_layers).chain(std::iter::once(&self.output))
    }

    /// The matrices of some layers.
    pub fn matrices_of(&self, layers: Range<usize>) -> impl Iterator<Item = &Matrix> {
        self.layers[layers].iter().flat_map(|l| {
            [
                &l.attn_q,
                &l.attn_k,
                &l.attn_v,
                &l.attn_gate,
                &l.attn_output,
                &l.ffn_gate,
                &l.ffn_up,
                &l.ffn_down,
            ]
        })
    }
}

/// Looks tensors up by name and checks their shape. Names are given without `.weight`.
pub(crate) struct Binder<'a> {
    pub(crate) file: &'a Arc<GgufFile>,
}

impl Binder<'_> {
    fn layer(&self, g: &Geometry, layer: usize) -> Result<LayerWeights, ModelError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let matrix = |part: &str, cols, rows| self.matrix(&name(part), cols, rows);
        let vector = |part: &str, len| self.vector(&name(part), len);
        Ok(LayerWeights {
            attn_norm: vector("attn_norm", g.hidden)?,
            attn_q: matrix("attn_q", g.hidden, g.q_width())?,
            attn_k: matrix("attn_k", g.hidden, g.kv_width())?,
            attn_v: matrix("attn_v", g.hidden, g.kv_width())?,
            attn_gate: matrix("attn_gate", g.hidden, g.q_width())?,
            attn_q_norm: vector("attn_q_norm", g.head_dim)?,
            attn_k_norm: vector("attn_k_norm", g.head_dim)?,
            attn_output: matrix("attn_output", g.q_width(), g.hidden)?,
            post_attention_norm: vector("post_attention_norm", g.hidden)?,
            ffn_norm: vector("ffn_norm", g.hidden)?,
            ffn_gate: matrix("ffn_gate", g.hidden, g.ffn)?,
            ffn_up: matrix("ffn_up", g.hidden, g.ffn)?,
            ffn_down: matrix("ffn_down", g.ffn, g.hidden)?,
            post_ffw_norm: vector("post_ffw_norm", g.hidden)?,
        })
    }

    /// A matrix with its optional per-tensor factor.
    pub(crate) fn matrix(&self, stem: &str, cols: usize, rows: usize) -> Result<Matrix, ModelError> {
        self.shaped_matrix(stem, &[cols, rows], cols, rows)
    }

    /// A matrix whose inputs are spread over several dimensions of the file.
    pub(crate) fn shaped_matrix(
        &self,
        stem: &str,
        shape: &[usize],
        cols: usize,
        rows: usize,
    ) -> Result<Matrix, ModelError> {
        let tensor = self.tensor(&format!("{stem}.weight"), shape)?;
        if !tensor.ty.is_decodable() || tensor.ty == GgmlType::Q8_K {
            let (expected, found) = ("a type that muser can multiply with", tensor.ty.name());
            let hint = "take a file quantised to Q2_K, Q3_K, IQ4_XS or more bits";
            return Err(wrong(&tensor.name, expected, format!("{found}; {hint}")));
        }
        Ok(Matrix {
            name: tensor.name.clone(),
            ty: tensor.ty,
            rows,
            cols,
            scale: self.scale(stem)?,
            file: Arc::clone(self.file),
            shard: tensor.shard,
            offset: tensor.offset,
            len: tensor.len,
        })
    }

    /// A vector, copied out as f32.
    pub(crate) fn vector(&self, stem: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(&format!("{stem}.weight"), &[len])?;
        self.floats(tensor, len)
    }

    /// The vector that is added to a product or a norm, copied out as f32.
    pub(crate) fn bias(&self, stem: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(&format!("{stem}.bias"), &[len])?;
        self.floats(tensor, len)
    }

    /// A table of `rows` rows of `cols` values, copied out as f32.
    pub(crate) fn table(&self, stem: &str, cols: usize, rows: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(&format!("{stem}.weight"), &[cols, rows])?;
        self.floats(tensor, cols * rows)
    }

    fn scale(&self, stem: &str) -> Result<f32, ModelError> {
        let names = [format!("{stem}.scale"), format!("{stem}.weight.scale")];
        let mut found = names.iter().filter(|name| self.file.tensor(name).is_some());
        let Some(name) = found.next() else { return Ok(1.0) };
        if let Some(second) = found.next() {
            return Err(wrong(second, format!("one factor, {name}"), "a second one for the same matrix"));
        }
        let factor = self.floats(self.tensor(name, &[1])?, 1)?[0];
        if factor > 0.0 { Ok(factor) } else { Err(wrong(name, "a factor above zero", factor.to_string())) }
    }

    fn floats(&self, tensor: &TensorInfo, len: usize) -> Result<Vec<f32>, ModelError> {
        if !matches!(tensor.ty, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16) {
            return Err(wrong(&tensor.name, "type F32, F16 or BF16", tensor.ty.name()));
        }
        let mut values = vec![0.0; len];
        dequantize_row(tensor.ty, self.file.tensor_data(tensor), &mut values)?;
        match values.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(wrong(&tensor.name, "finite numbers", format!("{} at index {at}", values[at]))),
            None => Ok(values),
        }
    }

    /// A tensor by its whole name, of this shape.
    pub(crate) fn tensor(&self, name: &str, shape: &[usize]) -> Result<&TensorInfo, ModelError> {
        let Some(tensor) = self.file.tensor(name) else {
            return Err(wrong(name, format!("a tensor of shape {shape:?}"), "no such tensor"));
        };
        // Trailing dimensions of 1 mean nothing.
        let significant = tensor.dims.iter().rposition(|dim| *dim != 1).map_or(1, |last| last + 1);
        let found = &tensor.dims[..significant.max(shape.len()).min(tensor.dims.len())];
        if found.len() != shape.len()
            || found.iter().zip(shape).any(|(found, expected)| *found != *expected as u64)
        {
            return Err(wrong(name, format!("shape {shape:?}"), format!("{:?}", tensor.dims)));
        }
        Ok(tensor)
    }
}

pub(crate) fn wrong(name: &str, expected: impl Into<String>, found: impl Into<String>) -> ModelError {
    ModelError::Tensor { name: name.to_owned(), expected: expected.into(), found: found.into() }
}
