// Attention without tensor cores: every operation and its order as the CPU backend defines them, so that both backends
// write the same bits. Slower than attention.cu in prefill and at great depths; for comparing backends and for KV that is
// to continue elsewhere.
//
// For one query and one block of 256 positions: s = scale * fma chain over d, m = max s, p = exp(s - m) and 0 for masked
// positions, l = sum p in 16 lanes by position % 16, then a tree; o[d] = fma chain over positions, plus +0. Blocks are
// combined ascending: M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L' = fma(L, a, l b), O' = fma(O, a, o b). The
// result is O * (1 / L). A block that a query does not see is left out (l = 0).
//
// A CTA takes the 16 query vectors of a tile and a block: 2 positions x 8 queries a thread for the scores, 2 dims x 4
// queries for the outputs. K and V pass through the same 64 KB of shared memory, 16-byte pieces swizzled by the row.
#include "attention.cuh"

struct ExactArgs {
  const float* q;        // [n][heads][128]
  const u16* kv;         // as in rows.cu
  u64 block_halves;
  const Tile* tiles;
  const uint2* groups;   // walk: first tile, tiles
  const u32* counts;     // split: parts in all, tiles
  const u32* tables;
  float* part_o;         // [part][16][128]
  float2* part_ml;       // [part][16]: maximum and sum
  u32 heads, kv_heads, group, window;  // window 0: full
  u32 group_tiles;       // walk: most tiles of a group
  float scale;
  // For the block of a draft, whose queries are not among the keys before it and all see each other; null otherwise:
  const u16* own;        // split: first of the blocks that come last for each tile, laid out like those of kv
  u64 own_halves;        // f16 values from one to the next
  const u32* ends;       // per tile: where the keys before the block end; the block's own number; its rows
};

constexpr int THREADS = 256;
constexpr int P_STRIDE = 260;

struct Shared {
  u8 kv[65536];
  float q[128][16];
  float p[16][P_STRIDE];
  float m[16], l[16], a[16], b[16];
};

// K and V of 256 positions of one KV head.
struct Keys {
  const u16* k;
  int base;  // position of the first
  int end;   // where the keys of all queries end; negative: each query is the last of its keys
};

DEVICE Keys keys_of(const ExactArgs& p, const Tile& tile, int kv_head, u32 at, int end) {
  const u16* block = p.kv + (u64)__ldcg(p.tables + tile.table + at) * p.block_halves;
  return {block + (u64)kv_head * 256 * 128, (int)(tile.first_block + at) * 256, end};
}

// Positions of the block (0..256) that query m sees: lo..hi, empty if none or if the query does not exist.
DEVICE void visible(const ExactArgs& p, const Tile& tile, int m, const Keys& keys, int& lo, int& hi) {
  const int tok = m / (int)p.group, pos = (int)tile.pos + tok;
  const int first = p.window ? max(0, pos - (int)p.window + 1) : 0, end = keys.end < 0 ? pos + 1 : keys.end;
  lo = min(max(first - keys.base, 0), 256);
  hi = tok < (int)tile.count ? min(max(end - keys.base, 0), 256) : 0;
}

DEVICE void load_queries(Shared& sh, const ExactArgs& p, const Tile& tile, int kv_head) {
  for (int i = threadIdx.x; i < 16 * 128; i += THREADS) {
    const int m = i >> 7, d = i & 127, tok = m / (int)p.group, head = kv_head * (int)p.group + m % (int)p.group;
    sh.q[d][m] = tok < (int)tile.count ? __ldcg(p.q + ((u64)(tile.row + tok) * p.heads + head) * 128 + d) : 0.f;
  }
}

// One block: leaves m and l of each query in `sh` and o of dims dp, dp + 64 for 4 queries in registers. Begins and ends
// with shared memory free for K.
DEVICE void attend_block(Shared& sh, float (&o)[2][4], const ExactArgs& p, const Tile& tile, const Keys& keys) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, base = keys.base;
  const u16* k = keys.k;
  const u16* v = k + (u64)p.kv_heads * 256 * 128;
  // Positions that any query of the tile sees, in pieces of 8.
  const int first = p.window ? max(0, (int)tile.pos - (int)p.window + 1) : 0;
  const int from = min(max(first - base, 0), 256) & ~7;
  const int end = keys.end < 0 ? (int)(tile.pos + tile.count) : keys.end;
  const int to = (min(max(end - base, 0), 256) + 7) & ~7;
  const u32 kv = smem_u32(sh.kv);

  for (int i = from * 16 + tid; i < to * 16; i += THREADS) {
    const int pos = i >> 4, c = i & 15;
    cp16(kv + pos * 256 + ((c ^ (pos & 7)) << 4), k + pos * 128 + c * 8);
  }
  cp_commit();
  cp_wait<0>();
  __syncthreads();
  {
    const int pos = tid & 127, half = (tid >> 7) * 8;
    const bool on0 = pos >= from && pos < to, on1 = pos + 128 >= from && pos + 128 < to;
    if (on0 || on1) {
      float s[2][8];
#pragma unroll
      for (int i = 0; i < 8; i++) s[0][i] = s[1][i] = 0.f;
#pragma unroll 2
      for (int c = 0; c < 16; c++) {
        float k0[8], k1[8];
        const u32 piece = (c ^ (pos & 7)) << 4;
        unpack8(k0, lds128(kv + pos * 256 + piece));
        unpack8(k1, lds128(kv + (pos + 128) * 256 + piece));
#pragma unroll
        for (int d = 0; d < 8; d++) {
          const float4 qa = *(const float4*)&sh.q[8 * c + d][half], qb = *(const float4*)&sh.q[8 * c + d][half + 4];
          const float q[8] = {qa.x, qa.y, qa.z, qa.w, qb.x, qb.y, qb.z, qb.w};
#pragma unroll
          for (int i = 0; i < 8; i++) {
            s[0][i] = __fmaf_rn(q[i], k0[d], s[0][i]);
            s[1][i] = __fmaf_rn(q[i], k1[d], s[1][i]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
        sh.p[half + i][pos] = __fmul_rn(s[0][i], p.scale);
        sh.p[half + i][pos + 128] = __fmul_rn(s[1][i], p.scale);
      }
    }
  }
  __syncthreads();
  // V arrives while the probabilities are computed.
  for (int i = tid; i < 128 * 32; i += THREADS) {
    const int dim = i >> 5, c = i & 31;
    if (c * 8 >= from && c * 8 < to) cp16(kv + dim * 512 + ((c ^ (dim & 7)) << 4), v + dim * 256 + c * 8);
  }
  cp_commit();
  {
    const int m = warp * 2 + (lane >> 4), j = lane & 15;  // 16 lanes a query, as in the definition
    int lo, hi;
    visible(p, tile, m, keys, lo, hi);
    float x[16], top = NEG_INF;
#pragma unroll
    for (int g = 0; g < 16; g++) {
      const int pos = 16 * g + j;
      x[g] = pos >= lo && pos < hi ? sh.p[m][pos] : NEG_INF;
      top = x[g] > top ? x[g] : top;
    }
#pragma unroll
    for (int s = 8; s; s >>= 1) {
      const float other = __shfl_xor_sync(~0u, top, s);
      top = other > top ? other : top;
    }
    float sum = 0.f;
#pragma unroll
    for (int g = 0; g < 16; g++) {
      const float e = lo < hi ? exp_exact(__fsub_rn(x[g], top)) : 0.f;
      sh.p[m][16 * g + j] = e;
      sum = __fadd_rn(sum, e);
    }
#pragma unroll
    for (int s = 8; s; s >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, s));
    if (j == 0) {
      sh.m[m] = lo < hi ? top : NEG_INF;
      sh.l[m] = sum;
    }
  }
  cp_wait<0>();
  __syncthreads();
  const int dim = tid & 63, quarter = (tid >> 6) * 4;
#pragma unroll
  for (int i = 0; i < 4; i++) o[0][i] = o[1][i] = 0.f;
  for (int c = from >> 3; c < to >> 3; c++) {
    float v0[8], v1[8];
    const u32 piece = (c ^ (dim & 7)) << 4;
    unpack8(v0, lds128(kv + dim * 512 + piece));
    unpack8(v1, lds128(kv + (dim + 64) * 512 + piece));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 pa = *(const float4*)&sh.p[quarter + i][8 * c], pb = *(const float4*)&sh.p[quarter + i][8 * c + 4];
      const float e[8] = {pa.x, pa.y, pa.z, pa.w, pb.x, pb.y, pb.z, pb.w};
#pragma unroll
      for (int j = 0; j < 8; j++) {
        o[0][i] = __fmaf_rn(e[j], v0[j], o[0][i]);
        o[1][i] = __fmaf_rn(e[j], v1[j], o[1][i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    o[0][i] = __fadd_rn(o[0][i], 0.f);
    o[1][i] = __fadd_rn(o[1][i], 0.f);
  }
  __syncthreads();
}

DEVICE void store(const ExactArgs& p, u64 part, const float (&o)[2][4]) {
  const int dim = threadIdx.x & 63, quarter = (threadIdx.x >> 6) * 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    p.part_o[part * 2048 + (quarter + i) * 128 + dim] = o[0][i];
    p.part_o[part * 2048 + (quarter + i) * 128 + dim + 64] = o[1][i];
  }
}

// Every partial result by itself: block `at` of a tile and KV head.
extern "C" __global__ void __launch_bounds__(THREADS) exact_split(const __grid_constant__ ExactArgs p) {
  extern __shared__ __align__(128) u8 bytes[];
  Shared& sh = *(Shared*)bytes;
  pdl_launch();
  pdl_wait();
  const u32 count = __ldcg(p.counts), tiles = __ldcg(p.counts + 1);
  const int lane = threadIdx.x & 31;
  for (u32 item = blockIdx.x; item < count; item += gridDim.x) {
    const u32 index = find_tile(p.tiles, tiles, item, lane);
    const Tile tile = load_tile(p.tiles + index);
    const u32 inside = item - tile.part, kv_head = inside / tile.parts;
    load_queries(sh, p, tile, kv_head);
    float o[2][4];
    const u32 at = inside - kv_head * tile.parts;
    Keys keys;
    if (p.own) {
      const u32* ends = p.ends + index * 3;
      const int end = (int)__ldcg(ends);
      if (at + 1 < tile.parts) {
        keys = keys_of(p, tile, kv_head, at, end);
      } else {
        keys = {p.own + (u64)__ldcg(ends + 1) * p.own_halves + (u64)kv_head * 256 * 128, end, end + (int)__ldcg(ends + 2)};
      }
    } else {
      keys = keys_of(p, tile, kv_head, at, -1);
    }
    attend_block(sh, o, p, tile, keys);
    store(p, item, o);
    if (threadIdx.x < 16) p.part_ml[(u64)item * 16 + threadIdx.x] = make_float2(sh.m[threadIdx.x], sh.l[threadIdx.x]);
    __syncthreads();
  }
}

// One tile and KV head walks its blocks; one partial result. Grid (groups * group_tiles, KV heads).
extern "C" __global__ void __launch_bounds__(THREADS) exact_walk(const __grid_constant__ ExactArgs p) {
  extern __shared__ __align__(128) u8 bytes[];
  Shared& sh = *(Shared*)bytes;
  pdl_launch();
  pdl_wait();
  const u32 slot = gridDim.x - 1 - blockIdx.x, kv_head = blockIdx.y;  // the longest walks first
  const uint2 grp = __ldcg(p.groups + slot / p.group_tiles);
  if (slot % p.group_tiles >= grp.y) return;
  const Tile tile = load_tile(p.tiles + grp.x + slot % p.group_tiles);
  load_queries(sh, p, tile, kv_head);
  float total[2][4], max_so_far = NEG_INF, sum_so_far = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) total[0][i] = total[1][i] = 0.f;
  const int quarter = (threadIdx.x >> 6) * 4;
  for (u32 at = 0; at < tile.blocks; at++) {
    float o[2][4];
    attend_block(sh, o, p, tile, keys_of(p, tile, kv_head, at, -1));
    if (threadIdx.x < 16) {
      const float m = sh.m[threadIdx.x], l = sh.l[threadIdx.x];
      float a = 1.f, b = -1.f;  // b < 0: leave this block out
      if (l != 0.f) {
        const float top = max_so_far > m ? max_so_far : m;
        a = exp_exact(__fsub_rn(max_so_far, top));
        b = exp_exact(__fsub_rn(m, top));
        sum_so_far = __fmaf_rn(sum_so_far, a, __fmul_rn(l, b));
        max_so_far = top;
      }
      sh.a[threadIdx.x] = a;
      sh.b[threadIdx.x] = b;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float a = sh.a[quarter + i], b = sh.b[quarter + i];
      if (b >= 0.f) {
        total[0][i] = __fmaf_rn(total[0][i], a, __fmul_rn(o[0][i], b));
        total[1][i] = __fmaf_rn(total[1][i], a, __fmul_rn(o[1][i], b));
      }
    }
  }
  const u64 part = tile.part + (u64)kv_head * tile.parts;
  store(p, part, total);
  if (threadIdx.x < 16) p.part_ml[part * 16 + threadIdx.x] = make_float2(max_so_far, sum_so_far);
}

struct ExactCombineArgs {
  const float* part_o;
  const float2* part_ml;
  const Tile* tiles;
  const u32* row_tile;  // per row
  const float* qkvg;    // [segments][n][width], gate at gate_at; null: no gate
  Act act;              // k = heads * 128
  u32 segments, n, width, gate_at, group;
};

// a = O * (1 / L) * sigmoid(gate), quantised for the output projection. One CTA per super-block (2 heads) and row. The
// factors of 128 blocks at a time depend only on the running maximum, so they are computed side by side.
extern "C" __global__ void __launch_bounds__(256) exact_combine(const __grid_constant__ ExactCombineArgs p) {
  __shared__ float as[2][128], bs[2][128], ls[2][128], scan[8], row[256];
  pdl_launch();
  pdl_wait();
  const int kb = blockIdx.x, r = blockIdx.y, i = threadIdx.x, h = i >> 7, d = i & 127, head = kb * 2 + h, lane = i & 31;
  const Tile tile = load_tile(p.tiles + __ldcg(p.row_tile + r));
  const int kv_head = head / (int)p.group, parts = tile.parts;
  const int m_row = (r - (int)tile.row) * (int)p.group + head % (int)p.group;
  const u64 part = tile.part + (u64)kv_head * parts;
  float o = 0.f, l = 0.f, top = NEG_INF;  // top: maximum of the blocks before this stage
  for (int stage = 0; stage < parts; stage += 128) {
    const int n = min(128, parts - stage);
    float2 ml = make_float2(NEG_INF, 0.f);
    if (d < n) ml = __ldcg(p.part_ml + (part + stage + d) * 16 + m_row);
    const bool seen = ml.y != 0.f;
    float upto = seen ? ml.x : NEG_INF;  // maximum up to this block, itself included
#pragma unroll
    for (int s = 1; s < 32; s <<= 1) {
      const float other = __shfl_up_sync(~0u, upto, s);
      if (lane >= s && other > upto) upto = other;
    }
    if (lane == 31) scan[i >> 5] = upto;
    float before = __shfl_up_sync(~0u, upto, 1);
    if (lane == 0) before = NEG_INF;
    __syncthreads();
    float carry = top;
    for (int w = h * 4; w < i >> 5; w++) carry = scan[w] > carry ? scan[w] : carry;
    before = carry > before ? carry : before;
    upto = carry > upto ? carry : upto;
    as[h][d] = exp_exact(__fsub_rn(before, upto));
    bs[h][d] = seen ? exp_exact(__fsub_rn(ml.x, upto)) : -1.f;
    ls[h][d] = ml.y;
    for (int w = h * 4; w < h * 4 + 4; w++) top = scan[w] > top ? scan[w] : top;
    __syncthreads();
    const float* po = p.part_o + (part + stage) * 2048 + m_row * 128 + d;
#pragma unroll 4
    for (int k = 0; k < n; k++) {
      const float v = __ldcg(po + (u64)k * 2048), a = as[h][k], b = bs[h][k];
      if (b >= 0.f) {
        o = __fmaf_rn(o, a, __fmul_rn(v, b));
        l = __fmaf_rn(l, a, __fmul_rn(ls[h][k], b));
      }
    }
    __syncthreads();
  }
  o = __fmul_rn(o, __fdiv_rn(1.f, l));
  if (p.qkvg) {
    const float* gate = p.qkvg + (u64)r * p.width + p.gate_at + kb * 256 + i;
    float z = __ldcg(gate);
    for (u32 s = 1; s < p.segments; s++) z = __fadd_rn(z, __ldcg(gate + s * (u64)p.n * p.width));
    o = __fmul_rn(o, sigmoid(z));
  }
  row[i] = o;
  __syncthreads();
  if (i < 32) {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = row[i * 8 + k];
    quantise_block(v, r, kb, i, p.act);
  }
}
