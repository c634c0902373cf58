//! From floats to the types of a GGUF file.

use std::cmp::Ordering;

use half::{bf16, f16};

/// Values of an NVFP4 block and bytes it takes.
const FP4_BLOCK: usize = 64;
pub(crate) const FP4_BLOCK_BYTES: usize = 36;
/// Largest E2M1 number and largest E4M3 number.
const E2M1_TOP: f32 = 6.0;
const E4M3_TOP: f32 = 448.0;
/// Code of the latter.
const E4M3_TOP_CODE: i32 = 0x7E;
/// How many codes beside the plain one a block's scale is looked for, on both sides.
const REACH: i32 = 8;

/// Rounds to bf16, ties to even.
pub(crate) fn to_bf16(values: &[f32], out: &mut [u8]) {
    for (value, out) in values.iter().zip(out.chunks_exact_mut(2)) {
        out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes());
    }
}

/// Widens or keeps.
pub(crate) fn to_f32(values: &[f32], out: &mut [u8]) {
    for (value, out) in values.iter().zip(out.chunks_exact_mut(4)) {
        out.copy_from_slice(&value.to_le_bytes());
    }
}

/// Blocks of 32 with an f16 scale, as everybody makes them: `d = amax / 127`, codes rounded half away from zero.
pub(crate) fn to_q8_0(values: &[f32], out: &mut [u8]) {
    for (values, out) in values.chunks_exact(32).zip(out.chunks_exact_mut(34)) {
        let amax = values.iter().fold(0.0f32, |amax, value| amax.max(value.abs()));
        let d = amax / 127.0;
        let inverse = if d > 0.0 { 1.0 / d } else { 0.0 };
        let inverse = if inverse.is_finite() { inverse } else { 0.0 };
        out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
        for (value, out) in values.iter().zip(&mut out[2..]) {
            *out = (value * inverse).round().clamp(-127.0, 127.0) as i8 as u8;
        }
    }
}

/// The factor of a matrix whose largest magnitude is `amax`: then the largest block scale is the largest E4M3 number.
pub(crate) fn fp4_factor(amax: f32) -> f32 {
    let factor = amax / (E2M1_TOP * E4M3_TOP);
    if factor.is_normal() { factor } else { 1.0 }
}

/// Encodes whole rows. For every 16 values each scale up to [`REACH`] codes from that of the largest magnitude is tried, and the
/// one of least squared error is taken; of equal ones the nearest, and then the smaller.
pub(crate) fn to_nvfp4(values: &[f32], factor: f32, out: &mut [u8]) {
    let inverse = 1.0 / factor;
    for (values, out) in values.chunks_exact(FP4_BLOCK).zip(out.chunks_exact_mut(FP4_BLOCK_BYTES)) {
        let (scales, codes) = out.split_at_mut(4);
        for ((values, scale), codes) in values.chunks_exact(16).zip(scales).zip(codes.chunks_exact_mut(8)) {
            let mut x = [0.0f32; 16];
            x.iter_mut().zip(values).for_each(|(x, value)| *x = value * inverse);
            *scale = best_scale(&x);
            let found = fp4_codes(&x, *scale);
            for (j, byte) in codes.iter_mut().enumerate() {
                *byte = found[j] | found[j + 8] << 4;
            }
        }
    }
}

/// The scale's code of least squared error for 16 values in units of the factor.
fn best_scale(x: &[f32; 16]) -> u8 {
    let magnitudes = x.map(f32::abs);
    let amax = magnitudes.iter().fold(0.0f32, |amax, value| amax.max(*value));
    let plain = i32::from(e4m3_code(amax / E2M1_TOP));
    if amax == 0.0 {
        return 0;
    }
    let mut best = (f32::INFINITY, 0u8);
    for step in 0..=2 * REACH {
        // 0, -1, 1, -2, 2, ...
        let offset = if step % 2 == 0 { step / 2 } else { -(step + 1) / 2 };
        let code = plain + offset;
        if (1..=E4M3_TOP_CODE).contains(&code) {
            let error = squared_error(&magnitudes, e4m3_value(code as u8));
            if error < best.0 {
                best = (error, code as u8);
            }
        }
    }
    best.1
}

/// `sum (x - scale * q)^2` with `q` the nearest E2M1 number to `x / scale`.
fn squared_error(magnitudes: &[f32; 16], scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    // Four sums side by side, so that the compiler may take vectors.
    let mut sums = [0.0f32; 4];
    for magnitudes in magnitudes.as_chunks::<4>().0 {
        for (sum, x) in sums.iter_mut().zip(magnitudes) {
            let off = x - scale * e2m1_round(x * inverse);
            *sum += off * off;
        }
    }
    (sums[0] + sums[2]) + (sums[1] + sums[3])
}

/// The nearest magnitude of E2M1, ties to the even code.
///
/// Its numbers are 0.5 apart up to 2, then 1, then 2: a quarter of the power of two below, or half. Adding that power times 2^22
/// leaves no more bits, rounded to the nearest with ties to even.
#[inline(always)]
fn e2m1_round(a: f32) -> f32 {
    let power = f32::from_bits(a.to_bits() & 0x7f80_0000);
    let shift = (if power > 1.0 { power } else { 1.0 }) * 4_194_304.0;
    let rounded = (a + shift) - shift;
    if rounded < E2M1_TOP { rounded } else { E2M1_TOP }
}

/// Codes of 16 values: sign and magnitude.
fn fp4_codes(x: &[f32; 16], scale: u8) -> [u8; 16] {
    let scale = e4m3_value(scale);
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    x.map(|x| {
        let a = x.abs() * inverse;
        let code = u8::from(a > 0.25)
            + u8::from(a >= 0.75)
            + u8::from(a > 1.25)
            + u8::from(a >= 1.75)
            + u8::from(a > 2.5)
            + u8::from(a >= 3.5)
            + u8::from(a > 5.0);
        // Zero has one code.
        if x < 0.0 && code > 0 { code | 8 } else { code }
    })
}

/// The numbers of the positive E4M3 codes.
static E4M3: [f32; E4M3_TOP_CODE as usize + 1] = {
    let mut table = [0.0; E4M3_TOP_CODE as usize + 1];
    let mut code = 0;
    while code < table.len() {
        let (exponent, mantissa) = (code >> 3, code & 7);
        table[code] = match exponent {
            0 => mantissa as f32 / 512.0,
            // (8 + m) * 2^(e - 10)
            _ => (8 + mantissa) as f32 * f32::from_bits((exponent as u32 + 117) << 23),
        };
        code += 1;
    }
    table
};

/// The number of a positive E4M3 code.
fn e4m3_value(code: u8) -> f32 {
    E4M3[usize::from(code)]
}

/// The code of the nearest positive E4M3 number, ties to the even one, no further than the largest.
fn e4m3_code(value: f32) -> u8 {
    // Codes of positive numbers ascend with them: the last one that is not above the value, then the nearer of two.
    let (mut low, mut high) = (0u8, E4M3_TOP_CODE as u8);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if e4m3_value(middle) <= value {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    if low == E4M3_TOP_CODE as u8 {
        return low;
    }
    let (below, above) = (value - e4m3_value(low), e4m3_value(low + 1) - value);
    match below.partial_cmp(&above) {
        Some(Ordering::Less) => low,
        Some(Ordering::Equal) => low + (low & 1),
        _ => low + 1,
    }
}

#[cfg(test)]
mod tests {
    use muser_gguf::{GgmlType, dequantize_row};

    use super::*;

    fn noise(count: usize, mut state: u32) -> Vec<f32> {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..count).map(|_| (0..6).map(|_| next()).sum::<f32>()).collect()
    }

    fn decoded(values: &[f32], factor: f32) -> Vec<f32> {
        let mut bytes = vec![0; values.len() / FP4_BLOCK * FP4_BLOCK_BYTES];
        to_nvfp4(values, factor, &mut bytes);
        let mut back = vec![0.0; values.len()];
        dequantize_row(GgmlType::NVFP4, &bytes, &mut back).expect("decodes");
        back.iter_mut().for_each(|value| *value *= factor);
        back
    }

    #[test]
    fn numbers_of_the_format_come_back() {
        let numbers = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let values: Vec<f32> = (0..64)
            .map(|i| {
                let scale = [448.0, 1.0, 0.25, 1.0 / 512.0][i / 16];
                let sign = if i % 16 < 8 { 1.0 } else { -1.0 };
                sign * numbers[i % 8] * scale * 0.125
            })
            .collect();
        assert_eq!(fp4_factor(6.0 * 448.0 * 0.125), 0.125);
        assert_eq!(decoded(&values, 0.125), values);
        assert_eq!(decoded(&[0.0; 64], fp4_factor(0.0)), [0.0; 64]);
    }

    #[test]
    fn rounding_is_to_the_nearest_and_ties_to_even() {
        let ties = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)];
        for (tie, even) in ties {
            assert_eq!(e2m1_round(tie), even, "{tie}");
            assert!(e2m1_round(tie * 1.001) > e2m1_round(tie * 0.999));
        }
        for code in 0..0x7E {
            assert_eq!(e4m3_value(code), 2.0 * muser_gguf::nvfp4_scale(code));
            let (low, high) = (e4m3_value(code), e4m3_value(code + 1));
            assert_eq!(e4m3_code(low), code);
            assert_eq!(e4m3_code(low + 0.49 * (high - low)), code);
            assert_eq!(e4m3_code(low + 0.51 * (high - low)), code + 1);
            assert_eq!(e4m3_code(f32::midpoint(low, high)) % 2, 0);
        }
        assert_eq!(e4m3_code(1e9), 0x7E);
    }

    /// The search is never worse than the plain scale, and clearly better on the whole.
    #[test]
    fn the_search_finds_better_scales() {
        let values = noise(64 * 256, 7);
        let amax = values.iter().fold(0.0f32, |amax, value| amax.max(value.abs()));
        let factor = fp4_factor(amax);
        let (mut plain, mut found) = (0.0f64, 0.0f64);
        for group in values.chunks_exact(16) {
            let x: [f32; 16] = std::array::from_fn(|i| (group[i] / factor).abs());
            let top = x.iter().fold(0.0f32, |top, value| top.max(*value));
            let straight = squared_error(&x, e4m3_value(e4m3_code(top / 6.0)));
            let best = squared_error(&x, e4m3_value(best_scale(&x)));
            assert!(best <= straight);
            plain += f64::from(straight);
            found += f64::from(best);
        }
        assert!(found < 0.8 * plain, "{found} against {plain}");
    }

    #[test]
    fn the_others_decode_to_what_was_meant() {
        let values = noise(64, 9);
        let (mut bytes, mut back) = (vec![0; 68], vec![0.0; 64]);
        to_q8_0(&values, &mut bytes);
        dequantize_row(GgmlType::Q8_0, &bytes, &mut back).expect("decodes");
        let amax = values.iter().fold(0.0f32, |amax, value| amax.max(value.abs()));
        assert!(values.iter().zip(&back).all(|(a, b)| (a - b).abs() <= amax / 127.0 * 0.51));
        let mut bytes = vec![0; 128];
        to_bf16(&values, &mut bytes);
        dequantize_row(GgmlType::BF16, &bytes, &mut back).expect("decodes");
        assert!(values.iter().zip(&back).all(|(a, b)| (a - b).abs() <= a.abs() / 256.0));
        to_q8_0(&[0.0; 32], &mut bytes[..34]);
        assert_eq!(bytes[..34], [0; 34]);
    }
}
