// Matrix products for 1 to 16 rows: each weight is read once, as fast as memory delivers it.
//
//   part[S][n_all][out_rows]: sums of the S segments of K; the kernel that consumes them adds them ascending.
//
// One CTA per SM. CTA c works on segment c mod S and stages only that segment's activations. Every warp is a worker of
// its own with a private ring of weight tiles in shared memory, filled by its own cp.async; the only CTA barrier is the
// one after staging. Row tiles are dealt out warp-major over CTAs, so that leftovers spread over all SMs. The rings are
// filled before the wait for the kernel before: weights depend on nothing.
//
// The schedule (warps, ring, which SM takes which tile) moves work and changes no operation, so it changes no bit.
#include "tiles.cuh"
#include "barriers.cuh"

// Two parts with types of their own may share a launch (attn_v beside q, k and gate): row tiles [0, tiles_a) from w_a,
// the rest from w_b.
struct FewArgs {
  const u8* w_a;
  const u8* w_b;
  Act act;
  float* part;
  u32 tiles_a, tiles_b;
  u32 kb, segments;
  u32 n, n_all;             // rows of this launch; rows of the output (stride from segment to segment)
  u32 first_row, out_rows;  // of tile 0 in the output; stride from row to row of the output
  u32 stages;               // slots of a warp's ring, 3 to 6
};

constexpr int WARPS = 16;
// Shared memory for a form of a single token's operands that takes 16 times the room of its codes, and registers for more warps.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool ROOMY = true;
#else
constexpr bool ROOMY = false;
#endif
constexpr int SINGLE_WARPS = ROOMY ? 20 : WARPS;

__device__ constexpr int max_tile(int a, int b) { return tile_bytes(a) > tile_bytes(b) ? tile_bytes(a) : tile_bytes(b); }

// Copies one segment's activations into shared memory; all reads are on their way together.
template <bool SMALL, int NT>
DEVICE void stage_activations(const FewArgs& p, u32 aq, u32 asum, float* ad, int qstride, int kb0, int L) {
  const int n = p.n;
  const i8* q = SMALL ? p.act.q32 : p.act.q;
  for (int i = threadIdx.x; i < n * L * 16; i += blockDim.x) {
    const int col = i / (L * 16), o = (i - col * L * 16) * 16;
    cp16(aq + col * qstride + o, q + (u64)col * p.act.k + (u64)kb0 * 256 + o);
  }
  if constexpr (SMALL) {
    for (int i = threadIdx.x; i < L * 8 * NT * 2; i += blockDim.x) {
      const int k = i / (8 * NT * 2), e = i - k * 8 * NT * 2, col = e >> 1;
      if (col < n) cp16(smem_u32(ad) + i * 16, p.act.d32 + ((u64)(kb0 + k) * p.act.ld + col) * 8 + (e & 1) * 4);
      else *(uint4*)((u8*)ad + i * 16) = make_uint4(0, 0, 0, 0);
    }
  } else {
    for (int i = threadIdx.x; i < n * L; i += blockDim.x) {
      const int k = i / n, col = i - k * n;
      cp16(asum + i * 16, p.act.sums + ((u64)(kb0 + k) * p.act.ld + col) * 16);
    }
    for (int i = threadIdx.x; i < L * 8 * NT; i += blockDim.x) {
      const int k = i / (8 * NT), col = i - k * 8 * NT;
      ad[i] = col < n ? __ldcg(p.act.d + (u64)(kb0 + k) * p.act.ld + col) : 0.f;
    }
  }
  cp_commit();
}

// The same for NVFP4, each four codes beside their negatives; those of a single token in the columns of their groups, between zeros
// that are there already.
template <int NT, bool ONE> DEVICE void stage_both(const FewArgs& p, u32 aq, float* ad, int qstride, int kb0, int L) {
  const int n = p.n;
  for (int i = threadIdx.x; i < n * L * 16; i += blockDim.x) {
    const int col = i / (L * 16), piece = i - col * L * 16;  // codes k = 4t .. 4t + 3 of four groups
    const uint4 x = __ldcg((const uint4*)(p.act.q + (u64)col * p.act.k + (u64)kb0 * 256 + piece * 16));
    if constexpr (ONE) {
      const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int h = 0; h < 4; h++) {
        const int group = (piece >> 2) * 4 + h;
        sts64(aq + group * 256 + (group & 7) * 32 + (piece & 3) * 8, make_uint2(words[h], negated4(words[h])));
      }
    } else {
      const u32 to = aq + col * qstride + piece * 32;
      sts128(to, make_uint4(x.x, negated4(x.x), x.y, negated4(x.y)));
      sts128(to + 16, make_uint4(x.z, negated4(x.z), x.w, negated4(x.w)));
    }
  }
  for (int i = threadIdx.x; i < L * 8 * NT; i += blockDim.x) {
    const int k = i / (8 * NT), col = i - k * 8 * NT;
    ad[i] = col < n ? __ldcg(p.act.d + (u64)(kb0 + k) * p.act.ld + col) : 0.f;
  }
}

// Waits until the oldest of `stages` loads of this warp has arrived.
DEVICE void wait_for_oldest(int stages) {
  if (stages == 3) cp_wait<2>();
  else if (stages == 4) cp_wait<3>();
  else if (stages == 5) cp_wait<4>();
  else cp_wait<5>();
}

// NTX: tiles of 8 tokens; 0 for a single token. QB: type of the second part, equal to QA when there is none.
template <int QA, int QB, int NTX> DEVICE void few(const FewArgs& p) {
  constexpr int NT = NTX ? NTX : 1;
  constexpr bool ONE = NTX == 0;
  constexpr int SLOT = max_tile(QA, QB);
  constexpr bool SMALL = QA == Q80;  // one activation scale per 32
  constexpr bool NEGATED = QA == NV4;
  // Bulk copies take fewer instructions, which are what NVFP4 lacks.
#if __CUDA_ARCH__ >= 900
  constexpr bool BULK = QA == NV4;
#else
  constexpr bool BULK = false;
#endif
  constexpr bool SINGLE = NEGATED && ONE && ROOMY;
  constexpr int BLOCK = SINGLE ? 4096 : NEGATED ? 512 : 256;  // bytes of a token's super-block
  extern __shared__ __align__(128) u8 sh[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, W = blockDim.x >> 5;
  pdl_launch();
  const int S = p.segments, kb = p.kb, n = p.n, stages = p.stages;
  const int seg = blockIdx.x % S, c = blockIdx.x / S, G = gridDim.x / S;
  const int kb0 = seg_begin(seg, kb, S), L = seg_begin(seg + 1, kb, S) - kb0;
  const int tiles = p.tiles_a + p.tiles_b, stride = G * W, first = warp * G + c;
  const int items = first < tiles ? (tiles - first + stride - 1) / stride : 0;
  const int total = items * L;

  const u32 ring = smem_u32(sh) + warp * stages * SLOT;
  u8* zero = sh + W * stages * SLOT;  // zero bytes: the operands of padded tokens
  const int qstride = L * BLOCK + (NEGATED ? 16 : 64);
  u8* aq = zero + BLOCK;
  u8* asum = aq + n * qstride;
  float* ad = (float*)(asum + (SMALL || NEGATED ? 0 : L * n * 16));
  const u32 scratch = smem_u32(ad) + L * 8 * NT * (SMALL ? 32 : 4) + warp * scratch_bytes(QA);

  // fill the ring
  int loaded = 0, load_kb = 0, load_slot = 0, load_tile = first;
  auto source = [&](int tile) {
    return QA == QB || tile < (int)p.tiles_a ? p.w_a + ((u64)tile * kb + kb0) * tile_bytes(QA)
                                             : p.w_b + ((u64)(tile - p.tiles_a) * kb + kb0) * tile_bytes(QB);
  };
  const u8* src = source(first);
  u32 load_at = ring;
  const u32 bars = scratch + 1024;  // one for each slot
  if constexpr (BULK) {
    if (lane == 0) {
      for (int i = 0; i < stages; i++) bar_init(bars + i * 8, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
  }
  auto issue = [&]() {
    if constexpr (BULK) {
      if (loaded < total && lane == 0) {
        bar_expect(bars + load_slot * 8, SLOT);
        bulk_load(load_at, src, SLOT, bars + load_slot * 8);
      }
    } else if (loaded < total) {
      const int bytes = QA == QB || load_tile < (int)p.tiles_a ? tile_bytes(QA) : tile_bytes(QB);
#pragma unroll
      for (int o = 0; o < SLOT; o += 512)
        if (o + lane * 16 < bytes) cp16(load_at + o + lane * 16, src + o + lane * 16);
    }
    if (!BULK) cp_commit();
    loaded++;
    src += QA == QB || load_tile < (int)p.tiles_a ? tile_bytes(QA) : tile_bytes(QB);
    load_at += SLOT;
    if (++load_kb == L) { load_kb = 0; load_tile += stride; src = source(load_tile); }
    if (++load_slot == stages) { load_slot = 0; load_at = ring; }
  };
  // One tile a warp at a time: whatever the kernels before this one still read would wait behind more.
  for (int i = 0; i < stages; i++) {
    issue();
    if (i + 1 == stages) break;
    if (!BULK) cp_wait<0>();
    else if (loaded <= total) bar_wait(bars + i * 8, 0);
  }
  for (int i = threadIdx.x; i < (SINGLE ? (L + 1) * 256 : BLOCK / 16); i += blockDim.x) *(uint4*)(zero + i * 16) = make_uint4(0, 0, 0, 0);
  if (SINGLE) __syncthreads();
  pdl_wait();

  if constexpr (NEGATED) stage_both<NT, ONE>(p, smem_u32(aq), ad, qstride, kb0, L);
  else stage_activations<SMALL, NT>(p, smem_u32(aq), smem_u32(asum), ad, qstride, kb0, L);
  if (!BULK) cp_wait<0>();  // the rings too: they were filled long ago
  __syncthreads();

  const int g = lane >> 2, t = lane & 3;
  u32 b0[NT], s0[NT];
  int bstep[NT], sstep[NT];
#pragma unroll
  for (int j = 0; j < NT; j++) {
    const bool on = j * 8 + g < n, son = on && t < 2 && !SMALL && !NEGATED;
    b0[j] = on ? smem_u32(aq) + (j * 8 + g) * qstride + t * (BLOCK / 16) : smem_u32(zero);
    bstep[j] = on ? BLOCK : 0;
    s0[j] = son ? smem_u32(asum) + (j * 8 + g) * 16 + t * 8 : smem_u32(zero);
    sstep[j] = son ? n * 16 : 0;
  }
  const u32 ad0 = smem_u32(ad);
  int slot = 0, parity = 0;
  u32 at = ring;
  for (int it = 0; it < items; it++) {
    const int tile = first + it * stride;
    float acc[1][NT][4];
    u32 b[NT], s[NT], dsc = ad0, own = smem_u32(aq) + lane * 8;
#pragma unroll
    for (int j = 0; j < NT; j++) {
      b[j] = b0[j]; s[j] = s0[j];
#pragma unroll
      for (int r = 0; r < 4; r++) acc[0][j][r] = 0.f;
    }
    for (int k = 0; k < L; k++) {
      if constexpr (BULK) {
        bar_wait(bars + slot * 8, parity);
      } else {
        wait_for_oldest(stages);
        __syncwarp();
      }
      if constexpr (SINGLE) nv4_single(at, own, dsc, lane, acc[0][0]);
      else if (QA == QB || tile < (int)p.tiles_a) tile_mul<QA, 1, NT, ONE, NEGATED>(at, 0, b, 0, s, dsc, scratch, lane, acc);
      else tile_mul<QB, 1, NT, ONE>(at, 0, b, 0, s, dsc, scratch, lane, acc);
      __syncwarp();
      issue();  // into the slot just read
      at += SLOT;
      if (++slot == stages) slot = 0, parity ^= 1, at = ring;
#pragma unroll
      for (int j = 0; j < NT; j++) { b[j] += bstep[j]; s[j] += sstep[j]; }
      dsc += (SMALL ? 256 : 32) * NT;
      own += BLOCK;
    }
    const u32 row = p.first_row + tile * 16 + g;
#pragma unroll
    for (int j = 0; j < NT; j++) {
      const int col = j * 8 + 2 * t;
      float* o = p.part + ((u64)seg * p.n_all + col) * p.out_rows + row;
      if (col < n) { o[0] = acc[0][j][0]; o[8] = acc[0][j][2]; }
      if (!ONE && col + 1 < n) { o[p.out_rows] = acc[0][j][1]; o[p.out_rows + 8] = acc[0][j][3]; }
    }
  }
}

#define FEW(name, qa, qb, ntx) \
  extern "C" __global__ void __launch_bounds__((qa == NV4 && ntx == 0 ? SINGLE_WARPS : WARPS) * 32, 1) name(const __grid_constant__ FewArgs p) { few<qa, qb, ntx>(p); }
#define FEW3(name, qa, qb) FEW(name##_1, qa, qb, 0) FEW(name##_8, qa, qb, 1) FEW(name##_16, qa, qb, 2)
FEW3(few_q4k, Q4K, Q4K)
FEW3(few_q5k, Q5K, Q5K)
FEW3(few_q6k, Q6K, Q6K)
FEW3(few_nv4, NV4, NV4)
FEW3(few_q80, Q80, Q80)
FEW3(few_q4k_q6k, Q4K, Q6K)
