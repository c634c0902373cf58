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
  float* out;
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

// Bytes of v (signed, two's complement) times a small signed factor, modulo 256.
DEVICE u32 scale_bytes4(u32 even, u32 odd, u32 factor) {
  return __byte_perm(even * factor, odd * factor, 0x6240);
}

template <int QT> DEVICE void consume(const WideArgs& p, u32 base, u32 full, u32 empty) {
  constexpr int TB = tile_bytes(QT), STAGE = stage_bytes<QT>();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kb = p.kb;
  const int col0 = blockIdx.x * TOKENS, tile0 = blockIdx.y * ROW_TILES;
  const int g = lane >> 2, t = lane & 3, tile = tile0 + warp;
  int acc[64];
  float sum[64];
#pragma unroll
  for (int i = 0; i < 64; i++) { acc[i] = 0; sum[i] = 0.f; }
  int seg = 0, seg_end = seg_begin(1, kb, p.segments);
  float* out = p.out + (u64)(col0 + 2 * t) * p.out_rows + p.first_row + tile * 16 + g;
  auto flush = [&]() {
#pragma unroll
    for (int i = 0; i < 64; i++) {
      const int col = (i >> 2) * 8 + (i & 1);
      float* o = out + (u64)col * p.out_rows + ((i >> 1) & 1) * 8;
      if (tile < (int)p.row_tiles && col0 + 2 * t + col < (int)p.n) *o = seg ? __fadd_rn(*o, sum[i]) : sum[i];
      sum[i] = 0.f;
    }
  };

  for (int k = 0; k < kb; k++) {
    const int slot = k % STAGES;
    const u32 stage = base + slot * STAGE, w = stage + TOKENS * 256 + warp * TB;
    const u32 scales = stage + TOKENS * 256 + ROW_TILES * TB;
    bar_wait(full + slot * 8, (k / STAGES) & 1);
    const u64 desc = descriptor(stage);
    // 64 lanes' worth of k: group grp lies 16384 bytes (128 values) times grp / 4 plus 32 bytes times grp % 4 in
    auto b_at = [&](int grp) { return desc + (((grp >> 2) * 16384 + (grp & 3) * 32) >> 4); };

    if constexpr (QT == Q6K) {
      uint4 v0 = lds128(w + 3072 + g * 32), v1 = lds128(w + 3072 + g * 32 + 16);
      // digits of the scales, one byte each; scales of group j of 16: byte j of these
      u32 s[2][4] = {{v0.x, v0.y, v0.z, v0.w}, {v1.x, v1.y, v1.z, v1.w}};
#pragma unroll
      for (int pass = 0; pass < 3; pass++) {
        if (pass) {
#pragma unroll
          for (int i = 0; i < 64; i++) acc[i] *= 7;
        }
#pragma unroll
        for (int grp = 0; grp < 8; grp++) {  // 32 values: words 3 grp .. 3 grp + 2 of 24
          u32 words[3];
#pragma unroll
          for (int f = 0; f < 3; f++) {
            const int word = grp * 3 + f;
            words[f] = lds32(w + (word >> 2) * 512 + lane * 16 + (word & 3) * 4);
          }
          u32 r[4] = {words[0] & 0xFCFCFCFCu, words[1] & 0xFCFCFCFCu, words[2] & 0xFCFCFCFCu,
                      ((words[0] << 6) & 0xC0C0C0C0u) | ((words[1] << 4) & 0x30303030u) | ((words[2] << 2) & 0x0C0C0C0Cu)};
          u32 a[4];
#pragma unroll
          for (int f = 0; f < 4; f++) {
            // register f: row g or g + 8, first or second 16 of the group
            const int sc = sbyte(s[f & 1][(2 * grp + (f >> 1)) >> 2], (2 * grp + (f >> 1)) & 3);
            const int d2 = (sc * 1338 + 32768) >> 16, rest = sc - 49 * d2, d1 = (rest * 9363 + 32768) >> 16;
            const u32 digit = (u32)(pass == 0 ? d2 : pass == 1 ? d1 : rest - 7 * d1) & 255;
            // 4 (q - 32) signed -> q - 32 signed, bytes apart
            const u32 u = (((r[f] ^ 0x80808080u) >> 2) & 0x3F3F3F3Fu) | 0x80808080u;
            const u32 q = (u - 0x20202020u) ^ 0x80808080u;
            a[f] = scale_bytes4(q & 0x00FF00FFu, (q >> 8) & 0x00FF00FFu, digit);
          }
          wgmma_fence();
          wgmma<true>(acc, a, b_at(grp), pass || grp);
        }
        wgmma_commit();
        wgmma_wait();
      }
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
      const uint4 m0 = lds128(w + META + g * 32);
      u32 s0[2], s1[2];
      s0[0] = (m0.x & 0x0F0F0F0Fu) | ((m0.z << 4) & 0x30303030u);
      s0[1] = ((m0.x >> 4) & 0x0F0F0F0Fu) | ((m0.z << 2) & 0x30303030u);
      s1[0] = (m0.y & 0x0F0F0F0Fu) | (m0.z & 0x30303030u);
      s1[1] = ((m0.y >> 4) & 0x0F0F0F0Fu) | ((m0.z >> 2) & 0x30303030u);
      uint4 fifth;
      if constexpr (QT == Q5K) fifth = lds128(w + 2048 + lane * 16);
#pragma unroll
      for (int pass = 0; pass < 2; pass++) {
        u32 d0[2], d1[2];  // this pass's digits of the scales
#pragma unroll
        for (int h = 0; h < 2; h++) {
          d0[h] = pass ? s0[h] & 0x07070707u : (s0[h] >> 3) & 0x07070707u;
          d1[h] = pass ? s1[h] & 0x07070707u : (s1[h] >> 3) & 0x07070707u;
        }
        if (pass) {
#pragma unroll
          for (int i = 0; i < 64; i++) acc[i] <<= 3;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint4 q = lds128(w + i * 512 + lane * 16);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int grp = 2 * i + h;
            const u32 qa = h ? q.z : q.x, qb = h ? q.w : q.y;
            u32 a[4] = {qa & 0x0F0F0F0Fu, (qa >> 4) & 0x0F0F0F0Fu, qb & 0x0F0F0F0Fu, (qb >> 4) & 0x0F0F0F0Fu};
            if constexpr (QT == Q5K) {
              auto bit = [&](u32 x) { return (grp < 4 ? x << (4 - grp) : x >> (grp - 4)) & 0x10101010u; };
              a[0] |= bit(fifth.x); a[1] |= bit(fifth.y); a[2] |= bit(fifth.z); a[3] |= bit(fifth.w);
            }
            const u32 f0 = ubyte(d0[grp >> 2], grp & 3), f1 = ubyte(d1[grp >> 2], grp & 3);
            a[0] *= f0; a[1] *= f1; a[2] *= f0; a[3] *= f1;  // at most 31 * 7 a byte: no carries
            wgmma_fence();
            wgmma<false>(acc, a, b_at(grp), pass || grp);
          }
        }
        wgmma_commit();
        wgmma_wait();
      }
      const uint4 m1 = lds128(w + META + g * 32 + 16);
      const int odd = t & 1;
      const u32 a0 = ((m1.x >> (4 * odd)) & 0x0F0F0F0Fu) | ((m1.z << (4 - 2 * odd)) & 0x30303030u);
      const u32 a1 = ((m1.y >> (4 * odd)) & 0x0F0F0F0Fu) | ((m1.z >> (2 * odd)) & 0x30303030u);
      const float e0 = low_half(m0.w), n0 = high_half(m0.w), e1 = low_half(m1.w), n1 = high_half(m1.w);
#pragma unroll
      for (int j = 0; j < 16; j++) {
        uint2 x = make_uint2(0, 0);
        if (t < 2) x = lds64(scales + (j * 8 + g) * 16 + t * 8);
        int mn[4] = {0, 0, 0, 0};
        mma16_u8s8(mn, a0, a1, x.y);
#pragma unroll
        for (int r = 0; r < 4; r++) mn[r] <<= 7;
        mma16_u8s8(mn, a0, a1, x.x);
        const uint2 xd = lds64(scales + TOKENS * 16 + (j * 8 + 2 * t) * 4);
#pragma unroll
        for (int r = 0; r < 4; r++) {
          const float d = __uint_as_float(r & 1 ? xd.y : xd.x);
          float& f = sum[4 * j + r];
          f = __fmaf_rn((float)acc[4 * j + r], __fmul_rn(r < 2 ? e0 : e1, d), f);
          f = __fmaf_rn((float)-mn[r], __fmul_rn(r < 2 ? n0 : n1, d), f);
        }
      }
    }
    // one arrival a warpgroup, after all its warps have read the stage
    asm volatile("bar.sync %0, 128;" ::"r"(1 + (warp >> 2)) : "memory");
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
  __shared__ __align__(8) u64 bars[2 * STAGES];
  const u32 base = (smem_u32(raw) + 1023) & ~1023u;
  const u32 full = smem_u32(bars), empty = full + STAGES * 8;
  const int warp = threadIdx.x >> 5, kb = p.kb, col0 = blockIdx.x * TOKENS, tile0 = blockIdx.y * ROW_TILES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      bar_init(full + i * 8, 1);
      bar_init(empty + i * 8, 2);
    }
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
