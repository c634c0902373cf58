//! What servers answer: the hub, storage hosts that it sends on to, and buckets. Addresses as they are typed.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use muser_hub::{Expected, Hub, ModelStore, PullOptions, Source, Token, Url, fuzzing, pull};
use muser_pack::store::{BucketOptions, BucketStore};
use muser_pack::{Area, ObjectName, PackStore as _};

use crate::{Input, Target, folder};

/// Addresses, names of files and numbers in headers.
pub const HUB_TEXT: Target = Target {
    name: "hub_text",
    about: "addresses, redirects, names, Content-Range, first bytes: two readings agree, nothing leaves its host by a redirect's form",
    run: hub_text,
    seeds: hub_text_seeds,
    words: &[
        "http://",
        "https://",
        "//",
        "?",
        "#",
        "@",
        ":443",
        "[::1]",
        "%2e",
        "..",
        "bytes ",
        "*/",
        "-00001-of-00003.gguf",
        "resolve",
        "blob",
        "huggingface.co",
        "GGUF",
    ],
    max_len: 512,
    memory: (1 << 20, 2048),
    millis: (50, 50),
};

fn hub_text(data: &[u8]) {
    let all = data.len().is_multiple_of(2);
    if let Some(fault) = fuzzing::head_fault(data, all) {
        assert!(!fault.is_empty());
        assert!(!data.starts_with(b"GGUF\x03\0\0\0") || data.len() < 24, "a good head: {fault}");
    }
    if let Some((bytes, total)) = fuzzing::content_range(data) {
        let text = std::str::from_utf8(data).expect("it was read").trim().to_owned();
        let part = bytes.map_or("*".to_owned(), |(first, last)| format!("{first}-{last}"));
        let total = total.map_or("*".to_owned(), |total| total.to_string());
        let plain: String = text.chars().filter(|c| !c.is_whitespace() && *c != '+').collect();
        let value = |text: &str| {
            text.split(['-', '/']).map(|n| n.trim_start_matches('0').to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(value(plain.trim_start_matches("bytes")), value(&format!("{part}/{total}")), "{text:?}");
    }
    let printable = fuzzing::printable(data);
    assert!(printable.bytes().all(|byte| byte.is_ascii_graphic()));
    let text = String::from_utf8_lossy(data);
    let (escaped, back) = fuzzing::segment(&text);
    assert!(back.as_deref() == Some(&*text) && escaped.is_ascii() && !escaped.contains('/'));
    if let Some(decoded) = fuzzing::decode_segment(&text) {
        assert_eq!(fuzzing::segment(&decoded).1, Some(decoded));
    }
    let (first, second) = text.split_once('\n').unwrap_or((&text, ""));
    if let Ok(url) = Url::parse(first) {
        check_url(&url);
        if let Ok(joined) = url.join(&fuzzing::printable(second.as_bytes())) {
            check_url(&joined);
            let stays = second.starts_with('?') || second.starts_with('/') && !second.starts_with("//");
            assert!(!stays || joined.same_origin(&url), "{second:?} leaves {url}");
        }
    }
    let hub = Hub::new("https://huggingface.co").expect("an address");
    match Source::parse(first, &hub) {
        Ok(sources) => {
            assert!(!sources.is_empty() && sources.len() <= 1000);
            for source in sources.iter().take(3) {
                let name = &source.file_name;
                assert!(
                    !name.is_empty()
                        && !name.starts_with('.')
                        && !name.contains(['/', '\\', ':'])
                        && name.len() <= 200,
                    "{name:?}"
                );
                check_url(&source.url);
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn check_url(url: &Url) {
    assert!(!url.host().is_empty() && url.target().starts_with('/'), "{url}");
    assert!(url.target().bytes().all(|byte| byte.is_ascii_graphic()) && !url.authority().contains('@'));
    let scheme = if url.is_https() { "https" } else { "http" };
    let whole = format!("{scheme}://{}{}", url.authority(), url.target());
    let again = Url::parse(&whole).expect("what is an address is one again");
    assert!(again.same_origin(url) && again.target() == url.target(), "{whole}");
}

fn hub_text_seeds() -> Vec<Vec<u8>> {
    [
        "https://example.com:8443/a/b?c=d#e\n//other/z",
        "http://[::1]:99/x\n/r?to=http://elsewhere/",
        "HTTP://Example.com\n?k",
        "bytes 5-9/10",
        "bytes */10",
        "bytes 0-0/*",
        "owner/repo@main/folder/model-00001-of-00003.gguf",
        "https://huggingface.co/o/r/blob/main/m.gguf",
        "muse-tiny",
        "GGUF\u{3}\0\0\0................",
        "<!doctype html>",
        "version https://git-lfs.github.com/spec/v1\noid",
        "/m%C3%BCser%20file.gguf",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}

/// Two servers that answer with what is next in a list, and what they were asked.
struct Server {
    hub: SocketAddr,
    other: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    answers: VecDeque<Vec<u8>>,
    /// Requests of this run: was it the second server, and the head.
    asked: Vec<(bool, String)>,
}

static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let state = Arc::new(Mutex::new(State::default()));
    let listen = |second: bool| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                answer(stream, second, &state);
            }
        });
        address
    };
    let (hub, other) = (listen(false), listen(true));
    Server { hub, other, state }
});

fn answer(mut stream: TcpStream, second: bool, state: &Mutex<State>) {
    let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
    let (mut head, mut piece) = (Vec::new(), [0; 4096]);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < 64 << 10 {
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => break,
            Ok(read) => head.extend_from_slice(&piece[..read]),
        }
    }
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    state.asked.push((second, String::from_utf8_lossy(&head).into_owned()));
    let bytes = state.answers.pop_front().unwrap_or_default();
    drop(state);
    let _ = stream.write_all(&bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
}

impl Server {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A pull through any answers.
pub const HUB_ANSWERS: Target = Target {
    name: "hub_answers",
    about: "any answers and redirects: a pull that ends well has the right bytes, no token leaves the hub's own host",
    run: hub_answers,
    seeds: hub_seeds,
    words: &[
        "HTTP/1.1 200 OK\\r\\n",
        "Content-Length: ",
        "Content-Range: bytes ",
        "Location: ",
        "Transfer-Encoding: chunked\\r\\n",
        "\\r\\n\\r\\n",
        "ETag: ",
        "X-Linked-Etag: ",
    ],
    max_len: 1024,
    memory: (16 << 20, 65_536),
    millis: (1000, 200),
};

static CONTENT: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut rng = muser_testkit::Rng(3);
    let mut content = b"GGUF\x03\0\0\0................".to_vec();
    content.extend((0..600).map(|_| rng.next_u64() as u8));
    content
});

fn an_answer(input: &mut Input<'_>) -> Vec<u8> {
    if input.below(6) == 0 {
        return input.bytes(200).to_vec();
    }
    let content = &*CONTENT;
    let from = if input.flag() { 0 } else { input.below(content.len() + 4) };
    let status = input.pick(&[
        "200 OK",
        "206 Partial Content",
        "302 Found",
        "307 Temporary Redirect",
        "416 Range Not Satisfiable",
        "404 Not Found",
        "401 Unauthorized",
        "429 Too Many Requests",
        "503 Service Unavailable",
        "200",
    ]);
    let mut head = format!("HTTP/1.1 {status}\r\nConnection: close\r\n");
    let body = content.get(from..).unwrap_or_default();
    let sent = &body[..body.len() - if input.flag() { 0 } else { input.below(body.len() + 1) }];
    if input.flag() {
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    if from > 0 || input.flag() {
        let shift = usize::from(input.below(4) == 0);
        head.push_str(&format!(
            "Content-Range: bytes {}-{}/{}\r\n",
            from + shift,
            content.len() - 1,
            content.len()
        ));
    }
    if status.starts_with('3') || input.below(12) == 0 {
        let server = &*SERVER;
        let place = match input.below(8) {
            0 => format!("http://{}/m.gguf", server.other),
            1 => format!("http://{}/m.gguf", server.hub),
            2 => "//127.0.0.1:1/".to_owned(),
            3 => format!("http://localhost:{}/x", server.hub.port()),
            4 => format!("//{}/y?z", server.other),
            5 => input.text(20).replace(['\r', '\n', '\0'], ""),
            _ => "/again?x=1".to_owned(),
        };
        head.push_str(&format!("Location: {place}\r\n"));
    }
    for (name, values) in [
        ("ETag", ["\"a\"", "\"b\"", "W/\"a\""]),
        ("X-Linked-Etag", ["\"a\"", "zz", ""]),
        ("X-Linked-Size", ["624", "9", "-1"]),
        ("Retry-After", ["0", "99999999999", "x"]),
        ("Content-Encoding", ["gzip", "identity", "br"]),
    ] {
        if input.below(5) == 0 {
            head.push_str(&format!("{name}: {}\r\n", input.pick(&values)));
        }
    }
    head.push_str("\r\n");
    [head.as_bytes(), sent].concat()
}

fn hub_answers(data: &[u8]) {
    let mut input = Input::new(data);
    let known = input.flag();
    let answers: VecDeque<_> = (0..input.below(7)).map(|_| an_answer(&mut input)).collect();
    let server = &*SERVER;
    server.with(|state| *state = State { answers, asked: Vec::new() });
    let home = folder();
    let store = ModelStore::open(Some(home.path())).expect("a folder");
    let hub = Hub::new(&format!("http://{}", server.hub)).expect("an address");
    let mut source = Source::parse("owner/repo/m.gguf", &hub).expect("a name").remove(0);
    if known {
        source.expected = Expected { size: Some(CONTENT.len() as u64), sha256: None };
    }
    let options = PullOptions {
        token: Token::new("hf_secret"),
        backoff: Duration::ZERO,
        max_wait: Duration::ZERO,
        max_failures: 2,
        stall_timeout: Duration::from_millis(700),
        connect_timeout: Duration::from_millis(700),
        ..PullOptions::default()
    };
    let mut reports = 0_u32;
    let pulled = pull(&store, &hub, &source, &options, &mut |_| {
        reports += 1;
        if reports > 500 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    match pulled {
        Ok(pulled) => {
            let bytes = std::fs::read(store.dir().join("m.gguf")).expect("it is under its name");
            assert_eq!(bytes.len() as u64, pulled.fetched_bytes + pulled.resumed_bytes);
            assert!(!known || bytes.len() == CONTENT.len());
        }
        Err(error) => {
            let text = error.to_string();
            assert!(!text.is_empty() && text.len() < 64 << 10 && !text.contains("hf_secret"), "{text}");
            assert!(!store.dir().join("m.gguf").exists(), "half a file under its name");
        }
    }
    let asked = server.with(|state| std::mem::take(&mut state.asked));
    assert!(asked.len() <= 64, "{} requests", asked.len());
    let own_host = format!("host: {}", server.hub);
    for (second, head) in asked {
        let told = head.to_ascii_lowercase().contains("authorization");
        assert!(
            !told || !second && head.to_ascii_lowercase().contains(&own_host),
            "the token went to {second} {head}"
        );
    }
}

fn hub_seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![
        // 200 with all of it; a redirect to the other server first; a part that is cut and gone on with.
        vec![1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1],
        vec![0, 2, 1, 1, 2, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1],
    ];
    for at in 0..16_u8 {
        seeds.push(
            (0..60).map(|i: u8| at.wrapping_mul(29).wrapping_add(i.wrapping_mul(2 * at + 1))).collect(),
        );
    }
    seeds
}

/// A bucket's answers.
pub const BUCKET_ANSWERS: Target = Target {
    name: "bucket_answers",
    about: "any answers of an object store: an object is as long as was said, names of a list are ours, else an error",
    run: bucket_answers,
    seeds: bucket_seeds,
    words: &[
        "HTTP/1.1 200 OK\\r\\n",
        "<ListBucketResult>",
        "<Contents><Key>",
        "</Key><Size>",
        "</Size></Contents>",
        "<IsTruncated>true</IsTruncated>",
        "<NextContinuationToken>",
        "ETag: ",
        "Last-Modified: ",
        "Content-Length: ",
    ],
    max_len: 2048,
    memory: (16 << 20, 65_536),
    millis: (1000, 200),
};

static BUCKET: LazyLock<BucketStore> = LazyLock::new(|| {
    BucketStore::open(&BucketOptions {
        bucket: "packs".into(),
        prefix: "p".into(),
        endpoint: Some(format!("http://{}", SERVER.hub)),
        credentials: Some(("key".into(), "secret".into())),
        request_timeout: Duration::from_millis(700),
        retries: 0,
    })
    .expect("nothing is asked yet")
});

const DATE: &str = "Wed, 21 Oct 2015 07:28:00 GMT";

fn bucket_answer(input: &mut Input<'_>) -> Vec<u8> {
    if input.below(4) == 0 {
        return input.bytes(400).to_vec();
    }
    let key = "ab".repeat(32);
    let body = match input.below(4) {
        0 => {
            let keys: String = (0..input.below(4))
                .map(|_| {
                    let key = if input.flag() { key.clone() } else { input.text(20) };
                    format!("<Contents><Key>p/packs/{key}</Key><LastModified>{}</LastModified><ETag>\"e\"</ETag><Size>{}</Size></Contents>", input.pick(&["2015-10-21T07:28:00.000Z", "never", "9999-99-99T00:00:00Z"]), input.number())
                })
                .collect();
            format!("<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>{}</IsTruncated><KeyCount>1</KeyCount>{keys}</ListBucketResult>", input.pick(&["false", "false", "true"])).into_bytes()
        }
        1 => input.bytes(200).to_vec(),
        _ => vec![7; input.below(600)],
    };
    let status = input.pick(&[
        "200 OK",
        "200 OK",
        "206 Partial Content",
        "404 Not Found",
        "412 Precondition Failed",
        "409 Conflict",
        "403 Forbidden",
        "500 Oops",
        "301 Moved",
    ]);
    let length = if input.below(4) == 0 { input.number().unsigned_abs() } else { body.len() as u64 };
    let date = if input.below(6) == 0 { input.text(12).replace(['\r', '\n'], "") } else { DATE.to_owned() };
    let head = format!(
        "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\nLast-Modified: {date}\r\nETag: \"e\"\r\n\r\n"
    );
    [head.as_bytes(), &body].concat()
}

fn bucket_answers(data: &[u8]) {
    let mut input = Input::new(data);
    let act = input.below(5);
    let answers: VecDeque<_> = (0..input.below(4)).map(|_| bucket_answer(&mut input)).collect();
    SERVER.with(|state| *state = State { answers, asked: Vec::new() });
    let name = ObjectName { area: Area::Packs, id: [0xab; 32] };
    let failed = match act {
        0 => BUCKET.list(Area::Packs).map(|listed| {
            assert!(
                listed.len() <= 16 && listed.iter().all(|one| one.name.area == Area::Packs),
                "{listed:?}"
            );
        }),
        1 => BUCKET.open(&name).map(|opened| {
            if let Some(object) = opened {
                let len = object.len().expect("it was fetched");
                assert!(len < 1 << 16, "{len} bytes of an answer of this fuzzer");
                let mut bytes = vec![0; len as usize];
                object.read_at(0, &mut bytes).expect("all of it is there");
                assert!(object.read_at(len, &mut [0]).is_err());
            }
        }),
        2 => BUCKET.contains(&name).map(drop),
        3 => BUCKET.put(&name, &[b"one", b"two"]).map(drop),
        _ => BUCKET.delete(&name).map(drop),
    };
    if let Err(error) = failed {
        let text = error.to_string();
        assert!(!text.is_empty() && !text.contains("secret"), "{text}");
    }
    let asked = SERVER.with(|state| state.asked.len());
    assert!(asked <= 8, "{asked} requests");
}

fn bucket_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for act in 0..5 {
        seeds.push(vec![act, 1, 1, 0, 2, 1, 0, 1, 1, 0, 0, 0, 1, 1]);
        seeds.push(vec![act, 2, 1, 2, 1, 9, 0, 1, 1, 1, 3, 2, 5, 3, 1, 1]);
    }
    seeds
}
