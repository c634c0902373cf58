//! Random schedules: whatever else runs, each request's tokens and logits are those of running alone and cold.

use std::collections::HashMap;

use crate::{
    DraftLength, EngineConfig, Event, FinishReason, ImageRows, ImageSource, Prompt, Request, RequestError,
    RestoreFailure, SamplingParams, Submission, SubmitError,
    driver::Turn,
    testing::{Answer, Bench, Fault, HIDDEN, Rng, expected, picture, stem},
    testing_source::ScriptedSource,
};

struct Running {
    request: Request,
    submission: Option<Submission>,
    answer: Answer,
    reads_one_in: usize,
    cancelled: bool,
}

fn random_request(rng: &mut Rng, context: usize, long_answers: bool) -> Request {
    // A few stems, so that prefixes are shared; most prompts are short, some span blocks.
    let longest = if rng.one_in(3) { context * 3 / 4 } else { 300 };
    let mut tokens = stem(rng.below(3) as u64, 1 + rng.below(longest));
    tokens.extend(stem(99 + rng.below(2) as u64, rng.below(30)));
    let mut prompt = Prompt::from(tokens);
    if rng.one_in(6) && prompt.tokens.len() > 8 {
        let digest = [rng.below(2) as u8; 32];
        let rows = (0..4 * HIDDEN).map(|i| i as f32 + f32::from(digest[0])).collect::<Vec<f32>>();
        prompt.images.push(ImageRows { at: 3, source: ImageSource::Rows(rows.into()), digest });
    } else if rng.one_in(4) && prompt.tokens.len() > 60 {
        // A few pictures, at few places, so that prefixes with them are shared; a second one far behind.
        for at in [1 + rng.below(2) * 8, prompt.tokens.len() / 2] {
            let seed = rng.below(3) as u64;
            let picture = picture(1 + seed as usize, 1 + rng.below(5), seed);
            let digest = [10 + 5 * seed as u8 + picture.cols as u8; 32];
            if at + picture.tokens() < prompt.tokens.len() / 2 || at == prompt.tokens.len() / 2 {
                prompt.images.push(ImageRows { at, source: ImageSource::Picture(picture), digest });
            }
        }
    }
    let most_tokens = if long_answers || rng.one_in(4) { 400 } else { 12 };
    let sampling = if rng.one_in(2) { SamplingParams::greedy() } else { SamplingParams::default() };
    Request {
        max_tokens: Some(rng.below(most_tokens) as u32),
        hash_logits: true,
        sampling,
        seed: Some(rng.next()),
        n: if rng.one_in(5) { 1 + rng.below(4) as u32 } else { 1 },
        priority: rng.below(3) as i32,
        cache: !rng.one_in(8),
        ..Request::new(prompt, Vec::new())
    }
}

fn random_config(rng: &mut Rng, context: usize, window: usize) -> EngineConfig {
    let blocks = context.div_ceil(256) as u64;
    let per_sequence = (window as u64 + 16).div_ceil(256) + 2;
    let parallel = 1 + rng.below(8);
    // From just enough for one sequence to plenty for all.
    let least = (blocks + per_sequence) * 2048;
    let more = if rng.one_in(2) { rng.below(4096) } else { rng.below(parallel * least as usize) };
    let kv_bytes = least + more as u64;
    EngineConfig {
        parallel,
        kv_bytes: Some(kv_bytes),
        prefill_rows: 1 + rng.below(400),
        mixed_rows: 1 + rng.below(100),
        event_ring: 8 + rng.below(20),
        window_slack: [0, 16][rng.below(2)],
        min_copy_tokens: 1 + rng.below(40),
        max_waiting: 100,
        image_cache_bytes: [0, 40, 1 << 20][rng.below(3)],
        host_bytes: [0, 0, 20_000, 1 << 20][rng.below(4)],
        slow_reader_timeout: std::time::Duration::from_hours(1),
        ..EngineConfig::default()
    }
}

/// One schedule. Returns tokens reused, preemptions, drafts accepted, blocks restored from host memory, tokens restored from
/// the source and restores that failed, so that the whole can show that it covered them.
fn schedule(seed: u64, sources: &mut HashMap<usize, ScriptedSource>) -> [u64; 6] {
    let mut rng = Rng(seed << 20);
    let context = [512, 700, 1300][rng.below(3)];
    let window = [1, 100, 256, 300, 600][rng.below(5)];
    let config = random_config(&mut rng, context, window);
    let drafts = rng.one_in(3);
    let mut bench =
        if drafts { Bench::drafting(context, window, &config) } else { Bench::new(context, window, &config) };
    if rng.one_in(2) {
        // Admits more than memory may carry, so that sequences must step aside.
        bench.driver.scheduler.memory.config.lookahead = rng.below(20);
    }
    // What one schedule leaves, later ones find: each is a restart. Half of them have no source.
    let source = rng.one_in(2).then(|| sources.entry(window).or_default().clone());
    if let Some(source) = &source {
        bench.driver.set_source(Some(Box::new(source.clone())));
    }
    let source_faults = rng.one_in(2);
    let long_answers = rng.one_in(3);
    let faults = rng.one_in(5);
    let mut to_come = 4 + rng.below(10);
    let mut running: Vec<Running> = Vec::new();
    let mut idle = 0;
    while to_come > 0 || !running.is_empty() {
        if to_come > 0 && (rng.one_in(4) || running.is_empty()) {
            to_come -= 1;
            let request = random_request(&mut rng, context, long_answers);
            let copy = clone(&request);
            match bench.submit(request) {
                Ok(submission) => running.push(Running {
                    answer: Answer::of(copy.n),
                    request: copy,
                    submission: Some(submission),
                    reads_one_in: [1, 1, 1, 5, 40][rng.below(5)],
                    cancelled: false,
                }),
                // The budget of this schedule is less than the context.
                Err(SubmitError::Capacity { .. }) => {}
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
        if faults && rng.one_in(40) {
            bench.fail_step(rng.below(3) as u64, Fault::Device);
        }
        if let Some(source) = &source {
            source.tick(&mut rng, source_faults);
        }
        if drafts {
            // Another length every round: none of them may change a token.
            bench.driver.draft.set_length(DraftLength::Fixed(rng.below(16)));
            if faults && rng.one_in(400) {
                bench.fail_draft();
            }
        }
        let turn = bench.turn();
        assert_ne!(turn, Turn::Stopped);
        let snapshot = bench.driver.shared().metrics.snapshot();
        assert!(snapshot.kv_bytes_held <= snapshot.kv_bytes_total);
        assert!(snapshot.host_bytes_held <= config.host_bytes as u64);
        assert!(snapshot.kv_bytes_total <= config.kv_bytes.unwrap_or(0), "the budget was exceeded");
        for one in &mut running {
            let Some(submission) = &mut one.submission else { continue };
            if rng.below(one.reads_one_in) == 0 {
                while let Some(event) = submission.try_recv() {
                    one.answer.take(event);
                }
            }
            if rng.one_in(60) {
                one.cancelled = true;
                if rng.one_in(2) {
                    submission.cancel();
                } else {
                    one.submission = None;
                }
            }
        }
        running.retain(|one| {
            let over = one.submission.is_none() || one.answer.is_over();
            if over {
                check(one, window, bench.driver.scheduler.memory.config.most_positions, seed, faults);
            }
            !over
        });
        idle = if turn == Turn::Worked { 0 } else { idle + 1 };
        assert!(idle < 2000, "seed {seed}: stuck with {} requests", running.len());
    }
    if let Some(source) = &source {
        source.lock().fetches.clear();
        source.lock().queries.clear();
        bench.run();
        source.take_all();
    }
    bench.run();
    let snapshot = bench.driver.shared().metrics.snapshot();
    bench.assert_balanced();
    let failures = RestoreFailure::ALL.map(|reason| snapshot.restore_failures(reason));
    [
        snapshot.cached_tokens,
        snapshot.preemptions,
        snapshot.accepted_tokens,
        snapshot.restored_blocks,
        snapshot.external_hits,
        failures.iter().sum(),
    ]
}

fn clone(request: &Request) -> Request {
    Request {
        prompt: request.prompt.clone(),
        max_tokens: request.max_tokens,
        sampling: request.sampling.clone(),
        seed: request.seed,
        n: request.n,
        ..Request::new(Vec::new(), Vec::new())
    }
}

fn check(one: &Running, window: usize, most_positions: usize, seed: u64, faults: bool) {
    match one.answer.failure() {
        None => {}
        Some(RequestError::Device(_)) if faults => {}
        Some(other) => panic!("seed {seed}: {other}"),
    }
    let request = &one.request;
    let prompt = request.prompt.tokens.len();
    let most = (request.max_tokens.unwrap_or(0) as usize).min(most_positions - prompt);
    for index in 0..request.n {
        let found = one.answer.tokens(index);
        let expected = expected(request, request.seed.unwrap_or(0), index, window, found.len());
        assert_eq!(found, expected, "seed {seed}: tokens or logits differ");
        if one.answer.is_over() && one.answer.failure().is_none() {
            let end = one.answer.finished(index);
            assert_eq!(end.usage.completion_tokens as usize, found.len());
            assert!(end.usage.cached_tokens < request.prompt.tokens.len() as u32);
            match end.reason {
                FinishReason::Cancelled => assert!(one.cancelled),
                FinishReason::Length => assert_eq!(found.len(), request.max_tokens.unwrap_or(0) as usize),
                FinishReason::Context => assert_eq!(found.len(), most),
                other => panic!("seed {seed}: {other:?}"),
            }
        }
    }
    let starts = one.answer.events.iter().filter(|event| matches!(event, Event::Started(_))).count();
    assert!(starts <= 1);
}

#[test]
fn random_schedules_give_what_running_alone_and_cold_gives() {
    let schedules = if muser_testkit::is_long() { 100_000 } else { 2_000 };
    let mut totals = [0; 6];
    let mut sources = HashMap::new();
    for seed in 0..schedules {
        totals.iter_mut().zip(schedule(seed, &mut sources)).for_each(|(total, n)| *total += n);
    }
    // A test of reuse, preemption, drafts and the host tier that never met any would show nothing.
    let least = [100_000, 10, 10_000, 30, 50_000, 30];
    assert!(totals.iter().zip(least).all(|(&total, least)| total > least), "{totals:?}");
}
