//! Requests that are made to keep the server busy, beside `/health` and somebody's stream: `MUSER_TEST_LONG=1 cargo test
//! --release -p muser-server --test hostile -- --nocapture` sends a hundred and holds the promised limits; the short form
//! sends some of each kind and notices when one of them stops the others.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use muser_engine::EngineConfig;
use muser_server::{Limits, ServerConfig};
use muser_testkit::{peak_resident_bytes, resident_bytes};
use serde_json::{Value, json};
use support::client::send;
use support::{get, request, tiny};
use tokio::io::AsyncReadExt as _;
use tokio::time::{sleep, timeout};

const CHAT: &str = "/v1/chat/completions";
const BODIES_MIB: usize = 192;

/// Compiled grammars.
const GRAMMARS_MIB: usize = 128;

/// What else requests take: copies of bodies while they are read, grammars that are being compiled and those that answers run
/// with, and what the allocator keeps of it all, which is more where each thread has memory of its own.
fn work_mib() -> usize {
    // As packages set it.
    if std::env::var_os("MALLOC_ARENA_MAX").is_some_and(|most| most == "2") { 200 } else { 500 }
}

/// What is promised; on machines that others use too only the long form can ask for it.
struct Promise {
    health: Duration,
    delay: Duration,
    requests: usize,
    /// Share of the full size of each body.
    size: usize,
}

fn promise() -> Promise {
    if muser_testkit::is_long() {
        Promise {
            health: Duration::from_millis(100),
            delay: Duration::from_millis(50),
            requests: 100,
            size: 8,
        }
    } else {
        Promise { health: Duration::from_secs(2), delay: Duration::from_secs(2), requests: 20, size: 1 }
    }
}

/// A kind of request: where it goes, with which headers, and what it says.
type Hostile = (&'static str, &'static str, Vec<u8>);

fn kinds(size: usize) -> Vec<Hostile> {
    let chat = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4});
        if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
            body.extend(more);
        }
        body.to_string().into_bytes()
    };
    let tool = |index: usize| json!({"type": "function", "function": {"name": format!("f{index}"), "parameters": {"type": "object"}}});
    let mib = size << 20;
    let numbers =
        |open: &str, close: &str| format!("{open}{}0{close}", "0,".repeat(mib * 3 / 2)).into_bytes();
    let items: Vec<Value> = (0..7_500 * size)
        .map(|_| json!({"role": "assistant", "content": "a word or two that are joined"}))
        .collect();
    let bomb = {
        use std::io::Write as _;
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        for _ in 0..64 {
            encoder.write_all(&vec![b' '; 1 << 20]).expect("memory");
        }
        encoder.finish().expect("memory")
    };
    vec![
        (CHAT, "", chat(json!({"tools": (0..4_000 * size).map(tool).collect::<Vec<_>>()}))),
        (CHAT, "", chat(json!({"tools": vec![tool(1); 1000]}))),
        ("/v1/completions", "", numbers("{\"prompt\":\"a\",\"zz\":[", "]}")),
        ("/v1/completions", "", numbers("{\"prompt\":[", "]}")),
        ("/v1/responses", "", json!({"input": items}).to_string().into_bytes()),
        (CHAT, "", chat(json!({"stop": "x".repeat(mib / 2), "n": 16}))),
        (CHAT, "", chat(json!({"logit_bias": vec![json!([5, 1]); 60_000 * size]}))),
        (CHAT, "", chat(json!({"messages": [{"role": "user", "content": "many words ".repeat(mib / 22)}]}))),
        (CHAT, "content-encoding: gzip\r\n", bomb),
        (CHAT, "", "[".repeat(mib).into_bytes()),
    ]
    .into_iter()
    .chain(grammars())
    .collect()
}

/// Grammars at the limits of what is accepted, and beyond: compiling them takes long, and so do their masks.
fn grammars() -> Vec<Hostile> {
    let with = |field: &str, value: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 48, "reasoning_effort": "none"});
        body[field] = value;
        (CHAT, "", body.to_string().into_bytes())
    };
    let schema = |schema: Value| {
        let form =
            json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
        with("response_format", form)
    };
    let object = |index: usize| {
        let key = format!("key{index}");
        json!({"type": "object", "properties": {key.clone(): {"type": "string"}}, "required": [key]})
    };
    let optional: serde_json::Map<String, Value> = (0..200)
        .map(|index| (format!("p{index}"), json!({"type": "string", "maxLength": 9 + index})))
        .collect();
    let words = |count: usize| (0..count).map(|index| json!(format!("word{index}"))).collect::<Vec<_>>();
    let chained: String = (0..9_900)
        .map(|rule| format!("r{rule} ::= \"a\" r{} | \"b\"\n", (rule + 1) % 9_900))
        .collect::<Vec<_>>()
        .concat();
    vec![
        schema(json!({"anyOf": (0..200).map(object).collect::<Vec<_>>()})),
        schema(json!({"anyOf": (0..3_000).map(object).collect::<Vec<_>>()})),
        schema(json!({"enum": words(50_000)})),
        schema(json!({"type": "object", "properties": optional})),
        schema(json!({"type": "array", "items": {"type": "string", "pattern": "^(a|ab|abc|[a-z]{1,40})*$"}})),
        schema(json!({"type": "string", "minLength": 20_000, "maxLength": 40_000})),
        with("guided_choice", json!(words(20_000))),
        with("guided_regex", json!("(a|b|ab|ba|[a-f]{3,9}){200}")),
        with("guided_regex", json!("(x?){400}x{400}")),
        with("guided_grammar", json!(format!("root ::= r0\n{chained}"))),
        with("guided_grammar", json!("root ::= x x x x x x x x\nx ::= \"a\"* x | x \"a\"* | \"\"")),
    ]
}

fn mib(bytes: Option<u64>) -> usize {
    (bytes.unwrap_or(0) >> 20) as usize
}

/// Gaps between the pieces of a stream.
async fn gaps(address: std::net::SocketAddr, tokens: u32) -> Vec<Duration> {
    let body = json!({"prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "stream": true});
    let mut stream = send(address, "POST", "/v1/completions", "", body.to_string().as_bytes()).await;
    let (mut gaps, mut last, mut buffer) = (Vec::new(), None::<Instant>, [0; 4096]);
    let mut text = String::new();
    loop {
        let count = stream.read(&mut buffer).await.expect("readable");
        if count == 0 {
            break;
        }
        let piece = String::from_utf8_lossy(&buffer[..count]);
        if piece.contains("\"text\"") {
            if let Some(last) = last {
                gaps.push(last.elapsed());
            }
            last = Some(Instant::now());
        }
        text.push_str(&piece);
    }
    assert!(text.contains("[DONE]"), "the stream ends well: {}", &text[text.len().saturating_sub(400)..]);
    gaps
}

fn p99(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[(times.len() - 1) * 99 / 100]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_can_stop_it_for_others() {
    let promise = promise();
    let (engine, facts) = tiny::spawn(EngineConfig { parallel: 4, ..EngineConfig::default() });
    let limits = Limits { bodies_bytes: BODIES_MIB << 20, ..Limits::default() };
    let server = tiny::serve_with(ServerConfig { limits, ..ServerConfig::default() }, &engine, &facts).await;
    let address = server.address;
    let kinds = Arc::new(kinds(promise.size));
    let quiet = p99(&mut gaps(address, 200).await);
    let before = mib(resident_bytes());

    let attacking = Arc::new(AtomicBool::new(true));
    let probe = tokio::spawn({
        let attacking = Arc::clone(&attacking);
        async move {
            let mut times = Vec::new();
            while attacking.load(Ordering::Relaxed) {
                let begun = Instant::now();
                assert_eq!(get(address, "/health").await.status, 200);
                times.push(begun.elapsed());
                sleep(Duration::from_millis(10)).await;
            }
            times
        }
    });
    let victim = tokio::spawn({
        let attacking = Arc::clone(&attacking);
        async move {
            let mut all = Vec::new();
            while attacking.load(Ordering::Relaxed) {
                all.extend(gaps(address, 300).await);
            }
            all
        }
    });
    let (served, refused, left) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let counts = Arc::new((served, refused, left));
    let begun = Instant::now();
    let attackers: Vec<_> = (0..promise.requests)
        .map(|number| {
            let (kinds, counts) = (Arc::clone(&kinds), Arc::clone(&counts));
            tokio::spawn(async move {
                let (path, headers, body) = &kinds[number % kinds.len()];
                // Every third leaves as soon as it has said all.
                if number % 3 == 2 {
                    drop(send(address, "POST", path, headers, body).await);
                    counts.2.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                let asked = timeout(Duration::from_mins(3), request(address, "POST", path, headers, body));
                let status = asked.await.expect("an answer in three minutes").status;
                let count = if status == 200 { &counts.0 } else { &counts.1 };
                assert!([200, 400, 408, 413, 429, 503].contains(&status), "{path}: {status}");
                count.fetch_add(1, Ordering::Relaxed);
            })
        })
        .collect();
    for attacker in attackers {
        attacker.await.expect("it ends");
    }
    let took = begun.elapsed();
    attacking.store(false, Ordering::Relaxed);
    let (mut health, mut beside) = (probe.await.expect("the probe"), victim.await.expect("the stream"));
    let peak = mib(peak_resident_bytes());
    let (worst, health, beside) = (health.iter().max().copied(), p99(&mut health), p99(&mut beside));
    eprintln!(
        "{} requests in {took:?}: {} served, {} refused, {} left; /health p99 {health:?}, at most {worst:?}; between tokens \
         p99 {quiet:?} alone, {beside:?} beside; resident {before} MiB before, {peak} MiB at most",
        promise.requests,
        counts.0.load(Ordering::Relaxed),
        counts.1.load(Ordering::Relaxed),
        counts.2.load(Ordering::Relaxed),
    );
    assert!(health <= promise.health, "/health p99 is {health:?}");
    assert!(beside <= quiet + promise.delay, "a stream's tokens come {beside:?} apart, {quiet:?} alone");
    // The bodies here and what the clients hold of them are in the same process.
    let ours: usize = kinds.iter().map(|(_, _, body)| body.len()).sum::<usize>() >> 20;
    assert!(
        peak < before + BODIES_MIB + GRAMMARS_MIB + work_mib() + ours,
        "memory grew from {before} to {peak} MiB"
    );
    server.stop().await;
}
