//! Keys, origins, limits, TLS, and errors that are always valid JSON.

mod support;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

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
    for path in [
        "/v1/models",
        "/metrics",
        "/v1/dashboard",
        "/slots",
        "/props",
        "/status",
        "/openapi.json",
        "/api/tags",
    ] {
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
        ("/common.js", "text/javascript"),
        ("/dashboard", "text/html"),
        ("/dashboard.js", "text/javascript"),
        ("/dashboard.css", "text/css"),
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
    for page in ["/", "/dashboard"] {
        let html = get(server.address, page).await;
        assert!(!html.text().contains("http://") && !html.text().contains("https://"));
    }
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

/// A certificate for localhost and its key, written to a folder.
struct Certificate {
    certificate: PathBuf,
    key: PathBuf,
    der: rustls::pki_types::CertificateDer<'static>,
}

impl Certificate {
    fn write(folder: &Path, name: &str) -> Self {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).expect("certificate");
        let (certificate, key) = (folder.join(format!("{name}.pem")), folder.join(format!("{name}-key.pem")));
        std::fs::write(&certificate, made.cert.pem()).expect("written");
        std::fs::write(&key, made.signing_key.serialize_pem()).expect("written");
        Self { certificate, key, der: made.cert.der().clone() }
    }

    /// Whether a client that knows only this certificate is answered.
    async fn is_shown_at(&self, address: SocketAddr) -> bool {
        match self.connect(address).await {
            Some(mut stream) => ask_health(&mut stream, "close").await.contains("HTTP/1.1 200"),
            None => false,
        }
    }

    async fn connect(
        &self,
        address: SocketAddr,
    ) -> Option<tokio_rustls::client::TlsStream<tokio::net::TcpStream>> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.der.clone()).expect("root");
        let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(client));
        let plain = tokio::net::TcpStream::connect(address).await.expect("connects");
        let name = rustls::pki_types::ServerName::try_from("localhost").expect("name");
        connector.connect(name, plain).await.ok()
    }
}

async fn ask_health<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
    stream: &mut S,
    connection: &str,
) -> String {
    let ask = format!("GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: {connection}\r\n\r\n");
    stream.write_all(ask.as_bytes()).await.expect("written");
    let (mut answer, mut piece) = (String::new(), [0; 1024]);
    while !answer.contains('}') {
        match stream.read(&mut piece).await {
            Ok(count) if count > 0 => answer.push_str(&String::from_utf8_lossy(&piece[..count])),
            _ => break,
        }
    }
    answer
}

#[tokio::test]
async fn tls_needs_no_more_than_two_files() {
    let folder = tempfile::tempdir().expect("folder");
    let files = Certificate::write(folder.path(), "first");
    let config = ServerConfig {
        tls_certificate: Some(files.certificate.clone()),
        tls_key: Some(files.key.clone()),
        ..ServerConfig::default()
    };
    let server = Running::scripted(config, Scripted::new(|_| Script::saying(SAYS))).await;
    assert!(files.is_shown_at(server.address).await);
    server.stop().await;
    let broken = ServerConfig {
        address: "127.0.0.1:0".parse().expect("address"),
        tls_certificate: Some(files.certificate.clone()),
        tls_key: Some(files.certificate),
        ..ServerConfig::default()
    };
    assert!(Server::bind(broken).await.is_err());
}

/// What SIGHUP does to certificates: the next connection sees the new one, an open one goes on, and files that cannot be used
/// change nothing, not even the keys beside them.
#[tokio::test]
async fn certificates_are_read_again_when_asked() {
    let folder = tempfile::tempdir().expect("folder");
    let (old, new) = (Certificate::write(folder.path(), "old"), Certificate::write(folder.path(), "new"));
    let [certificate, key, keys] = ["cert.pem", "key.pem", "keys"].map(|name| folder.path().join(name));
    let put = |files: &Certificate| {
        std::fs::copy(&files.certificate, &certificate).expect("copied");
        std::fs::copy(&files.key, &key).expect("copied");
    };
    put(&old);
    std::fs::write(&keys, "the-first-key-of-all\n").expect("written");
    let config = ServerConfig {
        address: "127.0.0.1:0".parse().expect("address"),
        key_file: Some(keys.clone()),
        tls_certificate: Some(certificate.clone()),
        tls_key: Some(key.clone()),
        ..ServerConfig::default()
    };
    let server = Server::bind(config).await.expect("binds");
    let (address, reloader, app) = (server.address(), server.reloader(), server.app());
    app.load(support::facts(), support::text(), std::sync::Arc::new(Scripted::new(|_| Script::saying(SAYS))));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let task = tokio::spawn(server.run(async {
        let _ = stopped.await;
    }));
    let mut open = old.connect(address).await.expect("handshake");
    assert!(ask_health(&mut open, "keep-alive").await.contains("200"));
    put(&new);
    assert!(old.is_shown_at(address).await && !new.is_shown_at(address).await, "not before it is asked to");
    reloader.reload().expect("usable");
    assert!(new.is_shown_at(address).await && !old.is_shown_at(address).await);
    assert!(ask_health(&mut open, "keep-alive").await.contains("200"), "open connections are not touched");
    // A key that is another certificate's, no certificate at all, a file that is gone: in the middle of being replaced, say.
    std::fs::write(&keys, "the-second-key-of-all\n").expect("written");
    std::fs::copy(&old.certificate, &certificate).expect("copied");
    assert!(reloader.reload().is_err());
    std::fs::write(&certificate, "").expect("written");
    assert!(reloader.reload().is_err());
    std::fs::remove_file(&key).expect("removed");
    assert!(reloader.reload().is_err());
    assert!(new.is_shown_at(address).await && !old.is_shown_at(address).await);
    assert!(app.keys().accept(b"the-first-key-of-all") && !app.keys().accept(b"the-second-key-of-all"));
    put(&old);
    reloader.reload().expect("usable");
    assert!(old.is_shown_at(address).await && app.keys().accept(b"the-second-key-of-all"));
    drop(open);
    let _ = stop.send(());
    task.await.expect("ends well");
}

/// Guesses of one address wait for one another after the first few; whoever has a key does not wait for them.
#[tokio::test]
async fn wrong_keys_take_time_and_right_ones_do_not() {
    let (server, _folder) = with_key().await;
    let address = server.address;
    let guess = |number: usize| async move {
        let begun = Instant::now();
        let headers = format!("x-api-key: guess-{number}\r\n");
        assert_eq!(request(address, "GET", "/v1/models", &headers, b"").await.status, 401);
        begun.elapsed()
    };
    let right = async {
        let mut longest = Duration::ZERO;
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(25)).await;
            let begun = Instant::now();
            let answer = request(address, "GET", "/v1/models", "x-api-key: secret-two\r\n", b"").await;
            assert_eq!(answer.status, 200);
            longest = longest.max(begun.elapsed());
        }
        longest
    };
    let (times, right) = tokio::join!(futures_util::future::join_all((0..32).map(guess)), right);
    let waited = times.iter().filter(|time| **time > Duration::from_millis(200)).count();
    assert!(waited >= 11 && times.iter().max() > Some(&Duration::from_secs(2)), "{times:?}");
    assert!(right < Duration::from_secs(1), "{right:?}");
    server.stop().await;
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
