//! `GET /v1/dashboard`: who may ask, what it says of work that was done, and what it never says.

mod support;

use std::time::Duration;

use muser_server::ServerConfig;
use muser_server::dashboard::{Bandwidth, FIGURES, Machine, Mark, NodePart, Report, VERSION};
use muser_server::nodes::{Handoff, KnownNodes, NodeTotals};
use serde_json::{Value, json};
use support::client::send;
use support::{Answer, Running, Script, Scripted, get, post, request};
use tokio::time::{sleep, timeout};

const CHAT: &str = "/v1/chat/completions";
const ROUTE: &str = "/v1/dashboard";
const SAYS: &str = " to=user<|message|>a b c d<|eot|>";

fn asked() -> Value {
    json!({"messages": [{"role": "user", "content": "the secret plan"}]})
}

async fn report(server: &Running) -> Report {
    read(&get(server.address, ROUTE).await)
}

fn read(answer: &Answer) -> Report {
    assert_eq!(answer.status, 200, "{}", answer.text());
    serde_json::from_slice(&answer.body).expect("the shape that `muser top` reads")
}

fn value(report: &Report, id: &str) -> Option<f64> {
    report.figures.iter().find(|figure| figure.id == id).unwrap_or_else(|| panic!("{id}")).value
}

struct Desk(NodePart);

impl KnownNodes for Desk {
    fn states(&self) -> Vec<NodePart> {
        vec![self.0.clone()]
    }

    fn totals(&self) -> NodeTotals {
        NodeTotals { served: vec![("given", 4)], ..NodeTotals::default() }
    }

    fn handoffs(&self) -> Vec<Handoff> {
        vec![Handoff { node: self.0.name.clone(), positions: 900, rows: 512, bytes: 77 }]
    }
}

async fn keyed(engine: Scripted, shared: bool) -> (Running, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("keys");
    std::fs::write(&path, "secret-one\n").expect("write");
    let config = ServerConfig { key_file: Some(path), shared_cache: shared, ..ServerConfig::default() };
    (Running::scripted(config, engine).await, folder)
}

#[tokio::test]
async fn figures_tell_what_was_done_and_nothing_of_what_was_said() {
    let engine =
        Scripted::new(|_| Script { cached: 3, pace: Duration::from_millis(2), ..Script::saying(SAYS) });
    let server = Running::scripted(ServerConfig::default(), engine).await;
    for _ in 0..3 {
        assert_eq!(post(server.address, CHAT, &asked()).await.status, 200);
    }
    assert_eq!(
        post(server.address, CHAT, &json!({"messages": 7, "temperature": "my words"})).await.status,
        400
    );
    assert_eq!(get(server.address, "/nowhere/secret").await.status, 404);
    let answer = get(server.address, ROUTE).await;
    let found = read(&answer);
    assert_eq!(found.version, VERSION);
    assert_eq!((found.model.name.as_str(), &*found.server.state), ("muse-tiny", "ready"));
    let written = value(&found, "written_tokens").expect("counted");
    assert!(written >= 12.0 && written % 3.0 == 0.0, "{written}");
    assert_eq!(value(&found, "answers"), Some(3.0));
    assert_eq!(value(&found, "errors"), Some(2.0));
    assert_eq!(value(&found, "own_errors"), Some(0.0));
    let next = value(&found, "next_token_p50").expect("tokens came after one another");
    assert!((0.001..0.1).contains(&next), "{next}");
    assert!(value(&found, "first_token_p95").is_some_and(|first| first > 0.0 && first < 5.0));
    assert_eq!(value(&found, "running"), Some(0.0));
    assert_eq!(value(&found, "bandwidth"), None, "nobody told it of the machine");
    let errors: Vec<_> =
        found.errors.list.iter().map(|error| (error.status, error.last_hour, error.total)).collect();
    assert_eq!(errors.len(), 2);
    assert!(errors.contains(&(400, 1, 1)) && errors.contains(&(404, 1, 1)), "{errors:?}");
    for word in ["secret", "plan", "my words", "nowhere", "a b c d"] {
        assert!(!answer.text().contains(word), "{word} in {}", answer.text());
    }
    // Every figure has its mark, and all three are used.
    assert_eq!(found.figures.len(), FIGURES.len());
    for mark in [Mark::Measured, Mark::Derived, Mark::Estimated] {
        assert!(found.figures.iter().any(|figure| figure.mark == mark), "{mark:?}");
    }
    server.stop().await;
}

#[tokio::test]
async fn rows_are_kept_and_only_new_ones_are_sent() {
    let server = Running::saying(SAYS).await;
    assert!(report(&server).await.history.rows.is_empty());
    for _ in 0..2 {
        post(server.address, CHAT, &asked()).await;
        server.app.sample();
    }
    let history = report(&server).await.history;
    assert_eq!((history.first, history.newest, history.rows.len()), (1, 2, 2));
    let written = history.columns.iter().position(|column| column.id == "written").expect("a column");
    assert!(history.rows.iter().all(|row| row.len() == history.columns.len()));
    assert!(history.rows.iter().all(|row| row[written].is_some_and(|rate| rate > 0.0)), "{:?}", history.rows);
    for (since, first, rows) in
        [("1", 2, 1), ("2", 3, 0), ("99", 100, 0), ("18446744073709551615", u64::MAX, 0)]
    {
        let history = read(&get(server.address, &format!("{ROUTE}?since={since}")).await).history;
        assert_eq!((history.first, history.newest, history.rows.len()), (first, 2, rows), "{since}");
    }
    for wrong in ["since=x", "since=-1", "since="] {
        let answer = get(server.address, &format!("{ROUTE}?{wrong}")).await;
        assert_eq!(
            (answer.status, answer.json()["error"]["param"].as_str()),
            (400, Some("since")),
            "{wrong}"
        );
    }
    // However long the server runs, the answer does not grow.
    for _ in 0..500 {
        server.app.sample();
    }
    let answer = get(server.address, ROUTE).await;
    let history = read(&answer).history;
    assert_eq!((history.rows.len(), history.first, history.newest), (360, 143, 502));
    assert!(answer.body.len() < 64 << 10, "{}", answer.body.len());
    server.stop().await;
}

/// It is asked for when something is wrong, so that is when it has to answer.
#[tokio::test]
async fn it_answers_as_the_server_stops_and_when_the_device_is_gone() {
    let empty = Running::empty(ServerConfig::default()).await;
    assert_eq!(get(empty.address, ROUTE).await.status, 503, "there is nothing to say yet");
    empty.stop().await;

    let engine = Scripted::new(|_| Script { pace: Duration::from_millis(300), ..Script::saying(SAYS) });
    let lost = engine.lost.clone();
    let server = Running::scripted(ServerConfig::default(), engine).await;
    *lost.lock().expect("lock") = Some("the card fell off the bus".into());
    let found = report(&server).await;
    assert_eq!(&*found.server.state, "lost");
    assert_eq!(found.server.reason.as_deref(), Some("the card fell off the bus"));
    *lost.lock().expect("lock") = None;

    let (address, app) = (server.address, server.app.clone());
    let body = asked().to_string();
    let _running = send(address, "POST", CHAT, "content-type: application/json\r\n", body.as_bytes()).await;
    sleep(Duration::from_millis(100)).await;
    let stopping = tokio::spawn(server.stop());
    timeout(Duration::from_secs(2), async {
        while !app.is_stopping() {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("it stops");
    assert_eq!(&*read(&get(address, ROUTE).await).server.state, "stopping");
    stopping.await.expect("stopped");
}

#[tokio::test]
async fn sizes_and_addresses_are_their_owners() {
    let node =
        || NodePart { name: "desk".into(), fault: Some("10.0.0.7: refused".into()), ..NodePart::default() };
    for shared in [false, true] {
        let slow = Scripted::new(|_| Script { pace: Duration::from_millis(500), ..Script::saying(SAYS) });
        let (server, _folder) = keyed(slow, shared).await;
        server.app.attach_nodes(Desk(node()));
        assert_eq!(get(server.address, ROUTE).await.status, 401);
        let key = "authorization: Bearer secret-one\r\n";
        let body = asked().to_string();
        let running = send(server.address, "POST", CHAT, key, body.as_bytes()).await;
        sleep(Duration::from_millis(200)).await;
        let found = read(&request(server.address, "GET", ROUTE, key, b"").await);
        let states: Vec<&str> = found.slots.list.iter().map(|slot| &*slot.state).collect();
        assert_eq!(states, [if shared { "writing" } else { "busy" }, "idle", "idle", "idle"]);
        assert_eq!(found.nodes.list[0].name, "desk");
        assert_eq!(found.nodes.list[0].fault.is_some(), shared);
        let slots = request(server.address, "GET", "/slots", key, b"").await.json();
        let handoff = json!({
            "node": "desk",
            "n_prompt_tokens": if shared { 900 } else { 0 },
            "n_rows": if shared { 512 } else { 0 },
            "n_bytes": if shared { 77 } else { 0 },
        });
        assert_eq!(slots[0]["handoffs"], json!([handoff]));
        let metrics = request(server.address, "GET", "/metrics", key, b"").await;
        let metrics = metrics.text();
        assert!(metrics.contains("outcome=\"given\"} 4") && metrics.contains("node=\"desk\""), "{metrics}");
        assert!(!metrics.contains("10.0.0.7"), "{metrics}");
        drop(running);
        server.stop().await;
    }
}

#[tokio::test]
async fn the_memory_is_measured_while_nothing_runs() {
    let slow = Scripted::new(|_| Script { pace: Duration::from_millis(20), ..Script::saying(SAYS) });
    let running = slow.running.clone();
    let server = Running::scripted(ServerConfig::default(), slow).await;
    server.app.attach_machine(Machine::new(1_000_000, Bandwidth::WhenIdle(Box::new(|| Some(2e9)))));
    let stream = send(server.address, "POST", CHAT, "", asked().to_string().as_bytes()).await;
    let is_running = || running.load(std::sync::atomic::Ordering::SeqCst) > 0;
    while !is_running() {
        sleep(Duration::from_millis(1)).await;
    }
    let busy = report(&server).await;
    sleep(Duration::from_millis(20)).await;
    assert_eq!(value(&busy, "bandwidth"), None);
    assert!(
        server.app.machine().is_some_and(|machine| machine.is_unmeasured()),
        "somebody would have waited"
    );
    drop(stream);
    let measured = async {
        loop {
            let found = report(&server).await;
            if value(&found, "bandwidth").is_some() {
                return found;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    let found = timeout(Duration::from_secs(10), measured).await.expect("it is measured once nothing runs");
    assert_eq!((value(&found, "bandwidth"), value(&found, "most_per_s")), (Some(2e9), Some(2000.0)));
    assert_eq!(value(&found, "step_bytes"), Some(1e6));
    server.stop().await;
}

/// A real engine: what it saved and how busy it was.
#[tokio::test(flavor = "multi_thread")]
async fn a_real_engine_says_what_a_known_prefix_saved() {
    let server = support::tiny::serve().await;
    let before = report(&server).await;
    let body =
        json!({"prompt": "The fox went to the river again. ".repeat(100), "n_predict": 8, "temperature": 0});
    for _ in 0..2 {
        assert_eq!(post(server.address, "/completion", &body).await.status, 200);
    }
    let found = report(&server).await;
    let grew = |id: &str| value(&found, id).unwrap_or(0.0) - value(&before, id).unwrap_or(0.0);
    assert!(grew("reused_tokens") >= 256.0, "{}", grew("reused_tokens"));
    assert!(grew("saved") > 0.0, "{}", grew("saved"));
    assert!(value(&found, "busy_share").is_some_and(|share| share > 0.0 && share <= 1.0));
    assert!(value(&found, "kv_total").is_some_and(|bytes| bytes > 0.0));
    assert!(value(&found, "reused_share").is_some_and(|share| share > 0.1 && share < 1.0));
    #[cfg(target_os = "linux")]
    assert!(value(&found, "process").is_some_and(|bytes| bytes > 1e6));
    server.stop().await;
}
