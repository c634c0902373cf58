//! Packs through the whole server with the bundled model: what was computed before a restart is not computed again, the
//! text stays the same, and a store that cannot be used costs time and nothing else.

#![allow(clippy::needless_pass_by_value, reason = "JSON values are written where they are used")]

mod support;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use muser_engine::{EngineConfig, EngineHandle, Shutdown};
use muser_server::ServerConfig;
use serde_json::{Value, json};
use support::{Running, get, post, request, tiny};

const CHAT: &str = "/v1/chat/completions";

struct Kept {
    server: Running,
    engine: EngineHandle,
}

/// A server with packs in `folder`.
async fn start(folder: &Path) -> Kept {
    let (engine, facts, packs) = tiny::spawn_with_packs(folder, EngineConfig::default());
    let server = Running::empty(ServerConfig::default()).await;
    server.app.attach_packs(packs);
    let device = format!("{}: {}", engine.info().backend, engine.info().device);
    let backend = std::sync::Arc::new(muser_server::LiveEngine::new(engine.clone(), device));
    server.app.load(facts, support::text(), backend);
    Kept { server, engine }
}

impl Kept {
    /// Ends at once, as a crash would as far as memory goes.
    async fn stop(self) {
        self.engine.shut_down(Shutdown::Cancel);
        self.server.stop().await;
        assert!(self.engine.join(Duration::from_secs(10)), "the engine ends");
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        let answer = post(self.server.address, path, &body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()
    }

    async fn metric(&self, name: &str) -> f64 {
        let text = get(self.server.address, "/metrics").await.text().to_owned();
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }
}

/// A conversation of about 1,300 tokens.
fn long() -> Vec<Value> {
    let story: String = vec!["The fox number one runs over the hill, and number two does not. "; 80].concat();
    vec![
        json!({"role": "system", "content": "Remember violet harbours."}),
        json!({"role": "user", "content": story}),
    ]
}

fn with_one_word_more() -> Value {
    let mut messages = long();
    messages.push(json!({"role": "assistant", "content": "I see."}));
    messages.push(json!({"role": "user", "content": "Go on."}));
    json!({"messages": messages, "temperature": 0, "max_tokens": 24, "reasoning_effort": "none"})
}

fn text(answer: &Value) -> String {
    answer["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
}

fn details(answer: &Value, name: &str) -> u64 {
    answer["usage"]["prompt_tokens_details"][name].as_u64().unwrap_or_else(|| panic!("{name} in {answer}"))
}

/// Every file below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// K1 over HTTP: save, new process, restore, the same and one word more.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_goes_on_after_a_restart() {
    let folder = tempfile::tempdir().expect("folder");
    let first = start(folder.path()).await;
    let expected = text(&first.post(CHAT, with_one_word_more()).await);
    let saved = first
        .post("/v1/sessions", json!({"name": "fox", "messages": long(), "reasoning_effort": "none"}))
        .await;
    let tokens = saved["tokens"].as_u64().expect("a count");
    assert!((1000..2500).contains(&tokens), "{tokens}");
    assert!(saved["pack"]["tokens"].as_u64() > Some(tokens - 256), "{saved}");
    first.stop().await;

    // Neither names nor bytes of the store show the conversation or the session's name.
    for path in files(&folder.path().join("packs")) {
        let shown = path.to_string_lossy().to_ascii_lowercase();
        assert!(!shown.contains("fox") && !shown.contains("violet"), "{shown}");
        let bytes = std::fs::read(&path).expect("readable");
        for word in ["violet", "fox number"] {
            assert!(!bytes.windows(word.len()).any(|window| window == word.as_bytes()), "{word} in {shown}");
        }
    }

    let second = start(folder.path()).await;
    let restored = second.post("/v1/sessions/fox/restore", json!({})).await;
    assert_eq!(restored["messages"], json!(long()));
    assert!(details(&restored, "restored_tokens") > tokens - 256, "{restored}");
    let again = second.post(CHAT, with_one_word_more()).await;
    assert_eq!(text(&again), expected);
    // Only the tail was computed: what the restored prompt does not share, and the words behind it.
    let prompt = again["usage"]["prompt_tokens"].as_u64().expect("a count");
    assert!(details(&again, "cached_tokens") + 300 > prompt, "{again}");
    assert!(details(&again, "cached_tokens") + 64 > tokens - 256, "{again}");
    assert!(second.metric("vllm:external_prefix_cache_hits_total").await > (tokens - 256) as f64);
    let computed = again["timings"]["prompt_n"].as_u64().expect("a count");
    assert!(computed < 300, "{computed} tokens were computed");
    second.stop().await;
}

/// Without any session: a prompt of yesterday is found by itself, and K9's billing numbers do not hide it.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_found_again_after_a_restart() {
    let folder = tempfile::tempdir().expect("folder");
    let body = |nonce: &str| {
        json!({"max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}], "system": [
            {"type": "text", "text": format!("x-anthropic-billing-header: cch={nonce};")},
            {"type": "text", "text": long()[1]["content"]},
        ]})
    };
    let first = start(folder.path()).await;
    let cold = first.post("/v1/messages", body("1111")).await;
    assert_eq!(cold["usage"]["cache_read_input_tokens"], 0);
    let begun = Instant::now();
    while first.metric("muser:packs").await < 1.0 {
        assert!(begun.elapsed() < Duration::from_mins(1), "nothing was published");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    first.stop().await;
    let second = start(folder.path()).await;
    let warm = second.post("/v1/messages", body("2222")).await;
    assert_eq!(warm["content"], cold["content"]);
    let tokens = cold["usage"]["input_tokens"].as_u64().expect("a count");
    assert!(warm["usage"]["cache_read_input_tokens"].as_u64() > Some(tokens - 256), "{warm}");
    assert!(second.metric("vllm:external_prefix_cache_hits_total").await > 900.0);
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_file_survives_a_restart() {
    let folder = tempfile::tempdir().expect("folder");
    let body = json!({"prompt": long()[1]["content"], "n_predict": 8, "temperature": 0, "id_slot": 2});
    let first = start(folder.path()).await;
    let expected = first.post("/completion", body.clone()).await["content"].clone();
    let saved = first.post("/slots/2?action=save", json!({"filename": "fox.bin"})).await;
    let tokens = saved["n_saved"].as_u64().expect("a count");
    assert!(tokens > 900 && saved["n_written"].as_u64() > Some(1 << 20), "{saved}");
    first.stop().await;
    let second = start(folder.path()).await;
    let restored = second.post("/slots/0?action=restore", json!({"filename": "fox.bin"})).await;
    assert!(restored["n_restored"].as_u64() > Some(tokens - 256), "{restored}");
    let again = second.post("/completion", body).await;
    assert_eq!(again["content"], expected);
    assert!(again["tokens_cached"].as_u64() > Some(tokens - 256), "{again}");
    second.stop().await;
}

/// Damaged bytes are computed instead, counted, and nobody is told but the metrics.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_packs_cost_time_and_nothing_else() {
    let folder = tempfile::tempdir().expect("folder");
    let first = start(folder.path()).await;
    let expected = text(&first.post(CHAT, with_one_word_more()).await);
    let body = json!({"name": "fox", "messages": long(), "reasoning_effort": "none"});
    first.post("/v1/sessions", body).await;
    first.stop().await;
    let mut damaged = 0;
    for path in files(&folder.path().join("packs")) {
        let mut bytes = std::fs::read(&path).expect("readable");
        // Segments are by far the largest; each gets a wrong bit in its middle.
        if bytes.len() > 100_000 {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::write(&path, bytes).expect("writable");
            damaged += 1;
        }
    }
    assert!(damaged > 5, "{damaged} files");
    let second = start(folder.path()).await;
    let restored = second.post("/v1/sessions/fox/restore", json!({})).await;
    assert_eq!((details(&restored, "restored_tokens"), &restored["messages"]), (0, &json!(long())));
    assert_eq!(text(&second.post(CHAT, with_one_word_more()).await), expected);
    assert!(second.metric("muser:restores_failed_total").await >= 1.0);
    assert!(second.metric("muser:pack_refusals_total").await >= 1.0);
    second.stop().await;
}

/// Deleting a session takes its state off the disk, not only out of the list.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_session_is_gone_after_a_restart() {
    let folder = tempfile::tempdir().expect("folder");
    let first = start(folder.path()).await;
    let body = json!({"name": "fox", "messages": long(), "reasoning_effort": "none"});
    first.post("/v1/sessions", body).await;
    let before: u64 = files(&folder.path().join("packs"))
        .iter()
        .filter_map(|path| path.metadata().ok())
        .map(|file| file.len())
        .sum();
    let deleted = request(first.server.address, "DELETE", "/v1/sessions/fox", "", b"").await;
    assert_eq!(deleted.status, 200, "{}", deleted.text());
    let after: u64 = files(&folder.path().join("packs"))
        .iter()
        .filter_map(|path| path.metadata().ok())
        .map(|file| file.len())
        .sum();
    assert!(before > 1 << 20 && after < before / 4, "{before} bytes, then {after}");
    first.stop().await;
    let second = start(folder.path()).await;
    assert_eq!(get(second.server.address, "/v1/sessions").await.json()["data"], json!([]));
    assert_eq!(get(second.server.address, "/v1/sessions/fox").await.status, 404);
    second.stop().await;
}
