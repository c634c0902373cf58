//! Attention over either kind of KV: the branch between them.

use std::ops::Range;

use muser_kv::BlockId;

use super::attention::{self, FloatKv};
use super::exact::{self, DigitKv};
use super::query_tile::QueryTile;
use crate::simd::Simd;

/// One layer's K and V of one key head, in all blocks.
#[derive(Clone, Copy)]
pub(crate) enum KvView {
    Float(FloatKv),
    Digits(DigitKv),
}

impl KvView {
    /// The same for queries and keys whose scores nothing bounds (`arith::vision::attention`).
    pub(crate) fn unbounded(self) -> Self {
        match self {
            KvView::Digits(kv) => KvView::Digits(DigitKv { bounded: false, ..kv }),
            // A maximum is carried anyway.
            KvView::Float(_) => self,
        }
    }
}

/// A tile over either kind.
pub(crate) type Tile<'a> = QueryTile<'a, KvView>;

/// Working memory of one thread, for the kind of KV that there is.
pub(crate) enum Scratch {
    Float(attention::Scratch),
    Digits(exact::Scratch),
}

/// Attention of one block, for each kind of KV. Not inlined into [`attend`] and [`attend_blocks`]: it is most of their code, and each
/// instruction set would have it twice.
#[derive(Clone, Copy)]
pub(super) struct BlockKernels {
    pub(super) float: attention::BlockKernel,
    pub(super) digits: exact::BlockKernel,
}

/// Whole attention of a tile; `out` row `r` gets its heads at `r * out_stride`.
///
/// # Safety
/// Pointers are valid for the stated shapes, the table covers `tile.blocks()`, every position that a row sees has been
/// written, and `scratch` is of the kind of the KV.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd>(
    tile: &Tile<'_>,
    out: *mut f32,
    out_stride: usize,
    scratch: &mut Scratch,
    kernels: BlockKernels,
) {
    match (tile.kv, scratch) {
        (KvView::Float(kv), Scratch::Float(scratch)) => {
            attention::attend::<S>(&tile.with(kv), out, out_stride, scratch, kernels.float);
        }
        (KvView::Digits(kv), Scratch::Digits(scratch)) => {
            exact::attend::<S>(&tile.with(kv), out, out_stride, scratch, kernels.digits);
        }
        _ => unreachable!("working memory is made for the executor's kind of KV"),
    }
}

/// Results of single blocks, for combining later: query `i` of block number `b` (from `blocks.start`) goes to
/// `partial[(b * queries + i) * (2 + head_dim)]`.
///
/// # Safety
/// As [`attend`]; `partial` is valid for `blocks.len() * queries` entries.
#[inline(always)]
pub(super) unsafe fn attend_blocks<S: Simd>(
    tile: &Tile<'_>,
    blocks: Range<usize>,
    partial: *mut f32,
    scratch: &mut Scratch,
    kernels: BlockKernels,
) {
    match (tile.kv, scratch) {
        (KvView::Float(kv), Scratch::Float(scratch)) => {
            attention::attend_blocks::<S>(&tile.with(kv), blocks, partial, scratch, kernels.float);
        }
        (KvView::Digits(kv), Scratch::Digits(scratch)) => {
            exact::attend_blocks::<S>(&tile.with(kv), blocks, partial, scratch, kernels.digits);
        }
        _ => unreachable!("working memory is made for the executor's kind of KV"),
    }
}

/// Combines `count` partial results of one query, `stride` values apart, and writes its output.
///
/// # Safety
/// `partial` and `out` are valid for that.
#[inline(always)]
pub(super) unsafe fn combine_blocks<S: Simd>(
    partial: *const f32,
    count: usize,
    stride: usize,
    out: *mut f32,
    dim: usize,
    scratch: &mut Scratch,
) {
    match scratch {
        Scratch::Float(scratch) => {
            attention::combine_blocks::<S>(partial, count, stride, out, dim, scratch);
        }
        Scratch::Digits(_) => exact::combine_blocks::<S>(partial, count, stride, out, dim),
    }
}

/// Stores K and V of one position of one key head; `k` may be changed.
///
/// # Safety
/// `k` and `v` are valid for a head; nobody else writes this position.
#[inline(always)]
pub(super) unsafe fn store_kv<S: Simd>(kv: &KvView, id: BlockId, slot: usize, k: *mut f32, v: *const f32) {
    match kv {
        KvView::Float(kv) => attention::store_kv::<S>(kv, id, slot, k, v),
        KvView::Digits(kv) => exact::store_kv::<S>(kv, id, slot, k, v),
    }
}
