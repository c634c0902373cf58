//! What a step does for the draft: from the target's residual stream of a row to the draft's K and V of its position.
//!
//! ```text
//! features = residual stream at the input of the target layers, one after the other      quantised as it is tapped
//! g        = rms(fc features) * enc.output_norm
//! K, V     = rope(rms_head(Wk g) * attn_k_norm), Wv g       for every draft layer, into the sliding blocks
//! ```

use muser_kv::KvGroup;

use super::Drafter;
use crate::CudaError;
use crate::driver::Launch;
use crate::forward::{ContextDraft, ForwardPass, layer_bytes};
use crate::kernels::{DraftHeadArgs, DraftNormArgs, DraftTapArgs};

impl ContextDraft for Drafter {
    fn tap(&self, walk: &ForwardPass<'_>, layer: usize) -> Result<(), CudaError> {
        let Some(place) = self.config.target_layers.iter().position(|l| *l == layer) else { return Ok(()) };
        let (n, blocks) = (walk.shape.n, self.config.hidden / 256);
        let args = DraftTapArgs {
            h: walk.scratch.h.at(0),
            act: walk.products.input(&self.weights.fc, self.extend.act_features.act, n),
            hidden: self.config.hidden as u32,
            first_block: (place * blocks) as u32,
        };
        let grid = (blocks.div_ceil(4) as u32, n as u32);
        walk.stream.launch(&self.kernels.tap, Launch::new(grid, 128), &args)
    }

    fn extend(&self, walk: &ForwardPass<'_>) -> Result<(), CudaError> {
        let (n, c, w, b) = (walk.shape.n, &self.config, &self.weights, &self.extend);
        let kv_width = c.kv_width();
        let computed = walk.shape.context;
        if computed {
            let features = walk.products.input(&w.fc, b.act_features.act, n);
            walk.products.multiply(walk.stream, &w.fc, features, b.mapped.at(0), n)?;
            let mapped = walk.products.input(&w.context, b.act_mapped.act, n);
            let norm = DraftNormArgs {
                part: b.mapped.at(0),
                factors: w.fc.factors(),
                w: w.enc_output_norm,
                act: mapped,
                segments: walk.products.output_segments(&w.fc, n),
                n: n as u32,
                hidden: c.hidden as u32,
                eps: c.rms_eps,
                ..DraftNormArgs::default()
            };
            let shape = Launch::new((n as u32, 1), (c.hidden / 8) as u32);
            walk.stream.launch(&self.kernels.norm, shape, &norm)?;
            walk.products.multiply(walk.stream, &w.context, mapped, b.kv.at(0), n)?;
        }
        let layers = w.layers.len();
        let heads = DraftHeadArgs {
            part: if computed { b.kv.at(0) } else { 0 },
            factors: w.context.factors(),
            k_norms: w.k_norms,
            angles: self.angles.at(0),
            positions: walk.data.positions(),
            slots: walk.data.slots(KvGroup::Sliding),
            kv: walk.sliding.memory.at(self.first_plane),
            block_bytes: walk.sliding.block_bytes,
            layer_bytes: layer_bytes(self.digits, c.kv_heads) as u64,
            segments: walk.products.output_segments(&w.context, n),
            n: n as u32,
            width: w.context.out_rows as u32,
            kv_heads: c.kv_heads as u32,
            layers: layers as u32,
            v_at: (layers * kv_width) as u32,
            eps: c.rms_eps,
            ..DraftHeadArgs::default()
        };
        let grid = ((2 * layers * c.kv_heads).div_ceil(4) as u32, n as u32);
        walk.stream.launch(&self.kernels.heads, Launch::new(grid, 128), &heads)
    }
}
