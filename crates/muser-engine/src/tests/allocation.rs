//! A decode step allocates nothing: counted by the allocator, for this thread, while the engine turns.
#![allow(unsafe_code, reason = "a global allocator cannot be written without; it forwards to the system's")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use crate::{
    EngineConfig, Request, SamplingParams, Submission,
    testing::{Bench, request, stem},
};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // A thread that is ending has no counter any more, and nobody asks for it.
    let _ = ALLOCATIONS.try_with(|counter| counter.set(counter.get() + 1));
}

// SAFETY: every method forwards its arguments unchanged to the system allocator, whose contract is the same.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; `pointer` came from `System` because all of ours do.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(vec![1u8; 100]))), 1);
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
    let mut submissions: Vec<Submission> = [
        ask(1, SamplingParams::greedy(), None),
        ask(2, SamplingParams::default(), Some(20)),
        ask(3, plain, None),
        ask(4, shaped, Some(3)),
    ]
    .into_iter()
    .map(|request| bench.submit(request).expect("good"))
    .collect();
    bench.turns(20);
    let mut tokens = 0;
    for turn in 0..700 {
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
    assert!(tokens >= 4 * 700, "all four decode all the time: {tokens}");
    assert!(bench.driver.shared().metrics.snapshot().evicted_blocks > 0);
}
