//! The operations of the model on one row, with sums in f64.

/// `x = x / sqrt(mean(x^2) + eps) * weight`, in place; without a weight the last factor is left out.
pub(super) fn rms_norm(x: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    let mean = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / x.len() as f64;
    let inv = 1.0 / (mean + f64::from(eps)).sqrt();
    for (i, v) in x.iter_mut().enumerate() {
        let w = weight.map_or(1.0, |w| f64::from(w[i]));
        *v = (f64::from(*v) * inv * w) as f32;
    }
}

/// Rotary embedding of one head at position `pos`: pairs `(x[2t], x[2t+1])` turn by `pos * theta^(-2t/d)`.
pub(super) fn rope(x: &mut [f32], pos: usize, theta: f32) {
    for t in 0..x.len() / 2 {
        rotate(x, (2 * t, 2 * t + 1), t, pos, theta);
    }
}

/// The same with pairs `(x[t], x[t + d/2])`, as the draft model has them.
pub(super) fn rope_halves(x: &mut [f32], pos: usize, theta: f32) {
    let half = x.len() / 2;
    for t in 0..half {
        rotate(x, (t, t + half), t, pos, theta);
    }
}

fn rotate(x: &mut [f32], (i, j): (usize, usize), t: usize, pos: usize, theta: f32) {
    let angle = pos as f64 * f64::from(theta).powf(-2.0 * t as f64 / x.len() as f64);
    let (sin, cos) = angle.sin_cos();
    let (a, b) = (f64::from(x[i]), f64::from(x[j]));
    x[i] = (a * cos - b * sin) as f32;
    x[j] = (a * sin + b * cos) as f32;
}

/// `sum_i a[i] * b[i]`, in eight interleaved f64 sums.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    dot_wide(a, b) as f32
}

/// The same before it is rounded.
pub(super) fn dot_wide(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    for (a, b) in a8.iter().zip(b8) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += f64::from(*a) * f64::from(*b);
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    lanes.iter().sum::<f64>() + rest
}

/// `1 / (1 + exp(-x))`.
pub(super) fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(x)).exp())) as f32
}

/// `x (1 + erf(x / sqrt 2)) / 2`.
pub(crate) fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2))
}

/// `2 / sqrt(pi) exp(-x^2) sum 2^n x^(2n + 1) / (1 3 5 .. (2n + 1))`: all terms have one sign.
fn erf(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > 1e-17 * sum.abs() {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// `x * sigmoid(x)`.
pub(super) fn silu(x: f32) -> f32 {
    (f64::from(x) / (1.0 + (-f64::from(x)).exp())) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norm_gives_the_multiplier_as_rms() {
        let mut x: Vec<f32> = (0..128).map(|i| (i as f32 * 0.37).sin() * 5.0).collect();
        rms_norm(&mut x, Some(&[3.87; 128]), 1e-5);
        let rms = (x.iter().map(|v| v * v).sum::<f32>() / 128.0).sqrt();
        assert!((rms - 3.87).abs() < 1e-4, "{rms}");
    }

    #[test]
    fn rope_at_position_zero_is_the_identity_and_keeps_pair_norms() {
        let x: Vec<f32> = (0..64).map(|i| i as f32 - 31.5).collect();
        let mut y = x.clone();
        rope(&mut y, 0, 500_000.0);
        assert_eq!(x, y);
        rope(&mut y, 77, 500_000.0);
        for (a, b) in x.chunks(2).zip(y.chunks(2)) {
            assert!((a[0].hypot(a[1]) - b[0].hypot(b[1])).abs() < 1e-4);
        }
        // The first pair turns by exactly `pos` radians.
        let angle = y[1].atan2(y[0]) - x[1].atan2(x[0]);
        assert!(((f64::from(angle) - 77.0).rem_euclid(std::f64::consts::TAU)).min(1e-5) <= 1e-5);
    }

    #[test]
    fn erf_has_its_known_values() {
        for (x, expected) in [
            (0.0, 0.0),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (5.0, 0.999_999_999_998_462_5),
            (9.0, 1.0),
        ] {
            assert!((erf(x) - expected).abs() < 1e-15 && (erf(-x) + expected).abs() < 1e-15, "erf({x})");
        }
    }

    #[test]
    fn dot_takes_lengths_that_are_no_multiple_of_eight() {
        let a: Vec<f32> = (1..=11).map(|i| i as f32).collect();
        assert_eq!(dot(&a, &a), 506.0);
    }
}
