//! A plain HTTP/1.1 client: what it sends and sees is what is on the wire.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The head, in lower case.
    pub head: String,
    /// The body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.text()))
    }

    /// The body as text; it must be UTF-8.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the body is UTF-8")
    }

    /// The payloads of an event stream, without the last `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        let lines = self.text().lines().filter_map(|line| line.strip_prefix("data: "));
        lines.filter(|line| *line != "[DONE]").map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// The lines of JSON of an Ollama stream.
    pub fn lines(&self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// The text of all chunks of one choice's delta field.
    pub fn deltas(&self, field: &str) -> String {
        self.events().iter().filter_map(|event| event["choices"][0]["delta"][field].as_str()).collect()
    }
}

/// Sends a body and waits for the whole answer.
pub async fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    request(address, "POST", path, "content-type: application/json\r\n", body.to_string().as_bytes()).await
}

/// Asks for a path.
pub async fn get(address: SocketAddr, path: &str) -> Answer {
    request(address, "GET", path, "", b"").await
}

/// Sends any request and waits for the whole answer.
pub async fn request(address: SocketAddr, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
    let mut stream = send(address, method, path, headers, body).await;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.expect("the answer can be read");
    parse(&bytes)
}

/// Sends a request and leaves the answer to be read.
pub async fn send(address: SocketAddr, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
    // A small buffer, so that a client that does not read is soon noticed.
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(16 << 10).expect("a buffer");
    let mut stream = socket.connect(address).await.expect("connects");
    let host = if headers.to_ascii_lowercase().contains("host:") { "" } else { "host: localhost\r\n" };
    let head = format!(
        "{method} {path} HTTP/1.1\r\n{host}connection: close\r\ncontent-length: {}\r\n{headers}\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.expect("head");
    // A server may answer and close before it has read a body that it refuses.
    let _ = stream.write_all(body).await;
    stream
}

/// Reads until `done` says so; the text so far and the time that took.
pub async fn read_until(stream: &mut TcpStream, done: impl Fn(&str) -> bool) -> (String, Duration) {
    let begun = Instant::now();
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&seen).into_owned();
        if done(&text) {
            return (text, begun.elapsed());
        }
        match stream.read(&mut buffer).await.expect("readable") {
            0 => panic!("the stream ended early:\n{text}"),
            count => seen.extend_from_slice(&buffer[..count]),
        }
    }
}

fn parse(bytes: &[u8]) -> Answer {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
    let head = std::str::from_utf8(&bytes[..end]).expect("the head is text").to_ascii_lowercase();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let body = &bytes[end + 4..];
    let body = if head.contains("transfer-encoding: chunked") { unchunk(body) } else { body.to_vec() };
    Answer { status, head, body }
}

fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(line) = bytes.windows(2).position(|window| window == b"\r\n") {
        let length = std::str::from_utf8(&bytes[..line]).expect("a length");
        let length = usize::from_str_radix(length.trim(), 16).expect("hexadecimal");
        let rest = &bytes[line + 2..];
        if length == 0 || rest.len() < length + 2 {
            break;
        }
        body.extend_from_slice(&rest[..length]);
        bytes = &rest[length + 2..];
    }
    body
}
