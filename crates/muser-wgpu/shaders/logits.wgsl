// logits = cap * tanh(scale * z / cap) of 256 values of a row, and the best of them.
struct P { zero: u32, width: u32, segments: u32, count_at: u32, groups: u32, scale: f32, cap: f32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> part: array<f32>;
@group(0) @binding(3) var<storage, read_write> logits: array<f32>;
@group(0) @binding(4) var<storage, read_write> best: array<vec2<u32>>;
// A product of few rows leaves a sum for each K segment.
fn segments_of(all: u32) -> u32 { return select(1u, all, step[p.count_at] <= 16u); }
var<workgroup> ranks: array<vec2<u32>, 256>;
@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  let id = g.x * 256u + i;
  var rank = vec2(0u, id);
  if (id < p.width) {
    let at = g.y * p.width + id;
    var z = part[at];
    for (var s = 1u; s < segments_of(p.segments); s++) { z = add(z, part[s * step[p.count_at] * p.width + at]); }
    z = mul(z, p.scale);
    if (CAPPED) { z = mul(p.cap, tanh_exact(divide(z, p.cap))); }
    logits[at] = z;
    rank.x = key_of(z);
  }
  ranks[i] = rank;
  for (var n = 128u; n > 0u; n = n >> 1u) {
    workgroupBarrier();
    if (i < n && before(ranks[i + n], ranks[i])) { ranks[i] = ranks[i + n]; }
  }
  if (i == 0u) { best[g.y * p.groups + g.x] = ranks[0]; }
}
