// Quantising 256 values of a row, one a thread of a workgroup of 256: int8 codes with a scale a 256 values and a sum a 32, int8
// codes with a scale a 32 values, and the values themselves, as far as `p.forms` (1, 2, 4) asks for them.
//
//   codes   [rows][blocks][64 words], then from p.small_at the same with a scale per 32
//   figures [rows]{ d [blocks], sums of 32 codes [blocks][8], d of 32 values [blocks][8] }
//   floats  [rows][blocks][256]
var<workgroup> quant_largest: array<atomic<u32>, 9>;
var<workgroup> quant_sums: array<atomic<i32>, 8>;
var<workgroup> quant_codes: array<i32, 256>;

fn quant_inverse(largest: u32) -> f32 {
  if (largest == 0u || largest >= 0x7f800000u) { return 0.0f; }
  return divide(127.0f, bitcast<f32>(largest));
}
fn quant_scale(largest: u32, inverse: f32) -> f32 {
  if (largest >= 0x7f800000u) { return nan(); }
  if (!is_finite(inverse)) { return 0.0f; }
  return divide(bitcast<f32>(largest), 127.0f);
}
fn quant_code(x: f32, largest: u32, inverse: f32) -> i32 {
  if (largest >= 0x7f800000u || !is_finite(inverse)) { return 0; }
  return nearest(mul(x, inverse));
}
fn quant_word(i: u32) -> u32 {
  let c = vec4(quant_codes[4u * i], quant_codes[4u * i + 1u], quant_codes[4u * i + 2u], quant_codes[4u * i + 3u]);
  let b = bitcast<vec4<u32>>(c) & vec4(255u);
  return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}

fn quantise(x: f32, row: u32, block: u32, i: u32) {
  let at = row * p.blocks + block;
  if ((p.forms & 4u) != 0u) { floats[at * 256u + i] = x; }
  if ((p.forms & 3u) == 0u) { return; }
  if (i < 9u) { atomicStore(&quant_largest[i], 0u); }
  if (i < 8u) { atomicStore(&quant_sums[i], 0); }
  workgroupBarrier();
  atomicMax(&quant_largest[0], magnitude(x));
  atomicMax(&quant_largest[1u + i / 32u], magnitude(x));
  workgroupBarrier();
  let figure = row * 17u * p.blocks;
  if ((p.forms & 1u) != 0u) {
    let largest = atomicLoad(&quant_largest[0]);
    let inverse = quant_inverse(largest);
    quant_codes[i] = quant_code(x, largest, inverse);
    atomicAdd(&quant_sums[i / 32u], quant_codes[i]);
    workgroupBarrier();
    if (i < 64u) { codes[at * 64u + i] = quant_word(i); }
    if (i < 8u) { figures[figure + p.blocks + block * 8u + i] = bitcast<u32>(atomicLoad(&quant_sums[i])); }
    if (i == 0u) { figures[figure + block] = bitcast<u32>(quant_scale(largest, inverse)); }
    workgroupBarrier();
  }
  if ((p.forms & 2u) != 0u) {
    let largest = atomicLoad(&quant_largest[1u + i / 32u]);
    let inverse = quant_inverse(largest);
    quant_codes[i] = quant_code(x, largest, inverse);
    workgroupBarrier();
    if (i < 64u) { codes[p.small_at + at * 64u + i] = quant_word(i); }
    if (i % 32u == 0u) {
      figures[figure + 9u * p.blocks + block * 8u + i / 32u] = bitcast<u32>(quant_scale(largest, inverse));
    }
  }
}
