//! What the consumer's thread hears of, and the prefix through which the engine talks to it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use muser_engine::{BlockReceiver, PrefixQuery, StoredPrefix};
use muser_handoff::{FetchEnd, Quoted, Series};
use muser_kv::{BLOCK_LEN, KvGroup};

use crate::landing::Block;

/// A hand-off, by a number of its own.
pub(crate) type JobId = u64;

/// What the consumer's thread hears of.
pub(crate) enum Told {
    Asked(PrefixQuery),
    /// A node's answer; `None`: it has none.
    Quoted {
        question: u32,
        node: Arc<str>,
        quoted: Option<Quoted>,
    },
    /// The engine has memory for a stage.
    Fetch {
        job: JobId,
        wanted: Vec<Block>,
        delivery: BlockReceiver,
    },
    /// The engine's end of a stage.
    StageEnded {
        job: JobId,
        stage: u32,
        imported: bool,
    },
    /// The engine has lost the prefix.
    Forgotten {
        job: JobId,
    },
    /// A node has admitted a request and will give these stages.
    Begun {
        job: JobId,
        turn: u32,
        stages: Vec<u32>,
    },
    /// Everything up to a boundary is written and bound.
    Ready {
        job: JobId,
        turn: u32,
        boundary: u32,
    },
    /// What a node says of the time that it still needs.
    Rest {
        job: JobId,
        turn: u32,
        rest: Duration,
    },
    /// A request is over.
    Ended {
        job: JobId,
        turn: u32,
        series: Box<Series>,
        end: FetchEnd,
    },
    Close,
}

/// A prompt that a node will read.
pub(crate) struct HandedPrefix {
    pub(crate) job: JobId,
    pub(crate) positions: usize,
    pub(crate) stages: Vec<u32>,
    pub(crate) tell: Mutex<Sender<Told>>,
}

impl HandedPrefix {
    fn tell(&self, told: Told) {
        let _ = self.tell.lock().unwrap_or_else(PoisonError::into_inner).send(told);
    }
}

impl StoredPrefix for HandedPrefix {
    fn has(&self, _: KvGroup, index: usize) -> bool {
        index < self.positions / BLOCK_LEN
    }

    fn tail(&self) -> Option<usize> {
        (!self.positions.is_multiple_of(BLOCK_LEN)).then_some(self.positions)
    }

    fn stop_after(&self, known: usize) -> Option<usize> {
        self.stages.iter().map(|&stage| stage as usize).find(|&stage| stage > known)
    }

    fn alone(&self) -> usize {
        self.positions
    }

    fn fetch(&self, wanted: Vec<(KvGroup, usize)>, delivery: BlockReceiver) {
        self.tell(Told::Fetch { job: self.job, wanted, delivery });
    }
}

impl Drop for HandedPrefix {
    fn drop(&mut self) {
        self.tell(Told::Forgotten { job: self.job });
    }
}

/// Numbers from 1.
pub(crate) struct Numbers(AtomicU64);

impl Numbers {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(1))
    }

    pub(crate) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}
