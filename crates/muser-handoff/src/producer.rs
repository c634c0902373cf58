//! The producing side of one transfer. No sockets, no clock, no rows: those who give blocks hash them outside and ask here what
//! to do with each chunk.

use std::sync::Arc;
use std::time::Duration;

use crate::consumer::SIGN_OF_LIFE;
use crate::digest::{SeriesKey, prefix_digest};
use crate::frame::{
    Abort, Begin, ChunkHead, Frame, Progress, Reason, Request, Seal, StageEnd, holdings_digest,
};
use crate::ids::{Digest, Nonce};
use crate::peers::{Ended, RESUMPTION};
use crate::plan::Plan;
use crate::planes::Planes;
use crate::{RangeSet, Refusal};

/// What a call has led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Move {
    /// Send this.
    Send(Frame),
    /// It is over.
    Ended(Ended),
}

/// What is to be done with a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wants {
    /// Nothing: the consumer has it from elsewhere, the transfer does not need it, or it was given.
    Nothing,
    /// Its digest alone.
    Digest,
    /// Digest and rows: there is credit for them.
    Rows,
    /// Rows, later: there is no credit.
    Wait,
}

#[derive(Clone, Debug)]
struct Stage {
    boundary: u32,
    bound: RangeSet,
    left: u64,
    sent: bool,
}

#[derive(Clone, Debug)]
struct Running {
    begin: Vec<u8>,
    /// All that is bound: sent now or in earlier transfers.
    bound: RangeSet,
    /// All that is sent now.
    sending: RangeSet,
    given: RangeSet,
    digests: Vec<Digest>,
    /// Bytes of chunks that were promised to those who wait for credit, and of sent ones.
    promised: u64,
    bytes: u64,
    stages: Vec<Stage>,
    left: u64,
    sealed: Option<Digest>,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Producer {
    request: Arc<Request>,
    plan: Arc<Plan>,
    key: SeriesKey,
    prefix: Digest,
    running: Option<Running>,
    ended: Option<Ended>,
    credit: u64,
    installed: u32,
    rows: u32,
    rest_ms: Option<u32>,
    said: Duration,
    heard: Duration,
}

impl Producer {
    /// A request, as far as it can be looked at without an engine: `planes` are the engine's, `identity` and `draft` what it
    /// computes.
    ///
    /// # Errors
    /// If this node does not compute what is asked for, or the request's holdings name what is not there.
    pub fn new(
        request: Arc<Request>,
        planes: &Planes,
        identity: &Digest,
        draft: &Digest,
        now: Duration,
    ) -> Result<Self, Refusal> {
        if request.identity != *identity || (request.wants_draft() && request.draft != *draft) {
            return Err(Refusal::Identity);
        }
        let plan = Plan::new(planes.select(request.wants_draft()), request.span.clone())?;
        if request.own.end().max(request.received.end()) > plan.chunks() {
            return Err(Refusal::Holdings);
        }
        let prefix = prefix_digest(&request.ids);
        Ok(Self {
            key: SeriesKey::new(request.series, identity, &prefix),
            request,
            plan: Arc::new(plan),
            prefix,
            running: None,
            ended: None,
            credit: 0,
            installed: 0,
            rows: 0,
            rest_ms: None,
            said: now,
            heard: now,
        })
    }

    /// The request.
    pub fn request(&self) -> &Arc<Request> {
        &self.request
    }

    /// The chunks.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// What hashes chunks.
    pub fn key(&self) -> SeriesKey {
        self.key.clone()
    }

    /// Why nothing can be given any more.
    pub fn ended(&self) -> Option<Ended> {
        self.ended
    }

    /// Admits the request. Stages that were not asked for are left out. Nothing happens the second time.
    pub fn begin(&mut self, stages: &[u32], producer_nonce: Nonce, now: Duration) -> Vec<Move> {
        if self.ended.is_some() || self.running.is_some() {
            return Vec::new();
        }
        let asked = &self.plan.span().stages;
        let given: Vec<u32> = asked.iter().copied().filter(|stage| stages.contains(stage)).collect();
        let bound = self.plan.needed_for(&given).minus(&self.request.own);
        let sending = bound.minus(&self.request.received);
        let bytes = self.plan.bytes_of(&sending);
        let begin = Frame::Begin(Box::new(Begin {
            transfer: self.request.transfer,
            nonce: self.request.nonce,
            producer_nonce,
            identity: self.request.identity,
            prefix: self.prefix,
            holdings: holdings_digest(&self.request.own, &self.request.received),
            cut: self.plan.span().cut,
            stages: given.clone(),
            planes: self.plan.planes().clone(),
            chunks: sending.len() as u32,
            bytes,
        }));
        let stages = given.into_iter().map(|boundary| {
            let bound = self.plan.needed_at(boundary).minus(&self.request.own);
            Stage { boundary, left: bound.len(), bound, sent: false }
        });
        self.running = Some(Running {
            begin: begin.encode(0),
            left: bound.len(),
            bound,
            sending,
            given: RangeSet::default(),
            digests: vec![[0; 32]; self.plan.chunks() as usize],
            promised: 0,
            bytes,
            stages: stages.collect(),
            sealed: None,
        });
        self.said = now;
        // Where everything is held there is nothing to wait for.
        [Move::Send(begin)].into_iter().chain(self.complete()).collect()
    }

    /// Must something of this chunk be given? [`Wants::Rows`] promises its bytes of credit, once.
    pub fn wants(&mut self, number: u32) -> Wants {
        let (None, Some(running)) = (self.ended, &mut self.running) else { return Wants::Nothing };
        if running.given.contains(number) || !running.bound.contains(number) {
            return Wants::Nothing;
        }
        if !running.sending.contains(number) {
            return Wants::Digest;
        }
        let bytes = self.plan.place(number).map_or(0, |place| self.plan.payload_bytes(&place) as u64);
        if running.promised + bytes > self.credit {
            return Wants::Wait;
        }
        running.promised += bytes;
        Wants::Rows
    }

    /// The rows that [`Producer::wants`] promised credit for are not given yet.
    pub fn unpromise(&mut self, number: u32) {
        let bytes = self.plan.place(number).map_or(0, |place| self.plan.payload_bytes(&place) as u64);
        if let Some(running) = &mut self.running {
            running.promised -= bytes;
        }
    }

    /// Does a block have chunks of which something must be given?
    pub fn lacks(&self, chunks: std::ops::Range<u32>) -> bool {
        let (None, Some(running)) = (self.ended, &self.running) else { return false };
        chunks.into_iter().any(|number| running.bound.contains(number) && !running.given.contains(number))
    }

    /// The digest of a chunk; its rows are to be sent with the head, before what [`Producer::sent`] gives.
    pub fn head(&self, number: u32, digest: Digest) -> Option<ChunkHead> {
        let place = self.plan.place(number)?;
        Some(ChunkHead { transfer: self.request.transfer, place, digest })
    }

    /// A chunk's digest is known, and its rows, if wanted, are on their way.
    pub fn sent(&mut self, number: u32, digest: Digest, now: Duration) -> Vec<Move> {
        let (None, Some(running)) = (self.ended, &mut self.running) else { return Vec::new() };
        if running.given.contains(number) || !running.bound.contains(number) {
            return Vec::new();
        }
        running.given.insert(number..number + 1);
        running.digests[number as usize] = digest;
        running.left -= 1;
        for stage in &mut running.stages {
            stage.left -= u64::from(stage.bound.contains(number));
        }
        let moves = self.complete();
        if !moves.is_empty() {
            self.said = now;
        }
        moves
    }

    fn complete(&mut self) -> Vec<Move> {
        let Some(running) = &mut self.running else { return Vec::new() };
        let transfer = self.request.transfer;
        let root =
            |bound: &RangeSet| self.key.root(bound.iter().map(|number| &running.digests[number as usize]));
        let mut moves = Vec::new();
        for stage in running.stages.iter_mut().filter(|stage| stage.left == 0 && !stage.sent) {
            stage.sent = true;
            let end = StageEnd { transfer, boundary: stage.boundary, root: root(&stage.bound) };
            moves.push(Move::Send(Frame::Stage(end)));
        }
        if running.left == 0 && running.sealed.is_none() {
            let root = root(&running.bound);
            let (chunks, bytes) = (running.sending.len() as u32, running.bytes);
            let code = self.key.seal(&running.begin, &root, chunks, bytes);
            running.sealed = Some(root);
            moves.push(Move::Send(Frame::Seal(Seal { transfer, chunks, bytes, root, code })));
        }
        moves
    }

    /// A frame of this transfer.
    ///
    /// # Errors
    /// If no consumer sends it; the transfer is over then.
    pub fn frame(&mut self, frame: &Frame, now: Duration) -> Result<Vec<Move>, Refusal> {
        if self.ended.is_some() {
            return Ok(Vec::new());
        }
        self.heard = now;
        match *frame {
            Frame::Progress(Progress::Consumer { credit, verified, installed, .. }) => {
                self.consumer_progress(credit, verified, installed).map(|()| Vec::new())
            }
            Frame::Ack(ack) => {
                let sealed = self.running.as_ref().and_then(|running| running.sealed);
                if sealed != Some(ack.root) {
                    return Err(Refusal::Ack);
                }
                Ok(self.end(Ended::Acknowledged))
            }
            Frame::Nack(_) => Ok(self.end(Ended::Aborted(Reason::Refused))),
            Frame::Abort(Abort { reason, .. }) => Ok(self.end(Ended::Aborted(reason))),
            ref other => Err(Refusal::Order { frame: other.kind().name() }),
        }
    }

    fn consumer_progress(&mut self, credit: u64, verified: u32, installed: u32) -> Result<(), Refusal> {
        if self.running.is_none() {
            return Err(Refusal::Order { frame: "PROGRESS" });
        }
        if credit < self.credit {
            return Err(Refusal::Backwards { field: "credit" });
        }
        if installed < self.installed {
            return Err(Refusal::Backwards { field: "installed" });
        }
        if verified > self.plan.chunks() {
            return Err(Refusal::Beyond { field: "verified" });
        }
        if installed > self.plan.span().cut {
            return Err(Refusal::Beyond { field: "installed" });
        }
        (self.credit, self.installed) = (credit, installed);
        Ok(())
    }

    /// How far computing is; goes out at once.
    pub fn progress(&mut self, rows: u32, rest: Option<Duration>, now: Duration) -> Vec<Move> {
        if self.ended.is_some() || self.running.is_none() {
            return Vec::new();
        }
        self.rows = self.rows.max(rows.min(self.plan.span().cut));
        self.rest_ms = rest.map(|rest| u32::try_from(rest.as_millis()).unwrap_or(u32::MAX - 1));
        self.say(now)
    }

    /// Ends it from this side.
    pub fn give_up(&mut self, reason: Reason) -> Vec<Move> {
        if self.ended.is_some() {
            return Vec::new();
        }
        let abort = Abort { transfer: self.request.transfer, by_consumer: false, reason };
        let mut moves = vec![Move::Send(Frame::Abort(abort))];
        moves.extend(self.end(Ended::Aborted(reason)));
        moves
    }

    /// The connection is gone.
    pub fn lost(&mut self) -> Vec<Move> {
        if self.ended.is_some() { Vec::new() } else { self.end(Ended::Lost) }
    }

    /// Time has passed. To be called every 100 ms or so.
    pub fn tick(&mut self, now: Duration) -> Vec<Move> {
        if self.ended.is_some() || self.running.is_none() {
            return Vec::new();
        }
        if now.saturating_sub(self.heard) > RESUMPTION {
            let mut moves = self.give_up(Reason::Silent);
            moves.retain(|step| matches!(step, Move::Send(_)));
            self.ended = Some(Ended::Lost);
            moves.push(Move::Ended(Ended::Lost));
            return moves;
        }
        if now.saturating_sub(self.said) >= SIGN_OF_LIFE { self.say(now) } else { Vec::new() }
    }

    fn end(&mut self, ended: Ended) -> Vec<Move> {
        self.ended = Some(ended);
        vec![Move::Ended(ended)]
    }

    fn say(&mut self, now: Duration) -> Vec<Move> {
        self.said = now;
        let transfer = self.request.transfer;
        vec![Move::Send(Frame::Progress(Progress::Producer {
            transfer,
            rows: self.rows,
            rest_ms: self.rest_ms,
        }))]
    }
}
