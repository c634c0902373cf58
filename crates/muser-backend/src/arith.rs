//! The arithmetic that every fast backend shares, bit for bit: activation formats, K segments, order of additions.
//!
//! A matrix product of one activation row `x` (K values) and one weight row is defined like this and never otherwise:
//!
//! 1. `x` is quantised by itself. Weight types with 256-value super-blocks (Q2_K to Q6_K, IQ4_XS) and NVFP4 use one f32
//!    scale per 256 values, types with 32-value blocks (Q8_0, Q4_0, ..., MXFP4) one per 32: [`quantize_block`].
//! 2. Inside a super-block everything is an exact integer: `isum = sum_g sc[g] * sum_i q[i] * x[i]` and, for types with
//!    mins, `msum = sum_g mn[g] * sum_i x[i]`, both in i32 (they cannot overflow).
//! 3. Per super-block, ascending: `acc = fma(isum as f32, d_w * d_x, acc)`, then for types with mins
//!    `acc = fma(-(msum as f32), dmin_w * d_x, acc)`. `d_w` is the f16 scale widened to f32, each product is rounded
//!    once, `fma` rounds once. For small blocks the same per block: `isum` over the block (MXFP4:
//!    `d_w = E(e)`), and `acc = fma(xsum as f32, m_w * d_x, acc)` for Q4_1 and Q5_1. NVFP4 has sums of more than 32 bits and a
//!    rule of its own: [`nvfp4`].
//! 4. K is cut into [`Segments`], fixed per matrix; each starts from `acc = 0`, the sums are added ascending; the
//!    matrix' factor, if it has one, is multiplied onto the result.
//! 5. Float weights (F32, F16, BF16): 16 partial sums, value `k` goes to lane `k % 16` by `fma`, ascending; then lanes
//!    are added as a tree: `l[i] + l[i + 8]`, `+ 4`, `+ 2`, `+ 1`. `x` stays f32. One segment.
//!
//! Sums of products over a row or a head ([`row_dot`]): runs of 8 adjacent values by `fma`, ascending; the runs of 256
//! values are added as a tree, then these sums as a tree. A norm is `1 / sqrt(sum / len + eps)`, three roundings. The step
//! between two products adds a normed row to the residual stream and norms the sum ([`ResidualSums`]): both norms from one
//! pass over the row.
//!
//! [`exp`] is one sequence of roundings, and so are the functions made of it: [`sigmoid`], [`silu_times`], [`tanh`].
//!
//! Attention has a module of its own: [`attention`]; so has what a vision tower does besides: [`vision`].
//!
//! So one row or many, one thread or many, any instruction set and any backend give the same bits.

pub mod attention;
pub mod nvfp4;
pub mod vision;

/// Segment counts by what a matrix is for. They are part of the numeric route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixRole {
    /// q, k, v and gate projections, which read the same input.
    AttnIn,
    /// Attention output projection.
    AttnOut,
    /// FFN gate and up.
    FfnIn,
    /// FFN down.
    FfnDown,
    /// Vocabulary matrix.
    Output,
    /// The draft model's feature projection.
    DraftFc,
}

/// How K is cut for one matrix: `count` runs of 256-value blocks, as even as possible, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    count: usize,
    blocks: usize,
}

impl Segments {
    /// Segments of a matrix of this role with `k` inputs.
    pub fn of(role: MatrixRole, k: usize) -> Self {
        let blocks = k.div_ceil(256);
        let wanted = match role {
            MatrixRole::AttnIn => 3,
            MatrixRole::AttnOut | MatrixRole::FfnDown => 4,
            MatrixRole::FfnIn | MatrixRole::Output => 2,
            MatrixRole::DraftFc => 8,
        };
        Self { count: wanted.min(blocks).max(1), blocks }
    }

    /// One segment: float weights.
    pub fn whole(k: usize) -> Self {
        Self { count: 1, blocks: k.div_ceil(256) }
    }

    /// Number of segments.
    pub fn count(&self) -> usize {
        self.count
    }

    /// 256-value blocks of segment `s`: `blocks * s / count .. blocks * (s + 1) / count`.
    pub fn range(&self, s: usize) -> std::ops::Range<usize> {
        self.blocks * s / self.count..self.blocks * (s + 1) / self.count
    }
}

/// Quantises one block (256 or 32 values) to int8 and returns its scale `d`, so that `x[i]` is about `d * q[i]`.
///
/// `d = amax / 127` and `q = round_to_nearest_even(x * (127 / amax))`, every operation rounded once in f32; a block of
/// zeros has `d = 0` and all codes 0. Non-finite inputs give non-finite `d`, which shows in the result.
pub fn quantize_block(x: &[f32], q: &mut [i8]) -> f32 {
    debug_assert_eq!(x.len(), q.len());
    let mut amax = 0.0f32;
    let mut finite = true;
    for &v in x {
        amax = amax.max(v.abs());
        finite &= v.is_finite();
    }
    if !finite {
        q.fill(0);
        return f32::NAN;
    }
    let inv = if amax > 0.0 { 127.0 / amax } else { 0.0 };
    if !inv.is_finite() {
        // amax is subnormal: the block is zero for every practical purpose, and 127 / amax would overflow.
        q.fill(0);
        return 0.0;
    }
    for (q, &v) in q.iter_mut().zip(x) {
        *q = (v * inv).round_ties_even() as i8;
    }
    amax / 127.0
}

/// Values that are added one after the other in [`row_dot`].
const RUN: usize = 8;
/// Runs whose sums are added as one tree.
const BLOCK_RUNS: usize = 32;

/// `sum a[i] * b[i]` in the order of all norms.
///
/// `a` and `b` have the same length. A tree over `n` sums is one over the next power of two with zeros.
#[inline(always)]
pub fn row_dot(a: &[f32], b: &[f32]) -> f32 {
    let [sum] = row_sums(a.len(), |i, acc: &mut [f32; 1]| acc[0] = a[i].mul_add(b[i], acc[0]));
    sum
}

/// `1 / sqrt(square_sum / len + eps)`.
#[inline(always)]
pub fn inverse_rms(square_sum: f32, len: usize, eps: f32) -> f32 {
    1.0 / (square_sum / len as f32 + eps).sqrt()
}

/// Sums over a row of `h` (residual stream) and `o` (output of a product), `u = o * post_weight`: enough for the norm of
/// `o` and for the norm of `h + c u`, because `sum (h + c u)^2 = sum h^2 + 2 c sum h u + c^2 sum u^2`.
#[derive(Clone, Copy, Debug)]
pub struct ResidualSums {
    len: usize,
    oo: f32,
    hh: f32,
    hu: f32,
    uu: f32,
}

impl ResidualSums {
    /// Sums of one row; all slices have the same length.
    #[inline(always)]
    pub fn of(h: &[f32], o: &[f32], post_weight: &[f32]) -> Self {
        let len = h.len();
        let (o, post_weight) = (&o[..len], &post_weight[..len]);
        let [oo, hh, hu, uu] = row_sums(len, |i, acc: &mut [f32; 4]| {
            let u = o[i] * post_weight[i];
            acc[0] = o[i].mul_add(o[i], acc[0]);
            acc[1] = h[i].mul_add(h[i], acc[1]);
            acc[2] = h[i].mul_add(u, acc[2]);
            acc[3] = u.mul_add(u, acc[3]);
        });
        Self { len, oo, hh, hu, uu }
    }

    /// Factor `c` of the post-norm: the new residual stream is `fma(c, o * post_weight, h)`.
    #[inline(always)]
    pub fn post_factor(&self, post_eps: f32) -> f32 {
        inverse_rms(self.oo, self.len, post_eps)
    }

    /// Factor of the norm of the new residual stream.
    #[inline(always)]
    pub fn next_factor(&self, c: f32, eps: f32) -> f32 {
        let square = (c * c).mul_add(self.uu, (2.0 * c).mul_add(self.hu, self.hh));
        inverse_rms(square.max(0.0), self.len, eps)
    }
}

/// Below this [`exp`] is +0: 2^-126, the smallest normal number.
const EXP_LOWEST: f32 = -87.33654;
/// Above this [`exp`] would overflow; larger arguments are treated as this one.
const EXP_HIGHEST: f32 = 88.37626;

/// e to the power of `x`; exactly 0 below -87.33 (so for -inf), exactly 1 for 0, NaN for NaN.
///
/// `2^n * p(r)` with `n = rint(x / ln 2)` and `r = x - n ln 2` in two steps (Cody and Waite), `p` a polynomial of degree 7
/// in Horner form by `fma`. The error is below 2 ulp where the result is normal.
pub fn exp(x: f32) -> f32 {
    let clamped = if EXP_LOWEST > x { EXP_LOWEST } else { x };
    let clamped = if EXP_HIGHEST < clamped { EXP_HIGHEST } else { clamped };
    let n = (clamped * std::f32::consts::LOG2_E).round_ties_even();
    // ln 2 as a short part, whose product with n is exact, and the rest.
    let r = (-n).mul_add(0.693_359_4, clamped);
    let r = (-n).mul_add(-2.121_944_4e-4, r);
    let coefficients = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let p = coefficients.iter().fold(1.0f32 / 5040.0, |p, c| p.mul_add(r, *c));
    let scale = f32::from_bits(((n as i32 + 127) << 23) as u32);
    if x < EXP_LOWEST { 0.0 } else { p * scale }
}

/// `1 / (1 + exp(-x))`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(0.0 - x))
}

/// `gate / (1 + exp(-gate)) * up`.
pub fn silu_times(gate: f32, up: f32) -> f32 {
    gate / (1.0 + exp(0.0 - gate)) * up
}

/// `1 - 2 / (exp(2 x) + 1)`: absolute error below 2e-7.
pub fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(x + x) + 1.0)
}

/// Adds 16 lanes as a tree: `l[i] + l[i + 8]`, `+ 4`, `+ 2`, `+ 1`.
#[inline(always)]
pub fn tree16(lanes: &[f32; 16]) -> f32 {
    let mut l = *lanes;
    for step in [8, 4, 2, 1] {
        for i in 0..step {
            l[i] += l[i + step];
        }
    }
    l[0]
}

/// Rotation per position of each pair of a head: `theta^(-2 t / head_dim)` for `t` in `0..head_dim / 2`.
pub fn inverse_frequencies(theta: f64, head_dim: usize) -> Vec<f64> {
    (0..head_dim / 2).map(|t| theta.powf(-2.0 * t as f64 / head_dim as f64)).collect()
}

/// `(cos, sin)` of a pair at a position, rounded once from f64.
pub fn rotation(position: usize, inverse_frequency: f64) -> (f32, f32) {
    let (sin, cos) = (position as f64 * inverse_frequency).sin_cos();
    (cos as f32, sin as f32)
}

/// `N` sums over `0..len` side by side; `add` adds value `i` to them.
#[inline(always)]
fn row_sums<const N: usize>(len: usize, mut add: impl FnMut(usize, &mut [f32; N])) -> [f32; N] {
    let mut blocks = [[0.0f32; N]; BLOCK_RUNS];
    let mut total = [0.0f32; N];
    let block = RUN * BLOCK_RUNS;
    for (b, start) in (0..len).step_by(block).enumerate() {
        let end = (start + block).min(len);
        let mut runs = [[0.0f32; N]; BLOCK_RUNS];
        for (run, at) in runs.iter_mut().zip((start..end).step_by(RUN)) {
            for i in at..(at + RUN).min(end) {
                add(i, run);
            }
        }
        blocks[b % BLOCK_RUNS] = tree(&mut runs);
        // Rows of more than 8192 values: one tree after the other.
        if b % BLOCK_RUNS == BLOCK_RUNS - 1 || end == len {
            let sum = tree(&mut blocks);
            total = std::array::from_fn(|n| total[n] + sum[n]);
            blocks = [[0.0; N]; BLOCK_RUNS];
        }
    }
    total
}

/// `x[i] + x[i + 16]`, `+ 8`, `+ 4`, `+ 2`, `+ 1`.
#[inline(always)]
fn tree<const N: usize>(x: &mut [[f32; N]; BLOCK_RUNS]) -> [f32; N] {
    let mut step = BLOCK_RUNS / 2;
    while step > 0 {
        for i in 0..step {
            x[i] = std::array::from_fn(|n| x[i][n] + x[i + step][n]);
        }
        step /= 2;
    }
    x[0]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROLES: [MatrixRole; 6] = [
        MatrixRole::AttnIn,
        MatrixRole::AttnOut,
        MatrixRole::FfnIn,
        MatrixRole::FfnDown,
        MatrixRole::Output,
        MatrixRole::DraftFc,
    ];

    #[test]
    fn segments_cover_k_in_order() {
        for role in ROLES {
            for blocks in 1..90 {
                let segments = Segments::of(role, blocks * 256);
                let mut next = 0;
                for s in 0..segments.count() {
                    let range = segments.range(s);
                    assert_eq!(range.start, next);
                    assert!(!range.is_empty());
                    next = range.end;
                }
                assert_eq!(next, blocks);
            }
        }
    }

    #[test]
    fn quantised_values_reach_the_ends_and_zero_stays_zero() {
        let mut q = [0i8; 4];
        assert_eq!(quantize_block(&[127.0, -127.0, 0.0, 63.5], &mut q), 1.0);
        assert_eq!(q, [127, -127, 0, 64]); // 63.5 rounds to even
        assert_eq!(quantize_block(&[0.0; 4], &mut q), 0.0);
        assert_eq!(q, [0; 4]);
    }

    #[test]
    fn a_value_that_is_not_finite_shows_in_the_scale() {
        let mut q = [1i8; 2];
        assert!(quantize_block(&[f32::NAN, 1.0], &mut q).is_nan());
        assert!(quantize_block(&[f32::INFINITY, 1.0], &mut q).is_nan());
        assert_eq!(quantize_block(&[f32::from_bits(1), 0.0], &mut q), 0.0);
    }

    #[test]
    fn exp_is_close_and_exact_where_it_must_be() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(-88.0).to_bits(), 0);
        assert!(exp(f32::NAN).is_nan());
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3 + 1.7e-4;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) / exact - 1.0).abs() < 2.4e-7, "exp({x})");
            assert!((f64::from(tanh(x)) - f64::from(x).tanh()).abs() < 2e-7, "tanh({x})");
        }
    }

    /// What a warp does that holds 8 values of a block per lane: its chain, then a butterfly.
    fn warp(values: &[f32]) -> f32 {
        let mut lanes: [f32; 32] = std::array::from_fn(|lane| {
            (8 * lane..8 * lane + 8).fold(0.0, |acc, i| values.get(i).map_or(acc, |v| v.mul_add(*v, acc)))
        });
        butterfly(&mut lanes)
    }

    fn butterfly(lanes: &mut [f32; 32]) -> f32 {
        for step in [16, 8, 4, 2, 1] {
            let before = *lanes;
            for (i, lane) in lanes.iter_mut().enumerate() {
                *lane = before[i] + before[i ^ step];
            }
        }
        assert!(lanes.iter().all(|l| l.to_bits() == lanes[0].to_bits()), "every lane has the same sum");
        lanes[0]
    }

    proptest! {
        #[test]
        fn sums_are_those_of_a_card(len in 1usize..33, x in proptest::collection::vec(-10.0f32..10.0, 8192)) {
            let x = &x[..len * 250];
            let mut blocks = [0.0; 32];
            blocks.iter_mut().zip(x.chunks(256)).for_each(|(b, x)| *b = warp(x));
            prop_assert_eq!(row_dot(x, x).to_bits(), butterfly(&mut blocks).to_bits());
        }

        /// A head of 128 values, four a lane: the odd lane of a pair goes on with the even lane's chain.
        #[test]
        fn sums_of_a_head_are_those_of_a_card(x in proptest::collection::vec(-10.0f32..10.0, 128)) {
            let even: Vec<f32> = x.chunks(8).map(|x| x[..4].iter().fold(0.0, |a, v| v.mul_add(*v, a))).collect();
            let mut lanes = [0.0; 32];
            for (i, run) in x.chunks(8).enumerate() {
                lanes[i] = run[4..].iter().fold(even[i], |a, v| v.mul_add(*v, a));
            }
            prop_assert_eq!(row_dot(&x, &x).to_bits(), butterfly(&mut lanes).to_bits());
        }

        #[test]
        fn one_pass_norms_like_two(x in proptest::collection::vec((-4.0f32..4.0, -40.0f32..40.0, 0.1f32..3.0), 700)) {
            let h: Vec<f32> = x.iter().map(|v| v.0).collect();
            let o: Vec<f32> = x.iter().map(|v| v.1).collect();
            let w: Vec<f32> = x.iter().map(|v| v.2).collect();
            let sums = ResidualSums::of(&h, &o, &w);
            let c = sums.post_factor(1e-8);
            let mean = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>() / 700.0;
            let exact_c = 1.0 / (mean(&mut o.iter().map(|v| f64::from(*v))) + 1e-8).sqrt();
            let sum = h.iter().zip(&o).zip(&w).map(|((h, o), w)| f64::from(*h) + exact_c * f64::from(*o) * f64::from(*w));
            let exact_r = 1.0 / (mean(&mut { sum }) + 1e-5).sqrt();
            prop_assert!((f64::from(c) / exact_c - 1.0).abs() < 1e-6);
            prop_assert!((f64::from(sums.next_factor(c, 1e-5)) / exact_r - 1.0).abs() < 2e-6);
        }

        #[test]
        fn error_is_at_most_half_a_step(x in proptest::collection::vec(-1e6f32..1e6, 256)) {
            let mut q = [0i8; 256];
            let d = quantize_block(&x, &mut q);
            for (x, q) in x.iter().zip(q) {
                prop_assert!((x - d * f32::from(q)).abs() <= d * 0.5001);
            }
        }
    }
}
