// The largest logits of a row, in order, for a host that samples from them and needs nothing else of the row.
//
// Keys are those of `rank_of`: larger logit, then smaller id; all different. A CTA holds 8,192 keys in registers and finds
// the smallest of the wanted ones bit by bit, counting keys at least as large: no histogram, no order of arrival, one
// result. First every 8,192 logits by themselves, then what these put out, which is then sorted.
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int KEYS = 8;

struct SelectArgs {
  const float* logits;  // [rows][vocab]
  const u32* counts;    // per row: how many are wanted, at most `most`; 0: none
  u64* chosen;          // [rows][chunks][most], zeros behind what there is
  u64* sorted;          // [rows][most], the largest first, zeros behind
  u32 vocab, chunks, most;
};

// Keys of the CTA that are at least `low`. `red` is used in turn, so that one barrier is enough.
DEVICE u32 count_from(const u64 (&key)[KEYS], u64 low, u32 (&red)[2][32], int turn) {
  u32 n = 0;
#pragma unroll
  for (int i = 0; i < KEYS; i++) n += key[i] >= low;
  n = __reduce_add_sync(~0u, n);
  if ((threadIdx.x & 31) == 0) red[turn & 1][threadIdx.x >> 5] = n;
  __syncthreads();
  return __reduce_add_sync(~0u, red[turn & 1][threadIdx.x & 31]);
}

// The largest value that at least `wanted` keys reach; 0 if there are fewer keys.
DEVICE u64 lowest_wanted(const u64 (&key)[KEYS], u32 wanted, u32 (&red)[2][32]) {
  u64 low = 0;
#pragma unroll 1
  for (int bit = 63; bit >= 0; bit--) {
    const u64 next = low | 1ull << bit;
    const u32 n = count_from(key, next, red, bit);
    if (n >= wanted) low = next;
    if (n == wanted) break;
  }
  return low;
}

// Grid (chunks, rows).
extern "C" __global__ void __launch_bounds__(THREADS) top_select(const __grid_constant__ SelectArgs p) {
  __shared__ u32 red[2][32], taken;
  pdl_launch();
  const u32 row = blockIdx.y, chunk = blockIdx.x, wanted = __ldcg(p.counts + row);
  if (threadIdx.x == 0) taken = 0;
  pdl_wait();
  if (wanted == 0) return;
  u64 key[KEYS];
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const u32 id = chunk * (THREADS * KEYS) + i * THREADS + threadIdx.x;
    key[i] = id < p.vocab ? rank_of(__ldcg(p.logits + (u64)row * p.vocab + id), id) : 0;
  }
  const u64 low = lowest_wanted(key, wanted, red);
  u64* out = p.chosen + ((u64)row * p.chunks + chunk) * p.most;
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    if (key[i] >= low && key[i] != 0) {
      const u32 at = atomicAdd(&taken, 1);
      // More than wanted only where several logits are not finite, which one tells as well.
      if (at < wanted) out[at] = key[i];
    }
  }
  __syncthreads();
  for (u32 at = taken + threadIdx.x; at < wanted; at += THREADS) out[at] = 0;
}

// Grid (rows). chunks * wanted is at most THREADS * KEYS, wanted at most 256.
extern "C" __global__ void __launch_bounds__(THREADS) top_merge(const __grid_constant__ SelectArgs p) {
  __shared__ u32 red[2][32], taken;
  __shared__ u64 found[256];
  pdl_launch();
  const u32 row = blockIdx.x, wanted = __ldcg(p.counts + row);
  if (threadIdx.x == 0) taken = 0;
  if (threadIdx.x < 256) found[threadIdx.x] = 0;
  pdl_wait();
  if (wanted == 0) return;
  u64 key[KEYS];
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const u32 at = i * THREADS + threadIdx.x;
    const bool there = at < p.chunks * wanted;
    key[i] = there ? __ldcg(p.chosen + ((u64)row * p.chunks + at / wanted) * p.most + at % wanted) : 0;
  }
  const u64 low = lowest_wanted(key, wanted, red);
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    if (key[i] >= low && key[i] != 0) {
      const u32 at = atomicAdd(&taken, 1);
      if (at < wanted) found[at] = key[i];
    }
  }
  __syncthreads();
  u64* out = p.sorted + (u64)row * p.most;
  if (threadIdx.x >= wanted) return;
  const u64 own = found[threadIdx.x];
  u32 larger = 0;
  for (u32 i = 0; i < wanted; i++) {
    // Equal ones: zeros, or several that are not finite.
    larger += found[i] > own || (found[i] == own && i < threadIdx.x);
  }
  out[larger] = own;
}
