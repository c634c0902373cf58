//! Limits, ends, reuse, cancellation, faults: one behaviour per test.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use crate::{
    Constraint, ContextPolicy, EngineConfig, EngineError, Event, FinishReason, Request, RequestError,
    RequestKind, SamplingParams, ShiftPlan, SlotState, StopWatch, SubmitError, TokenMask,
    driver::{Driver, Turn},
    testing::{Answer, Bench, Fault, Oracle, ScriptedExecutor, VOCAB, expected, geometry, request, stem},
};

fn bench() -> Bench {
    Bench::new(2048, 256, &EngineConfig::default())
}

fn greedy(prompt: Vec<u32>, max_tokens: u32) -> Request {
    Request { sampling: SamplingParams::greedy(), ..request(prompt, max_tokens) }
}

fn check_exact(bench: &Bench, request: &Request, answer: &Answer) {
    for index in 0..request.n {
        let found = answer.tokens(index);
        assert_eq!(found, expected(request, 5, index, bench.window, found.len()));
    }
}

#[test]
fn max_tokens_is_exact() {
    for max_tokens in [0, 1, 2, 17] {
        let mut bench = bench();
        let answer = bench.ask(greedy(vec![3], max_tokens));
        let end = answer.finished(0);
        assert_eq!(answer.tokens(0).len(), max_tokens as usize);
        assert_eq!((end.reason, end.usage.completion_tokens), (FinishReason::Length, max_tokens));
        check_exact(&bench, &greedy(vec![3], max_tokens), &answer);
        bench.assert_balanced();
    }
}

#[test]
fn max_tokens_zero_reads_the_prompt_for_those_who_come_after() {
    let mut bench = bench();
    bench.ask(greedy(stem(1, 700), 0));
    let answer = bench.ask(greedy(stem(1, 700), 3));
    assert_eq!(answer.started().cached_tokens, 699);
    check_exact(&bench, &greedy(stem(1, 700), 3), &answer);
}

#[test]
fn one_and_eight_at_a_time_give_identical_tokens() {
    let mut bench = Bench::new(2048, 256, &EngineConfig { parallel: 8, ..EngineConfig::default() });
    let requests: Vec<Request> = (0..8).map(|_| greedy(stem(1, 300), 40)).collect();
    let mut submissions: Vec<_> =
        requests.into_iter().map(|request| bench.submit(request).expect("good")).collect();
    bench.run();
    let alone = Bench::new(2048, 256, &EngineConfig::default()).ask(greedy(stem(1, 300), 40));
    for submission in &mut submissions {
        assert_eq!(bench.finish(submission).tokens(0), alone.tokens(0));
    }
    bench.assert_balanced();
}

#[test]
fn a_hundred_at_a_time_are_each_what_they_are_alone() {
    let config = EngineConfig { parallel: 100, ..EngineConfig::default() };
    let mut bench = Bench::new(1024, 256, &config);
    let request = |i: u64| greedy(stem(i, 20 + 7 * i as usize), 10 + i as u32 % 13);
    let mut submissions: Vec<_> = (0..100).map(|i| bench.submit(request(i)).expect("good")).collect();
    bench.run();
    let snapshot = bench.driver.shared().metrics.snapshot();
    // Side by side: as many steps as the longest takes beside the reading, not as many as all together.
    assert!(snapshot.steps < 150, "{} steps", snapshot.steps);
    for (i, submission) in submissions.iter_mut().enumerate() {
        let answer = bench.finish(submission);
        check_exact(&bench, &request(i as u64), &answer);
    }
    bench.assert_balanced();
}

#[test]
fn a_chat_turn_reuses_everything_before_it() {
    let mut bench = bench();
    let mut text = stem(1, 90);
    let mut known = 0;
    for turn in 0..12 {
        let ask = greedy(text.clone(), 30);
        let answer = bench.ask(greedy(text.clone(), 30));
        check_exact(&bench, &ask, &answer);
        // All but the last token of the turn before, which was sampled and never read.
        assert_eq!(answer.started().cached_tokens as usize, known, "turn {turn}");
        text.extend(answer.tokens(0).iter().map(|token| token.0));
        known = text.len() - 1;
        text.extend(stem(100 + turn, 20));
    }
    assert_eq!(bench.driver.shared().metrics.snapshot().copied_blocks, 0, "unfinished blocks are moved");
    bench.assert_balanced();
}

#[test]
fn a_history_that_drops_the_reasoning_reuses_what_is_before_it() {
    let mut bench = bench();
    let prompt = stem(1, 200);
    bench.ask(greedy(prompt.clone(), 300));
    let mut next = prompt.clone();
    next.extend(stem(2, 50));
    let answer = bench.ask(greedy(next.clone(), 5));
    assert!((200..=201).contains(&answer.started().cached_tokens), "{:?}", answer.started());
    check_exact(&bench, &greedy(next, 5), &answer);
    assert!(bench.driver.shared().metrics.snapshot().copied_blocks > 0);
    bench.assert_balanced();
}

#[test]
fn divergence_inside_a_cached_prompt_resumes_at_the_last_valid_point() {
    let mut bench = Bench::new(4096, 512, &EngineConfig::default());
    bench.ask(greedy(stem(1, 2724), 1));
    let mut other = stem(1, 960);
    other.extend(stem(2, 300));
    let answer = bench.ask(greedy(other.clone(), 5));
    assert!((960..965).contains(&answer.started().cached_tokens), "{:?}", answer.started());
    check_exact(&bench, &greedy(other, 5), &answer);
    bench.assert_balanced();
}

#[test]
fn without_cache_nothing_is_reused_and_nothing_stays() {
    let mut bench = bench();
    for _ in 0..2 {
        let answer = bench.ask(Request { cache: false, ..greedy(stem(1, 600), 2) });
        assert_eq!(answer.started().cached_tokens, 0);
    }
    assert_eq!(bench.driver.scheduler.memory.stats().full.cached, 0);
    bench.assert_balanced();
}

#[test]
fn choices_share_the_prompt() {
    let mut bench = bench();
    let ask = || Request { n: 3, ..request(stem(1, 1000), 20) };
    let mut submission = bench.submit(ask()).expect("good");
    let mut answer = Answer::of(3);
    while !answer.is_over() {
        bench.turn();
        while let Some(event) = submission.try_recv() {
            answer.take(event);
        }
    }
    check_exact(&bench, &ask(), &answer);
    assert_ne!(answer.tokens(0), answer.tokens(1), "choices draw differently");
    // 1,000 rows for the prompt, and one row for each of the others.
    assert_eq!(bench.driver.shared().metrics.snapshot().prefill_rows, 1002);
    bench.assert_balanced();
}

#[test]
fn a_prompt_beyond_the_context_is_refused_with_both_counts() {
    let bench = Bench::new(512, 256, &EngineConfig::default());
    for prompt in [512, 513, 1024] {
        let refused = bench.submit(greedy(stem(1, prompt), 1)).map(drop);
        let expected =
            SubmitError::ContextLength { prompt_tokens: prompt, max_prompt_tokens: 511, context: 512 };
        assert_eq!(refused, Err(expected));
    }
    assert!(bench.submit(greedy(stem(1, 511), 1)).is_ok());
    assert!(bench.submit(greedy(stem(1, 512), 0)).is_ok());
}

#[test]
fn a_request_beyond_the_memory_is_refused_with_both_counts() {
    // Room for 5 full blocks beside one window.
    let config = EngineConfig { kv_bytes: Some(2048 * (5 + 4)), parallel: 1, ..EngineConfig::default() };
    let mut bench = Bench::new(4096, 256, &config);
    let blocks = bench.driver.shared().limits.full_blocks;
    let refused = bench.submit(greedy(stem(1, 300), 256 * 8)).map(drop);
    assert_eq!(refused, Err(SubmitError::Capacity { needed_blocks: 10, available_blocks: blocks }));
    // Without a limit of its own the request gets what there is and hears about it.
    let answer = bench.ask(Request { max_tokens: None, ..greedy(stem(1, 300), 0) });
    assert_eq!(answer.finished(0).reason, FinishReason::Context);
    assert_eq!(answer.tokens(0).len(), blocks * 256 - 300);
    check_exact(&bench, &greedy(stem(1, 300), 0), &answer);
    bench.assert_balanced();
}

#[test]
fn a_full_context_ends_with_its_own_reason() {
    let mut bench = Bench::new(512, 256, &EngineConfig::default());
    let answer = bench.ask(greedy(stem(1, 500), 100));
    assert_eq!((answer.finished(0).reason, answer.tokens(0).len()), (FinishReason::Context, 12));
    check_exact(&bench, &greedy(stem(1, 500), 100), &answer);
}

#[test]
fn a_shift_reads_what_is_left_as_if_it_had_been_the_prompt() {
    let mut bench = Bench::new(512, 256, &EngineConfig::default());
    let prompt = stem(1, 450);
    let plan = ShiftPlan { keep: 50, turns: vec![50, 200, 350], plain: false };
    let policy = ContextPolicy::Shift(plan);
    let answer = bench.ask(Request { context_policy: policy, ..greedy(prompt.clone(), 120) });
    let shifts: Vec<u32> = answer
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Shifted { dropped_tokens, .. } => Some(*dropped_tokens),
            _ => None,
        })
        .collect();
    assert_eq!(shifts, [150]);
    assert_eq!((answer.finished(0).reason, answer.tokens(0).len()), (FinishReason::Length, 120));
    let tokens = answer.tokens(0);
    // Up to the full context it is the plain continuation ...
    assert_eq!(tokens[..62], expected(&greedy(prompt.clone(), 62), 5, 0, 256, 62));
    // ... and then that of the shortened text: system part, newest turns, and what was written.
    let mut short = prompt[..50].to_vec();
    short.extend(&prompt[200..]);
    short.extend(tokens[..62].iter().map(|token| token.0));
    assert_eq!(tokens[62..], expected(&greedy(short, 58), 5, 0, 256, 58));
    bench.assert_balanced();
}

#[test]
fn a_shift_with_nothing_to_drop_ends_like_an_error() {
    let mut bench = Bench::new(512, 256, &EngineConfig::default());
    for turns in [vec![], vec![50]] {
        let policy = ContextPolicy::Shift(ShiftPlan { keep: 50, turns, plain: false });
        let answer = bench.ask(Request { context_policy: policy, ..greedy(stem(1, 500), 100) });
        assert_eq!((answer.finished(0).reason, answer.tokens(0).len()), (FinishReason::Context, 12));
    }
    // Too long as it comes: old turns go at once; if the newest alone is too long the request is refused.
    let policy = |newest| ContextPolicy::Shift(ShiftPlan { keep: 50, turns: vec![50, newest], plain: false });
    let answer = bench.ask(Request { context_policy: policy(500), ..greedy(stem(1, 800), 5) });
    assert_eq!((answer.finished(0).reason, answer.tokens(0).len()), (FinishReason::Length, 5));
    let refused = bench.submit(Request { context_policy: policy(60), ..greedy(stem(1, 800), 5) });
    assert!(matches!(refused.map(drop), Err(SubmitError::ContextLength { prompt_tokens: 790, .. })));
    bench.assert_balanced();
}

#[test]
fn plain_text_loses_its_older_half_again_and_again() {
    let mut bench = Bench::new(512, 256, &EngineConfig::default());
    let prompt = stem(1, 100);
    for keep in [0, 37] {
        let policy = ContextPolicy::Shift(ShiftPlan { keep, turns: vec![], plain: true });
        let answer = bench.ask(Request { context_policy: policy, ..greedy(prompt.clone(), 1000) });
        assert_eq!((answer.finished(0).reason, answer.tokens(0).len()), (FinishReason::Length, 1000));
        // The same by the definition: whenever the text fills the context, what stands after `keep` is halved.
        let (mut text, mut written) = (prompt.clone(), Vec::new());
        while written.len() < 1000 {
            let n = (512 - text.len()).min(1000 - written.len());
            let next = expected(&greedy(text.clone(), n as u32), 5, 0, 256, n);
            text.extend(next.iter().map(|token| token.0));
            written.extend(next);
            text.drain(keep..keep + (text.len() - keep) / 2);
        }
        assert_eq!(answer.tokens(0), written);
    }
    // What stays fills the context by itself; a prompt that is too long is refused.
    let policy = |keep| ContextPolicy::Shift(ShiftPlan { keep, turns: vec![], plain: true });
    let answer = bench.ask(Request { context_policy: policy(100), ..greedy(stem(1, 101), 600) });
    assert_eq!(answer.finished(0).reason, FinishReason::Length);
    let answer = bench.ask(Request { context_policy: policy(511), ..greedy(stem(1, 511), 600) });
    assert_eq!((answer.finished(0).reason, answer.tokens(0).len()), (FinishReason::Context, 1));
    let refused = bench.submit(Request { context_policy: policy(0), ..greedy(stem(1, 800), 5) });
    assert!(matches!(refused.map(drop), Err(SubmitError::ContextLength { prompt_tokens: 800, .. })));
    bench.assert_balanced();
}

#[test]
fn a_stop_id_ends_without_a_token_event() {
    let mut bench = bench();
    let all = bench.ask(greedy(stem(1, 20), 30)).tokens(0);
    let stop = all[10].0;
    let first = all.iter().position(|token| token.0 == stop).expect("it is there");
    let answer = bench.ask(Request { stop_ids: vec![stop], ..greedy(stem(1, 20), 30) });
    assert_eq!(answer.tokens(0), all[..first]);
    let end = answer.finished(0);
    assert_eq!((end.reason, end.usage.completion_tokens as usize), (FinishReason::Stop(stop), first + 1));
}

struct StopAfter(u32);

impl StopWatch for StopAfter {
    fn push(&mut self, _token: u32) -> bool {
        self.0 -= 1;
        self.0 == 0
    }
}

#[test]
fn each_choice_has_its_own_stop_watch() {
    let mut bench = bench();
    let make = |index: u32| Box::new(StopAfter(3 + index)) as Box<dyn StopWatch>;
    let ask = Request { n: 2, stop_watch: Some(Box::new(make)), ..request(stem(1, 20), 30) };
    let mut submission = bench.submit(ask).expect("good");
    bench.run();
    let mut answer = Answer::of(2);
    while let Some(event) = submission.try_recv() {
        answer.take(event);
    }
    for index in 0..2 {
        assert_eq!(answer.tokens(index).len() as u32, 3 + index);
        assert_eq!(answer.finished(index).reason, FinishReason::StopWatch);
    }
}

/// Allows even ids, refuses the fourth token, or allows nothing.
struct Even {
    tokens: Arc<AtomicU32>,
    allow: bool,
    fail_at: u32,
}

impl Constraint for Even {
    fn mask(&mut self, allowed: &mut TokenMask) -> bool {
        (0..VOCAB as u32).step_by(2).filter(|_| self.allow).for_each(|id| allowed.allow(id));
        true
    }

    fn commit(&mut self, token: u32) -> Result<(), String> {
        assert_eq!(token % 2, 0);
        let n = self.tokens.fetch_add(1, Ordering::Relaxed) + 1;
        if n == self.fail_at { Err("as told".into()) } else { Ok(()) }
    }
}

#[test]
fn a_constraint_narrows_and_its_failure_is_the_requests() {
    let mut bench = bench();
    let tokens = Arc::new(AtomicU32::new(0));
    let constrained = |allow: bool, fail_at: u32| {
        let tokens = Arc::clone(&tokens);
        let make = move |_| -> Box<dyn Constraint> {
            Box::new(Even { tokens: Arc::clone(&tokens), allow, fail_at })
        };
        Request { constraint: Some(Box::new(make)), ..request(stem(1, 20), 30) }
    };
    let answer = bench.ask(constrained(true, u32::MAX));
    assert!(answer.tokens(0).len() == 30 && answer.tokens(0).iter().all(|token| token.0 % 2 == 0));
    assert_eq!(tokens.swap(0, Ordering::Relaxed), 30);
    let failed = bench.ask(constrained(true, 4));
    assert_eq!(failed.failure(), Some(&RequestError::Constraint("as told".into())));
    let failed = bench.ask(constrained(false, 4));
    assert!(matches!(failed.failure(), Some(RequestError::Constraint(_))));
    bench.assert_balanced();
}

#[test]
fn logprobs_come_sorted_and_are_the_models_own() {
    let mut bench = bench();
    let ask = Request { logprobs: Some(5), ..greedy(stem(1, 20), 3) };
    let answer = bench.ask(ask);
    let mut oracle = Oracle::new(256);
    oracle.push_prompt(&stem(1, 20).into());
    for event in &answer.events {
        let Event::Token(token) = event else { continue };
        let sum: f64 = oracle.logits.iter().map(|&v| f64::from(v).exp()).sum();
        let top = token.top.as_slice();
        assert_eq!(top.len(), 5);
        assert_eq!((top[0].0, Some(top[0].1)), (token.id, token.logprob));
        for &(id, logprob) in top {
            assert!((f64::from(logprob) - (f64::from(oracle.logits[id as usize]) - sum.ln())).abs() < 1e-5);
        }
        oracle.push(u64::from(token.id));
    }
    // Zero alternatives: the sampled token's own only; a bias changes what is drawn and not what is told.
    let sampling = SamplingParams { logit_bias: vec![(9, 100.0)], ..SamplingParams::greedy() };
    let answer = bench.ask(Request { logprobs: Some(0), sampling, ..greedy(stem(1, 20), 1) });
    let token = answer.events.iter().find_map(|event| match event {
        Event::Token(token) => Some(*token),
        _ => None,
    });
    let token = token.expect("one token");
    assert_eq!((token.id, token.top.as_slice().len()), (9, 0));
    assert!(token.logprob.is_some_and(|logprob| logprob < 0.0));
}

#[test]
fn an_omitted_seed_is_drawn_reported_and_repeats() {
    let mut bench = bench();
    let ask = |seed| Request { seed, ..request(stem(1, 20), 40) };
    let first = bench.ask(ask(None));
    let second = bench.ask(ask(None));
    assert_ne!(first.started().seed, second.started().seed);
    assert_ne!(first.tokens(0), second.tokens(0));
    assert_eq!(bench.ask(ask(Some(first.started().seed))).tokens(0), first.tokens(0));
    assert!(first.started().seed < 1 << 53);
}

#[test]
fn an_embedding_is_the_mean_of_all_hidden_states() {
    let config = EngineConfig { prefill_rows: 37, ..EngineConfig::default() };
    let mut bench = Bench::new(2048, 256, &config);
    let prompt = stem(1, 500);
    let mut oracle = Oracle::new(256);
    let mut sum = [0.0f64; 2];
    for &token in &prompt {
        oracle.push(u64::from(token));
        sum.iter_mut().zip(&oracle.hidden).for_each(|(sum, &value)| *sum += f64::from(value));
    }
    bench.ask(greedy(prompt.clone(), 1));
    for _ in 0..2 {
        let ask = Request { kind: RequestKind::Embed, ..request(prompt.clone(), 9) };
        let answer = bench.ask(ask);
        let mean: Box<[f32]> = sum.iter().map(|sum| (sum / 500.0) as f32).collect();
        assert!(answer.events.contains(&Event::Embedding(mean)), "{:?}", answer.events);
        assert_eq!(answer.finished(0).usage.completion_tokens, 0);
    }
    bench.assert_balanced();
}

#[test]
fn cancelling_frees_the_slot_at_the_next_step() {
    let config = EngineConfig { prefill_rows: 64, ..EngineConfig::default() };
    // While it decodes, and while it reads its prompt.
    for (prompt, turns) in [(20, 6), (1500, 3)] {
        let mut bench = Bench::new(2048, 256, &config);
        let submission = bench.submit(greedy(stem(1, prompt), 500)).expect("good");
        bench.turns(turns);
        assert_eq!(bench.driver.scheduler.slots.running().count(), 1);
        drop(submission);
        bench.turn();
        assert_eq!(bench.driver.scheduler.slots.running().count(), 0);
        assert_eq!(bench.driver.scheduler.memory.stats().full.used, 0);
        bench.assert_balanced();
    }
}

#[test]
fn cancelling_keeps_what_was_sent_and_says_so() {
    let mut bench = bench();
    let mut submission = bench.submit(greedy(stem(1, 20), 500)).expect("good");
    bench.turns(6);
    submission.cancel();
    let answer = bench.finish(&mut submission);
    assert_eq!(answer.finished(0).reason, FinishReason::Cancelled);
    assert_eq!(answer.tokens(0).len(), answer.finished(0).usage.completion_tokens as usize);
    assert!(answer.tokens(0).len() >= 4);
}

#[test]
fn cancelling_a_queued_request_disturbs_nobody() {
    let mut bench = Bench::new(2048, 256, &EngineConfig { parallel: 1, ..EngineConfig::default() });
    let mut first = bench.submit(greedy(stem(1, 20), 50)).expect("good");
    let second = bench.submit(greedy(stem(2, 20), 50)).expect("good");
    let mut third = bench.submit(greedy(stem(3, 20), 5)).expect("good");
    bench.turns(4);
    assert_eq!(bench.driver.scheduler.waiting().len(), 2);
    drop(second);
    bench.turn();
    assert_eq!(bench.driver.scheduler.waiting().len(), 1);
    let answer = bench.finish(&mut first);
    check_exact(&bench, &greedy(stem(1, 20), 50), &answer);
    let answer = bench.finish(&mut third);
    check_exact(&bench, &greedy(stem(3, 20), 5), &answer);
    bench.assert_balanced();
}

#[test]
fn a_slow_reader_pauses_alone_and_is_dropped_after_the_limit() {
    let config = EngineConfig { event_ring: 16, ..EngineConfig::default() };
    let mut bench = Bench::new(2048, 256, &config);
    let mut slow = bench.submit(greedy(stem(1, 20), 500)).expect("good");
    bench.run();
    assert_eq!(bench.driver.shared().slots[0].read(0).state, SlotState::Paused);
    // Another request is served meanwhile; a read of the slow one lets it go on.
    let answer = bench.ask(greedy(stem(2, 20), 100));
    check_exact(&bench, &greedy(stem(2, 20), 100), &answer);
    let mut slow_answer = Answer::default();
    while let Some(event) = slow.try_recv() {
        slow_answer.take(event);
    }
    bench.run();
    let generated = bench.driver.shared().slots[0].read(0).generated_tokens;
    assert!(generated as usize > slow_answer.tokens(0).len());
    // Then its reader sleeps for good.
    bench.advance(31_000);
    bench.run();
    while let Some(event) = slow.try_recv() {
        slow_answer.take(event);
    }
    assert_eq!(slow_answer.finished(0).reason, FinishReason::SlowReader);
    check_exact(&bench, &greedy(stem(1, 20), 500), &slow_answer);
    bench.assert_balanced();
}

#[test]
fn the_queue_has_a_limit_a_timeout_and_priorities() {
    let config = EngineConfig { parallel: 1, max_waiting: 2, ..EngineConfig::default() };
    let mut bench = Bench::new(2048, 256, &config);
    let mut first = bench.submit(greedy(stem(1, 20), 1000)).expect("good");
    bench.turn();
    let timeout = Some(Duration::from_secs(5));
    let mut second =
        bench.submit(Request { queue_timeout: timeout, ..greedy(stem(2, 20), 5) }).expect("good");
    let mut third = bench.submit(Request { priority: 1, ..greedy(stem(3, 20), 5) }).expect("good");
    let refused = bench.submit(greedy(stem(4, 20), 5)).map(drop);
    assert_eq!(refused, Err(SubmitError::QueueFull { waiting: 2, limit: 2 }));
    bench.turn();
    assert_eq!(bench.driver.scheduler.waiting()[0].task.priority, 1);
    bench.advance(6000);
    bench.turn();
    assert!(matches!(second.try_recv(), Some(Event::Failed(RequestError::QueueTimeout { .. }))));
    assert!(second.recv().is_none());
    bench.finish(&mut first);
    bench.finish(&mut third);
    bench.assert_balanced();
}

#[test]
fn a_deadline_ends_with_what_there_is() {
    let mut bench = bench();
    let deadline = Some(Duration::from_millis(20));
    let mut submission = bench.submit(Request { deadline, ..greedy(stem(1, 20), 500) }).expect("good");
    let answer = bench.finish(&mut submission);
    assert_eq!(answer.finished(0).reason, FinishReason::Deadline);
    assert!((10..=20).contains(&answer.tokens(0).len()));
    bench.assert_balanced();
}

#[test]
fn idle_says_when_to_look_again() {
    let mut bench = Bench::new(2048, 256, &EngineConfig { event_ring: 16, ..EngineConfig::default() });
    assert_eq!(bench.turn(), Turn::Idle { until: None });
    let deadline = Some(Duration::from_secs(100));
    let submission = bench.submit(Request { deadline, ..greedy(stem(1, 20), 500) }).expect("good");
    bench.run();
    match bench.turn() {
        Turn::Idle { until: Some(until) } => {
            assert!(until < Duration::from_secs(31), "the reader's limit first");
        }
        other => panic!("{other:?}"),
    }
    drop(submission);
}

#[test]
fn a_failed_step_fails_its_requests_and_the_engine_goes_on() {
    for fault in [Fault::Device, Fault::Panic, Fault::NotANumber] {
        let mut bench = bench();
        // Known to all, so that the failing requests write behind shared blocks.
        bench.ask(greedy(stem(1, 400), 1));
        let mut one = bench.submit(greedy(stem(1, 420), 50)).expect("good");
        let mut two = bench.submit(greedy(stem(2, 20), 50)).expect("good");
        bench.turns(5);
        bench.fail_step(0, fault);
        for submission in [&mut one, &mut two] {
            let answer = bench.finish(submission);
            match (fault, answer.failure()) {
                (Fault::Device, Some(RequestError::Device(what)))
                | (Fault::Panic, Some(RequestError::Panic(what))) => assert!(what.contains("as told")),
                (Fault::NotANumber, Some(RequestError::NotFinite { .. })) => {}
                (_, other) => panic!("{fault:?}: {other:?}"),
            }
            assert!(submission.recv().is_none(), "the stream ends");
        }
        let answer = bench.ask(greedy(stem(1, 420), 50));
        assert!(answer.started().cached_tokens >= 400);
        check_exact(&bench, &greedy(stem(1, 420), 50), &answer);
        let metrics = bench.driver.shared().metrics.snapshot();
        assert_eq!(metrics.requests_failed, 2);
        assert_eq!(metrics.step_errors + metrics.step_panics, u64::from(fault != Fault::NotANumber));
        bench.assert_balanced();
    }
}

#[test]
fn memory_that_runs_out_in_a_step_costs_the_newest_request_alone() {
    for step in 0..6 {
        let mut bench = bench();
        let ask = |i: u64| greedy(stem(i, 120 + 150 * i as usize), 30);
        let mut submissions: Vec<_> = (0..3).map(|i| bench.submit(ask(i)).expect("good")).collect();
        bench.turns(2);
        bench.fail_step(step, Fault::Memory);
        let answers: Vec<Answer> =
            submissions.iter_mut().map(|submission| bench.finish(submission)).collect();
        let Some(RequestError::Device(what)) = answers[2].failure() else {
            panic!("{:?}", answers[2].failure())
        };
        assert!(what.contains("out of memory on scripted"), "{what}");
        for (i, answer) in (0..).zip(&answers[..2]) {
            check_exact(&bench, &ask(i), answer);
        }
        // And there is room again.
        let answer = bench.ask(ask(2));
        check_exact(&bench, &ask(2), &answer);
        let metrics = bench.driver.shared().metrics.snapshot();
        assert_eq!((metrics.requests_failed, metrics.step_errors), (1, 1));
        bench.assert_balanced();
    }
}

#[test]
fn a_lost_device_is_remembered() {
    let mut bench = bench();
    bench.ask(greedy(stem(1, 40), 1));
    assert!(bench.driver.shared().lost.get().is_none());
    let mut submission = bench.submit(greedy(stem(1, 42), 50)).expect("good");
    bench.fail_step(0, Fault::Lost);
    let answer = bench.finish(&mut submission);
    let Some(RequestError::Device(what)) = answer.failure() else { panic!("{:?}", answer.failure()) };
    assert!(what.contains("lost to this process"), "{what}");
    assert_eq!(bench.driver.shared().lost.get(), Some(what));
    bench.assert_balanced();
}

#[test]
fn a_device_whose_layers_others_take_costs_the_requests_of_a_step() {
    for waits in [false, true] {
        let config = EngineConfig { event_ring: 16, ..EngineConfig::default() };
        let mut bench = Bench::new(2048, 256, &config);
        bench.ask(greedy(stem(1, 400), 1));
        // Its reader takes nothing after a while, so that it is in no step.
        let mut waiting = bench.submit(greedy(stem(2, 300), 40)).expect("good");
        if waits {
            bench.turns(60);
        }
        let mut computed = bench.submit(greedy(stem(1, 420), 50)).expect("good");
        bench.turns(3);
        bench.fail_step(0, Fault::Renewed);
        let answer = bench.finish(&mut computed);
        let Some(RequestError::Device(what)) = answer.failure() else { panic!("{:?}", answer.failure()) };
        assert!(what.contains("others have its layers now"), "{what}");
        let answer = bench.finish(&mut waiting);
        if waits {
            check_exact(&bench, &greedy(stem(2, 300), 40), &answer);
        } else {
            assert!(answer.failure().is_some(), "it was in the step");
        }
        // Nothing is known any more, and nobody takes the device for lost.
        let answer = bench.ask(greedy(stem(1, 400), 5));
        assert_eq!(answer.started().cached_tokens, 0);
        check_exact(&bench, &greedy(stem(1, 400), 5), &answer);
        assert!(bench.driver.shared().lost.get().is_none());
        bench.assert_balanced();
    }
}

#[test]
fn what_left_the_device_comes_back_from_host_memory() {
    // The device holds one prompt, host memory two.
    let config = EngineConfig {
        parallel: 1,
        kv_bytes: Some(2048 * (8 + 8)),
        host_bytes: 2048 * 30,
        ..EngineConfig::default()
    };
    let mut bench = Bench::new(2048, 256, &config);
    for round in 0..3 {
        for i in 0..2 {
            let ask = || greedy(stem(i, 1800), 3);
            let answer = bench.ask(ask());
            check_exact(&bench, &ask(), &answer);
            let cached = answer.started().cached_tokens;
            assert!(if round == 0 { cached == 0 } else { cached >= 1792 }, "round {round}: {cached}");
        }
    }
    let metrics = bench.driver.shared().metrics.snapshot();
    assert!(metrics.restored_blocks > 0 && metrics.host_bytes_held <= 2048 * 30);
    bench.assert_balanced();
}

#[test]
fn sequences_that_step_aside_come_back() {
    // Four answers of two blocks in memory for five blocks in all.
    let config = EngineConfig { kv_bytes: Some(2048 * (5 + 16)), ..EngineConfig::default() };
    let mut bench = Bench::new(1024, 256, &config);
    bench.driver.scheduler.memory.config.lookahead = 8;
    let full = bench.driver.shared().limits.full_blocks;
    assert!(full < 12, "{full}");
    let mut submissions: Vec<_> =
        (0..4).map(|i| bench.submit(greedy(stem(i, 200), 500)).expect("good")).collect();
    let mut answers: Vec<Answer> = (0..4).map(|_| Answer::default()).collect();
    while answers.iter().any(|answer| !answer.is_over()) {
        bench.turn();
        for (answer, submission) in answers.iter_mut().zip(&mut submissions) {
            while let Some(event) = submission.try_recv() {
                answer.take(event);
            }
        }
    }
    for (i, answer) in answers.iter().enumerate() {
        assert_eq!(answer.tokens(0).len(), 500);
        check_exact(&bench, &greedy(stem(i as u64, 200), 500), answer);
    }
    assert!(bench.driver.shared().metrics.snapshot().preemptions > 0);
    bench.assert_balanced();
}

#[test]
fn prompts_are_read_in_the_steps_that_the_executor_wants() {
    // A step of more than the fewest rows takes longer than it may: unless the executor knows better.
    let config = EngineConfig { prefill_step: Duration::from_millis(300), ..EngineConfig::default() };
    for (wanted, largest) in [(0, 64), (300, 300), (1 << 20, 512)] {
        let mut bench = Bench::with_prompt_rows(wanted, &config);
        for _ in 0..2 {
            bench.largest_step.store(0, Ordering::Relaxed);
            let ask = || Request { cache: false, ..greedy(stem(1, 1000), 2) };
            let answer = bench.ask(ask());
            check_exact(&bench, &ask(), &answer);
            assert_eq!(bench.largest_step.load(Ordering::Relaxed), largest, "{wanted} wanted");
        }
    }
}

#[test]
fn prefill_beside_decoding_keeps_to_its_budget() {
    let config = EngineConfig { prefill_rows: 400, mixed_rows: 50, ..EngineConfig::default() };
    let mut bench = Bench::new(4096, 256, &config);
    let mut decoding = bench.submit(greedy(stem(1, 20), 200)).expect("good");
    bench.turn();
    bench.turn();
    let before = bench.driver.shared().slots[0].read(0).generated_tokens;
    bench.largest_step.store(0, Ordering::Relaxed);
    let mut reading = bench.submit(greedy(stem(2, 1000), 1)).expect("good");
    for _ in 0..10 {
        bench.turn();
    }
    assert_eq!(bench.largest_step.load(Ordering::Relaxed), 50);
    assert_eq!(bench.driver.shared().slots[0].read(0).generated_tokens, before + 10, "a token each step");
    bench.finish(&mut reading);
    bench.finish(&mut decoding);
}

#[test]
fn prompts_are_read_side_by_side() {
    let config = EngineConfig { prefill_rows: 100, ..EngineConfig::default() };
    let mut bench = Bench::new(8192, 256, &config);
    let _long = bench.submit(greedy(stem(1, 8000), 1)).expect("good");
    bench.turn();
    let mut short = bench.submit(greedy(stem(2, 100), 1)).expect("good");
    let mut turns = 0;
    while !matches!(short.try_recv(), Some(Event::Started(_))) {
        bench.turn();
        turns += 1;
    }
    assert!(turns <= 3, "a short prompt waits for its share, not for the long one: {turns} turns");
}

#[test]
fn shutting_down_finishes_or_cancels() {
    for (level, reason) in [(1, FinishReason::Length), (2, FinishReason::Cancelled)] {
        let mut bench = bench();
        let mut submission = bench.submit(greedy(stem(1, 20), 30)).expect("good");
        bench.turn();
        bench.driver.shared().stopping.store(level, Ordering::SeqCst);
        assert_eq!(bench.submit(greedy(stem(1, 20), 30)).map(drop), Err(SubmitError::ShuttingDown));
        let mut last = Turn::Worked;
        while last == Turn::Worked {
            last = bench.turn();
        }
        if level == 2 {
            last = bench.turn();
        }
        assert_eq!(last, Turn::Stopped);
        let mut answer = Answer::default();
        while let Some(event) = submission.recv() {
            answer.take(event);
        }
        assert_eq!(answer.finished(0).reason, reason);
    }
}

#[test]
fn a_configuration_that_cannot_be_is_refused() {
    let check = |config: EngineConfig| {
        let geometry = geometry(512, 256);
        Driver::new(Box::new(ScriptedExecutor::new(geometry.clone())), &geometry, &config).map(drop)
    };
    let base = EngineConfig::default;
    for parallel in [0, 257] {
        let refused = check(EngineConfig { parallel, ..base() });
        assert!(matches!(refused, Err(EngineError::Config { key: "parallel", .. })));
    }
    let refused = check(EngineConfig { kv_bytes: Some(1000), ..base() });
    assert!(matches!(refused, Err(EngineError::KvBudget { budget: 1000, .. })));
    let refused = check(EngineConfig { context: Some(1), ..base() });
    assert!(matches!(refused, Err(EngineError::Config { key: "context", .. })));
}
