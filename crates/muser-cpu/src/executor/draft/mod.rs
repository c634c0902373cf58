//! The DFlash draft beside its model: weights, planes in the sliding blocks, working memory.
//!
//! Two things are done with it. Every step extends the draft's context ([`extend`]): features tapped from the target's
//! residual stream become the draft's K and V of the same positions, in planes that lie behind the target's own in each
//! sliding block. So whatever moves, shares or drops a block moves the draft's state with it, and a rejected proposal is
//! forgotten when the length is not advanced. A round ([`round`]) reads that context and proposes; it changes no block.
//!
//! Both are row-invariant like the step itself: neither other sequences nor the number of proposals before a row show in
//! what a row of the context says, and a round of one sequence does not depend on the others in it.

mod buffers;
pub(crate) mod extend;
pub(crate) mod round;
mod round_plan;
#[cfg(test)]
mod tests;

use muser_backend::arith::attention::{MAX_LOG2_DRAFT_SCORE, draft_score_bound};
use muser_backend::arith::{self, MatrixRole};
use muser_backend::{DraftInfo, ExecError, check_draft};
use muser_kv::KvGroup;
use muser_model::{DflashConfig, Draft, Matrix, Model};

use self::buffers::{DraftLayerViews, ExtendBuffers};
use self::round_plan::RoundPlan;
use super::kv::KvStore;
use super::rows::check_scores;
use crate::kernels::matmul::MatrixView;
use crate::kernels::query_tile::TILE_QUERIES;
use crate::kernels::unpack::Class;
use crate::memory::HugeBuffer;
use crate::options::Repack;
use crate::pool::Pool;
use crate::weights::Bound;

/// A draft model that has been taken in.
pub(crate) struct Drafter {
    // Before `model`: views point into its map.
    fc: MatrixView,
    layers: Vec<DraftLayerViews>,
    copy: Option<HugeBuffer>,
    model: Draft,
    /// Number of the draft's first layer in the KV store.
    first_layer: usize,
    /// One per pair of a head.
    inverse_frequencies: Vec<f64>,
    extend: ExtendBuffers,
    round: RoundPlan,
}

impl Drafter {
    /// Binds the draft's weights and adds its planes to the store. `rows` is the most rows of a step.
    pub(crate) fn new(
        model: Draft,
        target: &Model,
        kv: &mut KvStore,
        rows: usize,
        repack: Repack,
        pool: &mut Pool,
    ) -> Result<Self, ExecError> {
        check_draft(&model, target, "cpu")?;
        check_shapes(&model.config)?;
        if kv.kv_type().digits().is_some() {
            let head_dim = model.config.head_dim;
            let layers = model.layers.iter();
            let bounds = layers.map(|l| draft_score_bound(&l.attn_q_norm, &l.attn_k_norm, head_dim));
            check_scores("draft ", bounds, MAX_LOG2_DRAFT_SCORE)?;
        }
        let mut list = vec![(&model.fc, MatrixRole::DraftFc)];
        for l in &model.layers {
            list.extend([&l.attn_q, &l.attn_k, &l.attn_v].map(|m| (m, MatrixRole::AttnIn)));
            list.push((&l.attn_output, MatrixRole::AttnOut));
            list.extend([&l.ffn_gate, &l.ffn_up].map(|m| (m, MatrixRole::FfnIn)));
            list.push((&l.ffn_down, MatrixRole::FfnDown));
        }
        let Bound { views, copy } = Bound::new(&list, repack, pool)?;
        let layers: Vec<_> = views[1..]
            .chunks_exact(7)
            .map(|v| DraftLayerViews {
                attn_q: v[0],
                attn_k: v[1],
                attn_v: v[2],
                attn_output: v[3],
                ffn_gate: v[4],
                ffn_up: v[5],
                ffn_down: v[6],
            })
            .collect();
        let c = &model.config;
        let first_layer = kv.layers();
        for _ in &layers {
            kv.add_layer(KvGroup::Sliding, c.kv_heads, c.head_dim);
        }
        let g = &target.geometry;
        let same_angles = c.head_dim == g.head_dim && c.rope_theta.to_bits() == g.rope_theta.to_bits();
        let extend = ExtendBuffers::new(&model, views[0], &layers, rows, !same_angles);
        let round = RoundPlan::new(c, kv.kv_type(), pool.threads());
        let inverse_frequencies = arith::inverse_frequencies(f64::from(c.rope_theta), c.head_dim);
        Ok(Self { fc: views[0], layers, copy, model, first_layer, inverse_frequencies, extend, round })
    }

    /// What the engine may ask for.
    pub(crate) fn info(&self) -> DraftInfo {
        DraftInfo { max_proposals: self.model.config.max_draft(), window: self.model.config.window }
    }

    /// Shape and constants.
    pub(crate) fn config(&self) -> &DflashConfig {
        &self.model.config
    }

    /// Bytes of the repacked copy of the draft's weights.
    pub(crate) fn copied_bytes(&self) -> usize {
        self.copy.as_ref().map_or(0, HugeBuffer::len)
    }

    /// Classes of the matrices that a round multiplies with.
    pub(crate) fn classes(&self) -> impl Iterator<Item = Class> + '_ {
        let all = self.model.layers.iter().flat_map(|l| {
            [&l.attn_q, &l.attn_k, &l.attn_v, &l.attn_output, &l.ffn_gate, &l.ffn_up, &l.ffn_down]
        });
        all.filter_map(|m: &Matrix| Class::of(m.ty))
    }
}

/// Refuses what the kernels cannot do.
fn check_shapes(c: &DflashConfig) -> Result<(), ExecError> {
    let unsupported = |what: String| Err(ExecError::Unsupported { backend: "cpu", what });
    if !c.head_dim.is_multiple_of(16) || c.head_dim == 0 {
        return unsupported(format!("head size {} of the draft, expected a multiple of 16", c.head_dim));
    }
    if c.kv_heads == 0 || !c.heads.is_multiple_of(c.kv_heads) || c.heads / c.kv_heads > TILE_QUERIES {
        return unsupported(format!(
            "{} query heads of the draft on {} key heads, expected 1 to {TILE_QUERIES} each",
            c.heads, c.kv_heads
        ));
    }
    if c.block_size > muser_kv::BLOCK_LEN {
        return unsupported(format!(
            "draft blocks of {} rows, expected at most {}",
            c.block_size,
            muser_kv::BLOCK_LEN
        ));
    }
    Ok(())
}
