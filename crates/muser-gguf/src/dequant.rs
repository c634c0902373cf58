//! Scalar dequantisation of every decodable block type: the readable definition of what the bytes mean.
//!
//! Exactness is the point, not speed: each formula rounds in the order of the format's reference implementation, so that
//! the results agree with it bit for bit (a NaN scale aside, where only NaN-ness agrees). Kernels are tested against
//! these functions.

use half::{bf16, f16};

use crate::{GgmlType, GgufError};

/// Decodes one row, or any whole number of blocks: `bytes` become `out.len()` values.
pub fn dequantize_row(ty: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), GgufError> {
    if !ty.is_decodable() {
        return Err(GgufError::Unsupported(ty));
    }
    if ty.row_bytes(out.len()) != Some(bytes.len()) {
        let expected = match ty.row_bytes(out.len()) {
            Some(len) => len.to_string(),
            None => format!("a multiple of {} values, so no number of", ty.block_len()),
        };
        return Err(GgufError::RowLength { ty, values: out.len(), expected, found: bytes.len() });
    }
    let decode: fn(&[u8], &mut [f32]) = match ty {
        GgmlType::F32 => |b, o| o[0] = f32_at(b, 0),
        GgmlType::F16 => |b, o| o[0] = f16_at(b, 0),
        GgmlType::BF16 => |b, o| o[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        GgmlType::Q4_0 => q4_0,
        GgmlType::Q4_1 => q4_1,
        GgmlType::Q5_0 => q5_0,
        GgmlType::Q5_1 => q5_1,
        GgmlType::Q8_0 => q8_0,
        GgmlType::Q2_K => q2_k,
        GgmlType::Q3_K => q3_k,
        GgmlType::Q4_K => q4_k,
        GgmlType::Q5_K => q5_k,
        GgmlType::Q6_K => q6_k,
        GgmlType::Q8_K => q8_k,
        GgmlType::IQ4_NL => iq4_nl,
        GgmlType::IQ4_XS => iq4_xs,
        GgmlType::MXFP4 => mxfp4,
        GgmlType::NVFP4 => nvfp4,
        _ => return Err(GgufError::Unsupported(ty)),
    };
    for (block, values) in bytes.chunks_exact(ty.block_bytes()).zip(out.chunks_exact_mut(ty.block_len())) {
        decode(block, values);
    }
    Ok(())
}

/// The sixteen levels of IQ4_NL and IQ4_XS.
pub const IQ4_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The E2M1 numbers of MXFP4 and NVFP4, doubled so that they are integers; the block scale is halved in turn.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Scale of an MXFP4 block: half of `2^(e-127)`.
pub fn mxfp4_scale(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 })
}

/// Scale of an NVFP4 group: half of the E4M3 number, sign ignored, NaN taken as 0.
pub fn nvfp4_scale(x: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(x >> 3) & 15, f32::from(x & 7));
    match x & 0x7F {
        0 | 0x7F => 0.0,
        _ if exponent == 0 => 0.5 * mantissa * 2.0_f32.powi(-9),
        _ => 0.5 * (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    }
}

/// Scale and minimum of 32-value group `j` (0 to 7) from the 12 packed bytes of Q4_K and Q5_K.
pub fn k4_scale_min(scales: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (scales[j] & 63, scales[j + 4] & 63)
    } else {
        ((scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4), (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4))
    }
}

/// Scale (0 to 63, 32 means zero) of 16-value group `j` (0 to 15) from the 12 packed bytes of Q3_K.
pub fn q3_k_scale(scales: &[u8], j: usize) -> u8 {
    nibble(scales[j % 8], j / 8) | (((scales[8 + j % 4] >> (2 * (j / 4))) & 3) << 4)
}

fn f32_at(block: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

fn nibble(byte: u8, which: usize) -> u8 {
    (byte >> (4 * which)) & 15
}

fn q4_0(b: &[u8], out: &mut [f32]) {
    let d = f16_at(b, 0);
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * (f32::from(nibble(b[2 + i % 16], i / 16)) - 8.0);
    }
}

fn q4_1(b: &[u8], out: &mut [f32]) {
    let (d, m) = (f16_at(b, 0), f16_at(b, 2));
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * f32::from(nibble(b[4 + i % 16], i / 16)) + m;
    }
}

fn q5_0(b: &[u8], out: &mut [f32]) {
    let (d, qh) = (f16_at(b, 0), u32_at(b, 2));
    for (i, o) in out.iter_mut().enumerate() {
        let q = nibble(b[6 + i % 16], i / 16) | ((((qh >> i) & 1) as u8) << 4);
        *o = d * (f32::from(q) - 16.0);
    }
}

fn q5_1(b: &[u8], out: &mut [f32]) {
    let (d, m, qh) = (f16_at(b, 0), f16_at(b, 2), u32_at(b, 4));
    for (i, o) in out.iter_mut().enumerate() {
        let q = nibble(b[8 + i % 16], i / 16) | ((((qh >> i) & 1) as u8) << 4);
        *o = d * f32::from(q) + m;
    }
}

fn q8_0(b: &[u8], out: &mut [f32]) {
    let d = f16_at(b, 0);
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * f32::from(b[2 + i] as i8);
    }
}

fn q2_k(b: &[u8], out: &mut [f32]) {
    let (d, dmin) = (f16_at(b, 80), f16_at(b, 82));
    for (i, o) in out.iter_mut().enumerate() {
        let scale = b[i / 16];
        let q = (b[16 + 32 * (i / 128) + i % 32] >> (2 * ((i % 128) / 32))) & 3;
        *o = (d * f32::from(scale & 15)) * f32::from(q) - dmin * f32::from(scale >> 4);
    }
}

fn q3_k(b: &[u8], out: &mut [f32]) {
    let d = f16_at(b, 108);
    for (i, o) in out.iter_mut().enumerate() {
        let scale = f32::from(q3_k_scale(&b[96..108], i / 16)) - 32.0;
        let low = (b[32 + 32 * (i / 128) + i % 32] >> (2 * ((i % 128) / 32))) & 3;
        let high = (b[i % 32] >> (i / 32)) & 1;
        let q = i32::from(low) - if high == 1 { 0 } else { 4 };
        *o = (d * scale) * q as f32;
    }
}

fn q4_k(b: &[u8], out: &mut [f32]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    for (i, o) in out.iter_mut().enumerate() {
        let (scale, min) = k4_scale_min(&b[4..16], i / 32);
        let q = nibble(b[16 + 32 * (i / 64) + i % 32], (i % 64) / 32);
        *o = (d * f32::from(scale)) * f32::from(q) - dmin * f32::from(min);
    }
}

fn q5_k(b: &[u8], out: &mut [f32]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    for (i, o) in out.iter_mut().enumerate() {
        let (scale, min) = k4_scale_min(&b[4..16], i / 32);
        let low = nibble(b[48 + 32 * (i / 64) + i % 32], (i % 64) / 32);
        let q = low | (((b[16 + i % 32] >> (i / 32)) & 1) << 4);
        *o = (d * f32::from(scale)) * f32::from(q) - dmin * f32::from(min);
    }
}

fn q6_k(b: &[u8], out: &mut [f32]) {
    let d = f16_at(b, 208);
    for (i, o) in out.iter_mut().enumerate() {
        let (half, r) = (i / 128, i % 128);
        let low = nibble(b[64 * half + r % 64], r / 64);
        let q = low | (((b[128 + 32 * half + r % 32] >> (2 * (r / 32))) & 3) << 4);
        *o = (d * f32::from(b[192 + i / 16] as i8)) * (f32::from(q) - 32.0);
    }
}

fn q8_k(b: &[u8], out: &mut [f32]) {
    let d = f32_at(b, 0);
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * f32::from(b[4 + i] as i8);
    }
}

fn iq4_nl(b: &[u8], out: &mut [f32]) {
    let d = f16_at(b, 0);
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * f32::from(IQ4_LEVELS[usize::from(nibble(b[2 + i % 16], i / 16))]);
    }
}

fn iq4_xs(b: &[u8], out: &mut [f32]) {
    let d = f16_at(b, 0);
    let scales_high = u16::from_le_bytes([b[2], b[3]]);
    for (i, o) in out.iter_mut().enumerate() {
        let j = i / 32;
        let scale = nibble(b[4 + j / 2], j % 2) | ((((scales_high >> (2 * j)) & 3) as u8) << 4);
        let q = nibble(b[8 + 16 * j + i % 16], (i % 32) / 16);
        *o = (d * (f32::from(scale) - 32.0)) * f32::from(IQ4_LEVELS[usize::from(q)]);
    }
}

fn mxfp4(b: &[u8], out: &mut [f32]) {
    let d = mxfp4_scale(b[0]);
    for (i, o) in out.iter_mut().enumerate() {
        *o = d * f32::from(E2M1_DOUBLED[usize::from(nibble(b[1 + i % 16], i / 16))]);
    }
}

fn nvfp4(b: &[u8], out: &mut [f32]) {
    for (i, o) in out.iter_mut().enumerate() {
        let (group, r) = (i / 16, i % 16);
        let q = nibble(b[4 + 8 * group + r % 8], r / 8);
        *o = nvfp4_scale(b[group]) * f32::from(E2M1_DOUBLED[usize::from(q)]);
    }
}
