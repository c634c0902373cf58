// Products of weight rows in the file's own format: every type that has no tile, and matrices with a factor. Correct and
// simple: a warp owns a weight row and up to TOKENS activation rows, and reads each super-block's bytes one by one.
//
// The arithmetic is that of `muser_backend::arith` (integers exact in any order, float sums per block ascending, K segments
// added ascending). The whole sum goes to segment 0 of the output, zeros to the others.
#include "blocks.cuh"

struct AnyArgs {
  const u8* w;      // [rows][row_bytes]
  Act act;          // not tiled
  float* out;       // [out_segments][n_all][out_rows]
  u64 row_bytes;
  u32 type, rows, padded_rows, kb, segments, out_segments, first_row, out_rows, first, n, n_all;
  float scale;      // factor on the product
};

constexpr int WARPS = 8;

template <int TOKENS>
DEVICE void store(const AnyArgs& p, int row, int token0, const float (&v)[TOKENS]) {
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    const int col = token0 + t;
    if (col >= (int)p.n) break;
    float* o = p.out + (u64)(p.first + col) * p.out_rows + p.first_row + row;
    const float x = p.scale != 1.f ? __fmul_rn(v[t], p.scale) : v[t];
    *o = row < (int)p.rows ? x : 0.f;
    for (u32 s = 1; s < p.out_segments; s++) o[(u64)s * p.n_all * p.out_rows] = 0.f;
  }
}

// Lane l has values 8 l .. 8 l + 7 of the super-block.
DEVICE void codes8(u32 (&w)[2], const u8* b, int type, int i) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int q[4];
#pragma unroll
    for (int j = 0; j < 4; j++) q[j] = code_of(b, type, i + 4 * h + j);
    w[h] = pack4(q);
  }
}
DEVICE int dot8(const u32 (&w)[2], const u32 (&x)[2]) { return __dp4a((int)w[1], (int)x[1], __dp4a((int)w[0], (int)x[0], 0)); }
DEVICE int sum8i(const u32 (&x)[2]) { return __dp4a((int)x[1], 0x01010101, __dp4a((int)x[0], 0x01010101, 0)); }
DEVICE void activations8(u32 (&x)[2], const i8* row, int kb, int lane) {
  x[0] = *(const u32*)(row + kb * 256 + perm64(lane * 8));
  x[1] = *(const u32*)(row + kb * 256 + perm64(lane * 8 + 4));
}

// Sum over the warp of what exceeds 32 bits: scales of NVFP4 of any size. Rounded once.
DEVICE float wide_sum(long long v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return __ll2float_rn(v);
}

// Types with one scale of the activations per 256 values.
template <int TOKENS> DEVICE void any_super(const AnyArgs& p) {
  const int lane = threadIdx.x & 31, row = blockIdx.x * WARPS + (threadIdx.x >> 5), token0 = blockIdx.y * TOKENS;
  if (row >= (int)p.padded_rows) return;
  const int type = p.type, bytes = block_bytes(type), len = block_len(type);
  const bool mins = type == Q2_K || type == Q4_K || type == Q5_K;
  const u8* w_row = p.w + (u64)min(row, (int)p.rows - 1) * p.row_bytes;
  float total[TOKENS];
  for (u32 s = 0; s < p.segments; s++) {
    float acc[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) acc[t] = 0.f;
    for (int kb = seg_begin(s, p.kb, p.segments); kb < seg_begin(s + 1, p.kb, p.segments); kb++) {
      const int i = kb * 256 + lane * 8;
      const u8* b = w_row + (u64)(i / len) * bytes;
      u32 w[2];
      codes8(w, b, type, i % len);
      Group g = group_of(b, type, i % len);
      if (type == NVFP4) g.sc = nvfp4_integer(b[i % len >> 4]);
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        const int col = p.first + min(token0 + t, (int)p.n - 1);
        u32 x[2];
        activations8(x, p.act.q + (u64)col * p.act.k, kb, lane);
        const float dx = p.act.d[(u64)kb * p.act.ld + col];
        if (type == NVFP4) {  // doubled codes, scales in steps of 2^-9
          acc[t] = __fmaf_rn(__fmul_rn(wide_sum((long long)g.sc * dot8(w, x)), 0x1p-10f), dx, acc[t]);
          continue;
        }
        acc[t] = __fmaf_rn((float)__reduce_add_sync(~0u, g.sc * dot8(w, x)), __fmul_rn(g.d, dx), acc[t]);
        if (mins) acc[t] = __fmaf_rn(-(float)__reduce_add_sync(~0u, g.mn * sum8i(x)), __fmul_rn(g.m, dx), acc[t]);
      }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) total[t] = s == 0 ? acc[t] : __fadd_rn(total[t], acc[t]);
  }
  if (lane == 0) store<TOKENS>(p, row, token0, total);
}

// Types with one scale per 32 values. Four lanes hold a block.
template <int TOKENS> DEVICE void any_small(const AnyArgs& p) {
  const int lane = threadIdx.x & 31, row = blockIdx.x * WARPS + (threadIdx.x >> 5), token0 = blockIdx.y * TOKENS;
  if (row >= (int)p.padded_rows) return;
  const int type = p.type, bytes = block_bytes(type), len = block_len(type);
  const bool mins = type == Q4_1 || type == Q5_1;
  const u8* w_row = p.w + (u64)min(row, (int)p.rows - 1) * p.row_bytes;
  float total[TOKENS];
  for (u32 s = 0; s < p.segments; s++) {
    float acc[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) acc[t] = 0.f;
    for (int kb = seg_begin(s, p.kb, p.segments); kb < seg_begin(s + 1, p.kb, p.segments); kb++) {
      const int i = kb * 256 + lane * 8;
      const u8* b = w_row + (u64)(i / len) * bytes;
      u32 w[2];
      codes8(w, b, type, i % len);
      const Group g = group_of(b, type, i % len);
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        const int col = p.first + min(token0 + t, (int)p.n - 1);
        u32 x[2];
        activations8(x, p.act.q32 + (u64)col * p.act.k, kb, lane);
        const float dx = p.act.d32[((u64)kb * p.act.ld + col) * 8 + (lane >> 2)];
        int dot = dot8(w, x), sum = sum8i(x);
#pragma unroll
        for (int o = 1; o <= 2; o++) {
          dot += __shfl_xor_sync(~0u, dot, o);
          sum += __shfl_xor_sync(~0u, sum, o);
        }
        const float scale = __fmul_rn(g.d, dx), min_scale = __fmul_rn(g.m, dx);
        for (int from = 0; from < 32; from += 4) {
          acc[t] = __fmaf_rn((float)__shfl_sync(~0u, dot, from), __shfl_sync(~0u, scale, from), acc[t]);
          if (mins) acc[t] = __fmaf_rn((float)__shfl_sync(~0u, sum, from), __shfl_sync(~0u, min_scale, from), acc[t]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) total[t] = s == 0 ? acc[t] : __fadd_rn(total[t], acc[t]);
  }
  if (lane == 0) store<TOKENS>(p, row, token0, total);
}

// Float weights: 16 sums by k % 16, two weight rows a warp.
template <int TOKENS> DEVICE void any_float(const AnyArgs& p) {
  const int lane = threadIdx.x & 15, row = blockIdx.x * WARPS * 2 + (threadIdx.x >> 4), token0 = blockIdx.y * TOKENS;
  const u8* w_row = p.w + (u64)min(row, (int)p.rows - 1) * p.row_bytes;
  float acc[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; t++) acc[t] = 0.f;
#pragma unroll 4
  for (u32 k = lane; k < p.kb * 256; k += 16) {
    const float w = float_at(w_row, p.type, k);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const int col = p.first + min(token0 + t, (int)p.n - 1);
      acc[t] = __fmaf_rn(w, p.act.f[(u64)col * p.act.k + k], acc[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
#pragma unroll
    for (int s = 8; s; s >>= 1) acc[t] = __fadd_rn(acc[t], __shfl_xor_sync(~0u, acc[t], s));
  }
  if (lane == 0 && row < (int)p.padded_rows) store<TOKENS>(p, row, token0, acc);
}

#define KERNEL(name, body, tokens)                                                            \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) name(const __grid_constant__ AnyArgs p) { \
    pdl_wait();                                                                               \
    body<tokens>(p);                                                                          \
  }
KERNEL(any_super_1, any_super, 1)
KERNEL(any_super_8, any_super, 8)
KERNEL(any_small_1, any_small, 1)
KERNEL(any_small_8, any_small, 8)
KERNEL(any_float_1, any_float, 1)
KERNEL(any_float_8, any_float, 8)
