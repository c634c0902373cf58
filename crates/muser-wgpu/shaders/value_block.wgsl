// Value `e` of the row of blocks at byte `row`, rounded like the scalar definition (`muser_gguf::dequantize_row`).
fn value_at(row: u32, e: u32) -> f32 {
  let b = row + (e / BLOCK_LEN) * BLOCK_BYTES; let k = e % BLOCK_LEN;
  let h = k / 16u;
  let q = f32(signed_byte(half_codes(b, h)[(k % 16u) / 4u], k));
  let s = half_scales(b, h);
  let f = block_factors(b, h);
  if (BLOCK_LEN < 256u) {
    let v = mul(f.x, q);
    if (MINS) { return add(v, f.y); }
    return v;
  }
  let v = mul(mul(f.x, f32(s.x)), q);
  if (MINS) { return add(v, negated(mul(f.y, f32(s.y)))); }
  return v;
}
