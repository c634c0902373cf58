//! The DFlash draft on the card: weights, planes in the sliding blocks, working memory.
//!
//! Two things are done with it, both with the CPU backend's bits when they are given the same features. Every step extends
//! the draft's context ([`extend`]): the target's residual stream at the input of a few layers becomes the draft's K and V
//! of the same positions, in planes that lie behind the target's own in each sliding block; nothing leaves the card. A round
//! ([`round`]) reads that context and proposes; its own K and V lie in blocks of its own ([`round_data`]).
//!
//! Attention of a round is that of decoding (`digits_split_*` of `attention_digits.cu`), with the block's own K and V as one
//! block more.

mod buffers;
mod extend;
mod round;
mod round_data;
mod weights;

use std::collections::HashMap;
use std::sync::Arc;

use muser_backend::arith::attention::Digits;
use muser_backend::{ContextRows, DraftInfo};
use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::{DflashConfig, Draft};

use crate::CudaError;
use crate::driver::{Buffer, Context, Function, Graph};
use crate::forward::head_layout;
use crate::loaded::Kernels;
use buffers::{ExtendBuffers, RoundBuffers};
pub(crate) use round::RoundTarget;
use round_data::{RoundData, RoundShape};
use weights::DraftWeights;

/// Revision of the draft's context arithmetic, the CPU backend's; blocks that hold a draft's planes also name the draft.
pub(crate) const DRAFT_ROUTE: &str = "dflash-1";

/// Kernels besides those of the target.
struct DraftKernels {
    tap: Function,
    embed: Function,
    norm: Function,
    heads: Function,
}

/// A draft that has been taken in.
pub(crate) struct Drafter {
    // Dropped in order: graphs before the memory that they name.
    graphs: HashMap<RoundShape, Graph>,
    data: RoundData,
    round: RoundBuffers,
    extend: ExtendBuffers,
    weights: DraftWeights,
    kernels: DraftKernels,
    /// Which rows have the draft's context.
    pub(crate) rows: ContextRows,
    config: DflashConfig,
    /// cos and sin, laid out like the target's.
    angles: Buffer<f32>,
    /// Bytes of a sliding block before the draft's planes.
    first_plane: usize,
    digits: Digits,
}

impl Drafter {
    /// Loads the draft's weights. `rows` is the most rows of a step, `first_plane` the bytes that a sliding block has without
    /// a draft.
    pub(crate) fn new(
        context: &Arc<Context>,
        kernels: &Kernels,
        draft: &Draft,
        rows: usize,
        first_plane: usize,
        angles: Buffer<f32>,
        digits: Digits,
    ) -> Result<Self, CudaError> {
        let config = draft.config.clone();
        let weights = DraftWeights::load(context, draft, &kernels.repack()?)?;
        Ok(Self {
            graphs: HashMap::new(),
            data: RoundData::new(context, &config)?,
            round: RoundBuffers::new(context, &config, &weights, digits)?,
            extend: ExtendBuffers::new(context, &config, &weights, rows)?,
            kernels: DraftKernels {
                tap: kernels.get("draft_tap")?,
                embed: kernels.get("draft_embed")?,
                norm: kernels.get("draft_norm")?,
                heads: kernels.of_width("draft_heads", digits)?,
            },
            weights,
            rows: ContextRows::default(),
            config,
            angles,
            first_plane,
            digits,
        })
    }

    /// There are so many sliding blocks now, elsewhere.
    pub(crate) fn note_blocks(&mut self, blocks: u32) {
        // They name the addresses of the old ones.
        self.graphs.clear();
        self.rows.reset(blocks);
    }

    /// A sliding block was copied in.
    pub(crate) fn note_import(&mut self, block: BlockId, bytes: &[u8]) {
        let first = &bytes[self.first_plane..];
        let scales = &first[head_layout(self.digits).k_scales()..][..size_of::<f32>() * BLOCK_LEN];
        self.rows.note_import(block, scales);
    }

    /// What the engine may ask for.
    pub(crate) fn info(&self) -> DraftInfo {
        DraftInfo { max_proposals: self.config.max_draft(), window: self.config.window }
    }

    /// Layers of the target whose inputs are read.
    pub(crate) fn target_layers(&self) -> &[usize] {
        &self.config.target_layers
    }

    /// Products, for whoever plans their working memory.
    pub(crate) fn products(&self) -> impl Iterator<Item = &crate::matrix::Product> {
        self.weights.products()
    }
}

/// Shapes that the kernels are written for.
pub(crate) fn check_shapes(c: &DflashConfig) -> Result<(), CudaError> {
    let refuse = |what: String| Err(CudaError::Unsupported(format!("draft: {what}")));
    if c.head_dim != 128 {
        return refuse(format!("heads of {} values, the kernels need 128", c.head_dim));
    }
    if c.kv_heads == 0 || !c.heads.is_multiple_of(c.kv_heads) || !16usize.is_multiple_of(c.heads / c.kv_heads)
    {
        return refuse(format!(
            "{} query heads on {} KV heads, the kernels need a divisor of 16 on each",
            c.heads, c.kv_heads
        ));
    }
    for (what, value) in [("hidden size", c.hidden), ("FFN width", c.ffn), ("query width", c.q_width())] {
        if value == 0 || !value.is_multiple_of(256) {
            return refuse(format!("{what} {value}, the kernels need a multiple of 256"));
        }
    }
    if c.block_size > BLOCK_LEN || c.block_size > c.window {
        return refuse(format!(
            "blocks of {} rows, the kernels need at most {BLOCK_LEN} and the window, {}",
            c.block_size, c.window
        ));
    }
    Ok(())
}
