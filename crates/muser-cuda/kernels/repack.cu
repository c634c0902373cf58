// ggml blocks -> weight tiles (tiles.cuh), once per matrix at load.
//
// One thread makes one 32-bit word of a tile by looking up the codes that belong there. Types whose integers fit another
// type's tile share it, with the same integers and therefore the same bits in a product: Q4_0, Q5_0 and IQ4_NL become
// Q8_0 tiles, Q3_K becomes Q6_K tiles. A matrix of NVFP4 whose scales differ too much within 256 values has no tile: that is counted.
#include "tiles.cuh"

enum { Q4_0 = 2, Q5_0 = 6, Q8_0 = 8, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, NVFP4 = 40 };

struct RepackArgs {
  const u8* src;   // ggml blocks, row after row
  u32* dst;        // tiles
  u64 words;
  u32 rows, kb, type;
  u32* unfit;      // counts scales that the tile cannot hold
};

__constant__ i8 iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

DEVICE u32 load32(const u8* p) { return p[0] | p[1] << 8 | p[2] << 16 | (u32)p[3] << 24; }
DEVICE u32 load16(const u8* p) { return p[0] | p[1] << 8; }

// signed code of value k of a 256-value block of Q6_K or Q3_K
DEVICE int code6(const u8* b, int type, int k) {
  const int n = k >> 7, r = k & 127;
  if (type == Q3_K) {
    const int q = b[32 + 32 * n + (k & 31)] >> (2 * (r >> 5)) & 3;
    return q - (b[k & 31] >> (k >> 5) & 1 ? 0 : 4);
  }
  const int lo = b[64 * n + (r & 63)] >> (r >= 64 ? 4 : 0) & 15, hi = b[128 + 32 * n + (r & 31)] >> (2 * (r >> 5)) & 3;
  return (lo | hi << 4) - 32;
}
DEVICE int scale6(const u8* b, int type, int j) {
  if (type == Q6_K) return (i8)b[192 + j];
  const u8* s = b + 96;
  return (int)((s[j & 7] >> (j >= 8 ? 4 : 0) & 15) | (s[8 + (j & 3)] >> (2 * (j >> 2)) & 3) << 4) - 32;
}
// signed code of value i of a 32-value block
DEVICE int code8(const u8* b, int type, int i) {
  if (type == Q8_0) return (i8)b[2 + i];
  if (type == Q5_0) return (int)((b[6 + (i & 15)] >> (i >= 16 ? 4 : 0) & 15) | (load32(b + 2) >> i & 1) << 4) - 16;
  const int nib = b[2 + (i & 15)] >> (i >= 16 ? 4 : 0) & 15;
  return type == IQ4_NL ? iq4_values[nib] : nib - 8;
}

// Scale j of 256 values of NVFP4 in steps of 2^-9, and how many of the zeros that all 16 end with are taken off.
DEVICE u32 scale_nv4(const u8* b, int j) { return nvfp4_integer(b[36 * (j >> 2) + (j & 3)]); }
DEVICE u32 shift_nv4(const u8* b) {
  u32 all = 0;
  for (int j = 0; j < 16; j++) all |= scale_nv4(b, j);
  return all ? min(__ffs((int)all) - 1, 15) : 0;  // four bits
}

// Words of the scales of Q4_K and Q5_K: piece 0..7 = L0 L1 H D0 M0 M1 MH D1
DEVICE u32 meta_word(const u8* r0, const u8* r1, int piece) {
  u32 v = 0;
  const bool mins = piece >= 4;
  if ((piece & 3) == 3) {
    return load32(mins ? r1 : r0);
  }
  for (int y = 0; y < 4; y++) {
    u32 byte = 0;
    for (int r = 0; r < 2; r++) {
      for (int hi = 0; hi < 2; hi++) {
        u32 sc, mn;
        scale_min((r ? r1 : r0) + 4, y + 4 * hi, sc, mn);
        const u32 x = mins ? mn : sc;
        if ((piece & 3) == 2) byte |= (x >> 4) << (4 * r + 2 * hi);
        else if ((piece & 3) == r) byte |= (x & 15) << (4 * hi);
      }
    }
    v |= byte << (8 * y);
  }
  return v;
}

// block of row `row` (null beyond the matrix: the tile's missing rows are zeros)
DEVICE const u8* block_of(const RepackArgs& p, u32 row, u32 block, u32 per_row, u32 bytes) {
  return row < p.rows ? p.src + ((u64)row * per_row + block) * bytes : nullptr;
}

__device__ const u8 zero_block[256] = {};  // as long as any block

template <int QT> DEVICE void repack(const RepackArgs& p) {
  constexpr int TW = tile_bytes(QT) / 4;
  const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= p.words) return;
  const u64 tile = index / TW;
  const int w = (int)(index % TW), lane = w % 128 / 4, piece = w % 4, chunk = w / 128, g = lane >> 2, t = lane & 3;
  const u32 row0 = (u32)(tile / p.kb) * 16, kb = (u32)(tile % p.kb);
  auto block = [&](int row, u32 bytes) {
    const u8* b = block_of(p, row0 + row, kb, p.kb, bytes);
    return b ? b : zero_block;
  };
  u32 v = 0;
  if constexpr (QT == Q4K || QT == Q5K) {
    constexpr u32 BYTES = QT == Q4K ? 144 : 176, QS = QT == Q4K ? 16 : 48;
    if (chunk < 4) {
      const int h = piece >> 1, x = piece & 1, at = QS + 32 * chunk + 16 * x + 4 * t;
      const u32 a = load32(block(g, BYTES) + at) >> (4 * h), b = load32(block(g + 8, BYTES) + at) >> (4 * h);
      v = (a & 0x0F0F0F0Fu) | (b & 0x0F0F0F0Fu) << 4;
    } else if (QT == Q5K && chunk == 4) {
      v = load32(block(g + 8 * (piece & 1), BYTES) + 16 + 16 * (piece >> 1) + 4 * t);
    } else {
      const int m = w - (QT == Q4K ? 512 : 640), row = m >> 3;
      v = meta_word(block(row, BYTES), block(row + 8, BYTES), m & 7);
    }
  } else if constexpr (QT == Q6K) {
    const u32 bytes = p.type == Q3_K ? 110 : 210;
    // a missing row has code 0 and scale 0, whatever zero bytes would mean in its own format
    if (w < 768) {
      const int word = chunk * 4 + piece, j = word / 3, f = word % 3;
      const bool on0 = row0 + g + 8 * (f & 1) < p.rows, on1 = row0 + g + 8 < p.rows;
      for (int y = 0; y < 4; y++) {
        const int k = j * 32 + t * 4 + y;
        const u32 a = on0 ? (u32)(code6(block(g + 8 * (f & 1), bytes), p.type, k + 16 * (f >> 1)) * 4) & 255 : 0;
        const u32 b = on1 ? (u32)(code6(block(g + 8, bytes), p.type, k + 16) * 4) & 255 : 0;
        v |= (a | ((b >> (6 - 2 * f)) & 3)) << (8 * y);
      }
    } else if (w < 832) {
      const int m = w - 768, row = (m >> 3) + 8 * (m >> 2 & 1);
      if (row0 + row < p.rows)
        for (int y = 0; y < 4; y++) v |= (u32)(scale6(block(row, bytes), p.type, (m & 3) * 4 + y) & 255) << (8 * y);
    } else {
      const int row = w - 832;
      v = load16(block(row, bytes) + bytes - 2) | load16(block(row + 8, bytes) + bytes - 2) << 16;
    }
  } else if constexpr (QT == NV4) {
    constexpr u32 BYTES = 4 * 36;
    if (w < 512) {
      const int k = 64 * chunk + 16 * piece + 4 * t;
      for (int r = 0; r < 2; r++) {
        const u8* codes = block(g + 8 * r, BYTES) + 36 * (k >> 6) + 4 + 8 * (k >> 4 & 3);
        for (int y = 0; y < 4; y++) {
          const int i = (k & 15) + y;
          const u32 code = codes[i & 7] >> (i >= 8 ? 4 : 0) & 15, size = code & 7;
          v |= (size ? code : 0) << (16 * r + 4 * y);
        }
      }
    } else {
      const int m = w - 512, j = 2 * (m & 3);
      const u8* b = block((m >> 3) + 8 * (m >> 2 & 1), BYTES);
      const u32 shift = shift_nv4(b);
      for (int y = 0; y < 4; y++) {
        const u32 scale = scale_nv4(b, j + (y & 1) + 8 * (y >> 1)) >> shift;
        if (scale > NV4_MOST) atomicAdd(p.unfit, 1);
        const int up = scale > 15 ? 28 - __clz((int)scale) : 0;
        v |= ((scale >> up & 15) | (up << 4 & 0x70) | (shift >> y & 1) << 7) << (8 * y);
      }
    }
  } else {
    const u32 bytes = p.type == Q8_0 ? 34 : p.type == Q5_0 ? 22 : 18;
    auto small = [&](int row, int grp) { return block_of(p, row0 + row, kb * 8 + grp, p.kb * 8, bytes); };
    if (w < 1024) {
      const u8* b = small(g + 8 * (piece & 1), chunk);
      if (b)
        for (int y = 0; y < 4; y++) v |= (u32)(code8(b, p.type, 16 * (piece >> 1) + 4 * t + y) & 255) << (8 * y);
    } else {
      const int m = w - 1024, row = (m >> 3) + 8 * (m >> 2 & 1), grp = 2 * (m & 3);
      if (row0 + row < p.rows) v = load16(small(row, grp)) | load16(small(row, grp + 1)) << 16;
    }
  }
  p.dst[index] = v;
}

#define REPACK(name, qt) \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ RepackArgs p) { repack<qt>(p); }
REPACK(repack_q4k, Q4K)
REPACK(repack_q5k, Q5K)
REPACK(repack_q6k, Q6K)
REPACK(repack_nv4, NV4)
REPACK(repack_q80, Q80)
