//! The walk through the layers: which kernel runs on which buffers, in order. Everything that is launched here can be
//! recorded into a graph: no allocation, no host work that depends on results.

use muser_backend::KvType;
use muser_backend::arith::attention::{Digits, score_factor};
use muser_backend::kv_layout::HeadLayout;
use muser_kv::{BLOCK_LEN, KvGroup};
use muser_model::Geometry;

use crate::CudaError;
use crate::draft::Drafter;
use crate::driver::{Buffer, Function, Launch, Stream};
use crate::executor::Attention;
use crate::kernels::{
    Act, AttnArgs, CombineArgs, DigitArgs, EmbedArgs, ExactArgs, LogitArgs, NormArgs, RopeArgs, SelectArgs,
    ShortArgs, SiluArgs, TapArgs, Tuning,
};
use crate::matrix::{Product, ProductKernels};
use crate::step_data::{FIRST_BLOCK, StepData, StepShape};
use crate::weights::Weights;

/// Most rows whose logits are computed at a time.
pub(crate) const TOP_ROWS: usize = 32;

/// Query vectors of a tile times values of a head: a partial result of attention.
pub(crate) const PART_VALUES: usize = 16 * 128;

/// Shared memory of the combine kernel: 3 stages of 32 partial results of two heads.
pub(crate) const COMBINE_RING_BYTES: u32 = 3 * 32 * 260 * 4;

/// Shared memory of attention without tensor cores (`struct Shared` in `attention_exact.cu`) and its threads.
pub(crate) const EXACT_SHARED_BYTES: u32 = 65536 + 128 * 16 * 4 + 16 * 260 * 4 + 4 * 16 * 4;
pub(crate) const EXACT_THREADS: u32 = 256;

/// Threads of attention in a sequence's first block, and the rows up to which it takes two heads a CTA.
const SHORT_THREADS: u32 = 256;
const SHORT_FEW_ROWS: usize = 32;

/// CTAs that share a row in the norm kernel, for long rows.
const NORM_CLUSTER: u32 = 4;

/// Kernels besides the products.
pub(crate) struct RowKernels {
    pub(crate) embed: Function,
    pub(crate) norm: Function,
    pub(crate) silu: Function,
    pub(crate) rope: Function,
    pub(crate) logits: Function,
    pub(crate) tap: Function,
    pub(crate) select: Function,
    pub(crate) merge: Function,
    pub(crate) split: Function,
    pub(crate) many: Function,
    pub(crate) combine: Function,
    pub(crate) gate: Function,
    /// For 1, 2 and 8 query heads of a KV head.
    pub(crate) short: [Function; 3],
    pub(crate) exact_split: Function,
    pub(crate) exact_walk: Function,
    pub(crate) exact_combine: Function,
    /// For one and for two digits of K and V.
    pub(crate) digits: [DigitKernels; 2],
    pub(crate) digits_combine: Function,
    pub(crate) digits_gate: Function,
    /// Between the card's block layout and that of all backends.
    pub(crate) transpose: Function,
}

/// Attention in exact integers, for one width of K and V.
#[derive(Clone, Copy)]
pub(crate) struct DigitKernels {
    pub(crate) rope: Function,
    pub(crate) split: Function,
    pub(crate) many: Function,
    /// The same with warpgroup products.
    pub(crate) wide: Option<Function>,
}

impl RowKernels {
    /// Attention for K and V of so many digits.
    pub(crate) fn digits(&self, digits: Digits) -> DigitKernels {
        self.digits[digits.count() - 1]
    }
}

/// The sizes that K and V of one head and one block have on a card; all kernels are for heads of 128.
pub(crate) fn head_layout(digits: Digits) -> HeadLayout {
    HeadLayout { dim: 128, digits }
}

/// Bytes of K and V of one layer of a block.
pub(crate) fn layer_bytes(kv: KvType, kv_heads: usize) -> usize {
    kv.head_bytes(128) * BLOCK_LEN * kv_heads
}

/// Shared memory of a unit of attention in digits (`unit_bytes` in `attention_digits.cuh`).
fn unit_bytes(digits: Digits) -> u32 {
    2 * digits.count() as u32 * 8192 + 1024
}

/// Shape of `digits_split_*` on so many CTAs.
pub(crate) fn digits_split_launch(digits: Digits, tuning: &Tuning, ctas: u32) -> Launch {
    let units = tuning.split_units;
    let shared_bytes = units * unit_bytes(digits) + 4 * 16 * 132 * 4;
    Launch { shared_bytes, ..Launch::new((ctas, 1), units * 128) }
}

/// Shape of `digits_many_*` and `digits_wide_*`.
pub(crate) fn digits_many_launch(digits: Digits, tuning: &Tuning, grid: (u32, u32)) -> Launch {
    let warps = tuning.many_warps;
    let shared_bytes = tuning.many_stages() * unit_bytes(digits) + warps * 8192;
    Launch { shared_bytes, ..Launch::new(grid, warps * 32) }
}

/// Working memory of a step; the sizes follow from the geometry and the most rows of a step.
pub(crate) struct Scratch {
    /// Residual stream `[rows][hidden]`.
    pub(crate) h: Buffer<f32>,
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
    /// `[rows][heads][128]` for tensor cores.
    pub(crate) q: Buffer<u16>,
    /// The same for attention in the CPU's order.
    pub(crate) q_exact: Buffer<f32>,
    /// `[rows][heads]`: factor of each query's scores, for attention in digits.
    pub(crate) q_factors: Buffer<f32>,
    pub(crate) part_o: Buffer<f32>,
    /// Sums; for exact attention maxima and sums.
    pub(crate) part_l: Buffer<f32>,
    pub(crate) embeddings: Buffer<f32>,
    /// `[rows][features]`
    pub(crate) features: Option<Buffer<f32>>,
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

/// Which of `attend_short_1`, `_2` and `_8`, and its shape, for `rows` rows: few rows are spread over more CTAs.
pub(crate) fn short_launch(args: &ShortArgs, rows: usize) -> (usize, Launch) {
    let (variant, queries) = match args.group {
        1 => (0, 1),
        group if group.is_multiple_of(8) && rows > SHORT_FEW_ROWS => (2, 8),
        _ => (1, 2),
    };
    let heads = queries.max(2);
    // `struct Shared`: a block of K or V, queries, probabilities, outputs, sums, maxima.
    let shared_bytes = 65536 + 4 * (queries * (128 + 260 + 8) + heads * (128 + 1));
    let shape = Launch { shared_bytes, ..Launch::new((args.heads / heads, rows as u32), SHORT_THREADS) };
    (variant, shape)
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

/// Memory of the KV blocks of one group: `[block][layer of the group][K, V][kv head][256 * 128]` f16, or in digits
/// `[block][layer of the group][kv head]` heads of `attention_digits.cuh`.
pub(crate) struct KvPool {
    pub(crate) memory: Buffer<u8>,
    pub(crate) blocks: u32,
    /// f16 values, or pairs of bytes, of a block; in the sliding group the planes of a draft come last.
    pub(crate) block_halves: u64,
}

impl KvPool {
    /// No blocks.
    pub(crate) fn empty(context: &std::sync::Arc<crate::driver::Context>) -> Result<Self, CudaError> {
        Ok(Self { memory: Buffer::new(context, 0, "KV blocks")?, blocks: 0, block_halves: 0 })
    }
}

/// Everything that the walk reads.
pub(crate) struct Walk<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) geometry: &'a Geometry,
    pub(crate) weights: &'a Weights,
    pub(crate) scratch: &'a Scratch,
    pub(crate) products: &'a ProductKernels,
    pub(crate) rows: &'a RowKernels,
    pub(crate) angles: &'a Buffer<f32>,
    pub(crate) full: &'a KvPool,
    pub(crate) sliding: &'a KvPool,
    pub(crate) feature_layers: &'a [usize],
    pub(crate) draft: Option<&'a Drafter>,
    pub(crate) attention: Attention,
    pub(crate) kv: KvType,
    pub(crate) data: &'a StepData,
    pub(crate) shape: StepShape,
    pub(crate) tuning: Tuning,
    pub(crate) arch: u32,
    pub(crate) multiprocessors: u32,
}

impl Walk<'_> {
    /// Embedding, all layers, features. What is left is [`Self::top`].
    pub(crate) fn layers(&self) -> Result<(), CudaError> {
        let StepShape { n, .. } = self.shape;
        let s = self.scratch;
        self.embed()?;
        let mut before: Option<(u64, &Product)> = None;
        let mut in_group = [0usize; 2];
        for (index, layer) in self.weights.layers.iter().enumerate() {
            let attn_act = self.products.input(&layer.attn_in, s.act_hidden.act, n);
            self.norm(before, layer.attn_norm, attn_act, None)?;
            self.tap(index)?;
            if let Some(draft) = self.draft.filter(|_| self.shape.context) {
                draft.tap(self, index)?;
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
        self.draft.map_or(Ok(()), |draft| draft.extend(self))
    }

    /// Final norm and logits of top rows `from .. from + count` (at most [`TOP_ROWS`]) of the list.
    pub(crate) fn top(&self, from: usize, count: usize) -> Result<(), CudaError> {
        let (s, g) = (self.scratch, self.geometry);
        let last = self.weights.layers.last().map(|l| (l.post_ffw_norm, &l.ffn_down));
        let act = self.products.input(&self.weights.output, s.act_top.act, count);
        self.norm(last, self.weights.output_norm, act, Some((from, count)))?;
        self.products.multiply(self.stream, &self.weights.output, act, s.top.at(0), count)?;
        let args = LogitArgs {
            part: s.top.at(0),
            logits: s.logits.at(0),
            best: s.best.at(0),
            segments: self.weights.output.output_segments(count),
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

    fn embed(&self) -> Result<(), CudaError> {
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
        let (s, g, n) = (self.scratch, self.geometry, self.shape.n);
        let args = NormArgs {
            part: before.map_or(0, |_| s.projected.at(0)),
            h: s.h.at(0),
            post: before.map_or(0, |(post, _)| post),
            w,
            rows: top.map_or(0, |(from, _)| self.data.top(from)),
            y: top.map_or(0, |_| s.hidden.at(0)),
            best: top.map_or(0, |_| s.best.at(0)),
            act,
            segments: before.map_or(0, |(_, product)| product.output_segments(n)),
            n: n as u32,
            hidden: g.hidden as u32,
            eps: g.rms_eps,
            post_eps: g.post_norm_eps,
        };
        let rows = top.map_or(n, |(_, count)| count);
        self.stream.launch(&self.rows.norm, norm_launch(self.arch, g.hidden, rows), &args)
    }

    fn tap(&self, layer: usize) -> Result<(), CudaError> {
        let Some(at) = self.feature_layers.iter().position(|l| *l == layer) else { return Ok(()) };
        let Some(out) = self.scratch.features.as_ref().filter(|_| self.shape.features > 0) else {
            return Ok(());
        };
        let hidden = self.geometry.hidden;
        let args = TapArgs {
            h: self.scratch.h.at(0),
            rows: self.data.features(),
            out: out.at(0),
            hidden: hidden as u32,
            width: (self.feature_layers.len() * hidden) as u32,
            at: (at * hidden) as u32,
        };
        let grid = (hidden.div_ceil(1024) as u32, self.shape.features as u32);
        self.stream.launch(&self.rows.tap, Launch::new(grid, 256), &args)
    }

    fn attention(
        &self,
        layer: &crate::weights::LayerOnDevice,
        sliding: bool,
        place: usize,
    ) -> Result<(), CudaError> {
        let (s, g, n) = (self.scratch, self.geometry, self.shape.n);
        let group = if sliding { KvGroup::Sliding } else { KvGroup::Full };
        let pool = if sliding { self.sliding } else { self.full };
        let block_halves = pool.block_halves;
        let kv = pool.memory.at(place * layer_bytes(self.kv, g.kv_heads));
        let segments = layer.attn_in.output_segments(n);
        let (heads, kv_heads) = (g.heads as u32, g.kv_heads as u32);
        let width = layer.attn_in.out_rows as u32;
        let (q_width, kv_width) = (g.q_width() as u32, g.kv_width() as u32);

        let rope = RopeArgs {
            part: s.attn_in.at(0),
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            angles: if sliding { self.angles.at(0) } else { 0 },
            positions: self.data.positions(),
            slots: self.data.slots(group),
            q: s.q.at(0),
            q_exact: s.q_exact.at(0),
            kv,
            block_halves,
            segments,
            n: n as u32,
            heads,
            kv_heads,
            width,
            k_at: q_width,
            v_at: 2 * q_width + kv_width,
            eps: g.rms_eps,
            q_scale: match self.kv.digits() {
                Some(digits) => score_factor(g.head_dim, digits),
                None => std::f32::consts::LOG2_E / (g.head_dim as f32).sqrt(),
            },
            exact_below: match self.attention {
                Attention::Fast => FIRST_BLOCK,
                Attention::Exact => u32::MAX,
            },
            f: s.q_factors.at(0),
        };
        let grid = ((heads + 2 * kv_heads).div_ceil(4), n as u32);
        let kernel = self.kv.digits().map_or(self.rows.rope, |digits| self.rows.digits(digits).rope);
        self.stream.launch(&kernel, Launch::new(grid, 128), &rope)?;

        let combine = CombineArgs {
            part_o: s.part_o.at(0),
            part_l: s.part_l.at(0),
            tiles: self.data.tiles(group),
            row_tile: self.data.row_tile(),
            qkvg: s.attn_in.at(0),
            act: self.products.input(&layer.attn_out, s.act_attention.act, n),
            segments,
            n: n as u32,
            width,
            gate_at: q_width + kv_width,
            group: heads / kv_heads,
        };
        if let Some(digits) = self.kv.digits() {
            return self.attend_digits(digits, sliding, kv, 2 * block_halves, combine);
        }
        if self.shape.short > 0 {
            self.attend_short(sliding, kv, block_halves, &combine)?;
        }
        match self.attention {
            Attention::Fast => self.attend_fast(sliding, kv, block_halves, combine),
            Attention::Exact => self.attend_exact(sliding, kv, block_halves, combine),
        }
    }

    fn attend_fast(
        &self,
        sliding: bool,
        kv: u64,
        block_halves: u64,
        combine: CombineArgs,
    ) -> Result<(), CudaError> {
        let (s, g, n) = (self.scratch, self.geometry, self.shape.n);
        let group = if sliding { KvGroup::Sliding } else { KvGroup::Full };
        let (heads, kv_heads, q_width) = (g.heads as u32, g.kv_heads as u32, g.q_width() as u32);
        let attend = AttnArgs {
            q: s.q.at(0),
            kv,
            block_halves,
            tiles: self.data.tiles(group),
            groups: self.data.groups(),
            counts: self.data.counts(group),
            tables: self.data.tables(),
            part_o: s.part_o.at(0),
            part_l: s.part_l.at(0),
            heads,
            kv_heads,
            group: heads / kv_heads,
            window: if sliding { g.window as u32 } else { 0 },
        };
        let Tuning { split_warps, many_warps, .. } = self.tuning;
        if self.shape.split {
            let shape = Launch {
                shared_bytes: split_warps * 32768 + 4 * 16 * 132 * 4,
                ..Launch::new((self.multiprocessors, 1), split_warps * 32)
            };
            self.stream.launch(&self.rows.split, shape, &attend)?;
        }
        if self.shape.groups > 0 {
            let shape = Launch {
                shared_bytes: 2 * 32768 + many_warps * 8192,
                ..Launch::new((self.shape.groups as u32, kv_heads), many_warps * 32)
            };
            self.stream.launch(&self.rows.many, shape, &attend)?;
        }
        if self.shape.groups > 0 {
            let grid = ((q_width / 256).div_ceil(4), n as u32);
            self.stream.launch(&self.rows.gate, Launch::new(grid, 128), &combine)?;
        } else if self.shape.split {
            let shape =
                Launch { shared_bytes: COMBINE_RING_BYTES, ..Launch::new((q_width / 256, n as u32), 256) };
            self.stream.launch(&self.rows.combine, shape, &combine)?;
        }
        Ok(())
    }

    /// In exact integers: the definition of `muser_backend::arith::attention`.
    fn attend_digits(
        &self,
        digits: Digits,
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
        let kernels = self.rows.digits(digits);
        if self.shape.split {
            let shape = digits_split_launch(digits, &self.tuning, self.multiprocessors);
            self.stream.launch(&kernels.split, shape, &attend)?;
        }
        let blocks = (g.q_width() / 256) as u32;
        if self.shape.groups > 0 {
            let grid = (self.shape.groups as u32, g.kv_heads as u32);
            let shape = digits_many_launch(digits, &self.tuning, grid);
            self.stream.launch(&kernels.wide.unwrap_or(kernels.many), shape, &attend)?;
            let grid = (blocks.div_ceil(4), n as u32);
            self.stream.launch(&self.rows.digits_gate, Launch::new(grid, 128), &combine)
        } else {
            let shape = Launch { shared_bytes: COMBINE_RING_BYTES, ..Launch::new((blocks, n as u32), 256) };
            self.stream.launch(&self.rows.digits_combine, shape, &combine)
        }
    }

    /// Rows of the first block of their sequence.
    fn attend_short(
        &self,
        sliding: bool,
        kv: u64,
        block_halves: u64,
        combine: &CombineArgs,
    ) -> Result<(), CudaError> {
        let (g, n, rows) = (self.geometry, self.shape.n, self.shape.short);
        let group = if sliding { KvGroup::Sliding } else { KvGroup::Full };
        let args = ShortArgs {
            q: self.scratch.q_exact.at(0),
            kv,
            block_halves,
            rows: self.data.short(),
            slots: self.data.slots(group),
            qkvg: combine.qkvg,
            act: combine.act,
            segments: combine.segments,
            n: combine.n,
            width: combine.width,
            gate_at: combine.gate_at,
            heads: g.heads as u32,
            kv_heads: g.kv_heads as u32,
            group: combine.group,
            window: if sliding { g.window as u32 } else { 0 },
            recent: n.min(BLOCK_LEN) as u32,
            scale: 1.0 / (g.head_dim as f32).sqrt(),
        };
        let (variant, shape) = short_launch(&args, rows);
        self.stream.launch(&self.rows.short[variant], shape, &args)
    }

    fn attend_exact(
        &self,
        sliding: bool,
        kv: u64,
        block_halves: u64,
        combine: CombineArgs,
    ) -> Result<(), CudaError> {
        let (s, g) = (self.scratch, self.geometry);
        let group = if sliding { KvGroup::Sliding } else { KvGroup::Full };
        let group_tiles = self.tuning.many_warps;
        let attend = ExactArgs {
            q: s.q_exact.at(0),
            kv,
            block_halves,
            tiles: self.data.tiles(group),
            groups: self.data.groups(),
            counts: self.data.counts(group),
            tables: self.data.tables(),
            part_o: s.part_o.at(0),
            part_ml: s.part_l.at(0),
            heads: g.heads as u32,
            kv_heads: g.kv_heads as u32,
            group: (g.heads / g.kv_heads) as u32,
            window: if sliding { g.window as u32 } else { 0 },
            group_tiles,
            scale: 1.0 / (g.head_dim as f32).sqrt(),
            ..ExactArgs::default()
        };
        let launch = |grid| Launch { shared_bytes: EXACT_SHARED_BYTES, ..Launch::new(grid, EXACT_THREADS) };
        if self.shape.split {
            self.stream.launch(&self.rows.exact_split, launch((self.multiprocessors * 2, 1)), &attend)?;
        }
        if self.shape.groups > 0 {
            let grid = (self.shape.groups as u32 * group_tiles, g.kv_heads as u32);
            self.stream.launch(&self.rows.exact_walk, launch(grid), &attend)?;
        }
        let grid = ((g.q_width() / 256) as u32, self.shape.n as u32);
        self.stream.launch(&self.rows.exact_combine, Launch::new(grid, 256), &combine)
    }

    fn silu(&self, before: &Product, act: Act) -> Result<(), CudaError> {
        let (g, n) = (self.geometry, self.shape.n);
        let args = SiluArgs {
            part: self.scratch.ffn_in.at(0),
            act,
            segments: before.output_segments(n),
            n: n as u32,
            ffn: g.ffn as u32,
        };
        let grid = ((g.ffn / 256).div_ceil(4) as u32, n as u32);
        self.stream.launch(&self.rows.silu, Launch::new(grid, 128), &args)
    }
}
