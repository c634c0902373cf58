//! Time: headers at once, comments in silences, cancelling, slow readers.

mod support;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use muser_server::{Limits, ServerConfig};
use serde_json::{Value, json};
use support::client::{read_until, send};
use support::{Running, Script, Scripted, get};
use tokio::time::sleep;

const CHAT: &str = "/v1/chat/completions";

fn body(stream: bool) -> Vec<u8> {
    json!({"messages": [{"role": "user", "content": "a"}], "stream": stream}).to_string().into_bytes()
}

/// About `tokens` tokens, one each `pace`.
fn long(tokens: usize, pace: Duration) -> Script {
    Script { pace, ..Script::saying(&format!(" to=user<|message|>{}<|eot|>", "a b ".repeat(tokens / 2))) }
}

async fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what} did not happen");
        sleep(Duration::from_millis(5)).await;
    }
}

fn quick() -> ServerConfig {
    ServerConfig { keep_alive: Duration::from_millis(100), ..ServerConfig::default() }
}

#[tokio::test]
async fn headers_come_at_once_and_comments_while_the_prompt_is_read() {
    let engine = Scripted::new(|_| Script {
        prefill: Duration::from_secs(1),
        ..Script::saying(" to=user<|message|>ok<|eot|>")
    });
    let server = Running::scripted(quick(), engine).await;
    let mut stream = send(server.address, "POST", CHAT, "", &body(true)).await;
    let (head, time) = read_until(&mut stream, |text| text.contains("\r\n\r\n")).await;
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("text/event-stream"), "{head}");
    assert!(time < Duration::from_millis(500), "headers took {time:?}");
    let (text, _) = read_until(&mut stream, |text| text.contains("data: [DONE]")).await;
    assert!(text.matches(": keep-alive\n\n").count() >= 5, "{text}");
    server.stop().await;
}

/// N5: the parser holds a call's name back until its first parameter, however long that takes.
#[tokio::test]
async fn comments_go_on_while_a_call_is_held_back() {
    let name = "x".repeat(200);
    let engine = Scripted::new(move |_| Script {
        pace: Duration::from_millis(10),
        ..Script::saying(&format!(
            " to={name}<|message|><atem:function_calls>\n<atem:invoke name=\"{name}\">\n</atem:invoke>\n</atem:function_calls><|eot|>"
        ))
    });
    let server = Running::scripted(quick(), engine).await;
    let mut stream = send(server.address, "POST", CHAT, "", &body(true)).await;
    let (text, _) = read_until(&mut stream, |text| text.contains("data: [DONE]")).await;
    let before_first = text.split("data: ").next().unwrap_or_default();
    assert!(before_first.matches(": keep-alive").count() >= 3, "{text}");
    server.stop().await;
}

/// N1: streams, whole answers and prompts that are still being read.
#[tokio::test]
async fn a_closed_connection_cancels() {
    for (stream, prefill) in [(true, 0), (false, 0), (true, 60_000), (false, 60_000)] {
        let engine = Scripted::new(move |_| Script {
            prefill: Duration::from_millis(prefill),
            ..long(2000, Duration::from_millis(5))
        });
        let server = Running::scripted(ServerConfig::default(), engine.clone()).await;
        let socket = send(server.address, "POST", CHAT, "", &body(stream)).await;
        wait_for("the request", || engine.running.load(Ordering::SeqCst) == 1).await;
        if prefill == 0 {
            wait_for("five tokens", || engine.tokens.load(Ordering::SeqCst) >= 5).await;
        }
        drop(socket);
        let begun = Instant::now();
        wait_for("the cancelling", || engine.running.load(Ordering::SeqCst) == 0).await;
        assert_eq!(engine.cancelled.load(Ordering::SeqCst), 1, "stream {stream}, prefill {prefill}");
        assert!(begun.elapsed() < Duration::from_millis(500), "took {:?}", begun.elapsed());
        server.stop().await;
    }
}

/// N3.
#[tokio::test]
async fn cancelling_one_leaves_the_other_alone() {
    let engine = Scripted::new(|prompt| {
        if prompt.contains("slow") {
            long(4000, Duration::from_millis(5))
        } else {
            long(40, Duration::from_millis(5))
        }
    });
    let server = Running::scripted(ServerConfig::default(), engine.clone()).await;
    let slow = json!({"messages": [{"role": "user", "content": "slow"}], "stream": true}).to_string();
    let victim = send(server.address, "POST", CHAT, "", slow.as_bytes()).await;
    let mut other = send(server.address, "POST", CHAT, "", &body(true)).await;
    wait_for("both", || engine.running.load(Ordering::SeqCst) == 2).await;
    drop(victim);
    let (text, _) = read_until(&mut other, |text| text.contains("data: [DONE]")).await;
    assert!(text.contains("\"finish_reason\":\"stop\""));
    wait_for("the cancelling", || engine.cancelled.load(Ordering::SeqCst) == 1).await;
    server.stop().await;
}

#[tokio::test]
async fn a_reader_that_does_not_read_stalls_only_itself_and_is_dropped() {
    let limits = Limits { stalled_write_time: Duration::from_millis(400), ..Limits::default() };
    let config = ServerConfig { limits, ..ServerConfig::default() };
    let engine = Scripted::new(|prompt| {
        // Far more than the socket's buffers hold.
        let text = if prompt.contains("flood") { "lorem ipsum ".repeat(200_000) } else { "ok".into() };
        Script::saying(&format!(" to=user<|message|>{text}<|eot|>"))
    });
    let server = Running::scripted(config, engine.clone()).await;
    let flood = json!({"messages": [{"role": "user", "content": "flood"}], "stream": true}).to_string();
    let socket = send(server.address, "POST", CHAT, "", flood.as_bytes()).await;
    wait_for("the flood", || engine.tokens.load(Ordering::SeqCst) > 1000).await;
    // Others are served meanwhile.
    for _ in 0..5 {
        let mut other = send(server.address, "POST", CHAT, "", &body(true)).await;
        let (_, time) = read_until(&mut other, |text| text.contains("data: [DONE]")).await;
        assert!(time < Duration::from_secs(2), "another request took {time:?}");
    }
    wait_for("the dropping", || engine.cancelled.load(Ordering::SeqCst) == 1).await;
    drop(socket);
    server.stop().await;
}

#[tokio::test]
async fn metrics_tell_what_happened() {
    let engine = Scripted::new(|_| long(20, Duration::from_millis(1)));
    let server = Running::scripted(ServerConfig::default(), engine.clone()).await;
    support::post(server.address, CHAT, &serde_json::from_slice::<Value>(&body(false)).expect("JSON")).await;
    support::post(server.address, CHAT, &json!({"messages": 1})).await;
    let victim = send(server.address, "POST", CHAT, "", &body(true)).await;
    drop(victim);
    wait_for("the end", || engine.running.load(Ordering::SeqCst) == 0).await;
    let text = get(server.address, "/metrics").await;
    assert!(text.header("content-type").is_some_and(|kind| kind.starts_with("application/openmetrics-text")));
    let text = text.text().to_owned();
    let value = |name: &str| {
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
        line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok()).expect("a number")
    };
    assert!(value("vllm:generation_tokens_total") >= 20.0);
    assert_eq!(value("muser:requests_refused_total"), 1.0);
    assert!(value("vllm:time_to_first_token_seconds_count") >= 1.0);
    assert!(text.contains("finished_reason=\"stop\""));
    server.stop().await;
}
