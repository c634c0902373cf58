// What the bytes of every block type mean, 16 values ("half" of a group of 32) at a time: `half_codes` as int8 in four words,
// `half_scales` the integer scale and min of half `h` of the block at byte `b`, `block_factors` the float factors of both.
// A section for each type; the host takes the one that a kernel is for.

//! Q4_0
fn half_codes(b: u32, h: u32) -> vec4<u32> { let q = four_nibbles(b + 2u, h); return vec4(lowered(q.x, 0x08080808u), lowered(q.y, 0x08080808u), lowered(q.z, 0x08080808u), lowered(q.w, 0x08080808u)); }
fn half_scales(b: u32, h: u32) -> vec2<i32> { return vec2(1, 0); }
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b), 0.0f); }

//! Q4_1
fn half_codes(b: u32, h: u32) -> vec4<u32> { return four_nibbles(b + 4u, h); }
fn half_scales(b: u32, h: u32) -> vec2<i32> { return vec2(1, 1); }
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b), half_at(b + 2u)); }

//! Q5_0
fn half_codes(b: u32, h: u32) -> vec4<u32> { let bits = word_at(b + 2u) >> (16u * h); let q = four_nibbles(b + 6u, h) | (vec4(spread(bits), spread(bits >> 4u), spread(bits >> 8u), spread(bits >> 12u)) << vec4(4u)); return vec4(lowered(q.x, 0x10101010u), lowered(q.y, 0x10101010u), lowered(q.z, 0x10101010u), lowered(q.w, 0x10101010u)); }
fn half_scales(b: u32, h: u32) -> vec2<i32> { return vec2(1, 0); }
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b), 0.0f); }

//! Q5_1
fn half_codes(b: u32, h: u32) -> vec4<u32> { let bits = word_at(b + 4u) >> (16u * h); return four_nibbles(b + 8u, h) | (vec4(spread(bits), spread(bits >> 4u), spread(bits >> 8u), spread(bits >> 12u)) << vec4(4u)); }
fn half_scales(b: u32, h: u32) -> vec2<i32> { return vec2(1, 1); }
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b), half_at(b + 2u)); }

//! Q8_0
fn half_codes(b: u32, h: u32) -> vec4<u32> { return four_words(b + 2u + 16u * h); }
fn half_scales(b: u32, h: u32) -> vec2<i32> { return vec2(1, 0); }
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b), 0.0f); }

//! IQ4_NL
fn half_codes(b: u32, h: u32) -> vec4<u32> { let t = vec4(0xbfad9881u,0xf6eaddcfu,0x26190d01u,0x71594535u); let q = four_nibbles(b + 2u, h); return vec4(levels(t, q.x), levels(t, q.y), levels(t, q.z), levels(t, q.w)); }
fn half_scales(b: u32, h: u32) -> vec2<i32> { return vec2(1, 0); }
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b), 0.0f); }

//! MXFP4
fn half_codes(b: u32, h: u32) -> vec4<u32> { let t = vec4(0x03020100u,0x0c080604u,0xfdfeff00u,0xf4f8fafcu); let q = four_nibbles(b + 1u, h); return vec4(levels(t, q.x), levels(t, q.y), levels(t, q.z), levels(t, q.w)); }
fn half_scales(b: u32, h: u32) -> vec2<i32> { return vec2(1, 0); }
fn block_factors(b: u32, h: u32) -> vec2<f32> {
  let e = byte_at(b);
  return vec2(bitcast<f32>(select((max(e, 1u) - 1u) << 23u, 0x00200000u << min(e, 1u), e < 2u)), 0.0f);
}

//! NVFP4
fn half_codes(b: u32, h: u32) -> vec4<u32> { let at = b + 4u + 8u * h; let low = word_at(at); let high = word_at(at + 4u); let t = vec4(0x03020100u,0x0c080604u,0xfdfeff00u,0xf4f8fafcu); let q = vec4(low, high, low >> 4u, high >> 4u) & vec4(0x0f0f0f0fu); return vec4(levels(t, q.x), levels(t, q.y), levels(t, q.z), levels(t, q.w)); }
// The scale in steps of 2^-9 as two digits, 512 high + low: sums over 256 values need more than 32 bits.
fn half_scales(b: u32, h: u32) -> vec2<i32> {
  let x = byte_at(b + h) & 127u; let e = x >> 3u; let m = x & 7u;
  if (x == 127u) { return vec2(0, 0); }
  let s = i32(select((8u + m) << (max(e, 1u) - 1u), m, e == 0u));
  return vec2(s >> 9u, s & 511);
}
fn block_factors(b: u32, h: u32) -> vec2<f32> {
  // Half of an E4M3 number without its sign, NaN taken as 0; m / 8 * 2^(e - 7) / 2 is a normal number.
  let x = byte_at(b + h) & 127u; let e = x >> 3u; let m = x & 7u;
  if (x == 127u || x == 0u) { return vec2(0.0f, 0.0f); }
  if (e > 0u) { return vec2(bitcast<f32>(((e + 119u) << 23u) | (m << 20u)), 0.0f); }
  let shift = countLeadingZeros(m) - 8u;
  return vec2(bitcast<f32>(((140u - shift) << 23u) | ((m << shift) & 0x7fffffu)), 0.0f);
}

//! Q2_K
fn half_codes(b: u32, h: u32) -> vec4<u32> { let at = b + 16u + 32u * (h >> 3u) + 16u * (h & 1u); return (four_words(at) >> vec4(2u * ((h >> 1u) & 3u))) & vec4(0x03030303u); }
fn half_scales(b: u32, h: u32) -> vec2<i32> { let s = byte_at(b + h); return vec2(i32(s & 15u), i32(s >> 4u)); }
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b + 80u), half_at(b + 82u)); }

//! Q3_K
fn half_codes(b: u32, h: u32) -> vec4<u32> { let low = (four_words(b + 32u + 32u * (h >> 3u) + 16u * (h & 1u)) >> vec4(2u * ((h >> 1u) & 3u))) & vec4(0x03030303u); let high = (four_words(b + 16u * (h & 1u)) >> vec4(h >> 1u)) & vec4(0x01010101u); let q = low | (high << vec4(2u)); return vec4(lowered(q.x, 0x04040404u), lowered(q.y, 0x04040404u), lowered(q.z, 0x04040404u), lowered(q.w, 0x04040404u)); }
fn half_scales(b: u32, h: u32) -> vec2<i32> {
  let low = (byte_at(b + 96u + (h & 7u)) >> (4u * (h >> 3u))) & 15u;
  let high = (byte_at(b + 104u + (h & 3u)) >> (2u * (h >> 2u))) & 3u;
  return vec2(i32(low | (high << 4u)) - 32, 0);
}
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b + 108u), 0.0f); }

//! Q4_K
fn half_codes(b: u32, h: u32) -> vec4<u32> { return four_nibbles(b + 16u + 32u * (h >> 2u) + 16u * (h & 1u), (h >> 1u) & 1u); }
fn half_scales(b: u32, h: u32) -> vec2<i32> { return k4_scale_min(b + 4u, h >> 1u); }
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b), half_at(b + 2u)); }

//! Q5_K
fn half_codes(b: u32, h: u32) -> vec4<u32> { let high = (four_words(b + 16u + 16u * (h & 1u)) >> vec4(h >> 1u)) & vec4(0x01010101u); return four_nibbles(b + 48u + 32u * (h >> 2u) + 16u * (h & 1u), (h >> 1u) & 1u) | (high << vec4(4u)); }
fn half_scales(b: u32, h: u32) -> vec2<i32> { return k4_scale_min(b + 4u, h >> 1u); }
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b), half_at(b + 2u)); }

//! Q6_K
fn half_codes(b: u32, h: u32) -> vec4<u32> { let low = four_nibbles(b + 64u * (h >> 3u) + 16u * (h & 3u), (h >> 2u) & 1u); let high = (four_words(b + 128u + 32u * (h >> 3u) + 16u * (h & 1u)) >> vec4(2u * ((h >> 1u) & 3u))) & vec4(0x03030303u); let q = low | (high << vec4(4u)); return vec4(lowered(q.x, 0x20202020u), lowered(q.y, 0x20202020u), lowered(q.z, 0x20202020u), lowered(q.w, 0x20202020u)); }
fn half_scales(b: u32, h: u32) -> vec2<i32> { return vec2(signed_byte(byte_at(b + 192u + h), 0u), 0); }
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b + 208u), 0.0f); }

//! IQ4_XS
fn half_codes(b: u32, h: u32) -> vec4<u32> { let t = vec4(0xbfad9881u,0xf6eaddcfu,0x26190d01u,0x71594535u); let q = four_nibbles(b + 8u + 16u * (h >> 1u), h & 1u); return vec4(levels(t, q.x), levels(t, q.y), levels(t, q.z), levels(t, q.w)); }
fn half_scales(b: u32, h: u32) -> vec2<i32> {
  let j = h >> 1u;
  let low = (byte_at(b + 4u + (j >> 1u)) >> (4u * (j & 1u))) & 15u;
  let high = (half_bits(b + 2u) >> (2u * j)) & 3u;
  return vec2(i32(low | (high << 4u)) - 32, 0);
}
fn block_factors(b: u32, h: u32) -> vec2<f32> { return vec2(half_at(b), 0.0f); }
