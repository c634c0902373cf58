//! Connections without sockets: two ends of the protocol and a queue each way, with faults from a seed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use muser_handoff::consumer::Event;
use muser_handoff::frame::{ChunkHead, Frame};
use muser_handoff::link::{Doing, Link};
use muser_handoff::producer::Wants;
use muser_handoff::{
    Answer, Component, Digest, Ended, Facts, Fetch, FetchEnd, Fetching, Limits, NodeKey, Nonce, Outlet, Peer,
    PeerState, Peers, Plan, Quote, Reason, Refusal, Serving, Sink, TransferId,
};
use muser_kv::{CacheScope, KvGroup};

const LIMITS: Limits = Limits { may_prefill: true, transfers: 64, rows_a_minute: 0 };

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What happens to a connection when so many chunks have come over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The connection breaks, and can be made again.
    Cut,
    /// The node is gone for good.
    Kill,
    /// Nothing comes any more, and nobody says so.
    Stall,
    /// A bit of the chunk changes.
    Flip,
    /// The chunk is lost.
    Drop,
    /// It comes twice.
    Double,
}

enum Message {
    Frame(Frame),
    Chunk(ChunkHead, Vec<u8>),
    Cut,
}

/// A node that reads prompts.
pub(crate) struct Node {
    pub(crate) peer: Peer,
    pub(crate) serving: Arc<dyn Serving>,
    conn: Mutex<Option<Arc<Conn>>>,
    /// The next fault, and after how many more chunks.
    fault: Mutex<Option<(u64, Fault)>>,
    pub(crate) dead: AtomicBool,
}

/// The peers of one consumer.
pub(crate) struct Wire {
    facts: Arc<Facts>,
    pub(crate) nodes: Vec<Arc<Node>>,
    pub(crate) chunks: Arc<AtomicU64>,
    pub(crate) bytes: Arc<AtomicU64>,
    pub(crate) refusals: Arc<Mutex<Vec<Refusal>>>,
}

struct Conn {
    epoch: Instant,
    consumer: Mutex<Link>,
    producer: Mutex<Link>,
    to_consumer: Mutex<Sender<Message>>,
    to_producer: Mutex<Sender<Message>>,
    sinks: Mutex<HashMap<TransferId, Arc<dyn Sink>>>,
    outlets: Mutex<HashMap<TransferId, Arc<WireOutlet>>>,
    answers: Mutex<HashMap<u32, Answer>>,
    credit: (Mutex<()>, Condvar),
    node: Weak<Node>,
    facts: Arc<Facts>,
    stalled: AtomicBool,
    chunks: Arc<AtomicU64>,
    bytes: Arc<AtomicU64>,
    refusals: Arc<Mutex<Vec<Refusal>>>,
}

impl Wire {
    pub(crate) fn new(facts: Facts, nodes: Vec<(&str, Arc<dyn Serving>)>) -> Arc<Self> {
        let node = |(index, (name, serving)): (usize, (&str, Arc<dyn Serving>))| {
            let peer = Peer { name: name.into(), key: NodeKey([index as u8 + 1; 32]) };
            let (conn, fault) = (Mutex::new(None), Mutex::new(None));
            Arc::new(Node { peer, serving, conn, fault, dead: AtomicBool::new(false) })
        };
        let nodes: Vec<_> = nodes.into_iter().enumerate().map(node).collect();
        Arc::new(Self {
            facts: Arc::new(facts),
            nodes,
            chunks: Arc::default(),
            bytes: Arc::default(),
            refusals: Arc::default(),
        })
    }

    /// After so many more chunks from a node this happens.
    pub(crate) fn set_fault(&self, node: usize, after: u64, fault: Fault) {
        *lock(&self.nodes[node].fault) = Some((after, fault));
    }

    pub(crate) fn heal(&self) {
        for node in &self.nodes {
            *lock(&node.fault) = None;
            node.dead.store(false, Ordering::Relaxed);
            if let Some(conn) = lock(&node.conn).take() {
                conn.cut();
            }
        }
    }

    /// Nothing that nodes say is heard from now on.
    pub(crate) fn silence(&self) {
        for node in &self.nodes {
            if let Some(conn) = self.conn(&node.peer.name) {
                conn.stalled.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Bytes of rows that have come.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn conn(&self, name: &str) -> Option<Arc<Conn>> {
        let node = self.nodes.iter().find(|node| *node.peer.name == *name)?;
        if node.dead.load(Ordering::Relaxed) {
            return None;
        }
        let mut conn = lock(&node.conn);
        let open = conn.as_ref().filter(|conn| !lock(&conn.consumer).is_closed());
        if open.is_none() {
            *conn = Some(self.connect(node));
        }
        conn.clone()
    }

    fn connect(&self, node: &Arc<Node>) -> Arc<Conn> {
        let theirs = Arc::new(node.serving.facts());
        let mut consumer = Link::new(Arc::clone(&self.facts), LIMITS, Duration::ZERO);
        let mut producer = Link::new(Arc::clone(&theirs), LIMITS, Duration::ZERO);
        let hello = |facts: &Facts| {
            Frame::Hello(Box::new(facts.hello(Nonce([3; 16]), (0, 1), LIMITS, NodeKey([5; 32]))))
        };
        consumer.frame(hello(&theirs), Duration::ZERO);
        producer.frame(hello(&self.facts), Duration::ZERO);
        let ((to_consumer, at_consumer), (to_producer, at_producer)) = (channel(), channel());
        let conn = Arc::new(Conn {
            epoch: Instant::now(),
            consumer: Mutex::new(consumer),
            producer: Mutex::new(producer),
            to_consumer: Mutex::new(to_consumer),
            to_producer: Mutex::new(to_producer),
            sinks: Mutex::default(),
            outlets: Mutex::default(),
            answers: Mutex::default(),
            credit: Default::default(),
            node: Arc::downgrade(node),
            facts: theirs,
            stalled: AtomicBool::new(false),
            chunks: Arc::clone(&self.chunks),
            bytes: Arc::clone(&self.bytes),
            refusals: Arc::clone(&self.refusals),
        });
        let at = Arc::clone(&conn);
        std::thread::spawn(move || at.run(&at_consumer, true));
        let at = Arc::clone(&conn);
        std::thread::spawn(move || at.run(&at_producer, false));
        conn
    }
}

impl Conn {
    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    fn link(&self, consumer: bool) -> MutexGuard<'_, Link> {
        lock(if consumer { &self.consumer } else { &self.producer })
    }

    fn run(self: &Arc<Self>, queue: &Receiver<Message>, consumer: bool) {
        loop {
            let doing = match queue.recv_timeout(Duration::from_millis(20)) {
                Ok(Message::Cut) => self.link(consumer).close(Reason::Internal, None),
                Ok(_) | Err(RecvTimeoutError::Disconnected) if self.stalled.load(Ordering::Relaxed) => {
                    continue;
                }
                Ok(Message::Frame(frame)) => self.link(consumer).frame(frame, self.now()),
                Ok(Message::Chunk(head, rows)) => self.chunk(&head, rows),
                Err(RecvTimeoutError::Timeout) => self.link(consumer).tick(self.now()),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            self.does(doing, consumer);
            if self.link(consumer).is_closed() {
                lock(&self.answers).clear();
                return;
            }
        }
    }

    pub(crate) fn cut(&self) {
        let _ = lock(&self.to_consumer).send(Message::Cut);
        let _ = lock(&self.to_producer).send(Message::Cut);
    }

    /// A chunk comes, or what a fault makes of it.
    fn chunk(&self, head: &ChunkHead, mut rows: Vec<u8>) -> Vec<Doing> {
        let fault = self.node.upgrade().and_then(|node| {
            let mut next = lock(&node.fault);
            match &mut *next {
                Some((0, fault)) => {
                    let fault = *fault;
                    *next = None;
                    if fault == Fault::Kill {
                        node.dead.store(true, Ordering::Relaxed);
                    }
                    Some(fault)
                }
                Some((left, _)) => {
                    *left -= 1;
                    None
                }
                None => None,
            }
        });
        match fault {
            Some(Fault::Cut | Fault::Kill) => {
                self.cut();
                return Vec::new();
            }
            Some(Fault::Stall) => {
                self.stalled.store(true, Ordering::Relaxed);
                return Vec::new();
            }
            Some(Fault::Flip) => {
                let at = rows.len() / 3;
                rows[at] ^= 16;
            }
            Some(Fault::Drop) => return Vec::new(),
            Some(Fault::Double) => {
                let doing = self.take(head, &rows);
                return doing.into_iter().chain(self.take(head, &rows)).collect();
            }
            None => {}
        }
        self.take(head, &rows)
    }

    fn take(&self, head: &ChunkHead, rows: &[u8]) -> Vec<Doing> {
        let mut link = self.link(true);
        let number = match link.admit(head, rows.len(), self.now()) {
            Ok(Some(number)) => number,
            Ok(None) => return Vec::new(),
            Err(doing) => return doing,
        };
        let Some(key) = link.consumer(head.transfer).map(muser_handoff::consumer::Consumer::key) else {
            return Vec::new();
        };
        drop(link);
        if key.chunk(&head.place, rows) != head.digest {
            let refuse =
                |consumer: &mut muser_handoff::consumer::Consumer| consumer.refuse(Refusal::ChunkDigest);
            return self.link(true).with_consumer(head.transfer, refuse);
        }
        let sink = lock(&self.sinks).get(&head.transfer).cloned();
        let Some(sink) = sink else { return Vec::new() };
        self.chunks.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(rows.len() as u64, Ordering::Relaxed);
        if !sink.chunk(&head.place, rows) {
            return self.link(true).with_consumer(head.transfer, muser_handoff::consumer::Consumer::cancel);
        }
        let (digest, now) = (head.digest, self.now());
        self.link(true).with_consumer(head.transfer, |consumer| consumer.written(number, digest, now))
    }

    fn does(self: &Arc<Self>, doing: Vec<Doing>, consumer: bool) {
        let to_other = if consumer { &self.to_producer } else { &self.to_consumer };
        for one in doing {
            match one {
                Doing::Send(frame) => drop(lock(to_other).send(Message::Frame(frame))),
                Doing::Tell(transfer, event) => {
                    let sink = lock(&self.sinks).get(&transfer).cloned();
                    let Some(sink) = sink else { continue };
                    match event {
                        Event::Begun(stages) => sink.begun(&stages),
                        Event::Ready(boundary) => sink.ready(boundary),
                        Event::Progress { rows, rest } => sink.progress(rows, rest),
                        Event::Ended(_) => {}
                    }
                }
                Doing::Over(transfer, series, end) => {
                    let sink = lock(&self.sinks).remove(&transfer);
                    sink.into_iter().for_each(|sink| sink.ended(Clone::clone(&*series), end.clone()));
                }
                Doing::Serve(transfer, request, plan) => {
                    let Some(node) = self.node.upgrade() else { continue };
                    let outlet = Arc::new(WireOutlet {
                        conn: Arc::clone(self),
                        transfer,
                        plan,
                        ended: Mutex::new(None),
                        told: Mutex::new(Vec::new()),
                    });
                    lock(&self.outlets).insert(transfer, Arc::clone(&outlet));
                    let asking = Peer { name: "consumer".into(), key: NodeKey([9; 32]) };
                    node.serving.request(&asking, request, outlet);
                }
                Doing::Ended(transfer, ended) => {
                    let outlet = lock(&self.outlets).remove(&transfer);
                    outlet.into_iter().for_each(|outlet| outlet.end(ended));
                    self.wake();
                }
                Doing::Credit => self.wake(),
                Doing::Quote(quote) => {
                    let Some(node) = self.node.upgrade() else { continue };
                    let conn = Arc::clone(self);
                    let question = quote.question;
                    let answer: Answer = Box::new(move |mut quoted| {
                        quoted.question = question;
                        let _ = lock(&conn.to_consumer).send(Message::Frame(Frame::Quoted(quoted)));
                    });
                    node.serving.quote(&node.peer, quote, answer);
                }
                Doing::Quoted(quoted) => {
                    let answer = lock(&self.answers).remove(&quoted.question);
                    answer.into_iter().for_each(|answer| answer(quoted));
                }
                Doing::Refused(refusal) => lock(&self.refusals).push(refusal),
                Doing::Hello => {}
                Doing::Close(_) => self.cut(),
            }
        }
    }

    fn wake(&self) {
        drop(lock(&self.credit.0));
        self.credit.1.notify_all();
    }
}

type Told = Box<dyn FnOnce(Ended) + Send>;

struct WireOutlet {
    conn: Arc<Conn>,
    transfer: TransferId,
    plan: Arc<Plan>,
    ended: Mutex<Option<Ended>>,
    told: Mutex<Vec<Told>>,
}

impl WireOutlet {
    fn end(&self, ended: Ended) {
        lock(&self.ended).get_or_insert(ended);
        let told = std::mem::take(&mut *lock(&self.told));
        told.into_iter().for_each(|tell| tell(ended));
    }

    fn act(
        &self,
        act: impl FnOnce(&mut muser_handoff::producer::Producer) -> Vec<muser_handoff::producer::Move>,
    ) {
        let doing = self.conn.link(false).with_producer(self.transfer, act);
        self.conn.does(doing, false);
    }

    fn check(&self) -> Result<(), Ended> {
        (*lock(&self.ended)).map_or(Ok(()), Err)
    }
}

impl Outlet for WireOutlet {
    fn begin(&self, stages: &[u32]) -> Result<(), Ended> {
        let now = self.conn.now();
        self.act(|producer| producer.begin(stages, Nonce::fresh().expect("random bytes"), now));
        self.check()
    }

    fn plan(&self) -> Arc<Plan> {
        Arc::clone(&self.plan)
    }

    fn lacks(&self, group: KvGroup, block: u32) -> bool {
        let chunks = self.plan.block(group, block);
        self.conn.link(false).producer(self.transfer).is_some_and(|producer| producer.lacks(chunks))
    }

    fn block(&self, group: KvGroup, block: u32, bytes: &[u8]) -> Result<(), Ended> {
        for number in self.plan.block(group, block) {
            let place = self.plan.place(number).expect("a chunk");
            let planes = &self.conn.facts.planes;
            let layer = planes.layer_at(group, place.component, place.layer).expect("a layer");
            let plane = planes.plane(group, place.component).expect("a plane");
            let mut rows = Vec::new();
            plane.gather(&bytes[layer], place.row_range(), &mut rows);
            loop {
                self.check()?;
                let mut link = self.conn.link(false);
                let Some(producer) = link.producer(self.transfer) else {
                    drop(link);
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let wants = producer.wants(number);
                let digest = producer.key().chunk(&place, &rows);
                let head = producer.head(number, digest).expect("a head");
                drop(link);
                match wants {
                    Wants::Nothing => break,
                    Wants::Wait => {
                        let guard = lock(&self.conn.credit.0);
                        drop(self.conn.credit.1.wait_timeout(guard, Duration::from_millis(20)));
                        continue;
                    }
                    Wants::Rows => {
                        let message = Message::Chunk(head, std::mem::take(&mut rows));
                        let _ = lock(&self.conn.to_consumer).send(message);
                    }
                    Wants::Digest => {}
                }
                let now = self.conn.now();
                self.act(|producer| producer.sent(number, digest, now));
                break;
            }
        }
        self.check()
    }

    fn layer(&self, _: KvGroup, _: u32, _: Component, _: u16, _: &[u8]) -> Result<(), Ended> {
        unreachable!("blocks are given whole here")
    }

    fn progress(&self, rows: u32, rest: Option<Duration>) {
        let now = self.conn.now();
        self.act(|producer| producer.progress(rows, rest, now));
    }

    fn give_up(&self, reason: Reason) {
        self.act(|producer| producer.give_up(reason));
    }

    fn ended(&self) -> Option<Ended> {
        *lock(&self.ended)
    }

    fn on_end(&self, told: Box<dyn FnOnce(Ended) + Send>) {
        let ended = *lock(&self.ended);
        match ended {
            Some(ended) => told(ended),
            None => lock(&self.told).push(told),
        }
    }
}

struct WireFetching {
    conn: Arc<Conn>,
    transfer: TransferId,
}

impl Fetching for WireFetching {
    fn installed(&self, boundary: u32) {
        let now = self.conn.now();
        let installed = |consumer: &mut muser_handoff::consumer::Consumer| consumer.installed(boundary, now);
        let doing = self.conn.link(true).with_consumer(self.transfer, installed);
        self.conn.does(doing, true);
    }

    fn cancel(&self) {
        let cancel = muser_handoff::consumer::Consumer::cancel;
        let doing = self.conn.link(true).with_consumer(self.transfer, cancel);
        self.conn.does(doing, true);
    }
}

struct NoFetching;

impl Fetching for NoFetching {
    fn installed(&self, _: u32) {}

    fn cancel(&self) {}
}

impl Peers for Wire {
    fn tenant(&self, scope: &CacheScope) -> Digest {
        *scope.as_bytes()
    }

    fn list(&self) -> Vec<PeerState> {
        let state = |node: &Arc<Node>| {
            let conn = self.conn(&node.peer.name);
            let hello = conn.as_ref().and_then(|conn| lock(&conn.consumer).theirs().cloned());
            PeerState {
                peer: node.peer.clone(),
                address: None,
                may_prefill: true,
                connected: conn.is_some(),
                hello,
                load: None,
                round_trip: None,
                link_rate: None,
                fetching: 0,
                giving: 0,
                last_fault: None,
            }
        };
        self.nodes.iter().map(state).collect()
    }

    fn quote(&self, peer: &str, quote: Quote, answer: Answer) {
        let Some(conn) = self.conn(peer) else { return };
        let asked = lock(&conn.consumer).ask(quote, conn.now());
        if let Some((question, frame)) = asked {
            lock(&conn.answers).insert(question, answer);
            let _ = lock(&conn.to_producer).send(Message::Frame(frame));
        }
    }

    fn fetch(&self, peer: &str, fetch: Fetch, sink: Arc<dyn Sink>) -> Arc<dyn Fetching> {
        let Some(conn) = self.conn(peer) else {
            sink.ended(fetch.series, FetchEnd::Lost);
            return Arc::new(NoFetching);
        };
        let nonce = Nonce::fresh().expect("random bytes");
        let mut link = lock(&conn.consumer);
        match link.fetch(fetch, nonce, conn.now()) {
            Ok((transfer, frame)) => {
                lock(&conn.sinks).insert(transfer, sink);
                drop(link);
                let _ = lock(&conn.to_producer).send(Message::Frame(frame));
                Arc::new(WireFetching { conn, transfer })
            }
            Err(fetch) => {
                drop(link);
                sink.ended(fetch.series, FetchEnd::Lost);
                Arc::new(NoFetching)
            }
        }
    }
}
