// The best of the bests of a row.
struct P { zero: u32, groups: u32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> best: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read_write> chosen: array<vec2<u32>>;
var<workgroup> ranks: array<vec2<u32>, 256>;
@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  var rank = vec2(p.zero, 0xffffffffu);
  for (var k = i; k < p.groups; k += 256u) {
    let other = best[g.y * p.groups + k];
    if (before(other, rank)) { rank = other; }
  }
  ranks[i] = rank;
  for (var n = 128u; n > 0u; n = n >> 1u) {
    workgroupBarrier();
    if (i < n && before(ranks[i + n], ranks[i])) { ranks[i] = ranks[i + n]; }
  }
  if (i == 0u) { chosen[g.y] = ranks[0]; }
}
