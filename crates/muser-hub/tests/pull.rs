//! Pulls from a server that does everything wrong.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use muser_hub::{
    Expected, Hub, HubError, ModelStore, Phase, Progress, Proxies, PullOptions, Pulled, Sha256, Source,
    Token, Verified, pull,
};
use support::{Reply, Server, content};

/// A store in a folder of its own and quick options.
struct Client {
    home: tempfile::TempDir,
    options: PullOptions,
}

impl Client {
    fn new() -> Self {
        let options = PullOptions {
            backoff: Duration::from_millis(1),
            // A busy machine is no stalled server: how often a server is asked must not depend on it.
            stall_timeout: Duration::from_mins(1),
            max_failures: 3,
            ..PullOptions::default()
        };
        Self { home: tempfile::tempdir().unwrap(), options }
    }

    /// One that soon gives up on a server that says nothing.
    fn impatient() -> Self {
        let mut client = Self::new();
        client.options.stall_timeout = Duration::from_millis(400);
        client
    }

    fn store(&self) -> ModelStore {
        ModelStore::open(Some(self.home.path())).unwrap()
    }

    fn pull(&self, url: &str, sha256: Option<Sha256>) -> Result<Pulled, HubError> {
        self.pull_watched(url, sha256, &mut |_| ControlFlow::Continue(()))
    }

    fn pull_watched(
        &self,
        url: &str,
        sha256: Option<Sha256>,
        watch: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<Pulled, HubError> {
        let hub = Hub::new("http://127.0.0.1:9").unwrap();
        let mut source = Source::parse(url, &hub).unwrap().remove(0);
        source.expected = Expected { size: None, sha256 };
        pull(&self.store(), &hub, &source, &self.options, watch)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join("models").join(name)
    }

    /// The file is there and right, and nothing unfinished is left.
    fn check_done(&self, name: &str, expected: &[u8]) {
        assert!(std::fs::read(self.path(name)).unwrap() == expected, "{name} has other bytes");
        assert!(!self.path(&format!("{name}.part")).exists());
        assert!(!self.path(&format!("{name}.part.json")).exists());
    }

    fn check_absent(&self, name: &str) {
        assert!(!self.path(name).exists(), "{name} must not appear");
    }
}

fn hash(bytes: &[u8]) -> Sha256 {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    Sha256::of_file(file.path(), &mut |_| {}).unwrap()
}

#[test]
fn a_plain_file_arrives_and_is_recorded() {
    let data = content(300_000, 1);
    let server = Server::start({
        let data = data.clone();
        move |request, _| Reply::good(request, &data)
    });
    let client = Client::new();
    let mut last = None;
    let pulled = client
        .pull_watched(&server.url("/m.gguf"), Some(hash(&data)), &mut |progress| {
            last = Some(progress.clone());
            ControlFlow::Continue(())
        })
        .unwrap();
    client.check_done("m.gguf", &data);
    assert_eq!(pulled.model.verified, Verified::Yes(hash(&data)));
    assert_eq!(pulled.fetched_bytes, 300_000);
    let last = last.unwrap();
    assert_eq!((last.bytes, last.total, last.phase), (300_000, Some(300_000), Phase::Downloading));
    // A second pull asks nobody.
    assert!(client.pull(&server.url("/m.gguf"), Some(hash(&data))).unwrap().already_there);
    assert!(client.pull(&server.url("/m.gguf"), None).unwrap().already_there);
    assert_eq!(server.requests().len(), 1);
}

/// Row 65: what is no model is not kept, whatever the server calls it, and a hash that fits makes it none.
#[test]
fn what_is_no_model_is_never_taken_for_one() {
    let page = b"<!doctype html><html><body>".repeat(4000);
    let cases: [(&str, Vec<u8>, &str); 6] = [
        ("page", page.clone(), "a web page"),
        ("empty", Vec::new(), "an empty file"),
        ("error", b"{\"error\":\"Repository not found\"}".to_vec(), "JSON"),
        (
            "pointer",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n".to_vec(),
            "Git LFS",
        ),
        ("head", b"GGUF\x03\0\0\0".to_vec(), "ends in its head"),
        ("zip", b"PK\x03\x04".repeat(100), "other bytes"),
    ];
    for (name, body, sign) in cases {
        for chunked in [false, true] {
            let server = Server::start({
                let body = body.clone();
                move |request, _| {
                    if !chunked {
                        return Reply::good(request, &body);
                    }
                    let mut reply =
                        Reply::full(&[]).without("Content-Length").header("Transfer-Encoding", "chunked");
                    if !body.is_empty() {
                        reply.body = format!("{:x}\r\n", body.len()).into_bytes();
                        reply.body.extend_from_slice(&body);
                        reply.body.extend_from_slice(b"\r\n");
                    }
                    reply.body.extend_from_slice(b"0\r\n\r\n");
                    reply
                }
            });
            let client = Client::new();
            for sha256 in [None, Some(hash(&body))] {
                let error = client.pull(&server.url("/m.gguf"), sha256).unwrap_err();
                assert!(
                    matches!(&error, HubError::NotAModel { found, .. } if found.contains(sign)),
                    "{name}: {error}"
                );
                client.check_absent("m.gguf");
                client.check_absent("m.gguf.part");
                client.check_absent("m.gguf.part.json");
            }
            assert_eq!(server.requests().len(), 2, "asking again would not help");
        }
    }
}

/// A head that comes in pieces, over several attempts, is seen as a whole.
#[test]
fn a_head_in_pieces_is_one_head() {
    let data = content(5000, 31);
    let server = Server::start({
        let data = data.clone();
        move |request, n| {
            let reply = Reply::good(request, &data).header("ETag", "\"one\"");
            if n < 3 { reply.cut(5) } else { reply }
        }
    });
    let client = Client::new();
    client.pull(&server.url("/m.gguf"), None).unwrap();
    client.check_done("m.gguf", &data);
}

/// Security 20: any server may name a hash for its own file; only the hub's word makes it the expected one.
#[test]
fn a_server_cannot_vouch_for_itself() {
    let data = content(3000, 32);
    let linked = hash(&data).to_string();
    let server = Server::start({
        let data = data.clone();
        move |request, _| Reply::good(request, &data).header("X-Linked-ETag", &format!("\"{linked}\""))
    });
    let client = Client::new();
    let pulled = client.pull(&server.url("/m.gguf"), None).unwrap();
    assert_eq!(pulled.model.verified, Verified::HashedOnly(hash(&data)));
    // What it names must still be what comes.
    let server = Server::start(move |request, _| {
        Reply::good(request, &data).header("X-Linked-ETag", &format!("\"{}\"", "0".repeat(64)))
    });
    let client = Client::new();
    assert!(matches!(client.pull(&server.url("/m.gguf"), None), Err(HubError::WrongHash { .. })));
}

#[test]
fn a_token_is_not_sent_in_the_clear_or_missed_where_it_was_not_sent() {
    let mut client = Client::new();
    client.options.token = Token::new("very-secret");
    client.options.max_failures = 0;
    // A name that no resolver knows behind a proxy that is ours: nothing must reach it.
    let proxy = Server::start(|_, _| Reply::status("401 Unauthorized"));
    let address = proxy.addr.to_string();
    client.options.proxies =
        Proxies::from_env(|name| (name == "http_proxy").then(|| address.clone())).unwrap();
    let hub = Hub::new("http://hub.test").unwrap();
    let source = Source::parse("o/r/m.gguf", &hub).unwrap().remove(0);
    let result = pull(&client.store(), &hub, &source, &client.options, &mut |_| ControlFlow::Continue(()));
    assert!(matches!(result, Err(HubError::TokenInTheClear { .. })), "{result:?}");
    assert_eq!(proxy.requests().len(), 0);
    // Another host refuses: the token had no part in it.
    let message = client.pull(&proxy.url("/m.gguf"), None).unwrap_err().to_string();
    assert!(message.contains("was not sent there"), "{message}");
}

#[test]
fn plain_addresses_are_asked_for_through_the_proxy() {
    let data = content(4000, 33);
    let proxy = Server::start({
        let data = data.clone();
        move |request, _| Reply::good(request, &data)
    });
    let mut client = Client::new();
    let address = format!("http://us%65r:pass@{}", proxy.addr);
    client.options.proxies =
        Proxies::from_env(|name| (name == "all_proxy").then(|| address.clone())).unwrap();
    client.pull("http://files.test/m.gguf?x=1", None).unwrap();
    client.check_done("m.gguf", &data);
    let request = &proxy.requests()[0];
    assert_eq!(request.target, "http://files.test/m.gguf?x=1");
    assert_eq!(request.headers["host"], "files.test");
    assert_eq!(request.headers["proxy-authorization"], "Basic dXNlcjpwYXNz");
}

#[test]
fn a_location_with_raw_letters_is_followed() {
    let data = content(4000, 34);
    let server = Server::start({
        let data = data.clone();
        move |request, _| match request.target.as_str() {
            "/m%C3%BCser.gguf" => Reply::good(request, &data),
            _ => Reply::redirect("/müser.gguf"),
        }
    });
    let client = Client::new();
    client.pull(&server.url("/m.gguf"), None).unwrap();
    client.check_done("m.gguf", &data);
}

#[test]
fn the_hub_layout_brings_size_and_hash_over_a_redirect_and_keeps_the_token_home() {
    let data = content(50_000, 2);
    let storage = Server::start({
        let data = data.clone();
        move |request, _| Reply::good(request, &data).header("ETag", "\"storage\"")
    });
    let linked = hash(&data).to_string();
    let hub_server = Server::start({
        // 127.0.0.1 with another port is another origin.
        let location = storage.url("/blob?signature=secret");
        move |_, _| {
            Reply::redirect(&location)
                .header("X-Linked-Size", "50000")
                .header("X-Linked-ETag", &format!("\"{linked}\""))
        }
    });
    let mut client = Client::new();
    client.options.token = Token::new("  very-secret \n");
    let hub = Hub::new(&hub_server.url("")).unwrap();
    let source = Source::parse("owner/repo@v1/deep/m.gguf", &hub).unwrap().remove(0);
    let pulled =
        pull(&client.store(), &hub, &source, &client.options, &mut |_| ControlFlow::Continue(())).unwrap();
    client.check_done("m.gguf", &data);
    assert_eq!(pulled.model.verified, Verified::Yes(hash(&data)));
    let (at_hub, at_storage) = (&hub_server.requests()[0], &storage.requests()[0]);
    assert_eq!(at_hub.target, "/owner/repo/resolve/v1/deep/m.gguf");
    assert_eq!(at_hub.headers.get("authorization").map(String::as_str), Some("Bearer very-secret"));
    assert_eq!(at_storage.headers.get("authorization"), None);
    assert!(!format!("{:?}", client.options).contains("very-secret"));
    // Its record does not keep signed addresses either.
    assert!(!pulled.model.url.unwrap().contains("secret"));
}

#[test]
fn a_url_of_another_host_gets_no_token() {
    let server = Server::start(|request, _| Reply::good(request, &content(100, 1)));
    let mut client = Client::new();
    client.options.token = Token::new("very-secret");
    client.pull(&server.url("/m.gguf"), None).unwrap();
    assert_eq!(server.requests()[0].headers.get("authorization"), None);
}

#[test]
fn a_server_that_truncates_is_asked_for_the_rest() {
    let data = content(100_000, 3);
    let server = Server::start({
        let data = data.clone();
        move |request, n| {
            let reply = Reply::good(request, &data).header("ETag", "\"one\"");
            if n < 6 { reply.cut(10_000) } else { reply }
        }
    });
    let client = Client::new();
    client.pull(&server.url("/m.gguf"), None).unwrap();
    client.check_done("m.gguf", &data);
    let requests = server.requests();
    assert_eq!(
        requests.iter().map(support::Request::from).collect::<Vec<_>>()[1..3],
        [Some(10_000), Some(20_000)]
    );
    assert!(requests[1..].iter().all(|r| r.headers.get("if-range").map(String::as_str) == Some("\"one\"")));
}

#[test]
fn without_a_validator_or_a_hash_nothing_is_glued_together() {
    let data = content(100_000, 4);
    let server = Server::start({
        let data = data.clone();
        move |request, n| {
            let reply = Reply::good(request, &data).header("ETag", "W/\"weak\"");
            if n == 0 { reply.cut(10_000) } else { reply }
        }
    });
    let client = Client::new();
    client.pull(&server.url("/m.gguf"), None).unwrap();
    client.check_done("m.gguf", &data);
    assert_eq!(server.requests()[1].from(), None);
}

#[test]
fn wrong_ranges_lead_to_a_fresh_start() {
    let data = content(60_000, 5);
    for wrong in [
        "bytes 5-59999/60000",
        "bytes 9999-59999/60000",
        "bytes 9999-59998/60000",
        "bytes 10001-59999/60000",
        "bytes 10000-59999/70000",
        "bytes 10000-70000/60000",
        "bytes */60000",
        "lines 1-2/3",
        "x",
    ] {
        let server = Server::start({
            let (data, wrong) = (data.clone(), wrong.to_owned());
            move |request, n| match (n, request.from()) {
                (0, _) => Reply::full(&data).header("ETag", "\"e\"").cut(10_000),
                (_, Some(from)) => {
                    // As long as the header says, where it says something that can be.
                    let range = match wrong.as_str() {
                        "bytes 9999-59999/60000" => 9_999..60_000,
                        // Of the length that is missing: only its beginning gives it away.
                        "bytes 9999-59998/60000" => 9_999..59_999,
                        "bytes 10001-59999/60000" => 10_001..60_000,
                        _ => from..60_000,
                    };
                    let mut reply = Reply::full(&data[range]);
                    reply.status = "206 Partial Content";
                    reply.header("ETag", "\"e\"").header("Content-Range", &wrong)
                }
                _ => Reply::full(&data),
            }
        });
        let client = Client::new();
        client.pull(&server.url("/m.gguf"), None).unwrap();
        client.check_done("m.gguf", &data);
        let asked: Vec<_> = server.requests().iter().map(support::Request::from).collect();
        assert_eq!(asked, [None, Some(10_000), None], "{wrong}");
    }
}

#[test]
fn right_range_headers_over_wrong_bytes_are_caught_by_the_hash() {
    let data = content(60_000, 6);
    let server = Server::start({
        let data = data.clone();
        move |request, n| match (n, request.from()) {
            (0, _) => Reply::full(&data).cut(10_000),
            (_, Some(from)) => {
                let mut reply = Reply::range(&data, from);
                reply.body[0] ^= 1;
                reply
            }
            _ => Reply::full(&data),
        }
    });
    let client = Client::new();
    client.pull(&server.url("/m.gguf"), Some(hash(&data))).unwrap();
    client.check_done("m.gguf", &data);
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn wrong_bytes_behind_an_earlier_pull_are_caught_by_the_hash() {
    let data = content(3_000_000, 16);
    for retries in [0, 3] {
        let server = Server::start({
            let data = data.clone();
            move |request, _| match request.from() {
                Some(from) => {
                    let mut reply = Reply::range(&data, from).header("ETag", "\"e\"");
                    reply.body[0] ^= 1;
                    reply
                }
                None => Reply::full(&data).header("ETag", "\"e\""),
            }
        });
        let mut client = Client::new();
        client.options.max_failures = retries;
        let stop = |progress: &Progress| {
            if progress.bytes > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let url = server.url("/m.gguf");
        let stopped = client.pull_watched(&url, Some(hash(&data)), &mut { stop });
        assert!(matches!(stopped, Err(HubError::Cancelled { bytes: 1.. })), "{stopped:?}");
        // Another process goes on, and the server goes on with something else: never a file with these bytes.
        match client.pull(&url, Some(hash(&data))) {
            Ok(_) => client.check_done("m.gguf", &data),
            Err(HubError::WrongHash { .. }) => client.check_absent("m.gguf"),
            Err(other) => panic!("{other}"),
        }
        assert!(server.requests().iter().any(|request| request.from().is_some()), "it did go on");
    }
}

#[test]
fn ok_instead_of_partial_content_starts_again() {
    let data = content(60_000, 7);
    let server = Server::start({
        let data = data.clone();
        move |_, n| {
            let reply = Reply::full(&data).header("ETag", "\"e\"");
            if n < 2 { reply.cut(20_000 + n) } else { reply }
        }
    });
    let client = Client::new();
    let pulled = client.pull(&server.url("/m.gguf"), None).unwrap();
    client.check_done("m.gguf", &data);
    assert_eq!(pulled.fetched_bytes, 100_001);
}

#[test]
fn range_not_satisfiable_starts_again_or_gives_up() {
    let data = content(60_000, 8);
    let server = Server::start({
        let data = data.clone();
        move |request, n| match (n, request.from()) {
            (0, _) => Reply::full(&data).header("ETag", "\"e\"").cut(10_000),
            (_, Some(_)) => Reply::status("416 Range Not Satisfiable"),
            _ => Reply::full(&data),
        }
    });
    let client = Client::new();
    client.pull(&server.url("/m.gguf"), None).unwrap();
    client.check_done("m.gguf", &data);

    let server = Server::start(|_, _| Reply::status("416 Range Not Satisfiable"));
    let client = Client::new();
    assert!(matches!(client.pull(&server.url("/m.gguf"), None), Err(HubError::GaveUp { attempts: 4, .. })));
    client.check_absent("m.gguf");
}

#[test]
fn redirects_are_bounded_and_never_leave_https() {
    let server = Server::start(|request, _| match request.target.as_str() {
        "/loop.gguf" => Reply::redirect("/loop.gguf"),
        "/none.gguf" => Reply::status("302 Found"),
        "/odd.gguf" => Reply::redirect("ftp://somewhere/else"),
        "/start.gguf" => Reply::redirect("relative/end?x=1"),
        "/relative/end?x=1" => Reply::full(&content(100, 2)),
        _ => Reply::status("404 Not Found"),
    });
    let client = Client::new();
    assert!(matches!(client.pull(&server.url("/loop.gguf"), None), Err(HubError::RedirectLoop { .. })));
    assert_eq!(server.requests().len(), 9);
    assert!(matches!(client.pull(&server.url("/none.gguf"), None), Err(HubError::BadRedirect { .. })));
    assert!(matches!(client.pull(&server.url("/odd.gguf"), None), Err(HubError::BadRedirect { .. })));
    client.pull(&server.url("/start.gguf"), None).unwrap();
    client.check_done("start.gguf", &content(100, 2));
}

#[test]
fn a_stall_is_ended_and_resumed() {
    let data = content(60_000, 9);
    let server = Server::start({
        let data = data.clone();
        move |request, n| {
            let reply = Reply::good(request, &data).header("ETag", "\"e\"");
            if n == 0 { reply.cut(30_000).stall() } else { reply }
        }
    });
    let client = Client::impatient();
    client.pull(&server.url("/m.gguf"), None).unwrap();
    client.check_done("m.gguf", &data);
    assert_eq!(server.requests()[1].from(), Some(30_000));

    // A server that never says anything at all.
    let server =
        Server::start(|_, _| Reply { status: "", headers: vec![], body: vec![], end: support::End::Stall });
    let client = Client::new();
    let message = client.pull(&server.url("/m.gguf"), None).unwrap_err().to_string();
    assert!(message.contains("gave up after 4 attempts"), "{message}");
}

#[test]
fn a_changed_etag_starts_again() {
    let (old, new) = (content(60_000, 10), content(60_000, 11));
    for honours_if_range in [false, true] {
        let server = Server::start({
            let (old, new) = (old.clone(), new.clone());
            move |request, n| match n {
                0 => Reply::full(&old).header("ETag", "\"old\"").cut(30_000),
                _ if honours_if_range && request.headers.get("if-range").is_some_and(|v| v != "\"new\"") => {
                    Reply::full(&new).header("ETag", "\"new\"")
                }
                _ => Reply::good(request, &new).header("ETag", "\"new\""),
            }
        });
        let client = Client::new();
        client.pull(&server.url("/m.gguf"), None).unwrap();
        client.check_done("m.gguf", &new);
        assert_eq!(server.requests().len(), if honours_if_range { 2 } else { 3 });
    }
}

#[test]
fn a_file_that_changes_all_the_time_is_given_up() {
    let server = Server::start(|request, n| {
        Reply::good(request, &content(60_000, n as u64)).header("ETag", &format!("\"{n}\"")).cut(30_000)
    });
    let client = Client::new();
    assert!(matches!(client.pull(&server.url("/m.gguf"), None), Err(HubError::GaveUp { .. })));
    client.check_absent("m.gguf");
}

#[test]
fn a_wrong_hash_never_becomes_a_file() {
    let data = content(60_000, 12);
    let server = Server::start({
        let data = data.clone();
        move |request, n| {
            let reply = Reply::good(request, &data);
            if n == 0 { reply.cut(30_000) } else { reply }
        }
    });
    let client = Client::new();
    let wanted = hash(b"something else");
    match client.pull(&server.url("/m.gguf"), Some(wanted)) {
        Err(HubError::WrongHash { expected, found, .. }) => {
            assert_eq!((expected, found), (wanted.to_string(), hash(&data).to_string()));
        }
        other => panic!("{other:?}"),
    }
    client.check_absent("m.gguf");
    client.check_absent("m.gguf.part");
    // Once in pieces, once whole: a second download, not an endless one.
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn another_size_or_hash_than_known_ends_before_the_download() {
    let client = Client::new();
    for (name, value) in [
        ("X-Linked-Size", "7"),
        ("X-Linked-ETag", "\"0000000000000000000000000000000000000000000000000000000000000000\""),
    ] {
        let server = Server::start(move |_, _| Reply::full(&content(1_631, 1)).header(name, value));
        let hub = Hub::new(&server.url("")).unwrap();
        let source = Source::parse("dflash", &hub).unwrap().remove(0);
        let result =
            pull(&client.store(), &hub, &source, &client.options, &mut |_| ControlFlow::Continue(()));
        assert!(matches!(result, Err(HubError::NotTheKnownFile { .. })), "{result:?}");
        assert_eq!(server.requests().len(), 1);
    }
}

#[test]
fn statuses_say_what_to_do() {
    let server = Server::start(|request, _| match request.target.as_str() {
        "/401.gguf" => Reply::status("401 Unauthorized"),
        "/404.gguf" => Reply::status("404 Not Found"),
        "/429.gguf" => Reply::status("429 Too Many Requests").header("Retry-After", "86400"),
        _ => Reply::status("500 Internal Server Error"),
    });
    let client = Client::new();
    let message = |name: &str| client.pull(&server.url(name), None).unwrap_err().to_string();
    assert!(message("/401.gguf").contains("HF_TOKEN"));
    assert!(message("/404.gguf").contains("no such file"));
    assert!(message("/429.gguf").contains("wait 86400 s"));
    assert!(message("/500.gguf").contains("gave up after 4 attempts"));
    assert_eq!(server.requests().len(), 1 + 1 + 1 + 4);
}

#[test]
fn retry_after_is_waited_for() {
    let server = Server::start(|request, n| match n {
        0 => Reply::status("429 Too Many Requests").header("Retry-After", "1"),
        _ => Reply::good(request, &content(100, 1)),
    });
    let client = Client::new();
    let (mut waited, start) = (false, std::time::Instant::now());
    client
        .pull_watched(&server.url("/m.gguf"), None, &mut |progress| {
            waited |= matches!(&progress.phase, Phase::Waiting { reason, .. } if reason.contains("429"));
            ControlFlow::Continue(())
        })
        .unwrap();
    assert!(waited && start.elapsed() >= Duration::from_secs(1));
}

#[test]
fn more_bytes_than_announced_and_odd_encodings_are_refused() {
    let data = content(5_000, 13);
    let server = Server::start({
        let data = data.clone();
        move |request, _| match request.target.as_str() {
            "/long.gguf" => Reply::full(&data).header("X-Linked-Size", "4000"),
            "/gzip.gguf" => Reply::full(&data).header("Content-Encoding", "gzip"),
            _ => Reply::full(&data).without("Content-Length"),
        }
    });
    let client = Client::new();
    for name in ["long.gguf", "gzip.gguf", "endless.gguf"] {
        let message = client.pull(&server.url(&format!("/{name}")), None).unwrap_err().to_string();
        assert!(message.contains("the server's fault"), "{message}");
        client.check_absent(name);
    }
}

#[test]
fn stopping_keeps_the_bytes_and_offline_needs_them_all() {
    let data = content(3_000_000, 14);
    let server = Server::start({
        let data = data.clone();
        move |request, _| Reply::good(request, &data).header("ETag", "\"e\"")
    });
    let mut client = Client::new();
    let stop = |progress: &Progress| {
        if progress.bytes > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let url = server.url("/m.gguf");
    let Err(HubError::Cancelled { bytes }) = client.pull_watched(&url, None, &mut { stop }) else { panic!() };
    client.check_absent("m.gguf");
    client.options.offline = true;
    assert!(matches!(client.pull(&url, None), Err(HubError::Offline { .. })));
    client.options.offline = false;
    let pulled = client.pull(&url, None).unwrap();
    client.check_done("m.gguf", &data);
    assert_eq!((pulled.resumed_bytes, pulled.fetched_bytes), (bytes, 3_000_000 - bytes));
    client.options.offline = true;
    assert!(client.pull(&url, None).unwrap().already_there);
}

#[test]
fn a_process_that_dies_in_mid_transfer_leaves_no_file_and_no_lie() {
    let data = content(3_000_000, 15);
    let server = Server::start({
        let data = data.clone();
        move |request, _| Reply::good(request, &data).header("ETag", "\"e\"")
    });
    let client = Client::new();
    let url = server.url("/m.gguf");
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        client.pull_watched(&url, None, &mut |progress| {
            assert!(progress.bytes == 0, "dies here");
            ControlFlow::Continue(())
        })
    }));
    assert!(died.is_err());
    client.check_absent("m.gguf");
    assert!(client.path("m.gguf.part").exists());
    client.pull(&url, None).unwrap();
    client.check_done("m.gguf", &data);
}

#[test]
fn another_file_of_that_name_is_only_replaced_by_force() {
    let new = content(100, 3);
    let server = Server::start({
        let new = new.clone();
        move |request, _| Reply::good(request, &new)
    });
    let mut client = Client::new();
    std::fs::create_dir_all(client.path("")).unwrap();
    std::fs::write(client.path("m.gguf"), "old").unwrap();
    let url = server.url("/m.gguf");
    assert!(matches!(client.pull(&url, None), Err(HubError::Exists { .. })));
    assert!(matches!(client.pull(&url, Some(hash(&new))), Err(HubError::Exists { .. })));
    assert!(client.pull(&url, Some(hash(b"old"))).unwrap().already_there);
    client.options.force = true;
    client.pull(&url, Some(hash(&new))).unwrap();
    client.check_done("m.gguf", &new);
}

#[test]
fn a_host_that_is_not_there_is_named() {
    let client = Client::new();
    let message = client.pull("http://127.0.0.1:1/m.gguf", None).unwrap_err().to_string();
    assert!(message.contains("127.0.0.1:1"), "{message}");
}

/// TLS with a certificate authority of our own; without it the same server is refused, at once and by name.
#[test]
fn https_checks_who_it_speaks_to() {
    use std::io::Write;
    use std::sync::Arc;

    use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
    use support::read_request;

    let key =
        rcgen::generate_simple_self_signed(vec!["localhost".to_owned(), "hub.test".to_owned()]).unwrap();
    let pem = key.cert.pem();
    let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.signing_key.serialize_der()));
    let config =
        rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![key.cert.der().clone()], private)
            .unwrap();
    let config = Arc::new(config);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let connection = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
            let mut tls = rustls::StreamOwned::new(connection, stream.unwrap());
            let Some(request) = read_request(&mut tls) else { continue };
            let reply = match request.target.as_str() {
                "/away.gguf" => Reply::redirect("http://127.0.0.1:1/m.gguf"),
                _ => Reply::good(&request, &content(100, 4)),
            };
            let _ = tls.write_all(&reply.bytes());
            tls.conn.send_close_notify();
            let _ = tls.flush();
        }
    });
    let mut client = Client::new();
    let url = |name: &str| format!("https://localhost:{port}/{name}");
    let error = client.pull(&url("m.gguf"), None).unwrap_err();
    assert!(matches!(error, HubError::Tls { .. }), "{error}");

    let roots = client.home.path().join("roots.pem");
    std::fs::write(&roots, pem).unwrap();
    client.options.extra_roots = Some(roots);
    client.pull(&url("m.gguf"), None).unwrap();
    client.check_done("m.gguf", &content(100, 4));
    // A proxy makes a tunnel to the name, and the certificate is the name's.
    let proxy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = proxy.local_addr().unwrap().to_string();
    let asked = std::thread::spawn(move || {
        let (mut near, _) = proxy.accept().unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            std::io::Read::read_exact(&mut near, &mut byte).unwrap();
            head.push(byte[0]);
        }
        near.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").unwrap();
        let mut far = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (mut from_near, mut to_far) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from_near, &mut to_far));
        let _ = std::io::copy(&mut far, &mut near);
        String::from_utf8(head).unwrap()
    });
    client.options.proxies =
        Proxies::from_env(|name| (name == "HTTPS_PROXY").then(|| address.clone())).unwrap();
    client.pull(&format!("https://hub.test:{port}/through.gguf"), None).unwrap();
    client.check_done("through.gguf", &content(100, 4));
    assert!(asked.join().unwrap().starts_with(&format!("CONNECT hub.test:{port} HTTP/1.1\r\n")));
    // A redirect that would leave TLS is not followed.
    assert!(matches!(client.pull(&url("away.gguf"), None), Err(HubError::BadRedirect { .. })));
}
