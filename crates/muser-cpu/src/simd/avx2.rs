//! AVX2 with FMA and F16C, and the same with AVX-VNNI: 8 lanes.

use std::arch::x86_64::*;

use super::Simd;

/// Eight lanes; four byte products take three instructions.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Eight lanes; four byte products take one instruction.
#[derive(Clone, Copy)]
pub(crate) struct AvxVnni;

type F = __m256;
type I = __m256i;

macro_rules! eight_lanes {
    ($name:ty, $any:literal, $pairs:literal, $bias:literal, $dp4:expr, $dp4_wide:expr, $dp2:expr) => {
        impl Simd for $name {
            const N: usize = 8;
            const ANY_BYTE: bool = $any;
            const QUERIES: usize = 4;
            const PAIRS: bool = $pairs;
            const BIAS: i32 = $bias;
            type F = F;
            type I = I;

            #[inline(always)]
            unsafe fn f_splat(x: f32) -> F {
                _mm256_set1_ps(x)
            }
            #[inline(always)]
            unsafe fn f_load(p: *const f32) -> F {
                _mm256_loadu_ps(p)
            }
            #[inline(always)]
            unsafe fn f_store(p: *mut f32, a: F) {
                _mm256_storeu_ps(p, a);
            }
            #[inline(always)]
            unsafe fn f_add(a: F, b: F) -> F {
                _mm256_add_ps(a, b)
            }
            #[inline(always)]
            unsafe fn f_sub(a: F, b: F) -> F {
                _mm256_sub_ps(a, b)
            }
            #[inline(always)]
            unsafe fn f_mul(a: F, b: F) -> F {
                _mm256_mul_ps(a, b)
            }
            #[inline(always)]
            unsafe fn f_div(a: F, b: F) -> F {
                _mm256_div_ps(a, b)
            }
            #[inline(always)]
            unsafe fn f_fma(a: F, b: F, c: F) -> F {
                _mm256_fmadd_ps(a, b, c)
            }
            #[inline(always)]
            unsafe fn f_fnma(a: F, b: F, c: F) -> F {
                _mm256_fnmadd_ps(a, b, c)
            }
            #[inline(always)]
            unsafe fn f_max(a: F, b: F) -> F {
                _mm256_max_ps(a, b)
            }
            #[inline(always)]
            unsafe fn f_min(a: F, b: F) -> F {
                _mm256_min_ps(a, b)
            }
            #[inline(always)]
            unsafe fn f_zero_below(x: F, limit: F, value: F) -> F {
                _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, limit), value)
            }
            #[inline(always)]
            unsafe fn f_load_f16(p: *const u16) -> F {
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))
            }
            #[inline(always)]
            unsafe fn f_from_half(a: I) -> F {
                let low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
                let packed =
                    _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256::<1>(low));
                _mm256_cvtph_ps(packed)
            }
            #[inline(always)]
            unsafe fn f_store_f16(p: *mut u16, a: F) {
                _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a));
            }
            #[inline(always)]
            unsafe fn f_load_bf16(p: *const u16) -> F {
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
            }
            #[inline(always)]
            unsafe fn f_to_i(a: F) -> I {
                _mm256_cvtps_epi32(a)
            }
            #[inline(always)]
            unsafe fn f_from_i(a: I) -> F {
                _mm256_cvtepi32_ps(a)
            }
            #[inline(always)]
            unsafe fn f_from_bits(a: I) -> F {
                _mm256_castsi256_ps(a)
            }
            #[inline(always)]
            unsafe fn f_to_bits(a: F) -> I {
                _mm256_castps_si256(a)
            }

            #[inline(always)]
            unsafe fn i_splat(x: i32) -> I {
                _mm256_set1_epi32(x)
            }
            #[inline(always)]
            unsafe fn i_load(p: *const u8) -> I {
                _mm256_loadu_si256(p.cast())
            }
            #[inline(always)]
            unsafe fn i_store(p: *mut u8, a: I) {
                _mm256_storeu_si256(p.cast(), a);
            }
            #[inline(always)]
            unsafe fn i_add(a: I, b: I) -> I {
                _mm256_add_epi32(a, b)
            }
            #[inline(always)]
            unsafe fn i_sub(a: I, b: I) -> I {
                _mm256_sub_epi32(a, b)
            }
            #[inline(always)]
            unsafe fn i_mul(a: I, b: I) -> I {
                _mm256_mullo_epi32(a, b)
            }
            #[inline(always)]
            unsafe fn i_and(a: I, b: I) -> I {
                _mm256_and_si256(a, b)
            }
            #[inline(always)]
            unsafe fn i_or(a: I, b: I) -> I {
                _mm256_or_si256(a, b)
            }
            #[inline(always)]
            unsafe fn i_xor(a: I, b: I) -> I {
                _mm256_xor_si256(a, b)
            }
            #[inline(always)]
            unsafe fn i_max(a: I, b: I) -> I {
                _mm256_max_epi32(a, b)
            }
            #[inline(always)]
            unsafe fn i_min_bytes(a: I, b: I) -> I {
                _mm256_min_epu8(a, b)
            }
            #[inline(always)]
            unsafe fn any_top_bit(a: I) -> bool {
                _mm256_movemask_epi8(a) != 0
            }
            #[inline(always)]
            unsafe fn i_shl_by(a: I, count: I) -> I {
                _mm256_sllv_epi32(a, count)
            }
            // The shift counts are vectors because stable Rust cannot turn a `u32` parameter into the intrinsic's `i32`
            // one; LLVM folds them into immediates.
            #[inline(always)]
            unsafe fn i_shl<const K: u32>(a: I) -> I {
                _mm256_sll_epi32(a, _mm_cvtsi32_si128(K as i32))
            }
            #[inline(always)]
            unsafe fn i_shr<const K: u32>(a: I) -> I {
                _mm256_srl_epi32(a, _mm_cvtsi32_si128(K as i32))
            }
            #[inline(always)]
            unsafe fn i_sra<const K: u32>(a: I) -> I {
                _mm256_sra_epi32(a, _mm_cvtsi32_si128(K as i32))
            }
            #[inline(always)]
            unsafe fn i_lookup(table: &[u8; 16], index: I) -> I {
                _mm256_shuffle_epi8(
                    _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())),
                    index,
                )
            }
            #[inline(always)]
            unsafe fn dp4(acc: I, w: I, x: I) -> I {
                $dp4(acc, w, x)
            }
            #[inline(always)]
            unsafe fn dp4_wide(acc: I, w: I, x: I) -> I {
                $dp4_wide(acc, w, x)
            }
            #[inline(always)]
            unsafe fn dp2(acc: I, a: I, b: I) -> I {
                $dp2(acc, a, b)
            }
            #[inline(always)]
            unsafe fn prefetch(p: *const u8) {
                _mm_prefetch::<_MM_HINT_T0>(p.cast());
            }
            #[inline(always)]
            unsafe fn dp4_digits(acc: I, w: I, x: I) -> I {
                $dp4_wide(acc, w, x)
            }
            #[inline(always)]
            unsafe fn widen(a: I) -> (I, I) {
                (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(a)), _mm256_srai_epi16::<8>(a))
            }
            #[inline(always)]
            unsafe fn store_bytes(p: *mut u8, a: I) {
                let bytes = _mm256_set1_epi32(0x0c08_0400);
                let words = _mm256_permutevar8x32_epi32(
                    _mm256_shuffle_epi8(a, bytes),
                    _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0),
                );
                _mm_storel_epi64(p.cast(), _mm256_castsi256_si128(words));
            }
            #[inline(always)]
            unsafe fn store_pairs(p: *mut u8, a: I) {
                let halves = _mm256_set1_epi64x(0x0d0c_0504_0908_0100);
                let pairs = _mm256_permute4x64_epi64::<0b1000>(_mm256_shuffle_epi8(a, halves));
                _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(pairs));
            }
            #[inline(always)]
            unsafe fn f_top(a: F) -> f32 {
                let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
                let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
                _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps::<1>(a, a)))
            }
            #[inline(always)]
            unsafe fn f_tree(parts: [F; 4]) -> f32 {
                tree8(_mm256_add_ps(parts[0], parts[1]))
            }
            #[inline(always)]
            unsafe fn i_sum(a: I) -> i32 {
                let a = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
                let a = _mm_add_epi32(a, _mm_shuffle_epi32::<0b1110>(a));
                _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32::<1>(a)))
            }
        }
    };
}

/// Eight lanes added as a tree: `l[i] + l[i + 4]`, `+ 2`, `+ 1`.
#[inline(always)]
pub(super) unsafe fn tree8(a: F) -> f32 {
    let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
    let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps::<1>(a, a)))
}

/// Pairs of products stay below 2 * 128 * 127 = 32,512, so the saturating 16-bit sums are exact.
#[inline(always)]
unsafe fn dp4_madd(acc: I, w: I, x: I) -> I {
    _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)))
}

/// Splits the weight at its top bit to stay inside the bound of [`dp4_madd`].
#[inline(always)]
unsafe fn dp4_madd_wide(acc: I, w: I, x: I) -> I {
    let low = _mm256_and_si256(w, _mm256_set1_epi8(0x7f));
    let high = _mm256_and_si256(w, _mm256_set1_epi8(-128));
    dp4_madd(dp4_madd(acc, low, x), high, x)
}

#[inline(always)]
unsafe fn dp2_madd(acc: I, a: I, b: I) -> I {
    _mm256_add_epi32(acc, _mm256_madd_epi16(a, b))
}

eight_lanes!(Avx2, false, true, 0, dp4_madd, dp4_madd_wide, dp2_madd);
eight_lanes!(
    AvxVnni,
    true,
    false,
    128,
    _mm256_dpbusd_avx_epi32,
    _mm256_dpbusd_avx_epi32,
    _mm256_dpwssd_avx_epi32
);
