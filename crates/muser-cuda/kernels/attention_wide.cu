// Prefill attention in exact integers on Hopper (attention_digits.cuh): four warps multiply together, with K and V read from
// shared memory by the tensor cores themselves. What is left for a warp to issue are exponentials and digits.
#include "attention_digits.cuh"

constexpr int WARPS = 8, STAGES = 3;

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Rows of 128 bytes, 128-byte swizzle, 8 rows every 1,024 bytes; rows of 64 bytes, 64-byte swizzle, 8 rows every 512.
DEVICE u64 rows_128(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
DEVICE u64 rows_64(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 32ull << 32 | 2ull << 62; }

// c (+)= A B: 16 rows of this warp and 16 of each of the other three, 64 columns, 32 bytes of each.
DEVICE void wgmma(int (&c)[32], const u32 (&a)[4], u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p;\n}"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]), "+r"(c[4]), "+r"(c[5]), "+r"(c[6]), "+r"(c[7]),
        "+r"(c[8]), "+r"(c[9]), "+r"(c[10]), "+r"(c[11]), "+r"(c[12]), "+r"(c[13]), "+r"(c[14]), "+r"(c[15]),
        "+r"(c[16]), "+r"(c[17]), "+r"(c[18]), "+r"(c[19]), "+r"(c[20]), "+r"(c[21]), "+r"(c[22]), "+r"(c[23]),
        "+r"(c[24]), "+r"(c[25]), "+r"(c[26]), "+r"(c[27]), "+r"(c[28]), "+r"(c[29]), "+r"(c[30]), "+r"(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

struct SharedProducts {
  DEVICE static int first_warp(int warp) { return warp & ~3; }
  DEVICE static int last_warp(int warp) { return warp | 3; }
  // What this thread copied is to be read by the tensor cores.
  DEVICE static void after_copy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  template <int D> DEVICE static void scores(float (&s)[8][4], const Queries& q, u32 base, int) {
    int high[32], mixed[32];
    const u64 k = rows_128(base);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 4; c++) {
      wgmma(high, q.hi[c], k + 2 * c, c);
      wgmma(mixed, q.lo[c], k + 2 * c, c);
      if (D == 2) wgmma(mixed, q.hi[c], k + (8192 >> 4) + 2 * c, 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 32; i++) s[i >> 2][i & 3] = __int2float_rn(high[i] * 256 + mixed[i]);
  }

  template <int D> DEVICE static void values(float (&o)[16][4], const Weights& a, u32 base, int) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int high[32], mixed[32];
      const u64 v = rows_64(base + unit_v<D>() + half * 4096);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < 2; c++) {
        wgmma(high, a.hi[c], v + 2 * c, c);
        wgmma(mixed, a.lo[c], v + 2 * c, c);
        if (D == 2) wgmma(mixed, a.hi[c], v + (8192 >> 4) + 2 * c, 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < 32; i++) {
        float& x = o[8 * half + (i >> 2)][i & 3];
        x = __fmaf_rn(__int2float_rn(high[i] * 256 + mixed[i]), a.w[(i & 3) >> 1], x);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) digits_wide_2(const __grid_constant__ DigitArgs p) {
  walk_tiles<2, WARPS, STAGES, SharedProducts>(p);
}
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) digits_wide_1(const __grid_constant__ DigitArgs p) {
  walk_tiles<1, WARPS, STAGES, SharedProducts>(p);
}
