//! The consuming side of one transfer: which frames may come when, and what follows from them. No sockets, no clock: `now` is
//! time since whenever, monotonic.
//!
//! ```text
//! REQUEST ─► Requested ─BEGIN─► Receiving ─SEAL and all chunks─► Ready(cut) ─installed─► ACK, over
//!                                   └─STAGE and its chunks─► Ready(boundary) ─installed─► goes on
//! ```
//!
//! Order alone is no fault: STAGE and SEAL may overtake chunks of other streams and wait for them. Anything else that no
//! producer sends ends the transfer with a name.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::digest::SeriesKey;
use crate::frame::{
    Abort, Ack, Begin, ChunkHead, Frame, Nack, Progress, Reason, Request, Seal, StageEnd, holdings_digest,
};
use crate::ids::{Digest, Nonce, TransferId};
use crate::peers::{FetchEnd, SILENCE};
use crate::plan::Plan;
use crate::{RangeSet, Refusal, Series};

/// Bytes that may be on their way to a consumer.
pub const WINDOW_BYTES: u64 = 64 << 20;
/// How often each side of a transfer gives a sign of life.
pub const SIGN_OF_LIFE: Duration = Duration::from_millis(500);

/// How long after SEAL, or the last chunk, a stream may keep what the others have overtaken.
const MISSING: Duration = Duration::from_secs(3);

/// What follows for the sink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The producer begins and will give these stages.
    Begun(Vec<u32>),
    /// Everything up to a boundary is there and bound.
    Ready(u32),
    /// A sign of life.
    Progress {
        /// Positions that are final there.
        rows: u32,
        /// How long the rest takes.
        rest: Option<Duration>,
    },
    /// It is over.
    Ended(FetchEnd),
}

/// What a call has led to, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this.
    Send(Frame),
    /// Tell the sink.
    Tell(Event),
}

/// A boundary whose chunks are awaited.
#[derive(Clone, Debug)]
struct Boundary {
    positions: u32,
    /// What the producer binds, without the consumer's own.
    bound: RangeSet,
    /// Chunks of them that have not come.
    left: u64,
    /// The root, once STAGE or SEAL has come.
    root: Option<Digest>,
    told: bool,
}

#[derive(Clone, Debug)]
struct Running {
    /// As it was encoded: SEAL binds these bytes.
    begin: Vec<u8>,
    chunks: u32,
    bytes: u64,
    /// Stages, then the cut.
    boundaries: Vec<Boundary>,
    /// Chunks that may come.
    coming: RangeSet,
    /// Admitted chunks whose rows are being read or checked.
    under_way: BTreeSet<u32>,
    admitted_bytes: u64,
    written_bytes: u64,
    credit: u64,
    rows: u32,
    sealed: Option<Seal>,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Consumer {
    series: Series,
    transfer: TransferId,
    nonce: Nonce,
    running: Option<Running>,
    over: bool,
    deadline: Duration,
    /// When something of this transfer came last.
    heard: Duration,
    /// When a chunk, or SEAL, came last.
    chunk_came: Duration,
    /// When the last PROGRESS went.
    said: Duration,
}

impl Consumer {
    /// Begins a transfer, whose REQUEST is to be sent.
    pub fn new(
        series: Series,
        transfer: TransferId,
        nonce: Nonce,
        budget: Duration,
        priority: u8,
        now: Duration,
    ) -> (Self, Frame) {
        let request = Request {
            transfer,
            nonce,
            series: series.nonce,
            identity: series.identity,
            draft: series.draft,
            tenant: series.tenant,
            ids: Arc::clone(&series.ids),
            span: series.plan.span().clone(),
            budget_ms: u32::try_from(budget.as_millis()).unwrap_or(u32::MAX).max(1),
            priority,
            own: series.own.clone(),
            received: series.received.clone(),
        };
        let deadline = now.saturating_add(budget);
        let consumer = Self {
            series,
            transfer,
            nonce,
            running: None,
            over: false,
            deadline,
            heard: now,
            chunk_came: now,
            said: now,
        };
        (consumer, Frame::Request(Box::new(request)))
    }

    /// The chunks.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.series.plan
    }

    /// What hashes chunks.
    pub fn key(&self) -> SeriesKey {
        self.series.key.clone()
    }

    /// Is it over?
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Bytes of rows that the producer may still send.
    pub fn credit_left(&self) -> u64 {
        self.running.as_ref().map_or(0, |running| running.credit - running.admitted_bytes)
    }

    /// The series with what has come.
    pub fn into_series(self) -> Series {
        self.series
    }

    /// A frame of this transfer other than a chunk.
    pub fn frame(&mut self, frame: Frame, now: Duration) -> Vec<Step> {
        if self.over {
            return Vec::new();
        }
        self.heard = now;
        let steps = match frame {
            Frame::Begin(begin) => self.begin(&begin, now),
            Frame::Progress(Progress::Producer { rows, rest_ms, .. }) => self.progress(rows, rest_ms),
            Frame::Stage(stage) => self.stage(stage),
            Frame::Seal(seal) => {
                self.chunk_came = now;
                self.seal(seal)
            }
            Frame::Abort(Abort { reason, .. }) => Ok(self.end(FetchEnd::Peer(reason))),
            other => Err(Refusal::Order { frame: other.kind().name() }),
        };
        steps.unwrap_or_else(|refusal| self.refuse(refusal))
    }

    fn begin(&mut self, begin: &Begin, now: Duration) -> Result<Vec<Step>, Refusal> {
        if self.running.is_some() {
            return Err(Refusal::Order { frame: "BEGIN" });
        }
        let series = &self.series;
        if begin.nonce != self.nonce {
            return Err(Refusal::Nonce);
        }
        if begin.identity != series.identity {
            return Err(Refusal::Identity);
        }
        if begin.prefix != series.prefix {
            return Err(Refusal::Prefix);
        }
        let cut = series.plan.span().cut;
        if begin.cut != cut {
            return Err(Refusal::Cut { expected: cut, found: begin.cut });
        }
        if begin.holdings != holdings_digest(&series.own, &series.received) {
            return Err(Refusal::Holdings);
        }
        if begin.planes != *series.plan.planes() {
            return Err(Refusal::Planes);
        }
        let asked = &series.plan.span().stages;
        let ascending = begin.stages.is_sorted_by(|a, b| a < b);
        if !ascending || begin.stages.iter().any(|stage| !asked.contains(stage)) {
            return Err(Refusal::Stages);
        }
        let bound = series.plan.needed_for(&begin.stages).minus(&series.own);
        let coming = bound.minus(&series.received);
        let (chunks, bytes) = (coming.len(), series.plan.bytes_of(&coming));
        if u64::from(begin.chunks) != chunks {
            return Err(Refusal::Totals {
                field: "chunks",
                expected: chunks,
                found: u64::from(begin.chunks),
            });
        }
        if begin.bytes != bytes {
            return Err(Refusal::Totals { field: "bytes", expected: bytes, found: begin.bytes });
        }
        // What the consumer has already needs no stage.
        let boundaries =
            begin.stages.iter().copied().chain([cut]).filter(|&at| at > series.installed || at == cut);
        let boundaries = boundaries
            .map(|positions| {
                let bound = if positions == cut {
                    bound.clone()
                } else {
                    series.plan.needed_at(positions).minus(&series.own)
                };
                let left = bound.minus(&series.received).len();
                Boundary { positions, bound, left, root: None, told: false }
            })
            .collect();
        self.running = Some(Running {
            begin: Frame::Begin(Box::new(begin.clone())).encode(0),
            chunks: begin.chunks,
            bytes,
            boundaries,
            coming,
            under_way: BTreeSet::new(),
            admitted_bytes: 0,
            written_bytes: 0,
            credit: 0,
            rows: 0,
            sealed: None,
        });
        let told = Step::Tell(Event::Begun(begin.stages.clone()));
        Ok([told].into_iter().chain(self.say(now)).collect())
    }

    /// May this chunk come? Asked before anything is allocated for its rows. The number is to be handed to
    /// [`Consumer::written`] when the rows are checked and in their place.
    pub fn admit(&mut self, head: &ChunkHead, payload: usize) -> Result<u32, Refusal> {
        let Some(running) = self.running.as_mut().filter(|_| !self.over) else {
            return Err(Refusal::Unsolicited { frame: "CHUNK" });
        };
        let number = self.series.plan.number(&head.place)?;
        if self.series.own.contains(number) {
            return Err(Refusal::Held);
        }
        if self.series.received.contains(number) || running.under_way.contains(&number) {
            return Err(Refusal::Again);
        }
        if !running.coming.contains(number) {
            return Err(Refusal::Place);
        }
        let expected = self.series.plan.payload_bytes(&head.place) as u64;
        if payload as u64 != expected {
            return Err(Refusal::Payload { expected, found: payload as u64 });
        }
        let found = running.admitted_bytes + expected;
        if found > running.credit {
            return Err(Refusal::Credit { limit: running.credit, found });
        }
        running.admitted_bytes = found;
        running.under_way.insert(number);
        Ok(number)
    }

    /// The rows of an admitted chunk have the digest of its head, and are in their place.
    pub fn written(&mut self, number: u32, digest: Digest, now: Duration) -> Vec<Step> {
        let Some(running) = self.running.as_mut().filter(|_| !self.over) else { return Vec::new() };
        if !running.under_way.remove(&number) {
            return Vec::new();
        }
        (self.heard, self.chunk_came) = (now, now);
        self.series.digests[number as usize] = digest;
        self.series.received.insert(number..number + 1);
        let place = self.series.plan.place(number);
        running.written_bytes += place.map_or(0, |place| self.series.plan.payload_bytes(&place) as u64);
        for boundary in &mut running.boundaries {
            boundary.left -= u64::from(boundary.bound.contains(number));
        }
        let is_due = running.written_bytes + WINDOW_BYTES >= running.credit + WINDOW_BYTES / 4
            && running.credit < running.bytes;
        let mut steps = self.complete().unwrap_or_else(|refusal| self.refuse(refusal));
        if is_due && !self.over {
            steps.extend(self.say(now));
        }
        steps
    }

    fn progress(&mut self, rows: u32, rest_ms: Option<u32>) -> Result<Vec<Step>, Refusal> {
        let cut = self.series.plan.span().cut;
        let running = self.running.as_mut().ok_or(Refusal::Order { frame: "PROGRESS" })?;
        if rows < running.rows {
            return Err(Refusal::Backwards { field: "rows" });
        }
        if rows > cut {
            return Err(Refusal::Beyond { field: "rows" });
        }
        running.rows = rows;
        let rest = rest_ms.map(|ms| Duration::from_millis(u64::from(ms)));
        Ok(vec![Step::Tell(Event::Progress { rows, rest })])
    }

    fn stage(&mut self, stage: StageEnd) -> Result<Vec<Step>, Refusal> {
        let cut = self.series.plan.span().cut;
        let installed = self.series.installed;
        let running = self.running.as_mut().ok_or(Refusal::Order { frame: "STAGE" })?;
        if running.sealed.is_some() {
            return Err(Refusal::AfterSeal);
        }
        let named = running.boundaries.iter_mut().find(|boundary| boundary.positions == stage.boundary);
        match named.filter(|boundary| boundary.positions != cut && boundary.root.is_none()) {
            Some(boundary) => boundary.root = Some(stage.root),
            // It was there before the transfer began.
            None if stage.boundary <= installed
                && self.series.plan.span().stages.contains(&stage.boundary) => {}
            None => return Err(Refusal::Stage { found: stage.boundary }),
        }
        self.complete()
    }

    fn seal(&mut self, seal: Seal) -> Result<Vec<Step>, Refusal> {
        let running = self.running.as_mut().ok_or(Refusal::Order { frame: "SEAL" })?;
        if running.sealed.is_some() {
            return Err(Refusal::AfterSeal);
        }
        if (seal.chunks, seal.bytes) != (running.chunks, running.bytes) {
            return Err(Refusal::SealTotals);
        }
        if seal.code != self.series.key.seal(&running.begin, &seal.root, seal.chunks, seal.bytes) {
            return Err(Refusal::SealCode);
        }
        if let Some(cut) = running.boundaries.last_mut() {
            cut.root = Some(seal.root);
        }
        running.sealed = Some(seal);
        self.complete()
    }

    /// Boundaries that are complete now, checked.
    fn complete(&mut self) -> Result<Vec<Step>, Refusal> {
        let Some(running) = self.running.as_mut() else { return Ok(Vec::new()) };
        let mut steps = Vec::new();
        for boundary in &mut running.boundaries {
            let Some(root) = boundary.root.filter(|_| boundary.left == 0 && !boundary.told) else { continue };
            let digests = boundary.bound.iter().map(|number| &self.series.digests[number as usize]);
            if self.series.key.root(digests) != root {
                let is_cut = boundary.positions == self.series.plan.span().cut;
                return Err(if is_cut { Refusal::SealRoot } else { Refusal::StageRoot });
            }
            boundary.told = true;
            steps.push(Step::Tell(Event::Ready(boundary.positions)));
        }
        Ok(steps)
    }

    /// The switch to a boundary that was [`Event::Ready`] has been made.
    pub fn installed(&mut self, boundary: u32, now: Duration) -> Vec<Step> {
        let Some(running) = self.running.as_ref().filter(|_| !self.over) else { return Vec::new() };
        let was_ready = running.boundaries.iter().any(|ready| ready.positions == boundary && ready.told);
        if !was_ready {
            return Vec::new();
        }
        self.series.installed = self.series.installed.max(boundary);
        let root = running.sealed.map(|seal| seal.root).filter(|_| boundary == self.series.plan.span().cut);
        let Some(root) = root else { return self.say(now) };
        let mut steps = vec![Step::Send(Frame::Ack(Ack { transfer: self.transfer, root }))];
        steps.extend(self.end(FetchEnd::Installed));
        steps
    }

    /// What was sent is not believed.
    pub fn refuse(&mut self, refusal: Refusal) -> Vec<Step> {
        if self.over {
            return Vec::new();
        }
        let nack = Nack { transfer: self.transfer, refusal: refusal.number() as u16 };
        let mut steps = vec![Step::Send(Frame::Nack(nack))];
        steps.extend(self.end(FetchEnd::Refused(refusal)));
        steps
    }

    /// Nobody wants it any more.
    pub fn cancel(&mut self) -> Vec<Step> {
        self.abort(Reason::Cancelled, FetchEnd::Cancelled)
    }

    /// The connection is gone.
    pub fn lost(&mut self) -> Vec<Step> {
        if self.over { Vec::new() } else { self.end(FetchEnd::Lost) }
    }

    /// Time has passed. To be called every 100 ms or so.
    pub fn tick(&mut self, now: Duration) -> Vec<Step> {
        if self.over {
            return Vec::new();
        }
        if now >= self.deadline {
            return self.abort(Reason::Late, FetchEnd::Late);
        }
        if let Some(refusal) = self.missing() {
            return self.refuse(refusal);
        }
        if now.saturating_sub(self.heard) > SILENCE {
            return self.abort(Reason::Silent, FetchEnd::Silent);
        }
        if self.running.is_some() && now.saturating_sub(self.said) >= SIGN_OF_LIFE {
            return self.say(now);
        }
        Vec::new()
    }

    /// Chunks that will not come any more: SEAL has come and the producer is heard, but not of them.
    fn missing(&self) -> Option<Refusal> {
        let running = self.running.as_ref().filter(|running| running.sealed.is_some())?;
        let found = running.boundaries.last().map_or(0, |cut| cut.left);
        let is_heard = self.heard.saturating_sub(self.chunk_came) > MISSING;
        (found > 0 && running.under_way.is_empty() && is_heard).then_some(Refusal::Missing { found })
    }

    fn abort(&mut self, reason: Reason, end: FetchEnd) -> Vec<Step> {
        if self.over {
            return Vec::new();
        }
        let abort = Abort { transfer: self.transfer, by_consumer: true, reason };
        let mut steps = vec![Step::Send(Frame::Abort(abort))];
        steps.extend(self.end(end));
        steps
    }

    fn end(&mut self, end: FetchEnd) -> Vec<Step> {
        self.over = true;
        vec![Step::Tell(Event::Ended(end))]
    }

    fn say(&mut self, now: Duration) -> Vec<Step> {
        let Some(running) = &mut self.running else { return Vec::new() };
        self.said = now;
        running.credit = running.credit.max(running.written_bytes + WINDOW_BYTES);
        vec![Step::Send(Frame::Progress(Progress::Consumer {
            transfer: self.transfer,
            credit: running.credit,
            verified: self.series.received.len() as u32,
            installed: self.series.installed,
        }))]
    }
}
