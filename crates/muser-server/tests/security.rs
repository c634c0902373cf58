//! Keys, origins, limits, TLS, and errors that are always valid JSON.

mod support;

use std::io::Write as _;
use std::time::Duration;

use muser_server::{Limits, Server, ServerConfig, ShutdownPolicy};
use serde_json::json;
use support::client::{read_until, send};
use support::{Running, Script, Scripted, get, post, request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const SAYS: &str = " to=user<|message|>ok<|eot|>";

async fn with_key() -> (Running, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("keys");
    std::fs::write(&path, "# keys\nsecret-one\nsecret-two\n").expect("write");
    let config = ServerConfig { key_file: Some(path), ..ServerConfig::default() };
    (Running::scripted(config, Scripted::new(|_| Script::saying(SAYS))).await, folder)
}

/// A1: neither the host header nor an odd target opens anything.
#[tokio::test]
async fn no_route_but_health_answers_without_a_key() {
    let (server, _folder) = with_key().await;
    let body = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    for (path, headers) in [
        ("/v1/chat/completions", "host: localhost/v1/models?\r\n"),
        ("/v1/chat/completions", "host: /health\r\n"),
        ("/v1/chat/completions?/health", ""),
        ("/v1/chat/completions#/health", ""),
        ("http://localhost/v1/chat/completions", ""),
        ("/health/../v1/chat/completions", ""),
        ("/health/", ""),
        ("//health", ""),
        ("/v1/chat/completions", "authorization: Bearer secret\r\n"),
        ("/v1/chat/completions", "authorization: Bearer secret-one-two\r\n"),
        ("/v1/chat/completions", "authorization: Basic secret-one\r\n"),
        ("/v1/chat/completions", "x-api-key: \r\n"),
        ("/v1/messages", ""),
        ("/api/chat", ""),
        ("/no/such/route", ""),
    ] {
        let answer = request(server.address, "POST", path, headers, body.as_bytes()).await;
        assert!([400, 401].contains(&answer.status), "{path} {headers}: {}", answer.status);
        if answer.status == 401 {
            assert!(answer.json().get("error").is_some());
        }
    }
    for path in ["/v1/models", "/metrics", "/slots", "/props", "/status", "/openapi.json", "/api/tags"] {
        assert_eq!(get(server.address, path).await.status, 401, "{path}");
    }
    for headers in ["authorization: Bearer secret-one\r\n", "x-api-key: secret-two\r\n"] {
        let answer = request(server.address, "POST", "/v1/chat/completions", headers, body.as_bytes()).await;
        assert_eq!(answer.status, 200, "{headers}");
    }
    server.stop().await;
}

/// A3.
#[tokio::test]
async fn the_page_loads_without_a_key_and_the_api_does_not() {
    let (server, _folder) = with_key().await;
    for (path, kind) in [
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/page.css", "text/css"),
        ("/favicon.svg", "image/svg+xml"),
    ] {
        let answer = get(server.address, path).await;
        assert_eq!(answer.status, 200, "{path}");
        assert!(answer.header("content-type").is_some_and(|found| found.starts_with(kind)), "{path}");
        assert!(answer.header("content-security-policy").is_some());
    }
    assert_eq!(get(server.address, "/health").await.status, 200);
    assert_eq!(get(server.address, "/v1/models").await.status, 401);
    // The page loads nothing from elsewhere.
    let html = get(server.address, "/").await;
    assert!(!html.text().contains("http://") && !html.text().contains("https://"));
    server.stop().await;
}

#[tokio::test]
async fn pages_of_other_origins_may_not_call() {
    let server = Running::saying(SAYS).await;
    let body = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    let ask = async |headers: &str| {
        let answer = request(server.address, "POST", "/v1/chat/completions", headers, body.as_bytes()).await;
        (answer.status, answer.header("access-control-allow-origin").map(str::to_owned))
    };
    assert_eq!(ask("origin: https://evil.example\r\n").await, (403, None));
    assert_eq!(ask("origin: null\r\n").await, (403, None));
    assert_eq!(ask("").await, (200, None));
    assert_eq!(ask("sec-fetch-site: cross-site\r\n").await, (403, None));
    // Pages of this machine may call, and read what comes.
    let own = format!("http://{}", server.address);
    assert_eq!(ask(&format!("origin: {own}\r\n")).await, (200, Some(own)));
    let local = "http://localhost:3000".to_owned();
    assert_eq!(ask(&format!("origin: {local}\r\n")).await, (200, Some(local.clone())));
    let preflight = format!("origin: {local}\r\naccess-control-request-method: POST\r\n");
    let answer = request(server.address, "OPTIONS", "/v1/chat/completions", &preflight, b"").await;
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some(local.as_str())));
    let preflight = preflight.replace("localhost:3000", "evil.example");
    let answer = request(server.address, "OPTIONS", "/v1/chat/completions", &preflight, b"").await;
    assert_eq!(answer.header("access-control-allow-origin"), None);
    server.stop().await;
    let config = ServerConfig { cors_origins: vec!["https://ui.example".into()], ..ServerConfig::default() };
    let server = Running::scripted(config, Scripted::new(|_| Script::saying(SAYS))).await;
    let headers = "origin: https://ui.example\r\n";
    let answer = request(server.address, "POST", "/v1/chat/completions", headers, body.as_bytes()).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("access-control-allow-origin"), Some("https://ui.example"));
    let headers = "origin: https://ui.example\r\naccess-control-request-method: POST\r\n\
                   access-control-request-headers: authorization,content-type\r\n";
    let answer = request(server.address, "OPTIONS", "/v1/chat/completions", headers, b"").await;
    assert_eq!(answer.status, 200);
    // A wildcard would not cover the header with the key.
    assert_eq!(answer.header("access-control-allow-headers"), Some("authorization,content-type"));
    server.stop().await;
}

/// S3 and every other way to be wrong: the answer is a 4xx with a JSON object that names the fault.
#[tokio::test]
async fn bad_requests_are_the_clients_fault() {
    let config = ServerConfig { strict_model_name: true, ..ServerConfig::default() };
    let server = Running::scripted(config, Scripted::new(|_| Script::saying(SAYS))).await;
    let chat = "/v1/chat/completions";
    let cases: Vec<(&str, Vec<u8>, u16)> = vec![
        (chat, b"".to_vec(), 400),
        (chat, b"[]".to_vec(), 400),
        (chat, b"{\"messages\": ".to_vec(), 400),
        (chat, b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\xfe\"}]}".to_vec(), 400),
        (chat, b"{\"messages\": \"\\ud800\"}".to_vec(), 400),
        (chat, b"{\"messages\": []}".to_vec(), 400),
        (chat, b"{\"messages\": [null]}".to_vec(), 400),
        (chat, b"{\"model\": \"\\u0000\\\"<x>\", \"messages\": [{\"role\": \"user\"}]}".to_vec(), 404),
        (chat, b"{\"messages\": [{\"role\": \"user\"}], \"temperature\": 1e999}".to_vec(), 400),
        (chat, b"{\"messages\": [{\"role\": \"user\"}], \"seed\": 1e30}".to_vec(), 400),
        (chat, b"{\"messages\": [{\"role\": \"user\"}], \"logit_bias\": {\"999999\": 1}}".to_vec(), 400),
        ("/v1/completions", b"{\"prompt\": [999999]}".to_vec(), 400),
        ("/v1/completions", b"{\"prompt\": []}".to_vec(), 400),
        ("/v1/completions", b"{\"prompt\": {\"a\": 1}}".to_vec(), 400),
        ("/v1/messages", b"{}".to_vec(), 400),
        ("/v1/responses", b"{\"input\": 5}".to_vec(), 400),
        ("/v1/embeddings", b"{\"input\": [[1, 2]]}".to_vec(), 400),
        ("/tokenize", b"{}".to_vec(), 400),
        ("/detokenize", b"{\"tokens\": [-1]}".to_vec(), 400),
        ("/detokenize", b"{\"tokens\": [4000000000]}".to_vec(), 400),
        ("/api/chat", b"{\"messages\": 1}".to_vec(), 400),
        ("/api/show", b"null".to_vec(), 400),
        ("/nowhere", b"{}".to_vec(), 404),
        ("/health", b"{}".to_vec(), 405),
    ];
    for (path, body, expected) in cases {
        let answer = request(server.address, "POST", path, "", &body).await;
        let shown = String::from_utf8_lossy(&body).into_owned();
        assert_eq!(answer.status, expected, "{path} {shown}: {}", answer.text());
        if expected != 200 {
            assert!(answer.json().get("error").is_some(), "{path} {shown}");
        }
    }
    server.stop().await;
}

/// L3, L5: too long a prompt is a 400 with both counts, also for a stream; a large output limit is not its fault.
#[tokio::test]
async fn a_prompt_that_does_not_fit_is_said_before_the_stream() {
    let server = Running::saying(SAYS).await;
    let body = json!({"messages": [{"role": "user", "content": "word ".repeat(6000)}], "stream": true, "max_tokens": 7});
    let answer = post(server.address, "/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 400);
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "context_length_exceeded");
    let message = error["message"].as_str().expect("message");
    assert!(
        message.contains("maximum context length is 4096") && message.contains("resulted in 60"),
        "{message}"
    );
    server.stop().await;
}

#[tokio::test]
async fn a_full_queue_is_429_with_a_time() {
    let mut engine = Scripted::new(|_| Script::saying(SAYS));
    engine.places = 0;
    let server = Running::scripted(ServerConfig::default(), engine).await;
    let answer = post(
        server.address,
        "/v1/chat/completions",
        &json!({"messages": [{"role": "user", "content": "a"}]}),
    )
    .await;
    assert_eq!(answer.status, 429);
    assert!(answer.header("retry-after").is_some_and(|seconds| seconds.parse::<u32>().is_ok()));
    server.stop().await;
}

#[tokio::test]
async fn a_server_whose_device_is_gone_says_so_and_stays() {
    let engine = Scripted::new(|_| Script::saying(SAYS));
    let lost = std::sync::Arc::clone(&engine.lost);
    let server = Running::scripted(ServerConfig::default(), engine).await;
    assert_eq!(get(server.address, "/health").await.status, 200);
    *lost.lock().expect("lock") = Some("the card is lost to this process".to_owned());
    for path in ["/health", "/v1/health", "/v1/models"] {
        let answer = get(server.address, path).await;
        assert_eq!(answer.status, 503, "{path}");
        assert!(answer.text().contains("the card is lost"), "{}", answer.text());
    }
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    assert_eq!(post(server.address, "/v1/chat/completions", &chat).await.status, 503);
    // Operators still read the figures.
    assert_eq!(get(server.address, "/metrics").await.status, 200);
    server.stop().await;
}

#[tokio::test]
async fn a_server_that_loads_says_so() {
    let server = Running::empty(ServerConfig::default()).await;
    for path in ["/health", "/v1/models", "/metrics", "/props"] {
        assert_eq!(get(server.address, path).await.status, 503, "{path}");
    }
    server.app.load(
        support::facts(),
        support::text(),
        std::sync::Arc::new(Scripted::new(|_| Script::saying(SAYS))),
    );
    assert_eq!(get(server.address, "/health").await.status, 200);
    server.stop().await;
}

#[tokio::test]
async fn bodies_and_heads_are_limited() {
    let limits = Limits {
        body_bytes: 1000,
        head_bytes: 8192,
        head_time: Duration::from_millis(300),
        body_time: Duration::from_millis(300),
        ..Limits::default()
    };
    let config = ServerConfig { limits, ..ServerConfig::default() };
    let server = Running::scripted(config, Scripted::new(|_| Script::saying(SAYS))).await;
    let big = vec![b' '; 2000];
    assert_eq!(request(server.address, "POST", "/v1/chat/completions", "", &big).await.status, 413);
    let long = format!("x-long: {}\r\n", "a".repeat(20_000));
    assert_eq!(request(server.address, "GET", "/health", &long, b"").await.status, 431);
    // A head or a body that does not arrive is not waited for, nor is a client that says nothing or half of something.
    for begun in ["GET /health HTTP/1.1\r\n", "", "P", "PRI * HTTP/2.0\r\n"] {
        let mut stream = tokio::net::TcpStream::connect(server.address).await.expect("connects");
        stream.write_all(begun.as_bytes()).await.expect("written");
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(Duration::from_secs(3), stream.read_to_end(&mut rest)).await;
        closed.unwrap_or_else(|_| panic!("{begun:?} is still open")).expect("read");
    }
    let mut stream = tokio::net::TcpStream::connect(server.address).await.expect("connects");
    stream
        .write_all(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
        .await
        .expect("written");
    let (text, time) = read_until(&mut stream, |text| text.contains("\r\n\r\n")).await;
    assert!(text.starts_with("HTTP/1.1 408") && time < Duration::from_secs(3), "{text}");
    drop(stream);
    server.stop().await;
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_their_turn() {
    let limits = Limits { connections: 2, ..Limits::default() };
    let config = ServerConfig { limits, ..ServerConfig::default() };
    let server = Running::scripted(config, Scripted::new(|_| Script::saying(SAYS))).await;
    let idle = [
        send(server.address, "GET", "/health", "", b"").await,
        send(server.address, "GET", "/health", "", b"").await,
    ];
    // Both are answered and closed, and make room for the third.
    assert_eq!(get(server.address, "/health").await.status, 200);
    drop(idle);
    server.stop().await;
}

#[tokio::test]
async fn tls_needs_no_more_than_two_files() {
    let folder = tempfile::tempdir().expect("folder");
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).expect("certificate");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        let mut file = std::fs::File::create(&path).expect("file");
        file.write_all(text.as_bytes()).expect("written");
        path
    };
    let (certificate, key) =
        (write("cert.pem", &made.cert.pem()), write("key.pem", &made.signing_key.serialize_pem()));
    let config = ServerConfig {
        tls_certificate: Some(certificate.clone()),
        tls_key: Some(key),
        ..ServerConfig::default()
    };
    let server = Running::scripted(config, Scripted::new(|_| Script::saying(SAYS))).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).expect("root");
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(client));
    let plain = tokio::net::TcpStream::connect(server.address).await.expect("connects");
    let name = rustls::pki_types::ServerName::try_from("localhost").expect("name");
    let mut stream = connector.connect(name, plain).await.expect("handshake");
    stream
        .write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        .await
        .expect("written");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    server.stop().await;
    let broken = ServerConfig {
        address: "127.0.0.1:0".parse().expect("address"),
        tls_certificate: Some(certificate.clone()),
        tls_key: Some(certificate),
        ..ServerConfig::default()
    };
    assert!(Server::bind(broken).await.is_err());
}

#[tokio::test]
async fn the_end_waits_for_running_requests_or_cuts_them() {
    let slow = |_: &str| Script {
        pace: Duration::from_millis(20),
        ..Script::saying(" to=user<|message|>one two three four five six seven eight nine ten<|eot|>")
    };
    let body = json!({"messages": [{"role": "user", "content": "a"}], "stream": true}).to_string();
    let config =
        ServerConfig { shutdown: ShutdownPolicy::Finish(Duration::from_secs(10)), ..ServerConfig::default() };
    let server = Running::scripted(config, Scripted::new(slow)).await;
    let mut stream = send(server.address, "POST", "/v1/chat/completions", "", body.as_bytes()).await;
    let (seen, _) = read_until(&mut stream, |text| text.contains("data: ")).await;
    let stopping = tokio::spawn(server.stop());
    let mut rest = String::new();
    stream.read_to_string(&mut rest).await.expect("the stream is finished");
    assert!(format!("{seen}{rest}").contains("data: [DONE]"));
    stopping.await.expect("stopped");
}
