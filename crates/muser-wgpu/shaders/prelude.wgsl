// The one place where floats are rounded: every operation of `muser_backend::arith`, rounded once.
//
// A driver may contract, reorder, flush and approximate. So each operation comes in several forms, and the host picks by probing
// the device (probe.rs): `native` takes the driver's operation, `guarded` takes it where nothing is subnormal, `corrected`
// mends it with `exact_fma`, `integers` needs no float operation at all. Results pass `pin`, an integer operation with a value
// that no compiler knows, so nothing is contracted or reordered across them. NaN and infinity are told by bits.
//
// Every kernel declares `p`, a uniform whose first member is `zero`, always 0.

fn pin(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) ^ p.zero); }
// +0 that no compiler knows: sums begin with it.
fn nothing() -> f32 { return bitcast<f32>(p.zero); }
fn negated(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) ^ 0x80000000u); }
fn magnitude(x: f32) -> u32 { return bitcast<u32>(x) & 0x7fffffffu; }
fn is_nan(x: f32) -> bool { return magnitude(x) > 0x7f800000u; }
fn is_finite(x: f32) -> bool { return magnitude(x) < 0x7f800000u; }
fn nan() -> f32 { return bitcast<f32>(0x7fc00000u ^ p.zero); }
// Subnormal, zero left out.
fn is_tiny(x: f32) -> bool { let m = magnitude(x); return m != 0u && m < 0x00800000u; }
fn is_small(x: f32) -> bool { return magnitude(x) < 0x00800000u; }

// --- integers of 64 bits as (low, high)
fn any_below(m: vec2<u32>, s: u32) -> bool {
  if (s >= 64u) { return (m.x | m.y) != 0u; }
  if (s >= 32u) { return m.x != 0u || (m.y & ((1u << (s - 32u)) - 1u)) != 0u; }
  return (m.x & ((1u << s) - 1u)) != 0u;
}
fn right(m: vec2<u32>, s: u32) -> vec2<u32> {
  if (s >= 64u) { return vec2(0u); }
  if (s >= 32u) { return vec2(m.y >> (s - 32u), 0u); }
  if (s == 0u) { return m; }
  return vec2((m.x >> s) | (m.y << (32u - s)), m.y >> s);
}
fn left(m: vec2<u32>, s: u32) -> vec2<u32> {
  if (s >= 32u) { return vec2(0u, m.x << (s - 32u)); }
  if (s == 0u) { return m; }
  return vec2(m.x << s, (m.y << s) | (m.x >> (32u - s)));
}
// Shifted right, with a last bit that says whether anything was lost.
fn sticky(m: vec2<u32>, s: u32) -> vec2<u32> {
  let r = right(m, s);
  return vec2(r.x | select(0u, 1u, any_below(m, s)), r.y);
}
fn plus(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  let low = a.x + b.x;
  return vec2(low, a.y + b.y + select(0u, 1u, low < a.x));
}
fn minus(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return vec2(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x)); }
fn at_least(a: vec2<u32>, b: vec2<u32>) -> bool { return a.y > b.y || (a.y == b.y && a.x >= b.x); }
// Product of two numbers below 2^24.
fn times24(a: u32, b: u32) -> vec2<u32> {
  let ah = a >> 12u; let al = a & 0xfffu; let bh = b >> 12u; let bl = b & 0xfffu;
  let middle = ah * bl + al * bh + ((al * bl) >> 12u);
  return vec2(a * b, (ah * bh + (middle >> 12u)) >> 8u);
}
// m * 2^e as f32, rounded to nearest, ties to even; m below 2^63, its last bit may stand for lost ones.
fn composed(sign: u32, m: vec2<u32>, e: i32) -> f32 {
  if ((m.x | m.y) == 0u) { return bitcast<f32>(sign << 31u); }
  let top = select(31 - i32(countLeadingZeros(m.x)), 63 - i32(countLeadingZeros(m.y)), m.y != 0u);
  let biased = top + e + 127;
  let shift = top - 23 + max(0, 1 - biased);
  var q = 0u;
  if (shift <= 0) {
    q = m.x << u32(-shift);
  } else if (shift < 64) {
    q = right(m, u32(shift)).x;
    let half = (right(m, u32(shift - 1)).x & 1u) != 0u;
    if (half && (any_below(m, u32(shift - 1)) || (q & 1u) != 0u)) { q += 1u; }
  }
  let joined = select(q, (u32(max(biased, 1) - 1) << 23u) + q, biased > 0);
  return bitcast<f32>((sign << 31u) | min(joined, 0x7f800000u));
}
// Mantissa of 24 bits and exponent: the value is x * 2^y; subnormals are normalised. Not for 0.
fn taken_apart(x: f32) -> vec2<i32> {
  let m = magnitude(x); let e = m >> 23u;
  if (e > 0u) { return vec2(i32((m & 0x7fffffu) | 0x800000u), i32(e) - 150); }
  let shift = countLeadingZeros(m) - 8u;
  return vec2(i32(m << shift), -149 - i32(shift));
}

// --- a * b + c by integers
fn fma_integers(a: f32, b: f32, c: f32) -> f32 {
  let ua = bitcast<u32>(a); let ub = bitcast<u32>(b); let uc = bitcast<u32>(c);
  let sp = (ua ^ ub) >> 31u; let sc = uc >> 31u;
  let zero_product = magnitude(a) == 0u || magnitude(b) == 0u;
  if (max(magnitude(a), max(magnitude(b), magnitude(c))) >= 0x7f800000u) {
    let product_infinite = magnitude(a) == 0x7f800000u || magnitude(b) == 0x7f800000u;
    if (is_nan(a) || is_nan(b) || is_nan(c) || (product_infinite && zero_product)) { return nan(); }
    if (product_infinite) {
      if (magnitude(c) == 0x7f800000u && sc != sp) { return nan(); }
      return bitcast<f32>((sp << 31u) | 0x7f800000u);
    }
    return c;
  }
  if (zero_product) {
    if (magnitude(c) == 0u) { return bitcast<f32>((sp & sc) << 31u); }
    return c;
  }
  let fa = (ua >> 23u) & 255u; let fb = (ub >> 23u) & 255u; let fc = (uc >> 23u) & 255u;
  let ma = (ua & 0x7fffffu) | select(0u, 0x800000u, fa > 0u);
  let mb = (ub & 0x7fffffu) | select(0u, 0x800000u, fb > 0u);
  let mc = (uc & 0x7fffffu) | select(0u, 0x800000u, fc > 0u);
  var mp = left(times24(ma, mb), 13u);
  var mq = left(vec2(mc, 0u), 37u);
  var e = i32(max(fa, 1u)) + i32(max(fb, 1u)) - 313;
  let eq = i32(max(fc, 1u)) - 187;
  if (mc != 0u && eq > e) { mp = sticky(mp, u32(eq - e)); e = eq; } else { mq = sticky(mq, u32(e - eq)); }
  var m = plus(mp, mq); var sign = sp;
  if (sp != sc) {
    if (at_least(mp, mq)) { m = minus(mp, mq); } else { m = minus(mq, mp); sign = sc; }
    if ((m.x | m.y) == 0u) { return bitcast<f32>(0u); }
  }
  return composed(sign, m, e);
}
fn mul_integers(a: f32, b: f32) -> f32 { return fma_integers(a, b, bitcast<f32>(0x80000000u)); }
fn add_integers(a: f32, b: f32) -> f32 { return fma_integers(a, bitcast<f32>(0x3f800000u), b); }
fn divide_integers(a: f32, b: f32) -> f32 {
  let sign = (bitcast<u32>(a) ^ bitcast<u32>(b)) >> 31u;
  let infinite_a = magnitude(a) == 0x7f800000u; let infinite_b = magnitude(b) == 0x7f800000u;
  let zero_a = magnitude(a) == 0u; let zero_b = magnitude(b) == 0u;
  if (is_nan(a) || is_nan(b) || (infinite_a && infinite_b) || (zero_a && zero_b)) { return nan(); }
  if (infinite_a || zero_b) { return bitcast<f32>((sign << 31u) | 0x7f800000u); }
  if (infinite_b || zero_a) { return bitcast<f32>(sign << 31u); }
  let x = taken_apart(a); let y = taken_apart(b);
  var rest = u32(x.x); let by = u32(y.x); var q = 0u;
  for (var i = 0; i < 27; i++) {
    q = q << 1u;
    if (rest >= by) { rest -= by; q |= 1u; }
    rest = rest << 1u;
  }
  return composed(sign, vec2((q << 1u) | select(0u, 1u, rest != 0u), 0u), x.y - y.y - 27);
}
fn root_integers(a: f32) -> f32 {
  if (is_nan(a) || magnitude(a) == 0u) { return a; }
  if ((bitcast<u32>(a) >> 31u) != 0u) { return nan(); }
  if (magnitude(a) == 0x7f800000u) { return a; }
  let x = taken_apart(a);
  let odd = (x.y & 1) != 0;
  let m = u32(x.x) << select(0u, 1u, odd);
  let e = select(x.y, x.y - 1, odd);
  var root = 0u; var rest = 0u;
  for (var i = 0u; i < 26u; i++) {
    var pair = 0u;
    if (i < 13u) { pair = (m >> (2u * (12u - i))) & 3u; }
    rest = (rest << 2u) | pair;
    let t = (root << 2u) | 1u;
    root = root << 1u;
    if (rest >= t) { rest -= t; root |= 1u; }
  }
  return composed(0u, vec2((root << 1u) | select(0u, 1u, rest != 0u), 0u), e / 2 - 14);
}

// --- exponentials and what is made of them
fn exp_exact(x: f32) -> f32 {
  if (is_nan(x)) { return nan(); }
  let low = -87.33654f; let high = 88.37626f;
  var c = select(x, low, x < low);
  c = select(c, high, high < c);
  let n = round(mul(c, 1.442695f));
  var r = exact_fma(negated(n), 0.6933594f, c);
  r = exact_fma(negated(n), -0.00021219444f, r);
  var e = exact_fma(0.0001984127f, r, 0.0013888889f);
  e = exact_fma(e, r, 0.008333334f);
  e = exact_fma(e, r, 0.041666668f);
  e = exact_fma(e, r, 0.16666667f);
  e = exact_fma(e, r, 0.5f);
  e = exact_fma(e, r, 1.0f);
  e = exact_fma(e, r, 1.0f);
  if (x < low) { return 0.0f; }
  return mul(e, bitcast<f32>(u32(i32(n) + 127) << 23u));
}
fn sigmoid(x: f32) -> f32 { return divide(1.0f, add(1.0f, exp_exact(add(nothing(), negated(x))))); }
fn silu_times(gate: f32, up: f32) -> f32 {
  return mul(divide(gate, add(1.0f, exp_exact(add(nothing(), negated(gate))))), up);
}
fn tanh_exact(x: f32) -> f32 {
  return add(1.0f, negated(divide(2.0f, add(exp_exact(add(x, x)), 1.0f))));
}
// 2^s for |s| up to about 120.
fn exp2_exact(s: f32) -> f32 {
  let n = round(s);
  let r = add(s, negated(n));
  var e = exact_fma(0.0013264725f, r, 0.009671513f);
  e = exact_fma(e, r, 0.055507336f);
  e = exact_fma(e, r, 0.24022242f);
  e = exact_fma(e, r, 0.693147f);
  e = exact_fma(e, r, 1.0f);
  return bitcast<f32>(bitcast<u32>(e) + (bitcast<u32>(i32(n)) << 23u));
}
fn inverse_rms(square_sum: f32, len: f32, eps: f32) -> f32 {
  return divide(1.0f, root(add(divide(square_sum, len), eps)));
}
fn half_integers(h: u32) -> f32 {
  let sign = (h & 0x8000u) << 16u; let e = (h >> 10u) & 31u; let m = h & 0x3ffu;
  if (e == 31u) { return bitcast<f32>(sign | 0x7f800000u | (m << 13u)); }
  if (e > 0u) { return bitcast<f32>(sign | ((e + 112u) << 23u) | (m << 13u)); }
  if (m == 0u) { return bitcast<f32>(sign); }
  let shift = countLeadingZeros(m) - 8u;
  return bitcast<f32>(sign | ((126u - shift) << 23u) | ((m << shift) & 0x7fffffu));
}
// (512 high + low) * 2^-10, rounded once: a sum of NVFP4 (`arith::nvfp4::term`).
fn wide_term(high: i32, low: i32) -> f32 {
  let l = bitcast<u32>(low);
  var m = plus(vec2(bitcast<u32>(high) << 9u, bitcast<u32>(high >> 23u)), vec2(l, bitcast<u32>(low >> 31u)));
  let sign = m.y >> 31u;
  if (sign != 0u) { m = minus(vec2(0u), m); }
  return composed(select(0u, sign, (m.x | m.y) != 0u), m, -10);
}
// The integer nearest to x, ties to even; x is finite and within 2^22.
fn nearest(x: f32) -> i32 { return i32(round(x)); }
