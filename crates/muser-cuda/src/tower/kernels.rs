//! The kernels of the tower.

use crate::CudaError;
use crate::driver::{Function, Launch, Stream};
use crate::kernels::{GeluArgs, HeadArgs, RunArgs, TowerAttention, TowerNormArgs};
use crate::loaded::Kernels;

/// Rows of a CTA of `tower_values` and of `tower_heads`.
const VALUE_ROWS: u32 = 32;
const HEAD_ROWS: u32 = 4;
/// From so many rows on the card is full with a warp for each of them, or for several.
const MANY: u32 = 2048;
/// Of so many rows, then, a warp of `tower_gelu` has a super-block.
const GELU_ROWS: u32 = 4;
/// Width of the rows that one warp has alone (`tower_norm_6`): the released tower's.
pub(crate) const NARROW: u32 = 6 * 256;

/// The kernels besides products.
pub(crate) struct TowerKernels {
    pub(super) patches: Function,
    pub(super) embed: Function,
    norm: [Function; 2],
    pub(super) merge: Function,
    gelu: Function,
    pub(super) rows: Function,
    pub(crate) heads: Function,
    pub(crate) values: Function,
    /// For heads of the tower's size, with all that it takes to launch it.
    pub(crate) attend: (Function, TowerAttention),
}

impl TowerKernels {
    pub(crate) fn new(kernels: &Kernels, attention: TowerAttention) -> Result<Self, CudaError> {
        Ok(Self {
            patches: kernels.get("tower_patches")?,
            embed: kernels.get("tower_embed")?,
            norm: [kernels.get("tower_norm_6")?, kernels.get("tower_norm")?],
            merge: kernels.get("tower_merge")?,
            gelu: kernels.get("tower_gelu")?,
            rows: kernels.get("tower_rows")?,
            heads: kernels.get("tower_heads")?,
            values: kernels.get("tower_values")?,
            attend: (kernels.get(&attention.name)?, attention),
        })
    }

    /// Digits of queries, K and V.
    pub(crate) fn store_heads(&self, stream: &Stream, args: &HeadArgs) -> Result<(), CudaError> {
        let grid = ((2 * args.heads).div_ceil(4), args.n.div_ceil(HEAD_ROWS));
        stream.launch(&self.heads, Launch::new(grid, 128), args)?;
        let grid = (args.heads, args.n.div_ceil(VALUE_ROWS));
        stream.launch(&self.values, Launch::new(grid, 128), args)
    }

    /// Additions and norms of rows, quantised.
    pub(crate) fn norm(&self, stream: &Stream, args: &TowerNormArgs) -> Result<(), CudaError> {
        self.norm_by(args.hidden == NARROW && args.n >= MANY, stream, args)
    }

    /// The same by the kernel that has a warp for a row, or by the one that has a warp for a super-block.
    pub(crate) fn norm_by(
        &self,
        narrow: bool,
        stream: &Stream,
        args: &TowerNormArgs,
    ) -> Result<(), CudaError> {
        let [a_row, a_block] = &self.norm;
        if narrow {
            return stream.launch(a_row, Launch::new((args.n.div_ceil(4), 1), 128), args);
        }
        stream.launch(a_block, Launch::new((args.n, 1), args.hidden / 8), args)
    }

    /// GELU of rows of `act.k` values, quantised.
    pub(crate) fn gelu(&self, stream: &Stream, args: &GeluArgs) -> Result<(), CudaError> {
        self.gelu_by(if args.n < MANY { 1 } else { GELU_ROWS }, stream, args)
    }

    /// The same with so many rows of a super-block a warp.
    pub(crate) fn gelu_by(&self, rows: u32, stream: &Stream, args: &GeluArgs) -> Result<(), CudaError> {
        let grid = ((args.act.k / 256).div_ceil(4), args.n.div_ceil(rows));
        stream.launch(&self.gelu, Launch::new(grid, 128), args)
    }

    pub(crate) fn attend(&self, stream: &Stream, args: &RunArgs, runs: usize) -> Result<(), CudaError> {
        let (function, attention) = &self.attend;
        let shape = Launch::new((runs as u32, args.d.heads), attention.warps * 32);
        stream.launch(function, Launch { shared_bytes: attention.shared_bytes(), ..shape }, args)
    }
}
