// Products of float weights (F32, F16, BF16) with many rows. The order is that of `muser_backend::arith`: 16 sums by k % 16, each a
// chain of fma, ascending, then a tree; so the bits are those of `any_float_*`.
//
// A thread has one of the 16 sums of 16 output rows x 8 tokens, 16 adjacent threads the same outputs. In shared memory the four
// values k, k + 16, k + 32, k + 48 of a run of 64 lie together: 24 loads of 16 bytes serve 512 multiply-adds.
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

constexpr int ROWS = 64, TOKENS = 32, RUN = 64;  // of a CTA, whose 256 threads bring a run while they multiply with the one before

// N values of a row, from value `at` on, as they are: what is made of them must not be asked for before the products, or they wait for it.
template <int TYPE, int N> struct Bits {
  static constexpr int WORDS = N * (TYPE == F32 ? 4 : 2) / 4;
  u32 word[WORDS];
  DEVICE void load(const u8* row, int at) {
    const u8* p = row + (u64)at * (TYPE == F32 ? 4 : 2);
    if constexpr (WORDS == 4) {
      const uint4 v = *(const uint4*)p;
      word[0] = v.x; word[1] = v.y; word[2] = v.z; word[3] = v.w;
    } else {
      const uint2 v = *(const uint2*)p;
      word[0] = v.x; word[1] = v.y;
    }
  }
  DEVICE u32 bits(int i) const { return TYPE == F32 ? word[i] : word[i >> 1] >> (16 * (i & 1)) & 0xFFFFu; }
};
template <int TYPE> DEVICE float float_of(u32 bits) {
  return TYPE == F32 ? __uint_as_float(bits) : TYPE == F16 ? half_to_float((u16)bits) : __uint_as_float(bits << 16);
}

// Where the four values of sum `lane` of a row lie, in floats: so that neither writing nor reading meets in a bank.
DEVICE int place(int row, int lane) { return row * RUN + ((lane ^ lane >> 3 ^ (row & 1) << 1) << 2); }

template <int TYPE> DEVICE void many_float(const FloatArgs& p) {
  __shared__ __align__(16) float ws[2][ROWS * RUN], xs[2][TOKENS * RUN];
  const int lane = threadIdx.x & 15, group = threadIdx.x >> 4, row0 = blockIdx.x * ROWS, token0 = blockIdx.y * TOKENS;
  pdl_launch();
  pdl_wait();
  // What this thread brings: four sums of a row of weights, two of a token.
  const int w_mine = threadIdx.x >> 2, w_lane = (threadIdx.x & 3) * 4, x_mine = threadIdx.x >> 3, x_lane = (threadIdx.x & 7) * 2;
  const u8* w_row = p.w + (u64)min(row0 + w_mine, (int)p.rows - 1) * p.row_bytes;
  const float* x_row = p.x + (u64)min(token0 + x_mine, (int)p.n - 1) * p.k + x_lane;
  Bits<TYPE, 4> w_next[4];
  float2 x_next[4];
  auto bring = [&](int k) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      w_next[j].load(w_row, k + 16 * j + w_lane);
      x_next[j] = __ldcg((const float2*)(x_row + k + 16 * j));
    }
  };
  auto put = [&](int stage) {
#pragma unroll
    for (int e = 0; e < 4; e++)
      *(float4*)(ws[stage] + place(w_mine, w_lane + e)) =
          make_float4(float_of<TYPE>(w_next[0].bits(e)), float_of<TYPE>(w_next[1].bits(e)), float_of<TYPE>(w_next[2].bits(e)),
                      float_of<TYPE>(w_next[3].bits(e)));
    *(float4*)(xs[stage] + place(x_mine, x_lane)) = make_float4(x_next[0].x, x_next[1].x, x_next[2].x, x_next[3].x);
    *(float4*)(xs[stage] + place(x_mine, x_lane + 1)) = make_float4(x_next[0].y, x_next[1].y, x_next[2].y, x_next[3].y);
  };
  // Groups of a warp share their rows.
  const int my_row = (group >> 2) * 16, my_token = (group & 3) * 8;
  float acc[8][16];
#pragma unroll
  for (int i = 0; i < 128; i++) acc[i >> 4][i & 15] = 0.f;
  // A run is asked for two rounds before it is multiplied, and put where it is read from one round before.
  bring(0);
  put(0);
  if (RUN < (int)p.k) bring(RUN);
  __syncthreads();
  for (int k = 0, stage = 0; k < (int)p.k; k += RUN, stage ^= 1) {
    if (k + RUN < (int)p.k) put(stage ^ 1);
    if (k + 2 * RUN < (int)p.k) bring(k + 2 * RUN);
    const float* w = ws[stage];
    const float* x = xs[stage];
    float4 xv[8], wv = *(const float4*)(w + place(my_row, lane));
#pragma unroll
    for (int t = 0; t < 8; t++) xv[t] = *(const float4*)(x + place(my_token + t, lane));
#pragma unroll
    for (int r = 0; r < 16; r++) {
      const float4 next = *(const float4*)(w + place(my_row + min(r + 1, 15), lane));
#pragma unroll
      for (int t = 0; t < 8; t++) acc[t][r] = __fmaf_rn(wv.x, xv[t].x, acc[t][r]);
#pragma unroll
      for (int t = 0; t < 8; t++) acc[t][r] = __fmaf_rn(wv.y, xv[t].y, acc[t][r]);
#pragma unroll
      for (int t = 0; t < 8; t++) acc[t][r] = __fmaf_rn(wv.z, xv[t].z, acc[t][r]);
#pragma unroll
      for (int t = 0; t < 8; t++) acc[t][r] = __fmaf_rn(wv.w, xv[t].w, acc[t][r]);
      wv = next;
    }
    __syncthreads();
  }
#pragma unroll
  for (int t = 0; t < 8; t++) {
    float mine = 0.f;  // of row `lane`
#pragma unroll
    for (int r = 0; r < 16; r++) {
      float a = acc[t][r];
#pragma unroll
      for (int s = 8; s; s >>= 1) a = __fadd_rn(a, __shfl_xor_sync(~0u, a, s));
      if (lane == r) mine = a;
    }
    const int token = token0 + my_token + t, row = row0 + my_row + lane;
    if (token < (int)p.n && row < (int)p.padded_rows) {
      float* o = p.out + (u64)token * p.out_rows + p.first_row + row;
      if (p.scale != 1.f) mine = __fmul_rn(mine, p.scale);
      *o = row < (int)p.rows ? mine : 0.f;
      for (u32 s = 1; s < p.out_segments; s++) o[(u64)s * p.n * p.out_rows] = 0.f;
    }
  }
}

#define KERNEL(name, type) \
  extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ FloatArgs p) { many_float<type>(p); }
KERNEL(many_f32, F32)
KERNEL(many_f16, F16)
KERNEL(many_bf16, BF16)
