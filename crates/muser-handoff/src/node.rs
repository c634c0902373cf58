//! A node on a network: listens, dials who has an address, and keeps one connection to each peer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use muser_kv::CacheScope;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio_rustls::{LazyConfigAcceptor, TlsStream};

use crate::conn::{Conn, Parts, Totals, Watcher, lock};
use crate::dial::{open_stream, peer_key, read_hello};
use crate::enrol;
use crate::frame::{Frame, Hello};
use crate::ids::{Digest, NodeKey, Nonce};
use crate::link::Link;
use crate::peers::{Answer, Facts, Fetch, FetchEnd, Fetching, Peer, PeerState, Peers, Serving, Sink};
use crate::registry::{Entry, Registry, Watch, note_keys};
use crate::secret::{Secrets, is_next_of};
use crate::tls::{self, ALPN, ENROL_ALPN};
use crate::{NodeError, Quote, Reason, Refusal};

/// How long a handshake and HELLO may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Handshakes at once.
const HANDSHAKES: usize = 32;
/// Pauses between attempts to dial.
const PAUSES: [u64; 7] = [1, 2, 4, 8, 16, 32, 60];
/// How often the registry is looked at: a node that was removed is gone after two of these.
const LOOK: Duration = Duration::from_secs(1);

/// What a node needs to know.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Muser's folder: `nodes.toml`, `keys/node.key`, invitations.
    pub home: PathBuf,
    /// Where to listen; several addresses, or none.
    pub listen: Vec<SocketAddr>,
    /// Dial what has an address?
    pub dial: bool,
}

/// Figures for metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFigures {
    /// Refused frames by name.
    pub refusals: Vec<(&'static str, u64)>,
    /// Connections that came to nothing, by reason: `key`, `protocol`, `version`, `not_tls`, `tls`, `broken`, `time`, `busy`.
    pub handshakes_failed: BTreeMap<&'static str, u64>,
    /// Bytes of rows that came, and that were given.
    pub bytes: (u64, u64),
    /// Chunks that came, and that were given.
    pub chunks: (u64, u64),
    /// Connections that are open.
    pub connections: u64,
}

/// What is known of one peer.
#[derive(Default)]
struct Slot {
    conn: Option<Arc<Conn>>,
    hello: Option<Arc<Hello>>,
    last_fault: Option<String>,
    /// Dial now.
    wake: Arc<Notify>,
    dialler: Option<tokio::task::AbortHandle>,
}

/// See the module.
pub struct Node {
    home: PathBuf,
    serving: Arc<dyn Serving>,
    facts: Arc<Facts>,
    secrets: RwLock<Arc<Secrets>>,
    watch: Mutex<Watch>,
    slots: Mutex<BTreeMap<String, Slot>>,
    /// All connections, also those that another one of the same peer has taken the place of.
    conns: Mutex<Vec<Weak<Conn>>>,
    totals: Arc<Totals>,
    failed: Mutex<BTreeMap<&'static str, u64>>,
    handshakes: Semaphore,
    started: Instant,
    dial: bool,
    addresses: Mutex<Vec<SocketAddr>>,
    runtime: tokio::runtime::Handle,
    listeners: Mutex<Vec<tokio::task::AbortHandle>>,
    enrolled: AtomicU64,
}

impl Node {
    /// Reads key and registry, listens and begins to dial, on the runtime that this is called in. What `serving` says of itself
    /// is asked once.
    ///
    /// # Errors
    /// If a file cannot be used or an address cannot be listened on.
    pub async fn start(config: NodeConfig, serving: Arc<dyn Serving>) -> Result<Arc<Self>, NodeError> {
        let NodeConfig { home, listen, dial } = config;
        let secrets = Arc::new(Secrets::open_or_create(&home)?);
        let watch = Watch::new(&home)?;
        let facts = Arc::new(serving.facts());
        let node = Arc::new(Self {
            home,
            serving,
            facts,
            secrets: RwLock::new(secrets),
            watch: Mutex::new(watch),
            slots: Mutex::default(),
            conns: Mutex::default(),
            totals: Arc::default(),
            failed: Mutex::default(),
            handshakes: Semaphore::new(HANDSHAKES),
            started: Instant::now(),
            dial,
            addresses: Mutex::default(),
            runtime: tokio::runtime::Handle::current(),
            listeners: Mutex::default(),
            enrolled: AtomicU64::new(0),
        });
        for address in listen {
            let failed =
                |error: std::io::Error| NodeError::System(format!("cannot listen on {address}: {error}"));
            let listener = TcpListener::bind(address).await.map_err(failed)?;
            lock(&node.addresses).push(listener.local_addr().map_err(failed)?);
            let listening = tokio::spawn(listen_on(Arc::downgrade(&node), listener));
            lock(&node.listeners).push(listening.abort_handle());
        }
        node.arrange();
        tokio::spawn(look(Arc::downgrade(&node)));
        Ok(node)
    }

    /// Where it listens.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        lock(&self.addresses).clone()
    }

    /// Its key.
    pub fn key(&self) -> NodeKey {
        self.secrets().current.key()
    }

    /// What it says of itself.
    pub fn facts(&self) -> &Arc<Facts> {
        &self.facts
    }

    /// Figures so far.
    pub fn figures(&self) -> NodeFigures {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let totals = &self.totals;
        NodeFigures {
            refusals: totals.refusals.totals().collect(),
            handshakes_failed: lock(&self.failed).clone(),
            bytes: (of(&totals.bytes_in), of(&totals.bytes_out)),
            chunks: (of(&totals.chunks_in), of(&totals.chunks_out)),
            connections: self.open().count() as u64,
        }
    }

    /// Nodes that were enrolled while this one ran.
    pub fn enrolled(&self) -> u64 {
        self.enrolled.load(Ordering::Relaxed)
    }

    /// Ends all connections, saying that the node takes nothing new, and stops listening.
    pub fn stop(&self) {
        for listener in lock(&self.listeners).drain(..) {
            listener.abort();
        }
        for slot in lock(&self.slots).values_mut() {
            if let Some(dialler) = slot.dialler.take() {
                dialler.abort();
            }
        }
        for conn in self.open() {
            conn.close(Reason::Draining);
        }
    }

    fn open(&self) -> impl Iterator<Item = Arc<Conn>> + use<> {
        let mut conns = lock(&self.conns);
        conns.retain(|conn| conn.upgrade().is_some_and(|conn| !conn.is_closed()));
        conns.iter().filter_map(Weak::upgrade).collect::<Vec<_>>().into_iter()
    }

    #[cfg(test)]
    pub(crate) fn open_conns(&self) -> impl Iterator<Item = Arc<Conn>> + use<> {
        self.open()
    }

    fn secrets(&self) -> Arc<Secrets> {
        Arc::clone(&self.secrets.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn entry_of(&self, key: &NodeKey) -> Option<Entry> {
        lock(&self.watch).registry.by_key(key).cloned()
    }

    fn failed(&self, why: &'static str) {
        *lock(&self.failed).entry(why).or_default() += 1;
    }

    /// The connection to a peer that is there now.
    fn conn(&self, name: &str) -> Option<Arc<Conn>> {
        let slots = lock(&self.slots);
        let slot = slots.get(name)?;
        let conn = slot.conn.as_ref().filter(|conn| !conn.is_closed());
        if conn.is_none() {
            // Whoever asks wants it soon: no pause is waited for.
            slot.wake.notify_one();
        }
        conn.cloned()
    }

    /// Slots and diallers as the registry says; connections of those it no longer names are ended.
    fn arrange(self: &Arc<Self>) {
        let nodes = lock(&self.watch).registry.nodes.clone();
        for conn in self.open() {
            let entry = nodes.iter().find(|entry| entry.has_key(&conn.peer.key));
            match entry.filter(|entry| *entry.name == *conn.peer.name) {
                Some(entry) => conn.with_link(|link| link.set_limits(entry.limits())),
                None => conn.close(Reason::Removed),
            }
        }
        let mut slots = lock(&self.slots);
        slots.retain(|name, slot| {
            let is_named = nodes.iter().any(|entry| entry.name == *name);
            if let Some(dialler) = slot.dialler.take_if(|_| !is_named) {
                dialler.abort();
            }
            is_named
        });
        for entry in nodes {
            let slot = slots.entry(entry.name.clone()).or_default();
            if self.dial && entry.address.is_some() && slot.dialler.is_none() {
                let dialling = dial_on(Arc::downgrade(self), entry.name, Arc::clone(&slot.wake));
                slot.dialler = Some(self.runtime.spawn(dialling).abort_handle());
            }
        }
    }

    /// Looks at files that may have changed.
    fn look(self: &Arc<Self>) {
        let changed = {
            let mut watch = lock(&self.watch);
            watch.look().unwrap_or_else(|error| {
                tracing::error!("nobody is trusted until this is mended: {error}");
                true
            })
        };
        if changed {
            self.arrange();
        }
        self.turn_key();
    }

    /// The next key takes over once every peer has said that it knows it.
    fn turn_key(&self) {
        match Secrets::open_or_create(&self.home) {
            Ok(found) => {
                let told = found.next.as_ref().map(crate::secret::Secret::key);
                let nodes = &lock(&self.watch).registry.nodes;
                let all_know = told.is_some_and(|told| nodes.iter().all(|node| node.told_key == Some(told)));
                let mut found = found;
                if all_know {
                    match Secrets::end_rotation(&self.home).and_then(|_| Secrets::open_or_create(&self.home))
                    {
                        Ok(turned) => found = turned,
                        Err(error) => tracing::warn!("the node's key is not changed yet: {error}"),
                    }
                }
                *self.secrets.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(found);
            }
            Err(error) => tracing::warn!("the node's key cannot be read, the one before is used: {error}"),
        }
    }

    fn hello(&self, connection: Nonce, stream: u8, entry: &Entry) -> Hello {
        let secrets = self.secrets();
        let mut hello =
            self.facts.hello(connection, (stream, entry.streams), entry.limits(), entry.newest_key());
        if let Some(next) = &secrets.next {
            hello.next_key = next.key();
            hello.next_proof = next.prove_next_of(secrets.current.key());
        }
        hello
    }

    fn link(&self, entry: &Entry) -> Link {
        Link::new(Arc::clone(&self.facts), entry.limits(), self.started.elapsed())
    }

    /// A connection whose HELLOs were exchanged: from now on it is the peer's.
    fn take(self: &Arc<Self>, entry: &Entry, used: NodeKey, hello: Hello) -> Arc<Conn> {
        let conn = Conn::new(
            Parts {
                peer: Peer { name: entry.name.as_str().into(), key: used },
                number: hello.connection,
                planes: self.facts.planes.clone(),
                serving: Arc::clone(&self.serving),
                watcher: Arc::new(Watching(Arc::downgrade(self))),
                totals: Arc::clone(&self.totals),
                started: self.started,
            },
            self.link(entry),
        );
        lock(&self.conns).push(Arc::downgrade(&conn));
        if !hello.is_visit() {
            // The newest is what there is of a peer whose network has changed.
            lock(&self.slots).entry(entry.name.clone()).or_default().conn = Some(Arc::clone(&conn));
        }
        conn.take_hello(hello);
        conn
    }

    fn fault(&self, name: &str, fault: impl Into<String>) {
        if let Some(slot) = lock(&self.slots).get_mut(name) {
            slot.last_fault = Some(fault.into());
        }
    }
}

/// Turning points of connections, told to a node that may be gone.
struct Watching(Weak<Node>);

impl Watcher for Watching {
    fn hello(&self, conn: &Arc<Conn>, hello: &Arc<Hello>) {
        let Some(node) = self.0.upgrade() else { return };
        let none = NodeKey([0; 32]);
        if hello.next_key != none && !is_next_of(conn.peer.key, hello.next_key, &hello.next_proof) {
            return conn.refuse(Refusal::NextKey);
        }
        if let Some(slot) = lock(&node.slots).get_mut(&*conn.peer.name).filter(|_| !hello.is_visit()) {
            slot.hello = Some(Arc::clone(hello));
            slot.last_fault = None;
        }
        // Only what changes is written.
        let known = node.entry_of(&conn.peer.key);
        let is_new = known.is_some_and(|entry| {
            let announces = hello.next_key != none && hello.next_key != entry.newest_key();
            entry.next_key == Some(conn.peer.key) || announces || entry.told_key != Some(hello.knows)
        });
        if is_new && let Err(error) = note_keys(&node.home, conn.peer.key, hello) {
            tracing::warn!("what {} says of its keys is not kept: {error}", conn.peer.name);
        }
    }

    fn closed(&self, conn: &Arc<Conn>, reason: Reason) {
        let Some(node) = self.0.upgrade() else { return };
        // One that this one had taken the place of may be there still.
        let another = node.open().find(|other| {
            let is_visit = other.with_link(|link| link.theirs().is_none_or(|hello| hello.is_visit()));
            other.peer.name == conn.peer.name && !is_visit
        });
        if let Some(slot) = lock(&node.slots).get_mut(&*conn.peer.name)
            && slot.conn.take_if(|other| Arc::ptr_eq(other, conn)).is_some()
        {
            if reason != Reason::Draining {
                slot.last_fault = Some(format!("the connection ended: {}", reason.label()));
            }
            slot.conn = another;
            slot.wake.notify_one();
        }
    }
}

async fn look(node: Weak<Node>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(node) = node.upgrade() else { return };
        // Reading a file may take a moment.
        let _ = tokio::task::spawn_blocking(move || node.look()).await;
    }
}

async fn listen_on(node: Weak<Node>, listener: TcpListener) {
    loop {
        let accepted = listener.accept().await;
        let Some(node) = node.upgrade() else { return };
        match accepted {
            Ok((stream, _)) => {
                tokio::spawn(async move { node.accept(stream).await });
            }
            // Too many files are open, perhaps.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

impl Node {
    async fn accept(self: Arc<Self>, stream: TcpStream) {
        // Whoever has no place is closed at once: the port is open to anybody.
        let Ok(_place) = self.handshakes.try_acquire() else { return self.failed("busy") };
        let _ = stream.set_nodelay(true);
        match tokio::time::timeout(HANDSHAKE, self.handshake(stream)).await {
            Ok(Ok(())) => {}
            Ok(Err(why)) => self.failed(why),
            Err(_) => self.failed("time"),
        }
    }

    async fn handshake(self: &Arc<Self>, stream: TcpStream) -> Result<(), &'static str> {
        let fault = |error: std::io::Error| tls::handshake_fault(&error);
        let start =
            LazyConfigAcceptor::new(rustls::server::Acceptor::default(), stream).await.map_err(fault)?;
        let offers = |protocol: &[u8]| {
            start.client_hello().alpn().is_some_and(|mut offered| offered.any(|one| one == protocol))
        };
        let secrets = self.secrets();
        if offers(ENROL_ALPN) {
            return self.enrol(start, &secrets).await;
        }
        if !offers(ALPN) {
            return Err("protocol");
        }
        let node = Arc::downgrade(self);
        let trusts = move |key: &NodeKey| node.upgrade().is_some_and(|node| node.entry_of(key).is_some());
        let config = tls::server(&secrets.current, Arc::new(trusts), ALPN).map_err(|_| "tls")?;
        let stream = start.into_stream(Arc::new(config)).await.map_err(fault)?;
        let key = peer_key(stream.get_ref().1.peer_certificates()).ok_or("key")?;
        self.serve_stream(TlsStream::Server(stream), key).await
    }

    /// A stream that somebody we know has opened: of a new connection, or one more of a connection that is there.
    async fn serve_stream(
        self: &Arc<Self>,
        mut stream: TlsStream<TcpStream>,
        key: NodeKey,
    ) -> Result<(), &'static str> {
        let entry = self.entry_of(&key).ok_or("key")?;
        let hello = match read_hello(&mut stream).await {
            Ok(hello) => hello,
            Err(Some(refusal)) => {
                self.fault(&entry.name, refusal.to_string());
                self.totals.refusals.count(&refusal);
                return Ok(());
            }
            Err(None) => return Err("broken"),
        };
        let number = hello.stream;
        let ours = Frame::Hello(Box::new(self.hello(hello.connection, number, &entry))).encode(0);
        if stream.write_all(&ours).await.is_err() || stream.flush().await.is_err() {
            return Err("broken");
        }
        let conn = if number == 0 {
            self.take(&entry, key, hello)
        } else {
            let same = |conn: &Arc<Conn>| conn.peer.key == key && conn.number == hello.connection;
            let conn = self.open().find(same).ok_or("broken")?;
            if let Err(refusal) = conn.with_link(|link| link.joins(&hello)) {
                conn.refuse(refusal);
                return Ok(());
            }
            conn
        };
        run_stream(conn, number, stream);
        Ok(())
    }

    async fn enrol(
        self: &Arc<Self>,
        start: tokio_rustls::StartHandshake<TcpStream>,
        secrets: &Secrets,
    ) -> Result<(), &'static str> {
        // Without an invitation nobody is asked who they are.
        if !enrol::is_invited(&self.home) {
            return Err("protocol");
        }
        let config = tls::server(&secrets.current, Arc::new(|_| true), ENROL_ALPN).map_err(|_| "tls")?;
        let stream =
            start.into_stream(Arc::new(config)).await.map_err(|error| tls::handshake_fault(&error))?;
        let key = peer_key(stream.get_ref().1.peer_certificates()).ok_or("key")?;
        match enrol::answer(&self.home, secrets.current.key(), stream, key).await {
            Ok(name) => {
                tracing::info!("node {name} is enrolled");
                self.enrolled.fetch_add(1, Ordering::Relaxed);
                self.look();
                Ok(())
            }
            Err(_) => Err("code"),
        }
    }
}

fn run_stream(conn: Arc<Conn>, number: u8, stream: TlsStream<TcpStream>) {
    let (from, to) = tokio::io::split(stream);
    tokio::spawn(Arc::clone(&conn).write(number, to));
    tokio::spawn(conn.read(from));
}

/// Keeps a connection to one node.
async fn dial_on(node: Weak<Node>, name: String, wake: Arc<Notify>) {
    let mut failures = 0_usize;
    loop {
        let dialled = match node.upgrade() {
            Some(node) => node.dial_once(&name).await,
            None => return,
        };
        match dialled {
            Ok(Some(conn)) => {
                failures = 0;
                while !conn.is_closed() {
                    let _ = tokio::time::timeout(LOOK, wake.notified()).await;
                }
            }
            // It has dialled us.
            Ok(None) => {
                let _ = tokio::time::timeout(LOOK, wake.notified()).await;
            }
            Err(fault) => {
                if let Some(node) = node.upgrade() {
                    node.fault(&name, fault);
                }
                let pause = Duration::from_secs(PAUSES[failures.min(PAUSES.len() - 1)]);
                failures += 1;
                // Somebody who asks for the node does not wait, but for a moment: it may be asked for all the time.
                tokio::time::sleep(pause.min(Duration::from_millis(250))).await;
                let _ = tokio::time::timeout(pause, wake.notified()).await;
            }
        }
    }
}

impl Node {
    async fn dial_once(self: &Arc<Self>, name: &str) -> Result<Option<Arc<Conn>>, String> {
        let is_there = lock(&self.slots)
            .get(name)
            .is_some_and(|slot| slot.conn.as_ref().is_some_and(|conn| !conn.is_closed()));
        if is_there {
            return Ok(None);
        }
        let entry = lock(&self.watch).registry.named(name).cloned().map_err(|error| error.to_string())?;
        let Some(address) = entry.address.clone() else { return Ok(None) };
        let connection = Nonce::fresh().ok_or("no random bytes")?;
        let (stream, key, hello) = self.open_stream(&entry, &address, connection, 0).await?;
        let streams = entry.streams.min(hello.streams);
        let conn = self.take(&entry, key, hello);
        run_stream(Arc::clone(&conn), 0, stream);
        for number in 1..streams {
            let more =
                tokio::time::timeout(HANDSHAKE, self.open_stream(&entry, &address, connection, number));
            // One stream is enough to go on.
            let Ok(Ok((stream, _, hello))) = more.await else { break };
            if let Err(refusal) = conn.with_link(|link| link.joins(&hello)) {
                conn.refuse(refusal);
                break;
            }
            run_stream(Arc::clone(&conn), number, stream);
        }
        Ok(Some(conn))
    }

    async fn open_stream(
        &self,
        entry: &Entry,
        address: &str,
        connection: Nonce,
        number: u8,
    ) -> Result<(TlsStream<TcpStream>, NodeKey, Hello), String> {
        let hello = self.hello(connection, number, entry);
        let secrets = self.secrets();
        let opening = open_stream(&secrets.current, entry, address, hello);
        let opened = tokio::time::timeout(HANDSHAKE, opening).await;
        let opened = opened.unwrap_or_else(|_| Err((format!("{address} does not answer"), None)));
        opened.map_err(|(fault, refusal)| {
            if let Some(refusal) = refusal {
                self.totals.refusals.count(&refusal);
            }
            fault
        })
    }
}

impl Peers for Node {
    fn tenant(&self, scope: &CacheScope) -> Digest {
        if scope.is_default() {
            return [0; 32];
        }
        self.secrets().current.digest("muser node v1 tenant", scope.as_bytes())
    }

    fn list(&self) -> Vec<PeerState> {
        let nodes = lock(&self.watch).registry.nodes.clone();
        let slots = lock(&self.slots);
        let states = nodes.iter().map(|entry| {
            let slot = slots.get(&entry.name);
            let conn = slot.and_then(|slot| slot.conn.as_ref()).filter(|conn| !conn.is_closed());
            let of_link = conn.map(|conn| {
                conn.with_link(|link| {
                    let load = link.load().map(|(load, at)| (load.clone(), conn.now().saturating_sub(*at)));
                    (load, link.round_trip(), link.transfers())
                })
            });
            let (load, round_trip, (fetching, giving)) = of_link.unwrap_or_default();
            PeerState {
                peer: Peer { name: entry.name.as_str().into(), key: entry.key },
                address: entry.address.clone(),
                may_prefill: entry.rights.prefill,
                connected: conn.is_some(),
                hello: slot.and_then(|slot| slot.hello.clone()),
                load,
                round_trip,
                link_rate: conn.and_then(|conn| conn.link_rate()),
                fetching,
                giving,
                last_fault: slot.and_then(|slot| slot.last_fault.clone()),
            }
        });
        states.collect()
    }

    fn quote(&self, peer: &str, quote: Quote, answer: Answer) {
        if let Some(conn) = self.conn(peer) {
            conn.quote(quote, answer);
        }
    }

    fn fetch(&self, peer: &str, fetch: Fetch, sink: Arc<dyn Sink>) -> Arc<dyn Fetching> {
        let begun = match (self.conn(peer), Nonce::fresh()) {
            (Some(conn), Some(nonce)) => conn.fetch(fetch, nonce, Arc::clone(&sink)),
            _ => Err(Box::new(fetch)),
        };
        begun.unwrap_or_else(|fetch| {
            // Told from elsewhere, as all that follows a fetch is.
            self.runtime.spawn(async move { sink.ended(fetch.series, FetchEnd::Lost) });
            Arc::new(NoTransfer)
        })
    }
}

/// A transfer that did not begin.
struct NoTransfer;

impl Fetching for NoTransfer {
    fn installed(&self, _: u32) {}

    fn cancel(&self) {}
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The names in a registry, for whoever checks `--nodes`.
pub fn known_names(home: &Path) -> Result<BTreeSet<String>, NodeError> {
    Ok(Registry::read(home)?.nodes.into_iter().map(|entry| entry.name).collect())
}
