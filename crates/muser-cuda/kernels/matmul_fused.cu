// Matrix products for more than 16 rows on Hopper: weights go from memory in their file width to the operands of warpgroup
// multiplication, in registers; no digits are written out.
//
//   part[S][n][out_rows]: sums of the S segments of K, as matmul_few.cu.
//
// The scale of a group of weights is folded into the weights before they meet the tensor core, so that a super-block of 256 sums up
// inside it and no integer multiply-add per output is left. A scaled weight exceeds a byte, so it has two digits with a sum each,
// exact in i32:
//
//   Q4_K, Q5_K: scale = 8 a + b, 0..7:      q a and q b are at most 217:   isum = 8 sum(q a x) + sum(q b x)
//   Q6_K:       scale (q - 32) = 64 hi + lo                                4 isum = 256 sum(hi x) + sum(4 lo x)
//   NVFP4:      scale code = 256 hi + lo, at most 32,639                   isum = 256 sum(hi x) + sum(lo x)
//
// A warp unpacks the digits of its own row tile: a tile's lanes hold what the A registers of m64nNk32 want. A warpgroup has 64
// output rows x N tokens; the warpgroups of a CTA share the tokens, which one warp brings beside the weights, a super-block a slot.
// Mins meet the group sums in f16, exact because all numbers are integers below 2^24, and by warpgroups, too: a warp's own products
// would each wait for what the other groups have in the tensor core.
#include "digits.cuh"
#include "wgmma.cuh"
#include "barriers.cuh"
#include "wgmma_regs.cuh"

struct FusedArgs {
  const u8* w;
  Act act;  // tiled
  float* part;
  u32 row_tiles, kb, segments, n, first_row, out_rows;
};

template <int QT> __device__ constexpr int fused_sum_bytes() { return has_mins<QT>() ? 32 : 0; }  // of a token
template <int QT, int N, int GROUPS> __device__ constexpr int fused_slot_bytes() {
  return (N * (256 + fused_sum_bytes<QT>() + 4) + GROUPS * 4 * tile_bytes(QT) + 1023) & ~1023;
}
template <int QT, int N, int GROUPS> __device__ constexpr int fused_slots() {
  const int fit = (232448 - 1024 - 128 - GROUPS * 4 * digit_scratch_bytes(QT)) / fused_slot_bytes<QT, N, GROUPS>();
  return fit > 6 ? 6 : fit;
}

// What the sums of a super-block are multiplied with, for rows g and g + 8 of a warp's row tile.
template <int QT> struct RowFactors {
  float d[2], dmin[2];
  u32 mins[4];  // f16 pairs: the min of group t (0, 1) and group t + 4 (2, 3) of rows g and g + 8, once per 16 values
  DEVICE RowFactors(u32 w, int g, int t) {
    if constexpr (QT == NV4) {
      d[0] = nv4_scale_of(w, g);
      d[1] = nv4_scale_of(w, g + 8);
    } else if constexpr (QT == Q6K) {
      const u32 dd = lds32(w + 3328 + g * 4);
      d[0] = __fmul_rn(low_half(dd), 0.25f);
      d[1] = __fmul_rn(high_half(dd), 0.25f);
    } else {
      const u32 meta = w + (QT == Q5K ? 2560 : 2048) + g * 32;
      const u32 dm0 = lds32(meta + 12);
      const uint4 m1 = lds128(meta + 16);
      const u32 m[4] = {(m1.x & 0x0F0F0F0Fu) | ((m1.z << 4) & 0x30303030u), (m1.y & 0x0F0F0F0Fu) | (m1.z & 0x30303030u),
                        ((m1.x >> 4) & 0x0F0F0F0Fu) | ((m1.z << 2) & 0x30303030u), ((m1.y >> 4) & 0x0F0F0F0Fu) | ((m1.z >> 2) & 0x30303030u)};
#pragma unroll
      for (int r = 0; r < 4; r++) mins[r] = half2_sub(__byte_perm(m[r], 0x64646464u, 0x4040u | t | t << 8), 0x64006400u);
      d[0] = low_half(dm0);
      d[1] = low_half(m1.w);
      dmin[0] = high_half(dm0);
      dmin[1] = high_half(m1.w);
    }
  }
};

// What a CTA does, job by job: up to GROUPS units of 64 output rows x one segment x N tokens. Up to 64 tokens the units are
// dealt out evenly, in the order rows, segments, tokens: with few jobs a CTA, the last round would be mostly empty. CTAs at the same
// rows of different tokens run side by side, so that weights come from memory once. With 128 tokens all groups always work (one alone
// keeps the tensor core busy half the time), and the tokens of a block of rows follow each other.
template <int N, int GROUPS> struct Jobs {
  int rows, segments, columns, at, end;  // rows: units in a segment
  int column, row, segment, count, k0, k1;
  DEVICE Jobs(const FusedArgs& p) {
    rows = (p.row_tiles + 3) / 4;
    segments = p.segments;
    columns = (p.n + N - 1) / N;
    if constexpr (N > 64) {
      at = blockIdx.x;
      end = columns * segments * ((rows + GROUPS - 1) / GROUPS);
    } else {
      const u32 units = rows * segments * columns, each = units / gridDim.x, over = units % gridDim.x;
      at = blockIdx.x * each + min(blockIdx.x, over);
      end = at + each + (blockIdx.x < over ? 1 : 0);
    }
  }
  DEVICE bool next(const FusedArgs& p) {
    if (at >= end) return false;
    if constexpr (N > 64) {
      column = at % columns;
      const int rest = at / columns;
      segment = rest % segments;
      row = rest / segments * GROUPS;
      count = min(GROUPS, rows - row);
      at += gridDim.x;
    } else {
      const int left = end - at, jobs = (left + GROUPS - 1) / GROUPS, rest = at % (rows * segments);
      column = at / (rows * segments);
      segment = rest / rows;
      row = rest - segment * rows;
      count = min((left + jobs - 1) / jobs, rows - row);  // as even as can be
      at += count;
    }
    k0 = seg_begin(segment, p.kb, segments);
    k1 = seg_begin(segment + 1, p.kb, segments);
    return true;
  }
};

// Groups of 32 that are unpacked together; two such lots of A registers take turns.
template <int N> __device__ constexpr int lot() { return N > 64 ? 1 : 2; }

// What the producer says of a slot.
enum : u32 { COUNT = 7, ENDS = 8, STOP = ~0u };  // warpgroups with work; the segment ends
struct SlotInfo {
  u32 what, row, column, segment;
};

// Warpgroups take turns at the tensor core, where that pays: two at a time slow each other down. Weights of Q6_K and NVFP4 take so long to unpack
// that the core would wait for whoever has the turn.
template <int QT, int N> __device__ constexpr bool turns() { return N > 64 && has_mins<QT>(); }
DEVICE void take_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
DEVICE void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory"); }

template <int QT, int N, int GROUPS> DEVICE void fused_consume(const FusedArgs& p, u32 base, u32 full, u32 empty, u32 infos, u32 scratch) {
  using D = Digits<QT>;
  constexpr int SLOT = fused_slot_bytes<QT, N, GROUPS>(), SLOTS = fused_slots<QT, N, GROUPS>(), LOT = lot<N>();
  constexpr int SUMS = N * 256, SCALES = SUMS + N * fused_sum_bytes<QT>(), TILES = SCALES + N * 4;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int hi[N / 2], lo[N / 2];
  float sum[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum[i] = 0.f;
  int slot = 0, parity = 0;
  const int group = warp >> 2, next = group + 1 == GROUPS ? 0 : group + 1;
  if (turns<QT, N>() && next == 0) give_turn(0);
#pragma unroll 1
  for (;;) {
    const u32 at = base + slot * SLOT, w = at + TILES + warp * tile_bytes(QT);
    bar_wait(full + slot * 8, parity);
    const u32 what = lds32(infos + slot * 16);
    if (what == STOP) break;
    uint4 info = make_uint4(0, 0, 0, 0);
    if (group < (int)(what & COUNT)) {
      const u64 acts = rows_128(at);
      D digits(w, g, lane, scratch + warp * digit_scratch_bytes(QT));
      u32 a[2][LOT][2][4];
#pragma unroll
      for (int c = 0; c < 8 / LOT; c++) {
        if (c >= 2) wgmma_wait<1>();  // the lot that is written now has been read
#pragma unroll
        for (int l = 0; l < LOT; l++) digits.group(a[c & 1][l][0], a[c & 1][l][1], w, lane, c * LOT + l);
        if (turns<QT, N>() && c == 0) take_turn(group);
        wgmma_fence();
#pragma unroll
        for (int l = 0; l < LOT; l++) {
          const int grp = c * LOT + l;
          const u64 b = acts + ((grp >> 2) * (N * 128) + (grp & 3) * 32 >> 4);
          wgmma_regs<N, D::SIGNED>(hi, a[c & 1][l][0], b, grp);
          wgmma_regs<N, D::SIGNED>(lo, a[c & 1][l][1], b, grp);
        }
        wgmma_commit();
      }
      if (turns<QT, N>()) give_turn(next);
      const RowFactors<QT> f(w, g, t);
      wgmma_wait<0>();
      // Scale of the token of a sum: tokens 2t and 2t + 1 of each 8.
      uint2 pair = make_uint2(0, 0);
      auto scale_of = [&](int e) {
        if ((e & 3) == 0) pair = lds64(at + SCALES + ((e >> 2) * 8 + 2 * t) * 4);
        return __uint_as_float(e & 1 ? pair.y : pair.x);
      };
      constexpr int PARTS = N > 32 ? 2 : 1, PART = N / PARTS;
      float mins[PARTS][PART / 2];
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
#pragma unroll
        for (int i = 0; i < PART / 2; i++) {
          const int e = part * PART / 2 + i;
          sum[e] = add_sum<QT>(hi[e] * D::BASE + lo[e], f.d[(i >> 1) & 1], scale_of(e), sum[e]);
        }
        if constexpr (has_mins<QT>()) {
          wgmma_fence();
          wgmma_f16<PART>(mins[part], f.mins, rows_32(at + SUMS + part * PART * 32));
          wgmma_commit();
        }
      }
      if constexpr (has_mins<QT>()) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          if (part + 1 < PARTS) wgmma_wait<1>();
          else wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < PART / 2; i++) {
            const int e = part * PART / 2 + i;
            sum[e] = __fmaf_rn(-mins[part][i], __fmul_rn(f.dmin[(i >> 1) & 1], scale_of(e)), sum[e]);
          }
        }
      }
      info = lds128(infos + slot * 16);
    } else if (turns<QT, N>()) {
      take_turn(group);
      give_turn(next);
    }
    __syncwarp();
    if (lane == 0) bar_arrive(empty + slot * 8);
    if (++slot == SLOTS) { slot = 0; parity ^= 1; }
    if (!(info.x & ENDS)) continue;
    const int tile = info.y * 4 + warp, col0 = info.z * N + 2 * t;
    float* out = p.part + ((u64)info.w * p.n + col0) * p.out_rows + p.first_row + tile * 16 + g;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const int col = (i >> 2) * 8 + (i & 1);
      if (tile < (int)p.row_tiles && col0 + col < (int)p.n) out[(u64)col * p.out_rows + ((i >> 1) & 1) * 8] = sum[i];
      sum[i] = 0.f;
    }
  }
  if (turns<QT, N>() && group == 0) take_turn(0);  // what the last group gave
}

// One warp: a lane a copy, since what takes time is to issue them.
template <int QT, int N, int GROUPS> DEVICE void fused_produce(const FusedArgs& p, u32 base, u32 full, u32 empty, u32 infos) {
  constexpr int SLOT = fused_slot_bytes<QT, N, GROUPS>(), SLOTS = fused_slots<QT, N, GROUPS>(), TB = tile_bytes(QT);
  constexpr int SUM = fused_sum_bytes<QT>(), SUMS = N * 256, SCALES = SUMS + N * SUM, TILES = SCALES + N * 4, COPIES = GROUPS * 4;
  const int lane = threadIdx.x & 31;
  Jobs<N, GROUPS> job(p);
  int slot = 0, round = 0;
  bool waited = false;
  while (job.next(p)) {
    const int col0 = job.column * N;
    // This lane's copy: where it lies, from one super-block to the next, its place in a slot and its size.
    const u8* src;
    u64 step;
    u32 to, bytes;
    if (lane < COPIES) {
      const int tile = min(job.row * 4 + lane, (int)p.row_tiles - 1);
      src = p.w + (u64)tile * p.kb * TB, step = TB, to = TILES + lane * TB, bytes = lane < job.count * 4 ? TB : 0;
    } else if (lane < COPIES + 2) {
      const int half = lane - COPIES;
      src = (const u8*)p.act.q + (u64)(col0 >> 7) * p.kb * 32768 + half * 16384 + (col0 & 127) * 128;
      step = 32768, to = half * N * 128, bytes = N * 128;
    } else if (lane == COPIES + 2) {
      src = (const u8*)(p.act.d + col0), step = (u64)p.act.ld * 4, to = SCALES, bytes = N * 4;
    } else {
      src = p.act.sums + (u64)col0 * 32, step = (u64)p.act.ld * 32, to = SUMS, bytes = lane == COPIES + 3 ? N * SUM : 0;
    }
    src += job.k0 * step;
#pragma unroll 1
    for (int k = job.k0; k < job.k1; k++) {
      const u32 bar = full + slot * 8, at = base + slot * SLOT;
      if (round) bar_wait(empty + slot * 8, (round - 1) & 1);
      if (lane == 0) {
        const SlotInfo info = {job.count | (k + 1 == job.k1 ? ENDS : 0u), (u32)job.row, (u32)job.column, (u32)job.segment};
        sts128(infos + slot * 16, make_uint4(info.what, info.row, info.column, info.segment));
        bar_expect(bar, N * (256 + SUM + 4) + job.count * 4 * TB);
      }
      __syncwarp();
      if (!waited) {  // weights depend on nothing
        if (lane < COPIES && bytes) bulk_load(at + to, src, bytes, bar);
        pdl_wait();
        waited = true;
        if (lane >= COPIES && bytes) bulk_load(at + to, src, bytes, bar);
      } else if (bytes) {
        bulk_load(at + to, src, bytes, bar);
      }
      src += step;
      if (++slot == SLOTS) { slot = 0; round++; }
    }
  }
  if (round) bar_wait(empty + slot * 8, (round - 1) & 1);
  if (lane == 0) {
    sts128(infos + slot * 16, make_uint4(STOP, 0, 0, 0));
    bar_arrive(full + slot * 8);
  }
}

// Registers move from the producer's warps to the others. What is asked for in all must not exceed what the launch was given, by
// its bounds 96, 128 or 168 a thread: the kernel would wait for ever.
template <int GROUPS> DEVICE void grow_registers() {
  if constexpr (GROUPS == 4) asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
  if constexpr (GROUPS == 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
  if constexpr (GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
}
template <int GROUPS> DEVICE void shrink_registers() {
  if constexpr (GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
}

template <int QT, int N, int GROUPS> DEVICE void fused(const FusedArgs& p) {
  constexpr int SLOTS = fused_slots<QT, N, GROUPS>();
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = smem_u32(shared), full = base + SLOTS * fused_slot_bytes<QT, N, GROUPS>(), empty = full + SLOTS * 8, infos = empty + SLOTS * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      bar_init(full + i * 8, 1);
      bar_init(empty + i * 8, GROUPS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  pdl_launch();
  if (threadIdx.x >= GROUPS * 128) {
    shrink_registers<GROUPS>();
    if (threadIdx.x < GROUPS * 128 + 32) fused_produce<QT, N, GROUPS>(p, base, full, empty, infos);
  } else {
    grow_registers<GROUPS>();
    fused_consume<QT, N, GROUPS>(p, base, full, empty, infos, infos + SLOTS * 16);
  }
  pdl_wait();  // what comes after this kernel has waited for all before it
}
#define FUSED(name, qt, n, groups) \
  extern "C" __global__ void __launch_bounds__(groups * 128 + 128, 1) name(const __grid_constant__ FusedArgs p) { fused<qt, n, groups>(p); }
#define FUSED_ALL(n, groups) FUSED(fused_q4k_##n, Q4K, n, groups) FUSED(fused_q5k_##n, Q5K, n, groups) FUSED(fused_q6k_##n, Q6K, n, groups) \
  FUSED(fused_nv4_##n, NV4, n, groups)
FUSED_ALL(32, 4)
FUSED_ALL(64, 3)
FUSED_ALL(128, 2)
