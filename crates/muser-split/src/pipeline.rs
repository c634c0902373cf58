//! Parts at work at the same time: a thread for each, and groups of rows that go from thread to thread in order.
//!
//! A part meets the groups in their order, so that a row's KV is there before a later row of its sequence reads it.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use muser_backend::{Crossing, ExecError, StepBatch, StepOutput};

use crate::part::{Shared, lock};

/// Groups between two threads before the first one waits.
const WAITING: usize = 16;

/// Some rows of a step on their way through the parts.
#[derive(Default)]
struct Group {
    batch: StepBatch,
    crossing: Crossing,
    out: StepOutput,
    /// Why it went no further, and in which part.
    failed: Option<(usize, ExecError)>,
}

/// What went wrong, and in which part, if in one.
pub(crate) struct Failure {
    pub(crate) part: Option<usize>,
    pub(crate) error: ExecError,
}

/// The threads. Dropping it ends them.
pub(crate) struct Pipeline {
    /// To the first part; `None` only while it is dropped.
    entry: Option<SyncSender<Group>>,
    /// From the last one.
    exit: Receiver<Group>,
    /// Groups of earlier steps, with their memory.
    idle: Vec<Group>,
    threads: Vec<JoinHandle<()>>,
}

impl Pipeline {
    pub(crate) fn start(parts: impl Iterator<Item = Shared>) -> Result<Self, ExecError> {
        let (entry, mut inbox) = sync_channel(WAITING);
        let mut threads = Vec::new();
        for (number, part) in parts.enumerate() {
            let (outbox, next) = sync_channel(WAITING);
            let thread = std::thread::Builder::new().name(format!("muser-part-{number}"));
            let thread = thread.spawn(move || work((number, &part), &inbox, &outbox)).map_err(|error| {
                ExecError::Device { device: "split".into(), what: format!("starting threads: {error}") }
            })?;
            threads.push(thread);
            inbox = next;
        }
        Ok(Self { entry: Some(entry), exit: inbox, idle: Vec::new(), threads })
    }

    /// Sends the rows of `groups` through all parts; `(hidden, taps)` is the shape of their crossings.
    pub(crate) fn run(
        &mut self,
        batch: &StepBatch,
        groups: &[Range<usize>],
        (hidden, taps): (usize, usize),
        out: &mut StepOutput,
    ) -> Result<(), Failure> {
        let StepOutput { logits, hidden: states, argmax, candidates } = out;
        logits.clear();
        states.clear();
        argmax.clear();
        candidates.clear();
        let mut failed = None;
        let mut sent = 0;
        for finished in 0..groups.len() {
            while sent < groups.len() && sent - finished < WAITING {
                let mut group = self.idle.pop().unwrap_or_default();
                group.batch.take_rows(batch, groups[sent].clone(), hidden);
                group.crossing.shape(groups[sent].len(), hidden, taps);
                self.entry.as_ref().ok_or_else(gone)?.send(group).map_err(|_| gone())?;
                sent += 1;
            }
            let mut group = self.exit.recv().map_err(|_| gone())?;
            failed = failed.or(group.failed.take());
            logits.extend_from_slice(&group.out.logits);
            states.extend_from_slice(&group.out.hidden);
            argmax.extend_from_slice(&group.out.argmax);
            candidates.extend_from_slice(&group.out.candidates);
            self.idle.push(group);
        }
        failed.map_or(Ok(()), |(part, error)| Err(Failure { part: Some(part), error }))
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.entry = None;
        for thread in self.threads.drain(..) {
            // It has said so itself if it panicked.
            let _ = thread.join();
        }
    }
}

/// What a part's thread does until its groups come no more.
fn work((number, part): (usize, &Shared), inbox: &Receiver<Group>, outbox: &SyncSender<Group>) {
    while let Ok(mut group) = inbox.recv() {
        if group.failed.is_none() {
            let Group { batch, crossing, out, failed } = &mut group;
            let step = || lock(part).step_part(batch, crossing, out);
            *failed = match catch_unwind(AssertUnwindSafe(step)) {
                Ok(result) => result.err().map(|error| (number, error)),
                Err(panic) => Some((number, panicked(part, &*panic))),
            };
        }
        if outbox.send(group).is_err() {
            return;
        }
    }
}

fn panicked(part: &Shared, panic: &(dyn std::any::Any + Send)) -> ExecError {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    let what = format!("a step panicked: {}", text.as_deref().unwrap_or("no message"));
    ExecError::Device { device: lock(part).info().device.clone(), what }
}

fn gone() -> Failure {
    let error = ExecError::Lost { device: "split".into(), what: "the thread of a part has ended".into() };
    Failure { part: None, error }
}
