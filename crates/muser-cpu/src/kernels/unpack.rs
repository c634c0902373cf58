//! From transposed words to the one form that all products use, a [`Tile`]. What a type's integers mean is in its [`Class`];
//! value formulas are those of `muser_gguf`'s scalar dequantisation.

use muser_gguf::{GgmlType, mxfp4_scale};

use super::four;
use super::layout::{place_five, place_six};
use super::words::{Tile, Words, high_nibbles, low_nibbles, put, put_pair, put_scale, shift_right};
use crate::simd::Simd;

/// What the integers of a type mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// 256-value blocks: `d * sum(scale * code * x) - m * sum(min * x)`, groups of 16 or 32.
    Mins { group: usize },
    /// 256-value blocks: `d * sum(scale * (code - offset) * x)`.
    Offset { group: usize, offset: i32, wide: bool },
    /// 64-value blocks, up to 256 of which are one sum: [`four`].
    Four,
    /// 32-value blocks: `d * sum((code - offset) * x)`, a float scale for each.
    Small { offset: i32, wide: bool },
    /// 32-value blocks: `d * sum(code * x) + m * sum(x)`.
    SmallMins,
}

impl Class {
    /// The class of a quantised type; `None` for float types and those without kernels.
    pub(crate) fn of(ty: GgmlType) -> Option<Self> {
        Some(match ty {
            GgmlType::Q2_K => Self::Mins { group: 16 },
            GgmlType::Q4_K | GgmlType::Q5_K => Self::Mins { group: 32 },
            GgmlType::Q3_K => Self::Offset { group: 16, offset: 4, wide: false },
            GgmlType::Q6_K => Self::Offset { group: 16, offset: 32, wide: false },
            GgmlType::IQ4_XS => Self::Offset { group: 32, offset: 127, wide: true },
            GgmlType::Q4_0 => Self::Small { offset: 8, wide: false },
            GgmlType::Q5_0 => Self::Small { offset: 16, wide: false },
            GgmlType::Q8_0 => Self::Small { offset: 128, wide: true },
            GgmlType::IQ4_NL => Self::Small { offset: 127, wide: true },
            GgmlType::MXFP4 => Self::Small { offset: 12, wide: false },
            GgmlType::NVFP4 => Self::Four,
            GgmlType::Q4_1 | GgmlType::Q5_1 => Self::SmallMins,
            _ => return None,
        })
    }

    /// Number of the kernel variant in `Kernels::panels`.
    pub(crate) fn variant(self) -> usize {
        match self {
            Self::Mins { group: 16 } => 0,
            Self::Mins { .. } => 1,
            Self::Offset { group: 16, offset: 32, .. } => 8,
            Self::Offset { group: 16, .. } => 2,
            Self::Offset { .. } => 3,
            Self::Four => 4,
            Self::Small { wide: false, .. } => 5,
            Self::Small { .. } => 6,
            Self::SmallMins => 7,
        }
    }

    /// What is subtracted from codes.
    pub(crate) fn offset(self) -> i32 {
        match self {
            Self::Offset { offset, .. } | Self::Small { offset, .. } => offset,
            _ => 0,
        }
    }

    /// Does the type use one activation scale per 256 values (else per 32)?
    pub(crate) fn is_super(self) -> bool {
        matches!(self, Self::Mins { .. } | Self::Offset { .. } | Self::Four)
    }
}

/// K of IQ4_NL and IQ4_XS plus 127.
const IQ4_CODES: [u8; 16] = [0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240];
/// Doubled E2M1 values plus 12 (MXFP4).
const FP4_CODES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// Four unsigned bytes of scales (groups `4 a ..`) to `scale`.
#[inline(always)]
unsafe fn put_byte_scales<S: Simd>(tile: &mut Tile, a: usize, lane: usize, bytes: S::I) {
    for i in 0..4 {
        let scale = S::i_and(shift_right::<S>(bytes, 8 * i), S::i_splat(255));
        put_scale::<S>(tile, 4 * a + i, lane, scale);
    }
}

/// Four unsigned bytes of mins to `pairs`.
#[inline(always)]
unsafe fn put_byte_pairs<S: Simd>(tile: &mut Tile, a: usize, lane: usize, bytes: S::I) {
    let mask = S::i_splat(0x00ff_00ff);
    put_pair::<S>(tile, 2 * a, lane, S::i_and(bytes, mask));
    put_pair::<S>(tile, 2 * a + 1, lane, S::i_and(S::i_shr::<8>(bytes), mask));
}

/// Four signed 32-bit scales that fit in 16 bits, to `scale` and `pairs`.
#[inline(always)]
unsafe fn put_signed<S: Simd>(tile: &mut Tile, a: usize, lane: usize, scales: [S::I; 4]) {
    for (i, &scale) in scales.iter().enumerate() {
        put_scale::<S>(tile, 4 * a + i, lane, scale);
    }
    let low = S::i_splat(0xffff);
    for i in 0..2 {
        let pair = S::i_or(S::i_and(scales[i], low), S::i_shl::<16>(scales[i + 2]));
        put_pair::<S>(tile, 2 * a + i, lane, pair);
    }
}

/// Bits 0..4 of `bits` to the four bytes.
#[inline(always)]
unsafe fn spread_bits<S: Simd>(bits: S::I) -> S::I {
    let four = S::i_and(bits, S::i_splat(15));
    S::i_and(S::i_mul(four, S::i_splat(0x0020_4081)), S::i_splat(0x0101_0101))
}

/// Q4_K and Q5_K keep eight 6-bit scales and mins in three words.
#[inline(always)]
unsafe fn six_bit_scales<S: Simd>(tile: &mut Tile, lane: usize, s: [S::I; 3]) {
    let six = S::i_splat(0x3f3f_3f3f);
    let two = S::i_splat(0x0303_0303);
    let (top0, top1) = (S::i_and(S::i_shr::<6>(s[0]), two), S::i_and(S::i_shr::<6>(s[1]), two));
    put_byte_scales::<S>(tile, 0, lane, S::i_and(s[0], six));
    put_byte_scales::<S>(tile, 1, lane, S::i_or(low_nibbles::<S>(s[2]), S::i_shl::<4>(top0)));
    put_byte_pairs::<S>(tile, 0, lane, S::i_and(s[1], six));
    put_byte_pairs::<S>(tile, 1, lane, S::i_or(high_nibbles::<S>(s[2]), S::i_shl::<4>(top1)));
}

/// `d` in the low half and `m` in the high half of a word.
#[inline(always)]
unsafe fn put_d_m<S: Simd>(tile: &mut Tile, at: usize, lane: usize, word: S::I) {
    S::f_store(tile.d.as_mut_ptr().add(at * 16 + lane), S::f_from_half(word));
    S::f_store(tile.m.as_mut_ptr().add(at * 16 + lane), S::f_from_half(S::i_shr::<16>(word)));
}

#[inline(always)]
unsafe fn put_d_half<S: Simd>(tile: &mut Tile, at: usize, lane: usize, extra: *const u8) {
    let d = S::f_load_f16(extra.cast::<u16>().add(at * 16 + lane));
    S::f_store(tile.d.as_mut_ptr().add(at * 16 + lane), d);
}

/// Unpacks one 256-value super-block; of NVFP4 `inputs` values.
///
/// # Safety
/// `words` and `extra` hold one transposed block of `ty`.
#[inline(always)]
pub(super) unsafe fn unpack_super<S: Simd>(
    ty: GgmlType,
    words: *const u8,
    extra: *const u8,
    inputs: usize,
    tile: &mut Tile,
) {
    if ty == GgmlType::NVFP4 {
        return four::unpack::<S>(words, inputs, tile);
    }
    for lane in (0..16).step_by(S::N) {
        let w = Words::<S>::new(words, lane);
        match ty {
            GgmlType::Q4_K => {
                put_d_m::<S>(tile, 0, lane, w.get(0));
                six_bit_scales::<S>(tile, lane, [w.get(1), w.get(2), w.get(3)]);
                for c in 0..4 {
                    for j in 0..8 {
                        let v = w.get(4 + 8 * c + j);
                        put::<S>(tile, 16 * c + j, lane, low_nibbles::<S>(v));
                        put::<S>(tile, 16 * c + 8 + j, lane, high_nibbles::<S>(v));
                    }
                }
            }
            GgmlType::Q5_K => {
                put_d_m::<S>(tile, 0, lane, w.get(0));
                six_bit_scales::<S>(tile, lane, [w.get(1), w.get(2), w.get(3)]);
                let bit = S::i_splat(0x1010_1010);
                for j in 0..8 {
                    let high = w.get(place_five(4 + j));
                    for c in 0..4 {
                        let v = w.get(place_five(12 + 8 * c + j));
                        // Bit 2 c belongs to the low nibbles, bit 2 c + 1 to the high ones; both go to bit 4.
                        let (low_bit, high_bit) = match c {
                            0 => (S::i_shl::<4>(high), S::i_shl::<3>(high)),
                            1 => (S::i_shl::<2>(high), S::i_shl::<1>(high)),
                            2 => (high, S::i_shr::<1>(high)),
                            _ => (S::i_shr::<2>(high), S::i_shr::<3>(high)),
                        };
                        put::<S>(
                            tile,
                            16 * c + j,
                            lane,
                            S::i_or(low_nibbles::<S>(v), S::i_and(low_bit, bit)),
                        );
                        put::<S>(
                            tile,
                            16 * c + 8 + j,
                            lane,
                            S::i_or(high_nibbles::<S>(v), S::i_and(high_bit, bit)),
                        );
                    }
                }
            }
            GgmlType::Q6_K => {
                put_d_half::<S>(tile, 0, lane, extra);
                for a in 0..4 {
                    let v = w.get(place_six(48 + a));
                    let scales = [
                        S::i_sra::<24>(S::i_shl::<24>(v)),
                        S::i_sra::<24>(S::i_shl::<16>(v)),
                        S::i_sra::<24>(S::i_shl::<8>(v)),
                        S::i_sra::<24>(v),
                    ];
                    put_signed::<S>(tile, a, lane, scales);
                }
                let two = S::i_splat(0x3030_3030);
                for n in 0..2 {
                    for j in 0..8 {
                        let high = w.get(place_six(32 + 8 * n + j));
                        let a = w.get(place_six(16 * n + j));
                        let b = w.get(place_six(16 * n + 8 + j));
                        let at = 32 * n + j;
                        put::<S>(
                            tile,
                            at,
                            lane,
                            S::i_or(low_nibbles::<S>(a), S::i_and(S::i_shl::<4>(high), two)),
                        );
                        put::<S>(
                            tile,
                            at + 8,
                            lane,
                            S::i_or(low_nibbles::<S>(b), S::i_and(S::i_shl::<2>(high), two)),
                        );
                        put::<S>(tile, at + 16, lane, S::i_or(high_nibbles::<S>(a), S::i_and(high, two)));
                        put::<S>(
                            tile,
                            at + 24,
                            lane,
                            S::i_or(high_nibbles::<S>(b), S::i_and(S::i_shr::<2>(high), two)),
                        );
                    }
                }
            }
            GgmlType::Q2_K => {
                put_d_m::<S>(tile, 0, lane, w.get(20));
                for a in 0..4 {
                    let v = w.get(a);
                    put_byte_scales::<S>(tile, a, lane, low_nibbles::<S>(v));
                    put_byte_pairs::<S>(tile, a, lane, high_nibbles::<S>(v));
                }
                let two = S::i_splat(0x0303_0303);
                for n in 0..2 {
                    for j in 0..8 {
                        let v = w.get(4 + 8 * n + j);
                        for s in 0..4 {
                            put::<S>(
                                tile,
                                32 * n + 8 * s + j,
                                lane,
                                S::i_and(shift_right::<S>(v, 2 * s), two),
                            );
                        }
                    }
                }
            }
            GgmlType::Q3_K => {
                put_d_half::<S>(tile, 0, lane, extra);
                let (s0, s1, s2) = (w.get(24), w.get(25), w.get(26));
                let two = S::i_splat(0x0303_0303);
                for a in 0..4 {
                    // Groups 4 a ..: low nibbles of words 0 and 1, then their high nibbles; top bits from word 2.
                    let low = match a {
                        0 => low_nibbles::<S>(s0),
                        1 => low_nibbles::<S>(s1),
                        2 => high_nibbles::<S>(s0),
                        _ => high_nibbles::<S>(s1),
                    };
                    let top = S::i_shl::<4>(S::i_and(shift_right::<S>(s2, 2 * a), two));
                    let bytes = S::i_or(low, top);
                    let mut scales = [S::i_splat(0); 4];
                    for (i, scale) in scales.iter_mut().enumerate() {
                        let byte = S::i_and(shift_right::<S>(bytes, 8 * i), S::i_splat(255));
                        *scale = S::i_sub(byte, S::i_splat(32));
                    }
                    put_signed::<S>(tile, a, lane, scales);
                }
                let bit = S::i_splat(0x0404_0404);
                for n in 0..2 {
                    for j in 0..8 {
                        let v = w.get(8 + 8 * n + j);
                        let mask = w.get(j);
                        for s in 0..4 {
                            // Mask bit 4 n + s is the code's bit 2.
                            let i = 4 * n + s;
                            let high = if i < 2 {
                                if i == 0 { S::i_shl::<2>(mask) } else { S::i_shl::<1>(mask) }
                            } else {
                                shift_right::<S>(mask, i - 2)
                            };
                            let code =
                                S::i_or(S::i_and(shift_right::<S>(v, 2 * s), two), S::i_and(high, bit));
                            put::<S>(tile, 32 * n + 8 * s + j, lane, code);
                        }
                    }
                }
            }
            GgmlType::IQ4_XS => {
                let head = w.get(0);
                S::f_store(tile.d.as_mut_ptr().add(lane), S::f_from_half(head));
                let low = w.get(1);
                for a in 0..2 {
                    let mut scales = [S::i_splat(0); 4];
                    for (i, scale) in scales.iter_mut().enumerate() {
                        let j = 4 * a + i;
                        let four = S::i_and(shift_right::<S>(low, 4 * j), S::i_splat(15));
                        let top = match j {
                            0 => S::i_shr::<16>(head),
                            1 => S::i_shr::<18>(head),
                            2 => S::i_shr::<20>(head),
                            3 => S::i_shr::<22>(head),
                            4 => S::i_shr::<24>(head),
                            5 => S::i_shr::<26>(head),
                            6 => S::i_shr::<28>(head),
                            _ => S::i_shr::<30>(head),
                        };
                        let top = S::i_shl::<4>(S::i_and(top, S::i_splat(3)));
                        *scale = S::i_sub(S::i_or(four, top), S::i_splat(32));
                    }
                    put_signed::<S>(tile, a, lane, scales);
                }
                for g in 0..8 {
                    for j in 0..4 {
                        let v = w.get(2 + 4 * g + j);
                        let table = &IQ4_CODES;
                        put::<S>(tile, 8 * g + j, lane, S::i_lookup(table, low_nibbles::<S>(v)));
                        put::<S>(tile, 8 * g + 4 + j, lane, S::i_lookup(table, high_nibbles::<S>(v)));
                    }
                }
            }
            _ => {}
        }
    }
}

/// Unpacks `inputs / 32` small blocks (at most 8).
///
/// # Safety
/// `words` and `extra` hold that many transposed blocks of `ty`.
#[inline(always)]
pub(super) unsafe fn unpack_small<S: Simd>(
    ty: GgmlType,
    words: *const u8,
    extra: *const u8,
    inputs: usize,
    tile: &mut Tile,
) {
    for lane in (0..16).step_by(S::N) {
        for block in 0..inputs / 32 {
            match ty {
                GgmlType::Q8_0 => {
                    put_d_half::<S>(tile, block, lane, extra);
                    let w = Words::<S>::new(words.add(block * 8 * 64), lane);
                    for j in 0..8 {
                        let code = S::i_xor(w.get(j), S::i_splat(0x8080_8080_u32 as i32));
                        put::<S>(tile, 8 * block + j, lane, code);
                    }
                }
                GgmlType::Q4_0 => {
                    put_d_half::<S>(tile, block, lane, extra);
                    nibble_block::<S>(&Words::<S>::new(words.add(block * 4 * 64), lane), 0, block, tile);
                }
                GgmlType::IQ4_NL => {
                    put_d_half::<S>(tile, block, lane, extra);
                    lookup_block::<S>(
                        &Words::<S>::new(words.add(block * 4 * 64), lane),
                        &IQ4_CODES,
                        block,
                        tile,
                    );
                }
                GgmlType::MXFP4 => {
                    let mut bits = [0i32; 16];
                    for (i, bits) in bits.iter_mut().enumerate().take(S::N) {
                        *bits = mxfp4_scale(*extra.add(block * 16 + lane + i)).to_bits() as i32;
                    }
                    S::i_store(
                        tile.d.as_mut_ptr().add(block * 16 + lane).cast(),
                        S::i_load(bits.as_ptr().cast()),
                    );
                    lookup_block::<S>(
                        &Words::<S>::new(words.add(block * 4 * 64), lane),
                        &FP4_CODES,
                        block,
                        tile,
                    );
                }
                GgmlType::Q4_1 => {
                    let w = Words::<S>::new(words.add(block * 5 * 64), lane);
                    put_d_m::<S>(tile, block, lane, w.get(0));
                    nibble_block::<S>(&w, 1, block, tile);
                }
                GgmlType::Q5_0 => {
                    put_d_half::<S>(tile, block, lane, extra);
                    five_bit_block::<S>(&Words::<S>::new(words.add(block * 5 * 64), lane), 0, block, tile);
                }
                GgmlType::Q5_1 => {
                    let w = Words::<S>::new(words.add(block * 6 * 64), lane);
                    put_d_m::<S>(tile, block, lane, w.get(0));
                    five_bit_block::<S>(&w, 1, block, tile);
                }
                _ => {}
            }
        }
    }
}

/// Four words of nibbles from word `first`: low ones are values 0..16, high ones 16..32.
#[inline(always)]
unsafe fn nibble_block<S: Simd>(w: &Words<S>, first: usize, block: usize, tile: &mut Tile) {
    for j in 0..4 {
        let v = w.get(first + j);
        put::<S>(tile, 8 * block + j, w.lane, low_nibbles::<S>(v));
        put::<S>(tile, 8 * block + 4 + j, w.lane, high_nibbles::<S>(v));
    }
}

#[inline(always)]
unsafe fn lookup_block<S: Simd>(w: &Words<S>, table: &[u8; 16], block: usize, tile: &mut Tile) {
    for j in 0..4 {
        let v = w.get(j);
        put::<S>(tile, 8 * block + j, w.lane, S::i_lookup(table, low_nibbles::<S>(v)));
        put::<S>(tile, 8 * block + 4 + j, w.lane, S::i_lookup(table, high_nibbles::<S>(v)));
    }
}

/// A word of fifth bits at `first`, then four words of nibbles.
#[inline(always)]
unsafe fn five_bit_block<S: Simd>(w: &Words<S>, first: usize, block: usize, tile: &mut Tile) {
    let bits = w.get(first);
    for j in 0..4 {
        let v = w.get(first + 1 + j);
        let low_bit = S::i_shl::<4>(spread_bits::<S>(shift_right::<S>(bits, 4 * j)));
        let high_bit = S::i_shl::<4>(spread_bits::<S>(shift_right::<S>(bits, 16 + 4 * j)));
        put::<S>(tile, 8 * block + j, w.lane, S::i_or(low_nibbles::<S>(v), low_bit));
        put::<S>(tile, 8 * block + 4 + j, w.lane, S::i_or(high_nibbles::<S>(v), high_bit));
    }
}
