//! The draft's weights on the device, and the working memory of a step's rows and of a round's.

use muser_backend::arith::MatrixRole;
use muser_backend::arith::attention::Digits;
use muser_backend::kv_layout::HeadLayout;
use muser_model::{DflashConfig, Draft};

use crate::WgpuError;
use crate::activations::Activations;
use crate::device::{Buffer, Device};
use crate::scratch::few_rows;
use crate::weights::{Loader, Weight};

/// Most rows of a round, where a block has no more: what more rows take, more rounds take as well.
const ROUND_ROWS: usize = 32;

/// Most rows of a round.
pub(crate) fn round_rows(c: &DflashConfig) -> usize {
    ROUND_ROWS.max(c.block_size)
}

/// Matrices and norms of a layer of the draft.
pub(crate) struct DraftLayer {
    pub(super) attn_q: Weight,
    pub(super) attn_k: Weight,
    pub(super) attn_v: Weight,
    pub(super) attn_output: Weight,
    pub(super) ffn_gate: Weight,
    pub(super) ffn_up: Weight,
    pub(super) ffn_down: Weight,
    pub(super) attn_norm: Buffer,
    pub(super) q_norm: Buffer,
    pub(super) k_norm: Buffer,
    pub(super) ffn_norm: Buffer,
}

/// Weights of the draft.
pub(crate) struct DraftWeights {
    pub(super) fc: Weight,
    pub(super) enc_output_norm: Buffer,
    pub(super) output_norm: Buffer,
    pub(super) layers: Vec<DraftLayer>,
}

impl DraftWeights {
    pub(super) fn load(device: &Device, draft: &Draft) -> Result<Self, WgpuError> {
        let mut loader = Loader::new(device);
        let mut layers = Vec::with_capacity(draft.layers.len());
        for l in &draft.layers {
            let mut matrix = |matrix, role| loader.matrix(matrix, Some(role));
            layers.push(DraftLayer {
                attn_q: matrix(&l.attn_q, MatrixRole::AttnIn)?,
                attn_k: matrix(&l.attn_k, MatrixRole::AttnIn)?,
                attn_v: matrix(&l.attn_v, MatrixRole::AttnIn)?,
                attn_output: matrix(&l.attn_output, MatrixRole::AttnOut)?,
                ffn_gate: matrix(&l.ffn_gate, MatrixRole::FfnIn)?,
                ffn_up: matrix(&l.ffn_up, MatrixRole::FfnIn)?,
                ffn_down: matrix(&l.ffn_down, MatrixRole::FfnDown)?,
                attn_norm: loader.vector(&l.attn_norm)?,
                q_norm: loader.vector(&l.attn_q_norm)?,
                k_norm: loader.vector(&l.attn_k_norm)?,
                ffn_norm: loader.vector(&l.ffn_norm)?,
            });
        }
        let weights = Self {
            fc: loader.matrix(&draft.fc, Some(MatrixRole::DraftFc))?,
            enc_output_norm: loader.vector(&draft.enc_output_norm)?,
            output_norm: loader.vector(&draft.output_norm)?,
            layers,
        };
        loader.settle()?;
        Ok(weights)
    }
}

/// Working memory of a step's rows.
pub(super) struct ExtendBuffers {
    pub(super) act_features: Activations,
    /// Output of `fc`.
    pub(super) mapped: Buffer,
    pub(super) act_mapped: Activations,
    pub(super) k: Buffer,
    pub(super) v: Buffer,
    pub(super) factors: Buffer,
    pub(super) angles: Buffer,
}

impl ExtendBuffers {
    pub(super) fn new(
        device: &Device,
        c: &DflashConfig,
        weights: &DraftWeights,
        rows: usize,
    ) -> Result<Self, WgpuError> {
        let of = |width: usize| device.buffer((few_rows(rows) * width * 4) as u64, "the draft's context");
        let readers: Vec<_> = weights.layers.iter().flat_map(|l| [&l.attn_k, &l.attn_v]).collect();
        Ok(Self {
            act_features: Activations::new(device, rows as u32, &[&weights.fc])?,
            mapped: of(c.hidden)?,
            act_mapped: Activations::new(device, rows as u32, &readers)?,
            k: of(c.kv_width())?,
            v: of(c.kv_width())?,
            factors: of(2)?,
            angles: of(c.head_dim)?,
        })
    }
}

/// Working memory of a round's rows.
pub(super) struct RoundBuffers {
    pub(super) h: Buffer,
    pub(super) q: Buffer,
    pub(super) k: Buffer,
    pub(super) v: Buffer,
    pub(super) queries: Buffer,
    pub(super) query_factors: Buffer,
    pub(super) part_o: Buffer,
    pub(super) part_l: Buffer,
    pub(super) projected: Buffer,
    pub(super) ffn_gate: Buffer,
    pub(super) ffn_up: Buffer,
    pub(super) factors: Buffer,
    pub(super) angles: Buffer,
    /// K and V of the rows of the round, a block for each sequence.
    pub(super) own: Buffer,
    pub(super) act_hidden: Activations,
    pub(super) act_attention: Activations,
    pub(super) act_ffn: Activations,
}

impl RoundBuffers {
    pub(super) fn new(
        device: &Device,
        c: &DflashConfig,
        weights: &DraftWeights,
        digits: Digits,
        split: u32,
    ) -> Result<Self, WgpuError> {
        let rows = round_rows(c);
        let wide = few_rows(rows);
        let of = |values: usize| device.buffer(values as u64 * 4, "a draft's round");
        let parts = rows + split as usize;
        let hidden: Vec<_> = weights
            .layers
            .iter()
            .flat_map(|l| [&l.attn_q, &l.attn_k, &l.attn_v, &l.ffn_gate, &l.ffn_up])
            .collect();
        let attention: Vec<_> = weights.layers.iter().map(|l| &l.attn_output).collect();
        let ffn: Vec<_> = weights.layers.iter().map(|l| &l.ffn_down).collect();
        let activations = |readers: &[&Weight]| Activations::new(device, rows as u32, readers);
        let block = c.kv_heads * HeadLayout { dim: c.head_dim, digits }.bytes();
        Ok(Self {
            h: of(rows * c.hidden)?,
            q: of(wide * c.q_width())?,
            k: of(wide * c.kv_width())?,
            v: of(wide * c.kv_width())?,
            queries: of(rows * c.q_width() / 2)?,
            query_factors: of(rows * c.heads)?,
            part_o: of(parts * c.q_width())?,
            part_l: of(parts * c.heads)?,
            projected: of(wide * c.hidden)?,
            ffn_gate: of(wide * c.ffn)?,
            ffn_up: of(wide * c.ffn)?,
            factors: of(rows * 2)?,
            angles: of(rows * c.head_dim)?,
            // Each sequence has two rows at least.
            own: device.buffer((rows / 2 * block) as u64, "a draft's round")?,
            act_hidden: activations(&hidden)?,
            act_attention: activations(&attention)?,
            act_ffn: activations(&ffn)?,
        })
    }
}
