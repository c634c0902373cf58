//! AVX-512 F/BW/VL/DQ with VNNI: 16 lanes, one instruction for four byte products.

use std::arch::x86_64::*;

use super::Simd;

/// Sixteen lanes.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

type F = __m512;
type I = __m512i;

impl Simd for Avx512 {
    const N: usize = 16;
    const ANY_BYTE: bool = true;
    const QUERIES: usize = 8;
    const PAIRS: bool = false;
    const HALVES: bool = true;
    const BIAS: i32 = 128;
    type F = F;
    type I = I;

    #[inline(always)]
    unsafe fn f_splat(x: f32) -> F {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn f_load(p: *const f32) -> F {
        _mm512_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn f_store(p: *mut f32, a: F) {
        _mm512_storeu_ps(p, a);
    }
    #[inline(always)]
    unsafe fn f_add(a: F, b: F) -> F {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn f_sub(a: F, b: F) -> F {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn f_mul(a: F, b: F) -> F {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn f_div(a: F, b: F) -> F {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn f_fma(a: F, b: F, c: F) -> F {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn f_fnma(a: F, b: F, c: F) -> F {
        _mm512_fnmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn f_max(a: F, b: F) -> F {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn f_min(a: F, b: F) -> F {
        _mm512_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn f_zero_below(x: F, limit: F, value: F) -> F {
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit), value)
    }
    #[inline(always)]
    unsafe fn f_load_f16(p: *const u16) -> F {
        _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn f_from_half(a: I) -> F {
        _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a))
    }
    #[inline(always)]
    unsafe fn f_store_f16(p: *mut u16, a: F) {
        _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a));
    }
    #[inline(always)]
    unsafe fn f_load_bf16(p: *const u16) -> F {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))))
    }
    #[inline(always)]
    unsafe fn f_to_i(a: F) -> I {
        _mm512_cvtps_epi32(a)
    }
    #[inline(always)]
    unsafe fn f_from_i(a: I) -> F {
        _mm512_cvtepi32_ps(a)
    }
    #[inline(always)]
    unsafe fn f_from_bits(a: I) -> F {
        _mm512_castsi512_ps(a)
    }
    #[inline(always)]
    unsafe fn f_to_bits(a: F) -> I {
        _mm512_castps_si512(a)
    }

    #[inline(always)]
    unsafe fn i_splat(x: i32) -> I {
        _mm512_set1_epi32(x)
    }
    #[inline(always)]
    unsafe fn i_load(p: *const u8) -> I {
        _mm512_loadu_si512(p.cast())
    }
    #[inline(always)]
    unsafe fn i_store(p: *mut u8, a: I) {
        _mm512_storeu_si512(p.cast(), a);
    }
    #[inline(always)]
    unsafe fn i_add(a: I, b: I) -> I {
        _mm512_add_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn i_sub(a: I, b: I) -> I {
        _mm512_sub_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn i_mul(a: I, b: I) -> I {
        _mm512_mullo_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn i_and(a: I, b: I) -> I {
        _mm512_and_si512(a, b)
    }
    #[inline(always)]
    unsafe fn i_or(a: I, b: I) -> I {
        _mm512_or_si512(a, b)
    }
    #[inline(always)]
    unsafe fn i_xor(a: I, b: I) -> I {
        _mm512_xor_si512(a, b)
    }
    #[inline(always)]
    unsafe fn i_max(a: I, b: I) -> I {
        _mm512_max_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn i_min_bytes(a: I, b: I) -> I {
        _mm512_min_epu8(a, b)
    }
    #[inline(always)]
    unsafe fn any_top_bit(a: I) -> bool {
        _mm512_movepi8_mask(a) != 0
    }
    #[inline(always)]
    unsafe fn i_shl_by(a: I, count: I) -> I {
        _mm512_sllv_epi32(a, count)
    }
    #[inline(always)]
    unsafe fn i_shl_halves(a: I, count: I) -> I {
        _mm512_sllv_epi16(a, count)
    }
    #[inline(always)]
    unsafe fn i_pair(a: I, b: I) -> I {
        _mm512_mask_blend_epi16(0xaaaa_aaaa, a, _mm512_slli_epi32::<16>(b))
    }
    #[inline(always)]
    unsafe fn i_interleave(a: I) -> I {
        _mm512_shuffle_epi8(
            a,
            _mm512_broadcast_i32x4(_mm_set_epi8(15, 13, 14, 12, 11, 9, 10, 8, 7, 5, 6, 4, 3, 1, 2, 0)),
        )
    }
    #[inline(always)]
    unsafe fn i_shl<const K: u32>(a: I) -> I {
        _mm512_slli_epi32::<K>(a)
    }
    #[inline(always)]
    unsafe fn i_shr<const K: u32>(a: I) -> I {
        _mm512_srli_epi32::<K>(a)
    }
    #[inline(always)]
    unsafe fn i_sra<const K: u32>(a: I) -> I {
        _mm512_srai_epi32::<K>(a)
    }
    #[inline(always)]
    unsafe fn i_lookup(table: &[u8; 16], index: I) -> I {
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), index)
    }
    #[inline(always)]
    unsafe fn dp4(acc: I, w: I, x: I) -> I {
        _mm512_dpbusd_epi32(acc, w, x)
    }
    #[inline(always)]
    unsafe fn dp4_wide(acc: I, w: I, x: I) -> I {
        _mm512_dpbusd_epi32(acc, w, x)
    }
    // Not `pure`: the compiler would gather the loads of adjacent rows, and move loads of weights away from their uses.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn dp4_row<
        const C: usize,
        const H: usize,
        const J: usize,
        const T: usize,
        const R: usize,
        const WIDE: bool,
    >(
        mut acc: I,
        w: I,
        x: *const u8,
        _width: usize,
    ) -> I {
        std::arch::asm!(
            "vpdpbusd {acc}, {w}, dword ptr [{x} + {at}]{{1to16}}",
            acc = inout(zmm_reg) acc,
            w = in(zmm_reg) w,
            x = in(reg) x,
            at = const ((16 * C + 8 * H + J) * T + R) * 4,
            options(readonly, nostack, preserves_flags),
        );
        acc
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn here(mut a: I) -> I {
        std::arch::asm!("/* {a} */", a = inout(zmm_reg) a, options(nomem, nostack, preserves_flags));
        a
    }
    #[inline(always)]
    unsafe fn dp2(acc: I, a: I, b: I) -> I {
        _mm512_dpwssd_epi32(acc, a, b)
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
    #[inline(always)]
    unsafe fn dp4_digits(acc: I, w: I, x: I) -> I {
        _mm512_dpbusd_epi32(acc, w, x)
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, a: I) {
        _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(a));
    }
    #[inline(always)]
    unsafe fn f_top(a: F) -> f32 {
        _mm512_reduce_max_ps(a)
    }
    #[inline(always)]
    unsafe fn f_tree(parts: [F; 4]) -> f32 {
        let a = parts[0];
        super::avx2::tree8(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a)))
    }
    #[inline(always)]
    unsafe fn i_sum(a: I) -> i32 {
        _mm512_reduce_add_epi32(a)
    }
}
