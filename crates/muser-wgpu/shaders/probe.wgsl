// Single operations on many inputs, against the processor (probe.rs). OPERATION says which.
struct P { zero: u32, operation: u32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> inputs: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> results: array<u32>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let v = inputs[g.x];
  let a = bitcast<f32>(v.x); let b = bitcast<f32>(v.y); let c = bitcast<f32>(v.z);
  results[g.x] = operation(v, a, b, c);
}
