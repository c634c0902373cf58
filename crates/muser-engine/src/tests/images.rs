//! Pictures: rows on demand, what is kept, what others notice of the tower, and what ends it.

use std::sync::atomic::Ordering;

use crate::{
    ContextPolicy, EngineConfig, Event, FinishReason, ImageRows, ImageSource, Prompt, Request, RequestError,
    ShiftPlan, SubmitError,
    driver::Turn,
    testing::{Answer, Bench, Costs, expected, picture, request, stem},
};

/// A question of `before` tokens, a picture of 2 x 3 tokens, and `after` more.
fn question(before: usize, seed: u64, after: usize) -> Request {
    let mut tokens = stem(1, before);
    tokens.extend([7; 6]);
    tokens.extend(stem(2, after));
    let image =
        ImageRows { at: before, source: ImageSource::Picture(picture(2, 3, seed)), digest: [seed as u8; 32] };
    let prompt = Prompt { tokens, images: vec![image] };
    Request { prompt, ..request(Vec::new(), 5) }
}

fn again(request: &Request) -> Request {
    Request {
        prompt: request.prompt.clone(),
        cache: request.cache,
        ..crate::testing::request(Vec::new(), request.max_tokens.unwrap_or(0))
    }
}

fn check(bench: &Bench, request: &Request, answer: &Answer) {
    assert_eq!(answer.failure(), None);
    let found = answer.tokens(0);
    let expected = expected(request, request.seed.unwrap_or(0), 0, bench.window, found.len());
    assert_eq!(found, expected);
    assert_eq!(found.len(), request.max_tokens.unwrap_or(0) as usize);
}

/// Pictures encoded and rows kept that were used, so far.
fn figures(bench: &Bench) -> (u64, u64) {
    let snapshot = bench.driver.shared().metrics.snapshot();
    (snapshot.images_encoded, snapshot.image_cache_hits)
}

#[test]
fn a_second_question_about_a_picture_computes_no_row_of_it() {
    let mut bench = Bench::new(1024, 300, &EngineConfig::default());
    let first = question(20, 1, 30);
    let answer = bench.ask(again(&first));
    check(&bench, &first, &answer);
    assert_eq!(figures(&bench), (1, 0));
    assert_eq!(bench.driver.shared().metrics.snapshot().image_rows_encoded, 6);
    // The picture is in the known prefix: neither the tower nor a step computes it, and nobody even asks for its rows.
    let mut second = question(20, 1, 30);
    second.prompt.tokens.extend(stem(5, 40));
    let rows = bench.driver.shared().metrics.snapshot().prefill_rows;
    let answer = bench.ask(again(&second));
    check(&bench, &second, &answer);
    assert_eq!(answer.finished(0).usage.cached_tokens, 56);
    assert_eq!(bench.driver.shared().metrics.snapshot().prefill_rows - rows, 40);
    assert_eq!(figures(&bench), (1, 0));
    // Behind another text it is read again, but its rows are kept.
    let other = question(25, 1, 30);
    let answer = bench.ask(again(&other));
    check(&bench, &other, &answer);
    assert_eq!(figures(&bench), (1, 1));
    bench.assert_balanced();
}

#[test]
fn without_room_rows_are_made_again() {
    let config = EngineConfig { image_cache_bytes: 6 * 2 * 4 - 1, ..EngineConfig::default() };
    let mut bench = Bench::new(1024, 300, &config);
    for times in 1..=3 {
        let asked = Request { cache: false, ..question(20, 1, 30) };
        let answer = bench.ask(again(&asked));
        check(&bench, &asked, &answer);
        assert_eq!(figures(&bench), (times, 0));
    }
    assert_eq!(bench.driver.shared().metrics.snapshot().image_cache_bytes, 0);
}

#[test]
fn pictures_that_differ_never_share_a_prefix() {
    let mut bench = Bench::new(1024, 300, &EngineConfig::default());
    // The token before the picture is bound to it as well: a prefix is known up to there and no further.
    for seed in 1..4 {
        let asked = question(20, seed, 30);
        let answer = bench.ask(again(&asked));
        check(&bench, &asked, &answer);
        let known = answer.finished(0).usage.cached_tokens;
        assert_eq!(known, if seed == 1 { 0 } else { 19 });
    }
    assert_eq!(figures(&bench).0, 3);
}

#[test]
fn others_go_on_while_the_tower_works() {
    let config = EngineConfig { parallel: 2, ..EngineConfig::default() };
    let mut bench = Bench::new(2048, 300, &config);
    let text = request(stem(9, 10), 60);
    let mut writing = bench.submit(again(&text)).expect("good");
    bench.turns(3);
    let asked = question(20, 1, 30);
    let mut waiting = bench.submit(again(&asked)).expect("good");
    let mut written = Answer::default();
    while bench.driver.shared().metrics.snapshot().images_encoded == 0 {
        let before = written.events.len();
        assert_eq!(bench.turn(), Turn::Worked);
        while let Some(event) = writing.try_recv() {
            written.take(event);
        }
        assert!(written.events.len() > before, "a turn without a token for the other");
        if written.is_over() {
            break;
        }
    }
    let answer = bench.finish(&mut waiting);
    check(&bench, &asked, &answer);
    while !written.is_over() {
        bench.turn();
        while let Some(event) = writing.try_recv() {
            written.take(event);
        }
    }
    check(&bench, &text, &written);
}

#[test]
fn the_tower_takes_a_tenth_of_the_time_of_others_steps() {
    let config = EngineConfig { parallel: 2, ..EngineConfig::default() };
    let costs = Costs { step: |_| 10_000, draft: |_| 0 };
    // Slices shorter and longer than a step's share, and longer than a step.
    for (slice_us, seed) in [(300, 1), (3_000, 2), (25_000, 3)] {
        let mut bench = Bench::timed(4096, 300, &config, costs);
        bench.driver.draft.set_length(crate::DraftLength::Fixed(0));
        bench.tower.slice_us.store(slice_us, Ordering::Relaxed);
        let mut writing = bench.submit(request(stem(9, 10), 3000)).expect("good");
        bench.turns(3);
        let mut tokens = stem(1, 40);
        let image = picture(5, 6, seed);
        tokens.extend([7; 30]);
        tokens.extend(stem(2, 4));
        let images = vec![ImageRows { at: 40, source: ImageSource::Picture(image), digest: [1; 32] }];
        let asked = Request { prompt: Prompt { tokens, images }, ..request(Vec::new(), 1) };
        let _waiting = bench.submit(asked).expect("good");
        let before = bench.driver.shared().metrics.snapshot();
        while bench.driver.shared().metrics.snapshot().images_encoded == 0 {
            bench.turn();
            while writing.try_recv().is_some() {}
        }
        let after = bench.driver.shared().metrics.snapshot();
        let steps_us = (after.steps - before.steps) * 10_000;
        let tower_us = after.tower_us - before.tower_us;
        assert_eq!(tower_us, 30 * slice_us, "every slice is counted");
        assert!(tower_us <= steps_us / 10 + 2 * slice_us, "{slice_us}: {tower_us} of {steps_us}");
    }
}

#[test]
fn cancelling_ends_the_work_inside_the_tower() {
    let mut bench = Bench::new(1024, 300, &EngineConfig::default());
    let submission = bench.submit(question(20, 1, 30)).expect("good");
    while bench.tower.slices.load(Ordering::Relaxed) < 3 {
        assert_eq!(bench.turn(), Turn::Worked);
    }
    submission.cancel();
    bench.run();
    assert_eq!(bench.tower.dropped.load(Ordering::Relaxed), 1);
    assert_eq!(bench.tower.slices.load(Ordering::Relaxed), 3, "no slice after the end");
    bench.assert_balanced();
    // Somebody else who wants the same picture keeps it going.
    let first = bench.submit(question(20, 2, 30)).expect("good");
    let asked = question(21, 2, 30);
    let mut second = bench.submit(again(&asked)).expect("good");
    while bench.tower.slices.load(Ordering::Relaxed) < 6 {
        bench.turn();
    }
    drop(first);
    let answer = bench.finish(&mut second);
    check(&bench, &asked, &answer);
    assert_eq!(bench.tower.dropped.load(Ordering::Relaxed), 1);
    assert_eq!(figures(&bench).0, 1);
}

#[test]
fn a_tower_that_fails_ends_those_who_wait_for_it_and_nobody_else() {
    for fault in [1, 2] {
        let mut bench = Bench::new(2048, 300, &EngineConfig::default());
        let text = request(stem(9, 10), 40);
        let mut writing = bench.submit(again(&text)).expect("good");
        let mut asking = bench.submit(question(20, 1, 30)).expect("good");
        bench.turns(3);
        bench.tower.fault.store(fault, Ordering::Relaxed);
        let answer = bench.finish(&mut asking);
        match answer.failure() {
            Some(RequestError::Device(_)) if fault == 1 => {}
            Some(RequestError::Panic(_)) if fault == 2 => {}
            other => panic!("{other:?}"),
        }
        let written = bench.finish(&mut writing);
        check(&bench, &text, &written);
        // The same question once more is answered.
        let asked = question(20, 1, 30);
        let answer = bench.ask(again(&asked));
        check(&bench, &asked, &answer);
        assert_eq!(bench.driver.shared().metrics.snapshot().image_errors, 1);
        bench.assert_balanced();
    }
}

#[test]
fn one_digest_for_two_pictures_fails_and_hangs_nobody() {
    let mut bench = Bench::new(1024, 300, &EngineConfig::default());
    let mut wrong = question(20, 1, 30);
    let image = &mut wrong.prompt.images[0];
    image.source = ImageSource::Picture(picture(1, 2, 1));
    let right = bench.submit(question(20, 1, 30)).expect("good");
    let mut other = bench.submit(wrong).expect("good");
    let answer = bench.finish(&mut other);
    assert!(matches!(answer.failure(), Some(RequestError::Device(_))), "{:?}", answer.events);
    drop(right);
    bench.run();
    bench.assert_balanced();
}

#[test]
fn a_picture_of_the_wrong_size_or_place_is_refused_at_the_door() {
    let bench = Bench::new(1024, 300, &EngineConfig::default());
    let refused = |change: &dyn Fn(&mut Request)| {
        let mut asked = question(20, 1, 3);
        change(&mut asked);
        matches!(bench.submit(asked), Err(SubmitError::Invalid { field: "images", .. }))
    };
    assert!(!refused(&|_| {}));
    assert!(refused(&|r| r.prompt.images[0].at = 24), "beyond the end");
    assert!(refused(&|r| {
        let mut short = picture(2, 3, 1);
        short.rows = 1;
        r.prompt.images[0].source = ImageSource::Picture(short);
    }));
    assert!(refused(&|r| {
        let mut none = picture(2, 3, 1);
        (none.rows, none.rgb) = (0, Vec::new().into());
        r.prompt.images[0].source = ImageSource::Picture(none);
    }));
    assert!(refused(&|r| {
        let twice = r.prompt.images[0].clone();
        r.prompt.images.push(ImageRows { at: 25, ..twice });
    }));
}

#[test]
fn an_image_at_the_very_beginning_and_one_behind_another_are_read() {
    let mut bench = Bench::new(1024, 300, &EngineConfig::default());
    let of = |at, seed: u64| ImageRows {
        at,
        source: ImageSource::Picture(picture(1, 3, seed)),
        digest: [seed as u8; 32],
    };
    let prompt = Prompt { tokens: vec![7; 12], images: vec![of(0, 1), of(3, 2), of(8, 1)] };
    let asked = Request { prompt, ..request(Vec::new(), 4) };
    let answer = bench.ask(again(&asked));
    check(&bench, &asked, &answer);
    // The same picture twice is made once.
    assert_eq!(figures(&bench).0, 2);
    assert_eq!(answer.finished(0).reason, FinishReason::Length);
}

#[test]
fn a_picture_right_behind_the_dropped_turns_moves_with_them() {
    let mut bench = Bench::new(512, 256, &EngineConfig::default());
    // 50 tokens that stay, a turn up to 200 that goes, and a picture as the first thing behind it.
    let mut asked = question(200, 3, 244);
    asked.max_tokens = Some(120);
    asked.sampling = crate::SamplingParams::greedy();
    asked.context_policy =
        ContextPolicy::Shift(ShiftPlan { keep: 50, turns: vec![50, 200, 350], plain: false });
    let read = |prompt: Prompt, n| Request {
        prompt,
        sampling: crate::SamplingParams::greedy(),
        ..request(Vec::new(), n)
    };
    let first = Request { context_policy: asked.context_policy.clone(), ..read(asked.prompt.clone(), 120) };
    let answer = bench.ask(first);
    let dropped = answer.events.iter().find_map(|event| match event {
        Event::Shifted { dropped_tokens, .. } => Some(*dropped_tokens),
        _ => None,
    });
    assert_eq!((dropped, answer.finished(0).reason), (Some(150), FinishReason::Length));
    let tokens = answer.tokens(0);
    let before = read(asked.prompt.clone(), 62);
    assert_eq!(tokens[..62], expected(&before, 5, 0, bench.window, 62));
    let mut short = asked.prompt.clone();
    short.tokens.drain(50..200);
    short.tokens.extend(tokens[..62].iter().map(|token| token.0));
    short.images[0].at = 50;
    assert_eq!(tokens[62..], expected(&read(short, 58), 5, 0, bench.window, 58));
    bench.assert_balanced();
}
