//! A node that computes other bits under the same name is found, before and after it is used.

use std::io::Write as _;
use std::time::{Duration, Instant};

use muser_engine::EngineHandle;
use muser_model::Model;
use muser_node::{Auditor, CanaryError, canary};

use crate::support::{Bench, always, ask, config, engine, engine_of, executor_of, facts, prompt};

/// An engine over the bundled model with one weight changed.
fn spoiled() -> EngineHandle {
    let mut bytes = std::fs::read(muser_testkit::muse_tiny()).expect("it is there");
    let file = muser_gguf::GgufFile::open(muser_testkit::muse_tiny()).expect("it opens");
    let tensor = file.tensors().iter().find(|tensor| tensor.name == "blk.0.attn_k.weight").expect("a tensor");
    let data = file.tensor_data(tensor);
    let at = bytes.windows(64).position(|window| window == &data[..64]).expect("it is in the file");
    // A quant in the middle of a block.
    bytes[at + 40] ^= 0x11;
    let mut spoiled = tempfile::NamedTempFile::new().expect("a file");
    spoiled.write_all(&bytes).expect("written");
    let model = Model::load(spoiled.path()).expect("it is as good as any");
    engine_of(executor_of(model), config(), None)
}

#[test]
fn a_canary_tells_equal_bits_from_others() {
    let facts = facts();
    let bench = Bench::of(always(8192), vec![engine(config(), None), spoiled()], true);
    let report = canary(&*bench.peers(), "first", &facts, &bench.consumer).expect("equal");
    assert_eq!(report.bytes, crate::support::bytes_of_rows(0, 600) as u64);
    let error = canary(&*bench.peers(), "second", &facts, &bench.consumer).expect_err("one weight differs");
    assert!(matches!(error, CanaryError::Unlike { block: 0, .. }), "{error}");
    let error = canary(&*bench.peers(), "nobody", &facts, &bench.consumer).expect_err("there is none");
    assert!(matches!(error, CanaryError::Fetch(_)), "{error}");
    bench.assert_idle();
}

#[test]
fn the_first_hand_off_is_looked_after_and_a_node_with_other_bits_is_put_aside() {
    for (is_spoiled, producer) in [(false, engine(config(), None)), (true, spoiled())] {
        let bench = Bench::of(always(8192), vec![producer], true);
        let auditor = Auditor::start(&bench.nodes, bench.consumer.clone(), &facts()).expect("a thread");
        let long = prompt(90_000, 900);
        let there = ask(&bench.consumer, &long, 2);
        assert_eq!(there.usage.handed_tokens, 899);
        let until = Instant::now() + Duration::from_mins(1);
        while bench.nodes.figures().audited == 0 {
            assert!(Instant::now() < until, "nobody looks");
            std::thread::sleep(Duration::from_millis(10));
        }
        bench.assert_idle();
        assert_eq!(bench.nodes.is_rejected("first"), is_spoiled);
        let figures = bench.nodes.figures();
        assert_eq!((figures.audited, figures.unequal), (1, u64::from(is_spoiled)));
        assert_eq!((figures.transfer_time.count(), figures.quote_time.count()), (1, 1));
        assert_eq!(bench.nodes.running(), [], "it is over");
        assert_eq!(bench.givers[0].figures().given_positions, 899);
        // What it brought is forgotten, and it is asked no more.
        let again = ask(&bench.consumer, &long, 2);
        if is_spoiled {
            assert_eq!((again.usage.cached_tokens, again.usage.handed_tokens), (0, 0));
            assert_eq!(again.tokens, ask(&bench.local, &long, 2).tokens);
        } else {
            assert_eq!(again.tokens, there.tokens);
            let other = ask(&bench.consumer, &prompt(90_001, 700), 2);
            assert_eq!(other.usage.handed_tokens, 699);
            assert_eq!(bench.nodes.figures().audited, 1, "one of many");
        }
        drop(auditor);
        bench.assert_idle();
    }
}

#[test]
fn only_nodes_that_were_shown_to_be_equal_are_asked_where_proof_is_required() {
    let bench = Bench::of(always(8192), vec![engine(config(), None)], true);
    bench.nodes.require_proof();
    let ask_anew = |seed: u64| ask(&bench.consumer, &prompt(seed, 700), 2).usage.handed_tokens;
    assert_eq!(ask_anew(91_000), 0);
    let build = bench.peers().list()[0].hello.as_ref().expect("it has said who it is").build.clone();
    bench.nodes.note_proven("first", "muser 0.0.1");
    assert_eq!(ask_anew(91_001), 0, "another program was shown to be equal");
    bench.nodes.note_proven("first", &build);
    assert_eq!(ask_anew(91_002), 699);
    bench.nodes.reject("first");
    assert_eq!(ask_anew(91_003), 0);
    bench.nodes.pardon("first");
    assert_eq!(ask_anew(91_004), 699);
    bench.assert_idle();
}
