//! NVFP4 weights: 4-bit floats (E2M1), an 8-bit float (E4M3) for every 16 of them, one factor for the whole matrix.
//!
//! A weight is `code * scale * 2^-10 * factor`: `code` is the E2M1 number doubled (-12 to 12), `scale` the E4M3 number in
//! steps of 2^-9 ([`scale`], 0 to 229,376), both integers. A product of one activation row and one weight row:
//!
//! 1. Activations have one scale `d_x` per 256 values, as for K-quants: the same codes, the same `d_x` ([`super::quantize_block`]).
//!    Where a row of weights is no multiple of 256 (it is one of 64), the last run is shorter.
//! 2. Of each 256 values one exact integer ([`sum`]): `isum = sum_g scale[g] * sum_i code[16 g + i] * q[16 g + i]`. It is below
//!    2^37, so in 32 bits only where the scales of a row's 256 values have enough trailing zeros in common.
//! 3. `isum` is rounded to f32 once (to nearest, ties to even) and multiplied by 2^-10, which is exact ([`term`]); then
//!    `acc = fma(term, d_x, acc)`, one rounding. Powers of two may move between the sum and its conversion, which changes no bit;
//!    onto `d_x` they may not, which could be so small that it would be rounded.
//! 4. K segments as for every other type, then `* factor`: the last rounding of the product ([`product`]).
//!
//! Signs of scales are ignored and a NaN is 0, as in [`muser_gguf::nvfp4_scale`]; no matrix that has been loaded has either.

use muser_gguf::E2M1_DOUBLED;

use super::{Segments, quantize_block};

/// What one step of an integer sum is worth: scales count 2^-9 and codes halves.
pub const UNIT: f32 = 1.0 / 1024.0;

/// Values of a block of the file.
pub const BLOCK: usize = 64;
/// Bytes of a block: four scales, then 8 bytes of codes for each; low nibbles are the first 8 values of a group.
pub const BLOCK_BYTES: usize = 36;

/// The block scale that an E4M3 code stands for, in steps of 2^-9.
pub fn scale(code: u8) -> i32 {
    let (exponent, mantissa) = (i32::from(code >> 3) & 15, i32::from(code & 7));
    match exponent {
        _ if code & 0x7F == 0x7F => 0,
        0 => mantissa,
        _ => (8 + mantissa) << (exponent - 1),
    }
}

/// The exact sum over up to 256 values: whole blocks and the codes of as many activations.
pub fn sum(blocks: &[u8], q: &[i8]) -> i64 {
    debug_assert_eq!(blocks.len() / BLOCK_BYTES, q.len() / BLOCK);
    let mut sum = 0;
    for (block, q) in blocks.chunks_exact(BLOCK_BYTES).zip(q.chunks_exact(BLOCK)) {
        let (scales, nibbles) = block.split_at(4);
        for ((&code, nibbles), q) in scales.iter().zip(nibbles.chunks_exact(8)).zip(q.chunks_exact(16)) {
            let (low, high) = q.split_at(8);
            let dot: i32 = nibbles
                .iter()
                .zip(low.iter().zip(high))
                .map(|(&byte, (&low, &high))| {
                    let value = |nibble: u8| i32::from(E2M1_DOUBLED[usize::from(nibble & 15)]);
                    value(byte) * i32::from(low) + value(byte >> 4) * i32::from(high)
                })
                .sum();
            sum += i64::from(scale(code)) * i64::from(dot);
        }
    }
    sum
}

/// A sum as the number that meets the activation's scale: rounded once.
pub fn term(sum: i64) -> f32 {
    sum as f32 * UNIT
}

/// One whole product, as every fast backend has to compute it. `row` is whole blocks, `x` as many activations.
pub fn product(row: &[u8], x: &[f32], segments: Segments, factor: f32) -> f32 {
    const RUN: usize = 256;
    let mut total = 0.0;
    for segment in 0..segments.count() {
        let range = segments.range(segment);
        let (from, to) = (range.start * RUN, (range.end * RUN).min(x.len()));
        let mut acc = 0.0f32;
        for (x, blocks) in
            x[from..to].chunks(RUN).zip(row[from / BLOCK * BLOCK_BYTES..].chunks(4 * BLOCK_BYTES))
        {
            let mut q = [0; RUN];
            let q = &mut q[..x.len()];
            let d = quantize_block(x, q);
            acc = term(sum(&blocks[..x.len() / BLOCK * BLOCK_BYTES], q)).mul_add(d, acc);
        }
        total = if segment == 0 { acc } else { total + acc };
    }
    total * factor
}

#[cfg(test)]
mod tests {
    use muser_gguf::{GgmlType, dequantize_row, nvfp4_scale};

    use super::*;
    use crate::arith::MatrixRole;

    #[test]
    fn scales_are_the_numbers_of_the_format() {
        for code in 0..=255u8 {
            // The format's own scale is halved, as its codes are doubled.
            assert_eq!(scale(code) as f32 * (UNIT), nvfp4_scale(code), "code {code}");
        }
        assert_eq!((scale(1), scale(0x08), scale(0x38), scale(0x7E)), (1, 8, 512, 448 * 512));
    }

    /// The largest sum there is, and one that two roundings would get wrong.
    #[test]
    fn sums_are_exact_and_rounded_once() {
        let mut row = [[0u8; BLOCK_BYTES]; 4];
        row.iter_mut().for_each(|block| {
            block[..4].fill(0x7E);
            block[4..].fill(0x77);
        });
        let most = sum(row.as_flattened(), &[127; 256]);
        assert_eq!(most, 448 * 512 * 12 * 127 * 256);
        assert!(most < 1 << 37);
        assert_eq!(sum(row.as_flattened(), &[-127; 256]), -most);

        // 2^24 + 1 + 2^-9: half a step and a bit, so up; a sum of rounded parts would go down to the even number.
        let sum = (1i64 << 33) + (1 << 9) + 1;
        assert_eq!(term(sum), ((1u64 << 33) + (1 << 10)) as f32 * UNIT);
        assert_eq!(term(sum - 1), (1u64 << 33) as f32 * UNIT);
    }

    #[test]
    fn a_product_is_that_of_the_dequantised_weights() {
        for (cols, salt) in [(64usize, 1u32), (256, 2), (320, 3), (1280, 4), (1280 + 192, 5)] {
            let mut state = salt;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state >> 16
            };
            let mut row: Vec<u8> = (0..cols / BLOCK * BLOCK_BYTES).map(|_| next() as u8).collect();
            row.chunks_mut(BLOCK_BYTES).for_each(|b| b[..4].iter_mut().for_each(|s| *s = *s & 0x7F & !1));
            let x: Vec<f32> = (0..cols).map(|_| (next() % 2001) as f32 / 500.0 - 2.0).collect();
            let mut weights = vec![0.0; cols];
            dequantize_row(GgmlType::NVFP4, &row, &mut weights).expect("decodes");
            let (mut expected, mut size) = (0.0f64, 0.0f64);
            for (w, x) in weights.chunks(256).zip(x.chunks(256)) {
                let mut q = vec![0; x.len()];
                let d = quantize_block(x, &mut q);
                for (w, q) in w.iter().zip(q) {
                    let part = f64::from(*w) * f64::from(d) * f64::from(q);
                    expected += 0.25 * part;
                    size += 0.25 * part.abs();
                }
            }
            let found = product(&row, &x, Segments::of(MatrixRole::AttnOut, cols), 0.25);
            assert!(
                (f64::from(found) - expected).abs() < 1e-6 * size,
                "{cols}: {found} instead of {expected}"
            );
        }
    }

    #[test]
    fn what_is_not_finite_shows() {
        let row = [0u8; BLOCK_BYTES];
        let mut x = [0.0; BLOCK];
        assert_eq!(product(&row, &x, Segments::whole(BLOCK), 1.0), 0.0);
        x[3] = f32::NAN;
        assert!(product(&row, &x, Segments::whole(BLOCK), 1.0).is_nan());
    }
}
