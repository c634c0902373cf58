//! Drafting does not grow: the process is as large after 200 cycles of requests, long and short by turns, as after the first
//! few. A cycle is one request; with `MUSER_TEST_LONG=1` it is sixteen at once, longer than both windows by turns.

use muser_backend::DraftExecutor as _;

use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{DraftLength, Engine, EngineConfig, Event, Request, SamplingParams};
use muser_model::{Draft, Model};

#[test]
fn two_hundred_requests_leave_memory_as_it_was() {
    const WARM_UP: usize = 60;
    let model = Model::load(muser_testkit::muse_tiny()).expect("the bundled model loads");
    let geometry = model.geometry.clone();
    let options = CpuOptions { threads: Some(1), ..CpuOptions::default() };
    let mut executor = CpuExecutor::new(model, options).expect("it runs everywhere");
    let draft = Draft::load(muser_testkit::muse_tiny_draft()).expect("the bundled draft loads");
    executor.attach_draft(draft).expect("it fits");
    let long = muser_testkit::is_long();
    let together = if long { 16 } else { 1 };
    // Little KV memory, so that every block of it has been used and evicted after the first few requests.
    let config = EngineConfig {
        draft_length: DraftLength::Fixed(7),
        parallel: 2.max(together),
        context: Some(1024),
        kv_bytes: Some((24 << 20) * 2.max(together as u64) / 2),
        ..EngineConfig::default()
    };
    let engine = Engine::spawn(Box::new(executor), geometry, config).expect("the engine starts");
    // Longer than the target's window, and with time for it longer than the draft's too.
    let long_prompt = if long { 700 } else { 270 };
    let (mut after_warm_up, mut accepted) = (None, 0);
    for i in 0..200 {
        if i == WARM_UP {
            after_warm_up = muser_testkit::resident_bytes();
        }
        let mut submissions: Vec<_> = (0..together)
            .map(|k| {
                // A long one, then a short one right behind it in the same slot.
                let length = if (i + k) % 2 == 0 { long_prompt } else { 3 };
                let id = |j: usize| 256 + (i * 131 + k * 977 + j * 37) as u32 % 3700;
                let prompt: Vec<u32> = (0..length).map(id).collect();
                let request = Request {
                    max_tokens: Some(12),
                    sampling: SamplingParams::greedy(),
                    ..Request::new(prompt, Vec::new())
                };
                engine.submit(request).expect("good")
            })
            .collect();
        for submission in &mut submissions {
            let mut tokens = 0;
            while let Some(event) = submission.recv() {
                match event {
                    Event::Token(_) => tokens += 1,
                    Event::Finished(finished) => accepted += finished.usage.accepted_tokens,
                    Event::Started(_) => {}
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(tokens, 12, "cycle {i}");
        }
    }
    let metrics = engine.metrics();
    assert_eq!(metrics.draft_errors, 0);
    assert!(accepted > 0 && metrics.evicted_blocks > 0);
    if let (Some(before), Some(after)) = (after_warm_up, muser_testkit::resident_bytes()) {
        println!("{before} bytes after {WARM_UP} cycles of {together}, {after} after 200");
        assert!(after < before + (2 << 20), "{before} bytes after {WARM_UP} cycles, {after} after 200");
    }
}
