//! [`CudaExecutor`]: the model on the card and one step at a time.
//!
//! Steps of up to 16 rows run as one CUDA graph per combination of row counts, recorded on first use. Larger steps are
//! launched kernel by kernel. Every call ends with the stream idle, so results and pinned memory may be read.
//!
//! Invariant: graphs name the addresses of `scratch`, the weights, the KV pools and the small step data; whoever replaces
//! one of these drops the graphs.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use muser_backend::arith;
use muser_backend::arith::attention::{Digits, MAX_LOG2_SCORE, score_bound};
use muser_backend::{
    Crossing, DraftBatch, DraftExecutor, ExecError, Executor, ExecutorInfo, KvCapacity, KvType, LayerRange,
    LentBlock, RowWants, StepBatch, StepOutput, numeric_route, only_a_part,
};
use muser_gguf::GgmlType;
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::{Draft, Geometry, Matrix, Model};

mod blocks;
mod drafting;
mod part;
mod pictures;
mod streaming;

use crate::CudaError;
use crate::draft::Drafter;
use crate::driver::{Buffer, Context, Graph, Launch, Pinned, Stream};
use crate::forward::{
    Activations, ContextDraft, ForwardPass, KvPool, PART_VALUES, RowKernels, Scratch, SelectShape, TOP_ROWS,
    id_of_rank, layer_bytes, value_of_rank,
};
use crate::kernels::{ReadArgs, Tuning};
use crate::loaded::Kernels;
use crate::matrix::{FEW_ROWS, Prefill, Product, ProductKernels};
use crate::selftest::{self, Card};
use crate::step_data::{AttentionLimits, StepData, StepShape};
use crate::streaming::Streaming;
use crate::taps::Taps;
use crate::tower::Tower;
use crate::weights::{LayerOnDevice, Weights};

/// Block table entries of a step of few rows, to begin with.
const SMALL_TABLE_LEN: usize = 16 * 1024;

/// Choices of [`CudaExecutor::new`].
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// Which card.
    pub device: usize,
    /// Most rows of a step; working memory grows with it (about 250 KB a row for the 30B model).
    pub max_rows: usize,
    /// Run small steps as graphs. Off is slower and gives the same bits.
    pub graphs: bool,
    /// How steps of many rows multiply.
    pub prefill: Prefill,
    /// How K and V are stored: [`KvType::Int16`] or [`KvType::Int8`].
    pub kv: KvType,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { device: 0, max_rows: 2048, graphs: true, prefill: Prefill::Exact, kv: KvType::Int16 }
    }
}

/// A loaded model on a card.
pub struct CudaExecutor {
    // Dropped in order: graphs and memory before the context.
    graphs: HashMap<StepShape, Graph>,
    drafter: Option<Drafter>,
    tower: Option<Tower>,
    streaming: Option<Streaming>,
    small: StepData,
    large: StepData,
    full: KvPool,
    sliding: KvPool,
    /// A block in the layout that leaves the card.
    staging: Buffer<u8>,
    scratch: Scratch,
    logits_on_host: Pinned<f32>,
    hidden_on_host: Pinned<f32>,
    best_on_host: Pinned<u64>,
    sorted_on_host: Pinned<u64>,
    angles: Buffer<f32>,
    weights: Weights,
    products: ProductKernels,
    rows: RowKernels,
    kernels: Kernels,
    stream: Stream,
    context: Arc<Context>,
    /// For a draft to be checked against.
    model: Model,
    geometry: Geometry,
    limits: AttentionLimits,
    /// The layers of the model that are here.
    range: LayerRange,
    taps: Taps,
    options: CudaOptions,
    /// Of K and V, as `options.kv` says.
    digits: Digits,
    info: ExecutorInfo,
}

/// Bytes of a card that are not given to K and V, and the part of its memory that at least are not.
const LEAST_RESERVE: u64 = 512 << 20;
const RESERVED_PART: u64 = 50;

impl CudaExecutor {
    /// Loads `model` onto a card: compiles the kernels (once per machine), copies and repacks the weights.
    pub fn new(model: &Model, options: CudaOptions) -> Result<Self, CudaError> {
        Self::part(model, LayerRange::whole(model.geometry.layers()), options)
    }

    /// The same of some layers of `model`.
    pub fn part(model: &Model, range: LayerRange, options: CudaOptions) -> Result<Self, CudaError> {
        let digits = digits_of(options.kv)?;
        let context = Context::open(options.device)?;
        let geometry = model.geometry.clone();
        check_geometry(&geometry)?;
        check_scores(model)?;
        let kernels = Kernels::load(&context)?;
        let mut products = kernels.products(&context)?;
        let stream = Stream::new(&context)?;
        if std::env::var_os(selftest::SKIP_VARIABLE).is_none() {
            let card = Card { context: &context, kernels: &kernels, products: &products, stream: &stream };
            let start = std::time::Instant::now();
            let compared = selftest::at_start(&card, &weight_types(model), options.prefill, digits)?.compared;
            tracing::debug!(compared, seconds = start.elapsed().as_secs_f64(), "kernels are right");
        }
        let weights = Weights::load(&context, model, range, &kernels.repack()?)?;
        products.set_prefill(options.prefill);
        products.reserve(&context, weights.layers.iter().flat_map(LayerOnDevice::products))?;
        let options = CudaOptions { max_rows: options.max_rows.max(FEW_ROWS), ..options };
        let tuning = Tuning::of(context.arch);
        let limits = AttentionLimits {
            group: geometry.heads / geometry.kv_heads,
            kv_heads: geometry.kv_heads,
            many_warps: tuning.many_warps as usize,
            split_parts: FEW_ROWS * (geometry.context / BLOCK_LEN + 1) * geometry.kv_heads,
        };
        let rows = RowKernels {
            embed: kernels.get("embed_rows")?,
            norm: kernels.get("norm_rows")?,
            norm_cut: kernels.get("norm_cut")?,
            silu: kernels.get("silu_rows")?,
            logits: kernels.get("logit_rows")?,
            select: kernels.get("top_select")?,
            merge: kernels.get("top_merge")?,
            rope: kernels.of_width("rope_digits", digits)?,
            split: kernels.of_width("digits_split", digits)?,
            many: kernels
                .of_width("digits_wide", digits)
                .or_else(|_| kernels.of_width("digits_many", digits))?,
            combine: kernels.get("digits_combine")?,
            gate: kernels.get("digits_gate")?,
            transpose: kernels.get("kv_transpose")?,
        };
        let layers: Vec<&LayerOnDevice> = weights.layers.iter().collect();
        let scratch = scratch(&context, &geometry, (&layers, &weights.output), range, &options, limits)?;
        let table = angles(geometry.rope_theta, geometry.head_dim, geometry.context);
        let angles = Buffer::from_slice(&context, &table, "rotation angles")?;
        let select = SelectShape::of(geometry.vocab);
        let empty = || KvPool::empty(&context);
        let info = info(&context, model, range, &options, digits);
        let top_rows = if range.has_output() { TOP_ROWS } else { 0 };
        let mut executor = Self {
            graphs: HashMap::new(),
            drafter: None,
            tower: None,
            streaming: None,
            small: StepData::new(&context, FEW_ROWS, SMALL_TABLE_LEN)?,
            large: StepData::new(&context, options.max_rows, SMALL_TABLE_LEN)?,
            full: empty()?,
            sliding: empty()?,
            staging: Buffer::new(&context, 0, "a KV block on its way")?,
            scratch,
            logits_on_host: Pinned::zeroed(&context, (top_rows * geometry.vocab).max(1))?,
            hidden_on_host: Pinned::zeroed(&context, (top_rows * geometry.hidden).max(1))?,
            best_on_host: Pinned::zeroed(&context, TOP_ROWS)?,
            sorted_on_host: Pinned::zeroed(&context, TOP_ROWS * select.most)?,
            angles,
            weights,
            products,
            rows,
            kernels,
            stream,
            context,
            model: model.clone(),
            geometry,
            limits,
            range,
            taps: Taps::default(),
            options,
            digits,
            info,
        };
        executor.note_room()?;
        Ok(executor)
    }

    /// Notes what the card has left for K and V now. What is kept back is for graphs, tables that grow, and other programs.
    fn note_room(&mut self) -> Result<(), CudaError> {
        let (free, total) = self.context.memory()?;
        self.info.kv_room = Some(free.saturating_sub(LEAST_RESERVE.max(total / RESERVED_PART)));
        Ok(())
    }

    /// Bytes of weights that one decoded token reads.
    pub fn weight_bytes(&self) -> usize {
        self.weights.bytes_per_token()
    }

    /// Seconds that a plain read of `bytes` of device memory takes (the best of a few): the yardstick of every figure.
    pub fn measure_plain_read(&self, bytes: usize) -> Result<f64, CudaError> {
        let memory = Buffer::<u8>::zeroed(&self.context, bytes, "the read test")?;
        let sink = Buffer::<u32>::zeroed(&self.context, 1, "the read test")?;
        let args = ReadArgs { p: memory.at(0), n: (bytes / 16) as u64, out: sink.at(0) };
        let function = self.kernels.get("plain_read")?;
        let shape = Launch { overlap: false, ..Launch::new((self.context.multiprocessors * 8, 1), 256) };
        let mut best = f64::MAX;
        for _ in 0..6 {
            self.stream.synchronize()?;
            let start = std::time::Instant::now();
            self.stream.launch(&function, shape, &args)?;
            self.stream.synchronize()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    }

    fn run(
        &mut self,
        batch: &StepBatch,
        crossing: &mut Crossing,
        out: &mut StepOutput,
    ) -> Result<(), CudaError> {
        self.context.bind()?;
        let _settle = self.stream.settle_at_end();
        let small = batch.rows().len() <= FEW_ROWS;
        self.make_room(batch, small)?;
        let data = if small { &mut self.small } else { &mut self.large };
        let shape = data.fill(batch, &self.geometry, self.limits);
        if !batch.embeddings().is_empty() && self.range.has_embedding() {
            self.scratch.embeddings.write(0, batch.embeddings())?;
        }
        let data = if small { &self.small } else { &self.large };
        data.upload(&self.stream)?;
        if !self.range.has_embedding() {
            self.take_over(data, shape, crossing)?;
        }
        if small && self.options.graphs {
            if !self.graphs.contains_key(&shape) {
                let graph = self.stream.capture(|| self.walk(data, shape).small_step())?;
                self.graphs.insert(shape, graph);
            }
            self.stream.replay(&self.graphs[&shape])?;
        } else if small {
            self.walk(data, shape).small_step()?;
        } else {
            self.walk(data, shape).layers()?;
        }
        if self.range.has_output() {
            self.collect(batch, shape, small, out)
        } else {
            self.hand_over(shape, crossing)
        }
    }

    /// Brings what is wanted of the rows to the host, and nothing else.
    fn collect(
        &mut self,
        batch: &StepBatch,
        shape: StepShape,
        small: bool,
        out: &mut StepOutput,
    ) -> Result<(), CudaError> {
        let (vocab, hidden) = (self.geometry.vocab, self.geometry.hidden);
        let count_of =
            |wanted: fn(&RowWants) -> bool| batch.rows().iter().filter(|r| wanted(&r.wants)).count();
        // Resized, not cleared: the same size again costs nothing.
        out.logits.resize(count_of(|w| w.logits) * vocab, 0.0);
        out.hidden.resize(count_of(|w| w.hidden) * hidden, 0.0);
        out.argmax.clear();
        out.candidates.clear();
        let most = SelectShape::of(vocab).most;
        let (mut logit_rows, mut hidden_rows) = (out.logits.chunks_mut(vocab), out.hidden.chunks_mut(hidden));
        let wants: Vec<RowWants> =
            batch.rows().iter().map(|r| r.wants).filter(|w| w.needs_logits() || w.hidden).collect();
        for (round, wants) in wants.chunks(TOP_ROWS).enumerate() {
            if !small {
                self.walk(&self.large, shape).top(round * TOP_ROWS, wants.len())?;
            }
            for run in runs(wants, |w| w.logits) {
                let (at, count) = (run.start * vocab, run.len() * vocab);
                self.stream.download(&self.scratch.logits, &mut self.logits_on_host, at, count)?;
            }
            for run in runs(wants, |w| w.hidden) {
                let (at, count) = (run.start * hidden, run.len() * hidden);
                self.stream.download(&self.scratch.hidden, &mut self.hidden_on_host, at, count)?;
            }
            if wants.iter().any(|w| w.argmax) {
                self.stream.download(&self.scratch.best, &mut self.best_on_host, 0, wants.len())?;
            }
            if wants.iter().any(|w| w.candidates > 0) {
                let count = wants.len() * most;
                self.stream.download(&self.scratch.sorted, &mut self.sorted_on_host, 0, count)?;
            }
            self.stream.synchronize()?;
            let mut copies: Vec<(&[f32], &mut [f32])> = Vec::with_capacity(wants.len());
            for (i, want) in wants.iter().enumerate() {
                if want.logits {
                    let to = logit_rows.next().expect("a row for every row that wants logits");
                    copies.push((&self.logits_on_host.slice()[i * vocab..][..vocab], to));
                }
                if want.hidden {
                    let to = hidden_rows.next().expect("a row for every row that wants its hidden state");
                    to.copy_from_slice(&self.hidden_on_host.slice()[i * hidden..][..hidden]);
                }
                if want.argmax {
                    out.argmax.push(id_of_rank(self.best_on_host.slice()[i]));
                }
                let candidates = &self.sorted_on_host.slice()[i * most..][..usize::from(want.candidates)];
                let candidates = candidates.iter().take(vocab);
                out.candidates
                    .extend(candidates.map(|&rank| (id_of_rank(rank).unwrap_or(0), value_of_rank(rank))));
            }
            copy_rows(copies);
        }
        self.stream.synchronize()?;
        Ok(())
    }

    /// Grows the step data when the block tables of a batch do not fit.
    fn make_room(&mut self, batch: &StepBatch, small: bool) -> Result<(), CudaError> {
        let needed = StepData::tables_needed(batch);
        let data = if small { &mut self.small } else { &mut self.large };
        if needed > data.table_len() {
            let rows = if small { FEW_ROWS } else { self.options.max_rows };
            *data = StepData::new(&self.context, rows, needed.next_power_of_two())?;
            self.graphs.clear();
        }
        Ok(())
    }

    fn walk<'a>(&'a self, data: &'a StepData, shape: StepShape) -> ForwardPass<'a> {
        ForwardPass {
            stream: &self.stream,
            geometry: &self.geometry,
            weights: &self.weights,
            layers: &self.weights.layers,
            scratch: &self.scratch,
            products: &self.products,
            rows: &self.rows,
            angles: &self.angles,
            full: &self.full,
            sliding: &self.sliding,
            draft: self.drafter.as_ref().map(|drafter| drafter as &dyn ContextDraft),
            digits: self.digits,
            data,
            shape,
            range: self.range,
            taps: &self.taps,
            tuning: Tuning::of(self.context.arch),
            arch: self.context.arch,
            multiprocessors: self.context.multiprocessors,
        }
    }

    fn check_batch(&self, batch: &StepBatch) -> Result<(), ExecError> {
        let capacity = KvCapacity { full: self.full.blocks, sliding: self.sliding.blocks };
        batch.validate(&self.geometry, capacity, self.options.max_rows)?;
        if batch.embeddings().len() > self.scratch.embeddings.len() {
            return Err(ExecError::InvalidBatch("more embedding rows than rows".to_owned()));
        }
        let most = self.most_candidates();
        if let Some(row) = batch.rows().iter().find(|row| usize::from(row.wants.candidates) > most) {
            let asked = row.wants.candidates;
            return Err(ExecError::InvalidBatch(format!(
                "{asked} of the largest logits, the most is {most}"
            )));
        }
        Ok(())
    }

    /// A step that was checked.
    fn compute(
        &mut self,
        batch: &StepBatch,
        crossing: &mut Crossing,
        out: &mut StepOutput,
    ) -> Result<(), ExecError> {
        self.drafter.iter_mut().for_each(|drafter| drafter.rows.note_step(batch));
        self.run(batch, crossing, out).map_err(|e| self.fail(e))
    }

    fn pool(&self, group: KvGroup) -> &KvPool {
        match group {
            KvGroup::Full => &self.full,
            KvGroup::Sliding => &self.sliding,
        }
    }

    fn fail(&self, error: CudaError) -> ExecError {
        error.into_exec(&self.info.device)
    }
}

impl ForwardPass<'_> {
    /// A whole step of few rows.
    fn small_step(&self) -> Result<(), CudaError> {
        self.layers()?;
        if self.shape.top > 0 && self.range.has_output() {
            self.top(0, self.shape.top)?;
        }
        Ok(())
    }
}

impl Executor for CudaExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn read_bandwidth(&self) -> Result<Option<f64>, ExecError> {
        // Far beyond the second-level cache, and long enough for the launch not to count; less where a model fills the card.
        for bytes in [4_usize << 30, 512 << 20] {
            match self.context.bind().and_then(|()| self.measure_plain_read(bytes)) {
                Ok(seconds) => return Ok(Some(bytes as f64 / seconds)),
                Err(CudaError::OutOfMemory { .. }) => {}
                Err(error) => return Err(error.into_exec(&self.info.device)),
            }
        }
        Ok(None)
    }

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        self.graphs.clear();
        self.drafter.iter_mut().for_each(|drafter| drafter.note_blocks(capacity.sliding));
        // The old blocks go first, so that the new ones may use their memory.
        self.full = KvPool::empty(&self.context).map_err(|e| e.into_exec(&self.info.device))?;
        self.sliding = KvPool::empty(&self.context).map_err(|e| e.into_exec(&self.info.device))?;
        // Zeroed: a masked position contributes 0 times the scale of its value, which is 0 only if that is finite.
        let pool = |blocks: u32, bytes: usize| {
            Buffer::zeroed(&self.context, blocks as usize * bytes, "KV blocks")
                .map(|memory| KvPool { memory, blocks, block_bytes: bytes as u64 })
                .map_err(|e| e.into_exec(&self.info.device))
        };
        let bytes = self.info.full_block_bytes.max(self.info.sliding_block_bytes);
        let staging = Buffer::new(&self.context, bytes, "a KV block on its way");
        self.staging = staging.map_err(|e| e.into_exec(&self.info.device))?;
        self.full = pool(capacity.full, self.info.full_block_bytes)?;
        self.sliding = pool(capacity.sliding, self.info.sliding_block_bytes)?;
        Ok(())
    }

    fn step(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        self.check_batch(batch)?;
        if !self.range.is_whole() {
            return Err(only_a_part(self.range));
        }
        self.compute(batch, &mut Crossing::default(), out)
    }

    fn most_candidates(&self) -> usize {
        SelectShape::of(self.geometry.vocab).most
    }

    fn export_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        let at = self.place(group, block, dst.len())?;
        self.read_block(group, at, dst).map_err(|e| self.fail(e))
    }

    fn clear_rows(&self, _: KvGroup, rows: usize, bytes: &mut [u8]) {
        self.clear(rows, bytes);
    }

    fn import_block(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        let at = self.place(group, block, src.len())?;
        self.write_block(group, at, src).map_err(|e| self.fail(e))?;
        if group == KvGroup::Sliding {
            self.drafter.iter_mut().for_each(|drafter| drafter.note_import(block, src));
        }
        Ok(())
    }

    fn lend_block(&mut self, _: KvGroup, _: BlockId) -> Option<Box<dyn LentBlock>> {
        None
    }
}

impl DraftExecutor for CudaExecutor {
    fn attach_draft(&mut self, draft: Draft) -> Result<(), ExecError> {
        self.take_draft(&draft)
    }

    fn draft(&mut self, batch: &DraftBatch, logits: &mut Vec<f32>) -> Result<(), ExecError> {
        self.check_round(batch)?;
        self.rounds(batch, logits, None).map_err(|e| self.fail(e))
    }

    fn draft_largest(
        &mut self,
        batch: &DraftBatch,
        scratch: &mut Vec<f32>,
        ids: &mut Vec<Option<u32>>,
    ) -> Result<(), ExecError> {
        self.check_round(batch)?;
        self.rounds(batch, scratch, Some(ids)).map_err(|e| self.fail(e))
    }

    fn has_draft_context(&self, block: BlockId, row: usize) -> bool {
        self.drafter.as_ref().is_none_or(|drafter| drafter.rows.has(block, row))
    }
}

/// Runs of adjacent rows that want something.
fn runs(wants: &[RowWants], wanted: fn(&RowWants) -> bool) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    wants.chunk_by(move |a, b| wanted(a) == wanted(b)).filter_map(move |run| {
        at += run.len();
        wanted(&run[0]).then_some(at - run.len()..at)
    })
}

/// Copies rows; one thread moves about 10 GB/s, which for many rows of a large vocabulary is milliseconds.
fn copy_rows(rows: Vec<(&[f32], &mut [f32])>) {
    let threads = if rows.iter().map(|(from, _)| from.len()).sum::<usize>() > 1 << 20 { 4 } else { 1 };
    if threads == 1 {
        rows.into_iter().for_each(|(from, to)| to.copy_from_slice(from));
        return;
    }
    let share = rows.len().div_ceil(threads);
    let mut rows = rows;
    std::thread::scope(|scope| {
        while !rows.is_empty() {
            let some = rows.split_off(rows.len().saturating_sub(share));
            scope.spawn(|| some.into_iter().for_each(|(from, to)| to.copy_from_slice(from)));
        }
    });
}

/// Digits of a stored value, for the KV types that there are kernels for.
fn digits_of(kv: KvType) -> Result<Digits, CudaError> {
    kv.digits().ok_or_else(|| {
        let [a, b] = [KvType::Int16, KvType::Int8].map(KvType::name);
        CudaError::Unsupported(format!("KV type {}, the kernels have {a} and {b}", kv.name()))
    })
}

fn info(
    context: &Context,
    model: &Model,
    range: LayerRange,
    options: &CudaOptions,
    digits: Digits,
) -> ExecutorInfo {
    let geometry = &model.geometry;
    let block_bytes = |sliding: bool| {
        let layers = geometry.sliding[range.layers()].iter().filter(|s| **s == sliding).count();
        layers * layer_bytes(digits, geometry.kv_heads)
    };
    let arch = context.arch;
    ExecutorInfo {
        backend: "cuda",
        device: format!("{}, compute capability {}.{}", context.name, arch / 10, arch % 10),
        route: {
            // The same on every card.
            let prefill = if options.prefill == Prefill::Fast { "-prefill8" } else { "" };
            format!("{}{prefill}", numeric_route(digits, model))
        },
        kv_type: options.kv,
        full_block_bytes: block_bytes(false),
        sliding_block_bytes: block_bytes(true),
        max_rows: options.max_rows,
        vocab: geometry.vocab,
        hidden: geometry.hidden,
        draft: None,
        kv_room: None,
        prompt_rows: 0,
    }
}

/// Types of the matrices, each once.
fn weight_types(model: &Model) -> Vec<GgmlType> {
    let layers = model.layers.iter().flat_map(|l| {
        [&l.attn_q, &l.attn_k, &l.attn_v, &l.attn_gate, &l.attn_output, &l.ffn_gate, &l.ffn_up, &l.ffn_down]
    });
    types_of(layers.chain(std::iter::once(&model.output)))
}

fn types_of<'a>(matrices: impl Iterator<Item = &'a Matrix>) -> Vec<GgmlType> {
    let mut types = Vec::new();
    for matrix in matrices {
        if !types.contains(&matrix.ty) {
            types.push(matrix.ty);
        }
    }
    types
}

/// Shapes that the kernels are written for.
fn check_geometry(g: &Geometry) -> Result<(), CudaError> {
    let refuse = |what: String| Err(CudaError::Unsupported(what));
    if g.head_dim != 128 {
        return refuse(format!("heads of {} values, the kernels need 128", g.head_dim));
    }
    if !g.heads.is_multiple_of(g.kv_heads) || !16usize.is_multiple_of(g.heads / g.kv_heads) {
        return refuse(format!(
            "{} query heads per KV head, the kernels need a divisor of 16",
            g.heads / g.kv_heads
        ));
    }
    for (what, value) in [("hidden size", g.hidden), ("FFN width", g.ffn), ("query width", g.q_width())] {
        if value == 0 || !value.is_multiple_of(256) {
            return refuse(format!("{what} {value}, the kernels need a multiple of 256"));
        }
    }
    if g.hidden > 32 * 256 {
        return refuse(format!("hidden size {}, the kernels go up to 8192", g.hidden));
    }
    Ok(())
}

/// Attention carries no running maximum, so scores must be bounded; normalised q and k see to that.
fn check_scores(model: &Model) -> Result<(), CudaError> {
    model.layers.iter().enumerate().try_for_each(|(i, layer)| {
        check_norms(&format!("layer {i}"), &layer.attn_q_norm, &layer.attn_k_norm, model.geometry.head_dim)
    })
}

/// The same of the norm weights of one layer.
fn check_norms(layer: &str, q_norm: &[f32], k_norm: &[f32], head_dim: usize) -> Result<(), CudaError> {
    check_bound(layer, score_bound(q_norm, k_norm, head_dim), MAX_LOG2_SCORE)
}

fn check_bound(layer: &str, bound: f32, most: f32) -> Result<(), CudaError> {
    if bound.is_nan() || bound > most {
        return Err(CudaError::Unsupported(format!(
            "{layer}: attn_q_norm and attn_k_norm allow attention scores up to 2^{bound}, the kernels take 2^{most}"
        )));
    }
    Ok(())
}

fn scratch(
    context: &Arc<Context>,
    g: &Geometry,
    (layers, output): (&[&LayerOnDevice], &Product),
    range: LayerRange,
    options: &CudaOptions,
    limits: AttentionLimits,
) -> Result<Scratch, CudaError> {
    let max_rows = options.max_rows;
    let of = |pick: &dyn Fn(&LayerOnDevice) -> &Product| {
        layers.iter().map(|layer| pick(layer)).collect::<Vec<_>>()
    };
    let longest =
        |products: &[&Product], rows: usize| products.iter().map(|p| p.output_len(rows)).max().unwrap_or(0);
    let f32s = |len: usize, what: &str| Buffer::<f32>::new(context, len, what);
    let projections = [of(&|l| &l.attn_out), of(&|l| &l.ffn_down)].concat();
    let from_hidden = [of(&|l| &l.attn_in), of(&|l| &l.ffn_in)].concat();
    let parts = limits.split_parts + max_rows * g.kv_heads;
    let select = SelectShape::of(g.vocab);
    // A part before a cut has no top.
    let top_rows = if range.has_output() { TOP_ROWS } else { 0 };
    Ok(Scratch {
        cut: f32s(max_rows, "factors at a cut")?,
        h: f32s(max_rows * g.hidden, "the residual stream")?,
        attn_in: f32s(longest(&of(&|l| &l.attn_in), max_rows), "attention projections")?,
        projected: f32s(longest(&projections, max_rows), "output projections")?,
        ffn_in: f32s(longest(&of(&|l| &l.ffn_in), max_rows), "FFN projections")?,
        top: f32s(output.output_len(TOP_ROWS), "the vocabulary projection")?,
        logits: f32s(top_rows * g.vocab, "logits")?,
        best: Buffer::new(context, TOP_ROWS, "the largest logits")?,
        chosen: Buffer::new(context, TOP_ROWS * select.chunks * select.most, "the largest logits")?,
        sorted: Buffer::new(context, TOP_ROWS * select.most, "the largest logits")?,
        hidden: f32s(top_rows * g.hidden, "hidden states")?,
        q: Buffer::new(context, max_rows * g.q_width() * 2, "queries")?,
        q_factors: f32s(max_rows * g.heads, "queries")?,
        part_o: f32s(parts * PART_VALUES, "attention sums")?,
        part_l: f32s(parts * 16, "attention sums")?,
        embeddings: f32s(max_rows * g.hidden, "embedding rows")?,
        act_hidden: Activations::new(context, max_rows, g.hidden, &from_hidden)?,
        act_attention: Activations::new(context, max_rows, g.q_width(), &of(&|l| &l.attn_out))?,
        act_ffn: Activations::new(context, max_rows, g.ffn, &of(&|l| &l.ffn_down))?,
        act_top: Activations::new(context, TOP_ROWS, g.hidden, &[output])?,
    })
}

/// cos and sin of every pair and position, `[position][pair][cos, sin]`: the very numbers that the CPU backend uses.
fn angles(rope_theta: f32, head_dim: usize, positions: usize) -> Vec<f32> {
    let frequencies = arith::inverse_frequencies(f64::from(rope_theta), head_dim);
    let mut angles = vec![0.0f32; positions * head_dim];
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(16);
    let share = positions.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (part, angles) in angles.chunks_mut(share * head_dim).enumerate() {
            let frequencies = &frequencies;
            scope.spawn(move || {
                for (i, row) in angles.chunks_exact_mut(head_dim).enumerate() {
                    for (pair, frequency) in row.chunks_exact_mut(2).zip(frequencies) {
                        (pair[0], pair[1]) = arith::rotation(part * share + i, *frequency);
                    }
                }
            });
        }
    });
    angles
}
