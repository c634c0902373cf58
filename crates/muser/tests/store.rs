//! `pull`, `models` and `--model NAME` against a hub on loopback, with a process that is killed in mid-transfer.

mod support;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{Home, muse_tiny};

const TARGET: &str = "/someone/tiny/resolve/main/tiny.gguf";

/// Bytes that the first answer sends before it falls silent.
const FIRST_BYTES: usize = 3 << 20;

static ANSWERS: AtomicUsize = AtomicUsize::new(0);

/// Serves Muse Tiny under the hub's layout; the first connection stalls in the middle.
fn hub() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    let content = std::fs::read(muse_tiny()).expect("the bundled model");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let content = content.clone();
            std::thread::spawn(move || serve(stream.expect("a connection"), &content));
        }
    });
    address
}

fn serve(mut stream: TcpStream, content: &[u8]) {
    let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
    let (mut target, mut from) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) <= 2 {
            break;
        }
        if target.is_empty() {
            line.split(' ').nth(1).unwrap_or_default().clone_into(&mut target);
        }
        if let Some(range) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
            from = range.trim().trim_end_matches('-').parse().expect("a range");
        }
    }
    let end = content.len();
    let head = match (target.as_str(), from) {
        (TARGET, 0) => format!("200 OK\r\nContent-Length: {end}"),
        (TARGET, _) => {
            let rest = end - from;
            format!(
                "206 Partial Content\r\nContent-Length: {rest}\r\nContent-Range: bytes {from}-{}/{end}",
                end - 1
            )
        }
        _ => {
            let _ =
                stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            return;
        }
    };
    let first = ANSWERS.fetch_add(1, Ordering::SeqCst) == 0;
    let body = if first { &content[..FIRST_BYTES] } else { &content[from..] };
    // A client that is killed stops reading.
    let _ = write!(stream, "HTTP/1.1 {head}\r\nETag: \"tiny\"\r\nConnection: close\r\n\r\n");
    let _ = stream.write_all(body);
    if first {
        std::thread::sleep(Duration::from_mins(1));
    }
}

#[test]
fn a_killed_pull_goes_on_and_the_model_answers_by_name() {
    let (home, hub) = (Home::new(), hub());
    let arguments = ["pull", "someone/tiny/tiny.gguf", "--json", "--hub", &hub];
    let mut child = home.command(arguments).spawn().expect("the binary starts");
    let part = home.path("models/tiny.gguf.part");
    let start = Instant::now();
    while std::fs::metadata(&part).map_or(0, |m| m.len()) < FIRST_BYTES as u64 {
        assert!(start.elapsed() < Duration::from_secs(30), "the first bytes did not arrive");
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().expect("it can be killed");
    child.wait().expect("it ends");
    assert!(!home.path("models/tiny.gguf").exists());
    let listed: Value = serde_json::from_str(&home.run(["models", "--json"]).success()).expect("JSON");
    assert_eq!(listed[0]["unfinished"], true);

    let pulled: Value = serde_json::from_str(&home.run(arguments).success()).expect("JSON");
    assert_eq!(pulled["already_there"], false);
    let (here, bundled) = (std::fs::read(home.path("models/tiny.gguf")), std::fs::read(muse_tiny()));
    assert!(here.expect("the file") == bundled.expect("the bundled model"), "other bytes arrived");
    let again = home.run([&arguments[..], &["--offline"]].concat()).success();
    assert_eq!(serde_json::from_str::<Value>(&again).expect("JSON")["already_there"], true);

    let listed: Value = serde_json::from_str(&home.run(["models", "--json"]).success()).expect("JSON");
    assert_eq!((listed.as_array().map(Vec::len), &listed[0]["verified"]), (Some(1), &"hashed only".into()));
    let cost: Value =
        serde_json::from_str(&home.run(["cost", "tiny", "--no-probe", "--json"]).success()).expect("JSON");
    assert!(cost["model"].as_str().is_some_and(|path| path.ends_with("tiny.gguf")));

    let missing = home.run(["pull", "someone/tiny/other.gguf", "--hub", &hub]).failure(1);
    assert!(missing.contains("there is no such file"), "{missing}");
    let unnamed = home.run(["pull", "nonsense", "--hub", &hub]).failure(2);
    assert!(unnamed.contains("the short names are muse-glimmer-30b"), "{unnamed}");
}
