//! Log-probabilities of prompts, as evaluation tools ask for them, on the bundled model: the same numbers as decoding gives,
//! whatever the shape of the request.

mod support;

use serde_json::{Value, json};
use support::tiny::serve;
use support::{get, post};

const TEXT: &str =
    "The quick brown fox jumps over the lazy dog. It was a sunny day in the forest, and everybody was glad.";

fn numbers(choice: &Value) -> Vec<f64> {
    choice["logprobs"]["token_logprobs"].as_array().expect("list").iter().filter_map(Value::as_f64).collect()
}

/// What lm-eval sends for a multiple-choice task, several at a time, as ids and as text.
#[tokio::test]
async fn a_prompts_likelihood_is_what_decoding_says() {
    let server = serve().await;
    let ask = async |body: Value| {
        let answer = post(server.address, "/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    };
    let tokenized = post(server.address, "/tokenize", &json!({"prompt": TEXT})).await.json();
    let ids: Vec<u64> =
        tokenized["tokens"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect();
    let wanted = |prompt: Value| json!({"prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": true, "seed": 1234, "temperature": 0});
    let whole = ask(wanted(json!([ids]))).await;
    let choice = &whole["choices"][0];
    let values = choice["logprobs"]["token_logprobs"].as_array().expect("list");
    assert_eq!(values.len(), ids.len() + 1);
    assert_eq!(values[0], Value::Null);
    // Each of them, drawn by decoding from what stands before it with that token alone allowed to be likely.
    for at in [1, 2, ids.len() / 2, ids.len() - 1] {
        let body = json!({"prompt": [ids[..at]], "max_tokens": 1, "logprobs": 1, "temperature": 0,
            "logit_bias": {ids[at].to_string(): 1000}});
        let decoded = ask(body).await;
        assert_eq!(
            numbers(&decoded["choices"][0])[0],
            values[at].as_f64().expect("a number"),
            "position {at}"
        );
    }
    // As text, among others, and without a token after it.
    let batch = ask(wanted(json!([TEXT, "Hello", TEXT]))).await;
    for index in [0, 2] {
        assert_eq!(numbers(&batch["choices"][index]), numbers(choice));
    }
    assert_eq!(batch["choices"][1]["index"], 1);
    let mut only = wanted(json!(TEXT));
    only["max_tokens"] = 0.into();
    let only = ask(only).await;
    assert_eq!(only["choices"][0]["text"], TEXT);
    assert_eq!(numbers(&only["choices"][0]), numbers(choice)[..ids.len() - 1]);
    assert_eq!(only["usage"]["completion_tokens"], 0);
    // The place of each token in the text.
    let logprobs = &batch["choices"][0]["logprobs"];
    let text = batch["choices"][0]["text"].as_str().expect("text");
    let mut end = 0;
    for (token, offset) in logprobs["tokens"]
        .as_array()
        .expect("list")
        .iter()
        .zip(logprobs["text_offset"].as_array().expect("list"))
        .skip(1)
    {
        let (token, offset) = (token.as_str().expect("text"), offset.as_u64().expect("a number") as usize);
        assert_eq!(offset, end);
        assert!(text.chars().skip(offset).collect::<String>().starts_with(token), "{token:?} at {offset}");
        end += token.chars().count();
    }
    // In a stream, the same.
    let mut streamed = wanted(json!(TEXT));
    streamed["stream"] = true.into();
    let events = post(server.address, "/v1/completions", &streamed).await.events();
    let seen: Vec<f64> = events
        .iter()
        .filter(|event| event["choices"][0]["logprobs"].is_object())
        .flat_map(|event| numbers(&event["choices"][0]))
        .collect();
    assert_eq!(seen, numbers(choice));
    server.stop().await;
}

/// Tools take the last entry for the token after the prompt and drop it: it is there when that token ends the turn, or is
/// another one without text.
#[tokio::test]
async fn the_token_after_a_prompt_is_told_of_whatever_it_is() {
    let server = serve().await;
    let info = get(server.address, "/tokenizer_info").await.json();
    for (marker, finish) in [("eos_token", "stop"), ("bos_token", "length")] {
        let body = json!({"prompt": info[marker], "add_special_tokens": false});
        let tokens = post(server.address, "/tokenize", &body).await.json()["tokens"].clone();
        assert_eq!(tokens.as_array().map(Vec::len), Some(1), "a marker is one token: {tokens}");
        let id = tokens[0].as_u64().expect("an id");
        for stream in [false, true] {
            let body = json!({"prompt": TEXT, "max_tokens": 1, "logprobs": 1, "echo": true, "stream": stream,
                "logit_bias": {id.to_string(): 1000}});
            let answer = post(server.address, "/v1/completions", &body).await;
            let events = if stream { answer.events() } else { vec![answer.json()] };
            let text: String =
                events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
            let known: usize = events
                .iter()
                .filter_map(|event| {
                    event["choices"][0]["logprobs"]["token_logprobs"].as_array().map(Vec::len)
                })
                .sum();
            let tokens = post(server.address, "/tokenize", &json!({"prompt": TEXT})).await.json();
            let tokens = tokens["tokens"].as_array().map_or(0, Vec::len);
            let last = events.iter().rev().find_map(|event| event["choices"][0]["finish_reason"].as_str());
            assert_eq!((text.as_str(), known, last), (TEXT, tokens + 1, Some(finish)), "{marker} {stream}");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn vllms_shape_has_ranks() {
    let server = serve().await;
    let body = json!({"prompt": TEXT, "max_tokens": 1, "prompt_logprobs": 2, "temperature": 0});
    let object = post(server.address, "/v1/completions", &body).await.json();
    let prompt = object["choices"][0]["prompt_logprobs"].as_array().expect("a list").clone();
    assert_eq!(prompt[0], Value::Null);
    for entry in &prompt[1..] {
        let entry = entry.as_object().expect("an object");
        assert!((2..=3).contains(&entry.len()), "{entry:?}");
        assert!(entry.values().any(|value| value["rank"] == 1));
    }
    let chat =
        json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "prompt_logprobs": 0});
    let object = post(server.address, "/v1/chat/completions", &chat).await.json();
    assert_eq!(
        object["prompt_logprobs"].as_array().map(Vec::len),
        object["usage"]["prompt_tokens"].as_u64().map(|n| n as usize)
    );
    let mut streamed = chat;
    streamed["stream"] = true.into();
    let refused = post(server.address, "/v1/chat/completions", &streamed).await;
    assert_eq!(refused.json()["error"]["param"], "prompt_logprobs");
    server.stop().await;
}

#[tokio::test]
async fn the_tokenizer_tells_of_itself() {
    let server = serve().await;
    let info = get(server.address, "/tokenizer_info").await.json();
    for key in ["bos_token", "eos_token", "pad_token", "chat_template"] {
        assert!(info[key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {info}");
    }
    server.stop().await;
}

/// Many prompts wait for each other; a wrong one says which.
#[tokio::test]
async fn prompts_come_in_batches() {
    let server = serve().await;
    let prompts: Vec<String> = (0..40).map(|index| format!("Number {index} is")).collect();
    let body = json!({"prompt": prompts, "max_tokens": 0, "logprobs": 0, "echo": true});
    let object = post(server.address, "/v1/completions", &body).await.json();
    let choices = object["choices"].as_array().expect("list");
    for (index, (choice, prompt)) in choices.iter().zip(&prompts).enumerate() {
        assert_eq!(
            (choice["index"].as_u64(), choice["text"].as_str()),
            (Some(index as u64), Some(prompt.as_str()))
        );
    }
    assert_eq!(choices.len(), 40);
    let wrong = json!({"prompt": [[1, 2], [1, 4_000_000]], "max_tokens": 1});
    assert_eq!(post(server.address, "/v1/completions", &wrong).await.json()["error"]["param"], "prompt[1]");
    server.stop().await;
}
