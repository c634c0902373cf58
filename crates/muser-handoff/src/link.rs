//! One connection, whatever carries it: HELLO first, then transfers in both directions, each frame to whom it belongs.
//!
//! A frame that belongs to nothing ends the connection; one that is wrong for its transfer ends the transfer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::consumer::{Consumer, Event, Step};
use crate::frame::{Abort, ChunkHead, Frame, Hello, Kind, Load, Quote, Quoted, Reason, Request};
use crate::ids::TransferId;
use crate::peers::{Ended, Facts, Fetch, FetchEnd, Limits, SILENCE};
use crate::producer::{Move, Producer};
use crate::{Nonce, Plan, Refusal, Series};

/// Transfers that may go on at once in one direction, whatever a peer's limit says.
pub(crate) const MOST_TRANSFERS: u16 = 64;
/// Questions that may wait for an answer.
const MOST_QUESTIONS: usize = 64;
/// How long an answer may take.
const QUESTION_TIME: Duration = Duration::from_secs(1);
/// Ended transfers whose late frames are dropped.
const REMEMBERED: usize = 256;
/// How long an idle connection may be silent.
pub(crate) const IDLE_SILENCE: Duration = Duration::from_secs(15);
/// How often an idle side says something.
const IDLE_SIGN: Duration = Duration::from_secs(5);
/// How often a busy side says something of the connection itself.
const BUSY_SIGN: Duration = Duration::from_secs(1);

/// What a call has led to, in order.
#[derive(Debug)]
pub enum Doing {
    /// Send this.
    Send(Frame),
    /// Something for a transfer's sink; not its end.
    Tell(TransferId, Event),
    /// A transfer that this side takes is over.
    Over(TransferId, Box<Series>, FetchEnd),
    /// A request that may be asked.
    Serve(TransferId, Arc<Request>, Arc<Plan>),
    /// A transfer that this side gives is over.
    Ended(TransferId, Ended),
    /// There may be credit again.
    Credit,
    /// A question to be answered.
    Quote(Quote),
    /// An answer, to the question with this number.
    Quoted(Quoted),
    /// The peer has said who it is.
    Hello,
    /// To be counted.
    Refused(Refusal),
    /// The connection is over.
    Close(Reason),
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Link {
    facts: Arc<Facts>,
    limits: Limits,
    theirs: Option<Arc<Hello>>,
    load: Option<(Load, Duration)>,
    round_trip: Option<Duration>,
    consumers: BTreeMap<TransferId, Consumer>,
    producers: BTreeMap<TransferId, Producer>,
    /// Transfers that this side ended before the producer did: what is on its way for them is dropped.
    dropped: BTreeMap<TransferId, u64>,
    last_transfer: u32,
    last_request: u32,
    questions: BTreeMap<u32, Duration>,
    last_question: u32,
    /// Rows that may be asked for now, and since when.
    rows: (f64, Duration),
    heard: Duration,
    said_load: Option<Duration>,
    closed: bool,
}

impl Link {
    /// A connection that has just been made.
    pub fn new(facts: Arc<Facts>, limits: Limits, now: Duration) -> Self {
        Self {
            facts,
            limits,
            theirs: None,
            load: None,
            round_trip: None,
            consumers: BTreeMap::new(),
            producers: BTreeMap::new(),
            dropped: BTreeMap::new(),
            last_transfer: 0,
            last_request: 0,
            questions: BTreeMap::new(),
            last_question: 0,
            rows: (f64::from(limits.rows_a_minute), now),
            heard: now,
            said_load: None,
            closed: false,
        }
    }

    /// What the peer has said of itself.
    pub fn theirs(&self) -> Option<&Arc<Hello>> {
        self.theirs.as_ref()
    }

    /// How busy it said it is, and when.
    pub fn load(&self) -> Option<&(Load, Duration)> {
        self.load.as_ref()
    }

    /// Smoothed.
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    /// Transfers from the peer, and to it.
    pub fn transfers(&self) -> (usize, usize) {
        (self.consumers.len(), self.producers.len())
    }

    /// The registry says something else now.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// May a frame of this kind come now? Asked when nothing but its header is known, before memory is taken for it.
    pub fn expects(&self, kind: Kind) -> Result<(), Refusal> {
        let order = Err(Refusal::Order { frame: kind.name() });
        match (kind, &self.theirs) {
            (Kind::Hello, None) | (Kind::Abort, _) => Ok(()),
            (Kind::Hello, Some(_)) | (_, None) => order,
            (Kind::Request | Kind::Quote, _) if !self.limits.may_prefill => {
                Err(Refusal::NotAllowed { right: "prefill" })
            }
            (Kind::Begin | Kind::Chunk | Kind::Stage | Kind::Seal, _)
                if self.consumers.is_empty() && self.dropped.is_empty() =>
            {
                Err(Refusal::Unsolicited { frame: kind.name() })
            }
            (Kind::Ack | Kind::Nack, _) if self.last_request == 0 => {
                Err(Refusal::Unsolicited { frame: kind.name() })
            }
            (Kind::Quoted, _) if self.last_question == 0 => Err(Refusal::Unsolicited { frame: kind.name() }),
            _ => Ok(()),
        }
    }

    /// The peer's HELLO on a further stream.
    pub fn joins(&self, hello: &Hello) -> Result<(), Refusal> {
        let Some(theirs) = &self.theirs else { return Err(Refusal::Order { frame: "HELLO" }) };
        let same = Hello { stream: theirs.stream, ..hello.clone() } == **theirs;
        if same && hello.stream != 0 { Ok(()) } else { Err(Refusal::Stream) }
    }

    /// A frame other than a chunk.
    pub fn frame(&mut self, frame: Frame, now: Duration) -> Vec<Doing> {
        if self.closed {
            return Vec::new();
        }
        self.heard = now;
        if let Err(refusal) = self.expects(frame.kind()) {
            return self.close_for(refusal);
        }
        match frame {
            Frame::Hello(hello) => {
                self.theirs = Some(Arc::from(hello));
                vec![Doing::Hello]
            }
            Frame::Load(load) => self.take_load(load, now),
            Frame::Quote(quote) => vec![Doing::Quote(quote)],
            Frame::Quoted(quoted) => {
                if quoted.question == 0 || quoted.question > self.last_question {
                    return self.close_for(Refusal::Unsolicited { frame: "QUOTED" });
                }
                // An answer after its time is nobody's.
                let is_awaited = self.questions.remove(&quoted.question).is_some();
                if is_awaited { vec![Doing::Quoted(quoted)] } else { Vec::new() }
            }
            Frame::Request(request) => self.request(Arc::from(request), now),
            Frame::Chunk(_) => self.close_for(Refusal::Order { frame: "CHUNK" }),
            Frame::Abort(Abort { transfer: TransferId(0), reason, .. }) => self.close(reason, None),
            Frame::Abort(abort) if abort.by_consumer => self.for_producer(abort.transfer, &frame, now),
            Frame::Abort(abort) => self.for_consumer(abort.transfer, frame, now),
            Frame::Begin(ref begin) => self.for_consumer(begin.transfer, frame, now),
            Frame::Stage(stage) => self.for_consumer(stage.transfer, frame, now),
            Frame::Seal(seal) => self.for_consumer(seal.transfer, frame, now),
            Frame::Progress(crate::frame::Progress::Producer { transfer, .. }) => {
                self.for_consumer(transfer, frame, now)
            }
            Frame::Progress(crate::frame::Progress::Consumer { transfer, .. }) => {
                self.for_producer(transfer, &frame, now)
            }
            Frame::Ack(ack) => self.for_producer(ack.transfer, &frame, now),
            Frame::Nack(nack) => self.for_producer(nack.transfer, &frame, now),
        }
    }

    fn take_load(&mut self, load: Load, now: Duration) -> Vec<Doing> {
        if load.echo_ms != 0 {
            let trip = (now.as_millis() as u32).wrapping_sub(load.echo_ms).wrapping_sub(load.held_ms);
            // A peer's arithmetic is not believed beyond what a network can do.
            if trip < 60_000 {
                let trip = Duration::from_millis(u64::from(trip));
                self.round_trip = Some(self.round_trip.map_or(trip, |before| (before * 7 + trip) / 8));
            }
        }
        self.load = Some((load, now));
        Vec::new()
    }

    fn request(&mut self, request: Arc<Request>, now: Duration) -> Vec<Doing> {
        let transfer = request.transfer;
        if transfer.0 <= self.last_request {
            return self.close_for(Refusal::TransferInUse);
        }
        self.last_request = transfer.0;
        let refuse = |reason| vec![Doing::Send(Frame::Abort(Abort { transfer, by_consumer: false, reason }))];
        let most = self.limits.transfers.min(MOST_TRANSFERS);
        if self.producers.len() >= usize::from(most) {
            let limit = Refusal::Limit { field: "transfers", limit: u64::from(most) };
            return [Doing::Refused(limit)].into_iter().chain(refuse(Reason::Limit)).collect();
        }
        if request.span.cut > self.facts.max_positions {
            return refuse(Reason::TooLong);
        }
        if !self.take_rows(request.span.cut, now) {
            let limit =
                Refusal::Limit { field: "rows a minute", limit: u64::from(self.limits.rows_a_minute) };
            return [Doing::Refused(limit)].into_iter().chain(refuse(Reason::Limit)).collect();
        }
        let facts = &self.facts;
        match Producer::new(Arc::clone(&request), &facts.planes, &facts.identity, &facts.draft, now) {
            Ok(producer) => {
                let plan = Arc::clone(producer.plan());
                self.producers.insert(transfer, producer);
                vec![Doing::Serve(transfer, request, plan)]
            }
            Err(Refusal::Identity) => {
                [Doing::Refused(Refusal::Identity)].into_iter().chain(refuse(Reason::Unlike)).collect()
            }
            Err(refusal) => [Doing::Refused(refusal)].into_iter().chain(refuse(Reason::Refused)).collect(),
        }
    }

    /// A bucket that fills up in a minute.
    fn take_rows(&mut self, rows: u32, now: Duration) -> bool {
        let limit = f64::from(self.limits.rows_a_minute);
        if limit == 0.0 {
            return true;
        }
        let (left, at) = self.rows;
        let left = (left + limit / 60.0 * now.saturating_sub(at).as_secs_f64()).min(limit);
        let is_enough = left >= f64::from(rows).min(limit);
        self.rows = (if is_enough { (left - f64::from(rows)).max(0.0) } else { left }, now);
        is_enough
    }

    fn for_consumer(&mut self, transfer: TransferId, frame: Frame, now: Duration) -> Vec<Doing> {
        let Some(consumer) = self.consumers.get_mut(&transfer) else {
            let is_late = self.dropped.contains_key(&transfer)
                // The producer says something until it hears of the end.
                || (matches!(frame.kind(), Kind::Progress | Kind::Abort) && transfer.0 <= self.last_transfer);
            if is_late {
                return Vec::new();
            }
            return self.close_for(Refusal::Unsolicited { frame: frame.kind().name() });
        };
        let steps = consumer.frame(frame, now);
        self.steps(transfer, steps)
    }

    fn for_producer(&mut self, transfer: TransferId, frame: &Frame, now: Duration) -> Vec<Doing> {
        let Some(producer) = self.producers.get_mut(&transfer) else {
            if transfer.0 <= self.last_request {
                return Vec::new();
            }
            return self.close_for(Refusal::Unsolicited { frame: frame.kind().name() });
        };
        match producer.frame(frame, now) {
            Ok(moves) => {
                let mut doing = self.moves(transfer, moves);
                doing.push(Doing::Credit);
                doing
            }
            Err(refusal) => {
                let moves = producer.give_up(Reason::Refused);
                let mut doing = vec![Doing::Refused(refusal)];
                doing.extend(self.moves(transfer, moves));
                doing
            }
        }
    }

    /// May this chunk come? Before memory is taken for its rows. `Ok(None)`: its rows are to be read and dropped.
    pub fn admit(
        &mut self,
        head: &ChunkHead,
        payload: usize,
        now: Duration,
    ) -> Result<Option<u32>, Vec<Doing>> {
        self.heard = now;
        if let Some(consumer) = self.consumers.get_mut(&head.transfer) {
            return match consumer.admit(head, payload) {
                Ok(number) => Ok(Some(number)),
                Err(refusal) => {
                    let steps = consumer.refuse(refusal);
                    Err(self.steps(head.transfer, steps))
                }
            };
        }
        match self.dropped.get_mut(&head.transfer) {
            Some(left) if *left >= payload as u64 => {
                *left -= payload as u64;
                Ok(None)
            }
            _ => Err(self.close_for(Refusal::Unsolicited { frame: "CHUNK" })),
        }
    }

    /// A transfer of the consumer's, for its plan and key.
    pub fn consumer(&self, transfer: TransferId) -> Option<&Consumer> {
        self.consumers.get(&transfer)
    }

    /// A transfer of the producer's.
    pub fn producer(&mut self, transfer: TransferId) -> Option<&mut Producer> {
        self.producers.get_mut(&transfer)
    }

    /// Lets a consumer do something.
    pub fn with_consumer(
        &mut self,
        transfer: TransferId,
        act: impl FnOnce(&mut Consumer) -> Vec<Step>,
    ) -> Vec<Doing> {
        let Some(consumer) = self.consumers.get_mut(&transfer) else { return Vec::new() };
        let steps = act(consumer);
        self.steps(transfer, steps)
    }

    /// Lets a producer do something.
    pub fn with_producer(
        &mut self,
        transfer: TransferId,
        act: impl FnOnce(&mut Producer) -> Vec<Move>,
    ) -> Vec<Doing> {
        let Some(producer) = self.producers.get_mut(&transfer) else { return Vec::new() };
        let moves = act(producer);
        self.moves(transfer, moves)
    }

    /// Begins a transfer. `None`: the connection is over, or too many go on; the fetch comes back.
    pub fn fetch(
        &mut self,
        fetch: Fetch,
        nonce: Nonce,
        now: Duration,
    ) -> Result<(TransferId, Frame), Box<Fetch>> {
        let theirs = self.theirs.as_ref().filter(|theirs| theirs.serves_prefill && !self.closed);
        let Some(most) = theirs.map(|theirs| theirs.max_transfers.min(MOST_TRANSFERS)) else {
            return Err(Box::new(fetch));
        };
        if self.consumers.len() >= usize::from(most) || self.last_transfer == u32::MAX {
            return Err(Box::new(fetch));
        }
        self.last_transfer += 1;
        let transfer = TransferId(self.last_transfer);
        let Fetch { series, budget, priority } = fetch;
        let (consumer, frame) = Consumer::new(series, transfer, nonce, budget, priority, now);
        self.consumers.insert(transfer, consumer);
        Ok((transfer, frame))
    }

    /// Numbers a question; `None`: too many wait, or the peer answers none.
    pub fn ask(&mut self, mut quote: Quote, now: Duration) -> Option<(u32, Frame)> {
        // A node that reads nothing for us would take the question for a fault.
        let serves = self.theirs.as_ref().is_some_and(|theirs| theirs.serves_prefill);
        if self.closed || !serves || self.questions.len() >= MOST_QUESTIONS {
            return None;
        }
        self.last_question = self.last_question.checked_add(1)?;
        quote.question = self.last_question;
        self.questions.insert(quote.question, now);
        Some((quote.question, Frame::Quote(quote)))
    }

    /// Questions that were not answered in time.
    pub fn unanswered(&mut self, now: Duration) -> Vec<u32> {
        let late = |asked: &Duration| now.saturating_sub(*asked) > QUESTION_TIME;
        let over: Vec<u32> =
            self.questions.iter().filter(|(_, asked)| late(asked)).map(|(id, _)| *id).collect();
        for id in &over {
            self.questions.remove(id);
        }
        over
    }

    /// Is it time for a LOAD?
    pub fn load_is_due(&self, now: Duration) -> bool {
        let is_busy = !(self.consumers.is_empty() && self.producers.is_empty());
        let every = if is_busy { BUSY_SIGN } else { IDLE_SIGN };
        self.theirs.is_some() && self.said_load.is_none_or(|said| now.saturating_sub(said) >= every)
    }

    /// A LOAD with its stamps.
    pub fn say_load(&mut self, load: Load, now: Duration) -> Frame {
        self.said_load = Some(now);
        let stamp_ms = (now.as_millis() as u32).max(1);
        let (echo_ms, held_ms) = self
            .load
            .as_ref()
            .map_or((0, 0), |(theirs, came)| (theirs.stamp_ms, now.saturating_sub(*came).as_millis() as u32));
        Frame::Load(Load { stamp_ms, echo_ms, held_ms, ..load })
    }

    /// Time has passed. To be called every 100 ms or so.
    pub fn tick(&mut self, now: Duration) -> Vec<Doing> {
        if self.closed {
            return Vec::new();
        }
        let mut doing = Vec::new();
        let consumers: Vec<TransferId> = self.consumers.keys().copied().collect();
        for transfer in consumers {
            doing.extend(self.with_consumer(transfer, |consumer| consumer.tick(now)));
        }
        let producers: Vec<TransferId> = self.producers.keys().copied().collect();
        for transfer in producers {
            doing.extend(self.with_producer(transfer, |producer| producer.tick(now)));
        }
        let silence = now.saturating_sub(self.heard);
        let fetched_in_vain = doing.iter().any(|doing| matches!(doing, Doing::Over(_, _, FetchEnd::Silent)));
        // Half open: nothing at all is heard where something should be.
        if silence > IDLE_SILENCE || (fetched_in_vain && silence > SILENCE) {
            doing.extend(self.close(Reason::Silent, Some(Reason::Silent)));
        }
        doing
    }

    /// The connection broke, or this side ends it (then the peer is told why).
    pub fn close(&mut self, reason: Reason, tell: Option<Reason>) -> Vec<Doing> {
        if self.closed {
            return Vec::new();
        }
        let mut doing = Vec::new();
        if let Some(reason) = tell {
            let abort = Abort { transfer: TransferId(0), by_consumer: false, reason };
            doing.push(Doing::Send(Frame::Abort(abort)));
        }
        let consumers: Vec<TransferId> = self.consumers.keys().copied().collect();
        for transfer in consumers {
            doing.extend(self.with_consumer(transfer, Consumer::lost));
        }
        let producers: Vec<TransferId> = self.producers.keys().copied().collect();
        for transfer in producers {
            doing.extend(self.with_producer(transfer, Producer::lost));
        }
        self.closed = true;
        doing.push(Doing::Close(reason));
        doing
    }

    /// Is it over?
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Ends the connection because of what came.
    pub fn close_for(&mut self, refusal: Refusal) -> Vec<Doing> {
        // What comes over another stream of a connection that is over is nobody's fault.
        if self.closed {
            return Vec::new();
        }
        let mut doing = vec![Doing::Refused(refusal)];
        doing.extend(self.close(Reason::Refused, Some(Reason::Refused)));
        doing
    }

    fn steps(&mut self, transfer: TransferId, steps: Vec<Step>) -> Vec<Doing> {
        let mut doing = Vec::new();
        for step in steps {
            match step {
                Step::Send(frame) => doing.push(Doing::Send(frame)),
                Step::Tell(Event::Ended(end)) => doing.extend(self.over(transfer, end)),
                Step::Tell(event) => doing.push(Doing::Tell(transfer, event)),
            }
        }
        doing
    }

    /// What a producer has sent before it hears of an end is dropped, up to its credit. After ACK nothing can be on its way.
    fn over(&mut self, transfer: TransferId, end: FetchEnd) -> Vec<Doing> {
        let Some(consumer) = self.consumers.remove(&transfer) else { return Vec::new() };
        if end != FetchEnd::Installed {
            self.dropped.insert(transfer, consumer.credit_left());
        }
        if self.dropped.len() > REMEMBERED {
            self.dropped.pop_first();
        }
        let mut doing = Vec::new();
        if let FetchEnd::Refused(refusal) = &end {
            doing.push(Doing::Refused(refusal.clone()));
        }
        doing.push(Doing::Over(transfer, Box::new(consumer.into_series()), end));
        doing
    }

    fn moves(&mut self, transfer: TransferId, moves: Vec<Move>) -> Vec<Doing> {
        let mut doing = Vec::new();
        for step in moves {
            match step {
                Move::Send(frame) => doing.push(Doing::Send(frame)),
                Move::Ended(ended) => {
                    self.producers.remove(&transfer);
                    doing.push(Doing::Ended(transfer, ended));
                }
            }
        }
        doing
    }
}
