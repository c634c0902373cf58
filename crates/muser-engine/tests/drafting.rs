//! Drafting with the bundled draft on the scalar reference executor: the same tokens and logits as without, fewer steps.

use muser_backend::DraftExecutor as _;
use std::path::{Path, PathBuf};

use muser_backend::{KvType, ReferenceExecutor};
use muser_engine::{DraftLength, Engine, EngineConfig, Event, Request, SamplingParams, Usage};
use muser_model::{Draft, Model};

/// A user asks for a short story, in the bundled vocabulary.
const PROMPT: [u32; 21] = [
    4084, 4089, 306, 272, 4090, 563, 256, 536, 402, 348, 1355, 387, 256, 1229, 87, 13, 4087, 4089, 539, 415,
    398,
];

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(name)
}

/// What a greedy and a sampled request give when they run together.
fn run(proposals: usize) -> Vec<(Vec<(u32, u64)>, Usage)> {
    let model = Model::load(file("muse-tiny-Q4_K_M.gguf")).expect("the bundled model loads");
    let geometry = model.geometry.clone();
    let mut executor = ReferenceExecutor::new(model, KvType::F32).expect("it runs everything");
    let draft = Draft::load(muser_testkit::muse_tiny_draft()).expect("the bundled draft loads");
    executor.attach_draft(draft).expect("it fits");
    let config = EngineConfig {
        draft_length: DraftLength::Fixed(proposals),
        context: Some(512),
        ..EngineConfig::default()
    };
    let engine = Engine::spawn(Box::new(executor), geometry, config).expect("the engine starts");
    let mut submissions: Vec<_> = [SamplingParams::greedy(), SamplingParams::default()]
        .into_iter()
        .map(|sampling| {
            let request = Request {
                max_tokens: Some(32),
                sampling,
                seed: Some(3),
                hash_logits: true,
                ..Request::new(PROMPT.to_vec(), Vec::new())
            };
            engine.submit(request).expect("good")
        })
        .collect();
    let results = submissions
        .iter_mut()
        .map(|submission| {
            let (mut tokens, mut usage) = (Vec::new(), Usage::default());
            while let Some(event) = submission.recv() {
                match event {
                    Event::Token(token) => tokens.push((token.id, token.logit_hash.expect("asked for"))),
                    Event::Finished(finished) => usage = finished.usage,
                    Event::Started(_) => {}
                    other => panic!("{other:?}"),
                }
            }
            (tokens, usage)
        })
        .collect();
    assert_eq!(engine.metrics().draft_errors, 0);
    results
}

#[test]
fn drafts_change_no_token_and_no_logit() {
    let plain = run(0);
    let drafted = run(7);
    for ((plain_tokens, plain_usage), (tokens, usage)) in plain.iter().zip(&drafted) {
        assert_eq!(tokens, plain_tokens);
        assert_eq!((plain_usage.drafted_tokens, plain_usage.decode_steps), (0, 32));
        assert!(usage.accepted_tokens > 0 && usage.accepted_tokens <= usage.drafted_tokens);
        assert_eq!(usage.decode_steps + usage.accepted_tokens, 32);
    }
    // Greedy text is what the draft was trained on: clearly fewer steps than tokens.
    assert!(drafted[0].1.decode_steps <= 24, "{:?}", drafted[0].1);
}
