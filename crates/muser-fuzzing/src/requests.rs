//! Requests of every dialect, and heads of HTTP.

use std::sync::LazyLock;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request};
use http_body_util::BodyExt as _;
use muser_server::config::Limits;
use muser_server::describe::Route;
use muser_server::fields::{Field, Kind, Support};
use muser_server::fuzzing::serve;
use muser_server::routes::{ROUTES, router};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt as _;

use crate::chat::history;
use crate::scripted::APP;
use crate::{Input, Target};

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
}

static ROUTER: LazyLock<Router> = LazyLock::new(|| router(&APP));
static POSTS: LazyLock<Vec<&'static Route>> =
    LazyLock::new(|| ROUTES.iter().filter(|route| route.method == "POST").collect());

/// A body for a route, made from the route's own table of fields.
pub const REQUESTS: Target = Target {
    name: "requests",
    about: "bodies of every route of every dialect: never a 5xx, errors are JSON of the dialect, streams end as they should",
    run: requests,
    seeds: request_seeds,
    words: &[
        "\"model\":",
        "\"messages\":",
        "\"stream\":true",
        "\"tools\":",
        "\"input\":",
        "\"response_format\":",
        "\"stop\":",
        "\"logit_bias\":",
    ],
    max_len: 768,
    memory: (128 << 20, 262_144),
    millis: (8000, 4000),
};

fn requests(data: &[u8]) {
    let mut input = Input::new(data);
    let route = input.pick(&POSTS);
    let raw = input.below(10) == 0;
    let body = if raw { input.rest().to_vec() } else { body(route, &mut input).to_string().into_bytes() };
    let path = route.path.replace("{id}", "0").replace("{name}", "a");
    let request = Request::builder()
        .method(Method::POST)
        .uri(&path)
        .header("host", "localhost")
        .header("content-type", "application/json")
        .body(Body::from(body.clone()))
        .expect("a request");
    let (status, kind, answer) = RUNTIME.with(|runtime| {
        runtime.block_on(async {
            let answer = ROUTER.clone().oneshot(request).await.unwrap_or_else(|never| match never {});
            let kind = answer
                .headers()
                .get("content-type")
                .and_then(|kind| kind.to_str().ok())
                .unwrap_or_default()
                .to_owned();
            let status = answer.status().as_u16();
            (status, kind, answer.into_body().collect().await.expect("an answer's body").to_bytes())
        })
    });
    let shown = || {
        format!("{path} {status} {}\n{}", String::from_utf8_lossy(&body), String::from_utf8_lossy(&answer))
    };
    assert!(status < 500 || status == 501, "{}", shown());
    let text = std::str::from_utf8(&answer).unwrap_or_else(|_| panic!("text: {}", shown()));
    if kind.starts_with("text/event-stream") {
        for line in text.lines().filter_map(|line| line.strip_prefix("data:")) {
            let line = line.trim();
            assert!(
                line == "[DONE]" || serde_json::from_str::<Value>(line).is_ok(),
                "{line:?} in {}",
                shown()
            );
        }
        let ended = [
            "[DONE]",
            "response.completed",
            "response.incomplete",
            "response.failed",
            "message_stop",
            "\"stop\":true",
            "error",
        ];
        assert!(ended.iter().any(|end| text.contains(end)), "a stream without an end: {}", shown());
        return;
    }
    if kind.starts_with("application/x-ndjson") {
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{}", shown())))
            .collect();
        assert!(
            lines.last().is_some_and(|last| last["done"] == true || last.get("error").is_some()),
            "{}",
            shown()
        );
        return;
    }
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {}", shown()));
    if status >= 400 {
        let message = value["error"]["message"].as_str().or(value["error"].as_str()).unwrap_or_default();
        assert!(!message.is_empty() && message.len() < 64 << 10, "an error says why: {}", shown());
        let is_anthropic = path.starts_with("/v1/messages");
        assert!(!is_anthropic || value["type"] == "error", "{}", shown());
    }
}

fn body(route: &Route, input: &mut Input<'_>) -> Value {
    let mut fields = Map::new();
    let (messages, tools) = history(input);
    let often = input.below(4);
    for field in route.fields {
        let wanted = field.support == Support::Required || input.below(12) <= often;
        if !wanted || input.below(64) == 63 {
            continue;
        }
        let value = match field.name {
            _ if input.below(40) == 39 => input.json(3),
            "messages" => messages.clone().into(),
            "tools" if !tools.is_empty() => tools.clone().into(),
            "input" if input.flag() => messages.clone().into(),
            "model" => "muse-tiny".into(),
            "max_tokens" | "max_completion_tokens" | "max_output_tokens" | "n_predict" => input.below(40).into(),
            "tool_choice" => input.pick(&[json!("auto"), json!("none"), json!("required"), json!({"type": "function", "function": {"name": "tool_0"}})].each_ref()).clone(),
            "response_format" | "format" | "text" => input
                .pick(&[json!("json"), json!({"type": "json_object"}), json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}), json!({"type": "object"})].each_ref())
                .clone(),
            "grammar" => input.pick(&["root ::= \"a\"", "root ::=", "start: /x/"]).into(),
            _ => a_value(field.kind, input, 3),
        };
        fields.insert(field.name.to_owned(), value);
    }
    fields.into()
}

/// A value of a kind, and now and then of another one.
fn a_value(kind: Kind, input: &mut Input<'_>, depth: usize) -> Value {
    if depth == 0 || input.below(24) == 23 {
        return input.json(2);
    }
    match kind {
        Kind::Bool => input.flag().into(),
        Kind::Text => input.text(40).into(),
        Kind::Integer { min, max } => match input.below(4) {
            0 => min.into(),
            1 => max.into(),
            2 => input.number().into(),
            _ => min.saturating_add(i64::from(input.byte()) % 20).into(),
        },
        Kind::Seed => input.number().into(),
        Kind::Number { min, max } => match input.below(4) {
            0 => json!(min),
            1 => json!(max),
            2 => json!(input.number()),
            _ => json!(f64::from(input.byte()) / 100.0),
        },
        Kind::OneOf(words) => input.pick(words).into(),
        Kind::List(item) => (0..input.below(4)).map(|_| a_value(*item, input, depth - 1)).collect(),
        Kind::Object(table) => object(table, input, depth),
        Kind::Map => Value::Object((0..input.below(4)).map(|_| (input.text(8), input.json(2))).collect()),
        Kind::Either(kinds) => a_value(input.pick(kinds), input, depth),
        Kind::Any => input.json(depth),
    }
}

fn object(table: &[Field], input: &mut Input<'_>, depth: usize) -> Value {
    let mut fields = Map::new();
    for field in table {
        if field.support == Support::Required || input.below(3) == 0 {
            fields.insert(field.name.to_owned(), a_value(field.kind, input, depth - 1));
        }
    }
    fields.into()
}

fn request_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for route in 0..POSTS.len() as u8 {
        // A plain question, then one of everything.
        seeds.push([&[route, 1, 0, 0, 0, 9, 2, 3][..], &[0; 8], &[7; 40]].concat());
        seeds.push(
            (0..200)
                .map(|i: u8| if i == 0 { route } else { i.wrapping_mul(route | 1).wrapping_add(i / 7) })
                .collect(),
        );
        let raw = br#"{"model":"muse-tiny","messages":[{"role":"user","content":"Hi"}],"prompt":"a","input":"b","content":"c","tokens":[1],"stream":true,"max_tokens":3}"#;
        seeds.push([&[route, 0][..], raw].concat());
    }
    seeds
}

/// Bytes of a connection.
pub const HTTP_HEADS: Target = Target {
    name: "http_heads",
    about: "any bytes of a connection: it ends, never a 5xx, and answers do not depend on how the bytes were cut",
    run: http_heads,
    seeds: head_seeds,
    words: &[
        "GET ",
        "POST ",
        "OPTIONS ",
        " HTTP/1.1\\r\\n",
        " HTTP/1.0\\r\\n",
        "Host: localhost\\r\\n",
        "Content-Length: ",
        "Transfer-Encoding: chunked\\r\\n",
        "Connection: close\\r\\n",
        "Expect: 100-continue\\r\\n",
        "Content-Encoding: gzip\\r\\n",
        "Origin: http://localhost\\r\\n",
        "\\r\\n\\r\\n",
        "PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n",
        "/health",
        "/v1/chat/completions",
        "/v1/models/",
        "%2e%2e/",
        "0\\r\\n\\r\\n",
        "Authorization: Bearer x\\r\\n",
    ],
    max_len: 2048,
    memory: (8 << 20, 4096),
    millis: (2000, 500),
};

fn http_heads(data: &[u8]) {
    let Some((piece, bytes)) = data.split_first() else { return };
    let is_h2 = bytes.starts_with(b"PRI");
    let whole = converse(bytes, bytes.len().max(1));
    let cut = converse(bytes, 1 + usize::from(*piece) % 64);
    if is_h2 {
        return;
    }
    let (mut whole, mut cut) = (statuses(&whole), statuses(&cut));
    // A head that never ends may be refused for its first line or just be left: that is looked at once it is whole, or at once.
    for one in [&mut whole, &mut cut] {
        one.pop_if(|status| *status == 400);
    }
    assert_eq!(whole, cut, "what is answered depends on how it came");
    assert!(
        whole.iter().all(|status| (100..500).contains(status) || *status == 501 || *status == 505),
        "{whole:?}"
    );
}

/// What comes back for bytes that are written in pieces.
fn converse(bytes: &[u8], piece: usize) -> Vec<u8> {
    RUNTIME.with(|runtime| {
        runtime.block_on(async {
            let (mut ours, theirs) = duplex(if piece > 64 { 1 << 16 } else { piece });
            let served = tokio::spawn(async move { serve(theirs, ROUTER.clone(), &Limits::default()).await });
            let talk = async {
                let (mut from, mut to) = tokio::io::split(&mut ours);
                let write = async {
                    for part in bytes.chunks(piece) {
                        if to.write_all(part).await.is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown().await;
                };
                let mut answer = Vec::new();
                let read = async { drop(from.read_to_end(&mut answer).await) };
                tokio::join!(write, read);
                answer
            };
            let answer = tokio::time::timeout(Duration::from_secs(8), talk)
                .await
                .expect("the connection ends by itself");
            drop(ours);
            tokio::time::timeout(Duration::from_secs(8), served)
                .await
                .expect("and so does its task")
                .expect("without a panic");
            answer
        })
    })
}

/// The status of each answer, by a reading of its own: head, `Content-Length` or chunks, next head.
fn statuses(mut bytes: &[u8]) -> Vec<u16> {
    let mut found = Vec::new();
    while let Some(rest) = bytes.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(1..)) {
        let status = rest
            .get(1..4)
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| digits.parse().ok());
        let status: u16 = status.unwrap_or_else(|| {
            panic!("no status in {:?}", String::from_utf8_lossy(&bytes[..bytes.len().min(60)]))
        });
        found.push(status);
        let Some(end) = bytes.windows(4).position(|end| end == b"\r\n\r\n") else { break };
        let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
        let length =
            head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
        bytes = &bytes[end + 4..];
        if status == 100 {
            continue;
        }
        // Answers to HEAD have a length and no body: the next head stands at once.
        if !bytes.starts_with(b"HTTP/1.") {
            let Some(length) = length else { break };
            bytes = bytes.get(length..).unwrap_or_default();
        }
    }
    found
}

fn head_seeds() -> Vec<Vec<u8>> {
    let chat = r#"{"model":"m","messages":[{"role":"user","content":"Hi"}],"max_tokens":3}"#;
    let post = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{chat}",
        chat.len()
    );
    let chunked = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n{:x}\r\n{chat}\r\n0\r\n\r\n",
        chat.len()
    );
    [
        "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\nGET /props HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        "HEAD / HTTP/1.0\r\n\r\n",
        "OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost:3000\r\nAccess-Control-Request-Method: POST\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\u{4}\0\0\0\0\0",
        "GET /v1/models/%2e%2e%2fx HTTP/1.1\r\nHost: evil.example\r\nExpect: 100-continue\r\n\r\n",
        &post,
        &chunked,
        "GARBAGE\r\n\r\n",
    ]
    .iter()
    .map(|text| [&[9][..], text.as_bytes()].concat())
    .collect()
}
