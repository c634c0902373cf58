//! Random weights: the stream of words and the blocks made of it.
//!
//! Word `i` of a tensor is SplitMix64 at `key + (i + 1) * GOLDEN`, with a key from name and seed, so any piece of any
//! tensor can be made alone. Floats take one word each: the sum of its four 16-bit parts, centred and scaled, which is an
//! integer times one f32 constant. Quantised tensors are the word stream itself as block bytes, in which the scale fields
//! are overwritten with scales for the wanted spread and a mean of zero.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use muser_gguf::GgmlType;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// What a tensor is filled with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fill {
    Constant(f32),
    Random { mean: f32, sigma: f64 },
}

impl Fill {
    /// Spread of NVFP4 blocks whose scales are 1 to 1.875 times one half.
    pub(super) const NVFP4_SIGMA: f64 = 0.732_870 * E2M1_RMS;
}

/// Root mean square of the doubled E2M1 numbers: `sqrt(274 / 8)`.
const E2M1_RMS: f64 = 5.852_35;
/// Root mean square of the IQ4 levels.
const IQ4_RMS: f64 = 67.439;
/// Root mean square of scales 4 to 11, and of 2 to 9.
const SCALES_4_11: f64 = 7.842;
const SCALES_2_9: f64 = 5.958;

/// Key of a tensor's stream.
pub(super) fn key_of(name: &str, seed: u64) -> u64 {
    let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    });
    hash ^ mix(seed.wrapping_add(GOLDEN))
}

/// Fills `out` with `out.len()` bytes of a tensor from block `first_block` on. `first_block` must be a multiple of 8, so
/// that pieces begin at whole words.
pub(super) fn fill(out: &mut [u8], ty: GgmlType, fill: Fill, key: u64, first_block: u64) {
    debug_assert!(first_block.is_multiple_of(8));
    match (fill, ty) {
        (Fill::Constant(value), _) => floats(out, ty, |_| value),
        (Fill::Random { mean, sigma }, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16) => {
            // 65536 / sqrt(3) is the spread of the sum of four uniform 16-bit numbers.
            let factor = (sigma / 37837.227) as f32;
            floats(out, ty, |index| {
                let word = word(key, first_block + index);
                let sum = (word & 0xFFFF) + ((word >> 16) & 0xFFFF) + ((word >> 32) & 0xFFFF) + (word >> 48);
                let value = (sum as i32 - 131_070) as f32 * factor;
                if mean == 0.0 { value } else { mean + value }
            });
        }
        (Fill::Random { sigma, .. }, _) => {
            let first_word = first_block * ty.block_bytes() as u64 / 8;
            words(out, key, first_word);
            set_scales(out, ty, sigma);
        }
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn word(key: u64, index: u64) -> u64 {
    mix(key.wrapping_add((index + 1).wrapping_mul(GOLDEN)))
}

fn words(out: &mut [u8], key: u64, first: u64) {
    let mut state = key.wrapping_add(first.wrapping_mul(GOLDEN));
    let mut next = || {
        state = state.wrapping_add(GOLDEN);
        mix(state).to_le_bytes()
    };
    let mut chunks = out.chunks_exact_mut(8);
    for chunk in &mut chunks {
        chunk.copy_from_slice(&next());
    }
    let rest = chunks.into_remainder();
    let last = next();
    rest.copy_from_slice(&last[..rest.len()]);
}

fn floats(out: &mut [u8], ty: GgmlType, value: impl Fn(u64) -> f32) {
    // Conversion is fast in slices and slow one by one.
    const STEP: usize = 256;
    let (mut values, mut half) = ([0.0_f32; STEP], [f16::ZERO; STEP]);
    let width = ty.block_bytes();
    for (chunk, step) in out.chunks_mut(STEP * width).zip(0_u64..) {
        let count = chunk.len() / width;
        for (slot, index) in values[..count].iter_mut().zip(step * STEP as u64..) {
            *slot = value(index);
        }
        let places = chunk.chunks_exact_mut(width);
        match ty {
            GgmlType::F16 => {
                half.convert_from_f32_slice(&values);
                places.zip(&half).for_each(|(place, value)| place.copy_from_slice(&value.to_le_bytes()));
            }
            GgmlType::BF16 => places
                .zip(&values)
                .for_each(|(place, value)| place.copy_from_slice(&bf16::from_f32(*value).to_le_bytes())),
            _ => places.zip(&values).for_each(|(place, value)| place.copy_from_slice(&value.to_le_bytes())),
        }
    }
}

/// Overwrites the scale fields of random blocks.
fn set_scales(out: &mut [u8], ty: GgmlType, sigma: f64) {
    let blocks = out.chunks_exact_mut(ty.block_bytes());
    match ty {
        GgmlType::Q8_0 => {
            let d = short_f16(sigma / 73.3, 7);
            for block in blocks {
                put(block, 0, d);
                for q in &mut block[2..] {
                    // -128 would be beyond what quantisers make.
                    if *q == 0x80 {
                        *q = 0x81;
                    }
                }
            }
        }
        // Codes have a mean of minus one half (or so): the sign of the scale alternates at random instead.
        GgmlType::Q4_0 => alternate_sign(blocks, sigma / 4.637),
        GgmlType::Q5_0 => alternate_sign(blocks, sigma / 9.247),
        GgmlType::IQ4_NL => alternate_sign(blocks, sigma / IQ4_RMS),
        GgmlType::Q4_1 | GgmlType::Q5_1 => {
            let (middle, spread) = if ty == GgmlType::Q4_1 { (7.5, 4.61) } else { (15.5, 9.233) };
            let d = short_f16(sigma / spread, 6);
            for block in blocks {
                put(block, 0, d);
                put(block, 2, f16::from_f64(-middle * d.to_f64()));
            }
        }
        GgmlType::Q2_K => {
            let d = short_f16(sigma / (SCALES_4_11 * 1.118), 6);
            for block in blocks {
                for scale in &mut block[..16] {
                    *scale = (4 + (*scale & 7)) * 17;
                }
                put(block, 80, d);
                put(block, 82, f16::from_f64(1.5 * d.to_f64()));
            }
        }
        GgmlType::Q4_K | GgmlType::Q5_K => {
            let (middle, spread) = if ty == GgmlType::Q4_K { (7.5, 4.61) } else { (15.5, 9.233) };
            let d = short_f16(sigma / (SCALES_4_11 * spread), 6);
            for block in blocks {
                // Scale and minimum are equal, 4 to 11: groups 0 to 3 as bytes, groups 4 to 7 as nibbles.
                for i in 4..8 {
                    block[i] = 4 + (block[i] & 7);
                    block[i + 4] = block[i];
                    block[i + 8] = (4 + (block[i + 8] & 7)) * 17;
                }
                put(block, 0, d);
                put(block, 2, f16::from_f64(middle * d.to_f64()));
            }
        }
        GgmlType::Q3_K => {
            let d = short_f16(sigma / (SCALES_2_9 * 2.345), 6);
            for block in blocks {
                let mut packed = [0_u8; 12];
                for j in 0..16 {
                    let scale = signed_scale(block[96 + j % 12] >> (4 * (j / 12)));
                    packed[j % 8] |= (scale & 15) << (4 * (j / 8));
                    packed[8 + j % 4] |= (scale >> 4) << (2 * (j / 4));
                }
                block[96..108].copy_from_slice(&packed);
                put(block, 108, d);
            }
        }
        GgmlType::Q6_K => {
            let d = short_f16(sigma / (SCALES_2_9 * 18.473), 7);
            for block in blocks {
                for scale in &mut block[192..208] {
                    let magnitude = 2 + (*scale & 7) as i8;
                    *scale = (if *scale & 8 == 0 { -magnitude } else { magnitude }) as u8;
                }
                put(block, 208, d);
            }
        }
        GgmlType::IQ4_XS => {
            let d = short_f16(sigma / (SCALES_2_9 * IQ4_RMS), 6);
            for block in blocks {
                let (mut high, mut low) = (0_u16, [0_u8; 4]);
                for j in 0..8 {
                    let scale = signed_scale(block[4 + j / 2] >> (4 * (j % 2)));
                    low[j / 2] |= (scale & 15) << (4 * (j % 2));
                    high |= u16::from(scale >> 4) << (2 * j);
                }
                block[2..4].copy_from_slice(&high.to_le_bytes());
                block[4..8].copy_from_slice(&low);
                put(block, 0, d);
            }
        }
        GgmlType::MXFP4 => {
            // Scales are powers of two: two neighbours in the proportion that gives the wanted mean square.
            let wanted = sigma / E2M1_RMS;
            let exponent = wanted.log2().floor();
            let share = ((wanted / exponent.exp2()).powi(2) - 1.0) / 3.0;
            let threshold = (share * 256.0) as u8;
            for block in blocks {
                let larger = u8::from(block[0] < threshold);
                block[0] = (exponent + 128.0) as u8 + larger;
            }
        }
        GgmlType::NVFP4 => {
            // E4M3 codes of 1 to 1.875, moved by whole powers of two towards the wanted spread.
            let shift = (sigma / Fill::NVFP4_SIGMA).log2().round().clamp(-6.0, 7.0) as i8;
            let base = ((7 + shift) as u8) << 3;
            for block in blocks {
                for scale in &mut block[..4] {
                    *scale = base + (*scale & 7);
                }
            }
        }
        _ => {}
    }
}

/// A 6-bit scale, 32 meaning zero: magnitude 2 to 9 from three bits, sign from the fourth.
fn signed_scale(bits: u8) -> u8 {
    let magnitude = 2 + (bits & 7);
    if bits & 8 == 0 { 32 - magnitude } else { 32 + magnitude }
}

fn alternate_sign<'a>(blocks: impl Iterator<Item = &'a mut [u8]>, d: f64) {
    let d = short_f16(d, 7);
    for block in blocks {
        let sign = block[0] & 1 == 1;
        put(block, 0, if sign { d } else { -d });
    }
}

/// `x` with at most `bits` significant bits, so that small multiples of it are exact too.
fn short_f16(x: f64, bits: i32) -> f16 {
    // As of frexp: x = mantissa * 2^exponent with the mantissa from one half to one.
    let exponent = x.abs().log2().floor() as i32 + 1;
    let unit = 2.0_f64.powi(exponent - bits);
    f16::from_f64((x / unit).round_ties_even() * unit)
}

fn put(block: &mut [u8], at: usize, value: f16) {
    block[at..at + 2].copy_from_slice(&value.to_le_bytes());
}
