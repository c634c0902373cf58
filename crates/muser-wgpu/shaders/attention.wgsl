// Attention in exact integers (`arith::attention`): a workgroup of 256 has BATCH query heads of one KV head of one row, and walks
// through one block of 256 positions, a position a thread, or through all blocks of the row where it has one partial result.
//
// A row's record in `step` says what it sees: positions p.seen_at .. record[12], whose blocks the table at record[p.table_at]
// names from block record[p.table_at + 1] on; OWN: then, as one block more, rows 0 .. record[15] of block record[14] of `own`.
struct P { zero: u32, heads: u32, kv_heads: u32, records_at: u32, table_at: u32, seen_at: u32, parts_at: u32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> queries: array<u32>;
@group(0) @binding(3) var<storage, read> factors: array<f32>;
@group(0) @binding(4) var<storage, read> kv: array<u32>;
@group(0) @binding(5) var<storage, read> own: array<u32>;
@group(0) @binding(6) var<storage, read_write> part_o: array<f32>;
@group(0) @binding(7) var<storage, read_write> part_l: array<f32>;

const WORDS: u32 = DIM / 4u;
const PLANE: u32 = 64u * DIM;
const HEAD_WORDS: u32 = 2u * DIGITS * PLANE + 512u;
// Results of a thread.
const VALUES: u32 = (BATCH * DIM + 255u) / 256u;

var<workgroup> q: array<u32, 2u * BATCH * WORDS>;
var<workgroup> probability: array<f32, 256u * BATCH>;
var<workgroup> code: array<i32, 256u * BATCH>;
var<workgroup> digit: array<vec2<u32>, 64u * BATCH>;
var<workgroup> largest: array<atomic<u32>, 4u * BATCH>;
var<workgroup> lane_sum: array<f32, 64u * BATCH>;
var<workgroup> unit_sum: array<f32, 4u * BATCH>;

fn kv_word(from_own: bool, at: u32) -> u32 {
  if (OWN && from_own) { return own[at]; }
  return kv[at];
}

@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  let record = p.records_at + g.y * 16u;
  let first = step[record + p.seen_at]; let end = step[record + 12u];
  let first_block = first / 256u;
  let context_blocks = (end + 255u) / 256u - min(first_block, (end + 255u) / 256u);
  let blocks = context_blocks + select(0u, 1u, OWN);
  let part0 = step[record + p.parts_at]; let parts = step[record + p.parts_at + 1u];
  if (g.x >= parts) { return; }
  let batches = p.heads / p.kv_heads / BATCH;
  let kv_head = g.z / batches;
  let head0 = kv_head * (p.heads / p.kv_heads) + (g.z % batches) * BATCH;
  for (var w = i; w < 2u * BATCH * WORDS; w += 256u) { q[w] = queries[(g.y * p.heads + head0) * 2u * WORDS + w]; }
  workgroupBarrier();

  var o: array<f32, VALUES>; var l = nothing();
  for (var v = 0u; v < VALUES; v++) { o[v] = nothing(); }
  var b = g.x; var b_end = g.x + 1u;
  if (parts == 1u) { b = 0u; b_end = blocks; }
  for (; b < b_end; b++) {
    let from_own = OWN && b == context_blocks;
    var block = 0u; var visible = false;
    if (from_own) {
      block = step[record + 14u];
      visible = i < step[record + 15u];
    } else {
      block = step[step[record + p.table_at] + first_block + b - step[record + p.table_at + 1u]];
      let position = (first_block + b) * 256u + i;
      visible = position >= first && position < end;
    }
    let base = (block * p.kv_heads + kv_head) * HEAD_WORDS;
    let scales = base + 2u * DIGITS * PLANE;
    if (i < 4u * BATCH) { atomicStore(&largest[i], 0u); }

    var high: array<i32, BATCH>; var mixed: array<i32, BATCH>;
    for (var w = 0u; w < WORDS; w++) {
      let kh = kv_word(from_own, base + w * 256u + i);
      var kl = 0u;
      if (DIGITS == 2u) { kl = kv_word(from_own, base + PLANE + w * 256u + i); }
      for (var h = 0u; h < BATCH; h++) {
        let qh = q[h * 2u * WORDS + w]; let ql = q[h * 2u * WORDS + WORDS + w];
        high[h] += dot4(qh, kh);
        mixed[h] += dot4(ql, kh);
        if (DIGITS == 2u) { mixed[h] += dot4(qh, kl); }
      }
    }
    workgroupBarrier();
    let dk = bitcast<f32>(kv_word(from_own, scales + i));
    let dv = bitcast<f32>(kv_word(from_own, scales + 256u + i));
    var scaled: array<f32, BATCH>;
    for (var h = 0u; h < BATCH; h++) {
      var x = 0.0f; scaled[h] = 0.0f;
      let f = factors[g.y * p.heads + head0 + h];
      if (visible && is_finite(f)) {
        x = exp2_exact(mul(mul(f32(256 * high[h] + mixed[h]), dk), f));
        scaled[h] = mul(x, dv);
        atomicMax(&largest[h * 4u + i / 64u], bitcast<u32>(scaled[h]));
      }
      probability[h * 256u + i] = x;
    }
    workgroupBarrier();
    for (var h = 0u; h < BATCH; h++) {
      let exponent = atomicLoad(&largest[h * 4u + i / 64u]) >> 23u;
      var c = 0;
      if (exponent >= 17u) { c = nearest(mul(scaled[h], bitcast<f32>((267u - exponent) << 23u))); }
      code[h * 256u + i] = c;
    }
    for (var s = i; s < 64u * BATCH; s += 256u) {
      // Lane s % 16 of unit s / 16 % 4 of head s / 64.
      let at = (s / 64u) * 256u + ((s / 16u) % 4u) * 64u + s % 16u;
      var sum = add(nothing(), probability[at]);
      sum = add(sum, probability[at + 16u]);
      sum = add(sum, probability[at + 32u]);
      lane_sum[s] = add(sum, probability[at + 48u]);
    }
    workgroupBarrier();
    for (var s = i; s < 64u * BATCH; s += 256u) {
      let c = vec4(code[4u * s], code[4u * s + 1u], code[4u * s + 2u], code[4u * s + 3u]);
      let hi = bitcast<vec4<u32>>((c + vec4(128)) >> vec4(8u)) & vec4(255u);
      let lo = bitcast<vec4<u32>>(c) & vec4(255u);
      digit[s] = vec2(hi.x | (hi.y << 8u) | (hi.z << 16u) | (hi.w << 24u), lo.x | (lo.y << 8u) | (lo.z << 16u) | (lo.w << 24u));
    }
    for (var n = 8u; n > 0u; n = n >> 1u) {
      for (var s = i; s < 64u * BATCH; s += 256u) {
        if (s % 16u < n) { lane_sum[s] = add(lane_sum[s], lane_sum[s + n]); }
      }
      workgroupBarrier();
    }
    if (i < 4u * BATCH) { unit_sum[i] = lane_sum[i * 16u]; }

    for (var v = 0u; v < VALUES; v++) {
      let at = v * 256u + i;
      if (at < BATCH * DIM) {
        let h = at / DIM; let d = at % DIM;
        var sum = nothing();
        for (var u = 0u; u < 4u; u++) {
          let exponent = atomicLoad(&largest[h * 4u + u]) >> 23u;
          if (exponent < 17u) { continue; }
          var t = 0; var m = 0;
          for (var j = 0u; j < 16u; j++) {
            let x = digit[h * 64u + u * 16u + j];
            let vh = kv_word(from_own, base + DIGITS * PLANE + (u * 16u + j) * DIM + d);
            t += dot4(x.x, vh);
            m += dot4(x.y, vh);
            if (DIGITS == 2u) { m += dot4(x.x, kv_word(from_own, base + 3u * PLANE + (u * 16u + j) * DIM + d)); }
          }
          let weight = bitcast<f32>((exponent - 13u + select(0u, 8u, DIGITS == 2u)) << 23u);
          sum = exact_fma(f32(256 * t + m), weight, sum);
        }
        o[v] = add(o[v], sum);
      }
    }
    workgroupBarrier();
    if (i < BATCH) {
      var sum = nothing();
      for (var u = 0u; u < 4u; u++) { sum = add(sum, unit_sum[i * 4u + u]); }
      l = add(l, sum);
    }
  }
  let to = ((part0 + g.x) * p.heads + head0);
  for (var v = 0u; v < VALUES; v++) {
    let at = v * 256u + i;
    if (at < BATCH * DIM) { part_o[to * DIM + at] = o[v]; }
  }
  if (i < BATCH) { part_l[to + i] = l; }
}
