//! Arm NEON with the dot product extension: 4 lanes. The dot product is inline assembly (its intrinsics are not stable).

use std::arch::aarch64::*;
use std::arch::asm;

use super::Simd;

/// Four lanes.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

type F = float32x4_t;
type I = int32x4_t;

/// `acc + sum of 4 products` per lane, all bytes signed.
#[inline(always)]
unsafe fn sdot(acc: I, a: int8x16_t, b: int8x16_t) -> I {
    let mut out = acc;
    asm!(
        ".arch_extension dotprod",
        "sdot {acc:v}.4s, {a:v}.16b, {b:v}.16b",
        acc = inout(vreg) out,
        a = in(vreg) a,
        b = in(vreg) b,
        options(pure, nomem, nostack, preserves_flags)
    );
    out
}

impl Simd for Neon {
    const N: usize = 4;
    const ANY_BYTE: bool = false;
    const QUERIES: usize = 4;
    const PAIRS: bool = false;
    const BIAS: i32 = 0;
    type F = F;
    type I = I;

    #[inline(always)]
    unsafe fn f_splat(x: f32) -> F {
        vdupq_n_f32(x)
    }
    #[inline(always)]
    unsafe fn f_load(p: *const f32) -> F {
        vld1q_f32(p)
    }
    #[inline(always)]
    unsafe fn f_store(p: *mut f32, a: F) {
        vst1q_f32(p, a);
    }
    #[inline(always)]
    unsafe fn f_add(a: F, b: F) -> F {
        vaddq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn f_sub(a: F, b: F) -> F {
        vsubq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn f_mul(a: F, b: F) -> F {
        vmulq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn f_div(a: F, b: F) -> F {
        vdivq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn f_fma(a: F, b: F, c: F) -> F {
        vfmaq_f32(c, a, b)
    }
    #[inline(always)]
    unsafe fn f_fnma(a: F, b: F, c: F) -> F {
        vfmsq_f32(c, a, b)
    }
    #[inline(always)]
    unsafe fn f_max(a: F, b: F) -> F {
        vbslq_f32(vcgtq_f32(a, b), a, b)
    }
    #[inline(always)]
    unsafe fn f_min(a: F, b: F) -> F {
        vbslq_f32(vcltq_f32(a, b), a, b)
    }
    #[inline(always)]
    unsafe fn f_zero_below(x: F, limit: F, value: F) -> F {
        vbslq_f32(vcltq_f32(x, limit), vdupq_n_f32(0.0), value)
    }
    #[inline(always)]
    unsafe fn f_load_f16(p: *const u16) -> F {
        // Through `half`: its conversion is exact, and the f16 intrinsics want a type that is not stable.
        let mut out = [0.0f32; 4];
        for (i, out) in out.iter_mut().enumerate() {
            *out = half::f16::from_bits(p.add(i).read_unaligned()).to_f32();
        }
        vld1q_f32(out.as_ptr())
    }
    #[inline(always)]
    unsafe fn f_from_half(a: I) -> F {
        let mut lanes = [0i32; 4];
        vst1q_s32(lanes.as_mut_ptr(), a);
        vld1q_f32(lanes.map(|x| half::f16::from_bits(x as u16).to_f32()).as_ptr())
    }
    #[inline(always)]
    unsafe fn f_store_f16(p: *mut u16, a: F) {
        let mut lanes = [0.0f32; 4];
        vst1q_f32(lanes.as_mut_ptr(), a);
        for (i, x) in lanes.into_iter().enumerate() {
            p.add(i).write_unaligned(half::f16::from_f32(x).to_bits());
        }
    }
    #[inline(always)]
    unsafe fn f_load_bf16(p: *const u16) -> F {
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p)))
    }
    #[inline(always)]
    unsafe fn f_to_i(a: F) -> I {
        vcvtnq_s32_f32(a)
    }
    #[inline(always)]
    unsafe fn f_from_i(a: I) -> F {
        vcvtq_f32_s32(a)
    }
    #[inline(always)]
    unsafe fn f_from_bits(a: I) -> F {
        vreinterpretq_f32_s32(a)
    }
    #[inline(always)]
    unsafe fn f_to_bits(a: F) -> I {
        vreinterpretq_s32_f32(a)
    }

    #[inline(always)]
    unsafe fn i_splat(x: i32) -> I {
        vdupq_n_s32(x)
    }
    #[inline(always)]
    unsafe fn i_load(p: *const u8) -> I {
        vreinterpretq_s32_u8(vld1q_u8(p))
    }
    #[inline(always)]
    unsafe fn i_store(p: *mut u8, a: I) {
        vst1q_u8(p, vreinterpretq_u8_s32(a));
    }
    #[inline(always)]
    unsafe fn i_add(a: I, b: I) -> I {
        vaddq_s32(a, b)
    }
    #[inline(always)]
    unsafe fn i_sub(a: I, b: I) -> I {
        vsubq_s32(a, b)
    }
    #[inline(always)]
    unsafe fn i_mul(a: I, b: I) -> I {
        vmulq_s32(a, b)
    }
    #[inline(always)]
    unsafe fn i_and(a: I, b: I) -> I {
        vandq_s32(a, b)
    }
    #[inline(always)]
    unsafe fn i_or(a: I, b: I) -> I {
        vorrq_s32(a, b)
    }
    #[inline(always)]
    unsafe fn i_xor(a: I, b: I) -> I {
        veorq_s32(a, b)
    }
    #[inline(always)]
    unsafe fn i_max(a: I, b: I) -> I {
        vmaxq_s32(a, b)
    }
    #[inline(always)]
    unsafe fn i_min_bytes(a: I, b: I) -> I {
        vreinterpretq_s32_u8(vminq_u8(vreinterpretq_u8_s32(a), vreinterpretq_u8_s32(b)))
    }
    #[inline(always)]
    unsafe fn any_top_bit(a: I) -> bool {
        vmaxvq_u8(vreinterpretq_u8_s32(a)) > 127
    }
    #[inline(always)]
    unsafe fn i_shl_by(a: I, count: I) -> I {
        vshlq_s32(a, count)
    }
    #[inline(always)]
    unsafe fn i_shl<const K: u32>(a: I) -> I {
        vshlq_s32(a, vdupq_n_s32(K as i32))
    }
    #[inline(always)]
    unsafe fn i_shr<const K: u32>(a: I) -> I {
        vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-(K as i32))))
    }
    #[inline(always)]
    unsafe fn i_sra<const K: u32>(a: I) -> I {
        vshlq_s32(a, vdupq_n_s32(-(K as i32)))
    }
    #[inline(always)]
    unsafe fn i_lookup(table: &[u8; 16], index: I) -> I {
        vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table.as_ptr()), vreinterpretq_u8_s32(index)))
    }
    #[inline(always)]
    unsafe fn dp4(acc: I, w: I, x: I) -> I {
        sdot(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x))
    }
    #[inline(always)]
    unsafe fn dp4_wide(acc: I, w: I, x: I) -> I {
        // u = (u - 128) + 128: the signed dot, plus 128 times the sum of x.
        let (w, x) = (vreinterpretq_u8_s32(w), vreinterpretq_s8_s32(x));
        let signed = vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(0x80)));
        let sum = sdot(vdupq_n_s32(0), vdupq_n_s8(1), x);
        vaddq_s32(sdot(acc, signed, x), vshlq_n_s32::<7>(sum))
    }
    #[inline(always)]
    unsafe fn dp2(acc: I, a: I, b: I) -> I {
        let (a, b) = (vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b));
        let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
        let high = vmull_high_s16(a, b);
        vaddq_s32(acc, vpaddq_s32(low, high))
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn dp4_digits(acc: I, w: I, x: I) -> I {
        sdot(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x))
    }
    #[inline(always)]
    unsafe fn f_top(a: F) -> f32 {
        vmaxvq_f32(a)
    }
    #[inline(always)]
    unsafe fn i_sum(a: I) -> i32 {
        vaddvq_s32(a)
    }
}
