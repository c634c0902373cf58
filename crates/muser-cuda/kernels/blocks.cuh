// What the bytes of every ggml block type mean, value by value. Layouts made for speed are in tiles.cuh; this is for the
// embedding lookup and for products of the types that have no tile.
#pragma once
#include "common.cuh"

// ggml type numbers
enum {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
  IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39, NVFP4 = 40
};

__constant__ i8 iq4_levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
__constant__ i8 e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

DEVICE u32 ld16(const u8* p) { return p[0] | p[1] << 8; }
DEVICE u32 ld32(const u8* p) { return p[0] | p[1] << 8 | p[2] << 16 | (u32)p[3] << 24; }
DEVICE float f16_at(const u8* p) { return half_to_float((u16)ld16(p)); }
DEVICE int nibble(const u8* p, int i, int half) { return p[i % half] >> (i >= half ? 4 : 0) & 15; }

// Half of 2^(e - 127).
DEVICE float mxfp4_scale(u32 e) { return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23); }
// Half of the E4M3 number, sign ignored, NaN taken as 0.
DEVICE float nvfp4_scale(u32 x) {
  const u32 e = x >> 3 & 15, m = x & 7;
  if ((x & 0x7F) == 0x7F) return 0.f;
  return __fmul_rn((float)(e ? 8 + m : m), __uint_as_float(((e ? e : 1) + 116) << 23));  // m / 8 * 2^(e - 7) / 2
}

DEVICE int block_len(int type) {
  switch (type) {
    case F32: case F16: case BF16: return 1;
    case Q4_0: case Q4_1: case Q5_0: case Q5_1: case Q8_0: case IQ4_NL: case MXFP4: return 32;
    case NVFP4: return 64;
    default: return 256;
  }
}
DEVICE int block_bytes(int type) {
  switch (type) {
    case F32: return 4;
    case F16: case BF16: return 2;
    case Q4_0: case IQ4_NL: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case MXFP4: return 17;
    case NVFP4: return 36;
    case Q2_K: return 84;
    case Q3_K: return 110;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    default: return 136;  // IQ4_XS
  }
}

// Signed integer code of value i of a block.
DEVICE int code_of(const u8* b, int type, int i) {
  switch (type) {
    case Q4_0: return nibble(b + 2, i, 16) - 8;
    case Q4_1: return nibble(b + 4, i, 16);
    case Q5_0: return (nibble(b + 6, i, 16) | (ld32(b + 2) >> i & 1) << 4) - 16;
    case Q5_1: return nibble(b + 8, i, 16) | (ld32(b + 4) >> i & 1) << 4;
    case Q8_0: return (i8)b[2 + i];
    case IQ4_NL: return iq4_levels[nibble(b + 2, i, 16)];
    case MXFP4: return e2m1_doubled[nibble(b + 1, i, 16)];
    case NVFP4: return e2m1_doubled[nibble(b + 4 + 8 * (i >> 4), i & 15, 8)];
    case Q2_K: return b[16 + 32 * (i >> 7) + (i & 31)] >> (2 * (i >> 5 & 3)) & 3;
    case Q3_K: return (b[32 + 32 * (i >> 7) + (i & 31)] >> (2 * (i >> 5 & 3)) & 3) - (b[i & 31] >> (i >> 5) & 1 ? 0 : 4);
    case Q4_K: return b[16 + 32 * (i >> 6) + (i & 31)] >> (i & 32 ? 4 : 0) & 15;
    case Q5_K: return (b[48 + 32 * (i >> 6) + (i & 31)] >> (i & 32 ? 4 : 0) & 15) | (b[16 + (i & 31)] >> (i >> 5) & 1) << 4;
    case Q6_K: {
      const int half = i >> 7, r = i & 127;
      const int lo = b[64 * half + (r & 63)] >> (r >= 64 ? 4 : 0) & 15, hi = b[128 + 32 * half + (r & 31)] >> (2 * (r >> 5)) & 3;
      return (lo | hi << 4) - 32;
    }
    default: return iq4_levels[nibble(b + 8 + 16 * (i >> 5), i & 31, 16)];  // IQ4_XS
  }
}

// Integer scale and min of value i's group, and the float factors of both.
struct Group {
  int sc, mn;
  float d, m;
};
DEVICE Group group_of(const u8* b, int type, int i) {
  Group g = {1, 0, 0.f, 0.f};
  switch (type) {
    case Q4_1: case Q5_1:
      g.mn = 1;
      g.m = f16_at(b + 2);
      g.d = f16_at(b);
      break;
    case MXFP4: g.d = mxfp4_scale(b[0]); break;
    case NVFP4: g.d = nvfp4_scale(b[i >> 4]); break;
    case Q2_K:
      g.sc = b[i >> 4] & 15;
      g.mn = b[i >> 4] >> 4;
      g.d = f16_at(b + 80);
      g.m = f16_at(b + 82);
      break;
    case Q3_K: {
      const u8* s = b + 96;
      const int j = i >> 4;
      g.sc = (int)((s[j & 7] >> (j >= 8 ? 4 : 0) & 15) | (s[8 + (j & 3)] >> (2 * (j >> 2)) & 3) << 4) - 32;
      g.d = f16_at(b + 108);
      break;
    }
    case Q4_K: case Q5_K: {
      u32 sc, mn;
      scale_min(b + 4, i >> 5, sc, mn);
      g.sc = (int)sc;
      g.mn = (int)mn;
      g.d = f16_at(b);
      g.m = f16_at(b + 2);
      break;
    }
    case Q6_K:
      g.sc = (i8)b[192 + (i >> 4)];
      g.d = f16_at(b + 208);
      break;
    case IQ4_XS: {
      const int j = i >> 5;
      g.sc = (int)((b[4 + (j >> 1)] >> (4 * (j & 1)) & 15) | (ld16(b + 2) >> (2 * j) & 3) << 4) - 32;
      g.d = f16_at(b);
      break;
    }
    default: g.d = f16_at(b);
  }
  return g;
}

DEVICE float float_at(const u8* row, int type, u64 i) {
  if (type == F32) return *(const float*)(row + 4 * i);
  const u16 v = *(const u16*)(row + 2 * i);
  return type == F16 ? half_to_float(v) : __uint_as_float((u32)v << 16);
}

// Value i of a row, rounded like the scalar definition.
DEVICE float dequantise(const u8* row, int type, int i) {
  const int len = block_len(type);
  if (len == 1) return float_at(row, type, i);
  const u8* b = row + (u64)(i / len) * block_bytes(type);
  const int k = i % len;
  const Group g = group_of(b, type, k);
  const float q = (float)code_of(b, type, k);
  if (len < 256) {
    const float v = __fmul_rn(g.d, q);
    return g.mn ? __fadd_rn(v, g.m) : v;
  }
  const float v = __fmul_rn(__fmul_rn(g.d, (float)g.sc), q);
  const bool mins = type == Q2_K || type == Q4_K || type == Q5_K;
  return mins ? __fsub_rn(v, __fmul_rn(g.m, (float)g.mn)) : v;
}
