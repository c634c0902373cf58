//! What one key has is not there for another: cached prefixes, packs, sessions and slots, and what is said of them.

#![allow(clippy::needless_pass_by_value, reason = "JSON values are written where they are used")]

mod support;

use std::path::Path;
use std::time::Duration;

use muser_engine::{EngineConfig, EngineHandle, Shutdown};
use muser_server::ServerConfig;
use serde_json::{Value, json};
use support::{Answer, Running, request, tiny};

const CHAT: &str = "/v1/chat/completions";

struct Shared {
    server: Running,
    engine: EngineHandle,
}

/// A server with packs in `folder` and the keys `anna`, `bert` and `carl`.
async fn start(folder: &Path, shared_cache: bool, most_keepsakes: usize) -> Shared {
    start_with(folder, shared_cache, most_keepsakes, 1 << 30).await
}

async fn start_with(folder: &Path, shared_cache: bool, most_keepsakes: usize, most_bytes: u64) -> Shared {
    let keys = folder.join("api-keys");
    std::fs::write(&keys, "anna\nbert\ncarl\n").expect("written");
    let config = ServerConfig { key_file: Some(keys), shared_cache, ..ServerConfig::default() };
    let (engine, facts, packs) = tiny::spawn_with_packs(folder, EngineConfig::default());
    let server = Running::empty(config).await;
    server.app.attach_packs(packs.with_most_keepsakes(most_keepsakes, most_bytes));
    let device = format!("{}: {}", engine.info().backend, engine.info().device);
    let backend = std::sync::Arc::new(muser_server::LiveEngine::new(engine.clone(), device));
    server.app.load(facts, support::text(), backend);
    Shared { server, engine }
}

impl Shared {
    async fn ask(&self, key: &str, method: &str, path: &str, body: Value) -> Answer {
        let headers = format!("authorization: Bearer {key}\r\ncontent-type: application/json\r\n");
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        request(self.server.address, method, path, &headers, &body).await
    }

    async fn post(&self, key: &str, path: &str, body: Value) -> Value {
        let answer = self.ask(key, "POST", path, body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()
    }

    async fn get(&self, key: &str, path: &str) -> Value {
        let answer = self.ask(key, "GET", path, Value::Null).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()
    }

    /// Tokens of a prompt that the server says it had.
    async fn cached(&self, key: &str, prompt: &str, salt: Option<&str>) -> (u64, u64) {
        let mut body =
            json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": 1, "temperature": 0});
        if let Some(salt) = salt {
            body["cache_salt"] = salt.into();
        }
        let usage = self.post(key, CHAT, body).await["usage"].clone();
        let count = |value: &Value| value.as_u64().expect("a count");
        let details = &usage["prompt_tokens_details"];
        (count(&details["cached_tokens"]), count(&usage["prompt_tokens"]))
    }

    async fn stop(self) {
        self.engine.shut_down(Shutdown::Cancel);
        self.server.stop().await;
        assert!(self.engine.join(Duration::from_secs(10)), "the engine ends");
    }
}

fn story(sentences: usize) -> String {
    vec!["The fox number one runs over the hill, and number two does not. "; sentences].concat()
}

#[tokio::test]
async fn no_key_learns_from_cached_tokens_what_another_has_sent() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = start(folder.path(), false, 10).await;
    let secret = format!("{}The password of the safe is swordfish.", story(30));
    let (first, tokens) = server.cached("anna", &secret, None).await;
    assert_eq!(first, 0);
    // Bert guesses a beginning that is shorter than a block, then all of it: only what he has sent himself is his.
    let (cached, short) = server.cached("bert", &story(3), None).await;
    assert_eq!(cached, 0, "a guess shows");
    let (cached, _) = server.cached("bert", &secret, None).await;
    assert!(cached <= short, "a guess shows: {cached}");
    assert!(server.cached("bert", &secret, None).await.0 >= tokens - 2);
    assert!(server.cached("anna", &secret, None).await.0 >= tokens - 2, "anna's own is still there");
    // A salt narrows within one key, and equal salts of different keys have nothing in common.
    assert_eq!(server.cached("anna", &secret, Some("tenant 1")).await.0, 0);
    assert!(server.cached("anna", &secret, Some("tenant 1")).await.0 > 0);
    assert_eq!(server.cached("anna", &secret, Some("tenant 2")).await.0, 0);
    assert_eq!(server.cached("bert", &secret, Some("tenant 1")).await.0, 0);
    // Nor do sizes of running requests show.
    let slots = server.get("bert", "/slots").await;
    assert!(slots.as_array().expect("slots").iter().all(|slot| slot["n_prompt_tokens"] == 0), "{slots}");
    server.stop().await;
    // Packs on disk are as separate, and still there for their owner after a restart.
    let server = start(folder.path(), false, 10).await;
    assert_eq!(server.cached("carl", &secret, None).await.0, 0, "whoever never sent it");
    assert!(server.cached("anna", &secret, None).await.0 >= 256, "its owner");
    server.stop().await;
}

#[tokio::test]
async fn who_trusts_each_other_may_share() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = start(folder.path(), true, 10).await;
    let prompt = story(30);
    assert_eq!(server.cached("anna", &prompt, None).await.0, 0);
    assert!(server.cached("bert", &prompt, None).await.0 > 0);
    server.stop().await;
}

#[tokio::test]
async fn sessions_packs_and_slots_belong_to_their_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = start(folder.path(), false, 2).await;
    let session =
        |name: &str, text: String| json!({"name": name, "messages": [{"role": "user", "content": text}]});
    let made = server.post("anna", "/v1/sessions", session("diary", story(30))).await;
    let pack = made["pack"]["id"].as_str().expect("long enough for a pack").to_owned();
    // Bert sees none of it, and may use the same name for one of his own.
    assert_eq!(server.get("bert", "/v1/sessions").await["data"], json!([]));
    assert_eq!(server.get("bert", "/v1/packs").await["data"], json!([]));
    assert_eq!(server.get("bert", "/v1/packs").await["held_bytes"], 0);
    let refused = [
        ("GET", "/v1/sessions/diary".to_owned(), Value::Null),
        ("POST", "/v1/sessions/diary/save".to_owned(), json!({})),
        ("POST", "/v1/sessions/diary/restore".to_owned(), Value::Null),
        ("DELETE", "/v1/sessions/diary".to_owned(), Value::Null),
        ("GET", format!("/v1/packs/{pack}"), Value::Null),
        ("POST", format!("/v1/packs/{pack}/pin"), json!({"pinned": false})),
        ("DELETE", format!("/v1/packs/{pack}"), Value::Null),
    ];
    for (method, path, body) in refused {
        assert_eq!(server.ask("bert", method, &path, body).await.status, 404, "{method} {path}");
    }
    server.post("bert", "/v1/sessions", session("diary", "Something else.".into())).await;
    let own = server.get("anna", "/v1/sessions/diary").await;
    assert_eq!(own["messages"][0]["content"], story(30));
    assert_eq!(server.get("anna", &format!("/v1/packs/{pack}")).await["pinned"], true);
    // Slots: what a request of Anna's has left in one is not Bert's to save or erase.
    let chat = json!({"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1, "id_slot": 1});
    server.post("anna", CHAT, chat).await;
    let save = server.ask("bert", "POST", "/slots/1?action=save", json!({"filename": "taken"})).await;
    assert_eq!(save.status, 400, "{}", save.text());
    assert_eq!(server.post("bert", "/slots/1?action=erase", json!({})).await["n_erased"], 0);
    server.post("anna", "/slots/1?action=save", json!({"filename": "mine"})).await;
    let restore = server.ask("bert", "POST", "/slots/1?action=restore", json!({"filename": "mine"})).await;
    assert_eq!(restore.status, 400, "{}", restore.text());
    // Each may keep two sessions; one who is full stops nobody else, and saving again is no new one.
    server.post("anna", "/v1/sessions", session("second", "b".into())).await;
    let full = server.ask("anna", "POST", "/v1/sessions", session("third", "c".into())).await;
    assert_eq!((full.status, full.json()["error"]["code"].clone()), (507, json!("over_quota")));
    server
        .post("anna", "/v1/sessions/second/save", json!({"messages": [{"role": "user", "content": "d"}]}))
        .await;
    server.post("bert", "/v1/sessions", session("second", "b".into())).await;
    assert_eq!(server.ask("anna", "DELETE", "/v1/sessions/second", Value::Null).await.status, 200);
    server.post("anna", "/v1/sessions", session("third", "c".into())).await;
    server.stop().await;
    let server = start(folder.path(), false, 2).await;
    assert_eq!(server.get("anna", "/v1/sessions/diary").await["messages"][0]["content"], story(30));
    assert_eq!(server.get("bert", "/v1/sessions/diary").await["messages"][0]["content"], "Something else.");
    server.stop().await;
}

#[tokio::test]
async fn of_several_that_create_one_session_one_does() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = start(folder.path(), false, 10).await;
    let server = &server;
    for round in 0..3 {
        let name = format!("race {round}");
        let create = |i: usize| {
            let body = json!({"name": name, "messages": [{"role": "user", "content": format!("{round} {i} {}", story(25))}]});
            async move { server.ask("anna", "POST", "/v1/sessions", body).await.status }
        };
        let all = futures_util::future::join_all((0..8).map(create)).await;
        let count = |status: u16| all.iter().filter(|found| **found == status).count();
        assert_eq!((count(200), count(409)), (1, 7), "{all:?}");
        // Nothing that the losers pinned stays pinned.
        let packs = server.get("anna", "/v1/packs").await;
        let pinned =
            packs["data"].as_array().expect("packs").iter().filter(|pack| pack["pinned"] == true).count();
        assert_eq!(pinned, round + 1, "{packs}");
    }
    // A save of what was deleted meanwhile brings nothing back.
    let body = json!({"messages": [{"role": "user", "content": story(40)}]});
    let save = server.ask("anna", "POST", "/v1/sessions/race%200/save", body);
    let delete = async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        server.ask("anna", "DELETE", "/v1/sessions/race%200", Value::Null).await
    };
    let (save, delete) = tokio::join!(save, delete);
    assert_eq!(delete.status, 200, "{}", delete.text());
    let left = server.ask("anna", "GET", "/v1/sessions/race%200", Value::Null).await.status;
    assert!((save.status, left) == (409, 404) || (save.status, left) == (200, 404), "{} {left}", save.status);
}

/// What one key keeps is bounded in bytes too, whether by many sessions or by one that grows; what was there stays.
#[tokio::test]
async fn a_key_fills_its_own_share_and_no_more() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = start_with(folder.path(), false, 10, 6_000).await;
    let messages =
        |text: &str, bytes: usize| json!([{"role": "user", "content": text.repeat(bytes / text.len())}]);
    let create = |name: &str, bytes: usize| json!({"name": name, "messages": messages("a b c d ", bytes)});
    server.post("anna", "/v1/sessions", create("first", 2_700)).await;
    server.post("anna", "/v1/sessions", create("second", 2_700)).await;
    let over = |answer: Answer| {
        assert_eq!((answer.status, answer.json()["error"]["code"].clone()), (507, json!("over_quota")));
    };
    over(server.ask("anna", "POST", "/v1/sessions", create("third", 1_200)).await);
    let grown = json!({"messages": messages("a b c d ", 3_600)});
    over(server.ask("anna", "POST", "/v1/sessions/second/save", grown).await);
    let kept = server.get("anna", "/v1/sessions/second").await;
    assert_eq!(kept["messages"], messages("a b c d ", 2_700));
    // Nothing stays pinned for what was refused.
    let packs = server.get("anna", "/v1/packs").await;
    let pinned =
        packs["data"].as_array().expect("packs").iter().filter(|pack| pack["pinned"] == true).count();
    assert!(pinned <= 2, "{packs}");
    // One that shrinks makes room, another key has its own share, and so have saved slots.
    server.post("anna", "/v1/sessions/second/save", json!({"messages": messages("a b c d ", 300)})).await;
    server.post("anna", "/v1/sessions", create("third", 1_200)).await;
    server.post("bert", "/v1/sessions", create("first", 2_700)).await;
    let chat = json!({"messages": messages("a b c d ", 800), "max_tokens": 1, "id_slot": 1});
    server.post("anna", CHAT, chat).await;
    server.post("anna", "/slots/1?action=save", json!({"filename": "mine"})).await;
    server.stop().await;
}
