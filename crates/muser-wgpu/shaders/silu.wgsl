// silu(gate) * up, quantised: a workgroup for 256 values of a row.
struct P { zero: u32, width: u32, segments: u32, up_segments: u32, count_at: u32, blocks: u32, forms: u32, small_at: u32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> gate: array<f32>;
@group(0) @binding(3) var<storage, read> up: array<f32>;
@group(0) @binding(4) var<storage, read_write> codes: array<u32>;
@group(0) @binding(5) var<storage, read_write> figures: array<u32>;
@group(0) @binding(6) var<storage, read_write> floats: array<f32>;
// A product of few rows leaves a sum for each K segment.
fn segments_of(all: u32) -> u32 { return select(1u, all, step[p.count_at] <= 16u); }
@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  let at = g.y * p.width + g.x * 256u + i;
  let next = step[p.count_at] * p.width;
  var a = gate[at];
  for (var s = 1u; s < segments_of(p.segments); s++) { a = add(a, gate[s * next + at]); }
  var b = up[at];
  for (var s = 1u; s < segments_of(p.up_segments); s++) { b = add(b, up[s * next + at]); }
  quantise(silu_times(a, b), g.y, g.x, i);
}
