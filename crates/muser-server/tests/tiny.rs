//! The whole path with the bundled model on the CPU: limits, log-probabilities, seeds, cache, cancelling, embeddings.

#![allow(clippy::needless_pass_by_value, reason = "JSON values are written where they are used")]

mod support;

use std::time::{Duration, Instant};

use muser_engine::EngineConfig;
use muser_server::ServerConfig;
use serde_json::{Value, json};
use support::client::{read_until, send};
use support::tiny::{engine, serve};
use support::{Answer, get, post};
use tokio::time::sleep;

const CHAT: &str = "/v1/chat/completions";

fn chat(text: &str, more: Value) -> Value {
    let mut body =
        json!({"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24});
    for (key, value) in more.as_object().expect("object") {
        body[key] = value.clone();
    }
    body
}

fn content(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let message = &answer.json()["choices"][0]["message"];
    let part = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    format!("{}|{}", part("reasoning_content"), part("content"))
}

/// L1: exactly 0, 1, 2 tokens.
#[tokio::test]
async fn limits_are_exact() {
    let server = serve().await;
    for limit in 0..3 {
        for (path, body) in [
            ("/v1/completions", json!({"prompt": "a", "max_tokens": limit})),
            (CHAT, chat("a", json!({"max_tokens": limit}))),
        ] {
            let answer = post(server.address, path, &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            let object = answer.json();
            assert_eq!(object["usage"]["completion_tokens"], limit, "{object}");
            assert_eq!(object["choices"][0]["finish_reason"], "length");
        }
        let body = json!({"prompt": "a", "n_predict": limit});
        assert_eq!(post(server.address, "/completion", &body).await.json()["tokens_predicted"], limit);
    }
    server.stop().await;
}

/// P1 and P3.
#[tokio::test]
async fn log_probabilities_are_the_models_own() {
    let server = serve().await;
    let body = chat(
        "Hello!",
        json!({"logprobs": true, "top_logprobs": 5, "reasoning_effort": "none", "max_tokens": 8}),
    );
    let object = post(server.address, CHAT, &body).await.json();
    let tokens = object["choices"][0]["logprobs"]["content"].as_array().expect("tokens").clone();
    assert!(!tokens.is_empty());
    for token in &tokens {
        let top: Vec<f64> = token["top_logprobs"]
            .as_array()
            .expect("top")
            .iter()
            .filter_map(|entry| entry["logprob"].as_f64())
            .collect();
        assert_eq!(top.len(), 5);
        assert!(top.is_sorted_by(|a, b| a >= b) && top[0] <= 0.0, "{top:?}");
        assert!(top.iter().map(|logprob| logprob.exp()).sum::<f64>() <= 1.0 + 1e-4);
        assert_eq!(token["logprob"].as_f64(), Some(top[0]), "temperature 0 takes the most likely token");
    }
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token["bytes"].as_array().expect("bytes").iter().filter_map(Value::as_u64))
        .map(|byte| byte as u8)
        .collect();
    assert_eq!(
        String::from_utf8_lossy(&bytes),
        object["choices"][0]["message"]["content"].as_str().expect("text")
    );
    // The same numbers whatever the temperature: they are taken before it.
    let hot = json!({"logprobs": true, "top_logprobs": 5, "reasoning_effort": "none", "max_tokens": 1, "temperature": 1.7});
    let hot = post(server.address, CHAT, &chat("Hello!", hot)).await.json();
    assert_eq!(hot["choices"][0]["logprobs"]["content"][0]["top_logprobs"], tokens[0]["top_logprobs"],);
    for more in [json!({"logprobs": true}), json!({"logprobs": true, "top_logprobs": 0})] {
        let object = post(server.address, CHAT, &chat("Hello!", more)).await.json();
        assert!(object["choices"][0]["logprobs"]["content"].is_array());
    }
    let old = json!({"prompt": "Once upon", "max_tokens": 3, "logprobs": 0, "temperature": 0});
    let old = post(server.address, "/v1/completions", &old).await.json();
    let logprobs = &old["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().map(Vec::len), Some(3));
    assert_eq!(logprobs["top_logprobs"][0].as_object().map(serde_json::Map::len), Some(1));
    server.stop().await;
}

/// P5 and P7.
#[tokio::test]
async fn extreme_temperatures() {
    let server = serve().await;
    let greedy = content(&post(server.address, CHAT, &chat("Tell me about a fox.", json!({}))).await);
    for temperature in [0.0003, 1e-9] {
        let body = chat("Tell me about a fox.", json!({"temperature": temperature}));
        assert_eq!(content(&post(server.address, CHAT, &body).await), greedy, "temperature {temperature}");
    }
    // Near-uniform over the 64 tokens that the filter leaves: many seeds give many different tokens, all of them among
    // the 64 most likely.
    let mut seen = std::collections::HashSet::new();
    for seed in 0..48 {
        let body = json!({"prompt": "The fox", "max_tokens": 1, "temperature": 1e6, "top_p": 1, "seed": seed, "logprobs": 1});
        let answer = post(server.address, "/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        seen.insert(answer.json()["choices"][0]["logprobs"]["tokens"][0].to_string());
    }
    assert!((20..=64).contains(&seen.len()), "{} different tokens", seen.len());
    server.stop().await;
}

/// P9.
#[tokio::test]
async fn a_reported_seed_repeats_the_text() {
    let server = serve().await;
    let first = post(server.address, CHAT, &chat("Tell me about a fox.", json!({"temperature": 1.2}))).await;
    let seed = first.json()["seed"].clone();
    assert!(seed.is_u64());
    let again =
        post(server.address, CHAT, &chat("Tell me about a fox.", json!({"temperature": 1.2, "seed": seed})))
            .await;
    assert_eq!(content(&first), content(&again));
    let stream = json!({"temperature": 1.2, "seed": seed, "stream": true});
    let stream = post(server.address, CHAT, &chat("Tell me about a fox.", stream)).await;
    let streamed = format!("{}|{}", stream.deltas("reasoning_content"), stream.deltas("content"));
    assert_eq!(streamed, content(&first));
    server.stop().await;
}

/// K9: the second call reuses the prefix.
#[tokio::test]
async fn a_billing_number_does_not_cost_the_cache() {
    let server = serve().await;
    let long = "The quick brown fox jumps over the lazy dog. ".repeat(60);
    let mut cached = Vec::new();
    for nonce in ["1111", "2222"] {
        let body = json!({"max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}], "system": [
            {"type": "text", "text": format!("x-anthropic-billing-header: cch={nonce};")},
            {"type": "text", "text": long},
        ]});
        let answer = post(server.address, "/v1/messages", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        cached.push(answer.json()["usage"]["cache_read_input_tokens"].as_u64().expect("a count"));
    }
    assert!(cached[1] >= 256 && cached[1] > cached[0], "{cached:?}");
    server.stop().await;
}

/// N1 with the real engine: the slot is free again at once.
#[tokio::test]
async fn a_closed_connection_frees_its_slot() {
    let server = serve().await;
    let busy =
        || engine().0.slots().iter().filter(|slot| slot.state != muser_engine::SlotState::Idle).count();
    let body = json!({"prompt": "Once upon a time", "max_tokens": 3000, "stream": true, "logit_bias": {}, "seed": 1});
    let before = engine().0.metrics().finished_aborted;
    let mut socket = send(server.address, "POST", "/v1/completions", "", body.to_string().as_bytes()).await;
    read_until(&mut socket, |text| text.matches("data: ").count() >= 5).await;
    drop(socket);
    let begun = Instant::now();
    while engine().0.metrics().finished_aborted == before {
        assert!(begun.elapsed() < Duration::from_secs(5), "{} slots stay busy", busy());
        sleep(Duration::from_millis(5)).await;
    }
    server.stop().await;
}

/// O5.
#[tokio::test]
async fn embeddings_are_unit_vectors_in_both_encodings() {
    let server = serve().await;
    let floats = post(server.address, "/v1/embeddings", &json!({"input": ["a fox", "a dog"]})).await;
    assert_eq!(floats.status, 200, "{}", floats.text());
    let object = floats.json();
    let vector: Vec<f32> = object["data"][0]["embedding"]
        .as_array()
        .expect("floats")
        .iter()
        .filter_map(|value| value.as_f64().map(|value| value as f32))
        .collect();
    assert_eq!(vector.len(), 512);
    let length: f32 = vector.iter().map(|value| value * value).sum();
    assert!((length - 1.0).abs() < 1e-4, "{length}");
    let body = json!({"input": "a fox", "encoding_format": "base64"});
    let packed = post(server.address, "/v1/embeddings", &body).await.json();
    use base64::Engine as _;
    let bytes = base64::engine::general_purpose::STANDARD
        .decode(packed["data"][0]["embedding"].as_str().expect("text"))
        .expect("base64");
    let unpacked: Vec<f32> =
        bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect();
    assert_eq!(unpacked, vector);
    assert!(object["usage"]["prompt_tokens"].as_u64() > Some(0));
    server.stop().await;
}

/// L5: with a drafter too, a prompt of twice the window is a 400; and what it drafts changes no text.
#[tokio::test]
async fn a_drafter_changes_neither_limits_nor_text() {
    let (engine, facts) = support::tiny::spawn_drafting(EngineConfig::default());
    let server = support::tiny::serve_with(ServerConfig::default(), &engine, &facts).await;
    let plain = serve().await;
    for stream in [false, true] {
        let long =
            json!({"messages": [{"role": "user", "content": "word ".repeat(2 * 4096)}], "stream": stream});
        let answer = post(server.address, CHAT, &long).await;
        assert_eq!(
            (answer.status, answer.json()["error"]["code"].as_str()),
            (400, Some("context_length_exceeded"))
        );
    }
    let body = chat("Tell me a story about a fox.", json!({"max_tokens": 60}));
    let drafted = post(server.address, CHAT, &body).await;
    assert_eq!(content(&drafted), content(&post(plain.address, CHAT, &body).await));
    let text = get(server.address, "/metrics").await.text().to_owned();
    let proposed = text.lines().find(|line| line.starts_with("vllm:spec_decode_num_draft_tokens_total"));
    assert!(proposed.is_some_and(|line| !line.ends_with(" 0")), "{proposed:?}");
    plain.stop().await;
    server.stop().await;
}

/// L7: what fits is answered, what does not is said; with four slots each has the whole context.
#[tokio::test]
async fn one_request_may_use_the_whole_context() {
    let server = serve().await;
    let fits = "word ".repeat(2500);
    let answer = post(server.address, "/v1/completions", &json!({"prompt": fits, "max_tokens": 2})).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let tokens = answer.json()["usage"]["prompt_tokens"].as_u64().expect("a count");
    assert!(tokens > 2000, "{tokens}");
    let body = json!({"prompt": "word ".repeat(9000), "max_tokens": 2, "stream": true});
    let answer = post(server.address, "/v1/completions", &body).await;
    assert_eq!(
        (answer.status, answer.json()["error"]["code"].as_str()),
        (400, Some("context_length_exceeded"))
    );
    server.stop().await;
}

/// D1, the server's half: alone and beside others the same text comes, and `/v1/models` answers meanwhile.
#[tokio::test]
async fn neighbours_change_nothing() {
    let server = serve().await;
    let address = server.address;
    let ask = async |text: &str| content(&post(address, CHAT, &chat(text, json!({"max_tokens": 40}))).await);
    let texts = [
        "Tell me about a fox.",
        "Write a short story.",
        "What is a tree?",
        "Hello!",
        "Sing.",
        "Count to ten.",
    ];
    let mut alone = Vec::new();
    for text in texts {
        alone.push(ask(text).await);
    }
    let together = futures_util::future::join_all(texts.map(ask));
    let models = get(address, "/v1/models");
    let (together, models) = tokio::join!(together, models);
    assert_eq!(together, alone);
    assert_eq!(models.status, 200);
    server.stop().await;
}

/// A system message in mid-conversation costs no more than itself: what stands before it stays cached.
#[tokio::test]
async fn a_late_system_message_keeps_the_prefix() {
    let server = serve().await;
    let long = "The lazy dog sleeps under a tall tree near the river. ".repeat(60);
    let ask = async |late: bool| {
        let mut messages = vec![
            json!({"role": "user", "content": "Hi there"}),
            json!({"role": "assistant", "content": "Hello"}),
        ];
        if late {
            messages.push(json!({"role": "system", "content": "The mode is now plan."}));
        }
        messages.push(json!({"role": "user", "content": "Go on"}));
        let body = json!({"max_tokens": 3, "system": long, "messages": messages});
        let usage = post(server.address, "/v1/messages", &body).await.json()["usage"].clone();
        (
            usage["cache_read_input_tokens"].as_u64().expect("a count"),
            usage["input_tokens"].as_u64().expect("a count"),
        )
    };
    let (_, first) = ask(false).await;
    let (cached, fresh) = ask(true).await;
    assert!(cached > 512 && fresh < 60, "{cached} cached, {fresh} read, {first} the first time");
    server.stop().await;
}

/// Hostile input 16 and 17: seeds of 64 bits in one spelling, and log-probabilities that end with the text.
#[tokio::test]
async fn seeds_and_log_probabilities_are_those_of_the_text() {
    let server = serve().await;
    let ask = async |more: Value| {
        let mut body = json!({"prompt": "Once upon a time", "max_tokens": 24});
        body.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
        let answer = post(server.address, "/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    };
    for seed in [json!(u64::MAX), json!(1_u64 << 63), json!(-5), json!(7.0)] {
        let first = ask(json!({"seed": seed})).await;
        let again = ask(json!({"seed": first["seed"]})).await;
        assert_eq!(first["choices"][0]["text"], again["choices"][0]["text"], "{seed}");
        assert_eq!(first["seed"], again["seed"]);
    }
    let every = ask(json!({"seed": 3, "top_k": 0})).await;
    assert_eq!(
        ask(json!({"seed": 3, "top_k": 1_000_000_000})).await["choices"][0]["text"],
        every["choices"][0]["text"]
    );
    let text = ask(json!({"temperature": 0})).await["choices"][0]["text"].as_str().expect("text").to_owned();
    let stop: String = text.chars().skip(20).take(5).collect();
    let cut = ask(json!({"temperature": 0, "stop": stop, "logprobs": 1})).await;
    let choice = &cut["choices"][0];
    let shown = choice["text"].as_str().expect("text");
    assert!(text.starts_with(shown) && shown.len() < text.len());
    let tokens = choice["logprobs"]["tokens"].as_array().expect("list");
    let last = choice["logprobs"]["text_offset"]
        .as_array()
        .and_then(|list| list.last()?.as_u64())
        .expect("an offset");
    assert!((last as usize) < shown.chars().count(), "{tokens:?} for {shown:?}");
    server.stop().await;
}

/// Shorter vectors are the beginning of the long ones, scaled again; an empty text has one too.
#[tokio::test]
async fn embeddings_of_fewer_dimensions() {
    let server = serve().await;
    let ask = async |more: Value| {
        let mut body = json!({"input": ["a fox", ""]});
        body.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
        post(server.address, "/v1/embeddings", &body).await
    };
    let vector = |answer: &Answer, index: usize| -> Vec<f64> {
        let values = answer.json()["data"][index]["embedding"].as_array().expect("list").clone();
        values.iter().filter_map(Value::as_f64).collect()
    };
    let whole = ask(json!({})).await;
    let width = vector(&whole, 0).len();
    assert_eq!(vector(&whole, 1).len(), width);
    assert_eq!(vector(&ask(json!({"dimensions": width})).await, 0), vector(&whole, 0));
    let short = vector(&ask(json!({"dimensions": 8})).await, 0);
    assert_eq!(short.len(), 8);
    assert!((short.iter().map(|value| value * value).sum::<f64>() - 1.0).abs() < 1e-5);
    let ratio = vector(&whole, 0)[0] / short[0];
    assert!((vector(&whole, 0)[7] / short[7] - ratio).abs() < 1e-4);
    for wrong in [json!(0), json!(width + 1), json!("8")] {
        let refused = ask(json!({"dimensions": wrong})).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("dimensions")));
    }
    let ollama = post(server.address, "/api/embed", &json!({"input": "a fox", "dimensions": 8})).await.json();
    assert_eq!(ollama["embeddings"][0].as_array().map(Vec::len), Some(8));
    server.stop().await;
}

/// Ollama's streams tell of tokens too.
#[tokio::test]
async fn ollama_tells_log_probabilities() {
    let server = serve().await;
    for stream in [false, true] {
        let body = json!({"prompt": "Hello", "think": false, "stream": stream, "logprobs": true, "top_logprobs": 2,
            "options": {"num_predict": 8, "temperature": 0}});
        let lines = post(server.address, "/api/generate", &body).await.lines();
        let told: Vec<&Value> =
            lines.iter().filter_map(|line| line["logprobs"].as_array()).flatten().collect();
        let text: String = lines.iter().filter_map(|line| line["response"].as_str()).collect();
        let tokens: String = told.iter().filter_map(|entry| entry["token"].as_str()).collect();
        assert_eq!(text, tokens);
        assert!(
            told.iter().all(|entry| entry["top_logprobs"].as_array().map(Vec::len) == Some(2)),
            "{told:?}"
        );
    }
    server.stop().await;
}

/// Small things that were answered in another shape, or refused, than they should be.
#[tokio::test]
async fn odd_queries_and_choices_are_answered_in_kind() {
    let server = serve().await;
    for query in ["action=a&action=b", "action=a", "", "action"] {
        let answer = post(server.address, &format!("/slots/0?{query}"), &json!({})).await;
        assert!([400, 501].contains(&answer.status), "{query}: {}", answer.status);
        assert!(answer.json()["error"]["message"].is_string(), "{query}: {}", answer.text());
    }
    for choice in ["\u{7f}", "a\u{7f}b", "\u{1}", "\u{85}", "\"\\"] {
        let body = json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 40,
            "guided_choice": [choice], "reasoning_effort": "none"});
        let answer = post(server.address, "/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "{choice:?}: {}", answer.text());
        assert_eq!(answer.json()["choices"][0]["message"]["content"], choice);
    }
    server.stop().await;
}
