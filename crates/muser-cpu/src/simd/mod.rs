//! The vector instructions that the kernels are written in.
//!
//! Every kernel is written once, generic over [`Simd`], and compiled once per instruction set (`kernels::table`). An
//! implementation offers `N` lanes of 32 bits; one *tile row* of the weight layout is always 16 lanes, so a kernel walks
//! it in `16 / N` steps. Integer operations are exact. Float operations are the IEEE ones, each rounded once, in the
//! order written; the compiler may not reorder them. So all implementations give the same bits, and a reduction over
//! lanes must say its order in terms of 16 lanes (or of none, as the sums of `muser_backend::arith`), never of `N`.
#![allow(
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    reason = "an implementation is unsafe as a whole: its instructions exist only where detection found them"
)]

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod scalar;

/// Vectors of `N` 32-bit lanes.
///
/// # Safety of all methods
/// The caller runs on a processor that has the instruction set, and pointers are valid for `N` values of their type
/// (any alignment).
pub(crate) trait Simd: Copy + 'static {
    /// Lanes; 4, 8 or 16.
    const N: usize;
    /// Queries that attention keeps in registers at once.
    const QUERIES: usize;
    /// Does [`Simd::dp4`] take any unsigned byte?
    const ANY_BYTE: bool;
    /// Are digits of attention multiplied as pairs of 16 bits ([`Simd::dp2`]), because there is no dot product of signed bytes?
    const PAIRS: bool;
    /// Can halves of lanes be shifted each by its own count in one instruction ([`Simd::i_shl_halves`])?
    const HALVES: bool = false;
    /// What [`Simd::biased`] adds to signed bytes: 128 where a dot product takes one side unsigned, else 0.
    const BIAS: i32;
    /// `N` f32.
    type F: Copy;
    /// `N` i32, or `4 N` bytes.
    type I: Copy;

    unsafe fn f_splat(x: f32) -> Self::F;
    unsafe fn f_load(p: *const f32) -> Self::F;
    unsafe fn f_store(p: *mut f32, a: Self::F);
    unsafe fn f_add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn f_sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn f_mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn f_div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn f_fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c - a * b`, rounded once.
    unsafe fn f_fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`: a NaN in `a` gives `b`.
    unsafe fn f_max(a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`: a NaN in `a` gives `b`.
    unsafe fn f_min(a: Self::F, b: Self::F) -> Self::F;
    /// +0 where `x < limit`, else `value` (also where `x` is NaN).
    unsafe fn f_zero_below(x: Self::F, limit: Self::F, value: Self::F) -> Self::F;
    /// Widens f16 exactly.
    unsafe fn f_load_f16(p: *const u16) -> Self::F;
    /// Widens the f16 in the low half of every lane exactly.
    unsafe fn f_from_half(a: Self::I) -> Self::F;
    /// Rounds to f16, ties to even.
    unsafe fn f_store_f16(p: *mut u16, a: Self::F);
    /// Widens bf16 exactly.
    unsafe fn f_load_bf16(p: *const u16) -> Self::F;
    /// Rounds to the nearest integer, ties to even; the values fit.
    unsafe fn f_to_i(a: Self::F) -> Self::I;
    /// Converts, rounding to nearest, ties to even.
    unsafe fn f_from_i(a: Self::I) -> Self::F;
    unsafe fn f_from_bits(a: Self::I) -> Self::F;
    unsafe fn f_to_bits(a: Self::F) -> Self::I;

    unsafe fn i_splat(x: i32) -> Self::I;
    unsafe fn i_load(p: *const u8) -> Self::I;
    unsafe fn i_store(p: *mut u8, a: Self::I);
    unsafe fn i_add(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn i_sub(a: Self::I, b: Self::I) -> Self::I;
    /// Low 32 bits of the product.
    unsafe fn i_mul(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn i_and(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn i_or(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn i_xor(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn i_max(a: Self::I, b: Self::I) -> Self::I;
    /// The smaller of each two unsigned bytes.
    unsafe fn i_min_bytes(a: Self::I, b: Self::I) -> Self::I;
    /// Is the top bit of any byte set?
    unsafe fn any_top_bit(a: Self::I) -> bool;
    /// Every lane by a count of its own, 0 to 31.
    unsafe fn i_shl_by(a: Self::I, count: Self::I) -> Self::I;
    /// Both halves of each lane, shifted left by the same half of `count`.
    #[inline(always)]
    unsafe fn i_shl_halves(a: Self::I, count: Self::I) -> Self::I {
        let low = Self::i_splat(0xffff);
        let lower = Self::i_shl_by(Self::i_and(a, low), Self::i_and(count, low));
        let upper = Self::i_shl_by(Self::i_shr::<16>(a), Self::i_shr::<16>(count));
        Self::i_pair(lower, upper)
    }
    /// The low halves of the lanes of `a`, and over them those of `b`.
    #[inline(always)]
    unsafe fn i_pair(a: Self::I, b: Self::I) -> Self::I {
        Self::i_or(Self::i_and(a, Self::i_splat(0xffff)), Self::i_shl::<16>(b))
    }
    /// Bytes 0, 2, 1 and 3 of each lane, in this order.
    #[inline(always)]
    unsafe fn i_interleave(a: Self::I) -> Self::I {
        let outer = Self::i_and(a, Self::i_splat(0xff00_00ff_u32 as i32));
        let up = Self::i_and(Self::i_shl::<8>(a), Self::i_splat(0x00ff_0000));
        let down = Self::i_and(Self::i_shr::<8>(a), Self::i_splat(0x0000_ff00));
        Self::i_or(outer, Self::i_or(up, down))
    }
    unsafe fn i_shl<const K: u32>(a: Self::I) -> Self::I;
    /// Zeros come in from above.
    unsafe fn i_shr<const K: u32>(a: Self::I) -> Self::I;
    /// The sign comes in from above.
    unsafe fn i_sra<const K: u32>(a: Self::I) -> Self::I;
    /// Every byte of `index` (0..16) replaced by that entry of `table`.
    unsafe fn i_lookup(table: &[u8; 16], index: Self::I) -> Self::I;
    /// `acc + sum of 4 products` per lane: bytes of `w` are unsigned and at most 127 (see [`Simd::ANY_BYTE`]), bytes of `x` are in -127..=127.
    unsafe fn dp4(acc: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// As [`Simd::dp4`] with any unsigned `w`.
    unsafe fn dp4_wide(acc: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// [`Simd::dp4`], or [`Simd::dp4_wide`], with the activations of row `R` of a panel of `width` rows (`T` where `N` is 16), at word
    /// `16 C + 8 H + J` of a block of 256 inputs that begins at `x`. A set that can broadcast from memory does it in one
    /// instruction that the compiler leaves where it is.
    #[inline(always)]
    unsafe fn dp4_row<
        const C: usize,
        const H: usize,
        const J: usize,
        const T: usize,
        const R: usize,
        const WIDE: bool,
    >(
        acc: Self::I,
        w: Self::I,
        x: *const u8,
        width: usize,
    ) -> Self::I {
        let word = x.add(((16 * C + 8 * H + J) * width + R) * 4).cast::<i32>().read_unaligned();
        let word = Self::i_splat(word);
        if WIDE { Self::dp4_wide(acc, w, word) } else { Self::dp4(acc, w, word) }
    }
    /// `a`, computed at this place: the compiler may not put it off, holding what it is made of in memory until then.
    #[inline(always)]
    unsafe fn here(a: Self::I) -> Self::I {
        a
    }
    /// `acc + sum of 2 products` per lane of signed 16-bit halves.
    unsafe fn dp2(acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    unsafe fn prefetch(p: *const u8);

    /// Signed bytes as [`Simd::dp4_digits`] takes them.
    #[inline(always)]
    unsafe fn biased(a: Self::I) -> Self::I {
        if Self::BIAS == 0 { a } else { Self::i_xor(a, Self::i_splat(0x8080_8080_u32 as i32)) }
    }
    /// `acc + sum of 4 products` per lane of signed bytes, those of `w` [`Simd::biased`]. Not for sets with [`Simd::PAIRS`].
    unsafe fn dp4_digits(acc: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// Signed bytes 0 and 2 of every lane as halves, and bytes 1 and 3.
    #[inline(always)]
    unsafe fn widen(a: Self::I) -> (Self::I, Self::I) {
        let half = Self::i_splat(0xffff);
        let pair = |low: Self::I, high: Self::I| Self::i_or(Self::i_and(low, half), Self::i_shl::<16>(high));
        let byte0 = Self::i_sra::<24>(Self::i_shl::<24>(a));
        let byte1 = Self::i_sra::<24>(Self::i_shl::<16>(a));
        let byte2 = Self::i_sra::<24>(Self::i_shl::<8>(a));
        (pair(byte0, byte2), pair(byte1, Self::i_sra::<24>(a)))
    }
    /// Stores the low byte of every lane.
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, a: Self::I) {
        let mut lanes = [0i32; 16];
        Self::i_store(lanes.as_mut_ptr().cast(), a);
        for (i, lane) in lanes.iter().enumerate().take(Self::N) {
            *p.add(i) = *lane as u8;
        }
    }
    /// Stores the low halves of lanes 0, 2, 1, 3 of each four lanes.
    #[inline(always)]
    unsafe fn store_pairs(p: *mut u8, a: Self::I) {
        let mut lanes = [0i32; 16];
        Self::i_store(lanes.as_mut_ptr().cast(), a);
        for i in 0..Self::N {
            let lane = i & !3 | [0, 2, 1, 3][i & 3];
            p.add(2 * i).cast::<i16>().write_unaligned(lanes[lane] as i16);
        }
    }
    /// The largest lane; none is NaN.
    #[inline(always)]
    unsafe fn f_top(a: Self::F) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; 16];
        Self::f_store(lanes.as_mut_ptr(), a);
        lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if a > b { a } else { b })
    }
    /// Sixteen lanes, in `16 / N` vectors, added as a tree: `l[i] + l[i + 8]`, `+ 4`, `+ 2`, `+ 1`.
    #[inline(always)]
    unsafe fn f_tree(parts: [Self::F; 4]) -> f32 {
        let mut lanes = [0.0f32; 16];
        for (part, &a) in parts.iter().enumerate().take(16 / Self::N) {
            Self::f_store(lanes.as_mut_ptr().add(part * Self::N), a);
        }
        muser_backend::arith::tree16(&lanes)
    }
    /// Sum of all lanes.
    #[inline(always)]
    unsafe fn i_sum(a: Self::I) -> i32 {
        let mut lanes = [0i32; 16];
        Self::i_store(lanes.as_mut_ptr().cast(), a);
        lanes.iter().fold(0, |a, &b| a.wrapping_add(b))
    }
}
