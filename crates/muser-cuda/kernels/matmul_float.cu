// Products of float weights (F32, F16, BF16) with many rows. The order is that of `muser_backend::arith`: 16 sums by k % 16, each a
// chain of fma, ascending, then a tree; so the bits are those of `any_float_*`.
//
// A thread has one of the 16 sums of 8 output rows x 8 tokens, 16 adjacent threads the same outputs. In shared memory the four
// values k, k + 16, k + 32, k + 48 of a run of 64 lie together: 16 loads of 16 bytes serve 256 multiply-adds.
#include "blocks.cuh"

struct FloatArgs {
  const u8* w;     // [rows][row_bytes]
  const float* x;  // [n][k]
  float* out;      // [out_segments][n][out_rows]
  u64 row_bytes;
  u32 rows, padded_rows, k, out_segments, first_row, out_rows, n;
  float scale;     // factor on the product
  u32 _padding;
};

constexpr int TILE = 32, RUN = 64;

// The bits of value i of a row as they are: what is made of them must not be asked for before the products, or they wait for it.
template <int TYPE> DEVICE u32 bits_at(const u8* row, int i) {
  if constexpr (TYPE == F32) return *(const u32*)(row + 4 * i);
  else return *(const u16*)(row + 2 * i);
}
template <int TYPE> DEVICE float float_of(u32 bits) {
  return TYPE == F32 ? __uint_as_float(bits) : TYPE == F16 ? half_to_float((u16)bits) : __uint_as_float(bits << 16);
}

template <int TYPE> DEVICE void many_float(const FloatArgs& p) {
  __shared__ __align__(16) float ws[2][TILE * RUN], xs[2][TILE * RUN];
  const int lane = threadIdx.x & 15, group = threadIdx.x >> 4, row0 = blockIdx.x * TILE, token0 = blockIdx.y * TILE;
  pdl_launch();
  pdl_wait();
  // What this thread brings: sum `lane` of rows and tokens `group` and `group + 16` of the tile.
  const u8* w_row[2];
  const float* x_row[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    w_row[i] = p.w + (u64)min(row0 + group + 16 * i, (int)p.rows - 1) * p.row_bytes;
    x_row[i] = p.x + (u64)min(token0 + group + 16 * i, (int)p.n - 1) * p.k;
  }
  uint4 w_next[2];
  float4 x_next[2];
  auto bring = [&](int k) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = k + lane;
      w_next[i] = make_uint4(bits_at<TYPE>(w_row[i], at), bits_at<TYPE>(w_row[i], at + 16),
                             bits_at<TYPE>(w_row[i], at + 32), bits_at<TYPE>(w_row[i], at + 48));
      const float* x = x_row[i] + at;
      x_next[i] = make_float4(__ldcg(x), __ldcg(x + 16), __ldcg(x + 32), __ldcg(x + 48));
    }
  };
  auto put = [&](int stage) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = (group + 16 * i) * RUN + lane * 4;
      const uint4 w = w_next[i];
      *(float4*)(ws[stage] + at) =
          make_float4(float_of<TYPE>(w.x), float_of<TYPE>(w.y), float_of<TYPE>(w.z), float_of<TYPE>(w.w));
      *(float4*)(xs[stage] + at) = x_next[i];
    }
  };
  // Groups of a warp share their tokens.
  const int my_row = (group & 3) * 8, my_token = (group >> 2) * 8;
  float acc[8][8];
#pragma unroll
  for (int i = 0; i < 64; i++) acc[i >> 3][i & 7] = 0.f;
  bring(0);
  put(0);
  __syncthreads();
  for (int k = 0, stage = 0; k < (int)p.k; k += RUN, stage ^= 1) {
    const bool more = k + RUN < (int)p.k;
    if (more) bring(k + RUN);
    const float* w = ws[stage] + my_row * RUN + lane * 4;
    const float* x = xs[stage] + my_token * RUN + lane * 4;
    float4 wv[8];
#pragma unroll
    for (int r = 0; r < 8; r++) wv[r] = *(const float4*)(w + r * RUN);
#pragma unroll
    for (int t = 0; t < 8; t++) {
      const float4 xv = *(const float4*)(x + t * RUN);
#pragma unroll
      for (int r = 0; r < 8; r++) {
        float a = acc[t][r];
        a = __fmaf_rn(wv[r].x, xv.x, a);
        a = __fmaf_rn(wv[r].y, xv.y, a);
        a = __fmaf_rn(wv[r].z, xv.z, a);
        acc[t][r] = __fmaf_rn(wv[r].w, xv.w, a);
      }
    }
    if (more) put(stage ^ 1);
    __syncthreads();
  }
#pragma unroll
  for (int t = 0; t < 8; t++) {
    const int token = token0 + my_token + t;
#pragma unroll
    for (int r = 0; r < 8; r++) {
      float a = acc[t][r];
#pragma unroll
      for (int s = 8; s; s >>= 1) a = __fadd_rn(a, __shfl_xor_sync(~0u, a, s));
      const int row = row0 + my_row + r;
      if (lane == ((t * 8 + r) & 15) && token < (int)p.n && row < (int)p.padded_rows) {
        float* o = p.out + (u64)token * p.out_rows + p.first_row + row;
        if (p.scale != 1.f) a = __fmul_rn(a, p.scale);
        *o = row < (int)p.rows ? a : 0.f;
        for (u32 s = 1; s < p.out_segments; s++) o[(u64)s * p.n * p.out_rows] = 0.f;
      }
    }
  }
}

#define KERNEL(name, type) \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const __grid_constant__ FloatArgs p) { many_float<type>(p); }
KERNEL(many_f32, F32)
KERNEL(many_f16, F16)
KERNEL(many_bf16, BF16)
