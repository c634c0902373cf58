//! `muser top` against a server: in pipes, with keys, over a socket, and on a terminal.
#![cfg(unix)]

mod support;

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use support::Home;
use support::served::Served;

fn worked(served: &Served) {
    let body = json!({"prompt": "a secret plan for the fox", "max_tokens": 5, "temperature": 0});
    served.post("/v1/completions", &body);
    assert_eq!(served.exchange("GET", "/nowhere", &Value::Null).0, 404);
}

#[test]
fn a_pipe_gets_plain_text_or_json() {
    let home = Home::new();
    let served = Served::start(&home, &[]);
    worked(&served);
    let url = format!("http://{}", served.address);
    // A pipe is no terminal: with and without the flag.
    for more in [&["--once"][..], &[]] {
        let text = home.run([&["top", "--url", &url], more].concat()).success();
        assert!(text.starts_with("muser top  muse-tiny"), "{text}");
        assert!(!text.contains('\x1b') && !text.contains("secret"), "{text}");
        for wanted in
            ["ready", "404 not_found", "1 in 1 h, 1 m", "Bytes a step", "m measured  d derived  e estimated"]
        {
            assert!(text.contains(wanted), "{wanted} in {text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 110), "{text}");
    }
    let text = home.run(["top", "--url", &url, "--json"]).success();
    let report: Value = serde_json::from_str(&text).expect("one JSON object");
    assert_eq!((&report["version"], &report["model"]["name"]), (&json!(1), &json!("muse-tiny")));
    let value = |id: &str| {
        let figures = report["figures"].as_array().expect("a list");
        figures.iter().find(|figure| figure["id"] == id).expect(id)["value"].clone()
    };
    assert_eq!(value("answers"), json!(1.0));
    assert!(value("step_bytes").as_f64().is_some_and(|bytes| bytes > 1e6), "the model's weights");
    // The variable is the flag's default.
    let ran = home.command(["top", "--once"]).env("MUSER_URL", &url).output().expect("it starts");
    assert!(ran.status.success());
    let pid = served.id().to_string();
    on_a_terminal(&url, &pid);
}

/// On a terminal; the server is gone afterwards.
fn on_a_terminal(url: &str, pid: &str) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/top.py");
    let mut python = Command::new("python3");
    python.arg("-B").arg(script).args([env!("CARGO_BIN_EXE_muser"), url, pid]);
    match python.status() {
        Ok(status) => assert!(status.success(), "the lines above say what failed"),
        Err(_) => muser_testkit::skip(muser_testkit::Need::Python, "no python3"),
    }
}

#[test]
fn the_key_is_shown_and_its_want_is_said() {
    let home = Home::new();
    let keys = home.file("api-keys", "# ours\nfirst-key-of-the-file\nsecond-key-of-the-file\n");
    let served = Served::start(&home, &["--key-file", keys.to_str().expect("UTF-8")]);
    let url = format!("http://{}", served.address);
    let top = |more: &[&str]| home.run([&["top", "--once", "--url", &url], more].concat());
    top(&["--key-file", keys.to_str().expect("UTF-8")]).success();
    let ran = top(&[]);
    assert!(ran.failure(1).contains("wants a key"), "{}", ran.stderr());
    assert!(ran.stderr().contains("hint: --key-file FILE, or MUSER_API_KEY"), "{}", ran.stderr());
    let with = |key: &str| {
        home.command(["top", "--json", "--url", &url]).env("MUSER_API_KEY", key).output().expect("it starts")
    };
    assert!(with("second-key-of-the-file").status.success());
    let wrong = with("another key");
    assert_eq!(wrong.status.code(), Some(1));
    let empty = home.file("empty", "# none\n");
    let ran = top(&["--key-file", empty.to_str().expect("UTF-8")]);
    assert!(ran.failure(1).contains("it holds no key"), "{}", ran.stderr());
    // It goes to this machine only.
    let ran =
        home.run(["top", "--once", "--url", "http://192.0.2.7", "--key-file", keys.to_str().expect("UTF-8")]);
    let said = ran.failure(1);
    assert!(said.contains("without TLS") || said.contains("192.0.2.7"), "{said}");
    assert!(!ran.stderr().contains("first-key"), "a key is in no message");
}

#[test]
fn what_is_wrong_is_said_in_a_sentence() {
    let home = Home::new();
    let ran = home.run(["top", "--once", "--url", "127.0.0.1:8080"]);
    assert!(ran.failure(2).contains("expected http:// or https://"), "{}", ran.stderr());
    let nobody =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|taken| taken.local_addr()).expect("a free port");
    for flag in ["--once", "--json"] {
        let ran = home.run(["top", flag, "--url", &format!("http://{nobody}")]);
        assert!(ran.failure(1).contains(&nobody.to_string()), "{}", ran.stderr());
        assert!(ran.stderr().contains("hint: muser serve starts a server"), "{}", ran.stderr());
    }
    for (answer, wanted) in [
        ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", "expected JSON"),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{\"version\":2}",
            "expected version 1 of /v1/dashboard, found 2",
        ),
        ("HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{\"version\":1}", "has another shape"),
        ("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "nothing is at /v1/dashboard"),
        ("HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "is loading its model"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n", "failed"),
        ("SSH-2.0-x\r\n", "failed"),
    ] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let answering = std::thread::spawn(move || {
            use std::io::{Read as _, Write as _};
            let (mut stream, _) = listener.accept().expect("a connection");
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer.as_bytes());
        });
        let ran = home.run(["top", "--once", "--url", &url]);
        assert!(ran.failure(1).contains(wanted), "{answer}: {}", ran.stderr());
        answering.join().expect("answered");
    }
}

#[test]
fn a_socket_is_a_server_too() {
    let home = Home::new();
    let socket = home.path("s");
    let mut serve = home.command(["serve", "--host"]);
    let mut child = serve.arg(&socket).stderr(std::process::Stdio::null()).spawn().expect("it starts");
    let url = format!("unix:{}", socket.display());
    let begun = std::time::Instant::now();
    let text = loop {
        let ran = home.run(["top", "--once", "--url", &url]);
        if ran.code() == Some(0) {
            break ran.success();
        }
        assert!(begun.elapsed().as_secs() < 60, "{}", ran.stderr());
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    let _ = child.kill();
    let _ = child.wait();
    assert!(text.contains(&url), "{text}");
}
