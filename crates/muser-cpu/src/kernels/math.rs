//! exp and what is made of it, in one fixed sequence of roundings for every instruction set.
//!
//! `exp(x) = 2^n * p(r)` with `n = rint(x / ln 2)` and `r = x - n ln 2` in two steps (Cody and Waite), `p` a polynomial
//! of degree 7 in Horner form by `fma`. The error is below 2 ulp where the result is normal.

use crate::simd::Simd;

/// Below this exp is +0: 2^-126, the smallest normal number.
const LOWEST: f32 = -87.33654;
/// Above this exp would overflow; larger arguments are treated as this one.
const HIGHEST: f32 = 88.37626;

/// e to the power of `x`; exactly 0 below -87.33 (so for -inf), exactly 1 for 0, NaN for NaN.
#[inline(always)]
pub(super) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    let low = S::f_splat(LOWEST);
    let clamped = S::f_min(S::f_splat(HIGHEST), S::f_max(low, x));
    let n_int = S::f_to_i(S::f_mul(clamped, S::f_splat(std::f32::consts::LOG2_E)));
    let n = S::f_from_i(n_int);
    // ln 2 as a short part, whose product with n is exact, and the rest.
    let r = S::f_fnma(n, S::f_splat(0.693_359_4), clamped);
    let r = S::f_fnma(n, S::f_splat(-2.121_944_4e-4), r);
    let mut p = S::f_splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = S::f_fma(p, r, S::f_splat(c));
    }
    let scale = S::f_from_bits(S::i_shl::<23>(S::i_add(n_int, S::i_splat(127))));
    S::f_zero_below(x, low, S::f_mul(p, scale))
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
pub(super) unsafe fn sigmoid<S: Simd>(x: S::F) -> S::F {
    let one = S::f_splat(1.0);
    S::f_div(one, S::f_add(one, exp::<S>(S::f_sub(S::f_splat(0.0), x))))
}

/// `1 - 2 / (exp(2 x) + 1)`: absolute error below 2e-7.
#[inline(always)]
pub(super) unsafe fn tanh<S: Simd>(x: S::F) -> S::F {
    let one = S::f_splat(1.0);
    let e = exp::<S>(S::f_add(x, x));
    S::f_sub(one, S::f_div(S::f_splat(2.0), S::f_add(e, one)))
}
