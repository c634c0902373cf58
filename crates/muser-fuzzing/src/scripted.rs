//! An engine that answers at once with a text, through the real stop watch.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use futures_util::stream;
use muser_engine::{
    Event, FinishReason, Finished, PromptLogprobs, Request, RequestKind, Started, SubmitError, Timings,
    Token, TopLogprobs, Usage,
};
use muser_server::backend::{Backend, EventStream, Numerics, Slot, Snapshot};
use muser_server::text::TextPipeline;
use muser_server::{App, ModelFacts, ServerConfig, SharedApp};
use muser_text::Specials;

use crate::words::{FILE, TINY};

/// Positions of the context.
const CONTEXT: usize = 4096;

/// What it says by turns.
const TEXTS: [&str; 4] = [
    " to=user<|message|>Hello there.<|eot|>",
    " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>{\"a\": 1}<|eot|>",
    "<atem:function_calls>\n<atem:invoke name=\"tool_0\">\n<atem:parameter name=\"city\">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>",
    "no header at all STOP \u{1F98A}",
];

/// The server's state over it.
pub(crate) static APP: LazyLock<SharedApp> = LazyLock::new(|| {
    let app = App::new(ServerConfig::default()).expect("a configuration");
    let facts = ModelFacts {
        name: "muse-tiny".into(),
        context_tokens: CONTEXT,
        hidden: 512,
        ..ModelFacts::default()
    };
    app.load(facts, TextPipeline::from_gguf(&FILE).expect("its vocabulary is whole"), Arc::new(Scripted));
    app
});

struct Scripted;

impl Backend for Scripted {
    fn submit(&self, request: Request) -> Result<EventStream, SubmitError> {
        let prompt_tokens = request.prompt.tokens.len();
        if prompt_tokens >= CONTEXT {
            return Err(SubmitError::ContextLength {
                prompt_tokens,
                max_prompt_tokens: CONTEXT - 1,
                context: CONTEXT,
            });
        }
        assert!(
            request.prompt.tokens.iter().all(|id| (*id as usize) < TINY.vocab_size()),
            "an id of no vocabulary"
        );
        assert!(
            (1..=16).contains(&request.n) && request.logprobs.is_none_or(|k| k <= 20),
            "what the engine would refuse"
        );
        let seed = request.seed.unwrap_or(0);
        Ok(EventStream { seed, events: Box::pin(stream::iter(play(&request))) })
    }

    fn snapshot(&self) -> Snapshot {
        let slots = (0..4).map(|id| Slot { id, ..Slot::default() }).collect();
        Snapshot { slots, kv_blocks_total: 4, ..Snapshot::default() }
    }

    fn slots(&self) -> usize {
        4
    }

    fn abort_all(&self) {}

    fn device(&self) -> String {
        "a script".into()
    }

    fn numerics(&self) -> Numerics {
        Numerics { kv_type: "16", route: "script".to_owned() }
    }
}

fn play(request: &Request) -> Vec<Event> {
    let prompt_tokens = request.prompt.tokens.len() as u32;
    let usage = Usage { prompt_tokens, ..Usage::default() };
    let started = Started {
        prompt_tokens,
        cached_tokens: 0,
        queue_time: Duration::ZERO,
        prefill_time: Duration::ZERO,
        seed: request.seed.unwrap_or(0),
    };
    let mut events = Vec::new();
    if request.prompt_logprobs.is_some() {
        events.push(Event::Prompt(PromptLogprobs::default()));
    }
    events.push(Event::Started(started));
    if matches!(request.kind, RequestKind::Embed) {
        events.push(Event::Embedding(vec![0.5; 512].into()));
        events.push(Event::Finished(Finished {
            index: 0,
            reason: FinishReason::Length,
            usage,
            timings: Timings::default(),
        }));
        return events;
    }
    let text = TEXTS[request.prompt.tokens.iter().map(|id| *id as usize).sum::<usize>() % TEXTS.len()];
    let ids = TINY.encode(text, Specials::Parse);
    for index in 0..request.n {
        let mut watch = request.stop_watch.as_ref().map(|make| make(index));
        let (mut reason, mut count) = (FinishReason::Length, 0);
        for &id in ids.iter().take(request.max_tokens.unwrap_or(u32::MAX) as usize) {
            count += 1;
            if request.stop_ids.contains(&id) {
                reason = FinishReason::Stop(id);
                break;
            }
            let logprob = request.logprobs.map(|_| -0.5);
            events.push(Event::Token(Token {
                index,
                id,
                logprob,
                top: TopLogprobs::default(),
                logit_hash: None,
            }));
            if watch.as_mut().is_some_and(|watch| watch.push(id)) {
                reason = FinishReason::StopWatch;
                break;
            }
        }
        let usage = Usage { completion_tokens: count, ..usage };
        events.push(Event::Finished(Finished { index, reason, usage, timings: Timings::default() }));
    }
    events
}
