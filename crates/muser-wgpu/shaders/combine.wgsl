// Partial results of attention added up, blocks ascending; divided, gated (GATED), quantised. A workgroup for 256 values of a row.
struct P { zero: u32, width: u32, heads: u32, segments: u32, count_at: u32, records_at: u32, parts_at: u32, blocks: u32, forms: u32, small_at: u32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> part_o: array<f32>;
@group(0) @binding(3) var<storage, read> part_l: array<f32>;
@group(0) @binding(4) var<storage, read> factors: array<f32>;
@group(0) @binding(5) var<storage, read> gate: array<f32>;
@group(0) @binding(6) var<storage, read_write> codes: array<u32>;
@group(0) @binding(7) var<storage, read_write> figures: array<u32>;
@group(0) @binding(8) var<storage, read_write> floats: array<f32>;
// A product of few rows leaves a sum for each K segment.
fn segments_of(all: u32) -> u32 { return select(1u, all, step[p.count_at] <= 16u); }
@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  let e = g.x * 256u + i;
  let head = e / DIM;
  let record = p.records_at + g.y * 16u + p.parts_at;
  let first = step[record]; let parts = step[record + 1u];
  var o = nothing(); var l = nothing();
  for (var part = first; part < first + parts; part++) {
    o = add(o, part_o[part * p.width + e]);
    l = add(l, part_l[part * p.heads + head]);
  }
  o = mul(o, divide(1.0f, l));
  if (!is_finite(factors[g.y * p.heads + head])) { o = nan(); }
  if (GATED) {
    let at = g.y * p.width + e;
    var z = gate[at];
    for (var s = 1u; s < segments_of(p.segments); s++) { z = add(z, gate[s * step[p.count_at] * p.width + at]); }
    o = mul(o, sigmoid(z));
  }
  quantise(o, g.y, g.x, i);
}
