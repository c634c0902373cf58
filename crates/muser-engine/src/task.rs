//! A request as the engine thread sees it: immutable facts shared by its choices, and the way it ends.
//!
//! When the last choice lets go of its [`Task`], however that comes about, the submission's stream closes and the request
//! no longer counts as in flight. So no path, not even a panic of the engine thread, leaves a reader waiting.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use muser_kv::CacheScope;

use crate::{
    Constraint, ContextPolicy, Event, Prompt, RequestError, RequestKind, SamplingParams, StopWatch,
    prefix::Outlet, submission::Ring,
};

/// Facts of a request.
pub(crate) struct Task {
    pub(crate) id: u64,
    pub(crate) kind: RequestKind,
    pub(crate) prompt_tokens: u32,
    pub(crate) max_tokens: u32,
    pub(crate) sampling: SamplingParams,
    pub(crate) seed: u64,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) n: u32,
    pub(crate) logprobs: Option<u8>,
    pub(crate) prompt_logprobs: Option<u8>,
    pub(crate) hash_logits: bool,
    pub(crate) priority: i32,
    pub(crate) queue_until: Option<Duration>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) cache: bool,
    pub(crate) is_for_peer: bool,
    pub(crate) most_reused: usize,
    pub(crate) scope: CacheScope,
    pub(crate) submitted_at: Duration,
    pub(crate) ring: Arc<Ring>,
    /// Choices that have not ended. The ring always keeps room for their ends.
    pub(crate) remaining: AtomicU32,
    /// Some choice has had a slot: the request can no longer time out in the queue.
    pub(crate) admitted: AtomicBool,
    /// [`Event::Started`] was sent.
    pub(crate) started: AtomicBool,
    /// A [`Event::Failed`] was sent: the other choices end without a word.
    pub(crate) failed: AtomicBool,
    /// Prompt positions that the first choice found known.
    pub(crate) cached_tokens: AtomicU32,
    /// Of these and of what was read again later, positions that a source brought.
    pub(crate) restored_tokens: AtomicU32,
    /// Of those, positions that a peer computed.
    pub(crate) handed_tokens: AtomicU32,
    /// Time that took, in microseconds.
    pub(crate) restore_us: AtomicU64,
    /// Events that the step being planned may send.
    pub(crate) planned_events: AtomicU32,
    in_flight: Arc<AtomicUsize>,
}

/// A request on its way to the engine thread.
pub(crate) struct Job {
    pub(crate) task: Arc<Task>,
    pub(crate) prompt: Prompt,
    /// What has been written of the answer already.
    pub(crate) written: Vec<u32>,
    pub(crate) context_policy: ContextPolicy,
    /// One for each choice.
    pub(crate) choices: Vec<Choice>,
}

/// What belongs to one choice alone.
pub(crate) struct Choice {
    pub(crate) stop_watch: Option<Box<dyn StopWatch>>,
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    pub(crate) outlet: Option<Outlet>,
}

impl Job {
    pub(crate) fn new(
        mut request: crate::Request,
        id: u64,
        seed: u64,
        ring: Arc<Ring>,
        now: Duration,
        queue_timeout: Option<Duration>,
        in_flight: Arc<AtomicUsize>,
    ) -> Self {
        let mut outlet = request.outlet.take().map(Outlet::new);
        let choices = (0..request.n)
            .map(|index| Choice {
                stop_watch: request.stop_watch.as_ref().map(|make| make(index)),
                constraint: request.constraint.as_ref().map(|make| make(index)),
                outlet: outlet.take(),
            })
            .collect();
        let max_tokens = match request.kind {
            RequestKind::Generate => request.max_tokens.unwrap_or(u32::MAX),
            RequestKind::Embed => 0,
        };
        let task = Task {
            id,
            kind: request.kind,
            prompt_tokens: request.prompt.tokens.len() as u32,
            max_tokens,
            sampling: request.sampling,
            seed,
            stop_ids: request.stop_ids,
            n: request.n,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs.filter(|_| request.kind == RequestKind::Generate),
            hash_logits: request.hash_logits,
            priority: request.priority,
            queue_until: request.queue_timeout.or(queue_timeout).map(|wait| now + wait),
            deadline: request.deadline.map(|time| now + time),
            // Known rows have no hidden states and no logits any more: what needs those must compute every row.
            cache: request.cache
                && request.kind == RequestKind::Generate
                && request.prompt_logprobs.is_none(),
            is_for_peer: request.for_peer,
            most_reused: request.most_reused.unwrap_or(usize::MAX),
            scope: request.scope,
            submitted_at: now,
            ring,
            remaining: AtomicU32::new(request.n),
            admitted: AtomicBool::new(false),
            started: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            cached_tokens: AtomicU32::new(0),
            restored_tokens: AtomicU32::new(0),
            handed_tokens: AtomicU32::new(0),
            restore_us: AtomicU64::new(0),
            planned_events: AtomicU32::new(0),
            in_flight,
        };
        Self {
            task: Arc::new(task),
            prompt: request.prompt,
            written: request.written,
            context_policy: request.context_policy,
            choices,
        }
    }
}

impl Task {
    /// Order in the queue: priority, then age. The first is served first and preempted last.
    pub(crate) fn rank(&self) -> (i64, u64) {
        (-i64::from(self.priority), self.id)
    }

    /// Events that the step being planned can still set aside, as far as is known.
    pub(crate) fn room(&self) -> usize {
        let taken = self.planned_events.load(Ordering::Relaxed) + self.remaining.load(Ordering::Relaxed);
        self.ring.room().saturating_sub(taken as usize)
    }

    /// Is there room for `events` more in the step being planned? If so they are set aside.
    pub(crate) fn plan_events(&self, events: u32) -> bool {
        let planned = self.planned_events.load(Ordering::Relaxed);
        let wanted = (planned + events + self.remaining.load(Ordering::Relaxed)) as usize;
        if self.ring.room() < wanted {
            // Told first and looked again: a read in between has either been seen here or will wake the engine.
            self.ring.starve();
            if self.ring.room() < wanted {
                return false;
            }
        }
        self.planned_events.store(planned + events, Ordering::Relaxed);
        true
    }

    /// Sends the one event after which nothing comes. `false` if it was sent before.
    pub(crate) fn fail(&self, error: RequestError) -> bool {
        if self.failed.swap(true, Ordering::Relaxed) {
            return false;
        }
        self.ring.send(Event::Failed(error));
        true
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        self.ring.close();
    }
}
