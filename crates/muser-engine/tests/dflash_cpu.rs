//! Drafting on the CPU executor, end to end: greedy text and the logits behind every token are those of plain decoding,
//! whatever the number of proposals and whoever else is in the batch.
//!
//! Small by default; `MUSER_TEST_LONG=1` takes 500 prompts of 200 tokens, every batch size from 1 to 8 with every number of
//! proposals. It prints what it did.

use muser_backend::DraftExecutor as _;
use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{DraftLength, Engine, EngineConfig, EngineHandle, Event, Request, SamplingParams, Usage};
use muser_model::{Draft, Model};

/// `<|begin_of_text|><|start|>user<|message|>` and `<|eot|><|start|>assistant` in the bundled vocabulary.
const HEAD: [u32; 5] = [4084, 4089, 306, 272, 4090];
const TAIL: [u32; 5] = [4087, 4089, 539, 415, 398];
/// What users ask: stories about a fox and about a girl who finds a map, bridges, rain, sleep, the sky, a poem, rivers.
const QUESTIONS: [&[u32]; 8] = [
    &[563, 256, 536, 402, 348, 1355, 387, 256, 1229, 87, 13],
    &[563, 256, 536, 402, 387, 256, 905, 392, 1045, 256, 1476, 13],
    &[581, 303, 256, 3234, 30],
    &[1603, 948, 3735, 2171, 13],
    &[1504, 418, 1658, 1803, 82, 348, 1049, 281, 1106, 13],
    &[2178, 303, 262, 2706, 2675, 30],
    &[563, 256, 1191, 474, 387, 262, 1579, 13],
    &[581, 303, 262, 1081, 895, 256, 296, 422, 275, 256, 3583, 30],
];
/// Most proposals of the bundled draft, and most sequences at once.
const MOST: usize = 7;
const BATCH: usize = 8;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(name)
}

/// An engine over Muse Tiny that proposes so many tokens; `None` has no draft at all.
fn engine(proposals: Option<usize>, parallel: usize) -> EngineHandle {
    let model = Model::load(file("muse-tiny-Q4_K_M.gguf")).expect("the bundled model loads");
    let geometry = model.geometry.clone();
    // The bits do not depend on the number of threads, and one never waits for another.
    let options = CpuOptions { threads: Some(1), ..CpuOptions::default() };
    let mut executor = CpuExecutor::new(model, options).expect("it runs everywhere");
    if proposals.is_some() {
        let draft = Draft::load(muser_testkit::muse_tiny_draft()).expect("the bundled draft loads");
        executor.attach_draft(draft).expect("it fits");
    }
    let config = EngineConfig {
        draft_length: DraftLength::Fixed(proposals.unwrap_or(0)),
        parallel,
        context: Some(1536),
        ..EngineConfig::default()
    };
    Engine::spawn(Box::new(executor), geometry, config).expect("the engine starts")
}

/// Ids and hashes of logits.
type Text = Vec<(u32, u64)>;

/// Greedy continuations of `prompts`, all submitted together.
fn generate(engine: &EngineHandle, prompts: &[Vec<u32>], tokens: usize) -> Vec<(Text, Usage)> {
    let mut submissions: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let request = Request {
                max_tokens: Some(tokens as u32),
                sampling: SamplingParams::greedy(),
                hash_logits: true,
                ..Request::new(prompt.clone(), Vec::new())
            };
            engine.submit(request).expect("good")
        })
        .collect();
    submissions
        .iter_mut()
        .map(|submission| {
            let (mut text, mut usage) = (Vec::new(), Usage::default());
            while let Some(event) = submission.recv() {
                match event {
                    Event::Token(token) => text.push((token.id, token.logit_hash.expect("asked for"))),
                    Event::Finished(finished) => usage = finished.usage,
                    Event::Started(_) => {}
                    other => panic!("{other:?}"),
                }
            }
            (text, usage)
        })
        .collect()
}

/// Question `i`, with words of its own before its end: some have one more, some hundreds.
fn prompt(i: usize) -> Vec<u32> {
    let mut state = i as u64 + 1;
    let mut below = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let mut ids = HEAD.to_vec();
    ids.extend_from_slice(QUESTIONS[i % QUESTIONS.len()]);
    let extra = if i % 16 == 5 { 200 + below(500) } else { below(20) };
    ids.extend((0..extra).map(|_| 256 + below(3700) as u32));
    ids.extend_from_slice(&TAIL);
    ids
}

#[test]
fn drafted_text_is_plain_text_alone_and_in_batches() {
    let long = muser_testkit::is_long();
    let (count, tokens) = if long { (500, 200) } else { (14, 40) };
    let prompts: Vec<Vec<u32>> = (0..count).map(prompt).collect();
    let started = Instant::now();
    let plain = engine(None, 1);
    let expected: Vec<Text> =
        prompts.iter().flat_map(|p| generate(&plain, std::slice::from_ref(p), tokens)).map(|t| t.0).collect();
    drop(plain);
    println!("plain, alone: {:.1} s", started.elapsed().as_secs_f64());

    let plain = engine(None, BATCH);
    for (texts, prompts) in expected.chunks(BATCH).zip(prompts.chunks(BATCH)) {
        let found = generate(&plain, prompts, tokens);
        assert!(found.iter().map(|(text, _)| text).eq(texts), "a plain batch differs");
    }
    drop(plain);
    println!("plain, in batches: {:.1} s", started.elapsed().as_secs_f64());

    let drafting: Vec<EngineHandle> = (1..=MOST).map(|proposals| engine(Some(proposals), BATCH)).collect();
    let (mut steps, mut checked, mut right) = ([0; MOST], [0; MOST], [0; MOST]);
    let mut compare = |proposals: usize, batch: std::ops::Range<usize>| {
        let found = generate(&drafting[proposals - 1], &prompts[batch.clone()], tokens);
        for ((text, usage), i) in found.iter().zip(batch.clone()) {
            let at = text.iter().zip(&expected[i]).position(|(a, b)| a != b);
            assert!(
                at.is_none(),
                "prompt {i}: {proposals} proposals, batch {batch:?}: differs at token {at:?}"
            );
            assert_eq!(text.len(), expected[i].len(), "prompt {i}");
            steps[proposals - 1] += usage.decode_steps;
            checked[proposals - 1] += usage.drafted_tokens;
            right[proposals - 1] += usage.accepted_tokens;
        }
    };
    for i in 0..count {
        compare(1 + i % MOST, i..i + 1);
    }
    println!("drafted, alone: {:.1} s", started.elapsed().as_secs_f64());
    let (mut first, mut k) = (0, 0);
    while first < count {
        // All 49 pairs of a batch size from 2 to 8 and a number of proposals come up once in 49 batches.
        let (size, proposals) = (2 + k % 7, 1 + (k / 7 + 3 * (k % 7)) % MOST);
        let end = (first + size).min(count);
        compare(proposals, first..end);
        (first, k) = (end, k + 1);
    }
    println!("drafted, in batches: {:.1} s", started.elapsed().as_secs_f64());
    for proposals in 1..=MOST {
        let i = proposals - 1;
        let per_step = f64::from(right[i]) / f64::from(steps[i]) + 1.0;
        println!("{proposals} proposals: {} of {} right, {per_step:.2} tokens a step", right[i], checked[i]);
        assert!(right[i] > 0, "{proposals} proposals: none was ever right");
    }
    for engine in &drafting {
        assert_eq!(engine.metrics().draft_errors, 0);
    }
}

#[test]
fn proposals_are_worth_what_the_draft_was_trained_to() {
    // On the model's own greedy text. 7 proposals gave 2.24 tokens per pass when the draft was trained.
    let prompts: Vec<Vec<u32>> =
        QUESTIONS.iter().map(|question| [&HEAD[..], question, &TAIL[..]].concat()).collect();
    let tokens_per_pass = |engine: &EngineHandle, at_once: usize| {
        let results: Vec<_> =
            prompts.chunks(at_once).flat_map(|prompts| generate(engine, prompts, 150)).collect();
        let tokens: usize = results.iter().map(|(text, _)| text.len()).sum();
        let passes: u32 = results.iter().map(|(_, usage)| usage.decode_steps).sum();
        tokens as f64 / f64::from(passes)
    };
    let alone = tokens_per_pass(&engine(Some(MOST), 1), 1);
    let together = tokens_per_pass(&engine(Some(MOST), BATCH), BATCH);
    println!("{alone:.3} tokens per target pass alone, {together:.3} with {BATCH} together");
    assert!(alone >= 2.2, "{alone:.3} tokens per target pass");
    // A round is a function of the sequence alone.
    assert!((together / alone - 1.0).abs() < 0.01, "{together:.3} against {alone:.3}");
}

#[test]
fn sixteen_together_accept_what_each_accepts_alone() {
    const TOGETHER: usize = 16;
    let prompts: Vec<Vec<u32>> = (0..TOGETHER).map(prompt).collect();
    let texts = |engine: &EngineHandle, at_once: usize| -> Vec<(Text, Usage)> {
        prompts.chunks(at_once).flat_map(|prompts| generate(engine, prompts, 60)).collect()
    };
    let (alone, together) =
        (texts(&engine(Some(MOST), 1), 1), texts(&engine(Some(MOST), TOGETHER), TOGETHER));
    let accepted =
        |texts: &[(Text, Usage)]| -> u32 { texts.iter().map(|(_, usage)| usage.accepted_tokens).sum() };
    println!("accepted alone {}, with {TOGETHER} together {}", accepted(&alone), accepted(&together));
    for (i, ((text, usage), (text_together, usage_together))) in alone.iter().zip(&together).enumerate() {
        assert_eq!(text, text_together, "prompt {i}");
        // Not within ten per cent, but the same: rounds do not see each other.
        assert_eq!(usage.accepted_tokens, usage_together.accepted_tokens, "prompt {i}");
    }
    assert!(accepted(&alone) > 0);
}
