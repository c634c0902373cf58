//! `muser serve --packs`, killed and started again: what was computed stays computed, the text stays the same, and keys that
//! do not fit are refused in words.

mod support;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::Home;

/// A server that dies with this value.
struct Served {
    child: Child,
    address: String,
}

impl Served {
    /// Starts one with its home in `home`, and waits until it is ready.
    fn start(home: &Home) -> Self {
        let mut child = home
            .command(["serve", "--port", "0", "--packs"])
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        let stderr = child.stderr.take().expect("piped");
        let mut address = String::new();
        let mut lines = BufReader::new(stderr).lines();
        for line in lines.by_ref().map_while(Result::ok) {
            if let Some((_, rest)) = line.split_once("listening on http://") {
                rest.split([',', ' ', '/']).next().unwrap_or_default().clone_into(&mut address);
            }
            if line.contains("ready") {
                break;
            }
        }
        assert!(!address.is_empty(), "it says where it listens");
        // Reading on, so that it never waits for us.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address }
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let body = body.to_string();
        let mut stream = TcpStream::connect(&self.address).expect("connects");
        stream.set_read_timeout(Some(Duration::from_mins(2))).expect("a timeout");
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.0\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n");
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).expect("written");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, serde_json::from_str(body).unwrap_or(Value::Null))
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.ask("POST", path, body);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    /// SIGKILL: nothing is said goodbye to.
    fn kill(mut self) {
        self.child.kill().expect("it was running");
        self.child.wait().expect("it ends");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

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
    let first = Served::start(&home);
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
    let second = Served::start(&home);
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
