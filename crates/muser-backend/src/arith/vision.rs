//! What a vision tower computes besides products and attention: the order of its patches, the values of bytes, positions, layer
//! norms, GELU and the rotation by two axes; every function a fixed sequence of roundings.
//!
//! Patches are ordered window by window (windows in raster order, patches inside a window in raster order), so that a window is a
//! run of rows. In layers with windows each window's K and V begin in a block of their own; in full layers the blocks are filled by
//! all patches in this order. Attention is that of the text model with 16-bit K and V and a running maximum ([`attention`]), every
//! patch seeing all keys of its run.
//!
//! One row: `x = product + P` with `P` the chain of [`position`]; norms by [`layer_norm`]; a product's bias is added to the finished
//! product, `q` and `k` rotate then (`a c - b s`, `a s + b c`, each operation rounded), `h = h + (product + bias)`, [`gelu`] of
//! `product + bias`.

pub mod attention;

use super::{inverse_rms, row_sums};

/// The numeric route of every backend that computes a tower like this: equal names, equal bits. Its number rises when any bit of any
/// row may change.
pub const ROUTE: &str = "exact-tower-1";

/// Base of the rotation, on both axes.
pub const ROPE_THETA: f64 = 10_000.0;

/// Where a patch of a picture that is not square looks into the position table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PositionRule {
    /// At its own row and column, stretched to the table.
    #[default]
    Raster,
    /// As transformers 5.24 reads it: the flat order of the patches taken for that of a picture with rows and columns swapped. For
    /// square pictures the same.
    Reference,
}

impl PositionRule {
    /// All rules.
    pub const ALL: [PositionRule; 2] = [PositionRule::Raster, PositionRule::Reference];

    /// `raster` or `reference`.
    pub fn name(self) -> &'static str {
        match self {
            PositionRule::Raster => "raster",
            PositionRule::Reference => "reference",
        }
    }

    /// The rule of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| rule.name() == name)
    }
}

/// Values of the bytes of each colour: `(byte - 255 mean) / (255 std)`, two roundings. (A byte over 255 first differs in the last
/// bit for half of all bytes.)
pub fn values_of_bytes(mean: [f32; 3], std: [f32; 3]) -> [[f32; 256]; 3] {
    std::array::from_fn(|colour| {
        let (mean, std) = (255.0 * mean[colour], 255.0 * std[colour]);
        std::array::from_fn(|byte| (byte as f32 - mean) / std)
    })
}

/// Rows and columns of patches of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchGrid {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl PatchGrid {
    /// Patches.
    pub fn count(self) -> usize {
        self.rows * self.cols
    }

    /// Row and column of every patch in the order of the tower, whose windows have `side` patches a side, and the patches
    /// after each window.
    pub fn order(self, side: usize) -> (Vec<(usize, usize)>, Vec<usize>) {
        let (mut order, mut ends) = (Vec::with_capacity(self.count()), Vec::new());
        for top in (0..self.rows).step_by(side) {
            for left in (0..self.cols).step_by(side) {
                for y in top..(top + side).min(self.rows) {
                    order.extend((left..(left + side).min(self.cols)).map(|x| (y, x)));
                }
                ends.push(order.len());
            }
        }
        (order, ends)
    }
}

/// The patch of `size` pixels a side at row `y` and column `x` of a picture that is `cols` patches wide, as values ordered colour,
/// row, column. `rgb` is ordered row, column, colour.
pub fn patch(
    rgb: &[u8],
    cols: usize,
    size: usize,
    (y, x): (usize, usize),
    values: &[[f32; 256]; 3],
    out: &mut [f32],
) {
    let width = cols * size;
    for (colour, out) in out.chunks_exact_mut(size * size).enumerate() {
        for (line, out) in out.chunks_exact_mut(size).enumerate() {
            let at = (y * size + line) * width + x * size;
            for (i, out) in out.iter_mut().enumerate() {
                *out = values[colour][usize::from(rgb[(at + i) * 3 + colour])];
            }
        }
    }
}

/// The four places of the position table (`side` places a side) that a patch reads, and their weights: bilinear, what lies off the
/// table weighs nothing.
pub fn position_taps(
    rule: PositionRule,
    grid: PatchGrid,
    (y, x): (usize, usize),
    side: usize,
) -> [(usize, f64); 4] {
    let (row, col, rows, cols) = match rule {
        PositionRule::Raster => (y, x, grid.rows, grid.cols),
        PositionRule::Reference => {
            let flat = y * grid.cols + x;
            (flat / grid.rows, flat % grid.rows, grid.cols, grid.rows)
        }
    };
    let axis = |at: usize, count: usize| {
        let place = (at as f64 + 0.5) * side as f64 / count as f64 - 0.5;
        let low = place.floor();
        [(low, 1.0 - (place - low)), (low + 1.0, place - low)].map(|(place, weight)| {
            let on = place >= 0.0 && place < side as f64;
            (place.clamp(0.0, (side - 1) as f64) as usize, if on { weight } else { 0.0 })
        })
    };
    let (rows, cols) = (axis(row, rows), axis(col, cols));
    let tap = |r: (usize, f64), c: (usize, f64)| (r.0 * side + c.0, r.1 * c.1);
    [tap(rows[0], cols[0]), tap(rows[0], cols[1]), tap(rows[1], cols[0]), tap(rows[1], cols[1])]
}

/// Value `i` of a patch's position: a chain of `fma` over the taps, their weights rounded once, from +0.
#[inline(always)]
pub fn position(taps: &[(usize, f32); 4], table: &[f32], hidden: usize, i: usize) -> f32 {
    taps.iter().fold(0.0, |sum, (place, weight)| weight.mul_add(table[place * hidden + i], sum))
}

/// Mean of a row and the inverse of its spread: sums in the order of all norms.
#[inline(always)]
pub fn layer_stats(x: &[f32], eps: f32) -> (f32, f32) {
    let [sum] = row_sums(x.len(), |i, acc: &mut [f32; 1]| acc[0] += x[i]);
    let mean = sum / x.len() as f32;
    let [square] = row_sums(x.len(), |i, acc: &mut [f32; 1]| {
        let d = x[i] - mean;
        acc[0] = d.mul_add(d, acc[0]);
    });
    (mean, inverse_rms(square, x.len(), eps))
}

/// `fma((x - mean) r, weight, bias)`.
pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let (mean, r) = layer_stats(x, eps);
    for (i, out) in out.iter_mut().enumerate() {
        *out = ((x[i] - mean) * r).mul_add(weight[i], bias[i]);
    }
}

/// `-ln(erfc(t / sqrt 2) / 2)` for `t` from 0 on, ascending powers: least squares with the weights that [`gelu`] needs. It grows
/// for all `t`, and what it is beyond 6.5 does not matter.
pub const GELU_EXPONENT: [f32; 9] = [
    std::f32::consts::LN_2,
    0.797_887_15,
    0.318_282_13,
    0.036_440_77,
    -0.004_975_463_7,
    0.000_157_378_67,
    0.000_102_622_49,
    -2.162_890_6e-5,
    1.484_444e-6,
];

/// `x (1 + erf(x / sqrt 2)) / 2` as `max(x, 0) - |x| exp(-q(|x|))`, `q` in Horner form by `fma`: one piece for all `x`. The error is
/// below 1e-7 of `|x|`.
pub fn gelu(x: f32) -> f32 {
    let t = f32::from_bits(x.to_bits() & 0x7fff_ffff);
    let [head @ .., top] = GELU_EXPONENT;
    let q = head.iter().rev().fold(top, |q, c| q.mul_add(t, *c));
    let positive = if x > 0.0 { x } else { 0.0 };
    (-t).mul_add(super::exp(0.0 - q), positive)
}

/// `cos` and `sin` of the pairs of one axis at a place, which counts from 1.
pub fn axis_rotation(place: usize, inverse_frequencies: &[f64], cos: &mut [f32], sin: &mut [f32]) {
    for ((frequency, cos), sin) in inverse_frequencies.iter().zip(cos).zip(sin) {
        (*cos, *sin) = super::rotation(place + 1, *frequency);
    }
}

/// `cos` of a head's pairs, then `sin`, of each patch of `order`: columns turn the first half of the pairs, rows the second.
pub fn rotations(head_dim: usize, order: &[(usize, usize)], grid: PatchGrid) -> Vec<f32> {
    let frequencies = axis_frequencies(head_dim);
    let quarter = frequencies.len();
    let longest = grid.rows.max(grid.cols);
    let (mut cos, mut sin) = (vec![0.0; longest * quarter], vec![0.0; longest * quarter]);
    for (place, (cos, sin)) in cos.chunks_mut(quarter).zip(sin.chunks_mut(quarter)).enumerate() {
        axis_rotation(place, &frequencies, cos, sin);
    }
    let mut all = Vec::with_capacity(order.len() * head_dim);
    for (y, x) in order {
        for table in [&cos, &sin] {
            all.extend_from_slice(&table[x * quarter..][..quarter]);
            all.extend_from_slice(&table[y * quarter..][..quarter]);
        }
    }
    all
}

/// Rotation of each pair of a head along one axis: half of the pairs turn by the column, the other half by the row.
pub fn axis_frequencies(head_dim: usize) -> Vec<f64> {
    super::inverse_frequencies(ROPE_THETA, head_dim / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gelu_is_close_everywhere() {
        let exact = |x: f64| crate::reference::gelu(x);
        for i in -200_000..200_000 {
            let x = i as f32 * 1e-4;
            let error = (f64::from(gelu(x)) - exact(f64::from(x))).abs();
            assert!(error <= 1.2e-7 * f64::from(x.abs()), "gelu({x}) = {}, {error} off", gelu(x));
        }
        assert_eq!(gelu(0.0).to_bits(), 0);
        assert_eq!(gelu(-0.0), 0.0);
        assert_eq!((gelu(1e30), gelu(-1e30), gelu(-50.0)), (1e30, 0.0, 0.0));
        assert!(gelu(f32::NAN).is_nan());
    }

    #[test]
    fn a_byte_has_the_value_of_the_reference() {
        let [red, green, blue] = values_of_bytes([0.5; 3], [0.5; 3]);
        assert_eq!((red, green), (green, blue));
        for (byte, value) in red.iter().enumerate() {
            assert_eq!(*value, (byte as f32 - 127.5) / 127.5);
        }
        let other = (0..256).filter(|byte| red[*byte] != (*byte as f32 / 255.0 - 0.5) / 0.5).count();
        assert_eq!(other, 128, "a byte over 255 first would be another value");
    }

    #[test]
    fn patches_are_ordered_window_by_window() {
        let (order, ends) = PatchGrid { rows: 3, cols: 4 }.order(2);
        let expected =
            [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)];
        assert_eq!((order.as_slice(), ends.as_slice()), (expected.as_slice(), [4, 8, 10, 12].as_slice()));
    }

    #[test]
    fn a_grid_of_the_size_of_the_table_reads_each_place_alone() {
        for rule in PositionRule::ALL {
            for y in 0..6 {
                for x in 0..6 {
                    let taps = position_taps(rule, PatchGrid { rows: 6, cols: 6 }, (y, x), 6);
                    assert_eq!((taps[0].0, taps[0].1), (y * 6 + x, 1.0));
                    assert!(taps[1..].iter().all(|(_, weight)| *weight == 0.0));
                }
            }
        }
    }

    #[test]
    fn a_finer_grid_loses_weight_beyond_the_border_and_nowhere_else() {
        let grid = PatchGrid { rows: 12, cols: 12 };
        let sum =
            |y, x| position_taps(PositionRule::Raster, grid, (y, x), 6).iter().map(|tap| tap.1).sum::<f64>();
        assert_eq!((sum(5, 5), sum(0, 5), sum(0, 0), sum(11, 6)), (1.0, 0.75, 0.5625, 0.75));
        // Only a picture that is not square tells the rules apart.
        let wide = PatchGrid { rows: 4, cols: 8 };
        let at = |rule| position_taps(rule, wide, (1, 3), 6);
        assert_ne!(at(PositionRule::Raster), at(PositionRule::Reference));
    }

    #[test]
    fn a_norm_has_the_mean_and_spread_of_its_weight() {
        let x: Vec<f32> = (0..192).map(|i| (i as f32 * 0.7).sin() * 5.0 + 3.0).collect();
        let mut out = vec![0.0; 192];
        layer_norm(&x, &[2.0; 192], &[0.5; 192], 1e-5, &mut out);
        let mean: f32 = out.iter().sum::<f32>() / 192.0;
        let spread = (out.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 192.0).sqrt();
        assert!((mean - 0.5).abs() < 1e-5 && (spread - 2.0).abs() < 1e-4, "{mean} {spread}");
    }
}
