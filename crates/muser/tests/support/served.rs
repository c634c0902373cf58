//! `muser serve` as a process of its own.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

use super::Home;

/// A server that dies with this value.
pub struct Served {
    child: Child,
    pub address: String,
    said: Arc<Mutex<String>>,
}

impl Served {
    /// Starts one with its home in `home` and its packs there, and waits until it is ready.
    pub fn start(home: &Home, more: &[&str]) -> Self {
        let args = [&["serve", "--port", "0", "--packs"], more].concat();
        let mut child = home.command(args).stdout(Stdio::null()).spawn().expect("it starts");
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
        let said = Arc::<Mutex<String>>::default();
        let kept = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let mut kept = kept.lock().expect("nobody panics with it");
                kept.push_str(&line);
                kept.push('\n');
            }
        });
        Self { child, address, said }
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Status and body of an answer.
    pub fn exchange(&self, method: &str, path: &str, body: &Value) -> (u16, String) {
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
        (status, body.to_owned())
    }

    /// The same with the body parsed.
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.exchange(method, path, body);
        (status, serde_json::from_str(&body).unwrap_or(Value::Null))
    }

    /// The sum of a metric's values over those of its labels that contain `label`.
    pub fn metric(&self, name: &str, label: &str) -> f64 {
        let (_, text) = self.exchange("GET", "/metrics", &Value::Null);
        let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(label));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// The answer to a request that must be good.
    pub fn post(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.ask("POST", path, body);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    /// What it has logged since it was ready.
    pub fn said(&self) -> String {
        self.said.lock().expect("nobody panics with it").clone()
    }

    /// SIGKILL: nothing is said goodbye to.
    pub fn kill(mut self) {
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
