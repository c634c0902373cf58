// Attention in exact integers, as `muser_backend::arith::attention` defines it: the parts that all its kernels share.
//
// The unit of work is 16 query vectors (the tokens and query heads that share a KV head: one m16 tile) against 64 positions.
// K, V and queries are int8 digits, K and V one or two of them (D), queries and weights always two:
//
//   T = 256 sum qh kh + sum (qh kl + ql kh)       s = (f32(T) d_k) f       p = 2^s, 0 where masked
//   l = sum of p, position j in lane j % 16       p' = p d_v               x = rint(p' 2^(14 - e)), 2^e above the largest p'
//   T = 256 sum xh vh + sum (xh vl + xl vh)       O = fma(f32(T), 2^(e - 14), O)      (with D = 2 the weight times 256)
//
// A KV head of a block on the card; scales are f32. Other backends hold K and V in words of four, so blocks that leave or
// come are transposed (kv_transpose):
//   K hi [256 positions][128], K lo, V hi [128][256 positions], V lo, d of k [256], d of v [256]
//
// Columns of a unit's S: column n = 8 j + 2 t + e is position 16 (j >> 1) + 4 t + 2 (j & 1) + e. A lane then holds the
// positions 16 m + 4 t + 0..3, which is what it needs as operand of the second product with V in order, and it holds four whole
// lanes of the sum. K is put into shared memory in the order of columns.
#pragma once
#include "attention.cuh"
#include "heads.cuh"

struct DigitArgs {
  const u8* q;       // [n][heads][hi 128, lo 128]
  const float* f;    // [n][heads] factor of each query's scores; not finite: the result is NaN
  const u8* kv;      // the layer's first head in the first block
  u64 block_bytes;   // from one block to the next
  const Tile* tiles;
  const uint2* groups;  // many: first tile, tiles
  const u32* counts;    // split: parts in all, tiles
  const u32* tables;
  float* part_o;     // [part][16][128]
  float* part_l;     // [part][16]
  u32 heads, kv_heads, group, window;  // window 0: full
  // For the block of a draft, whose queries are not among the keys before it and all see each other; null otherwise:
  const u8* own;     // split: first of the blocks that come last for each tile, laid out like those of kv
  u64 own_bytes;     // from one to the next
  const u32* ends;   // per tile: where the keys before the block end; the block's own number; its rows
};

// A unit in shared memory: K hi, K lo [64 columns][128] in pieces of 16 bytes swizzled by the column (the 128-byte swizzle of
// warpgroup products), V hi, V lo [128][64] swizzled by pairs of rows (the 64-byte swizzle), d of k [64], d of v [64].
template <int D> __device__ constexpr u32 unit_v() { return D * 8192; }
template <int D> __device__ constexpr u32 unit_scales() { return 2 * D * 8192; }
template <int D> __device__ constexpr u32 unit_bytes() { return 2 * D * 8192 + 1024; }  // whole swizzle patterns

DEVICE int column_of(int position) {
  return (position & ~15) + ((position >> 1) & 1) * 8 + ((position >> 2) & 3) * 2 + (position & 1);
}

// Fetch a unit of a head, K with both scales and V, by so many threads, of which this is number i. A thread's pieces of 16 bytes
// lie at constant distances: one address each, not one a piece.
template <int D, int THREADS> DEVICE void stage_keys(u32 dst, const u8* head, int unit, int i) {
  constexpr int ROWS = THREADS / 8;  // positions of a round
  const int position = i >> 3, c = i & 7, n = column_of(position);
  const u8* k = head + (unit * 64 + position) * 128 + c * 16;
  const u32 to = dst + n * 128 + ((c ^ (n & 7)) << 4);
#pragma unroll
  for (int plane = 0; plane < D; plane++) {
#pragma unroll
    for (int r = 0; r < 64; r += ROWS) cp16(to + plane * 8192 + r * 128, k + plane * PLANE + r * 128);
  }
  if (i < 32)
    cp16(dst + unit_scales<D>() + i * 16, head + scales_at<D>() + (i >> 4) * 1024 + unit * 256 + (i & 15) * 16);
}
template <int D, int THREADS> DEVICE void stage_values(u32 dst, const u8* head, int unit, int i) {
  constexpr int ROWS = THREADS / 4;  // dims of a round
  const int dim = i >> 2, c = i & 3;
  const u8* v = head + v_at<D>() + dim * 256 + unit * 64 + c * 16;
  const u32 to = dst + unit_v<D>() + dim * 64 + ((c ^ ((dim >> 1) & 3)) << 4);
#pragma unroll
  for (int plane = 0; plane < D; plane++) {
#pragma unroll
    for (int r = 0; r < 128; r += ROWS) cp16(to + plane * 8192 + r * 64, v + plane * PLANE + r * 256);
  }
}

// Brings a unit that is not complete yet into L2, so that fetching it later is short. `i` in 0..127.
template <int D> DEVICE void prefetch_unit(const u8* head, int unit, int i) {
  auto line = [](const u8* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); };
#pragma unroll
  for (int plane = 0; plane < D; plane++) {
    if (i < 64) line(head + plane * PLANE + (unit * 64 + i) * 128);
    line(head + v_at<D>() + plane * PLANE + i * 256 + unit * 64);
  }
  if (i < 4) line(head + scales_at<D>() + (i >> 1) * 1024 + unit * 256 + (i & 1) * 128);
}

// --- tensor cores
DEVICE void mma_s8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void ldmatrix4(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a));
}

// --- queries
struct Queries {
  u32 hi[4][4], lo[4][4];  // 32 dims each: the A operand of rows g and g + 8
  float f[2];
};

DEVICE void load_queries(Queries& q, const DigitArgs& p, const Tile& tile, int kv_head, int g, int t) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int m = g + 8 * h, tok = m / (int)p.group, head = kv_head * (int)p.group + m % (int)p.group;
    const bool on = tok < (int)tile.count;
    const u64 row = (u64)(tile.row + (on ? tok : 0)) * p.heads + head;
    const u32* src = (const u32*)(p.q + row * 256) + t;
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        q.hi[c][2 * k + h] = on ? __ldcg(src + 8 * c + 4 * k) : 0;
        q.lo[c][2 * k + h] = on ? __ldcg(src + 32 + 8 * c + 4 * k) : 0;
      }
    }
    q.f[h] = on ? __ldcg(p.f + row) : 0.f;
  }
}

// Visible positions of rows g and g + 8, both ends included; empty when the row does not exist.
struct Rows2 {
  int lo[2], hi[2];
};

// `end`: where the keys of all rows end; negative: each row is the last of its keys.
// `token`: which of the tile's tokens the rows are of.
DEVICE Rows2 visible(const DigitArgs& p, const Tile& tile, const int (&token)[2], int end) {
  Rows2 r;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int tok = token[h], pos = (int)tile.pos + tok;
    const bool on = tok < (int)tile.count;
    r.hi[h] = !on ? -1 : end < 0 ? pos : end - 1;
    r.lo[h] = p.window && on ? max(0, pos - (int)p.window + 1) : 0;
  }
  return r;
}

// --- one unit
// Of TILES times 8 columns from tile `first` on.
template <int D, int TILES> DEVICE void unit_scores(float (&s)[TILES][4], const Queries& q, u32 base, int first, int lane) {
#pragma unroll
  for (int j = 0; j < TILES; j++) {
    int high[4] = {0, 0, 0, 0}, mixed[4] = {0, 0, 0, 0};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 at = base + (8 * (first + j) + (lane & 7)) * 128 + (((4 * h + (lane >> 3)) ^ (lane & 7)) << 4);
      u32 k[4];
      ldmatrix4(k, at);
      mma_s8(high, q.hi[2 * h], k[0], k[1]);
      mma_s8(mixed, q.lo[2 * h], k[0], k[1]);
      mma_s8(high, q.hi[2 * h + 1], k[2], k[3]);
      mma_s8(mixed, q.lo[2 * h + 1], k[2], k[3]);
      if (D == 2) {
        ldmatrix4(k, at + 8192);
        mma_s8(mixed, q.hi[2 * h], k[0], k[1]);
        mma_s8(mixed, q.hi[2 * h + 1], k[2], k[3]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) s[j][e] = __int2float_rn(high[e] * 256 + mixed[e]);
  }
}

// The digits of x, as A operands of 32 positions each, with what weighs them.
struct Weights {
  u32 hi[2][4], lo[2][4];
  float w[2], l[2];
};

constexpr float RINT = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which then lies in the low bits

// 2^r for what rounding took, |r| up to 1/2.
DEVICE float exp2_fraction(float r) {
  float p = 1.3264725e-3f;
  p = __fmaf_rn(p, r, 9.671513e-3f);
  p = __fmaf_rn(p, r, 5.5507336e-2f);
  p = __fmaf_rn(p, r, 0.24022242f);
  p = __fmaf_rn(p, r, 0.693147f);
  return __fmaf_rn(p, r, 1.f);
}
// 2^s; the function of the definition, operation by operation.
DEVICE float exp2_exact(float s) {
  const float t = __fadd_rn(s, RINT);
  const float p = exp2_fraction(__fsub_rn(s, __fsub_rn(t, RINT)));
  return __int_as_float(__float_as_int(p) + (__float_as_int(t) << 23));
}

// 2^(14 - e) for the largest p' of a unit, and what weighs the codes; both 0 where nothing counts.
template <int D> DEVICE float code_scale(float& weight, float largest) {
  const u32 exponent = __float_as_uint(largest) & 0x7F800000u;
  const bool zero = exponent < 17u << 23;
  weight = zero ? 0.f : __uint_as_float(exponent - (13u << 23) + (D == 2 ? 8u << 23 : 0u));
  return zero ? 0.f : __uint_as_float((267u << 23) - exponent);
}

// x + 128 in the low bits: the high digit is its second byte, the low one its first with the top bit turned.
DEVICE void code_digits(u32& hi, u32& lo, const float (&x)[4], float scale) {
  u32 b[4];
#pragma unroll
  for (int e = 0; e < 4; e++) b[e] = __float_as_uint(__fmaf_rn(x[e], scale, RINT + 128.f));
  lo = __byte_perm(__byte_perm(b[0], b[1], 0x0040), __byte_perm(b[2], b[3], 0x0040), 0x5410) ^ 0x80808080u;
  hi = __byte_perm(__byte_perm(b[0], b[1], 0x0051), __byte_perm(b[2], b[3], 0x0051), 0x5410);
}

// The sum of a row's probabilities and the digits of its weights, from what a lane has of them.
template <int D>
DEVICE void row_digits(Weights& a, int h, const float (&x)[16], float (&sum)[4], float f, float largest) {
#pragma unroll
  for (int e = 0; e < 4; e++) sum[e] = __fadd_rn(sum[e], __shfl_xor_sync(~0u, sum[e], 2));
#pragma unroll
  for (int e = 0; e < 4; e++) sum[e] = __fadd_rn(sum[e], __shfl_xor_sync(~0u, sum[e], 1));
  a.l[h] = __fadd_rn(__fadd_rn(sum[0], sum[2]), __fadd_rn(sum[1], sum[3]));
  if (!(fabsf(f) <= 3.402823466e38f)) a.l[h] = __int_as_float(0x7FC00000);
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const float scale = code_scale<D>(a.w[h], largest);
#pragma unroll
  for (int m = 0; m < 4; m++) {
    const float v[4] = {x[4 * m], x[4 * m + 1], x[4 * m + 2], x[4 * m + 3]};
    code_digits(a.hi[m >> 1][2 * (m & 1) + h], a.lo[m >> 1][2 * (m & 1) + h], v, scale);
  }
}

// `first`: position of the unit's first column, in the terms of `rows`.
template <int D>
DEVICE void unit_weights(Weights& a, float (&s)[8][4], const float (&f)[2], u32 scales, int first, const Rows2& rows, int t) {
  bool all = true;
#pragma unroll
  for (int h = 0; h < 2; h++) all = all && first >= rows.lo[h] && first + 63 <= rows.hi[h];
  all = __all_sync(~0u, all);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float x[16], sum[4], largest = 0.f;
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const u32 at = scales + (16 * m + 4 * t) * 4;
      const uint4 ku = lds128(at), vu = lds128(at + 256);
      const u32 kb[4] = {ku.x, ku.y, ku.z, ku.w}, vb[4] = {vu.x, vu.y, vu.z, vu.w};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float v = s[2 * m + (e >> 1)][2 * h + (e & 1)];
        v = exp2_exact(__fmul_rn(__fmul_rn(v, __uint_as_float(kb[e])), f[h]));
        if (!all) {
          const int position = first + 16 * m + 4 * t + e;
          v = position >= rows.lo[h] && position <= rows.hi[h] ? v : 0.f;
        }
        sum[e] = m == 0 ? v : __fadd_rn(sum[e], v);
        v = __fmul_rn(v, __uint_as_float(vb[e]));
        largest = fmaxf(largest, v);
        x[4 * m + e] = v;
      }
    }
    row_digits<D>(a, h, x, sum, f[h], largest);
  }
}

// f32(T) of dims 8 nt + 2 t, + 1 for rows g and g + 8.
template <int D> DEVICE void unit_values(float (&o)[4], const Weights& a, u32 base, int nt, int lane) {
  const int dim = 8 * nt + (lane & 7);
  const u32 at = base + unit_v<D>() + dim * 64 + (((lane >> 3) ^ ((dim >> 1) & 3)) << 4);
  int high[4] = {0, 0, 0, 0}, mixed[4] = {0, 0, 0, 0};
  u32 v[4];
  ldmatrix4(v, at);
  mma_s8(high, a.hi[0], v[0], v[1]);
  mma_s8(mixed, a.lo[0], v[0], v[1]);
  mma_s8(high, a.hi[1], v[2], v[3]);
  mma_s8(mixed, a.lo[1], v[2], v[3]);
  if (D == 2) {
    ldmatrix4(v, at + 8192);
    mma_s8(mixed, a.hi[0], v[0], v[1]);
    mma_s8(mixed, a.hi[1], v[2], v[3]);
  }
#pragma unroll
  for (int e = 0; e < 4; e++) o[e] = __int2float_rn(high[e] * 256 + mixed[e]);
}

// Each warp multiplies for itself.
struct OwnProducts {
  DEVICE static int first_warp(int warp) { return warp; }
  DEVICE static int last_warp(int warp) { return warp; }
  DEVICE static void after_copy() {}
  template <int D> DEVICE static void scores(float (&s)[8][4], const Queries& q, u32 base, int lane) {
    unit_scores<D>(s, q, base, 0, lane);
  }
  template <int D> DEVICE static void values(float (&o)[16][4], const Weights& a, u32 base, int lane) {
#pragma unroll
    for (int nt = 0; nt < 16; nt++) {
      float v[4];
      unit_values<D>(v, a, base, nt, lane);
#pragma unroll
      for (int e = 0; e < 4; e++) o[nt][e] = __fmaf_rn(v[e], a.w[e >> 1], o[nt][e]);
    }
  }
};

DEVICE const u8* block_at(const DigitArgs& p, u32 block, u32 head_offset) {
  return p.kv + (u64)block * p.block_bytes + head_offset;
}

// Prefill: WARPS consecutive tiles of one sequence, one per warp, walk the units together; K and V of a unit are staged once for
// all, three units in flight, one barrier a unit. The row sums rest in shared memory, private to their thread. `Products`
// multiplies: with a warp's own instructions, or with those of four warps together (then all four have the same units).
template <int D, int WARPS, int STAGES, class Products> DEVICE void walk_tiles(const DigitArgs& p) {
  extern __shared__ __align__(1024) u8 sh[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, kv_head = blockIdx.y;
  const u32 buf = smem_u32(sh);
  float* total = (float*)(sh + STAGES * unit_bytes<D>()) + warp * 64 * 32 + lane;
  pdl_launch();
  pdl_wait();
  const uint2 grp = __ldcg(p.groups + gridDim.x - 1 - blockIdx.x);  // the longest walks first
  const int last_tile = (int)grp.y - 1;
  const Tile first = load_tile(p.tiles + grp.x), last = load_tile(p.tiles + grp.x + last_tile);
  const bool on = warp <= last_tile;
  Tile tile = load_tile(p.tiles + grp.x + min(warp, last_tile));
  if (!on) tile.count = 0;
  const int token[2] = {g / (int)p.group, (g + 8) / (int)p.group};
  Rows2 rows = visible(p, tile, token, -1);
  Queries q;
  load_queries(q, p, tile, kv_head, g, t);
#pragma unroll
  for (int i = 0; i < 64; i++) total[i * 32] = 0.f;
  float total_l[2] = {0.f, 0.f}, lb[2] = {0.f, 0.f}, o[16][4];

  // Units that this warp (or one of the warps that it multiplies with) sees.
  const Tile from = load_tile(p.tiles + grp.x + min(Products::first_warp(warp), last_tile));
  const Tile to = load_tile(p.tiles + grp.x + min(Products::last_warp(warp), last_tile));
  const bool some = Products::first_warp(warp) <= last_tile;
  auto begin_of = [&](const Tile& t) { return p.window ? max(0, (int)t.pos - (int)p.window + 1) : 0; };
  const int my_begin = begin_of(from), my_end = some ? (int)(to.pos + to.count) : 0;
  const int unit_begin = begin_of(first) >> 6, unit_end = ((int)(last.pos + last.count - 1) >> 6) + 1;
  const u32 head_offset = kv_head * head_bytes<D>();

  auto fetch = [&](int unit) {
    if (unit < unit_end) {
      const u8* head = block_at(p, __ldcg(p.tables + first.table + (unit >> 2) - first.first_block), head_offset);
      const u32 dst = buf + (unit - unit_begin) % STAGES * unit_bytes<D>();
      stage_keys<D, WARPS * 32>(dst, head, unit & 3, threadIdx.x);
      stage_values<D, WARPS * 32>(dst, head, unit & 3, threadIdx.x);
    }
    cp_commit();
  };
  bool started = false;  // has this warp a unit in its current block?
  auto close_block = [&]() {
    if (started) {
#pragma unroll
      for (int i = 0; i < 64; i++) total[i * 32] = __fadd_rn(total[i * 32], o[i >> 2][i & 3]);
      total_l[0] = __fadd_rn(total_l[0], lb[0]);
      total_l[1] = __fadd_rn(total_l[1], lb[1]);
    }
    started = false;
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch(unit_begin + s);
  for (int unit = unit_begin; unit < unit_end; unit++) {
    cp_wait<STAGES - 2>();
    Products::after_copy();
    __syncthreads();
    fetch(unit + STAGES - 1);
    if (unit * 64 < my_end && unit * 64 + 63 >= my_begin) {
      const u32 base = buf + (unit - unit_begin) % STAGES * unit_bytes<D>();
      float s[8][4];
      Weights a;
      Products::template scores<D>(s, q, base, lane);
      unit_weights<D>(a, s, q.f, base + unit_scales<D>(), unit * 64, rows, t);
      if (!started) {
#pragma unroll
        for (int i = 0; i < 64; i++) o[i >> 2][i & 3] = 0.f;
        lb[0] = lb[1] = 0.f;
      }
      started = true;
      Products::template values<D>(o, a, base, lane);
      lb[0] = __fadd_rn(lb[0], a.l[0]);
      lb[1] = __fadd_rn(lb[1], a.l[1]);
    }
    if ((unit & 3) == 3) close_block();
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
