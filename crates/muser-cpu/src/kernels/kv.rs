//! Attention over either kind of KV: what both share, and the branch between them.
//!
//! A tile is some rows of one sequence times the query heads that share one key head, so K and V are read once per tile.

use std::ops::Range;

use muser_kv::{BLOCK_LEN, BlockId};

use super::attention::{self, FloatKv};
use super::exact::{self, DigitKv};
use crate::simd::Simd;

/// Most queries of a tile.
pub(crate) const TILE_QUERIES: usize = 64;
/// Values of a partial result before the outputs: maximum (of digits only where scores are not bounded), sum.
pub(crate) const STATE_HEAD: usize = 2;

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

/// One tile of queries. Query `i` is head `i % heads` of row `i / heads`.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a, V = KvView> {
    pub(crate) kv: V,
    /// Values of a head.
    pub(crate) head_dim: usize,
    /// Block ids; entry 0 is absolute block `first_block`.
    pub(crate) table: &'a [BlockId],
    pub(crate) first_block: usize,
    /// Position of the first row.
    pub(crate) start: usize,
    pub(crate) rows: usize,
    /// Query heads of this key head.
    pub(crate) heads: usize,
    /// Keys that a query sees, its own included; `usize::MAX` for all.
    pub(crate) window: usize,
    /// Where the keys of all rows end, instead of each at its own position: rows that are not among the keys.
    pub(crate) end: Option<usize>,
    /// First row's first head; heads are adjacent.
    pub(crate) q: *const f32,
    pub(crate) q_stride: usize,
}

impl<V> Tile<'_, V> {
    /// Positions `first .. end` that row `row` sees.
    pub(crate) fn visible(&self, row: usize) -> (usize, usize) {
        let own = self.start + row + 1;
        let end = self.end.unwrap_or(own);
        (own.saturating_sub(self.window).min(end), end)
    }

    /// Absolute blocks that any row sees.
    pub(crate) fn blocks(&self) -> Range<usize> {
        let (first, _) = self.visible(0);
        let (_, end) = self.visible(self.rows - 1);
        first / BLOCK_LEN..end.div_ceil(BLOCK_LEN)
    }

    pub(crate) fn queries(&self) -> usize {
        self.rows * self.heads
    }

    /// Where query `i` begins.
    pub(crate) fn query(&self, i: usize) -> *const f32 {
        self.q.wrapping_add(i / self.heads * self.q_stride + i % self.heads * self.head_dim)
    }
}

impl<'a> Tile<'a> {
    fn with<V>(&self, kv: V) -> Tile<'a, V> {
        let Self { head_dim, table, first_block, start, rows, heads, window, end, q, q_stride, .. } = *self;
        Tile { kv, head_dim, table, first_block, start, rows, heads, window, end, q, q_stride }
    }
}

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
