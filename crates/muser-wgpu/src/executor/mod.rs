//! [`WgpuExecutor`]: a model on a device, one step at a time.
//!
//! Every kernel's bindings are made once, when K and V are allocated ([`Program`]); a step writes its data into one buffer and
//! records dispatches. Every call ends with the device idle, so results may be read and the next step's data written.

use std::sync::Arc;

use muser_backend::arith;
use muser_backend::arith::attention::{Digits, MAX_LOG2_SCORE, score_bound};
use muser_backend::kv_layout::HeadLayout;
use muser_backend::{
    Crossing, ExecError, Executor, ExecutorInfo, KvCapacity, KvType, LayerRange, LentBlock, StepBatch,
    StepOutput, numeric_route, only_a_part,
};
use muser_kv::{BLOCK_LEN, BlockId, KvGroup};
use muser_model::{Geometry, Model};

use crate::WgpuError;
use crate::call::{Maker, Params};
use crate::device::{Buffer, Device};
use crate::draft::Drafter;
use crate::gpu::Gpu;
use crate::program::{Parts, Program};
use crate::scratch::{Scratch, step_rows, top_rows};
use crate::step_data::{Shape, StepData, index, most_split};
use crate::taps::Taps;
use crate::weights::{self, Weights};

mod blocks;
mod drafting;
mod part;
mod results;

/// Choices of [`WgpuExecutor::new`].
#[derive(Clone, Copy, Debug)]
pub struct WgpuOptions {
    /// Most rows of a step.
    pub max_rows: usize,
    /// How K and V are stored: [`KvType::Int16`] or [`KvType::Int8`].
    pub kv: KvType,
}

impl Default for WgpuOptions {
    fn default() -> Self {
        Self { max_rows: 512, kv: KvType::Int16 }
    }
}

/// Parts of a step that are submitted one after the other, so that the device works while the rest is recorded.
const SUBMISSIONS: usize = 4;
/// Bytes of a device that are not given to K and V, and the part of its memory that at least are not.
const LEAST_RESERVE: u64 = 256 << 20;
const RESERVED_PART: u64 = 50;

/// A loaded model on a device.
pub struct WgpuExecutor {
    info: ExecutorInfo,
    model: Model,
    digits: Digits,
    step: StepData,
    scratch: Scratch,
    weights: Weights,
    /// K and V of every layer.
    kv: Vec<Buffer>,
    capacity: KvCapacity,
    program: Option<Program>,
    drafter: Option<Drafter>,
    params: Params,
    /// Results on their way to the host.
    staging: Option<Buffer>,
    /// The layers of the model that are here.
    range: LayerRange,
    taps: Option<Taps>,
    inverse_frequencies: Vec<f64>,
    top_rows: usize,
    gpu: Arc<Gpu>,
}

impl WgpuExecutor {
    /// Loads `model`.
    ///
    /// # Errors
    /// A shape or a type without a kernel, or not enough memory.
    pub fn new(gpu: &Arc<Gpu>, model: Model, options: WgpuOptions) -> Result<Self, WgpuError> {
        let whole = LayerRange::whole(model.geometry.layers());
        Self::part(gpu, model, whole, options)
    }

    /// Loads some layers of `model`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn part(
        gpu: &Arc<Gpu>,
        model: Model,
        range: LayerRange,
        options: WgpuOptions,
    ) -> Result<Self, WgpuError> {
        let digits = options.kv.digits().ok_or_else(|| {
            WgpuError::Unsupported(format!("KV type {}, expected 16 or 8", options.kv.name()))
        })?;
        check_geometry(&model.geometry)?;
        check_scores(&model)?;
        model.matrices().try_for_each(weights::check)?;
        let device = &gpu.device;
        let g = &model.geometry;
        let binding = device.facts.binding.min(device.facts.buffer);
        let (max_rows, top_rows) = (options.max_rows.min(step_rows(g, binding)), top_rows(g, binding));
        if max_rows == 0 || top_rows == 0 {
            let (ffn, vocab) = (g.ffn, g.vocab);
            let what =
                format!("rows of {ffn} and {vocab} values, the device binds {binding} bytes at a time");
            return Err(WgpuError::Unsupported(what));
        }
        let split = most_split(max_rows, g.q_width(), binding);
        let needed = weights::bytes_of(weights::of_range(&model, range));
        let available = device.available();
        if needed > available {
            return Err(WgpuError::OutOfMemory { what: "the weights".into(), needed, available });
        }
        let weights = Weights::load(device, &model, range)?;
        let scratch_top = if range.has_output() { top_rows } else { 0 };
        let scratch = Scratch::new(device, g, &weights, max_rows, scratch_top, split)?;
        let step = StepData::new(device, max_rows, top_rows, g.context.div_ceil(BLOCK_LEN), split)?;
        let inverse_frequencies = arith::inverse_frequencies(f64::from(g.rope_theta), g.head_dim);
        let info = info(device, &model, range, options.kv, digits, max_rows);
        let mut executor = Self {
            info,
            digits,
            step,
            scratch,
            weights,
            kv: Vec::new(),
            capacity: KvCapacity { full: 0, sliding: 0 },
            program: None,
            drafter: None,
            params: Params::default(),
            staging: None,
            range,
            taps: None,
            inverse_frequencies,
            top_rows,
            gpu: Arc::clone(gpu),
            model,
        };
        executor.note_room();
        Ok(executor)
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Bytes of weights that one decoded token reads.
    pub fn weight_bytes(&self) -> u64 {
        let table = self.range.has_embedding().then_some(&self.model.token_embd);
        weights::bytes_of(weights::of_range(&self.model, self.range)) - weights::bytes_of(table.into_iter())
    }

    fn fail(&self, error: WgpuError) -> ExecError {
        error.into_exec(&self.info.device)
    }

    /// K and V of one layer of a block, numbered from the first of the range; the layers of a draft come behind those of the
    /// target.
    fn layer_bytes(&self, layer: usize) -> usize {
        let g = &self.model.geometry;
        let is_draft = layer >= self.layer_count();
        let of_draft = self.drafter.as_ref().filter(|_| is_draft).map(|drafter| &drafter.config);
        of_draft.map_or(g.kv_heads, |c| c.kv_heads) * self.head_layout(layer).bytes()
    }

    fn head_layout(&self, layer: usize) -> HeadLayout {
        let g = &self.model.geometry;
        let of_draft = self.drafter.as_ref().filter(|_| layer >= self.layer_count());
        HeadLayout {
            dim: of_draft.map_or(g.head_dim, |drafter| drafter.config.head_dim),
            digits: self.digits,
        }
    }

    /// Layers with K and V, a draft's included.
    fn kv_layers(&self) -> usize {
        self.layer_count() + self.drafter.as_ref().map_or(0, Drafter::layers)
    }

    fn is_sliding(&self, layer: usize) -> bool {
        layer >= self.layer_count() || self.model.geometry.sliding[self.range.first() + layer]
    }

    /// Notes what the device has left for K and V.
    fn note_room(&mut self) {
        let device = &self.gpu.device;
        let reserve = LEAST_RESERVE.max(device.facts.memory.unwrap_or(0) / RESERVED_PART);
        self.info.kv_room = device.facts.memory.map(|_| device.available().saturating_sub(reserve));
    }

    fn allocate(&mut self, capacity: KvCapacity) -> Result<(), WgpuError> {
        // The old ones go first, so that the new ones may use their memory.
        self.program = None;
        self.drafter.iter_mut().for_each(Drafter::forget);
        self.params = Params::default();
        self.kv.clear();
        self.gpu.device.wait()?;
        self.capacity = capacity;
        let blocks = |layer| if self.is_sliding(layer) { capacity.sliding } else { capacity.full };
        let sizes: Vec<u64> =
            (0..self.kv_layers()).map(|l| u64::from(blocks(l)) * self.layer_bytes(l) as u64).collect();
        let (needed, available) = (sizes.iter().sum(), self.gpu.device.available());
        let limit = self.gpu.device.facts.binding;
        if needed > available || sizes.iter().any(|size| *size > limit) {
            self.capacity = KvCapacity { full: 0, sliding: 0 };
            let what = if needed > available {
                "KV blocks".to_owned()
            } else {
                format!("KV blocks, a layer of which has {:?} bytes,", sizes.iter().max())
            };
            return Err(WgpuError::OutOfMemory { what, needed, available: available.min(limit) });
        }
        for size in sizes {
            self.kv.push(self.gpu.device.buffer(size, "KV blocks")?);
        }
        let mut maker =
            Maker { device: &self.gpu.device, library: &self.gpu.library, params: &mut self.params };
        let parts = Parts {
            geometry: &self.model.geometry,
            weights: &self.weights,
            scratch: &self.scratch,
            step: &self.step,
            kv: &self.kv,
            digits: self.digits,
            range: self.range,
        };
        let program = Program::new(&mut maker, parts)?;
        if let Some(drafter) = &mut self.drafter {
            drafter.make_calls(&mut maker, parts)?;
            drafter.rows.reset(capacity.sliding);
        }
        maker.finish()?;
        self.program = Some(program);
        self.gpu.device.keep_pipelines();
        Ok(())
    }

    fn run(
        &mut self,
        batch: &StepBatch,
        crossing: &mut Crossing,
        out: &mut StepOutput,
    ) -> Result<(), WgpuError> {
        let (shape, end) = self.step.fill(batch, &self.model.geometry)?;
        self.step.upload(&self.gpu.device, shape.rows, end)?;
        self.write_angles(batch)?;
        if !batch.embeddings().is_empty() && self.range.has_embedding() {
            self.gpu.device.write(&self.scratch.embeddings, 0, bytemuck::cast_slice(batch.embeddings()))?;
        }
        if let Some(drafter) = &mut self.drafter {
            drafter.rows.note_step(batch);
            drafter.prepare_step(&self.gpu.device, batch)?;
        }
        if !self.range.has_embedding() {
            self.take_over(batch, crossing, shape)?;
        }
        self.layers(shape, batch.wants_draft_context())?;
        if self.range.has_output() {
            self.collect(batch, out)?;
        } else {
            self.hand_over(batch, crossing)?;
        }
        self.gpu.device.wait()
    }

    fn layers(&self, shape: Shape, context: bool) -> Result<(), WgpuError> {
        let Some(program) = &self.program else { return Ok(()) };
        let layers = self.layer_count();
        let row_bytes = self.info.hidden as u64 * 4;
        for part in 0..SUBMISSIONS.min(layers) {
            let parts = SUBMISSIONS.min(layers);
            let mut recorder = self.gpu.device.recorder();
            if part == 0 {
                program.embed(&mut recorder, shape.rows);
            }
            for layer in layers * part / parts..layers * (part + 1) / parts {
                let drafter = self.drafter.as_ref().filter(|_| context);
                let of_model = self.range.first() + layer;
                program.layer_calls(&mut recorder, layer, shape.rows, shape.parts, |recorder| {
                    drafter.iter().for_each(|drafter| drafter.tap(recorder, of_model, shape.rows));
                    if let Some(taps) = self.taps.as_ref().filter(|_| context) {
                        let bytes = u64::from(shape.rows) * row_bytes;
                        taps.record(recorder, of_model, &self.scratch.h, bytes);
                    }
                });
            }
            if part + 1 == parts {
                program.cut(&mut recorder, shape.rows);
            }
            if let Some(drafter) = self.drafter.as_ref().filter(|_| part + 1 == parts) {
                drafter.extend(&mut recorder, shape.rows, context);
            }
            self.gpu.device.submit(recorder)?;
        }
        Ok(())
    }

    /// cos and sin of every row's position.
    fn write_angles(&self, batch: &StepBatch) -> Result<(), WgpuError> {
        let mut angles = Vec::with_capacity(batch.rows().len() * self.inverse_frequencies.len() * 2);
        for seq in batch.seqs() {
            for position in seq.start_pos..seq.start_pos + seq.n_rows {
                for frequency in &self.inverse_frequencies {
                    let (cos, sin) = arith::rotation(position as usize, *frequency);
                    angles.extend([cos, sin]);
                }
            }
        }
        self.gpu.device.write(&self.scratch.angles, 0, bytemuck::cast_slice(&angles))
    }

    fn check_batch(&self, batch: &StepBatch) -> Result<(), ExecError> {
        batch.validate(&self.model.geometry, self.capacity, self.info.max_rows)?;
        if batch.embeddings().len() as u64 * 4 > self.scratch.embeddings.size() {
            return Err(ExecError::InvalidBatch("more embedding rows than rows".to_owned()));
        }
        if batch.rows().iter().any(|row| row.wants.candidates > 0) {
            return Err(ExecError::InvalidBatch("candidates, of which this backend has none".to_owned()));
        }
        Ok(())
    }
}

impl Executor for WgpuExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        self.allocate(capacity).map_err(|error| self.fail(error))
    }

    fn step(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        self.check_batch(batch)?;
        if !self.range.is_whole() {
            return Err(only_a_part(self.range));
        }
        self.run(batch, &mut Crossing::default(), out).map_err(|error| self.fail(error))
    }

    fn most_candidates(&self) -> usize {
        0
    }

    fn read_bandwidth(&self) -> Result<Option<f64>, ExecError> {
        crate::bandwidth::measure(&self.gpu.device, &self.gpu.library).map_err(|error| self.fail(error))
    }

    fn export_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        self.check_block(group, block, dst.len())?;
        self.read_block(group, block, dst).map_err(|error| self.fail(error))
    }

    fn clear_rows(&self, group: KvGroup, rows: usize, bytes: &mut [u8]) {
        self.clear(group, rows.min(BLOCK_LEN)..BLOCK_LEN, bytes);
    }

    fn import_block(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        self.check_block(group, block, src.len())?;
        self.write_block(group, block, src).map_err(|error| self.fail(error))?;
        self.note_import(group, block, src);
        Ok(())
    }

    fn lend_block(&mut self, _: KvGroup, _: BlockId) -> Option<Box<dyn LentBlock>> {
        None
    }
}

muser_backend::no_tower!(WgpuExecutor);

fn info(
    device: &Device,
    model: &Model,
    range: LayerRange,
    kv: KvType,
    digits: Digits,
    max_rows: usize,
) -> ExecutorInfo {
    let (g, route) = (&model.geometry, numeric_route(digits, model));
    let of = |group: KvGroup| {
        let sliding = &g.sliding[range.layers()];
        let layers = sliding.iter().filter(|sliding| index(group) == usize::from(**sliding)).count();
        layers * g.kv_heads * HeadLayout { dim: g.head_dim, digits }.bytes()
    };
    ExecutorInfo {
        backend: "wgpu",
        device: format!("{}, {}", device.facts.name, device.facts.api),
        route,
        kv_type: kv,
        full_block_bytes: of(KvGroup::Full),
        sliding_block_bytes: of(KvGroup::Sliding),
        max_rows,
        vocab: g.vocab,
        hidden: g.hidden,
        draft: None,
        kv_room: None,
        prompt_rows: 0,
    }
}

/// Refuses shapes that the kernels are not written for.
fn check_geometry(g: &Geometry) -> Result<(), WgpuError> {
    let refuse = |what: String| Err(WgpuError::Unsupported(what));
    if g.head_dim == 0 || !g.head_dim.is_multiple_of(16) || g.head_dim > 256 {
        return refuse(format!("heads of {} values, expected a multiple of 16 up to 256", g.head_dim));
    }
    if g.kv_heads == 0 || !g.heads.is_multiple_of(g.kv_heads) {
        return refuse(format!("{} query heads on {} KV heads, expected a multiple", g.heads, g.kv_heads));
    }
    for (what, value) in [("hidden size", g.hidden), ("FFN width", g.ffn), ("query width", g.q_width())] {
        if value == 0 || !value.is_multiple_of(256) {
            return refuse(format!("{what} {value}, expected a multiple of 256"));
        }
    }
    if g.hidden > 8192 {
        return refuse(format!("hidden size {}, at most 8192", g.hidden));
    }
    Ok(())
}

/// Refuses norms whose scores the arithmetic of digits cannot hold.
fn check_scores(model: &Model) -> Result<(), WgpuError> {
    for (layer, l) in model.layers.iter().enumerate() {
        let bound = score_bound(&l.attn_q_norm, &l.attn_k_norm, model.geometry.head_dim);
        if bound.is_nan() || bound >= MAX_LOG2_SCORE {
            return Err(WgpuError::Unsupported(format!(
                "layer {layer}: attn_q_norm and attn_k_norm allow attention scores up to 2^{bound}, expected below \
                 2^{MAX_LOG2_SCORE}"
            )));
        }
    }
    Ok(())
}
