//! What is done to one row between two products: norms, quantisation, head norms with RoPE, gates.
//!
//! Sums over a row are those of [`arith::row_dot`] and [`arith::ResidualSums`], the same on every backend.

use muser_backend::arith;

use super::math::{exp, sigmoid};
use super::matmul::{Panels, SUPER_SUMS, panel_of};
use crate::simd::Simd;

/// Where a quantised row goes.
#[derive(Clone, Copy)]
pub(crate) struct QuantTarget {
    /// For super-block types, if any matrix needs it.
    pub(crate) super_blocks: Option<Panels>,
    /// For small-block types, if any matrix needs it.
    pub(crate) small_blocks: Option<Panels>,
    /// Values of a row.
    pub(crate) k: usize,
    /// Rows of the step.
    pub(crate) rows: usize,
}

/// `out = x * inverse_rms(x) * weight`; without a weight if the pointer is null. `out` may be `x`.
///
/// # Safety
/// All are valid for `len` values.
#[inline(always)]
pub(crate) unsafe fn rms_norm<S: Simd>(
    x: *const f32,
    weight: *const f32,
    eps: f32,
    out: *mut f32,
    len: usize,
) {
    let row = std::slice::from_raw_parts(x, len);
    scale_row::<S>(x, arith::inverse_rms(arith::row_dot(row, row), len, eps), weight, out, len);
}

/// `out = x * r * weight`; without a weight if the pointer is null. `out` may be `x`.
///
/// # Safety
/// All are valid for `len` values.
#[inline(always)]
pub(crate) unsafe fn scale_row<S: Simd>(
    x: *const f32,
    r: f32,
    weight: *const f32,
    out: *mut f32,
    len: usize,
) {
    let rv = S::f_splat(r);
    let whole = len / S::N * S::N;
    for i in (0..whole).step_by(S::N) {
        let mut v = S::f_mul(S::f_load(x.add(i)), rv);
        if !weight.is_null() {
            v = S::f_mul(v, S::f_load(weight.add(i)));
        }
        S::f_store(out.add(i), v);
    }
    for i in whole..len {
        let v = *x.add(i) * r;
        *out.add(i) = if weight.is_null() { v } else { v * *weight.add(i) };
    }
}

/// `h = fma(c, o * weight, h)` with `c` the inverse rms of `o`; returns the inverse rms of the new `h`.
///
/// # Safety
/// All are valid for `len` values.
#[inline(always)]
pub(crate) unsafe fn add_post_norm<S: Simd>(
    h: *mut f32,
    o: *const f32,
    weight: *const f32,
    (post_eps, eps): (f32, f32),
    len: usize,
) -> f32 {
    let slice = |p: *const f32| std::slice::from_raw_parts(p, len);
    let sums = arith::ResidualSums::of(slice(h), slice(o), slice(weight));
    let c = sums.post_factor(post_eps);
    let cv = S::f_splat(c);
    let whole = len / S::N * S::N;
    for i in (0..whole).step_by(S::N) {
        let u = S::f_mul(S::f_load(o.add(i)), S::f_load(weight.add(i)));
        S::f_store(h.add(i), S::f_fma(cv, u, S::f_load(h.add(i))));
    }
    for i in whole..len {
        *h.add(i) = c.mul_add(*o.add(i) * *weight.add(i), *h.add(i));
    }
    sums.next_factor(c, eps)
}

/// Quantises values `from .. to` of row `row` (multiples of 256 unless `to` is the end of the row).
///
/// # Safety
/// `x` is valid for `k` values, the panels for all rows; nobody else writes this part of them.
#[inline(always)]
pub(crate) unsafe fn quantize<S: Simd>(
    x: *const f32,
    row: usize,
    from: usize,
    to: usize,
    target: &QuantTarget,
) {
    let (panel_row, width) = panel_of(row, target.rows);
    let t = row - panel_row;
    let k = target.k;
    let blocks = k.div_ceil(256);
    for panels in target.super_blocks.iter().chain(&target.small_blocks) {
        panels.reach.holds((panel_row + width) * k);
    }
    let mut codes = [0i8; 256];
    for at in (from..to).step_by(256) {
        let len = (to - at).min(256);
        let block = at / 256;
        if let Some(p) = target.super_blocks {
            let to = SuperBlock {
                q: p.q.add(panel_row * k + at * width),
                d: p.d.add(panel_row * blocks + block * width),
                sums: p.sums.add(panel_row * blocks * SUPER_SUMS + block * SUPER_SUMS * width),
                width,
            };
            let d = quantize_block::<S>(x.add(at), &mut codes[..len]);
            // Only NVFP4 has rows that end inside a block; sums that lie beyond are of nothing.
            codes[len..].fill(0);
            to.store(t, &codes, len, d);
        }
        if let Some(p) = target.small_blocks {
            for small in 0..len / 32 {
                let at = at + small * 32;
                let b = at / 32;
                let to = SmallBlock {
                    q: p.q.add(panel_row * k + at * width),
                    d: p.d.add(panel_row * (k / 32) + b * width),
                    sum: p.sums.add(panel_row * (k / 32) + b * width),
                    width,
                };
                let d = quantize_block::<S>(x.add(at), &mut codes[..32]);
                to.store(t, &codes[..32], d);
            }
        }
    }
}

/// Where 256 values of a panel go for super-block types.
struct SuperBlock {
    q: *mut u8,
    d: *mut f32,
    sums: *mut i32,
    width: usize,
}

impl SuperBlock {
    #[inline(always)]
    unsafe fn store(&self, t: usize, codes: &[i8; 256], len: usize, d: f32) {
        let width = self.width;
        *self.d.add(t) = d;
        store_codes(&codes[..len], self.q, width, t);
        let sums = self.sums.add(t);
        let s16: [i32; 16] =
            std::array::from_fn(|g| codes[16 * g..16 * g + 16].iter().map(|&q| i32::from(q)).sum());
        let s32: [i32; 8] = std::array::from_fn(|g| s16[2 * g] + s16[2 * g + 1]);
        let pair = |s: &[i32], p: usize| {
            let first = p / 2 * 4 + p % 2;
            (s[first] & 0xffff) | (s[first + 2] << 16)
        };
        for i in 0..8 {
            *sums.add(i * width) = pair(&s16, i);
        }
        for i in 0..4 {
            *sums.add((8 + i) * width) = pair(&s32, i);
        }
        for (i, sum) in s16.iter().enumerate() {
            *sums.add((12 + i) * width) = -32 * sum;
        }
    }
}

/// Where 32 values of a panel go for small-block types.
struct SmallBlock {
    q: *mut u8,
    d: *mut f32,
    sum: *mut i32,
    width: usize,
}

impl SmallBlock {
    #[inline(always)]
    unsafe fn store(&self, t: usize, codes: &[i8], d: f32) {
        *self.d.add(t) = d;
        store_codes(codes, self.q, self.width, t);
        *self.sum.add(t) = codes.iter().map(|&q| i32::from(q)).sum();
    }
}

/// Four codes a word, `width` words apart.
#[inline(always)]
unsafe fn store_codes(codes: &[i8], to: *mut u8, width: usize, t: usize) {
    if width == 1 {
        std::ptr::copy_nonoverlapping(codes.as_ptr().cast(), to, codes.len());
        return;
    }
    for j in 0..codes.len() / 4 {
        let word = codes.as_ptr().add(4 * j).cast::<u32>().read_unaligned();
        to.add((j * width + t) * 4).cast::<u32>().write_unaligned(word);
    }
}

/// [`arith::quantize_block`], vectorised: a maximum is exact in any order.
#[inline(always)]
unsafe fn quantize_block<S: Simd>(x: *const f32, codes: &mut [i8]) -> f32 {
    let len = codes.len();
    if !len.is_multiple_of(16) {
        return arith::quantize_block(std::slice::from_raw_parts(x, len), codes);
    }
    // Magnitudes of floats order like their bits; infinities and NaNs come out on top.
    let mask = S::i_splat(0x7fff_ffff);
    let mut top = S::i_splat(0);
    for i in (0..len).step_by(S::N) {
        top = S::i_max(top, S::i_and(S::f_to_bits(S::f_load(x.add(i))), mask));
    }
    let mut lanes = [0i32; 16];
    S::i_store(lanes.as_mut_ptr().cast(), top);
    let bits = lanes.iter().fold(0, |a, &b| a.max(b));
    let amax = f32::from_bits(bits as u32);
    let inv = if amax > 0.0 { 127.0 / amax } else { 0.0 };
    if !amax.is_finite() || !inv.is_finite() {
        codes.fill(0);
        return if amax.is_finite() { 0.0 } else { f32::NAN };
    }
    let inv = S::f_splat(inv);
    for i in (0..len).step_by(S::N) {
        let mut ints = [0i32; 16];
        S::i_store(ints.as_mut_ptr().cast(), S::f_to_i(S::f_mul(S::f_load(x.add(i)), inv)));
        for (c, v) in codes[i..i + S::N].iter_mut().zip(ints) {
            *c = v as i8;
        }
    }
    amax / 127.0
}

/// Norm of one head with weight, then RoPE if `rope` is not null: on pairs `(x[2t], x[2t + 1])`, or with `HALVES` on pairs
/// `(x[t], x[t + dim / 2])`.
///
/// `rope` holds `cos` of each pair, then `sin` of each pair.
///
/// # Safety
/// `x` and `weight` are valid for `dim` values, `rope` for `dim` values.
#[inline(always)]
pub(crate) unsafe fn head_norm_rope<S: Simd, const HALVES: bool>(
    x: *mut f32,
    weight: *const f32,
    eps: f32,
    dim: usize,
    rope: *const f32,
) {
    rms_norm::<S>(x, weight, eps, x, dim);
    if rope.is_null() {
        return;
    }
    let half = dim / 2;
    for t in 0..half {
        let (i, j) = if HALVES { (t, t + half) } else { (2 * t, 2 * t + 1) };
        let (c, s) = (*rope.add(t), *rope.add(half + t));
        let (a, b) = (*x.add(i), *x.add(j));
        *x.add(i) = a * c - b * s;
        *x.add(j) = a * s + b * c;
    }
}

/// `o *= sigmoid(g)`.
///
/// # Safety
/// Both are valid for `len` values, a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn gate<S: Simd>(o: *mut f32, g: *const f32, len: usize) {
    for i in (0..len).step_by(S::N) {
        S::f_store(o.add(i), S::f_mul(S::f_load(o.add(i)), sigmoid::<S>(S::f_load(g.add(i)))));
    }
}

/// `up = silu(gate) * up`.
///
/// # Safety
/// Both are valid for `len` values.
#[inline(always)]
pub(crate) unsafe fn silu_mul<S: Simd>(gate: *const f32, up: *mut f32, len: usize) {
    let whole = len / S::N * S::N;
    for i in (0..whole).step_by(S::N) {
        S::f_store(up.add(i), silu_times::<S>(S::f_load(gate.add(i)), S::f_load(up.add(i))));
    }
    if whole < len {
        let mut pad = [[0.0f32; 16]; 2];
        std::ptr::copy_nonoverlapping(gate.add(whole), pad[0].as_mut_ptr(), len - whole);
        std::ptr::copy_nonoverlapping(up.add(whole), pad[1].as_mut_ptr(), len - whole);
        let v = silu_times::<S>(S::f_load(pad[0].as_ptr()), S::f_load(pad[1].as_ptr()));
        S::f_store(pad[1].as_mut_ptr(), v);
        std::ptr::copy_nonoverlapping(pad[1].as_ptr(), up.add(whole), len - whole);
    }
}

#[inline(always)]
unsafe fn silu_times<S: Simd>(g: S::F, u: S::F) -> S::F {
    let e = exp::<S>(S::f_sub(S::f_splat(0.0), g));
    S::f_mul(S::f_div(g, S::f_add(S::f_splat(1.0), e)), u)
}
