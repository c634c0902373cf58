//! A minute of rough handling, with the bundled model: `MUSER_TEST_LONG=1 cargo test --release -p muser-server --test load
//! -- --nocapture`. Two hundred connections at once ask, hang up, read slowly or not at all, and send bodies that are too
//! large; every answer that is read to its end must be the right one, `/v1/models` must stay quick, and nothing may be
//! left over afterwards.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use muser_engine::EngineConfig;
use muser_server::{Limits, ServerConfig};
use serde_json::json;
use support::client::{read_until, send};
use support::{get, post, request, tiny};
use tokio::time::sleep;

const CHAT: &str = "/v1/chat/completions";
const CONNECTIONS: usize = 200;
const QUESTIONS: [&str; 4] = ["Tell me about a fox.", "What is a tree?", "Hello!", "Write a short story."];

/// A small generator: the run is the same each time but for the machine's timing.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

fn resident_mib() -> usize {
    (muser_testkit::resident_bytes().unwrap_or(0) >> 20) as usize
}

fn body(question: &str, stream: bool) -> serde_json::Value {
    json!({"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24, "stream": stream})
}

#[derive(Default)]
struct Counts {
    right: AtomicUsize,
    hung_up: AtomicUsize,
    refused: AtomicUsize,
    too_large: AtomicUsize,
    not_read: AtomicUsize,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_minute_of_rough_handling() {
    if !muser_testkit::is_long() {
        eprintln!("SKIPPED: set MUSER_TEST_LONG=1");
        return;
    }
    let (engine, facts) =
        tiny::spawn(EngineConfig { parallel: 8, max_waiting: 120, ..EngineConfig::default() });
    let limits =
        Limits { stalled_write_time: Duration::from_secs(5), body_bytes: 1 << 20, ..Limits::default() };
    let server = tiny::serve_with(ServerConfig { limits, ..ServerConfig::default() }, &engine, &facts).await;
    let address = server.address;

    let mut expected = Vec::new();
    for question in QUESTIONS {
        let answer = post(address, CHAT, &body(question, true)).await;
        expected.push((answer.deltas("reasoning_content"), answer.deltas("content")));
    }
    let expected = Arc::new(expected);
    let counts = Arc::new(Counts::default());
    let before_mib = resident_mib();
    let end = Instant::now() + Duration::from_mins(1);

    let mut clients = Vec::new();
    for number in 0..CONNECTIONS {
        let (expected, counts) = (Arc::clone(&expected), Arc::clone(&counts));
        clients.push(tokio::spawn(async move {
            let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ ((number as u64 + 1) << 20));
            while Instant::now() < end {
                let which = dice.roll(QUESTIONS.len() as u64) as usize;
                let asked = body(QUESTIONS[which], true);
                match dice.roll(10) {
                    0..=5 => {
                        let answer = post(address, CHAT, &asked).await;
                        if answer.status == 200 {
                            let found = (answer.deltas("reasoning_content"), answer.deltas("content"));
                            assert_eq!(found, expected[which], "a wrong answer");
                            counts.right.fetch_add(1, Ordering::Relaxed);
                        } else {
                            assert_eq!(answer.status, 429, "{}", answer.text());
                            counts.refused.fetch_add(1, Ordering::Relaxed);
                            sleep(Duration::from_millis(100 + dice.roll(400))).await;
                        }
                    }
                    6 | 7 => {
                        let socket = send(address, "POST", CHAT, "", asked.to_string().as_bytes()).await;
                        sleep(Duration::from_millis(dice.roll(500))).await;
                        drop(socket);
                        counts.hung_up.fetch_add(1, Ordering::Relaxed);
                    }
                    8 => {
                        let large = vec![b' '; (1 << 20) + 1 + dice.roll(1 << 20) as usize];
                        let answer = request(address, "POST", CHAT, "", &large).await;
                        assert_eq!(answer.status, 413);
                        counts.too_large.fetch_add(1, Ordering::Relaxed);
                    }
                    _ => {
                        let mut socket = send(address, "POST", CHAT, "", asked.to_string().as_bytes()).await;
                        let _ = read_until(&mut socket, |text| text.contains("HTTP/1.1")).await;
                        sleep(Duration::from_millis(500 + dice.roll(2000))).await;
                        counts.not_read.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }));
    }
    let probe = tokio::spawn(async move {
        let mut times = Vec::new();
        while Instant::now() < end {
            let begun = Instant::now();
            assert_eq!(get(address, "/v1/models").await.status, 200);
            times.push(begun.elapsed());
            sleep(Duration::from_millis(20)).await;
        }
        times.sort();
        times
    });
    for client in clients {
        client.await.expect("a client saw something wrong");
    }
    let times = probe.await.expect("the probe");
    let begun = Instant::now();
    while engine.in_flight() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(10), "{} requests are left over", engine.in_flight());
        sleep(Duration::from_millis(20)).await;
    }
    let metrics = engine.metrics();
    assert_eq!((metrics.running, metrics.waiting), (0, 0));
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let after_mib = resident_mib();
    eprintln!(
        "{} right, {} refused with 429, {} hung up, {} too large, {} slow; /v1/models p50 {:?} p99 {:?} max {:?} of {}; \
         resident {before_mib} -> {after_mib} MiB; {} tokens",
        counts.right.load(Ordering::Relaxed),
        counts.refused.load(Ordering::Relaxed),
        counts.hung_up.load(Ordering::Relaxed),
        counts.too_large.load(Ordering::Relaxed),
        counts.not_read.load(Ordering::Relaxed),
        at(0.5),
        at(0.99),
        at(1.0),
        times.len(),
        metrics.generated_tokens,
    );
    assert!(counts.right.load(Ordering::Relaxed) > 20);
    // The prefix cache fills up to its budget; beyond that nothing may grow.
    let budget_mib = (metrics.kv_bytes_total >> 20) as usize;
    assert!(after_mib < before_mib + budget_mib + 200, "memory grew from {before_mib} to {after_mib} MiB");
    assert!(
        at(0.99) < Duration::from_millis(20) || cfg!(debug_assertions),
        "p99 of /v1/models is {:?}",
        at(0.99)
    );
    server.stop().await;
}
