//! Digits of K, V and queries.

use muser_backend::arith::attention::{Digits, TOP_16, hadamard_factor};
use muser_backend::kv_layout::HeadLayout;
use muser_kv::{BLOCK_LEN, BlockId};

use super::products::Plane;
use crate::bounds::Reach;
use crate::simd::Simd;

/// One layer's K and V of one key head, in all blocks.
#[derive(Clone, Copy)]
pub(crate) struct DigitKv {
    /// This layer and head in the first block.
    pub(crate) first: *mut u8,
    /// Bytes from one block to the next.
    pub(crate) block_stride: usize,
    /// Blocks that there are.
    pub(crate) blocks: Reach,
    pub(crate) head: HeadLayout,
    /// Are scores bounded, so that no maximum is carried?
    pub(crate) bounded: bool,
}

impl DigitKv {
    pub(super) fn block(&self, id: BlockId) -> *mut u8 {
        self.blocks.holds(id.0 as usize + 1);
        self.first.wrapping_add(id.0 as usize * self.block_stride)
    }
}

/// Multiplies a head by the Hadamard matrix, as [`muser_backend::arith::attention::hadamard`].
#[inline(always)]
pub(super) unsafe fn rotate<S: Simd>(x: *mut f32, dim: usize) {
    if !dim.is_power_of_two() {
        return;
    }
    for at in (0..dim).step_by(16) {
        let mut a = x.add(at).cast::<[f32; 16]>().read_unaligned();
        for h in [1, 2, 4, 8] {
            let mut b = [0.0f32; 16];
            for i in 0..16 {
                // One of the two is the sum, the other the difference.
                b[i] = if i & h == 0 { a[i] + a[i ^ h] } else { a[i ^ h] - a[i] };
            }
            a = b;
        }
        x.add(at).cast::<[f32; 16]>().write_unaligned(a);
    }
    let mut h = 16;
    while h < dim {
        for pair in (0..dim).step_by(2 * h) {
            for at in (pair..pair + h).step_by(S::N) {
                let (a, b) = (S::f_load(x.add(at)), S::f_load(x.add(at + h)));
                S::f_store(x.add(at), S::f_add(a, b));
                S::f_store(x.add(at + h), S::f_sub(a, b));
            }
        }
        h *= 2;
    }
    let factor = S::f_splat(hadamard_factor(dim));
    for at in (0..dim).step_by(S::N) {
        S::f_store(x.add(at), S::f_mul(S::f_load(x.add(at)), factor));
    }
}

/// What codes are made with.
struct Scale {
    /// What a code is worth.
    d: f32,
    /// `None` where all codes are 0.
    inverse: Option<f32>,
}

/// The rule of [`muser_backend::arith::attention::quantize`].
#[inline(always)]
unsafe fn scale<S: Simd>(x: *const f32, dim: usize, top: f32, marks_nan: bool) -> Scale {
    let mask = S::i_splat(0x7fff_ffff);
    let mut largest = S::i_splat(0);
    for at in (0..dim).step_by(S::N) {
        largest = S::i_max(largest, S::i_and(S::f_to_bits(S::f_load(x.add(at))), mask));
    }
    let mut lanes = [0i32; 16];
    S::i_store(lanes.as_mut_ptr().cast(), largest);
    let amax = f32::from_bits(lanes.iter().fold(0, |a, &b| a.max(b)) as u32);
    let inverse = if amax > 0.0 { top / amax } else { 0.0 };
    if amax.is_finite() && inverse.is_finite() {
        return Scale { d: amax / top, inverse: Some(inverse) };
    }
    Scale { d: if amax.is_finite() || !marks_nan { 0.0 } else { f32::NAN }, inverse: None }
}

/// Sixteen codes.
#[inline(always)]
unsafe fn codes<S: Simd>(x: *const f32, scale: &Scale) -> [i32; 16] {
    let mut codes = [0i32; 16];
    if let Some(inverse) = scale.inverse {
        for at in (0..16).step_by(S::N) {
            let code = S::f_to_i(S::f_mul(S::f_load(x.add(at)), S::f_splat(inverse)));
            S::i_store(codes.as_mut_ptr().add(at).cast(), code);
        }
    }
    codes
}

/// High and low digits of sixteen codes as bytes.
#[inline(always)]
unsafe fn bytes<S: Simd>(codes: &[i32; 16]) -> ([u8; 16], [u8; 16]) {
    let (mut high, mut low) = ([0u8; 16], [0u8; 16]);
    for at in (0..16).step_by(S::N) {
        let code = S::i_load(codes.as_ptr().add(at).cast());
        S::store_bytes(low.as_mut_ptr().add(at), code);
        S::store_bytes(high.as_mut_ptr().add(at), S::i_sra::<8>(S::i_add(code, S::i_splat(128))));
    }
    (high, low)
}

fn word(bytes: &[u8; 16], i: usize) -> i32 {
    i32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
}

fn halves(low: i32, high: i32) -> i32 {
    (low & 0xffff) | (high << 16)
}

/// Writes a rotated query's digits, rows of [`Simd::QUERIES`] interleaved; returns its scale, and the sum of what the bias of
/// K's digits is multiplied with.
#[inline(always)]
pub(super) unsafe fn query_digits<S: Simd>(
    x: *const f32,
    dim: usize,
    kv: Digits,
    to: *mut i32,
) -> (f32, i32) {
    let scale = scale::<S>(x, dim, TOP_16, true);
    let mut sum = 0i32;
    for at in (0..dim).step_by(16) {
        let codes = codes::<S>(x.add(at), &scale);
        let (high, low) = bytes::<S>(&codes);
        for i in 0..16 {
            sum += codes[i] + if kv == Digits::Two { i32::from(high[i] as i8) } else { 0 };
        }
        for i in 0..4 {
            let to = to.add((at / 4 + i) * Plane::count::<S>() * S::QUERIES);
            if S::PAIRS {
                let c = &codes[4 * i..4 * i + 4];
                let h: [i32; 4] = std::array::from_fn(|j| i32::from(high[4 * i + j] as i8));
                let words = [halves(c[0], c[2]), halves(c[1], c[3]), halves(h[0], h[2]), halves(h[1], h[3])];
                for (plane, word) in words.into_iter().enumerate() {
                    *to.add(plane * S::QUERIES) = word;
                }
            } else {
                *to = word(&high, i);
                *to.add(S::QUERIES) = word(&low, i);
            }
        }
    }
    (scale.d, sum)
}

/// Stores K (which is rotated in place) and V of one position of one key head.
///
/// # Safety
/// `k` and `v` are valid for a head; nobody else writes this position.
#[inline(always)]
pub(crate) unsafe fn store_kv<S: Simd>(kv: &DigitKv, id: BlockId, slot: usize, k: *mut f32, v: *const f32) {
    let head = kv.head;
    Reach::of(BLOCK_LEN).holds(slot + 1);
    let block = kv.block(id);
    rotate::<S>(k, head.dim);
    for (x, is_key) in [(k.cast_const(), true), (v, false)] {
        let scale = scale::<S>(x, head.dim, head.digits.top(), false);
        for at in (0..head.dim).step_by(16) {
            let (high, low) = bytes::<S>(&codes::<S>(x.add(at), &scale));
            // With one digit the code is the low byte.
            let planes = if head.digits == Digits::Two { [high, low] } else { [low, low] };
            for (plane, bytes) in planes.iter().enumerate().take(head.digits.count()) {
                if is_key {
                    for i in 0..4 {
                        let to = block.add(head.k(plane) + head.k_at(slot, at + 4 * i));
                        to.cast::<i32>().write_unaligned(word(bytes, i));
                    }
                } else {
                    let to = block.add(head.v(plane) + head.v_at(slot, at));
                    for (i, byte) in bytes.iter().enumerate() {
                        *to.add(4 * i) = *byte;
                    }
                }
            }
        }
        let scales = if is_key { head.k_scales() } else { head.v_scales() };
        block.add(scales).cast::<f32>().add(slot).write_unaligned(scale.d);
    }
}
