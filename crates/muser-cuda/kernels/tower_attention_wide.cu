// Attention of a vision tower (tower_attention.cuh) on Hopper, with products of four warps together (attention_wide.cuh).
//
// Two CTAs of four warps a multiprocessor: nothing keeps them in step, so that one multiplies while the other weighs.
#include "attention_wide.cuh"
#include "tower_attention.cuh"

struct SharedTowerProducts {
  DEVICE static void after_copy() { SharedProducts::after_copy(); }

  template <int DIM> DEVICE static void scores(float (&s)[8][4], const Queries& q, u32 base, int) {
    int high[32], mixed[32];
    const u64 b = rows_128(base);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < DIM / 32; c++) {
      wgmma(high, q.hi[c], b + 2 * c, c);
      wgmma(mixed, q.lo[c], b + 2 * c, c);
      wgmma(mixed, q.hi[c], b + (8192 >> 4) + 2 * c, 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 32; i++) s[i >> 2][i & 3] = __int2float_rn(high[i] * 256 + mixed[i]);
  }

  template <int DIM> DEVICE static void values(float (&o)[DIM / 8][4], const Weights& a, u32 base, int) {
#pragma unroll
    for (int half = 0; half < DIM / 64; half++) {
      int high[32], mixed[32];
      digit_products<2>(high, mixed, a.hi, a.lo, rows_64(base + unit_v<2>() + half * 4096));
#pragma unroll
      for (int i = 0; i < 32; i++) add(o[8 * half + (i >> 2)][i & 3], high[i], mixed[i], a.w[(i & 3) >> 1]);
    }
    if constexpr (DIM % 64 != 0) {  // 32 dims more
      constexpr int FIRST = DIM / 64 * 8;
      int high[16], mixed[16];
      const u64 b = rows_64(base + unit_v<2>() + DIM / 64 * 4096);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < 2; c++) {
        wgmma_half(high, a.hi[c], b + 2 * c, c);
        wgmma_half(mixed, a.lo[c], b + 2 * c, c);
        wgmma_half(mixed, a.hi[c], b + (8192 >> 4) + 2 * c, 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < 16; i++) add(o[FIRST + (i >> 2)][i & 3], high[i], mixed[i], a.w[(i & 3) >> 1]);
    }
  }

  DEVICE static void add(float& o, int high, int mixed, float w) {
    o = __fmaf_rn(__int2float_rn(high * 256 + mixed), w, o);
  }
};

#define ATTEND(dim)                                                                                                    \
  extern "C" __global__ void __launch_bounds__(128, 2) tower_attend_wide_##dim(const __grid_constant__ RunArgs p) {     \
    walk_run<dim, 4, 2, SharedTowerProducts>(p);                                                                       \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256, 1) tower_attend_whole_##dim(const __grid_constant__ RunArgs p) {    \
    walk_run<dim, 8, 3, SharedTowerProducts>(p);                                                                       \
  }
ATTEND(64)
ATTEND(96)
ATTEND(128)
