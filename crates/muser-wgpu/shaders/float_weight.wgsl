// Value `e` of the row of float weights at byte `row`. FLOAT: 0 F32, 1 F16, 2 BF16.
fn float_weight(row: u32, e: u32) -> f32 {
  if (FLOAT == 0u) { return bitcast<f32>(weights[row / 4u + e]); }
  let a = row + 2u * e;
  let bits = (weights[a >> 2u] >> ((a & 2u) * 8u)) & 0xffffu;
  if (FLOAT == 1u) { return half(bits); }
  return bitcast<f32>(bits << 16u);
}
