//! Working memory of the draft: of a step's rows, and of a round's.

use std::sync::Arc;

use muser_backend::arith::attention::Digits;
use muser_model::DflashConfig;

use super::round_data::{most_parts, most_sequences, round_rows};
use super::weights::{DraftLayerOnDevice, DraftWeights};
use crate::CudaError;
use crate::driver::{Buffer, Context};
use crate::forward::{Activations, PART_VALUES, layer_bytes};
use crate::matrix::Product;

/// Working memory of a step's rows.
pub(super) struct ExtendBuffers {
    pub(super) act_features: Activations,
    /// Output of `fc`.
    pub(super) mapped: Buffer<f32>,
    pub(super) act_mapped: Activations,
    /// K and V of all layers.
    pub(super) kv: Buffer<f32>,
}

impl ExtendBuffers {
    pub(super) fn new(
        context: &Arc<Context>,
        c: &DflashConfig,
        weights: &DraftWeights,
        rows: usize,
    ) -> Result<Self, CudaError> {
        let features = c.target_layers.len() * c.hidden;
        Ok(Self {
            act_features: Activations::new(context, rows, features, &[&weights.fc])?,
            mapped: Buffer::new(context, weights.fc.output_len(rows), "the draft's features")?,
            act_mapped: Activations::new(context, rows, c.hidden, &[&weights.context])?,
            kv: Buffer::new(context, weights.context.output_len(rows), "the draft's context")?,
        })
    }
}

/// Working memory of a round's rows.
pub(super) struct RoundBuffers {
    pub(super) h: Buffer<f32>,
    pub(super) attn_in: Buffer<f32>,
    pub(super) projected: Buffer<f32>,
    pub(super) ffn_in: Buffer<f32>,
    /// `[rows][heads][hi 128, lo 128]`
    pub(super) q: Buffer<u8>,
    /// `[rows][heads]`: factor of each query's scores.
    pub(super) q_factors: Buffer<f32>,
    pub(super) part_o: Buffer<f32>,
    pub(super) part_l: Buffer<f32>,
    /// K and V of one layer at a time, a block for each sequence. Zeroed: attention multiplies the scales of what it masks by 0.
    pub(super) own: Buffer<u8>,
    pub(super) act_hidden: Activations,
    pub(super) act_attention: Activations,
    pub(super) act_ffn: Activations,
}

impl RoundBuffers {
    pub(super) fn new(
        context: &Arc<Context>,
        c: &DflashConfig,
        weights: &DraftWeights,
        digits: Digits,
    ) -> Result<Self, CudaError> {
        let rows = round_rows(c);
        let of =
            |pick: fn(&DraftLayerOnDevice) -> &Product| weights.layers.iter().map(pick).collect::<Vec<_>>();
        let longest = |products: &[&Product]| products.iter().map(|p| p.output_len(rows)).max().unwrap_or(0);
        let f32s = |len: usize| Buffer::<f32>::new(context, len, "rows of the draft");
        let (attn_in, attn_out) = (of(|l| &l.attn_in), of(|l| &l.attn_out));
        let (ffn_in, down) = (of(|l| &l.ffn_in), of(|l| &l.ffn_down));
        let parts = most_parts(c);
        Ok(Self {
            h: f32s(rows * c.hidden)?,
            attn_in: f32s(longest(&attn_in))?,
            projected: f32s(longest(&[&attn_out[..], &down].concat()))?,
            ffn_in: f32s(longest(&ffn_in))?,
            q: Buffer::new(context, rows * c.q_width() * 2, "rows of the draft")?,
            q_factors: f32s(rows * c.heads)?,
            part_o: f32s(parts * PART_VALUES)?,
            part_l: f32s(parts * 16)?,
            own: Buffer::zeroed(
                context,
                most_sequences(c) * layer_bytes(digits, c.kv_heads),
                "K and V of drafted blocks",
            )?,
            act_hidden: Activations::new(context, rows, c.hidden, &[&attn_in[..], &ffn_in].concat())?,
            act_attention: Activations::new(context, rows, c.q_width(), &attn_out)?,
            act_ffn: Activations::new(context, rows, c.ffn, &down)?,
        })
    }
}
