// The residual stream of all rows as one part of a draft's features, quantised.
struct P { zero: u32, width: u32, first_block: u32, blocks: u32, forms: u32, small_at: u32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> h: array<f32>;
@group(0) @binding(2) var<storage, read_write> codes: array<u32>;
@group(0) @binding(3) var<storage, read_write> figures: array<u32>;
@group(0) @binding(4) var<storage, read_write> floats: array<f32>;
@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  quantise(h[g.y * p.width + g.x * 256u + i], g.y, p.first_block + g.x, i);
}
