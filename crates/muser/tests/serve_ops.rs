//! `muser serve` under operators' hands: logs that cannot be written, signals, sockets, and what is said of refused requests.
#![cfg(unix)]

mod support;

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use support::Home;
use support::served::Served;

/// A server behind a Unix socket, which says nothing to us.
struct Quiet {
    child: Child,
    socket: std::path::PathBuf,
}

impl Quiet {
    /// Starts `command`, whose arguments end with the program's own, and waits until it is ready.
    fn start(home: &Home, mut command: Command) -> Self {
        let socket = home.path("s");
        command.arg("--host").arg(&socket).stdin(Stdio::null());
        let served = Self { child: command.spawn().expect("it starts"), socket };
        let begun = Instant::now();
        while served.get("/health") != Some(200) {
            assert!(begun.elapsed() < Duration::from_mins(1), "it is not ready");
            std::thread::sleep(Duration::from_millis(30));
        }
        served
    }

    fn get(&self, path: &str) -> Option<u16> {
        let mut stream = UnixStream::connect(&self.socket).ok()?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.split(' ').nth(1)?.parse().ok()
    }

    /// All routes that operators look at answer, again and again.
    fn check_well(&mut self) {
        for _ in 0..5 {
            for path in ["/health", "/metrics", "/v1/models", "/status"] {
                assert_eq!(self.get(path), Some(200), "{path}");
            }
            assert_eq!(self.get("/nowhere"), Some(404));
        }
        assert!(self.child.try_wait().expect("ours").is_none(), "it runs");
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).status().expect("kill");
    assert!(sent.success());
}

/// The reader of the log goes away while the server runs; or the log's disk is full from the start.
#[test]
fn a_log_that_cannot_be_written_fails_nothing() {
    for more in [&["-v"][..], &["-vv", "--log-json"]] {
        let home = Home::new();
        let mut command = home.command([&["serve"], more].concat());
        command.stdout(Stdio::null());
        let mut served = Quiet::start(&home, command);
        drop(served.child.stderr.take());
        served.check_well();
    }
    #[cfg(target_os = "linux")]
    {
        let home = Home::new();
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
        let mut command = home.command(["serve", "-v"]);
        command.stdout(Stdio::null()).stderr(full);
        Quiet::start(&home, command).check_well();
    }
}

/// No descriptors left, nobody reads the log: the warning about it must not end the process.
#[cfg(target_os = "linux")]
#[test]
fn without_descriptors_and_log_it_goes_on() {
    let home = Home::new();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 60; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_muser"), "serve"]);
    command.env("MUSER_HOME", home.path("home")).env_remove("MUSER_MODEL");
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut served = Quiet::start(&home, command);
    drop(served.child.stderr.take());
    let many: Vec<_> = (0..86).map(|_| UnixStream::connect(&served.socket)).collect();
    std::thread::sleep(Duration::from_millis(500));
    drop(many);
    let begun = Instant::now();
    while served.get("/health") != Some(200) {
        assert!(begun.elapsed() < Duration::from_secs(20), "it answers again");
        std::thread::sleep(Duration::from_millis(50));
    }
    served.check_well();
}

/// SIGHUP reads the keys again, other signals that mean nothing here end nothing, and SIGTERM ends it well.
#[test]
fn signals_mean_what_operators_expect() {
    let home = Home::new();
    let keys = home.file("keys", "the-first-key-of-all\n");
    let mut command = home.command(["serve", "--key-file"]);
    command.arg(&keys).stdout(Stdio::null()).stderr(Stdio::null());
    let mut served = Quiet::start(&home, command);
    let ask = |key: &str| {
        let mut stream = UnixStream::connect(home.path("s")).expect("connects");
        write!(stream, "GET /v1/models HTTP/1.0\r\nx-api-key: {key}\r\n\r\n").expect("written");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok())
    };
    assert_eq!(ask("the-first-key-of-all"), Some(200));
    home.file("keys", "the-second-key-of-all\n");
    for name in ["USR1", "USR2", "HUP"] {
        signal(served.child.id(), name);
    }
    let begun = Instant::now();
    while ask("the-second-key-of-all") != Some(200) {
        assert!(begun.elapsed() < Duration::from_secs(20), "the new key is taken up");
        std::thread::sleep(Duration::from_millis(30));
    }
    assert_eq!(ask("the-first-key-of-all"), Some(401));
    signal(served.child.id(), "TERM");
    let status = served.child.wait().expect("ours");
    assert!(status.success(), "{status}");
    assert!(!Path::new(&served.socket).exists(), "its socket is gone");
}

/// Operators hear of refused requests without asking for more logs: what was wrong, in our words only.
#[test]
fn refused_requests_are_told_without_their_words() {
    let home = Home::new();
    let served = Served::start(&home, &[]);
    let body = json!({"messages": [{"role": "zanzibar", "content": "quokka"}], "temperature": "wombat"});
    assert_eq!(served.exchange("POST", "/v1/chat/completions", &body).0, 400);
    let role = json!({"messages": [{"role": "zanzibar", "content": "quokka"}]});
    assert_eq!(served.exchange("POST", "/v1/chat/completions", &role).0, 400);
    let begun = Instant::now();
    let said = loop {
        let said = served.said();
        if said.matches("request refused").count() >= 2 {
            break said;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{said}");
        std::thread::sleep(Duration::from_millis(20));
    };
    for sign in ["WARN", "invalid_value", "temperature", "messages[0].role", "expected", "status=400"] {
        assert!(said.contains(sign), "{sign}: {said}");
    }
    for word in ["zanzibar", "quokka", "wombat"] {
        assert!(!said.contains(word), "{word}: {said}");
    }
    let counted = served.metric("muser:requests_refused_total", "code=\"invalid_value\"");
    assert!(counted >= 2.0, "{counted}");
    served.kill();
}

/// A prompt without end is refused, not read until memory is full.
#[cfg(target_os = "linux")]
#[test]
fn endless_input_is_refused() {
    let home = Home::new();
    let zeros = std::fs::File::open("/dev/zero").expect("Linux has it");
    let mut command = home.command(["run"]);
    let out = command.stdin(zeros).output().expect("it ends");
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("more than 256 MiB"), "{stderr}");
}

/// What `--insecure` leaves open depends on what else was given.
#[test]
fn insecure_says_what_is_open() {
    let home = Home::new();
    let keys = home.file("keys", "a-key-of-enough-letters\n");
    let keys = keys.to_str().expect("UTF-8");
    for (more, sign) in [(&[][..], "anyone who reaches"), (&["--key-file", keys], "there is no TLS")] {
        let args =
            [&["serve", "--host", "0.0.0.0", "--port", "0", "--insecure", "-m", "no-such-model"], more]
                .concat();
        let ran = home.run(args);
        assert_eq!(ran.code(), Some(1), "{}", ran.stderr());
        // The model is looked for first, so nothing is said of an address.
        assert!(!ran.stderr().contains(sign));
        let mut child = home
            .command([&["serve", "--host", "0.0.0.0", "--port", "0", "--insecure"], more].concat())
            .spawn()
            .expect("it starts");
        let mut stderr = child.stderr.take().expect("piped");
        let (mut said, mut piece) = (String::new(), [0; 512]);
        while !said.contains("ready") {
            let count = stderr.read(&mut piece).expect("readable");
            assert!(count > 0, "{said}");
            said.push_str(&String::from_utf8_lossy(&piece[..count]));
        }
        let _ = child.kill();
        let _ = child.wait();
        assert!(said.contains(sign), "{said}");
    }
}
