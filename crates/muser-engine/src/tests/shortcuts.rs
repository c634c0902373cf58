//! Rows of which the executor tells less than all logits: the largest, or the largest few. The text is that of all logits.

use crate::{
    DraftLength, DraftSampling, EngineConfig, Event, Request, RequestError, SamplingParams,
    testing::{Answer, Bench, Fault, request, stem},
};

fn bench(proposals: usize, candidates: usize) -> Bench {
    let config =
        EngineConfig { parallel: 4, draft_length: DraftLength::Fixed(proposals), ..EngineConfig::default() };
    let mut bench = Bench::drafting(2048, 256, &config);
    bench.driver.stepper.set_most_candidates(candidates);
    bench
}

/// A request whose logits nobody hashes.
fn ask(sampling: &SamplingParams, seed: u64) -> Request {
    Request {
        sampling: sampling.clone(),
        hash_logits: false,
        ..request(stem(seed, 20 + 30 * seed as usize), 60)
    }
}

fn ids(answer: &Answer) -> Vec<u32> {
    let tokens = answer.events.iter().filter_map(|event| match event {
        Event::Token(token) => Some(token.id),
        _ => None,
    });
    tokens.collect()
}

/// The ids that texts of this kind have most often.
fn most_frequent(bench: &mut Bench, sampling: &SamplingParams, count: usize) -> Vec<u32> {
    let mut times = std::collections::BTreeMap::<u32, usize>::new();
    for seed in 0..8 {
        let answer = bench.ask(ask(sampling, seed));
        ids(&answer).into_iter().for_each(|id| *times.entry(id).or_default() += 1);
    }
    let mut ranked: Vec<(usize, u32)> = times.into_iter().map(|(id, times)| (times, id)).collect();
    ranked.sort_unstable_by(|a, b| b.cmp(a));
    ranked.into_iter().map(|(_, id)| id).take(count).collect()
}

#[test]
fn the_text_is_that_of_all_logits() {
    let default = SamplingParams::default;
    let kinds = [
        SamplingParams::greedy(),
        SamplingParams { top_k: 8, ..default() },
        SamplingParams { top_k: 3, top_p: 1.0, temperature: 2.0, ..default() },
        SamplingParams { top_k: 8, top_p: 0.6, min_p: 0.2, ..default() },
        // Not among the candidates, shaped, or without a limit.
        SamplingParams { top_k: 9, ..default() },
        SamplingParams { top_k: 5, presence_penalty: 0.5, ..default() },
        SamplingParams { top_k: 5, logit_bias: vec![(3, 2.0)], ..default() },
        SamplingParams { top_k: 0, ..default() },
    ];
    // What may not be drawn: as many more candidates, up to more than there are. Ids that are likely here.
    let often = most_frequent(&mut bench(0, 0), &kinds[1], 9);
    let without = |count: usize| often[..count].iter().map(|&id| (id, f32::NEG_INFINITY)).collect::<Vec<_>>();
    let kinds: Vec<_> = kinds
        .into_iter()
        .chain([
            SamplingParams { logit_bias: without(2), ..SamplingParams::greedy() },
            SamplingParams { logit_bias: without(9), ..SamplingParams::greedy() },
            SamplingParams { top_k: 5, logit_bias: without(3), ..default() },
            SamplingParams { top_k: 5, logit_bias: without(4), ..default() },
        ])
        .collect();
    for how in [DraftSampling::Exact, DraftSampling::Rejection] {
        for proposals in [0, 1, 5] {
            let (mut whole, mut few) = (bench(proposals, 0), bench(proposals, 8));
            whole.driver.draft.set_sampling(how);
            few.driver.draft.set_sampling(how);
            // All together, so that rows of every kind are in one step.
            for kinds in [&kinds[..4], &kinds[2..6], &kinds[4..8], &kinds[8..]] {
                let submit = |bench: &mut Bench| -> Vec<Vec<u32>> {
                    let mut submissions: Vec<_> =
                        (0..).zip(kinds).map(|(i, kind)| bench.submit(ask(kind, i)).expect("good")).collect();
                    submissions.iter_mut().map(|submission| ids(&bench.finish(submission))).collect()
                };
                let (expected, found) = (submit(&mut whole), submit(&mut few));
                assert_eq!(expected, found, "{how:?}, {proposals} proposals");
                assert!(found.iter().all(|ids| ids.len() == 60));
            }
            let accepted = few.driver.shared().metrics.snapshot().accepted_tokens;
            assert_eq!(accepted, whole.driver.shared().metrics.snapshot().accepted_tokens);
            assert_eq!(accepted > 50, proposals > 0, "{accepted}");
            few.assert_balanced();
        }
    }
}

#[test]
fn a_logit_that_is_no_number_fails_the_request() {
    for (proposals, sampling) in
        [(0, SamplingParams { top_k: 4, ..SamplingParams::default() }), (3, SamplingParams::greedy())]
    {
        let mut bench = bench(proposals, 8);
        bench.ask(ask(&sampling, 1));
        bench.fail_step(3, Fault::NotANumber);
        let answer = bench.ask(ask(&sampling, 2));
        assert!(matches!(answer.failure(), Some(RequestError::NotFinite { .. })), "{:?}", answer.failure());
        bench.assert_balanced();
    }
}
