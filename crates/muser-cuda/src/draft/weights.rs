//! The draft's weights on the card.
//!
//! K and V of all layers lie together: a step computes them for its rows in one product ([`DraftWeights::context`]), a round
//! reads the same tiles layer by layer.

use std::sync::Arc;

use muser_backend::arith::MatrixRole;
use muser_model::{Draft, Matrix};

use crate::CudaError;
use crate::driver::{Buffer, Context};
use crate::matrix::Product;
use crate::uploader::Repack;
use crate::weights::{Plan, Unfit, upload, with_fallback};

/// Products and norm weights of a draft layer.
pub(super) struct DraftLayerOnDevice {
    /// q, K, V.
    pub(super) attn_in: Product,
    pub(super) attn_out: Product,
    /// gate, up.
    pub(super) ffn_in: Product,
    pub(super) ffn_down: Product,
    pub(super) attn_norm: u64,
    pub(super) q_norm: u64,
    pub(super) ffn_norm: u64,
}

impl DraftLayerOnDevice {
    fn products(&mut self) -> [&mut Product; 4] {
        [&mut self.attn_in, &mut self.attn_out, &mut self.ffn_in, &mut self.ffn_down]
    }
}

/// All of them.
pub(super) struct DraftWeights {
    pub(super) fc: Product,
    pub(super) enc_output_norm: u64,
    /// K of all layers, then V of all layers.
    pub(super) context: Product,
    pub(super) output_norm: u64,
    /// `[layers][128]`
    pub(super) k_norms: u64,
    pub(super) layers: Vec<DraftLayerOnDevice>,
    _tiles: Buffer<u8>,
    _norms: Buffer<f32>,
}

impl DraftWeights {
    /// Copies and repacks; `repack[tile]` are the kernels.
    pub(super) fn load(context: &Arc<Context>, draft: &Draft, repack: &Repack) -> Result<Self, CudaError> {
        with_fallback(|unfit| Self::load_with(context, draft, repack, unfit))
    }

    fn load_with(
        context: &Arc<Context>,
        draft: &Draft,
        repack: &Repack,
        without_tile: &Unfit,
    ) -> Result<(Self, Unfit), CudaError> {
        let c = &draft.config;
        let (hidden, kv_width, count) = (c.hidden, c.kv_width(), draft.layers.len());
        let mut plan = Plan::new(without_tile);
        let mut fc = plan.product(MatrixRole::DraftFc, c.target_layers.len() * hidden, &[&draft.fc])?;
        let keys = draft.layers.iter().map(|l| &l.attn_k);
        let keys_and_values: Vec<&Matrix> = keys.chain(draft.layers.iter().map(|l| &l.attn_v)).collect();
        let mut all_kv = plan.product(MatrixRole::AttnIn, hidden, &keys_and_values)?;
        let k_norms: Vec<f32> = draft.layers.iter().flat_map(|l| l.attn_k_norm.iter().copied()).collect();
        let k_norms = plan.norm(&k_norms);
        let (enc_output_norm, output_norm) =
            (plan.norm(&draft.enc_output_norm), plan.norm(&draft.output_norm));
        let mut layers = Vec::with_capacity(count);
        for layer in &draft.layers {
            layers.push(DraftLayerOnDevice {
                attn_in: plan.product(MatrixRole::AttnIn, hidden, &[&layer.attn_q])?,
                attn_out: plan.product(MatrixRole::AttnOut, c.q_width(), &[&layer.attn_output])?,
                ffn_in: plan.product(MatrixRole::FfnIn, hidden, &[&layer.ffn_gate, &layer.ffn_up])?,
                ffn_down: plan.product(MatrixRole::FfnDown, c.ffn, &[&layer.ffn_down])?,
                attn_norm: plan.norm(&layer.attn_norm),
                q_norm: plan.norm(&layer.attn_q_norm),
                ffn_norm: plan.norm(&layer.ffn_norm),
            });
        }
        for (index, layer) in layers.iter_mut().enumerate() {
            for at in [index, count + index] {
                layer.attn_in.borrow_rows(&all_kv, at * kv_width, kv_width);
            }
            layer.products().into_iter().for_each(|product| plan.factors(product));
        }
        [&mut fc, &mut all_kv].into_iter().for_each(|product| plan.factors(product));
        let tiles = Buffer::<u8>::new(context, plan.bytes, "the draft's weights")?;
        let norms = Buffer::from_slice(context, &plan.norms, "the draft's norm weights")?;
        let unfit = upload(context, &plan.jobs, &tiles, repack, None)?;

        // Until now addresses were offsets.
        let norm = |offset: u64| norms.at(offset as usize);
        [&mut fc, &mut all_kv].into_iter().for_each(|product| product.place(&tiles, &norms));
        for layer in &mut layers {
            layer.products().into_iter().for_each(|product| product.place(&tiles, &norms));
            for offset in [&mut layer.attn_norm, &mut layer.q_norm, &mut layer.ffn_norm] {
                *offset = norm(*offset);
            }
        }
        let loaded = Self {
            fc,
            enc_output_norm: norm(enc_output_norm),
            context: all_kv,
            output_norm: norm(output_norm),
            k_norms: norm(k_norms),
            layers,
            _tiles: tiles,
            _norms: norms,
        };
        Ok((loaded, unfit))
    }

    pub(super) fn products(&self) -> impl Iterator<Item = &Product> {
        let layers = self.layers.iter().flat_map(|l| [&l.attn_in, &l.attn_out, &l.ffn_in, &l.ffn_down]);
        [&self.fc, &self.context].into_iter().chain(layers)
    }
}
