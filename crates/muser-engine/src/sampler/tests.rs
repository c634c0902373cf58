//! The sampler against plain definitions: sort everything, sum everything.

use super::*;

fn key(position: u64) -> DrawKey {
    DrawKey { seed: 11, index: 0, position }
}

/// Logits with a shape like a model's: a few high ones, a long tail.
fn logits(n: usize, seed: u64) -> Vec<f32> {
    (0..n)
        .map(|i| {
            let u = rng::uniform(seed, 0, i as u64, rng::Stream::Draft);
            (8.0 * u.powi(6) - 4.0 * rng::uniform(seed, 1, i as u64, rng::Stream::Draft)) as f32
        })
        .collect()
}

/// The distribution by definition.
fn expected(params: &SamplingParams, logits: &[f32]) -> Vec<(u32, f64)> {
    let mut ranked: Vec<(u32, f64)> =
        logits.iter().enumerate().map(|(i, &v)| (i as u32, f64::from(v))).collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if params.top_k > 0 {
        ranked.truncate(params.top_k as usize);
    }
    let best = ranked[0].1;
    let total: f64 = ranked.iter().map(|(_, v)| (v - best).exp()).sum();
    if params.top_p < 1.0 {
        let mut mass = 0.0;
        let mut keep = 0;
        for (_, v) in &ranked {
            mass += (v - best).exp() / total;
            keep += 1;
            if mass >= f64::from(params.top_p) {
                break;
            }
        }
        ranked.truncate(keep);
    }
    ranked.retain(|(_, v)| (v - best).exp() >= f64::from(params.min_p) * (1.0 - 1e-9));
    let t = f64::from(params.temperature);
    let total: f64 = ranked.iter().map(|(_, v)| ((v - best) / t).exp()).sum();
    ranked.into_iter().map(|(id, v)| (id, ((v - best) / t).exp() / total)).collect()
}

/// Draws many times and compares with the definition by chi-square; rare tokens are pooled.
fn check_distribution(params: &SamplingParams, logits: &[f32]) {
    let expected = expected(params, logits);
    let draws = 20_000u64;
    let mut counts = vec![0u32; logits.len()];
    let mut sampler = Sampler::new();
    for position in 0..draws {
        let id = sampler.draw(params, logits, key(position)).expect("something is left");
        counts[id as usize] += 1;
    }
    let allowed: u32 = expected.iter().map(|&(id, _)| counts[id as usize]).sum();
    assert_eq!(u64::from(allowed), draws, "a filtered token was drawn: {params:?}");
    let (mut chi, mut cells) = (0.0, 0usize);
    let (mut pool_expected, mut pool_found) = (0.0, 0.0);
    let mut add = |expected: f64, found: f64| {
        chi += (found - expected).powi(2) / expected;
        cells += 1;
    };
    for (id, p) in expected {
        let (e, f) = (p * draws as f64, f64::from(counts[id as usize]));
        if e >= 10.0 {
            add(e, f);
        } else {
            pool_expected += e;
            pool_found += f;
            if pool_expected >= 10.0 {
                add(pool_expected, pool_found);
                (pool_expected, pool_found) = (0.0, 0.0);
            }
        }
    }
    let freedom = cells.saturating_sub(1).max(1) as f64;
    // Wilson-Hilferty: a standard normal deviate; beyond 4.5 is one in 300,000.
    let z = ((chi / freedom).cbrt() - (1.0 - 2.0 / (9.0 * freedom))) / (2.0 / (9.0 * freedom)).sqrt();
    assert!(z < 4.5, "chi-square {chi} with {freedom} degrees, z {z}: {params:?}");
}

#[test]
fn draws_follow_the_definition() {
    let base = SamplingParams { top_k: 0, top_p: 1.0, ..SamplingParams::default() };
    for params in [
        SamplingParams::default(),
        base.clone(),
        SamplingParams { temperature: 0.4, ..base.clone() },
        SamplingParams { temperature: 2.5, top_k: 20, ..base.clone() },
        SamplingParams { top_p: 0.5, ..base.clone() },
        SamplingParams { top_p: 0.999, ..base.clone() },
        SamplingParams { min_p: 0.1, ..base.clone() },
        SamplingParams { min_p: 0.02, top_p: 0.9, temperature: 1.7, ..base.clone() },
        SamplingParams { top_k: 1000, top_p: 0.0, ..base },
    ] {
        check_distribution(&params, &logits(600, 5));
    }
}

#[test]
fn the_filters_leave_what_the_definition_leaves() {
    for (n, seed) in [(5, 1), (300, 2), (3000, 3), (20_000, 4)] {
        let logits = logits(n, seed);
        for top_k in [0, 2, 64, 5000] {
            for top_p in [0.0, 0.3, 0.95, 0.9999, 1.0] {
                for min_p in [0.0, 0.001, 0.3, 1.0] {
                    let params = SamplingParams { top_k, top_p, min_p, ..SamplingParams::default() };
                    let mut sampler = Sampler::new();
                    let mut found: Vec<u32> = sampler
                        .distribution(&params, &logits)
                        .expect("something is left")
                        .iter()
                        .map(|c| c.id)
                        .collect();
                    let mut expected: Vec<u32> = expected(&params, &logits).iter().map(|e| e.0).collect();
                    found.sort_unstable();
                    expected.sort_unstable();
                    // Sums in another order may move the edge of a nucleus by a token among thousands.
                    let differing = found.len().abs_diff(expected.len());
                    assert!(differing <= usize::from(expected.len() > 500), "{n} {params:?}");
                    if differing == 0 {
                        assert_eq!(found, expected, "{n} {params:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn tiny_temperatures_are_greedy() {
    let mut logits = logits(1000, 9);
    logits[700] = 30.0;
    logits[300] = 30.0;
    for temperature in [0.0, 1e-9, 0.0003, 1e-3, f32::MIN_POSITIVE, 1e-45] {
        let params = SamplingParams { temperature, top_k: 0, top_p: 1.0, ..SamplingParams::default() };
        for position in 0..50 {
            assert_eq!(Sampler::new().draw(&params, &logits, key(position)), Some(300), "{temperature}");
        }
    }
    // Just above the threshold the difference of 30 divided by the temperature must not overflow to NaN either.
    logits[700] = 1.0;
    let params = SamplingParams { temperature: 0.0011, ..SamplingParams::default() };
    assert_eq!(Sampler::new().draw(&params, &logits, key(0)), Some(300));
}

#[test]
fn a_huge_temperature_is_uniform_over_what_the_filters_leave() {
    let logits = logits(5000, 3);
    let params = SamplingParams { temperature: 1e6, ..SamplingParams::default() };
    let left = expected(&params, &logits).len();
    assert!((2..=64).contains(&left));
    let mut sampler = Sampler::new();
    let weights: Vec<f32> =
        sampler.distribution(&params, &logits).expect("something is left").iter().map(|c| c.value).collect();
    assert_eq!(weights.len(), left);
    assert!(weights.iter().all(|w| *w > 0.9999), "{weights:?}");
    check_distribution(&params, &logits);
}

#[test]
fn logprobs_are_the_models_own_and_sorted() {
    let logits = logits(3000, 7);
    let (log_sum, top) = Sampler::new().logprobs(&logits, 5);
    let exact: f64 = logits.iter().map(|&v| f64::from(v).exp()).sum::<f64>().ln();
    assert!((log_sum - exact).abs() < 1e-5);
    assert_eq!(top.as_slice().len(), 5);
    assert!(top.as_slice().windows(2).all(|pair| pair[0].1 >= pair[1].1));
    for &(id, logprob) in top.as_slice() {
        assert!((f64::from(logprob) - (f64::from(logits[id as usize]) - exact)).abs() < 1e-5);
    }
    assert_eq!(Sampler::new().logprobs(&logits, 0).1.as_slice().len(), 0);
}

#[test]
fn bias_penalties_and_mask_apply_in_this_order() {
    let params = SamplingParams {
        logit_bias: vec![(0, 1.0), (3, f32::NEG_INFINITY)],
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        ..SamplingParams::default()
    };
    let mut counts = TokenCounts::new(6, 10);
    counts.push_prompt(0);
    counts.push_prompt(1);
    counts.push_output(1);
    counts.push_output(1);
    let mut mask = TokenMask::new(6);
    mask.allow_all();
    mask.forbid(5);
    let mut logits = [3.0, -2.0, 1.0, 9.0, 0.5, 8.0];
    Sampler::apply_processors(&params, Some(&counts), Some(&mask), &mut logits);
    assert_eq!(logits, [2.0, -4.0 - 0.5 - 0.5, 1.0, f32::NEG_INFINITY, 0.5, f32::NEG_INFINITY]);
    assert_eq!(Sampler::new().draw(&SamplingParams::greedy(), &logits, key(0)), Some(0));
    let mut none = TokenMask::new(6);
    none.clear();
    Sampler::apply_processors(&params, None, Some(&none), &mut logits);
    assert_eq!(Sampler::new().draw(&SamplingParams::greedy(), &logits, key(0)), None);
    assert_eq!(Sampler::new().draw(&SamplingParams::default(), &logits, key(0)), None);
}

#[test]
fn non_finite_logits_are_found_anywhere() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 15, 16, 40, 41] {
            let mut logits = vec![1.0f32; 42];
            assert_eq!(check_finite(&logits, 3), Ok(()));
            logits[at] = bad;
            assert_eq!(check_finite(&logits, 3), Err(RequestError::NotFinite { position: 3 }));
        }
    }
}

#[test]
fn figures_out_of_range_are_named() {
    let check = |params: SamplingParams, field: &str| match params.validate(100) {
        Err(crate::SubmitError::Invalid { field: found, .. }) => assert_eq!(found, field),
        other => panic!("{other:?}"),
    };
    let base = SamplingParams::default();
    check(SamplingParams { temperature: f32::NAN, ..base.clone() }, "temperature");
    check(SamplingParams { temperature: -1.0, ..base.clone() }, "temperature");
    check(SamplingParams { top_p: 1.5, ..base.clone() }, "top_p");
    check(SamplingParams { top_p: f32::NAN, ..base.clone() }, "top_p");
    check(SamplingParams { min_p: -0.1, ..base.clone() }, "min_p");
    check(SamplingParams { repetition_penalty: 0.0, ..base.clone() }, "repetition_penalty");
    check(SamplingParams { presence_penalty: f32::INFINITY, ..base.clone() }, "presence_penalty");
    check(SamplingParams { frequency_penalty: f32::NAN, ..base.clone() }, "frequency_penalty");
    check(SamplingParams { logit_bias: vec![(100, 1.0)], ..base.clone() }, "logit_bias");
    check(SamplingParams { logit_bias: vec![(1, f32::INFINITY)], ..base }, "logit_bias");
}

#[test]
fn top_p_ends_where_the_mass_is_met_exactly() {
    // Weights that are sums of powers of two: nothing is rounded.
    let cases: [(u32, f32, &[u32]); 5] = [
        (2, 0.5, &[0]),
        (4, 0.5, &[0, 1]),
        (4, 0.75, &[0, 1, 2]),
        (4, 0.25, &[0]),
        (4, 0.500_001, &[0, 1, 2]),
    ];
    for (equal, top_p, expected) in cases {
        let mut logits = vec![-30.0; 40];
        logits[..equal as usize].fill(3.0);
        let params = SamplingParams { top_k: equal, top_p, temperature: 1.0, ..SamplingParams::default() };
        let mut drawn: Vec<u32> =
            (0..300).filter_map(|i| Sampler::new().draw(&params, &logits, key(i))).collect();
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn, expected, "{equal} equal, top-p {top_p}");
    }
}
