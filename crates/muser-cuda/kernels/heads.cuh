// One head of a row with a warp, 4 of its 128 values a lane: norm, Hadamard matrix, digits
// (`muser_backend::arith::attention`), and where digits of K and V go in their block (attention_digits.cuh).
#pragma once
#include "common.cuh"

constexpr u32 PLANE = 256 * 128;  // bytes of one digit of K or V of a head in a block
template <int D> __device__ constexpr u32 v_at() { return D * PLANE; }
template <int D> __device__ constexpr u32 scales_at() { return 2 * D * PLANE; }
template <int D> __device__ constexpr u32 head_bytes() { return 2 * D * PLANE + 2048; }

// 1 / sqrt(mean of squares + eps): a run of 8 values is the even lane's chain, continued by the odd lane.
DEVICE float head_inverse_rms(const float (&x)[4], float eps) {
  float s = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) s = __fmaf_rn(x[i], x[i], s);
  s = __shfl_xor_sync(~0u, s, 1);
#pragma unroll
  for (int i = 0; i < 4; i++) s = __fmaf_rn(x[i], x[i], s);
#pragma unroll
  for (int o = 16; o > 1; o >>= 1) s = __fadd_rn(s, __shfl_xor_sync(~0u, s, o));
  return inverse_rms(__shfl_sync(~0u, s, 1), 128, eps);
}

// Of a head of 4 `lanes` values; `factor`: 1 / sqrt of its length.
DEVICE void hadamard_of(float (&x)[4], int lane, int lanes, float factor) {
  const float a = __fadd_rn(x[0], x[1]), b = __fsub_rn(x[0], x[1]), c = __fadd_rn(x[2], x[3]), d = __fsub_rn(x[2], x[3]);
  x[0] = __fadd_rn(a, c);
  x[1] = __fadd_rn(b, d);
  x[2] = __fsub_rn(a, c);
  x[3] = __fsub_rn(b, d);
#pragma unroll 1  // shorter code is faster here
  for (int o = 1; o < lanes; o <<= 1) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float other = __shfl_xor_sync(~0u, x[i], o);
      x[i] = lane & o ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = __fmul_rn(x[i], factor);
}
DEVICE void hadamard(float (&x)[4], int lane) { hadamard_of(x, lane, 32, 0.08838834764831845f); }

// Codes up to `top` and their scale; what is not finite has codes 0 and the scale `bad`.
DEVICE float head_codes(const float (&x)[4], float top, float bad, int (&codes)[4]) {
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) bits = max(bits, __float_as_uint(x[i]) & 0x7FFFFFFFu);
  bits = __reduce_max_sync(~0u, bits);
  const float largest = __uint_as_float(bits), inverse = bits ? __fdiv_rn(top, largest) : 0.f;
  const bool finite = bits < 0x7F800000u, good = finite && inverse <= 3.402823466e38f;
#pragma unroll
  for (int i = 0; i < 4; i++) codes[i] = good ? (int)(__float_as_uint(__fadd_rn(__fmul_rn(x[i], inverse), TO_INTEGER)) - __float_as_uint(TO_INTEGER)) : 0;
  return good ? __fdiv_rn(largest, top) : finite ? 0.f : bad;
}

DEVICE u32 high_digits(const int (&c)[4]) {
  const int h[4] = {(c[0] + 128) >> 8, (c[1] + 128) >> 8, (c[2] + 128) >> 8, (c[3] + 128) >> 8};
  return (h[0] & 255) | (h[1] & 255) << 8 | (h[2] & 255) << 16 | (u32)h[3] << 24;
}
DEVICE u32 low_digits(const int (&c)[4]) {
  return (c[0] & 255) | (c[1] & 255) << 8 | (c[2] & 255) << 16 | (u32)c[3] << 24;
}

// A rotated query's digits ([hi 128, lo 128]) and the factor of its scores.
DEVICE void store_query_digits(const float (&x)[4], u8* digits, float* f, float factor, int lane) {
  int codes[4];
  const float d = head_codes(x, 32639.f, __int_as_float(0x7FC00000), codes);
  *(u32*)(digits + lane * 4) = high_digits(codes);
  *(u32*)(digits + 128 + lane * 4) = low_digits(codes);
  if (lane == 0) *f = __fmul_rn(d, factor);
}
DEVICE void store_query(float (&x)[4], u8* digits, float* f, float factor, int lane) {
  hadamard(x, lane);
  store_query_digits(x, digits, f, factor, lane);
}

template <int D> DEVICE void store_key_digits(const float (&x)[4], u8* head, u32 inside, int lane) {
  int codes[4];
  const float d = head_codes(x, D == 2 ? 32639.f : 127.f, 0.f, codes);
  u8* k = head + inside * 128 + lane * 4;
  *(u32*)k = D == 2 ? high_digits(codes) : low_digits(codes);
  if (D == 2) *(u32*)(k + PLANE) = low_digits(codes);
  if (lane == 0) *(float*)(head + scales_at<D>() + inside * 4) = d;
}

template <int D> DEVICE void store_key(float (&x)[4], u8* head, u32 inside, int lane) {
  hadamard(x, lane);
  store_key_digits<D>(x, head, inside, lane);
}

template <int D> DEVICE void store_value(const float (&x)[4], u8* head, u32 inside, int lane) {
  int codes[4];
  const float d = head_codes(x, D == 2 ? 32639.f : 127.f, 0.f, codes);
  const u32 high = D == 2 ? high_digits(codes) : low_digits(codes), low = low_digits(codes);
  u8* v = head + v_at<D>() + lane * 4 * 256 + inside;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[i * 256] = (u8)(high >> 8 * i);
    if (D == 2) v[PLANE + i * 256] = (u8)(low >> 8 * i);
  }
  if (lane == 0) *(float*)(head + scales_at<D>() + 1024 + inside * 4) = d;
}
