//! Attention, defined like the matrix products: exact integers inside, few float operations in one order around them.
//!
//! For one query row of one head; every f32 operation is rounded once. A *unit* is 64 positions, a *block* 256, both at
//! absolute places, so nothing depends on where a sequence was cut into steps.
//!
//! 1. *Stored*, once, when a row is computed, after norm and rotation: k is multiplied by the Hadamard matrix of the head
//!    ([`hadamard`]), which spreads a few large channels over all of them. Of k and of v, per position and KV head:
//!    `d = amax / 32639` and codes `rint(x * (32639 / amax))` ([`quantize`]); with 8-bit KV 127 in place of 32639. A 16-bit
//!    code is two int8 digits, `256 hi + lo` with `lo` in -128..=127 ([`digits`]). Zeros and what is not finite: codes 0, d 0.
//! 2. *Query*: `q` likewise, always in 16 bits; `f = d_q * factor` with [`score_factor`]. If `f` is not finite, the result is NaN.
//! 3. *Score*: exact i32 `T = 256 sum qh kh + sum (qh kl + ql kh)`; the product of the low digits is left out (it is below
//!    the codes' own rounding) and with 8-bit KV there is no `kl`. `s = (f32(T) * d_k) * f`, in units of log2.
//! 4. *Probability* `p = 2^s` ([`exp2`]), exactly 0 for positions that the query does not see. No maximum is subtracted: q and
//!    k are normed, so scores are bounded ([`MAX_LOG2_SCORE`], checked when a model is loaded).
//! 5. *Unit*: `l = sum p`, position `j` to lane `j % 16`, ascending, the lanes as a tree (`+ 8`, `+ 4`, `+ 2`, `+ 1`).
//!    `p' = p * d_v`; with `2^(e-1) <= max p' < 2^e` over the unit, codes `x = rint(p' * 2^(14-e))`, two digits
//!    ([`UnitScale`]). `T[d] = 256 sum xh vh + sum (xh vl + xl vh)`, weight `w = 2^(e-14)`, with 16-bit KV times 256.
//! 6. *Block*: from +0, units ascending, `O = fma(f32(T), w, O)` and `L = L + l`. *Row*: from +0, blocks ascending, `O = O + O_b`,
//!    `L = L + L_b`. The result is `O * (1 / L)`.
//!
//! `w` is a power of two, so `f32(T) * w` is exact and a unit that nobody sees may be left out as well as added. Integers
//! cannot overflow: `|T| <= 5.4e8` for heads of 128 and for 64 positions (even for 256). Sums of digits may be taken in any
//! order, as pairs of 16 bits or in matrix units. V's scale rides in `p'`, so the codes' precision goes where the
//! contribution is. A row uses its own query, codes that were written once, and maxima over what it sees itself.

use super::tree16;

/// Positions of a unit.
pub const UNIT: usize = 64;
/// Largest code of 16 bits: its digits fit int8.
pub const TOP_16: f32 = 32639.0;
/// Largest code of 8 bits.
pub const TOP_8: f32 = 127.0;
/// Bits of the codes of `p'`.
pub const WEIGHT_BITS: u32 = 14;
/// Largest `|s|` that a model's norm weights may allow: below it no sum can overflow.
pub const MAX_LOG2_SCORE: f32 = 90.0;

/// How many int8 digits a stored value has: the KV cache's width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Digits {
    /// 8 bits.
    One,
    /// 16 bits.
    Two,
}

impl Digits {
    /// 1 or 2.
    pub fn count(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
        }
    }

    /// The largest code.
    pub fn top(self) -> f32 {
        match self {
            Self::One => TOP_8,
            Self::Two => TOP_16,
        }
    }
}

/// The numeric route of every backend that computes all of [`crate::arith`], without what a model adds to it
/// ([`crate::numeric_route`]): equal names, equal bits. Its number rises when any bit of any result may change.
pub fn route(kv: Digits) -> String {
    format!("exact-1/kv{}", 8 * kv.count())
}

/// Multiplies a head by the Hadamard matrix of its length, in Sylvester's order: for `h` = 1, 2, 4, ... all pairs
/// `(a, b) = (x[i], x[i + h])` become `(a + b, a - b)`; then every value times `1 / sqrt(len)`. A length that is no power
/// of two is left as it is.
#[inline(always)]
pub fn hadamard(x: &mut [f32]) {
    let len = x.len();
    if !len.is_power_of_two() {
        return;
    }
    let mut h = 1;
    while h < len {
        for pair in x.chunks_exact_mut(2 * h) {
            let (a, b) = pair.split_at_mut(h);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        h *= 2;
    }
    let factor = hadamard_factor(len);
    x.iter_mut().for_each(|v| *v *= factor);
}

/// `1 / sqrt(len)`, rounded once from f64.
#[inline(always)]
pub fn hadamard_factor(len: usize) -> f32 {
    (1.0 / (len as f64).sqrt()) as f32
}

/// Codes and scale of one head of one position: `x[i]` is about `d * codes[i]`.
///
/// `d = amax / top`, `codes = rint(x * (top / amax))`. Zeros, magnitudes so small that `top / amax` overflows, and values
/// that are not finite have codes 0; `d` is 0 for them, NaN for the last if `marks_nan` (a query).
#[inline(always)]
pub fn quantize(x: &[f32], top: f32, marks_nan: bool, codes: &mut [i16]) -> f32 {
    let mut bits = 0u32;
    for v in x {
        // Magnitudes of floats order like their bits; infinities and NaN come out on top.
        bits = bits.max(v.to_bits() & 0x7fff_ffff);
    }
    let amax = f32::from_bits(bits);
    let inverse = if amax > 0.0 { top / amax } else { 0.0 };
    if !amax.is_finite() || !inverse.is_finite() {
        codes.fill(0);
        return if amax.is_finite() || !marks_nan { 0.0 } else { f32::NAN };
    }
    for (c, v) in codes.iter_mut().zip(x) {
        *c = (v * inverse).round_ties_even() as i16;
    }
    amax / top
}

/// `(hi, lo)` with `code = 256 hi + lo`, `lo` in -128..=127.
#[inline(always)]
pub fn digits(code: i16) -> (i8, i8) {
    let lo = code as i8;
    (((i32::from(code) - i32::from(lo)) >> 8) as i8, lo)
}

/// What a query's scale is multiplied with: `log2 e / sqrt(head_dim)`, rounded once from f64, and for 16-bit KV times 256.
#[inline(always)]
pub fn score_factor(head_dim: usize, kv: Digits) -> f32 {
    let factor = (std::f64::consts::LOG2_E / (head_dim as f64).sqrt()) as f32;
    match kv {
        Digits::One => factor,
        Digits::Two => factor * 256.0,
    }
}

/// Coefficients of [`exp2`], from `r^5` down: fitted together, so the second to last is near ln 2 and not it.
#[allow(clippy::approx_constant, reason = "see above")]
pub const EXP2: [f32; 6] = [1.3264725e-3, 9.671513e-3, 5.5507336e-2, 0.24022242, 0.693147, 1.0];

/// `2^s` for `|s|` up to about 120; relative error 1e-7. `n = rint(s)`, `r = s - n`, a polynomial of degree 5 by `fma`, `n`
/// added to the exponent.
#[inline(always)]
pub fn exp2(s: f32) -> f32 {
    let n = s.round_ties_even();
    let r = s - n;
    let p = EXP2[1..].iter().fold(EXP2[0], |p, c| p.mul_add(r, *c));
    f32::from_bits(p.to_bits().wrapping_add(((n as i32) << 23) as u32))
}

/// The power of two of a unit's `p'`, from the largest of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnitScale {
    /// `2^(14-e)`; 0 where all codes are 0.
    pub scale: f32,
    /// `2^(e-14)`, with 16-bit KV times 256.
    pub weight: f32,
}

/// Exponent bits of 2^-110: a unit whose largest `p'` is below that counts as zeros.
pub const LEAST_EXPONENT: u32 = 17;

impl UnitScale {
    /// For the largest visible `p'`, which is finite and not negative.
    #[inline(always)]
    pub fn of(largest: f32, kv: Digits) -> Self {
        let exponent = largest.to_bits() >> 23;
        if exponent < LEAST_EXPONENT {
            return Self { scale: 0.0, weight: 0.0 };
        }
        // e = exponent - 126.
        let shift = if kv == Digits::Two { 8 } else { 0 };
        Self {
            scale: f32::from_bits((267 - exponent) << 23),
            weight: f32::from_bits((exponent - 13 + shift) << 23),
        }
    }

    /// The code of one `p'`: 0 to 2^14.
    #[inline(always)]
    pub fn code(self, p: f32) -> i16 {
        (p * self.scale).round_ties_even() as i16
    }
}

/// Digits of one head of one position, as they are stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredHead {
    /// High digits, or the only ones.
    pub hi: Vec<i8>,
    /// Low digits; empty with 8-bit KV.
    pub lo: Vec<i8>,
    /// Scale.
    pub d: f32,
}

impl StoredHead {
    /// Stores a v head, or a k head that [`hadamard`] has been applied to.
    pub fn of(x: &[f32], kv: Digits) -> Self {
        let mut codes = vec![0i16; x.len()];
        let d = quantize(x, kv.top(), false, &mut codes);
        match kv {
            Digits::One => Self { hi: codes.iter().map(|c| *c as i8).collect(), lo: Vec::new(), d },
            Digits::Two => {
                let (hi, lo) = codes.iter().map(|c| digits(*c)).unzip();
                Self { hi, lo, d }
            }
        }
    }
}

/// `256 sum ah bh + sum (ah bl + al bh)` of digits `a` (always two) and `b`.
fn product<'a>(a: impl Iterator<Item = (i8, i8)>, b: impl Iterator<Item = (i8, Option<&'a i8>)>) -> i32 {
    let (mut high, mut mixed) = (0i32, 0i32);
    for ((ah, al), (bh, bl)) in a.zip(b) {
        let [ah, al, bh, bl] = [ah, al, bh, bl.copied().unwrap_or(0)].map(i32::from);
        high += ah * bh;
        mixed += ah * bl + al * bh;
    }
    256 * high + mixed
}

/// The whole definition in scalar code: one query head (before [`hadamard`]) over positions `0..keys.len()` whose first
/// is at absolute place `start`, a multiple of 256; `visible` says which are seen. What every backend is checked against.
pub fn attend(
    q: &[f32],
    keys: &[StoredHead],
    values: &[StoredHead],
    visible: impl Fn(usize) -> bool,
    kv: Digits,
) -> Vec<f32> {
    let dim = q.len();
    let mut rotated = q.to_vec();
    hadamard(&mut rotated);
    let mut codes = vec![0i16; dim];
    let f = quantize(&rotated, TOP_16, true, &mut codes) * score_factor(dim, kv);
    if !f.is_finite() {
        return vec![f32::NAN; dim];
    }
    let (mut row, mut row_l) = (vec![0.0f32; dim], 0.0f32);
    let block_len = 4 * UNIT;
    for block in (0..keys.len()).step_by(block_len) {
        let (mut o, mut sum) = (vec![0.0f32; dim], 0.0f32);
        for unit in (block..(block + block_len).min(keys.len())).step_by(UNIT) {
            let positions = unit..(unit + UNIT).min(keys.len());
            let (mut p, mut scaled, mut lanes) = ([0.0f32; UNIT], [0.0f32; UNIT], [0.0f32; 16]);
            for j in positions.clone().filter(|j| visible(*j)) {
                let key = &keys[j];
                let lo = (0..dim).map(|i| (key.hi[i], key.lo.get(i)));
                let t = product(codes.iter().map(|c| digits(*c)), lo);
                p[j - unit] = exp2(t as f32 * key.d * f);
                scaled[j - unit] = p[j - unit] * values[j].d;
            }
            p.iter().enumerate().for_each(|(j, p)| lanes[j % 16] += p);
            sum += tree16(&lanes);
            let scale = UnitScale::of(scaled.iter().fold(0.0f32, |a, b| a.max(*b)), kv);
            for (d, o) in o.iter_mut().enumerate() {
                let weights = positions.clone().map(|j| digits(scale.code(scaled[j - unit])));
                let column = positions.clone().map(|j| (values[j].hi[d], values[j].lo.get(d)));
                *o = (product(weights, column) as f32).mul_add(scale.weight, *o);
            }
        }
        row.iter_mut().zip(&o).for_each(|(row, o)| *row += o);
        row_l += sum;
    }
    let inverse = 1.0 / row_l;
    row.iter().map(|o| o * inverse).collect()
}

/// Largest magnitude; NaN if any value is not a number.
fn largest<'a>(w: impl IntoIterator<Item = &'a f32>) -> f32 {
    w.into_iter().fold(0.0f32, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b.abs()) })
}

/// Upper bound of `|s|` that norm weights allow: `max |q_norm| max |k_norm| sqrt(dim) log2 e`, since a normed head has a length
/// of at most `sqrt(dim)`.
pub fn score_bound(q_norm: &[f32], k_norm: &[f32], head_dim: usize) -> f32 {
    largest(q_norm) * largest(k_norm) * (head_dim as f32).sqrt() * std::f32::consts::LOG2_E
}

/// Largest `|s|` that a draft's norm weights may allow, by [`draft_score_bound`]: what [`exp2`] takes. Trained drafts reach
/// 103 in this bound and a fraction of it in use. A sum that overflows all the same makes proposals worse, never a text.
pub const MAX_LOG2_DRAFT_SCORE: f32 = 120.0;

/// As [`score_bound`] for heads that are rotated by halves: rotation mixes value `t` with `t + dim / 2` and no others, so
/// the bound is the largest over such pairs.
pub fn draft_score_bound(q_norm: &[f32], k_norm: &[f32], head_dim: usize) -> f32 {
    let half = head_dim / 2;
    let pairs = (0..half)
        .map(|t| largest([&q_norm[t], &q_norm[t + half]]) * largest([&k_norm[t], &k_norm[t + half]]));
    let most = pairs.fold(0.0f32, |a, b| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) });
    most * (head_dim as f32).sqrt() * std::f32::consts::LOG2_E
}

#[cfg(test)]
mod tests;
