//! Attention of a vision tower: that of [`super::super::attention`] with 16 bits, for scores that nothing bounds.
//!
//! A tower's q and k are not normed, so a running maximum is carried. It is a whole number of log2: taking a smaller one back is then
//! a product with a power of two, which does not round. What differs from the text model's definition, point by point:
//!
//! 1. *Score* `s` is kept within [`MOST_SCORE`]; `n = rint(s)`.
//! 2. *Maximum* of a unit: the largest `n` of the positions that are seen, and of the maximum before it in the block ([`NO_PEAK`] at
//!    its begin). What the block had gathered is taken along: `O = O * c`, `L = L * c` with `c` = [`decay`] of the difference.
//! 3. *Probability* `p = 2^(s - n)` by the same polynomial, its exponent raised by `n - maximum`, at least [`LEAST_SHIFT`].
//! 4. *Row*: with `M` the larger maximum of row and block, both are multiplied with their decay to it, then added.
//!
//! All patches of a run see all of its keys: there is no mask besides its end.

use super::super::attention::{
    Digits, EXP2, StoredHead, TOP_16, UNIT, UnitScale, digits, hadamard, quantize, score_factor,
};
use super::super::tree16;

/// Largest `|s|`; rows beyond it are those of a tower that computes nothing any more.
pub const MOST_SCORE: f32 = 1e6;
/// The maximum of nothing: below every score by more than [`decay`] keeps.
pub const NO_PEAK: f32 = -1e7;
/// A position's weight is at least two to the power of this.
pub const LEAST_SHIFT: f32 = -100.0;

/// What 0 or a negative whole number of log2 makes of a sum; 0 below 2^-126.
#[inline(always)]
pub fn decay(difference: f32) -> f32 {
    if difference < -126.0 { 0.0 } else { f32::from_bits(((difference as i32 + 127) as u32) << 23) }
}

/// The whole definition in scalar code: one query (before [`hadamard`]) over all keys of its run.
pub fn attend(q: &[f32], keys: &[StoredHead], values: &[StoredHead]) -> Vec<f32> {
    let dim = q.len();
    let mut rotated = q.to_vec();
    hadamard(&mut rotated);
    let mut codes = vec![0i16; dim];
    let f = quantize(&rotated, TOP_16, true, &mut codes) * score_factor(dim, Digits::Two);
    if !f.is_finite() {
        return vec![f32::NAN; dim];
    }
    let mut row = Gathered::new(dim);
    for block in (0..keys.len()).step_by(4 * UNIT) {
        let mut gathered = Gathered::new(dim);
        for unit in (block..(block + 4 * UNIT).min(keys.len())).step_by(UNIT) {
            let end = (unit + UNIT).min(keys.len());
            gathered.unit(&codes, f, &keys[unit..end], &values[unit..end]);
        }
        row.block(&gathered);
    }
    let inverse = 1.0 / row.l;
    row.o.iter().map(|o| o * inverse).collect()
}

struct Gathered {
    peak: f32,
    l: f32,
    o: Vec<f32>,
}

impl Gathered {
    fn new(dim: usize) -> Self {
        Self { peak: NO_PEAK, l: 0.0, o: vec![0.0; dim] }
    }

    fn unit(&mut self, codes: &[i16], f: f32, keys: &[StoredHead], values: &[StoredHead]) {
        let pair = |stored: &StoredHead, d: usize| (stored.hi[d], stored.lo[d]);
        let scores: Vec<f32> = keys
            .iter()
            .map(|key| {
                let t = product(codes.iter().enumerate().map(|(d, c)| (digits(*c), pair(key, d))));
                let s = t as f32 * key.d * f;
                let s = if s > -MOST_SCORE { s } else { -MOST_SCORE };
                if s < MOST_SCORE { s } else { MOST_SCORE }
            })
            .collect();
        let peak = scores.iter().fold(self.peak, |peak, s| peak.max(s.round_ties_even()));
        let taken = decay(self.peak - peak);
        self.peak = peak;
        let (mut lanes, mut scaled, mut largest) = ([0.0f32; 16], [0.0f32; UNIT], 0.0f32);
        for (j, (s, value)) in scores.iter().zip(values).enumerate() {
            let n = s.round_ties_even();
            let r = s - n;
            let p = EXP2[1..].iter().fold(EXP2[0], |p, c| p.mul_add(r, *c));
            let shift = (n - peak).max(LEAST_SHIFT) as i32;
            let p = f32::from_bits(p.to_bits().wrapping_add((shift << 23) as u32));
            lanes[j % 16] += p;
            scaled[j] = p * value.d;
            largest = largest.max(scaled[j]);
        }
        let scale = UnitScale::of(largest, Digits::Two);
        self.l = self.l * taken + tree16(&lanes);
        for (d, o) in self.o.iter_mut().enumerate() {
            let weights = values.iter().zip(&scaled).map(|(v, p)| (digits(scale.code(*p)), pair(v, d)));
            *o = (product(weights) as f32).mul_add(scale.weight, *o * taken);
        }
    }

    fn block(&mut self, block: &Self) {
        let peak = self.peak.max(block.peak);
        let (here, there) = (decay(self.peak - peak), decay(block.peak - peak));
        self.peak = peak;
        self.l = self.l * here + block.l * there;
        for (o, b) in self.o.iter_mut().zip(&block.o) {
            *o = *o * here + *b * there;
        }
    }
}

/// `256 sum ah bh + sum (ah bl + al bh)`.
fn product(pairs: impl Iterator<Item = ((i8, i8), (i8, i8))>) -> i32 {
    pairs.fold(0, |sum, (a, b)| {
        let [ah, al, bh, bl] = [a.0, a.1, b.0, b.1].map(i32::from);
        sum + 256 * (ah * bh) + ah * bl + al * bh
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;

    fn exact(q: &[f32], k: &[Vec<f32>], v: &[Vec<f32>]) -> Vec<f64> {
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let scores: Vec<f64> = k.iter().map(|k| dot(q, k) / (q.len() as f64).sqrt()).collect();
        let top = scores.iter().fold(f64::MIN, |a, b| a.max(*b));
        let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let of = |d: usize| v.iter().zip(&weights).map(|(v, w)| f64::from(v[d]) * w).sum::<f64>() / sum;
        (0..q.len()).map(of).collect()
    }

    /// Whatever the scores are, however many keys there are: near what softmax says.
    #[test]
    fn it_is_softmax_for_small_and_large_scores() {
        let mut random = Random::new(3);
        for (dim, keys) in [(64, 1), (96, 63), (64, 300), (96, 700)] {
            for size in [0.01f32, 1.0, 6.0, 40.0, 3000.0] {
                let mut head = |size: f32| -> Vec<f32> {
                    (0..dim).map(|_| size * (random.below(20_001) as f32 / 10_000.0 - 1.0)).collect()
                };
                let q = head(size);
                let k: Vec<Vec<f32>> = (0..keys).map(|_| head(size)).collect();
                let v: Vec<Vec<f32>> = (0..keys).map(|_| head(2.0)).collect();
                let stored_key = |k: &Vec<f32>| {
                    let mut k = k.clone();
                    hadamard(&mut k);
                    StoredHead::of(&k, Digits::Two)
                };
                let stored_keys: Vec<_> = k.iter().map(stored_key).collect();
                let stored_values: Vec<_> = v.iter().map(|v| StoredHead::of(v, Digits::Two)).collect();
                let found = attend(&q, &stored_keys, &stored_values);
                // Codes of 16 bits cost a score up to about its size over 2^16.
                let bound = 1e-3 + 2e-5 * f64::from(size * size) * (dim as f64).sqrt();
                for (found, expected) in found.iter().zip(exact(&q, &k, &v)) {
                    assert!(
                        (f64::from(*found) - expected).abs() < bound.min(4.1),
                        "{dim} {keys} {size}: {found} {expected}"
                    );
                    assert!(found.abs() <= 2.001, "an average of values");
                }
            }
        }
    }

    #[test]
    fn a_query_that_is_not_finite_says_so_and_a_score_that_is_none_does_no_harm() {
        let key = StoredHead::of(&[1e37; 16], Digits::Two);
        let value = StoredHead::of(&[1.0; 16], Digits::Two);
        let of = |x: f32| attend(&[x; 16], std::slice::from_ref(&key), std::slice::from_ref(&value));
        assert!(of(f32::NAN).iter().chain(&of(f32::INFINITY)).all(|x| x.is_nan()));
        for x in [1e37, -1e37, 0.0, 1e-40] {
            assert!(of(x).iter().all(|x| (x - 1.0).abs() < 1e-3), "{x}");
        }
        assert_eq!((decay(0.0), decay(-1.0), decay(-126.0), decay(-127.0)), (1.0, 0.5, 2f32.powi(-126), 0.0));
    }
}
