//! The engine with a real model on the CPU: 16 clients at a time, three in ten of them leaving at random moments, and
//! every token and every logit is that of running alone and cold.
//!
//! Some seconds here; two minutes with `MUSER_TEST_LONG=1`.

use std::time::{Duration, Instant};

use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{
    Engine, EngineConfig, EngineHandle, Event, FinishReason, Request, SamplingParams, SlotState, Submission,
};
use muser_model::{Geometry, Model};
use muser_testkit::Rng;

const CLIENTS: usize = 16;

fn engine(config: EngineConfig) -> (EngineHandle, Geometry) {
    let path = muser_testkit::muse_tiny();
    let model = Model::load(&path).expect("the bundled model loads");
    let geometry = model.geometry.clone();
    let executor = CpuExecutor::new(model, CpuOptions::default()).expect("the CPU runs it");
    let engine = Engine::spawn(Box::new(executor), geometry.clone(), config).expect("the engine starts");
    (engine, geometry)
}

/// A kind of request; all of a kind must give the same tokens.
struct Kind {
    prompt: Vec<u32>,
    max_tokens: u32,
    greedy: bool,
    expected: Vec<(u32, u64)>,
}

impl Kind {
    fn request(&self, cache: bool) -> Request {
        let sampling = if self.greedy { SamplingParams::greedy() } else { SamplingParams::default() };
        Request {
            max_tokens: Some(self.max_tokens),
            sampling,
            seed: Some(7),
            hash_logits: true,
            cache,
            ..Request::new(self.prompt.clone(), Vec::new())
        }
    }
}

/// Prompts that share beginnings: below, at and beyond the window of 256, and some that are each other's continuation.
fn kinds(vocab: usize, rng: &mut Rng) -> Vec<Kind> {
    let stem: Vec<u32> = (0..900).map(|_| rng.below(vocab) as u32).collect();
    [5, 60, 61, 255, 256, 257, 300, 520, 700, 900]
        .into_iter()
        .enumerate()
        .map(|(i, len)| {
            let mut prompt = stem[..len].to_vec();
            if i % 3 == 2 {
                prompt.extend((0..9).map(|_| rng.below(vocab) as u32));
            }
            Kind { prompt, max_tokens: 8 + rng.below(60) as u32, greedy: i % 2 == 0, expected: Vec::new() }
        })
        .collect()
}

fn read_all(submission: &mut Submission) -> (Vec<(u32, u64)>, Option<FinishReason>) {
    let mut tokens = Vec::new();
    let mut reason = None;
    while let Some(event) = submission.recv() {
        match event {
            Event::Token(token) => tokens.push((token.id, token.logit_hash.expect("asked for"))),
            Event::Finished(finished) => reason = Some(finished.reason),
            Event::Started(_) => {}
            other => panic!("{other:?}"),
        }
    }
    (tokens, reason)
}

#[test]
fn sixteen_clients_three_in_ten_leaving_and_no_wrong_token() {
    let long = muser_testkit::is_long();
    let duration = Duration::from_secs(if long { 120 } else { 4 });
    let mut rng = Rng(42);
    // Alone and cold: an engine with one slot, and nothing kept.
    let (alone, geometry) = engine(EngineConfig { parallel: 1, ..EngineConfig::default() });
    let mut kinds = kinds(geometry.vocab, &mut rng);
    for kind in &mut kinds {
        let mut submission = alone.submit(kind.request(false)).expect("good");
        kind.expected = read_all(&mut submission).0;
        assert_eq!(kind.expected.len(), kind.max_tokens as usize);
    }
    drop(alone);

    // Memory for about three long sequences: eviction and waiting are part of it.
    let (engine, _) =
        engine(EngineConfig { kv_bytes: Some(24 << 20), prefill_rows: 200, ..EngineConfig::default() });
    let total = engine.metrics().kv_bytes_total;
    assert!(total <= 24 << 20);
    let kinds = &kinds;
    let outcomes: Vec<(u32, u32)> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let engine = engine.clone();
                let mut rng = Rng(1000 + client as u64);
                scope.spawn(move || {
                    let (mut whole, mut left) = (0, 0);
                    let end = Instant::now() + duration;
                    while Instant::now() < end {
                        let kind = &kinds[rng.below(kinds.len())];
                        let mut submission = engine.submit(kind.request(true)).expect("good");
                        if rng.below(10) < 3 {
                            // Leaves: at once, or after some events.
                            for _ in 0..rng.below(12) {
                                if let Some(Event::Failed(error)) = submission.recv() {
                                    panic!("{error}");
                                }
                            }
                            left += 1;
                            continue;
                        }
                        let (tokens, reason) = read_all(&mut submission);
                        assert_eq!(reason, Some(FinishReason::Length));
                        assert_eq!(tokens, kind.expected, "prompt of {}", kind.prompt.len());
                        whole += 1;
                    }
                    (whole, left)
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().expect("no client panicked")).collect()
    });
    let whole: u32 = outcomes.iter().map(|outcome| outcome.0).sum();
    let left: u32 = outcomes.iter().map(|outcome| outcome.1).sum();
    assert!(whole > 0 && left > 0, "{whole} answers, {left} left");

    let start = Instant::now();
    while engine.in_flight() > 0 || engine.metrics().full_blocks_used > 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "something leaked: {:?}", engine.metrics());
        std::thread::sleep(Duration::from_millis(2));
    }
    let metrics = engine.metrics();
    assert_eq!(metrics.sliding_blocks_used, 0);
    assert!(metrics.cached_tokens > 0 && metrics.kv_bytes_held <= total);
    assert_eq!((metrics.requests_failed, metrics.step_errors, metrics.step_panics), (0, 0, 0));
    assert!(engine.slots().iter().all(|slot| slot.state == SlotState::Idle));
    println!(
        "{whole} answers read, {left} clients left, {} of {} prompt tokens reused, {} blocks evicted, {} copied",
        metrics.cached_tokens, metrics.prompt_tokens, metrics.evicted_blocks, metrics.copied_blocks
    );
}
