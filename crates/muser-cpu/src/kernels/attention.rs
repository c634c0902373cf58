//! Attention of a tile of queries over paged blocks of 256 positions.
//!
//! A tile is some rows of one sequence times the query heads that share one key head, so K and V are widened from f16
//! once per tile. Block layout, per layer and key head (f16):
//!
//! ```text
//! K  [head_dim][256]    a score is a chain over d for a vector of positions: no sum crosses lanes
//! V  [256][head_dim]    an output is a chain over positions for a vector of d
//! ```
//!
//! Arithmetic, for one query and one block (never depending on the other queries of the tile):
//! `s[j] = scale * fma chain over d ascending`, `m = max s`, `p[j] = exp(s[j] - m)`, exactly 0 for positions that the
//! query does not see; `l = sum p` in 16 lanes by `j % 16`, added as a tree; `o[d] = fma chain over j ascending of
//! p[j] v[j][d]`, plus +0. Blocks are combined ascending: `M' = max(M, m)`, `a = exp(M - M')`, `b = exp(m - M')`,
//! `L' = fma(L, a, l b)`, `O' = fma(O, a, o b)`. The result is `O * (1 / L)`. A block that a query does not see at all is
//! left out. A masked position adds `0 * v` to a chain: `v` is finite because values are clamped when stored, and the
//! final +0 removes the one trace it could leave, the sign of a zero.
//!
//! Per query and position 2 `head_dim` fused multiply-adds, against 4 `head_dim` bytes of K and V per position and tile.
//! A span of 32 positions is `head_dim` cache lines of K, 512 bytes apart, which no hardware stream follows: working on a
//! span asks for the lines of the next one ([`Ahead`]), of V after the last span of K, of the next block after V.

use muser_backend::arith::tree16;
use muser_kv::{BLOCK_LEN, BlockId};

use super::math::exp;
use super::query_tile::{QueryTile, STATE_HEAD, TILE_QUERIES};
use crate::bounds::Reach;
use crate::simd::Simd;

/// Positions that are widened to f32 at a time.
const SPAN: usize = 32;

/// One layer's K and V of one key head, in all blocks.
#[derive(Clone, Copy)]
pub(crate) struct FloatKv {
    /// First block's K of this layer and head.
    pub(crate) k: *mut u16,
    /// First block's V of this layer and head.
    pub(crate) v: *mut u16,
    /// f16 values from one block to the next.
    pub(crate) block_stride: usize,
    /// Blocks that there are.
    pub(crate) blocks: Reach,
    pub(crate) head_dim: usize,
    /// What scores are multiplied with.
    pub(crate) scale: f32,
}

pub(crate) type Tile<'a> = QueryTile<'a, FloatKv>;

/// [`one_block`] of an instruction set.
pub(super) type BlockKernel = unsafe fn(&Tile<'_>, usize, usize, &mut Scratch);

/// Working memory of one thread.
pub(crate) struct Scratch {
    /// Queries in register groups: `[group][d][S::QUERIES]`.
    q: Vec<f32>,
    /// Scores and probabilities `[query][256]`.
    p: Vec<f32>,
    /// Widened K or V, `SPAN` positions.
    wide: Vec<f32>,
    /// Outputs of one block, `[query][head_dim]`.
    o: Vec<f32>,
    /// What queries have gathered, `[query][2 + head_dim]`: maximum, sum (0 means nothing yet), outputs.
    state: Vec<f32>,
}

impl Scratch {
    pub(crate) fn new(head_dim: usize) -> Self {
        Self {
            q: vec![0.0; (TILE_QUERIES + 8) * head_dim],
            p: vec![0.0; (TILE_QUERIES + 8) * BLOCK_LEN],
            wide: vec![0.0; SPAN * head_dim],
            o: vec![0.0; (TILE_QUERIES + 8) * head_dim],
            state: vec![0.0; TILE_QUERIES * (STATE_HEAD + head_dim)],
        }
    }
}

/// Whole attention of a tile; `out` row `r` gets its heads at `r * out_stride`.
///
/// # Safety
/// Pointers are valid for the stated shapes, the table covers `tile.blocks()`, and every position that a row sees has
/// been written.
#[inline(always)]
pub(crate) unsafe fn attend<S: Simd>(
    tile: &Tile<'_>,
    out: *mut f32,
    out_stride: usize,
    scratch: &mut Scratch,
    one_block: BlockKernel,
) {
    let dim = tile.head_dim;
    let queries = tile.rows * tile.heads;
    let size = STATE_HEAD + dim;
    let mut state = std::mem::take(&mut scratch.state);
    for i in 0..queries {
        state[i * size + 1] = 0.0;
    }
    load_queries::<S>(tile, scratch);
    let blocks = tile.blocks();
    for block in blocks.clone() {
        one_block(tile, block, blocks.end, scratch);
        for i in 0..queries {
            if sees(tile, i, block) {
                let (m, l) = (scratch.p[i * BLOCK_LEN], scratch.p[i * BLOCK_LEN + 1]);
                let o = scratch.o.as_ptr().add(i * dim);
                combine::<S>(state.as_mut_ptr().add(i * size), m, l, o, dim);
            }
        }
    }
    for i in 0..queries {
        let (row, head) = (i / tile.heads, i % tile.heads);
        finish::<S>(state.as_ptr().add(i * size), out.add(row * out_stride + head * dim), dim);
    }
    scratch.state = state;
}

/// Results of single blocks, for combining later: query `i` of block number `b` (from `blocks.start`) goes to
/// `partial[(b * queries + i) * (2 + head_dim)]`, with `L` of 0 where the query does not see the block.
///
/// # Safety
/// As [`attend`]; `partial` is valid for `blocks.len() * queries` entries.
#[inline(always)]
pub(crate) unsafe fn attend_blocks<S: Simd>(
    tile: &Tile<'_>,
    blocks: std::ops::Range<usize>,
    partial: *mut f32,
    scratch: &mut Scratch,
    one_block: BlockKernel,
) {
    let dim = tile.head_dim;
    let queries = tile.rows * tile.heads;
    let size = STATE_HEAD + dim;
    load_queries::<S>(tile, scratch);
    for (b, block) in blocks.clone().enumerate() {
        one_block(tile, block, blocks.end, scratch);
        for i in 0..queries {
            let to = partial.add((b * queries + i) * size);
            let seen = sees(tile, i, block);
            *to = scratch.p[i * BLOCK_LEN];
            *to.add(1) = if seen { scratch.p[i * BLOCK_LEN + 1] } else { 0.0 };
            std::ptr::copy_nonoverlapping(scratch.o.as_ptr().add(i * dim), to.add(STATE_HEAD), dim);
        }
    }
}

/// Combines `count` partial results of one query, `stride` values apart, and writes its output.
///
/// # Safety
/// `partial` and `out` are valid for that.
#[inline(always)]
pub(crate) unsafe fn combine_blocks<S: Simd>(
    partial: *const f32,
    count: usize,
    stride: usize,
    out: *mut f32,
    dim: usize,
    scratch: &mut Scratch,
) {
    let state = scratch.state.as_mut_ptr();
    *state.add(1) = 0.0;
    for b in 0..count {
        let from = partial.add(b * stride);
        if *from.add(1) != 0.0 {
            combine::<S>(state, *from, *from.add(1), from.add(STATE_HEAD), dim);
        }
    }
    finish::<S>(state, out, dim);
}

fn sees(tile: &Tile<'_>, query: usize, block: usize) -> bool {
    let (first, end) = tile.visible(query / tile.heads);
    first.max(block * BLOCK_LEN) < end.min((block + 1) * BLOCK_LEN)
}

#[inline(always)]
unsafe fn load_queries<S: Simd>(tile: &Tile<'_>, scratch: &mut Scratch) {
    let dim = tile.head_dim;
    let queries = tile.rows * tile.heads;
    let groups = queries.div_ceil(S::QUERIES);
    for slot in 0..groups * S::QUERIES {
        let to = scratch.q.as_mut_ptr().add(slot / S::QUERIES * S::QUERIES * dim + slot % S::QUERIES);
        // Empty slots repeat the last query; their results are not used.
        let i = slot.min(queries - 1);
        let from = tile.q.add(i / tile.heads * tile.q_stride + i % tile.heads * dim);
        for d in 0..dim {
            *to.add(d * S::QUERIES) = *from.add(d);
        }
    }
}

/// Cache lines that will be needed after the span in work: as many as a span has, `head_dim`.
#[derive(Clone, Copy)]
struct Ahead {
    first: *const u16,
    /// f16 values from one line to the next.
    stride: usize,
}

/// f16 values of a cache line.
const LINE: usize = 32;

impl Ahead {
    /// K of the span at position `span` of a block.
    fn keys(k: *const u16, span: usize) -> Self {
        Self { first: k.wrapping_add(span), stride: BLOCK_LEN }
    }

    /// V from position `from` of a block.
    fn values(v: *const u16, from: usize, dim: usize) -> Self {
        Self { first: v.wrapping_add(from * dim), stride: LINE }
    }

    #[inline(always)]
    unsafe fn ask<S: Simd>(&self, line: usize) {
        S::prefetch(self.first.wrapping_add(line * self.stride).cast());
    }
}

/// Leaves `m` and `l` in the first two values of each query's `p` row and `o` in `scratch.o`. `end_block` is where the
/// caller ends.
#[inline(always)]
pub(super) unsafe fn one_block<S: Simd>(
    tile: &Tile<'_>,
    block: usize,
    end_block: usize,
    scratch: &mut Scratch,
) {
    let dim = tile.head_dim;
    let queries = tile.rows * tile.heads;
    let base = block * BLOCK_LEN;
    let id = tile.table[block - tile.first_block].0 as usize;
    let next = if block + 1 < end_block { tile.table[block + 1 - tile.first_block].0 as usize } else { id };
    tile.kv.blocks.holds(id.max(next) + 1);
    let next_k = tile.kv.k.add(next * tile.kv.block_stride).cast_const();
    let k = tile.kv.k.add(id * tile.kv.block_stride).cast_const();
    let v = tile.kv.v.add(id * tile.kv.block_stride).cast_const();
    // Positions of this block that any row sees; beyond them nothing may be read.
    let first = tile.visible(0).0.max(base) - base;
    let end = tile.visible(tile.rows - 1).1.min(base + BLOCK_LEN) - base;
    let groups = queries.div_ceil(S::QUERIES);

    // With one group of queries each key is used once: it is widened on the way. With more it is widened beforehand.
    let direct = groups == 1;
    for span in (first / SPAN * SPAN..end).step_by(SPAN) {
        let ahead =
            if span + SPAN < end { Ahead::keys(k, span + SPAN) } else { Ahead::values(v, first, dim) };
        if !direct {
            for d in 0..dim {
                ahead.ask::<S>(d);
                for i in (0..SPAN).step_by(S::N) {
                    let wide = S::f_load_f16(k.add(d * BLOCK_LEN + span + i));
                    S::f_store(scratch.wide.as_mut_ptr().add(d * SPAN + i), wide);
                }
            }
        }
        for group in 0..groups {
            let q = scratch.q.as_ptr().add(group * S::QUERIES * dim);
            let p = scratch.p.as_mut_ptr().add(group * S::QUERIES * BLOCK_LEN + span);
            let half = queries - group * S::QUERIES <= S::QUERIES / 2;
            let wide = scratch.wide.as_ptr();
            match (direct, half) {
                (true, true) => scores::<S, true, true>(q, k.add(span).cast(), dim, tile.kv.scale, p, ahead),
                (true, false) => {
                    scores::<S, true, false>(q, k.add(span).cast(), dim, tile.kv.scale, p, ahead);
                }
                (false, true) => scores::<S, false, true>(q, wide.cast(), dim, tile.kv.scale, p, ahead),
                (false, false) => scores::<S, false, false>(q, wide.cast(), dim, tile.kv.scale, p, ahead),
            }
        }
    }
    let mut sums = [(0.0f32, 0.0f32); TILE_QUERIES];
    for (i, sum) in sums.iter_mut().enumerate().take(queries) {
        let (from, to) = tile.visible(i / tile.heads);
        let from = from.max(base) - base;
        let to = to.clamp(base, base + BLOCK_LEN) - base;
        let p = &mut scratch.p[i * BLOCK_LEN..(i + 1) * BLOCK_LEN];
        *sum = if from < to {
            softmax::<S>(p, from, to)
        } else {
            p.fill(0.0);
            (0.0, 0.0)
        };
    }
    scratch.o[..queries * dim].fill(0.0);
    for span in (first / SPAN * SPAN..end).step_by(SPAN) {
        let (from, to) = (span.max(first), (span + SPAN).min(end));
        let ahead = if to < end { Ahead::values(v, to, dim) } else { Ahead::keys(next_k, 0) };
        if !direct {
            for i in (0..(to - from) * dim).step_by(S::N) {
                if i % LINE == 0 {
                    ahead.ask::<S>(i / LINE);
                }
                let wide = S::f_load_f16(v.add(from * dim + i));
                S::f_store(scratch.wide.as_mut_ptr().add(i), wide);
            }
        }
        for i in (0..queries).step_by(S::QUERIES) {
            let p = scratch.p.as_ptr().add(i * BLOCK_LEN + from);
            // A last group that is not full also works on spare rows.
            let o = scratch.o.as_mut_ptr().add(i * dim);
            let half = queries - i <= S::QUERIES / 2;
            if direct {
                outputs::<S, true>(p, v.add(from * dim).cast(), to - from, dim, o, half, ahead);
            } else {
                outputs::<S, false>(p, scratch.wide.as_ptr().cast(), to - from, dim, o, half, ahead);
            }
        }
    }
    for (i, &(m, l)) in sums.iter().enumerate().take(queries) {
        scratch.p[i * BLOCK_LEN] = m;
        scratch.p[i * BLOCK_LEN + 1] = l;
        let o = scratch.o.as_mut_ptr().add(i * dim);
        for d in (0..dim).step_by(S::N) {
            S::f_store(o.add(d), S::f_add(S::f_load(o.add(d)), S::f_splat(0.0)));
        }
    }
}

/// Loads `N` values of f16 (`DIRECT`) or f32.
#[inline(always)]
unsafe fn load_kv<S: Simd, const DIRECT: bool>(base: *const u8, at: usize) -> S::F {
    if DIRECT { S::f_load_f16(base.cast::<u16>().add(at)) } else { S::f_load(base.cast::<f32>().add(at)) }
}

/// Scores of `S::QUERIES` queries (or the first `HALF` of them) for `SPAN` positions; `k` is `[dim][256]` f16 (`DIRECT`)
/// or `[dim][SPAN]` f32.
#[inline(always)]
unsafe fn scores<S: Simd, const DIRECT: bool, const HALF: bool>(
    q: *const f32,
    k: *const u8,
    dim: usize,
    scale: f32,
    p: *mut f32,
    ahead: Ahead,
) {
    let queries = if HALF { S::QUERIES / 2 } else { S::QUERIES };
    let stride = if DIRECT { BLOCK_LEN } else { SPAN };
    for at in (0..SPAN).step_by(2 * S::N) {
        let mut acc = [[S::f_splat(0.0); 2]; 8];
        for d in 0..dim {
            if DIRECT && at == 0 {
                ahead.ask::<S>(d);
            }
            let k0 = load_kv::<S, DIRECT>(k, d * stride + at);
            let k1 = load_kv::<S, DIRECT>(k, d * stride + at + S::N);
            for (i, acc) in acc.iter_mut().enumerate().take(queries) {
                let qv = S::f_splat(*q.add(d * S::QUERIES + i));
                acc[0] = S::f_fma(qv, k0, acc[0]);
                acc[1] = S::f_fma(qv, k1, acc[1]);
            }
        }
        let scale = S::f_splat(scale);
        for (i, acc) in acc.iter().enumerate().take(queries) {
            S::f_store(p.add(i * BLOCK_LEN + at), S::f_mul(acc[0], scale));
            S::f_store(p.add(i * BLOCK_LEN + at + S::N), S::f_mul(acc[1], scale));
        }
    }
}

/// Turns scores `from .. to` into probabilities, everything else into 0; returns maximum and sum.
#[inline(always)]
unsafe fn softmax<S: Simd>(p: &mut [f32], from: usize, to: usize) -> (f32, f32) {
    let parts = 16 / S::N;
    let (low, high) = (from / 16 * 16, to.next_multiple_of(16));
    p[..low].fill(0.0);
    p[high..].fill(0.0);
    p[low..from].fill(f32::NEG_INFINITY);
    p[to..high].fill(f32::NEG_INFINITY);
    let at = p.as_mut_ptr();
    let mut top = S::f_splat(f32::NEG_INFINITY);
    for i in (low..high).step_by(S::N) {
        top = S::f_max(top, S::f_load(at.add(i)));
    }
    let mut lanes = [f32::NEG_INFINITY; 16];
    S::f_store(lanes.as_mut_ptr(), top);
    let m = lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if a > b { a } else { b });
    let mv = S::f_splat(m);
    let mut acc = [S::f_splat(0.0); 4];
    for i in (low..high).step_by(16) {
        for (part, acc) in acc.iter_mut().enumerate().take(parts) {
            let at = at.add(i + part * S::N);
            let e = exp::<S>(S::f_sub(S::f_load(at), mv));
            S::f_store(at, e);
            *acc = S::f_add(*acc, e);
        }
    }
    let mut lanes = [0.0f32; 16];
    for (part, &acc) in acc.iter().enumerate().take(parts) {
        S::f_store(lanes.as_mut_ptr().add(part * S::N), acc);
    }
    (m, tree16(&lanes))
}

/// Adds `count` positions to the outputs of `S::QUERIES` queries (or half of them).
///
/// Queries times vectors of d fill the registers, and every value is loaded once for all queries.
#[inline(always)]
unsafe fn outputs<S: Simd, const DIRECT: bool>(
    p: *const f32,
    v: *const u8,
    count: usize,
    dim: usize,
    o: *mut f32,
    half: bool,
    ahead: Ahead,
) {
    let mut d = 0;
    while d < dim {
        let left = (dim - d) / S::N;
        d += S::N
            * match (S::QUERIES == 8, half) {
                (true, false) if left >= 2 => output_chunk::<S, 8, 2, DIRECT>(p, v, count, dim, o, d, ahead),
                (true, false) => output_chunk::<S, 8, 1, DIRECT>(p, v, count, dim, o, d, ahead),
                (true, true) if left >= 4 => output_chunk::<S, 4, 4, DIRECT>(p, v, count, dim, o, d, ahead),
                (false, false) if left >= 2 => output_chunk::<S, 4, 2, DIRECT>(p, v, count, dim, o, d, ahead),
                (true, true) | (false, false) => {
                    output_chunk::<S, 4, 1, DIRECT>(p, v, count, dim, o, d, ahead)
                }
                (false, true) if left >= 4 => output_chunk::<S, 2, 4, DIRECT>(p, v, count, dim, o, d, ahead),
                (false, true) => output_chunk::<S, 2, 1, DIRECT>(p, v, count, dim, o, d, ahead),
            };
    }
}

/// `Q` queries, `W` vectors from `d`; returns `W`.
#[inline(always)]
unsafe fn output_chunk<S: Simd, const Q: usize, const W: usize, const DIRECT: bool>(
    p: *const f32,
    v: *const u8,
    count: usize,
    dim: usize,
    o: *mut f32,
    d: usize,
    ahead: Ahead,
) -> usize {
    let mut acc = [[S::f_splat(0.0); W]; Q];
    for (query, acc) in acc.iter_mut().enumerate() {
        for (w, acc) in acc.iter_mut().enumerate() {
            *acc = S::f_load(o.add(query * dim + d + w * S::N));
        }
    }
    for j in 0..count {
        if DIRECT {
            // Line `32 c + j` while working on values `32 c ..` of position `j`: each once.
            for c in d.div_ceil(LINE)..(d + W * S::N).div_ceil(LINE) {
                ahead.ask::<S>(c * SPAN + j);
            }
        }
        let mut value = [S::f_splat(0.0); W];
        for (w, value) in value.iter_mut().enumerate() {
            *value = load_kv::<S, DIRECT>(v, j * dim + d + w * S::N);
        }
        for (query, acc) in acc.iter_mut().enumerate() {
            let pv = S::f_splat(*p.add(query * BLOCK_LEN + j));
            for (acc, &value) in acc.iter_mut().zip(&value) {
                *acc = S::f_fma(pv, value, *acc);
            }
        }
    }
    for (query, acc) in acc.iter().enumerate() {
        for (w, &acc) in acc.iter().enumerate() {
            S::f_store(o.add(query * dim + d + w * S::N), acc);
        }
    }
    W
}

#[inline(always)]
unsafe fn combine<S: Simd>(state: *mut f32, m: f32, l: f32, o: *const f32, dim: usize) {
    let to = state.add(STATE_HEAD);
    if *state.add(1) == 0.0 {
        *state = m;
        *state.add(1) = l;
        std::ptr::copy_nonoverlapping(o, to, dim);
        return;
    }
    let old = *state;
    let top = if old > m { old } else { m };
    let factors = [old - top, m - top];
    let mut padded = [0.0f32; 16];
    padded[..2].copy_from_slice(&factors);
    let e = exp::<S>(S::f_load(padded.as_ptr()));
    S::f_store(padded.as_mut_ptr(), e);
    let (a, b) = (padded[0], padded[1]);
    *state = top;
    *state.add(1) = (*state.add(1)).mul_add(a, l * b);
    let (a, b) = (S::f_splat(a), S::f_splat(b));
    for d in (0..dim).step_by(S::N) {
        let scaled = S::f_mul(S::f_load(o.add(d)), b);
        S::f_store(to.add(d), S::f_fma(S::f_load(to.add(d)), a, scaled));
    }
}

#[inline(always)]
unsafe fn finish<S: Simd>(state: *const f32, out: *mut f32, dim: usize) {
    let inverse = S::f_splat(1.0 / *state.add(1));
    for d in (0..dim).step_by(S::N) {
        S::f_store(out.add(d), S::f_mul(S::f_load(state.add(STATE_HEAD + d)), inverse));
    }
}

/// Stores K (transposed) and V of one position of one key head, clamped to the finite range of f16.
///
/// # Safety
/// `k` and `v` are valid for `head_dim` values; nobody else writes this position.
#[inline(always)]
pub(crate) unsafe fn store_kv<S: Simd>(kv: &FloatKv, id: BlockId, slot: usize, k: *const f32, v: *const f32) {
    let dim = kv.head_dim;
    kv.blocks.holds(id.0 as usize + 1);
    Reach::of(BLOCK_LEN).holds(slot + 1);
    let block = id.0 as usize * kv.block_stride;
    let (to_k, to_v) = (kv.k.add(block + slot), kv.v.add(block + slot * dim));
    let (low, high) = (S::f_splat(-65504.0), S::f_splat(65504.0));
    // A NaN is stored as the lowest number: the row that made it shows the NaN by itself, later rows must not read one.
    for d in (0..dim).step_by(S::N) {
        let mut halves = [0u16; 16];
        S::f_store_f16(halves.as_mut_ptr(), S::f_min(S::f_max(S::f_load(k.add(d)), low), high));
        for (i, &half) in halves.iter().enumerate().take(S::N) {
            *to_k.add((d + i) * BLOCK_LEN) = half;
        }
        S::f_store_f16(to_v.add(d), S::f_min(S::f_max(S::f_load(v.add(d)), low), high));
    }
}
