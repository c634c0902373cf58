//! Weights on the device, one copy: matrices in the file's layout, cut into slabs of rows that fit a binding.

use muser_backend::LayerRange;
use muser_backend::arith::{MatrixRole, Segments};
use muser_gguf::GgmlType;
use muser_model::{Matrix, Model};

use crate::WgpuError;
use crate::device::{Buffer, Device};
use crate::text::{block_text, float_number, unit_len};

/// Bytes that are on their way to the device at most.
const STAGING_BYTES: usize = 64 << 20;
/// Bytes behind the last row that kernels may read.
const PADDING: u64 = 16;

/// Some rows of a matrix.
pub(crate) struct Slab {
    pub(crate) buffer: Buffer,
    pub(crate) first_row: u32,
    pub(crate) rows: u32,
}

/// A matrix on the device.
pub(crate) struct Weight {
    pub(crate) ty: GgmlType,
    pub(crate) rows: u32,
    pub(crate) blocks: u32,
    pub(crate) row_bytes: u32,
    pub(crate) scale: f32,
    pub(crate) segments: u32,
    pub(crate) slabs: Vec<Slab>,
}

impl Weight {
    /// Is there a factor on products and looked up rows?
    pub(crate) fn is_scaled(&self) -> bool {
        self.scale.to_bits() != 1.0f32.to_bits()
    }
}

/// Matrices and norms of a layer.
pub(crate) struct LayerOnDevice {
    pub(crate) attn_q: Weight,
    pub(crate) attn_k: Weight,
    pub(crate) attn_v: Weight,
    pub(crate) attn_gate: Weight,
    pub(crate) attn_output: Weight,
    pub(crate) ffn_gate: Weight,
    pub(crate) ffn_up: Weight,
    pub(crate) ffn_down: Weight,
    pub(crate) attn_norm: Buffer,
    pub(crate) q_norm: Buffer,
    pub(crate) k_norm: Buffer,
    pub(crate) post_attention_norm: Buffer,
    pub(crate) ffn_norm: Buffer,
    pub(crate) post_ffw_norm: Buffer,
}

/// Weights of a range of layers.
pub(crate) struct Weights {
    /// With the first layer, and where there is a draft.
    pub(crate) embedding: Option<Weight>,
    pub(crate) layers: Vec<LayerOnDevice>,
    /// With the last layer.
    pub(crate) output: Option<Weight>,
    pub(crate) output_norm: Buffer,
}

/// What activations a matrix reads: 1 codes with a scale per 256, 2 per 32, 4 floats.
pub(crate) fn form_of(ty: GgmlType) -> u32 {
    match ty {
        _ if float_number(ty).is_some() => 4,
        _ if unit_len(ty) == 256 => 1,
        _ => 2,
    }
}

/// Refuses what there is no kernel for.
pub(crate) fn check(matrix: &Matrix) -> Result<(), WgpuError> {
    let refuse = |what: String| Err(WgpuError::Unsupported(format!("{}: {what}", matrix.name)));
    if block_text(matrix.ty).is_empty() && float_number(matrix.ty).is_none() {
        return refuse(format!("no kernel for type {}", matrix.ty.name()));
    }
    if !matrix.cols.is_multiple_of(256) || matrix.cols == 0 {
        return refuse(format!("{} inputs, expected a multiple of 256", matrix.cols));
    }
    Ok(())
}

/// The matrices of a range of layers.
pub(crate) fn of_range(model: &Model, range: LayerRange) -> impl Iterator<Item = &Matrix> {
    let table = range.has_embedding().then_some(&model.token_embd);
    let output = range.has_output().then_some(&model.output);
    table.into_iter().chain(model.matrices_of(range.layers())).chain(output)
}

/// Bytes that matrices take.
pub(crate) fn bytes_of<'a>(matrices: impl Iterator<Item = &'a Matrix>) -> u64 {
    matrices.map(|matrix| matrix.bytes().len() as u64 + PADDING).sum()
}

/// Copies matrices, a bounded part of them on its way at a time.
pub(crate) struct Loader<'a> {
    device: &'a Device,
    pending: usize,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(device: &'a Device) -> Self {
        Self { device, pending: 0 }
    }

    /// A vector of f32.
    pub(crate) fn vector(&self, values: &[f32]) -> Result<Buffer, WgpuError> {
        self.device.filled(values, "a norm's weights")
    }

    /// A matrix for its role; without one, a table whose rows are looked up.
    pub(crate) fn matrix(&mut self, matrix: &Matrix, role: Option<MatrixRole>) -> Result<Weight, WgpuError> {
        check(matrix)?;
        let row_bytes = matrix.row_bytes();
        let facts = &self.device.facts;
        // Kernels count bytes of a slab in 32 bits.
        let limit = facts.binding.min(facts.buffer).min(u64::from(u32::MAX)) - PADDING;
        // Whole words: rows of some types end inside one.
        let most = (limit / row_bytes as u64) as usize / 4 * 4;
        if most == 0 {
            let what = format!(
                "{}: four rows of {row_bytes} bytes, the device binds {limit} at a time",
                matrix.name
            );
            return Err(WgpuError::Unsupported(what));
        }
        let mut slabs = Vec::new();
        for first in (0..matrix.rows).step_by(most) {
            let rows = most.min(matrix.rows - first);
            let buffer = self.device.buffer((rows * row_bytes) as u64 + PADDING, "the weights")?;
            self.copy(matrix, first, rows, &buffer)?;
            slabs.push(Slab { buffer, first_row: first as u32, rows: rows as u32 });
        }
        let float = float_number(matrix.ty).is_some();
        let segments = role.filter(|_| !float).map_or(1, |role| Segments::of(role, matrix.cols).count());
        Ok(Weight {
            ty: matrix.ty,
            rows: matrix.rows as u32,
            blocks: (matrix.cols / 256) as u32,
            row_bytes: row_bytes as u32,
            scale: matrix.scale,
            segments: segments as u32,
            slabs,
        })
    }

    fn copy(&mut self, matrix: &Matrix, first: usize, rows: usize, to: &Buffer) -> Result<(), WgpuError> {
        matrix
            .check_scales(first..first + rows)
            .map_err(|error| WgpuError::Unsupported(error.to_string()))?;
        let row_bytes = matrix.row_bytes();
        let bytes = first * row_bytes..(first + rows) * row_bytes;
        let chunk = (STAGING_BYTES / 4).next_multiple_of(4);
        for from in bytes.clone().step_by(chunk) {
            let part = from..(from + chunk).min(bytes.end);
            matrix.will_read(part.clone());
            self.device.write(to, (from - bytes.start) as u64, &matrix.bytes()[part.clone()])?;
            matrix.has_read(part.clone());
            self.pending += part.len();
            if self.pending >= STAGING_BYTES {
                self.settle()?;
            }
        }
        Ok(())
    }

    /// Waits for everything that is on its way.
    pub(crate) fn settle(&mut self) -> Result<(), WgpuError> {
        self.pending = 0;
        self.device.submit(self.device.recorder())?;
        self.device.wait()
    }
}

impl Weights {
    /// Loads a range of a model.
    pub(crate) fn load(device: &Device, model: &Model, range: LayerRange) -> Result<Self, WgpuError> {
        let mut loader = Loader::new(device);
        let mut layers = Vec::with_capacity(range.count());
        for l in &model.layers[range.layers()] {
            let mut matrix = |matrix: &Matrix, role| loader.matrix(matrix, Some(role));
            layers.push(LayerOnDevice {
                attn_q: matrix(&l.attn_q, MatrixRole::AttnIn)?,
                attn_k: matrix(&l.attn_k, MatrixRole::AttnIn)?,
                attn_v: matrix(&l.attn_v, MatrixRole::AttnIn)?,
                attn_gate: matrix(&l.attn_gate, MatrixRole::AttnIn)?,
                attn_output: matrix(&l.attn_output, MatrixRole::AttnOut)?,
                ffn_gate: matrix(&l.ffn_gate, MatrixRole::FfnIn)?,
                ffn_up: matrix(&l.ffn_up, MatrixRole::FfnIn)?,
                ffn_down: matrix(&l.ffn_down, MatrixRole::FfnDown)?,
                attn_norm: loader.vector(&l.attn_norm)?,
                q_norm: loader.vector(&l.attn_q_norm)?,
                k_norm: loader.vector(&l.attn_k_norm)?,
                post_attention_norm: loader.vector(&l.post_attention_norm)?,
                ffn_norm: loader.vector(&l.ffn_norm)?,
                post_ffw_norm: loader.vector(&l.post_ffw_norm)?,
            });
        }
        let output = range.has_output().then(|| loader.matrix(&model.output, Some(MatrixRole::Output)));
        let embedding = range.has_embedding().then(|| loader.matrix(&model.token_embd, None));
        let weights = Self {
            layers,
            output: output.transpose()?,
            output_norm: loader.vector(&model.output_norm)?,
            embedding: embedding.transpose()?,
        };
        loader.settle()?;
        Ok(weights)
    }

    /// Loads the embedding table for a draft behind a cut.
    pub(crate) fn load_table(&mut self, device: &Device, model: &Model) -> Result<(), WgpuError> {
        let mut loader = Loader::new(device);
        self.embedding = Some(loader.matrix(&model.token_embd, None)?);
        loader.settle()
    }
}
