// What follows attention in exact integers (attention_digits.cuh): partial results of a row are added up, ascending, and the
// row is gated and quantised for the output projection.
//
// `digits_combine` is for steps of few rows, whose long rows have a partial result for every block; `digits_gate` for steps of
// many rows, nearly all of which have one. Same additions, same bits.
#include "attention.cuh"

struct CombineArgs {
  const float* part_o;
  const float* part_l;
  const Tile* tiles;
  const u32* row_tile;  // per row
  const float* qkvg;    // [segments][n][width], gate at gate_at; null: no gate (`digits_combine` alone)
  const float* factors; // [width] of qkvg, or null
  Act act;              // k = heads * 128
  u32 segments, n, width, gate_at, group;
};

constexpr int COMBINE_PARTS = 32;   // partial results of a stage
constexpr int COMBINE_STAGES = 3;

// a = O * (1 / L) * sigmoid(gate), quantised; a draft has no gate. One CTA per super-block (2 heads) and row. Long lists of
// partial results pass through shared memory, so that many are on their way while they are added one by one.
extern "C" __global__ void __launch_bounds__(256, 4) digits_combine(const __grid_constant__ CombineArgs p) {
  extern __shared__ __align__(16) float ring[];  // [COMBINE_STAGES][COMBINE_PARTS][256 + 4]: O of two heads, L of each
  __shared__ float row[256];
  constexpr int SLOT = 260;
  pdl_launch();
  const int kb = blockIdx.x, r = blockIdx.y, i = threadIdx.x, head = kb * 2 + (i >> 7), d = i & 127;
  const Tile tile = load_tile(p.tiles + __ldcg(p.row_tile + r));
  const int kv_head = head / (int)p.group, parts = tile.parts;
  const int m = (r - (int)tile.row) * (int)p.group + head % (int)p.group;
  const u64 part = tile.part + (u64)kv_head * parts;
  const float* po = p.part_o + part * 2048 + m * 128;
  const float* pl = p.part_l + part * 16 + m;
  const float* gate = p.qkvg + (u64)r * p.width + p.gate_at + kb * 256 + i;
  pdl_wait();
  const float z = p.qkvg ? times_factor(sum1(gate, (u64)p.n * p.width, p.segments), p.factors, p.gate_at + kb * 256 + i) : 0.f;
  float o = 0.f, l = 0.f;
  if (parts > 8) {
    const u32 base = smem_u32(ring);
    auto issue = [&](int stage) {  // a head's 128 threads: 32 of them copy one part, 4 parts at a time
      const int first = stage * COMBINE_PARTS;
      const u32 dst = base + (stage % COMBINE_STAGES) * COMBINE_PARTS * SLOT * 4;
      const int lane = i & 31, w = (i >> 5) & 3, h = i >> 7;
      for (int k = w; k < COMBINE_PARTS; k += 4)
        if (first + k < parts) cp16(dst + (k * SLOT + h * 128 + lane * 4) * 4, po + (u64)(first + k) * 2048 + lane * 4);
      if (d < COMBINE_PARTS && first + d < parts)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst + (d * SLOT + 256 + h) * 4), "l"(pl + (first + d) * 16)
                     : "memory");
      cp_commit();
    };
    const int stages = (parts + COMBINE_PARTS - 1) / COMBINE_PARTS;
    for (int s = 0; s < COMBINE_STAGES - 1; s++) issue(s);
    for (int s = 0; s < stages; s++) {
      cp_wait<COMBINE_STAGES - 2>();
      __syncthreads();
      issue(s + COMBINE_STAGES - 1);
      const float* src = ring + (s % COMBINE_STAGES) * COMBINE_PARTS * SLOT;
      const int n = min(COMBINE_PARTS, parts - s * COMBINE_PARTS);
#pragma unroll 8
      for (int k = 0; k < n; k++) {
        o = __fadd_rn(o, src[k * SLOT + i]);
        l = __fadd_rn(l, src[k * SLOT + 256 + (i >> 7)]);
      }
    }
  } else {
#pragma unroll 8
    for (int b = 0; b < parts; b++) {
      o = __fadd_rn(o, __ldcg(po + (u64)b * 2048 + d));
      l = __fadd_rn(l, __ldcg(pl + b * 16));
    }
  }
  o = __fmul_rn(o, __fdiv_rn(1.f, l));
  row[i] = p.qkvg ? __fmul_rn(o, sigmoid(z)) : o;
  __syncthreads();
  if (i < 32) {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = row[i * 8 + k];
    quantise_block(v, r, kb, i, p.act);
  }
}

// The same for steps of many rows, where nearly every row has one partial result: one warp per super-block, 8 values a
// lane.
extern "C" __global__ void __launch_bounds__(128) digits_gate(const __grid_constant__ CombineArgs p) {
  pdl_launch();
  const int kb = blockIdx.x * 4 + (threadIdx.x >> 5), r = blockIdx.y, lane = threadIdx.x & 31;
  if (kb * 256 >= (int)p.act.k) {
    pdl_wait();
    return;
  }
  const int head = kb * 2 + (lane >> 4), d = (lane & 15) * 8;
  const Tile tile = load_tile(p.tiles + __ldcg(p.row_tile + r));
  const int kv_head = head / (int)p.group, parts = tile.parts;
  const int m = (r - (int)tile.row) * (int)p.group + head % (int)p.group;
  const u64 part = tile.part + (u64)kv_head * parts;
  pdl_wait();
  float z[8], o[8], l = 0.f;
  sum8(z, p.qkvg + (u64)r * p.width + p.gate_at + kb * 256 + lane * 8, (u64)p.n * p.width, p.segments);
#pragma unroll
  for (int i = 0; i < 8; i++) o[i] = 0.f;
  for (int b = 0; b < parts; b++) {
    float v[8];
    load8(v, p.part_o + (part + b) * 2048 + m * 128 + d);
#pragma unroll
    for (int i = 0; i < 8; i++) o[i] = __fadd_rn(o[i], v[i]);
    l = __fadd_rn(l, __ldcg(p.part_l + (part + b) * 16 + m));
  }
  times_factors8(z, p.factors, p.gate_at + kb * 256 + lane * 8);
#pragma unroll
  for (int i = 0; i < 8; i++) o[i] = __fmul_rn(__fmul_rn(o[i], __fdiv_rn(1.f, l)), sigmoid(z[i]));
  quantise_block(o, r, kb, lane, p.act);
}
