// Weights as two digits with the scales of their groups folded in, for warpgroup products; matmul_fused.cu says why.
#pragma once
#include "tiles.cuh"

// The digits of a warp's row tile, group of 32 by group.
template <int QT> struct Digits;
template <bool FIVE> struct DigitsMin {
  static constexpr bool SIGNED = false;
  static constexpr int BASE = 8;
  u32 high[2][2], low[2][2];  // digits of the scales, a byte a group
  uint4 fifth, q;
  DEVICE DigitsMin(u32 w, int g, int lane) {
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
  DEVICE Digits(u32 w, int g, int) {
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
