//! `muser serve --packs`, killed and started again: what was computed stays computed, and the text stays the same.

mod support;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::Home;
use support::served::Served;

fn messages() -> Vec<Value> {
    let story = "The fox runs over the hill and does not look back at the violet harbour. ".repeat(60);
    vec![json!({"role": "user", "content": story})]
}

fn and_more() -> Value {
    let mut messages = messages();
    messages.push(json!({"role": "assistant", "content": "I see."}));
    messages.push(json!({"role": "user", "content": "Go on."}));
    json!({"messages": messages, "temperature": 0, "max_tokens": 16, "reasoning_effort": "none"})
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().expect("text")
}

/// K1: save, SIGKILL, a new process, restore, one word more.
#[test]
fn a_session_survives_a_kill() {
    let home = Home::new();
    let first = Served::start(&home, &[]);
    let expected = first.post("/v1/chat/completions", &and_more());
    let session = json!({"name": "fox", "messages": messages(), "reasoning_effort": "none"});
    let saved = first.post("/v1/sessions", &session);
    let tokens = saved["tokens"].as_u64().expect("a count");
    assert!(tokens > 800 && saved["pack"]["tokens"].as_u64() > Some(tokens - 256), "{saved}");
    // Killed while others are being answered and published.
    let busy = json!({"prompt": "Once upon a time there was a fox. ".repeat(80), "max_tokens": 400});
    let address = first.address.clone();
    let client = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(address).expect("connects");
        let body = busy.to_string();
        let head = format!("POST /v1/completions HTTP/1.0\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.read(&mut [0; 64]).map(drop));
    });
    std::thread::sleep(Duration::from_millis(150));
    first.kill();
    client.join().expect("the other client ends");

    let begun = Instant::now();
    let second = Served::start(&home, &[]);
    let restored = second.post("/v1/sessions/fox/restore", &json!({}));
    let details = &restored["usage"]["prompt_tokens_details"];
    assert!(details["restored_tokens"].as_u64() > Some(tokens - 256), "{restored}");
    assert_eq!(restored["messages"], json!(messages()));
    let again = second.post("/v1/chat/completions", &and_more());
    assert_eq!(text(&again), text(&expected));
    let prompt = again["usage"]["prompt_tokens"].as_u64().expect("a count");
    let cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
    assert!(prompt - cached < 300, "only the tail is computed: {again}");
    assert!(begun.elapsed() < Duration::from_mins(2));
    assert_eq!(second.ask("DELETE", "/v1/sessions/fox", &json!({})).0, 200);
    second.kill();
}

/// Twenty marked prompts (1,000 with `MUSER_TEST_LONG=1`), before and after a restart, with the server saying all that it can say: no word of them and no
/// four of their tokens in a row are in logs, metrics or names of files. (The bytes of a store are searched where it is
/// written.)
#[test]
fn no_log_metric_or_file_name_tells_a_prompt() {
    let home = Home::new();
    let marked = |i: usize| format!("The zanzibar{i} quokka hides. ").repeat(50);
    let ids = home.run(["tokenize", "--json", &marked(7)]).success();
    let ids: Value = serde_json::from_str(&ids).expect("JSON");
    let ids: Vec<u64> = ids.as_array().expect("a list").iter().filter_map(Value::as_u64).collect();
    let prompts = if muser_testkit::is_long() { 1000 } else { 20 };
    let mut written = Vec::new();
    for start in 20..40 {
        let four = &ids[start..start + 4];
        for separator in [" ", ", ", ","] {
            let words: Vec<String> = four.iter().map(u64::to_string).collect();
            written.push(words.join(separator));
        }
    }
    let check = |what: &str, text: &str| {
        let lower = text.to_ascii_lowercase();
        for word in ["zanzibar", "quokka"] {
            assert!(!lower.contains(word), "{word} in {what}: {text}");
        }
        for tokens in &written {
            assert!(!text.contains(tokens), "tokens {tokens} in {what}: {text}");
        }
    };
    for round in 0..2 {
        let served = Served::start(&home, &["-vv"]);
        for i in 0..prompts {
            let body = json!({"prompt": marked(i), "temperature": 0, "max_tokens": 2});
            let answer = served.post("/v1/completions", &body);
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
            // The longest of what was kept when it was killed is there; the last ones may not have been kept.
            assert!(i != 0 || cached >= Some(200 * round), "{answer}");
        }
        let begun = Instant::now();
        while served.metric("muser:packs", "") < 3.0 {
            assert!(begun.elapsed() < Duration::from_mins(1), "nothing is published");
            std::thread::sleep(Duration::from_millis(50));
        }
        // Names of sessions are the user's words too, wherever in a path they stand and whatever is answered.
        let session = json!({"name": "zanzibar diary", "messages": [{"role": "user", "content": "Hello."}], "unknown": 1});
        let (status, said) = served.exchange("POST", "/v1/sessions", &session);
        assert_eq!(status, if round == 0 { 200 } else { 409 }, "{said}");
        for (method, path, expected) in [
            ("GET", "/v1/sessions/zanzibar%20diary", 200),
            ("POST", "/v1/sessions/zanzibar%20diary/restore", 200),
            ("GET", "/v1/sessions/quokka", 404),
            ("PUT", "/v1/sessions/quokka", 405),
            ("GET", "/v1/sessions/quokka/rename", 404),
            ("GET", "/sessions/zanzibar", 404),
        ] {
            assert_eq!(served.exchange(method, path, &json!({"wombat": 1})).0, expected, "{method} {path}");
        }
        check("the metrics", &served.exchange("GET", "/metrics", &Value::Null).1);
        let said = served.said();
        assert!(said.len() > 500, "it was told to talk: {said}");
        check("the log", &said);
        served.kill();
    }
    let mut left = vec![home.path("packs")];
    while let Some(path) = left.pop() {
        check("a name", &path.file_name().expect("a name").to_string_lossy());
        if path.is_dir() {
            left.extend(std::fs::read_dir(&path).expect("list").map(|entry| entry.expect("entry").path()));
        }
    }
}
