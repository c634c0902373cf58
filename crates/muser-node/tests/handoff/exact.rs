//! E6: what a node has read is, bit for bit, what is read here.

use muser_kv::CacheScope;
use muser_node::Producer;

use crate::support::{Bench, ask, ask_as, assert_idle, prompt, read_here, state_digest};

/// Asks here and there, and compares all there is; answers with what the consumer computed.
fn compare(bench: &Bench, prompt: &[u32]) -> u64 {
    let before = bench.consumer.metrics().prefill_rows;
    let (here, there) = (ask(&bench.local, prompt, 4), ask(&bench.consumer, prompt, 4));
    assert_eq!(there.tokens, here.tokens, "{} positions", prompt.len());
    let computed = bench.consumer.metrics().prefill_rows - before;
    let digests =
        [&bench.local, &bench.consumer].map(|engine| state_digest(engine, prompt, crate::support::window()));
    assert_eq!(digests[0], digests[1], "{} positions", prompt.len());
    computed
}

fn count(few: u64) -> u64 {
    if muser_testkit::is_long() { 200 } else { few }
}

#[test]
fn what_a_node_reads_is_what_is_read_here() {
    let bench = Bench::tls(8192, 1);
    let mut rng = muser_testkit::Rng(6);
    for seed in 0..count(12) {
        let len = 1 + rng.below(if seed % 4 == 3 { 4097 } else { 1400 });
        let computed = compare(&bench, &prompt(seed, len));
        if len > 256 {
            assert_eq!(computed, 1, "of {len} positions");
        }
    }
    let figures = bench.settled();
    assert!(figures.installed > 0 && figures.given_up == 0, "{figures:?}");
    assert_eq!(bench.consumer.metrics().handed_tokens, bench.consumer.metrics().external_hits);
    assert_eq!(bench.given(), figures.installed);
    bench.assert_idle();
}

#[test]
fn a_delta_is_what_the_whole_would_have_been_and_sends_only_what_lacks() {
    let bench = Bench::tls(8192, 1);
    let mut rng = muser_testkit::Rng(7);
    for seed in 0..count(8) {
        let len = 600 + rng.below(if seed % 4 == 3 { 3400 } else { 1000 });
        let held = 256 + rng.below(len - 560);
        let prompt = prompt(1000 + seed, len);
        read_here(&bench.consumer, &prompt[..held]);
        let before = bench.nodes.figures().received_bytes;
        assert_eq!(compare(&bench, &prompt), 1, "{held} of {len} were held");
        let sent = bench.nodes.figures().received_bytes - before;
        let lacking = crate::support::bytes_of_rows(held / 256 * 256, len - 1);
        assert!(sent as f64 <= lacking as f64 * 1.01, "{sent} bytes of {lacking}: {held} of {len} were held");
    }
    assert_eq!(bench.nodes.figures().given_up, 0);
    bench.assert_idle();
}

#[test]
fn a_prefix_that_comes_in_stages_is_the_same() {
    let bench = Bench::tls(512, 1);
    let mut rng = muser_testkit::Rng(8);
    for seed in 0..count(6) {
        let len = 1100 + rng.below(if seed % 3 == 2 { 2900 } else { 900 });
        assert_eq!(compare(&bench, &prompt(2000 + seed, len)), 1);
    }
    let figures = bench.settled();
    assert_eq!(figures.given_up, 0, "{figures:?}");
    assert!(figures.stages >= figures.installed * 3, "{figures:?}");
    bench.assert_idle();
}

#[test]
fn what_the_node_knows_already_has_no_stages_and_is_the_same() {
    let bench = Bench::tls(512, 1);
    let prompt = prompt(3000, 1900);
    for forget in [false, true] {
        // Once as far as the node said that it knows, once further than it remembers.
        compare(&bench, &prompt);
        assert_idle(&bench.consumer);
        bench.consumer.forget_prefixes();
        if forget {
            let giver = Producer::scope_of(&bench.net().consumer.key(), &[0; 32]);
            crate::support::read(&bench.producers[0], &prompt[..1700], giver);
        }
    }
    let given_up = bench.nodes.figures().given_up;
    assert_eq!(compare(&bench, &prompt[..1800]), 1);
    assert_eq!((given_up, bench.nodes.figures().given_up), (0, 0));
    bench.assert_idle();
}

/// What one client of the consumer had read is not known at the node to another one, by answers or by time.
#[test]
fn tenants_of_a_consumer_are_kept_apart_at_the_node() {
    let bench = Bench::tls(512, 1);
    let prompt = prompt(3500, 1500);
    let local = ask(&bench.local, &prompt, 2).tokens;
    let computed = || bench.producers[0].metrics().prefill_rows;
    for (tenant, rows) in [("a", 1500), ("b", 3000), ("a", 3000)] {
        let there = ask_as(&bench.consumer, &prompt, 2, CacheScope::of(&[tenant.as_bytes()]));
        assert_eq!(there.tokens, local, "{tenant}");
        assert!(there.usage.handed_tokens > 1000, "{tenant}: {:?}", there.usage);
        // The last row is the consumer's own.
        assert!((rows - 8..=rows).contains(&computed()), "{tenant}: {}", computed());
        assert_idle(&bench.consumer);
        bench.consumer.forget_prefixes();
    }
    bench.assert_idle();
}

#[test]
fn sixteen_at_once_from_two_nodes_are_each_what_they_are_alone() {
    let bench = Bench::tls(512, 2);
    let prompts: Vec<Vec<u32>> =
        (0..16).map(|i| prompt(4000 + i % 12, 300 + 20 * (i as usize % 12))).collect();
    let answers: Vec<_> = std::thread::scope(|scope| {
        let asking: Vec<_> =
            prompts.iter().map(|prompt| scope.spawn(|| ask(&bench.consumer, prompt, 3))).collect();
        asking.into_iter().map(|one| one.join().expect("no panic")).collect()
    });
    for (prompt, there) in prompts.iter().zip(&answers) {
        assert_eq!(there.tokens, ask(&bench.local, prompt, 3).tokens);
    }
    let figures = bench.settled();
    assert_eq!(figures.given_up, 0, "{figures:?}");
    assert!(figures.begun <= 12, "the same prompt is fetched once: {figures:?}");
    assert!(bench.givers.iter().all(|giver| giver.figures().given > 0), "both had something to do");
    for engine in &bench.producers {
        assert_idle(engine);
    }
    bench.assert_idle();
}
