// Matrix products for many rows (prefill) on Hopper: 128 output rows x 128 tokens per CTA, warpgroup tensor cores.
//
//   out[n][out_rows], same bits as matmul_few.cu and matmul_many.cu.
//
// The scale of a group of weights is folded into the weights before they meet the tensor core, so that a super-block of
// 256 sums up inside it and no integer multiply-add per output is left. A scaled weight exceeds a byte, so it is written
// in two digits with a sum each, exact in i32:
//
//   Q4_K, Q5_K: scale = 8 a + b, 0..7:      q a and q b are at most 217:   isum = 8 sum(q a x) + sum(q b x)
//   Q6_K:       scale (q - 32) = 64 hi + lo                                4 isum = 256 sum(hi x) + sum(4 lo x)
//   NVFP4:      scale code = 256 hi + lo, at most 32,639                   isum = 256 sum(hi x) + sum(lo x)
//
// `split_*` writes the digits of a whole matrix once (they are read by every block of tokens), as the image that
// warpgroup multiplication reads from shared memory; activations lie in memory alike (common.cuh, `tiled`). `wide_*` then
// has two consumer warpgroups of 64 rows each and one producer that fills a ring of half super-blocks with bulk copies.
// Mins are multiplied with group sums by f16 tensor cores, exact because all numbers are integers below 2^24.
// Sums of finished segments rest in shared memory, private to their thread.
//
// `round_*` and `wide_rounded` are the fast variant with bits of its own: weights are rounded to 8 bits with a scale per 256
// of a row, so one digit is left, there are no mins, and segments do not matter.
#include "digits.cuh"
#include "wgmma.cuh"
#include "barriers.cuh"

struct WideArgs {
  const u8* w;
  Act act;
  float* out;  // whole tiles of 128 rows
  u32 row_tiles, kb, segments, n;
  u32 first_row, out_rows;
  const u8* digits;
};
enum { ROUNDED = 5 };  // beside the tile types

constexpr int TOKENS = 128, ROW_TILES = 8, CONSUMERS = 256;
constexpr int ACT_BYTES = TOKENS * 128;            // half a super-block
constexpr int DIGIT_BYTES = ROW_TILES * 16 * 128;  // the same of one digit
constexpr int SCALE_SLOTS = 2;

template <int QT> __device__ constexpr int digits() { return QT == ROUNDED ? 1 : 2; }
template <int QT> __device__ constexpr int slots() { return QT == ROUNDED ? 6 : 3; }
template <int QT> __device__ constexpr int slot_bytes() { return ACT_BYTES + digits<QT>() * DIGIT_BYTES; }
template <int QT> __device__ constexpr int total_bytes() { return QT == ROUNDED ? 0 : 64 * CONSUMERS * 4; }
template <int QT> __device__ constexpr int image_bytes() { return 2 * digits<QT>() * DIGIT_BYTES; }  // of 128 rows x 256
template <int QT> __device__ constexpr int sum_bytes() { return has_mins<QT>() ? TOKENS * 32 : 0; }
template <int QT> __device__ constexpr int meta_bytes() { return QT == ROUNDED ? 64 : QT == Q6K ? 32 : 256; }   // of a row tile
template <int QT> __device__ constexpr int meta_at() { return QT == Q6K ? 3328 : QT == Q5K ? 2560 : 2048; }
template <int QT> __device__ constexpr int scale_bytes() { return sum_bytes<QT>() + TOKENS * 4 + ROW_TILES * meta_bytes<QT>(); }

template <bool SIGNED> DEVICE void wgmma(int (&c)[64], u64 a, u64 b, int accumulate) {
#define WGMMA(TYPE)                                                                                                   \
  asm volatile(                                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n128k32.s32." TYPE ".s8 {"                                                     \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "  \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p;\n}"  \
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]), "+r"(c[4]), "+r"(c[5]), "+r"(c[6]), "+r"(c[7]), \
        "+r"(c[8]), "+r"(c[9]), "+r"(c[10]), "+r"(c[11]), "+r"(c[12]), "+r"(c[13]), "+r"(c[14]), "+r"(c[15]), \
        "+r"(c[16]), "+r"(c[17]), "+r"(c[18]), "+r"(c[19]), "+r"(c[20]), "+r"(c[21]), "+r"(c[22]), "+r"(c[23]), \
        "+r"(c[24]), "+r"(c[25]), "+r"(c[26]), "+r"(c[27]), "+r"(c[28]), "+r"(c[29]), "+r"(c[30]), "+r"(c[31]), \
        "+r"(c[32]), "+r"(c[33]), "+r"(c[34]), "+r"(c[35]), "+r"(c[36]), "+r"(c[37]), "+r"(c[38]), "+r"(c[39]), \
        "+r"(c[40]), "+r"(c[41]), "+r"(c[42]), "+r"(c[43]), "+r"(c[44]), "+r"(c[45]), "+r"(c[46]), "+r"(c[47]), \
        "+r"(c[48]), "+r"(c[49]), "+r"(c[50]), "+r"(c[51]), "+r"(c[52]), "+r"(c[53]), "+r"(c[54]), "+r"(c[55]), \
        "+r"(c[56]), "+r"(c[57]), "+r"(c[58]), "+r"(c[59]), "+r"(c[60]), "+r"(c[61]), "+r"(c[62]), "+r"(c[63])  \
      : "l"(a), "l"(b), "r"(accumulate))
  if constexpr (SIGNED) WGMMA("s8");
  else WGMMA("u8");
#undef WGMMA
}
// What the products need to know of the digits.
template <int QT> struct Weights : Digits<QT> {};
template <> struct Weights<ROUNDED> {
  static constexpr bool SIGNED = true;
  static constexpr int BASE = 1;
};

struct SplitArgs {
  const u8* w;
  u8* digits;
  float* scales;  // of `round`: [block of 128 rows][kb][128]
  u32 row_tiles, kb;
};

// Where a lane's register f (row g or g + 8, first or second 16 of a group) of a digit's image belongs: [half][digit][128
// rows][128 bytes], as warpgroup multiplication reads it.
template <int DIGITS> DEVICE u32 image_at(int warp, int lane, int digit, int grp, int f) {
  const int row = warp * 16 + (lane >> 2) + 8 * (f & 1), chunk = 2 * (grp & 3) + (f >> 1);
  return ((grp >> 2) * DIGITS + digit) * DIGIT_BYTES + row * 128 + ((chunk ^ (row & 7)) << 4) + 4 * (lane & 3);
}
DEVICE void write_image(u8* dst, const u8* image, int bytes) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  pdl_wait();  // the products before this one read the same memory
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(smem_u32(image)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}
// Brings this warp's tile of the CTA's 128 rows x 256 weights. Grid (kb, blocks of 128 rows), a warp per row tile.
template <int QT> DEVICE u32 bring_tile(const SplitArgs& p, u8* tiles, int warp, int lane) {
  constexpr int TB = tile_bytes(QT);
  const int tile = min((int)blockIdx.y * ROW_TILES + warp, (int)p.row_tiles - 1);
  pdl_launch();
  const u8* src = p.w + ((u64)tile * p.kb + blockIdx.x) * TB;
  const u32 mine = smem_u32(tiles) + warp * TB;
  for (int o = lane * 16; o < TB; o += 512) cp16(mine + o, src + o);
  cp_commit();
  cp_wait<0>();
  __syncwarp();
  return mine;
}

// Writes the digits of 128 rows x 256 weights.
template <int QT> DEVICE void split(const SplitArgs& p) {
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
  const u32 mine = bring_tile<QT>(p, shared + image_bytes<QT>(), warp, lane);
  u32 a[2][8][4];
  // Where the images end up nothing lies yet.
  Digits<QT> unpack(mine, g, lane, smem_u32(shared) + warp * digit_scratch_bytes(QT));
#pragma unroll
  for (int grp = 0; grp < 8; grp++) unpack.group(a[0][grp], a[1][grp], mine, lane, grp);
  if (digit_scratch_bytes(QT)) __syncthreads();
#pragma unroll
  for (int d = 0; d < 2; d++) {
#pragma unroll
    for (int grp = 0; grp < 8; grp++) {
#pragma unroll
      for (int f = 0; f < 4; f++) *(u32*)(shared + image_at<2>(warp, lane, d, grp, f)) = a[d][grp][f];
    }
  }
  write_image(p.digits + ((u64)blockIdx.y * p.kb + blockIdx.x) * image_bytes<QT>(), shared, image_bytes<QT>());
}

// Four codes (0 to 63, one a byte) times `slope` plus `offset`, rounded to signed bytes.
DEVICE u32 round4(u32 codes, float slope, float offset) {
  u32 r[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {  // adding 1.5 * 2^23 leaves the rounded integer in the low bits
    r[i] = __float_as_uint(__fadd_rn(__fmaf_rn((float)ubyte(codes, i), slope, offset), 12582912.f));
  }
  return __byte_perm(__byte_perm(r[0], r[1], 0x0040), __byte_perm(r[2], r[3], 0x0040), 0x5410);
}

// Writes 128 rows x 256 weights rounded to 8 bits, and their scales: the largest that a row's codes could reach, over 127.
template <int QT> DEVICE void round_weights(const SplitArgs& p) {
  extern __shared__ __align__(128) u8 shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const u32 w = bring_tile<QT>(p, shared + image_bytes<ROUNDED>(), warp, lane);
  // w = slope code + offset, per row and 16 weights
  float slope[2][16], offset[2][16], most[2] = {0.f, 0.f};
  if constexpr (QT == Q6K) {
    const u32 dd = lds32(w + 3328 + g * 4);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float d = h ? high_half(dd) : low_half(dd);
#pragma unroll
      for (int j = 0; j < 16; j++) {
        slope[h][j] = d * (float)sbyte(lds32(w + 3072 + g * 32 + h * 16 + (j >> 2) * 4), j & 3);
        offset[h][j] = -32.f * slope[h][j];
        most[h] = fmaxf(most[h], fabsf(offset[h][j]));
      }
    }
  } else {
    const uint4 m0 = lds128(w + (QT == Q5K ? 2560 : 2048) + g * 32), m1 = lds128(w + (QT == Q5K ? 2560 : 2048) + g * 32 + 16);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 dd = h ? m1.w : m0.w, ls = h ? m0.y : m0.x, lm = h ? m1.y : m1.x;
      const float d = low_half(dd), dmin = high_half(dd);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        // high bits: row g y (bits 0, 1), y + 4 (2, 3), row g + 8 y (4, 5), y + 4 (6, 7)
        const int high = 2 * (j >> 2) + 4 * h;
        const u32 sc = (ubyte(ls, j & 3) >> (4 * (j >> 2)) & 15) | (ubyte(m0.z, j & 3) >> high & 3) << 4;
        const u32 mn = (ubyte(lm, j & 3) >> (4 * (j >> 2)) & 15) | (ubyte(m1.z, j & 3) >> high & 3) << 4;
        slope[h][2 * j] = slope[h][2 * j + 1] = d * (float)sc;
        offset[h][2 * j] = offset[h][2 * j + 1] = -dmin * (float)mn;
        most[h] = fmaxf(most[h], fmaxf(fabsf(offset[h][2 * j]), fabsf(slope[h][2 * j] * (QT == Q5K ? 31.f : 15.f) + offset[h][2 * j])));
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float scale = most[h] / 127.f, inverse = scale > 0.f ? 1.f / scale : 0.f;
#pragma unroll
    for (int j = 0; j < 16; j++) {
      slope[h][j] *= inverse;
      offset[h][j] *= inverse;
    }
    most[h] = scale;
  }
  uint4 fifth;
  if constexpr (QT == Q5K) fifth = lds128(w + 2048 + lane * 16);
#pragma unroll
  for (int grp = 0; grp < 8; grp++) {
    u32 v[4];
    if constexpr (QT == Q6K) {
      u32 x[3];
#pragma unroll
      for (int f = 0; f < 3; f++) {
        const int word = 3 * grp + f;
        x[f] = lds32(w + (word >> 2) * 512 + lane * 16 + (word & 3) * 4);
        v[f] = ((x[f] >> 2) & 0x3F3F3F3Fu) ^ 0x20202020u;
      }
      v[3] = (((x[0] << 4) & 0x30303030u) | ((x[1] << 2) & 0x0C0C0C0Cu) | (x[2] & 0x03030303u)) ^ 0x20202020u;
    } else {
      const uint2 q = lds64(w + (grp >> 1) * 512 + lane * 16 + (grp & 1) * 8);
      v[0] = q.x & 0x0F0F0F0Fu;
      v[1] = (q.x >> 4) & 0x0F0F0F0Fu;
      v[2] = q.y & 0x0F0F0F0Fu;
      v[3] = (q.y >> 4) & 0x0F0F0F0Fu;
      if constexpr (QT == Q5K) {
        auto bit = [&](u32 x) { return (grp < 4 ? x << (4 - grp) : x >> (grp - 4)) & 0x10101010u; };
        v[0] |= bit(fifth.x); v[1] |= bit(fifth.y); v[2] |= bit(fifth.z); v[3] |= bit(fifth.w);
      }
    }
#pragma unroll
    for (int f = 0; f < 4; f++) {
      const int h = f & 1, j = 2 * grp + (f >> 1);
      *(u32*)(shared + image_at<1>(warp, lane, 0, grp, f)) = round4(v[f], slope[h][j], offset[h][j]);
    }
  }
  const u64 block = (u64)blockIdx.y * p.kb + blockIdx.x;
  write_image(p.digits + block * image_bytes<ROUNDED>(), shared, image_bytes<ROUNDED>());
  if (t == 0) {
    p.scales[block * 128 + warp * 16 + g] = most[0];
    p.scales[block * 128 + warp * 16 + g + 8] = most[1];
  }
}

// What the sums of a super-block are multiplied with, for rows g and g + 8 of a warp's row tile.
template <int QT> struct Factors {
  float d[2], dmin[2];
  u32 mins[4];  // f16 pairs: the min of groups 2t (0, 1) and 2t + 1 (2, 3) of rows g and g + 8, once per 16 values
  DEVICE Factors(u32 meta, int g, int t) {
    if constexpr (QT == ROUNDED) {
      d[0] = __uint_as_float(lds32(meta + g * 4));
      d[1] = __uint_as_float(lds32(meta + g * 4 + 32));
    } else if constexpr (QT == NV4) {
      d[0] = nv4_scale(lds32(meta + g * 32));
      d[1] = nv4_scale(lds32(meta + g * 32 + 16));
    } else if constexpr (QT == Q6K) {
      const u32 dd = lds32(meta + g * 4);
      d[0] = __fmul_rn(low_half(dd), 0.25f);
      d[1] = __fmul_rn(high_half(dd), 0.25f);
    } else {
      const u32 dm0 = lds32(meta + g * 32 + 12);
      const uint4 m1 = lds128(meta + g * 32 + 16);
      const int high = t >> 1;
      const u32 m[2] = {((m1.x >> (4 * high)) & 0x0F0F0F0Fu) | ((m1.z << (4 - 2 * high)) & 0x30303030u),
                        ((m1.y >> (4 * high)) & 0x0F0F0F0Fu) | ((m1.z >> (2 * high)) & 0x30303030u)};
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const u32 byte = 2 * (t & 1) + (r >> 1);
        mins[r] = half2_sub(__byte_perm(m[r & 1], 0x64646464u, 0x4040u | byte | byte << 8), 0x64006400u);
      }
      d[0] = low_half(dm0);
      d[1] = low_half(m1.w);
      dmin[0] = high_half(dm0);
      dmin[1] = high_half(m1.w);
    }
  }
};

template <int QT> DEVICE void consume(const WideArgs& p, u32 base, u32 full, u32 empty) {
  using W = Weights<QT>;
  constexpr int SCALE_BYTES = scale_bytes<QT>();
  const u32 scales0 = base + slots<QT>() * slot_bytes<QT>(), totals = scales0 + SCALE_SLOTS * SCALE_BYTES + threadIdx.x * 4;
  const u32 full_scales = full + 2 * slots<QT>() * 8, empty_scales = full_scales + SCALE_SLOTS * 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = warp >> 2, kb = p.kb;
  const int g = lane >> 2, t = lane & 3;
  const int columns = (p.n + TOKENS - 1) / TOKENS, rows = (p.row_tiles + ROW_TILES - 1) / ROW_TILES;
  const int jobs = columns * rows;
  int hi[64], lo[64];
  float sum[64];
#pragma unroll
  for (int i = 0; i < 64; i++) sum[i] = 0.f;
  int slot = 0, parity = 0, scale_slot = 0, scale_parity = 0;
  auto advance = [&]() {
    if (++slot == slots<QT>()) { slot = 0; parity ^= 1; }
  };
  auto release = [&](u32 bar) {
    __syncwarp();
    if (lane == 0) bar_arrive(bar);
  };
  for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
    int seg = 0, seg_end = seg_begin(1, kb, p.segments);
    for (int k = 0; k < kb; k++) {
      const u32 first_slot = slot;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        bar_wait(full + slot * 8, parity);
        const u64 acts = rows_128(base + slot * slot_bytes<QT>());
        const u64 weights = rows_128(base + slot * slot_bytes<QT>() + ACT_BYTES + group * 8192);
        wgmma_fence();
#pragma unroll
        for (int grp = 0; grp < 4; grp++) {  // 32 bytes a group
          wgmma<W::SIGNED>(hi, weights + grp * 2, acts + grp * 2, half || grp);
          if (digits<QT>() > 1) wgmma<W::SIGNED>(lo, weights + ((DIGIT_BYTES + grp * 32) >> 4), acts + grp * 2, half || grp);
        }
        wgmma_commit();
        if (half == 0) advance();
      }
      // The rows' factors are made while the tensor core works: behind the wait they would be a chain of round trips.
      bar_wait(full_scales + scale_slot * 8, scale_parity);
      const u32 scales = scales0 + scale_slot * SCALE_BYTES;
      const Factors<QT> f(scales + sum_bytes<QT>() + TOKENS * 4 + warp * meta_bytes<QT>(), g, t);
      wgmma_wait<1>();
      release(empty + first_slot * 8);
      wgmma_wait<0>();
      release(empty + slot * 8);
      advance();
      if constexpr (QT == ROUNDED) {
#pragma unroll
        for (int j = 0; j < 16; j++) {
          const uint2 xd = lds64(scales + (j * 8 + 2 * t) * 4);
#pragma unroll
          for (int r = 0; r < 4; r++)
            sum[4 * j + r] =
                __fmaf_rn((float)hi[4 * j + r], __fmul_rn(f.d[r >> 1], __uint_as_float(r & 1 ? xd.y : xd.x)), sum[4 * j + r]);
        }
      } else if constexpr (QT == Q6K || QT == NV4) {
#pragma unroll
        for (int j = 0; j < 16; j++) {
          const uint2 xd = lds64(scales + (j * 8 + 2 * t) * 4);
#pragma unroll
          for (int r = 0; r < 4; r++)
            sum[4 * j + r] = add_sum<QT>(hi[4 * j + r] * W::BASE + lo[4 * j + r], f.d[r >> 1], __uint_as_float(r & 1 ? xd.y : xd.x), sum[4 * j + r]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 16; j++) {
          const uint2 x = lds64(scales + (j * 8 + g) * 32 + ((t * 8) ^ ((g & 4) << 2))), xd = lds64(scales + TOKENS * 32 + (j * 8 + 2 * t) * 4);
          float mn[4];
          mma16_f16_zero(mn, f.mins, x.x, x.y);
#pragma unroll
          for (int r = 0; r < 4; r++) {
            const float d = __uint_as_float(r & 1 ? xd.y : xd.x);
            float& s = sum[4 * j + r];
            s = __fmaf_rn((float)(hi[4 * j + r] * W::BASE + lo[4 * j + r]), __fmul_rn(f.d[r >> 1], d), s);
            s = __fmaf_rn(-mn[r], __fmul_rn(f.dmin[r >> 1], d), s);
          }
        }
      }
      release(empty_scales + scale_slot * 8);
      if (++scale_slot == SCALE_SLOTS) { scale_slot = 0; scale_parity ^= 1; }
      if (k + 1 != seg_end) continue;
      if (k + 1 == kb) {
        const int col0 = job % columns * TOKENS, tile = job / columns * ROW_TILES + warp;
        float* out = p.out + (u64)(col0 + 2 * t) * p.out_rows + p.first_row + tile * 16 + g;
        if (tile < (int)p.row_tiles) {
#pragma unroll
          for (int i = 0; i < 64; i++) {
            const float v = seg ? __fadd_rn(__uint_as_float(lds32(totals + i * CONSUMERS * 4)), sum[i]) : sum[i];
            out[(u64)((i >> 2) * 8 + (i & 1)) * p.out_rows + ((i >> 1) & 1) * 8] = v;
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < 64; i++) {
          const u32 at = totals + i * CONSUMERS * 4;
          const float v = seg ? __fadd_rn(__uint_as_float(lds32(at)), sum[i]) : sum[i];
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
        }
      }
      seg++;
      seg_end = seg_begin(seg + 1, kb, p.segments);
#pragma unroll
      for (int i = 0; i < 64; i++) sum[i] = 0.f;
    }
  }
}

template <int QT> DEVICE void wide(const WideArgs& p) {
  constexpr int TB = QT == ROUNDED ? 0 : tile_bytes(QT), SUM_BYTES = sum_bytes<QT>(), SCALE_BYTES = scale_bytes<QT>();
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = smem_u32(shared);
  const u32 full = base + slots<QT>() * slot_bytes<QT>() + SCALE_SLOTS * SCALE_BYTES + total_bytes<QT>(), empty = full + slots<QT>() * 8;
  const u32 full_scales = empty + slots<QT>() * 8, empty_scales = full_scales + SCALE_SLOTS * 8;
  const int warp = threadIdx.x >> 5, kb = p.kb;
  if (threadIdx.x == 0) {
    for (int i = 0; i < slots<QT>(); i++) {
      bar_init(full + i * 8, 1);
      bar_init(empty + i * 8, CONSUMERS / 32);
    }
    for (int i = 0; i < SCALE_SLOTS; i++) {
      bar_init(full_scales + i * 8, 1);
      bar_init(empty_scales + i * 8, CONSUMERS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  pdl_launch();
  pdl_wait();

  if (warp >= CONSUMERS / 32) {  // producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == CONSUMERS) {
      const int columns = (p.n + TOKENS - 1) / TOKENS, rows = (p.row_tiles + ROW_TILES - 1) / ROW_TILES;
      const int jobs = columns * rows;
      int slot = 0, round = 0, scale_slot = 0, scale_round = 0;
      for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
        const int column = job % columns, row = job / columns;
        const i8* q = p.act.q + (u64)column * kb * (2 * ACT_BYTES);
        const u8* digits_of_row = p.digits + (u64)row * kb * image_bytes<QT>();
        for (int k = 0; k < kb; k++) {
#pragma unroll 1
          for (int half = 0; half < 2; half++) {
            const u32 bar = full + slot * 8, at = base + slot * slot_bytes<QT>();
            if (round) bar_wait(empty + slot * 8, (round - 1) & 1);
            bar_expect(bar, slot_bytes<QT>());
            bulk_load(at, q + (u64)(2 * k + half) * ACT_BYTES, ACT_BYTES, bar);
            bulk_load(at + ACT_BYTES, digits_of_row + (u64)(2 * k + half) * (digits<QT>() * DIGIT_BYTES), digits<QT>() * DIGIT_BYTES, bar);
            if (++slot == slots<QT>()) { slot = 0; round++; }
          }
          const u32 bar = full_scales + scale_slot * 8, scales = base + slots<QT>() * slot_bytes<QT>() + scale_slot * SCALE_BYTES;
          if (scale_round) bar_wait(empty_scales + scale_slot * 8, (scale_round - 1) & 1);
          bar_expect(bar, SCALE_BYTES);
          const u64 at = (u64)k * p.act.ld + column * TOKENS;
          if (SUM_BYTES) bulk_load(scales, p.act.sums + at * 32, SUM_BYTES, bar);
          bulk_load(scales + SUM_BYTES, p.act.d + at, TOKENS * 4, bar);
          if constexpr (QT == ROUNDED) {
            bulk_load(scales + TOKENS * 4, p.w + ((u64)row * kb + k) * 512, 512, bar);
          } else {
#pragma unroll 1
          for (int r = 0; r < ROW_TILES; r++) {
            const int tile = min(row * ROW_TILES + r, (int)p.row_tiles - 1);
            bulk_load(scales + SUM_BYTES + TOKENS * 4 + r * meta_bytes<QT>(), p.w + ((u64)tile * kb + k) * TB + meta_at<QT>(),
                      meta_bytes<QT>(), bar);
          }
          }
          if (++scale_slot == SCALE_SLOTS) { scale_slot = 0; scale_round++; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume<QT>(p, base, full, empty);
  }
}
#define SPLIT(name) \
  extern "C" __global__ void __launch_bounds__(ROW_TILES * 32, 2) name(const __grid_constant__ SplitArgs p)
SPLIT(split_q4k) { split<Q4K>(p); }
SPLIT(split_q5k) { split<Q5K>(p); }
SPLIT(split_q6k) { split<Q6K>(p); }
SPLIT(split_nv4) { split<NV4>(p); }
SPLIT(round_q4k) { round_weights<Q4K>(p); }
SPLIT(round_q5k) { round_weights<Q5K>(p); }
SPLIT(round_q6k) { round_weights<Q6K>(p); }
#define WIDE(name, qt) \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) name(const __grid_constant__ WideArgs p) { wide<qt>(p); }
WIDE(wide_q4k, Q4K)
WIDE(wide_q5k, Q5K)
WIDE(wide_q6k, Q6K)
WIDE(wide_nv4, NV4)
WIDE(wide_rounded, ROUNDED)
