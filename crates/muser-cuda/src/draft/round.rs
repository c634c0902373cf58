//! A draft round: the block forward of several sequences at once, from anchors to proposals.
//!
//! A sequence has a row for its anchor and one for each proposal. Rows of one block see each other, all of them, besides the
//! context before the anchor: attention is that of the context's blocks followed by one more. Rounds of up to 32 rows run as
//! graphs, one for each number of rows and proposals.

use muser_backend::DraftBatch;
use muser_backend::arith::attention::score_factor;

use super::Drafter;
use super::round_data::{ROUND_ROWS, RoundShape};
use crate::CudaError;
use crate::driver::{Launch, Stream};
use crate::forward::{
    Activations, KvPool, RowKernels, Scratch, TOP_ROWS, combine_launch, digits_split_launch, layer_bytes,
    logit_launch,
};
use crate::kernels::{
    CombineArgs, DigitArgs, DraftEmbedArgs, DraftHeadArgs, DraftNormArgs, LogitArgs, SiluArgs, Tuning,
};
use crate::matrix::{Product, ProductKernels};
use crate::weights::Weights;

/// What a round uses of its target.
pub(crate) struct RoundTarget<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) products: &'a ProductKernels,
    pub(crate) rows: &'a RowKernels,
    pub(crate) weights: &'a Weights,
    pub(crate) scratch: &'a Scratch,
    pub(crate) sliding: &'a KvPool,
    pub(crate) multiprocessors: u32,
    pub(crate) tuning: Tuning,
    pub(crate) graphs: bool,
    pub(crate) vocab: usize,
    pub(crate) logit_scale: f32,
    pub(crate) softcap: f32,
}

/// A round that has run.
pub(crate) struct Round {
    pub(crate) rows: usize,
    pub(crate) proposals: usize,
    /// The first sequence that is left over.
    pub(crate) next: usize,
    /// Are the proposals there?
    pub(crate) proposed: bool,
}

impl Drafter {
    /// Runs the sequences from `first` on, as many as fit; what is left is [`Self::propose`], unless a graph had it in it.
    pub(crate) fn round(
        &mut self,
        target: &RoundTarget<'_>,
        batch: &DraftBatch,
        first: usize,
    ) -> Result<Round, CudaError> {
        let (shape, next) = self.data.fill(batch, first);
        let RoundShape { rows, proposals } = shape;
        self.data.upload(target.stream)?;
        if rows > ROUND_ROWS || !target.graphs {
            self.layers(target, rows)?;
            return Ok(Round { rows, proposals, next, proposed: false });
        }
        if !self.graphs.contains_key(&shape) {
            let graph = target.stream.capture(|| {
                self.layers(target, rows)?;
                self.propose(target, rows, 0, proposals)
            })?;
            self.graphs.insert(shape, graph);
        }
        target.stream.replay(&self.graphs[&shape])?;
        Ok(Round { rows, proposals, next, proposed: true })
    }

    fn layers(&self, target: &RoundTarget<'_>, n: usize) -> Result<(), CudaError> {
        let (c, b) = (&self.config, &self.round);
        let stream = target.stream;
        let embed = DraftEmbedArgs {
            table: target.weights.embedding.at(0),
            inputs: self.data.inputs(),
            h: b.h.at(0),
            row_bytes: target.weights.embedding_row_bytes as u64,
            type_id: target.weights.embedding_type.id(),
            hidden: c.hidden as u32,
            factor: target.weights.embedding_factor,
            _padding: 0,
        };
        // Nothing runs before the round's data has arrived: later kernels read it before they wait.
        let grid = ((c.hidden / 256).div_ceil(4) as u32, n as u32);
        stream.launch(&self.kernels.embed, Launch { overlap: false, ..Launch::new(grid, 128) }, &embed)?;
        let input = |product: &Product, act: &Activations| target.products.input(product, act.act, n);
        let mut before: Option<&Product> = None;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            let act = input(&layer.attn_in, &b.act_hidden);
            self.norm(target, before, n, DraftNormArgs { w: layer.attn_norm, act, ..self.all_rows(n) })?;
            target.products.multiply(stream, &layer.attn_in, act, b.attn_in.at(0), n)?;
            self.attention(target, index, n)?;
            let act = input(&layer.attn_out, &b.act_attention);
            target.products.multiply(stream, &layer.attn_out, act, b.projected.at(0), n)?;
            let act = input(&layer.ffn_in, &b.act_hidden);
            let norm = DraftNormArgs { w: layer.ffn_norm, act, ..self.all_rows(n) };
            self.norm(target, Some(&layer.attn_out), n, norm)?;
            target.products.multiply(stream, &layer.ffn_in, act, b.ffn_in.at(0), n)?;
            let act = input(&layer.ffn_down, &b.act_ffn);
            let silu = SiluArgs {
                part: b.ffn_in.at(0),
                factors: layer.ffn_in.factors(),
                act,
                segments: target.products.output_segments(&layer.ffn_in, n),
                n: n as u32,
                ffn: c.ffn as u32,
            };
            let grid = ((c.ffn / 256).div_ceil(4) as u32, n as u32);
            stream.launch(&target.rows.silu, Launch::new(grid, 128), &silu)?;
            target.products.multiply(stream, &layer.ffn_down, act, b.projected.at(0), n)?;
            before = Some(&layer.ffn_down);
        }
        Ok(())
    }

    /// Logits of proposals `from .. from + count` (at most [`TOP_ROWS`]) of a round of `rows` rows, into the target's scratch
    /// memory, and the largest of each.
    pub(crate) fn propose(
        &self,
        target: &RoundTarget<'_>,
        rows: usize,
        from: usize,
        count: usize,
    ) -> Result<(), CudaError> {
        debug_assert!(count <= TOP_ROWS, "the caller cuts");
        let (s, output) = (target.scratch, &target.weights.output);
        let act = target.products.input(output, s.act_top.act, count);
        let norm = DraftNormArgs {
            w: self.weights.output_norm,
            rows: self.data.top(from),
            best: s.best.at(0),
            act,
            ..self.all_rows(rows)
        };
        self.norm(target, self.weights.layers.last().map(|l| &l.ffn_down), count, norm)?;
        target.products.multiply(target.stream, output, act, s.top.at(0), count)?;
        let args = LogitArgs {
            part: s.top.at(0),
            factors: output.factors(),
            logits: s.logits.at(0),
            best: s.best.at(0),
            segments: target.products.output_segments(output, count),
            n: count as u32,
            out_rows: output.out_rows as u32,
            vocab: target.vocab as u32,
            scale: target.logit_scale,
            cap: target.softcap,
        };
        target.stream.launch(&target.rows.logits, logit_launch(target.vocab, count), &args)
    }

    fn all_rows(&self, n: usize) -> DraftNormArgs {
        let c = &self.config;
        DraftNormArgs {
            h: self.round.h.at(0),
            n: n as u32,
            hidden: c.hidden as u32,
            eps: c.rms_eps,
            ..DraftNormArgs::default()
        }
    }

    /// Adds the output of the product `before` to the residual stream and norms `count` rows.
    fn norm(
        &self,
        target: &RoundTarget<'_>,
        before: Option<&Product>,
        count: usize,
        args: DraftNormArgs,
    ) -> Result<(), CudaError> {
        let args = DraftNormArgs {
            part: before.map_or(0, |_| self.round.projected.at(0)),
            factors: before.map_or(0, Product::factors),
            segments: before.map_or(0, |product| target.products.output_segments(product, args.n as usize)),
            ..args
        };
        let shape = Launch::new((count as u32, 1), args.hidden / 8);
        target.stream.launch(&self.kernels.norm, shape, &args)
    }

    fn attention(&self, target: &RoundTarget<'_>, index: usize, n: usize) -> Result<(), CudaError> {
        let (c, b, layer) = (&self.config, &self.round, &self.weights.layers[index]);
        let stream = target.stream;
        let (heads, kv_heads) = (c.heads as u32, c.kv_heads as u32);
        let (q_width, kv_width) = (c.q_width() as u32, c.kv_width() as u32);
        let layer_bytes = layer_bytes(self.digits, c.kv_heads);
        let head_args = DraftHeadArgs {
            part: b.attn_in.at(0),
            factors: layer.attn_in.factors(),
            q_norm: layer.q_norm,
            k_norms: self.weights.k_norms + (index * 128 * size_of::<f32>()) as u64,
            angles: self.angles.at(0),
            positions: self.data.positions(),
            slots: self.data.slots(),
            q: b.q.at(0),
            f: b.q_factors.at(0),
            kv: b.own.at(0),
            block_bytes: layer_bytes as u64,
            layer_bytes: 0,
            segments: target.products.output_segments(&layer.attn_in, n),
            n: n as u32,
            width: layer.attn_in.out_rows as u32,
            heads,
            kv_heads,
            layers: 1,
            k_at: q_width,
            v_at: q_width + kv_width,
            eps: c.rms_eps,
            factor: score_factor(c.head_dim, self.digits),
        };
        let grid = ((heads + 2 * kv_heads).div_ceil(4), n as u32);
        stream.launch(&self.kernels.heads, Launch::new(grid, 128), &head_args)?;

        let attend = DigitArgs {
            q: b.q.at(0),
            f: b.q_factors.at(0),
            kv: target.sliding.memory.at(self.first_plane + index * layer_bytes),
            block_bytes: target.sliding.block_bytes,
            tiles: self.data.tiles(),
            counts: self.data.counts(),
            tables: self.data.tables(),
            part_o: b.part_o.at(0),
            part_l: b.part_l.at(0),
            heads,
            kv_heads,
            group: heads / kv_heads,
            window: c.window as u32,
            own: b.own.at(0),
            own_bytes: layer_bytes as u64,
            ends: self.data.ends(),
            ..DigitArgs::default()
        };
        let shape = digits_split_launch(self.digits, &target.tuning, target.multiprocessors);
        stream.launch(&target.rows.split, shape, &attend)?;

        let combine = CombineArgs {
            part_o: b.part_o.at(0),
            part_l: b.part_l.at(0),
            tiles: self.data.tiles(),
            row_tile: self.data.row_tile(),
            act: target.products.input(&layer.attn_out, b.act_attention.act, n),
            n: n as u32,
            group: heads / kv_heads,
            ..CombineArgs::default()
        };
        stream.launch(&target.rows.combine, combine_launch(c.q_width(), n), &combine)
    }
}
