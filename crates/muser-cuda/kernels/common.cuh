// Types, PTX wrappers and the activation format, shared by all kernels.
//
// No CUDA header is included: NVRTC alone compiles these files. All f32 arithmetic is explicit (__fmaf_rn, __fmul_rn,
// __fadd_rn) and the files are compiled with --fmad=false, so that the order and the rounding of every operation is
// written here and nowhere else.
#pragma once

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

// Quantised activations of up to `ld` rows with k values each.
//   q    [ld][k]          int8, one scale per 256; in each 64 values permuted by perm64 (or tiled, see tiled_at)
//   d    [k / 256][ld]    f32 scale
//   sums [k / 256][ld]    16 bytes: sums of 32 values as lo + 128 hi: {lo[0..3], hi[0..3], lo[4..7], hi[4..7]};
//                         tiled: 32 bytes: sums of 16 values as f16 (at most 2,032: exact); rows 4 to 7 of 8 have the halves swapped
//   q32  [ld][k]          int8, one scale per 32, permuted alike
//   d32  [k / 256][ld][8] f32 scale
//   f    [ld][k]          the values themselves, for float weights
// q, q32 or f is null when no matrix that reads this buffer wants that format.
struct Act {
  i8* q;
  float* d;
  u8* sums;
  i8* q32;
  float* d32;
  float* f;
  u32 k;
  u32 ld;
  u32 tiled;
};

// Position of value k (0..255) of a super-block: a lane's four B registers of two groups are 16 contiguous bytes.
DEVICE int perm64(int k) {
  return (k & ~63) + ((k & 15) >> 2) * 16 + ((k >> 5) & 1) * 8 + ((k >> 4) & 1) * 4 + (k & 3);
}

// Place of value k (0..255) of super-block kb of a row in tiled q: a run of 32 KB for 128 rows x 256 values, which is the
// image that warpgroup multiplication reads from shared memory: two halves of 128 values, a row of 128 bytes each, 16-byte
// pieces swizzled by the row. Values stay in order.
DEVICE u64 tiled_at(const Act& a, int col, int kb, int k) {
  const u64 tile = ((u64)(col >> 7) * (a.k / 256) + kb) * 32768;
  return tile + (k >> 7) * 16384 + (col & 127) * 128 + ((((k >> 4) & 7) ^ (col & 7)) << 4) + (k & 15);
}

// K segment s of S covers super-blocks [seg_begin(s), seg_begin(s + 1)).
DEVICE int seg_begin(int s, int kb, int S) { return s * kb / S; }

// --- programmatic dependent launch: every kernel waits before it touches what an earlier kernel touches
DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void pdl_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- memory
DEVICE u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void cp16(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
DEVICE void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
DEVICE uint4 lds128(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
DEVICE void sts128(u32 a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void sts64(u32 a, uint2 v) { asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(v.x), "r"(v.y) : "memory"); }
DEVICE uint2 lds64(u32 a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
DEVICE u32 lds32(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
// Past L1: the data was written by another kernel that may still have been running when this one started.
DEVICE float4 ldcg4(const float* p) { return __ldcg((const float4*)p); }
DEVICE void spread8(float (&v)[8], const float4& a, const float4& b) {
  v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
  v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}
DEVICE void load8(float (&v)[8], const float* p) { spread8(v, ldcg4(p), ldcg4(p + 4)); }
// Of a vector that no kernel writes: such loads may pass stores, and stay in the first-level cache.
DEVICE void load8_constant(float (&v)[8], const float* p) { spread8(v, __ldg((const float4*)p), __ldg((const float4*)p + 1)); }
// Sums of S segment sums, ascending. Four are asked for at once: one after the other, each would take a round trip.
struct Segments8 {
  float4 a[4], b[4];
  DEVICE void load(const float* p, u64 step, int S) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
      if (s < S) {
        a[s] = ldcg4(p + s * step);
        b[s] = ldcg4(p + s * step + 4);
      }
    }
  }
  DEVICE void add_up(float (&v)[8], const float* p, u64 step, int S) const {
    spread8(v, a[0], b[0]);
    auto add = [&](const float4& x, const float4& y) {
      v[0] = __fadd_rn(v[0], x.x); v[1] = __fadd_rn(v[1], x.y); v[2] = __fadd_rn(v[2], x.z); v[3] = __fadd_rn(v[3], x.w);
      v[4] = __fadd_rn(v[4], y.x); v[5] = __fadd_rn(v[5], y.y); v[6] = __fadd_rn(v[6], y.z); v[7] = __fadd_rn(v[7], y.w);
    };
#pragma unroll
    for (int s = 1; s < 4; s++) {
      if (s < S) add(a[s], b[s]);
    }
#pragma unroll 1
    for (int s = 4; s < S; s++) add(ldcg4(p + s * step), ldcg4(p + s * step + 4));
  }
};
DEVICE void sum8(float (&v)[8], const float* p, u64 step, int S) {
  Segments8 segments;
  segments.load(p, step, S);
  segments.add_up(v, p, step, S);
}
DEVICE float4 sum4(const float* p, u64 step, int S) {
  float4 a[4];
#pragma unroll
  for (int s = 0; s < 4; s++) {
    if (s < S) a[s] = ldcg4(p + s * step);
  }
  float4 v = a[0];
  auto add = [&](const float4& x) {
    v.x = __fadd_rn(v.x, x.x); v.y = __fadd_rn(v.y, x.y); v.z = __fadd_rn(v.z, x.z); v.w = __fadd_rn(v.w, x.w);
  };
#pragma unroll
  for (int s = 1; s < 4; s++) {
    if (s < S) add(a[s]);
  }
#pragma unroll 1
  for (int s = 4; s < S; s++) add(ldcg4(p + s * step));
  return v;
}
DEVICE float sum1(const float* p, u64 step, int S) {
  float a[4];
#pragma unroll
  for (int s = 0; s < 4; s++) {
    if (s < S) a[s] = __ldcg(p + s * step);
  }
  float v = a[0];
#pragma unroll
  for (int s = 1; s < 4; s++) {
    if (s < S) v = __fadd_rn(v, a[s]);
  }
#pragma unroll 1
  for (int s = 4; s < S; s++) v = __fadd_rn(v, __ldcg(p + s * step));
  return v;
}

// Factors of the matrices that output rows belong to, the last step of a product; null: all are 1.
DEVICE void times_factors8(float (&v)[8], const float* factors, u64 at) {
  if (!factors) return;
  float f[8];
  load8(f, factors + at);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = __fmul_rn(v[i], f[i]);
}
DEVICE float times_factor(float v, const float* factors, u64 at) { return factors ? __fmul_rn(v, __ldcg(factors + at)) : v; }

// --- half precision
DEVICE float half_to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
DEVICE u16 float_to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
DEVICE float low_half(u32 v) { return half_to_float((u16)v); }
DEVICE float high_half(u32 v) { return half_to_float((u16)(v >> 16)); }

// --- the functions of `muser_backend::arith`, operation by operation
DEVICE float inverse_rms(float square_sum, u32 len, float eps) {
  return __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(square_sum, (float)len), eps)));
}
// x + TO_INTEGER is the integer nearest to x (ties to even) in its lowest bits, if that is below 2^22: an addition takes the place of a
// conversion, which runs at an eighth of the rate.
constexpr float TO_INTEGER = 12582912.f;
// e^x of what is at most 88.37: exactly 0 below -87.33, exactly 1 for 0.
DEVICE float exp_bounded(float x) {
  const float rounded = __fadd_rn(__fmul_rn(x, 1.44269504088896340736f), TO_INTEGER), n = __fsub_rn(rounded, TO_INTEGER);
  float r = __fmaf_rn(-n, 0.6933594f, x);
  r = __fmaf_rn(-n, -2.1219444e-4f, r);
  float p = 1.f / 5040.f;
  p = __fmaf_rn(p, r, 1.f / 720.f);
  p = __fmaf_rn(p, r, 1.f / 120.f);
  p = __fmaf_rn(p, r, 1.f / 24.f);
  p = __fmaf_rn(p, r, 1.f / 6.f);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.f);
  p = __fmaf_rn(p, r, 1.f);
  return x < -87.33654f ? 0.f : __fmul_rn(p, __uint_as_float((__float_as_uint(rounded) + 127) << 23));
}
// e^x, of 88.37 for all that is larger.
DEVICE float exp_exact(float x) {
  const float high = 88.37626f;
  return exp_bounded(high < x ? high : x);
}
DEVICE float sigmoid(float x) { return __fdiv_rn(1.f, __fadd_rn(1.f, exp_exact(__fsub_rn(0.f, x)))); }
DEVICE float silu_times(float g, float u) {
  return __fmul_rn(__fdiv_rn(g, __fadd_rn(1.f, exp_exact(__fsub_rn(0.f, g)))), u);
}
DEVICE float tanh_exact(float x) {
  return __fsub_rn(1.f, __fdiv_rn(2.f, __fadd_rn(exp_exact(__fadd_rn(x, x)), 1.f)));
}

// --- order of logits
// The larger the logit and the smaller the id, the larger the key; all ones where a logit is not finite.
DEVICE u64 rank_of(float v, u32 id) {
  if (!(fabsf(v) <= 3.402823466e38f)) return ~0ull;
  const u32 bits = __float_as_uint(__fadd_rn(v, 0.f));  // -0 ranks like 0
  return (u64)(bits >> 31 ? ~bits : bits | 1u << 31) << 32 | (~id & 0x7FFFFFFFu);
}

// --- scale and min of group j (32 values) of Q4_K and Q5_K
DEVICE void scale_min(const u8* s, int j, u32& sc, u32& mn) {
  if (j < 4) {
    sc = s[j] & 63;
    mn = s[j + 4] & 63;
  } else {
    sc = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    mn = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
  }
}

// --- scale of a group of NVFP4: the E4M3 number in steps of 2^-9, sign ignored, NaN taken as 0
DEVICE int nvfp4_integer(u32 x) {
  const u32 e = x >> 3 & 15, m = x & 7;
  return (x & 0x7F) == 0x7F ? 0 : (int)(e ? (8 + m) << (e - 1) : m);
}

// --- tensor cores
DEVICE void mma32_u8s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}
DEVICE void mma32_s8s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}
DEVICE void mma32_u8s8_add(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma16_u8s8(int (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
DEVICE void mma16_s8s8(int (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(b0), "r"(0));
}
// The negatives of four signed bytes, none of which is -128.
DEVICE u32 negated4(u32 x) { return ((x ^ 0x7F7F7F7Fu) + 0x01010101u) ^ 0x80808080u; }
DEVICE int ubyte(u32 v, int i) { return (int)__byte_perm(v, 0, 0x4440 + i); }
DEVICE int sbyte(u32 v, int i) {
  int r;  // selector nibbles with the top bit set replicate the sign
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(v), "r"(i | (i | 8) * 0x1110));
  return r;
}

// --- quantising one super-block of 256 values with one warp, 8 values per lane
DEVICE u32 pack4(const int* q) {
  return (q[0] & 255) | (q[1] & 255) << 8 | (q[2] & 255) << 16 | (u32)q[3] << 24;
}
// Codes of four values, bytes: the integers nearest to x r, all within a signed byte.
DEVICE u32 codes4(const float* x, float r) {
  u32 q[4];
#pragma unroll
  for (int i = 0; i < 4; i++) q[i] = __float_as_uint(__fadd_rn(__fmul_rn(x[i], r), TO_INTEGER));
  return __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
}
DEVICE int sum_of_codes(u32 codes, int before) {
  int r;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(codes), "r"(0x01010101), "r"(before));
  return r;
}
// The larger one, or NaN if there is one.
DEVICE float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
constexpr float MOST = 3.402823466e38f;
// 8 values a lane of super-block kb of row col, in all formats that are wanted; a run with what is not finite has codes 0 and the scale NaN.
DEVICE void quantise_block(const float (&x)[8], int col, int kb, int lane, const Act& a) {
  float m8 = 0.f;  // NaN or infinity where anything is
#pragma unroll
  for (int i = 0; i < 8; i++) m8 = max_or_nan(m8, fabsf(x[i]));
  if (a.f) {
    float* f = a.f + (u64)col * a.k + kb * 256 + lane * 8;
    *(float4*)f = make_float4(x[0], x[1], x[2], x[3]);
    *(float4*)(f + 4) = make_float4(x[4], x[5], x[6], x[7]);
  }
  const float nan = __int_as_float(0x7FC00000);
  if (a.q32) {
    float m32 = max_or_nan(m8, __shfl_xor_sync(~0u, m8, 1));
    m32 = max_or_nan(m32, __shfl_xor_sync(~0u, m32, 2));
    const bool ok = m32 <= MOST;
    const float r = m32 > 0.f ? __fdiv_rn(127.f, m32) : 0.f;
    const bool tiny = !(r <= MOST);
    i8* dst = a.q32 + (u64)col * a.k + kb * 256;
    *(u32*)(dst + perm64(lane * 8)) = ok && !tiny ? codes4(x, r) : 0;
    *(u32*)(dst + perm64(lane * 8 + 4)) = ok && !tiny ? codes4(x + 4, r) : 0;
    if ((lane & 3) == 0) a.d32[((u64)kb * a.ld + col) * 8 + (lane >> 2)] = !ok ? nan : tiny ? 0.f : __fdiv_rn(m32, 127.f);
  }
  if (a.q) {
    // Bits of floats that are not negative are in the floats' order, NaN last.
    const float m = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(m8)));
    const bool ok = m <= MOST;
    // Both quotients by one division: odd lanes have 127 / m, even ones m / 127.
    const bool odd = lane & 1;
    const float mine = __fdiv_rn(odd ? 127.f : m, odd ? m : 127.f), other = __shfl_xor_sync(~0u, mine, 1);
    const float r = m > 0.f ? (odd ? mine : other) : 0.f, d = odd ? other : mine;
    const bool tiny = !(r <= MOST);
    const u32 q0 = ok && !tiny ? codes4(x, r) : 0, q1 = ok && !tiny ? codes4(x + 4, r) : 0;
    int s = sum_of_codes(q1, sum_of_codes(q0, 0));
    s += __shfl_xor_sync(~0u, s, 1);
    if (a.tiled) {
      *(uint2*)(a.q + tiled_at(a, col, kb, lane * 8)) = make_uint2(q0, q1);
      if ((lane & 1) == 0) ((u16*)a.sums)[((u64)kb * a.ld + col) * 16 + ((lane >> 1) ^ ((col & 4) << 1))] = float_to_half((float)s);
    } else {
      i8* dst = a.q + (u64)col * a.k + kb * 256;
      *(u32*)(dst + perm64(lane * 8)) = q0;
      *(u32*)(dst + perm64(lane * 8 + 4)) = q1;
      s += __shfl_xor_sync(~0u, s, 2);
      if ((lane & 3) == 0) {
        const int grp = lane >> 2, lo = ((s + 64) & 127) - 64, hi = (s - lo) >> 7;
        u8* u = a.sums + ((u64)kb * a.ld + col) * 16 + (grp >> 2) * 8 + (grp & 3);
        u[0] = (u8)lo;
        u[4] = (u8)hi;
      }
    }
    if (lane == 0) a.d[(u64)kb * a.ld + col] = !ok ? nan : tiny ? 0.f : d;
  }
}
