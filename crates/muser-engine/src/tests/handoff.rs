//! Prefixes that grow at the door and on their way out, sources one behind the other, and answers that go on.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use muser_kv::{BLOCK_LEN, KvGroup};

use crate::{
    Constraint, ContextPolicy, EngineConfig, FinishReason, PrefixExport, PrefixOutlet, Request,
    RestoreFailure, SamplingParams, ShiftPlan, Sources, StopWatch, TokenMask,
    testing::{Answer, Bench, VOCAB, expected, request, stem},
    testing_source::ScriptedSource,
};

const CONTEXT: usize = 4096;
const WINDOW: usize = 300;

fn bench(config: &EngineConfig) -> Bench {
    Bench::new(CONTEXT, WINDOW, config)
}

fn bench_with(source: &ScriptedSource) -> Bench {
    let mut bench = bench(&EngineConfig::default());
    bench.driver.set_source(Some(Box::new(source.clone())));
    bench
}

/// A source that has what computing the prompt leaves.
fn stored(prompt: &[u32]) -> ScriptedSource {
    let source = ScriptedSource::default();
    let mut bench = bench_with(&source);
    let mut submission = bench.submit(request(prompt.to_vec(), 2)).expect("good");
    bench.turn();
    source.answer_all();
    bench.finish(&mut submission);
    source.take_all();
    bench.run();
    source
}

/// Sliding blocks of the window before a place, of which a computed prompt leaves only the last.
fn store_windows(source: &ScriptedSource, prompt: &[u32], ends: &[usize]) {
    for &end in ends {
        let other = stored(&prompt[..=end]);
        let blocks = std::mem::take(&mut other.lock().blocks);
        source.lock().blocks.extend(blocks);
    }
}

fn is_exact(answer: &Answer, prompt: &[u32], tokens: usize) {
    let one = request(prompt.to_vec(), tokens as u32);
    assert_eq!(answer.tokens(0), expected(&one, 5, 0, WINDOW, tokens));
}

#[test]
fn a_prefix_comes_in_stages_and_a_later_failure_costs_only_what_came_after() {
    let prompt = stem(1, 3000);
    let source = stored(&prompt);
    store_windows(&source, &prompt, &[1024, 2048]);
    source.lock().stages = vec![1024, 2048];
    source.lock().hands = true;
    for fails_in in [0, 1, 2, 3] {
        let mut bench = bench_with(&source);
        let mut submission = bench.submit(request(prompt.clone(), 9)).expect("good");
        bench.turn();
        source.answer_all();
        for stage in 0..3 {
            bench.turns(3);
            let mut fetch = source.lock().fetches.pop().expect("a stage is being fetched");
            let last = fetch.wanted.iter().map(|(_, index)| index + 1).max();
            assert_eq!(last, Some([4, 8, 11][stage]), "a stage ends where the source says");
            if stage == fails_in {
                source.deliver_one(&mut fetch);
                fetch.delivery.fail(RestoreFailure::Store, None);
                break;
            }
            while source.deliver_one(&mut fetch) {}
        }
        let answer = bench.finish(&mut submission);
        is_exact(&answer, &prompt, 9);
        let kept = [0, 1024, 2048, 2816][fails_in];
        let usage = answer.finished(0).usage;
        assert_eq!((usage.restored_tokens, usage.handed_tokens, usage.cached_tokens), (kept, kept, kept));
        let now = bench.driver.shared().metrics.snapshot();
        assert_eq!(now.prefill_rows, u64::from(3000 - kept));
        assert_eq!(now.handed_tokens, u64::from(kept));
        source.lock().offers.clear();
        bench.run();
        bench.assert_balanced();
    }
}

#[test]
fn a_stage_that_cannot_be_resumed_at_is_none() {
    let prompt = stem(1, 3000);
    let source = stored(&prompt);
    // There is no window before 1,024, and 9,000 lies behind the prompt.
    source.lock().stages = vec![1024, 9000];
    let mut bench = bench_with(&source);
    let mut submission = bench.submit(request(prompt.clone(), 3)).expect("good");
    for _ in 0..10 {
        bench.turn();
        source.answer_all();
        source.deliver_all();
    }
    let answer = bench.finish(&mut submission);
    is_exact(&answer, &prompt, 3);
    assert_eq!(answer.started().cached_tokens, 2816);
}

#[test]
fn signs_of_life_keep_a_fetch_without_blocks() {
    let prompt = stem(1, 1400);
    let source = stored(&prompt);
    let mut bench = bench_with(&source);
    let mut submission = bench.submit(request(prompt.clone(), 3)).expect("good");
    bench.turn();
    source.answer_all();
    bench.turn();
    let mut fetch = source.lock().fetches.pop().expect("it is being fetched");
    for _ in 0..20 {
        bench.advance(1500);
        fetch.delivery.note_alive();
        bench.turns(2);
        assert!(!fetch.delivery.is_cancelled());
    }
    while source.deliver_one(&mut fetch) {}
    assert_eq!(bench.finish(&mut submission).started().cached_tokens, 1280);

    let mut submission = bench.submit(request(stem(2, 10), 1)).expect("good");
    bench.finish(&mut submission);
    let mut bench = bench_with(&source);
    let mut submission = bench.submit(request(prompt.clone(), 3)).expect("good");
    bench.turn();
    source.answer_all();
    bench.turn();
    let fetch = source.lock().fetches.pop().expect("it is being fetched");
    fetch.delivery.note_alive();
    bench.advance(1500);
    bench.turn();
    bench.advance(2100);
    bench.turns(2);
    assert!(fetch.delivery.is_cancelled(), "one sign lasts as long as a block");
    is_exact(&bench.finish(&mut submission), &prompt, 3);
}

#[test]
fn who_fetches_takes_nobodys_slot_and_waits_for_one_with_what_came() {
    let prompt = stem(1, 1400);
    let source = stored(&prompt);
    let config = EngineConfig { parallel: 1, ..EngineConfig::default() };
    let mut bench = bench(&config);
    bench.driver.set_source(Some(Box::new(source.clone())));
    let mut submission = bench.submit(request(prompt.clone(), 5)).expect("good");
    bench.turn();
    source.answer_all();
    bench.turn();
    assert_eq!(bench.driver.shared().metrics.snapshot().fetching, 1);
    // The one slot is free for another, which keeps it.
    let mut other = bench.submit(request(stem(9, 100), 50)).expect("good");
    bench.turns(10);
    let now = bench.driver.shared().metrics.snapshot();
    assert_eq!((now.running, now.fetching, now.waiting), (1, 1, 1));
    // A third one behind it begins to fetch, too, although no slot is free.
    let third = [&prompt[..600], &stem(8, 700)].concat();
    source.deliver_all();
    bench.turns(3);
    let now = bench.driver.shared().metrics.snapshot();
    assert_eq!((now.running, now.fetching), (1, 1), "all is there, and it waits with it");
    let mut waiting = bench.submit(request(third.clone(), 5)).expect("good");
    bench.turns(2);
    assert!(source.lock().queries.len() <= 1);
    source.answer_all();
    let answer = bench.finish(&mut other);
    assert_eq!(answer.tokens(0).len(), 50);
    let answer = bench.finish(&mut submission);
    is_exact(&answer, &prompt, 5);
    assert_eq!(answer.started().cached_tokens, 1280);
    source.deliver_all();
    let answer = bench.finish(&mut waiting);
    is_exact(&answer, &third, 5);
    source.lock().offers.clear();
    bench.run();
    bench.assert_balanced();
}

#[test]
fn without_a_slot_some_fetch_and_the_slot_goes_to_the_first_that_is_ready() {
    // All slots are taken by short answers, so there is memory for more than those.
    let config = EngineConfig { parallel: 16, ..EngineConfig::default() };
    let prompts: Vec<_> = (0..20).map(|i| stem(20 + i, 300)).collect();
    let source = ScriptedSource::default();
    for prompt in &prompts {
        let one = stored(prompt);
        let blocks = std::mem::take(&mut one.lock().blocks);
        source.lock().blocks.extend(blocks);
    }
    let mut bench = bench(&config);
    bench.driver.set_source(Some(Box::new(source.clone())));
    let mut busy: Vec<_> =
        (0..16).map(|i| bench.submit(request(stem(90 + i, 20), 220)).expect("good")).collect();
    bench.turns(5);
    let mut all: Vec<_> = prompts
        .iter()
        .map(|prompt| (prompt, bench.submit(request(prompt.clone(), 3)).expect("good")))
        .collect();
    bench.turns(2);
    source.answer_all();
    bench.turns(3);
    let now = bench.driver.shared().metrics.snapshot();
    assert_eq!((now.running, now.fetching), (16, 16), "sixteen at a time");
    for _ in 0..100 {
        bench.turn();
        source.deliver_all();
    }
    for busy in &mut busy {
        assert_eq!(bench.finish(busy).tokens(0).len(), 220);
    }
    let mut answers: Vec<Answer> = all.iter().map(|_| Answer::default()).collect();
    for _ in 0..3000 {
        bench.turn();
        source.answer_all();
        source.deliver_all();
        for (answer, (_, submission)) in answers.iter_mut().zip(&mut all) {
            while let Some(event) = submission.try_recv() {
                answer.take(event);
            }
        }
    }
    for (answer, (prompt, _)) in answers.iter().zip(&all) {
        is_exact(answer, prompt, 3);
    }
    source.lock().offers.clear();
    bench.run();
    bench.assert_balanced();
}

#[test]
fn a_question_says_how_urgent_it_is_and_what_computing_here_would_take() {
    let source = ScriptedSource::default();
    let mut bench = bench_with(&source);
    let ask = Request {
        priority: -3,
        deadline: Some(Duration::from_secs(9)),
        for_peer: true,
        ..request(stem(1, 1000), 1)
    };
    let mut submission = bench.submit(ask).expect("good");
    bench.turn();
    let query = source.lock().queries.pop().expect("asked");
    assert_eq!((query.priority(), query.is_for_peer()), (-3, true));
    let left = query.time_left().expect("it is limited");
    assert!(left <= Duration::from_secs(9) && left > Duration::from_millis(8900), "{left:?}");
    assert_eq!((query.pace().time(0, 1000), query.pace().ahead()), (None, Duration::ZERO));
    drop(query);
    bench.finish(&mut submission);

    let mut busy = bench.submit(request(stem(3, 2000), 2)).expect("good");
    let mut second = bench.submit(request(stem(2, 1000), 2)).expect("good");
    bench.turn();
    let query = source.lock().queries.pop().expect("asked");
    assert!(!query.is_for_peer() && query.time_left().is_none());
    assert!(query.pace().time(0, 1000) >= query.pace().time(0, 500), "measured by now");
    assert!(query.pace().time(0, 1000).is_some());
    drop(query);
    source.lock().queries.clear();
    bench.finish(&mut busy);
    bench.finish(&mut second);
}

#[test]
fn the_second_source_is_asked_for_what_the_first_lacks_and_its_failure_costs_only_that() {
    let prompt = stem(1, 3000);
    let (near, far) = (stored(&prompt[..1300]), stored(&prompt));
    near.lock().alone = 1299;
    far.lock().hands = true;
    for fails in [false, true] {
        let mut bench = bench(&EngineConfig::default());
        let sources = Sources::new(Box::new(near.clone()), Box::new(far.clone()));
        bench.driver.set_source(Some(Box::new(sources)));
        let mut submission = bench.submit(request(prompt.clone(), 7)).expect("good");
        bench.turn();
        assert!(far.lock().queries.is_empty(), "one after the other");
        near.answer_all();
        let query = far.lock().queries.pop().expect("asked next");
        assert_eq!((query.known(), query.units().len()), (1299, 2999));
        far.answer(query);
        bench.turns(2);
        assert!(far.lock().fetches.is_empty(), "first what is near");
        near.deliver_all();
        bench.turns(4);
        assert!(near.lock().fetches.is_empty());
        if fails {
            let fetch = far.lock().fetches.pop().expect("then what is far");
            fetch.delivery.fail(RestoreFailure::Store, None);
        } else {
            far.deliver_all();
        }
        let answer = bench.finish(&mut submission);
        is_exact(&answer, &prompt, 7);
        let usage = answer.finished(0).usage;
        let expected = if fails { (1280, 0) } else { (2816, 1536) };
        assert_eq!((usage.restored_tokens, usage.handed_tokens), expected);
        near.lock().offers.clear();
        assert!(far.lock().offers.is_empty(), "prefixes are offered to the first");
        bench.run();
        bench.assert_balanced();
    }
}

#[test]
fn who_has_all_of_it_or_none_decides_whether_the_other_is_asked() {
    let prompt = stem(1, 1000);
    let (near, far) = (stored(&prompt), stored(&prompt));
    near.lock().alone = 999;
    let mut bench = bench(&EngineConfig::default());
    let sources = Sources::new(Box::new(near.clone()), Box::new(far.clone()));
    bench.driver.set_source(Some(Box::new(sources)));
    let mut submission = bench.submit(request(prompt.clone(), 2)).expect("good");
    bench.turn();
    near.answer_all();
    for _ in 0..4 {
        bench.turn();
        near.deliver_all();
    }
    assert_eq!(bench.finish(&mut submission).started().cached_tokens, 768);
    assert!(far.lock().queries.is_empty());
    // Silence of the first, then of the second, are answers.
    let mut submission = bench.submit(request(stem(7, 600), 2)).expect("good");
    bench.turn();
    drop(std::mem::take(&mut near.lock().queries));
    assert_eq!(far.lock().queries.len(), 1);
    drop(std::mem::take(&mut far.lock().queries));
    is_exact(&bench.finish(&mut submission), &stem(7, 600), 2);
}

/// Keeps what it hears, and how far that went.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<PrefixExport>>>);

/// Has steps end at two places, and hears of its admission first.
struct Stopping {
    kept: Kept,
    known: Option<usize>,
}

impl PrefixOutlet for Stopping {
    fn admitted(&mut self, known: usize) {
        assert!(self.known.replace(known).is_none(), "once");
    }

    fn next_stop(&self, computed: usize) -> Option<usize> {
        [512, 900].into_iter().find(|&stop| stop > computed)
    }

    fn grown(&mut self, offer: PrefixExport) {
        assert_eq!(self.known, Some(0));
        self.kept.grown(offer);
    }
}

#[test]
fn steps_end_where_an_outlet_wants_windows_and_those_are_there() {
    let prompt = stem(1, 1500);
    let config = EngineConfig { prefill_rows: 400, ..EngineConfig::default() };
    let mut bench = bench(&config);
    let kept = Kept::default();
    let outlet = Box::new(Stopping { kept: kept.clone(), known: None });
    let ask = Request { outlet: Some(outlet), ..request(prompt.clone(), 0) };
    let mut submission = bench.submit(ask).expect("good");
    bench.finish(&mut submission);
    let offers = std::mem::take(&mut *kept.0.lock().expect("no panic"));
    for end in [512, 900, 1500] {
        let at_end = offers.iter().find(|offer| offer.units().len() == end);
        let ends: Vec<_> = offers.iter().map(|offer| offer.units().len()).collect();
        let offer = at_end.unwrap_or_else(|| panic!("no step ended at {end}: {ends:?}"));
        for index in (end + 1 - WINDOW) / BLOCK_LEN..offer.blocks() {
            assert!(offer.has(KvGroup::Sliding, index), "block {index} of the window before {end}");
        }
    }
    for offer in offers.iter().filter(|offer| ![512, 900, 1500].contains(&offer.units().len())) {
        assert!((0..offer.blocks()).all(|index| !offer.has(KvGroup::Sliding, index)));
    }
    drop(offers);
    bench.run();
    bench.assert_balanced();
}

impl PrefixOutlet for Kept {
    fn grown(&mut self, offer: PrefixExport) {
        self.0.lock().expect("no panic").push(offer);
    }
}

fn bytes_of(bench: &mut Bench, offer: &PrefixExport, group: KvGroup, index: usize) -> Vec<u8> {
    let (give, take) = std::sync::mpsc::channel();
    offer.copy_out(group, index, Vec::new(), move |bytes, result| {
        let _ = give.send(result.map(|()| bytes));
    });
    bench.run();
    take.try_recv().expect("copied").expect("it is there")
}

#[test]
fn an_outlet_hears_of_a_prompt_while_it_is_computed() {
    let prompt = stem(1, 1000);
    let config = EngineConfig { prefill_rows: 300, ..EngineConfig::default() };
    let mut bench = bench(&config);
    let kept = Kept::default();
    let ask = |kept: &Kept| Request { outlet: Some(Box::new(kept.clone())), ..request(prompt.clone(), 0) };
    let mut submission = bench.submit(ask(&kept)).expect("good");
    let answer = bench.finish(&mut submission);
    assert_eq!(answer.finished(0).reason, FinishReason::Length);
    assert!(answer.tokens(0).is_empty());
    let offers = std::mem::take(&mut *kept.0.lock().expect("no panic"));
    let ends: Vec<usize> = offers.iter().map(|offer| offer.units().len()).collect();
    assert!(ends.len() >= 3 && ends.is_sorted_by(|a, b| a < b), "{ends:?}");
    assert_eq!(ends.last(), Some(&1000), "to the last row, which was not sampled from");
    // What left early is what stands there in the end, as far as it went.
    let last = offers.last().expect("some");
    for offer in &offers {
        let index = (offer.units().len() - 1) / BLOCK_LEN;
        let rows = offer.units().len() - index * BLOCK_LEN;
        for group in [KvGroup::Full, KvGroup::Sliding] {
            if !offer.has(group, index) {
                assert_eq!(group, KvGroup::Sliding);
                continue;
            }
            let early = bytes_of(&mut bench, offer, group, index);
            if last.has(group, index) {
                let late = bytes_of(&mut bench, last, group, index);
                assert_eq!(early[..rows * 8], late[..rows * 8]);
            }
            assert!(early[rows * 8..].iter().all(|&byte| byte == 0), "nothing of others leaves");
        }
    }
    drop(offers);
    // What memory knows is told at once, and nothing but the last row is computed.
    let before = bench.driver.shared().metrics.snapshot().prefill_rows;
    let mut submission = bench.submit(ask(&kept)).expect("good");
    bench.finish(&mut submission);
    let offers = std::mem::take(&mut *kept.0.lock().expect("no panic"));
    assert_eq!(offers.last().map(|offer| offer.units().len()), Some(1000));
    assert_eq!(bench.driver.shared().metrics.snapshot().prefill_rows - before, 1);
    drop(offers);
    bench.run();
    bench.assert_balanced();
}

#[test]
fn what_is_known_further_than_may_be_reused_is_computed_again() {
    let prompt = stem(1, 1000);
    let source = stored(&prompt);
    let mut bench = bench_with(&source);
    for (most, cached) in [(600, 512), (512, 512), (100, 0), (5000, 768)] {
        let ask = Request { most_reused: Some(most), ..request(prompt.clone(), 3) };
        let mut submission = bench.submit(ask).expect("good");
        for _ in 0..6 {
            bench.turn();
            source.answer_all();
            source.deliver_all();
        }
        let answer = bench.finish(&mut submission);
        is_exact(&answer, &prompt, 3);
        assert_eq!(answer.started().cached_tokens, cached, "{most}");
        source.lock().offers.clear();
        bench.run();
        bench.driver.scheduler.memory.forget();
    }
}

/// Ends with the twenty-fifth even token.
struct Even(u32);

impl StopWatch for Even {
    fn push(&mut self, token: u32) -> bool {
        self.0 += u32::from(token.is_multiple_of(2));
        self.0 >= 25
    }
}

/// What may follow depends on all that was written.
struct Sum(u32);

impl Constraint for Sum {
    fn mask(&mut self, allowed: &mut TokenMask) -> bool {
        (0..VOCAB as u32).filter(|id| id % 3 != self.0 % 3).for_each(|id| allowed.allow(id));
        true
    }

    fn commit(&mut self, token: u32) -> Result<(), String> {
        if token % 3 == self.0 % 3 {
            return Err("it was masked".into());
        }
        self.0 = self.0.wrapping_mul(5).wrapping_add(token);
        Ok(())
    }
}

fn sampled(prompt: &[u32], written: &[u32], most: u32) -> Request {
    let sampling = SamplingParams {
        temperature: 0.9,
        top_k: 20,
        repetition_penalty: 1.2,
        presence_penalty: 0.4,
        frequency_penalty: 0.3,
        ..SamplingParams::default()
    };
    Request {
        sampling,
        seed: Some(77),
        max_tokens: Some(most),
        written: written.to_vec(),
        hash_logits: true,
        stop_watch: Some(Box::new(|_| Box::new(Even(0)))),
        constraint: Some(Box::new(|_| Box::new(Sum(0)))),
        ..Request::new(prompt.to_vec(), Vec::new())
    }
}

#[test]
fn an_answer_that_goes_on_elsewhere_is_the_one_without_the_break() {
    let prompt = stem(1, 240);
    for (most, reason) in [(400, FinishReason::StopWatch), (30, FinishReason::Length)] {
        let whole = bench(&EngineConfig::default()).ask(sampled(&prompt, &[], most));
        let tokens = whole.tokens(0);
        let end = whole.finished(0);
        assert_eq!(end.reason, reason);
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        for cut in [1, 2, 15, 16, 17, ids.len() - 1] {
            let mut bench = bench(&EngineConfig::default());
            let rest = bench.ask(sampled(&prompt, &ids[..cut], most));
            assert_eq!(rest.tokens(0), tokens[cut..], "cut at {cut}");
            let now = rest.finished(0);
            assert_eq!((now.reason, now.usage.completion_tokens), (reason, end.usage.completion_tokens));
            assert_eq!(now.usage.prompt_tokens, 240);
            bench.assert_balanced();
        }
    }
}

#[test]
fn an_answer_that_was_shifted_goes_on_as_it_was() {
    let mut bench = Bench::new(300, 100, &EngineConfig::default());
    let prompt = stem(1, 200);
    let plan = ShiftPlan { keep: 20, turns: vec![], plain: true };
    let ask = |written: &[u32]| Request {
        context_policy: ContextPolicy::Shift(plan.clone()),
        ..sampled(&prompt, written, 500)
    };
    let endless = |request: Request| Request { stop_watch: None, ..request };
    let tokens = bench.ask(endless(ask(&[]))).tokens(0);
    assert_eq!(tokens.len(), 500);
    let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
    for cut in [50, 99, 100, 101, 180, 300, 499] {
        let mut bench = Bench::new(300, 100, &EngineConfig::default());
        let rest = bench.ask(endless(ask(&ids[..cut])));
        assert_eq!(rest.tokens(0), tokens[cut..], "cut at {cut}");
    }
}

#[test]
fn what_cannot_go_on_is_refused_at_the_door() {
    let bench = bench(&EngineConfig::default());
    let bad = [
        Request { n: 2, ..sampled(&stem(1, 10), &[1], 50) },
        sampled(&stem(1, 10), &[1, 2, 3], 3),
        sampled(&stem(1, 10), &[VOCAB as u32], 9),
        Request { kind: crate::RequestKind::Embed, ..sampled(&stem(1, 10), &[1], 9) },
    ];
    for request in bad {
        let error = bench.submit(request).expect_err("refused");
        assert!(error.to_string().contains("written"), "{error}");
    }
    // What the constraint would never have let through fails the request, not the engine.
    let mut bench = Bench::new(CONTEXT, WINDOW, &EngineConfig::default());
    let answer = bench.ask(sampled(&stem(1, 10), &[3], 9));
    assert!(matches!(answer.failure(), Some(crate::RequestError::Constraint(_))), "{:?}", answer.events);
    bench.assert_balanced();
}
