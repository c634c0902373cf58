//! Log-probabilities of a prompt's own tokens: what decoding would have said, however the prompt was cut.

use crate::{
    ContextPolicy, EngineConfig, Event, PromptLogprobs, Request, RequestError, SamplingParams, ShiftPlan,
    SubmitError,
    sampler::Sampler,
    testing::{Answer, Bench, Fault, Oracle, VOCAB, expected, request, stem},
};

const WINDOW: usize = 256;

fn asking(prompt: Vec<u32>, max_tokens: u32, top: u8) -> Request {
    let sampling = SamplingParams::greedy();
    Request { sampling, prompt_logprobs: Some(top), ..request(prompt, max_tokens) }
}

/// What reading one token after the other says.
fn one_by_one(prompt: &[u32], top: usize) -> PromptLogprobs {
    let (mut oracle, mut sampler) = (Oracle::new(WINDOW), Sampler::new());
    let mut known = PromptLogprobs { top_each: top, ..PromptLogprobs::default() };
    for pair in prompt.windows(2) {
        oracle.push(u64::from(pair[0]));
        let (log_sum, best) = sampler.logprobs(&oracle.logits, top);
        let value = oracle.logits[pair[1] as usize];
        let rank = 1 + oracle.logits.iter().filter(|&&other| other > value).count() as u32;
        known.tokens.push(((f64::from(value) - log_sum) as f32, rank));
        known.top.extend_from_slice(best.as_slice());
    }
    known
}

fn told(answer: &Answer) -> &PromptLogprobs {
    let mut told = answer.events.iter().filter_map(|event| match event {
        Event::Prompt(known) => Some(known),
        _ => None,
    });
    let known = told.next().expect("the prompt's log-probabilities came");
    assert!(told.next().is_none(), "they come once");
    known
}

#[test]
fn every_cut_of_a_prompt_says_what_decoding_says() {
    let prompt = stem(3, 700);
    let alone = one_by_one(&prompt, 4);
    for prefill_rows in [1, 7, 256, 512] {
        for max_tokens in [0, 1, 5] {
            let config = EngineConfig { prefill_rows, ..EngineConfig::default() };
            let mut bench = Bench::new(2048, WINDOW, &config);
            let answer = bench.ask(asking(prompt.clone(), max_tokens, 4));
            assert_eq!(told(&answer), &alone, "{prefill_rows} rows a step, {max_tokens} tokens");
            assert_eq!(alone.top_at(700), &[]);
            assert_eq!(alone.top_at(699).len(), 4);
            let wanted = expected(&asking(prompt.clone(), max_tokens, 4), 5, 0, WINDOW, max_tokens as usize);
            assert_eq!(answer.tokens(0), wanted, "the tokens after it are the same");
            bench.assert_balanced();
        }
    }
}

#[test]
fn a_known_prompt_is_read_again_and_leaves_what_was_known() {
    let mut bench = Bench::new(2048, WINDOW, &EngineConfig::default());
    let prompt = stem(3, 600);
    bench.ask(request(prompt.clone(), 2));
    let answer = bench.ask(asking(prompt.clone(), 1, 0));
    assert_eq!(answer.started().cached_tokens, 0, "known rows have no logits");
    assert_eq!(told(&answer), &one_by_one(&prompt, 0));
    assert_eq!(bench.ask(request(prompt, 2)).started().cached_tokens, 599);
    bench.assert_balanced();
}

#[test]
fn several_choices_and_neighbours_tell_it_once_each() {
    let config = EngineConfig { parallel: 4, ..EngineConfig::default() };
    let mut bench = Bench::new(2048, WINDOW, &config);
    let prompts = [stem(1, 300), stem(2, 1), stem(3, 900)];
    let mut running: Vec<_> = prompts
        .iter()
        .map(|prompt| bench.submit(Request { n: 2, ..asking(prompt.clone(), 3, 2) }).expect("good"))
        .collect();
    let mut answers: Vec<Answer> = prompts.iter().map(|_| Answer::of(2)).collect();
    while !answers.iter().all(Answer::is_over) {
        bench.turn();
        for (submission, answer) in running.iter_mut().zip(&mut answers) {
            while let Some(event) = submission.try_recv() {
                answer.take(event);
            }
        }
    }
    for (prompt, answer) in prompts.iter().zip(&answers) {
        assert_eq!(told(answer), &one_by_one(prompt, 2));
        assert_eq!(answer.tokens(0).len(), 3);
        assert_eq!(answer.tokens(1).len(), 3);
    }
    bench.assert_balanced();
}

#[test]
fn limits_and_faults() {
    let mut bench = Bench::new(2048, WINDOW, &EngineConfig::default());
    let refused = bench.submit(asking(stem(1, 4), 1, 21)).err();
    assert!(matches!(refused, Some(SubmitError::Invalid { field: "prompt_logprobs", .. })), "{refused:?}");
    let unknown = Request { stop_ids: vec![VOCAB as u32], ..request(stem(1, 4), 1) };
    let refused = bench.submit(unknown).err();
    assert!(matches!(refused, Some(SubmitError::Invalid { field: "stop_token_ids", .. })), "{refused:?}");
    bench.fail_step(0, Fault::NotANumber);
    let answer = bench.ask(asking(stem(1, 40), 1, 0));
    assert_eq!(answer.failure(), Some(&RequestError::NotFinite { position: 0 }));
    // A shift reads the rest again and has nothing more to tell.
    let plan = ContextPolicy::Shift(ShiftPlan { keep: 2, turns: vec![2, 900, 1900], plain: false });
    let answer = bench.ask(Request { context_policy: plan, ..asking(stem(1, 2000), 100, 0) });
    assert!(answer.events.iter().any(|event| matches!(event, Event::Shifted { .. })));
    assert_eq!(told(&answer), &one_by_one(&stem(1, 2000), 0));
    bench.assert_balanced();
}

#[test]
fn top_k_of_the_whole_vocabulary_is_no_filter() {
    let text = |top_k: u32| {
        let mut bench = Bench::new(2048, WINDOW, &EngineConfig::default());
        let sampling = SamplingParams { top_k, ..SamplingParams::default() };
        bench.ask(Request { sampling, ..request(stem(9, 30), 60) }).tokens(0)
    };
    let none = text(0);
    for top_k in [VOCAB as u32, VOCAB as u32 + 1, u32::MAX] {
        assert_eq!(text(top_k), none, "top_k {top_k}");
    }
    assert_ne!(text(2), none);
}
