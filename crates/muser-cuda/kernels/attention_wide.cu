// Prefill attention in exact integers on Hopper (attention_digits.cuh): four warps multiply together, with K and V read from
// shared memory by the tensor cores themselves. What is left for a warp to issue are exponentials and digits.
#include "attention_wide.cuh"

constexpr int WARPS = 8, STAGES = 3;

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) digits_wide_2(const __grid_constant__ DigitArgs p) {
  walk_tiles<2, WARPS, STAGES, SharedProducts>(p);
}
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) digits_wide_1(const __grid_constant__ DigitArgs p) {
  walk_tiles<1, WARPS, STAGES, SharedProducts>(p);
}
