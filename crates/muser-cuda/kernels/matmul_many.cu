// Matrix products for many rows (prefill): 64 MT output rows x TOKENS tokens per CTA, integer tensor cores.
//
//   out[n][out_rows]: the segments of K are already added, ascending, so the bits are those of matmul_few.cu.
//
// Warps are arranged 4 (rows) x TOKENS / 32; each holds MT row tiles x 32 tokens, so that an activation fragment serves
// MT row tiles and a weight fragment four token tiles. Weights and activations come through a ring of STAGES
// super-blocks in shared memory filled by cp.async. Segment sums rest in shared memory, private to their thread.
//
// Per super-block and m16n8 tile: 8 mma (4,096 MAC each) but also 8 x 128 integer multiply-adds for the scales: the
// latter set the pace (64 a cycle and SM), not the tensor cores.
#include "tiles.cuh"

#ifndef TOKENS
#define TOKENS 128
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef WARP_ROW_TILES
#define WARP_ROW_TILES 2
#endif

struct ManyArgs {
  const u8* w;
  Act act;
  float* out;
  u32 row_tiles, kb, segments, n;
  u32 first_row, out_rows;
};

constexpr int MT = WARP_ROW_TILES;
constexpr int ROW_TILES = 4 * MT;
constexpr int THREADS = TOKENS * 4;
constexpr int NT = 4;

template <int QT> __device__ constexpr int scale_bytes() { return QT == Q80 ? TOKENS * 32 : TOKENS * 20; }
template <int QT> __device__ constexpr int stage_bytes() { return ROW_TILES * tile_bytes(QT) + TOKENS * 256 + scale_bytes<QT>(); }

template <int QT> DEVICE void many(const ManyArgs& p) {
  constexpr int TB = tile_bytes(QT);
  extern __shared__ __align__(128) u8 sh[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wr = warp & 3, wc = warp >> 2;
  const int g = lane >> 2, t = lane & 3;
  const int col0 = blockIdx.x * TOKENS, tile0 = blockIdx.y * ROW_TILES;
  const int kb = p.kb;
  float* totals = (float*)(sh + STAGES * stage_bytes<QT>()) + warp * MT * NT * 4 * 32 + lane;
  u8* zero = sh + STAGES * stage_bytes<QT>() + THREADS * MT * NT * 16;
  const u32 scratch = smem_u32(zero) + 16 + warp * scratch_bytes(QT);
  if (threadIdx.x < 4) ((u32*)zero)[threadIdx.x] = 0;
  const u32 stage0 = smem_u32(sh);

  auto issue = [&](int k) {
    if (k < kb) {
      const u32 base = stage0 + (k % STAGES) * stage_bytes<QT>();
#pragma unroll 4
      for (int i = threadIdx.x; i < ROW_TILES * TB / 16; i += THREADS) {
        const int r = i / (TB / 16), o = i - r * (TB / 16);
        const int tile = min(tile0 + r, (int)p.row_tiles - 1);
        cp16(base + i * 16, p.w + ((u64)tile * kb + k) * TB + o * 16);
      }
      const i8* q = QT == Q80 ? p.act.q32 : p.act.q;
#pragma unroll 4
      for (int i = threadIdx.x; i < TOKENS * 16; i += THREADS) {
        const int col = i >> 4, c = i & 15;
        cp16(base + ROW_TILES * TB + col * 256 + (((c >> 2) ^ (col & 1)) * 64) + (c & 3) * 16,
             q + (u64)(col0 + col) * p.act.k + (u64)k * 256 + c * 16);
      }
      const u32 scales = base + ROW_TILES * TB + TOKENS * 256;
      if constexpr (QT == Q80) {
        for (int i = threadIdx.x; i < TOKENS * 2; i += THREADS)
          cp16(scales + i * 16, (const u8*)(p.act.d32 + ((u64)k * p.act.ld + col0) * 8) + i * 16);
      } else {
        for (int i = threadIdx.x; i < TOKENS; i += THREADS)
          cp16(scales + i * 16, p.act.sums + ((u64)k * p.act.ld + col0 + i) * 16);
        if (threadIdx.x < TOKENS / 4)
          cp16(scales + TOKENS * 16 + threadIdx.x * 16, p.act.d + (u64)k * p.act.ld + col0 + threadIdx.x * 4);
      }
    }
    cp_commit();
  };

  pdl_launch();
  pdl_wait();
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) issue(i);
  float acc[MT][NT][4];
#pragma unroll
  for (int i = 0; i < MT * NT * 4; i++) ((float*)acc)[i] = 0.f;
  int seg = 0, seg_end = seg_begin(1, kb, p.segments);
  for (int k = 0; k < kb; k++) {
    cp_wait<STAGES - 2>();
    __syncthreads();  // stage k is here for all, and all have left the stage that is filled next
    issue(k + STAGES - 1);
    const u32 base = stage0 + (k % STAGES) * stage_bytes<QT>();
    const u32 aq = base + ROW_TILES * TB + (wc * 32 + g) * 256 + t * 16;
    const u32 scales = base + ROW_TILES * TB + TOKENS * 256;
    u32 b[NT], s[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) {
      b[j] = aq + j * 8 * 256;
      s[j] = t < 2 ? scales + (wc * 32 + j * 8 + g) * 16 + t * 8 : smem_u32(zero);
    }
    const u32 dsc = QT == Q80 ? scales + wc * 32 * 32 : scales + TOKENS * 16 + wc * 32 * 4;
    tile_mul<QT, MT, NT, false>(base + wr * MT * TB, TB, b, g & 1, s, dsc, scratch, lane, acc);
    if (k + 1 == seg_end && k + 1 < kb) {
#pragma unroll
      for (int i = 0; i < MT * NT * 4; i++) {
        float& a = ((float*)acc)[i];
        totals[i * 32] = seg ? __fadd_rn(totals[i * 32], a) : a;
        a = 0.f;
      }
      seg++;
      seg_end = seg_begin(seg + 1, kb, p.segments);
    }
  }
#pragma unroll
  for (int m = 0; m < MT; m++) {
    const int tile = tile0 + wr * MT + m;
    if (tile >= (int)p.row_tiles) continue;
    const u32 row = p.first_row + tile * 16 + g;
#pragma unroll
    for (int j = 0; j < NT; j++) {
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const u32 col = col0 + wc * 32 + j * 8 + 2 * t + (r & 1);
        const float a = acc[m][j][r], v = seg ? __fadd_rn(totals[((m * NT + j) * 4 + r) * 32], a) : a;
        if (col < p.n) p.out[(u64)col * p.out_rows + row + (r >> 1) * 8] = v;
      }
    }
  }
}

#define MANY(name, qt) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ ManyArgs p) { many<qt>(p); }
MANY(many_q4k, Q4K)
MANY(many_q5k, Q5K)
MANY(many_q6k, Q6K)
MANY(many_nv4, NV4)
MANY(many_q80, Q80)
