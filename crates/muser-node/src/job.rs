//! One prompt on its way: its stages, the request that goes on, and the nodes that could go on with it.

use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use muser_engine::{BlockReceiver, LocalPace};
use muser_handoff::{FetchEnd, Fetching, Place, Series, Sink};
use muser_kv::{BLOCK_LEN, CacheScope, KvGroup};

use crate::audit::START_BLOCKS;
use crate::figures::Counters;
use crate::landing::{Block, Landing};
use crate::progress::Progress;
use crate::told::{JobId, Told};

/// A request that goes on.
pub(crate) struct Request {
    pub(crate) node: Arc<str>,
    /// Which request of the job: what is told of an earlier one is void.
    pub(crate) turn: u32,
    pub(crate) fetching: Arc<dyn Fetching>,
    /// Positions that its series reaches to.
    pub(crate) cut: u32,
}

/// A lost connection that may come back.
pub(crate) struct Retry {
    pub(crate) node: Arc<str>,
    pub(crate) at: Instant,
    pub(crate) until: Instant,
}

/// A hand-off.
pub(crate) struct Job {
    pub(crate) ids: Arc<[u32]>,
    pub(crate) scope: CacheScope,
    pub(crate) stages: Vec<u32>,
    /// Nodes that could go on, soonest first, with the time that each would have taken.
    pub(crate) nodes: VecDeque<(Arc<str>, Duration)>,
    /// The draft's rows come, too.
    pub(crate) with_draft: bool,
    pub(crate) pace: Arc<LocalPace>,
    pub(crate) until: Instant,
    /// The first request.
    pub(crate) began: Option<Instant>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) priority: u8,
    pub(crate) landing: Arc<Landing>,
    /// The stage that the engine has memory for.
    pub(crate) delivery: Option<BlockReceiver>,
    pub(crate) wanted: Vec<Block>,
    pub(crate) stage_end: u32,
    /// Positions known here before the stage.
    pub(crate) known: u32,
    /// Everything up to here is written and bound.
    pub(crate) ready: u32,
    /// Blocks that a node was told that they are held.
    pub(crate) held: Vec<Block>,
    pub(crate) request: Option<Request>,
    /// What came, where no request goes on.
    pub(crate) series: Option<Box<Series>>,
    pub(crate) turns: u32,
    /// The node it is being read by has been asked a second time.
    pub(crate) asked_again: bool,
    /// What came of the beginning, if its node is to be looked after.
    pub(crate) kept: Option<Kept>,
    /// A connection may be coming back: when to look again, and until when.
    pub(crate) retry: Option<Retry>,
}

impl Job {
    pub(crate) fn cut(&self) -> u32 {
        self.ids.len() as u32
    }

    /// The boundary at which a stage with these blocks ends.
    pub(crate) fn boundary(&self, wanted: &[Block]) -> u32 {
        let blocks = wanted.iter().map(|(_, index)| index + 1).max().unwrap_or_default();
        let ends = self.stages.iter().copied().chain([self.cut()]);
        let mut ends = ends.filter(|&end| (end as usize).div_ceil(BLOCK_LEN) >= blocks);
        ends.next().unwrap_or_else(|| self.cut())
    }

    /// How long computing the rest here would take; `None` if that is not known.
    pub(crate) fn local_rest(&self) -> Option<Duration> {
        self.pace.time(self.known as usize, self.ids.len())
    }

    /// Is this about the request that goes on?
    pub(crate) fn is_current(&self, turn: u32) -> bool {
        self.request.as_ref().is_some_and(|request| request.turn == turn)
    }
}

/// Rows of a prompt's beginning as they came, for an audit.
pub(crate) type Kept = Arc<Mutex<Vec<(Place, Box<[u8]>)>>>;

/// The transport's view of a job.
pub(crate) struct JobSink {
    pub(crate) job: JobId,
    pub(crate) turn: u32,
    pub(crate) landing: Arc<Landing>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) kept: Option<Kept>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) tell: Mutex<Sender<Told>>,
}

impl JobSink {
    fn tell(&self, told: Told) {
        let _ = self.tell.lock().unwrap_or_else(PoisonError::into_inner).send(told);
    }
}

impl Sink for JobSink {
    fn begun(&self, stages: &[u32]) {
        self.landing.note_alive();
        self.tell(Told::Begun { job: self.job, turn: self.turn, stages: stages.to_vec() });
    }

    fn chunk(&self, place: &Place, rows: &[u8]) -> bool {
        let taken = self.landing.take(place, rows);
        if let Some(kept) = &self.kept
            && place.group == KvGroup::Full
            && (place.block as usize) < START_BLOCKS
        {
            kept.lock().unwrap_or_else(PoisonError::into_inner).push((*place, rows.into()));
        }
        if taken {
            Counters::add(&self.counters.received_bytes, rows.len() as u64);
            self.progress.note_bytes(rows.len());
        }
        taken
    }

    fn ready(&self, boundary: u32) {
        self.landing.note_alive();
        self.tell(Told::Ready { job: self.job, turn: self.turn, boundary });
    }

    fn progress(&self, rows: u32, rest: Option<Duration>) {
        self.landing.note_alive();
        self.progress.note_rows(rows);
        if let Some(rest) = rest {
            self.tell(Told::Rest { job: self.job, turn: self.turn, rest });
        }
    }

    fn ended(&self, series: Series, end: FetchEnd) {
        self.tell(Told::Ended { job: self.job, turn: self.turn, series: Box::new(series), end });
    }
}
