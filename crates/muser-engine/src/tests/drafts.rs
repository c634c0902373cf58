//! Drafting in the engine with the scripted executor: what ends inside a drafted block, what the draft sees, what
//! adaptive lengths do on a machine of known costs.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::{
    Constraint, DraftLength, DraftSampling, EngineConfig, Event, FinishReason, Request, SamplingParams,
    StopWatch, TokenMask,
    sampler::Sampler,
    testing::{Answer, Bench, Costs, Fault, Oracle, VOCAB, argmax, expected, request, stem},
};

fn drafting(proposals: usize) -> Bench {
    let config = EngineConfig { draft_length: DraftLength::Fixed(proposals), ..EngineConfig::default() };
    Bench::drafting(2048, 256, &config)
}

fn greedy(prompt: Vec<u32>, max_tokens: u32) -> Request {
    Request { sampling: SamplingParams::greedy(), ..request(prompt, max_tokens) }
}

fn tokens_of(request: &Request, n: usize) -> Vec<(u32, u64)> {
    expected(request, 5, 0, 256, n)
}

/// Proposals and acceptances of greedy decoding by the draft's definition, without blocks or engine.
fn expected_drafts(prompt: &[u32], n: usize, proposals: usize) -> (u32, u32) {
    let mut oracle = Oracle::new(256);
    oracle.push_prompt(&prompt.to_vec().into());
    let mut text = vec![argmax(&oracle.logits)];
    let (mut drafted, mut accepted) = (0, 0);
    while text.len() < n {
        let wanted = proposals.min(n - text.len() - 1);
        let (mut block, mut input) = (oracle.clone(), *text.last().expect("begun"));
        let guesses: Vec<u32> = (0..wanted)
            .map(|_| {
                block.push(u64::from(input));
                input = argmax(&block.draft_logits);
                input
            })
            .collect();
        drafted += wanted as u32;
        oracle.push(u64::from(*text.last().expect("begun")));
        text.push(argmax(&oracle.logits));
        for guess in guesses {
            if *text.last().expect("begun") != guess {
                break;
            }
            accepted += 1;
            oracle.push(u64::from(guess));
            text.push(argmax(&oracle.logits));
        }
    }
    (drafted, accepted)
}

#[test]
fn the_draft_sees_what_it_should_beyond_the_window_after_reuse_and_for_a_short_one_after_a_long_one() {
    for proposals in [1, 4, 15] {
        let mut bench = drafting(proposals);
        // Beyond the window, then the same again from known blocks, then a short one in the same slot.
        for (prompt, what) in [
            (stem(1, 900), "long"),
            (stem(1, 900), "long, reused"),
            (stem(2, 7), "short after long"),
            (stem(3, 255), "at a block's end"),
        ] {
            let ask = greedy(prompt.clone(), 60);
            let answer = bench.ask(greedy(prompt.clone(), 60));
            assert_eq!(answer.tokens(0), tokens_of(&ask, 60), "{what}");
            let usage = answer.finished(0).usage;
            let found = (usage.drafted_tokens, usage.accepted_tokens);
            assert_eq!(found, expected_drafts(&prompt, 60, proposals), "{what}, {proposals} proposals");
            assert_eq!(usage.decode_steps + usage.accepted_tokens, 60, "{what}");
            assert!(proposals < 4 || usage.decode_steps < 45, "{what}: {usage:?}");
        }
        bench.assert_balanced();
    }
}

#[test]
fn max_tokens_is_exact_whatever_was_proposed() {
    for proposals in [1, 3, 15] {
        let mut bench = drafting(proposals);
        for max_tokens in [0, 1, 2, 3, 5, 17] {
            let answer = bench.ask(greedy(stem(1, 20), max_tokens));
            assert_eq!(answer.tokens(0), tokens_of(&greedy(stem(1, 20), 0), max_tokens as usize));
            assert_eq!(answer.finished(0).reason, FinishReason::Length);
        }
        // At the context's end, too.
        let config = EngineConfig { draft_length: DraftLength::Fixed(proposals), ..EngineConfig::default() };
        let mut bench = Bench::drafting(512, 256, &config);
        let answer = bench.ask(greedy(stem(1, 500), 100));
        assert_eq!((answer.finished(0).reason, answer.tokens(0).len()), (FinishReason::Context, 12));
    }
}

#[test]
fn a_stop_id_inside_a_block_ends_there() {
    let all = tokens_of(&greedy(stem(1, 20), 0), 40);
    for at in 0..40 {
        let stop = all[at].0;
        let first = all.iter().position(|token| token.0 == stop).expect("it is there");
        let mut bench = drafting(15);
        let answer = bench.ask(Request { stop_ids: vec![stop], ..greedy(stem(1, 20), 60) });
        assert_eq!(answer.tokens(0), all[..first]);
        assert_eq!(answer.finished(0).reason, FinishReason::Stop(stop));
        assert_eq!(answer.finished(0).usage.completion_tokens as usize, first + 1);
        // What lay behind the stop was never part of the text: the next turn resumes before it.
        let mut next = stem(1, 20);
        next.extend(all[..first].iter().map(|token| token.0));
        next.extend(stem(9, 5));
        let answer = bench.ask(greedy(next.clone(), 8));
        assert_eq!(answer.tokens(0), tokens_of(&greedy(next, 0), 8));
        bench.assert_balanced();
    }
}

struct StopAfter(u32);

impl StopWatch for StopAfter {
    fn push(&mut self, _token: u32) -> bool {
        self.0 -= 1;
        self.0 == 0
    }
}

#[test]
fn a_stop_watch_sees_tokens_one_by_one() {
    for after in 1..20 {
        let mut bench = drafting(15);
        let watch = move |_| Box::new(StopAfter(after)) as Box<dyn StopWatch>;
        let answer = bench.ask(Request { stop_watch: Some(Box::new(watch)), ..greedy(stem(1, 20), 60) });
        assert_eq!(answer.tokens(0), tokens_of(&greedy(stem(1, 20), 0), after as usize));
        assert_eq!(answer.finished(0).reason, FinishReason::StopWatch);
        bench.assert_balanced();
    }
}

/// Allows the ids that leave another remainder than the last one, and counts how often it was asked.
struct NoTwoAlike {
    last: u32,
    commits: Arc<AtomicU32>,
    /// Can a draft look ahead?
    forks: bool,
}

impl Constraint for NoTwoAlike {
    fn mask(&mut self, allowed: &mut TokenMask) -> bool {
        (0..VOCAB as u32).filter(|id| id % 3 != self.last % 3).for_each(|id| allowed.allow(id));
        true
    }

    fn commit(&mut self, token: u32) -> Result<(), String> {
        assert_ne!(token % 3, self.last % 3, "it was masked");
        self.last = token;
        self.commits.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn fork(&self) -> Option<Box<dyn Constraint>> {
        let copy = Self { commits: Arc::default(), ..*self };
        self.forks.then(|| Box::new(copy) as Box<dyn Constraint>)
    }
}

#[test]
fn constraints_penalties_bias_and_logprobs_are_as_without_proposals() {
    let commits = Arc::new(AtomicU32::new(0));
    let ask = |sampling: SamplingParams| {
        let commits = Arc::clone(&commits);
        let make = move |_| -> Box<dyn Constraint> {
            Box::new(NoTwoAlike { last: 0, commits: Arc::clone(&commits), forks: true })
        };
        Request { sampling, logprobs: Some(3), constraint: Some(Box::new(make)), ..request(stem(1, 30), 80) }
    };
    let shaped = SamplingParams {
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.1,
        logit_bias: vec![(3, 2.0), (4, f32::NEG_INFINITY)],
        ..SamplingParams::default()
    };
    for sampling in [
        SamplingParams::greedy(),
        SamplingParams { temperature: 0.0, ..shaped.clone() },
        SamplingParams::default(),
        shaped,
    ] {
        let plain = drafting(0).ask(ask(sampling.clone()));
        assert_eq!(commits.swap(0, Ordering::Relaxed), 80);
        for proposals in [1, 2, 7] {
            let mut bench = drafting(proposals);
            let drafted = bench.ask(ask(sampling.clone()));
            // Ids, log-probabilities, alternatives and hashes of logits.
            let tokens = |answer: &Answer| -> Vec<Event> {
                answer.events.iter().filter(|e| matches!(e, Event::Token(_))).cloned().collect()
            };
            assert_eq!(tokens(&drafted), tokens(&plain), "{sampling:?}");
            assert_eq!(commits.swap(0, Ordering::Relaxed), 80);
            assert!(drafted.finished(0).usage.accepted_tokens > 5, "{:?}", drafted.finished(0).usage);
            bench.assert_balanced();
        }
    }
}

#[test]
fn a_copy_of_the_constraint_goes_ahead_with_the_proposals() {
    let accepted = |forks: bool| {
        let make = move |_| -> Box<dyn Constraint> {
            Box::new(NoTwoAlike { last: 0, commits: Arc::default(), forks })
        };
        let ask = Request { constraint: Some(Box::new(make)), ..greedy(stem(1, 30), 200) };
        let mut bench = drafting(7);
        let answer = bench.ask(ask);
        bench.assert_balanced();
        (answer.tokens(0), answer.finished(0).usage.accepted_tokens)
    };
    let ((plain, without), (text, with)) = (accepted(false), accepted(true));
    assert_eq!(plain, text);
    // A third of the ids is forbidden at each place: proposals that nobody masked are at times among them.
    assert!(with > without, "{with} right with looking ahead, {without} without");
}

#[test]
fn several_at_once_with_and_without_proposals_are_each_alone() {
    let config = EngineConfig { parallel: 8, draft_length: DraftLength::Fixed(5), ..EngineConfig::default() };
    let mut bench = Bench::drafting(2048, 256, &config);
    let mut submissions: Vec<_> = (0..8u32)
        .map(|i| {
            let sampling = if i % 2 == 0 { SamplingParams::greedy() } else { SamplingParams::default() };
            // Some end soon, so that the others' rounds change in size.
            let ask = Request { sampling, ..request(stem(u64::from(i), 10 + 40 * i as usize), 5 + 20 * i) };
            let copy = Request { sampling: ask.sampling.clone(), ..request(ask.prompt.tokens.clone(), 0) };
            (copy, bench.submit(ask).expect("good"))
        })
        .collect();
    bench.run();
    let (mut alone, mut together) = (0.0, 0.0);
    for (i, (copy, submission)) in submissions.iter_mut().enumerate() {
        let answer = bench.finish(submission);
        let n = 5 + 20 * i;
        assert_eq!(answer.tokens(0), tokens_of(copy, n));
        if i % 2 == 0 {
            let usage = answer.finished(0).usage;
            let (_, accepted) = expected_drafts(&copy.prompt.tokens, n, 5);
            alone += f64::from(accepted);
            together += f64::from(usage.accepted_tokens);
        }
    }
    // Rows do not depend on their company, so neither does acceptance.
    assert_eq!(alone, together);
    bench.assert_balanced();
}

#[test]
fn cancelled_preempted_and_failed_rounds_leave_nothing_behind() {
    let config = EngineConfig {
        parallel: 4,
        draft_length: DraftLength::Fixed(9),
        kv_bytes: Some(2048 * 10),
        ..EngineConfig::default()
    };
    let mut bench = Bench::drafting(1024, 256, &config);
    bench.driver.scheduler.memory.config.lookahead = 4;
    let ask = |i: u64| greedy(stem(i, 200 + 10 * i as usize), 300);
    let mut submissions: Vec<_> = (0..4).map(|i| bench.submit(ask(i)).expect("good")).collect();
    for turn in 0..30 {
        bench.turn();
        if turn == 12 {
            submissions.pop();
        }
        if turn == 16 {
            bench.fail_draft();
        }
    }
    for (i, submission) in submissions.iter_mut().enumerate() {
        let answer = bench.finish(submission);
        assert_eq!(answer.tokens(0), tokens_of(&ask(i as u64), 300));
    }
    let metrics = bench.driver.shared().metrics.snapshot();
    assert_eq!(metrics.draft_errors, 1);
    assert!(metrics.preemptions > 0 && metrics.accepted_tokens > 0);
    bench.assert_balanced();

    let mut bench = drafting(6);
    bench.ask(greedy(stem(1, 40), 5));
    bench.fail_step(3, Fault::Device);
    assert!(bench.ask(greedy(stem(1, 40), 50)).failure().is_some());
    assert_eq!(bench.ask(greedy(stem(1, 40), 50)).tokens(0), tokens_of(&greedy(stem(1, 40), 0), 50));
    bench.assert_balanced();
}

#[test]
fn figures_add_up() {
    let mut bench = drafting(4);
    let usage = bench.ask(greedy(stem(1, 20), 100)).finished(0).usage;
    let metrics = bench.driver.shared().metrics.snapshot();
    assert_eq!(metrics.drafted_tokens, u64::from(usage.drafted_tokens));
    assert_eq!(metrics.accepted_tokens, u64::from(usage.accepted_tokens));
    assert_eq!(metrics.drafted_by_place.iter().sum::<u64>(), metrics.drafted_tokens);
    assert_eq!(metrics.accepted_by_place.iter().sum::<u64>(), metrics.accepted_tokens);
    assert_eq!(metrics.drafts, metrics.drafted_by_place[0]);
    assert!(metrics.accepted_by_place.windows(2).all(|pair| pair[0] >= pair[1]));
    assert_eq!((metrics.drafted_by_place[4], metrics.draft_errors), (0, 0));
}

/// Sampled pairs of tokens by rejection sampling in the engine, many seeds, against the products of probabilities.
#[test]
fn rejection_sampling_in_the_engine_has_the_distribution_of_plain_sampling() {
    let config = EngineConfig {
        parallel: 8,
        draft_length: DraftLength::Fixed(3),
        draft_sampling: DraftSampling::Rejection,
        ..EngineConfig::default()
    };
    let mut bench = Bench::drafting(512, 256, &config);
    let sampling = SamplingParams { top_k: 3, top_p: 1.0, ..SamplingParams::default() };
    let prompt = stem(4, 12);
    let runs = 3000u64;
    let mut counts: BTreeMap<Vec<u32>, f64> = BTreeMap::new();
    let mut accepted = 0;
    for seed in 0..runs {
        let ask = Request { sampling: sampling.clone(), seed: Some(seed), ..request(prompt.clone(), 4) };
        let answer = bench.ask(ask);
        accepted += answer.finished(0).usage.accepted_tokens;
        // The first token comes from the prompt, the second and third from a drafted block.
        let ids: Vec<u32> = answer.tokens(0).iter().take(3).map(|token| token.0).collect();
        *counts.entry(ids).or_default() += 1.0;
    }
    assert!(accepted > runs as u32 / 2, "{accepted}");
    let mut chi = 0.0;
    let mut cells = 0;
    let mut sampler = Sampler::new();
    let mut paths = vec![(Vec::new(), 1.0)];
    for _ in 0..3 {
        paths = paths
            .into_iter()
            .flat_map(|(path, share)| {
                let mut oracle = Oracle::new(256);
                oracle.push_prompt(&prompt.clone().into());
                path.iter().for_each(|&id: &u32| oracle.push(u64::from(id)));
                let candidates = sampler.distribution(&sampling, &oracle.logits).expect("some");
                let total: f64 = candidates.iter().map(|c| f64::from(c.value)).sum();
                let next: Vec<_> = candidates.iter().map(|c| (c.id, f64::from(c.value) / total)).collect();
                next.into_iter().map(move |(id, p)| ([path.as_slice(), &[id]].concat(), share * p))
            })
            .collect();
    }
    for (path, share) in paths {
        let (expected, found) = (share * runs as f64, counts.remove(&path).unwrap_or(0.0));
        chi += (found - expected).powi(2) / expected;
        cells += 1;
    }
    assert!(counts.is_empty(), "texts that plain sampling never gives: {counts:?}");
    // 26 degrees of freedom: 99.99 % lie below 62.
    assert!(cells == 27 && chi < 62.0, "chi-square {chi} over {cells} texts");
    // The same seed and lengths give the same text.
    let ask = || Request { sampling: sampling.clone(), ..request(prompt.clone(), 60) };
    assert_eq!(bench.ask(ask()).tokens(0), bench.ask(ask()).tokens(0));
}

fn adaptive(costs: Costs) -> (Answer, crate::MetricsSnapshot, f64) {
    let mut bench = Bench::timed(2048, 256, &EngineConfig::default(), costs);
    let answer = bench.ask(greedy(stem(1, 100), 1000));
    let took = answer.finished(0).timings.decode.as_secs_f64();
    let metrics = bench.driver.shared().metrics.snapshot();
    (answer, metrics, took)
}

#[test]
fn adaptive_lengths_pay_where_rows_are_cheap_and_stay_away_where_they_are_not() {
    let plain = tokens_of(&greedy(stem(1, 100), 0), 1000);
    // Microseconds. A step costs 30 ms and little more for more rows: proposals pay.
    let cheap = Costs { step: |rows| 30_000 + 800 * rows as u64, draft: |rows| 3000 + 200 * rows as u64 };
    let (answer, metrics, took) = adaptive(cheap);
    assert_eq!(answer.tokens(0), plain);
    // The test's clock moves by another millisecond a turn.
    let speedup = 1000.0 * 0.0318 / took;
    assert!(speedup > 1.3, "{speedup:.2}: {metrics:?}");
    let forecast = metrics.forecast_ns as f64 / metrics.forecast_rounds_ns as f64;
    assert!((forecast - 1.0).abs() < 0.05, "forecast {forecast:.3}");

    // Every row costs what the first one costs: they do not.
    let dear = Costs { step: |rows| 1000 + 30_000 * rows as u64, draft: |rows| 10_000 * rows as u64 };
    let (answer, metrics, took) = adaptive(dear);
    assert_eq!(answer.tokens(0), plain);
    let speedup = 1000.0 * 0.032 / took;
    assert!(speedup > 0.97, "{speedup:.3}: {metrics:?}");
    assert!(metrics.drafted_tokens > 0, "it has tried");
}

#[test]
fn where_drafting_sleeps_rows_without_its_context_are_known_for_what_they_are() {
    let dear = Costs { step: |rows| 1000 + 30_000 * rows as u64, draft: |rows| 10_000 * rows as u64 };
    let mut bench = Bench::timed(2048, 256, &EngineConfig::default(), dear);
    let first = bench.ask(greedy(stem(1, 100), 700));
    let tries = bench.driver.shared().metrics.snapshot().drafts;
    assert!((1..12).contains(&tries), "{tries}");

    // The next turn of the talk reads its beginning from blocks that were computed while drafting slept.
    let mut prompt = stem(1, 100);
    prompt.extend(first.tokens(0).iter().map(|token| token.0));
    let known = prompt.len();
    prompt.extend(stem(7, 5));
    let ask = greedy(prompt.clone(), 40);
    let mut submission = bench.submit(greedy(prompt.clone(), 40)).expect("good");
    while found_gap_end(&bench).is_none() {
        bench.turn();
    }
    let gap_end = found_gap_end(&bench);
    assert!(gap_end.is_some_and(|end| end + 20 > known), "{gap_end:?} of {known}");
    assert_eq!(bench.finish(&mut submission).tokens(0), tokens_of(&ask, 40));
    bench.assert_balanced();

    // Where drafting never slept there is no gap, however much is reused.
    let cheap = Costs { step: |rows| 30_000 + 800 * rows as u64, draft: |rows| 3000 + 200 * rows as u64 };
    let mut bench = Bench::timed(2048, 256, &EngineConfig::default(), cheap);
    bench.ask(greedy(prompt[..known].to_vec(), 20));
    let mut submission = bench.submit(greedy(prompt, 20)).expect("good");
    while found_gap_end(&bench).is_none() {
        bench.turn();
    }
    assert_eq!(found_gap_end(&bench), Some(0));
    bench.finish(&mut submission);
}

fn found_gap_end(bench: &Bench) -> Option<usize> {
    bench.driver.scheduler.slots.get(0)?.draft.found_gap_end()
}

/// Ends a text with its second token.
struct Second(u32);

impl StopWatch for Second {
    fn push(&mut self, _: u32) -> bool {
        self.0 += 1;
        self.0 == 2
    }
}

#[test]
fn proposals_behind_the_end_of_a_text_count_neither_way() {
    let mut accepted = 0;
    for seed in 0..20 {
        let mut bench = drafting(7);
        let watch: crate::StopWatchFactory = Box::new(|_| Box::new(Second(0)));
        let answer = bench.ask(Request { stop_watch: Some(watch), ..greedy(stem(seed, 40), 50) });
        let end = answer.finished(0);
        assert_eq!((end.reason, end.usage.completion_tokens), (FinishReason::StopWatch, 2));
        assert_eq!(end.usage.drafted_tokens, 7);
        // One round: its first proposal was right, or the end hid what it was worth; of the other six nothing is known.
        assert_eq!(bench.driver.draft.judged(), end.usage.accepted_tokens as f32, "seed {seed}");
        accepted += end.usage.accepted_tokens;
    }
    assert!((1..20).contains(&accepted), "both happen: {accepted} of 20");
}
