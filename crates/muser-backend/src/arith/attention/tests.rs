use proptest::prelude::*;

use super::*;

/// A small generator: tests must not depend on a crate's stream.
fn noise(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

fn exact(q: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>], seen: std::ops::Range<usize>) -> Vec<f64> {
    with_weights(q, keys, values, seen, |p| p)
}

/// Attention in f64 but for what `round` does to the probabilities.
fn with_weights(
    q: &[f32],
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
    seen: std::ops::Range<usize>,
    round: fn(f64) -> f64,
) -> Vec<f64> {
    let dim = q.len();
    let scores: Vec<f64> = seen
        .clone()
        .map(|j| {
            q.iter().zip(&keys[j]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
                / (dim as f64).sqrt()
        })
        .collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let p: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
    let sum: f64 = p.iter().sum();
    let p: Vec<f64> = p.into_iter().map(round).collect();
    (0..dim)
        .map(|d| seen.clone().zip(&p).map(|(j, p)| p * f64::from(values[j][d])).sum::<f64>() / sum)
        .collect()
}

fn relative_error(got: &[f32], want: &[f64]) -> f64 {
    let norm = want.iter().map(|v| v * v).sum::<f64>().sqrt();
    got.iter().zip(want).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>().sqrt() / norm
}

fn stored(x: &[f32], rotate: bool, kv: Digits) -> StoredHead {
    let mut x = x.to_vec();
    if rotate {
        hadamard(&mut x);
    }
    StoredHead::of(&x, kv)
}

#[test]
fn attention_is_close_to_exact_in_both_widths() {
    for (seed, dim, n) in [(1, 128, 700), (2, 64, 300), (3, 96, 65)] {
        let mut next = noise(seed);
        let mut head = |size: f32| (0..dim).map(|_| next() * size).collect::<Vec<f32>>();
        let keys: Vec<_> = (0..n).map(|_| head(2.0)).collect();
        let values: Vec<_> = (0..n).map(|_| head(1.0)).collect();
        let q = head(4.0);
        let seen = 37..n - 3;
        let want = exact(&q, &keys, &values, seen.clone());
        for (kv, bound) in [(Digits::Two, 5e-4), (Digits::One, 5e-2)] {
            let k: Vec<_> = keys.iter().map(|k| stored(k, true, kv)).collect();
            let v: Vec<_> = values.iter().map(|v| stored(v, false, kv)).collect();
            let got = attend(&q, &k, &v, |j| seen.contains(&j), kv);
            let error = relative_error(&got, &want);
            assert!(error < bound, "{dim} {kv:?}: {error}");
            assert!(error > 0.0, "it is not the exact code that was run");
        }
    }
}

#[test]
fn what_is_not_finite_stays_with_its_row() {
    let kv = Digits::Two;
    let mut next = noise(9);
    let mut head = || (0..64).map(|_| next()).collect::<Vec<f32>>();
    let (q, k, v) = (head(), head(), head());
    let bad = |x: &[f32], value: f32| {
        let mut x = x.to_vec();
        x[5] = value;
        x
    };
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let good = [stored(&k, true, kv), stored(&bad(&k, value), true, kv)];
        assert_eq!(good[1].d, 0.0);
        assert!(good[1].hi.iter().chain(&good[1].lo).all(|c| *c == 0));
        let values = [stored(&v, false, kv), stored(&bad(&v, value), false, kv)];
        let out = attend(&q, &good, &values, |_| true, kv);
        assert!(out.iter().all(|x| x.is_finite()), "a later row is untouched");
        let out = attend(&bad(&q, value), &good, &values, |_| true, kv);
        assert!(out.iter().all(|x| x.is_nan()), "the row that made it shows it");
    }
    let zero = attend(&[0.0; 64], &[stored(&k, true, kv)], &[stored(&v, false, kv)], |_| true, kv);
    assert!(zero.iter().zip(&v).all(|(a, b)| (a - b).abs() < 1e-4), "a query of zeros weighs all alike");
}

#[test]
fn units_that_nobody_sees_may_be_left_out() {
    let kv = Digits::Two;
    let mut next = noise(4);
    let mut head = || (0..32).map(|_| next()).collect::<Vec<f32>>();
    let keys: Vec<_> = (0..600).map(|_| stored(&head(), true, kv)).collect();
    let values: Vec<_> = (0..600).map(|_| stored(&head(), false, kv)).collect();
    let q = head();
    let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let all = bits(attend(&q, &keys, &values, |j| (256..530).contains(&j), kv));
    // Stale codes and scales of positions behind the end change nothing; neither does a block less in front.
    assert_eq!(all, bits(attend(&q, &keys[..530], &values[..530], |j| j >= 256, kv)));
    assert_eq!(all, bits(attend(&q, &keys[256..], &values[256..], |j| j < 274, kv)));
}

#[test]
fn exp2_is_close_and_exact_where_it_must_be() {
    for n in -100i32..=100 {
        assert_eq!(exp2(n as f32), 2f32.powi(n));
    }
    for i in -90_000..90_000 {
        let s = i as f32 * 1e-3 + 1.7e-4;
        let error = f64::from(exp2(s)) / f64::from(s).exp2() - 1.0;
        assert!(error.abs() < 3e-7, "exp2({s}): {error}");
    }
}

#[test]
fn scales_of_units() {
    for kv in [Digits::One, Digits::Two] {
        for largest in [1.0f32, 0.9999, 2.0, 1e-20, 3.7e20, 2f32.powi(-110)] {
            let unit = UnitScale::of(largest, kv);
            let code = unit.code(largest);
            assert!((8192..=16384).contains(&code), "{largest}: {code}");
            let factor = if kv == Digits::Two { 256.0 } else { 1.0 };
            assert_eq!(unit.scale * unit.weight, factor);
        }
        assert_eq!(UnitScale::of(2f32.powi(-111), kv), UnitScale { scale: 0.0, weight: 0.0 });
        assert_eq!(UnitScale::of(0.0, kv).code(0.0), 0);
    }
}

#[test]
fn hadamard_is_its_own_inverse_and_keeps_lengths() {
    for len in [1usize, 2, 64, 96, 128] {
        let mut next = noise(len as u64);
        let x: Vec<f32> = (0..len).map(|_| next()).collect();
        let mut y = x.clone();
        hadamard(&mut y);
        let square = |x: &[f32]| x.iter().map(|v| v * v).sum::<f32>();
        assert!((square(&x) / square(&y) - 1.0).abs() < 1e-5);
        assert_eq!(y == x, len == 1 || !len.is_power_of_two());
        hadamard(&mut y);
        assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-5));
    }
    let mut first = [0.0f32; 4];
    first[1] = 2.0;
    hadamard(&mut first);
    assert_eq!(first, [1.0, -1.0, 1.0, -1.0], "Sylvester's order");
}

#[test]
fn adversarial_heads_lose_no_more_than_half_precision() {
    // Outlier channels in k and q, constant offsets in k, one peak, a flat head, a sink with a small value: the error
    // of 16 bits is below that of K, V, q and p rounded to f16.
    let (dim, n) = (128, 1500);
    let half = |x: &[f32]| x.iter().map(|v| half::f16::from_f32(*v).to_f32()).collect::<Vec<f32>>();
    type Shape = fn(&mut [Vec<f32>], &mut [Vec<f32>], &mut Vec<f32>);
    let shapes: [(&str, Shape); 6] = [
        ("outliers in k", |k, _, _| k.iter_mut().for_each(|k| k[..4].iter_mut().for_each(|x| *x *= 30.0))),
        ("offsets in k", |k, _, q| {
            k.iter_mut().for_each(|k| (k[3], k[40], k[99]) = (20.0, -35.0, 50.0));
            (q[3], q[40], q[99]) = (0.01, 0.01, 0.01);
        }),
        ("outliers in v", |_, v, _| v.iter_mut().for_each(|v| (v[7], v[70]) = (v[7] * 40.0, v[70] * 40.0))),
        ("one peak", |k, _, q| k[700] = q.iter().map(|x| x * 1.2).collect()),
        ("flat", |_, _, q| q.iter_mut().for_each(|x| *x *= 0.01)),
        ("sink", |k, v, q| {
            k[0] = q.iter().map(|x| x * 1.1).collect();
            v[0].iter_mut().for_each(|x| *x *= 0.01);
        }),
    ];
    for (name, shape) in shapes {
        let mut next = noise(77);
        // Root mean squares of q and k whose product is the model's 3.87, as after its norms.
        let mut head = |size: f32| (0..dim).map(|_| next() * size).collect::<Vec<f32>>();
        let mut keys: Vec<_> = (0..n).map(|_| head(3.4)).collect();
        let mut values: Vec<_> = (0..n).map(|_| head(1.0)).collect();
        let mut q = head(3.4);
        shape(&mut keys, &mut values, &mut q);
        let want = exact(&q, &keys, &values, 0..n);
        let k: Vec<_> = keys.iter().map(|k| stored(k, true, Digits::Two)).collect();
        let v: Vec<_> = values.iter().map(|v| stored(v, false, Digits::Two)).collect();
        let ours = relative_error(&attend(&q, &k, &v, |_| true, Digits::Two), &want);
        let (kh, vh): (Vec<_>, Vec<_>) = keys.iter().zip(&values).map(|(k, v)| (half(k), half(v))).unzip();
        let rounded = with_weights(&half(&q), &kh, &vh, 0..n, |p| half::f16::from_f64(p).to_f64());
        let f16 = relative_error(&rounded.iter().map(|x| *x as f32).collect::<Vec<_>>(), &want);
        assert!(ours <= f16, "{name}: {ours} against {f16}");
    }
}

proptest! {
    /// Digits, pairs of 16 bits and whole integers give the same T.
    #[test]
    fn any_way_of_multiplying_gives_the_same_integer(a in proptest::collection::vec(-32639i16..=32639, 128), b in proptest::collection::vec(-32639i16..=32639, 128)) {
        let split = |x: &[i16]| x.iter().map(|c| digits(*c)).collect::<Vec<_>>();
        let (da, db) = (split(&a), split(&b));
        let lows: Vec<i8> = db.iter().map(|d| d.1).collect();
        let by_digits = product(da.iter().copied(), db.iter().zip(&lows).map(|(d, l)| (d.0, Some(l))));
        // 16-bit a times the high digit, in pairs, and the high digit of a times the low one.
        let pairs: i32 = (0..128).map(|i| i32::from(a[i]) * i32::from(db[i].0) + i32::from(da[i].0) * i32::from(db[i].1)).sum();
        prop_assert_eq!(by_digits, pairs);
        let whole: i64 = (0..128).map(|i| i64::from(a[i]) * i64::from(b[i]) - i64::from(da[i].1) * i64::from(db[i].1)).sum();
        prop_assert_eq!(i64::from(by_digits) * 256, whole);
        prop_assert!(by_digits.unsigned_abs() < 540_000_000);
        for (c, (hi, lo)) in a.iter().zip(da) {
            prop_assert_eq!(i32::from(*c), 256 * i32::from(hi) + i32::from(lo));
            prop_assert!((-127..=127).contains(&hi));
        }
    }
}

#[test]
fn bounds_of_scores_are_never_lost() {
    let mut norm = vec![1.0f32; 64];
    norm[3] = -2.0;
    let ones = vec![1.0f32; 64];
    let one = 8.0 * std::f32::consts::LOG2_E;
    assert_eq!(score_bound(&norm, &ones, 64), 2.0 * one);
    // Values 3 and 35 meet, 3 and 40 do not.
    let mut other = ones.clone();
    other[40] = 5.0;
    assert_eq!(
        (score_bound(&norm, &other, 64), draft_score_bound(&norm, &other, 64)),
        (10.0 * one, 5.0 * one)
    );
    other[35] = 4.0;
    assert_eq!(draft_score_bound(&norm, &other, 64), 8.0 * one);
    // Whatever follows a NaN.
    for at in [0, 31, 63] {
        norm[at] = f32::NAN;
        assert!(score_bound(&norm, &ones, 64).is_nan() && score_bound(&ones, &norm, 64).is_nan());
        assert!(draft_score_bound(&norm, &ones, 64).is_nan() && draft_score_bound(&ones, &norm, 64).is_nan());
        norm[at] = 1.0;
    }
    norm[7] = f32::INFINITY;
    assert_eq!(score_bound(&norm, &ones, 64), f32::INFINITY);
}
