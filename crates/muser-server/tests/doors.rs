//! What a request may ask of the scheduler and of the KV cache, through HTTP, with the bundled model: rank, time limit, going
//! on beyond the context, host memory.

mod support;

use std::time::{Duration, Instant};

use muser_engine::EngineConfig;
use muser_server::ServerConfig;
use serde_json::{Value, json};
use support::tiny::{serve_with, spawn};
use support::{Running, get, post};

async fn served(config: EngineConfig, server: ServerConfig) -> Running {
    let (engine, facts) = spawn(config);
    serve_with(server, &engine, &facts).await
}

fn config() -> EngineConfig {
    EngineConfig { parallel: 1, ..EngineConfig::default() }
}

async fn metric(server: &Running, name: &str) -> f64 {
    let text = get(server.address, "/metrics").await.text().to_owned();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a figure")
}

/// With one place, requests of lower `priority` go before those that came earlier.
#[tokio::test]
async fn lower_numbers_go_first() {
    let server = served(config(), ServerConfig::default()).await;
    let address = server.address;
    let ask = move |priority: Value, tokens: u32| {
        let body = json!({"prompt": "Once", "max_tokens": tokens, "ignore_eos": true, "priority": priority});
        tokio::spawn(async move {
            let answer = post(address, "/v1/completions", &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            Instant::now()
        })
    };
    let first = ask(json!(0), 300);
    let begun = Instant::now();
    while metric(&server, "vllm:num_requests_running").await < 1.0 {
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    let mut ends = Vec::new();
    for (waiting, priority) in
        [(1.0, json!(5)), (2.0, json!(null)), (3.0, json!(-2_000_000_000)), (4.0, json!(5))]
    {
        ends.push(ask(priority, 40));
        while metric(&server, "vllm:num_requests_waiting").await < waiting {
            assert!(!first.is_finished(), "the first one has ended too early for this test");
        }
    }
    let mut at = Vec::new();
    for end in ends {
        at.push(end.await.expect("an answer"));
    }
    assert!(at[2] < at[1] && at[1] < at[0] && at[0] < at[3], "{at:?}");
    let wrong = post(address, "/v1/completions", &json!({"prompt": "a", "priority": "high"})).await;
    assert_eq!((wrong.status, wrong.json()["error"]["param"].as_str()), (400, Some("priority")));
    server.stop().await;
}

/// What exists when the time is over is the answer; a request that waited all the time has none.
#[tokio::test]
async fn a_time_limit_ends_the_text() {
    let server = served(config(), ServerConfig::default()).await;
    let body = json!({"messages": [{"role": "user", "content": "Tell me a story."}], "timeout": 2.0,
        "logit_bias": {}, "ignore_eos": true});
    let begun = Instant::now();
    let (long, waits) = tokio::join!(post(server.address, "/v1/chat/completions", &body), async {
        // Only behind a request that has the one place does this one wait for as long as it may.
        while metric(&server, "vllm:num_requests_running").await < 1.0 {
            assert!(begun.elapsed() < Duration::from_secs(20));
        }
        let body = json!({"prompt": "a", "timeout": 0.05, "max_tokens": 5});
        post(server.address, "/v1/completions", &body).await
    });
    let took = begun.elapsed();
    assert!(took > Duration::from_millis(1_900) && took < Duration::from_secs(20), "{took:?}");
    let object = long.json();
    assert_eq!(object["choices"][0]["finish_reason"], "length", "{object}");
    let written = object["usage"]["completion_tokens"].as_u64().expect("a count");
    assert!((1..4000).contains(&written), "{written}");
    let object = waits.json();
    assert_eq!(object["choices"][0]["finish_reason"], "length", "{object}");
    assert_eq!(object["usage"]["completion_tokens"], 0);
    for wrong in [json!(0), json!(-1), json!("1s")] {
        let answer = post(server.address, "/v1/completions", &json!({"prompt": "a", "timeout": wrong})).await;
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some("timeout")));
    }
    server.stop().await;
}

/// Text goes on beyond the context if the server or the request says so, and `n_keep` stays.
#[tokio::test]
async fn text_goes_on_beyond_the_context() {
    let small = EngineConfig { context: Some(256), ..config() };
    let by_default =
        served(small.clone(), ServerConfig { context_shift: true, ..ServerConfig::default() }).await;
    let on_request = served(small, ServerConfig::default()).await;
    let body = json!({"prompt": "Once upon a time there was", "n_predict": 700, "ignore_eos": true, "temperature": 0});
    let with = |more: Value| {
        let mut body = body.clone();
        for (key, value) in more.as_object().expect("an object") {
            body[key] = value.clone();
        }
        body
    };
    let plain = post(on_request.address, "/completion", &body).await.json();
    assert_eq!((plain["truncated"].as_bool(), plain["stop_type"].as_str()), (Some(false), Some("limit")));
    let written = plain["tokens_predicted"].as_u64().expect("a count");
    assert!(written < 256);
    let shifted = post(on_request.address, "/completion", &with(json!({"context_shift": true}))).await.json();
    assert_eq!(
        (shifted["truncated"].as_bool(), shifted["tokens_predicted"].as_u64()),
        (Some(true), Some(700))
    );
    let text = |object: &Value| object["content"].as_str().expect("text").to_owned();
    assert!(text(&shifted).starts_with(&text(&plain)), "up to the full context it is the plain text");
    let same = post(by_default.address, "/completion", &body).await.json();
    assert_eq!(text(&same), text(&shifted));
    let off = post(by_default.address, "/completion", &with(json!({"context_shift": false}))).await.json();
    assert_eq!(text(&off), text(&plain));
    // Another beginning stays, so other text follows; the end of the context comes at the same place.
    let kept = post(by_default.address, "/completion", &with(json!({"n_keep": -1}))).await.json();
    assert_eq!((kept["truncated"].as_bool(), kept["tokens_predicted"].as_u64()), (Some(true), Some(700)));
    assert_eq!(text(&kept)[..text(&plain).len()], text(&plain));
    assert!(metric(&by_default, "muser:context_shifts_total").await >= 6.0);
    by_default.stop().await;
    on_request.stop().await;
}

/// A chat that is too long loses whole turns, oldest first: the answer is that to the shortened chat.
#[tokio::test]
async fn a_chat_loses_its_oldest_turns() {
    let config = EngineConfig { context: Some(512), ..config() };
    let server = served(config, ServerConfig { context_shift: true, ..ServerConfig::default() }).await;
    let turn = |name: &str| {
        vec![
            json!({"role": "user", "content": format!("{name}: {}", "some words ".repeat(30))}),
            json!({"role": "assistant", "content": format!("Yes, {name}.")}),
        ]
    };
    let system = json!({"role": "system", "content": "You are a fox."});
    let last = json!({"role": "user", "content": "And now?"});
    let chat = |turns: &[&str]| {
        let mut messages = vec![system.clone()];
        turns.iter().for_each(|name| messages.extend(turn(name)));
        messages.push(last.clone());
        json!({"messages": messages, "max_tokens": 12, "temperature": 0})
    };
    let answer = async |body: Value| {
        let answer = post(server.address, "/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let object = answer.json();
        (object["choices"][0]["message"].clone(), object["usage"]["prompt_tokens"].as_u64().expect("a count"))
    };
    let (long, tokens) = answer(chat(&["one", "two", "three", "four", "five", "six", "seven"])).await;
    assert!(tokens > 512, "{tokens}: too long as it is");
    let mut same = Vec::new();
    for left in [
        &["two", "three", "four", "five", "six", "seven"][..],
        &["three", "four", "five", "six", "seven"],
        &["four", "five", "six", "seven"],
        &["five", "six", "seven"],
        &["six", "seven"],
        &["seven"],
    ] {
        let body = chat(left);
        let (short, tokens) = answer(body).await;
        same.push((tokens <= 512 - 64, short == long));
    }
    let first_that_fits = same.iter().position(|(fits, _)| *fits).expect("one fits");
    assert!(same[first_that_fits].1, "{same:?}: the answer is that to the chat without the oldest turns");
    // A single turn that is too long stays a 400.
    let body = json!({"messages": [{"role": "user", "content": "word ".repeat(900)}]});
    let refused = post(server.address, "/v1/chat/completions", &body).await;
    assert_eq!(
        (refused.status, refused.json()["error"]["code"].as_str()),
        (400, Some("context_length_exceeded"))
    );
    server.stop().await;
}

/// Blocks that the device has no room for come back from host memory, and the text is the same.
#[tokio::test]
async fn host_memory_keeps_what_left_the_device() {
    let server = served(
        EngineConfig { kv_bytes: Some(16 << 20), host_bytes: 256 << 20, context: Some(2048), ..config() },
        ServerConfig::default(),
    )
    .await;
    let prompt = |name: &str| json!({"prompt": format!("{name} {}", "word ".repeat(900)), "max_tokens": 4, "temperature": 0});
    let mut texts = Vec::new();
    for round in 0..2 {
        for name in ["fox", "dog", "cat", "owl", "hen", "cow"] {
            let object = post(server.address, "/v1/completions", &prompt(name)).await.json();
            let text = object["choices"][0]["text"].as_str().expect("text").to_owned();
            if round == 0 {
                texts.push((name, text));
            } else {
                assert!(texts.contains(&(name, text)), "{name}: the same text");
                let cached = object["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
                assert!(cached > Some(700), "{name}: {cached:?}");
            }
        }
    }
    assert!(metric(&server, "muser:kv_host_blocks_restored_total").await > 0.0);
    let held = metric(&server, "muser:kv_host_bytes{").await;
    assert!(held > 0.0 && held <= f64::from(256 << 20), "{held}");
    assert!(metric(&server, "muser:step_seconds_count").await > 0.0);
    server.stop().await;
}
