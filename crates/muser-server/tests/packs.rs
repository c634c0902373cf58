//! Packs, sessions and slot files over a scripted engine and a store in memory. The engine's half, and that a restart
//! changes nothing, is in `restart`.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use muser_kv::{BLOCK_LEN, KvGroup, PositionKey};
use muser_pack::{
    Geometry, Identity, KeyRing, LayerKind, Library, LibraryOptions, MemoryStore, Positions, Representation,
};
use muser_server::{Packs, ServerConfig};
use serde_json::{Value, json};
use support::{Answer, Running, Script, Scripted, get, post, request};

const CHAT: &str = "/v1/chat/completions";
const SAYS: &str = " to=user<|message|>ok<|eot|>";
const BLOCK_BYTES: usize = 1024;

fn identity() -> Identity {
    Identity {
        weights: [1; 32],
        architecture: b"scripted".to_vec(),
        quantisation: "none".into(),
        adapters: Vec::new(),
        tokenizer: [2; 32],
        template: [3; 32],
        positions: Positions {
            rotary_base_bits: 0,
            pairing: "interleaved".into(),
            scaling: "none".into(),
            rotating: vec![true, false],
            origin: 0,
        },
        geometry: Geometry {
            layers: vec![LayerKind::Sliding, LayerKind::Full],
            window: 256,
            kv_heads: 1,
            head_dim: 1,
            block_len: BLOCK_LEN as u32,
        },
        scalars: Vec::new(),
        context_policy: "refuse".into(),
        media: None,
        draft: None,
        representation: Representation {
            route: "script".into(),
            kv_type: "f16".into(),
            layout: "none".into(),
            row_bytes: 2,
            full_block_bytes: BLOCK_BYTES as u32,
            sliding_block_bytes: BLOCK_BYTES as u32,
        },
    }
}

/// A library in memory.
fn library() -> Library {
    let keys = KeyRing::generate().expect("random numbers");
    Library::open(Arc::new(MemoryStore::new()), keys, LibraryOptions::default()).expect("opens")
}

/// A server whose engine publishes the whole blocks of the prompt it read last, when it is waited for.
async fn serve(library: &Library, engine: &Scripted) -> Running {
    let server = Running::empty(ServerConfig::default()).await;
    let scope = library.scope(identity(), "");
    let publish = {
        let (library, scope, engine) = (library.clone(), scope.clone(), engine.clone());
        move |_: Duration| {
            let ids = engine.last().ids;
            let units: Vec<PositionKey> =
                ids[..ids.len() / BLOCK_LEN * BLOCK_LEN].iter().copied().map(PositionKey::token).collect();
            if !units.is_empty() {
                let mut publication = library.begin_publish(&scope, &units).expect("room");
                for wanted in publication.wanted() {
                    let fill = if wanted.group == KvGroup::Full { 1 } else { 2 };
                    publication.put(wanted.group, wanted.index, &[fill; BLOCK_BYTES]).expect("put");
                }
                publication.commit(false).expect("published");
            }
            true
        }
    };
    server.app.attach_packs(Packs::new(library.clone(), scope, publish));
    server.app.load(support::facts(), support::text(), Arc::new(engine.clone()));
    server
}

fn engine() -> Scripted {
    Scripted::new(|_| Script { cached: 3, ..Script::saying(SAYS) })
}

/// A conversation of some hundred tokens for each sentence.
fn messages(sentences: usize) -> Value {
    json!([
        {"role": "system", "content": "A secret phrase: violet harbour."},
        {"role": "user", "content": "The quick brown fox jumps over the lazy dog. ".repeat(10 * sentences)},
    ])
}

async fn delete(server: &Running, path: &str) -> Answer {
    request(server.address, "DELETE", path, "", b"").await
}

#[tokio::test]
async fn without_packs_the_routes_say_so() {
    let server = Running::saying(SAYS).await;
    for (method, path) in [
        ("GET", "/v1/packs"),
        ("DELETE", "/v1/packs/00"),
        ("GET", "/v1/sessions"),
        ("POST", "/v1/sessions"),
        ("POST", "/v1/sessions/a/restore"),
        ("POST", "/slots/0?action=save"),
    ] {
        let answer = request(server.address, method, path, "", b"{}").await;
        assert_eq!(
            (answer.status, answer.json()["error"]["code"].as_str()),
            (400, Some("not_enabled")),
            "{path}"
        );
    }
    assert!(get(server.address, "/status").await.json()["packs"].is_null());
    server.stop().await;
}

#[tokio::test]
async fn a_session_is_kept_found_and_forgotten() {
    let (library, engine) = (library(), engine());
    let server = serve(&library, &engine).await;
    let created =
        post(server.address, "/v1/sessions", &json!({"name": "fox", "messages": messages(10)})).await;
    assert_eq!(created.status, 200, "{}", created.text());
    let session = created.json();
    let tokens = session["tokens"].as_u64().expect("a count");
    assert!(tokens > 600, "{tokens}");
    assert_eq!(session["pack"]["tokens"].as_u64(), Some(tokens / 256 * 256));
    assert_eq!(session["message_count"], 2);
    // The prompt is the one that a chat request with these messages would have.
    let saved_ids = engine.last().ids;
    post(server.address, CHAT, &json!({"messages": messages(10)})).await;
    assert_eq!(engine.last().ids, saved_ids);
    assert_eq!(engine.seen.lock().expect("lock")[0].max_tokens, Some(0));

    let packs = get(server.address, "/v1/packs").await.json();
    assert_eq!((&packs["data"][0]["pinned"], &packs["data"][0]["usable"]), (&json!(true), &json!(true)));
    assert_eq!(packs["data"][0]["id"], session["pack"]["id"]);
    assert!(packs["held_bytes"].as_u64() > Some(0));

    let again = post(server.address, "/v1/sessions", &json!({"name": "fox"})).await;
    assert_eq!((again.status, again.header("x-should-retry")), (409, Some("false")));
    let list = get(server.address, "/v1/sessions").await.json();
    assert_eq!((&list["data"][0]["name"], list["data"].as_array().map(Vec::len)), (&json!("fox"), Some(1)));
    assert!(!list.to_string().contains("violet"), "a list holds no messages");

    // A new process over the same store.
    server.stop().await;
    let server = serve(&library, &engine).await;
    let shown = get(server.address, "/v1/sessions/fox").await.json();
    assert_eq!(shown["messages"], messages(10));
    let restored = post(server.address, "/v1/sessions/fox/restore", &json!({})).await.json();
    assert_eq!(restored["messages"], messages(10));
    assert_eq!(engine.last().ids, saved_ids);
    assert_eq!(restored["usage"]["prompt_tokens_details"]["cached_tokens"], 3);

    // Longer messages: the pack is another one, and the old one is let go.
    let saved =
        post(server.address, "/v1/sessions/fox/save", &json!({"messages": messages(20)})).await.json();
    assert_ne!(saved["pack"]["id"], session["pack"]["id"]);
    assert_eq!(saved["created"], session["created"]);
    let packs = get(server.address, "/v1/packs").await.json();
    let pinned: Vec<&Value> =
        packs["data"].as_array().expect("list").iter().filter(|pack| pack["pinned"] == true).collect();
    assert_eq!((pinned.len(), &pinned[0]["id"]), (1, &saved["pack"]["id"]));
    let same = post(server.address, "/v1/sessions/fox/save", &json!({})).await.json();
    assert_eq!(same["pack"], saved["pack"]);

    assert_eq!(delete(&server, "/v1/sessions/fox").await.status, 200);
    assert_eq!(delete(&server, "/v1/sessions/fox").await.status, 404);
    assert_eq!(get(server.address, "/v1/sessions/fox").await.status, 404);
    let left = get(server.address, "/v1/packs").await.json();
    assert!(left["data"].as_array().expect("list").iter().all(|pack| pack["id"] != saved["pack"]["id"]));
    server.stop().await;
}

#[tokio::test]
async fn a_pack_that_another_session_needs_stays() {
    let (library, engine) = (library(), engine());
    let server = serve(&library, &engine).await;
    for name in ["one", "two"] {
        let body = json!({"name": name, "messages": messages(10)});
        assert_eq!(post(server.address, "/v1/sessions", &body).await.status, 200);
    }
    let packs = async || get(server.address, "/v1/packs").await.json()["data"].as_array().map_or(0, Vec::len);
    assert_eq!(packs().await, 1);
    assert_eq!(delete(&server, "/v1/sessions/one").await.status, 200);
    assert_eq!(packs().await, 1);
    assert_eq!(delete(&server, "/v1/sessions/two").await.status, 200);
    assert_eq!(packs().await, 0);
    server.stop().await;
}

#[tokio::test]
async fn names_are_checked_and_short_sessions_need_no_pack() {
    let (library, engine) = (library(), engine());
    let server = serve(&library, &engine).await;
    for name in ["../x", "a/b", "", ".x", "a\u{0}b", &"x".repeat(200)] {
        let answer = post(server.address, "/v1/sessions", &json!({"name": name})).await;
        assert_eq!(
            (answer.status, answer.json()["error"]["param"].as_str()),
            (400, Some("name")),
            "{name:?}"
        );
        let slot = post(server.address, "/slots/0?action=restore", &json!({"filename": name})).await;
        assert_eq!(
            (slot.status, slot.json()["error"]["param"].as_str()),
            (400, Some("filename")),
            "{name:?}"
        );
    }
    for path in ["/v1/sessions/..%2fx", "/v1/sessions/.x"] {
        assert_eq!(get(server.address, path).await.status, 400, "{path}");
    }
    let unnamed = post(server.address, "/v1/sessions", &json!({})).await.json();
    assert!(unnamed["name"].as_str().is_some_and(|name| name.starts_with("session-")));
    let body = json!({"name": "short", "messages": [{"role": "user", "content": "Hi"}]});
    let short = post(server.address, "/v1/sessions", &body).await.json();
    assert!(short["pack"].is_null() && short["tokens"].as_u64() > Some(3), "{short}");
    assert_eq!(post(server.address, "/v1/sessions/short/restore", &json!({})).await.status, 200);
    let bad = json!({"name": "bad", "messages": [{"role": "foo", "content": "x"}]});
    let bad = post(server.address, "/v1/sessions", &bad).await;
    assert_eq!((bad.status, bad.json()["error"]["param"].as_str()), (400, Some("messages[0].role")));
    server.stop().await;
}

#[tokio::test]
async fn packs_are_pinned_and_removed_by_name() {
    let (library, engine) = (library(), engine());
    let server = serve(&library, &engine).await;
    let session =
        post(server.address, "/v1/sessions", &json!({"name": "a", "messages": messages(10)})).await.json();
    let path = format!("/v1/packs/{}", session["pack"]["id"].as_str().expect("an id"));
    let pin =
        async |pinned: Value| post(server.address, &format!("{path}/pin"), &json!({"pinned": pinned})).await;
    assert_eq!(pin(json!(false)).await.json()["pinned"], false);
    assert_eq!(pin(json!(true)).await.json()["pinned"], true);
    assert_eq!(pin(json!("yes")).await.status, 400);
    let blocks = session["pack"]["tokens"].as_u64().expect("a count") / 256;
    assert_eq!(get(server.address, &path).await.json()["segments"].as_u64(), Some(2 * blocks));
    assert_eq!(delete(&server, &path).await.status, 200);
    // Gone is gone, and a session lives without its pack.
    for (method, path) in [("GET", path.as_str()), ("DELETE", &path), ("GET", "/v1/packs/xyz")] {
        assert_eq!(request(server.address, method, path, "", b"").await.status, 404, "{path}");
    }
    assert_eq!(pin(json!(true)).await.status, 404);
    assert_eq!(post(server.address, "/v1/sessions/a/restore", &json!({})).await.status, 200);
    assert_eq!(delete(&server, "/v1/sessions/a").await.status, 200);
    server.stop().await;
}

#[tokio::test]
async fn a_slot_is_saved_under_a_file_name_as_in_llama_server() {
    let (library, engine) = (library(), engine());
    let server = serve(&library, &engine).await;
    let act = async |slot: &str, action: &str, body: Value| {
        post(server.address, &format!("/slots/{slot}?action={action}"), &body).await
    };
    let file = json!({"filename": "my slot.bin"});
    assert_eq!(act("1", "save", file.clone()).await.status, 400, "nothing there yet");
    let body = json!({"prompt": "one two three ".repeat(200), "id_slot": 1, "n_predict": 4});
    assert_eq!(post(server.address, "/completion", &body).await.status, 200);
    let read = engine.last().ids;
    let saved = act("1", "save", file.clone()).await.json();
    assert_eq!((&saved["id_slot"], &saved["filename"]), (&json!(1), &json!("my slot.bin")));
    let whole_blocks = saved["n_saved"].as_u64().expect("a count");
    assert!(
        whole_blocks > 256 && whole_blocks % 256 == 0 && saved["n_written"].as_u64() > Some(0),
        "{saved}"
    );
    // What was generated is part of the slot.
    assert!(engine.last().ids.starts_with(&read) && engine.last().ids.len() > read.len());
    let erased = act("1", "erase", json!({})).await.json();
    assert_eq!(erased["n_erased"].as_u64(), Some(engine.last().ids.len() as u64));
    assert_eq!(act("1", "save", file.clone()).await.status, 400);

    let held = engine.last().ids;
    let restored = act("2", "restore", file.clone()).await.json();
    assert_eq!((&restored["n_restored"], &restored["id_slot"]), (&json!(3), &json!(2)), "{restored}");
    assert_eq!(engine.last().ids, held);
    assert_eq!(act("2", "save", json!({"filename": "copy"})).await.status, 200);
    for (slot, action, body) in [
        ("9", "save", file.clone()),
        ("x", "save", file.clone()),
        ("0", "dance", file.clone()),
        ("0", "restore", json!({})),
        ("0", "restore", json!({"filename": "none"})),
        ("0", "restore", json!({"filename": 3})),
    ] {
        assert_eq!(act(slot, action, body).await.status, 400, "{slot} {action}");
    }
    assert_eq!(engine.running.load(Ordering::SeqCst), 0);
    server.stop().await;
}

#[tokio::test]
async fn metrics_and_status_tell_of_packs() {
    let (library, engine) = (library(), engine());
    let server = serve(&library, &engine).await;
    post(server.address, "/v1/sessions", &json!({"name": "a", "messages": messages(10)})).await;
    let text = get(server.address, "/metrics").await.text().to_owned();
    assert!(text.contains("muser:packs{model_name=\"muse-tiny\"} 1\n"), "{text}");
    assert!(text.contains("vllm:external_prefix_cache_queries_total"));
    assert_eq!(get(server.address, "/status").await.json()["packs"]["count"], 1);
    server.stop().await;
}
