//! Prefixes from and for a source: restarts, failures on the way, other requests meanwhile.

use std::time::Duration;

use crate::{
    EngineConfig, Event, FinishReason, MetricsSnapshot, Request, RestoreFailure, SamplingParams,
    testing::{Answer, Bench, expected, request, stem},
    testing_source::ScriptedSource,
};

const CONTEXT: usize = 4096;
const WINDOW: usize = 300;

fn bench(source: &ScriptedSource) -> Bench {
    bench_with(source, &EngineConfig::default())
}

fn bench_with(source: &ScriptedSource, config: &EngineConfig) -> Bench {
    let mut bench = Bench::new(CONTEXT, WINDOW, config);
    bench.driver.set_source(Some(Box::new(source.clone())));
    bench
}

fn metrics(bench: &Bench) -> MetricsSnapshot {
    bench.driver.shared().metrics.snapshot()
}

/// Computes a prompt in an engine of its own and keeps what it offers.
fn stored(prompt: &[u32]) -> ScriptedSource {
    let source = ScriptedSource::default();
    let mut bench = bench(&source);
    let mut submission = bench.submit(request(prompt.to_vec(), 4)).expect("good");
    bench.turn();
    source.answer_all();
    bench.finish(&mut submission);
    source.take_all();
    bench.run();
    bench.assert_balanced();
    source
}

/// Turns, with a source that answers and delivers, until the request has ended.
fn finish(bench: &mut Bench, source: &ScriptedSource, request: Request) -> Answer {
    let mut submission = bench.submit(request).expect("good");
    let mut answer = Answer::default();
    for _ in 0..100_000 {
        bench.turn();
        source.answer_all();
        source.deliver_all();
        while let Some(event) = submission.try_recv() {
            answer.take(event);
        }
        if answer.is_over() {
            return answer;
        }
    }
    panic!("no end");
}

fn check_answer(answer: &Answer, prompt: &[u32], tokens: u32, cached: u32) {
    let request = request(prompt.to_vec(), tokens);
    assert_eq!(answer.tokens(0), expected(&request, 5, 0, WINDOW, tokens as usize));
    assert_eq!(answer.started().cached_tokens, cached);
    assert_eq!(answer.finished(0).usage.cached_tokens, cached);
}

#[test]
fn what_an_engine_computed_the_next_one_restores_and_computes_only_the_rest() {
    // Lengths around blocks and the window; one row must always be computed.
    for len in [255, 256, 257, 511, 512, 513, 600, 1023, 1024, 1025, 2047, 2048, 2049, 3000] {
        let prompt = stem(1, len);
        let source = stored(&prompt);
        let mut bench = bench(&source);
        let answer = finish(&mut bench, &source, request(prompt.clone(), 20));
        let cached = (len - 1) / 256 * 256;
        check_answer(&answer, &prompt, 20, cached as u32);
        let now = metrics(&bench);
        assert_eq!(now.prefill_rows as usize, len - cached, "only the rest is computed");
        assert_eq!(now.external_hits as usize, cached);
        assert_eq!(answer.finished(0).usage.restored_tokens as usize, cached);
        assert_eq!(now.restore_time.count(), u64::from(cached > 0));
        assert_eq!(now.external_queries as usize, if len > 256 { len - 1 } else { 0 });
        // The window's sliding blocks and all full ones, nothing else.
        let sliding = cached / 256 - (cached + 1).saturating_sub(WINDOW).min(cached) / 256;
        assert_eq!(now.external_blocks as usize, cached / 256 + sliding);
        bench.run();
        source.lock().offers.clear();
        bench.run();
        bench.assert_balanced();
    }
}

#[test]
fn a_prompt_that_parts_in_the_middle_resumes_at_the_last_block_before() {
    let mut prompt = stem(1, 2724);
    let source = stored(&prompt);
    prompt.truncate(960);
    prompt.extend(stem(2, 700));
    let mut bench = bench(&source);
    let answer = finish(&mut bench, &source, request(prompt.clone(), 8));
    check_answer(&answer, &prompt, 8, 768);
}

#[test]
fn memory_and_store_complete_each_other() {
    let prompt = stem(1, 2100);
    let source = stored(&prompt);
    let mut bench = bench(&source);
    // Memory gets the beginning by computing it: the source keeps silent.
    let start = prompt[..1100].to_vec();
    let mut submission = bench.submit(request(start, 1)).expect("good");
    bench.turn();
    drop(std::mem::take(&mut source.lock().queries));
    bench.finish(&mut submission);
    let before = metrics(&bench);
    let answer = finish(&mut bench, &source, request(prompt.clone(), 8));
    check_answer(&answer, &prompt, 8, 2048);
    let now = metrics(&bench);
    assert_eq!(now.external_hits, 2048 - 1100);
    // Blocks 4 to 7 of the full group; of the sliding group the window before 2,048, blocks 6 and 7.
    assert_eq!(now.external_blocks - before.external_blocks, 4 + 2);
}

#[test]
fn every_failure_ends_in_computing_and_is_counted() {
    let prompt = stem(1, 1400);
    let all = [
        RestoreFailure::Missing,
        RestoreFailure::Invalid,
        RestoreFailure::Store,
        RestoreFailure::Slow,
        RestoreFailure::Device,
    ];
    for failure in all {
        let source = stored(&prompt);
        let mut bench = bench(&source);
        let mut submission = bench.submit(request(prompt.clone(), 10)).expect("good");
        bench.turn();
        source.answer_all();
        bench.turn();
        let mut fetch = source.lock().fetches.pop().expect("it is being fetched");
        source.deliver_one(&mut fetch);
        bench.turn();
        match failure {
            RestoreFailure::Slow => bench.advance(3000),
            RestoreFailure::Device => {
                let (group, index) = fetch.wanted[0];
                fetch.delivery.give(group, index, Box::new(vec![0; 17]));
            }
            RestoreFailure::Store => {}
            other => fetch.delivery.fail(other, None),
        }
        if failure == RestoreFailure::Store {
            drop(fetch);
        } else {
            bench.turn();
            bench.turn();
            assert!(fetch.delivery.is_cancelled(), "{failure:?}");
        }
        let answer = bench.finish(&mut submission);
        check_answer(&answer, &prompt, 10, 0);
        let now = metrics(&bench);
        for reason in RestoreFailure::ALL {
            assert_eq!(now.restore_failures(reason), u64::from(reason == failure), "{failure:?} {reason:?}");
        }
        assert_eq!((now.requests_failed, now.prefill_rows), (0, 1400));
        source.lock().offers.clear();
        bench.run();
        bench.assert_balanced();
    }
}

#[test]
fn a_block_that_is_gone_costs_only_what_needed_it() {
    use muser_kv::{KvGroup, PositionKey};
    let prompt = stem(1, 2000);
    let source = stored(&prompt);
    let units: Vec<PositionKey> = prompt.iter().map(|&id| PositionKey::token(id)).collect();
    let mut bench = bench(&source);
    let mut submission = bench.submit(request(prompt.clone(), 10)).expect("good");
    bench.turn();
    source.answer_all();
    bench.turn();
    // Found a moment ago, gone when it is to be read: the last full block.
    let key = crate::testing_source::key(&units, KvGroup::Full, 6).expect("long enough");
    assert!(source.lock().blocks.remove(&key).is_some());
    source.deliver_all();
    bench.turn();
    source.deliver_all();
    let answer = bench.finish(&mut submission);
    check_answer(&answer, &prompt, 10, 1536);
    let now = metrics(&bench);
    assert_eq!((now.restores_missing, now.external_hits), (1, 1536));
}

#[test]
fn silence_is_an_answer_after_a_while() {
    let prompt = stem(1, 1000);
    let source = stored(&prompt);
    let mut bench = bench(&source);
    let mut submission = bench.submit(request(prompt.clone(), 5)).expect("good");
    bench.turns(10);
    assert_eq!(metrics(&bench).prefill_rows, 0, "it waits");
    bench.advance(500);
    let answer = bench.finish(&mut submission);
    check_answer(&answer, &prompt, 5, 0);
    assert_eq!(metrics(&bench).restores_slow, 1);
    assert!(!source.lock().queries[0].is_wanted());
}

#[test]
fn two_requests_for_the_same_prefix_fetch_it_once() {
    let prompt = stem(1, 2000);
    let source = stored(&prompt);
    let mut bench = bench(&source);
    let other: Vec<u32> = [&prompt[..1900], &stem(7, 50)].concat();
    let mut first = bench.submit(request(prompt.clone(), 5)).expect("good");
    let mut second = bench.submit(request(other.clone(), 5)).expect("good");
    bench.turn();
    source.answer_all();
    bench.turns(5);
    assert_eq!(source.lock().fetches.len(), 1);
    source.deliver_all();
    let first = bench.finish(&mut first);
    let second = bench.finish(&mut second);
    check_answer(&first, &prompt, 5, 1792);
    check_answer(&second, &other, 5, 1792);
    assert_eq!(source.lock().delivered, 7 + 2);
    assert_eq!(metrics(&bench).external_hits, 1792);
}

#[test]
fn choices_wait_for_the_first_one_which_restores() {
    let prompt = stem(1, 1000);
    let source = stored(&prompt);
    let mut bench = bench(&source);
    let three = Request { n: 3, ..request(prompt.clone(), 6) };
    let mut submission = bench.submit(three).expect("good");
    let mut answer = Answer::of(3);
    for _ in 0..200 {
        bench.turn();
        source.answer_all();
        source.deliver_all();
        while let Some(event) = submission.try_recv() {
            answer.take(event);
        }
    }
    for index in 0..3 {
        let one = request(prompt.clone(), 6);
        assert_eq!(answer.tokens(index), expected(&one, 5, index, WINDOW, 6));
    }
    assert_eq!(answer.started().cached_tokens, 768);
    assert_eq!(source.lock().delivered, 3 + 2);
}

#[test]
fn others_decode_while_one_is_fetched() {
    let prompt = stem(1, 1400);
    let source = stored(&prompt);
    let mut bench = bench(&source);
    let mut other = bench.submit(request(stem(9, 20), 200)).expect("good");
    bench.turns(5);
    let mut submission = bench.submit(request(prompt.clone(), 10)).expect("good");
    bench.turn();
    source.answer_all();
    bench.turn();
    let before = metrics(&bench).decode_rows;
    bench.turns(100);
    assert_eq!(metrics(&bench).decode_rows - before, 100, "a row in every turn");
    while let Some(event) = other.try_recv() {
        assert!(!matches!(event, Event::Finished(_)));
    }
    source.deliver_all();
    let answer = bench.finish(&mut submission);
    check_answer(&answer, &prompt, 10, 1280);
}

#[test]
fn a_cancelled_fetch_ends_with_the_next_turn_and_gives_its_memory_back() {
    let prompt = stem(1, 3000);
    let source = stored(&prompt);
    let mut bench = bench(&source);
    let mut submission = bench.submit(request(prompt.clone(), 10)).expect("good");
    bench.turn();
    source.answer_all();
    bench.turn();
    let mut fetch = source.lock().fetches.pop().expect("it is being fetched");
    for _ in 0..5 {
        source.deliver_one(&mut fetch);
    }
    bench.turn();
    let places: Vec<_> =
        fetch.wanted.iter().filter_map(|&(group, index)| fetch.delivery.place(group, index)).collect();
    assert!(places.len() > 1, "the executor lends every other block");
    let mut touched = 0;
    assert!(places[0].write(0..100, &mut |out| touched = out.len()));
    assert!(!places[0].write(0..1 << 20, &mut |_| touched = 0), "a block is not as long as that");
    assert_eq!(touched, 100);
    submission.cancel();
    bench.turn();
    assert!(fetch.delivery.is_cancelled());
    // What still comes is dropped, and nothing is written any more: the memory is somebody else's.
    for place in places {
        assert_eq!(place.bytes(), 0);
        assert!(!place.write(0..100, &mut |_| touched = 0));
        fetch.delivery.filled(place);
    }
    assert_eq!(touched, 100);
    source.deliver_one(&mut fetch);
    let answer = bench.finish(&mut submission);
    assert_eq!(answer.finished(0).reason, FinishReason::Cancelled);
    bench.run();
    bench.assert_balanced();
}

#[test]
fn sequences_that_need_memory_get_what_is_held_for_export() {
    let source = ScriptedSource::default();
    // Memory for one sequence.
    let kv_bytes = Some((16 + 4) * 2048);
    let config = EngineConfig { parallel: 1, kv_bytes, ..EngineConfig::default() };
    let mut bench = bench_with(&source, &config);
    for i in 0..4 {
        let prompt = stem(i, 3500);
        let mut submission = bench.submit(request(prompt.clone(), 10)).expect("good");
        bench.turn();
        source.answer_all();
        let answer = bench.finish(&mut submission);
        check_answer(&answer, &prompt, 10, 0);
        // The offer is neither taken nor dropped.
        assert!(!source.lock().offers.is_empty());
    }
    let offers = std::mem::take(&mut source.lock().offers);
    let (give, take) = std::sync::mpsc::channel();
    offers[0].copy_out(muser_kv::KvGroup::Full, 0, Vec::new(), move |_, result| {
        let _ = give.send(result);
    });
    bench.turn();
    assert_eq!(take.try_recv(), Ok(Err(crate::ExportError::Gone)));
    drop(offers);
    bench.run();
    bench.assert_balanced();
}

#[test]
fn without_memory_for_a_fetch_the_request_waits_as_any_other() {
    let prompt = stem(1, 3500);
    let source = stored(&prompt);
    let kv_bytes = Some((16 + 6) * 2048);
    let config = EngineConfig { parallel: 2, kv_bytes, ..EngineConfig::default() };
    let mut bench = bench_with(&source, &config);
    let long = stem(5, 3000);
    let mut other = bench.submit(request(long.clone(), 300)).expect("good");
    bench.turn();
    source.answer_all();
    bench.turns(30);
    let mut submission = bench.submit(request(prompt.clone(), 5)).expect("good");
    let mut answer = Answer::default();
    let mut of_other = Answer::default();
    for _ in 0..2000 {
        bench.turn();
        source.answer_all();
        source.deliver_all();
        source.lock().offers.clear();
        while let Some(event) = submission.try_recv() {
            answer.take(event);
        }
        while let Some(event) = other.try_recv() {
            of_other.take(event);
        }
    }
    check_answer(&answer, &prompt, 5, 3328);
    check_answer(&of_other, &long, 300, 0);
}

#[test]
fn an_engine_that_stops_answers_whoever_waits_for_a_copy() {
    let prompt = stem(1, 1000);
    let source = ScriptedSource::default();
    let mut bench = bench(&source);
    let mut submission = bench.submit(request(prompt, 5)).expect("good");
    bench.turn();
    source.answer_all();
    bench.finish(&mut submission);
    let offer = source.lock().offers.pop().expect("offered");
    let (give, take) = std::sync::mpsc::channel();
    for _ in 0..2 {
        let give = give.clone();
        offer.copy_out(muser_kv::KvGroup::Full, 0, Vec::new(), move |_, result| {
            let _ = give.send(result);
        });
    }
    drop(bench);
    let (_, after) = offer.copy_out_blocking(muser_kv::KvGroup::Full, 0, Vec::new());
    let stopped = Err(crate::ExportError::Stopped);
    assert_eq!((take.try_recv(), take.try_recv(), after), (Ok(stopped), Ok(stopped), stopped));
}

#[test]
fn a_request_that_wants_no_cache_neither_asks_nor_offers() {
    let source = ScriptedSource::default();
    let mut bench = bench(&source);
    let one = Request {
        cache: false,
        sampling: SamplingParams::greedy(),
        queue_timeout: Some(Duration::from_secs(1)),
        ..request(stem(1, 1000), 5)
    };
    bench.ask(one);
    let state = source.lock();
    assert!(state.queries.is_empty() && state.offers.is_empty());
}
