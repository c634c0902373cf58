// Factors of a row's norms: (c of the post-norm, r of the norm). MODE 0: r of the row; 1: both, of the residual stream and a product
// that is added to it after its post-norm, from one pass; 2: r of the sum of both.
struct P { zero: u32, width: u32, segments: u32, count_at: u32, rows_at: u32, first: u32, eps: f32, post_eps: f32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> h: array<f32>;
@group(0) @binding(3) var<storage, read> o: array<f32>;
@group(0) @binding(4) var<storage, read> post: array<f32>;
@group(0) @binding(5) var<storage, read_write> factors: array<vec2<f32>>;
// A product of few rows leaves a sum for each K segment.
fn segments_of(all: u32) -> u32 { return select(1u, all, step[p.count_at] <= 16u); }

fn product_at(row: u32, at: u32) -> f32 {
  var v = o[row * p.width + at];
  for (var s = 1u; s < segments_of(p.segments); s++) { v = add(v, o[(s * step[p.count_at] + row) * p.width + at]); }
  return v;
}
fn row_term(row: u32, at: u32, sums: vec4<f32>) -> vec4<f32> {
  let x = h[row * p.width + at];
  if (MODE == 1u) {
    let v = product_at(row, at);
    let u = mul(v, post[at]);
    return vec4(exact_fma(v, v, sums.x), exact_fma(x, x, sums.y), exact_fma(x, u, sums.z), exact_fma(u, u, sums.w));
  }
  var y = x;
  if (MODE == 2u) { y = add(x, product_at(row, at)); }
  return vec4(sums.x, exact_fma(y, y, sums.y), sums.z, sums.w);
}
@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  var row = g.y;
  if (p.rows_at != 0u) { row = step[p.rows_at + p.first + g.y]; }
  let s = row_sums(row, p.width, i);
  if (i != 0u) { return; }
  let len = f32(p.width);
  if (MODE == 1u) {
    let c = inverse_rms(s.x, len, p.post_eps);
    var square = exact_fma(mul(c, c), s.w, exact_fma(mul(2.0f, c), s.z, s.y));
    if (is_nan(square) || (bitcast<u32>(square) >> 31u) != 0u) { square = nothing(); }
    factors[g.y] = vec2(c, inverse_rms(square, len, p.eps));
  } else {
    factors[g.y] = vec2(nothing(), inverse_rms(s.y, len, p.eps));
  }
}
