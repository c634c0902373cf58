//! The DFlash draft: its weights, its planes in the sliding blocks, the rounds.
//!
//! Every step extends the draft's context ([`extend`]): the target's residual stream at the input of a few layers becomes the
//! draft's K and V of the same positions, in planes behind the target's own in each sliding block. A round ([`round`]) reads that
//! context and proposes; its own K and V lie in blocks of its own.

mod buffers;
mod calls;
mod extend;
mod round;

use muser_backend::arith;
use muser_backend::arith::attention::{Digits, MAX_LOG2_DRAFT_SCORE, draft_score_bound};
use muser_backend::{ContextRows, DraftInfo};
use muser_kv::BLOCK_LEN;
use muser_model::{DflashConfig, Draft, Geometry};

use crate::WgpuError;
use crate::device::Device;
use crate::program::Heads;
use crate::scratch::Scratch;
use crate::step_data::{StepData, most_split};
use crate::weights;
use buffers::{DraftWeights, ExtendBuffers, RoundBuffers, round_rows};
use calls::{Extend, Round};

/// Revision of the draft's context arithmetic, the CPU backend's; blocks that hold a draft's planes also name the draft.
pub(crate) const DRAFT_ROUTE: &str = "dflash-1";

/// A draft that has been taken in.
pub(crate) struct Drafter {
    pub(crate) config: DflashConfig,
    pub(crate) rows: ContextRows,
    pub(crate) data: StepData,
    weights: DraftWeights,
    extend: ExtendBuffers,
    round: RoundBuffers,
    inverse_frequencies: Vec<f64>,
    calls: Option<(Extend, Round)>,
    digits: Digits,
}

/// Refuses shapes that the kernels are not written for, and scores that the arithmetic cannot hold.
pub(crate) fn check(draft: &Draft) -> Result<(), WgpuError> {
    let c = &draft.config;
    let refuse = |what: String| Err(WgpuError::Unsupported(format!("draft: {what}")));
    if c.head_dim == 0 || !c.head_dim.is_multiple_of(16) || c.head_dim > 256 {
        return refuse(format!("heads of {} values, expected a multiple of 16 up to 256", c.head_dim));
    }
    if c.kv_heads == 0 || !c.heads.is_multiple_of(c.kv_heads) {
        return refuse(format!("{} query heads on {} KV heads, expected a multiple", c.heads, c.kv_heads));
    }
    for (what, value) in [("hidden size", c.hidden), ("FFN width", c.ffn), ("query width", c.q_width())] {
        if value == 0 || !value.is_multiple_of(256) {
            return refuse(format!("{what} {value}, expected a multiple of 256"));
        }
    }
    if c.block_size > BLOCK_LEN {
        return refuse(format!("blocks of {} rows, expected at most {BLOCK_LEN}", c.block_size));
    }
    for (i, layer) in draft.layers.iter().enumerate() {
        let bound = draft_score_bound(&layer.attn_q_norm, &layer.attn_k_norm, c.head_dim);
        if bound.is_nan() || bound >= MAX_LOG2_DRAFT_SCORE {
            return refuse(format!(
                "layer {i}: attn_q_norm and attn_k_norm allow attention scores up to 2^{bound}, expected below \
                 2^{MAX_LOG2_DRAFT_SCORE}"
            ));
        }
    }
    draft.matrices().try_for_each(weights::check)
}

impl Drafter {
    /// Loads the draft's weights; `rows` is the most rows of a step, `top` the most of the top at a time.
    pub(crate) fn new(
        device: &Device,
        draft: &Draft,
        digits: Digits,
        rows: usize,
        top: usize,
    ) -> Result<Self, WgpuError> {
        let config = draft.config.clone();
        let weights = DraftWeights::load(device, draft)?;
        // A window may lie across one block more than it fills.
        let blocks = config.window.div_ceil(BLOCK_LEN) + 2;
        let rows_of_round = round_rows(&config);
        let split = most_split(rows_of_round, config.q_width(), device.facts.binding);
        Ok(Self {
            data: StepData::new(device, rows_of_round, top, blocks, split)?,
            extend: ExtendBuffers::new(device, &config, &weights, rows)?,
            round: RoundBuffers::new(device, &config, &weights, digits, split)?,
            inverse_frequencies: arith::inverse_frequencies(f64::from(config.rope_theta), config.head_dim),
            rows: ContextRows::default(),
            calls: None,
            weights,
            config,
            digits,
        })
    }

    pub(crate) fn info(&self) -> DraftInfo {
        DraftInfo { max_proposals: self.config.max_draft(), window: self.config.window }
    }

    /// Number of layers, whose K and V lie behind those of the target.
    pub(crate) fn layers(&self) -> usize {
        self.weights.layers.len()
    }

    fn heads(&self) -> Heads {
        let c = &self.config;
        Heads { heads: c.heads, kv_heads: c.kv_heads, dim: c.head_dim, digits: self.digits, eps: c.rms_eps }
    }

    /// Forgets the calls, which name memory that goes.
    pub(crate) fn forget(&mut self) {
        self.calls = None;
    }

    /// cos and sin of positions, in the order of heads' halves.
    fn angles(&self, positions: impl Iterator<Item = u32>) -> Vec<f32> {
        let mut angles = Vec::new();
        for position in positions {
            for frequency in &self.inverse_frequencies {
                let (cos, sin) = arith::rotation(position as usize, *frequency);
                angles.extend([cos, sin]);
            }
        }
        angles
    }
}

/// What a draft needs of the target besides.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) device: &'a Device,
    pub(crate) geometry: &'a Geometry,
    pub(crate) scratch: &'a Scratch,
}
