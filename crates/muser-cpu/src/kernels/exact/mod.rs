//! Attention in integers ([`arith::attention`]): a tile of queries over paged blocks of digits ([`HeadLayout`]).
//!
//! A unit of 64 positions is three passes over the tile: products of the queries' digits with K's (`products`), weights
//! of the positions from them, in floats, as digits again (`weigh`), products of those with V's. Both products are the same
//! kernel: words of four digits along the sum, a lane for each position of K or each dim of V.
//!
//! Positions that a query does not see have probability and weight 0, whatever their memory holds: scores of them are
//! masked before they are used, and the codes of V are finite by nature.
//!
//! [`arith::attention`]: muser_backend::arith::attention

mod products;
mod store;
mod weigh;

use std::ops::Range;

use muser_backend::arith::attention::{Digits, UNIT, score_factor};
use muser_backend::arith::vision::attention::{NO_PEAK, decay};
use muser_kv::BLOCK_LEN;

use self::products::{Ahead, Plane, Words, products};
use self::weigh::{Weighed, weigh, weigh_running};
use super::query_tile::{QueryTile, STATE_HEAD, TILE_QUERIES};
use crate::simd::Simd;

pub(crate) use self::store::DigitKv;
pub(super) use self::store::store_kv;

pub(crate) type Tile<'a> = QueryTile<'a, DigitKv>;

/// [`one_block`] of an instruction set: compiled once, for both ways through attention.
pub(super) type BlockKernel = unsafe fn(&Tile<'_>, usize, usize, &mut Scratch);

/// Queries of a tile, rounded up to whole groups.
const SLOTS: usize = TILE_QUERIES + 8;

/// Memory that begins at a cache line.
struct Lines(Vec<Line>);

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([i32; 16]);

impl Lines {
    /// Room for `words` words of 32 bits, zeros.
    fn new(words: usize) -> Self {
        Self(vec![Line([0; 16]); words.div_ceil(16)])
    }

    fn ptr<T>(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast()
    }
}

/// Working memory of one thread.
pub(crate) struct Scratch {
    /// Digits of the queries: `[group][dim / 4][digit][S::QUERIES]` words.
    q: Lines,
    /// What follows from a query's scale and digits.
    query: Vec<Query>,
    /// Products with K, `[query][64]`.
    t: Lines,
    /// Digits of the weights, `[query][digit][16]` words.
    x: Lines,
    weighed: Vec<Weighed>,
    /// K or V of a unit as the products take it, when several groups of queries read it.
    words: Lines,
    /// Outputs of one block, `[query][head_dim]`.
    o: Lines,
    /// Sums of probabilities of one block.
    l: Vec<f32>,
    /// Largest scores of one block.
    peak: Vec<f32>,
    /// What queries have gathered, `[query][2 + head_dim]`.
    state: Vec<f32>,
    /// A rotated query.
    row: Vec<f32>,
}

/// One query.
#[derive(Clone, Copy, Default)]
struct Query {
    /// What `T * d_k` is multiplied with; 0 for a query that is not finite.
    f: f32,
    /// What takes the bias of K's digits out of `T`.
    correction: i32,
    /// Is the result NaN?
    is_nan: bool,
}

impl Scratch {
    pub(crate) fn new(head_dim: usize) -> Self {
        Self {
            q: Lines::new(SLOTS * head_dim),
            query: vec![Query::default(); SLOTS],
            t: Lines::new(SLOTS * UNIT),
            x: Lines::new(SLOTS * UNIT),
            weighed: vec![Weighed::default(); SLOTS],
            words: Lines::new(UNIT * head_dim),
            o: Lines::new(SLOTS * head_dim),
            l: vec![0.0; SLOTS],
            peak: vec![NO_PEAK; SLOTS],
            state: vec![0.0; TILE_QUERIES * (STATE_HEAD + head_dim)],
            row: vec![0.0; head_dim],
        }
    }
}

/// See [`crate::kernels::kv::attend`].
#[inline(always)]
pub(super) unsafe fn attend<S: Simd>(
    tile: &Tile<'_>,
    out: *mut f32,
    out_stride: usize,
    scratch: &mut Scratch,
    one_block: BlockKernel,
) {
    let dim = tile.head_dim;
    let queries = tile.queries();
    let size = STATE_HEAD + dim;
    load_queries::<S>(tile, scratch);
    let state = scratch.state.as_mut_ptr();
    state.write_bytes(0, queries * size);
    let blocks = tile.blocks();
    if !tile.kv.bounded {
        (0..queries).for_each(|i| *state.add(i * size) = NO_PEAK);
    }
    for block in blocks.clone() {
        one_block(tile, block, blocks.end, scratch);
        for i in 0..queries {
            let (state, l, o) = (state.add(i * size), scratch.l[i], scratch.o.ptr::<f32>().add(i * dim));
            if tile.kv.bounded {
                add::<S>(state, l, o, dim);
            } else {
                add_decayed::<S>(state, scratch.peak[i], l, o, dim);
            }
        }
    }
    for i in 0..queries {
        let to = out.add(i / tile.heads * out_stride + i % tile.heads * dim);
        finish::<S>(state.add(i * size), to, dim);
    }
}

/// See [`crate::kernels::kv::attend_blocks`].
#[inline(always)]
pub(super) unsafe fn attend_blocks<S: Simd>(
    tile: &Tile<'_>,
    blocks: Range<usize>,
    partial: *mut f32,
    scratch: &mut Scratch,
    one_block: BlockKernel,
) {
    let dim = tile.head_dim;
    let queries = tile.queries();
    load_queries::<S>(tile, scratch);
    for (b, block) in blocks.clone().enumerate() {
        one_block(tile, block, blocks.end, scratch);
        for i in 0..queries {
            let to = partial.add((b * queries + i) * (STATE_HEAD + dim));
            *to.add(1) = scratch.l[i];
            let o = scratch.o.ptr::<f32>().add(i * dim);
            std::ptr::copy_nonoverlapping(o, to.add(STATE_HEAD), dim);
        }
    }
}

/// See [`crate::kernels::kv::combine_blocks`].
#[inline(always)]
pub(super) unsafe fn combine_blocks<S: Simd>(
    partial: *const f32,
    count: usize,
    stride: usize,
    out: *mut f32,
    dim: usize,
) {
    let mut sum = 0.0f32;
    for b in 0..count {
        sum += *partial.add(b * stride + 1);
    }
    let inverse = inverse::<S>(sum);
    for d in (0..dim).step_by(S::N) {
        let mut o = S::f_splat(0.0);
        for b in 0..count {
            o = S::f_add(o, S::f_load(partial.add(b * stride + STATE_HEAD + d)));
        }
        S::f_store(out.add(d), S::f_mul(o, inverse));
    }
}

/// Adds a block's results to what a query has gathered.
#[inline(always)]
unsafe fn add<S: Simd>(state: *mut f32, l: f32, o: *const f32, dim: usize) {
    *state.add(1) += l;
    for d in (0..dim).step_by(S::N) {
        let to = state.add(STATE_HEAD + d);
        S::f_store(to, S::f_add(S::f_load(to), S::f_load(o.add(d))));
    }
}

/// The same where both have a maximum.
#[inline(always)]
unsafe fn add_decayed<S: Simd>(state: *mut f32, block_peak: f32, l: f32, o: *const f32, dim: usize) {
    let peak = if *state > block_peak { *state } else { block_peak };
    let (here, there) = (decay(*state - peak), decay(block_peak - peak));
    *state = peak;
    *state.add(1) = *state.add(1) * here + l * there;
    let (here, there) = (S::f_splat(here), S::f_splat(there));
    for d in (0..dim).step_by(S::N) {
        let to = state.add(STATE_HEAD + d);
        let sum = S::f_add(S::f_mul(S::f_load(to), here), S::f_mul(S::f_load(o.add(d)), there));
        S::f_store(to, sum);
    }
}

/// Multiplies what a query has gathered in a block.
#[inline(always)]
unsafe fn scale<S: Simd>(o: *mut f32, factor: f32, dim: usize) {
    let factor = S::f_splat(factor);
    for d in (0..dim).step_by(S::N) {
        S::f_store(o.add(d), S::f_mul(S::f_load(o.add(d)), factor));
    }
}

#[inline(always)]
unsafe fn finish<S: Simd>(state: *const f32, out: *mut f32, dim: usize) {
    let inverse = inverse::<S>(*state.add(1));
    for d in (0..dim).step_by(S::N) {
        S::f_store(out.add(d), S::f_mul(S::f_load(state.add(STATE_HEAD + d)), inverse));
    }
}

/// NaN for queries whose sum was made NaN.
#[inline(always)]
unsafe fn inverse<S: Simd>(l: f32) -> S::F {
    S::f_splat(if l.is_nan() { f32::NAN } else { 1.0 / l })
}

/// Rotates the tile's queries and takes their digits.
#[inline(always)]
unsafe fn load_queries<S: Simd>(tile: &Tile<'_>, scratch: &mut Scratch) {
    let dim = tile.head_dim;
    let digits = tile.kv.head.digits;
    let factor = score_factor(dim, digits);
    let group_words = S::QUERIES * dim / 4 * Plane::count::<S>();
    for i in 0..tile.queries() {
        let row = scratch.row.as_mut_ptr();
        std::ptr::copy_nonoverlapping(tile.query(i), row, dim);
        store::rotate::<S>(row, dim);
        let to = scratch.q.ptr::<i32>().add(i / S::QUERIES * group_words + i % S::QUERIES);
        let (d, sum) = store::query_digits::<S>(row, dim, digits, to);
        let f = d * factor;
        let is_nan = !f.is_finite();
        scratch.query[i] =
            Query { f: if is_nan { 0.0 } else { f }, correction: (-S::BIAS).wrapping_mul(sum), is_nan };
    }
}

/// One unit of a block, for the tile.
#[derive(Clone, Copy)]
struct Unit {
    /// This head's block.
    block: *const u8,
    /// First position in the block.
    at: usize,
    /// Positions in the unit that any query sees.
    seen: (usize, usize),
}

/// Leaves each query's sum in `scratch.l` and its outputs in `scratch.o`. `end_block` is where the caller ends.
#[inline(always)]
pub(super) unsafe fn one_block<S: Simd>(
    tile: &Tile<'_>,
    block: usize,
    end_block: usize,
    scratch: &mut Scratch,
) {
    match (tile.kv.head.digits, tile.kv.bounded) {
        (Digits::One, true) => block_of::<S, false, true>(tile, block, end_block, scratch),
        (Digits::Two, true) => block_of::<S, true, true>(tile, block, end_block, scratch),
        (Digits::Two, false) => block_of::<S, true, false>(tile, block, end_block, scratch),
        (Digits::One, false) => unreachable!("a tower's K and V have 16 bits"),
    }
}

#[inline(always)]
unsafe fn block_of<S: Simd, const TWO: bool, const BOUNDED: bool>(
    tile: &Tile<'_>,
    block: usize,
    end_block: usize,
    scratch: &mut Scratch,
) {
    let head = tile.kv.head;
    let queries = tile.queries();
    let base = block * BLOCK_LEN;
    let at = |block: usize| tile.kv.block(tile.table[block - tile.first_block]).cast_const();
    let this = at(block);
    let next = if block + 1 < end_block { at(block + 1) } else { this };
    let first = tile.visible(0).0.max(base) - base;
    let end = tile.visible(tile.rows - 1).1.min(base + BLOCK_LEN) - base;

    scratch.o.ptr::<f32>().write_bytes(0, queries * tile.head_dim);
    scratch.l[..queries].fill(0.0);
    if !BOUNDED {
        scratch.peak[..queries].fill(NO_PEAK);
    }
    for unit in (first / UNIT * UNIT..end).step_by(UNIT) {
        let unit =
            Unit { block: this, at: unit, seen: (first.max(unit) - unit, end.min(unit + UNIT) - unit) };
        scores::<S, TWO>(tile, unit, Ahead::values(head, this, unit.at), scratch);
        weights::<S, TWO, BOUNDED>(tile, unit, base, scratch);
        let ahead = if unit.at + UNIT < end {
            Ahead::keys(head, this, unit.at + UNIT)
        } else {
            Ahead::keys(head, next, 0)
        };
        values::<S, TWO>(tile, unit, ahead, scratch);
    }
    for (l, query) in scratch.l.iter_mut().zip(&scratch.query[..queries]) {
        if query.is_nan {
            *l = f32::NAN;
        }
    }
}

/// Products of all queries with K of the unit's positions that any of them sees.
#[inline(always)]
unsafe fn scores<S: Simd, const TWO: bool>(tile: &Tile<'_>, unit: Unit, ahead: Ahead, scratch: &mut Scratch) {
    let head = tile.kv.head;
    let queries = tile.queries();
    let steps = head.dim / 4;
    let plane = |plane: usize| unit.block.add(head.k(plane) + head.k_at(unit.at, 0));
    let low = plane(usize::from(TWO));
    let mut words = Words { planes: [plane(0), low], stride: 4 * BLOCK_LEN, ready: false };
    let groups = queries.div_ceil(S::QUERIES);
    let (from, to) = (unit.seen.0 / S::N * S::N, unit.seen.1);
    if groups > direct_groups::<S>() {
        words = products::prepare::<S, TWO>(words, steps, UNIT, ahead, scratch.words.ptr());
    }
    let t = scratch.t.ptr::<i32>();
    let q = scratch.q.ptr::<i32>();
    let mut lane = from;
    while lane < to {
        let left = if groups > 1 { 1 } else { (UNIT - lane) / S::N };
        let mut done = 1;
        for group in 0..groups {
            let x = q.add(group * S::QUERIES * steps * Plane::count::<S>()).cast_const();
            let ahead = if group == 0 && !words.ready { ahead.at(lane / S::N * steps) } else { Ahead::NONE };
            let n = (queries - group * S::QUERIES).min(S::QUERIES);
            let first = group * S::QUERIES;
            let query = &scratch.query;
            done = products::<S, TWO, false>(words, lane, left, steps, x, n, ahead, |i, vector, a| {
                let a = S::i_add(a, S::i_splat(query[first + i].correction));
                S::i_store(t.add((first + i) * UNIT + lane + vector * S::N).cast(), a);
            });
        }
        lane += done * S::N;
    }
}

/// Groups of queries up to which K and V are read as they are stored.
#[inline(always)]
fn direct_groups<S: Simd>() -> usize {
    if S::PAIRS { 1 } else { 2 }
}

/// Weights of the unit's positions for every query.
#[inline(always)]
unsafe fn weights<S: Simd, const TWO: bool, const BOUNDED: bool>(
    tile: &Tile<'_>,
    unit: Unit,
    base: usize,
    scratch: &mut Scratch,
) {
    let head = tile.kv.head;
    let dk = unit.block.add(head.k_scales()).cast::<f32>().add(unit.at);
    let dv = unit.block.add(head.v_scales()).cast::<f32>().add(unit.at);
    let words = UNIT / 4 * Plane::count::<S>();
    let mut mask = [0i32; UNIT];
    for row in 0..tile.rows {
        let start = base + unit.at;
        let (from, to) = tile.visible(row);
        let (from, to) = (from.clamp(start, start + UNIT) - start, to.clamp(start, start + UNIT) - start);
        let whole = to - from == UNIT;
        if !whole {
            for (j, mask) in mask.iter_mut().enumerate() {
                *mask = if (from..to).contains(&j) { -1 } else { 0 };
            }
        }
        for i in row * tile.heads..(row + 1) * tile.heads {
            let t = scratch.t.ptr::<i32>().add(i * UNIT).cast_const();
            let x = scratch.x.ptr::<i32>().add(i * words);
            let f = scratch.query[i].f;
            if !BOUNDED {
                let before = scratch.peak[i];
                let (weighed, peak) = if whole {
                    weigh_running::<S, false>(t, dk, dv, f, mask.as_ptr(), before, x)
                } else {
                    weigh_running::<S, true>(t, dk, dv, f, mask.as_ptr(), before, x)
                };
                if peak > before {
                    let factor = decay(before - peak);
                    scratch.peak[i] = peak;
                    scratch.l[i] *= factor;
                    scale::<S>(scratch.o.ptr::<f32>().add(i * head.dim), factor, head.dim);
                }
                scratch.l[i] += weighed.l;
                scratch.weighed[i] = weighed;
                continue;
            }
            let weighed = if whole {
                weigh::<S, TWO, false>(t, dk, dv, f, mask.as_ptr(), x)
            } else {
                weigh::<S, TWO, true>(t, dk, dv, f, mask.as_ptr(), x)
            };
            scratch.l[i] += weighed.l;
            scratch.weighed[i] = weighed;
        }
    }
}

/// Adds products of the weights with V of the unit to the outputs.
#[inline(always)]
unsafe fn values<S: Simd, const TWO: bool>(tile: &Tile<'_>, unit: Unit, ahead: Ahead, scratch: &mut Scratch) {
    let head = tile.kv.head;
    let dim = head.dim;
    let queries = tile.queries();
    // Words of four positions that any query sees.
    let (from, to) = (unit.seen.0 / 4, unit.seen.1.div_ceil(4));
    let plane = |plane: usize| unit.block.add(head.v(plane) + head.v_at(unit.at + 4 * from, 0));
    let low = plane(usize::from(TWO));
    let mut words = Words { planes: [plane(0), low], stride: 4 * dim, ready: false };
    let groups = queries.div_ceil(S::QUERIES);
    let steps = to - from;
    if groups > direct_groups::<S>() {
        words = products::prepare::<S, TWO>(words, steps, dim, ahead, scratch.words.ptr());
    }
    let o = scratch.o.ptr::<f32>();
    let query_words = UNIT / 4 * Plane::count::<S>();
    let x = scratch.x.ptr::<i32>().add(from * Plane::step::<S>());
    let mut lane = 0;
    while lane < dim {
        let left = if groups > 1 { 1 } else { (dim - lane) / S::N };
        let mut done = 1;
        for group in 0..groups {
            let first = group * S::QUERIES;
            let x = x.add(first * query_words).cast_const();
            let ahead = if group == 0 && !words.ready { ahead.at(lane / S::N * steps) } else { Ahead::NONE };
            let n = (queries - first).min(S::QUERIES);
            let weighed = &scratch.weighed;
            done = products::<S, TWO, true>(words, lane, left, steps, x, n, ahead, |i, vector, a| {
                let weighed = weighed[first + i];
                let a = S::f_from_i(S::i_add(a, S::i_splat(weighed.correction)));
                let to = o.add((first + i) * dim + lane + vector * S::N);
                S::f_store(to, S::f_fma(a, S::f_splat(weighed.weight), S::f_load(to)));
            });
        }
        lane += done * S::N;
    }
}

#[cfg(test)]
mod tests;
