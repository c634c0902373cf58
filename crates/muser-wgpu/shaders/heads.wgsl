// A head of DIM values with a workgroup of DIM threads: norm, rotation, Hadamard matrix, digits.
var<workgroup> head: array<f32, DIM>;
var<workgroup> head_runs: array<f32, 32>;
var<workgroup> head_codes: array<i32, DIM>;
var<workgroup> head_largest: atomic<u32>;

fn tree32(i: u32) {
  for (var s = 16u; s > 0u; s = s >> 1u) {
    workgroupBarrier();
    if (i < s) { head_runs[i] = add(head_runs[i], head_runs[i + s]); }
  }
  workgroupBarrier();
}
// head = head * (1 / rms) * weight.
fn head_norm(i: u32, weight: f32, eps: f32) {
  for (var r = i; r < 32u; r += DIM) {
    var s = nothing();
    for (var k = 0u; k < 8u; k++) { if (r * 8u + k < DIM) { s = exact_fma(head[r * 8u + k], head[r * 8u + k], s); } }
    head_runs[r] = s;
  }
  tree32(i);
  // A row of sums has one block, whose sum is added to nothing, as a tree of blocks would.
  let r = inverse_rms(add(nothing(), head_runs[0]), f32(DIM), eps);
  head[i] = mul(mul(head[i], r), weight);
  workgroupBarrier();
}
fn head_rotate(i: u32, a: u32, b: u32, first: bool, angle: vec2<f32>) {
  let x = head[a]; let y = head[b];
  workgroupBarrier();
  if (first) { head[i] = add(mul(x, angle.x), negated(mul(y, angle.y))); }
  else { head[i] = add(mul(x, angle.y), mul(y, angle.x)); }
  workgroupBarrier();
}
fn head_hadamard(i: u32) {
  if ((DIM & (DIM - 1u)) != 0u) { return; }
  for (var h = 1u; h < DIM; h = h << 1u) {
    let x = head[i]; let other = head[i ^ h];
    workgroupBarrier();
    head[i] = select(add(x, other), add(other, negated(x)), (i & h) != 0u);
    workgroupBarrier();
  }
  head[i] = mul(head[i], p.hadamard);
  workgroupBarrier();
}
// Codes to `head_codes`; the scale, `bad` where something is not finite.
fn head_quantise(i: u32, top: f32, marks_nan: bool) -> f32 {
  if (i == 0u) { atomicStore(&head_largest, 0u); }
  workgroupBarrier();
  atomicMax(&head_largest, magnitude(head[i]));
  workgroupBarrier();
  let largest = atomicLoad(&head_largest);
  let finite = largest < 0x7f800000u;
  var inverse = 0.0f;
  if (finite && largest != 0u) { inverse = divide(top, bitcast<f32>(largest)); }
  let good = finite && is_finite(inverse);
  var code = 0;
  if (good) { code = nearest(mul(head[i], inverse)); }
  head_codes[i] = code;
  workgroupBarrier();
  if (good) { return divide(bitcast<f32>(largest), top); }
  if (!finite && marks_nan) { return nan(); }
  return 0.0f;
}
fn high_digit(c: i32) -> u32 { return bitcast<u32>((c + 128) >> 8u) & 255u; }
fn low_digit(c: i32) -> u32 { return bitcast<u32>(c) & 255u; }
fn high_word(w: u32) -> u32 {
  return high_digit(head_codes[4u * w]) | (high_digit(head_codes[4u * w + 1u]) << 8u) | (high_digit(head_codes[4u * w + 2u]) << 16u)
    | (high_digit(head_codes[4u * w + 3u]) << 24u);
}
fn low_word(w: u32) -> u32 {
  return low_digit(head_codes[4u * w]) | (low_digit(head_codes[4u * w + 1u]) << 8u) | (low_digit(head_codes[4u * w + 2u]) << 16u)
    | (low_digit(head_codes[4u * w + 3u]) << 24u);
}
