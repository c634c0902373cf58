// The small steps between the matrix products, fused so that each row is read once: embedding lookup, residual + norms +
// quantise, q/k norm + rope + KV write, silu * up + quantise, logits.
//
// One warp owns one super-block of 256 values (8 per lane) or one head of 128 (4 per lane). Every operation and the order of
// every sum is that of `muser_backend::arith` and of the CPU's kernels: 8 values by fma in order, then a butterfly over
// lanes, then a butterfly over super-blocks.
#include "blocks.cuh"
#include "heads.cuh"

DEVICE float warp_sum(float s) {
#pragma unroll
  for (int o = 16; o; o >>= 1) s = __fadd_rn(s, __shfl_xor_sync(~0u, s, o));
  return s;
}
DEVICE float square_sum8(const float (&v)[8]) {
  float s = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) s = __fmaf_rn(v[i], v[i], s);
  return warp_sum(s);
}

// Sum of squares over a row of which every warp of the CTA holds one super-block.
DEVICE float row_square_sum(const float (&v)[8], float* red, int blocks) {
  const int lane = threadIdx.x & 31;
  const float s = square_sum8(v);
  if (lane == 0) red[threadIdx.x >> 5] = s;
  __syncthreads();
  return warp_sum(lane < blocks ? red[lane] : 0.f);
}

struct EmbedArgs {
  const u8* table;
  const u32* inputs;        // per row: token id, or 0x80000000 | row of `embeddings`
  const float* embeddings;
  float* h;
  u64 row_bytes;
  u32 type, hidden;
  float eps, factor;        // factor: of the table
};

// h = rms(embedding), no weight. One CTA of hidden / 256 warps per row.
extern "C" __global__ void __launch_bounds__(1024) embed_rows(const __grid_constant__ EmbedArgs p) {
  __shared__ float red[32];
  const int lane = threadIdx.x & 31, kb = threadIdx.x >> 5, blocks = p.hidden / 256, row = blockIdx.x;
  pdl_launch();
  pdl_wait();
  const u32 in = __ldcg(p.inputs + row);
  const int e = kb * 256 + lane * 8;
  float v[8];
  if (in >> 31) {
    load8(v, p.embeddings + (u64)(in & 0x7FFFFFFF) * p.hidden + e);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __fmul_rn(dequantise(p.table + in * p.row_bytes, p.type, e + i), p.factor);
  }
  const float r = inverse_rms(row_square_sum(v, red, blocks), p.hidden, p.eps);
  float* h = p.h + (u64)row * p.hidden + e;
#pragma unroll
  for (int i = 0; i < 8; i++) h[i] = __fmul_rn(v[i], r);
}

// --- clusters: the CTAs that share a row add their sums through each other's shared memory (sm_90 on)
DEVICE u32 cluster_size() {
#if __CUDA_ARCH__ >= 900
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
#else
  return 1;
#endif
}
DEVICE u32 cluster_rank() {
#if __CUDA_ARCH__ >= 900
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
#else
  return 0;
#endif
}
DEVICE void cluster_sync(u32 size) {
#if __CUDA_ARCH__ >= 900
  if (size > 1) {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}
DEVICE void store_peer(float4* p, u32 rank, float4 v, u32 size) {
#if __CUDA_ARCH__ >= 900
  if (size > 1) {
    u32 a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(smem_u32(p)), "r"(rank));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
    return;
  }
#endif
  *p = v;
}

struct NormArgs {
  const float* part;   // [segments][n][hidden], null: no residual update
  const float* factors;  // [hidden] or null
  float* h;            // [n][hidden]
  const float* post;   // weight of the post-norm
  const float* w;      // weight of the norm
  const u32* rows;     // which row of h each output row is made of, null: all
  float* y;            // [rows][hidden] the normalised row in f32, or null
  u64* best;           // [rows] set to 0 for logit_rows, or null
  Act act;
  u32 segments, n, hidden;
  float eps, post_eps;
};

// h += rms(o, post_eps) * post with o the sum of segments; a = rms(h, eps) * w, quantised.
//
// With u = o * post and c the factor of the first norm, the second norm needs sum (h + c u)^2 = sum h^2 + 2 c sum h u +
// c^2 sum u^2: all four sums are taken at once, so a row has one reduction instead of two. Each CTA of the cluster holds
// the super-blocks of its warps; sums are added by a butterfly over all super-blocks, the same for any cluster size.
#if __CUDA_ARCH__ >= 900  // long rows are shared by a cluster
#define NORM_THREADS 256
#else
#define NORM_THREADS 1024
#endif
// CUT: at a cut between layers the factor of the second norm goes along with the row. With a product it is written to `cut` (one a
// row), without one it is taken from there.
template <bool CUT> DEVICE void norm(const NormArgs& p, float* cut) {
  __shared__ float4 red[32];
  const u32 size = cluster_size();
  const int lane = threadIdx.x & 31, W = blockDim.x >> 5, D = p.hidden, blocks = D / 256;
  const int out = blockIdx.x / size, kb = (int)cluster_rank() * W + (threadIdx.x >> 5), e = min(kb, blocks - 1) * 256 + lane * 8;
  pdl_launch();
  if (size > 1) cluster_sync(size);  // the peers' shared memory exists from here on
  float pw[8], ww[8], x[8], u[8];
  load8(ww, p.w + e);
  if (p.part) load8(pw, p.post + e);
  const int row = p.rows ? (int)__ldcg(p.rows + out) : out;
  pdl_wait();
  float* h = p.h + (u64)row * D + e;
  load8(x, h);
  float4 s = make_float4(0.f, 0.f, 0.f, 0.f);  // sums of o^2, h^2, h u, u^2
  if (p.part) {
    float o[8];
    sum8(o, p.part + (u64)row * D + e, (u64)p.n * D, p.segments);
    times_factors8(o, p.factors, e);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u[i] = __fmul_rn(o[i], pw[i]);
      s.x = __fmaf_rn(o[i], o[i], s.x);
      s.z = __fmaf_rn(x[i], u[i], s.z);
      s.w = __fmaf_rn(u[i], u[i], s.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) u[i] = 0.f;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) s.y = __fmaf_rn(x[i], x[i], s.y);
  s = make_float4(warp_sum(s.x), warp_sum(s.y), warp_sum(s.z), warp_sum(s.w));
  if (lane < (int)size && kb < blocks) store_peer(red + kb, lane, s, size);
  cluster_sync(size);
  s = lane < blocks ? red[lane] : make_float4(0.f, 0.f, 0.f, 0.f);
  s = make_float4(warp_sum(s.x), warp_sum(s.y), warp_sum(s.z), warp_sum(s.w));
  const float c = p.part ? inverse_rms(s.x, D, p.post_eps) : 0.f;
  const float square = __fmaf_rn(__fmul_rn(c, c), s.w, __fmaf_rn(__fmul_rn(2.f, c), s.z, s.y));
  const float r = CUT && !p.part ? __ldcg(cut + row) : inverse_rms(fmaxf(square, 0.f), D, p.eps);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __fmaf_rn(c, u[i], x[i]);
  if (kb >= blocks) return;
  if (CUT && p.part && kb == 0 && lane == 0) cut[row] = r;
  if (p.best && kb == 0 && lane == 0) p.best[out] = 0;
  if (p.part && !p.rows) {
    *(float4*)h = make_float4(x[0], x[1], x[2], x[3]);
    *(float4*)(h + 4) = make_float4(x[4], x[5], x[6], x[7]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __fmul_rn(__fmul_rn(x[i], r), ww[i]);
  if (p.y) {
    float* y = p.y + (u64)out * D + e;
    *(float4*)y = make_float4(x[0], x[1], x[2], x[3]);
    *(float4*)(y + 4) = make_float4(x[4], x[5], x[6], x[7]);
  }
  quantise_block(x, out, kb, lane, p.act);
}
extern "C" __global__ void __launch_bounds__(NORM_THREADS) norm_rows(const __grid_constant__ NormArgs p) { norm<false>(p, nullptr); }

struct NormCutArgs {
  NormArgs norm;
  float* cut;  // [n]
};
extern "C" __global__ void __launch_bounds__(NORM_THREADS) norm_cut(const __grid_constant__ NormCutArgs p) { norm<true>(p.norm, p.cut); }

struct SiluArgs {
  const float* part;  // [segments][n][2 * ffn]: gate, up
  const float* factors;  // [2 * ffn] or null
  Act act;            // k = ffn
  u32 segments, n, ffn;
};

// a = silu(gate) * up, quantised. One warp per super-block.
extern "C" __global__ void __launch_bounds__(128) silu_rows(const __grid_constant__ SiluArgs p) {
  pdl_launch();
  const int kb = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y;
  pdl_wait();
  if (kb * 256 >= (int)p.ffn) return;
  float u[8], v[8];
  const float* src = p.part + (u64)row * 2 * p.ffn + kb * 256 + lane * 8;
  const u64 step = (u64)p.n * 2 * p.ffn;
  Segments8 gate, up;
  gate.load(src, step, p.segments);
  up.load(src + p.ffn, step, p.segments);
  gate.add_up(u, src, step, p.segments);
  up.add_up(v, src + p.ffn, step, p.segments);
  times_factors8(u, p.factors, kb * 256 + lane * 8);
  times_factors8(v, p.factors, p.ffn + kb * 256 + lane * 8);
#pragma unroll
  for (int i = 0; i < 8; i++) u[i] = silu_times(u[i], v[i]);
  quantise_block(u, row, kb, lane, p.act);
}

struct RopeArgs {
  const float* part;     // [segments][n][width]: q, k, gate, v side by side
  const float* factors;  // [width] or null
  const float* q_norm;   // [128]
  const float* k_norm;   // [128]
  const float2* angles;  // [position][64] cos, sin; null on layers without rope
  const u32* positions;  // per row
  const u32* slots;      // per row: block id * 256 + position in the block
  u8* q;                 // [n][heads][hi 128, lo 128]
  float* f;              // [n][heads] factor of each query's scores
  u8* kv;                // first block of the group, at this layer's place
  u64 block_bytes;       // from one block to the next
  u32 segments, n, heads, kv_heads, width, k_at, v_at;
  float eps, factor;     // factor: what a query's scale is multiplied with
};

// q = digits of rope(rms(q) * w); K and V of each row go to their block in D digits (attention_digits.cuh).
// One warp per head; grid (heads + 2 kv_heads, rows) in warps of 4.
template <int D> DEVICE void rope(const RopeArgs& p) {
  pdl_launch();
  const int head = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y;
  const int H = p.heads, KV = p.kv_heads;
  const bool is_q = head < H, is_v = head >= H + KV;
  // Nothing in a step writes these: read before the wait.
  const u32 slot = __ldcg(p.slots + row), inside = slot & 255, position = __ldcg(p.positions + row);
  const float4 w = *(const float4*)((is_q ? p.q_norm : p.k_norm) + lane * 4);
  float4 cs = make_float4(1.f, 0.f, 1.f, 0.f);
  if (p.angles) cs = *(const float4*)(p.angles + (u64)position * 64 + lane * 2);
  pdl_wait();
  if (head >= H + 2 * KV) return;
  const u32 at = is_q ? head * 128 : is_v ? p.v_at + (head - H - KV) * 128 : p.k_at + (head - H) * 128;
  const float* src = p.part + (u64)row * p.width + at + lane * 4;
  const u64 step = (u64)p.n * p.width;
  const float4 f = sum4(src, step, p.segments);
  float x[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = times_factor(x[i], p.factors, at + lane * 4 + i);
  u8* block = p.kv + (u64)(slot >> 8) * p.block_bytes;
  if (is_v) {
    store_value<D>(x, block + (head - H - KV) * head_bytes<D>(), inside, lane);
    return;
  }
  const float r = head_inverse_rms(x, p.eps);
  x[0] = __fmul_rn(__fmul_rn(x[0], r), w.x);
  x[1] = __fmul_rn(__fmul_rn(x[1], r), w.y);
  x[2] = __fmul_rn(__fmul_rn(x[2], r), w.z);
  x[3] = __fmul_rn(__fmul_rn(x[3], r), w.w);
  if (p.angles) {
    const float a = x[0], b = x[1], c = x[2], d = x[3];
    x[0] = __fsub_rn(__fmul_rn(a, cs.x), __fmul_rn(b, cs.y));
    x[1] = __fadd_rn(__fmul_rn(a, cs.y), __fmul_rn(b, cs.x));
    x[2] = __fsub_rn(__fmul_rn(c, cs.z), __fmul_rn(d, cs.w));
    x[3] = __fadd_rn(__fmul_rn(c, cs.w), __fmul_rn(d, cs.z));
  }
  const u64 query = (u64)row * H + head;
  if (is_q) store_query(x, p.q + query * 256, p.f + query, p.factor, lane);
  else store_key<D>(x, block + (head - H) * head_bytes<D>(), inside, lane);
}
extern "C" __global__ void __launch_bounds__(128) rope_digits_1(const __grid_constant__ RopeArgs p) { rope<1>(p); }
extern "C" __global__ void __launch_bounds__(128) rope_digits_2(const __grid_constant__ RopeArgs p) { rope<2>(p); }

struct LogitArgs {
  const float* part;  // [segments][n][out_rows]
  const float* factors;  // [out_rows] or null
  float* logits;      // [n][vocab]
  u64* best;          // [n] 0 before
  u32 segments, n, out_rows, vocab;
  float scale, cap;   // cap 0: none
};

// logits = cap * tanh(scale * z / cap), and the largest one's id.
extern "C" __global__ void __launch_bounds__(256) logit_rows(const __grid_constant__ LogitArgs p) {
  pdl_launch();
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  pdl_wait();
  u64 key = 0;
  if (i < p.vocab) {
    const float* src = p.part + (u64)row * p.out_rows + i;
    float z = times_factor(sum1(src, (u64)p.n * p.out_rows, p.segments), p.factors, i);
    z = __fmul_rn(z, p.scale);
    if (p.cap > 0.f) z = __fmul_rn(p.cap, tanh_exact(__fdiv_rn(z, p.cap)));
    p.logits[(u64)row * p.vocab + i] = z;
    key = rank_of(z, i);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const u64 other = __shfl_xor_sync(~0u, key, o);
    key = other > key ? other : key;
  }
  if ((threadIdx.x & 31) == 0) atomicMax(p.best + row, key);
}

struct QuantiseArgs {
  const float* x;
  Act act;
};

// Quantisation by itself, for the self-test. Grid (k / 256, rows), one warp.
extern "C" __global__ void __launch_bounds__(32) quantise(const __grid_constant__ QuantiseArgs p) {
  float v[8];
  load8(v, p.x + (u64)blockIdx.y * p.act.k + blockIdx.x * 256 + threadIdx.x * 8);
  quantise_block(v, blockIdx.y, blockIdx.x, threadIdx.x, p.act);
}

struct ReadArgs {
  const uint4* p;
  u64 n;
  u32* out;
};

// Plain read: the bandwidth that everything else is measured against.
extern "C" __global__ void __launch_bounds__(256) plain_read(const __grid_constant__ ReadArgs p) {
  u32 s = 0;
  const u64 step = (u64)gridDim.x * blockDim.x;
  u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
  for (; i + 7 * step < p.n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = __ldcs(p.p + i + k * step);
#pragma unroll
    for (int k = 0; k < 8; k++) s ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (s == 0x12345678u) *p.out = s;
}
