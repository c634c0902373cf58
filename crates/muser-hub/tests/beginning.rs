//! The beginning of a file, from servers that do what they should and from others.

mod support;

use muser_hub::{Hub, HubError, PullOptions, Source, beginning};
use support::{Reply, Server, content};

fn fetch(server: &Server, most: u64) -> Result<(Vec<u8>, u64), HubError> {
    let hub = Hub::new("http://127.0.0.1:9").expect("an address");
    let source = Source::parse(&server.url("/model.gguf"), &hub).expect("an address").remove(0);
    let options = PullOptions::default();
    beginning(&hub, &source, &options, most).map(|found| (found.bytes, found.total))
}

fn part(content: &[u8], range: &str) -> Reply {
    let mut reply = Reply::full(content);
    reply.status = "206 Partial Content";
    reply.headers.push(("Content-Range".into(), range.into()));
    reply
}

#[test]
fn a_range_is_asked_for_and_no_more_is_read() {
    let all = content(5000, 1);
    for whole in [false, true] {
        let answer = all.clone();
        let server = Server::start(move |request, _| {
            assert_eq!(request.headers.get("range").map(String::as_str), Some("bytes=0-999"));
            if whole { Reply::full(&answer) } else { part(&answer[..1000], "bytes 0-999/5000") }
        });
        assert_eq!(fetch(&server, 1000).expect("answered"), (all[..1000].to_vec(), 5000));
    }
    let answer = all.clone();
    let server = Server::start(move |_, _| part(&answer, "bytes 0-4999/5000"));
    assert_eq!(fetch(&server, 1 << 20).expect("all of it"), (all, 5000));
}

#[test]
fn answers_that_are_no_beginning_are_refused() {
    for (range, sign) in [("bytes 5-999/5000", "bytes from 0 on"), ("bytes 0-999/*", "size of the file")] {
        let server = Server::start(move |_, _| part(&content(1000, 1), range));
        let error = fetch(&server, 1000).expect_err(range).to_string();
        assert!(error.contains(sign), "{error}");
    }
    let server = Server::start(|_, _| part(&content(500, 1), "bytes 0-499/5000"));
    assert!(matches!(fetch(&server, 1000), Err(HubError::Truncated { .. })));
    let server = Server::start(|_, _| Reply::status("404 Not Found"));
    assert!(fetch(&server, 1000).expect_err("nothing there").to_string().contains("no such file"));
}
