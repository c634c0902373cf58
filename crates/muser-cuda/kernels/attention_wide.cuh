// Products of attention's units on Hopper: four warps multiply together, with K and V read from shared memory by the tensor cores
// themselves.
#pragma once
#include "attention_digits.cuh"
#include "wgmma.cuh"

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

// The digit products of STEPS times 32 bytes: hi b.hi in `high`, lo b.hi and hi b.lo in `mixed`; b.lo lies 8 KB behind b.hi.
template <int D, int STEPS>
DEVICE void digit_products(int (&high)[32], int (&mixed)[32], const u32 (&hi)[STEPS][4], const u32 (&lo)[STEPS][4], u64 b) {
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < STEPS; c++) {
    wgmma(high, hi[c], b + 2 * c, c);
    wgmma(mixed, lo[c], b + 2 * c, c);
    if (D == 2) wgmma(mixed, hi[c], b + (8192 >> 4) + 2 * c, 1);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// The same with 32 columns.
DEVICE void wgmma_half(int (&c)[16], const u32 (&a)[4], u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p;\n}"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]), "+r"(c[4]), "+r"(c[5]), "+r"(c[6]), "+r"(c[7]),
        "+r"(c[8]), "+r"(c[9]), "+r"(c[10]), "+r"(c[11]), "+r"(c[12]), "+r"(c[13]), "+r"(c[14]), "+r"(c[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

struct SharedProducts {
  DEVICE static int first_warp(int warp) { return warp & ~3; }
  DEVICE static int last_warp(int warp) { return warp | 3; }
  // What this thread copied is to be read by the tensor cores.
  DEVICE static void after_copy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  template <int D> DEVICE static void scores(float (&s)[8][4], const Queries& q, u32 base, int) {
    int high[32], mixed[32];
    digit_products<D>(high, mixed, q.hi, q.lo, rows_128(base));
#pragma unroll
    for (int i = 0; i < 32; i++) s[i >> 2][i & 3] = __int2float_rn(high[i] * 256 + mixed[i]);
  }

  template <int D> DEVICE static void values(float (&o)[16][4], const Weights& a, u32 base, int) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int high[32], mixed[32];
      digit_products<D>(high, mixed, a.hi, a.lo, rows_64(base + unit_v<D>() + half * 4096));
#pragma unroll
      for (int i = 0; i < 32; i++) {
        float& x = o[8 * half + (i >> 2)][i & 3];
        x = __fmaf_rn(__int2float_rn(high[i] * 256 + mixed[i]), a.w[(i & 3) >> 1], x);
      }
    }
  }
};
