//! The vision tower: its weights, and a picture on its way through it.
//!
//! The work is cut into slices of some patches of one layer, so that steps can come between. A layer has two: norm, q, k, v and
//! rotation ([`Stage::Keys`]), which every patch must have been through before any can go on, then attention and everything
//! after it ([`Stage::Mix`]). Rows do not see how they were cut.

mod slice;
#[cfg(test)]
mod tests;

use muser_backend::arith::MatrixRole;
use muser_backend::arith::vision::{self, PatchGrid, PositionRule};
use muser_backend::{ExecError, KvType, TowerImage, TowerInfo, TowerStage as Stage};
use muser_gguf::GgmlType;
use muser_kv::{BLOCK_LEN, BlockId};
use muser_model::Projector;

use super::kv::Heads;
use super::panels::PanelBuffers;
use super::scratch::{ThreadScratch, thread_scratch};
use crate::kernels::matmul::MatrixView;
use crate::kernels::unpack::Class;
use crate::options::Repack;
use crate::pool::Pool;
use crate::weights::Bound;

/// Patches of a slice: enough for the products, few enough for the steps that wait behind it.
const SLICE: usize = 128;

/// Matrices of one layer.
#[derive(Clone, Copy)]
struct LayerViews {
    attn_q: MatrixView,
    attn_k: MatrixView,
    attn_v: MatrixView,
    attn_out: MatrixView,
    ffn_up: MatrixView,
    ffn_down: MatrixView,
}

/// A projector ready to compute.
pub(crate) struct Tower {
    pub(crate) info: TowerInfo,
    // Before `projector`: views point into its map or into the copy.
    patches: MatrixView,
    layers: Vec<LayerViews>,
    adapters: [MatrixView; 3],
    copy: Bound,
    projector: Projector,
    rule: PositionRule,
    values: [[f32; 256]; 3],
    heads: Heads,
    buffers: SliceBuffers,
    scratch: Vec<ThreadScratch>,
    work: Option<Work>,
}

/// Row buffers of a slice, `[SLICE][width]`.
struct SliceBuffers {
    /// Input of a product, as wide as the widest: patches, normed rows, rows of the adapter.
    a: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// Attention output.
    o: Vec<f32>,
    /// Output of products back to the residual stream.
    projected: Vec<f32>,
    /// The feed-forward layer's, and the adapter's second.
    wide: Vec<f32>,
    panels: PanelBuffers,
}

/// A picture on its way.
struct Work {
    image: TowerImage,
    grid: PatchGrid,
    /// Row and column of each patch, window by window.
    order: Vec<(usize, usize)>,
    /// Patches after each window.
    ends: Vec<usize>,
    /// Window of each patch.
    window: Vec<u32>,
    /// First block of each window in layers with windows.
    first_block: Vec<u32>,
    /// Number of each patch in the order, by raster place.
    index: Vec<u32>,
    blocks: Vec<BlockId>,
    /// Residual stream of all patches.
    h: Vec<f32>,
    q: Vec<f32>,
    /// `cos` of a head's pairs, then `sin`, of all patches.
    rope: Vec<f32>,
    /// K and V of one layer.
    kv: Vec<u64>,
    rows: Vec<f32>,
    /// What is done next, to the patches (of [`Stage::Adapt`] the tokens) from `at` on.
    stage: Stage,
    at: usize,
}

impl Tower {
    pub(crate) fn new(
        projector: Projector,
        rule: PositionRule,
        repack: Repack,
        pool: &mut Pool,
    ) -> Result<Self, ExecError> {
        let c = &projector.config;
        check_shapes(&projector)?;
        let mut matrices = Vec::with_capacity(6 * projector.layers.len() + 4);
        for l in &projector.layers {
            matrices.extend([&l.attn_q, &l.attn_k, &l.attn_v].map(|l| (&l.matrix, MatrixRole::AttnIn)));
            matrices.push((&l.attn_out.matrix, MatrixRole::AttnOut));
            matrices.push((&l.ffn_up.matrix, MatrixRole::FfnIn));
            matrices.push((&l.ffn_down.matrix, MatrixRole::FfnDown));
        }
        matrices.push((&projector.patches, MatrixRole::FfnIn));
        matrices.extend(projector.adapters.iter().map(|m| (m, MatrixRole::FfnDown)));
        let copy = Bound::new(&matrices, repack, pool)?;
        let views = &copy.views;
        let layers = views[..6 * projector.layers.len()].chunks_exact(6).map(|v| LayerViews {
            attn_q: v[0],
            attn_k: v[1],
            attn_v: v[2],
            attn_out: v[3],
            ffn_up: v[4],
            ffn_down: v[5],
        });
        let layers = layers.collect();
        let [patches, first, second, third] = views[views.len() - 4..] else {
            unreachable!("four matrices were bound last")
        };
        let classes = || projector.matrices().filter_map(|m| Class::of(m.ty));
        let (super_blocks, small_blocks) =
            (classes().any(Class::is_super), classes().any(|class| !class.is_super()));
        let widest = c.patch_values().max(c.merged()).max(c.ffn).max(projector.adapter);
        let of = |width: usize| vec![0.0f32; SLICE * width];
        Ok(Self {
            info: TowerInfo::new(vision::ROUTE, &projector, rule),
            patches,
            layers,
            adapters: [first, second, third],
            values: vision::values_of_bytes(c.mean, c.std),
            heads: Heads { kv_type: KvType::Int16, count: c.heads, dim: c.head_dim() },
            buffers: SliceBuffers {
                a: of(widest),
                k: of(c.hidden),
                v: of(c.hidden),
                o: of(c.hidden),
                projected: of(c.hidden),
                wide: of(c.ffn.max(projector.adapter)),
                panels: PanelBuffers::new(SLICE, widest.next_multiple_of(256), super_blocks, small_blocks),
            },
            scratch: thread_scratch(pool.threads(), SLICE, c.head_dim(), KvType::Int16),
            copy,
            projector,
            rule,
            work: None,
        })
    }

    /// Bytes of the repacked copy.
    pub(crate) fn copied_bytes(&self) -> usize {
        self.copy.copy.as_ref().map_or(0, crate::memory::HugeBuffer::len)
    }

    pub(crate) fn begin(&mut self, image: &TowerImage) -> Result<(), ExecError> {
        self.work = None;
        let grid = image.validate(&self.projector)?;
        self.work = Some(self.plan(image, grid));
        Ok(())
    }

    pub(crate) fn drop_image(&mut self) {
        self.work = None;
    }

    fn plan(&self, image: &TowerImage, grid: PatchGrid) -> Work {
        let c = &self.projector.config;
        let n = grid.count();
        let (order, ends) = grid.order(c.grid());
        let (mut window, mut first_block, mut blocks) = (Vec::with_capacity(n), Vec::new(), 0);
        let mut start = 0;
        for (number, end) in ends.iter().enumerate() {
            window.extend(std::iter::repeat_n(number as u32, end - start));
            first_block.push(blocks as u32);
            blocks += (end - start).div_ceil(BLOCK_LEN);
            start = *end;
        }
        blocks = blocks.max(n.div_ceil(BLOCK_LEN));
        let mut index = vec![0; n];
        for (number, (y, x)) in order.iter().enumerate() {
            index[y * grid.cols + x] = number as u32;
        }
        Work {
            image: image.clone(),
            grid,
            rope: vision::rotations(c.head_dim(), &order, grid),
            order,
            ends,
            window,
            first_block,
            index,
            blocks: (0..blocks as u32).map(BlockId).collect(),
            h: vec![0.0; n * c.hidden],
            q: vec![0.0; n * c.hidden],
            kv: vec![0; (blocks * self.heads.bytes()).div_ceil(8)],
            rows: vec![0.0; image.tokens() * c.projection],
            stage: Stage::Embed,
            at: 0,
        }
    }
}

/// Refuses what the kernels cannot do, before anything is loaded.
fn check_shapes(projector: &Projector) -> Result<(), ExecError> {
    let c = &projector.config;
    let unsupported = |what: String| Err(ExecError::Unsupported { backend: "cpu", what });
    if !c.head_dim().is_multiple_of(16) {
        return unsupported(format!("a tower with heads of {}, expected a multiple of 16", c.head_dim()));
    }
    if c.merge * c.merge > SLICE {
        return unsupported(format!("tokens of {0}x{0} patches, expected at most 8x8", c.merge));
    }
    for m in projector.matrices() {
        let float = matches!(m.ty, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
        if !float && Class::of(m.ty).is_none() {
            return unsupported(format!("{}: no kernel for type {}", m.name, m.ty.name()));
        }
    }
    Ok(())
}
