//! What stands before the routes: hosts, connections and their limits, bodies as they come over the wire, and the end.

mod support;

use std::io::Write as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use muser_server::{Limits, Server, ServerConfig, ShutdownPolicy};
use serde_json::{Value, json};
use support::client::{read_until, send};
use support::{Running, Script, Scripted, get, post, request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

const CHAT: &str = "/v1/chat/completions";
const SAYS: &str = " to=user<|message|>ok<|eot|>";

fn saying() -> Scripted {
    Scripted::new(|_| Script::saying(SAYS))
}

fn asked() -> Value {
    json!({"messages": [{"role": "user", "content": "a"}]})
}

/// A page whose name was made to point here asks like any page of the same origin: without `Origin`, with its own name.
#[tokio::test]
async fn a_rebound_name_reads_nothing() {
    let config = ServerConfig { allowed_hosts: vec!["muser.example".into()], ..ServerConfig::default() };
    let server = Running::scripted(config, saying()).await;
    let body = asked().to_string();
    let ask = async |method: &str, path: &str, host: &str| {
        request(server.address, method, path, &format!("host: {host}\r\n"), body.as_bytes()).await
    };
    for path in [
        "/v1/sessions/diary",
        "/v1/sessions",
        "/v1/packs",
        "/props",
        "/slots",
        "/status",
        "/metrics",
        "/v1/dashboard",
        "/api/ps",
        "/v1/models",
        "/openapi.json",
        "/nowhere",
    ] {
        let answer = ask("GET", path, "attacker.example").await;
        assert_eq!(answer.status, 403, "{path}");
        assert!(answer.text().contains("--allowed-host"), "{}", answer.text());
    }
    assert_eq!(ask("DELETE", "/v1/sessions/diary", "attacker.example:8080").await.status, 403);
    assert_eq!(ask("POST", CHAT, "attacker.example").await.status, 403);
    assert_eq!(ask("POST", "/v1/messages", "attacker.example").await.json()["type"], "error");
    assert_eq!(ask("POST", "http://attacker.example/v1/chat/completions", "localhost").await.status, 403);
    for host in ["localhost:1", "127.0.0.1", "[::1]:8080", "10.1.2.3", "muser.example", "MUSER.example:443"] {
        assert_eq!(ask("POST", CHAT, host).await.status, 200, "{host}");
    }
    // Nothing secret: probes of every kind get through.
    assert_eq!(ask("GET", "/health", "attacker.example").await.status, 200);
    server.stop().await;
}

/// With a key nothing is asked of the name; `--insecure` lifts the rule about addresses and no other.
#[tokio::test]
async fn a_key_makes_the_name_unimportant_and_insecure_does_not() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("keys");
    std::fs::write(&path, "a-key-of-enough-letters\n").expect("written");
    let config = ServerConfig { key_file: Some(path), ..ServerConfig::default() };
    let server = Running::scripted(config, saying()).await;
    let key = "authorization: Bearer a-key-of-enough-letters\r\n";
    let body = asked().to_string();
    for more in ["host: muser.lan\r\n", "host: attacker.example\r\n", "origin: https://any.example\r\n"] {
        let headers = format!("{key}{more}");
        assert_eq!(
            request(server.address, "POST", CHAT, &headers, body.as_bytes()).await.status,
            200,
            "{more}"
        );
    }
    server.stop().await;
    let config = ServerConfig { insecure: true, ..ServerConfig::default() };
    let server = Running::scripted(config, saying()).await;
    for headers in
        ["origin: https://evil.example\r\n", "host: evil.example\r\n", "sec-fetch-site: cross-site\r\n"]
    {
        let answer = request(server.address, "POST", CHAT, headers, body.as_bytes()).await;
        assert_eq!(answer.status, 403, "{headers}");
    }
    server.stop().await;
}

#[tokio::test]
async fn bodies_are_decoded_and_marks_passed_over() {
    let limits = Limits { body_bytes: 4096, ..Limits::default() };
    let server = Running::scripted(ServerConfig { limits, ..ServerConfig::default() }, saying()).await;
    let gzip = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).and_then(|()| encoder.finish()).expect("memory")
    };
    let body = asked().to_string();
    let ask = async |headers: &str, body: &[u8]| request(server.address, "POST", CHAT, headers, body).await;
    assert_eq!(ask("content-encoding: gzip\r\n", &gzip(body.as_bytes())).await.status, 200);
    assert_eq!(ask("", format!("\u{feff}{body}").as_bytes()).await.status, 200);
    assert_eq!(ask("content-encoding: gzip\r\n", &gzip(&[b' '; 5000])).await.status, 413);
    let plain = ask("content-encoding: br\r\n", body.as_bytes()).await;
    assert_eq!(plain.status, 400);
    assert!(plain.text().contains("not valid br"), "{}", plain.text());
    let unknown = ask("content-encoding: lz4\r\n", body.as_bytes()).await;
    assert_eq!((unknown.status, unknown.header("accept-encoding")), (415, Some("gzip, deflate, zstd, br")));
    server.stop().await;
}

/// Row 48: between requests a connection may be silent for the keep-alive time, which is not the time of a head.
#[tokio::test]
async fn an_idle_connection_stays_for_the_keep_alive_time() {
    let limits = Limits {
        head_time: Duration::from_millis(200),
        idle_time: Duration::from_millis(1200),
        ..Limits::default()
    };
    let server = Running::scripted(ServerConfig { limits, ..ServerConfig::default() }, saying()).await;
    let mut stream = TcpStream::connect(server.address).await.expect("connects");
    for pause in [0, 700] {
        sleep(Duration::from_millis(pause)).await;
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("open");
        read_until(&mut stream, |text| text.contains("\"ok\"")).await;
    }
    let begun = Instant::now();
    let mut rest = Vec::new();
    timeout(Duration::from_secs(10), stream.read_to_end(&mut rest))
        .await
        .expect("closed")
        .expect("in good manners");
    assert!((1000..4000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    // A second head that is not finished has the head's time.
    let mut stream = TcpStream::connect(server.address).await.expect("connects");
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("open");
    read_until(&mut stream, |text| text.contains("\"ok\"")).await;
    stream.write_all(b"GET /hea").await.expect("open");
    let begun = Instant::now();
    let _ = timeout(Duration::from_secs(10), stream.read_to_end(&mut rest)).await.expect("closed");
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    server.stop().await;
}

/// Silent connections do not keep others out: the longest idle one makes room, and one address has a share.
#[tokio::test]
async fn silent_connections_make_room() {
    let limits = Limits { connections: 8, connections_per_address: 8, ..Limits::default() };
    let server = Running::scripted(ServerConfig { limits, ..ServerConfig::default() }, saying()).await;
    let mut silent = Vec::new();
    for _ in 0..20 {
        let mut stream = TcpStream::connect(server.address).await.expect("connects");
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("open");
        read_until(&mut stream, |text| text.contains("\"ok\"")).await;
        silent.push(stream);
    }
    let health = timeout(Duration::from_secs(5), get(server.address, "/health")).await.expect("in time");
    assert_eq!(health.status, 200);
    drop(silent);
    server.stop().await;
    // All busy and all from one address: the next is closed, not kept waiting.
    let limits = Limits { connections: 8, connections_per_address: 2, ..Limits::default() };
    let slow = Scripted::new(|_| Script { prefill: Duration::from_secs(3), ..Script::saying(SAYS) });
    let server = Running::scripted(ServerConfig { limits, ..ServerConfig::default() }, slow.clone()).await;
    let body = asked().to_string();
    let busy = [
        send(server.address, "POST", CHAT, "", body.as_bytes()).await,
        send(server.address, "POST", CHAT, "", body.as_bytes()).await,
    ];
    while slow.running.load(Ordering::SeqCst) < 2 {
        sleep(Duration::from_millis(5)).await;
    }
    let mut third = TcpStream::connect(server.address).await.expect("connects");
    let closed = timeout(Duration::from_secs(2), third.read(&mut [0; 16])).await.expect("not kept waiting");
    assert!(closed.is_err() || closed.is_ok_and(|count| count == 0));
    drop(busy);
    server.stop().await;
}

/// Row 30: who is cut off hears so in every dialect, and never that the answer has reached its length.
#[tokio::test]
async fn an_answer_that_is_cut_off_never_looks_complete() {
    let long = |_: &str| Script {
        pace: Duration::from_millis(10),
        ..Script::saying(&format!(" to=user<|message|>{}<|eot|>", "word ".repeat(2000)))
    };
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 3000});
    let text = json!({"prompt": "a", "max_tokens": 3000});
    let input = json!({"input": "a"});
    let cases: [(&str, &Value); 7] = [
        (CHAT, &chat),
        ("/v1/completions", &text),
        ("/completion", &text),
        ("/v1/messages", &chat),
        ("/v1/responses", &input),
        ("/api/chat", &chat),
        ("/api/generate", &text),
    ];
    for stream in [false, true] {
        let config = ServerConfig {
            shutdown: ShutdownPolicy::Finish(Duration::from_millis(300)),
            ..ServerConfig::default()
        };
        let engine = Scripted::new(long);
        let server = Running::scripted(config, engine.clone()).await;
        let mut running = Vec::new();
        for (path, body) in cases {
            let mut body = body.clone();
            body["stream"] = stream.into();
            running.push((path, send(server.address, "POST", path, "", body.to_string().as_bytes()).await));
        }
        while engine.tokens.load(Ordering::SeqCst) < 20 * cases.len() {
            sleep(Duration::from_millis(5)).await;
        }
        let stopping = tokio::spawn(server.stop());
        for (path, mut socket) in running {
            let mut said = String::new();
            socket.read_to_string(&mut said).await.expect("readable");
            assert!(said.contains("stopping"), "{path} {stream}: {said}");
            assert!(stream || said.starts_with("HTTP/1.1 503"), "{path}: {said}");
            for sign in [
                "\"length\"",
                "max_tokens\"",
                "[DONE]",
                "response.completed",
                "\"incomplete\"",
                "\"limit\"",
                "\"done\":true",
            ] {
                assert!(!said.contains(sign), "{path} {stream} says {sign}: {said}");
            }
        }
        stopping.await.expect("stopped");
    }
}

/// Row 33: probes see 503 while running requests are finished, and so does whoever comes late.
#[tokio::test]
async fn while_draining_the_server_answers_503() {
    let slow = |_: &str| Script {
        pace: Duration::from_millis(40),
        ..Script::saying(&format!(" to=user<|message|>{}<|eot|>", "word ".repeat(30)))
    };
    let config =
        ServerConfig { shutdown: ShutdownPolicy::Finish(Duration::from_secs(20)), ..ServerConfig::default() };
    let server = Running::scripted(config, Scripted::new(slow)).await;
    let address = server.address;
    let mut body = asked();
    body["stream"] = true.into();
    let mut stream = send(address, "POST", CHAT, "", body.to_string().as_bytes()).await;
    let (seen, _) = read_until(&mut stream, |text| text.contains("data: ")).await;
    let stopping = tokio::spawn(server.stop());
    sleep(Duration::from_millis(100)).await;
    let health = get(address, "/health").await;
    assert_eq!((health.status, health.header("connection")), (503, Some("close")));
    assert_eq!(post(address, CHAT, &asked()).await.status, 503);
    assert_eq!(get(address, "/metrics").await.status, 200);
    let mut rest = String::new();
    stream.read_to_string(&mut rest).await.expect("the stream is finished");
    assert!(format!("{seen}{rest}").contains("data: [DONE]"));
    timeout(Duration::from_secs(5), stopping).await.expect("in time").expect("stopped");
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
}

/// Row 50: lines without text while a long prompt is read.
#[tokio::test]
async fn ollama_streams_say_something_each_second() {
    let slow = Scripted::new(|_| Script { prefill: Duration::from_millis(700), ..Script::saying(SAYS) });
    let config = ServerConfig { keep_alive: Duration::from_millis(100), ..ServerConfig::default() };
    let server = Running::scripted(config, slow).await;
    for (path, body, field) in
        [("/api/chat", asked(), "/message/content"), ("/api/generate", json!({"prompt": "a"}), "/response")]
    {
        let answer = post(server.address, path, &body).await;
        assert_eq!(answer.header("x-accel-buffering"), Some("no"));
        let lines = answer.lines();
        let silent = lines.iter().take_while(|line| line.pointer(field) == Some(&json!(""))).count();
        assert!((4..9).contains(&silent), "{path}: {silent} of {lines:?}");
        assert!(lines[..silent].iter().all(|line| line["done"] == false && line["model"] == support::MODEL));
        assert_eq!(lines.last().expect("a line")["done_reason"], "stop");
        let said: String = lines.iter().filter_map(|line| line.pointer(field)?.as_str()).collect();
        assert_eq!(said, "ok", "{path}");
    }
    server.stop().await;
}

#[tokio::test]
async fn metrics_come_in_the_format_that_is_asked_for() {
    let server = Running::scripted(ServerConfig::default(), saying()).await;
    post(server.address, CHAT, &json!({"messages": 1})).await;
    let ask = async |accept: &str| request(server.address, "GET", "/metrics", accept, b"").await;
    let open = ask("accept: application/openmetrics-text; version=1.0.0\r\n").await;
    assert!(
        open.text().contains("# TYPE muser:requests_refused counter") && open.text().ends_with("# EOF\n")
    );
    let classic = ask("accept: text/plain\r\n").await;
    assert_eq!(classic.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let text = classic.text();
    assert!(
        text.contains("# TYPE muser:requests_refused_total counter") && !text.contains("# EOF"),
        "{text}"
    );
    assert!(text.contains("status=\"400\",code=\"invalid_value\""), "{text}");
    server.stop().await;
}

/// Row 41: every address of the page is relative, so it works wherever a proxy puts it.
#[tokio::test]
async fn the_page_names_nothing_from_the_root() {
    let server = Running::scripted(ServerConfig::default(), saying()).await;
    for path in ["/", "/page.js", "/page.css", "/common.js", "/dashboard", "/dashboard.js", "/dashboard.css"]
    {
        let text = get(server.address, path).await.text().to_owned();
        for sign in
            ["href=\"/", "src=\"/", "url(/", "url(\"/", "\"/v1", "`/v1", "'/v1", "\"/status", "fetch(\"/"]
        {
            assert!(!text.contains(sign), "{sign} in {path}");
        }
    }
    server.stop().await;
}

#[cfg(unix)]
#[tokio::test]
async fn a_unix_socket_is_its_owners() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("muser.sock");
    let config = ServerConfig { socket: Some(path.clone()), ..ServerConfig::default() };
    // A socket that a killed server left behind is no obstacle.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("binds"));
    let server = Server::bind(config.clone()).await.expect("binds");
    assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    server.app().load(support::facts(), support::text(), std::sync::Arc::new(saying()));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let task = tokio::spawn(server.run(async {
        let _ = stopped.await;
    }));
    assert!(Server::bind(config).await.is_err(), "somebody listens there");
    let mut stream = tokio::net::UnixStream::connect(&path).await.expect("connects");
    let body = asked().to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.expect("written");
    let mut said = String::new();
    stream.read_to_string(&mut said).await.expect("readable");
    assert!(said.starts_with("HTTP/1.1 200") && said.contains("\"ok\""), "{said}");
    let _ = stop.send(());
    task.await.expect("ends well");
    assert!(!path.exists());
    std::fs::write(&path, "a file of somebody").expect("written");
    let config = ServerConfig { socket: Some(path.clone()), ..ServerConfig::default() };
    assert!(Server::bind(config).await.is_err());
    assert!(path.exists(), "it is left alone");
}

#[tokio::test]
async fn keys_are_read_again_when_asked() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("keys");
    std::fs::write(&path, "\u{feff}the-first-key-of-all\n").expect("written");
    let config = ServerConfig {
        key_file: Some(path.clone()),
        address: "127.0.0.1:0".parse().expect("address"),
        ..ServerConfig::default()
    };
    let server = Server::bind(config).await.expect("binds");
    let (address, reloader) = (server.address(), server.reloader());
    server.app().load(support::facts(), support::text(), std::sync::Arc::new(saying()));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let task = tokio::spawn(server.run(async {
        let _ = stopped.await;
    }));
    let ask = async |key: &str| {
        let headers = format!("authorization: Bearer {key}\r\n");
        request(address, "GET", "/v1/models", &headers, b"").await.status
    };
    assert_eq!((ask("the-first-key-of-all").await, ask("the-second-key-of-all").await), (200, 401));
    std::fs::write(&path, "the-second-key-of-all\n").expect("written");
    assert_eq!(ask("the-second-key-of-all").await, 401);
    reloader.reload().expect("readable");
    assert_eq!((ask("the-first-key-of-all").await, ask("the-second-key-of-all").await), (401, 200));
    // A file that cannot be used changes nothing: the server never falls open.
    for broken in ["", "# nothing\n"] {
        std::fs::write(&path, broken).expect("written");
        assert!(reloader.reload().is_err());
        assert_eq!((ask("the-second-key-of-all").await, ask("").await), (200, 401));
    }
    let _ = stop.send(());
    task.await.expect("ends well");
}

/// What proxies and old clients send beside a request, or in place of the newer version's ways.
#[tokio::test]
async fn old_and_polite_requests_are_answered() {
    let server = Running::scripted(ServerConfig::default(), saying()).await;
    // An offer to speak HTTP/2 that need not be taken.
    let offer = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n";
    let body = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    let mut stream = TcpStream::connect(server.address).await.expect("connects");
    let ask = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{offer}content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(ask.as_bytes()).await.expect("written");
    let (answer, _) = read_until(&mut stream, |text| text.contains("\"usage\"")).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // A stream for HTTP/1.0 has no chunks and ends with the connection; proxies are told not to hold it back.
    let body = json!({"messages": [{"role": "user", "content": "a"}], "stream": true}).to_string();
    let mut stream = TcpStream::connect(server.address).await.expect("connects");
    let ask = format!("POST /v1/chat/completions HTTP/1.0\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(ask.as_bytes()).await.expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("it ends");
    let (head, events) = answer.split_once("\r\n\r\n").expect("a head");
    let head = head.to_ascii_lowercase();
    assert!(
        head.contains(" 200 ") && head.contains("x-accel-buffering: no") && !head.contains("chunked"),
        "{head}"
    );
    assert!(events.starts_with("data: {") && events.ends_with("data: [DONE]\n\n"), "{events}");
    server.stop().await;
}
