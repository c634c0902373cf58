//! The executor: a model's weights, its KV blocks, the threads, and the step that puts them together.
#![allow(unsafe_code, reason = "hands the step's buffers to the threads")]

mod buffers;
mod draft;
mod kv;
mod loans;
mod panels;
mod plan;
mod rows;
mod scratch;
mod share;
mod step;
#[cfg(test)]
mod tests;
mod tower;

use std::time::Duration;

use muser_backend::arith::attention as attention_bits;
use muser_backend::arith::vision::PositionRule;
use muser_backend::{
    Crossing, DraftBatch, DraftExecutor, ExecError, Executor, ExecutorInfo, HostLayers, KvCapacity, KvType,
    LayerRange, LayerStreamer, LentBlock, PartExecutor, StepBatch, StepOutput, TowerExecutor, TowerImage,
    TowerInfo, arith, check_projector, draft_mark, largest_of_draft, no_tower, numeric_route, only_a_part,
};
use muser_gguf::GgmlType;
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::{Draft, Matrix, Model, Projector};

use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::kernels::query_tile::{STATE_HEAD, TILE_QUERIES};
use crate::kernels::unpack::Class;
use crate::options::{CpuOptions, Repack};
use crate::pool::Pool;
use crate::weights::Weights;
use buffers::{Buffers, Widths};
use draft::Drafter;
use draft::round::RoundTarget;
use kv::KvStore;
use plan::Plan;
use rows::{RowPlace, check_scores};
use scratch::{ThreadScratch, thread_scratch};
use step::{Cut, StepJob};
use tower::Tower;

/// The numeric route with KV in f16; with digits it is [`numeric_route`].
const ROUTE: &str = "cpu-2/f16";

/// Revision of the draft's context arithmetic; blocks that hold a draft's planes also name the draft.
const DRAFT_ROUTE: &str = "dflash-1";

/// What was found and chosen, for `doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuDescription {
    /// Instruction set in use.
    pub isa: Isa,
    /// Sets that the processor has.
    pub supported: Vec<Isa>,
    /// Threads.
    pub threads: usize,
    /// Name of the processor, if the system tells.
    pub processor: Option<String>,
    /// Bytes of the repacked copies of the weights, a draft's included; 0 when they are used from the map.
    pub repacked_bytes: usize,
}

/// Runs Muse Glimmer on the processor.
pub struct CpuExecutor {
    info: ExecutorInfo,
    description: CpuDescription,
    // Before `model`: views point into its map.
    weights: Weights,
    model: Model,
    kernels: &'static Kernels,
    pool: Pool,
    kv: KvStore,
    buffers: Buffers,
    scratch: Vec<ThreadScratch>,
    plan: Plan,
    rows: Vec<RowPlace>,
    partial: Vec<f32>,
    inverse_frequencies: Vec<f64>,
    drafter: Option<Drafter>,
    tower: Option<Tower>,
    range: LayerRange,
    /// Layers whose inputs go over the cut for a draft behind it.
    taps: Vec<usize>,
    /// Are there matrices of super-block types, of small-block types? A draft's do not count.
    forms: (bool, bool),
    repack: Repack,
}

// SAFETY: raw pointers inside point to memory that the executor owns or keeps alive, used only through `&mut self`.
unsafe impl Send for CpuExecutor {}

impl CpuExecutor {
    /// Binds (and repacks) the weights of `model` and starts the threads.
    ///
    /// # Errors
    /// A type or shape without kernels, an instruction set that is not there, or not enough memory.
    pub fn new(model: Model, options: CpuOptions) -> Result<Self, ExecError> {
        let whole = LayerRange::whole(model.geometry.layers());
        Self::part(model, whole, options)
    }

    /// The same of some layers of `model`.
    ///
    /// # Errors
    /// As with [`Self::new`].
    pub fn part(model: Model, range: LayerRange, options: CpuOptions) -> Result<Self, ExecError> {
        let isa = match options.isa {
            Some(isa) if !isa.is_supported() => {
                let what = format!("this processor lacks {}", isa.label());
                return Err(ExecError::Unsupported { backend: "cpu", what });
            }
            Some(isa) => isa,
            None => Isa::from_environment()?,
        };
        check_shapes(&model, range)?;
        let route = match (options.kv, options.kv.digits()) {
            (_, Some(digits)) => {
                let head_dim = model.geometry.head_dim;
                let layers = model.layers.iter();
                let bounds =
                    layers.map(|l| attention_bits::score_bound(&l.attn_q_norm, &l.attn_k_norm, head_dim));
                check_scores("", bounds, attention_bits::MAX_LOG2_SCORE)?;
                numeric_route(digits, &model)
            }
            (KvType::F16, _) => ROUTE.into(),
            (other, _) => {
                let what = format!("KV type {}, expected f16, 16 or 8", other.name());
                return Err(ExecError::Unsupported { backend: "cpu", what });
            }
        };
        let mut pool = Pool::new(options.threads).map_err(|error| ExecError::Device {
            device: "cpu".into(),
            what: format!("starting threads: {error}"),
        })?;
        let weights = Weights::new(&model, range, options.repack, &mut pool)?;
        let g = &model.geometry;
        let max_rows = options.max_rows.clamp(1, 65536);
        let classes = || matrices(&model, range).filter_map(|m| Class::of(m.ty));
        let forms = (classes().any(Class::is_super), classes().any(|class| !class.is_super()));
        let buffers = Buffers::new(Widths::of(g), max_rows, forms.0, forms.1);
        let scratch = thread_scratch(pool.threads(), max_rows, g.head_dim, options.kv);
        let kv = KvStore::new(g, range, options.kv);
        let description = CpuDescription {
            isa,
            supported: Isa::ALL.into_iter().filter(|isa| isa.is_supported()).collect(),
            threads: pool.threads(),
            processor: processor_name(),
            repacked_bytes: weights.copied_bytes(),
        };
        let info = ExecutorInfo {
            backend: "cpu",
            device: format!(
                "{}, {} threads, {}",
                description.processor.as_deref().unwrap_or(std::env::consts::ARCH),
                description.threads,
                isa.label()
            ),
            route,
            kv_type: options.kv,
            full_block_bytes: kv.block_bytes(KvGroup::Full),
            sliding_block_bytes: kv.block_bytes(KvGroup::Sliding),
            max_rows,
            vocab: g.vocab,
            hidden: g.hidden,
            draft: None,
            kv_room: None,
            prompt_rows: 0,
        };
        let inverse_frequencies = arith::inverse_frequencies(f64::from(g.rope_theta), g.head_dim);
        Ok(Self {
            info,
            description,
            weights,
            kernels: Kernels::of(isa),
            pool,
            kv,
            buffers,
            scratch,
            plan: Plan::default(),
            rows: Vec::with_capacity(max_rows),
            partial: Vec::new(),
            inverse_frequencies,
            drafter: None,
            tower: None,
            range,
            taps: Vec::new(),
            forms,
            repack: options.repack,
            model,
        })
    }

    /// What was found and chosen.
    pub fn describe(&self) -> &CpuDescription {
        &self.description
    }

    /// The draft's K and V of all rows: zeros if the step leaves them out.
    fn prepare_draft(&mut self, batch: &StepBatch) {
        let Some(drafter) = &mut self.drafter else { return };
        for place in &self.rows {
            let seq = &batch.seqs()[place.seq];
            let index = place.position / BLOCK_LEN - seq.sliding_first as usize;
            let (block, row) = (batch.sliding_table(seq)[index], place.position % BLOCK_LEN);
            if batch.wants_draft_context() {
                drafter.note_context(block, row);
            } else {
                drafter.blank(&mut self.kv, block, row);
            }
        }
    }

    /// Numbers the rows and sizes the outputs.
    fn place_rows(&mut self, batch: &StepBatch, out: &mut StepOutput) -> usize {
        let (mut logits, mut hidden) = (0, 0);
        let top = self.range.has_output();
        self.rows.clear();
        let number = |wanted: bool, count: &mut usize| {
            *count += usize::from(wanted);
            wanted.then(|| *count - 1)
        };
        for (index, seq) in batch.seqs().iter().enumerate() {
            for i in 0..seq.n_rows as usize {
                let wants = batch.rows()[seq.first_row as usize + i].wants;
                self.rows.push(RowPlace {
                    seq: index,
                    position: seq.start_pos as usize + i,
                    logits: number(top && wants.needs_logits(), &mut logits),
                    hidden: number(top && wants.hidden, &mut hidden),
                });
            }
        }
        if top {
            out.logits.resize(logits * self.info.vocab, 0.0);
            out.hidden.resize(hidden * self.info.hidden, 0.0);
        }
        logits
    }

    /// Taps that the crossing of a step has room for.
    fn taps_of(&self, batch: &StepBatch) -> usize {
        let of_draft = self.drafter.as_ref().map_or(0, |drafter| drafter.config().target_layers.len());
        if batch.wants_draft_context() { of_draft.max(self.taps.len()) } else { 0 }
    }

    /// The layers of the range, on a batch.
    fn run(
        &mut self,
        batch: &StepBatch,
        crossing: &mut Crossing,
        out: &mut StepOutput,
    ) -> Result<(), ExecError> {
        batch.validate(&self.model.geometry, self.kv.capacity(), self.info.max_rows)?;
        for seq in batch.seqs() {
            self.kv.check_ours(KvGroup::Full, batch.full_table(seq))?;
            self.kv.check_ours(KvGroup::Sliding, batch.sliding_table(seq))?;
        }
        let logit_rows = self.place_rows(batch, out);
        let g = &self.model.geometry;
        let group = g.heads / g.kv_heads;
        self.plan.make(batch, group, g.kv_heads, self.pool.threads());
        if self.plan.split_blocks.is_some() {
            let entry = STATE_HEAD + g.head_dim;
            let size = self.plan.tiles.len() * self.plan.max_blocks * TILE_QUERIES.max(group) * entry;
            if self.partial.len() < size {
                self.partial.resize(size, 0.0);
            }
        }
        self.prepare_draft(batch);
        let drafter = self.drafter.as_mut().filter(|_| batch.wants_draft_context());
        let extend = drafter.map(Drafter::extend);
        let context = StepJob {
            model: &self.model,
            weights: &self.weights,
            kernels: self.kernels,
            batch,
            kv: &self.kv,
            plan: &self.plan,
            // A draft may need rows in a form that no matrix of the target reads.
            buffers: self.buffers.pointers().only(self.forms.0, self.forms.1),
            places: &self.rows,
            inverse_frequencies: &self.inverse_frequencies,
            scratch: self.scratch.as_mut_ptr(),
            partial: self.partial.as_mut_ptr(),
            logits: out.logits.as_mut_ptr(),
            logit_rows,
            hidden: out.hidden.as_mut_ptr(),
            draft: extend.as_ref(),
            range: self.range,
            cut: Cut::new(crossing, if batch.wants_draft_context() { &self.taps } else { &[] }),
        };
        self.pool
            .run_rows(self.rows.len(), &|worker| context.run(worker))
            .map_err(|what| ExecError::Device { device: "cpu".into(), what })?;
        if self.range.has_output() {
            out.reduce_to_argmax(batch, self.info.vocab);
        }
        Ok(())
    }
}

impl Executor for CpuExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        self.kv.allocate(capacity)?;
        if let Some(drafter) = &mut self.drafter {
            drafter.note_blocks(capacity.sliding);
        }
        Ok(())
    }

    fn step(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        if self.range.is_whole() {
            self.run(batch, &mut Crossing::default(), out)
        } else {
            Err(only_a_part(self.range))
        }
    }

    fn export_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        self.kv.export(group, block, dst)
    }

    fn clear_rows(&self, group: KvGroup, rows: usize, bytes: &mut [u8]) {
        self.kv.clear_rows(group, rows, bytes);
    }

    fn import_block(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        self.kv.import(group, block, src)?;
        if let (KvGroup::Sliding, Some(drafter)) = (group, &mut self.drafter) {
            drafter.note_context(block, BLOCK_LEN - 1);
        }
        Ok(())
    }

    fn lend_block(&mut self, group: KvGroup, block: BlockId) -> Option<Box<dyn LentBlock>> {
        let loan = self.kv.lend(group, block)?;
        if let (KvGroup::Sliding, Some(drafter)) = (group, &mut self.drafter) {
            drafter.note_context(block, BLOCK_LEN - 1);
        }
        Some(loan)
    }

    fn most_candidates(&self) -> usize {
        0
    }

    fn read_bandwidth(&self) -> Result<Option<f64>, ExecError> {
        Ok(None)
    }
}

impl PartExecutor for CpuExecutor {
    fn range(&self) -> LayerRange {
        self.range
    }

    fn tap_features(&mut self, layers: &[usize]) -> Result<(), ExecError> {
        self.taps = layers.to_vec();
        Ok(())
    }

    fn step_part(
        &mut self,
        batch: &StepBatch,
        crossing: &mut Crossing,
        out: &mut StepOutput,
    ) -> Result<(), ExecError> {
        if !self.range.is_whole() {
            crossing.check(batch.rows().len(), self.info.hidden, self.taps_of(batch))?;
        }
        self.run(batch, crossing, out)
    }

    fn as_host(&mut self) -> Option<&mut dyn HostLayers> {
        Some(self)
    }

    fn as_streamer(&mut self) -> Option<&mut dyn LayerStreamer> {
        None
    }
}

impl HostLayers for CpuExecutor {
    fn kv_capacity(&self) -> KvCapacity {
        self.kv.capacity()
    }

    fn kv_of(&self, layer: usize, block: BlockId) -> Result<&[u8], ExecError> {
        self.kv.layer(layer.wrapping_sub(self.range.first()), block)
    }

    fn kv_of_mut(&mut self, layer: usize, block: BlockId) -> Result<&mut [u8], ExecError> {
        self.kv.layer_mut(layer.wrapping_sub(self.range.first()), block)
    }
}

impl DraftExecutor for CpuExecutor {
    fn attach_draft(&mut self, draft: Draft) -> Result<(), ExecError> {
        let unsupported = |what: &str| Err(ExecError::Unsupported { backend: "cpu", what: what.into() });
        if self.drafter.is_some() {
            return unsupported("a second draft model");
        }
        if self.kv.capacity() != (KvCapacity { full: 0, sliding: 0 }) {
            return unsupported("a draft model after KV blocks were allocated");
        }
        if !self.range.has_output() {
            return unsupported("a draft model without the output layer");
        }
        let mark = draft_mark(&draft);
        let max_rows = self.info.max_rows;
        let drafter = Drafter::new(draft, &self.model, &mut self.kv, max_rows, self.repack, &mut self.pool)?;
        let g = &self.model.geometry;
        let rows = round_rows(max_rows, &drafter);
        let widths = Widths::of(g).or_draft(drafter.config());
        let classes =
            || matrices(&self.model, self.range).filter_map(|m| Class::of(m.ty)).chain(drafter.classes());
        let (super_blocks, small_blocks) =
            (classes().any(Class::is_super), classes().any(|class| !class.is_super()));
        self.buffers = Buffers::new(widths, rows, super_blocks, small_blocks);
        self.scratch = thread_scratch(self.pool.threads(), rows, widths.head_dim, self.info.kv_type);
        self.description.repacked_bytes += drafter.copied_bytes();
        self.info.draft = Some(drafter.info());
        self.info.sliding_block_bytes = self.kv.block_bytes(KvGroup::Sliding);
        self.info.route = format!("{}+{DRAFT_ROUTE}-{mark}", self.info.route);
        self.drafter = Some(drafter);
        Ok(())
    }

    fn draft(&mut self, batch: &DraftBatch, logits: &mut Vec<f32>) -> Result<(), ExecError> {
        let (Some(drafter), Some(output)) = (&mut self.drafter, self.weights.output) else {
            return Err(ExecError::InvalidBatch("no draft model is attached".into()));
        };
        let vocab = self.info.vocab;
        batch.validate(drafter.info(), vocab, self.kv.capacity())?;
        for seq in batch.seqs() {
            self.kv.check_ours(KvGroup::Sliding, batch.sliding_table(seq))?;
        }
        logits.resize(batch.proposals() * vocab, 0.0);
        let (mut first, mut at) = (0, 0);
        while first < batch.seqs().len() {
            let target = RoundTarget {
                model: &self.model,
                output,
                kernels: self.kernels,
                kv: &self.kv,
                buffers: self.buffers.pointers(),
                max_rows: round_rows(self.info.max_rows, drafter),
                scratch: self.scratch.as_mut_ptr(),
                threads: self.pool.threads(),
            };
            let (round, next) = drafter.round(target, batch, first, &mut logits[at..]);
            at += round.logit_rows() * vocab;
            self.pool
                .run_rows(0, &|worker| round.run(worker))
                .map_err(|what| ExecError::Device { device: "cpu".into(), what })?;
            first = next;
        }
        Ok(())
    }

    fn draft_largest(
        &mut self,
        batch: &DraftBatch,
        scratch: &mut Vec<f32>,
        ids: &mut Vec<Option<u32>>,
    ) -> Result<(), ExecError> {
        largest_of_draft(self, batch, scratch, ids)
    }

    fn has_draft_context(&self, block: BlockId, row: usize) -> bool {
        self.drafter.as_ref().is_none_or(|drafter| drafter.has_context(&self.kv, block, row))
    }
}

impl TowerExecutor for CpuExecutor {
    fn attach_projector(&mut self, projector: Projector, rule: PositionRule) -> Result<(), ExecError> {
        check_projector(&projector, &self.model.geometry, "cpu")?;
        if let Some(tower) = self.tower.take() {
            self.description.repacked_bytes -= tower.copied_bytes();
        }
        let tower = Tower::new(projector, rule, self.repack, &mut self.pool)?;
        self.description.repacked_bytes += tower.copied_bytes();
        self.tower = Some(tower);
        Ok(())
    }

    fn tower(&self) -> Option<&TowerInfo> {
        self.tower.as_ref().map(|tower| &tower.info)
    }

    fn begin_image(&mut self, image: &TowerImage) -> Result<(), ExecError> {
        self.tower.as_mut().ok_or_else(no_tower)?.begin(image)
    }

    fn encode_image(&mut self, time: Duration, rows: &mut Vec<f32>) -> Result<bool, ExecError> {
        let tower = self.tower.as_mut().ok_or_else(no_tower)?;
        tower.encode(self.kernels, &mut self.pool, time, rows)
    }

    fn drop_image(&mut self) {
        if let Some(tower) = &mut self.tower {
            tower.drop_image();
        }
    }
}

/// Rows that the row buffers of an executor with a draft have room for: a step, or at least one block of the draft.
fn round_rows(max_rows: usize, drafter: &Drafter) -> usize {
    max_rows.max(drafter.config().block_size)
}

/// The matrices of a range that products read.
fn matrices(model: &Model, range: LayerRange) -> impl Iterator<Item = &Matrix> {
    model.matrices_of(range.layers()).chain(range.has_output().then_some(&model.output))
}

/// Refuses what the kernels cannot do, before anything is loaded.
fn check_shapes(model: &Model, range: LayerRange) -> Result<(), ExecError> {
    let g = &model.geometry;
    let unsupported = |what: String| Err(ExecError::Unsupported { backend: "cpu", what });
    if !g.head_dim.is_multiple_of(16) || g.head_dim == 0 {
        return unsupported(format!("head size {}, expected a multiple of 16", g.head_dim));
    }
    if g.kv_heads == 0 || !g.heads.is_multiple_of(g.kv_heads) || g.heads / g.kv_heads > TILE_QUERIES {
        return unsupported(format!(
            "{} query heads on {} key heads, expected 1 to {TILE_QUERIES} each",
            g.heads, g.kv_heads
        ));
    }
    let table = &model.token_embd;
    if !table.ty.is_decodable() {
        return unsupported(format!("{}: type {} cannot be decoded", table.name, table.ty.name()));
    }
    for m in matrices(model, range) {
        let float = matches!(m.ty, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
        if !float && Class::of(m.ty).is_none() {
            return unsupported(format!("{}: no kernel for type {}", m.name, m.ty.name()));
        }
    }
    Ok(())
}

/// `model name` of `/proc/cpuinfo`.
fn processor_name() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}
