//! The kernels of the tower.

use crate::CudaError;
use crate::driver::{Function, Launch, Stream};
use crate::kernels::{HeadArgs, RunArgs, TowerAttention};
use crate::loaded::Kernels;

/// Rows of a CTA of `tower_values`.
const VALUE_ROWS: u32 = 32;

/// The kernels besides products.
pub(crate) struct TowerKernels {
    pub(super) patches: Function,
    pub(super) embed: Function,
    pub(crate) norm: Function,
    pub(super) merge: Function,
    pub(crate) gelu: Function,
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
            norm: kernels.get("tower_norm")?,
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
        let grid = ((2 * args.heads).div_ceil(4), args.n);
        stream.launch(&self.heads, Launch::new(grid, 128), args)?;
        let grid = (args.heads, args.n.div_ceil(VALUE_ROWS));
        stream.launch(&self.values, Launch::new(grid, 128), args)
    }

    pub(crate) fn attend(&self, stream: &Stream, args: &RunArgs, runs: usize) -> Result<(), CudaError> {
        let (function, attention) = &self.attend;
        let shape = Launch::new((runs as u32, args.d.heads), attention.warps * 32);
        stream.launch(function, Launch { shared_bytes: attention.shared_bytes(), ..shape }, args)
    }
}
