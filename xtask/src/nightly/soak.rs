//! A real server under mixed load for a time: chats, streams that are read and streams that are left, long prompts whose
//! prefixes are packed, sessions, nonsense. Its memory stays flat, nothing is a 5xx, what is asked again is answered alike.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::job::Job;
use super::{Context, Outcome};

/// Clients at once.
const CLIENTS: u64 = 4;
/// Requests of a client before another one takes its place.
const LIFE: usize = 40;
/// How long an answer may take on a busy machine.
const PATIENCE: Duration = Duration::from_mins(4);

pub(super) fn run(context: &Context) -> Result<Outcome> {
    if !cfg!(target_os = "linux") {
        return Ok(Outcome::Skipped("memory is read from /proc".to_owned()));
    }
    let mut build = Job::cargo(context, "soak-build");
    build.args(["build", "-p", "muser", "--profile", &context.profile]).run()?;
    let built = if context.profile == "dev" { "debug" } else { &context.profile };
    let program = crate::target_dir().join(built).join("muser");
    let home = context.folder.join("soak-home");
    let _ = std::fs::remove_dir_all(&home);
    std::fs::create_dir_all(&home)?;
    let mut server = Server::start(&program, &home, &context.folder.join("soak-server.log"))?;
    let book = Arc::new(Mutex::new(Book::default()));
    let end = Instant::now() + context.time;
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let (address, book) = (server.address.clone(), Arc::clone(&book));
            std::thread::spawn(move || {
                for life in 0.. {
                    let mut client = Client { address: &address, book: &book, random: number << 32 | life };
                    if (0..LIFE).any(|_| Instant::now() >= end || !client.act()) {
                        return;
                    }
                }
            })
        })
        .collect();
    let mut resident = Vec::new();
    while Instant::now() < end {
        std::thread::sleep(Duration::from_secs(2));
        resident.push(server.resident_kib()?);
    }
    for client in clients {
        client.join().map_err(|_| anyhow::anyhow!("a client panicked"))?;
    }
    let book = book.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(fault) = book.faults.first() {
        bail!("{} faults, the first: {fault}", book.faults.len());
    }
    let (early, late) = flat(&resident)?;
    server.is_at_rest()?;
    server.stop()?;
    if book.compared < 10 {
        bail!("{} answers were compared: too short a time", book.compared);
    }
    Ok(Outcome::Passed(json!({
        "seconds_of_load": context.time.as_secs(), "requests": book.counts, "answers_compared": book.compared,
        "resident_mib_early": early >> 10, "resident_mib_late": late >> 10,
    })))
}

/// Medians of the second and of the last tenth; an error if memory has grown.
fn flat(resident: &[u64]) -> Result<(u64, u64)> {
    let tenth = (resident.len() / 10).max(1);
    let median = |range: &[u64]| {
        let mut sorted = range.to_vec();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied().unwrap_or(0)
    };
    // Blocks of the KV cache become resident as they are first used: the first fifth is none of it.
    let early = median(resident.get(2 * tenth..3 * tenth).unwrap_or(resident));
    let late = median(&resident[resident.len().saturating_sub(tenth)..]);
    let most = early + early / 20 + (24 << 10);
    if late > most {
        bail!(
            "memory has grown from {} MiB to {} MiB, at most {} expected",
            early >> 10,
            late >> 10,
            most >> 10
        );
    }
    Ok((early, late))
}

struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(program: &Path, home: &Path, log: &Path) -> Result<Self> {
        let mut child = Command::new(program)
            .args(["serve", "--port", "0", "--packs", "--parallel", "4"])
            .env("MUSER_HOME", home)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| program.display().to_string())?;
        let mut lines = BufReader::new(child.stderr.take().context("piped")?).lines();
        let mut address = String::new();
        for line in lines.by_ref().map_while(Result::ok) {
            if let Some((_, rest)) = line.split_once("listening on http://") {
                rest.split([',', ' ', '/']).next().unwrap_or_default().clone_into(&mut address);
            }
            if line.contains("ready") {
                break;
            }
        }
        if address.is_empty() {
            bail!("the server does not say where it listens");
        }
        let mut log = std::fs::File::create(log)?;
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| drop(writeln!(log, "{line}")));
        });
        Ok(Self { child, address })
    }

    fn resident_kib(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))
            .context("the server has ended")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok()).context("no VmRSS")
    }

    /// Nothing runs any more once nobody asks: streams that were left have ended.
    fn is_at_rest(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let (status, text) = ask(&self.address, "GET", "/metrics", None)?;
            let running = text.lines().find(|line| line.starts_with("vllm:num_requests_running"));
            let running = running.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            if status == 200 && running == Some(0.0) {
                return Ok(());
            }
            if begun.elapsed() > Duration::from_secs(30) {
                bail!("{running:?} requests are running though nobody asks (status {status})");
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    fn stop(&mut self) -> Result<()> {
        let id = self.child.id().to_string();
        Command::new("kill").args(["-TERM", &id]).status()?;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_mins(1) {
            if let Some(status) = self.child.try_wait()? {
                return if status.success() { Ok(()) } else { bail!("the server ended with {status}") };
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        bail!("the server does not end")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What all clients have seen.
#[derive(Default)]
struct Book {
    counts: HashMap<&'static str, u64>,
    /// The first answer to a question, by the question.
    answers: HashMap<String, String>,
    compared: u64,
    faults: Vec<String>,
}

struct Client<'a> {
    address: &'a str,
    book: &'a Mutex<Book>,
    random: u64,
}

impl Client<'_> {
    fn below(&mut self, n: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % n
    }

    fn book(&self) -> std::sync::MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One request of some kind. `false`: something is wrong.
    fn act(&mut self) -> bool {
        let (kind, done) = match self.below(10) {
            0..3 => ("chat", self.chat(false)),
            3 | 4 => ("stream", self.chat(true)),
            5 => ("left", self.leave()),
            6 => ("long", self.long()),
            7 => ("session", self.session()),
            8 => ("nonsense", self.nonsense()),
            _ => ("facts", self.facts()),
        };
        let mut book = self.book();
        *book.counts.entry(kind).or_default() += 1;
        match done {
            Ok(()) => true,
            Err(fault) => {
                book.faults.push(format!("{kind}: {fault:#}"));
                false
            }
        }
    }

    fn question(&mut self) -> Value {
        let subject =
            ["a fox", "the sea", "an old clock", "two friends", "rain", "a violet"][self.below(6) as usize];
        let (temperature, seed) = [(0.0, 1), (0.8, 7), (1.2, 9)][self.below(3) as usize];
        json!({
            "messages": [{"role": "user", "content": format!("Tell me about {subject}.")}],
            "temperature": temperature, "seed": seed, "max_tokens": 24 + 16 * self.below(3), "reasoning_effort": "none",
        })
    }

    /// The text of an answer does not depend on who else is there, nor on whether it comes in pieces.
    fn chat(&mut self, stream: bool) -> Result<()> {
        let question = self.question();
        let mut body = question.clone();
        body["stream"] = stream.into();
        let text = self.good("POST", "/v1/chat/completions", Some(&body))?;
        let found: String = if stream {
            let events =
                text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|line| *line != "[DONE]");
            let values = events.map(serde_json::from_str::<Value>).collect::<serde_json::Result<Vec<_>>>()?;
            values.iter().filter_map(|value| value["choices"][0]["delta"]["content"].as_str()).collect()
        } else {
            let value: Value = serde_json::from_str(&text)?;
            value["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
        };
        self.compare(&question.to_string(), found)
    }

    fn compare(&self, question: &str, found: String) -> Result<()> {
        let mut book = self.book();
        if let Some(first) = book.answers.get(question) {
            if *first != found {
                bail!("{question}: {first:?} and then {found:?}");
            }
            book.compared += 1;
        } else {
            book.answers.insert(question.to_owned(), found);
        }
        Ok(())
    }

    /// A stream that its reader leaves after some bytes.
    fn leave(&mut self) -> Result<()> {
        let mut body = self.question();
        (body["stream"], body["max_tokens"]) = (true.into(), 400.into());
        let mut stream = send(self.address, "POST", "/v1/chat/completions", Some(&body))?;
        let mut some = vec![0; 200 + self.below(2000) as usize];
        let read = stream.read(&mut some)?;
        let head = String::from_utf8_lossy(&some[..read]);
        if !head.contains(" 200 ") && !head.contains(" 429 ") {
            bail!("{head}");
        }
        Ok(())
    }

    /// A prompt of some blocks whose beginning others have asked before.
    fn long(&mut self) -> Result<()> {
        let story = "The fox runs over the hill and does not look back at the violet harbour. "
            .repeat(20 + 10 * self.below(4) as usize);
        let question = json!({"prompt": story, "max_tokens": 12, "temperature": 0});
        let text = self.good("POST", "/v1/completions", Some(&question))?;
        let value: Value = serde_json::from_str(&text)?;
        let found = value["choices"][0]["text"].as_str().unwrap_or_default().to_owned();
        self.compare(&format!("long {}", question["prompt"].as_str().map_or(0, str::len)), found)
    }

    fn session(&mut self) -> Result<()> {
        let name = format!("soak-{}", self.random % 1000);
        let words = "Once upon a time there was a clock that nobody wound. ".repeat(30);
        let body = json!({"name": name, "messages": [{"role": "user", "content": words}], "reasoning_effort": "none"});
        let (status, text) = ask(self.address, "POST", "/v1/sessions", Some(&body))?;
        // Two clients may take the same name.
        if status >= 500 || (status >= 400 && status != 409 && status != 400) {
            bail!("{status} {text}");
        }
        for (method, path) in
            [("POST", format!("/v1/sessions/{name}/restore")), ("DELETE", format!("/v1/sessions/{name}"))]
        {
            let (status, text) =
                ask(self.address, method, &path, (method == "POST").then(|| json!({})).as_ref())?;
            if status >= 500 {
                bail!("{method} {path}: {status} {text}");
            }
        }
        Ok(())
    }

    fn nonsense(&mut self) -> Result<()> {
        let bodies = [
            json!({"messages": "none"}),
            json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": -1}),
            json!({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}),
            json!({"prompt": "a ".repeat(40_000), "max_tokens": 1}),
        ];
        let body = &bodies[self.below(4) as usize];
        let path = if body.get("prompt").is_some() { "/v1/completions" } else { "/v1/chat/completions" };
        let (status, text) = ask(self.address, "POST", path, Some(body))?;
        if !(400..500).contains(&status) {
            bail!("{status} for {path}: {}", text.chars().take(300).collect::<String>());
        }
        Ok(())
    }

    fn facts(&mut self) -> Result<()> {
        let path = ["/health", "/v1/models", "/metrics", "/status", "/slots", "/"][self.below(6) as usize];
        self.good("GET", path, None).map(drop)
    }

    fn good(&self, method: &str, path: &str, body: Option<&Value>) -> Result<String> {
        let (status, text) = ask(self.address, method, path, body)?;
        if status != 200 {
            bail!("{method} {path}: {status} {}", text.chars().take(400).collect::<String>());
        }
        Ok(text)
    }
}

fn send(address: &str, method: &str, path: &str, body: Option<&Value>) -> Result<TcpStream> {
    let body = body.map(Value::to_string).unwrap_or_default();
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let length = body.len();
    write!(stream, "{method} {path} HTTP/1.0\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}")?;
    Ok(stream)
}

fn ask(address: &str, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, String)> {
    let mut answer = Vec::new();
    send(address, method, path, body)?
        .read_to_end(&mut answer)
        .with_context(|| format!("{method} {path}"))?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, text) = answer.split_once("\r\n\r\n").context("an answer without a head")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no status")?;
    Ok((status, text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_grows_is_seen() {
        let level: Vec<u64> = (0..100).map(|i| 300_000 + i % 7).collect();
        assert!(flat(&level).is_ok());
        let slow: Vec<u64> = (0..100).map(|i| 300_000 + 1_000 * i).collect();
        assert!(flat(&slow).is_err());
        // It may grow at first.
        let warm: Vec<u64> = (0..100).map(|i| 200_000 + 100_000 * i.min(15) / 15).collect();
        assert!(flat(&warm).is_ok());
    }
}
