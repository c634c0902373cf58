//! The exponential of numbers up to 0, in plain f32 operations: vectorises, and gives the same bits on every machine.

/// `e^x` for `x <= 0`, within 2 units in the last place; 0 below -87 (where f32 has no normal numbers left).
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; `e^r` by its series, times `2^n` by the exponent's bits.
pub(crate) fn exp_nonpositive(x: f32) -> f32 {
    const LOWEST: f32 = -87.0;
    // ln 2 in two parts, the first with so few bits that its multiples are exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 * 2^23 rounds to an integer without a call.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > LOWEST { x } else { LOWEST };
    let n = (clamped * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut series = 1.0 / 5040.0;
    for factor in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        series = series * r + factor;
    }
    let scale = f32::from_bits(((n as i32 + 127) as u32) << 23);
    if x > LOWEST { series * scale } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_exponential() {
        let mut x = 0.0f32;
        while x > -86.9 {
            let exact = f64::from(x).exp();
            let error = (f64::from(exp_nonpositive(x)) - exact).abs() / exact;
            assert!(error < 2.5e-7, "{x}: {error}");
            x -= 0.000_97;
        }
        assert_eq!(exp_nonpositive(0.0), 1.0);
        for x in [-88.0, -1e6, -1e30, f32::NEG_INFINITY] {
            assert_eq!(exp_nonpositive(x), 0.0);
        }
    }
}
