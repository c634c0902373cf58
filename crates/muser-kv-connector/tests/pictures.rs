//! Prompts with pictures on the CPU, by hash: alone = with others = in any chunks = warm = from a pack after a restart = drafted = with
//! any number of threads; and what was known is not computed again.
//!
//! Some seconds here; more schedules with `MUSER_TEST_LONG=1`.

mod support;

use muser_backend::arith::vision::PositionRule;
use muser_backend::{DraftExecutor as _, Executor as _, TowerExecutor as _, TowerImage, picture_digest};
use muser_cpu::{CpuExecutor, CpuOptions};
use muser_engine::{
    DraftLength, Engine, EngineConfig, EngineHandle, Event, ImageRows, ImageSource, Prompt, Request,
};
use muser_kv_connector::{PackOptions, PackSource, identity_of, weights_root};
use muser_model::{Model, Projector};
use support::{Answer, Disk, Rng, Running, ask, models, read, request};

/// Tokens that are written.
const TOKENS: u32 = 6;

fn executor(threads: usize, with_draft: bool) -> (Model, CpuExecutor) {
    let model = Model::load(models().join("muse-tiny-Q4_K_M.gguf")).expect("the bundled model loads");
    let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
    let mut executor = CpuExecutor::new(model.clone(), options).expect("the CPU runs it");
    if with_draft {
        executor.attach_draft(support::draft()).expect("it fits");
    }
    let projector =
        Projector::load(muser_testkit::muse_tiny_projector()).expect("the bundled projector loads");
    executor.attach_projector(projector, PositionRule::Raster).expect("it fits");
    (model, executor)
}

fn engine(threads: usize, with_draft: bool, config: EngineConfig) -> EngineHandle {
    let (model, executor) = executor(threads, with_draft);
    Engine::spawn(Box::new(executor), model.geometry, config).expect("it starts")
}

fn config() -> EngineConfig {
    EngineConfig { context: Some(1536), draft_length: DraftLength::Fixed(4), ..EngineConfig::default() }
}

/// A picture of so many tokens with its digest.
fn picture(rows: usize, cols: usize, seed: u64) -> (TowerImage, [u8; 32]) {
    let mut rng = Rng(seed);
    let noise: Vec<u8> = (0..64).map(|_| rng.below(256) as u8).collect();
    let byte = |i: usize| noise[(i / 3 + i / 999 * 7) % 64].wrapping_add((i % 3 * 40) as u8);
    let rgb: Vec<u8> = (0..rows * cols * 28 * 28 * 3).map(byte).collect();
    let sides = (28 * cols as u32, 28 * rows as u32);
    let digest = picture_digest("muse-tiny", "none", 4096, sides, &rgb);
    (TowerImage { rows, cols, rgb: rgb.into() }, digest)
}

/// Rows and columns of tokens, and a seed.
type Shape = (usize, usize, u64);

/// Texts and pictures in turn.
fn prompt(parts: &[(&[u32], Shape)], end: &[u32]) -> Prompt {
    let mut prompt = Prompt { tokens: Vec::new(), images: Vec::new() };
    for (text, (rows, cols, seed)) in parts {
        prompt.tokens.extend_from_slice(text);
        let (image, digest) = picture(*rows, *cols, *seed);
        prompt.images.push(ImageRows {
            at: prompt.tokens.len(),
            source: ImageSource::Picture(image),
            digest,
        });
        prompt.tokens.extend(std::iter::repeat_n(7, rows * cols));
    }
    prompt.tokens.extend_from_slice(end);
    prompt
}

fn asked(prompt: &Prompt, cache: bool) -> Request {
    Request { prompt: prompt.clone(), cache, ..request(&[], TOKENS, true) }
}

/// Prompts that share beginnings and pictures: a picture at the beginning, across the edge of a block, two of them, one of a
/// single token, one longer than the window, one that is another's with more behind it.
fn all_prompts() -> Vec<Prompt> {
    let mut rng = Rng(5);
    let stem = rng.tokens(300);
    let more = rng.tokens(40);
    let (small, wide, tall, dot) = ((3, 5, 1), (2, 30, 2), (17, 17, 3), (1, 1, 4));
    vec![
        prompt(&[(&stem[..3], small)], &more[..9]),
        prompt(&[(&stem[..240], wide)], &more[..5]),
        prompt(&[(&stem[..3], small)], &more),
        prompt(&[(&stem[..3], small), (&more[..7], wide)], &more[7..12]),
        prompt(&[(&[], dot)], &more[..3]),
        prompt(&[(&stem[..20], tall)], &more[..6]),
        // In shape alone, and in pixels alone, another picture than the first one's.
        prompt(&[(&stem[..3], (5, 3, 1))], &more[..9]),
        prompt(&[(&stem[..3], (3, 5, 9))], &more[..9]),
    ]
}

/// Ids with the hashes of their logits.
type Text = Vec<(u32, u64)>;

fn expected(prompts: &[Prompt]) -> Vec<Text> {
    let alone = engine(1, false, EngineConfig { parallel: 1, ..config() });
    prompts.iter().map(|prompt| ask(&alone, asked(prompt, false)).0).collect()
}

fn together(engine: &EngineHandle, prompts: &[Prompt], cache: bool) -> Vec<Answer> {
    let submit = |prompt: &Prompt| engine.submit(asked(prompt, cache)).expect("good");
    let mut submissions: Vec<_> = prompts.iter().map(submit).collect();
    submissions.iter_mut().map(read).collect()
}

/// D11: drafts go on behind a picture, too.
#[test]
fn a_picture_is_the_same_alone_with_others_in_chunks_warm_drafted_and_with_more_threads() {
    let prompts = all_prompts();
    let expected = expected(&prompts);
    for (i, text) in expected.iter().enumerate() {
        assert!(text.len() == TOKENS as usize && expected[..i].iter().all(|other| other != text), "{i}");
    }
    let texts = |answers: Vec<Answer>| -> Vec<Text> { answers.into_iter().map(|answer| answer.0).collect() };
    // Chunks that cut pictures anywhere, one sequence or four at a time, threads, drafts.
    for (chunk, parallel, threads, draft) in [(7, 1, 1, None), (64, 4, 2, Some(1)), (33, 2, 3, Some(7))] {
        let config = EngineConfig {
            prefill_rows: chunk,
            parallel,
            draft_length: DraftLength::Fixed(draft.unwrap_or(0)),
            ..config()
        };
        let engine = engine(threads, draft.is_some(), config);
        let found = texts(together(&engine, &prompts, false));
        assert_eq!(found, expected, "chunks of {chunk}, {parallel} together, {threads} threads, {draft:?}");
        // Warm, in another order: what is known of a prompt ends anywhere.
        let cold = texts(together(&engine, &prompts, true));
        assert_eq!(cold, expected);
        for (i, prompt) in prompts.iter().enumerate().rev() {
            assert_eq!(ask(&engine, asked(prompt, true)).0, expected[i], "{i}, warm");
        }
        if let Some(proposals) = draft.filter(|proposals| *proposals > 1) {
            assert!(engine.metrics().drafted_tokens > 0, "{proposals} proposals after a picture");
        }
    }
}

#[test]
fn a_second_question_computes_no_row_of_the_tower_and_none_of_the_picture() {
    let mut rng = Rng(8);
    let (stem, first, second) = (rng.tokens(30), rng.tokens(20), rng.tokens(25));
    let of = |end: &[u32], seed: u64| prompt(&[(&stem, (4, 6, seed))], end);
    let engine = engine(1, false, config());
    ask(&engine, asked(&of(&first, 1), true));
    let before = engine.metrics();
    assert_eq!((before.images_encoded, before.image_rows_encoded), (1, 24));
    let (_, usage) = ask(&engine, asked(&of(&second, 1), true));
    let after = engine.metrics();
    assert_eq!(usage.cached_tokens, 30 + 24);
    assert_eq!(after.prefill_rows - before.prefill_rows, 25);
    assert_eq!((after.images_encoded, after.image_cache_hits), (1, 0), "nobody even asked for its rows");
    // Another picture in its place shares the text before it, up to the token that is bound to the picture.
    let (_, usage) = ask(&engine, asked(&of(&second, 2), true));
    assert_eq!(usage.cached_tokens, 29);
    assert_eq!(engine.metrics().images_encoded, 2);
}

fn start(disk: &Disk, with_draft: bool) -> Running {
    let (model, executor) = executor(1, with_draft);
    let root = weights_root(&model.file, None, 1, |_| {});
    let draft = with_draft.then(support::draft);
    let draft = draft.as_ref().map(|draft| (draft, weights_root(&draft.file, None, 1, |_| {})));
    let identity = identity_of(&model, root, draft, executor.info()).expect("it fits");
    let library = disk.library();
    let scope = library.scope(identity, "");
    let config = EngineConfig { identity: scope.digest().to_vec(), ..config() };
    let (source, packs) = PackSource::start(library, scope, PackOptions::default()).expect("threads");
    let engine = Engine::spawn_with(Box::new(executor), model.geometry, config, Some(Box::new(source)));
    Running { engine: engine.expect("it starts"), packs }
}

#[test]
fn a_pack_brings_a_picture_back_after_a_restart_without_the_tower() {
    // Long enough to be worth a pack.
    let stem = Rng(6).tokens(270);
    let mut prompts = vec![
        prompt(&[(&stem[..250], (2, 6, 1))], &stem[..9]),
        prompt(&[(&stem[..250], (2, 6, 1))], &stem[9..20]),
        prompt(&[(&stem, (1, 1, 4)), (&stem[..5], (4, 3, 2))], &stem[..4]),
    ];
    prompts.push(all_prompts().swap_remove(5));
    let expected = expected(&prompts);
    for with_draft in [false, true] {
        let disk = Disk::new();
        let first = start(&disk, with_draft);
        for (prompt, expected) in prompts.iter().zip(&expected) {
            assert_eq!(&ask(&first.engine, asked(prompt, true)).0, expected);
        }
        first.stop();
        let second = start(&disk, with_draft);
        for (i, (prompt, expected)) in prompts.iter().zip(&expected).enumerate() {
            let before = second.engine.metrics();
            let (text, usage) = ask(&second.engine, asked(prompt, true));
            assert_eq!(&text, expected, "{i}");
            // All but the last token, whose row gives the first logits.
            assert_eq!(usage.cached_tokens as usize, prompt.tokens.len() - 1, "{i}");
            assert_eq!(second.engine.metrics().prefill_rows - before.prefill_rows, 1, "{i}");
        }
        let metrics = second.engine.metrics();
        assert_eq!((metrics.images_encoded, metrics.image_cache_hits), (0, 0));
        assert!(metrics.external_hits > 0);
        second.stop();
    }
}

/// Random company, chunks, memory and drafts; three in ten leave, also while the tower works for them.
#[test]
fn two_hundred_random_schedules_and_no_wrong_token() {
    let mut prompts = all_prompts();
    // The longest has been looked at above, and takes as long as all others together.
    prompts.remove(5);
    let expected = expected(&prompts);
    let (engines, rounds) = muser_testkit::long_or((60, 60), (8, 25));
    let mut rng = Rng(2026);
    let (mut whole, mut left) = (0, 0);
    for _ in 0..engines {
        let draft = rng.below(2) == 0;
        let config = EngineConfig {
            parallel: 1 + rng.below(4),
            prefill_rows: [5, 40, 130, 1024][rng.below(4)],
            image_cache_bytes: [0, 40 << 10, 64 << 20][rng.below(3)],
            kv_bytes: [None, Some(12 << 20)][rng.below(2)],
            draft_length: DraftLength::Fixed(rng.below(8)),
            ..config()
        };
        let engine = engine(1 + rng.below(2), draft, config);
        for _ in 0..rounds {
            let clients = 1 + rng.below(3);
            let mut running: Vec<_> = (0..clients)
                .map(|_| {
                    let which = rng.below(prompts.len());
                    (which, engine.submit(asked(&prompts[which], rng.below(4) > 0)).expect("good"))
                })
                .collect();
            while let Some((which, mut submission)) = running.pop() {
                if rng.below(10) < 3 {
                    for _ in 0..rng.below(3) {
                        if let Some(Event::Failed(error)) = submission.recv() {
                            panic!("{error}");
                        }
                    }
                    left += 1;
                    continue;
                }
                assert_eq!(read(&mut submission).0, expected[which], "prompt {which}");
                whole += 1;
            }
        }
        let metrics = engine.metrics();
        assert_eq!((metrics.requests_failed, metrics.step_errors, metrics.image_errors), (0, 0, 0));
    }
    assert!(whole > 100 && left > 30, "{whole} answers, {left} left");
}
