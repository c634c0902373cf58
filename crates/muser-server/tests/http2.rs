//! HTTP/2, in the clear and behind TLS: the same answers, several requests on one connection, cancelling by stream,
//! a reader that stops reading one stream, keys, and the end.

mod support;

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http2;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use muser_server::{Limits, ServerConfig, ShutdownPolicy};
use serde_json::{Value, json};
use support::{Running, Script, Scripted};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::sleep;

type Sender = http2::SendRequest<Full<Bytes>>;

const CHAT: &str = "/v1/chat/completions";
const SAYS: &str = " to=user<|message|>ok<|eot|>";

async fn open<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(stream: S) -> Sender {
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(16 << 10)
        .handshake(TokioIo::new(stream))
        .await
        .expect("a handshake");
    tokio::spawn(connection);
    sender
}

async fn connect(address: SocketAddr) -> Sender {
    open(TcpStream::connect(address).await.expect("connects")).await
}

async fn ask(sender: &mut Sender, method: &str, path: &str, key: &str, body: &Value) -> Response<Incoming> {
    sender.ready().await.expect("the connection is open");
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let request = Request::builder().method(method).uri(format!("http://localhost{path}"));
    let request =
        if key.is_empty() { request } else { request.header("authorization", format!("Bearer {key}")) };
    sender.send_request(request.body(Full::from(body)).expect("a request")).await.expect("an answer")
}

async fn text(response: Response<Incoming>) -> String {
    let bytes = response.into_body().collect().await.expect("a whole body").to_bytes();
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn chat(word: &str, stream: bool) -> Value {
    json!({"messages": [{"role": "user", "content": word}], "stream": stream})
}

fn slowly() -> Scripted {
    Scripted::new(|prompt| {
        let pace = Duration::from_millis(if prompt.contains("slow") { 5 } else { 0 });
        let said = if prompt.contains("flood") { "lorem ipsum ".repeat(100_000) } else { "a b ".repeat(40) };
        Script { pace, ..Script::saying(&format!(" to=user<|message|>{said}<|eot|>")) }
    })
}

async fn wait_for(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what} did not happen");
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn one_connection_carries_several_answers() {
    let server = Running::scripted(ServerConfig::default(), slowly()).await;
    let mut sender = connect(server.address).await;
    let slow = ask(&mut sender, "POST", CHAT, "", &chat("slow", true)).await;
    assert_eq!(slow.status(), 200);
    assert_eq!(slow.headers()["content-type"], "text/event-stream");
    let models = ask(&mut sender, "GET", "/v1/models", "", &Value::Null).await;
    assert!(text(models).await.contains(support::MODEL));
    let whole = text(ask(&mut sender, "POST", CHAT, "", &chat("quick", false)).await).await;
    let whole: Value = serde_json::from_str(&whole).expect("JSON");
    let streamed = text(slow).await;
    let said: String = streamed
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(whole["choices"][0]["message"]["content"], said);
    assert!(streamed.ends_with("data: [DONE]\n\n"));
    // The client's fault is a 400 here too, and the connection goes on.
    assert_eq!(ask(&mut sender, "POST", CHAT, "", &json!({"messages": 1})).await.status(), 400);
    assert_eq!(ask(&mut sender, "GET", "/health", "", &Value::Null).await.status(), 200);
    drop(sender);
    server.stop().await;
}

/// N1: the reset of one stream cancels its request and no other.
#[tokio::test]
async fn dropping_one_answer_cancels_one_request() {
    let engine = slowly();
    let server = Running::scripted(ServerConfig::default(), engine.clone()).await;
    let mut sender = connect(server.address).await;
    let victim = ask(&mut sender, "POST", CHAT, "", &chat("slow", true)).await;
    let other = ask(&mut sender, "POST", CHAT, "", &chat("slow", true)).await;
    wait_for("both", || engine.running.load(Ordering::SeqCst) == 2).await;
    drop(victim);
    wait_for("the cancelling", || engine.cancelled.load(Ordering::SeqCst) == 1).await;
    assert!(text(other).await.ends_with("data: [DONE]\n\n"));
    assert_eq!(engine.cancelled.load(Ordering::SeqCst), 1);
    drop(sender);
    server.stop().await;
}

/// A stream that is not read is not produced either, and its neighbours on the connection are.
#[tokio::test]
async fn a_reader_that_stops_stalls_only_its_stream() {
    let engine = slowly();
    let server = Running::scripted(ServerConfig::default(), engine.clone()).await;
    let mut sender = connect(server.address).await;
    let unread = ask(&mut sender, "POST", CHAT, "", &chat("flood", true)).await;
    for _ in 0..5 {
        let begun = Instant::now();
        let other = text(ask(&mut sender, "POST", CHAT, "", &chat("quick", true)).await).await;
        assert!(other.ends_with("data: [DONE]\n\n") && begun.elapsed() < Duration::from_secs(5));
    }
    let given = engine.tokens.load(Ordering::SeqCst);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(engine.tokens.load(Ordering::SeqCst), given, "a stream that nobody reads goes on");
    assert!(given < 20_000, "{given} tokens were made");
    drop(unread);
    wait_for("the cancelling", || engine.cancelled.load(Ordering::SeqCst) == 1).await;
    drop(sender);
    server.stop().await;
}

/// Who only answers pings has no claim to a place for ever; who has a request open has.
#[tokio::test]
async fn a_connection_without_requests_is_said_goodbye() {
    let limits = Limits { idle_time: Duration::from_millis(400), ..Limits::default() };
    let server = Running::scripted(ServerConfig { limits, ..ServerConfig::default() }, slowly()).await;
    let mut sender = connect(server.address).await;
    // 80 words, 5 ms each: as long as the limit.
    let slow = text(ask(&mut sender, "POST", CHAT, "", &chat("slow", true)).await).await;
    assert!(slow.ends_with("data: [DONE]\n\n"));
    let begun = Instant::now();
    while !sender.is_closed() {
        assert!(begun.elapsed() < Duration::from_secs(10), "the connection is still open");
        sleep(Duration::from_millis(10)).await;
    }
    assert!(begun.elapsed() > Duration::from_millis(300), "{:?}", begun.elapsed());
    server.stop().await;
}

/// Names that strangers can make point here, in the target of a request.
#[tokio::test]
async fn a_strangers_authority_is_refused() {
    let server = Running::scripted(ServerConfig::default(), slowly()).await;
    let mut sender = connect(server.address).await;
    for (authority, expected) in [("attacker.example", 403), ("localhost:1", 200), ("[::1]", 200)] {
        sender.ready().await.expect("open");
        let asked =
            Request::get(format!("http://{authority}/v1/models")).body(Full::default()).expect("a request");
        assert_eq!(sender.send_request(asked).await.expect("an answer").status(), expected, "{authority}");
    }
    server.stop().await;
}

/// A1 for this version: the authority opens nothing.
#[tokio::test]
async fn keys_are_asked_for() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("keys");
    std::fs::write(&path, "secret\n").expect("written");
    let config = ServerConfig { key_file: Some(path), ..ServerConfig::default() };
    let server = Running::scripted(config, Scripted::new(|_| Script::saying(SAYS))).await;
    let mut sender = connect(server.address).await;
    for (path, key, expected) in [
        (CHAT, "", 401),
        (CHAT, "wrong", 401),
        ("/v1/chat/completions?/health", "", 401),
        ("//health", "", 401),
        (CHAT, "secret", 200),
    ] {
        assert_eq!(
            ask(&mut sender, "POST", path, key, &chat("a", false)).await.status(),
            expected,
            "{path} {key}"
        );
    }
    let odd = Request::post("http://localhost%2fhealth@x/v1/chat/completions").body(Full::default());
    if let Ok(odd) = odd {
        sender.ready().await.expect("open");
        let status = sender.send_request(odd).await.map(|answer| answer.status().as_u16());
        assert!(status.is_err() || status.is_ok_and(|status| [400, 401].contains(&status)));
    }
    drop(sender);
    server.stop().await;
}

#[tokio::test]
async fn behind_tls_it_is_agreed_on() {
    let folder = tempfile::tempdir().expect("folder");
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).expect("certificate");
    let (certificate, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).expect("written");
    std::fs::write(&key, made.signing_key.serialize_pem()).expect("written");
    let config =
        ServerConfig { tls_certificate: Some(certificate), tls_key: Some(key), ..ServerConfig::default() };
    let server = Running::scripted(config, Scripted::new(|_| Script::saying(SAYS))).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).expect("root");
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut client = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    client.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(client));
    let plain = TcpStream::connect(server.address).await.expect("connects");
    let name = rustls::pki_types::ServerName::try_from("localhost").expect("name");
    let stream = connector.connect(name, plain).await.expect("handshake");
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let mut sender = open(stream).await;
    let streamed = text(ask(&mut sender, "POST", CHAT, "", &chat("a", true)).await).await;
    assert!(streamed.ends_with("data: [DONE]\n\n"), "{streamed}");
    drop(sender);
    server.stop().await;
}

#[tokio::test]
async fn the_end_waits_for_running_streams() {
    let config =
        ServerConfig { shutdown: ShutdownPolicy::Finish(Duration::from_secs(10)), ..ServerConfig::default() };
    let server = Running::scripted(config, slowly()).await;
    let mut sender = connect(server.address).await;
    let mut running = ask(&mut sender, "POST", CHAT, "", &chat("slow", true)).await;
    running.body_mut().frame().await.expect("a frame").expect("data");
    let stopping = tokio::spawn(server.stop());
    assert!(text(running).await.ends_with("data: [DONE]\n\n"));
    stopping.await.expect("stopped");
}
