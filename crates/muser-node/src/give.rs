//! One request of a peer, on a thread of its own: the engine computes, and what is final leaves.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use muser_engine::{
    Event, ExportError, PrefixExport, PrefixOutlet, RequestError, SamplingParams, Submission, SubmitError,
};
use muser_handoff::{Ended, Outlet, Plan, RESUMPTION, Reason};
use muser_kv::{BLOCK_LEN, CacheScope, KvGroup};

use crate::quotes::block_hashes;
use crate::seats::Seat;

/// Bytes that wait for the link, at most.
const MOST_AHEAD: usize = 64 << 20;
/// How often the thread looks whether anybody still wants it: a step of the engine is longer.
const LOOK: Duration = Duration::from_millis(20);

/// What a peer asked for.
pub(crate) struct Giving {
    pub(crate) request: Arc<muser_handoff::Request>,
    pub(crate) outlet: Arc<dyn Outlet>,
    pub(crate) scope: CacheScope,
    pub(crate) seat: Seat,
}

/// What the engine says.
enum Said {
    /// It begins to compute, and knows so many positions.
    Admitted(usize),
    Grown(PrefixExport),
    /// A block of the full group has been copied out, or not.
    Copied(u32, Vec<u8>, Result<(), ExportError>),
    /// The transfer is over.
    Over,
}

/// Blocks of the full group that are copied out at the end of the very step that made them final, while the engine's thread is
/// there: had this thread to ask for them first, they would leave a step later.
struct Ahead {
    /// Those that must be given, ascending.
    blocks: Vec<u32>,
    /// How many of them have been asked for.
    asked: usize,
    block_bytes: usize,
    /// Bytes that were copied, or are to be, and have not left.
    bytes: Arc<AtomicUsize>,
    /// Blocks below this one have been asked for.
    below: Arc<AtomicU32>,
}

impl Ahead {
    fn of(giving: &Giving) -> Self {
        let plan = giving.outlet.plan();
        let own = &giving.request.own;
        let lacks = |block: u32| plan.block(KvGroup::Full, block).any(|number| !own.contains(number));
        let full = plan.blocks().filter(|(group, _)| *group == KvGroup::Full).map(|(_, block)| block);
        Self {
            blocks: full.filter(|&block| lacks(block)).collect(),
            asked: 0,
            block_bytes: giving.seat.shared.facts.planes.block_bytes(KvGroup::Full),
            bytes: Arc::default(),
            below: Arc::default(),
        }
    }

    fn ask(&mut self, offer: &PrefixExport, say: &Sender<Said>) {
        let whole = offer.units().len() / BLOCK_LEN;
        while let Some(&block) = self.blocks.get(self.asked)
            && (block as usize) < whole
            && self.bytes.load(Ordering::Relaxed) + self.block_bytes <= MOST_AHEAD
        {
            self.asked += 1;
            self.bytes.fetch_add(self.block_bytes, Ordering::Relaxed);
            self.below.store(block + 1, Ordering::Relaxed);
            let say = say.clone();
            offer.copy_out(KvGroup::Full, block as usize, Vec::new(), move |bytes, result| {
                let _ = say.send(Said::Copied(block, bytes, result));
            });
        }
    }
}

/// The engine's end.
struct Hearing {
    say: Sender<Said>,
    stages: Vec<u32>,
    ahead: Ahead,
}

impl PrefixOutlet for Hearing {
    fn admitted(&mut self, known: usize) {
        let _ = self.say.send(Said::Admitted(known));
    }

    fn next_stop(&self, computed: usize) -> Option<usize> {
        self.stages.iter().map(|&stage| stage as usize).find(|&stage| stage > computed)
    }

    fn grown(&mut self, offer: PrefixExport) {
        self.ahead.ask(&offer, &self.say);
        let _ = self.say.send(Said::Grown(offer));
    }
}

/// Gives a prefix away, to its end or until nobody wants it.
pub(crate) fn give(giving: Giving) -> Ended {
    let (say, hear) = channel();
    let over = Mutex::new(say.clone());
    giving.outlet.on_end(Box::new(move |_| {
        let _ = over.lock().unwrap_or_else(PoisonError::into_inner).send(Said::Over);
    }));
    let ahead = Ahead::of(&giving);
    let (ahead_bytes, asked_below) = (Arc::clone(&ahead.bytes), Arc::clone(&ahead.below));
    let hearing = Hearing { say, stages: giving.request.span.stages.clone(), ahead };
    let submission = match submit(&giving, hearing) {
        Ok(submission) => submission,
        Err(reason) => {
            giving.outlet.give_up(reason);
            return Ended::Aborted(reason);
        }
    };
    let plan = giving.outlet.plan();
    let mut gives = Gives {
        giving,
        submission,
        buffer: Vec::new(),
        plan,
        began: Instant::now(),
        known: 0,
        ahead_bytes,
        asked_below,
    };
    match gives.begin().and_then(|()| gives.run(&hear)) {
        Ok(()) => gives.wait_for_end(&hear),
        Err(Ended::Lost) => {
            gives.stay_for_a_while();
            Ended::Lost
        }
        Err(ended) => ended,
    }
}

/// Hands the prompt to the engine: it samples nothing, and comes after the clients.
fn submit(giving: &Giving, hearing: Hearing) -> Result<Submission, Reason> {
    let request = &giving.request;
    let shared = &giving.seat.shared;
    let urgency = i32::from(128u8.saturating_sub(request.priority).min(99));
    let engine_request = muser_engine::Request {
        max_tokens: Some(0),
        sampling: SamplingParams::greedy(),
        priority: shared.options.priority.saturating_add(urgency),
        deadline: Some(Duration::from_millis(u64::from(request.budget_ms))),
        outlet: Some(Box::new(hearing)),
        // Stages are given with their windows, so they are computed even where more is known.
        most_reused: request.span.stages.first().map(|&stage| stage as usize),
        for_peer: true,
        scope: giving.scope,
        ..muser_engine::Request::new(request.ids.to_vec(), Vec::new())
    };
    let engine = shared.engine.get().ok_or(Reason::Busy)?;
    engine.submit(engine_request).map_err(|error| match error {
        SubmitError::QueueFull { .. } => Reason::Busy,
        SubmitError::ShuttingDown => Reason::Draining,
        SubmitError::ContextLength { .. } | SubmitError::Capacity { .. } => Reason::TooLong,
        _ => Reason::Refused,
    })
}

struct Gives {
    giving: Giving,
    submission: Submission,
    buffer: Vec<u8>,
    plan: Arc<Plan>,
    began: Instant,
    /// Positions that needed no computing.
    known: usize,
    ahead_bytes: Arc<AtomicUsize>,
    asked_below: Arc<AtomicU32>,
}

impl Gives {
    fn outlet(&self) -> &dyn Outlet {
        &*self.giving.outlet
    }

    fn cut(&self) -> usize {
        self.giving.request.ids.len()
    }

    /// Until the last block has been given.
    fn run(&mut self, hear: &Receiver<Said>) -> Result<(), Ended> {
        let mut is_whole = false;
        loop {
            if is_whole && self.ahead_bytes.load(Ordering::Relaxed) == 0 {
                return Ok(());
            }
            self.look()?;
            match hear.recv_timeout(LOOK) {
                Ok(Said::Admitted(known)) => self.note_admitted(known),
                Ok(Said::Grown(offer)) => {
                    // Of several that wait, each ends where a stage may: none is left out.
                    is_whole |= self.grow(&offer)?;
                }
                Ok(Said::Copied(block, bytes, result)) => {
                    let given = self.give_bytes(KvGroup::Full, block, &bytes, result);
                    let size = self.giving.seat.shared.facts.planes.block_bytes(KvGroup::Full);
                    self.ahead_bytes.fetch_sub(size, Ordering::Relaxed);
                    given?;
                }
                Ok(Said::Over) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(self.give_up(Reason::Internal)),
            }
        }
    }

    /// Is it still wanted, and does the engine still compute it?
    fn look(&mut self) -> Result<(), Ended> {
        if let Some(ended) = self.outlet().ended() {
            return Err(ended);
        }
        if self.giving.seat.replaced.load(Ordering::Relaxed) {
            return Err(self.give_up(Reason::Cancelled));
        }
        match self.submission.try_recv() {
            Some(Event::Failed(error)) => {
                let reason = match error {
                    RequestError::Device(_) | RequestError::NotFinite { .. } => Reason::Device,
                    RequestError::ShutDown => Reason::Draining,
                    RequestError::Capacity { .. } => Reason::Gone,
                    RequestError::QueueTimeout { .. } => Reason::Busy,
                    _ => Reason::Internal,
                };
                Err(self.give_up(reason))
            }
            Some(Event::Finished(finished)) => match finished.reason {
                muser_engine::FinishReason::Deadline => Err(self.give_up(Reason::Late)),
                muser_engine::FinishReason::Cancelled => Err(self.give_up(Reason::Draining)),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn give_up(&self, reason: Reason) -> Ended {
        self.outlet().give_up(reason);
        Ended::Aborted(reason)
    }

    /// Admits the request before the engine has a place for it: a queue is no silence.
    fn begin(&self) -> Result<(), Ended> {
        self.outlet().begin(&self.giving.request.span.stages)?;
        self.progress(0);
        Ok(())
    }

    fn note_admitted(&mut self, known: usize) {
        self.known = known;
        self.began = Instant::now();
        self.progress(known);
    }

    fn progress(&self, rows: usize) {
        let left = (self.cut() - rows.min(self.cut())) as u64;
        let by_figures = self.giving.seat.shared.time(left, rows as u64);
        // By this prompt's own pace where there are no figures.
        let computed = rows.saturating_sub(self.known);
        let own = (computed > 0).then(|| self.began.elapsed().mul_f64(left as f64 / computed as f64));
        self.outlet().progress(rows as u32, by_figures.or(own));
    }

    /// Gives what has become final; `true` when all of it has been given.
    fn grow(&mut self, offer: &PrefixExport) -> Result<bool, Ended> {
        let end = offer.units().len();
        let plan = Arc::clone(&self.plan);
        self.progress(end);
        let cut = self.cut();
        let is_boundary = end == cut || plan.span().stages.contains(&(end as u32));
        let needed = is_boundary.then(|| plan.needed_at(end as u32));
        for (group, block) in plan.blocks() {
            let whole = (block as usize + 1) * BLOCK_LEN <= end;
            let final_now = match group {
                KvGroup::Full => whole || end == cut,
                // Windows leave at their boundary: of those between, most would never be asked for.
                KvGroup::Sliding => {
                    needed.as_ref().is_some_and(|needed| needed.contains(plan.block(group, block).start))
                }
            };
            let asked_for = group == KvGroup::Full && block < self.asked_below.load(Ordering::Relaxed);
            if final_now && !asked_for && self.outlet().lacks(group, block) {
                self.give_block(offer, group, block)?;
            }
        }
        if end == cut {
            let Giving { request, seat, .. } = &self.giving;
            let hashes = block_hashes(&request.identity, &request.tenant, &request.ids);
            seat.shared.remember(seat.peer, hashes);
        }
        Ok(end == cut)
    }

    fn give_block(&mut self, offer: &PrefixExport, group: KvGroup, block: u32) -> Result<(), Ended> {
        let buffer = std::mem::take(&mut self.buffer);
        let (buffer, result) = offer.copy_out_blocking(group, block as usize, buffer);
        let given = self.give_bytes(group, block, &buffer, result);
        self.buffer = buffer;
        given
    }

    fn give_bytes(
        &self,
        group: KvGroup,
        block: u32,
        bytes: &[u8],
        result: Result<(), ExportError>,
    ) -> Result<(), Ended> {
        match result {
            Ok(()) => self.outlet().block(group, block, bytes),
            Err(ExportError::Gone) => Err(self.give_up(Reason::Gone)),
            Err(ExportError::Device) => Err(self.give_up(Reason::Device)),
            Err(ExportError::Stopped) => Err(self.give_up(Reason::Draining)),
        }
    }

    /// The consumer has everything, and says so when it has installed it.
    fn wait_for_end(&self, hear: &Receiver<Said>) -> Ended {
        loop {
            if let Some(ended) = self.outlet().ended() {
                return ended;
            }
            let _ = hear.recv_timeout(Duration::from_secs(1));
        }
    }

    /// The consumer's connection is lost: what is being computed goes on for a while, in case it asks again.
    fn stay_for_a_while(&mut self) {
        let until = Instant::now() + RESUMPTION;
        while Instant::now() < until && !self.giving.seat.replaced.load(Ordering::Relaxed) {
            let event = self.submission.recv_timeout(LOOK);
            if matches!(event, Ok(None | Some(Event::Finished(_) | Event::Failed(_)))) {
                return;
            }
        }
    }
}
