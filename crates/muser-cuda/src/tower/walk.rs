//! Which kernels a slice of a picture runs, in order.

use muser_backend::TowerStage as Stage;
use muser_backend::arith::attention::{Digits, hadamard_factor, score_factor};
use muser_model::VisionConfig;

use super::kernels::TowerKernels;
use super::memory::{PictureMemory, SliceMemory};
use super::plan::{FULL, PicturePlan, WINDOWS};
use super::weights::{NormOnDevice, TowerWeights};
use crate::CudaError;
use crate::driver::{Launch, Stream};
use crate::forward::layer_bytes;
use crate::kernels::{
    Act, DigitArgs, GeluArgs, HeadArgs, MergeArgs, PatchArgs, PositionArgs, RowsArgs, RunArgs, TowerNormArgs,
};
use crate::matrix::{Product, ProductKernels};

/// Patches (in the last stage tokens) `from .. from + count` of a picture.
pub(super) struct SliceWalk<'a> {
    pub(super) stream: &'a Stream,
    pub(super) config: &'a VisionConfig,
    pub(super) weights: &'a TowerWeights,
    pub(super) slice: &'a SliceMemory,
    pub(super) picture: &'a PictureMemory,
    pub(super) plan: &'a PicturePlan,
    pub(super) products: &'a ProductKernels,
    pub(super) kernels: &'a TowerKernels,
    pub(super) from: usize,
    pub(super) count: usize,
    /// These are all patches: the end of a layer goes on with the norm of the next one.
    pub(super) whole: bool,
    /// The layer before has done that.
    pub(super) normed: bool,
}

impl SliceWalk<'_> {
    pub(super) fn run(&self, stage: Stage) -> Result<(), CudaError> {
        match stage {
            Stage::Embed => self.embed(),
            Stage::Keys(layer) => self.keys(layer),
            Stage::Mix(layer) => self.mix(layer),
            Stage::Adapt => self.adapt(),
        }
    }

    /// One warp per super-block, a CTA a row.
    fn whole_rows(&self) -> Launch {
        Launch::new((self.count as u32, 1), (self.config.hidden / 8) as u32)
    }

    /// One warp per super-block of rows of `width` values.
    fn blocks(&self, width: usize) -> Launch {
        Launch::new(((width / 256).div_ceil(4) as u32, self.count as u32), 128)
    }

    /// Where the slice's rows of `width` values begin in a buffer of all patches.
    fn row(&self, base: u64, bytes: usize) -> u64 {
        base + (self.from * bytes) as u64
    }

    fn plan_row(&self, offset: usize, values: usize) -> u64 {
        self.row(self.picture.plan.at(offset), 4 * values)
    }

    fn h(&self) -> u64 {
        self.row(self.picture.h.at(0), 4 * self.config.hidden)
    }

    fn multiply(&self, product: &Product, act: Act, out: u64) -> Result<(), CudaError> {
        self.products.multiply(self.stream, product, act, out, self.count)
    }

    fn embed(&self) -> Result<(), CudaError> {
        let (c, w, s) = (self.config, self.weights, self.slice);
        let act = self.products.input(&w.patches, s.patches.act, self.count);
        let patches = PatchArgs {
            rgb: self.picture.rgb.at(0),
            places: self.plan_row(self.plan.offsets.places, 2),
            values: w.values,
            x: act.f,
            columns: self.plan.grid.cols as u32,
            size: c.patch as u32,
            width: w.patches.k as u32,
            _padding: 0,
        };
        self.stream.launch(&self.kernels.patches, Launch::new((self.count as u32, 1), 256), &patches)?;
        self.multiply(&w.patches, act, s.projected.at(0))?;
        let args = PositionArgs {
            part: s.projected.at(0),
            taps: self.plan_row(self.plan.offsets.taps, 8),
            table: w.positions,
            weight: w.pre_norm.weight,
            bias: w.pre_norm.bias,
            h: self.h(),
            segments: self.products.output_segments(&w.patches, self.count),
            n: self.count as u32,
            hidden: c.hidden as u32,
            eps: c.norm_eps,
        };
        self.stream.launch(&self.kernels.embed, self.whole_rows(), &args)
    }

    /// The residual stream takes the product in `projected` (with its bias), then is normed into `act`.
    fn norm(
        &self,
        before: Option<(&Product, u64)>,
        after: Option<(NormOnDevice, Act)>,
    ) -> Result<(), CudaError> {
        let args = TowerNormArgs {
            part: before.map_or(0, |_| self.slice.projected.at(0)),
            part_bias: before.map_or(0, |(_, bias)| bias),
            h: self.h(),
            weight: after.map_or(0, |(norm, _)| norm.weight),
            bias: after.map_or(0, |(norm, _)| norm.bias),
            act: after.map_or_else(Act::default, |(_, act)| act),
            segments: before.map_or(0, |(product, _)| self.products.output_segments(product, self.count)),
            n: self.count as u32,
            hidden: self.config.hidden as u32,
            eps: self.config.norm_eps,
        };
        self.kernels.norm(self.stream, &args)
    }

    /// Norm, q, k, v, their biases, rotation, K and V stored.
    fn keys(&self, index: usize) -> Result<(), CudaError> {
        let (c, s, layer) = (self.config, self.slice, &self.weights.layers[index]);
        let act = self.products.input(&layer.attn_in, s.hidden.act, self.count);
        if !self.normed {
            self.norm(None, Some((layer.ln1, act)))?;
        }
        self.multiply(&layer.attn_in, act, s.attn_in.at(0))?;
        let dim = c.head_dim();
        let args = HeadArgs {
            part: s.attn_in.at(0),
            bias: layer.bias_in,
            rope: self.plan_row(self.plan.offsets.rope, dim),
            slots: self.plan_row(self.plan.offsets.slots[self.kind(index)], 1),
            q: self.row(self.picture.q.at(0), c.heads * 256),
            f: self.row(self.picture.f.at(0), c.heads * 4),
            kv: self.picture.kv.at(0),
            block_bytes: layer_bytes(Digits::Two, c.heads) as u64,
            segments: self.products.output_segments(&layer.attn_in, self.count),
            n: self.count as u32,
            heads: c.heads as u32,
            dim: dim as u32,
            factor: score_factor(dim, Digits::Two),
            hadamard: if dim.is_power_of_two() { hadamard_factor(dim) } else { 0.0 },
        };
        self.kernels.store_heads(self.stream, &args)
    }

    fn kind(&self, layer: usize) -> usize {
        if self.config.is_full(layer) { FULL } else { WINDOWS }
    }

    /// Attention of the slice's patches, and everything after it.
    fn mix(&self, index: usize) -> Result<(), CudaError> {
        let (c, s, layer) = (self.config, self.slice, &self.weights.layers[index]);
        self.attention(self.kind(index))?;
        let act = self.products.input(&layer.attn_out, s.mixed.act, self.count);
        self.rows(s.o.at(0), 1, c.hidden, 0, act)?;
        self.multiply(&layer.attn_out, act, s.projected.at(0))?;
        let act = self.products.input(&layer.ffn_up, s.hidden.act, self.count);
        self.norm(Some((&layer.attn_out, layer.bias_out)), Some((layer.ln2, act)))?;
        self.multiply(&layer.ffn_up, act, s.wide.at(0))?;
        let act = self.products.input(&layer.ffn_down, s.ffn.act, self.count);
        self.gelu(&layer.ffn_up, layer.bias_up, act)?;
        self.multiply(&layer.ffn_down, act, s.projected.at(0))?;
        let next = self.weights.layers.get(index + 1).filter(|_| self.whole);
        let next = next.map(|next| (next.ln1, self.products.input(&next.attn_in, s.hidden.act, self.count)));
        self.norm(Some((&layer.ffn_down, layer.bias_down)), next)
    }

    fn attention(&self, kind: usize) -> Result<(), CudaError> {
        let (c, to) = (self.config, self.from + self.count);
        let (at, runs) = self.plan.runs_of(kind, self.from, to);
        let args = RunArgs {
            d: DigitArgs {
                q: self.picture.q.at(0),
                f: self.picture.f.at(0),
                kv: self.picture.kv.at(0),
                block_bytes: layer_bytes(Digits::Two, c.heads) as u64,
                heads: c.heads as u32,
                kv_heads: c.heads as u32,
                group: 1,
                ..DigitArgs::default()
            },
            runs: self.picture.plan.at(at),
            out: self.slice.o.at(0),
            from: self.from as u32,
            to: to as u32,
            dim: c.head_dim() as u32,
            _padding: 0,
        };
        self.kernels.attend(self.stream, &args, runs)
    }

    /// GELU of the product in `wide`, quantised.
    fn gelu(&self, before: &Product, bias: u64, act: Act) -> Result<(), CudaError> {
        let segments = self.products.output_segments(before, self.count);
        let args = GeluArgs { part: self.slice.wide.at(0), bias, act, segments, n: self.count as u32 };
        self.kernels.gelu(self.stream, &args)
    }

    /// Sums of segments, to `out` or quantised.
    fn rows(&self, part: u64, segments: u32, width: usize, out: u64, act: Act) -> Result<(), CudaError> {
        let n = self.count as u32;
        let args = RowsArgs { part, out, act, segments, n, width: width as u32, _padding: 0 };
        self.stream.launch(&self.kernels.rows, self.blocks(width), &args)
    }

    /// Last norm, pixel shuffle and the adapter, of tokens.
    fn adapt(&self) -> Result<(), CudaError> {
        let (c, w, s) = (self.config, self.weights, self.slice);
        let [first, second, third] = &w.adapters;
        let squares = c.merge * c.merge;
        let act = self.products.input(first, s.merged.act, self.count);
        let args = MergeArgs {
            h: self.picture.h.at(0),
            patches: self.plan_row(self.plan.offsets.merge, squares),
            weight: w.post_norm.weight,
            bias: w.post_norm.bias,
            act,
            squares: squares as u32,
            hidden: c.hidden as u32,
            eps: c.norm_eps,
            _padding: 0,
        };
        let shape = Launch { shared_bytes: (4 * c.merged()) as u32, ..self.whole_rows() };
        self.stream.launch(&self.kernels.merge, shape, &args)?;
        self.multiply(first, act, s.wide.at(0))?;
        let act = self.products.input(second, s.adapter.act, self.count);
        self.gelu(first, 0, act)?;
        self.multiply(second, act, s.wide.at(0))?;
        let act = self.products.input(third, s.adapter.act, self.count);
        self.gelu(second, 0, act)?;
        self.multiply(third, act, s.wide.at(0))?;
        let out = self.row(self.picture.rows.at(0), 4 * c.projection);
        self.rows(
            s.wide.at(0),
            self.products.output_segments(third, self.count),
            c.projection,
            out,
            Act::default(),
        )
    }
}
