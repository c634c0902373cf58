//! Products of one unpacked tile with a panel of activation rows.
//!
//! ```text
//! panel of T rows:   q  [k / 4][T] words of 4 int8          one load-and-broadcast feeds 16 output rows
//! tile:              codes [k / 4][16 rows] words of 4 u8
//! T accumulators of 16 lanes;  no sum ever crosses lanes
//! ```
//!
//! Per 256 inputs and activation row on AVX-512 VNNI: 64 dot instructions for 4,096 products, 8 (or 16) multiplies by
//! integer scales, 4 (or 8) dots with the group sums of `x`, one conversion and one or two `fma`.

use super::layout::TILE_ROWS;
use super::words::Tile;
use crate::simd::Simd;

/// One block's worth of a panel from some row on: 256 inputs.
#[derive(Clone, Copy)]
pub(crate) struct PanelBlock {
    /// int8 codes, `[64][width]` words.
    pub(crate) q: *const u8,
    /// Scales: `[width]` (super-block types) or `[8][width]`.
    pub(crate) d: *const f32,
    /// Group sums: `[28][width]` for super-block types, i32 `[8][width]` else.
    pub(crate) sums: *const i32,
    /// Rows of the panel; a kernel works on `T` of them.
    pub(crate) width: usize,
}

/// Words between the same place of consecutive groups: known at compile time where there is a kernel of every width.
#[inline(always)]
pub(super) fn stride<S: Simd, const T: usize>(x: PanelBlock) -> usize {
    if S::N == 16 { T } else { x.width }
}

/// Super-block types: adds one block to `acc[t][16]`. `SIX` is for Q6_K, whose offset goes in with the group sums.
///
/// # Safety
/// `acc` is writable for `16 T` values, the panel block is complete.
#[inline(always)]
pub(super) unsafe fn super_block<
    S: Simd,
    const T: usize,
    const GROUP: usize,
    const MINS: bool,
    const WIDE: bool,
    const SIX: bool,
>(
    tile: &Tile,
    offset: i32,
    x: PanelBlock,
    acc: *mut f32,
) {
    let width = stride::<S, T>(x);
    let groups = 256 / GROUP;
    let words = GROUP / 4;
    for lane in (0..16).step_by(S::N) {
        let mut isum = [S::i_splat(0); T];
        let codes = tile.codes.as_ptr().add(lane * 4);
        for g in 0..groups {
            let mut dot = [S::i_splat(0); T];
            if SIX {
                for (t, dot) in dot.iter_mut().enumerate() {
                    *dot = S::i_splat(*x.sums.add((12 + g) * width + t));
                }
            }
            for j in 0..words {
                let at = g * words + j;
                let w = S::i_load(codes.add(at * 64));
                for (t, dot) in dot.iter_mut().enumerate() {
                    let xq = S::i_splat(x.q.add((at * width + t) * 4).cast::<i32>().read_unaligned());
                    *dot = if WIDE { S::dp4_wide(*dot, w, xq) } else { S::dp4(*dot, w, xq) };
                }
            }
            let scale = S::i_load(tile.scale.as_ptr().add(g * 16 + lane).cast());
            for t in 0..T {
                isum[t] = S::i_add(isum[t], S::i_mul(dot[t], scale));
            }
        }
        let mut psum = [S::i_splat(0); T];
        let first_pair = if GROUP == 16 { 0 } else { 8 };
        for p in 0..if SIX { 0 } else { groups / 2 } {
            let pair = S::i_load(tile.pairs.as_ptr().add(p * 16 + lane).cast());
            for (t, psum) in psum.iter_mut().enumerate() {
                *psum = S::dp2(*psum, pair, S::i_splat(*x.sums.add((first_pair + p) * width + t)));
            }
        }
        let d = S::f_load(tile.d.as_ptr().add(lane));
        let m = S::f_load(tile.m.as_ptr().add(lane));
        for t in 0..T {
            let at = acc.add(t * TILE_ROWS + lane);
            let dx = S::f_splat(*x.d.add(t));
            let sum =
                if MINS || SIX { isum[t] } else { S::i_sub(isum[t], S::i_mul(psum[t], S::i_splat(offset))) };
            let mut a = S::f_fma(S::f_from_i(sum), S::f_mul(d, dx), S::f_load(at));
            if MINS {
                a = S::f_fnma(S::f_from_i(psum[t]), S::f_mul(m, dx), a);
            }
            S::f_store(at, a);
        }
    }
}

/// Small-block types: adds `inputs / 32` blocks to `acc`.
///
/// # Safety
/// As [`super_block`].
#[inline(always)]
pub(super) unsafe fn small_blocks<S: Simd, const T: usize, const MINS: bool, const WIDE: bool>(
    tile: &Tile,
    offset: i32,
    inputs: usize,
    x: PanelBlock,
    acc: *mut f32,
) {
    const GROUP: usize = 32;
    let width = stride::<S, T>(x);
    let words = GROUP / 4;
    for lane in (0..16).step_by(S::N) {
        let mut a = [S::f_splat(0.0); T];
        for (t, a) in a.iter_mut().enumerate() {
            *a = S::f_load(acc.add(t * TILE_ROWS + lane));
        }
        let codes = tile.codes.as_ptr().add(lane * 4);
        for g in 0..inputs / GROUP {
            let mut dot = [S::i_splat(0); T];
            if !MINS {
                for (t, dot) in dot.iter_mut().enumerate() {
                    *dot = S::i_splat((*x.sums.add(g * width + t)).wrapping_mul(-offset));
                }
            }
            for j in 0..words {
                let at = g * words + j;
                let w = S::i_load(codes.add(at * 64));
                for (t, dot) in dot.iter_mut().enumerate() {
                    let xq = S::i_splat(x.q.add((at * width + t) * 4).cast::<i32>().read_unaligned());
                    *dot = if WIDE { S::dp4_wide(*dot, w, xq) } else { S::dp4(*dot, w, xq) };
                }
            }
            let d = S::f_load(tile.d.as_ptr().add(g * 16 + lane));
            for t in 0..T {
                let dx = S::f_splat(*x.d.add(g * width + t));
                a[t] = S::f_fma(S::f_from_i(dot[t]), S::f_mul(d, dx), a[t]);
                if MINS {
                    let m = S::f_load(tile.m.as_ptr().add(g * 16 + lane));
                    let sum = S::f_splat(*x.sums.add(g * width + t) as f32);
                    a[t] = S::f_fma(sum, S::f_mul(m, dx), a[t]);
                }
            }
        }
        for (t, a) in a.iter().enumerate() {
            S::f_store(acc.add(t * TILE_ROWS + lane), *a);
        }
    }
}
