// Bytes of weights as they lie in the file.
fn byte_at(a: u32) -> u32 { return (weights[a >> 2u] >> ((a & 3u) * 8u)) & 255u; }
fn half_bits(a: u32) -> u32 { return byte_at(a) | (byte_at(a + 1u) << 8u); }
fn half_at(a: u32) -> f32 { return half(half_bits(a)); }
fn word_at(a: u32) -> u32 {
  let i = a >> 2u; let s = (a & 3u) * 8u;
  if (s == 0u) { return weights[i]; }
  return (weights[i] >> s) | (weights[i + 1u] << (32u - s));
}
// Four bits as the lowest of four bytes.
fn spread(b: u32) -> u32 { return ((b & 15u) * 0x00204081u) & 0x01010101u; }
// Subtracts `less` (the same in all four bytes) from four bytes below 128.
fn lowered(q: u32, less: u32) -> u32 { return ((q | 0x80808080u) - less) ^ 0x80808080u; }
fn signed_byte(v: u32, i: u32) -> i32 { return i32(v << (24u - 8u * (i & 3u))) >> 24u; }
// Four codes of four bits as four levels of a table of 16 int8.
fn level(table: vec4<u32>, q: u32) -> u32 { return (table[(q >> 2u) & 3u] >> ((q & 3u) * 8u)) & 255u; }
fn levels(table: vec4<u32>, q: u32) -> u32 {
  return level(table, q & 15u) | (level(table, (q >> 8u) & 15u) << 8u) | (level(table, (q >> 16u) & 15u) << 16u)
    | (level(table, (q >> 24u) & 15u) << 24u);
}
fn four_words(a: u32) -> vec4<u32> { return vec4(word_at(a), word_at(a + 4u), word_at(a + 8u), word_at(a + 12u)); }
fn four_nibbles(a: u32, h: u32) -> vec4<u32> { return (four_words(a) >> vec4(4u * h)) & vec4(0x0f0f0f0fu); }
fn k4_scale_min(s: u32, j: u32) -> vec2<i32> {
  if (j < 4u) { return vec2(i32(byte_at(s + j) & 63u), i32(byte_at(s + j + 4u) & 63u)); }
  let both = byte_at(s + j + 4u);
  return vec2(i32((both & 15u) | ((byte_at(s + j - 4u) >> 6u) << 4u)), i32((both >> 4u) | ((byte_at(s + j) >> 6u) << 4u)));
}
