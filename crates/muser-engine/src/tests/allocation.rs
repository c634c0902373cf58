//! A decode step allocates nothing: counted by the allocator, for this thread, while the engine turns. With all that a
//! request of the product has in place: the watch of stop strings that the server and the command install, a constraint on
//! tokens, and a draft.

use std::sync::Arc;

use muser_testkit::{CountingAllocator, allocations, muse_tiny, uncounted};
use muser_text::{Markers, OutputMode, OutputOptions, StopMatcher, Tokenizer};

use crate::{
    Constraint, DraftLength, EngineConfig, Request, SamplingParams, StopWatch, Submission, TokenMask,
    testing::{Bench, Costs, request, stem},
};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1u8; 100]))), 1);
}

/// The product's own watch, for a chat with stop strings that do not come.
struct Watch(StopMatcher);

impl StopWatch for Watch {
    fn push(&mut self, token: u32) -> bool {
        self.0.push(token)
    }
}

fn watched(request: Request) -> Request {
    let path = muse_tiny();
    let file = muser_gguf::GgufFile::open(path).expect("the bundled model opens");
    let tokenizer = Arc::new(Tokenizer::from_gguf(&file).expect("it has a vocabulary"));
    let options = OutputOptions {
        mode: OutputMode::Raw(Markers::Show),
        stop: vec!["no such text".into(), "!\"#$%&'()*+,-./0123456789:;<=>?".into()],
        ..OutputOptions::default()
    };
    let matcher =
        StopMatcher::new(tokenizer, &options, false).expect("good options").expect("there are stops");
    Request { stop_watch: Some(Box::new(move |_| Box::new(Watch(matcher.clone())))), ..request }
}

/// Every token narrows the next: as a grammar does, and allowing enough that a draft's proposals are sometimes right.
#[derive(Clone)]
struct Narrow(u32);

impl Constraint for Narrow {
    fn mask(&mut self, allowed: &mut TokenMask) -> bool {
        allowed.allow_all();
        (0..40).filter(|id| id % 7 == self.0 % 7).for_each(|id| allowed.forbid(id));
        true
    }

    fn commit(&mut self, token: u32) -> Result<(), String> {
        self.0 = self.0.wrapping_mul(31).wrapping_add(token);
        Ok(())
    }

    fn fork(&self) -> Option<Box<dyn Constraint>> {
        // The copy is the grammar's, not the engine's.
        Some(uncounted(|| Box::new(self.clone())))
    }
}

fn narrowed(request: Request) -> Request {
    Request { constraint: Some(Box::new(|index| Box::new(Narrow(index)))), ..request }
}

/// Turns while all sequences decode: allocations must be none in each.
fn decode(bench: &mut Bench, requests: Vec<Request>, turns: usize) -> usize {
    let mut submissions: Vec<Submission> =
        requests.into_iter().map(|request| bench.submit(request).expect("good")).collect();
    bench.turns(20);
    let mut tokens = 0;
    for turn in 0..turns {
        let allocations = allocations(|| {
            std::hint::black_box(bench.driver.turn());
        });
        assert_eq!(allocations, 0, "allocations in turn {turn}");
        for submission in &mut submissions {
            while submission.try_recv().is_some() {
                tokens += 1;
            }
        }
    }
    tokens
}

/// The control of the test below: a watch that makes text is seen.
#[test]
#[should_panic(expected = "allocations in turn")]
fn a_watch_that_allocates_is_seen() {
    struct Wasteful;
    impl StopWatch for Wasteful {
        fn push(&mut self, token: u32) -> bool {
            std::hint::black_box(token.to_string()).is_empty()
        }
    }
    let mut bench = Bench::new(2048, 256, &EngineConfig::default());
    let wasteful =
        Request { stop_watch: Some(Box::new(|_| Box::new(Wasteful))), ..request(stem(1, 100), 900) };
    decode(&mut bench, vec![wasteful], 10);
}

#[test]
fn a_decode_step_with_watch_constraint_and_draft_allocates_nothing() {
    for length in [DraftLength::Fixed(4), DraftLength::Auto] {
        let config = EngineConfig { parallel: 4, draft_length: length, ..EngineConfig::default() };
        // Where steps are dear and drafts are cheap, lengths follow what was accepted and change all the time.
        let costs = Costs { step: |_| 20_000, draft: |rows| 200 + 10 * rows as u64 };
        let mut bench = Bench::timed(2048, 256, &config, costs);
        let ask = |i: u64, sampling: SamplingParams, logprobs| {
            let base = request(stem(i, 100 + 30 * i as usize), 1900);
            Request { sampling, logprobs, ..base }
        };
        let penalties = SamplingParams {
            repetition_penalty: 1.1,
            presence_penalty: 0.1,
            logit_bias: vec![(3, 1.0)],
            ..SamplingParams::default()
        };
        let requests = vec![
            watched(ask(1, SamplingParams::greedy(), None)),
            narrowed(watched(ask(2, SamplingParams::default(), Some(5)))),
            narrowed(watched(ask(3, SamplingParams::greedy(), None))),
            narrowed(watched(ask(4, penalties, None))),
        ];
        let tokens = decode(&mut bench, requests, 250);
        let figures = bench.driver.shared().metrics.snapshot();
        assert!(tokens >= 4 * 250, "all four decode all the time: {tokens}");
        assert!(figures.drafted_tokens > 0 && figures.accepted_tokens > 0, "the draft works: {figures:?}");
    }
}

#[test]
fn a_decode_step_allocates_nothing() {
    // Little memory, so that blocks are evicted meanwhile; long enough for every sequence to pass block boundaries.
    let config = EngineConfig { kv_bytes: Some(2048 * 44), parallel: 5, ..EngineConfig::default() };
    let mut bench = Bench::new(2048, 256, &config);
    for i in 0..3 {
        bench.ask(request(stem(50 + i, 1500), 1));
    }
    let plain = SamplingParams { top_k: 0, top_p: 1.0, ..SamplingParams::default() };
    let shaped = SamplingParams {
        repetition_penalty: 1.1,
        presence_penalty: 0.1,
        frequency_penalty: 0.1,
        min_p: 0.01,
        top_k: 0,
        logit_bias: vec![(3, 1.0)],
        ..SamplingParams::default()
    };
    let ask = |i: u64, sampling: SamplingParams, logprobs| {
        let base = request(stem(i, 100 + 30 * i as usize), 900);
        Request { sampling, logprobs, ..base }
    };
    let requests = vec![
        ask(1, SamplingParams::greedy(), None),
        ask(2, SamplingParams::default(), Some(20)),
        ask(3, plain, None),
        ask(4, shaped, Some(3)),
    ];
    let tokens = decode(&mut bench, requests, 700);
    assert!(tokens >= 4 * 700, "all four decode all the time: {tokens}");
    assert!(bench.driver.shared().metrics.snapshot().evicted_blocks > 0);
}
