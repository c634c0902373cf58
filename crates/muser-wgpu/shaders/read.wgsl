// Plain read: 16 bytes a thread and turn, eight loads in flight.
struct P { zero: u32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> memory: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> sink: array<u32>;
@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) l: u32) {
  let i = (g.y * 32768u + g.x) * 2048u + l;
  let s = memory[i] ^ memory[i + 256u] ^ memory[i + 512u] ^ memory[i + 768u] ^ memory[i + 1024u] ^ memory[i + 1280u]
    ^ memory[i + 1536u] ^ memory[i + 1792u];
  if ((s.x ^ s.y ^ s.z ^ s.w) == (0x9e3779b9u ^ p.zero)) { sink[0] = 1u; }
}
