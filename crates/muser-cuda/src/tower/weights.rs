//! A projector's weights on the card.

use std::sync::Arc;

use muser_backend::arith::MatrixRole;
use muser_backend::arith::vision::values_of_bytes;
use muser_gguf::{GgmlType, dequantize_row};
use muser_model::{LayerNorm, Matrix, Projector};

use crate::CudaError;
use crate::driver::{Buffer, Context};
use crate::matrix::{AnyKind, Product, RawPart};
use crate::uploader::Repack;
use crate::weights::{Plan, upload};

/// Where the weight and the bias of a norm lie.
#[derive(Clone, Copy)]
pub(super) struct NormOnDevice {
    pub(super) weight: u64,
    pub(super) bias: u64,
}

/// Products, norms and biases of a layer.
pub(super) struct LayerOnDevice {
    /// q, k, v.
    pub(super) attn_in: Product,
    pub(super) attn_out: Product,
    pub(super) ffn_up: Product,
    pub(super) ffn_down: Product,
    pub(super) ln1: NormOnDevice,
    pub(super) ln2: NormOnDevice,
    /// Of q, k and v, one after the other.
    pub(super) bias_in: u64,
    pub(super) bias_out: u64,
    pub(super) bias_up: u64,
    pub(super) bias_down: u64,
}

/// All of them.
pub(super) struct TowerWeights {
    pub(super) patches: Product,
    pub(super) layers: Vec<LayerOnDevice>,
    pub(super) adapters: [Product; 3],
    pub(super) pre_norm: NormOnDevice,
    pub(super) post_norm: NormOnDevice,
    /// The position table, `[place][hidden]`.
    pub(super) positions: u64,
    /// Values of the bytes of each colour.
    pub(super) values: u64,
    _tiles: Buffer<u8>,
    _norms: Buffer<f32>,
    _patches: Buffer<f32>,
}

impl TowerWeights {
    /// Copies and repacks; `repack[tile]` are the kernels.
    pub(super) fn load(
        context: &Arc<Context>,
        projector: &Projector,
        repack: &Repack,
    ) -> Result<Self, CudaError> {
        let c = &projector.config;
        let mut plan = Plan::of_tower();
        let mut layers = Vec::with_capacity(c.layers);
        for l in &projector.layers {
            let inputs = [&l.attn_q, &l.attn_k, &l.attn_v];
            let biases: Vec<f32> = inputs.iter().flat_map(|l| l.bias.iter().copied()).collect();
            layers.push(LayerOnDevice {
                attn_in: plan.product(MatrixRole::AttnIn, c.hidden, &inputs.map(|l| &l.matrix))?,
                attn_out: plan.product(MatrixRole::AttnOut, c.hidden, &[&l.attn_out.matrix])?,
                ffn_up: plan.product(MatrixRole::FfnIn, c.hidden, &[&l.ffn_up.matrix])?,
                ffn_down: plan.product(MatrixRole::FfnDown, c.ffn, &[&l.ffn_down.matrix])?,
                ln1: norm(&mut plan, &l.ln1),
                ln2: norm(&mut plan, &l.ln2),
                bias_in: plan.norm(&biases),
                bias_out: plan.norm(&l.attn_out.bias),
                bias_up: plan.norm(&l.ffn_up.bias),
                bias_down: plan.norm(&l.ffn_down.bias),
            });
        }
        let [first, second, third] = &projector.adapters;
        let mut adapters = [
            plan.product(MatrixRole::FfnDown, first.cols, &[first])?,
            plan.product(MatrixRole::FfnDown, second.cols, &[second])?,
            plan.product(MatrixRole::FfnDown, third.cols, &[third])?,
        ];
        let (mut pre_norm, mut post_norm) =
            (norm(&mut plan, &projector.pre_norm), norm(&mut plan, &projector.post_norm));
        let positions = plan.norm(&projector.positions);
        let values = plan.norm(values_of_bytes(c.mean, c.std).as_flattened());

        let tiles = Buffer::<u8>::new(context, plan.bytes, "the tower's weights")?;
        let norms = Buffer::from_slice(context, &plan.norms, "the tower's norm weights")?;
        upload(context, &plan.jobs, &tiles, repack, None)?;
        let (patches, patch_values) = patch_product(context, &projector.patches)?;

        // Until now addresses were offsets.
        let place = |product: &mut Product| product.addresses().for_each(|address| *address += tiles.at(0));
        let at = |offset: &mut u64| *offset = norms.at(*offset as usize);
        let norm_at = |norm: &mut NormOnDevice| [&mut norm.weight, &mut norm.bias].into_iter().for_each(at);
        for l in &mut layers {
            [&mut l.attn_in, &mut l.attn_out, &mut l.ffn_up, &mut l.ffn_down].into_iter().for_each(place);
            [&mut l.ln1, &mut l.ln2].into_iter().for_each(norm_at);
            let biases = [&mut l.bias_in, &mut l.bias_out, &mut l.bias_up, &mut l.bias_down];
            biases.into_iter().for_each(at);
        }
        adapters.iter_mut().for_each(place);
        [&mut pre_norm, &mut post_norm].into_iter().for_each(norm_at);
        Ok(Self {
            patches,
            layers,
            adapters,
            pre_norm,
            post_norm,
            positions: norms.at(positions as usize),
            values: norms.at(values as usize),
            _tiles: tiles,
            _norms: norms,
            _patches: patch_values,
        })
    }

    pub(super) fn products(&self) -> impl Iterator<Item = &Product> {
        let layers = self.layers.iter().flat_map(|l| [&l.attn_in, &l.attn_out, &l.ffn_up, &l.ffn_down]);
        std::iter::once(&self.patches).chain(layers).chain(&self.adapters)
    }
}

fn norm(plan: &mut Plan<'_>, norm: &LayerNorm) -> NormOnDevice {
    NormOnDevice { weight: plan.norm(&norm.weight), bias: plan.norm(&norm.bias) }
}

/// The product of patches, whose inputs are no multiple of 256: its rows are filled up with zeros, which no sum sees.
fn patch_product(context: &Arc<Context>, matrix: &Matrix) -> Result<(Product, Buffer<f32>), CudaError> {
    if AnyKind::of(matrix.ty) != Some(AnyKind::Float) {
        return Err(CudaError::Unsupported(format!("{matrix:?}: the matrix of patches is one of floats")));
    }
    let k = matrix.cols.next_multiple_of(256);
    let mut values = vec![0.0f32; matrix.rows * k];
    for (row, values) in values.chunks_exact_mut(k).enumerate() {
        let dequantised = dequantize_row(matrix.ty, matrix.row(row), &mut values[..matrix.cols]);
        dequantised.map_err(|error| CudaError::Unsupported(error.to_string()))?;
    }
    let buffer = Buffer::from_slice(context, &values, "the tower's patch weights")?;
    let raw = RawPart {
        ty: GgmlType::F32,
        kind: AnyKind::Float,
        address: buffer.at(0),
        rows: matrix.rows as u32,
        row_bytes: 4 * k,
        first_row: 0,
        scale: matrix.scale,
    };
    let mut product = Product::new(MatrixRole::FfnIn, k);
    product.raw.push(raw);
    product.out_rows = matrix.rows;
    Ok((product, buffer))
}
