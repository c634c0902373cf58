// The steps between the products of a DFlash draft: tap of the target's residual stream, raw embedding lookup, residual and
// norm, head norms with rotation in halves and K and V. Its attention is `digits_split` of attention_digits.cu.
//
// Operation by operation what the CPU backend does (`muser-cpu`, executor/draft), so that proposals have the same bits.
#include "blocks.cuh"
#include "heads.cuh"

DEVICE float warp_sum(float s) {
#pragma unroll
  for (int o = 16; o; o >>= 1) s = __fadd_rn(s, __shfl_xor_sync(~0u, s, o));
  return s;
}

struct DraftTapArgs {
  const float* h;  // [n][hidden]
  Act act;         // k = taps * hidden
  u32 hidden;
  u32 first_block;  // where this tap's super-blocks begin
};

// The residual stream of all rows as one part of the concatenated features, quantised. One warp per super-block.
extern "C" __global__ void __launch_bounds__(128) draft_tap(const __grid_constant__ DraftTapArgs p) {
  pdl_launch();
  const int kb = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y;
  pdl_wait();
  if (kb * 256 >= (int)p.hidden) return;
  float v[8];
  load8(v, p.h + (u64)row * p.hidden + kb * 256 + lane * 8);
  quantise_block(v, row, p.first_block + kb, lane, p.act);
}

struct DraftEmbedArgs {
  const u8* table;
  const u32* inputs;  // token id of each row
  float* h;           // [n][hidden]
  u64 row_bytes;
  u32 type, hidden;
  float factor;       // of the table
};

// h = embedding row: the numbers of the file and the table's factor. One warp per super-block.
extern "C" __global__ void __launch_bounds__(128) draft_embed(const __grid_constant__ DraftEmbedArgs p) {
  pdl_launch();
  const int kb = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y;
  pdl_wait();
  if (kb * 256 >= (int)p.hidden) return;
  const int e = kb * 256 + lane * 8;
  const u8* from = p.table + __ldcg(p.inputs + row) * p.row_bytes;
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = __fmul_rn(dequantise(from, p.type, e + i), p.factor);
  float* h = p.h + (u64)row * p.hidden + e;
  *(float4*)h = make_float4(v[0], v[1], v[2], v[3]);
  *(float4*)(h + 4) = make_float4(v[4], v[5], v[6], v[7]);
}

struct DraftNormArgs {
  const float* part;  // [segments][n][hidden], or null: nothing to add
  const float* factors;  // [hidden] or null
  float* h;           // [n][hidden], or null: the row is what `part` says
  const float* w;     // [hidden]
  const u32* rows;    // which row of h each output row is made of; null: all, and h is written
  u64* best;          // [output rows] set to 0 for logit_rows, or null
  Act act;
  u32 segments, n, hidden;
  float eps;
};

// h += sum of segments; a = rms(h) * w, quantised. One CTA of hidden / 256 warps per output row.
extern "C" __global__ void __launch_bounds__(1024) draft_norm(const __grid_constant__ DraftNormArgs p) {
  __shared__ float red[32];
  const int lane = threadIdx.x & 31, kb = threadIdx.x >> 5, D = p.hidden, e = kb * 256 + lane * 8, out = blockIdx.x;
  pdl_launch();
  const int row = p.rows ? (int)__ldcg(p.rows + out) : out;
  pdl_wait();
  float x[8];
  if (p.part) {
    sum8(x, p.part + (u64)row * D + e, (u64)p.n * D, p.segments);
    times_factors8(x, p.factors, e);
  }
  if (p.h) {
    float* h = p.h + (u64)row * D + e;
    float before[8];
    load8(before, h);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = p.part ? __fadd_rn(before[i], x[i]) : before[i];
    if (p.part && !p.rows) {
      *(float4*)h = make_float4(x[0], x[1], x[2], x[3]);
      *(float4*)(h + 4) = make_float4(x[4], x[5], x[6], x[7]);
    }
  }
  float s = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) s = __fmaf_rn(x[i], x[i], s);
  s = warp_sum(s);
  if (lane == 0) red[kb] = s;
  __syncthreads();
  s = warp_sum(lane < D / 256 ? red[lane] : 0.f);
  const float r = inverse_rms(s, D, p.eps);
  if (p.best && threadIdx.x == 0) p.best[out] = 0;
  float w[8];
  load8(w, p.w + e);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __fmul_rn(__fmul_rn(x[i], r), w[i]);
  quantise_block(x, out, kb, lane, p.act);
}

struct DraftHeadArgs {
  const float* part;     // [segments][n][width]: heads of q, K of all layers, V of all layers; null: K and V are zeros
  const float* factors;  // [width] or null
  const float* q_norm;   // [128]
  const float* k_norms;  // [layers][128]
  const float2* angles;  // [position][64] cos, sin
  const u32* positions;  // per row
  const u32* slots;      // per row: block id * 256 + position in the block
  u8* q;                 // [n][heads][hi 128, lo 128]
  float* f;              // [n][heads] factor of each query's scores
  u8* kv;                // first block, at the first layer's place
  u64 block_bytes;       // from one block to the next
  u64 layer_bytes;       // and from one layer to the next
  u32 segments, n, width, heads, kv_heads, layers, k_at, v_at;
  float eps, factor;     // factor: what a query's scale is multiplied with
};

// q = digits of rope(rms(q) * w); K and V of each row and layer go to their block, laid out as in rows.cu. Rotation is on
// pairs (t, t + 64). One warp per head; grid ((heads + 2 layers kv_heads) / 4, rows).
template <int D> DEVICE void draft_rope(const DraftHeadArgs& p) {
  pdl_launch();
  const int index = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y;
  const int H = p.heads, KV = p.kv_heads;
  if (index >= H + 2 * KV * (int)p.layers) return;
  const bool is_q = index < H;
  const int layer = is_q ? 0 : (index - H) / (2 * KV), inside_layer = is_q ? 0 : (index - H) % (2 * KV);
  const bool is_v = inside_layer >= KV;
  const int head = is_q ? index : is_v ? inside_layer - KV : inside_layer;
  // Nothing in a step writes these: read before the wait.
  const u32 slot = __ldcg(p.slots + row), inside = slot & 255;
  const float4 w = *(const float4*)((is_q ? p.q_norm : p.k_norms + layer * 128) + lane * 4);
  const float* cs = (const float*)(p.angles + (u64)__ldcg(p.positions + row) * 64) + (lane & 15) * 8;
  const float4 a0 = *(const float4*)cs, a1 = *(const float4*)(cs + 4);
  pdl_wait();
  const u32 at = is_q ? head * 128 : is_v ? p.v_at + (layer * KV + head) * 128 : p.k_at + (layer * KV + head) * 128;
  float x[4] = {0.f, 0.f, 0.f, 0.f};
  if (p.part) {
    const float4 f = sum4(p.part + (u64)row * p.width + at + lane * 4, (u64)p.n * p.width, p.segments);
    x[0] = f.x; x[1] = f.y; x[2] = f.z; x[3] = f.w;
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = times_factor(x[i], p.factors, at + lane * 4 + i);
  }
  u8* to = p.kv + (u64)(slot >> 8) * p.block_bytes + layer * p.layer_bytes + head * head_bytes<D>();
  if (is_v) {
    store_value<D>(x, to, inside, lane);
    return;
  }
  if (p.part) {
    const float r = head_inverse_rms(x, p.eps);
    const float weight[4] = {w.x, w.y, w.z, w.w}, c[4] = {a0.x, a0.z, a1.x, a1.z}, sn[4] = {a0.y, a0.w, a1.y, a1.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = __fmul_rn(__fmul_rn(x[i], r), weight[i]);
      const float other = __shfl_xor_sync(~0u, x[i], 16);
      x[i] = lane < 16 ? __fsub_rn(__fmul_rn(x[i], c[i]), __fmul_rn(other, sn[i]))
                       : __fadd_rn(__fmul_rn(other, sn[i]), __fmul_rn(x[i], c[i]));
    }
  }
  const u64 query = (u64)row * H + head;
  if (is_q) store_query(x, p.q + query * 256, p.f + query, p.factor, lane);
  else store_key<D>(x, to, inside, lane);
}
extern "C" __global__ void __launch_bounds__(128) draft_heads_1(const __grid_constant__ DraftHeadArgs p) { draft_rope<1>(p); }
extern "C" __global__ void __launch_bounds__(128) draft_heads_2(const __grid_constant__ DraftHeadArgs p) { draft_rope<2>(p); }
