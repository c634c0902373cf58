// Attention of a vision tower (tower_attention.cuh), each warp with its own tensor instructions.
#include "tower_attention.cuh"

#ifndef MANY_WARPS
#define MANY_WARPS 8
#endif
#ifndef MANY_STAGES
#define MANY_STAGES 3
#endif

struct OwnTowerProducts {
  DEVICE static void after_copy() {}
  template <int DIM> DEVICE static void scores(float (&s)[8][4], const Queries& q, u32 base, int lane) {
    unit_scores<2>(s, q, base, 0, lane);
  }
  template <int DIM> DEVICE static void values(float (&o)[DIM / 8][4], const Weights& a, u32 base, int lane) {
#pragma unroll
    for (int nt = 0; nt < DIM / 8; nt++) {
      float v[4];
      unit_values<2>(v, a, base, nt, lane);
#pragma unroll
      for (int e = 0; e < 4; e++) o[nt][e] = __fmaf_rn(v[e], a.w[e >> 1], o[nt][e]);
    }
  }
};

#define ATTEND(dim)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(MANY_WARPS * 32, 1) tower_attend_##dim(const __grid_constant__ RunArgs p) { \
    walk_run<dim, MANY_WARPS, MANY_STAGES, OwnTowerProducts>(p);                                                        \
  }
ATTEND(64)
ATTEND(96)
ATTEND(128)
