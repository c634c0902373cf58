// Head norms, rotation, digits: queries to `q` [rows][heads][digits][DIM / 4] with the factor of their scores, K and V to their place
// in the blocks (`muser_backend::kv_layout`). KIND: 0 queries, 1 keys, 2 values. ROTATE: 0 none, 1 pairs (2 t, 2 t + 1), 2 pairs
// (t, t + DIM / 2). DIGITS: of K and V. A workgroup for a head of a row.
struct P { zero: u32, heads: u32, segments: u32, count_at: u32, slots_at: u32, slots_step: u32, blank: u32, eps: f32, factor: f32, hadamard: f32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> part: array<f32>;
@group(0) @binding(3) var<storage, read> weight: array<f32>;
@group(0) @binding(4) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read_write> to: array<atomic<u32>>;
@group(0) @binding(6) var<storage, read_write> factors: array<f32>;
// A product of few rows leaves a sum for each K segment.
fn segments_of(all: u32) -> u32 { return select(1u, all, step[p.count_at] <= 16u); }

const PLANE: u32 = 64u * DIM;
const HEAD_WORDS: u32 = 2u * DIGITS * PLANE + 512u;

@compute @workgroup_size(DIM) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  let width = p.heads * DIM;
  let at = g.y * width + g.x * DIM + i;
  var x = nothing();
  if (p.blank == 0u) {
    x = part[at];
    for (var s = 1u; s < segments_of(p.segments); s++) { x = add(x, part[s * step[p.count_at] * width + at]); }
  }
  head[i] = x;
  workgroupBarrier();
  if (KIND != 2u) {
    head_norm(i, weight[i], p.eps);
    if (ROTATE == 1u) { head_rotate(i, i & ~1u, i | 1u, (i & 1u) == 0u, angles[g.y * (DIM / 2u) + i / 2u]); }
    if (ROTATE == 2u) {
      let t = i % (DIM / 2u);
      head_rotate(i, t, t + DIM / 2u, i < DIM / 2u, angles[g.y * (DIM / 2u) + t]);
    }
    head_hadamard(i);
  }
  let top = select(127.0f, 32639.0f, KIND == 0u || DIGITS == 2u);
  let d = head_quantise(i, top, KIND == 0u);
  if (KIND == 0u) {
    let query = g.y * p.heads + g.x;
    if (i < DIM / 4u) {
      atomicStore(&to[query * (DIM / 2u) + i], high_word(i));
      atomicStore(&to[query * (DIM / 2u) + DIM / 4u + i], low_word(i));
    }
    if (i == 0u) { factors[query] = mul(d, p.factor); }
    return;
  }
  let slot = step[p.slots_at + g.y * p.slots_step];
  let inside = slot & 255u;
  let base = ((slot >> 8u) * p.heads + g.x) * HEAD_WORDS;
  if (KIND == 1u) {
    if (i < DIM / 4u) {
      if (DIGITS == 2u) {
        atomicStore(&to[base + i * 256u + inside], high_word(i));
        atomicStore(&to[base + PLANE + i * 256u + inside], low_word(i));
      } else {
        atomicStore(&to[base + i * 256u + inside], low_word(i));
      }
    }
    if (i == 0u) { atomicStore(&to[base + 2u * DIGITS * PLANE + inside], bitcast<u32>(d)); }
    return;
  }
  // Four positions share a word of V; other rows of the step may have the others.
  let shift = 8u * (inside & 3u);
  let v = base + DIGITS * PLANE + (inside >> 2u) * DIM + i;
  let c = head_codes[i];
  var high = low_digit(c);
  if (DIGITS == 2u) { high = high_digit(c); }
  atomicAnd(&to[v], ~(255u << shift));
  atomicOr(&to[v], high << shift);
  if (DIGITS == 2u) {
    atomicAnd(&to[v + PLANE], ~(255u << shift));
    atomicOr(&to[v + PLANE], low_digit(c) << shift);
  }
  if (i == 0u) { atomicStore(&to[base + 2u * DIGITS * PLANE + 256u + inside], bitcast<u32>(d)); }
}
