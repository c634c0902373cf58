// h = h * r: the embedding's norm, which has no weight.
struct P { zero: u32, width: u32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> factors: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read_write> h: array<f32>;
@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  let at = g.y * p.width + g.x * 256u + i;
  h[at] = mul(h[at], factors[g.y].y);
}
