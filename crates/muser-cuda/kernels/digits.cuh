// Weights as two digits with the scales of their groups folded in, for warpgroup products; matmul_fused.cu says why.
#pragma once
#include "tiles.cuh"

// Shared memory of a warp beside its tile, for NVFP4's scales as integers.
__device__ constexpr int digit_scratch_bytes(int qt) { return qt == NV4 ? 512 : 0; }

template <int QT> __device__ constexpr bool has_mins() { return QT == Q4K || QT == Q5K; }

// The digits of a warp's row tile, group of 32 by group.
template <int QT> struct Digits;
template <bool FIVE> struct DigitsMin {
  static constexpr bool SIGNED = false;
  static constexpr int BASE = 8;
  u32 high[2][2], low[2][2];  // digits of the scales, a byte a group
  uint4 fifth, q;
  DEVICE DigitsMin(u32 w, int g, int lane, u32) {
    const uint4 m = lds128(w + (FIVE ? 2560 : 2048) + g * 32);
    const u32 s[2][2] = {{(m.x & 0x0F0F0F0Fu) | ((m.z << 4) & 0x30303030u), ((m.x >> 4) & 0x0F0F0F0Fu) | ((m.z << 2) & 0x30303030u)},
                         {(m.y & 0x0F0F0F0Fu) | (m.z & 0x30303030u), ((m.y >> 4) & 0x0F0F0F0Fu) | ((m.z >> 2) & 0x30303030u)}};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      high[i >> 1][i & 1] = (s[i >> 1][i & 1] >> 3) & 0x07070707u;
      low[i >> 1][i & 1] = s[i >> 1][i & 1] & 0x07070707u;
    }
    if constexpr (FIVE) fifth = lds128(w + 2048 + lane * 16);
  }
  DEVICE void group(u32 (&hi)[4], u32 (&lo)[4], u32 w, int lane, int grp) {
    if ((grp & 1) == 0) q = lds128(w + (grp >> 1) * 512 + lane * 16);
    const u32 qa = grp & 1 ? q.z : q.x, qb = grp & 1 ? q.w : q.y;
    u32 v[4] = {qa & 0x0F0F0F0Fu, (qa >> 4) & 0x0F0F0F0Fu, qb & 0x0F0F0F0Fu, (qb >> 4) & 0x0F0F0F0Fu};
    if constexpr (FIVE) {
      auto bit = [&](u32 x) { return (grp < 4 ? x << (4 - grp) : x >> (grp - 4)) & 0x10101010u; };
      v[0] |= bit(fifth.x); v[1] |= bit(fifth.y); v[2] |= bit(fifth.z); v[3] |= bit(fifth.w);
    }
#pragma unroll
    for (int f = 0; f < 4; f++) {  // row g or g + 8; at most 31 * 7 a byte: no carries
      hi[f] = v[f] * (u32)ubyte(high[f & 1][grp >> 2], grp & 3);
      lo[f] = v[f] * (u32)ubyte(low[f & 1][grp >> 2], grp & 3);
    }
  }
};
template <> struct Digits<Q4K> : DigitsMin<false> { using DigitsMin<false>::DigitsMin; };
template <> struct Digits<Q5K> : DigitsMin<true> { using DigitsMin<true>::DigitsMin; };
// w = scale (q - 32) lies within 4096: w = 64 hi + lo, lo in -32..31. Two weights a register, biased so that no lane is
// negative: 4 (w + 8224) has hi + 128 in its high and 4 (lo + 32) in its low byte. The low digit keeps its factor 4:
// isum * 4 = 256 sum(hi x) + sum(4 lo x).
template <> struct Digits<Q6K> {
  static constexpr bool SIGNED = true;
  static constexpr int BASE = 256;
  uint4 scales[2];
  DEVICE Digits(u32 w, int g, int, u32) {
    scales[0] = lds128(w + 3072 + g * 32);
    scales[1] = lds128(w + 3072 + g * 32 + 16);
  }
  DEVICE void group(u32 (&hi)[4], u32 (&lo)[4], u32 w, int lane, int grp) {
    u32 x[3];
#pragma unroll
    for (int f = 0; f < 3; f++) {
      const int word = 3 * grp + f;
      x[f] = lds32(w + (word >> 2) * 512 + lane * 16 + (word & 3) * 4);
    }
    const u32 r[4] = {x[0], x[1], x[2], ((x[0] << 6) & 0xC0C0C0C0u) | ((x[1] << 4) & 0x30303030u) | ((x[2] << 2) & 0x0C0C0C0Cu)};
#pragma unroll
    for (int f = 0; f < 4; f++) {  // row g or g + 8, first or second 16 of the group
      const uint4& all = scales[f & 1];
      const u32 four = (grp >> 1) == 0 ? all.x : (grp >> 1) == 1 ? all.y : (grp >> 1) == 2 ? all.z : all.w;
      const int s = sbyte(four, 2 * (grp & 1) + (f >> 1));
      const u32 bias = (u32)(s * -128 + 32896) * 0x10001u;
      const u32 even = (r[f] ^ 0x80808080u) & 0x00FC00FCu, odd = ((r[f] ^ 0x80808080u) >> 8) & 0x00FC00FCu;  // 4 q
      const u32 z0 = even * (u32)s + bias, z1 = odd * (u32)s + bias;
      hi[f] = __byte_perm(z0, z1, 0x7351) ^ 0x80808080u;
      lo[f] = __byte_perm(z0, z1, 0x6240) ^ 0x80808080u;
    }
  }
};
// w = scale * code lies within 32,639 (NV4_MOST): w = 256 hi + lo, both signed bytes. Two weights a register: w + 32,896 has hi + 128 in
// its high and lo + 128 in its low byte. Codes come with 16 added, which the same constant takes away; what runs over from one
// half to the other in between is taken back, too.
template <> struct Digits<NV4> {
  static constexpr bool SIGNED = true;
  static constexpr int BASE = 256;
  u32 scales;  // of row g, in this warp's own shared memory: 16 integers of 16 bits; those of row g + 8 follow 256 bytes later
  DEVICE Digits(u32 w, int g, int lane, u32 scratch) {
    const int row = lane >> 1, half = lane & 1;
    const uint2 x = nv4_scales(w, row, half);
    scales = scratch + g * 32;
    __syncwarp();  // the scales before have been read
    const uint4 a = nv4_integers(x.x), b = nv4_integers(x.y);
    sts64(scratch + row * 32 + half * 8, make_uint2(a.x | a.y << 16, b.x | b.y << 16));
    sts64(scratch + row * 32 + half * 8 + 16, make_uint2(a.z | a.w << 16, b.z | b.w << 16));
    __syncwarp();
  }
  DEVICE void group(u32 (&hi)[4], u32 (&lo)[4], u32 w, int lane, int grp) {
    const uint2 q = lds64(w + (grp >> 1) * 512 + lane * 16 + (grp & 1) * 8);
    const u32 s[2] = {lds32(scales + grp * 4), lds32(scales + 256 + grp * 4)};
#pragma unroll
    for (int half = 0; half < 2; half++) {  // first or second 16 of the group
#pragma unroll
      for (int r = 0; r < 2; r++) {  // row g or g + 8
        const u32 code = nv4_biased(half ? q.y : q.x, r), scale = half ? s[r] >> 16 : s[r] & 0xFFFFu;
        const u32 bias = 32896u * 0x10001u - scale * (16u * 0x10001u);
        const u32 z0 = (code & 0x00FF00FFu) * scale + bias, z1 = (code >> 8 & 0x00FF00FFu) * scale + bias;
        hi[2 * half + r] = __byte_perm(z0, z1, 0x7351) ^ 0x80808080u;
        lo[2 * half + r] = __byte_perm(z0, z1, 0x6240) ^ 0x80808080u;
      }
    }
  }
};

// A super-block's sum, times its scale and the token's, on top of `before`. The scale of NVFP4 is a power of two, and nothing is
// rounded before the fma; others have a product of both scales.
template <int QT> DEVICE float add_sum(int isum, float d, float dx, float before) {
  if constexpr (QT == NV4) return __fmaf_rn(__fmul_rn((float)isum, d), dx, before);
  else return __fmaf_rn((float)isum, __fmul_rn(d, dx), before);
}
