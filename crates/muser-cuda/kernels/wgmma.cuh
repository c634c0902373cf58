// Warpgroup multiplication (sm_90a): its ordering, and how operands in shared memory are described.
#pragma once
#include "common.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Rows of 128 bytes, 128-byte swizzle, 8 rows every 1,024 bytes; rows of 64 bytes, 64-byte swizzle, 8 rows every 512; rows of 32
// bytes, 32-byte swizzle (the halves of rows 4 to 7 of 8 change places), 8 rows every 256.
DEVICE u64 rows_128(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
DEVICE u64 rows_64(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 32ull << 32 | 2ull << 62; }
DEVICE u64 rows_32(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 16ull << 32 | 3ull << 62; }
