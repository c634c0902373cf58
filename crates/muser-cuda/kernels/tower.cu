// The small steps of a vision tower between its products: patches, positions, layer norms, heads, GELU, pixel shuffle. Every
// operation and the order of every sum is that of `muser_backend::arith::vision` and of the CPU's kernels.
//
// One warp owns one super-block of 256 values (8 a lane) or one head of at most 128 (4 a lane).
#include "heads.cuh"

DEVICE float lanes_sum(float s) {
#pragma unroll
  for (int o = 16; o; o >>= 1) s = __fadd_rn(s, __shfl_xor_sync(~0u, s, o));
  return s;
}
// Sum over a row of which every warp of the CTA has one super-block, from the sums of lanes.
DEVICE float row_sum(float s, float* red, int blocks) {
  const int lane = threadIdx.x & 31;
  s = lanes_sum(s);
  __syncthreads();
  if (lane == 0) red[threadIdx.x >> 5] = s;
  __syncthreads();
  return lanes_sum(lane < blocks ? red[lane] : 0.f);
}

// v = fma((v - mean) r, w, b) of a row.
DEVICE void layer_norm(float (&v)[8], const float* weight, const float* bias, u32 width, float eps, float* red) {
  const int e = threadIdx.x * 8, blocks = width / 256;
  float s = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) s = __fadd_rn(s, v[i]);
  const float mean = __fdiv_rn(row_sum(s, red, blocks), (float)width);
  s = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float d = __fsub_rn(v[i], mean);
    s = __fmaf_rn(d, d, s);
  }
  const float r = inverse_rms(row_sum(s, red, blocks), width, eps);
  float w[8], b[8];
  load8(w, weight + e);
  load8(b, bias + e);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = __fmaf_rn(__fmul_rn(__fsub_rn(v[i], mean), r), w[i], b[i]);
}
DEVICE void store8(float* p, const float (&v)[8]) {
  *(float4*)p = make_float4(v[0], v[1], v[2], v[3]);
  *(float4*)(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
}

struct PatchArgs {
  const u8* rgb;        // [row][column][colour]
  const uint2* places;  // row and column of each patch of the slice
  const float* values;  // [colour][256]
  float* x;             // [n][width]: colour, row, column, then zeros
  u32 columns, size, width, _padding;  // patches of a row of the picture, pixels of a side
};

extern "C" __global__ void __launch_bounds__(256) tower_patches(const __grid_constant__ PatchArgs p) {
  pdl_launch();
  pdl_wait();
  const uint2 place = __ldcg(p.places + blockIdx.x);
  const u32 area = p.size * p.size;
  for (u32 i = threadIdx.x; i < p.width; i += 256) {
    float v = 0.f;
    if (i < 3 * area) {
      const u32 colour = i / area, at = i - colour * area, line = at / p.size, column = at - line * p.size;
      const u64 pixel = (u64)(place.x * p.size + line) * p.columns * p.size + place.y * p.size + column;
      v = p.values[colour * 256 + p.rgb[pixel * 3 + colour]];
    }
    p.x[(u64)blockIdx.x * p.width + i] = v;
  }
}

struct PositionArgs {
  const float* part;    // [segments][n][hidden]
  const uint2* taps;    // [n][4] place in the table, weight
  const float* table;   // [places][hidden]
  const float* weight;
  const float* bias;
  float* h;             // [n][hidden]
  u32 segments, n, hidden;
  float eps;
};

// h = norm(product + position). One CTA of hidden / 256 warps a row, as in the next two kernels.
extern "C" __global__ void __launch_bounds__(1024) tower_embed(const __grid_constant__ PositionArgs p) {
  __shared__ float red[32];
  const int e = threadIdx.x * 8;
  const u64 row = blockIdx.x;
  pdl_launch();
  pdl_wait();
  float v[8], position[8];
  sum8(v, p.part + row * p.hidden + e, (u64)p.n * p.hidden, p.segments);
#pragma unroll
  for (int i = 0; i < 8; i++) position[i] = 0.f;
#pragma unroll
  for (int tap = 0; tap < 4; tap++) {
    const uint2 at = __ldcg(p.taps + row * 4 + tap);
    float learned[8];
    load8(learned, p.table + (u64)at.x * p.hidden + e);
#pragma unroll
    for (int i = 0; i < 8; i++) position[i] = __fmaf_rn(__uint_as_float(at.y), learned[i], position[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = __fadd_rn(v[i], position[i]);
  layer_norm(v, p.weight, p.bias, p.hidden, p.eps, red);
  store8(p.h + row * p.hidden + e, v);
}

struct TowerNormArgs {
  const float* part;       // [segments][n][hidden], null: nothing is added
  const float* part_bias;
  float* h;                // [n][hidden]
  const float* weight;     // null: no norm
  const float* bias;
  Act act;
  u32 segments, n, hidden;
  float eps;
};

// The same by a single warp, which waits for no other: rows of BLOCKS super-blocks. The number is known when this is compiled; where it is not, every
// load waits for the one before.
template <int BLOCKS> DEVICE float narrow_sum(float (&s)[BLOCKS]) {
  static_assert(BLOCKS <= 8);
#pragma unroll
  for (int o = 16; o; o >>= 1)
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) s[b] = __fadd_rn(s[b], __shfl_xor_sync(~0u, s[b], o));
  // As lanes of `row_sum` add them, most of which have zeros.
  float all[8];
#pragma unroll
  for (int b = 0; b < 8; b++) all[b] = b < BLOCKS ? __fadd_rn(s[b], 0.f) : 0.f;
#pragma unroll
  for (int o = 4; o; o >>= 1)
#pragma unroll
    for (int b = 0; b < o; b++) all[b] = __fadd_rn(all[b], all[b + o]);
  return all[0];
}
template <int BLOCKS> DEVICE void load_row(float (&v)[BLOCKS][8], const float* p) {
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) load8(v[b], p + b * 256);
}
// What `tower_norm` does, a warp a row of BLOCKS super-blocks.
template <int BLOCKS> DEVICE void norm_row(const TowerNormArgs& p) {
  constexpr int WIDTH = BLOCKS * 256;
  const u32 row = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, e = lane * 8;
  pdl_launch();
  pdl_wait();
  if (row >= p.n) return;
  float v[BLOCKS][8], x[BLOCKS][8];
  float* h = p.h + (u64)row * WIDTH + e;
  load_row(v, h);
  if (p.part) {
    const float* part = p.part + (u64)row * WIDTH + e;
    load_row(x, part);
#pragma unroll 1
    for (u32 s = 1; s < p.segments; s++) {
      float more[BLOCKS][8];
      part += (u64)p.n * WIDTH;
      load_row(more, part);
#pragma unroll
      for (int i = 0; i < WIDTH / 32; i++) x[i >> 3][i & 7] = __fadd_rn(x[i >> 3][i & 7], more[i >> 3][i & 7]);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      float c[8];
      load8_constant(c, p.part_bias + e + b * 256);
#pragma unroll
      for (int i = 0; i < 8; i++) v[b][i] = __fadd_rn(v[b][i], __fadd_rn(x[b][i], c[i]));
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) store8(h + b * 256, v[b]);
  }
  if (!p.weight) return;
  float s[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    s[b] = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) s[b] = __fadd_rn(s[b], v[b][i]);
  }
  const float mean = __fdiv_rn(narrow_sum(s), (float)WIDTH);
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    s[b] = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float d = __fsub_rn(v[b][i], mean);
      s[b] = __fmaf_rn(d, d, s[b]);
    }
  }
  const float r = inverse_rms(narrow_sum(s), WIDTH, p.eps);
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    float w[8], c[8];
    load8_constant(w, p.weight + e + b * 256);
    load8_constant(c, p.bias + e + b * 256);
#pragma unroll
    for (int i = 0; i < 8; i++) v[b][i] = __fmaf_rn(__fmul_rn(__fsub_rn(v[b][i], mean), r), w[i], c[i]);
    quantise_block(v[b], row, b, lane, p.act);
  }
}
// Of the released tower's width. The compilers for older cards need more registers.
#if __CUDA_ARCH__ >= 900
constexpr int NARROW_CTAS = 4;
#else
constexpr int NARROW_CTAS = 3;
#endif
extern "C" __global__ void __launch_bounds__(128, NARROW_CTAS) tower_norm_6(const __grid_constant__ TowerNormArgs p) { norm_row<6>(p); }

// h += product + bias; a = norm(h), quantised.
extern "C" __global__ void __launch_bounds__(1024) tower_norm(const __grid_constant__ TowerNormArgs p) {
  __shared__ float red[32];
  const int e = threadIdx.x * 8;
  pdl_launch();
  pdl_wait();
  float v[8];
  float* h = p.h + (u64)blockIdx.x * p.hidden + e;
  load8(v, h);
  if (p.part) {
    float x[8], b[8];
    sum8(x, p.part + (u64)blockIdx.x * p.hidden + e, (u64)p.n * p.hidden, p.segments);
    load8(b, p.part_bias + e);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __fadd_rn(v[i], __fadd_rn(x[i], b[i]));
    store8(h, v);
  }
  if (!p.weight) return;
  layer_norm(v, p.weight, p.bias, p.hidden, p.eps, red);
  quantise_block(v, blockIdx.x, threadIdx.x >> 5, threadIdx.x & 31, p.act);
}

struct MergeArgs {
  const float* h;      // [patches][hidden]
  const u32* patches;  // [n][squares] the patches of each token
  const float* weight;
  const float* bias;
  Act act;             // k = squares hidden
  u32 squares, hidden;
  float eps;
  u32 _padding;
};

// The patches of a token, normed, channel by channel, quantised.
extern "C" __global__ void __launch_bounds__(1024) tower_merge(const __grid_constant__ MergeArgs p) {
  extern __shared__ __align__(16) float merged[];
  __shared__ float red[32];
  const int e = threadIdx.x * 8, lane = threadIdx.x & 31;
  pdl_launch();
  pdl_wait();
  for (u32 s = 0; s < p.squares; s++) {
    const u32 patch = __ldcg(p.patches + (u64)blockIdx.x * p.squares + s);
    float v[8];
    load8(v, p.h + (u64)patch * p.hidden + e);
    layer_norm(v, p.weight, p.bias, p.hidden, p.eps, red);
#pragma unroll
    for (int i = 0; i < 8; i++) merged[(e + i) * p.squares + s] = v[i];
  }
  __syncthreads();
  for (u32 kb = threadIdx.x >> 5; kb < p.act.k / 256; kb += blockDim.x >> 5) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = merged[kb * 256 + lane * 8 + i];
    quantise_block(v, blockIdx.x, kb, lane, p.act);
  }
}

// x (1 + erf(x / sqrt 2)) / 2, operation by operation.
DEVICE float gelu(float x) {
  const float t = fabsf(x);
  float q = 1.484444e-6f;
  q = __fmaf_rn(q, t, -2.1628906e-5f);
  q = __fmaf_rn(q, t, 0.00010262249f);
  q = __fmaf_rn(q, t, 0.00015737867f);
  q = __fmaf_rn(q, t, -0.0049754637f);
  q = __fmaf_rn(q, t, 0.03644077f);
  q = __fmaf_rn(q, t, 0.31828213f);
  q = __fmaf_rn(q, t, 0.79788715f);
  q = __fmaf_rn(q, t, 0.693147180559945309f);
  return __fmaf_rn(-t, exp_bounded(__fsub_rn(0.f, q)), fmaxf(x, 0.f));  // q is never negative
}

struct GeluArgs {
  const float* part;  // [segments][n][k of act]
  const float* bias;  // or null
  Act act;
  u32 segments, n;
};

// a = gelu(product + bias), or of the product alone if `bias` is null, quantised. A warp has a super-block of some rows, as many as the grid
// leaves it, and asks for the next one before it begins. Grid (super-blocks / 4, runs of rows).
extern "C" __global__ void __launch_bounds__(128) tower_gelu(const __grid_constant__ GeluArgs p) {
  const int kb = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, e = kb * 256 + lane * 8;
  const u32 rows = (p.n + gridDim.y - 1) / gridDim.y, row0 = blockIdx.y * rows, end = min(row0 + rows, p.n);
  pdl_launch();
  pdl_wait();
  if (e >= (int)p.act.k || row0 >= end) return;
  float v[8], next[8], b[8];
  const float* part = p.part + (u64)row0 * p.act.k + e;
  load8(next, part);
#pragma unroll
  for (int i = 0; i < 8; i++) b[i] = 0.f;
  if (p.bias) load8(b, p.bias + e);
#pragma unroll 1  // shorter code is faster here, too
  for (u32 row = row0; row < end; row++) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = next[i];
    if (row + 1 < end) load8(next, part + p.act.k);
#pragma unroll 1
    for (u32 s = 1; s < p.segments; s++) {
      float x[8];
      load8(x, part + (u64)s * p.n * p.act.k);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = __fadd_rn(v[i], x[i]);
    }
    part += p.act.k;
    if (p.bias) {
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = __fadd_rn(v[i], b[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = gelu(v[i]);
    quantise_block(v, row, kb, lane, p.act);
  }
}

struct RowsArgs {
  const float* part;  // [segments][n][width]
  float* out;         // [n][width], or
  Act act;            // quantised, if `out` is null
  u32 segments, n, width, _padding;
};

// Finished rows: sums of segments, as they are or quantised. One warp per super-block.
extern "C" __global__ void __launch_bounds__(128) tower_rows(const __grid_constant__ RowsArgs p) {
  const int kb = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, e = kb * 256 + lane * 8;
  pdl_launch();
  pdl_wait();
  if (e >= (int)p.width) return;
  float v[8];
  sum8(v, p.part + (u64)blockIdx.y * p.width + e, (u64)p.n * p.width, p.segments);
  if (p.out) store8(p.out + (u64)blockIdx.y * p.width + e, v);
  else quantise_block(v, blockIdx.y, kb, lane, p.act);
}

// Parts of q, k and v of a slice.
struct HeadArgs {
  const float* part;  // [segments][n][3 heads dim]: q, k, v
  const float* bias;  // [3 heads dim]
  const float* rope;  // [n][dim]: cos of each pair, then sin
  const u32* slots;   // per row: block * 256 + place in the block
  u8* q;              // [n][heads][hi 128, lo 128]
  float* f;           // [n][heads]
  u8* kv;
  u64 block_bytes;
  u32 segments, n, heads, dim;
  float factor, hadamard;  // of scores; of the Hadamard matrix, 0: none
};

// A lane's four values of head `index` of q, k and v, with their bias.
DEVICE void biased_head(float (&x)[4], const HeadArgs& p, u32 index, u32 row, u32 d) {
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = 0.f;
  if (d >= p.dim) return;
  const u32 at = index * p.dim + d, width = 3 * p.heads * p.dim;
  const float4 v = sum4(p.part + (u64)row * width + at, (u64)p.n * width, p.segments), b = ldcg4(p.bias + at);
  x[0] = __fadd_rn(v.x, b.x);
  x[1] = __fadd_rn(v.y, b.y);
  x[2] = __fadd_rn(v.z, b.z);
  x[3] = __fadd_rn(v.w, b.w);
}

// A head of q or k: rotation, Hadamard matrix and digits.
DEVICE void store_head(float (&x)[4], float2 c, float2 s, const HeadArgs& p, u32 head, bool is_key, u32 row, u32 lane) {
  if (lane * 4 < p.dim) {
    const float a = x[0], e = x[2];
    x[0] = __fsub_rn(__fmul_rn(a, c.x), __fmul_rn(x[1], s.x));
    x[1] = __fadd_rn(__fmul_rn(a, s.x), __fmul_rn(x[1], c.x));
    x[2] = __fsub_rn(__fmul_rn(e, c.y), __fmul_rn(x[3], s.y));
    x[3] = __fadd_rn(__fmul_rn(e, s.y), __fmul_rn(x[3], c.y));
  }
  if (p.hadamard != 0.f) hadamard_of(x, lane, p.dim / 4, p.hadamard);
  if (is_key) {
    const u32 slot = __ldcg(p.slots + row);
    u8* block = p.kv + (u64)(slot >> 8) * p.block_bytes + head * head_bytes<2>();
    store_key_digits<2>(x, block, slot & 255, lane);
  } else {
    const u64 query = (u64)row * p.heads + head;
    store_query_digits(x, p.q + query * 256, p.f + query, p.factor, lane);
  }
}

// q and k: bias, rotation, Hadamard matrix and digits. One warp has a head of HEAD_ROWS rows, and asks for all of them before it begins.
// Grid (2 heads / 4, rows / HEAD_ROWS).
constexpr int HEAD_ROWS = 4;
extern "C" __global__ void __launch_bounds__(128) tower_heads(const __grid_constant__ HeadArgs p) {
  const u32 index = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row0 = blockIdx.y * HEAD_ROWS, d = lane * 4;
  pdl_launch();
  pdl_wait();
  if (index >= 2 * p.heads) return;
  const bool is_key = index >= p.heads;
  const u32 head = is_key ? index - p.heads : index;
  float values[HEAD_ROWS][4];
  float2 cosines[HEAD_ROWS], sines[HEAD_ROWS];
#pragma unroll
  for (int r = 0; r < HEAD_ROWS; r++) {
    const u32 row = min(row0 + r, p.n - 1);
    biased_head(values[r], p, index, row, d);
    if (d < p.dim) {
      const float* rope = p.rope + (u64)row * p.dim + lane * 2;
      cosines[r] = __ldcg((const float2*)rope);
      sines[r] = __ldcg((const float2*)(rope + p.dim / 2));
    }
  }
#pragma unroll
  for (int r = 0; r < HEAD_ROWS; r++) {
    const u32 row = row0 + r;
    if (row >= p.n) break;
    store_head(values[r], cosines[r], sines[r], p, head, is_key, row, lane);
  }
}
// v: bias and digits. A CTA has a head of 32 rows: a dim's digits of positions that follow each other leave together.
// Grid (heads, rows / 32).
constexpr int V_ROWS = 32, V_STRIDE = V_ROWS + 4;  // bytes from dim to dim in shared memory: four lanes a bank

extern "C" __global__ void __launch_bounds__(128) tower_values(const __grid_constant__ HeadArgs p) {
  __shared__ __align__(16) u8 digits[2][128 * V_STRIDE];
  __shared__ u32 slots[V_ROWS];
  const u32 head = blockIdx.x, row0 = blockIdx.y * V_ROWS, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 rows = min((u32)V_ROWS, p.n - row0);
  pdl_launch();
  pdl_wait();
  if (threadIdx.x < rows) slots[threadIdx.x] = __ldcg(p.slots + row0 + threadIdx.x);
  __syncthreads();
  auto head_of = [&](u32 slot) { return p.kv + (u64)(slot >> 8) * p.block_bytes + head * head_bytes<2>(); };
  for (u32 r = warp; r < rows; r += 4) {
    float x[4];
    biased_head(x, p, 2 * p.heads + head, row0 + r, lane * 4);
    int codes[4];
    const float d = head_codes(x, 32639.f, 0.f, codes);
    const u32 high = high_digits(codes), low = low_digits(codes);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      digits[0][(lane * 4 + i) * V_STRIDE + r] = (u8)(high >> 8 * i);
      digits[1][(lane * 4 + i) * V_STRIDE + r] = (u8)(low >> 8 * i);
    }
    if (lane == 0) *(float*)(head_of(slots[r]) + scales_at<2>() + 1024 + (slots[r] & 255) * 4) = d;
  }
  __syncthreads();
  const bool run = rows == V_ROWS && (slots[0] & 15) == 0 && slots[V_ROWS - 1] == slots[0] + V_ROWS - 1 &&
                   slots[0] >> 8 == slots[V_ROWS - 1] >> 8;
  for (u32 i = threadIdx.x; i < 256; i += 128) {
    const u32 plane = i >> 7, dim = i & 127;
    if (dim >= p.dim) continue;
    const u8* from = digits[plane] + dim * V_STRIDE;
    const u64 at = v_at<2>() + plane * PLANE + dim * 256;
    if (run) {
      uint4* to = (uint4*)(head_of(slots[0]) + at + (slots[0] & 255));
      const u32* word = (const u32*)from;
      to[0] = make_uint4(word[0], word[1], word[2], word[3]);
      to[1] = make_uint4(word[4], word[5], word[6], word[7]);
    } else {
      for (u32 r = 0; r < rows; r++) head_of(slots[r])[at + (slots[r] & 255)] = from[r];
    }
  }
}
