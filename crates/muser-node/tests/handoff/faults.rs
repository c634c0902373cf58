//! Whatever goes wrong on the way, the answer is that of reading here, and both sides have their memory back.

use std::time::{Duration, Instant};

use muser_handoff::testing::Faults;

use crate::support::{Bench, ask, assert_idle, prompt};
use crate::wire::Fault;
use muser_engine::{Request, SamplingParams};
use muser_node::{NodeOptions, Preference, Producer};

const ALL: [Fault; 6] = [Fault::Cut, Fault::Kill, Fault::Stall, Fault::Flip, Fault::Drop, Fault::Double];

#[test]
fn faults_at_random_places_change_no_answer_and_leave_no_memory() {
    for nodes in [1, 2] {
        let bench = Bench::new(512, nodes);
        let mut rng = muser_testkit::Rng(9 + nodes as u64);
        let rounds = if muser_testkit::is_long() { 40 } else { 2 };
        for round in 0..rounds * ALL.len() as u64 {
            let fault = ALL[round as usize % ALL.len()];
            // Nodes that failed are left alone for a while: a new set of circuits is a new bench's.
            let bench = if round % 6 == 0 { &Bench::new(512, nodes) } else { &bench };
            let prompt = prompt(10_000 * nodes as u64 + round, 700 + rng.below(1200));
            for node in 0..nodes {
                bench.wire().set_fault(node, rng.below(40) as u64, fault);
            }
            let there = ask(&bench.consumer, &prompt, 3);
            assert_eq!(there.tokens, ask(&bench.local, &prompt, 3).tokens, "{fault:?}, {nodes} nodes");
            let usage = there.usage;
            assert!(usage.handed_tokens <= usage.cached_tokens && usage.cached_tokens < prompt.len() as u32);
            bench.wire().heal();
            assert_idle(&bench.consumer);
        }
        bench.assert_idle();
    }
}

#[test]
fn a_connection_that_breaks_is_resumed_and_nothing_is_sent_twice() {
    let mut rng = muser_testkit::Rng(10);
    for round in 0..if muser_testkit::is_long() { 50 } else { 6 } {
        let bench = Bench::new(8192, 1);
        let prompt = prompt(20_000 + round, 1200 + rng.below(600));
        bench.wire().set_fault(0, 1 + rng.below(15) as u64, Fault::Cut);
        let there = ask(&bench.consumer, &prompt, 3);
        let figures = bench.settled();
        assert_eq!((figures.resumed, figures.installed, figures.given_up), (1, 1, 0), "{figures:?}");
        assert_eq!(there.usage.handed_tokens as usize, prompt.len() - 1);
        assert_eq!(bench.consumer.metrics().prefill_rows, 1);
        // The chunk that was on its way when it broke is the only one that may have come in vain.
        let payload = crate::support::bytes_of_rows(0, prompt.len() - 1) as f64;
        assert!(bench.wire().bytes() as f64 <= payload * 1.05, "{} of {payload}", bench.wire().bytes());
        assert_eq!(there.tokens, ask(&bench.local, &prompt, 3).tokens);
        bench.assert_idle();
    }
}

#[test]
fn a_node_that_dies_is_followed_by_another_one_or_by_this_one_from_the_last_stage() {
    // The 25th chunk is behind the first stage of 4.
    let bench = Bench::new(512, 2);
    let prompt = prompt(30_000, 2100);
    (0..2).for_each(|node| bench.wire().set_fault(node, 25, Fault::Kill));
    let there = ask(&bench.consumer, &prompt, 3);
    let figures = bench.settled();
    assert_eq!(there.tokens, ask(&bench.local, &prompt, 3).tokens);
    assert_eq!(figures.moved, 1, "{figures:?}");
    bench.wire().heal();

    let bench = Bench::new(512, 1);
    bench.wire().set_fault(0, 25, Fault::Kill);
    let began = Instant::now();
    let there = ask(&bench.consumer, &prompt, 3);
    let figures = bench.settled();
    assert_eq!((figures.installed, figures.given_up), (0, 1), "{figures:?}, {:?}", began.elapsed());
    let usage = there.usage;
    assert!(usage.handed_tokens >= 512 && usage.handed_tokens.is_multiple_of(512), "{usage:?}");
    let rows = bench.consumer.metrics().prefill_rows;
    assert_eq!(rows, 2100 - u64::from(usage.handed_tokens), "only what came after is computed here");
    assert_eq!(there.tokens, ask(&bench.local, &prompt, 3).tokens);
    bench.assert_idle();
}

#[test]
fn a_client_that_leaves_stops_the_node_within_a_step() {
    let bench = Bench::new(8192, 1);
    for round in 0..if muser_testkit::is_long() { 60 } else { 6 } {
        let request = Request {
            max_tokens: Some(1),
            sampling: SamplingParams::greedy(),
            ..Request::new(prompt(40_000 + round, 3800), Vec::new())
        };
        let submission = bench.consumer.submit(request).expect("it is taken");
        std::thread::sleep(Duration::from_millis(7 * round % 97));
        drop(submission);
        let left = Instant::now();
        bench.assert_idle();
        assert!(left.elapsed() < Duration::from_secs(5), "{:?}", left.elapsed());
    }
    assert_eq!(bench.nodes.figures().installed, 0);
}

#[test]
fn without_nodes_that_answer_a_prompt_is_read_here_after_at_most_the_time_for_asking() {
    for silent in [false, true] {
        let options = NodeOptions { preference: Preference::Nodes, ..NodeOptions::default() };
        let bench = Bench::with(options, 1, false);
        if silent {
            bench.wire().silence();
        } else {
            bench.givers[0].drain();
        }
        let prompt = prompt(50_000, 900);
        let before = bench.consumer.metrics().restores_slow;
        let there = ask(&bench.consumer, &prompt, 2);
        assert_eq!(there.usage.handed_tokens, 0);
        assert_eq!(there.tokens, ask(&bench.local, &prompt, 2).tokens);
        assert_eq!(bench.nodes.figures().no_node, 1);
        assert_eq!(bench.consumer.metrics().restores_slow, before, "an answer came in time: none");
        bench.assert_idle();
    }
}

#[test]
fn a_prompt_that_is_read_sooner_here_is_read_here() {
    let options = NodeOptions { least_local: Duration::from_mins(1), ..NodeOptions::default() };
    let bench = Bench::with(options, 1, false);
    // Nobody has measured anything here: the node is asked about a long one.
    let there = ask(&bench.consumer, &prompt(60_000, 1300), 2);
    assert_eq!(there.usage.handed_tokens, 1299);
    // Then it is known that so few rows take no time; that one row takes a moment says nothing of it.
    crate::support::read_here(&bench.consumer, &prompt(60_001, 900));
    let again = ask(&bench.consumer, &prompt(60_002, 300), 2);
    assert_eq!(again.usage.handed_tokens, 0);
    assert_eq!(bench.nodes.figures().asked, 1);
    bench.assert_idle();
    let bench = Bench::with(NodeOptions::default(), 1, false);
    let short = ask(&bench.consumer, &prompt(60_003, 900), 2);
    assert_eq!((short.usage.handed_tokens, bench.nodes.figures().asked), (0, 0), "not about a short one");
    bench.assert_idle();
}

#[test]
fn a_node_whose_memory_is_needed_says_so_and_the_rest_is_read_here() {
    let bench = Bench::new(8192, 1);
    let scope = Producer::scope_of(&muser_handoff::NodeKey([9; 32]), &[0; 32]);
    let prompts: Vec<_> = (0..3).map(|i| prompt(70_000 + i, 3000)).collect();
    std::thread::scope(|threads| {
        for (i, prompt) in prompts.iter().enumerate() {
            let bench = &bench;
            threads.spawn(move || {
                let there = ask(&bench.consumer, prompt, 2);
                assert_eq!(there.tokens, ask(&bench.local, prompt, 2).tokens, "request {i}");
            });
        }
        // Its own clients come first, with all the memory there is.
        for i in 0..4 {
            let engine = &bench.producers[0];
            threads.spawn(move || crate::support::read_here(engine, &prompt(71_000 + i, 4000)));
        }
    });
    crate::support::read(&bench.producers[0], &prompts[0][..300], scope);
    bench.assert_idle();
}

#[test]
fn faults_of_the_network_change_no_answer_and_leave_no_memory() {
    let bench = Bench::tls(512, 2);
    let rounds = if muser_testkit::is_long() { 500 } else { 10 };
    for round in 0..rounds {
        let prompt = prompt(80_000 + round, 600 + round as usize * 97 % 1300);
        let bytes = support_bytes(&prompt);
        for (index, relay) in bench.net().relays.iter().enumerate() {
            relay.set(Faults::random(2 * round + index as u64, bytes));
        }
        let there = ask(&bench.consumer, &prompt, 2);
        assert_eq!(there.tokens, ask(&bench.local, &prompt, 2).tokens, "round {round}");
        bench.net().relays.iter().for_each(|relay| relay.set(Faults::default()));
        assert_idle(&bench.consumer);
    }
    bench.assert_idle();
    let figures = bench.nodes.figures();
    assert!(figures.begun > 0, "{figures:?}");
}

fn support_bytes(prompt: &[u32]) -> u64 {
    crate::support::bytes_of_rows(0, prompt.len() - 1) as u64
}
