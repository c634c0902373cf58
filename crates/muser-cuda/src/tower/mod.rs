//! The vision tower on a card: its weights, and a picture on its way through it.
//!
//! The bits are those of `muser_backend::arith::vision`, so those of the CPU. The work is cut into slices of some patches of one
//! layer, launched on the executor's own stream between its steps; rows do not see how they were cut. Products are always
//! exact, also where prompts are computed with rounded weights.

mod kernels;
mod memory;
mod plan;
mod walk;
mod weights;

use std::sync::Arc;
use std::time::{Duration, Instant};

use muser_backend::arith::vision::{PositionRule, ROUTE};
use muser_backend::{ExecError, TowerImage, TowerInfo, TowerStage as Stage, no_image};
use muser_model::Projector;

use crate::CudaError;
use crate::driver::{Context, Stream};
use crate::kernels::TowerAttention;
use crate::loaded::Kernels;
use crate::matrix::ProductKernels;
use crate::uploader::copy_in_parallel;
pub(crate) use kernels::{NARROW, TowerKernels};
use memory::{PictureMemory, PictureSize, SLICE, SliceMemory, TOKENS};
use plan::PicturePlan;
use walk::SliceWalk;
use weights::TowerWeights;

/// Most patches of a slice where steps of others come between.
const SHORT_SLICE: usize = 1024;
/// Tokens of a slice of the adapter, likewise.
const SHORT_TOKENS: usize = 128;
/// From this much time on nobody waits: slices are long and follow each other unwatched.
const LONG: Duration = Duration::from_millis(10);
/// Slices that are launched before the clock is looked at.
const UNWATCHED: usize = 8;

/// A projector ready to compute.
pub(crate) struct Tower {
    pub(crate) info: TowerInfo,
    work: Option<Work>,
    /// Of the latest picture, on the card: the next one is often as large.
    plan: Option<Arc<PicturePlan>>,
    picture: PictureMemory,
    slice: SliceMemory,
    weights: TowerWeights,
    products: ProductKernels,
    kernels: TowerKernels,
    projector: Projector,
    rule: PositionRule,
    context: Arc<Context>,
}

/// A picture on its way.
struct Work {
    plan: Arc<PicturePlan>,
    stage: Stage,
    /// Patches, or tokens, that this stage is past.
    at: usize,
    /// The layer before, all of whose patches were one slice, has left them normed for this one.
    normed: bool,
}

impl Work {
    /// Moves on by `count`; false at the end of the last stage.
    fn advance(&mut self, count: usize, layers: usize) -> bool {
        self.normed = matches!(self.stage, Stage::Mix(_)) && self.is_whole(count);
        self.at += count;
        if self.at < self.total() {
            return true;
        }
        let Some(next) = self.stage.next(layers) else { return false };
        (self.stage, self.at) = (next, 0);
        true
    }

    /// Are the next `count` all patches?
    fn is_whole(&self, count: usize) -> bool {
        self.at == 0 && count == self.plan.grid.count()
    }

    fn total(&self) -> usize {
        if self.stage == Stage::Adapt { self.plan.tokens } else { self.plan.grid.count() }
    }
}

impl Tower {
    pub(crate) fn new(
        context: &Arc<Context>,
        kernels: &Kernels,
        projector: Projector,
        rule: PositionRule,
    ) -> Result<Self, CudaError> {
        check_shapes(&projector, context.shared_bytes as usize)?;
        let weights = TowerWeights::load(context, &projector, &kernels.repack()?)?;
        let mut products = kernels.products(context)?;
        products.reserve(context, weights.products())?;
        let attention = TowerAttention::of(context.arch, projector.config.head_dim()).swap_remove(0);
        let slice = SliceMemory::new(context, &projector, &weights)?;
        let mut tower = Self {
            info: TowerInfo::new(ROUTE, &projector, rule),
            work: None,
            plan: None,
            picture: PictureMemory::new(context)?,
            slice,
            weights,
            products,
            kernels: TowerKernels::new(kernels, attention)?,
            projector,
            rule,
            context: context.clone(),
        };
        // Room for the nominal picture before the engine takes what is left for K and V.
        let side = tower.projector.config.grid();
        let rgb = vec![0; side * side * tower.projector.config.unit().pow(2) * 3];
        let nominal = TowerImage { rows: side, cols: side, rgb: rgb.into() };
        tower.plan(&nominal).map_err(|error| CudaError::Unsupported(error.to_string()))?;
        Ok(tower)
    }

    pub(crate) fn begin(&mut self, image: &TowerImage, device: &str) -> Result<(), ExecError> {
        self.work = None;
        image.validate(&self.projector)?;
        let plan = self.plan(image).map_err(|e| e.into_exec(device))?;
        self.picture.rgb.write(0, &image.rgb).map_err(|e| e.into_exec(device))?;
        self.work = Some(Work { plan, stage: Stage::Embed, at: 0, normed: false });
        Ok(())
    }

    pub(crate) fn drop_image(&mut self) {
        self.work = None;
    }

    /// A picture's plan on the card, and room for it.
    fn plan(&mut self, image: &TowerImage) -> Result<Arc<PicturePlan>, CudaError> {
        let c = &self.projector.config;
        let grid =
            image.validate(&self.projector).map_err(|error| CudaError::Unsupported(error.to_string()))?;
        if let Some(plan) = self.plan.as_ref().filter(|plan| plan.grid == grid) {
            return Ok(Arc::clone(plan));
        }
        self.plan = None;
        let plan = PicturePlan::new(c, self.rule, image, grid, 16 * self.kernels.attend.1.warps as usize);
        let size = PictureSize {
            patches: grid.count(),
            tokens: image.tokens(),
            blocks: plan.blocks,
            rgb: image.rgb.len(),
            plan: plan.data.len(),
        };
        self.picture.reserve(&self.context, &self.projector, size)?;
        self.picture.plan.write(0, &plan.data)?;
        Ok(Arc::clone(self.plan.insert(Arc::new(plan))))
    }

    /// Slices until `time` is over; see [`muser_backend::TowerExecutor::encode_image`].
    pub(crate) fn encode(
        &mut self,
        stream: &Stream,
        time: Duration,
        rows: &mut Vec<f32>,
        device: &str,
    ) -> Result<bool, ExecError> {
        let start = Instant::now();
        let layers = self.projector.layers.len();
        let (patches, tokens) = if time >= LONG { (SLICE, TOKENS) } else { (SHORT_SLICE, SHORT_TOKENS) };
        let unwatched = if time >= LONG { UNWATCHED } else { 1 };
        loop {
            for _ in 0..unwatched {
                let Some(mut work) = self.work.take() else { return Err(no_image()) };
                let most = if work.stage == Stage::Adapt { tokens } else { patches };
                let count = most.min(work.total() - work.at);
                // An error ends the work: what was taken out is not put back.
                self.launch(stream, &work, count).map_err(|e| e.into_exec(device))?;
                if !work.advance(count, layers) {
                    self.collect(stream, &work, rows).map_err(|e| e.into_exec(device))?;
                    return Ok(true);
                }
                self.work = Some(work);
            }
            if let Err(error) = stream.synchronize() {
                self.work = None;
                return Err(error.into_exec(device));
            }
            if start.elapsed() >= time {
                return Ok(false);
            }
        }
    }

    fn launch(&self, stream: &Stream, work: &Work, count: usize) -> Result<(), CudaError> {
        let walk = SliceWalk {
            stream,
            config: &self.projector.config,
            weights: &self.weights,
            slice: &self.slice,
            picture: &self.picture,
            plan: &work.plan,
            products: &self.products,
            kernels: &self.kernels,
            from: work.at,
            count,
            whole: work.is_whole(count),
            normed: work.normed && work.is_whole(count),
        };
        walk.run(work.stage)
    }

    fn collect(&mut self, stream: &Stream, work: &Work, rows: &mut Vec<f32>) -> Result<(), CudaError> {
        let len = work.plan.tokens * self.projector.config.projection;
        stream.download(&self.picture.rows, &mut self.picture.rows_on_host, 0, len)?;
        stream.synchronize()?;
        if rows.len() != len {
            // Fresh zeros are no memory yet: the threads that copy are the first to touch it.
            *rows = vec![0.0; len];
        }
        copy_in_parallel(&self.picture.rows_on_host.slice()[..len], rows);
        Ok(())
    }
}

/// Shapes that the kernels are written for.
fn check_shapes(projector: &Projector, shared_bytes: usize) -> Result<(), CudaError> {
    let c = &projector.config;
    let refuse = |what: String| Err(CudaError::Unsupported(format!("the projector: {what}")));
    for (what, value) in [
        ("hidden size", c.hidden),
        ("FFN width", c.ffn),
        ("adapter width", projector.adapter),
        ("row width", c.projection),
    ] {
        if value == 0 || !value.is_multiple_of(256) {
            return refuse(format!("{what} {value}, the kernels need a multiple of 256"));
        }
    }
    if c.hidden > 32 * 256 {
        return refuse(format!("hidden size {}, the kernels go up to 8192", c.hidden));
    }
    if !c.head_dim().is_multiple_of(16) || c.head_dim() > 128 {
        return refuse(format!(
            "heads of {} values, the kernels need a multiple of 16 up to 128",
            c.head_dim()
        ));
    }
    if 4 * c.merged() + 1024 > shared_bytes {
        return refuse(format!(
            "{} values of a token's patches, more than a multiprocessor holds",
            c.merged()
        ));
    }
    Ok(())
}
