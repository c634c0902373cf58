//! Looking after: of the first hand-off of each node, and then of one in so many, some rows are computed here when the engine
//! rests, and compared with those that came.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muser_engine::EngineHandle;
use muser_handoff::{Facts, Nonce, Place, Planes};
use muser_kv::{BLOCK_LEN, CacheScope};

use crate::figures::Counters;
use crate::nodes::{Audit, AuditFrom, Audits, NodeUse};
use crate::state;

/// One hand-off in so many is looked at, and the first of each node.
pub(crate) const ONE_IN: u64 = 256;
/// Rows computed from the beginning of a prompt.
const FROM_START: usize = START_BLOCKS * BLOCK_LEN;
/// Blocks of the full group that are kept as they came, for that.
pub(crate) const START_BLOCKS: usize = 2;
/// Rows computed behind a stage: an unfinished block, for of whole ones that are equal in name one is kept.
const FROM_STAGE: usize = BLOCK_LEN - 1;
/// How often it is looked whether the engine rests, and for how long.
const LOOK: Duration = Duration::from_millis(50);
const PATIENCE: Duration = Duration::from_mins(10);

/// The thread that audits; dropping it ends it.
pub struct Auditor {
    audits: Audits,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Auditor {
    /// Audits what nodes bring to `engine`. A node whose bits differ is rejected, and what is known is forgotten.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(nodes: &NodeUse, engine: EngineHandle, facts: &Facts) -> std::io::Result<Self> {
        let (send, receive) = channel();
        let audits = Arc::clone(&nodes.audits);
        *audits.lock().unwrap_or_else(PoisonError::into_inner) = Some(send);
        let stop = Arc::new(AtomicBool::new(false));
        let (nodes, planes, stopped) = (nodes.clone(), facts.planes.clone(), Arc::clone(&stop));
        let run = move || run(&receive, &nodes, &engine, &planes, &stopped);
        let thread = std::thread::Builder::new().name("node-audit".into()).spawn(run)?;
        Ok(Self { audits, stop, thread: Some(thread) })
    }
}

impl Drop for Auditor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.audits.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.thread.take().map(JoinHandle::join);
    }
}

fn run(audits: &Receiver<Audit>, nodes: &NodeUse, engine: &EngineHandle, planes: &Planes, stop: &AtomicBool) {
    loop {
        let audit = match audits.recv_timeout(LOOK) {
            Ok(audit) => audit,
            Err(RecvTimeoutError::Timeout) if !stop.load(Ordering::Relaxed) => continue,
            Err(_) => return,
        };
        let until = Instant::now() + PATIENCE;
        while engine.in_flight() > 0 && Instant::now() < until {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            std::thread::sleep(LOOK);
        }
        match is_equal(engine, planes, &audit) {
            None => {}
            Some(true) => Counters::add(&nodes.counters.audited, 1),
            Some(false) => {
                Counters::add(&nodes.counters.unequal, 1);
                Counters::add(&nodes.counters.audited, 1);
                nodes.reject(&audit.node);
                engine.forget_prefixes();
            }
        }
    }
}

/// Are the rows that came those that are computed here? `None` where there is nothing to compare.
fn is_equal(engine: &EngineHandle, planes: &Planes, audit: &Audit) -> Option<bool> {
    match &audit.from {
        AuditFrom::Start(came) => from_start(engine, planes, &audit.ids, came),
        AuditFrom::Stage(stage) => behind_stage(engine, audit, *stage),
    }
}

fn from_start(
    engine: &EngineHandle,
    planes: &Planes,
    ids: &[u32],
    came: &[(Place, Box<[u8]>)],
) -> Option<bool> {
    let ids = &ids[..FROM_START.min(ids.len())];
    // A prefix of nobody's: what came must not be what is compared with.
    let scope = CacheScope::of(&[b"audit", &Nonce::fresh()?.0]);
    let here = state::blocks(engine, &state::Wanted { ids, scope, most_reused: 0, least_known: 0 })?;
    let rows = came.iter().map(|(place, rows)| (place, &**rows));
    (!came.is_empty()).then(|| state::first_difference(planes, rows, &here).is_none())
}

fn behind_stage(engine: &EngineHandle, audit: &Audit, stage: usize) -> Option<bool> {
    let end = (stage + FROM_STAGE).min(audit.ids.len());
    let (ids, scope) = (&audit.ids[..end], audit.scope);
    let came = state::Wanted { ids, scope, most_reused: end, least_known: end - 1 };
    let came = state::blocks(engine, &came)?;
    let here = state::Wanted { ids, scope, most_reused: stage, least_known: stage };
    let here = state::blocks(engine, &here)?;
    let behind =
        here.keys().filter(|(_, index)| *index >= stage / BLOCK_LEN && *index < end.div_ceil(BLOCK_LEN));
    let both: Vec<_> = behind.filter(|block| came.contains_key(block)).collect();
    (!both.is_empty()).then(|| both.into_iter().all(|block| here[block] == came[block]))
}
