// The new residual stream and its norm, quantised: a workgroup for 256 values of a row. MODE as in norm_sums.wgsl; STORE: the new
// residual stream is kept; ROW: the normed row is kept as well.
struct P { zero: u32, width: u32, segments: u32, count_at: u32, rows_at: u32, first: u32, blocks: u32, forms: u32, small_at: u32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> factors: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> o: array<f32>;
@group(0) @binding(4) var<storage, read> post: array<f32>;
@group(0) @binding(5) var<storage, read> weight: array<f32>;
@group(0) @binding(6) var<storage, read_write> h: array<f32>;
@group(0) @binding(7) var<storage, read_write> codes: array<u32>;
@group(0) @binding(8) var<storage, read_write> figures: array<u32>;
@group(0) @binding(9) var<storage, read_write> floats: array<f32>;
@group(0) @binding(10) var<storage, read_write> normed: array<f32>;
// A product of few rows leaves a sum for each K segment.
fn segments_of(all: u32) -> u32 { return select(1u, all, step[p.count_at] <= 16u); }

@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  var row = g.y;
  if (p.rows_at != 0u) { row = step[p.rows_at + p.first + g.y]; }
  let e = g.x * 256u + i;
  let at = row * p.width + e;
  let f = factors[g.y];
  var x = h[at];
  if (MODE != 0u) {
    var v = o[at];
    for (var s = 1u; s < segments_of(p.segments); s++) { v = add(v, o[s * step[p.count_at] * p.width + at]); }
    if (MODE == 1u) { x = exact_fma(f.x, mul(v, post[e]), x); } else { x = add(x, v); }
    if (STORE) { h[at] = x; }
  }
  let y = mul(mul(x, f.y), weight[e]);
  if (ROW) { normed[g.y * p.width + e] = y; }
  quantise(y, g.y, g.x, i);
}
