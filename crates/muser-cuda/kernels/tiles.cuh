// Weight tiles and their product with quantised activations.
//
// A tile is 16 output rows x 256 of k, exactly as many bytes as the 16 ggml blocks it holds. Tiles are stored row tile by
// row tile, k ascending: a K segment of a row tile is one contiguous run. Lane = 4 g + t as in mma.m16n8k32: g is row g
// and row g + 8, t a quarter of k.
//
//   Q4_K, 2304 B     0  chunk i=0..3, 512 B: [lane][16 B] = { X0 X1 | X0 X1 } for groups 2i | 2i+1 of 32 values
//                         X0 byte y: low nibble q[row g][4t+y], high nibble q[row g+8][same]; X1: the same for k + 16
//                 2048  g=0..7, 32 B: { L0 L1 H D0 | M0 M1 MH D1 }
//                         L0 (row g), L1 (row g+8): byte y = low 4 bits of scale y | scale y+4
//                         H byte y: high 2 bits of scales: row g y, row g y+4, row g+8 y, row g+8 y+4
//                         M0 M1 MH: the mins likewise; D0, D1: f16 d, f16 dmin of rows g, g+8
//   Q5_K, 2816 B     0  as Q4_K;  2048  [lane][16 B]: word r holds the fifth bits of A register r (row g k, row g+8 k,
//                         row g k+16, row g+8 k+16), bit i of byte y belongs to group i;  2560  scales as Q4_K
//   Q6_K, 3360 B     0  6 chunks of [lane][16 B]: 24 words per lane, words 3j..3j+2 = group j of 32
//                         R0 = row g k, R1 = row g+8 k, R2 = row g k+16, R3 = row g+8 k+16; bytes 4 (q - 32), signed
//                         w0 = R0 | R3[7:6]   w1 = R1 | R3[5:4]   w2 = R2 | R3[3:2]
//                 3072  g: 16 int8 scales of row g, 16 of row g+8;  3328  g: f16 d of row g, of row g+8
//   Q8_0, 4352 B     0  8 chunks (one per group of 32) of [lane][16 B] = the four A registers
//                 4096  g: 8 f16 d of row g, 8 of row g+8
#pragma once
#include "common.cuh"

enum { Q4K = 0, Q5K = 1, Q6K = 2, Q80 = 3 };

__device__ constexpr int tile_bytes(int qt) { return qt == Q4K ? 2304 : qt == Q5K ? 2816 : qt == Q6K ? 3360 : 4352; }

// Products of MT row tiles (tile_step bytes apart in shared memory) with 8 NT tokens, added to acc in the one order that
// the arithmetic allows. A lane's results: rows g, g + 8; tokens 2t, 2t + 1.
//   b[j]: shared address of this lane's activations of token 8 j + g; 64-value chunk i lies at b[j] + 64 (i ^ swap)
//   s[j]: its group sums (lanes with t >= 2: zeros);  dsc: shared address of the scales of this super-block
// ONE computes token 2t only: enough for a single token, and no bit of it changes.
template <int QT, int MT, int NT, bool ONE>
DEVICE void tile_mul(u32 tile, u32 tile_step, const u32* b, u32 swap, const u32* s, u32 dsc, int lane,
                     float (&acc)[MT][NT][4]) {
  const int g = lane >> 2, t = lane & 3;
  constexpr int STEP = ONE ? 2 : 1;
  if constexpr (QT == Q80) {
    uint4 wd0[MT], wd1[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) {
      wd0[m] = lds128(tile + m * tile_step + 4096 + g * 32);
      wd1[m] = lds128(tile + m * tile_step + 4096 + g * 32 + 16);
    }
#pragma unroll
    for (int grp = 0; grp < 8; grp++) {
      const int i = grp >> 1, h = grp & 1;
      float w0[MT], w1[MT];
      uint4 a[MT];
#pragma unroll
      for (int m = 0; m < MT; m++) {
        a[m] = lds128(tile + m * tile_step + grp * 512 + lane * 16);
        const u32 p0 = i == 0 ? wd0[m].x : i == 1 ? wd0[m].y : i == 2 ? wd0[m].z : wd0[m].w;
        const u32 p1 = i == 0 ? wd1[m].x : i == 1 ? wd1[m].y : i == 2 ? wd1[m].z : wd1[m].w;
        w0[m] = h ? high_half(p0) : low_half(p0);
        w1[m] = h ? high_half(p1) : low_half(p1);
      }
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const uint2 x = lds64(b[j] + (i ^ swap) * 64 + h * 8);
        const u32 da = dsc + (j * 8 + 2 * t) * 32 + grp * 4;
        const float x0 = __uint_as_float(lds32(da)), x1 = ONE ? 0.f : __uint_as_float(lds32(da + 32));
#pragma unroll
        for (int m = 0; m < MT; m++) {
          int c[4];
          mma32_s8s8(c, a[m].x, a[m].y, a[m].z, a[m].w, x.x, x.y);
#pragma unroll
          for (int r = 0; r < 4; r += STEP)
            acc[m][j][r] = __fmaf_rn((float)c[r], __fmul_rn(r < 2 ? w0[m] : w1[m], r & 1 ? x1 : x0), acc[m][j][r]);
        }
      }
    }
  } else if constexpr (QT == Q6K) {
    int is[MT][NT][4];
    u32 wv[MT][12];
#pragma unroll
    for (int i = 0; i < 4; i++) {  // 64 values of k: words 6i .. 6i + 5 of 24
      u32 r[MT][2][4];
      u32 sc0[MT], sc1[MT];
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const u32 base = tile + m * tile_step;
        if ((i & 1) == 0) {
#pragma unroll
          for (int p = 0; p < 3; p++) {
            const uint4 v = lds128(base + (3 * (i >> 1) + p) * 512 + lane * 16);
            wv[m][4 * p] = v.x; wv[m][4 * p + 1] = v.y; wv[m][4 * p + 2] = v.z; wv[m][4 * p + 3] = v.w;
          }
        }
        sc0[m] = lds32(base + 3072 + g * 32 + i * 4);
        sc1[m] = lds32(base + 3072 + g * 32 + 16 + i * 4);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 w0 = wv[m][6 * (i & 1) + 3 * h], w1 = wv[m][6 * (i & 1) + 3 * h + 1], w2 = wv[m][6 * (i & 1) + 3 * h + 2];
          r[m][h][0] = w0 & 0xFCFCFCFCu;
          r[m][h][1] = w1 & 0xFCFCFCFCu;
          r[m][h][2] = w2 & 0xFCFCFCFCu;
          r[m][h][3] = ((w0 << 6) & 0xC0C0C0C0u) | ((w1 << 4) & 0x30303030u) | ((w2 << 2) & 0x0C0C0C0Cu);
        }
      }
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const uint4 x = lds128(b[j] + (i ^ swap) * 64);
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
          for (int h = 0; h < 4; h++) {  // groups of 16 values
            int c[4];
            mma16_s8s8(c, r[m][h >> 1][(h & 1) * 2], r[m][h >> 1][(h & 1) * 2 + 1],
                       h == 0 ? x.x : h == 1 ? x.y : h == 2 ? x.z : x.w);
            const int sa = sbyte(sc0[m], h), sb = sbyte(sc1[m], h);
#pragma unroll
            for (int e = 0; e < 4; e += STEP) is[m][j][e] = (i | h ? is[m][j][e] : 0) + c[e] * (e < 2 ? sa : sb);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const u32 dd = lds32(tile + m * tile_step + 3328 + g * 4);
      const float d0 = __fmul_rn(low_half(dd), 0.25f), d1 = __fmul_rn(high_half(dd), 0.25f);  // stored as 4 (q - 32)
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const uint2 xd = lds64(dsc + j * 32 + t * 8);
#pragma unroll
        for (int r = 0; r < 4; r += STEP)
          acc[m][j][r] = __fmaf_rn((float)is[m][j][r], __fmul_rn(r < 2 ? d0 : d1, __uint_as_float(r & 1 ? xd.y : xd.x)),
                                   acc[m][j][r]);
      }
    }
  } else {  // Q4_K and Q5_K
    constexpr int META = QT == Q5K ? 2560 : 2048;
    u32 s0[MT][2], s1[MT][2];
    uint4 fifth[MT];
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const uint4 m0 = lds128(tile + m * tile_step + META + g * 32);
      s0[m][0] = (m0.x & 0x0F0F0F0Fu) | ((m0.z << 4) & 0x30303030u);
      s0[m][1] = ((m0.x >> 4) & 0x0F0F0F0Fu) | ((m0.z << 2) & 0x30303030u);
      s1[m][0] = (m0.y & 0x0F0F0F0Fu) | (m0.z & 0x30303030u);
      s1[m][1] = ((m0.y >> 4) & 0x0F0F0F0Fu) | ((m0.z >> 2) & 0x30303030u);
      if constexpr (QT == Q5K) fifth[m] = lds128(tile + m * tile_step + 2048 + lane * 16);
    }
    int is[MT][NT][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 a[MT][2][4];
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const uint4 q = lds128(tile + m * tile_step + i * 512 + lane * 16);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 qa = h ? q.z : q.x, qb = h ? q.w : q.y;
          if constexpr (QT == Q4K) {
            a[m][h][0] = qa & 0x0F0F0F0Fu;
            a[m][h][1] = qa & 0xF0F0F0F0u;  // no shift: row g+8 comes out 16 times too large, undone in d
            a[m][h][2] = qb & 0x0F0F0F0Fu;
            a[m][h][3] = qb & 0xF0F0F0F0u;
          } else {  // 31 * 16 exceeds a byte: shift
            const int grp = 2 * i + h;
            auto bit = [&](u32 w) { return (grp < 4 ? w << (4 - grp) : w >> (grp - 4)) & 0x10101010u; };
            a[m][h][0] = (qa & 0x0F0F0F0Fu) | bit(fifth[m].x);
            a[m][h][1] = ((qa >> 4) & 0x0F0F0F0Fu) | bit(fifth[m].y);
            a[m][h][2] = (qb & 0x0F0F0F0Fu) | bit(fifth[m].z);
            a[m][h][3] = ((qb >> 4) & 0x0F0F0F0Fu) | bit(fifth[m].w);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const uint4 x = lds128(b[j] + (i ^ swap) * 64);
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int grp = 2 * i + h;
            int c[4];
            mma32_u8s8(c, a[m][h][0], a[m][h][1], a[m][h][2], a[m][h][3], h ? x.z : x.x, h ? x.w : x.y);
            const int sa = ubyte(s0[m][grp >> 2], grp & 3), sb = ubyte(s1[m][grp >> 2], grp & 3);
#pragma unroll
            for (int r = 0; r < 4; r += STEP) is[m][j][r] = (grp ? is[m][j][r] : 0) + c[r] * (r < 2 ? sa : sb);
          }
        }
      }
    }
    const int odd = t & 1;
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const uint4 m1 = lds128(tile + m * tile_step + META + g * 32 + 16);
      const u32 dm0 = lds32(tile + m * tile_step + META + g * 32 + 12);
      const u32 a0 = ((m1.x >> (4 * odd)) & 0x0F0F0F0Fu) | ((m1.z << (4 - 2 * odd)) & 0x30303030u);
      const u32 a1 = ((m1.y >> (4 * odd)) & 0x0F0F0F0Fu) | ((m1.z >> (2 * odd)) & 0x30303030u);
      const float d0 = low_half(dm0), n0 = high_half(dm0), n1 = high_half(m1.w);
      const float d1 = QT == Q4K ? __fmul_rn(low_half(m1.w), 0.0625f) : low_half(m1.w);
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const uint2 sum = lds64(s[j]);
        int mn[4] = {0, 0, 0, 0};
        mma16_u8s8(mn, a0, a1, sum.y);
#pragma unroll
        for (int r = 0; r < 4; r++) mn[r] <<= 7;
        mma16_u8s8(mn, a0, a1, sum.x);
        const uint2 xd = lds64(dsc + j * 32 + t * 8);
#pragma unroll
        for (int r = 0; r < 4; r += STEP) {
          const float x = __uint_as_float(r & 1 ? xd.y : xd.x);
          acc[m][j][r] = __fmaf_rn((float)is[m][j][r], __fmul_rn(r < 2 ? d0 : d1, x), acc[m][j][r]);
          acc[m][j][r] = __fmaf_rn((float)-mn[r], __fmul_rn(r < 2 ? n0 : n1, x), acc[m][j][r]);
        }
      }
    }
  }
}
