//! Saved, everything dropped, opened again, restored: the same tokens and the same logits as if it had never stopped, and
//! only what was not restored is computed.
//!
//! A few cases here; the full numbers with `MUSER_TEST_LONG=1`.

mod support;

use support::{Disk, Rng, alone, ask, request, start};

fn long() -> bool {
    muser_testkit::is_long()
}

#[test]
fn random_prompts_after_restarts_give_what_an_uninterrupted_run_gives() {
    let (cases, stem_tokens) = if long() { (200, 3000) } else { (14, 1100) };
    let mut rng = Rng(77);
    let stems: Vec<Vec<u32>> = (0..3).map(|_| rng.tokens(stem_tokens)).collect();
    let uninterrupted = alone();
    let disk = Disk::new();
    let first = start(&disk);
    for stem in &stems {
        let (tokens, usage) = ask(&first.engine, request(stem, 4, true));
        assert_eq!(tokens, ask(&uninterrupted, request(stem, 4, true)).0);
        assert_eq!((usage.cached_tokens, usage.restored_tokens), (0, 0));
    }
    first.stop();
    let mut running = start(&disk);
    let mut restored = 0;
    for case in 0..cases {
        if case % 4 == 3 {
            running.stop();
            running = start(&disk);
        }
        let stem = &stems[rng.below(3)];
        let cut = 1 + rng.below(stem.len());
        let suffix = if rng.below(3) == 0 { 0 } else { rng.below(200) };
        let prompt = [&stem[..cut], &rng.tokens(suffix)].concat();
        let greedy = rng.below(2) == 0;
        let expected = ask(&uninterrupted, request(&prompt, 10, greedy)).0;
        let before = running.engine.metrics();
        let (tokens, usage) = ask(&running.engine, request(&prompt, 10, greedy));
        let after = running.engine.metrics();
        assert_eq!(tokens, expected, "case {case}: cut {cut}, {suffix} more");
        let computed = after.prefill_rows - before.prefill_rows;
        let cached = u64::from(usage.cached_tokens);
        assert_eq!(cached + computed, prompt.len() as u64, "what is cached is not computed");
        assert!(
            cached >= (cut.min(prompt.len() - 1) / 256 * 256) as u64,
            "case {case}: {usage:?}, cut {cut}"
        );
        assert_eq!(after.external_hits - before.external_hits, u64::from(usage.restored_tokens));
        restored += usage.restored_tokens;
    }
    assert!(restored > 0);
    let metrics = running.engine.metrics();
    assert_eq!((metrics.requests_failed, metrics.step_errors, metrics.step_panics), (0, 0, 0));
    running.stop();
}

#[test]
fn a_session_goes_on_after_a_restart_as_if_it_had_not_stopped() {
    let mut cuts = vec![255, 256, 257, 511, 513];
    if long() {
        cuts.extend([2047, 2048, 2049, 3841]);
    }
    let stem = Rng(5).tokens(4200);
    let uninterrupted = alone();
    for cut in cuts {
        let greedy = cut % 2 == 0;
        let prompt = &stem[..cut];
        let whole = ask(&uninterrupted, request(prompt, 24, greedy)).0;
        let disk = Disk::new();
        let first = start(&disk);
        let mut tokens = ask(&first.engine, request(prompt, 12, greedy)).0;
        first.stop();
        let second = start(&disk);
        let so_far: Vec<u32> = prompt.iter().copied().chain(tokens.iter().map(|(id, _)| *id)).collect();
        let (more, usage) = ask(&second.engine, request(&so_far, 12, greedy));
        tokens.extend(more);
        assert_eq!(tokens, whole, "cut {cut}");
        // Everything but the last token's row, which was not computed before either: also inside a block.
        assert_eq!(usage.cached_tokens as usize, so_far.len() - 1, "cut {cut}");
        assert_eq!(second.engine.metrics().prefill_rows, 1);
        second.stop();
    }
}

#[test]
fn the_same_prompt_by_many_at_once_is_fetched_once() {
    let mut rng = Rng(9);
    let prompt = rng.tokens(900);
    let disk = Disk::new();
    let first = start(&disk);
    let expected = ask(&first.engine, request(&prompt, 8, true)).0;
    first.stop();
    let second = start(&disk);
    disk.store.faults.opened.store(0, std::sync::atomic::Ordering::SeqCst);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let (tokens, usage) = ask(&second.engine, request(&prompt, 8, true));
                assert_eq!(tokens, expected);
                assert!(usage.cached_tokens >= 768, "{usage:?}");
            });
        }
    });
    // Three full blocks, the unfinished one, and of the sliding group the window before 899 and the unfinished block.
    let opened = disk.store.faults.opened.load(std::sync::atomic::Ordering::SeqCst);
    assert!(opened <= 4 + 3, "{opened} segments were read");
    let metrics = second.engine.metrics();
    assert_eq!(metrics.restore_time.count(), 1);
    second.stop();
}

#[test]
fn another_model_or_key_finds_nothing() {
    let prompt = Rng(3).tokens(600);
    let disk = Disk::new();
    let first = start(&disk);
    let expected = ask(&first.engine, request(&prompt, 6, true)).0;
    first.stop();
    type Change = fn(&mut muser_pack::Identity);
    let changes: [(&str, Change); 5] = [
        ("weights", |identity| identity.weights[0] ^= 1),
        ("tokenizer", |identity| identity.tokenizer[31] ^= 1),
        ("template", |identity| identity.template[7] ^= 1),
        ("route", |identity| identity.representation.route.push('x')),
        ("draft", |identity| {
            identity.draft = Some(muser_pack::DraftModel { weights: [1; 32], layers: 2, window: 1 });
        }),
    ];
    for (what, change) in changes {
        let other =
            support::start_with(&disk, support::config(), muser_kv_connector::PackOptions::default(), change);
        let (tokens, usage) = ask(&other.engine, request(&prompt, 6, true));
        assert_eq!((usage.cached_tokens, other.engine.metrics().external_hits), (0, 0), "{what}");
        assert_eq!(tokens, expected);
        other.stop();
    }
    let again = start(&disk);
    assert_eq!(ask(&again.engine, request(&prompt, 6, true)).1.cached_tokens, 599);
    again.stop();
}
