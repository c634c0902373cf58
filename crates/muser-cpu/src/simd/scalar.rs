//! Plain Rust: the reference for the other instruction sets, and what runs where there are none.

use half::f16;

use super::Simd;

/// Eight lanes in arrays.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

const N: usize = 8;
type F = [f32; N];
type I = [i32; N];

#[inline]
fn map2<A: Copy, B: Copy, R: Copy + Default>(a: [A; N], b: [B; N], f: impl Fn(A, B) -> R) -> [R; N] {
    let mut out = [R::default(); N];
    for i in 0..N {
        out[i] = f(a[i], b[i]);
    }
    out
}

impl Simd for Scalar {
    const N: usize = N;
    const ANY_BYTE: bool = true;
    const QUERIES: usize = 4;
    const PAIRS: bool = false;
    // So that what other sets do in one instruction is tested.
    const HALVES: bool = true;
    const BIAS: i32 = 0;
    type F = F;
    type I = I;

    #[inline]
    unsafe fn f_splat(x: f32) -> F {
        [x; N]
    }
    #[inline]
    unsafe fn f_load(p: *const f32) -> F {
        p.cast::<F>().read_unaligned()
    }
    #[inline]
    unsafe fn f_store(p: *mut f32, a: F) {
        p.cast::<F>().write_unaligned(a);
    }
    #[inline]
    unsafe fn f_add(a: F, b: F) -> F {
        map2(a, b, |a, b| a + b)
    }
    #[inline]
    unsafe fn f_sub(a: F, b: F) -> F {
        map2(a, b, |a, b| a - b)
    }
    #[inline]
    unsafe fn f_mul(a: F, b: F) -> F {
        map2(a, b, |a, b| a * b)
    }
    #[inline]
    unsafe fn f_div(a: F, b: F) -> F {
        map2(a, b, |a, b| a / b)
    }
    #[inline]
    unsafe fn f_fma(a: F, b: F, c: F) -> F {
        let mut out = c;
        for i in 0..N {
            out[i] = a[i].mul_add(b[i], c[i]);
        }
        out
    }
    #[inline]
    unsafe fn f_fnma(a: F, b: F, c: F) -> F {
        let mut out = c;
        for i in 0..N {
            out[i] = (-a[i]).mul_add(b[i], c[i]);
        }
        out
    }
    #[inline]
    unsafe fn f_max(a: F, b: F) -> F {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline]
    unsafe fn f_min(a: F, b: F) -> F {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline]
    unsafe fn f_zero_below(x: F, limit: F, value: F) -> F {
        let mut out = value;
        for i in 0..N {
            if x[i] < limit[i] {
                out[i] = 0.0;
            }
        }
        out
    }
    #[inline]
    unsafe fn f_load_f16(p: *const u16) -> F {
        p.cast::<[u16; N]>().read_unaligned().map(|h| f16::from_bits(h).to_f32())
    }
    #[inline]
    unsafe fn f_from_half(a: I) -> F {
        a.map(|x| f16::from_bits(x as u16).to_f32())
    }
    #[inline]
    unsafe fn f_store_f16(p: *mut u16, a: F) {
        p.cast::<[u16; N]>().write_unaligned(a.map(|x| f16::from_f32(x).to_bits()));
    }
    #[inline]
    unsafe fn f_load_bf16(p: *const u16) -> F {
        p.cast::<[u16; N]>().read_unaligned().map(|h| f32::from_bits(u32::from(h) << 16))
    }
    #[inline]
    unsafe fn f_to_i(a: F) -> I {
        a.map(|x| x.round_ties_even() as i32)
    }
    #[inline]
    unsafe fn f_from_i(a: I) -> F {
        a.map(|x| x as f32)
    }
    #[inline]
    unsafe fn f_from_bits(a: I) -> F {
        a.map(|x| f32::from_bits(x as u32))
    }
    #[inline]
    unsafe fn f_to_bits(a: F) -> I {
        a.map(|x| x.to_bits() as i32)
    }

    #[inline]
    unsafe fn i_splat(x: i32) -> I {
        [x; N]
    }
    #[inline]
    unsafe fn i_load(p: *const u8) -> I {
        p.cast::<I>().read_unaligned()
    }
    #[inline]
    unsafe fn i_store(p: *mut u8, a: I) {
        p.cast::<I>().write_unaligned(a);
    }
    #[inline]
    unsafe fn i_add(a: I, b: I) -> I {
        map2(a, b, i32::wrapping_add)
    }
    #[inline]
    unsafe fn i_sub(a: I, b: I) -> I {
        map2(a, b, i32::wrapping_sub)
    }
    #[inline]
    unsafe fn i_mul(a: I, b: I) -> I {
        map2(a, b, i32::wrapping_mul)
    }
    #[inline]
    unsafe fn i_and(a: I, b: I) -> I {
        map2(a, b, |a, b| a & b)
    }
    #[inline]
    unsafe fn i_or(a: I, b: I) -> I {
        map2(a, b, |a, b| a | b)
    }
    #[inline]
    unsafe fn i_xor(a: I, b: I) -> I {
        map2(a, b, |a, b| a ^ b)
    }
    #[inline]
    unsafe fn i_max(a: I, b: I) -> I {
        map2(a, b, |a: i32, b| a.max(b))
    }
    #[inline]
    unsafe fn i_min_bytes(a: I, b: I) -> I {
        map2(a, b, |a: i32, b: i32| {
            let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
            i32::from_le_bytes(std::array::from_fn(|i| a[i].min(b[i])))
        })
    }
    #[inline]
    unsafe fn any_top_bit(a: I) -> bool {
        a.iter().any(|&x| x as u32 & 0x8080_8080 != 0)
    }
    #[inline]
    unsafe fn i_shl_by(a: I, count: I) -> I {
        map2(a, count, |a: i32, count: i32| ((a as u32) << count) as i32)
    }
    #[inline]
    unsafe fn i_shl<const K: u32>(a: I) -> I {
        a.map(|x| ((x as u32) << K) as i32)
    }
    #[inline]
    unsafe fn i_shr<const K: u32>(a: I) -> I {
        a.map(|x| ((x as u32) >> K) as i32)
    }
    #[inline]
    unsafe fn i_sra<const K: u32>(a: I) -> I {
        a.map(|x| x >> K)
    }
    #[inline]
    unsafe fn i_lookup(table: &[u8; 16], index: I) -> I {
        index.map(|x| i32::from_le_bytes(x.to_le_bytes().map(|i| table[usize::from(i & 15)])))
    }
    #[inline]
    unsafe fn dp4(acc: I, w: I, x: I) -> I {
        let mut out = acc;
        for i in 0..N {
            let (w, x) = (w[i].to_le_bytes(), x[i].to_le_bytes());
            for j in 0..4 {
                out[i] = out[i].wrapping_add(i32::from(w[j]) * i32::from(x[j] as i8));
            }
        }
        out
    }
    #[inline]
    unsafe fn dp4_wide(acc: I, w: I, x: I) -> I {
        Self::dp4(acc, w, x)
    }
    #[inline]
    unsafe fn dp2(acc: I, a: I, b: I) -> I {
        let mut out = acc;
        for i in 0..N {
            let low = i32::from(a[i] as i16) * i32::from(b[i] as i16);
            let high = (a[i] >> 16) * (b[i] >> 16);
            out[i] = out[i].wrapping_add(low).wrapping_add(high);
        }
        out
    }
    #[inline]
    unsafe fn prefetch(_: *const u8) {}
    #[inline]
    unsafe fn dp4_digits(acc: I, w: I, x: I) -> I {
        let mut out = acc;
        for i in 0..N {
            let (w, x) = (w[i].to_le_bytes(), x[i].to_le_bytes());
            for j in 0..4 {
                out[i] = out[i].wrapping_add(i32::from(w[j] as i8) * i32::from(x[j] as i8));
            }
        }
        out
    }
}
