//! The bucket store against an S3-compatible server process, well-behaved and not.
//!
//! `MUSER_TEST_MOTO` names the program `moto_server` (`pip install "moto[s3]" flask flask-cors`) and then it must start, as in
//! CI. Without the variable a program of that name on the path is used, and where there is none the tests say that they are
//! skipped.

#![cfg(feature = "object-store")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use muser_kv::{KvGroup, PositionKey};
use muser_pack::store::{BucketOptions, BucketStore, conformance};
use muser_pack::{Area, Identity, KeyRing, Library, LibraryOptions, PackStore, Scope};

/// A server process; ends with the test.
struct Server {
    child: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn server() -> Option<Server> {
    let named = std::env::var_os("MUSER_TEST_MOTO");
    let program = named.clone().unwrap_or_else(|| "moto_server".into());
    let port =
        TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port();
    let started = Command::new(&program)
        .args(["-H", "127.0.0.1", "-p", &port.to_string()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let Ok(child) = started else {
        assert!(named.is_none(), "MUSER_TEST_MOTO: {} does not start", program.display());
        muser_testkit::skip(muser_testkit::Need::Bucket, "there is no moto_server (set MUSER_TEST_MOTO)");
        return None;
    };
    let mut server = Server { child, port };
    let give_up = Instant::now() + Duration::from_mins(1);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < give_up, "the server does not answer");
        let ended = server.child.try_wait().expect("a child");
        assert!(ended.is_none(), "the server ended: {ended:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the server");
    let request = "PUT /packs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Some(server)
}

fn options(port: u16, prefix: &str) -> BucketOptions {
    BucketOptions {
        bucket: "packs".into(),
        prefix: prefix.into(),
        endpoint: Some(format!("http://127.0.0.1:{port}")),
        credentials: Some(("key".into(), "secret".into())),
        request_timeout: Duration::from_secs(20),
        retries: 3,
    }
}

/// Blocks that are worth a request.
fn identity() -> Identity {
    let mut identity = Identity::example();
    let representation = &mut identity.representation;
    representation.row_bytes = 512;
    (representation.full_block_bytes, representation.sliding_block_bytes) = (64 << 10, 128 << 10);
    identity
}

fn rows(scope: &Scope, group: KvGroup, index: usize) -> Vec<u8> {
    let mut bytes = vec![0; scope.block_bytes(group)];
    let what = [index as u8, u8::from(group == KvGroup::Full)];
    blake3::Hasher::new().update(&what).finalize_xof().fill(&mut bytes);
    bytes
}

fn units() -> Vec<PositionKey> {
    (0..1100).map(PositionKey::token).collect()
}

fn publish(library: &Library, scope: &Scope) -> Result<(), muser_pack::PackError> {
    let mut publication = library.begin_publish(scope, &units())?;
    for wanted in publication.wanted() {
        publication.put(wanted.group, wanted.index, &rows(scope, wanted.group, wanted.index))?;
    }
    publication.commit(false).map(drop)
}

/// Restores all of the prompt and compares; how many positions there were.
fn restore(library: &Library, scope: &Scope) -> Result<usize, muser_pack::PackError> {
    let Some(plan) = library.longest(scope, &units(), 1100, false) else { return Ok(0) };
    for segment in &plan.segments {
        let mut bytes = vec![0; segment.bytes];
        library.fetch(scope, segment, &mut bytes)?;
        assert!(bytes == rows(scope, segment.group, segment.index), "wrong rows");
    }
    Ok(plan.positions)
}

fn open(options: &BucketOptions, keys: &KeyRing) -> Result<Library, muser_pack::PackError> {
    let store = BucketStore::open(options).expect("options are right");
    Library::open(Arc::new(store), keys.clone(), LibraryOptions::default())
}

#[test]
fn buckets_conform_and_machines_share_them() {
    let Some(server) = server() else { return };
    let next = AtomicUsize::new(0);
    conformance::check_all(&|_| {
        let prefix = format!("conformance/{}", next.fetch_add(1, Ordering::Relaxed));
        Arc::new(BucketStore::open(&options(server.port, &prefix)).expect("options are right"))
    });
    let keys = KeyRing::generate().expect("random");
    let shared = options(server.port, "shared");
    let (one, other) = (open(&shared, &keys).expect("open"), open(&shared, &keys).expect("open"));
    let scope = one.scope(identity(), "");
    publish(&one, &scope).expect("published");
    assert_eq!(restore(&other, &scope).expect("nothing yet"), 0);
    other.refresh().expect("refreshed");
    assert_eq!(restore(&other, &scope).expect("restored"), 1100);
    publish(&other, &scope).expect("published again");
    assert_eq!(other.counters().snapshot().published_segments, 0, "everything was there");
    // Somebody changes an object.
    let store = BucketStore::open(&shared).expect("options are right");
    let segment = one.longest(&scope, &units(), 1100, false).expect("found").segments[0].id.object();
    let mut bytes = vec![0; store.open(&segment).expect("open").expect("there").len().expect("len") as usize];
    store.open(&segment).expect("open").expect("there").read_at(0, &mut bytes).expect("read");
    bytes[9000] ^= 1;
    store.delete(&segment).expect("deleted");
    store.put(&segment, &[&bytes]).expect("put");
    assert_eq!(restore(&other, &scope).expect_err("changed").counter_name(), "chunk");
    assert_eq!(restore(&other, &scope).expect("not found any more"), 0);
    for pack in one.packs() {
        one.remove(pack.id).expect("removed");
    }
    one.collect_garbage().expect("collected");
    assert_eq!(store.list(Area::Segments).expect("list"), []);
    other.refresh().expect("refreshed");
    assert_eq!(other.packs(), []);
}

/// What a proxy does to an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Every second answer is "internal error".
    Errors,
    /// Every answer comes late.
    Slow,
    /// Bodies end in the middle, and the connection with them.
    Cut,
    /// No answer at all.
    Dead,
}

/// Stands between store and server; the port it listens on.
fn proxy(to: u16, fault: Fault) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("a port").port();
    let count = Arc::new(AtomicUsize::new(0));
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let count = Arc::clone(&count);
            std::thread::spawn(move || serve(client, to, fault, &count));
        }
    });
    port
}

/// One request: connections are closed after each, which is the simplest proxy that is right.
fn serve(mut client: TcpStream, to: u16, fault: Fault, count: &AtomicUsize) -> Option<()> {
    let mut reader = BufReader::new(client.try_clone().ok()?);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        if line == "\r\n" {
            break;
        }
        if !lower.starts_with("connection:") {
            head.push_str(&line);
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let number = count.fetch_add(1, Ordering::Relaxed);
    match fault {
        Fault::Errors if number.is_multiple_of(2) => {
            let answer = "HTTP/1.1 500 no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            client.write_all(answer.as_bytes()).ok()?;
            return Some(());
        }
        Fault::Dead => return Some(()),
        Fault::Slow => std::thread::sleep(Duration::from_millis(60)),
        Fault::Errors | Fault::Cut => {}
    }
    let mut server = TcpStream::connect(("127.0.0.1", to)).ok()?;
    server.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).ok()?;
    server.write_all(&body).ok()?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).ok()?;
    let is_large = answer.len() > 20_000;
    let end = if fault == Fault::Cut && is_large { answer.len() / 2 } else { answer.len() };
    client.write_all(&answer[..end]).ok()
}

#[test]
fn a_misbehaving_server_costs_time_or_a_miss_and_never_a_wrong_row() {
    let Some(server) = server() else { return };
    let keys = KeyRing::generate().expect("random");
    let good = open(&options(server.port, "faults"), &keys).expect("open");
    let scope = good.scope(identity(), "");
    publish(&good, &scope).expect("published");
    for fault in [Fault::Errors, Fault::Slow] {
        let library = open(&options(proxy(server.port, fault), "faults"), &keys).expect("open");
        assert_eq!(restore(&library, &scope).expect("restored"), 1100, "{fault:?}");
    }
    let mut cut = options(proxy(server.port, Fault::Cut), "faults");
    cut.retries = 1;
    let library = open(&cut, &keys).expect("manifests are short enough");
    let failed = restore(&library, &scope).expect_err("bodies end too early");
    assert!(["remote", "truncated"].contains(&failed.counter_name()), "{failed}");
    let mut dead = options(proxy(server.port, Fault::Dead), "faults");
    (dead.retries, dead.request_timeout) = (1, Duration::from_secs(2));
    let started = Instant::now();
    let failed = open(&dead, &keys).expect_err("nobody answers");
    assert_eq!(failed.counter_name(), "remote", "{failed}");
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    assert_eq!(restore(&good, &scope).expect("nothing was harmed"), 1100);
}
