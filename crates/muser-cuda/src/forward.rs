//! The walk through the layers: which kernel runs on which buffers, in order. Everything that is launched here can be
//! recorded into a graph: no allocation, no host work that depends on results.

use muser_backend::LayerRange;
use muser_backend::arith::attention::{Digits, score_factor};
use muser_backend::kv_layout::HeadLayout;
use muser_kv::KvGroup;
use muser_model::Geometry;

use crate::CudaError;
use crate::driver::{Buffer, Function, Launch, Stream};
use crate::kernels::{
    Act, COMBINE_RING_BYTES, CombineArgs, DigitArgs, EmbedArgs, LogitArgs, NormArgs, NormCutArgs, RopeArgs,
    SelectArgs, SiluArgs, Tuning,
};
use crate::matrix::{Product, ProductKernels};
use crate::step_data::{StepData, StepShape};
use crate::taps::Taps;
use crate::weights::{LayerOnDevice, Weights};

/// Most rows whose logits are computed at a time.
pub(crate) const TOP_ROWS: usize = 64;

/// Query vectors of a tile times values of a head: a partial result of attention.
pub(crate) const PART_VALUES: usize = 16 * 128;

/// CTAs that share a row in the norm kernel, for long rows.
const NORM_CLUSTER: u32 = 4;

/// Kernels besides the products.
pub(crate) struct RowKernels {
    pub(crate) embed: Function,
    pub(crate) norm: Function,
    /// The same at a cut between layers.
    pub(crate) norm_cut: Function,
    pub(crate) silu: Function,
    pub(crate) logits: Function,
    pub(crate) select: Function,
    pub(crate) merge: Function,
    /// Head norms, rotation and digits.
    pub(crate) rope: Function,
    /// Attention of few rows, block by block.
    pub(crate) split: Function,
    /// Attention of many rows: with warpgroup products where the card has them.
    pub(crate) many: Function,
    pub(crate) combine: Function,
    pub(crate) gate: Function,
    /// Between the card's block layout and that of all backends.
    pub(crate) transpose: Function,
}

/// The sizes that K and V of one head and one block have on a card; all kernels are for heads of 128.
pub(crate) fn head_layout(digits: Digits) -> HeadLayout {
    HeadLayout { dim: 128, digits }
}

/// Bytes of K and V of one layer of a block.
pub(crate) fn layer_bytes(digits: Digits, kv_heads: usize) -> usize {
    head_layout(digits).bytes() * kv_heads
}

/// Shape of `digits_split_*` on so many CTAs.
pub(crate) fn digits_split_launch(digits: Digits, tuning: &Tuning, ctas: u32) -> Launch {
    let shape = Launch::new((ctas, 1), tuning.split_units * 128);
    Launch { shared_bytes: tuning.split_shared_bytes(digits), ..shape }
}

/// Shape of `digits_many_*` and `digits_wide_*`.
pub(crate) fn digits_many_launch(digits: Digits, tuning: &Tuning, grid: (u32, u32)) -> Launch {
    let shape = Launch::new(grid, tuning.many_warps * 32);
    Launch { shared_bytes: tuning.many_shared_bytes(digits), ..shape }
}

/// Shape of `digits_combine` for `rows` rows of `width` values.
pub(crate) fn combine_launch(width: usize, rows: usize) -> Launch {
    let shape = Launch::new(((width / 256) as u32, rows as u32), 256);
    Launch { shared_bytes: COMBINE_RING_BYTES, ..shape }
}

/// Shape of `digits_gate`.
pub(crate) fn gate_launch(width: usize, rows: usize) -> Launch {
    Launch::new(((width / 256).div_ceil(4) as u32, rows as u32), 128)
}

/// Working memory of a step; the sizes follow from the geometry and the most rows of a step.
pub(crate) struct Scratch {
    /// Residual stream `[rows][hidden]`.
    pub(crate) h: Buffer<f32>,
    /// At a cut, `[rows]`: factors of the norm behind it.
    pub(crate) cut: Buffer<f32>,
    /// Output of q, k, gate, v.
    pub(crate) attn_in: Buffer<f32>,
    /// Output of the attention and down projections.
    pub(crate) projected: Buffer<f32>,
    /// Output of gate, up.
    pub(crate) ffn_in: Buffer<f32>,
    /// Output of the vocabulary matrix.
    pub(crate) top: Buffer<f32>,
    /// `[TOP_ROWS][vocab]`
    pub(crate) logits: Buffer<f32>,
    /// `[TOP_ROWS]`, see [`id_of_rank`]
    pub(crate) best: Buffer<u64>,
    /// `[TOP_ROWS][chunks][most]` and `[TOP_ROWS][most]`, see [`SelectShape`]
    pub(crate) chosen: Buffer<u64>,
    pub(crate) sorted: Buffer<u64>,
    /// `[TOP_ROWS][hidden]`
    pub(crate) hidden: Buffer<f32>,
    /// `[rows][heads][hi 128, lo 128]`
    pub(crate) q: Buffer<u8>,
    /// `[rows][heads]`: factor of each query's scores.
    pub(crate) q_factors: Buffer<f32>,
    pub(crate) part_o: Buffer<f32>,
    pub(crate) part_l: Buffer<f32>,
    pub(crate) embeddings: Buffer<f32>,
    pub(crate) act_hidden: Activations,
    pub(crate) act_attention: Activations,
    pub(crate) act_ffn: Activations,
    pub(crate) act_top: Activations,
}

/// Shape of the norm kernel for `rows` rows.
pub(crate) fn norm_launch(arch: u32, hidden: usize, rows: usize) -> Launch {
    let blocks = (hidden / 256) as u32;
    let cluster = if arch >= 90 && blocks > 8 { NORM_CLUSTER } else { 1 };
    Launch { cluster, ..Launch::new((rows as u32 * cluster, 1), blocks.div_ceil(cluster) * 32) }
}

/// Shape of `logit_rows` for `rows` rows.
pub(crate) fn logit_launch(vocab: usize, rows: usize) -> Launch {
    Launch::new((vocab.div_ceil(256) as u32, rows as u32), 256)
}

/// How the largest logits of a row are found: a CTA looks at [`SELECT_KEYS`] of them, then one at what these put out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SelectShape {
    pub(crate) chunks: usize,
    /// Most that a row can ask for; 0 where the vocabulary is too large.
    pub(crate) most: usize,
}

/// Keys that a CTA of `sampling.cu` holds.
pub(crate) const SELECT_KEYS: usize = 8192;
pub(crate) const SELECT_THREADS: u32 = 1024;
/// Most logits of a row that `top_merge` sorts.
const MOST_CANDIDATES: usize = 256;

impl SelectShape {
    pub(crate) fn of(vocab: usize) -> Self {
        let chunks = vocab.div_ceil(SELECT_KEYS);
        Self { chunks, most: (SELECT_KEYS / chunks.max(1)).min(MOST_CANDIDATES) }
    }
}

/// The logit in a rank of `logit_rows`; NaN if it was not finite.
pub(crate) fn value_of_rank(rank: u64) -> f32 {
    let bits = (rank >> 32) as u32;
    match rank {
        u64::MAX => f32::NAN,
        _ if bits >> 31 == 1 => f32::from_bits(bits & 0x7FFF_FFFF),
        _ => f32::from_bits(!bits),
    }
}

/// The id in a rank of `logit_rows`; `None` if a logit was not finite.
pub(crate) fn id_of_rank(rank: u64) -> Option<u32> {
    (rank != u64::MAX).then_some(!(rank as u32) & 0x7FFF_FFFF)
}

/// A quantised activation buffer and its memory.
pub(crate) struct Activations {
    pub(crate) act: Act,
    memory: Buffer<u8>,
}

impl Activations {
    /// For up to `rows` rows of `k` values, in the formats that `readers` want.
    pub(crate) fn new(
        context: &std::sync::Arc<crate::driver::Context>,
        rows: usize,
        k: usize,
        readers: &[&Product],
    ) -> Result<Self, CudaError> {
        // Kernels of many rows read whole tiles of rows.
        let ld = rows.next_multiple_of(128);
        let kb = k / 256;
        let large = readers.iter().any(|p| p.wants_super_blocks());
        let small = readers.iter().any(|p| p.wants_small_blocks());
        let floats = readers.iter().any(|p| p.wants_floats());
        let sizes = [
            (large, ld * k),
            (large, kb * ld * 4),
            (large, kb * ld * 32),
            (small, ld * k),
            (small, kb * ld * 32),
            (floats, ld * k * 4),
        ];
        let total = sizes.iter().map(|(on, bytes)| if *on { bytes.next_multiple_of(256) } else { 0 }).sum();
        let memory = Buffer::<u8>::zeroed(context, total, "activations")?;
        let mut at = 0;
        let mut place = |(on, bytes): (bool, usize)| {
            if !on {
                return 0;
            }
            let address = memory.at(at);
            at += bytes.next_multiple_of(256);
            address
        };
        let [q, d, sums, q32, d32, f] = sizes.map(&mut place);
        Ok(Self {
            act: Act { q, d, sums, q32, d32, f, k: k as u32, ld: ld as u32, ..Act::default() },
            memory,
        })
    }

    /// Copies bytes from a device address inside this buffer.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.memory.read((address - self.memory.at(0)) as usize, bytes)
    }
}

/// Memory of the KV blocks of one group: `[block][layer of the group][kv head]` heads of `attention_digits.cuh`.
pub(crate) struct KvPool {
    pub(crate) memory: Buffer<u8>,
    pub(crate) blocks: u32,
    /// Bytes of a block; in the sliding group the planes of a draft come last.
    pub(crate) block_bytes: u64,
}

impl KvPool {
    /// No blocks.
    pub(crate) fn empty(context: &std::sync::Arc<crate::driver::Context>) -> Result<Self, CudaError> {
        Ok(Self { memory: Buffer::new(context, 0, "KV blocks")?, blocks: 0, block_bytes: 0 })
    }
}

/// A draft that follows a step: it reads the residual stream on the way and has its own K and V of the rows at the end.
pub(crate) trait ContextDraft {
    /// Takes the residual stream at the input of a layer, if the draft reads it there.
    fn tap(&self, walk: &ForwardPass<'_>, layer: usize) -> Result<(), CudaError>;
    /// After the layers: K and V of all rows, or zeros in their place.
    fn extend(&self, walk: &ForwardPass<'_>) -> Result<(), CudaError>;
}

/// Everything that the walk reads.
pub(crate) struct ForwardPass<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) geometry: &'a Geometry,
    pub(crate) weights: &'a Weights,
    /// Those of the range.
    pub(crate) layers: &'a [LayerOnDevice],
    pub(crate) scratch: &'a Scratch,
    pub(crate) products: &'a ProductKernels,
    pub(crate) rows: &'a RowKernels,
    pub(crate) angles: &'a Buffer<f32>,
    pub(crate) full: &'a KvPool,
    pub(crate) sliding: &'a KvPool,
    pub(crate) draft: Option<&'a dyn ContextDraft>,
    pub(crate) digits: Digits,
    pub(crate) data: &'a StepData,
    pub(crate) shape: StepShape,
    /// The layers of the model that are here.
    pub(crate) range: LayerRange,
    pub(crate) taps: &'a Taps,
    pub(crate) tuning: Tuning,
    pub(crate) arch: u32,
    pub(crate) multiprocessors: u32,
}

impl ForwardPass<'_> {
    /// Embedding, unless the rows came over a cut, and all layers. What is left is [`Self::top`], unless they go over a cut.
    pub(crate) fn layers(&self) -> Result<(), CudaError> {
        let StepShape { n, .. } = self.shape;
        let s = self.scratch;
        if self.range.has_embedding() {
            self.embed()?;
        }
        let mut before: Option<(u64, &Product)> = None;
        let mut in_group = [0usize; 2];
        for (index, layer) in self.range.layers().zip(self.layers) {
            let attn_act = self.products.input(&layer.attn_in, s.act_hidden.act, n);
            match before {
                None if !self.range.has_embedding() => self.norm_cut(None, layer.attn_norm, attn_act)?,
                before => self.norm(before, layer.attn_norm, attn_act, None)?,
            }
            if let Some(draft) = self.draft.filter(|_| self.shape.context) {
                draft.tap(self, index)?;
            }
            if let Some((features, at)) =
                self.taps.place(index, self.geometry.hidden).filter(|_| self.shape.context)
            {
                self.stream.copy(&s.h, features, at, n * self.geometry.hidden)?;
            }
            self.products.multiply(self.stream, &layer.attn_in, attn_act, s.attn_in.at(0), n)?;

            let sliding = self.geometry.sliding[index];
            let place = &mut in_group[usize::from(sliding)];
            self.attention(layer, sliding, *place)?;
            *place += 1;

            let out_act = self.products.input(&layer.attn_out, s.act_attention.act, n);
            self.products.multiply(self.stream, &layer.attn_out, out_act, s.projected.at(0), n)?;
            let ffn_act = self.products.input(&layer.ffn_in, s.act_hidden.act, n);
            self.norm(Some((layer.post_attention_norm, &layer.attn_out)), layer.ffn_norm, ffn_act, None)?;
            self.products.multiply(self.stream, &layer.ffn_in, ffn_act, s.ffn_in.at(0), n)?;
            let down_act = self.products.input(&layer.ffn_down, s.act_ffn.act, n);
            self.silu(&layer.ffn_in, down_act)?;
            self.products.multiply(self.stream, &layer.ffn_down, down_act, s.projected.at(0), n)?;
            before = Some((layer.post_ffw_norm, &layer.ffn_down));
        }
        if let (false, Some(layer)) = (self.range.has_output(), self.layers.last()) {
            // What the norm makes of the rows serves nobody.
            let act = self.products.input(&layer.attn_in, s.act_hidden.act, n);
            self.norm_cut(before, layer.attn_norm, act)?;
        }
        self.draft.map_or(Ok(()), |draft| draft.extend(self))
    }

    /// Final norm and logits of top rows `from .. from + count` (at most [`TOP_ROWS`]) of the list.
    pub(crate) fn top(&self, from: usize, count: usize) -> Result<(), CudaError> {
        let (s, g) = (self.scratch, self.geometry);
        let last = self.layers.last().map(|l| (l.post_ffw_norm, &l.ffn_down));
        let act = self.products.input(&self.weights.output, s.act_top.act, count);
        self.norm(last, self.weights.output_norm, act, Some((from, count)))?;
        self.products.multiply(self.stream, &self.weights.output, act, s.top.at(0), count)?;
        let args = LogitArgs {
            part: s.top.at(0),
            factors: self.weights.output.factors(),
            logits: s.logits.at(0),
            best: s.best.at(0),
            segments: self.products.output_segments(&self.weights.output, count),
            n: count as u32,
            out_rows: self.weights.output.out_rows as u32,
            vocab: g.vocab as u32,
            scale: g.logit_scale,
            cap: g.softcap.unwrap_or(0.0),
        };
        self.stream.launch(&self.rows.logits, logit_launch(g.vocab, count), &args)?;
        if !self.shape.candidates {
            return Ok(());
        }
        let SelectShape { chunks, most } = SelectShape::of(g.vocab);
        let select = SelectArgs {
            logits: s.logits.at(0),
            counts: self.data.candidates(from),
            chosen: s.chosen.at(0),
            sorted: s.sorted.at(0),
            vocab: g.vocab as u32,
            chunks: chunks as u32,
            most: most as u32,
            _padding: 0,
        };
        let shape = Launch::new((chunks as u32, count as u32), SELECT_THREADS);
        self.stream.launch(&self.rows.select, shape, &select)?;
        self.stream.launch(&self.rows.merge, Launch::new((count as u32, 1), SELECT_THREADS), &select)
    }

    /// Rows of the embedding table, or those that came instead, normalised.
    pub(crate) fn embed(&self) -> Result<(), CudaError> {
        let (w, s, g) = (self.weights, self.scratch, self.geometry);
        let args = EmbedArgs {
            table: w.embedding.at(0),
            inputs: self.data.inputs(),
            embeddings: s.embeddings.at(0),
            h: s.h.at(0),
            row_bytes: w.embedding_row_bytes as u64,
            type_id: w.embedding_type.id(),
            hidden: g.hidden as u32,
            eps: g.rms_eps,
            factor: w.embedding_factor,
        };
        // Nothing runs before the step's data has arrived: later kernels read it before they wait.
        let shape = Launch { overlap: false, ..Launch::new((self.shape.n as u32, 1), (g.hidden / 8) as u32) };
        self.stream.launch(&self.rows.embed, shape, &args)
    }

    /// Residual update from the product `before` (with its post-norm) and the next norm, for all rows or some top rows.
    fn norm(
        &self,
        before: Option<(u64, &Product)>,
        w: u64,
        act: Act,
        top: Option<(usize, usize)>,
    ) -> Result<(), CudaError> {
        let rows = top.map_or(self.shape.n, |(_, count)| count);
        let args = self.norm_args(before, w, act, top);
        self.stream.launch(&self.rows.norm, norm_launch(self.arch, self.geometry.hidden, rows), &args)
    }

    /// The same for all rows at a cut: after the product `before` the factors of the next norm are kept, without one they are there.
    fn norm_cut(&self, before: Option<(u64, &Product)>, w: u64, act: Act) -> Result<(), CudaError> {
        let norm = self.norm_args(before, w, act, None);
        let args = NormCutArgs { norm, cut: self.scratch.cut.at(0) };
        let shape = norm_launch(self.arch, self.geometry.hidden, self.shape.n);
        // As the embedding: nothing runs before the step's data has arrived.
        let overlap = shape.overlap && before.is_some();
        self.stream.launch(&self.rows.norm_cut, Launch { overlap, ..shape }, &args)
    }

    fn norm_args(
        &self,
        before: Option<(u64, &Product)>,
        w: u64,
        act: Act,
        top: Option<(usize, usize)>,
    ) -> NormArgs {
        let (s, g, n) = (self.scratch, self.geometry, self.shape.n);
        NormArgs {
            part: before.map_or(0, |_| s.projected.at(0)),
            factors: before.map_or(0, |(_, product)| product.factors()),
            h: s.h.at(0),
            post: before.map_or(0, |(post, _)| post),
            w,
            rows: top.map_or(0, |(from, _)| self.data.top(from)),
            y: top.map_or(0, |_| s.hidden.at(0)),
            best: top.map_or(0, |_| s.best.at(0)),
            act,
            segments: before.map_or(0, |(_, product)| self.products.output_segments(product, n)),
            n: n as u32,
            hidden: g.hidden as u32,
            eps: g.rms_eps,
            post_eps: g.post_norm_eps,
        }
    }

    fn attention(&self, layer: &LayerOnDevice, sliding: bool, place: usize) -> Result<(), CudaError> {
        let (s, g, n) = (self.scratch, self.geometry, self.shape.n);
        let group = if sliding { KvGroup::Sliding } else { KvGroup::Full };
        let pool = if sliding { self.sliding } else { self.full };
        let kv = pool.memory.at(place * layer_bytes(self.digits, g.kv_heads));
        let segments = self.products.output_segments(&layer.attn_in, n);
        let (heads, kv_heads) = (g.heads as u32, g.kv_heads as u32);
        let width = layer.attn_in.out_rows as u32;
        let (q_width, kv_width) = (g.q_width() as u32, g.kv_width() as u32);

        let rope = RopeArgs {
            part: s.attn_in.at(0),
            factors: layer.attn_in.factors(),
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            angles: if sliding { self.angles.at(0) } else { 0 },
            positions: self.data.positions(),
            slots: self.data.slots(group),
            q: s.q.at(0),
            f: s.q_factors.at(0),
            kv,
            block_bytes: pool.block_bytes,
            segments,
            n: n as u32,
            heads,
            kv_heads,
            width,
            k_at: q_width,
            v_at: 2 * q_width + kv_width,
            eps: g.rms_eps,
            factor: score_factor(g.head_dim, self.digits),
        };
        let grid = ((heads + 2 * kv_heads).div_ceil(4), n as u32);
        self.stream.launch(&self.rows.rope, Launch::new(grid, 128), &rope)?;

        let combine = CombineArgs {
            part_o: s.part_o.at(0),
            part_l: s.part_l.at(0),
            tiles: self.data.tiles(group),
            row_tile: self.data.row_tile(),
            qkvg: s.attn_in.at(0),
            factors: layer.attn_in.factors(),
            act: self.products.input(&layer.attn_out, s.act_attention.act, n),
            segments,
            n: n as u32,
            width,
            gate_at: q_width + kv_width,
            group: heads / kv_heads,
        };
        self.attend(sliding, kv, pool.block_bytes, combine)
    }

    /// In exact integers: the definition of `muser_backend::arith::attention`.
    fn attend(
        &self,
        sliding: bool,
        kv: u64,
        block_bytes: u64,
        combine: CombineArgs,
    ) -> Result<(), CudaError> {
        let (s, g, n) = (self.scratch, self.geometry, self.shape.n);
        let group = if sliding { KvGroup::Sliding } else { KvGroup::Full };
        let attend = DigitArgs {
            q: s.q.at(0),
            f: s.q_factors.at(0),
            kv,
            block_bytes,
            tiles: self.data.tiles(group),
            groups: self.data.groups(),
            counts: self.data.counts(group),
            tables: self.data.tables(),
            part_o: s.part_o.at(0),
            part_l: s.part_l.at(0),
            heads: g.heads as u32,
            kv_heads: g.kv_heads as u32,
            group: combine.group,
            window: if sliding { g.window as u32 } else { 0 },
            ..DigitArgs::default()
        };
        if self.shape.split {
            let shape = digits_split_launch(self.digits, &self.tuning, self.multiprocessors);
            self.stream.launch(&self.rows.split, shape, &attend)?;
        }
        if self.shape.groups > 0 {
            let grid = (self.shape.groups as u32, g.kv_heads as u32);
            let shape = digits_many_launch(self.digits, &self.tuning, grid);
            self.stream.launch(&self.rows.many, shape, &attend)?;
            self.stream.launch(&self.rows.gate, gate_launch(g.q_width(), n), &combine)
        } else {
            self.stream.launch(&self.rows.combine, combine_launch(g.q_width(), n), &combine)
        }
    }

    fn silu(&self, before: &Product, act: Act) -> Result<(), CudaError> {
        let (g, n) = (self.geometry, self.shape.n);
        let args = SiluArgs {
            part: self.scratch.ffn_in.at(0),
            factors: before.factors(),
            act,
            segments: self.products.output_segments(before, n),
            n: n as u32,
            ffn: g.ffn as u32,
        };
        let grid = ((g.ffn / 256).div_ceil(4) as u32, n as u32);
        self.stream.launch(&self.rows.silu, Launch::new(grid, 128), &args)
    }
}
