// Attention in exact integers (attention_digits.cuh): decode, prefill with each warp's own tensor instructions, and the
// transposition of blocks that leave or come. Prefill on Hopper: attention_wide.cu.
//
// `digits_split_*` computes blocks in parallel and leaves the additions to `digits_combine`; `digits_many_*` walks them in
// turn. Same units, same additions, same bits.
#include "attention_digits.cuh"

#ifndef SPLIT_UNITS  // units of a block that are computed side by side
#define SPLIT_UNITS 4
#endif
#ifndef MANY_WARPS
#define MANY_WARPS 8
#endif
#ifndef MANY_STAGES
#define MANY_STAGES 3
#endif

constexpr int O_STRIDE = 132;  // floats from row to row of a unit's O in shared memory

// Where a partial result belongs. Nothing in a step writes the tiles and tables, so they are read before the wait.
struct Item {
  Tile tile;
  u32 kv_head, at;  // at: block within the tile's blocks
  u32 block;        // its number; on its way for a while after `seek`
  int first;        // place of the block's first position in the terms of the visible rows
  int end;          // as in `visible`
  bool own;         // the draft's own block: all its rows see all of it
};

// Tiles of a step that each CTA keeps at hand: with many sequences nearly every turn has another one.
constexpr u32 NEAR_TILES = 64;
constexpr int TILE_WORDS = sizeof(Tile) / 4;

DEVICE void bring_tiles(u32* near, const DigitArgs& p, u32 tiles) {
  if (tiles > NEAR_TILES) return;
  for (u32 i = threadIdx.x; i < tiles * TILE_WORDS; i += blockDim.x) near[i] = __ldcg((const u32*)p.tiles + i);
}

// Moves to partial result i, in the same tile if it is there.
DEVICE void seek(Item& item, u32& index, u32 i, const DigitArgs& p, u32 tiles, const u32* near, int lane) {
  if (i - item.tile.part >= item.tile.parts * p.kv_heads) {
    if (tiles > NEAR_TILES) {
      index = find_tile([&](u32 t) { return __ldcg(&p.tiles[t].part); }, tiles, i, lane);
      item.tile = load_tile(p.tiles + index);
    } else {
      index = find_tile([&](u32 t) { return ((const Tile*)near)[t].part; }, tiles, i, lane);
      item.tile = ((const Tile*)near)[index];
    }
  }
  const u32 inside = i - item.tile.part;
  item.kv_head = inside / item.tile.parts;
  item.at = inside - item.kv_head * item.tile.parts;
  item.own = p.own && item.at + 1 == item.tile.parts;
  const u32* ends = p.ends + (u64)index * 3;
  if (item.own) {
    item.block = __ldcg(ends + 1);
    item.first = 0;
    item.end = (int)__ldcg(ends + 2);
  } else {
    item.block = __ldcg(p.tables + item.tile.table + item.at);
    item.first = (int)(item.tile.first_block + item.at) * 256;
    item.end = p.own ? (int)__ldcg(ends) : -1;
  }
}

template <int D> DEVICE const u8* head_of(const DigitArgs& p, const Item& item) {
  const u32 head = item.kv_head * head_bytes<D>();
  return item.own ? p.own + (u64)item.block * p.own_bytes + head : block_at(p, item.block, head);
}

// --- a quarter of a unit with a warp: positions 16 m + 4 t + 0..3 of it (quarter m), and dims 32 m .. 32 m + 31
//
// A token's attention is one chain of these steps, so it takes what their latencies take: four warps share a unit, and what
// all warps need (queries, addresses at constant distances) is brought or computed once.

constexpr int Q_STRIDE = 272;  // bytes from row to row of queries in shared memory: no bank twice

// Queries of a tile and KV head on their way into shared memory, where all warps find them.
struct QueryPieces {
  static constexpr int N = SPLIT_UNITS == 1 ? 2 : 1;  // pieces of 16 bytes a thread; there are 256
  u64 row[N];  // of a query; ~0 where the tile has none
  uint4 bytes[N];
  float f[N];
  DEVICE void find(const DigitArgs& p, const Tile& tile, int kv_head) {
#pragma unroll
    for (int k = 0; k < N; k++) {
      const int i = threadIdx.x + k * SPLIT_UNITS * 128, m = i >> 4, tok = m / (int)p.group;
      const u64 at = (u64)(tile.row + tok) * p.heads + kv_head * (int)p.group + m % (int)p.group;
      row[k] = i < 256 && tok < (int)tile.count ? at : ~0ull;
    }
  }
  DEVICE void load(const DigitArgs& p) {
#pragma unroll
    for (int k = 0; k < N; k++) {
      const bool on = row[k] != ~0ull;
      bytes[k] = on ? __ldcg((const uint4*)(p.q + row[k] * 256) + (threadIdx.x & 15)) : make_uint4(0, 0, 0, 0);
      f[k] = on ? __ldcg(p.f + row[k]) : 0.f;
    }
  }
  DEVICE void store(u8* rows, float* factors) const {
#pragma unroll
    for (int k = 0; k < N; k++) {
      const int i = threadIdx.x + k * SPLIT_UNITS * 128;
      if (i >= 256) return;
      *(uint4*)(rows + (i >> 4) * Q_STRIDE + (i & 15) * 16) = bytes[k];
      if ((i & 15) == 0) factors[i >> 4] = f[k];
    }
  }
};

DEVICE void take_queries(Queries& q, const u8* rows, const float* f, int lane) {
  const u32 at = smem_u32(rows) + (lane & 15) * Q_STRIDE + (lane >> 4) * 16;
#pragma unroll
  for (int c = 0; c < 4; c++) {
    ldmatrix4(q.hi[c], at + 32 * c);
    ldmatrix4(q.lo[c], at + 128 + 32 * c);
  }
  q.f[0] = f[lane >> 2];
  q.f[1] = f[(lane >> 2) + 8];
}

// What the warps of a unit tell each other.
struct Shared {
  float p[4][16][16];  // [quarter][row][position % 16]
  float peak[4][16];   // [quarter][row] largest p'
  uint4 x[4][32];      // [quarter][lane] digits: high of rows g and g + 8, low of both
};

// The threads of one of the units that are computed side by side.
DEVICE void unit_sync(int place) { asm volatile("bar.sync %0, 128;" ::"r"(place + 1) : "memory"); }

// p' of rows g and g + 8; p goes to the other warps.
DEVICE void quarter_weights(float (&x)[2][4], Shared& sh, const float (&s)[2][4], const float (&f)[2], u32 scales, int first,
                            const Rows2& rows, int m, int g, int t) {
  const u32 at = scales + (16 * m + 4 * t) * 4;
  const uint4 ku = lds128(at), vu = lds128(at + 256);
  const u32 kb[4] = {ku.x, ku.y, ku.z, ku.w}, vb[4] = {vu.x, vu.y, vu.z, vu.w};
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float p[4], largest = 0.f;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int position = first + 16 * m + 4 * t + e;
      const float v = exp2_exact(__fmul_rn(__fmul_rn(s[e >> 1][2 * h + (e & 1)], __uint_as_float(kb[e])), f[h]));
      p[e] = position >= rows.lo[h] && position <= rows.hi[h] ? v : 0.f;
      x[h][e] = __fmul_rn(p[e], __uint_as_float(vb[e]));
      largest = fmaxf(largest, x[h][e]);
    }
    if (!(fabsf(f[h]) <= 3.402823466e38f)) p[0] = __int_as_float(0x7FC00000);
    *(float4*)&sh.p[m][g + 8 * h][4 * t] = make_float4(p[0], p[1], p[2], p[3]);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    if (t == 0) sh.peak[m][g + 8 * h] = largest;
  }
}

// The unit's sums of p: 4 rows a warp, 8 lanes a row.
DEVICE float row_sum(const Shared& sh, int row, int lane) {
  float sum[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int at = (lane & 7) + 8 * k;
    sum[k] = __fadd_rn(__fadd_rn(__fadd_rn(sh.p[0][row][at], sh.p[1][row][at]), sh.p[2][row][at]), sh.p[3][row][at]);
  }
  float l = __fadd_rn(sum[0], sum[1]);
#pragma unroll
  for (int o = 4; o; o >>= 1) l = __fadd_rn(l, __shfl_xor_sync(~0u, l, o));
  return l;
}

// The digits of p' go to the other warps; w: what weighs them.
template <int D> DEVICE void quarter_digits(float (&w)[2], Shared& sh, const float (&x)[2][4], int m, int g, int lane) {
  u32 hi[2], lo[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float largest = sh.peak[0][g + 8 * h];
#pragma unroll
    for (int i = 1; i < 4; i++) largest = fmaxf(largest, sh.peak[i][g + 8 * h]);
    const float scale = code_scale<D>(w[h], largest);
    code_digits(hi[h], lo[h], x[h], scale);
  }
  sh.x[m][lane] = make_uint4(hi[0], hi[1], lo[0], lo[1]);
}

// One block per turn, SPLIT_UNITS of its units at a time. The next turn's place is known and its K and V are fetched as soon
// as this turn's have been used. Blocks that this step does not write are fetched before the wait, others as far as L2.
template <int D> DEVICE void split(const DigitArgs& p) {
  extern __shared__ __align__(1024) u8 sh[];
  __shared__ Shared shared[SPLIT_UNITS];
  __shared__ __align__(16) u8 query_rows[16 * Q_STRIDE];
  __shared__ __align__(16) u32 near[NEAR_TILES * TILE_WORDS];
  __shared__ float query_f[16], uw[4][16], ul[4][16];
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int place = threadIdx.x >> 7, member = threadIdx.x & 127, m = member >> 5;
  const u32 buf = smem_u32(sh) + place * unit_bytes<D>();
  Shared& mine = shared[place];
  const int token[2] = {g / (int)p.group, (g + 8) / (int)p.group};
  float* uo = (float*)(sh + SPLIT_UNITS * unit_bytes<D>());  // [4][16][O_STRIDE]
  constexpr int ROUNDS = 4 / SPLIT_UNITS;
  constexpr int STEP_ROWS = 16;  // most rows that a sequence with split attention has in a step

  // Units that no row of the tile sees are neither fetched nor computed: their weight is 0.
  auto seen = [&](const Item& item, int round) {
    const int first = item.first + (place + round * SPLIT_UNITS) * 64;
    const int end = item.end < 0 ? (int)(item.tile.pos + item.tile.count) : item.end;
    return first < end && (item.own || !p.window || first + 63 + (int)p.window > (int)item.tile.pos);
  };
  auto fetch_k = [&](bool on, const Item& item, int round) {
    if (on && seen(item, round)) {
      stage_keys<D, 128>(buf, head_of<D>(p, item), place + round * SPLIT_UNITS, member);
    }
    cp_commit();
  };
  auto fetch_v = [&](bool on, const Item& item, int round) {
    if (on && seen(item, round)) {
      stage_values<D, 128>(buf, head_of<D>(p, item), place + round * SPLIT_UNITS, member);
    }
    cp_commit();
  };

  pdl_launch();
  const u32 count = __ldcg(p.counts), tiles = __ldcg(p.counts + 1);
  if (blockIdx.x < count) bring_tiles(near, p, tiles);
  __syncthreads();
  Item next;
  u32 index = 0;
  next.tile.part = next.tile.parts = 0;
  bool old = false;
  if (blockIdx.x < count) {
    seek(next, index, blockIdx.x, p, tiles, near, lane);
    old = !p.own && (next.tile.first_block + next.at + 1) * 256 + STEP_ROWS <= next.tile.pos;
    if (old) {
      fetch_k(true, next, 0);
      fetch_v(true, next, 0);
    } else if (seen(next, 0)) {
      prefetch_unit<D>(head_of<D>(p, next), place, member);
    }
  }
  QueryPieces pieces;
  if (blockIdx.x < count) pieces.find(p, next.tile, next.kv_head);
  if (blockIdx.x >= count && blockIdx.x) return;  // makes room for the kernels to come; one has to wait
  pdl_wait();
  if (blockIdx.x >= count) return;
  pieces.load(p);
  if (!old) {
    fetch_k(true, next, 0);
    fetch_v(true, next, 0);
  }
  Queries q;
  u32 q_row = ~0u, q_head = 0;
  for (u32 item = blockIdx.x; item < count; item += gridDim.x) {
    const Item now = next;
    const bool more = item + gridDim.x < count;
    if (now.tile.row != q_row || now.kv_head != q_head) {
      if (item != blockIdx.x) {
        pieces.find(p, now.tile, now.kv_head);
        pieces.load(p);
      }
      pieces.store(query_rows, query_f);
      __syncthreads();
      take_queries(q, query_rows, query_f, lane);
      q_row = now.tile.row;
      q_head = now.kv_head;
    }
    if (more) seek(next, index, item + gridDim.x, p, tiles, near, lane);
    Rows2 rows = visible(p, now.tile, token, now.end);
    if (now.own) rows.lo[0] = rows.lo[1] = 0;
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round++) {
      const bool last = round == ROUNDS - 1;
      const int unit = place + round * SPLIT_UNITS;
      const bool on = seen(now, round);
      float x[2][4];
      cp_wait<1>();
      unit_sync(place);
      if (on) {
        float s[2][4];
        unit_scores<D>(s, q, buf, 2 * m, lane);
        quarter_weights(x, mine, s, q.f, buf + unit_scales<D>(), now.first + unit * 64, rows, m, g, t);
      }
      unit_sync(place);
      fetch_k(!last || more, last ? next : now, last ? 0 : round + 1);
      float w[2] = {0.f, 0.f}, l = 0.f;
      if (on) {
        quarter_digits<D>(w, mine, x, m, g, lane);
        l = row_sum(mine, 4 * m + (lane >> 3), lane);
      }
      if ((lane & 7) == 0) ul[unit][4 * m + (lane >> 3)] = l;
      if (m == 0 && t == 0) {
        uw[unit][g] = w[0];
        uw[unit][g + 8] = w[1];
      }
      cp_wait<1>();
      unit_sync(place);
      if (on) {
        Weights a;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint4 d = mine.x[i][lane];
          a.hi[i >> 1][2 * (i & 1)] = d.x;
          a.hi[i >> 1][2 * (i & 1) + 1] = d.y;
          a.lo[i >> 1][2 * (i & 1)] = d.z;
          a.lo[i >> 1][2 * (i & 1) + 1] = d.w;
        }
        float* o = uo + (unit * 16 + g) * O_STRIDE + 2 * t;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float v[4];
          const int nt = 4 * m + i;
          unit_values<D>(v, a, buf, nt, lane);
          *(float2*)(o + 8 * nt) = make_float2(v[0], v[1]);
          *(float2*)(o + 8 * O_STRIDE + 8 * nt) = make_float2(v[2], v[3]);
        }
      }
      unit_sync(place);
      fetch_v(!last || more, last ? next : now, last ? 0 : round + 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * 32; i += SPLIT_UNITS * 128) {
      const int row = i >> 5, d = (i & 31) * 4;
      float4 b = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int u = 0; u < 4; u++) {
        const float w = uw[u][row];
        const float4 v = *(const float4*)(uo + (u * 16 + row) * O_STRIDE + d);
        const float4 sum = make_float4(__fmaf_rn(v.x, w, b.x), __fmaf_rn(v.y, w, b.y), __fmaf_rn(v.z, w, b.z), __fmaf_rn(v.w, w, b.w));
        b = w != 0.f ? sum : b;  // what an unseen unit left is not a value
      }
      float lb = 0.f;
#pragma unroll
      for (int u = 0; u < 4; u++) lb = __fadd_rn(lb, ul[u][row]);
      *(float4*)(p.part_o + (u64)item * 2048 + row * 128 + d) = b;
      if (d == 0) p.part_l[(u64)item * 16 + row] = lb;
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(SPLIT_UNITS * 128, 1) digits_split_2(const __grid_constant__ DigitArgs p) { split<2>(p); }
extern "C" __global__ void __launch_bounds__(SPLIT_UNITS * 128, 1) digits_split_1(const __grid_constant__ DigitArgs p) { split<1>(p); }

extern "C" __global__ void __launch_bounds__(MANY_WARPS * 32, 1) digits_many_2(const __grid_constant__ DigitArgs p) {
  walk_tiles<2, MANY_WARPS, MANY_STAGES, OwnProducts>(p);
}
extern "C" __global__ void __launch_bounds__(MANY_WARPS * 32, 1) digits_many_1(const __grid_constant__ DigitArgs p) {
  walk_tiles<1, MANY_WARPS, MANY_STAGES, OwnProducts>(p);
}

struct TransposeArgs {
  const u8* src;
  u8* dst;
  u32 digits;  // of K and of V
  u32 out;     // 1: from the card's order to that of other backends; 0: back
};

// K and V of the heads of a block between the card's order and words of four dims or positions (`muser_backend::kv_layout`):
// a plane of K is a matrix of 256 x 32 words here and 32 x 256 there, one of V 128 x 64 here and 64 x 128 there. Grid
// (2 digits + 1, heads): the last of a head's CTAs copies its scales.
extern "C" __global__ void __launch_bounds__(256) kv_transpose(const __grid_constant__ TransposeArgs p) {
  __shared__ u32 tile[32][33];
  const u64 head = (u64)blockIdx.y * (2 * p.digits * PLANE + 2048);
  const u32 plane = blockIdx.x;
  const u32* src = (const u32*)(p.src + head + plane * PLANE);
  u32* dst = (u32*)(p.dst + head + plane * PLANE);
  if (plane == 2 * p.digits) {
    for (int i = threadIdx.x; i < 512; i += 256) dst[i] = src[i];
    return;
  }
  const int here_rows = plane < p.digits ? 256 : 128, here_columns = plane < p.digits ? 32 : 64;
  const int rows = p.out ? here_rows : here_columns, columns = p.out ? here_columns : here_rows;  // of the source
  const int x = threadIdx.x & 31, y = threadIdx.x >> 5;
  for (int r = 0; r < rows; r += 32) {
    for (int c = 0; c < columns; c += 32) {
#pragma unroll
      for (int i = y; i < 32; i += 8) tile[i][x] = src[(r + i) * columns + c + x];
      __syncthreads();
#pragma unroll
      for (int i = y; i < 32; i += 8) dst[(c + i) * rows + r + x] = tile[x][i];
      __syncthreads();
    }
  }
}
