// Matrix products for many rows (prefill) on Hopper: 128 output rows x 128 tokens per CTA, warpgroup tensor cores.
//
//   out[n][out_rows], same bits as matmul_few.cu and matmul_many.cu.
//
// The scale of a group of weights is folded into the weights before they meet the tensor core, so that a super-block of
// 256 sums up inside it and no integer multiply-add per output is left. A scaled weight exceeds a byte, so the scale is
// written in digits whose products with a weight fit one, and the digits take turns (Horner, exact in i32):
//
//   Q4_K, Q5_K: scale = 8 a + b, 0..7:            q a and q b are at most 217:  isum = 8 sum(q a x) + sum(q b x)
//   Q6_K:       scale = 49 a + 7 b + c, -3..3:    q a ... are at most 96:       isum = 7 (7 sum(..) + sum(..)) + sum(..)
//
// Two consumer warpgroups of 64 rows each (weights from registers, activations from shared memory) and one producer
// that fills a ring of STAGES super-blocks with bulk copies. Activations lie in memory as the image of such a tile
// (common.cuh, `tiled`), so a stage is eleven copies. While one group works on its f32 sums the other one multiplies.
// Segment sums are added in `out`, each by the thread that will add the next.
#include "tiles.cuh"

struct WideArgs {
  const u8* w;
  Act act;
  float* out;  // whole tiles of 128 rows
  u32 row_tiles, kb, segments, n;
  u32 first_row, out_rows;
};

constexpr int TOKENS = 128, ROW_TILES = 8, STAGES = 3;
constexpr int CONSUMERS = 256;

template <int QT> __device__ constexpr int stage_bytes() {
  return (TOKENS * 256 + ROW_TILES * tile_bytes(QT) + TOKENS * 20 + 1023) / 1024 * 1024;
}

// --- barriers in shared memory, bulk copies, warpgroup multiply
DEVICE void bar_init(u32 bar, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(n)); }
DEVICE void bar_expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEVICE void bar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
DEVICE void bulk_load(u32 dst, const void* src, int bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// rows of 128 bytes, 128-byte swizzle, 8 rows every 1024 bytes
DEVICE u64 descriptor(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

template <bool SIGNED> DEVICE void wgmma(int (&c)[64], const u32 (&a)[4], u64 b, int accumulate) {
#define WGMMA(TYPE)                                                                                                   \
  asm volatile(                                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n128k32.s32." TYPE ".s8 {"                                                     \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                              \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                              \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                             \
      "{%64, %65, %66, %67}, %68, p;\n}"                                                                              \
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]), "+r"(c[4]), "+r"(c[5]), "+r"(c[6]), "+r"(c[7]),               \
        "+r"(c[8]), "+r"(c[9]), "+r"(c[10]), "+r"(c[11]), "+r"(c[12]), "+r"(c[13]), "+r"(c[14]), "+r"(c[15]),         \
        "+r"(c[16]), "+r"(c[17]), "+r"(c[18]), "+r"(c[19]), "+r"(c[20]), "+r"(c[21]), "+r"(c[22]), "+r"(c[23]),       \
        "+r"(c[24]), "+r"(c[25]), "+r"(c[26]), "+r"(c[27]), "+r"(c[28]), "+r"(c[29]), "+r"(c[30]), "+r"(c[31]),       \
        "+r"(c[32]), "+r"(c[33]), "+r"(c[34]), "+r"(c[35]), "+r"(c[36]), "+r"(c[37]), "+r"(c[38]), "+r"(c[39]),       \
        "+r"(c[40]), "+r"(c[41]), "+r"(c[42]), "+r"(c[43]), "+r"(c[44]), "+r"(c[45]), "+r"(c[46]), "+r"(c[47]),       \
        "+r"(c[48]), "+r"(c[49]), "+r"(c[50]), "+r"(c[51]), "+r"(c[52]), "+r"(c[53]), "+r"(c[54]), "+r"(c[55]),       \
        "+r"(c[56]), "+r"(c[57]), "+r"(c[58]), "+r"(c[59]), "+r"(c[60]), "+r"(c[61]), "+r"(c[62]), "+r"(c[63])        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
  if constexpr (SIGNED) WGMMA("s8");
  else WGMMA("u8");
#undef WGMMA
}

// The A registers of a super-block for one digit of the scales: weights of 8 groups of 32, rows g and g + 8, times the
// digit of their group. Pass 0 is the highest digit.
template <int QT> struct Weights;

template <bool FIVE> struct WeightsMin {
  u32 s0[2], s1[2];  // 6-bit scales of rows g and g + 8, one a byte
  uint4 fifth;

  DEVICE void load(u32 w, int g, int lane) {
    const uint4 m = lds128(w + (FIVE ? 2560 : 2048) + g * 32);
    s0[0] = (m.x & 0x0F0F0F0Fu) | ((m.z << 4) & 0x30303030u);
    s0[1] = ((m.x >> 4) & 0x0F0F0F0Fu) | ((m.z << 2) & 0x30303030u);
    s1[0] = (m.y & 0x0F0F0F0Fu) | (m.z & 0x30303030u);
    s1[1] = ((m.y >> 4) & 0x0F0F0F0Fu) | ((m.z >> 2) & 0x30303030u);
    if constexpr (FIVE) fifth = lds128(w + 2048 + lane * 16);
  }
  DEVICE void digits(u32 (&a)[8][4], u32 w, int lane, int pass) const {
    const int shift = pass ? 0 : 3;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 q = lds128(w + i * 512 + lane * 16);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int grp = 2 * i + h;
        const u32 qa = h ? q.z : q.x, qb = h ? q.w : q.y;
        u32 v[4] = {qa & 0x0F0F0F0Fu, (qa >> 4) & 0x0F0F0F0Fu, qb & 0x0F0F0F0Fu, (qb >> 4) & 0x0F0F0F0Fu};
        if constexpr (FIVE) {
          auto bit = [&](u32 x) { return (grp < 4 ? x << (4 - grp) : x >> (grp - 4)) & 0x10101010u; };
          v[0] |= bit(fifth.x); v[1] |= bit(fifth.y); v[2] |= bit(fifth.z); v[3] |= bit(fifth.w);
        }
        const u32 f0 = (s0[grp >> 2] >> (8 * (grp & 3) + shift)) & 7, f1 = (s1[grp >> 2] >> (8 * (grp & 3) + shift)) & 7;
        a[grp][0] = v[0] * f0; a[grp][1] = v[1] * f1;  // at most 31 * 7 a byte: no carries
        a[grp][2] = v[2] * f0; a[grp][3] = v[3] * f1;
      }
    }
  }
};
template <> struct Weights<Q4K> : WeightsMin<false> {
  static constexpr int PASSES = 2, BASE = 8;
  static constexpr bool SIGNED = false;
};
template <> struct Weights<Q5K> : WeightsMin<true> {
  static constexpr int PASSES = 2, BASE = 8;
  static constexpr bool SIGNED = false;
};
template <> struct Weights<Q6K> {
  static constexpr int PASSES = 3, BASE = 7;
  static constexpr bool SIGNED = true;
  u32 mine[3][2];  // digits of scales 4t .. 4t + 3, one a byte, of rows g and g + 8

  DEVICE void load(u32 w, int g, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 scales = lds32(w + 3072 + g * 32 + h * 16 + (lane & 3) * 4);
      mine[0][h] = mine[1][h] = mine[2][h] = 0;
#pragma unroll
      for (int y = 0; y < 4; y++) {
        const int sc = sbyte(scales, y), high = (sc * 1338 + 32768) >> 16;
        const int rest = sc - 49 * high, middle = (rest * 9363 + 32768) >> 16;
        mine[0][h] |= (u32)(high & 255) << (8 * y);
        mine[1][h] |= (u32)(middle & 255) << (8 * y);
        mine[2][h] |= (u32)((rest - 7 * middle) & 255) << (8 * y);
      }
    }
  }
  DEVICE void digits(u32 (&a)[8][4], u32 w, int lane, int pass) const {
    u32 d[2][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int i = 0; i < 4; i++) d[h][i] = __shfl_sync(~0u, mine[pass][h], (lane & 28) | i);
    }
#pragma unroll
    for (int grp = 0; grp < 8; grp++) {  // words 3 grp .. 3 grp + 2 of 24
      u32 v[3];
#pragma unroll
      for (int f = 0; f < 3; f++) {
        const int word = grp * 3 + f;
        v[f] = lds32(w + (word >> 2) * 512 + lane * 16 + (word & 3) * 4);
      }
      // codes 0..63 (stored as 4 (q - 32))
      const u32 u[4] = {((v[0] >> 2) & 0x3F3F3F3Fu) ^ 0x20202020u, ((v[1] >> 2) & 0x3F3F3F3Fu) ^ 0x20202020u,
                        ((v[2] >> 2) & 0x3F3F3F3Fu) ^ 0x20202020u,
                        (((v[0] << 4) & 0x30303030u) | ((v[1] << 2) & 0x0C0C0C0Cu) | (v[2] & 0x03030303u)) ^ 0x20202020u};
#pragma unroll
      for (int f = 0; f < 4; f++) {  // row g or g + 8, first or second 16 of the group
        const int j = 2 * grp + (f >> 1);
        // (q - 32) digit = q digit + 224 digit modulo 256, two bytes at a time in halves of 16 bits that cannot overflow
        const u32 digit = ubyte(d[f & 1][j >> 2], j & 3), offset = ((digit * 224) & 255) * 0x10001u;
        a[grp][f] = __byte_perm((u[f] & 0x00FF00FFu) * digit + offset, ((u[f] >> 8) & 0x00FF00FFu) * digit + offset, 0x6240);
      }
    }
  }
};

// Makes the compiler finish these registers here and not between two multiplications.
DEVICE void settle(u32 (&a)[8][4]) {
#pragma unroll
  for (int i = 0; i < 8; i++) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3]));
}

template <int QT> DEVICE void consume(const WideArgs& p, u32 base, u32 full, u32 empty) {
  constexpr int TB = tile_bytes(QT), STAGE = stage_bytes<QT>();
  constexpr int PASSES = Weights<QT>::PASSES;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = warp >> 2, kb = p.kb;
  const int col0 = blockIdx.x * TOKENS, tile0 = blockIdx.y * ROW_TILES;
  const int g = lane >> 2, t = lane & 3, tile = tile0 + warp;
  int acc[64];
  float sum[64];
#pragma unroll
  for (int i = 0; i < 64; i++) { acc[i] = 0; sum[i] = 0.f; }
  int seg = 0, seg_end = seg_begin(1, kb, p.segments);
  float* out = p.out + (u64)(col0 + 2 * t) * p.out_rows + p.first_row + tile * 16 + g;
  auto flush = [&]() {
    if (tile < (int)p.row_tiles) {
      const bool add = seg > 0;
#pragma unroll
      for (int part = 0; part < 4; part++) {  // loads of 16 values are on their way together
        float old[16];
        auto at = [&](int i) {
          return out + (u64)((part * 4 + (i >> 2)) * 8 + (i & 1)) * p.out_rows + ((i >> 1) & 1) * 8;
        };
        if (add) {
#pragma unroll
          for (int i = 0; i < 16; i++) old[i] = *at(i);
#pragma unroll
          for (int i = 0; i < 16; i++) sum[part * 16 + i] = __fadd_rn(old[i], sum[part * 16 + i]);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) *at(i) = sum[part * 16 + i];
      }
    }
#pragma unroll
    for (int i = 0; i < 64; i++) sum[i] = 0.f;
  };
  // The groups take turns at the tensor core: one multiplies while the other adds up in f32. (Barriers in shared memory,
  // because waiting for one is a loop, which keeps the compiler from moving work behind it.)
  const u32 my_turn = empty + (STAGES + group) * 8, other_turn = empty + (STAGES + 1 - group) * 8;
  if (group == 1 && lane == 0) bar_arrive(other_turn);

  for (int k = 0; k < kb; k++) {
    const int slot = k % STAGES;
    const u32 stage = base + slot * STAGE, w = stage + TOKENS * 256 + warp * TB;
    const u32 scales = stage + TOKENS * 256 + ROW_TILES * TB;
    bar_wait(full + slot * 8, (k / STAGES) & 1);
    const u64 desc = descriptor(stage);
    Weights<QT> weights;
    u32 a[2][8][4];
    weights.load(w, g, lane);
    weights.digits(a[0], w, lane, 0);
    settle(a[0]);
    bar_wait(my_turn, k & 1);
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      if (pass) {
        wgmma_wait();
#pragma unroll
        for (int i = 0; i < 64; i++) acc[i] *= Weights<QT>::BASE;
      }
      wgmma_fence();
#pragma unroll
      for (int grp = 0; grp < 8; grp++)  // 128 values a half of 16 KB, 32 bytes a group
        wgmma<Weights<QT>::SIGNED>(acc, a[pass & 1][grp], desc + (((grp >> 2) * 16384 + (grp & 3) * 32) >> 4), pass || grp);
      wgmma_commit();
      if (pass + 1 < PASSES) {
        weights.digits(a[(pass + 1) & 1], w, lane, pass + 1);
        settle(a[(pass + 1) & 1]);
      }
    }
    if (lane == 0) bar_arrive(other_turn);
    wgmma_wait();

    if constexpr (QT == Q6K) {
      const u32 dd = lds32(w + 3328 + g * 4);
      const float d0 = low_half(dd), d1 = high_half(dd);
#pragma unroll
      for (int j = 0; j < 16; j++) {
        const uint2 xd = lds64(scales + TOKENS * 16 + (j * 8 + 2 * t) * 4);
#pragma unroll
        for (int r = 0; r < 4; r++)
          sum[4 * j + r] = __fmaf_rn((float)acc[4 * j + r], __fmul_rn(r < 2 ? d0 : d1, __uint_as_float(r & 1 ? xd.y : xd.x)),
                                     sum[4 * j + r]);
      }
    } else {
      constexpr int META = QT == Q5K ? 2560 : 2048;
      const u32 dm0 = lds32(w + META + g * 32 + 12);
      const uint4 m1 = lds128(w + META + g * 32 + 16);
      const int odd = t & 1;
      const u32 a0 = ((m1.x >> (4 * odd)) & 0x0F0F0F0Fu) | ((m1.z << (4 - 2 * odd)) & 0x30303030u);
      const u32 a1 = ((m1.y >> (4 * odd)) & 0x0F0F0F0Fu) | ((m1.z >> (2 * odd)) & 0x30303030u);
      const float e0 = low_half(dm0), n0 = high_half(dm0), e1 = low_half(m1.w), n1 = high_half(m1.w);
#pragma unroll
      for (int part = 0; part < 2; part++) {  // eight token tiles side by side, to have work during each latency
        int mn[8][4];
        uint2 x[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          x[j] = make_uint2(0, 0);
          if (t < 2) x[j] = lds64(scales + ((part * 8 + j) * 8 + g) * 16 + t * 8);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
          mn[j][0] = mn[j][1] = mn[j][2] = mn[j][3] = 0;
          mma16_u8s8(mn[j], a0, a1, x[j].y);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
          for (int r = 0; r < 4; r++) mn[j][r] <<= 7;
          mma16_u8s8(mn[j], a0, a1, x[j].x);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const uint2 xd = lds64(scales + TOKENS * 16 + ((part * 8 + j) * 8 + 2 * t) * 4);
#pragma unroll
          for (int r = 0; r < 4; r++) {
            const float d = __uint_as_float(r & 1 ? xd.y : xd.x);
            const int i = (part * 8 + j) * 4 + r;
            sum[i] = __fmaf_rn((float)acc[i], __fmul_rn(r < 2 ? e0 : e1, d), sum[i]);
            sum[i] = __fmaf_rn(-(float)mn[j][r], __fmul_rn(r < 2 ? n0 : n1, d), sum[i]);
          }
        }
      }
    }
    // one arrival a warpgroup, after all its warps have read the stage
    if (group == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
    else asm volatile("bar.sync 2, 128;" ::: "memory");
    if ((threadIdx.x & 127) == 0) bar_arrive(empty + slot * 8);
    if (k + 1 == seg_end) {
      flush();
      seg++;
      seg_end = seg_begin(seg + 1, kb, p.segments);
    }
  }
}

template <int QT> DEVICE void wide(const WideArgs& p) {
  constexpr int TB = tile_bytes(QT), STAGE = stage_bytes<QT>();
  extern __shared__ u8 raw[];
  __shared__ __align__(8) u64 bars[2 * STAGES + 2];  // full, empty, turn of each group
  const u32 base = (smem_u32(raw) + 1023) & ~1023u;
  const u32 full = smem_u32(bars), empty = full + STAGES * 8;
  const int warp = threadIdx.x >> 5, kb = p.kb, col0 = blockIdx.x * TOKENS, tile0 = blockIdx.y * ROW_TILES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      bar_init(full + i * 8, 1);
      bar_init(empty + i * 8, 2);
    }
    bar_init(empty + STAGES * 8, 4);
    bar_init(empty + STAGES * 8 + 8, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  pdl_launch();
  pdl_wait();

  if (warp >= CONSUMERS / 32) {  // producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == CONSUMERS) {
      const i8* q = p.act.q + (u64)blockIdx.x * kb * (TOKENS * 256);
      for (int k = 0; k < kb; k++) {
        const int slot = k % STAGES;
        const u32 stage = base + slot * STAGE, bar = full + slot * 8;
        if (k >= STAGES) bar_wait(empty + slot * 8, (k / STAGES - 1) & 1);
        bar_expect(bar, TOKENS * 256 + ROW_TILES * TB + TOKENS * 20);
        bulk_load(stage, q + (u64)k * (TOKENS * 256), TOKENS * 256, bar);
        for (int r = 0; r < ROW_TILES; r++) {
          const int tile = min(tile0 + r, (int)p.row_tiles - 1);
          bulk_load(stage + TOKENS * 256 + r * TB, p.w + ((u64)tile * kb + k) * TB, TB, bar);
        }
        const u32 scales = stage + TOKENS * 256 + ROW_TILES * TB;
        bulk_load(scales, p.act.sums + ((u64)k * p.act.ld + col0) * 16, TOKENS * 16, bar);
        bulk_load(scales + TOKENS * 16, p.act.d + (u64)k * p.act.ld + col0, TOKENS * 4, bar);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<QT>(p, base, full, empty);
  }
}
#define WIDE(name, qt) \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) name(const __grid_constant__ WideArgs p) { wide<qt>(p); }
WIDE(wide_q4k, Q4K)
WIDE(wide_q5k, Q5K)
WIDE(wide_q6k, Q6K)
