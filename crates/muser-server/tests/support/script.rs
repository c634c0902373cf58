//! An engine that says what a script tells it to, token by token, through the real stop watch.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::stream;
use muser_engine::{
    Event, FinishReason, Finished, Request, Started, SubmitError, Timings, Token, TopLogprobs, Usage,
};
use muser_server::backend::{Backend, EventStream, Numerics, Slot, Snapshot};
use muser_text::{Markers, Specials, Tokenizer};
use tokio::sync::mpsc;
use tokio::time::sleep;

/// What one request gets.
#[derive(Clone)]
pub struct Script {
    /// The model's output after `<|start|>assistant`, markers included.
    pub output: String,
    /// Before the first token.
    pub prefill: Duration,
    /// Before each token.
    pub pace: Duration,
    /// Prompt tokens that count as cached.
    pub cached: u32,
}

impl Script {
    /// Says `output` at once.
    pub fn saying(output: &str) -> Self {
        Self { output: output.into(), prefill: Duration::ZERO, pace: Duration::ZERO, cached: 0 }
    }
}

/// What the engine saw of a request.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The prompt as text, markers shown.
    pub prompt: String,
    /// The prompt's ids.
    pub ids: Vec<u32>,
    /// The limit.
    pub max_tokens: Option<u32>,
    /// The seed.
    pub seed: Option<u64>,
}

/// The engine.
#[derive(Clone)]
pub struct Scripted {
    tokenizer: Arc<Tokenizer>,
    script: Arc<dyn Fn(&str) -> Script + Send + Sync>,
    /// Requests, in order.
    pub seen: Arc<Mutex<Vec<Seen>>>,
    /// Requests running now.
    pub running: Arc<AtomicUsize>,
    /// Requests whose stream was dropped before the end.
    pub cancelled: Arc<AtomicUsize>,
    /// Tokens given out in all.
    pub tokens: Arc<AtomicUsize>,
    /// Why the device is gone.
    pub lost: Arc<Mutex<Option<String>>>,
    /// Requests beyond this number are refused.
    pub places: usize,
    /// What a context holds.
    pub context: usize,
    /// Whether running requests are to end.
    cut: Arc<tokio::sync::watch::Sender<bool>>,
}

impl Scripted {
    /// An engine whose script sees the prompt as text.
    pub fn new(script: impl Fn(&str) -> Script + Send + Sync + 'static) -> Self {
        Self {
            tokenizer: Arc::clone(super::text().tokenizer()),
            script: Arc::new(script),
            seen: Arc::default(),
            running: Arc::default(),
            cancelled: Arc::default(),
            tokens: Arc::default(),
            places: 1000,
            lost: Arc::default(),
            context: super::CONTEXT,
            cut: Arc::new(tokio::sync::watch::channel(false).0),
        }
    }

    /// The last request.
    pub fn last(&self) -> Seen {
        self.seen.lock().expect("lock").last().expect("a request came").clone()
    }
}

impl Backend for Scripted {
    fn submit(&self, request: Request) -> Result<EventStream, SubmitError> {
        let prompt_tokens = request.prompt.tokens.len();
        if prompt_tokens >= self.context {
            let context = self.context;
            return Err(SubmitError::ContextLength {
                prompt_tokens,
                max_prompt_tokens: context - 1,
                context,
            });
        }
        if self.running.load(Ordering::SeqCst) >= self.places {
            return Err(SubmitError::QueueFull { waiting: 3, limit: 3 });
        }
        let prompt = self.tokenizer.decode(&request.prompt.tokens, Markers::Show);
        let script = (self.script)(&prompt);
        self.seen.lock().expect("lock").push(Seen {
            prompt,
            ids: request.prompt.tokens.clone(),
            max_tokens: request.max_tokens,
            seed: request.seed,
        });
        self.running.fetch_add(1, Ordering::SeqCst);
        let seed = request.seed.unwrap_or(0);
        let (events, receiver) = mpsc::channel(1);
        let engine = self.clone();
        tokio::spawn(async move {
            let whole = engine.play(request, script, &events).await.is_some();
            engine.running.fetch_sub(1, Ordering::SeqCst);
            if !whole {
                engine.cancelled.fetch_add(1, Ordering::SeqCst);
            }
        });
        let events =
            stream::unfold(receiver, |mut receiver| async move { Some((receiver.recv().await?, receiver)) });
        Ok(EventStream { seed, events: Box::pin(events) })
    }

    fn snapshot(&self) -> Snapshot {
        let running = self.running.load(Ordering::SeqCst);
        let slots = (0..4).map(|id| Slot { id, busy: id < running, ..Slot::default() }).collect();
        Snapshot { slots, running: running as u64, kv_blocks_total: 4, ..Snapshot::default() }
    }

    fn slots(&self) -> usize {
        4
    }

    fn abort_all(&self) {
        self.cut.send_replace(true);
    }

    fn lost(&self) -> Option<String> {
        self.lost.lock().expect("lock").clone()
    }

    fn device(&self) -> String {
        "a script".into()
    }

    fn numerics(&self) -> Numerics {
        Numerics { kv_type: "16", route: "script".to_owned() }
    }
}

impl Scripted {
    /// Plays the script; `None` when nobody listens any more.
    async fn play(&self, request: Request, script: Script, events: &mpsc::Sender<Event>) -> Option<()> {
        let give = async |event: Event| events.send(event).await.ok();
        let wait = async |time: Duration| {
            tokio::select! {
                () = sleep(time) => Some(()),
                () = events.closed() => None,
            }
        };
        wait(script.prefill).await?;
        let prompt_tokens = request.prompt.tokens.len() as u32;
        give(Event::Started(Started {
            prompt_tokens,
            cached_tokens: script.cached,
            queue_time: Duration::ZERO,
            prefill_time: script.prefill,
            seed: request.seed.unwrap_or(0),
        }))
        .await?;
        let ids = self.tokenizer.encode(&script.output, Specials::Parse);
        for index in 0..request.n {
            let mut watch = request.stop_watch.as_ref().map(|make| make(index));
            let mut reason = FinishReason::Length;
            let mut count = 0;
            for &id in ids.iter().take(request.max_tokens.unwrap_or(u32::MAX) as usize) {
                wait(script.pace).await?;
                if *self.cut.borrow() {
                    reason = FinishReason::Cancelled;
                    break;
                }
                count += 1;
                if request.stop_ids.contains(&id) {
                    reason = FinishReason::Stop(id);
                    break;
                }
                self.tokens.fetch_add(1, Ordering::SeqCst);
                let token = Token { index, id, logprob: None, top: TopLogprobs::default(), logit_hash: None };
                give(Event::Token(token)).await?;
                if watch.as_mut().is_some_and(|watch| watch.push(id)) {
                    reason = FinishReason::StopWatch;
                    break;
                }
            }
            let usage = Usage {
                prompt_tokens,
                cached_tokens: script.cached,
                completion_tokens: count,
                ..Usage::default()
            };
            give(Event::Finished(Finished { index, reason, usage, timings: Timings::default() })).await?;
        }
        Some(())
    }
}
