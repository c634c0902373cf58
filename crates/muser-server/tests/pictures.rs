//! Pictures through every API, with the bundled model and its projector on the CPU.

#![allow(clippy::needless_pass_by_value, reason = "JSON values are written where they are used")]

mod support;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use muser_engine::{EngineConfig, EngineHandle};
use muser_server::ServerConfig;
use serde_json::{Value, json};
use support::tiny::{serve_with, spawn_seeing};
use support::{Answer, Running, get, model_path, post};

const CHAT: &str = "/v1/chat/completions";
const QUESTION: &str = "What color is the background?";

/// A drawn scene of 140x280 pixels: 50 tokens.
fn demo() -> String {
    STANDARD.encode(std::fs::read(model_path().with_file_name("muse-tiny-demo.jpg")).expect("the picture"))
}

/// A PNG that the tests of preprocessing have.
fn png() -> Vec<u8> {
    let path = model_path().with_file_name("../crates/muser-image/tests/golden/11.png");
    std::fs::read(path).expect("the picture")
}

fn url() -> String {
    format!("data:image/jpeg;base64,{}", demo())
}

async fn server() -> (Running, EngineHandle) {
    let (engine, facts) = spawn_seeing(EngineConfig::default());
    (serve_with(ServerConfig::default(), &engine, &facts).await, engine)
}

fn ask(parts: Value) -> Value {
    json!({
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0, "max_tokens": 24, "reasoning_effort": "none",
    })
}

fn image(more: Value) -> Value {
    let mut image = json!({"url": url()});
    image.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
    json!({"type": "image_url", "image_url": image})
}

fn question() -> Value {
    json!([image(json!({})), {"type": "text", "text": QUESTION}])
}

fn whole(answer: Answer) -> Value {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn refused(answer: &Answer, place: &str, said: &str) {
    let text = answer.text();
    assert_eq!(answer.status, 400, "{place}: {text}");
    assert!(text.contains(place) && text.contains(said), "{place}, {said}: {text}");
}

#[tokio::test]
async fn every_api_shows_the_same_picture() {
    let (server, engine) = server().await;
    let chat = whole(post(server.address, CHAT, &ask(question())).await);
    let text = chat["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
    assert_eq!(text, "The background is orange.");
    assert_eq!(chat["usage"]["prompt_tokens_details"]["image_tokens"], 50);
    let tokens = chat["usage"]["prompt_tokens"].as_u64().expect("a number");

    let input = json!([{"role": "user", "content": [
        {"type": "input_image", "image_url": url()}, {"type": "input_text", "text": QUESTION}]}]);
    let body =
        json!({"input": input, "temperature": 0, "max_output_tokens": 24, "reasoning": {"effort": "none"}});
    let answer = whole(post(server.address, "/v1/responses", &body).await);
    assert_eq!(answer["output"][0]["content"][0]["text"], text.as_str(), "{answer}");
    assert_eq!(answer["usage"]["input_tokens_details"]["image_tokens"], 50);

    let source = json!({"type": "base64", "media_type": "image/jpeg", "data": demo()});
    let blocks = json!([{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]);
    let messages = json!([{"role": "user", "content": blocks}]);
    let body =
        json!({"max_tokens": 24, "temperature": 0, "messages": messages, "thinking": {"type": "disabled"}});
    let answer = whole(post(server.address, "/v1/messages", &body).await);
    assert_eq!(answer["content"][0]["text"], text.as_str(), "{answer}");
    let body = json!({"messages": messages, "thinking": {"type": "disabled"}});
    let counted = whole(post(server.address, "/v1/messages/count_tokens", &body).await);
    assert_eq!(counted["input_tokens"].as_u64(), Some(tokens), "counted from the header alone");

    let options = json!({"temperature": 0, "num_predict": 24});
    let message = json!({"role": "user", "content": QUESTION, "images": [demo()]});
    let body = json!({"messages": [message], "options": options, "stream": false, "think": false});
    let answer = whole(post(server.address, "/api/chat", &body).await);
    assert_eq!(answer["message"]["content"], text.as_str(), "{answer}");
    let body =
        json!({"prompt": QUESTION, "images": [demo()], "options": options, "stream": false, "think": false});
    let answer = whole(post(server.address, "/api/generate", &body).await);
    assert_eq!(answer["response"], text.as_str(), "{answer}");

    // All of that was one prompt: the tower worked once, and no row was looked up again.
    let now = engine.metrics();
    assert_eq!((now.images_encoded, now.image_rows_encoded, now.image_cache_hits), (1, 50, 0));
    server.stop().await;
}

#[tokio::test]
async fn what_is_asked_later_knows_the_picture() {
    let (server, engine) = server().await;
    let first = whole(post(server.address, CHAT, &ask(question())).await);
    let said = &first["choices"][0]["message"]["content"];
    let mut body = ask(question());
    body["messages"].as_array_mut().expect("list").extend([
        json!({"role": "assistant", "content": said}),
        json!({"role": "user", "content": "What do you see?"}),
    ]);
    let second = whole(post(server.address, CHAT, &body).await);
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number");
    assert!(cached >= first["usage"]["prompt_tokens"].as_u64().expect("a number"), "{second}");
    assert_eq!(engine.metrics().images_encoded, 1);
    // One pixel more is another picture, and so is the same one with a lower cap.
    let low = json!([image(json!({"detail": "low"})), {"type": "text", "text": QUESTION}]);
    whole(post(server.address, CHAT, &ask(low)).await);
    assert_eq!(engine.metrics().images_encoded, 2);
    server.stop().await;
}

#[tokio::test]
async fn what_a_tool_shows_is_seen_and_two_pictures_keep_their_order() {
    let (server, _engine) = server().await;
    let call = json!({"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}});
    let tool = json!([{"type": "text", "text": "here:"}, image(json!({}))]);
    let body = json!({"temperature": 0, "max_tokens": 8, "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": tool},
    ]});
    let answer = whole(post(server.address, CHAT, &body).await);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["image_tokens"], 50);
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": demo()}}]});
    let body = json!({"max_tokens": 8, "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]},
    ]});
    whole(post(server.address, "/v1/messages", &body).await);
    let two = json!([image(json!({})), {"type": "text", "text": "and"}, image(json!({})), {"type": "text", "text": "?"}]);
    let answer = whole(post(server.address, CHAT, &ask(two)).await);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["image_tokens"], 100);
    server.stop().await;
}

#[tokio::test]
async fn llama_servers_completion_takes_pictures_at_its_markers() {
    let (server, _engine) = server().await;
    let props = whole(get(server.address, "/props").await);
    assert_eq!(props["modalities"]["vision"], true);
    let marker = props["media_marker"].as_str().expect("text");
    let body = |text: String, data: Value| json!({"prompt": {"prompt_string": text, "multimodal_data": data}, "n_predict": 4, "temperature": 0});
    let answer = post(server.address, "/completion", &body(format!("a {marker} b"), json!([demo()]))).await;
    assert!(whole(answer)["tokens_evaluated"].as_u64().is_some_and(|tokens| tokens > 52));
    for (text, data) in [(format!("a {marker}{marker}"), json!([demo()])), ("a".to_owned(), json!([demo()]))]
    {
        let answer = post(server.address, "/completion", &body(text, data)).await;
        refused(&answer, "prompt.multimodal_data", "images");
    }
    // As text the marker is text.
    let plain = json!({"prompt": format!("a {marker} b"), "n_predict": 1});
    whole(post(server.address, "/completion", &plain).await);
    let show = whole(post(server.address, "/api/show", &json!({"model": "muse-tiny"})).await);
    assert!(show["capabilities"].as_array().is_some_and(|all| all.contains(&json!("vision"))));
    server.stop().await;
}

#[tokio::test]
async fn bad_pictures_are_a_400_with_their_place() {
    let (server, engine) = server().await;
    let bomb = {
        let mut png = png();
        png[16..20].copy_from_slice(&60_000u32.to_be_bytes());
        png[20..24].copy_from_slice(&60_000u32.to_be_bytes());
        STANDARD.encode(png)
    };
    let cut = STANDARD.encode(&png()[..900]);
    let cases = [
        ("http://127.0.0.1:9/x.png".to_owned(), "fetches nothing"),
        ("https://example.com/x.png".to_owned(), "fetches nothing"),
        ("file:///etc/passwd".to_owned(), "fetches nothing"),
        (format!("data:image/png;base64,{bomb}"), "60000x60000"),
        (format!("data:image/png;base64,{cut}"), "damaged"),
        ("data:image/png;base64,".to_owned(), "empty"),
        (format!("data:image/png;base64,{}", STANDARD.encode("<svg xmlns='x'/>")), "found SVG"),
        (format!("data:image/png;base64,{}", STANDARD.encode("BM000000000000")), "found BMP"),
        ("data:image/png;base64,%%%".to_owned(), "base64"),
        ("data:image/png,abc".to_owned(), "data URL"),
    ];
    for (url, said) in cases {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]);
        let answer = post(server.address, CHAT, &ask(parts)).await;
        refused(&answer, "messages[0].content[1]", said);
    }
    let file = json!([{"type": "image_url", "image_url": {"file_id": "x"}}]);
    refused(&post(server.address, CHAT, &ask(file)).await, "messages[0].content[0]", "keeps no files");
    let video = json!([{"type": "video_url", "video_url": {"url": "data:x"}}]);
    refused(&post(server.address, CHAT, &ask(video)).await, "messages[0].content[0]", "Video");
    let many: Vec<Value> = (0..33).map(|_| image(json!({}))).collect();
    refused(&post(server.address, CHAT, &ask(many.into())).await, "messages[0].content[32]", "At most 32");
    let ollama = json!({"messages": [{"role": "user", "content": "a", "images": [demo(), "!"]}]});
    refused(&post(server.address, "/api/chat", &ollama).await, "messages[0].images[1]", "base64");
    let anthropic = json!({"max_tokens": 1, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]}]});
    refused(
        &post(server.address, "/v1/messages", &anthropic).await,
        "messages[0].content[0]",
        "fetches nothing",
    );
    assert_eq!(engine.metrics().images_encoded, 0);
    // The server is as it was.
    whole(post(server.address, CHAT, &ask(question())).await);
    server.stop().await;
}

/// G17.
#[tokio::test]
async fn without_a_projector_text_is_served_and_the_file_at_fault_is_named() {
    let (engine, facts) = support::tiny::spawn(EngineConfig::default());
    let blind = Some("Images cannot be shown to this model: /m/mmproj.gguf is not usable".to_owned());
    let facts = muser_server::ModelFacts { blind, ..facts };
    let server = serve_with(ServerConfig::default(), &engine, &facts).await;
    refused(&post(server.address, CHAT, &ask(question())).await, "messages[0].content[0]", "/m/mmproj.gguf");
    whole(post(server.address, CHAT, &ask(json!("Hello"))).await);
    let props = whole(get(server.address, "/props").await);
    assert_eq!(props["modalities"]["vision"], false);
    // An agent that looked at a picture goes on.
    let source = json!({"type": "base64", "media_type": "image/jpeg", "data": demo()});
    let body = json!({"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]});
    whole(post(server.address, "/v1/messages", &body).await);
    server.stop().await;
}

/// Every kind of file that preprocessing is tested with, and every beginning of a small one: answered, or a 400 that says why. (V1, V3,
/// V5: transparent, turned by EXIF, of one pixel, 16 bits, grey, CMYK, palettes with alpha.)
#[tokio::test]
async fn whatever_comes_as_a_picture_is_answered_or_a_400() {
    let (server, engine) = server().await;
    let folder = model_path().with_file_name("../crates/muser-image/tests/golden");
    let send = async |bytes: &[u8]| {
        let url = format!("data:image/png;base64,{}", STANDARD.encode(bytes));
        let image = json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}});
        let mut body = ask(json!([image, {"type": "text", "text": "?"}]));
        body["max_tokens"] = json!(1);
        post(server.address, CHAT, &body).await
    };
    let mut files: Vec<_> = ["", "decode"]
        .iter()
        .flat_map(|name| std::fs::read_dir(folder.join(name)).expect("a folder"))
        .map(|entry| entry.expect("it is there").path())
        .filter(|path| {
            path.extension().is_some_and(|e| e != "tsv" && e != "bin" && e != "py") && path.is_file()
        })
        .collect();
    files.sort();
    assert!(files.len() > 60, "{} files", files.len());
    // Of the plain sizes every third will do: each is read by the tests of preprocessing.
    let is_plain = |path: &std::path::Path| path.parent().is_some_and(|folder| !folder.ends_with("decode"));
    let plain = files.iter().filter(|path| is_plain(path)).step_by(3);
    for path in plain.chain(files.iter().filter(|path| !is_plain(path))) {
        let bytes = std::fs::read(path).expect("read");
        if bytes.len() < 60_000 {
            let answer = send(&bytes).await;
            assert_eq!(answer.status, 200, "{}: {}", path.display(), answer.text());
        }
    }
    for (width, height) in [(1, 1), (4000, 1), (1, 4000)] {
        let answer = send(&flat_png(width, height, [9, 99, 199])).await;
        assert_eq!(answer.status, 200, "{width}x{height}: {}", answer.text());
    }
    let small = std::fs::read(folder.join("03.png")).expect("read");
    for end in (0..small.len()).step_by(7) {
        let answer = send(&small[..end]).await;
        assert!(matches!(answer.status, 200 | 400), "{end} bytes: {} {}", answer.status, answer.text());
    }
    let now = engine.metrics();
    assert_eq!((now.requests_failed, now.image_errors, now.step_panics), (0, 0, 0));
    let answer = get(server.address, "/metrics").await;
    let metrics = answer.text();
    for name in
        ["images_encoded_total", "image_rows_encoded_total", "image_cache_bytes", "tower_seconds_total"]
    {
        let line = metrics.lines().find(|line| line.starts_with(&format!("muser:{name}{{")));
        let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        assert!(value.is_some_and(|value| value > 0.0), "{name}: {line:?}");
    }
    server.stop().await;
}

/// K7: many pictures, and the rows that are kept stay within their budget.
#[tokio::test]
async fn a_hundred_pictures_stay_within_the_budget_of_rows() {
    // Rows of two tokens take 4 KB.
    let budget = 64 << 10;
    let (engine, facts) = spawn_seeing(EngineConfig {
        image_cache_bytes: budget,
        kv_bytes: Some(16 << 20),
        context: Some(2048),
        ..EngineConfig::default()
    });
    let server = serve_with(ServerConfig::default(), &engine, &facts).await;
    for number in 0..100u8 {
        let png = flat_png(56, 28, [number, 255 - number, number / 2]);
        let url = format!("data:image/png;base64,{}", STANDARD.encode(png));
        let mut body =
            ask(json!([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]));
        body["max_tokens"] = json!(1);
        whole(post(server.address, CHAT, &body).await);
        let now = engine.metrics();
        assert_eq!(now.images_encoded, u64::from(number) + 1, "no two share their rows");
        assert!(now.image_cache_bytes <= budget as u64 && now.kv_bytes_total <= 16 << 20);
    }
    assert!(engine.metrics().image_cache_bytes > 32 << 10, "what fits is kept");
    server.stop().await;
}

/// A PNG of one colour, without compression.
fn flat_png(width: u32, height: u32, colour: [u8; 3]) -> Vec<u8> {
    let rows: Vec<u8> =
        (0..height).flat_map(|_| std::iter::once(0).chain(colour.repeat(width as usize))).collect();
    let (mut a, mut b) = (1u32, 0u32);
    for byte in &rows {
        a = (a + u32::from(*byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    // One stored block.
    let len = u16::try_from(rows.len()).expect("a small picture");
    let data =
        [&[0x78, 1, 1][..], &len.to_le_bytes(), &(!len).to_le_bytes(), &rows, &(b << 16 | a).to_be_bytes()];
    let header = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    for (kind, data) in [(b"IHDR", header), (b"IDAT", data.concat()), (b"IEND", Vec::new())] {
        png.extend((data.len() as u32).to_be_bytes());
        let body = [&kind[..], &data].concat();
        let crc = body.iter().fold(!0u32, |crc, byte| {
            (0..8)
                .fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ (0xEDB8_8320 & 0u32.wrapping_sub(crc & 1)))
        });
        png.extend(body);
        png.extend((!crc).to_be_bytes());
    }
    png
}
