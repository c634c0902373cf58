// Products of weight rows in the file's layout: every block type, any number of rows. A workgroup has 8 weight rows and TOKENS
// activation rows; 32 lanes of a weight row take a unit each (256 or 32 values, whose sum is one exact integer), their exact
// integers meet in workgroup memory, and one thread for each pair of rows adds them up in order, segment after segment.
struct P { zero: u32, row_bytes: u32, rows: u32, blocks: u32, segments: u32, width: u32, first_row: u32, count_at: u32, small_at: u32, scale: f32 }
@group(0) @binding(0) var<uniform> p: P;
@group(0) @binding(1) var<storage, read> step: array<u32>;
@group(0) @binding(2) var<storage, read> weights: array<u32>;
@group(0) @binding(3) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> figures: array<u32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

var<workgroup> sums: array<i32, 256 * TOKENS>;
var<workgroup> mins: array<i32, 256 * TOKENS>;
var<workgroup> factors: array<vec2<f32>, 256>;

fn dot16(a: vec4<u32>, b: vec4<u32>) -> i32 { return dot4(a.x, b.x) + dot4(a.y, b.y) + dot4(a.z, b.z) + dot4(a.w, b.w); }

@compute @workgroup_size(256) fn main(@builtin(workgroup_id) g: vec3<u32>, @builtin(local_invocation_index) i: u32) {
  let count = step[p.count_at];
  let token0 = g.y * TOKENS;
  let lane = i % 32u;
  let row = min(g.x * 8u + i / 32u, p.rows - 1u);
  // As a chain of sums: 8 weight rows x TOKENS.
  let own_row = i / TOKENS; let own_token = i % TOKENS;
  let token = min(token0 + own_token, count - 1u);
  let figure = token * 17u * p.blocks;
  var total = 0.0f;
  for (var s = 0u; s < p.segments; s++) {
    let end = (p.blocks * (s + 1u) / p.segments) * (256u / UNIT);
    var acc = nothing();
    for (var base = (p.blocks * s / p.segments) * (256u / UNIT); base < end; base += 32u) {
      let unit = base + lane;
      if (unit < end) {
        let b = row * p.row_bytes + (unit * UNIT / BLOCK_LEN) * BLOCK_BYTES;
        factors[i] = block_factors(b, 0u);
        var isum: array<i32, TOKENS>; var msum: array<i32, TOKENS>;
        for (var h = 0u; h < UNIT / 16u; h++) {
          let at = b + h / (BLOCK_LEN / 16u) * BLOCK_BYTES;
          let q = half_codes(at, h % (BLOCK_LEN / 16u));
          let sc = half_scales(at, h % (BLOCK_LEN / 16u));
          for (var t = 0u; t < TOKENS; t++) {
            let x = codes[p.small_at / 4u + min(token0 + t, count - 1u) * p.blocks * 16u + unit * (UNIT / 16u) + h];
            let sum = dot16(q, x);
            isum[t] += sc.x * sum;
            if (WIDE) { msum[t] += sc.y * sum; }
            if (MINS) { msum[t] += sc.y * dot16(vec4(0x01010101u), x); }
          }
        }
        for (var t = 0u; t < TOKENS; t++) {
          sums[i * TOKENS + t] = isum[t];
          if (MINS || WIDE) { mins[i * TOKENS + t] = msum[t]; }
        }
      }
      workgroupBarrier();
      if (own_row < 8u) {
        let units = min(32u, end - base);
        for (var u = 0u; u < units; u++) {
          let at = own_row * 32u + u;
          let f = factors[at];
          var d = 0.0f;
          if (UNIT == 256u) { d = bitcast<f32>(figures[figure + base + u]); }
          else { d = bitcast<f32>(figures[figure + 9u * p.blocks + (base + u) * UNIT / 32u]); }
          if (WIDE) {
            // The activation's scale alone: the weights' are in the sum.
            acc = exact_fma(wide_term(sums[at * TOKENS + own_token], mins[at * TOKENS + own_token]), d, acc);
            continue;
          }
          acc = exact_fma(f32(sums[at * TOKENS + own_token]), mul(f.x, d), acc);
          if (MINS) {
            let m = f32(mins[at * TOKENS + own_token]);
            acc = exact_fma(select(m, negated(m), UNIT == 256u), mul(f.y, d), acc);
          }
        }
      }
      workgroupBarrier();
    }
    if (s == 0u) { total = acc; } else { total = add(total, acc); }
  }
  let weight_row = g.x * 8u + own_row;
  if (own_row < 8u && weight_row < p.rows && token0 + own_token < count) {
    if (SCALED) { total = mul(total, p.scale); }
    out[token * p.width + p.first_row + weight_row] = total;
  }
}
