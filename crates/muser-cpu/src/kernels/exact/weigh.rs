//! From products with K to digits of weights: the float part of a unit.

use muser_backend::arith::attention::{Digits, EXP2, UNIT, UnitScale};
use muser_backend::arith::vision::attention::{LEAST_SHIFT, MOST_SCORE};

use crate::simd::Simd;

/// What is known of a query after a unit's weights.
#[derive(Clone, Copy, Default)]
pub(super) struct Weighed {
    /// Sum of the probabilities.
    pub(super) l: f32,
    /// What products with V are multiplied with.
    pub(super) weight: f32,
    /// What takes the bias of V's digits out of them.
    pub(super) correction: i32,
}

/// 2 to the power of `s`, as [`muser_backend::arith::attention::exp2`].
#[inline(always)]
unsafe fn exp2<S: Simd>(s: S::F) -> S::F {
    let n = S::f_to_i(s);
    raised::<S>(fraction::<S>(S::f_sub(s, S::f_from_i(n))), n)
}

/// 2 to the power of what rounding took.
#[inline(always)]
unsafe fn fraction<S: Simd>(r: S::F) -> S::F {
    let mut p = S::f_splat(EXP2[0]);
    for c in &EXP2[1..] {
        p = S::f_fma(p, r, S::f_splat(*c));
    }
    p
}

/// `p * 2^n`.
#[inline(always)]
unsafe fn raised<S: Simd>(p: S::F, n: S::I) -> S::F {
    S::f_from_bits(S::i_add(S::f_to_bits(p), S::i_shl::<23>(n)))
}

/// Weights of a unit for one query: `t` are its 64 products, `dk` and `dv` the positions' scales, `mask` is read where
/// `MASKED`: -1 for positions that are seen, else 0. The digits go to `x`.
#[inline(always)]
pub(super) unsafe fn weigh<S: Simd, const TWO: bool, const MASKED: bool>(
    t: *const i32,
    dk: *const f32,
    dv: *const f32,
    f: f32,
    mask: *const i32,
    x: *mut i32,
) -> Weighed {
    let vectors = UNIT / S::N;
    let f = S::f_splat(f);
    let mut scaled = [S::f_splat(0.0); UNIT / 4];
    let mut l = [S::f_splat(0.0); 4];
    let mut top = S::f_splat(0.0);
    for v in 0..vectors {
        let at = v * S::N;
        let s = S::f_mul(S::f_from_i(S::i_load(t.add(at).cast())), S::f_load(dk.add(at)));
        let mut p = exp2::<S>(S::f_mul(s, f));
        let mut weight = S::f_mul(p, S::f_load(dv.add(at)));
        if MASKED {
            // Both: the scale of a position that nobody wrote may be anything.
            let mask = S::i_load(mask.add(at).cast());
            p = S::f_from_bits(S::i_and(S::f_to_bits(p), mask));
            weight = S::f_from_bits(S::i_and(S::f_to_bits(weight), mask));
        }
        let part = &mut l[v % (16 / S::N)];
        *part = S::f_add(*part, p);
        top = S::f_max(weight, top);
        scaled[v] = weight;
    }
    encode::<S, TWO>(&scaled, S::f_top(top), S::f_tree(l), x)
}

/// The same for scores that nothing bounds: relative to the largest so far, which was `before` and is returned.
#[inline(always)]
pub(super) unsafe fn weigh_running<S: Simd, const MASKED: bool>(
    t: *const i32,
    dk: *const f32,
    dv: *const f32,
    f: f32,
    mask: *const i32,
    before: f32,
    x: *mut i32,
) -> (Weighed, f32) {
    let vectors = UNIT / S::N;
    let f = S::f_splat(f);
    let (lowest, highest) = (S::f_splat(-MOST_SCORE), S::f_splat(MOST_SCORE));
    let mut scores = [S::f_splat(0.0); UNIT / 4];
    let mut peak = S::f_splat(before);
    for (v, score) in scores.iter_mut().enumerate().take(vectors) {
        let at = v * S::N;
        let s = S::f_mul(S::f_from_i(S::i_load(t.add(at).cast())), S::f_load(dk.add(at)));
        let mut s = S::f_min(S::f_max(S::f_mul(s, f), lowest), highest);
        if MASKED {
            let mask = S::i_load(mask.add(at).cast());
            let hidden = S::i_and(S::f_to_bits(lowest), S::i_xor(mask, S::i_splat(-1)));
            s = S::f_from_bits(S::i_or(S::i_and(S::f_to_bits(s), mask), hidden));
        }
        *score = s;
        peak = S::f_max(S::f_from_i(S::f_to_i(s)), peak);
    }
    let top_score = S::f_top(peak);
    let peak = S::f_splat(top_score);
    let mut scaled = [S::f_splat(0.0); UNIT / 4];
    let mut l = [S::f_splat(0.0); 4];
    let mut top = S::f_splat(0.0);
    for (v, &s) in scores.iter().enumerate().take(vectors) {
        let at = v * S::N;
        let n = S::f_from_i(S::f_to_i(s));
        let shift = S::f_max(S::f_sub(n, peak), S::f_splat(LEAST_SHIFT));
        let mut p = raised::<S>(fraction::<S>(S::f_sub(s, n)), S::f_to_i(shift));
        let mut weight = S::f_mul(p, S::f_load(dv.add(at)));
        if MASKED {
            let mask = S::i_load(mask.add(at).cast());
            p = S::f_from_bits(S::i_and(S::f_to_bits(p), mask));
            weight = S::f_from_bits(S::i_and(S::f_to_bits(weight), mask));
        }
        let part = &mut l[v % (16 / S::N)];
        *part = S::f_add(*part, p);
        top = S::f_max(weight, top);
        scaled[v] = weight;
    }
    (encode::<S, true>(&scaled, S::f_top(top), S::f_tree(l), x), top_score)
}

/// Digits of weights whose largest is `top`, to `x`; `l` is the sum of the probabilities.
#[inline(always)]
unsafe fn encode<S: Simd, const TWO: bool>(
    scaled: &[S::F; UNIT / 4],
    top: f32,
    l: f32,
    x: *mut i32,
) -> Weighed {
    let vectors = UNIT / S::N;
    let digits = if TWO { Digits::Two } else { Digits::One };
    let unit = UnitScale::of(top, digits);
    let scale = S::f_splat(unit.scale);
    let mut sum = S::i_splat(0);
    for (v, &weight) in scaled.iter().enumerate().take(vectors) {
        let codes = S::f_to_i(S::f_mul(weight, scale));
        let high = S::i_sra::<8>(S::i_add(codes, S::i_splat(128)));
        sum = S::i_add(sum, if TWO { S::i_add(codes, high) } else { codes });
        if S::PAIRS {
            S::store_pairs(x.add(v * S::N / 2).cast(), codes);
            S::store_pairs(x.add(UNIT / 2 + v * S::N / 2).cast(), high);
        } else {
            S::store_bytes(x.add(v * S::N / 4).cast(), high);
            S::store_bytes(x.add(UNIT / 4 + v * S::N / 4).cast(), codes);
        }
    }
    let correction = if S::BIAS == 0 { 0 } else { (-S::BIAS).wrapping_mul(S::i_sum(sum)) };
    Weighed { l, weight: unit.weight, correction }
}
