// Rows of the embedding table, or rows that were put in, as they are: h [rows][width]. A slab of the table holds the rows from
// `first_row` on; `given`: this call also copies the rows that were put in.
struct P { zero: u32, width: u32, row_bytes: u32, first_row: u32, rows: u32, given: u32, inputs_at: u32, inputs_step: u32, scale: f32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> weights: array<u32>;
@group(0) @binding(3) var<storage, read> given: array<f32>;
@group(0) @binding(4) var<storage, read_write> h: array<f32>;
@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  let e = g.x * 256u + i;
  let input = step[p.inputs_at + g.y * p.inputs_step];
  if ((input >> 31u) != 0u) {
    if (p.given != 0u) { h[g.y * p.width + e] = given[(input & 0x7fffffffu) * p.width + e]; }
    return;
  }
  if (input < p.first_row || input - p.first_row >= p.rows) { return; }
  var v = value_at((input - p.first_row) * p.row_bytes, e);
  if (SCALED) { v = mul(v, p.scale); }
  h[g.y * p.width + e] = v;
}
