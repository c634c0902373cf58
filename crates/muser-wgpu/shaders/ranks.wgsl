// Order of logits: the larger the key the larger the logit; 0xffffffff where it is not finite; 0 is below all. Of equal keys the
// lowest id comes first. A rank is (key, id).
fn key_of(v: f32) -> u32 {
  if (!is_finite(v)) { return 0xffffffffu; }
  let bits = bitcast<u32>(v);
  if (magnitude(v) == 0u) { return 0x80000000u; }
  return select(bits | 0x80000000u, ~bits, (bits >> 31u) != 0u);
}
fn before(a: vec2<u32>, b: vec2<u32>) -> bool { return a.x > b.x || (a.x == b.x && a.y < b.y); }
