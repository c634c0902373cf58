//! A tile of attention: some rows of one sequence times the query heads that share one key head, so that K and V are read once
//! for all of them.

use std::ops::Range;

use muser_kv::{BLOCK_LEN, BlockId};

/// Most queries of a tile.
pub(crate) const TILE_QUERIES: usize = 64;
/// Values of a partial result before the outputs: maximum (of digits only where scores are not bounded), sum.
pub(crate) const STATE_HEAD: usize = 2;

/// One tile of queries. Query `i` is head `i % heads` of row `i / heads`.
#[derive(Clone, Copy)]
pub(crate) struct QueryTile<'a, V> {
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

impl<V> QueryTile<'_, V> {
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

impl<'a, V: Copy> QueryTile<'a, V> {
    /// The same queries over another view of K and V.
    pub(super) fn with<W>(&self, kv: W) -> QueryTile<'a, W> {
        let Self { head_dim, table, first_block, start, rows, heads, window, end, q, q_stride, .. } = *self;
        QueryTile { kv, head_dim, table, first_block, start, rows, heads, window, end, q, q_stride }
    }
}
