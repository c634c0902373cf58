//! Memory of the tower: buffers of a slice, and those of a picture, which grow with the largest one.

use std::sync::Arc;

use muser_backend::arith::attention::Digits;
use muser_model::Projector;

use super::weights::TowerWeights;
use crate::CudaError;
use crate::driver::{Buffer, Context, Pinned, Plain};
use crate::forward::{Activations, layer_bytes};
use crate::matrix::Product;

/// Most patches of a slice, where nobody waits.
pub(super) const SLICE: usize = 4096;
/// Tokens of a slice of the adapter, likewise.
pub(super) const TOKENS: usize = 1024;

/// Row buffers of a slice of patches (or tokens).
pub(super) struct SliceMemory {
    /// Values of patches.
    pub(super) patches: Activations,
    /// Normed rows.
    pub(super) hidden: Activations,
    /// Attention output, quantised.
    pub(super) mixed: Activations,
    pub(super) ffn: Activations,
    /// The patches of a token.
    pub(super) merged: Activations,
    pub(super) adapter: Activations,
    /// Output of q, k, v.
    pub(super) attn_in: Buffer<f32>,
    /// Output of products back to the residual stream.
    pub(super) projected: Buffer<f32>,
    /// The feed-forward layer's, and the adapter's.
    pub(super) wide: Buffer<f32>,
    /// Attention output.
    pub(super) o: Buffer<f32>,
}

impl SliceMemory {
    pub(super) fn new(
        context: &Arc<Context>,
        projector: &Projector,
        w: &TowerWeights,
    ) -> Result<Self, CudaError> {
        let c = &projector.config;
        let of = |pick: fn(&super::weights::LayerOnDevice) -> &Product| -> Vec<&Product> {
            w.layers.iter().map(pick).collect()
        };
        let (attn_in, attn_out) = (of(|l| &l.attn_in), of(|l| &l.attn_out));
        let (ffn_up, ffn_down) = (of(|l| &l.ffn_up), of(|l| &l.ffn_down));
        let longest = |products: &[&Product], rows: usize| {
            products.iter().map(|p| p.output_len(rows)).max().unwrap_or(0)
        };
        let f32s = |len: usize| Buffer::<f32>::new(context, len, "the tower's rows");
        let [first, second, third] = &w.adapters;
        let act = |rows, k, readers: &[&Product]| Activations::new(context, rows, k, readers);
        Ok(Self {
            patches: act(SLICE, w.patches.k, &[&w.patches])?,
            hidden: act(SLICE, c.hidden, &[attn_in.as_slice(), &ffn_up].concat())?,
            mixed: act(SLICE, c.hidden, &attn_out)?,
            ffn: act(SLICE, c.ffn, &ffn_down)?,
            merged: act(TOKENS, c.merged(), &[first])?,
            adapter: act(TOKENS, projector.adapter, &[second, third])?,
            attn_in: f32s(longest(&attn_in, SLICE))?,
            projected: f32s(longest(&[attn_out.as_slice(), &ffn_down, &[&w.patches]].concat(), SLICE))?,
            wide: f32s(longest(&ffn_up, SLICE).max(longest(&[first, second, third], TOKENS)))?,
            o: f32s(SLICE * c.hidden)?,
        })
    }
}

/// What a picture takes.
#[derive(Clone, Copy)]
pub(super) struct PictureSize {
    pub(super) patches: usize,
    pub(super) tokens: usize,
    /// Blocks of K and V of a layer.
    pub(super) blocks: usize,
    pub(super) rgb: usize,
    /// Values of the plan.
    pub(super) plan: usize,
}

/// Buffers of a picture.
pub(super) struct PictureMemory {
    pub(super) rgb: Buffer<u8>,
    pub(super) plan: Buffer<u32>,
    /// Residual stream.
    pub(super) h: Buffer<f32>,
    /// `[patches][heads][hi 128, lo 128]`
    pub(super) q: Buffer<u8>,
    /// `[patches][heads]`
    pub(super) f: Buffer<f32>,
    /// K and V of a layer.
    pub(super) kv: Buffer<u8>,
    pub(super) rows: Buffer<f32>,
    pub(super) rows_on_host: Pinned<f32>,
}

impl PictureMemory {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let f32s = || Buffer::<f32>::new(context, 0, "a picture");
        let bytes = || Buffer::<u8>::new(context, 0, "a picture");
        Ok(Self {
            rgb: bytes()?,
            plan: Buffer::new(context, 0, "a picture")?,
            h: f32s()?,
            q: bytes()?,
            f: f32s()?,
            kv: bytes()?,
            rows: f32s()?,
            rows_on_host: Pinned::zeroed(context, 0)?,
        })
    }

    /// Makes room for a picture.
    pub(super) fn reserve(
        &mut self,
        context: &Arc<Context>,
        projector: &Projector,
        size: PictureSize,
    ) -> Result<(), CudaError> {
        let c = &projector.config;
        grow(context, &mut self.rgb, size.rgb)?;
        grow(context, &mut self.plan, size.plan)?;
        grow(context, &mut self.h, size.patches * c.hidden)?;
        grow(context, &mut self.q, size.patches * c.heads * 256)?;
        grow(context, &mut self.f, size.patches * c.heads)?;
        // Zeroed: a position behind the last key contributes 0 times its scale, which is 0 only if that is finite.
        grow(context, &mut self.kv, size.blocks * layer_bytes(Digits::Two, c.heads))?;
        let rows = size.tokens * c.projection;
        grow(context, &mut self.rows, rows)?;
        if self.rows_on_host.slice().len() < rows {
            self.rows_on_host = Pinned::zeroed(context, rows)?;
        }
        Ok(())
    }
}

/// A longer buffer of zeros in place of one that is too short. The old one goes first.
fn grow<T: Plain>(context: &Arc<Context>, buffer: &mut Buffer<T>, len: usize) -> Result<(), CudaError> {
    if buffer.len() < len {
        *buffer = Buffer::new(context, 0, "a picture")?;
        *buffer = Buffer::zeroed(context, len, "a picture")?;
    }
    Ok(())
}
