// Attention over paged f16 KV blocks of 256 positions, grouped query heads, sliding window or full.
//
// The unit of work is 16 query vectors (the tokens and query heads that share a KV head: one m16 tile) against 64
// positions aligned to absolute positions. A unit never depends on another:
//
//   S = Q K^T (f16 in, f32 sums), in units of log2: q carries log2(e) / sqrt(128)
//   m = row maximum, P = 2^(S - m) rounded to f16, l = sum of P before rounding, O = P V, w = 2^m
//
// q and k are normalised, so |S| is bounded (about 63 for this model's 3.87 sqrt(128); checked at load to stay below
// 90): w cannot overflow in f32, and no running maximum is carried from unit to unit. What is left is plain addition:
//
//   block:  O_b = w0 O0, then fma(w_u, O_u, O_b), ascending;  row: O = O + O_b over blocks ascending;  O / L at the end
//
// `attend_split` computes blocks in parallel and leaves the additions to `attend_combine`; `attend_many` (prefill) walks
// them in turn. Same units, same additions, same bits. Masked positions have P = 0 exactly, and V is finite.
//
// Rows of a sequence's first block are left to attention_short.cu: no tile holds them (NO_TILE).
//
// Fragments are 16-byte loads: the k index of an mma may be permuted freely if both operands agree. For Q K^T a lane
// takes 8 consecutive dims of a row, for P V 16 consecutive positions of a dim (V is stored transposed per block):
// column c of S tile j is position 16 (c >> 1) + 2 j + (c & 1).
#include "attention.cuh"

#ifndef SPLIT_WARPS
#define SPLIT_WARPS 4
#endif
#ifndef MANY_WARPS
#define MANY_WARPS 8
#endif

struct AttnArgs {
  const u16* q;          // [n][heads][128]
  const u16* kv;         // as in rows.cu
  u64 block_halves;
  const Tile* tiles;
  const uint2* groups;   // many: first tile, tiles
  const u32* counts;     // split: parts in all, tiles
  const u32* tables;
  float* part_o;         // [part][16][128]
  float* part_l;         // [part][16]
  u32 heads, kv_heads, group, window;  // window 0: full
};

struct Rows2 {
  int lo[2], hi[2];  // visible positions of rows g and g + 8; empty when the row does not exist
};

DEVICE Rows2 visible(const AttnArgs& p, const Tile& tile, int g) {
  Rows2 r;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int tok = (g + 8 * h) / (int)p.group, pos = (int)tile.pos + tok;
    const bool on = tok < (int)tile.count;
    r.hi[h] = on ? pos : -1;
    r.lo[h] = p.window && on ? max(0, pos - (int)p.window + 1) : 0;
  }
  return r;
}

// Q fragments: chunk c of 32 dims, rows g and g + 8; a step's registers are a0 = x|z of row g, a1 of row g + 8, a2, a3.
DEVICE void load_q(uint4 (&q)[4][2], const AttnArgs& p, const Tile& tile, int kv_head, int g, int t) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int m = g + 8 * h, tok = m / (int)p.group, head = kv_head * (int)p.group + m % (int)p.group;
    const bool on = tok < (int)tile.count;
    const u16* src = p.q + ((u64)(tile.row + (on ? tok : 0)) * p.heads + head) * 128 + 8 * t;
#pragma unroll
    for (int c = 0; c < 4; c++) q[c][h] = on ? __ldcg((const uint4*)(src + 32 * c)) : make_uint4(0, 0, 0, 0);
  }
}

struct Unit {
  float o[16][4];
  float w[2], l[2];
};

// Copies 64 positions of K and V into shared memory, 16-byte pieces swizzled so that fragment loads have no conflicts.
DEVICE void stage_k(u32 dst, const u16* k, int i) {  // i in 0..1023
  const int pos = i >> 4, c = i & 15;
  cp16(dst + pos * 256 + ((c ^ ((pos & 1) << 2)) << 4), k + pos * 128 + c * 8);
}
DEVICE void stage_v(u32 dst, const u16* v, int i) {
  const int dim = i >> 3, c = i & 7;
  cp16(dst + dim * 128 + ((c ^ (dim & 1)) << 4), v + dim * 256 + c * 8);
}

DEVICE void unit_scores(float (&s)[8][4], const uint4 (&q)[4][2], u32 ks, int g, int t) {
#pragma unroll
  for (int j = 0; j < 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
#pragma unroll
  for (int c = 0; c < 4; c++) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int pos = 16 * (g >> 1) + 2 * j + (g & 1);
      const uint4 k = lds128(ks + pos * 256 + (((4 * c + t) ^ ((pos & 1) << 2)) << 4));
      mma16_f16(s[j], q[c][0].x, q[c][1].x, q[c][0].y, q[c][1].y, k.x, k.y);
      mma16_f16(s[j], q[c][0].z, q[c][1].z, q[c][0].w, q[c][1].w, k.z, k.w);
    }
  }
}

DEVICE void unit_softmax(float (&s)[8][4], u32 (&a)[4][4], float (&w)[2], float (&l)[2], int pos0, const Rows2& rows, int t) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float m = NEG_INF;
#pragma unroll
    for (int j = 0; j < 8; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int pos = pos0 + 16 * t + 2 * j + e;
        float& x = s[j][2 * h + e];
        x = pos >= rows.lo[h] && pos <= rows.hi[h] ? x : NEG_INF;
        m = fmaxf(m, x);
      }
    }
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    const bool any = m > NEG_INF;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = s[j][2 * h + e];
        x = any ? exp2_approx(__fsub_rn(x, m)) : 0.f;
        sum = __fadd_rn(sum, x);
      }
    }
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    l[h] = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
    w[h] = any ? exp2_approx(m) : 0.f;
  }
#pragma unroll
  for (int k = 0; k < 4; k++) {
    a[k][0] = pack_half2(s[2 * k][0], s[2 * k][1]);
    a[k][1] = pack_half2(s[2 * k][2], s[2 * k][3]);
    a[k][2] = pack_half2(s[2 * k + 1][0], s[2 * k + 1][1]);
    a[k][3] = pack_half2(s[2 * k + 1][2], s[2 * k + 1][3]);
  }
}

// O of dims 8 nt + 2t, + 1 for rows g and g + 8
DEVICE void unit_values(float (&o)[4], const u32 (&a)[4][4], u32 vs, int nt, int g, int t) {
  const int dim = 8 * nt + g;
  const uint4 v0 = lds128(vs + dim * 128 + (((2 * t) ^ (dim & 1)) << 4));
  const uint4 v1 = lds128(vs + dim * 128 + (((2 * t + 1) ^ (dim & 1)) << 4));
  o[0] = o[1] = o[2] = o[3] = 0.f;
  mma16_f16(o, a[0][0], a[0][1], a[0][2], a[0][3], v0.x, v0.y);
  mma16_f16(o, a[1][0], a[1][1], a[1][2], a[1][3], v0.z, v0.w);
  mma16_f16(o, a[2][0], a[2][1], a[2][2], a[2][3], v1.x, v1.y);
  mma16_f16(o, a[3][0], a[3][1], a[3][2], a[3][3], v1.z, v1.w);
}

DEVICE const u16* k_block(const AttnArgs& p, u32 block, int kv_head) {
  return p.kv + (u64)block * p.block_halves + (u64)kv_head * 256 * 128;
}
DEVICE const u16* v_block(const AttnArgs& p, u32 block, int kv_head) {
  return k_block(p, block, kv_head) + (u64)p.kv_heads * 256 * 128;
}

constexpr int O_STRIDE = 132;  // floats from row to row of a unit's O in shared memory

// Where a partial result belongs. Nothing in a step writes the tiles and tables, so they are read before the wait.
struct Item {
  Tile tile;
  u32 kv_head, at;  // at: block within the tile's blocks
  const u16 *k, *v;
};

// Moves to partial result i, in the same tile if it is there.
DEVICE void seek(Item& item, u32 i, const AttnArgs& p, u32 tiles, int lane) {
  if (i - item.tile.part >= item.tile.parts * p.kv_heads) {
    item.tile = load_tile(p.tiles + find_tile(p.tiles, tiles, i, lane));
  }
  const u32 inside = i - item.tile.part;
  item.kv_head = inside / item.tile.parts;
  item.at = inside - item.kv_head * item.tile.parts;
  const u32 block = __ldcg(p.tables + item.tile.table + item.at);
  item.k = k_block(p, block, item.kv_head);
  item.v = v_block(p, block, item.kv_head);
}

// One block per turn; warp u computes units u, u + SPLIT_WARPS, ... The next turn's place is known and its K and V are
// fetched as soon as this turn's have been used. Blocks that this step does not write are fetched before the wait.
extern "C" __global__ void __launch_bounds__(SPLIT_WARPS * 32, 1) attend_split(const __grid_constant__ AttnArgs p) {
  extern __shared__ __align__(128) u8 sh[];
  __shared__ float uw[4][16], ul[4][16];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const u32 ks = smem_u32(sh) + warp * 32768, vs = ks + 16384;
  float* uo = (float*)(sh + SPLIT_WARPS * 32768);  // [4][16][O_STRIDE]
  constexpr int ROUNDS = 4 / SPLIT_WARPS;
  constexpr int STEP_ROWS = 16;  // most rows that a sequence with split attention has in a step

  // Units that no row of the tile sees are neither fetched nor computed: their weight is 0.
  auto seen = [&](const Item& item, int round) {
    const int first = (int)(item.tile.first_block + item.at) * 256 + (warp + round * SPLIT_WARPS) * 64;
    return first < (int)(item.tile.pos + item.tile.count) && (!p.window || first + 63 + (int)p.window > (int)item.tile.pos);
  };
  auto fetch_k = [&](bool on, const Item& item, int round) {
    if (on && seen(item, round)) {
      const u16* src = item.k + (warp + round * SPLIT_WARPS) * 64 * 128;
#pragma unroll 8
      for (int i = lane; i < 1024; i += 32) stage_k(ks, src, i);
    }
    cp_commit();
  };
  auto fetch_v = [&](bool on, const Item& item, int round) {
    if (on && seen(item, round)) {
      const u16* src = item.v + (warp + round * SPLIT_WARPS) * 64;
#pragma unroll 8
      for (int i = lane; i < 1024; i += 32) stage_v(vs, src, i);
    }
    cp_commit();
  };

  pdl_launch();
  const u32 count = __ldcg(p.counts), tiles = __ldcg(p.counts + 1);
  Item next;
  next.tile.part = next.tile.parts = 0;
  bool old = false;
  if (blockIdx.x < count) {
    seek(next, blockIdx.x, p, tiles, lane);
    old = (next.tile.first_block + next.at + 1) * 256 + STEP_ROWS <= next.tile.pos;
    if (old) {
      fetch_k(true, next, 0);
      fetch_v(true, next, 0);
    }
  }
  if (blockIdx.x >= count && blockIdx.x) return;  // makes room for the kernels to come; one has to wait
  pdl_wait();
  if (blockIdx.x >= count) return;
  if (!old) {
    fetch_k(true, next, 0);
    fetch_v(true, next, 0);
  }
  uint4 q[4][2];
  u32 q_row = ~0u, q_head = 0;
  for (u32 item = blockIdx.x; item < count; item += gridDim.x) {
    const Item now = next;
    const bool more = item + gridDim.x < count;
    if (more) seek(next, item + gridDim.x, p, tiles, lane);
    if (now.tile.row != q_row || now.kv_head != q_head) {
      load_q(q, p, now.tile, now.kv_head, g, t);
      q_row = now.tile.row;
      q_head = now.kv_head;
    }
    const Rows2 rows = visible(p, now.tile, g);
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      const bool last = round == ROUNDS - 1;
      const int unit = warp + round * SPLIT_WARPS;
      const bool on = seen(now, round);
      float s[8][4], w[2] = {0.f, 0.f}, l[2] = {0.f, 0.f};
      u32 a[4][4];
      cp_wait<1>();
      __syncwarp();
      if (on) unit_scores(s, q, ks, g, t);
      __syncwarp();
      fetch_k(!last || more, last ? next : now, last ? 0 : round + 1);
      if (on) unit_softmax(s, a, w, l, (int)(now.tile.first_block + now.at) * 256 + unit * 64, rows, t);
      if (t == 0) {
        uw[unit][g] = w[0]; uw[unit][g + 8] = w[1];
        ul[unit][g] = l[0]; ul[unit][g + 8] = l[1];
      }
      cp_wait<1>();
      __syncwarp();
      if (on) {
        float* o = uo + (unit * 16 + g) * O_STRIDE + 2 * t;
#pragma unroll
        for (int nt = 0; nt < 16; nt++) {
          float v[4];
          unit_values(v, a, vs, nt, g, t);
          *(float2*)(o + 8 * nt) = make_float2(v[0], v[1]);
          *(float2*)(o + 8 * O_STRIDE + 8 * nt) = make_float2(v[2], v[3]);
        }
      }
      __syncwarp();
      fetch_v(!last || more, last ? next : now, last ? 0 : round + 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * 32; i += SPLIT_WARPS * 32) {
      const int row = i >> 5, d = (i & 31) * 4;
      float4 b;
#pragma unroll
      for (int u = 0; u < 4; u++) {
        const float w = uw[u][row];
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (w != 0.f) v = *(const float4*)(uo + (u * 16 + row) * O_STRIDE + d);
        if (u == 0) {
          b = make_float4(__fmul_rn(w, v.x), __fmul_rn(w, v.y), __fmul_rn(w, v.z), __fmul_rn(w, v.w));
        } else {
          b.x = __fmaf_rn(w, v.x, b.x); b.y = __fmaf_rn(w, v.y, b.y); b.z = __fmaf_rn(w, v.z, b.z); b.w = __fmaf_rn(w, v.w, b.w);
        }
      }
      *(float4*)(p.part_o + (u64)item * 2048 + row * 128 + d) = b;
      if (d == 0) {
        float lb = __fmul_rn(uw[0][row], ul[0][row]);
#pragma unroll
        for (int u = 1; u < 4; u++) lb = __fmaf_rn(uw[u][row], ul[u][row], lb);
        p.part_l[(u64)item * 16 + row] = lb;
      }
    }
    __syncthreads();
  }
}

// MANY_WARPS consecutive tiles of one sequence, one per warp, walk the blocks together; K and V of a unit are staged once
// for all. The row sums rest in shared memory, private to their thread.
extern "C" __global__ void __launch_bounds__(MANY_WARPS * 32, 1) attend_many(const __grid_constant__ AttnArgs p) {
  extern __shared__ __align__(128) u8 sh[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, kv_head = blockIdx.y;
  const u32 buf = smem_u32(sh);
  float* total = (float*)(sh + 2 * 32768) + warp * 64 * 32 + lane;
  pdl_launch();
  pdl_wait();
  const uint2 grp = __ldcg(p.groups + gridDim.x - 1 - blockIdx.x);  // the longest walks first
  const Tile first = p.tiles[grp.x], last = p.tiles[grp.x + grp.y - 1];
  const bool on = warp < (int)grp.y;
  const Tile tile = on ? p.tiles[grp.x + warp] : first;
  Rows2 rows = visible(p, tile, g);
  if (!on) rows.hi[0] = rows.hi[1] = -1;
  uint4 q[4][2];
  load_q(q, p, tile, kv_head, g, t);
#pragma unroll
  for (int i = 0; i < 64; i++) total[i * 32] = 0.f;
  float total_l[2] = {0.f, 0.f};

  const int last_pos = last.pos + last.count - 1;
  const int begin_pos = p.window ? max(0, (int)first.pos - (int)p.window + 1) : 0;
  const int my_end = on ? (int)(tile.pos + tile.count) : 0;
  const int my_begin = p.window ? max(0, (int)tile.pos - (int)p.window + 1) : 0;
  const int unit_begin = begin_pos >> 6, unit_end = (last_pos >> 6) + 1;

  auto fetch = [&](int unit) {
    if (unit < unit_end) {
      const u32 block = __ldcg(p.tables + first.table + (unit >> 2) - first.first_block);
      const u16* k = k_block(p, block, kv_head) + (unit & 3) * 64 * 128;
      const u16* v = v_block(p, block, kv_head) + (unit & 3) * 64;
      const u32 base = buf + (unit & 1) * 32768;
#pragma unroll 4
      for (int i = threadIdx.x; i < 1024; i += MANY_WARPS * 32) stage_k(base, k, i);
#pragma unroll 4
      for (int i = threadIdx.x; i < 1024; i += MANY_WARPS * 32) stage_v(base + 16384, v, i);
    }
    cp_commit();
  };
  float o[16][4], lb[2] = {0.f, 0.f};
  bool started = false;  // has this warp a unit in its current block?
  auto close_block = [&]() {
    if (started) {
#pragma unroll
      for (int nt = 0; nt < 16; nt++) {
#pragma unroll
        for (int e = 0; e < 4; e++) total[(nt * 4 + e) * 32] = __fadd_rn(total[(nt * 4 + e) * 32], o[nt][e]);
      }
      total_l[0] = __fadd_rn(total_l[0], lb[0]);
      total_l[1] = __fadd_rn(total_l[1], lb[1]);
    }
    started = false;
  };
  fetch(unit_begin);
  for (int unit = unit_begin; unit < unit_end; unit++) {
    fetch(unit + 1);
    cp_wait<1>();
    __syncthreads();
    if (unit * 64 < my_end && unit * 64 + 63 >= my_begin) {
      const u32 ks = buf + (unit & 1) * 32768, vs = ks + 16384;
      float s[8][4], w[2], l[2];
      u32 a[4][4];
      unit_scores(s, q, ks, g, t);
      unit_softmax(s, a, w, l, unit * 64, rows, t);
      if (!started) {
#pragma unroll
        for (int i = 0; i < 64; i++) ((float*)o)[i] = 0.f;
        lb[0] = lb[1] = 0.f;
      }
      started = true;
#pragma unroll
      for (int nt = 0; nt < 16; nt++) {
        float v[4];
        unit_values(v, a, vs, nt, g, t);
#pragma unroll
        for (int e = 0; e < 4; e++) o[nt][e] = __fmaf_rn(w[e >> 1], v[e], o[nt][e]);
      }
      lb[0] = __fmaf_rn(w[0], l[0], lb[0]);
      lb[1] = __fmaf_rn(w[1], l[1], lb[1]);
    }
    if ((unit & 3) == 3) close_block();
    __syncthreads();
  }
  close_block();
  if (on) {
    const u64 part = tile.part + (u64)kv_head * tile.parts;
    float* po = p.part_o + part * 2048 + g * 128 + 2 * t;
#pragma unroll
    for (int nt = 0; nt < 16; nt++) {
      *(float2*)(po + 8 * nt) = make_float2(total[(nt * 4) * 32], total[(nt * 4 + 1) * 32]);
      *(float2*)(po + 8 * 128 + 8 * nt) = make_float2(total[(nt * 4 + 2) * 32], total[(nt * 4 + 3) * 32]);
    }
    if (t == 0) {
      p.part_l[part * 16 + g] = total_l[0];
      p.part_l[part * 16 + g + 8] = total_l[1];
    }
  }
}

struct CombineArgs {
  const float* part_o;
  const float* part_l;
  const Tile* tiles;
  const u32* row_tile;  // per row; NO_TILE: its result is already there
  const float* qkvg;    // [segments][n][width], gate at gate_at
  Act act;              // k = heads * 128
  u32 segments, n, width, gate_at, group;
};

constexpr int COMBINE_PARTS = 32;   // partial results of a stage
constexpr int COMBINE_STAGES = 3;

// O / L; with digits O * (1 / L), as every backend defines it.
template <bool DIGITS> DEVICE float whole(float o, float l) { return DIGITS ? __fmul_rn(o, __fdiv_rn(1.f, l)) : __fdiv_rn(o, l); }

// a = O / L * sigmoid(gate), quantised for the output projection; without a gate for a draft. One CTA per super-block (2 heads) and row. Long lists of
// partial results pass through shared memory, so that many are on their way while they are added one by one.
template <bool DIGITS> DEVICE void combine(const CombineArgs& p) {
  extern __shared__ __align__(16) float ring[];  // [COMBINE_STAGES][COMBINE_PARTS][256 + 4]: O of two heads, L of each
  __shared__ float row[256];
  constexpr int SLOT = 260;
  pdl_launch();
  const int kb = blockIdx.x, r = blockIdx.y, i = threadIdx.x, head = kb * 2 + (i >> 7), d = i & 127;
  const u32 index = __ldcg(p.row_tile + r);
  if (index == NO_TILE) {
    pdl_wait();
    return;
  }
  const Tile tile = load_tile(p.tiles + index);
  const int kv_head = head / (int)p.group, parts = tile.parts;
  const int m = (r - (int)tile.row) * (int)p.group + head % (int)p.group;
  const u64 part = tile.part + (u64)kv_head * parts;
  const float* po = p.part_o + part * 2048 + m * 128;
  const float* pl = p.part_l + part * 16 + m;
  const float* gate = p.qkvg + (u64)r * p.width + p.gate_at + kb * 256 + i;
  pdl_wait();
  const float z = DIGITS && !p.qkvg ? 0.f : sum1(gate, (u64)p.n * p.width, p.segments);
  float o = 0.f, l = 0.f;
  if (parts > 8) {
    const u32 base = smem_u32(ring);
    auto issue = [&](int stage) {  // a head's 128 threads: 32 of them copy one part, 4 parts at a time
      const int first = stage * COMBINE_PARTS;
      const u32 dst = base + (stage % COMBINE_STAGES) * COMBINE_PARTS * SLOT * 4;
      const int lane = i & 31, w = (i >> 5) & 3, h = i >> 7;
      for (int k = w; k < COMBINE_PARTS; k += 4)
        if (first + k < parts) cp16(dst + (k * SLOT + h * 128 + lane * 4) * 4, po + (u64)(first + k) * 2048 + lane * 4);
      if (d < COMBINE_PARTS && first + d < parts)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst + (d * SLOT + 256 + h) * 4), "l"(pl + (first + d) * 16)
                     : "memory");
      cp_commit();
    };
    const int stages = (parts + COMBINE_PARTS - 1) / COMBINE_PARTS;
    for (int s = 0; s < COMBINE_STAGES - 1; s++) issue(s);
    for (int s = 0; s < stages; s++) {
      cp_wait<COMBINE_STAGES - 2>();
      __syncthreads();
      issue(s + COMBINE_STAGES - 1);
      const float* src = ring + (s % COMBINE_STAGES) * COMBINE_PARTS * SLOT;
      const int n = min(COMBINE_PARTS, parts - s * COMBINE_PARTS);
#pragma unroll 8
      for (int k = 0; k < n; k++) {
        o = __fadd_rn(o, src[k * SLOT + i]);
        l = __fadd_rn(l, src[k * SLOT + 256 + (i >> 7)]);
      }
    }
  } else {
#pragma unroll 8
    for (int b = 0; b < parts; b++) {
      o = __fadd_rn(o, __ldcg(po + (u64)b * 2048 + d));
      l = __fadd_rn(l, __ldcg(pl + b * 16));
    }
  }
  o = whole<DIGITS>(o, l);
  row[i] = DIGITS && !p.qkvg ? o : __fmul_rn(o, sigmoid(z));
  __syncthreads();
  if (i < 32) {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = row[i * 8 + k];
    quantise_block(v, r, kb, i, p.act);
  }
}

extern "C" __global__ void __launch_bounds__(256, 4) attend_combine(const __grid_constant__ CombineArgs p) { combine<false>(p); }
extern "C" __global__ void __launch_bounds__(256, 4) digits_combine(const __grid_constant__ CombineArgs p) { combine<true>(p); }

// The same for steps of many rows, where nearly every row has one partial result: one warp per super-block, 8 values a
// lane.
template <bool DIGITS> DEVICE void gate(const CombineArgs& p) {
  pdl_launch();
  const int kb = blockIdx.x * 4 + (threadIdx.x >> 5), r = blockIdx.y, lane = threadIdx.x & 31;
  const u32 index = __ldcg(p.row_tile + r);
  if (kb * 256 >= (int)p.act.k || index == NO_TILE) {
    pdl_wait();
    return;
  }
  const int head = kb * 2 + (lane >> 4), d = (lane & 15) * 8;
  const Tile tile = load_tile(p.tiles + index);
  const int kv_head = head / (int)p.group, parts = tile.parts;
  const int m = (r - (int)tile.row) * (int)p.group + head % (int)p.group;
  const u64 part = tile.part + (u64)kv_head * parts;
  pdl_wait();
  float z[8], o[8], l = 0.f;
  sum8(z, p.qkvg + (u64)r * p.width + p.gate_at + kb * 256 + lane * 8, (u64)p.n * p.width, p.segments);
#pragma unroll
  for (int i = 0; i < 8; i++) o[i] = 0.f;
  for (int b = 0; b < parts; b++) {
    float v[8];
    load8(v, p.part_o + (part + b) * 2048 + m * 128 + d);
#pragma unroll
    for (int i = 0; i < 8; i++) o[i] = __fadd_rn(o[i], v[i]);
    l = __fadd_rn(l, __ldcg(p.part_l + (part + b) * 16 + m));
  }
#pragma unroll
  for (int i = 0; i < 8; i++) o[i] = __fmul_rn(whole<DIGITS>(o[i], l), sigmoid(z[i]));
  quantise_block(o, r, kb, lane, p.act);
}
extern "C" __global__ void __launch_bounds__(128) attend_gate(const __grid_constant__ CombineArgs p) { gate<false>(p); }
extern "C" __global__ void __launch_bounds__(128) digits_gate(const __grid_constant__ CombineArgs p) { gate<true>(p); }
