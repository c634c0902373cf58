// Attention of a vision tower (tower_attention.cuh) on Hopper, with products of four warps together (attention_wide.cuh).
#include "attention_wide.cuh"
#include "tower_attention.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) tower_attend_wide(const __grid_constant__ RunArgs p) {
  walk_run<8, 3, SharedProducts>(p);
}
