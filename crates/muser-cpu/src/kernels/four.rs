//! NVFP4: exact sums over 256 values ([`muser_backend::arith::nvfp4`]) in 32 bits where they fit, in two parts where not.
//!
//! The 16 scales of a row's 256 values are integers of up to 18 bits, most of which end in zeros that they have in common. Over
//! those, `scale * dot` is summed in 32 bits if no scale exceeds the smallest one by more than [`OCTAVES`]: it always was in
//! the matrices of real models. Else ([`Packed::wide`]) every scale is taken apart into two digits of 9 bits, whose sums fit,
//! and the two are put together in 64 bits. Which way a block goes changes no bit.
//!
//! Words of 256 values: four times a word of scales and eight of codes, two words for each group of 16, whose low nibbles are
//! its first 8 values.

use muser_backend::arith::nvfp4;

use super::layout::TILE_ROWS;
use super::tile::{PanelBlock, stride};
use super::words::{Tile, Words, high_nibbles, low_nibbles, put, put_scale, shift_right};
use crate::simd::Simd;

/// Words of 64 values.
const BLOCK_WORDS: usize = 9;
/// Doubled E2M1 values plus 32: so the group sums of activations that Q6_K's offset needs serve here too.
const CODES: [u8; 16] = [32, 33, 34, 35, 36, 38, 40, 44, 32, 31, 30, 29, 28, 26, 24, 20];
/// By exponent: the leading bit of a number, which the smallest ones do not have.
const LEADING: [u8; 16] = [0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8];
/// By exponent: the power of two that a number's mantissa counts, plus one.
const POWER: [u8; 16] = [1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
/// How far the exponents of a block may be apart: 16 * 16 * 12 * 127 * (15 << 8) is below 2^31.
const OCTAVES: i32 = 8;
/// Bits of the low digit of a scale.
const DIGIT: u32 = 9;

/// Scales of up to 256 values of a part of a tile, a byte each: mantissa in the low nibble, in the high one how much further
/// left it is than the smallest of its row.
pub(super) struct Packed<S: Simd> {
    words: [S::I; 4],
    /// Power of the smallest one ([`POWER`]).
    base: S::I,
    /// Are exponents of some row too far apart? Then nothing else here is of use.
    pub(super) wide: bool,
}

impl<S: Simd> Packed<S> {
    /// Of `heads`, the words of scales of `heads.len()` blocks of 64.
    #[inline(always)]
    pub(super) unsafe fn new<const BLOCKS: usize>(heads: [S::I; BLOCKS]) -> Self {
        let mut mantissas = [S::i_splat(0); BLOCKS];
        let mut powers = [S::i_splat(0); BLOCKS];
        let mut least = S::i_splat(0x0f0f_0f0f);
        for block in 0..BLOCKS {
            (mantissas[block], powers[block]) = parts::<S>(heads[block]);
            least = S::i_min_bytes(least, powers[block]);
        }
        let least = S::i_min_bytes(least, S::i_shr::<16>(least));
        let base = S::i_and(S::i_min_bytes(least, S::i_shr::<8>(least)), S::i_splat(255));
        let bases = S::i_mul(base, S::i_splat(0x0101_0101));
        let mut words = [S::i_splat(0); 4];
        let mut far = S::i_splat(0);
        for block in 0..BLOCKS {
            let shift = S::i_sub(powers[block], bases);
            far = S::i_or(far, S::i_add(shift, S::i_splat((127 - OCTAVES) * 0x0101_0101)));
            words[block] = S::i_or(mantissas[block], S::i_shl::<4>(shift));
        }
        Self { words, base, wide: S::any_top_bit(far) }
    }

    /// The scale of group `group`, a constant after unrolling, of block `block` over the common zeros.
    #[inline(always)]
    pub(super) unsafe fn scale(&self, block: usize, group: usize) -> S::I {
        let word = self.words[block];
        let mantissa = S::i_and(shift_right::<S>(word, 8 * group), S::i_splat(15));
        let shift = match group {
            0 => S::i_and(S::i_shr::<4>(word), S::i_splat(15)),
            1 => S::i_and(S::i_shr::<12>(word), S::i_splat(15)),
            2 => S::i_and(S::i_shr::<20>(word), S::i_splat(15)),
            _ => S::i_shr::<28>(word),
        };
        S::i_shl_by(mantissa, shift)
    }

    /// The scales of groups 0 and 1 of block `block` as halves of a lane, those of 2 and 3 as another's: 15 << 8 fits.
    #[inline(always)]
    pub(super) unsafe fn pairs(&self, block: usize) -> [S::I; 2] {
        let word = S::i_interleave(self.words[block]);
        let nibbles = S::i_splat(0x000f_000f);
        let first = S::i_shl_halves(S::i_and(word, nibbles), S::i_and(S::i_shr::<4>(word), nibbles));
        let mantissas = S::i_and(S::i_shr::<8>(word), nibbles);
        [first, S::i_shl_halves(mantissas, S::i_and(S::i_shr::<12>(word), nibbles))]
    }

    /// What a sum is worth that was made with these scales: a power of two.
    #[inline(always)]
    pub(super) unsafe fn unit(&self) -> S::F {
        // 2^(base - 1) steps of 2^-10.
        S::f_from_bits(S::i_shl::<23>(S::i_add(self.base, S::i_splat(127 - 11))))
    }
}

/// Mantissas with their leading bit, and powers, of four scales.
#[inline(always)]
unsafe fn parts<S: Simd>(head: S::I) -> (S::I, S::I) {
    let exponents = S::i_and(S::i_shr::<3>(head), S::i_splat(0x0f0f_0f0f));
    let mantissas = S::i_and(head, S::i_splat(0x0707_0707));
    (S::i_or(mantissas, S::i_lookup(&LEADING, exponents)), S::i_lookup(&POWER, exponents))
}

/// The scale of group `group` as it is, in two digits: high, low.
#[inline(always)]
unsafe fn digits<S: Simd>(head: S::I, group: usize) -> (S::I, S::I) {
    let (mantissas, powers) = parts::<S>(head);
    let byte = S::i_splat(255);
    let mantissa = S::i_and(shift_right::<S>(mantissas, 8 * group), byte);
    let power = S::i_and(shift_right::<S>(powers, 8 * group), byte);
    // The mantissa twice as large, a bit less to shift: a shift of power - 1.
    let scale = S::i_shr::<1>(S::i_shl_by(mantissa, power));
    (S::i_shr::<DIGIT>(scale), S::i_and(scale, S::i_splat((1 << DIGIT) - 1)))
}

/// Sums over two digits of the scales, put together, rounded once, as the number that meets the activation's scale.
#[inline(always)]
unsafe fn term<S: Simd>(high: S::I, low: S::I) -> S::F {
    let (mut a, mut b, mut out) = ([0i32; 16], [0i32; 16], [0f32; 16]);
    S::i_store(a.as_mut_ptr().cast(), high);
    S::i_store(b.as_mut_ptr().cast(), low);
    for lane in 0..S::N {
        out[lane] = nvfp4::term((i64::from(a[lane]) << DIGIT) + i64::from(b[lane]));
    }
    S::f_load(out.as_ptr())
}

/// The four words of codes of a group, in the order of its values, from its two words of nibbles.
#[inline(always)]
pub(super) unsafe fn codes<S: Simd>(a: S::I, b: S::I) -> [S::I; 4] {
    // Written out: a closure would be compiled without the instruction set.
    [
        S::i_lookup(&CODES, low_nibbles::<S>(a)),
        S::i_lookup(&CODES, low_nibbles::<S>(b)),
        S::i_lookup(&CODES, high_nibbles::<S>(a)),
        S::i_lookup(&CODES, high_nibbles::<S>(b)),
    ]
}

/// Unpacks `inputs` values (a multiple of 64, at most 256).
///
/// # Safety
/// `words` holds that many.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd>(words: *const u8, inputs: usize, tile: &mut Tile) {
    let blocks = inputs / 64;
    tile.wide = false;
    for lane in (0..16).step_by(S::N) {
        let w = Words::<S>::new(words, lane);
        for block in 0..blocks {
            for group in 0..4 {
                let at = BLOCK_WORDS * block + 1 + 2 * group;
                for (j, &codes) in codes::<S>(w.get(at), w.get(at + 1)).iter().enumerate() {
                    put::<S>(tile, 16 * block + 4 * group + j, lane, codes);
                }
            }
        }
        let packed = match blocks {
            1 => Packed::<S>::new([w.get(0)]),
            2 => Packed::<S>::new([w.get(0), w.get(9)]),
            3 => Packed::<S>::new([w.get(0), w.get(9), w.get(18)]),
            _ => Packed::<S>::new([w.get(0), w.get(9), w.get(18), w.get(27)]),
        };
        tile.wide |= packed.wide;
        S::f_store(tile.d.as_mut_ptr().add(lane), packed.unit());
        for block in 0..blocks {
            for group in 0..4 {
                put_scale::<S>(tile, 4 * block + group, lane, packed.scale(block, group));
            }
        }
    }
    if tile.wide {
        for lane in (0..16).step_by(S::N) {
            let w = Words::<S>::new(words, lane);
            for g in 0..4 * blocks {
                let (high, low) = digits::<S>(w.get(BLOCK_WORDS * (g / 4)), g % 4);
                put_scale::<S>(tile, g, lane, high);
                S::i_store(tile.low.as_mut_ptr().add(g * 16 + lane).cast(), low);
            }
        }
    }
}

/// Adds up to 256 unpacked values to `acc[t][16]`.
///
/// # Safety
/// As [`super::tile::super_block`].
#[inline(always)]
pub(super) unsafe fn panel<S: Simd, const T: usize>(
    tile: &Tile,
    inputs: usize,
    x: PanelBlock,
    acc: *mut f32,
) {
    if tile.wide {
        return add_panel::<S, T, true>(tile, inputs, x, acc);
    }
    add_panel::<S, T, false>(tile, inputs, x, acc);
}

#[inline(always)]
unsafe fn add_panel<S: Simd, const T: usize, const WIDE: bool>(
    tile: &Tile,
    inputs: usize,
    x: PanelBlock,
    acc: *mut f32,
) {
    let width = stride::<S, T>(x);
    for lane in (0..16).step_by(S::N) {
        let mut isum = [S::i_splat(0); T];
        let mut lower = [S::i_splat(0); T];
        let codes = tile.codes.as_ptr().add(lane * 4);
        for g in 0..inputs / 16 {
            let mut dot = offsets::<S, T>(x, width, g);
            for at in 4 * g..4 * g + 4 {
                let w = S::i_load(codes.add(at * 64));
                for (t, dot) in dot.iter_mut().enumerate() {
                    let xq = x.q.add((at * width + t) * 4).cast::<i32>().read_unaligned();
                    *dot = S::dp4(*dot, w, S::i_splat(xq));
                }
            }
            let scale = S::i_load(tile.scale.as_ptr().add(g * 16 + lane).cast());
            for t in 0..T {
                isum[t] = S::i_add(isum[t], S::i_mul(dot[t], scale));
                if WIDE {
                    let low = S::i_load(tile.low.as_ptr().add(g * 16 + lane).cast());
                    lower[t] = S::i_add(lower[t], S::i_mul(dot[t], low));
                }
            }
        }
        let unit = S::f_load(tile.d.as_ptr().add(lane));
        for t in 0..T {
            let at = acc.add(t * TILE_ROWS + lane);
            let term = if WIDE { term::<S>(isum[t], lower[t]) } else { S::f_mul(S::f_from_i(isum[t]), unit) };
            S::f_store(at, S::f_fma(term, S::f_splat(*x.d.add(t)), S::f_load(at)));
        }
    }
}

/// Where the sums of group `g` start: codes are 32 too large.
#[inline(always)]
pub(super) unsafe fn offsets<S: Simd, const T: usize>(x: PanelBlock, width: usize, g: usize) -> [S::I; T] {
    let mut dot = [S::i_splat(0); T];
    for (t, dot) in dot.iter_mut().enumerate() {
        *dot = S::i_splat(*x.sums.add((12 + g) * width + t));
    }
    dot
}

/// Adds 256 values straight from their words to `acc`, whichever way the scales are: two digits of each.
///
/// # Safety
/// `w` holds them, the panel block is complete.
#[inline(always)]
pub(super) unsafe fn wide_block<S: Simd, const T: usize>(w: &Words<S>, x: PanelBlock, acc: &mut [S::F; T]) {
    let width = stride::<S, T>(x);
    let mut high_sum = [S::i_splat(0); T];
    let mut low_sum = [S::i_splat(0); T];
    for g in 0..16 {
        let block = w.block(BLOCK_WORDS * (g / 4));
        let (high, low) = digits::<S>(block.get(0), g % 4);
        let codes = codes::<S>(block.get(1 + 2 * (g % 4)), block.get(2 + 2 * (g % 4)));
        let mut dot = offsets::<S, T>(x, width, g);
        for (j, &codes) in codes.iter().enumerate() {
            for (t, dot) in dot.iter_mut().enumerate() {
                let xq = x.q.add(((4 * g + j) * width + t) * 4).cast::<i32>().read_unaligned();
                *dot = S::dp4(*dot, codes, S::i_splat(xq));
            }
        }
        for t in 0..T {
            high_sum[t] = S::i_add(high_sum[t], S::i_mul(dot[t], high));
            low_sum[t] = S::i_add(low_sum[t], S::i_mul(dot[t], low));
        }
    }
    for t in 0..T {
        acc[t] = S::f_fma(term::<S>(high_sum[t], low_sum[t]), S::f_splat(*x.d.add(t)), acc[t]);
    }
}
