// Attention of a vision tower in exact integers, as `muser_backend::arith::vision::attention` defines it: units, digits and products
// are those of attention_digits.cuh; scores are not bounded, so a running maximum (a whole number of log2) is carried, and all
// patches of a run see all of its keys.
//
// A CTA has a head and 16 WARPS patches of one run, a warp 16 of them. K and V lie in blocks like the text model's, those of a run
// one after the other. Heads of less than 128 values are filled up with zeros in the queries, which no sum sees.
#pragma once
#include "attention_digits.cuh"

struct RunArgs {
  DigitArgs d;        // q and f of all patches, kv, block_bytes, heads; group 1
  const uint4* runs;  // a CTA's: first patch, end, first block, keys
  float* out;         // [patches of the slice][heads * dim]
  u32 from, to, dim;  // the slice; values of a head
};

constexpr float MOST_SCORE = 1e6f, NO_PEAK = -1e7f;

// `stage_keys` and `stage_values` without the pieces that a head of DIM values does not have.
template <int DIM, int THREADS> DEVICE void stage_unit(u32 dst, const u8* head, int unit, int i) {
  {
    constexpr int ROWS = THREADS / 8;  // positions of a round
    const int position = i >> 3, c = i & 7, n = column_of(position);
    const u8* k = head + (unit * 64 + position) * 128 + c * 16;
    const u32 to = dst + n * 128 + ((c ^ (n & 7)) << 4);
    if (c < DIM / 16) {
#pragma unroll
      for (int plane = 0; plane < 2; plane++) {
#pragma unroll
        for (int r = 0; r < 64; r += ROWS) cp16(to + plane * 8192 + r * 128, k + plane * PLANE + r * 128);
      }
    }
  }
  if (i < 32)
    cp16(dst + unit_scales<2>() + i * 16, head + scales_at<2>() + (i >> 4) * 1024 + unit * 256 + (i & 15) * 16);
  constexpr int ROWS = THREADS / 4;  // dims of a round
  const int dim = i >> 2, c = i & 3;
  const u8* v = head + v_at<2>() + dim * 256 + unit * 64 + c * 16;
  const u32 to = dst + unit_v<2>() + dim * 64 + ((c ^ ((dim >> 1) & 3)) << 4);
#pragma unroll
  for (int plane = 0; plane < 2; plane++) {
#pragma unroll
    for (int r = 0; r < DIM; r += ROWS) {
      if (r + ROWS <= DIM || dim + r < DIM) cp16(to + plane * 8192 + r * 64, v + plane * PLANE + r * 256);
    }
  }
}

// 2^d for whole d up to 0; 0 below 2^-126.
DEVICE float decay(float d) { return d < -126.f ? 0.f : __int_as_float(((int)d + 127) << 23); }

// Sets s to the scores of two rows and `top` to the largest of each, rounded, in the low bits of RINT + score. Scores beyond
// MOST_SCORE are cut off where `CUT`.
template <bool CUT>
DEVICE void unit_peaks(float (&s)[8][4], float (&top)[2], const float (&f)[2], u32 scales, int keys, int t) {
  top[0] = top[1] = -MOST_SCORE;
#pragma unroll
  for (int m = 0; m < 4; m++) {
    const uint4 ku = lds128(scales + (16 * m + 4 * t) * 4);
    const u32 kb[4] = {ku.x, ku.y, ku.z, ku.w};
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& v = s[2 * m + (e >> 1)][2 * h + (e & 1)];
        v = __fmul_rn(__fmul_rn(v, __uint_as_float(kb[e])), f[h]);
        if (CUT) {
          v = fminf(fmaxf(v, -MOST_SCORE), MOST_SCORE);
          v = 16 * m + 4 * t + e < keys ? v : -MOST_SCORE;
        }
        top[h] = fmaxf(top[h], v);
      }
    }
  }
}

// Digits of the weights of a unit with `keys` keys left, of two rows; `factor`: what the block's sums are multiplied with.
DEVICE void running_weights(Weights& a, float (&s)[8][4], const float (&f)[2], u32 scales, int keys, float (&peak)[2],
                            float (&factor)[2], int t) {
  // No product of digits exceeds 5.5e8: with the largest scale of this lane's keys and both queries' that bounds all scores.
  bool near = keys >= 64;
  {
    float d = 0.f;
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const uint4 ku = lds128(scales + (16 * m + 4 * t) * 4);
      d = fmaxf(fmaxf(fmaxf(d, __uint_as_float(ku.x)), fmaxf(__uint_as_float(ku.y), __uint_as_float(ku.z))), __uint_as_float(ku.w));
    }
    near = near && d * 5.5e8f * fmaxf(f[0], f[1]) < 0.9f * MOST_SCORE;
  }
  const bool all = keys >= 64;
  float top[2];
  if (__all_sync(~0u, near)) unit_peaks<false>(s, top, f, scales, keys, t);
  else unit_peaks<true>(s, top, f, scales, keys, t);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    // Rounding keeps the order, so the largest score rounded is the largest rounded score.
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
    const float now = fmaxf(__fsub_rn(__fadd_rn(top[h], RINT), RINT), peak[h]);
    factor[h] = decay(__fsub_rn(peak[h], now));
    peak[h] = now;
    const int base = __float_as_int(__fadd_rn(now, RINT));
    float x[16], sum[4], largest = 0.f;
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const uint4 vu = lds128(scales + 256 + (16 * m + 4 * t) * 4);
      const u32 vb[4] = {vu.x, vu.y, vu.z, vu.w};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float v = s[2 * m + (e >> 1)][2 * h + (e & 1)];
        const float rounded = __fadd_rn(v, RINT);
        const int shift = max(__float_as_int(rounded) - base, -100);
        v = __int_as_float(__float_as_int(exp2_fraction(__fsub_rn(v, __fsub_rn(rounded, RINT)))) + (shift << 23));
        if (!all) v = 16 * m + 4 * t + e < keys ? v : 0.f;
        sum[e] = m == 0 ? v : __fadd_rn(sum[e], v);
        v = __fmul_rn(v, __uint_as_float(vb[e]));
        largest = fmaxf(largest, v);
        x[4 * m + e] = v;
      }
    }
    row_digits<2>(a, h, x, sum, f[h], largest);
  }
}

template <int DIM, int WARPS, int STAGES, class Products> DEVICE void walk_run(const RunArgs& p) {
  constexpr int NT = DIM / 8, SUMS = 4 * NT;
  extern __shared__ __align__(1024) u8 sh[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, head = blockIdx.y;
  const u32 buf = smem_u32(sh);
  float* total = (float*)(sh + STAGES * unit_bytes<2>()) + warp * SUMS * 32 + lane;
  pdl_launch();
  pdl_wait();
  const uint4 run = __ldcg(p.runs + blockIdx.x);
  const int keys = (int)run.w, units = (keys + 63) >> 6;
  // Patches of this warp that lie in the run and in the slice.
  const int first = (int)run.x + warp * 16;
  const int row_begin = max(first, (int)p.from), row_end = min(min(first + 16, (int)run.y), (int)p.to);
  Tile tile = {};
  tile.row = (u32)first;
  tile.count = (u32)max(0, row_end - first);
  Queries q;
  load_queries(q, p.d, tile, head, g, t);
#pragma unroll
  for (int i = 0; i < SUMS; i++) total[i * 32] = 0.f;
  float total_l[2] = {0.f, 0.f}, total_peak[2] = {NO_PEAK, NO_PEAK};
  float lb[2] = {0.f, 0.f}, peak[2] = {NO_PEAK, NO_PEAK}, o[NT][4];
  const u32 head_offset = head * head_bytes<2>();

  auto fetch = [&](int unit) {
    if (unit < units) {
      const u8* at = block_at(p.d, run.z + (unit >> 2), head_offset);
      const u32 dst = buf + unit % STAGES * unit_bytes<2>();
      stage_unit<DIM, WARPS * 32>(dst, at, unit & 3, threadIdx.x);
    }
    cp_commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch(s);
#pragma unroll 1
  for (int unit = 0; unit < units; unit++) {
    cp_wait<STAGES - 2>();
    Products::after_copy();
    __syncthreads();
    fetch(unit + STAGES - 1);
    const u32 base = buf + unit % STAGES * unit_bytes<2>();
    if ((unit & 3) == 0) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) o[i >> 2][i & 3] = 0.f;
      lb[0] = lb[1] = 0.f;
      peak[0] = peak[1] = NO_PEAK;
    }
    float s[8][4], factor[2];
    Weights a;
    Products::template scores<DIM>(s, q, base, lane);
    running_weights(a, s, q.f, base + unit_scales<2>(), keys - unit * 64, peak, factor, t);
    if (!__all_sync(~0u, factor[0] == 1.f && factor[1] == 1.f)) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) o[i >> 2][i & 3] = __fmul_rn(o[i >> 2][i & 3], factor[(i & 3) >> 1]);
    }
    Products::template values<DIM>(o, a, base, lane);
#pragma unroll
    for (int h = 0; h < 2; h++) lb[h] = __fadd_rn(__fmul_rn(lb[h], factor[h]), a.l[h]);
    if ((unit & 3) == 3 || unit + 1 == units) {  // the block's end
      float here[2], there[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float top = fmaxf(total_peak[h], peak[h]);
        here[h] = decay(__fsub_rn(total_peak[h], top));
        there[h] = decay(__fsub_rn(peak[h], top));
        total_peak[h] = top;
        total_l[h] = __fadd_rn(__fmul_rn(total_l[h], here[h]), __fmul_rn(lb[h], there[h]));
      }
#pragma unroll
      for (int i = 0; i < SUMS; i++) {
        const int h = (i & 3) >> 1;
        total[i * 32] = __fadd_rn(__fmul_rn(total[i * 32], here[h]), __fmul_rn(o[i >> 2][i & 3], there[h]));
      }
    }
  }
  const u64 width = (u64)p.d.heads * p.dim;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = first + g + 8 * h;
    if (row < row_begin || row >= row_end) continue;
    const float inverse = __fdiv_rn(1.f, total_l[h]);
    float* out = p.out + (u64)(row - (int)p.from) * width + head * p.dim + 2 * t;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      if (8 * nt < (int)p.dim) *(float2*)(out + 8 * nt) = make_float2(__fmul_rn(total[(nt * 4 + 2 * h) * 32], inverse),
                                             __fmul_rn(total[(nt * 4 + 2 * h + 1) * 32], inverse));
    }
  }
}
