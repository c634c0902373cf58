//! What a fault leaves behind.

use crate::{
    EngineConfig, Request, RequestError, SamplingParams,
    testing::{Bench, expected, request, stem},
};

fn ask(prompt: &[u32]) -> Request {
    Request { sampling: SamplingParams::greedy(), ..request(prompt.to_vec(), 3) }
}

fn check(bench: &mut Bench, prompt: &[u32]) {
    let answer = bench.ask(ask(prompt));
    assert_eq!(answer.failure(), None);
    assert_eq!(answer.tokens(0), expected(&ask(prompt), 5, 0, 256, 3));
}

fn check_fails(bench: &mut Bench, prompt: &[u32]) {
    let answer = bench.ask(ask(prompt));
    assert!(matches!(answer.failure(), Some(RequestError::Device(_))), "{:?}", answer.failure());
}

#[test]
fn blocks_whose_bytes_never_came_back_are_not_known() {
    // The device holds one prompt, host memory two.
    let config = EngineConfig {
        parallel: 1,
        kv_bytes: Some(2048 * (8 + 8)),
        host_bytes: 2048 * 30,
        ..EngineConfig::default()
    };
    let prompts = [stem(0, 1800), stem(1, 1800)];
    // The first, a middle one and one of the last of the blocks that come back.
    for import in [0, 3, 6] {
        let mut bench = Bench::new(2048, 256, &config);
        prompts.iter().for_each(|prompt| check(&mut bench, prompt));
        assert!(bench.driver.shared().metrics.snapshot().host_bytes_held > 0);
        bench.fail_import(import);
        check_fails(&mut bench, &prompts[0]);
        for prompt in [0, 1, 0] {
            check(&mut bench, &prompts[prompt]);
        }
        bench.assert_balanced();
    }
}

#[test]
fn a_copy_that_failed_leaves_no_block_that_is_known() {
    let mut bench = Bench::new(2048, 256, &EngineConfig::default());
    let prompt = stem(1, 400);
    check(&mut bench, &prompt);
    // The same up to the middle of a block, which is copied so that the first prompt keeps its own.
    let mut other = prompt[..350].to_vec();
    other.extend(stem(2, 300));
    bench.fail_import(0);
    check_fails(&mut bench, &other);
    for prompt in [&other, &prompt, &other] {
        check(&mut bench, prompt);
    }
    bench.assert_balanced();
}
