//! A loopback HTTP server whose every answer is scripted byte by byte, so that it can misbehave in any way.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, reason = "shared by test binaries only")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Request {
    pub target: String,
    pub headers: HashMap<String, String>,
}

impl Request {
    /// First byte asked for with `Range: bytes=N-`.
    pub fn from(&self) -> Option<usize> {
        self.headers.get("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    }
}

/// What happens after the written bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Close,
    /// Keep the connection open without a word.
    Stall,
}

/// Bytes to write, and the end.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: &'static str,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub end: End,
}

impl Reply {
    pub fn status(status: &'static str) -> Self {
        Self {
            status,
            headers: vec![("Content-Length".into(), "0".into())],
            body: Vec::new(),
            end: End::Close,
        }
    }

    /// The whole content.
    pub fn full(content: &[u8]) -> Self {
        Self {
            status: "200 OK",
            headers: vec![("Content-Length".into(), content.len().to_string())],
            body: content.to_vec(),
            end: End::Close,
        }
    }

    /// What a good server answers: the whole, or the rest that was asked for.
    pub fn good(request: &Request, content: &[u8]) -> Self {
        match request.from() {
            Some(from) if from < content.len() => Self::range(content, from),
            Some(_) => Self::status("416 Range Not Satisfiable")
                .header("Content-Range", &format!("bytes */{}", content.len())),
            None => Self::full(content),
        }
    }

    pub fn range(content: &[u8], from: usize) -> Self {
        let mut reply = Self::full(&content[from..]);
        reply.status = "206 Partial Content";
        reply.header("Content-Range", &format!("bytes {from}-{}/{}", content.len() - 1, content.len()))
    }

    pub fn redirect(location: &str) -> Self {
        Self::status("302 Found").header("Location", location)
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.retain(|(n, _)| n != name);
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(n, _)| n != name);
        self
    }

    /// Announces everything and sends only so many bytes.
    pub fn cut(mut self, bytes: usize) -> Self {
        self.body.truncate(bytes);
        self
    }

    pub fn stall(mut self) -> Self {
        self.end = End::Stall;
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = format!("HTTP/1.1 {}\r\nConnection: close\r\n", self.status).into_bytes();
        for (name, value) in &self.headers {
            out.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
        }
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(&self.body);
        out
    }
}

/// Answers request number `n` (from 0).
pub type Script = dyn Fn(&Request, usize) -> Reply + Send + Sync;

pub struct Server {
    pub addr: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Starts a server that lives as long as the test process.
    pub fn start(script: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&requests);
        let script: Arc<Script> = Arc::new(script);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(stream), script, log) = (stream, Arc::clone(&script), Arc::clone(&log)) else {
                    continue;
                };
                thread::spawn(move || serve(stream, &*script, &log));
            }
        });
        Self { addr, requests }
    }

    pub fn url(&self, target: &str) -> String {
        format!("http://{}{target}", self.addr)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn serve(mut stream: TcpStream, script: &Script, log: &Mutex<Vec<Request>>) {
    let Some(request) = read_request(&stream) else { return };
    let n = {
        let mut log = log.lock().unwrap();
        log.push(request.clone());
        log.len() - 1
    };
    let reply = script(&request, n);
    let _ = stream.write_all(&reply.bytes());
    match reply.end {
        End::Close => drop(stream),
        End::Stall => {
            // Until the client goes away.
            let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
            let _ = stream.read(&mut [0; 16]);
        }
    }
}

pub fn read_request(stream: impl Read) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let target = line.split(' ').nth(1)?.to_owned();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    Some(Request { target, headers })
}

/// Bytes without a pattern that a shifted copy would share, behind the head of a model file.
pub fn content(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let random = (0..len).map(|_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    });
    b"GGUF\x03\0\0\0".iter().copied().chain(random.skip(8)).take(len).collect()
}
