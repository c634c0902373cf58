//! The executor: a model's weights, its KV blocks, the threads, and the step that puts them together.
#![allow(unsafe_code, reason = "hands the step's buffers to the threads")]

mod buffers;
mod kv;
mod plan;
mod step;
#[cfg(test)]
mod tests;

use muser_backend::{ExecError, Executor, ExecutorInfo, KvCapacity, KvType, StepBatch, StepOutput};
use muser_gguf::GgmlType;
use muser_kv::{BlockId, KvGroup};
use muser_model::{Matrix, Model};

use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::kernels::attention::{self, STATE_HEAD, TILE_QUERIES};
use crate::kernels::matmul;
use crate::kernels::unpack::Class;
use crate::options::CpuOptions;
use crate::pool::Pool;
use crate::weights::Weights;
use buffers::Buffers;
use kv::KvStore;
use plan::Plan;
use step::{StepContext, ThreadScratch};

/// Revision of the CPU arithmetic; part of the numeric route. The same for all instruction sets: the bits are.
const ROUTE: &str = "cpu-1/f16";

/// Where a row is and what it puts out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowPlace {
    pub(crate) seq: usize,
    pub(crate) position: usize,
    /// Number among the rows that want logits.
    pub(crate) logits: Option<usize>,
    pub(crate) features: Option<usize>,
    pub(crate) hidden: Option<usize>,
}

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
    /// Bytes of the repacked copy of the weights; 0 when they are used from the map.
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
    feature_layers: Vec<usize>,
}

// SAFETY: raw pointers inside point to memory that the executor owns or keeps alive, used only through `&mut self`.
unsafe impl Send for CpuExecutor {}

impl CpuExecutor {
    /// Binds (and repacks) the weights of `model` and starts the threads.
    ///
    /// # Errors
    /// A type or shape without kernels, an instruction set that is not there, or not enough memory.
    pub fn new(model: Model, options: CpuOptions) -> Result<Self, ExecError> {
        let isa = match options.isa {
            Some(isa) if !isa.is_supported() => {
                let what = format!("this processor lacks {}", isa.label());
                return Err(ExecError::Unsupported { backend: "cpu", what });
            }
            Some(isa) => isa,
            None => Isa::from_environment()?,
        };
        check_shapes(&model)?;
        let mut pool = Pool::new(options.threads).map_err(|error| ExecError::Device {
            device: "cpu".into(),
            what: format!("starting threads: {error}"),
        })?;
        let weights = Weights::new(&model, options.repack, &mut pool)?;
        let g = &model.geometry;
        let max_rows = options.max_rows.clamp(1, 65536);
        let classes = || matrices(&model).filter_map(|m| Class::of(m.ty));
        let buffers = Buffers::new(
            g,
            max_rows,
            classes().any(Class::is_super),
            classes().any(|class| !class.is_super()),
        );
        let scratch = (0..pool.threads())
            .map(|_| ThreadScratch {
                product: matmul::Scratch::new(max_rows),
                attention: attention::Scratch::new(g.head_dim),
            })
            .collect();
        let kv = KvStore::new(g);
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
            route: ROUTE.into(),
            kv_type: KvType::F16,
            full_block_bytes: kv.block_bytes(KvGroup::Full),
            sliding_block_bytes: kv.block_bytes(KvGroup::Sliding),
            max_rows,
            vocab: g.vocab,
            hidden: g.hidden,
            features: 0,
            draft: None,
        };
        let theta = f64::from(g.rope_theta);
        let inverse_frequencies =
            (0..g.head_dim / 2).map(|t| theta.powf(-2.0 * t as f64 / g.head_dim as f64)).collect();
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
            feature_layers: Vec::new(),
            model,
        })
    }

    /// What was found and chosen.
    pub fn describe(&self) -> &CpuDescription {
        &self.description
    }

    /// Numbers the rows and sizes the outputs.
    fn place_rows(&mut self, batch: &StepBatch, out: &mut StepOutput) -> usize {
        let (mut logits, mut features, mut hidden) = (0, 0, 0);
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
                    logits: number(wants.logits, &mut logits),
                    features: number(wants.features, &mut features),
                    hidden: number(wants.hidden, &mut hidden),
                });
            }
        }
        out.logits.resize(logits * self.info.vocab, 0.0);
        out.features.resize(features * self.info.features, 0.0);
        out.hidden.resize(hidden * self.info.hidden, 0.0);
        logits
    }
}

impl Executor for CpuExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn allocate_kv(&mut self, capacity: KvCapacity) -> Result<(), ExecError> {
        self.kv.allocate(capacity)
    }

    fn set_feature_layers(&mut self, layers: &[usize]) -> Result<(), ExecError> {
        let count = self.model.geometry.layers();
        if let Some(bad) = layers.iter().find(|&&layer| layer >= count) {
            let what = format!("feature layer {bad}, the model has {count}");
            return Err(ExecError::Unsupported { backend: "cpu", what });
        }
        self.feature_layers = layers.to_vec();
        self.info.features = layers.len() * self.info.hidden;
        Ok(())
    }

    fn step(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), ExecError> {
        batch.validate(&self.model.geometry, self.kv.capacity(), self.info.max_rows)?;
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
        let context = StepContext {
            model: &self.model,
            weights: &self.weights,
            kernels: self.kernels,
            batch,
            kv: &self.kv,
            plan: &self.plan,
            buffers: self.buffers.pointers(),
            rows: &self.rows,
            inverse_frequencies: &self.inverse_frequencies,
            feature_layers: &self.feature_layers,
            scratch: self.scratch.as_mut_ptr(),
            partial: self.partial.as_mut_ptr(),
            logits: out.logits.as_mut_ptr(),
            logit_rows,
            features: out.features.as_mut_ptr(),
            hidden: out.hidden.as_mut_ptr(),
        };
        self.pool
            .run(&|worker| context.run(worker))
            .map_err(|what| ExecError::Device { device: "cpu".into(), what })
    }

    fn export_block(&self, group: KvGroup, block: BlockId, dst: &mut [u8]) -> Result<(), ExecError> {
        self.kv.export(group, block, dst)
    }

    fn import_block(&mut self, group: KvGroup, block: BlockId, src: &[u8]) -> Result<(), ExecError> {
        self.kv.import(group, block, src)
    }
}

/// All matrices that products read.
fn matrices(model: &Model) -> impl Iterator<Item = &Matrix> {
    let layers = model.layers.iter().flat_map(|l| {
        [&l.attn_q, &l.attn_k, &l.attn_v, &l.attn_gate, &l.attn_output, &l.ffn_gate, &l.ffn_up, &l.ffn_down]
    });
    layers.chain(std::iter::once(&model.output))
}

/// Refuses what the kernels cannot do, before anything is loaded.
fn check_shapes(model: &Model) -> Result<(), ExecError> {
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
    for m in matrices(model) {
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
