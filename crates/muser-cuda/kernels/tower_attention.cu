// Attention of a vision tower (tower_attention.cuh), each warp with its own tensor instructions.
#include "tower_attention.cuh"

#ifndef MANY_WARPS
#define MANY_WARPS 8
#endif
#ifndef MANY_STAGES
#define MANY_STAGES 3
#endif

extern "C" __global__ void __launch_bounds__(MANY_WARPS * 32, 1) tower_attend(const __grid_constant__ RunArgs p) {
  walk_run<MANY_WARPS, MANY_STAGES, OwnProducts>(p);
}
