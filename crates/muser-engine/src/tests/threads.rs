//! The engine on its own thread: blocking and async readers, cancelling by dropping, shutting down.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::{Duration, Instant},
};

use crate::{
    Engine, EngineConfig, EngineHandle, Event, FinishReason, Request, RequestError, SamplingParams, Shutdown,
    SubmitError,
    testing::{ScriptedExecutor, expected, geometry, request, stem},
};

fn spawn(config: EngineConfig) -> EngineHandle {
    let geometry = geometry(2048, 256);
    Engine::spawn(Box::new(ScriptedExecutor::new(geometry.clone())), geometry, config).expect("it starts")
}

fn greedy(prompt: Vec<u32>, max_tokens: u32) -> Request {
    Request { sampling: SamplingParams::greedy(), ..request(prompt, max_tokens) }
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn many_threads_read_what_running_alone_gives() {
    let engine = spawn(EngineConfig { event_ring: 16, ..EngineConfig::default() });
    std::thread::scope(|scope| {
        for i in 0..12 {
            let engine = engine.clone();
            scope.spawn(move || {
                let prompt = stem(i % 3, 200 + 40 * i as usize);
                let mut submission = engine.submit(greedy(prompt.clone(), 200)).expect("good");
                let mut tokens = Vec::new();
                let mut reason = None;
                while let Some(event) = submission.recv() {
                    match event {
                        Event::Token(token) => tokens.push((token.id, token.logit_hash.unwrap_or(0))),
                        Event::Finished(finished) => reason = Some(finished.reason),
                        Event::Started(_) => {}
                        other => panic!("{other:?}"),
                    }
                }
                assert_eq!(reason, Some(FinishReason::Length));
                assert_eq!(tokens, expected(&greedy(prompt, 200), 5, 0, 256, 200));
            });
        }
    });
    wait_until("nothing is in flight", || engine.in_flight() == 0);
    let metrics = engine.metrics();
    assert_eq!((metrics.requests_accepted, metrics.finished_length), (12, 12));
    assert_eq!(metrics.generated_tokens, 12 * 200);
    assert!(metrics.step_time.count() >= 200, "a step for every token of the longest");
}

/// Counts its wakes and wakes the thread that waits for them.
struct CountingWaker(AtomicUsize, std::thread::Thread);

impl Wake for CountingWaker {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
        self.1.unpark();
    }
}

#[test]
fn a_task_is_woken_for_every_event_it_waits_for() {
    let engine = spawn(EngineConfig::default());
    let mut submission = engine.submit(greedy(stem(1, 20), 50)).expect("good");
    let counting = Arc::new(CountingWaker(AtomicUsize::new(0), std::thread::current()));
    let waker = Waker::from(Arc::clone(&counting));
    let mut tokens = 0;
    loop {
        let wakes = counting.0.load(Ordering::SeqCst);
        match submission.poll_recv(&mut Context::from_waker(&waker)) {
            Poll::Ready(Some(event)) => tokens += usize::from(matches!(event, Event::Token(_))),
            Poll::Ready(None) => break,
            Poll::Pending => {
                let start = Instant::now();
                while counting.0.load(Ordering::SeqCst) == wakes {
                    assert!(start.elapsed() < Duration::from_secs(20), "a wake was lost");
                    std::thread::park_timeout(Duration::from_secs(1));
                }
            }
        }
    }
    assert_eq!(tokens, 50);
}

#[test]
fn dropping_a_submission_frees_its_place() {
    let engine = spawn(EngineConfig { event_ring: 8, ..EngineConfig::default() });
    let mut submission = engine.submit(greedy(stem(1, 20), 1900)).expect("good");
    assert!(matches!(submission.recv(), Some(Event::Started(_))));
    assert_eq!(submission.prefilled(), 20);
    drop(submission);
    wait_until("the place is free", || engine.in_flight() == 0);
    wait_until("no block is in use", || engine.metrics().full_blocks_used == 0);
    assert!(engine.slots().iter().all(|slot| slot.state == crate::SlotState::Idle));
}

#[test]
fn a_reader_that_comes_back_goes_on() {
    let engine = spawn(EngineConfig { event_ring: 16, ..EngineConfig::default() });
    let mut submission = engine.submit(greedy(stem(1, 20), 300)).expect("good");
    let paused = || engine.slots()[0].state == crate::SlotState::Paused;
    wait_until("the ring is full", paused);
    assert_eq!(submission.recv_timeout(Duration::from_secs(20)).map(|event| event.is_some()), Ok(true));
    let mut tokens = 0;
    while let Some(event) = submission.recv() {
        tokens += usize::from(matches!(event, Event::Token(_)));
    }
    assert_eq!(tokens, 300);
}

#[test]
fn shutting_down_lets_no_reader_wait() {
    for how in [Shutdown::Finish, Shutdown::Cancel] {
        let engine = spawn(EngineConfig { parallel: 1, ..EngineConfig::default() });
        let mut submissions: Vec<_> =
            (0..5).map(|i| engine.submit(greedy(stem(i, 100), 50)).expect("good")).collect();
        engine.shut_down(how);
        assert!(!engine.is_running());
        assert_eq!(engine.submit(greedy(stem(1, 10), 1)).map(drop), Err(SubmitError::ShuttingDown));
        for submission in &mut submissions {
            let mut last = None;
            while let Some(event) = submission.recv() {
                last = Some(event);
            }
            match (how, last) {
                (Shutdown::Finish, Some(Event::Finished(end))) => {
                    assert_eq!(end.reason, FinishReason::Length);
                }
                (Shutdown::Cancel, Some(Event::Finished(_) | Event::Failed(RequestError::ShutDown))) => {}
                (_, other) => panic!("{how:?}: {other:?}"),
            }
        }
        assert!(engine.join(Duration::from_secs(20)));
    }
}

#[test]
fn dropping_the_last_handle_ends_every_stream() {
    let engine = spawn(EngineConfig { parallel: 1, ..EngineConfig::default() });
    let mut submission = engine.submit(greedy(stem(1, 20), 1900)).expect("good");
    drop(engine);
    while submission.recv().is_some() {}
}

#[test]
fn forgotten_prefixes_are_read_again() {
    let engine = spawn(EngineConfig { parallel: 2, ..EngineConfig::default() });
    let cached = |prompt: &[u32]| {
        let mut submission = engine.submit(greedy(prompt.to_vec(), 5)).expect("good");
        let mut cached = None;
        while let Some(event) = submission.recv() {
            if let Event::Started(started) = event {
                cached = Some(started.cached_tokens);
            }
        }
        cached.expect("it started")
    };
    let prompt = stem(1, 1000);
    assert_eq!(cached(&prompt), 0);
    assert_eq!(cached(&prompt), 999);
    for _ in 0..20 {
        engine.forget_prefixes();
        assert_eq!(cached(&prompt), 0);
        assert_eq!(cached(&prompt), 999);
    }
    // Whoever is running keeps what it has.
    let mut running = engine.submit(greedy(stem(2, 300), 1000)).expect("good");
    while !matches!(running.recv(), Some(Event::Token(_))) {}
    engine.forget_prefixes();
    let mut tokens = 1;
    while let Some(event) = running.recv() {
        tokens += usize::from(matches!(event, Event::Token(_)));
    }
    assert_eq!(tokens, 1000);
    engine.shut_down(Shutdown::Finish);
    assert!(engine.join(Duration::from_secs(20)));
    engine.forget_prefixes();
}
