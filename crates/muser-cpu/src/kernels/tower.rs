//! What a vision tower does to one row between two products: [`muser_backend::arith::vision`], vectorised.

use muser_backend::arith::vision::{GELU_EXPONENT, layer_stats};

use super::math::exp;
use crate::simd::Simd;

/// `out = fma((x - mean) r, weight, bias)`. `out` may be `x`.
///
/// # Safety
/// All are valid for `len` values.
#[inline(always)]
pub(crate) unsafe fn layer_norm<S: Simd>(
    x: *const f32,
    weight: *const f32,
    bias: *const f32,
    eps: f32,
    out: *mut f32,
    len: usize,
) {
    let (mean, r) = layer_stats(std::slice::from_raw_parts(x, len), eps);
    let (mean_v, r_v) = (S::f_splat(mean), S::f_splat(r));
    let whole = len / S::N * S::N;
    for i in (0..whole).step_by(S::N) {
        let v = S::f_mul(S::f_sub(S::f_load(x.add(i)), mean_v), r_v);
        S::f_store(out.add(i), S::f_fma(v, S::f_load(weight.add(i)), S::f_load(bias.add(i))));
    }
    for i in whole..len {
        *out.add(i) = ((*x.add(i) - mean) * r).mul_add(*weight.add(i), *bias.add(i));
    }
}

/// One head of a row: `x += bias`, then pairs `(x[2t], x[2t + 1])` turn; `rope` holds `cos` of each pair, then `sin`.
///
/// # Safety
/// All are valid for `dim` values, an even number.
#[inline(always)]
pub(crate) unsafe fn bias_rope<S: Simd>(x: *mut f32, bias: *const f32, dim: usize, rope: *const f32) {
    add_bias::<S>(x, bias, dim);
    let half = dim / 2;
    for t in 0..half {
        let (c, s) = (*rope.add(t), *rope.add(half + t));
        let (a, b) = (*x.add(2 * t), *x.add(2 * t + 1));
        *x.add(2 * t) = a * c - b * s;
        *x.add(2 * t + 1) = a * s + b * c;
    }
}

/// `x += bias`.
///
/// # Safety
/// Both are valid for `len` values.
#[inline(always)]
pub(crate) unsafe fn add_bias<S: Simd>(x: *mut f32, bias: *const f32, len: usize) {
    let whole = len / S::N * S::N;
    for i in (0..whole).step_by(S::N) {
        S::f_store(x.add(i), S::f_add(S::f_load(x.add(i)), S::f_load(bias.add(i))));
    }
    for i in whole..len {
        *x.add(i) += *bias.add(i);
    }
}

/// `h = h + (product + bias)`.
///
/// # Safety
/// All are valid for `len` values.
#[inline(always)]
pub(crate) unsafe fn add_product<S: Simd>(h: *mut f32, product: *const f32, bias: *const f32, len: usize) {
    let whole = len / S::N * S::N;
    for i in (0..whole).step_by(S::N) {
        let sum = S::f_add(S::f_load(product.add(i)), S::f_load(bias.add(i)));
        S::f_store(h.add(i), S::f_add(S::f_load(h.add(i)), sum));
    }
    for i in whole..len {
        *h.add(i) += *product.add(i) + *bias.add(i);
    }
}

/// `x = gelu(x + bias)`; without a bias if the pointer is null.
///
/// # Safety
/// Both are valid for `len` values.
#[inline(always)]
pub(crate) unsafe fn gelu<S: Simd>(x: *mut f32, bias: *const f32, len: usize) {
    for i in (0..len).step_by(S::N) {
        let count = (len - i).min(S::N);
        if count == S::N {
            let mut v = S::f_load(x.add(i));
            if !bias.is_null() {
                v = S::f_add(v, S::f_load(bias.add(i)));
            }
            S::f_store(x.add(i), gelu_of::<S>(v));
            continue;
        }
        let mut pad = [0.0f32; 16];
        for (j, pad) in pad.iter_mut().enumerate().take(count) {
            *pad = if bias.is_null() { *x.add(i + j) } else { *x.add(i + j) + *bias.add(i + j) };
        }
        let v = gelu_of::<S>(S::f_load(pad.as_ptr()));
        S::f_store(pad.as_mut_ptr(), v);
        std::ptr::copy_nonoverlapping(pad.as_ptr(), x.add(i), count);
    }
}

#[inline(always)]
unsafe fn gelu_of<S: Simd>(x: S::F) -> S::F {
    let t = S::f_from_bits(S::i_and(S::f_to_bits(x), S::i_splat(0x7fff_ffff)));
    let [head @ .., top] = GELU_EXPONENT;
    let mut q = S::f_splat(top);
    for c in head.iter().rev() {
        q = S::f_fma(q, t, S::f_splat(*c));
    }
    let zero = S::f_splat(0.0);
    // A NaN in `x` gives zero here and shows through `t`.
    let positive = S::f_max(x, zero);
    S::f_fnma(t, exp::<S>(S::f_sub(zero, q)), positive)
}

/// `x += ` the position of [`muser_backend::arith::vision::position`].
///
/// # Safety
/// `x` is valid for `hidden` values, `table` for the rows that the taps name.
#[inline(always)]
pub(crate) unsafe fn add_position<S: Simd>(
    x: *mut f32,
    taps: &[(usize, f32); 4],
    table: *const f32,
    hidden: usize,
) {
    let whole = hidden / S::N * S::N;
    for i in (0..whole).step_by(S::N) {
        let mut sum = S::f_splat(0.0);
        for (place, weight) in taps {
            sum = S::f_fma(S::f_splat(*weight), S::f_load(table.add(place * hidden + i)), sum);
        }
        S::f_store(x.add(i), S::f_add(S::f_load(x.add(i)), sum));
    }
    for i in whole..hidden {
        let sum = taps
            .iter()
            .fold(0.0f32, |sum, (place, weight)| weight.mul_add(*table.add(place * hidden + i), sum));
        *x.add(i) += sum;
    }
}
