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
//   NVFP4, 2304 B    0  chunk i=0..3, 512 B: [lane][16 B] = a word for each 16 of 64 values, E2M1 numbers, a zero without sign:
//                         nibble y: row g k = 4t + y, nibble y + 4: row g + 8 the same k
//                 2048  g: 16 scales of row g, 16 of row g+8, one per 16 values: a byte x stands for (x & 15) << (x >> 4 & 7);
//                         word t has groups 2t, 2t + 1, 2t + 8 and 2t + 9; the top bits of each of a row's words: n of d = 2^(n - 10)
//                       The scales of a row's 256 values are E4M3 numbers in steps of 2^-9, less n of the zeros at the end that all
//                       of them have. A tile can hold them if none exceeds NV4_MOST; else the matrix stays as it is in the file.
#pragma once
#include "common.cuh"

enum { Q4K = 0, Q5K = 1, Q6K = 2, NV4 = 3, Q80 = 4 };

constexpr u32 NV4_MOST = 15 << 7;  // 12 times that has two signed digits

__device__ constexpr int tile_bytes(int qt) { return qt == Q4K ? 2304 : qt == Q5K ? 2816 : qt == Q6K ? 3360 : qt == NV4 ? 2304 : 4352; }

// Shared memory that a warp needs beside a tile to multiply with it: NVFP4's scales as integers, and barriers of its ring.
__device__ constexpr int scratch_bytes(int qt) { return qt == NV4 ? 1024 + 64 : 0; }

// Four weights (E2M1 numbers, doubled, from 16 bits of a word) as bytes. A selector with its top bit set does not choose a byte but
// repeats the byte's sign, which is 0 here: what has the other sign becomes 0.
DEVICE u32 nv4_lookup(u32 first, u32 second, u32 codes) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(first), "r"(second), "r"(codes));
  return r;
}
constexpr u32 NV4_SIGNS = 0x88888888u;
// As an A operand of twice the k: sizes of those without sign, sizes of those with; meets codes and their negatives.
DEVICE void nv4_operand(u32 w, u32 (&a)[4]) {
  constexpr u32 FIRST = 0x03020100u, SECOND = 0x0C080604u;
  const u32 minus = w ^ NV4_SIGNS;
  a[0] = nv4_lookup(FIRST, SECOND, w);
  a[1] = nv4_lookup(FIRST, SECOND, w >> 16);
  a[2] = nv4_lookup(FIRST, SECOND, minus);
  a[3] = nv4_lookup(FIRST, SECOND, minus >> 16);
}
// With 16 added, row g and row g + 8.
DEVICE u32 nv4_biased(u32 w, int row) {
  return nv4_lookup(0x13121110u, 0x1C181614u, w >> (16 * row)) | nv4_lookup(0x0D0E0F10u, 0x04080A0Cu, (w ^ NV4_SIGNS) >> (16 * row));
}
// What the integers of a row are worth, from any word of its scales.
DEVICE float nv4_scale(u32 scales) {
  const u32 top = (scales & 0x80808080u) * 0x00204081u;  // n in the highest four bits
  return __uint_as_float((top >> 5 & 0x07800000u) + (117u << 23));
}
DEVICE float nv4_scale_of(u32 tile, int row) { return nv4_scale(lds32(tile + 2048 + (row & 7) * 32 + (row >> 3) * 16)); }
// The scales of four groups as integers.
DEVICE uint4 nv4_integers(u32 scales) {
  const u32 size = scales & 0x0F0F0F0Fu, up = (scales >> 4) & 0x07070707u;
  auto one = [&](int i) { return (u32)ubyte(size, i) << ubyte(up, i); };
  return make_uint4(one(0), one(1), one(2), one(3));
}
// Half of a row's scales.
DEVICE uint2 nv4_scales(u32 tile, int row, int half) { return lds64(tile + 2048 + (row & 7) * 32 + (row >> 3) * 16 + half * 8); }

// Makes integers of a tile's scales, [16 rows][16]: four lanes want the same ones, so each makes some for all.
DEVICE void nv4_make_integers(u32 tile, u32 scratch, int lane) {
  const int row = lane >> 1, half = lane & 1;
  const uint2 x = nv4_scales(tile, row, half);
  __syncwarp();  // those before have been read
  const uint4 a = nv4_integers(x.x), b = nv4_integers(x.y);
  sts128(scratch + row * 64 + half * 16, make_uint4(a.x, a.y, b.x, b.y));
  sts128(scratch + row * 64 + half * 16 + 32, make_uint4(a.z, a.w, b.z, b.w));
  __syncwarp();
}

// A row tile of NVFP4 times a single token. The columns of a product are eight groups of 16 values, so that a lane has sums of
// its own instead of the same as seven others: activations come as B operands that are zero but in their column.
//   x: shared address of this lane's operands: 8 bytes for each group, 256 bytes from one group to the next
DEVICE void nv4_single(u32 tile, u32 x, u32 dsc, int lane, float (&acc)[4]) {
  const int g = lane >> 2, t = lane & 3;
  const u32 scales[2] = {lds32(tile + 2048 + g * 32 + t * 4), lds32(tile + 2048 + g * 32 + 16 + t * 4)};
  const uint4 s[2] = {nv4_integers(scales[0]), nv4_integers(scales[1])};
  int is[2] = {0, 0};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int c[2][4] = {};  // two chains of sums, so that they overlap
#pragma unroll
    for (int i = 0; i < 2; i++) {  // 64 values of k
      const uint4 q = lds128(tile + (2 * half + i) * 512 + lane * 16);
#pragma unroll
      for (int h = 0; h < 4; h++) {
        u32 a[4];
        nv4_operand(h == 0 ? q.x : h == 1 ? q.y : h == 2 ? q.z : q.w, a);
        const uint2 b = lds64(x + (8 * half + 4 * i + h) * 256);
        mma32_u8s8_add(c[i], a, b.x, b.y);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      is[r] += (c[0][2 * r] + c[1][2 * r]) * (int)(half ? s[r].z : s[r].x);
      is[r] += (c[0][2 * r + 1] + c[1][2 * r + 1]) * (int)(half ? s[r].w : s[r].y);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    is[r] += __shfl_xor_sync(~0u, is[r], 1);
    is[r] += __shfl_xor_sync(~0u, is[r], 2);
    // d is a power of two: nothing is rounded before the fma
    acc[2 * r] = __fmaf_rn(__fmul_rn((float)is[r], nv4_scale(scales[r])), __uint_as_float(lds32(dsc)), acc[2 * r]);
  }
}

// Products of MT row tiles (tile_step bytes apart in shared memory) with 8 NT tokens, added to acc in the one order that
// the arithmetic allows. A lane's results: rows g, g + 8; tokens 2t, 2t + 1.
//   b[j]: shared address of this lane's activations of token 8 j + g; 64-value chunk i lies at b[j] + 64 (i ^ swap)
//   s[j]: its group sums (lanes with t >= 2: zeros);  dsc: shared address of the scales of this super-block
//   scratch: scratch_bytes of shared memory of this warp's own
// NEGATED, for NVFP4: each 4 bytes of activations lie beside their negatives.
// ONE computes token 2t only: enough for a single token, and no bit of it changes.
template <int QT, int MT, int NT, bool ONE, bool NEGATED = false>
DEVICE void tile_mul(u32 tile, u32 tile_step, const u32* b, u32 swap, const u32* s, u32 dsc, u32 scratch, int lane,
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
  } else if constexpr (QT == NV4) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const u32 base = tile + m * tile_step;
      nv4_make_integers(base, scratch, lane);
      int is[NT][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {  // 64 values of k
        const uint4 q = lds128(base + i * 512 + lane * 16);
        const uint4 s0 = lds128(scratch + g * 64 + i * 16), s1 = lds128(scratch + 512 + g * 64 + i * 16);
        u32 a[4][4];
        nv4_operand(q.x, a[0]);
        nv4_operand(q.y, a[1]);
        nv4_operand(q.z, a[2]);
        nv4_operand(q.w, a[3]);
#pragma unroll
        for (int j = 0; j < NT; j++) {
          uint4 x[2];  // codes of four groups, each beside its negative
          if constexpr (NEGATED) {
            x[0] = lds128(b[j] + i * 128);
            x[1] = lds128(b[j] + i * 128 + 16);
          } else {
            const uint4 v = lds128(b[j] + (i ^ swap) * 64);
            x[0] = make_uint4(v.x, negated4(v.x), v.y, negated4(v.y));
            x[1] = make_uint4(v.z, negated4(v.z), v.w, negated4(v.w));
          }
#pragma unroll
          for (int h = 0; h < 4; h++) {  // groups of 16 values
            int c[4];
            mma32_u8s8(c, a[h][0], a[h][1], a[h][2], a[h][3], h & 1 ? x[h >> 1].z : x[h >> 1].x, h & 1 ? x[h >> 1].w : x[h >> 1].y);
            const int sa = h == 0 ? s0.x : h == 1 ? s0.y : h == 2 ? s0.z : s0.w, sb = h == 0 ? s1.x : h == 1 ? s1.y : h == 2 ? s1.z : s1.w;
#pragma unroll
            for (int e = 0; e < 4; e += STEP) is[j][e] = (i | h ? is[j][e] : 0) + c[e] * (e < 2 ? sa : sb);
          }
        }
      }
      const float d0 = nv4_scale_of(base, g), d1 = nv4_scale_of(base, g + 8);
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const uint2 xd = lds64(dsc + j * 32 + t * 8);
#pragma unroll
        for (int r = 0; r < 4; r += STEP)  // d is a power of two: nothing is rounded before the fma
          acc[m][j][r] = __fmaf_rn(__fmul_rn((float)is[j][r], r < 2 ? d0 : d1), __uint_as_float(r & 1 ? xd.y : xd.x), acc[m][j][r]);
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
