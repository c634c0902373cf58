// Attention of rows in the first block of their sequence (positions 0 to 255): the CPU backend's arithmetic, operation by
// operation (see attention_exact.cu), with the gate and the quantisation behind it in the same kernel. One block is all
// that such a row sees, so nothing is combined, no partial result leaves the CTA, and short texts have the CPU's bits.
//
// A CTA takes Q query heads that share a KV head (Q = 1: one after the other) of one row: a thread per position for the
// scores, per dim for the outputs. K and V lie side by side in shared memory up to 128 positions, beyond that V takes
// K's place. Q = 2 spreads a decode step over many multiprocessors, Q = 8 reads K and V less often for prefill.
#include "attention.cuh"

struct ShortArgs {
  const float* q;      // [n][heads][128], not scaled
  const u16* kv;       // as in rows.cu
  u64 block_halves;
  const u32* rows;     // the rows that this launch is for
  const u32* slots;    // per row of the step: block id * 256 + position
  const float* qkvg;   // [segments][n][width], gate at gate_at
  Act act;             // k = heads * 128
  u32 segments, n, width, gate_at;
  u32 heads, kv_heads, group, window;  // window 0: full
  u32 recent;          // so many positions, a row's own the last, may be written by this step; the others are there before
  float scale;
};

constexpr int THREADS = 256;
constexpr int P_STRIDE = 260;

template <int Q> struct Shared {
  static constexpr int HEADS = Q < 2 ? 2 : Q;  // of the CTA: whole super-blocks
  u8 kv[65536];
  float q[128][Q];
  float p[Q][P_STRIDE];
  float o[HEADS][128];
  float l[HEADS];
  float top[Q][8];
};

template <int Q> DEVICE void attend(const ShortArgs& p) {
  constexpr int HEADS = Shared<Q>::HEADS, PER_THREAD = Q < 2 ? 1 : Q / 2;
  extern __shared__ __align__(128) u8 bytes[];
  Shared<Q>& sh = *(Shared<Q>*)bytes;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  pdl_launch();
  const u32 r = __ldcg(p.rows + blockIdx.y), slot = __ldcg(p.slots + r);
  const int pos = slot & 255, hi = pos + 1, lo = p.window ? max(0, hi - (int)p.window) : 0;
  const int old = max(lo, hi - (int)p.recent);
  const bool both = hi <= 128;
  const u32 ks = smem_u32(sh.kv), vs = both ? ks + 32768 : ks, v_stride = both ? 256 : 512;
  const u16* block = p.kv + (u64)(slot >> 8) * p.block_halves;

  auto fetch_k = [&](const u16* k, int from, int to) {
    for (int i = from * 16 + tid; i < to * 16; i += THREADS) {
      const int at = i >> 4, c = i & 15;
      cp16(ks + at * 256 + ((c ^ (at & 7)) << 4), k + at * 128 + c * 8);
    }
  };
  auto fetch_v = [&](const u16* v, int from, int to) {  // in pieces of 8 positions
    const int bits = both ? 4 : 5;
    for (int i = tid; i < 128 << bits; i += THREADS) {
      const int dim = i >> bits, c = i & ((1 << bits) - 1);
      if (c >= from && c < to) cp16(vs + dim * v_stride + ((c ^ (dim & 7)) << 4), v + dim * 256 + c * 8);
    }
  };

  const int first_head = blockIdx.x * HEADS, kb = blockIdx.x * (HEADS / 2) + warp;
  const float* gate_at = p.qkvg + (u64)r * p.width + p.gate_at + kb * 256 + lane * 8;
  const u64 gate_step = (u64)p.n * p.width;
  Segments8 gate;
#pragma unroll
  for (int pass = 0; pass < HEADS / Q; pass++) {
    const int head = first_head + pass * Q, kv_head = head / (int)p.group;
    const u16 *k = block + (u64)kv_head * 256 * 128, *v = k + (u64)p.kv_heads * 256 * 128;
    int from = lo;
    if (pass == 0) {
      from = old;
      fetch_k(k, lo, old);
      if (both) fetch_v(v, lo >> 3, old >> 3);
      pdl_wait();
      if (warp < HEADS / 2) gate.load(gate_at, gate_step, p.segments);
    }
    for (int i = tid; i < Q * 128; i += THREADS) sh.q[i & 127][i >> 7] = __ldcg(p.q + ((u64)r * p.heads + head) * 128 + i);
    fetch_k(k, from, hi);
    cp_commit();
    if (both) fetch_v(v, from >> 3, (hi + 7) >> 3);
    cp_commit();
    cp_wait<1>();
    __syncthreads();
    const bool on = tid >= lo && tid < hi;
    float s[Q];
#pragma unroll
    for (int i = 0; i < Q; i++) s[i] = on ? 0.f : NEG_INF;
    if (on) {
#pragma unroll 4
      for (int c = 0; c < 16; c++) {
        float kc[8];
        unpack8(kc, lds128(ks + tid * 256 + ((c ^ (tid & 7)) << 4)));
#pragma unroll
        for (int d = 0; d < 8; d++) {
#pragma unroll
          for (int i = 0; i < Q; i++) s[i] = __fmaf_rn(sh.q[8 * c + d][i], kc[d], s[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < Q; i++) s[i] = __fmul_rn(s[i], p.scale);
    }
#pragma unroll
    for (int i = 0; i < Q; i++) {
      float top = s[i];
#pragma unroll
      for (int o = 16; o; o >>= 1) {
        const float other = __shfl_xor_sync(~0u, top, o);
        top = other > top ? other : top;
      }
      if (lane == 0) sh.top[i][warp] = top;
    }
    __syncthreads();
    if (!both) {  // all have read K
      fetch_v(v, lo >> 3, (hi + 7) >> 3);
      cp_commit();
    }
#pragma unroll
    for (int i = 0; i < Q; i++) {
      float top = NEG_INF;
#pragma unroll
      for (int w = 0; w < 8; w++) top = sh.top[i][w] > top ? sh.top[i][w] : top;
      sh.p[i][tid] = on ? exp_exact(__fsub_rn(s[i], top)) : 0.f;
    }
    cp_wait<0>();
    __syncthreads();
    if (warp < (Q + 1) / 2) {  // 16 lanes a query, as in the definition
      const int query = min(tid >> 4, Q - 1), j = tid & 15;
      float sum = 0.f;
#pragma unroll
      for (int g = 0; g < 16; g++) sum = __fadd_rn(sum, sh.p[query][16 * g + j]);
#pragma unroll
      for (int o = 8; o; o >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, o));
      if (j == 0) sh.l[pass * Q + query] = sum;
    }
    const int dim = tid & 127, first = (tid >> 7) * PER_THREAD;
    if (first < Q) {
      float o[PER_THREAD];
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++) o[i] = 0.f;
#pragma unroll 2
      for (int c = lo >> 3; c < (hi + 7) >> 3; c++) {
        float vc[8];
        unpack8(vc, lds128(vs + dim * v_stride + ((c ^ (dim & 7)) << 4)));
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
          const float4 a = *(const float4*)&sh.p[first + i][8 * c], b = *(const float4*)&sh.p[first + i][8 * c + 4];
          const float e[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
          for (int j = 0; j < 8; j++) o[i] = __fmaf_rn(e[j], vc[j], o[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++) sh.o[pass * Q + first + i][dim] = __fadd_rn(o[i], 0.f);
    }
    __syncthreads();
  }
  if (warp < HEADS / 2) {
    float z[8], a[8];
    gate.add_up(z, gate_at, gate_step, p.segments);
    const int h = 2 * warp + (lane >> 4), d = (lane & 15) * 8;
    const float inverse = __fdiv_rn(1.f, sh.l[h]);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = __fmul_rn(__fmul_rn(sh.o[h][d + i], inverse), sigmoid(z[i]));
    quantise_block(a, r, kb, lane, p.act);
  }
}

#define SHORT(q) \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_short_##q(const __grid_constant__ ShortArgs p) { attend<q>(p); }
SHORT(1)
SHORT(2)
SHORT(8)
