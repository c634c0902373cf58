//! A connection with its streams: reading, writing, and handing what comes to whom it is for.
//!
//! One lock guards the machine ([`Link`]); what follows from a call is queued while it is held, so that order is kept, and
//! told outside of it. Rows go from a stream's buffer to the sink without the lock.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, mpsc};

use crate::consumer::Event;
use crate::frame::{ChunkHead, Frame, HEADER_BYTES, Header, Hello, Kind};
use crate::ids::TransferId;
use crate::link::{Doing, Link};
use crate::peers::{Answer, Fetch, FetchEnd, Fetching, Peer, Serving, Sink};
use crate::producer::Wants;
use crate::{Component, Ended, Nonce, Outlet, Plan, Planes, Reason, Refusal, Refusals, Request, Series};

/// Bytes of rows that wait to be written.
const QUEUED_BYTES: u64 = 16 << 20;
/// Chunks of a stream that are in memory: one that is read, one that waits, one that is checked.
const BUFFERS: usize = 3;
/// Buffers that are kept for the next frames.
const SPARE: usize = 32;
/// How long a connection that is over is given to say why.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Things to be told that may wait; beyond it signs of life are left out.
const TOLD: usize = 4096;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What connections share.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) refusals: Refusals,
    pub(crate) bytes_in: AtomicU64,
    pub(crate) bytes_out: AtomicU64,
    pub(crate) chunks_in: AtomicU64,
    pub(crate) chunks_out: AtomicU64,
}

/// A transfer that this side takes.
struct Taking {
    sink: Arc<dyn Sink>,
    /// Held while a chunk is being written, so that nothing is told after the end.
    over: RwLock<bool>,
}

enum Told {
    Event(Arc<Taking>, Event),
    Over(Arc<Taking>, Box<Series>, FetchEnd),
    Serve(Arc<Request>, Arc<Giving>),
    Quote(crate::Quote),
    Answer(Answer, crate::Quoted),
    Ended(Arc<Giving>, Ended),
    Hello,
    Closed(Reason),
}

#[derive(Default)]
struct Books {
    taking: HashMap<TransferId, Arc<Taking>>,
    giving: HashMap<TransferId, Arc<Giving>>,
    answers: HashMap<u32, Answer>,
    control: VecDeque<Vec<u8>>,
    /// Whole CHUNK frames.
    rows: VecDeque<Vec<u8>>,
    queued_bytes: u64,
    /// Buffers of frames that are written, for the next ones: fresh ones of this size cost page faults.
    spare: Vec<Vec<u8>>,
}

/// What happens at turning points of a connection.
pub(crate) trait Watcher: Send + Sync {
    /// The peer has said who it is.
    fn hello(&self, conn: &Arc<Conn>, hello: &Arc<Hello>);
    /// The connection is over.
    fn closed(&self, conn: &Arc<Conn>, reason: Reason);
}

pub(crate) struct Conn {
    pub(crate) peer: Peer,
    pub(crate) number: Nonce,
    planes: Planes,
    serving: Arc<dyn Serving>,
    watcher: Arc<dyn Watcher>,
    totals: Arc<Totals>,
    started: Instant,
    state: Mutex<(Link, Books)>,
    room: Condvar,
    wake: Notify,
    /// Streams end.
    ended: Notify,
    is_closed: AtomicBool,
    tell: mpsc::Sender<Told>,
    runtime: tokio::runtime::Handle,
    came: Mutex<Rate>,
}

/// Bytes a second while something came.
#[derive(Debug, Default)]
struct Rate {
    since: Option<Instant>,
    bytes: u64,
    smoothed: Option<f64>,
}

impl Rate {
    fn add(&mut self, bytes: u64) {
        let since = *self.since.get_or_insert_with(Instant::now);
        self.bytes += bytes;
        let took = since.elapsed();
        if took > Duration::from_secs(2) {
            // There was a pause: it says nothing of the link.
            (self.since, self.bytes) = (None, 0);
        } else if took > Duration::from_millis(200) {
            let rate = self.bytes as f64 / took.as_secs_f64();
            self.smoothed = Some(self.smoothed.map_or(rate, |before| before * 0.7 + rate * 0.3));
            (self.since, self.bytes) = (None, 0);
        }
    }
}

pub(crate) struct Parts {
    pub(crate) peer: Peer,
    pub(crate) number: Nonce,
    pub(crate) planes: Planes,
    pub(crate) serving: Arc<dyn Serving>,
    pub(crate) watcher: Arc<dyn Watcher>,
    pub(crate) totals: Arc<Totals>,
    pub(crate) started: Instant,
}

impl Conn {
    /// A connection, whose teller runs from now on.
    pub(crate) fn new(parts: Parts, link: Link) -> Arc<Self> {
        let (tell, told) = mpsc::channel(TOLD);
        let Parts { peer, number, planes, serving, watcher, totals, started } = parts;
        let conn = Arc::new(Self {
            peer,
            number,
            planes,
            serving,
            watcher,
            totals,
            started,
            state: Mutex::new((link, Books::default())),
            room: Condvar::new(),
            wake: Notify::new(),
            ended: Notify::new(),
            is_closed: AtomicBool::new(false),
            tell,
            runtime: tokio::runtime::Handle::current(),
            came: Mutex::default(),
        });
        tokio::spawn(Arc::clone(&conn).teller(told));
        tokio::spawn(Arc::clone(&conn).ticker());
        conn
    }

    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    pub(crate) fn with_link<T>(&self, look: impl FnOnce(&mut Link) -> T) -> T {
        look(&mut lock(&self.state).0)
    }

    pub(crate) fn link_rate(&self) -> Option<f64> {
        lock(&self.came).smoothed
    }

    /// Does something with the machine; what follows is queued in order.
    fn act(self: &Arc<Self>, act: impl FnOnce(&mut Link, Duration) -> Vec<Doing>) {
        let now = self.now();
        let mut state = lock(&self.state);
        let doing = act(&mut state.0, now);
        self.apply(&mut state.1, doing);
    }

    fn apply(self: &Arc<Self>, books: &mut Books, doing: Vec<Doing>) {
        for one in doing {
            match one {
                Doing::Send(frame) => {
                    books.control.push_back(frame.encode(0));
                    self.wake.notify_waiters();
                }
                Doing::Tell(transfer, event) => {
                    if let Some(taking) = books.taking.get(&transfer) {
                        self.tell(Told::Event(Arc::clone(taking), event));
                    }
                }
                Doing::Over(transfer, series, end) => {
                    if let Some(taking) = books.taking.remove(&transfer) {
                        self.tell(Told::Over(taking, series, end));
                    }
                }
                Doing::Serve(transfer, request, plan) => {
                    let conn = Arc::clone(self);
                    let giving = Arc::new(Giving { conn, transfer, plan, end: Mutex::new((None, None)) });
                    books.giving.insert(transfer, Arc::clone(&giving));
                    self.tell(Told::Serve(request, giving));
                }
                Doing::Ended(transfer, ended) => {
                    if let Some(giving) = books.giving.remove(&transfer) {
                        lock(&giving.end).0 = Some(ended);
                        self.tell(Told::Ended(giving, ended));
                    }
                    self.room.notify_all();
                }
                Doing::Credit => self.room.notify_all(),
                Doing::Quote(quote) => self.tell(Told::Quote(quote)),
                Doing::Quoted(quoted) => {
                    if let Some(answer) = books.answers.remove(&quoted.question) {
                        self.tell(Told::Answer(answer, quoted));
                    }
                }
                Doing::Hello => self.tell(Told::Hello),
                Doing::Refused(refusal) => {
                    tracing::warn!(node = %self.peer.name, refusal = refusal.name(), "refused: {refusal}");
                    self.totals.refusals.count(&refusal);
                }
                Doing::Close(reason) => {
                    self.is_closed.store(true, Ordering::Release);
                    books.answers.clear();
                    // Of what waits to be written only why it is over is still of use.
                    books.rows.clear();
                    books.queued_bytes = 0;
                    self.tell(Told::Closed(reason));
                    self.room.notify_all();
                    self.wake.notify_waiters();
                    self.ended.notify_waiters();
                }
            }
        }
    }

    fn tell(self: &Arc<Self>, told: Told) {
        match self.tell.try_send(told) {
            // Signs of life may be left out; nothing else comes so often.
            Ok(())
            | Err(
                mpsc::error::TrySendError::Closed(_)
                | mpsc::error::TrySendError::Full(Told::Event(_, Event::Progress { .. })),
            ) => {}
            Err(mpsc::error::TrySendError::Full(told)) => {
                let tell = self.tell.clone();
                self.runtime.spawn(async move { tell.send(told).await });
            }
        }
    }

    async fn teller(self: Arc<Self>, mut told: mpsc::Receiver<Told>) {
        while let Some(one) = told.recv().await {
            match one {
                Told::Event(taking, event) => match event {
                    Event::Begun(stages) => taking.sink.begun(&stages),
                    Event::Ready(boundary) => taking.sink.ready(boundary),
                    Event::Progress { rows, rest } => taking.sink.progress(rows, rest),
                    Event::Ended(_) => {}
                },
                Told::Over(taking, series, end) => {
                    *taking.over.write().unwrap_or_else(PoisonError::into_inner) = true;
                    taking.sink.ended(*series, end);
                }
                Told::Serve(request, giving) => self.serving.request(&self.peer, request, giving),
                Told::Quote(quote) => {
                    let conn = Arc::clone(&self);
                    let question = quote.question;
                    let answer = Box::new(move |quoted: crate::Quoted| {
                        let quoted = crate::Quoted { question, ..quoted };
                        conn.act(|link, _| {
                            if link.is_closed() {
                                Vec::new()
                            } else {
                                vec![Doing::Send(Frame::Quoted(quoted))]
                            }
                        });
                    });
                    self.serving.quote(&self.peer, quote, answer);
                }
                Told::Answer(answer, quoted) => answer(quoted),
                Told::Ended(giving, ended) => giving.ended_as(ended),
                Told::Hello => {
                    if let Some(hello) = self.with_link(|link| link.theirs().cloned()) {
                        self.watcher.hello(&self, &hello);
                    }
                }
                Told::Closed(reason) => {
                    self.watcher.closed(&self, reason);
                    // What was queued behind it is told as well.
                    told.close();
                }
            }
        }
    }

    async fn ticker(self: Arc<Self>) {
        while !self.is_closed() {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let load_is_due = self.with_link(|link| link.load_is_due(self.now()));
            let load = load_is_due.then(|| self.serving.load());
            let now = self.now();
            let mut state = lock(&self.state);
            let (link, books) = &mut *state;
            for question in link.unanswered(now) {
                books.answers.remove(&question);
            }
            let mut doing = link.tick(now);
            if let Some(load) = load.filter(|_| !link.is_closed()) {
                doing.push(Doing::Send(link.say_load(load, now)));
            }
            self.apply(books, doing);
        }
    }

    /// Ends the connection, and says why.
    pub(crate) fn close(self: &Arc<Self>, reason: Reason) {
        self.act(|link, _| link.close(reason, Some(reason)));
    }

    /// A stream broke.
    fn broke(self: &Arc<Self>) {
        self.act(|link, _| link.close(Reason::Silent, None));
    }

    pub(crate) fn take_hello(self: &Arc<Self>, hello: Hello) {
        self.act(|link, now| link.frame(Frame::Hello(Box::new(hello)), now));
    }

    pub(crate) fn refuse(self: &Arc<Self>, refusal: Refusal) {
        self.act(|link, _| link.close_for(refusal));
    }

    pub(crate) fn quote(self: &Arc<Self>, quote: crate::Quote, answer: Answer) {
        let now = self.now();
        let mut state = lock(&self.state);
        let Some((question, frame)) = state.0.ask(quote, now) else { return };
        state.1.answers.insert(question, answer);
        self.apply(&mut state.1, vec![Doing::Send(frame)]);
    }

    /// Begins a transfer, or gives the fetch back.
    pub(crate) fn fetch(
        self: &Arc<Self>,
        fetch: Fetch,
        nonce: Nonce,
        sink: Arc<dyn Sink>,
    ) -> Result<Arc<dyn Fetching>, Box<Fetch>> {
        let now = self.now();
        let mut state = lock(&self.state);
        let (transfer, frame) = state.0.fetch(fetch, nonce, now)?;
        state.1.taking.insert(transfer, Arc::new(Taking { sink, over: RwLock::new(false) }));
        self.apply(&mut state.1, vec![Doing::Send(frame)]);
        Ok(Arc::new(Running { conn: Arc::clone(self), transfer }))
    }

    /// Writes what is queued on a stream; stream 0 all that is no chunk.
    pub(crate) async fn write(self: Arc<Self>, stream: u8, mut to: impl AsyncWrite + Unpin) {
        loop {
            let (woken, ended) = (self.wake.notified(), self.ended.notified());
            let was_closed = self.is_closed();
            let (frame, is_rows) = {
                let mut state = lock(&self.state);
                let books = &mut state.1;
                match if stream == 0 { books.control.pop_front() } else { None } {
                    Some(frame) => (Some(frame), false),
                    None => (books.rows.pop_front(), true),
                }
            };
            let written = match &frame {
                // Why it is over is said, if the network takes it.
                Some(frame) if was_closed => {
                    match tokio::time::timeout(LAST_WORDS, to.write_all(frame)).await {
                        Ok(written) => written,
                        Err(_) => break,
                    }
                }
                Some(frame) => tokio::select! {
                    written = to.write_all(frame) => written,
                    // Half of a frame is on its way: nothing can follow it.
                    () = ended => break,
                },
                None if was_closed => break,
                None => {
                    let flushed = to.flush().await;
                    // The closing may come between looking and waiting.
                    let _ = tokio::time::timeout(Duration::from_millis(200), woken).await;
                    flushed
                }
            };
            if let Some(frame) = frame.filter(|_| is_rows) {
                self.wrote(frame);
            }
            if written.is_err() {
                return self.broke();
            }
        }
        let _ = tokio::time::timeout(LAST_WORDS, to.shutdown()).await;
    }

    /// A CHUNK is written: there is room for another one.
    fn wrote(&self, frame: Vec<u8>) {
        let books = &mut lock(&self.state).1;
        books.queued_bytes = books.queued_bytes.saturating_sub(frame.len() as u64);
        if books.spare.len() < SPARE {
            books.spare.push(frame);
        }
        self.room.notify_all();
    }

    /// Reads a stream until it ends.
    pub(crate) async fn read(self: Arc<Self>, mut from: impl AsyncRead + Unpin) {
        // While a chunk is checked and put in its place the next one is read: a few buffers a stream, whatever comes.
        let (check, checks) = mpsc::channel(1);
        let (give_back, mut spare) = mpsc::channel(BUFFERS);
        let conn = Arc::clone(&self);
        // A thread: a task that is woken by the reader would wait for the reader's thread.
        tokio::task::spawn_blocking(move || conn.check(checks, &give_back));
        let mut buffers = BUFFERS;
        loop {
            let ended = self.ended.notified();
            if self.is_closed() {
                return;
            }
            let one = tokio::select! {
                () = ended => return,
                one = self.read_one(&mut from, &check, &mut spare, &mut buffers) => one,
            };
            match one {
                Ok(()) => {}
                Err(Fault::Broken) => return self.broke(),
                Err(Fault::Refused(refusal)) => return self.refuse(refusal),
            }
        }
    }

    async fn read_one(
        self: &Arc<Self>,
        from: &mut (impl AsyncRead + Unpin),
        check: &mpsc::Sender<Came>,
        spare: &mut mpsc::Receiver<Vec<u8>>,
        fresh: &mut usize,
    ) -> Result<(), Fault> {
        let mut header = [0; HEADER_BYTES];
        from.read_exact(&mut header).await?;
        let header = Header::decode(header)?;
        self.with_link(|link| link.expects(header.kind))?;
        if header.kind != Kind::Chunk {
            let mut body = Vec::new();
            from.take(u64::from(header.body)).read_to_end(&mut body).await?;
            if body.len() != header.body as usize {
                return Err(Fault::Broken);
            }
            let (frame, _) = Frame::decode(header.kind, &body)?;
            self.act(|link, now| link.frame(frame, now));
            return Ok(());
        }
        let Some(payload) = (header.body as usize).checked_sub(ChunkHead::BYTES) else {
            return Err(Refusal::Truncated { field: "chunk" }.into());
        };
        let mut head = [0; ChunkHead::BYTES];
        from.read_exact(&mut head).await?;
        let (Frame::Chunk(head), _) = Frame::decode(Kind::Chunk, &head)? else {
            return Err(Refusal::Kind { found: Kind::Chunk as u16 }.into());
        };
        let admitted = self.admit(&head, payload);
        let mut rows = match spare.try_recv() {
            Ok(buffer) => buffer,
            Err(_) if *fresh > 0 => {
                *fresh -= 1;
                Vec::new()
            }
            Err(_) => spare.recv().await.ok_or(Fault::Broken)?,
        };
        rows.resize(payload, 0);
        from.read_exact(&mut rows).await?;
        self.totals.bytes_in.fetch_add(payload as u64, Ordering::Relaxed);
        lock(&self.came).add(payload as u64);
        check.send(Came { head, admitted, rows }).await.map_err(|_| Fault::Broken)?;
        Ok(())
    }

    /// Checks what a stream has read, and puts it in its place.
    fn check(self: Arc<Self>, mut checks: mpsc::Receiver<Came>, give_back: &mpsc::Sender<Vec<u8>>) {
        while let Some(Came { head, admitted, rows }) = checks.blocking_recv() {
            if let Some((number, taking, key)) = admitted {
                self.take_rows(&head, number, &taking, &key, &rows);
            }
            let _ = give_back.try_send(rows);
        }
    }

    /// Is somebody waiting for this chunk? If not, its rows are read and dropped, or the connection is over.
    fn admit(
        self: &Arc<Self>,
        head: &ChunkHead,
        payload: usize,
    ) -> Option<(u32, Arc<Taking>, crate::SeriesKey)> {
        let now = self.now();
        let mut state = lock(&self.state);
        match state.0.admit(head, payload, now) {
            Ok(number) => {
                let key = state.0.consumer(head.transfer)?.key();
                Some((number?, Arc::clone(state.1.taking.get(&head.transfer)?), key))
            }
            Err(doing) => {
                self.apply(&mut state.1, doing);
                None
            }
        }
    }

    fn take_rows(
        self: &Arc<Self>,
        head: &ChunkHead,
        number: u32,
        taking: &Taking,
        key: &crate::SeriesKey,
        rows: &[u8],
    ) {
        let transfer = head.transfer;
        if key.chunk(&head.place, rows) != head.digest {
            self.act(|link, _| {
                link.with_consumer(transfer, |consumer| consumer.refuse(Refusal::ChunkDigest))
            });
            return;
        }
        let was_written = {
            let over = taking.over.read().unwrap_or_else(PoisonError::into_inner);
            !*over && taking.sink.chunk(&head.place, rows)
        };
        self.totals.chunks_in.fetch_add(1, Ordering::Relaxed);
        self.act(|link, now| {
            link.with_consumer(transfer, |consumer| {
                if was_written { consumer.written(number, head.digest, now) } else { consumer.cancel() }
            })
        });
    }
}

/// The number of a chunk, and what is to be done with it.
type Admitted = (u32, Arc<Taking>, crate::SeriesKey);

/// A chunk that was read.
struct Came {
    head: ChunkHead,
    /// `None`: nobody waits for it any more.
    admitted: Option<Admitted>,
    rows: Vec<u8>,
}

enum Fault {
    Broken,
    Refused(Refusal),
}

impl From<std::io::Error> for Fault {
    fn from(_: std::io::Error) -> Self {
        Self::Broken
    }
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The consumer's end.
struct Running {
    conn: Arc<Conn>,
    transfer: TransferId,
}

impl Fetching for Running {
    fn installed(&self, boundary: u32) {
        self.conn
            .act(|link, now| link.with_consumer(self.transfer, |consumer| consumer.installed(boundary, now)));
    }

    fn cancel(&self) {
        self.conn.act(|link, _| link.with_consumer(self.transfer, crate::consumer::Consumer::cancel));
    }
}

/// Where rows begin in a frame.
const CHUNK_START: usize = HEADER_BYTES + ChunkHead::BYTES;

type OnEnd = Box<dyn FnOnce(Ended) + Send>;

/// The producer's end.
pub(crate) struct Giving {
    conn: Arc<Conn>,
    transfer: TransferId,
    plan: Arc<Plan>,
    end: Mutex<(Option<Ended>, Option<OnEnd>)>,
}

impl Giving {
    fn ended_as(&self, ended: Ended) {
        let told = lock(&self.end).1.take();
        if let Some(told) = told {
            told(ended);
        }
    }

    /// How it ended, also before that was told.
    fn end_now(&self) -> Ended {
        lock(&self.end).0.unwrap_or(Ended::Lost)
    }

    /// What of a chunk is wanted, once that can be said.
    fn wait_for(&self, number: u32) -> Result<(Wants, crate::SeriesKey), Ended> {
        let mut state = lock(&self.conn.state);
        loop {
            let (link, books) = &mut *state;
            let has_room = books.queued_bytes < QUEUED_BYTES;
            let Some(producer) = link.producer(self.transfer) else { break };
            match producer.wants(number) {
                Wants::Rows if !has_room => producer.unpromise(number),
                Wants::Wait => {}
                wants => return Ok((wants, producer.key())),
            }
            let waited = self.conn.room.wait_timeout(state, Duration::from_millis(500));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        Err(self.end_now())
    }
}

impl Outlet for Giving {
    fn begin(&self, stages: &[u32]) -> Result<(), Ended> {
        let Some(nonce) = Nonce::fresh() else {
            self.give_up(Reason::Internal);
            return Err(Ended::Aborted(Reason::Internal));
        };
        self.conn.act(|link, now| {
            link.with_producer(self.transfer, |producer| producer.begin(stages, nonce, now))
        });
        self.ended().map_or(Ok(()), Err)
    }

    fn plan(&self) -> Arc<Plan> {
        Arc::clone(&self.plan)
    }

    fn lacks(&self, group: muser_kv::KvGroup, block: u32) -> bool {
        let chunks = self.plan().block(group, block);
        self.conn
            .with_link(|link| link.producer(self.transfer).is_some_and(|producer| producer.lacks(chunks)))
    }

    fn block(&self, group: muser_kv::KvGroup, block: u32, bytes: &[u8]) -> Result<(), Ended> {
        let plan = self.plan();
        for plane in plan.planes().of_group(group) {
            for layer in 0..plane.layers {
                let at = self.conn.planes.layer_at(group, plane.component, layer);
                let Some(bytes) = at.and_then(|at| bytes.get(at)) else {
                    self.give_up(Reason::Internal);
                    return Err(Ended::Aborted(Reason::Internal));
                };
                self.layer(group, block, plane.component, layer, bytes)?;
            }
        }
        Ok(())
    }

    fn layer(
        &self,
        group: muser_kv::KvGroup,
        block: u32,
        component: Component,
        layer: u16,
        bytes: &[u8],
    ) -> Result<(), Ended> {
        let plan = self.plan();
        let plane = plan.planes().plane(group, component).filter(|plane| plane.layer_bytes() == bytes.len());
        let Some(plane) = plane else {
            self.give_up(Reason::Internal);
            return Err(Ended::Aborted(Reason::Internal));
        };
        for number in plan.layer_chunks(group, block, component, layer) {
            let (wants, key) = self.wait_for(number)?;
            if wants == Wants::Nothing {
                continue;
            }
            let Some(place) = plan.place(number) else { continue };
            let mut frame = lock(&self.conn.state).1.spare.pop().unwrap_or_default();
            frame.clear();
            frame.resize(CHUNK_START, 0);
            plane.gather(bytes, place.row_range(), &mut frame);
            let rows = frame.len() - CHUNK_START;
            let digest = key.chunk(&place, &frame[CHUNK_START..]);
            let now = self.conn.now();
            let mut state = lock(&self.conn.state);
            let (link, books) = &mut *state;
            let Some(producer) = link.producer(self.transfer) else {
                drop(state);
                return Err(self.end_now());
            };
            if let Some(head) = producer.head(number, digest).filter(|_| wants == Wants::Rows) {
                let totals = &self.conn.totals;
                totals.bytes_out.fetch_add(rows as u64, Ordering::Relaxed);
                totals.chunks_out.fetch_add(1, Ordering::Relaxed);
                frame[..CHUNK_START].copy_from_slice(&Frame::Chunk(head).encode(rows));
                books.queued_bytes += frame.len() as u64;
                books.rows.push_back(frame);
                self.conn.wake.notify_waiters();
            }
            let doing = link.with_producer(self.transfer, |producer| producer.sent(number, digest, now));
            self.conn.apply(books, doing);
        }
        Ok(())
    }

    fn progress(&self, rows: u32, rest: Option<Duration>) {
        self.conn.act(|link, now| {
            link.with_producer(self.transfer, |producer| producer.progress(rows, rest, now))
        });
    }

    fn give_up(&self, reason: Reason) {
        self.conn.act(|link, _| link.with_producer(self.transfer, |producer| producer.give_up(reason)));
    }

    fn ended(&self) -> Option<Ended> {
        lock(&self.end).0
    }

    fn on_end(&self, told: OnEnd) {
        let mut end = lock(&self.end);
        let Some(ended) = end.0 else {
            end.1 = Some(told);
            return;
        };
        drop(end);
        told(ended);
    }
}
