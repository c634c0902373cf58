//! Nodes on loopback, TLS and all.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use muser_kv::KvGroup;
use tempfile::TempDir;

use super::{Memory, assert_complete, facts, fetch_of, layer_bytes, load, series, write};
use crate::testing::{Faults, Relay};
use crate::{
    Answer, Ended, Entry, Facts, Fetch, FetchEnd, Load, Node, NodeConfig, NodeKey, Outlet, Peer, Peers,
    Place, Plan, Quote, Quoted, RangeSet, Reason, Registry, Request, Rights, Secrets, Series, Serving, Sink,
};

/// A made-up engine that gives what [`layer_bytes`] says, a block at a time.
struct Engine {
    facts: Arc<Facts>,
    /// Before each block.
    pause: Mutex<Duration>,
    ended: Arc<Mutex<Vec<Ended>>>,
    is_wrong: AtomicBool,
}

impl Engine {
    fn new() -> Arc<Self> {
        let (facts, ended) = (facts(true), Arc::default());
        Arc::new(Self { facts, pause: Mutex::default(), ended, is_wrong: AtomicBool::new(false) })
    }
}

impl Serving for Engine {
    fn facts(&self) -> Facts {
        Facts::clone(&self.facts)
    }

    fn load(&self) -> Load {
        load()
    }

    fn quote(&self, _: &Peer, quote: Quote, answer: Answer) {
        answer(Quoted { question: 0, known: quote.held, wait_ms: 1, compute_ms: 2, refused: None });
    }

    fn request(&self, _: &Peer, request: Arc<Request>, outlet: Arc<dyn Outlet>) {
        let (facts, ended) = (Arc::clone(&self.facts), Arc::clone(&self.ended));
        let (pause, is_wrong) = (*self.pause.lock().expect("a pause"), self.is_wrong.load(Ordering::SeqCst));
        outlet.on_end(Box::new(move |end| ended.lock().expect("a list").push(end)));
        std::thread::spawn(move || {
            let _ = give_all(&facts, &request, &*outlet, pause, is_wrong);
        });
    }
}

fn give_all(
    facts: &Facts,
    request: &Request,
    outlet: &dyn Outlet,
    pause: Duration,
    is_wrong: bool,
) -> Result<(), Ended> {
    outlet.begin(&request.span.stages)?;
    let plan = outlet.plan();
    for (group, block) in plan.blocks().collect::<Vec<_>>() {
        std::thread::sleep(pause);
        if !outlet.lacks(group, block) {
            continue;
        }
        let mut bytes = Vec::new();
        for plane in facts.planes.of_group(group) {
            for layer in 0..plane.layers {
                let place = Place { group, block, component: plane.component, layer, first_row: 0, rows: 0 };
                bytes.extend(layer_bytes(plane, &place, plan.block_rows(group, block)));
            }
        }
        bytes[0] ^= u8::from(is_wrong);
        outlet.block(group, block, &bytes)?;
        outlet.progress((block + 1) * 256, Some(Duration::from_millis(3)));
    }
    Ok(())
}

/// A consumer's memory; what it hears goes to a channel.
struct Taker {
    plan: Arc<Plan>,
    memory: Mutex<Memory>,
    heard: mpsc::Sender<Heard>,
    over: AtomicBool,
}

enum Heard {
    Ready(u32),
    Ended(Box<Series>, FetchEnd),
}

impl Sink for Taker {
    fn begun(&self, _: &[u32]) {}

    fn chunk(&self, place: &Place, rows: &[u8]) -> bool {
        assert!(!self.over.load(Ordering::SeqCst), "told after the end");
        write(&mut self.memory.lock().expect("memory"), &self.plan, place, rows);
        true
    }

    fn ready(&self, boundary: u32) {
        let _ = self.heard.send(Heard::Ready(boundary));
    }

    fn progress(&self, _: u32, _: Option<Duration>) {}

    fn ended(&self, series: Series, end: FetchEnd) {
        assert!(!self.over.swap(true, Ordering::SeqCst), "ended twice");
        let _ = self.heard.send(Heard::Ended(Box::new(series), end));
    }
}

/// Fetches, and answers what is ready. What came is added to `memory`.
fn fetch(node: &Node, peer: &str, fetch: Fetch, memory: &mut Memory) -> (Series, FetchEnd, Vec<u32>) {
    let (heard, hears) = mpsc::channel();
    let plan = Arc::clone(fetch.series.plan());
    let taker = Arc::new(Taker {
        plan,
        memory: Mutex::new(std::mem::take(memory)),
        heard,
        over: AtomicBool::new(false),
    });
    let fetching = node.fetch(peer, fetch, Arc::clone(&taker) as Arc<dyn Sink>);
    let mut ready = Vec::new();
    loop {
        let next = hears.recv_timeout(Duration::from_secs(30));
        match next.unwrap_or_else(|_| panic!("nothing is heard: {:?} {ready:?}", node.list())) {
            Heard::Ready(boundary) => {
                ready.push(boundary);
                fetching.installed(boundary);
            }
            Heard::Ended(series, end) => {
                *memory = std::mem::take(&mut taker.memory.lock().expect("memory"));
                return (*series, end, ready);
            }
        }
    }
}

struct Host {
    home: TempDir,
    engine: Arc<Engine>,
    node: Arc<Node>,
}

/// A home with a key.
fn home() -> (TempDir, NodeKey) {
    let home = tempfile::tempdir().expect("a folder");
    let key = Secrets::open_or_create(home.path()).expect("a key").current.key();
    (home, key)
}

fn know(home: &TempDir, name: &str, address: Option<SocketAddr>, key: NodeKey, streams: u8) {
    let rights = Rights { prefill: true, sessions: false };
    let entry =
        Entry { streams, ..Entry::new(name, address.map(|address| address.to_string()), key, rights) };
    Registry::update(home.path(), |registry| registry.add(entry)).expect("added");
}

async fn start(home: TempDir, listens: bool) -> Host {
    let engine = Engine::new();
    let listen = if listens { vec!["127.0.0.1:0".parse().expect("an address")] } else { vec![] };
    let config = NodeConfig { home: home.path().to_owned(), listen, dial: true };
    let node = Node::start(config, Arc::clone(&engine) as Arc<dyn Serving>).await.expect("a node");
    Host { home, engine, node }
}

/// A consumer that dials a producer, through a relay if there are faults.
async fn pair(streams: u8, faults: Option<Faults>) -> (Host, Host, Option<Relay>) {
    let ((near, near_key), (far, far_key)) = (home(), home());
    know(&far, "laptop", None, near_key, 1);
    let far = start(far, true).await;
    let mut address = far.node.addresses()[0];
    let relay = match faults {
        Some(faults) => Some(Relay::start(address, faults).await.expect("a relay")),
        None => None,
    };
    if let Some(relay) = &relay {
        address = relay.address();
    }
    know(&near, "box", Some(address), far_key, streams);
    (start(near, false).await, far, relay)
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn is_connected(node: &Node) -> bool {
    node.list().iter().any(|peer| peer.connected && peer.hello.is_some())
}

async fn connected(host: &Host) {
    until("there is no connection", || is_connected(&host.node)).await;
}

/// What lacks of a series, all that is sent.
fn sent(series: &Series) -> RangeSet {
    RangeSet::from(0..series.plan().chunks()).minus(&series.own)
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("it ends")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefixes_are_fetched_in_both_directions_of_one_connection() {
    for streams in [1, 4] {
        let (near, far, _) = pair(streams, None).await;
        connected(&near).await;
        connected(&far).await;
        for (asker, peer) in [(Arc::clone(&near.node), "box"), (Arc::clone(&far.node), "laptop")] {
            blocking(move || {
                for (cut, stages, draft) in
                    [(1, &[][..], false), (700, &[256, 512][..], true), (2000, &[1024], false)]
                {
                    let wanted =
                        series(cut, stages, draft, |group, block| group == KvGroup::Full && block == 1);
                    let mut memory = Memory::new();
                    let (got, end, ready) = fetch(&asker, peer, fetch_of(wanted), &mut memory);
                    assert_eq!(end, FetchEnd::Installed);
                    assert_eq!(ready, stages.iter().copied().chain([cut]).collect::<Vec<_>>());
                    assert_complete(&memory, got.plan(), &sent(&got));
                }
            })
            .await;
        }
        let figures = far.node.figures();
        assert!(figures.refusals.iter().all(|(_, count)| *count == 0), "{figures:?}");
        assert_eq!(figures.connections, 1);
        let engine = Arc::clone(&far.engine);
        until("ACK", move || *engine.ended.lock().expect("a list") == [Ended::Acknowledged; 3]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn questions_are_answered_and_loads_come() {
    let (near, _far, _) = pair(1, None).await;
    connected(&near).await;
    let (give, mut take) = tokio::sync::mpsc::channel(1);
    let quote = Quote { question: 0, identity: super::IDENTITY, positions: 600, held: 100, hashes: vec![] };
    near.node.quote(
        "box",
        quote,
        Box::new(move |quoted| {
            let _ = give.try_send(quoted);
        }),
    );
    let quoted = take.recv().await.expect("an answer");
    assert_eq!((quoted.known, quoted.refused), (100, None));
    let node = Arc::clone(&near.node);
    until("LOAD", move || node.list()[0].load.is_some()).await;
    let state = &near.node.list()[0];
    assert_eq!(state.load.as_ref().map(|(load, _)| load.places), Some(4));
    assert_eq!(crate::Fit::of(near.node.facts(), state.hello.as_ref().expect("HELLO")), crate::Fit::Exact);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_at_once_and_cancelling_give_everything_back() {
    let (near, far, _) = pair(2, None).await;
    connected(&near).await;
    *far.engine.pause.lock().expect("a pause") = Duration::from_millis(30);
    let transfers: Vec<_> = (0..8)
        .map(|number| {
            let node = Arc::clone(&near.node);
            tokio::task::spawn_blocking(move || {
                let wanted = series(1000 + number * 10, &[256], false, |_, _| false);
                let mut memory = Memory::new();
                let (got, end, _) = fetch(&node, "box", fetch_of(wanted), &mut memory);
                assert_eq!(end, FetchEnd::Installed, "{number}");
                assert_complete(&memory, got.plan(), &sent(&got));
            })
        })
        .collect();
    let node = Arc::clone(&near.node);
    until("all go on at once", move || node.list()[0].fetching == 8).await;
    // The registry there lets eight go on at once, and said so: one more is not even asked for.
    let node = Arc::clone(&near.node);
    let more =
        move || fetch(&node, "box", fetch_of(series(300, &[], false, |_, _| false)), &mut Memory::new());
    assert_eq!(blocking(more).await.1, FetchEnd::Lost);
    for one in transfers {
        one.await.expect("it ends well");
    }
    // Cancelled in the middle: nothing is left on either side.
    *far.engine.pause.lock().expect("a pause") = Duration::from_millis(50);
    let (heard, hears) = mpsc::channel();
    let wanted = series(5000, &[], false, |_, _| false);
    let plan = Arc::clone(wanted.plan());
    let taker = Arc::new(Taker { plan, memory: Mutex::default(), heard, over: AtomicBool::new(false) });
    let fetching = near.node.fetch("box", fetch_of(wanted), taker);
    tokio::time::sleep(Duration::from_millis(200)).await;
    fetching.cancel();
    let end = blocking(move || hears.recv_timeout(Duration::from_secs(5)).expect("the end")).await;
    assert!(matches!(end, Heard::Ended(_, FetchEnd::Cancelled)));
    let (near_node, far_node) = (Arc::clone(&near.node), Arc::clone(&far.node));
    until("both forget it", move || near_node.list()[0].fetching == 0 && far_node.list()[0].giving == 0)
        .await;
    let engine = Arc::clone(&far.engine);
    until("the producer hears of it", move || {
        engine.ended.lock().expect("a list").last() == Some(&Ended::Aborted(Reason::Cancelled))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_network_does_the_series_goes_on_and_ends_well() {
    let rounds = muser_testkit::long_or(500, 24);
    let at_once = 4;
    for first in (0..rounds).step_by(at_once) {
        let mut runs = Vec::new();
        for seed in first..first + at_once as u64 {
            runs.push(tokio::spawn(async move {
                let streams = 1 + (seed % 3) as u8;
                let faults = Faults::random(seed, 150_000);
                let (near, far, relay) = pair(streams, Some(faults.clone())).await;
                *far.engine.pause.lock().expect("a pause") = Duration::from_millis(seed % 5);
                let node = Arc::clone(&near.node);
                let (ready, tries) = blocking(move || fetch_until_done(&node, seed)).await;
                assert_eq!(ready.last(), Some(&3000), "{seed} {faults:?}");
                assert!(tries < 60, "{seed} {faults:?}");
                drop(relay);
                // Bits that changed below TLS never come to a digest.
                let refused = near.node.figures().refusals;
                let is_clean = refused.iter().all(|(name, count)| *count == 0 || *name == "missing");
                assert!(is_clean, "{seed} {faults:?} {refused:?}");
            }));
        }
        for run in runs {
            run.await.expect("it ends well");
        }
    }
}

fn fetch_until_done(node: &Node, seed: u64) -> (Vec<u32>, u32) {
    let mut wanted = series(3000, &[1024, 2048], seed.is_multiple_of(2), |_, _| false);
    let own = sent(&wanted);
    let (mut memory, mut all_ready) = (Memory::new(), Vec::new());
    for tries in 0..60 {
        let began = Instant::now();
        while !is_connected(node) && began.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (series, end, ready) = fetch(node, "box", fetch_of(wanted), &mut memory);
        wanted = series;
        all_ready.extend(ready);
        match end {
            FetchEnd::Installed => {
                assert_complete(&memory, wanted.plan(), &own);
                return (all_ready, tries);
            }
            // Half a record on a stream that says nothing more looks like a chunk that was never sent.
            FetchEnd::Lost
            | FetchEnd::Silent
            | FetchEnd::Peer(_)
            | FetchEnd::Refused(crate::Refusal::Missing { .. }) => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => panic!("{seed}: {other:?}"),
        }
    }
    panic!("{seed}: it never ends: {:?}", node.list());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_computes_something_else_is_found_by_the_next_ones_root() {
    let (near, far, relay) = pair(1, Some(Faults::default())).await;
    connected(&near).await;
    far.engine.is_wrong.store(true, Ordering::SeqCst);
    *far.engine.pause.lock().expect("a pause") = Duration::from_millis(30);
    let (node, relay) = (Arc::clone(&near.node), relay.expect("a relay"));
    let cutter = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(150)).await;
        relay.cut();
        relay
    });
    let (got, end, _) = blocking(move || {
        fetch(&node, "box", fetch_of(series(3000, &[], false, |_, _| false)), &mut Memory::new())
    })
    .await;
    assert_eq!(end, FetchEnd::Lost);
    assert!(!got.received().is_empty());
    let _relay = cutter.await.expect("cut");
    far.engine.is_wrong.store(false, Ordering::SeqCst);
    let node = Arc::clone(&near.node);
    until("it comes back", || is_connected(&near.node)).await;
    let (_, end, ready) = blocking(move || fetch(&node, "box", fetch_of(got), &mut Memory::new())).await;
    assert_eq!((end, ready), (FetchEnd::Refused(crate::Refusal::SealRoot), vec![]));
    assert_eq!(
        near.node.figures().refusals.iter().find(|(name, _)| *name == "seal_root").map(|one| one.1),
        Some(1)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_removed_is_gone_within_five_seconds() {
    let (near, far, _) = pair(1, None).await;
    connected(&near).await;
    *far.engine.pause.lock().expect("a pause") = Duration::from_millis(100);
    let node = Arc::clone(&near.node);
    let fetching = blocking_in_background(move || {
        fetch(&node, "box", fetch_of(series(20_000, &[], false, |_, _| false)), &mut Memory::new())
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let began = Instant::now();
    Registry::update(far.home.path(), |registry| {
        registry.nodes.clear();
        Ok(())
    })
    .expect("removed");
    let (_, end, _) = fetching.await.expect("it ends");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(end, FetchEnd::Lost);
    // And it does not come back.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(!is_connected(&near.node));
    assert!(far.node.figures().handshakes_failed.contains_key("key"), "{:?}", far.node.figures());
    let state = &near.node.list()[0];
    assert!(state.last_fault.as_ref().is_some_and(|fault| fault.contains("does not know")), "{state:?}");
}

fn blocking_in_background<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> tokio::task::JoinHandle<T> {
    tokio::task::spawn_blocking(work)
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_registry_cannot_be_used_nobody_is_trusted() {
    let (near, far, _) = pair(1, None).await;
    connected(&near).await;
    connected(&far).await;
    let path = Registry::path(far.home.path());
    let chmod = |mode| {
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).expect("chmod");
    };
    chmod(0o644);
    let node = Arc::clone(&far.node);
    until("it is ended", move || node.figures().connections == 0 && node.list().is_empty()).await;
    chmod(0o600);
    connected(&near).await;
    connected(&far).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_closed_and_counted() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let (far_home, _) = home();
    let far = start(far_home, true).await;
    let address = far.node.addresses()[0];
    let text = address.to_string();
    let stranger = Secrets::open_or_create(home().0.path()).expect("a key");
    let trusting: crate::tls::Trusts = Arc::new(|_| true);
    // A key that nobody knows: TLS 1.3 lets the client find out with its first read.
    let config = crate::tls::client(&stranger.current, Arc::clone(&trusting), crate::ALPN).expect("TLS");
    if let Ok(mut stream) = crate::dial::connect(config.clone(), &text).await {
        let _ = stream.write_all(&[0; 100]).await;
        assert!(matches!(stream.read(&mut [0; 10]).await, Err(_) | Ok(0)));
    }
    // Another protocol; enrolment without an invitation.
    for alpn in [&b"h2"[..], b"muser-node/2", crate::ENROL_ALPN] {
        let config = crate::tls::client(&stranger.current, Arc::clone(&trusting), alpn).expect("TLS");
        assert!(crate::dial::connect(config, &text).await.is_err());
    }
    // No protocol at all.
    let mut none = config;
    none.alpn_protocols.clear();
    let mut stream = tokio::net::TcpStream::connect(address).await.expect("TCP");
    let name = rustls::pki_types::ServerName::try_from("x").expect("a name");
    assert!(
        tokio_rustls::TlsConnector::from(Arc::new(none)).connect(name.clone(), &mut stream).await.is_err()
    );
    // TLS 1.2.
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut old = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS12])
        .expect("TLS 1.2")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    old.alpn_protocols = vec![crate::ALPN.to_vec()];
    let mut stream = tokio::net::TcpStream::connect(address).await.expect("TCP");
    assert!(tokio_rustls::TlsConnector::from(Arc::new(old)).connect(name, &mut stream).await.is_err());
    // HTTP, SSH, nothing that is anything, and silence.
    for words in ["GET / HTTP/1.1\r\nHost: x\r\n\r\n", "SSH-2.0-x\r\n", "\u{0}\u{1}\u{2}\u{3}\u{4}\u{5}\u{6}"]
    {
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("TCP");
        stream.write_all(words.as_bytes()).await.expect("written");
        let mut said = Vec::new();
        let _ = tokio::time::timeout(Duration::from_secs(8), stream.read_to_end(&mut said))
            .await
            .expect("it is closed");
        assert!(said.len() < 32, "nothing but an alert: {said:?}");
    }
    let node = Arc::clone(&far.node);
    until("all are counted", move || {
        let failed = node.figures().handshakes_failed;
        let of = |why| failed.get(why).copied().unwrap_or(0);
        of("key") == 1 && of("protocol") == 4 && of("version") == 1 && of("not_tls") >= 2
    })
    .await;
    assert_eq!(far.node.figures().connections, 0);
    assert!(far.node.list().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_has_another_key_than_the_pinned_one_is_not_talked_to() {
    let (far_home, _) = home();
    let far = start(far_home, true).await;
    let (near, _) = home();
    know(&near, "box", Some(far.node.addresses()[0]), NodeKey([9; 32]), 1);
    let near = start(near, false).await;
    let node = Arc::clone(&near.node);
    until("the fault is told", move || {
        node.list()[0]
            .last_fault
            .as_ref()
            .is_some_and(|fault| fault.contains("another key than the one that is pinned"))
    })
    .await;
    assert!(!is_connected(&near.node));
    let (_, end, _) = blocking(move || {
        fetch(&near.node, "box", fetch_of(series(300, &[], false, |_, _| false)), &mut Memory::new())
    })
    .await;
    assert_eq!(end, FetchEnd::Lost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_change_while_nodes_talk() {
    let (near, far, _) = pair(1, None).await;
    connected(&near).await;
    let old = far.node.key();
    let new = Secrets::begin_rotation(far.home.path()).expect("a new key");
    assert_ne!(old, new);
    // Told with the next HELLO, under the old key.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let reconnect = |host: &Host| host.node.open_conns().for_each(|conn| conn.close(Reason::Draining));
    for _ in 0..3 {
        reconnect(&near);
        tokio::time::sleep(Duration::from_millis(300)).await;
        connected(&near).await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
    }
    let node = Arc::clone(&far.node);
    until("the new key is used", move || node.key() == new).await;
    reconnect(&near);
    tokio::time::sleep(Duration::from_millis(500)).await;
    connected(&near).await;
    let home = near.home.path().to_owned();
    until("the old key is forgotten", move || {
        let registry = Registry::read(&home).expect("a registry");
        registry.nodes[0].key == new && registry.nodes[0].next_key.is_none()
    })
    .await;
}
