// Products of float weights: 16 sums by k % 16, each a chain of fma, ascending, then a tree. A workgroup has 16 weight rows and
// TOKENS activation rows.
struct P { zero: u32, row_bytes: u32, rows: u32, blocks: u32, segments: u32, width: u32, first_row: u32, count_at: u32, small_at: u32, scale: f32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> weights: array<u32>;
@group(0) @binding(3) var<storage, read> floats: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
var<workgroup> lanes: array<f32, 256 * TOKENS>;

@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  let count = step[p.count_at];
  let token0 = g.y * TOKENS; let lane = i % 16u;
  let row = min(g.x * 16u + i / 16u, p.rows - 1u);
  let k = p.blocks * 256u;
  var acc: array<f32, TOKENS>;
  for (var t = 0u; t < TOKENS; t++) { acc[t] = nothing(); }
  for (var e = lane; e < k; e += 16u) {
    let w = float_weight(row * p.row_bytes, e);
    for (var t = 0u; t < TOKENS; t++) {
      acc[t] = exact_fma(w, floats[min(token0 + t, count - 1u) * k + e], acc[t]);
    }
  }
  for (var t = 0u; t < TOKENS; t++) { lanes[t * 256u + i] = acc[t]; }
  workgroupBarrier();
  for (var step = 8u; step > 0u; step = step >> 1u) {
    if (lane < step) {
      for (var t = 0u; t < TOKENS; t++) { lanes[t * 256u + i] = add(lanes[t * 256u + i], lanes[t * 256u + i + step]); }
    }
    workgroupBarrier();
  }
  if (lane != 0u || g.x * 16u + i / 16u >= p.rows) { return; }
  for (var t = 0u; t < TOKENS; t++) {
    if (token0 + t < count) {
      var v = lanes[t * 256u + i];
      if (SCALED) { v = mul(v, p.scale); }
      out[(token0 + t) * p.width + p.first_row + row] = v;
    }
  }
}
