//! A driver on the test's own thread, and what comes of its requests.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{
    EngineConfig, Event, Request, Submission, SubmitError,
    driver::{Driver, Turn},
    testing::{Costs, Fault, ScriptedExecutor, TowerState, geometry},
};

/// A driver on the test's own thread, with a clock that the test moves.
pub(crate) struct Bench {
    pub(crate) driver: Driver,
    pub(crate) window: usize,
    clock: Arc<AtomicU64>,
    fault: Arc<AtomicU64>,
    pub(crate) largest_step: Arc<AtomicU64>,
    draft_fails: Arc<AtomicBool>,
    /// Imports that still succeed; below 0: all of them.
    imports_until_fault: Arc<AtomicI64>,
    pub(crate) tower: Arc<TowerState>,
}

impl Bench {
    pub(crate) fn new(context: usize, window: usize, config: &EngineConfig) -> Self {
        Self::of(ScriptedExecutor::new(geometry(context, window)), config, None)
    }

    /// On an executor that wants so many rows of a prompt in a step, each of which takes ten milliseconds.
    pub(crate) fn with_prompt_rows(rows: usize, config: &EngineConfig) -> Self {
        let costs = Costs { step: |rows| 10_000 * rows as u64, draft: |_| 0 };
        Self::of(ScriptedExecutor::with_prompt_rows(geometry(2048, 256), rows), config, Some(costs))
    }

    /// With a draft of up to fifteen proposals.
    pub(crate) fn drafting(context: usize, window: usize, config: &EngineConfig) -> Self {
        Self::of(ScriptedExecutor::with_draft(geometry(context, window), 15), config, None)
    }

    /// With a draft, on a clock that steps and drafts move.
    pub(crate) fn timed(context: usize, window: usize, config: &EngineConfig, costs: Costs) -> Self {
        Self::of(ScriptedExecutor::with_draft(geometry(context, window), 15), config, Some(costs))
    }

    fn of(mut executor: ScriptedExecutor, config: &EngineConfig, costs: Option<Costs>) -> Self {
        let geometry = executor.geometry.clone();
        let clock = Arc::new(AtomicU64::new(0));
        executor.costs = costs.map(|costs| (costs, Arc::clone(&clock)));
        let fault = Arc::clone(&executor.fault);
        let largest_step = Arc::clone(&executor.largest_step);
        let draft_fails = Arc::clone(&executor.draft_fails);
        let imports_until_fault = Arc::clone(&executor.imports_until_fault);
        let tower = Arc::clone(&executor.tower_state);
        let mut driver =
            Driver::new(Box::new(executor), &geometry, config).expect("the configuration is good");
        let for_driver = Arc::clone(&clock);
        driver.set_clock(Box::new(move || Duration::from_micros(for_driver.load(Ordering::Relaxed))));
        Self {
            driver,
            window: geometry.window,
            clock,
            fault,
            largest_step,
            draft_fails,
            imports_until_fault,
            tower,
        }
    }

    fn now(&self) -> Duration {
        Duration::from_micros(self.clock.load(Ordering::Relaxed))
    }

    /// The next draft fails.
    pub(crate) fn fail_draft(&self) {
        self.draft_fails.store(true, Ordering::Relaxed);
    }

    /// So many imports succeed, and the next one fails.
    pub(crate) fn fail_import(&self, after: i64) {
        self.imports_until_fault.store(after, Ordering::Relaxed);
    }

    pub(crate) fn submit(&self, request: Request) -> Result<Submission, SubmitError> {
        self.driver.shared().submit(request, &std::thread::current(), self.now())
    }

    pub(crate) fn advance(&self, ms: u64) {
        self.clock.fetch_add(ms * 1000, Ordering::Relaxed);
    }

    /// The step `after` steps from now goes wrong.
    pub(crate) fn fail_step(&self, after: u64, fault: Fault) {
        let steps = self.driver.shared().metrics.snapshot().steps;
        self.fault.store((steps + 1 + after) << 8 | fault as u64, Ordering::Relaxed);
    }

    pub(crate) fn turn(&mut self) -> Turn {
        self.advance(1);
        self.driver.turn()
    }

    pub(crate) fn turns(&mut self, n: usize) {
        for _ in 0..n {
            self.turn();
        }
    }

    /// Turns until there is nothing to do.
    pub(crate) fn run(&mut self) {
        for _ in 0..1_000_000 {
            if self.turn() != Turn::Worked {
                return;
            }
        }
        panic!("the engine never rests");
    }

    /// Turns and reads until the submission has ended.
    pub(crate) fn finish(&mut self, submission: &mut Submission) -> Answer {
        let mut answer = Answer::default();
        for _ in 0..1_000_000 {
            let turn = self.turn();
            let before = answer.events.len();
            while let Some(event) = submission.try_recv() {
                answer.take(event);
            }
            if answer.is_over() {
                return answer;
            }
            assert!(turn == Turn::Worked || answer.events.len() > before, "idle without an end");
        }
        panic!("the engine never rests");
    }

    pub(crate) fn ask(&mut self, request: Request) -> Answer {
        let mut submission = self.submit(request).expect("the request is good");
        self.finish(&mut submission)
    }

    /// Nobody is left, nothing is held, and every block can be had.
    pub(crate) fn assert_balanced(&mut self) {
        assert!(self.driver.scheduler.is_empty());
        assert_eq!(self.driver.shared().in_flight(), 0);
        let stats = self.driver.scheduler.memory.stats();
        assert_eq!((stats.full.used, stats.sliding.used), (0, 0), "blocks leaked");
        self.driver.scheduler.memory.forget();
        let stats = self.driver.scheduler.memory.stats();
        assert_eq!(stats.full.free, stats.full.total);
        assert_eq!(stats.sliding.free, stats.sliding.total);
    }
}

/// What came of a request.
#[derive(Default)]
pub(crate) struct Answer {
    pub(crate) events: Vec<Event>,
    n: Option<u32>,
}

impl Answer {
    pub(crate) fn take(&mut self, event: Event) {
        assert!(!matches!(self.events.last(), Some(Event::Failed(_))), "nothing comes after a failure");
        self.events.push(event);
    }

    pub(crate) fn of(n: u32) -> Self {
        Self { events: Vec::new(), n: Some(n) }
    }

    pub(crate) fn is_over(&self) -> bool {
        let ends = self.events.iter().filter(|event| matches!(event, Event::Finished(_))).count();
        ends as u32 == self.n.unwrap_or(1) || matches!(self.events.last(), Some(Event::Failed(_)))
    }

    pub(crate) fn tokens(&self, index: u32) -> Vec<(u32, u64)> {
        let of_index = self.events.iter().filter_map(|event| match event {
            Event::Token(token) if token.index == index => Some(token),
            _ => None,
        });
        of_index.map(|token| (token.id, token.logit_hash.unwrap_or(0))).collect()
    }

    pub(crate) fn finished(&self, index: u32) -> crate::Finished {
        let mut ends = self.events.iter().filter_map(|event| match event {
            Event::Finished(finished) if finished.index == index => Some(*finished),
            _ => None,
        });
        let end = ends.next().expect("the choice has ended");
        assert!(ends.next().is_none(), "a choice ends once");
        end
    }

    pub(crate) fn started(&self) -> crate::Started {
        let started = self.events.iter().find_map(|event| match event {
            Event::Started(started) => Some(*started),
            _ => None,
        });
        started.expect("the request has started")
    }

    pub(crate) fn failure(&self) -> Option<&crate::RequestError> {
        match self.events.last() {
            Some(Event::Failed(error)) => Some(error),
            _ => None,
        }
    }
}
