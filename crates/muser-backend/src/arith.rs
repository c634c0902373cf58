//! The arithmetic that every fast backend shares, bit for bit: activation formats, K segments, order of additions.
//!
//! A matrix product of one activation row `x` (K values) and one weight row is defined like this and never otherwise:
//!
//! 1. `x` is quantised by itself. Weight types with 256-value super-blocks (Q2_K to Q6_K, IQ4_XS) use one f32 scale per
//!    256 values, types with 16- to 64-value blocks (Q8_0, Q4_0, ..., NVFP4) one per 32: [`quantize_block`].
//! 2. Inside a super-block everything is an exact integer: `isum = sum_g sc[g] * sum_i q[i] * x[i]` and, for types with
//!    mins, `msum = sum_g mn[g] * sum_i x[i]`, both in i32 (they cannot overflow).
//! 3. Per super-block, ascending: `acc = fma(isum as f32, d_w * d_x, acc)`, then for types with mins
//!    `acc = fma(-(msum as f32), dmin_w * d_x, acc)`. `d_w` is the f16 scale widened to f32, each product is rounded
//!    once, `fma` rounds once. For small blocks the same per block: `isum` over the block (NVFP4: over 16 values, whose
//!    scale is `U(d[g])`; MXFP4: `d_w = E(e)`), and `acc = fma(xsum as f32, m_w * d_x, acc)` for Q4_1 and Q5_1.
//! 4. K is cut into [`Segments`], fixed per matrix; each starts from `acc = 0`, the sums are added ascending.
//! 5. Float weights (F32, F16, BF16): 16 partial sums, value `k` goes to lane `k % 16` by `fma`, ascending; then lanes
//!    are added as a tree: `l[i] + l[i + 8]`, `+ 4`, `+ 2`, `+ 1`. `x` stays f32. One segment.
//!
//! So one row or many, one thread or many, and any instruction set give the same bits.

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

    proptest! {
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
