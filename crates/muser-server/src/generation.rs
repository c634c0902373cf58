//! One request in the engine, seen as text: submits it, and turns its token events into [`Update`]s as they come.
//!
//! A generation is a stream that runs nothing by itself. Whoever polls it (the connection, in the end) drives the
//! decoding; dropping it drops the engine's submission, which cancels the request within a step. Preparing a prompt
//! can take milliseconds per megabyte of text, so that happens beside the connections' threads.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt as _};
use muser_engine::{
    ContextPolicy, Event, FinishReason, Finished, PromptLogprobs, Request, RequestError, RequestKind,
    StopWatch, StopWatchFactory, SubmitError, Token,
};
use muser_text::{OutputDecoder, OutputEnd, OutputEvent, OutputOptions, Specials, StopMatcher, TokenKind};

use crate::answer::{Answer, Finish, Outcome, PromptToken, Seconds, TokenLogprob, Update, Usage};
use crate::app::{App, Loaded};
use crate::backend::EventStream;
use crate::error::ApiError;
use crate::form;
use crate::generation_params::{GenerationParams, Prompt};
use crate::metrics::ChoiceClock;
use crate::notice::Notice;
use crate::owner::Owner;
use crate::params::drawn_seed;
use crate::places::Places;
use crate::text::TextPipeline;
use crate::work_room::compute;
pub(crate) use crate::work_room::run_blocking;

/// A running request.
pub struct Generation {
    loaded: Arc<Loaded>,
    stream: EventStream,
    stops: Vec<String>,
    choices: Vec<Choice>,
    ready: VecDeque<Update>,
    ended: bool,
    held: Option<HeldTokens>,
    /// The prompt's ids, where its own tokens are to be told of.
    prompt: Vec<u32>,
    places: Places,
    notice: Notice,
    /// The field, as `places` takes it, to name if what the request asks for leaves no token to choose.
    narrowed_by: String,
    /// Prompt tokens that are rows of images.
    image_tokens: u32,
}

/// What the first choice has in its cache, for whoever saves the slot later.
struct HeldTokens {
    owner: Owner,
    slot: Option<usize>,
    ids: Vec<u32>,
}

struct Choice {
    decoder: OutputDecoder,
    /// Whether there were tools to call. A call that nobody offered is shown as text: a client without tools could not
    /// answer it, and would be left with nothing.
    offered: bool,
    /// Whether tokens without text, such as the end of the turn, are told of too.
    tells_all: bool,
    /// Whether the latest token was one that ends a text.
    at_end: bool,
    /// Log-probabilities of tokens whose text has not been given out, with the place of each in the answer's bytes.
    logprobs: VecDeque<(usize, TokenLogprob)>,
    /// Bytes of the answer that its tokens make, and those that have been given out.
    told_bytes: usize,
    given_bytes: usize,
    clock: ChoiceClock,
    /// Tokens that went because the context was full.
    shifted: u32,
    finished: bool,
}

impl Generation {
    /// Prepares `work` and hands it to the engine. All that can be said against a request is said here, before the
    /// headers of an answer.
    pub async fn start(
        app: &App,
        loaded: &Arc<Loaded>,
        work: GenerationParams,
        arrived: Instant,
    ) -> Result<Self, ApiError> {
        let places = work.places.clone();
        Self::begin(app, loaded, work, arrived).await.map_err(|fault| places.locate(fault))
    }

    async fn begin(
        app: &App,
        loaded: &Arc<Loaded>,
        mut work: GenerationParams,
        arrived: Instant,
    ) -> Result<Self, ApiError> {
        work.context_shift.get_or_insert(app.config.context_shift);
        let timeout = work.timeout;
        let seed = work.seed.unwrap_or_else(|| drawn_seed(app.random_u64()));
        let default_limit = app.config.limits.default_output_tokens;
        let stops = work.stops.clone();
        let slot = work.slot;
        let owner = Owner::current()?;
        let scope = owner.scope(work.cache_salt.as_deref());
        let output_limit = work.max_tokens.or(default_limit);
        let places = work.places.clone();
        let tells_prompt = work.prompt_logprobs.is_some();
        let tells_all = work.tells_last;
        let mut prepared = {
            let loaded = Arc::clone(loaded);
            compute(move || prepare(&loaded, work, seed, output_limit)).await?
        };
        prepared.request.scope = scope;
        prepared.request.deadline = timeout.map(|timeout| timeout.saturating_sub(arrived.elapsed()));
        let choices = prepared.request.n as usize;
        let decoder = loaded.text.decoder(&prepared.options)?;
        let offered = !prepared.options.tools.is_empty();
        let prompt_tokens = prepared.request.prompt.tokens.len();
        let image_tokens = image_tokens(loaded, &prepared.request);
        // Ids alone do not say what an image shows, so such a slot is not kept.
        let held = app.packs().is_ok() && prepared.request.cache && image_tokens == 0;
        let held = held.then(|| HeldTokens { owner, slot, ids: prepared.request.prompt.tokens.clone() });
        let prompt = if tells_prompt { prepared.request.prompt.tokens.clone() } else { Vec::new() };
        let stream = loaded
            .backend
            .submit(prepared.request)
            .map_err(|refusal| refused(loaded, &refusal, prompt_tokens))?;
        let call_prefix = app.new_id("call_");
        let choices = (0..choices)
            .map(|index| Choice {
                decoder: {
                    let mut decoder = decoder.clone();
                    decoder.name_calls(format!("{call_prefix}{index}"));
                    decoder
                },
                offered,
                tells_all,
                at_end: false,
                logprobs: VecDeque::new(),
                told_bytes: 0,
                given_bytes: 0,
                clock: ChoiceClock::new(arrived),
                shifted: 0,
                finished: false,
            })
            .collect();
        let (loaded, ready) = (Arc::clone(loaded), VecDeque::new());
        let Prepared { notice, narrowed_by, .. } = prepared;
        Ok(Self {
            loaded,
            stream,
            stops,
            choices,
            ready,
            ended: false,
            held,
            prompt,
            places,
            notice,
            narrowed_by,
            image_tokens,
        })
    }

    /// What of the request is not kept, for the answer's headers.
    pub(crate) fn notice(&self) -> Notice {
        self.notice.clone()
    }

    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.stream.seed
    }

    /// Number of choices.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// Waits for the end and gives all choices whole.
    pub async fn answers(mut self) -> Result<Vec<Answer>, ApiError> {
        let mut answers = vec![Answer::default(); self.choices.len()];
        while let Some(update) = self.next().await {
            match update {
                Update::Started { .. } | Update::End => {}
                Update::Prompt(prompt) => {
                    if let Some(answer) = answers.first_mut() {
                        answer.prompt = Some(prompt);
                    }
                }
                Update::Piece { choice, piece, logprobs } => {
                    if let Some(answer) = answers.get_mut(choice as usize) {
                        answer.push(piece, logprobs);
                    }
                }
                Update::Finished { choice, outcome } => {
                    if let Some(answer) = answers.get_mut(choice as usize) {
                        answer.outcome = outcome;
                    }
                }
                Update::Failed(fault) => return Err(fault),
            }
        }
        Ok(answers)
    }

    fn take_event(&mut self, event: Event) {
        match event {
            Event::Started(started) => {
                let metrics = &self.loaded.metrics;
                let (prompt_tokens, cached_tokens) = (started.prompt_tokens, started.cached_tokens);
                metrics.count_started(prompt_tokens, cached_tokens, started.queue_time, started.prefill_time);
                self.ready.push_back(Update::Started { prompt_tokens, cached_tokens });
            }
            Event::Prompt(known) => self.take_prompt(&known),
            Event::Token(token) => self.take_token(&token),
            Event::Finished(finished) => self.take_end(&finished),
            Event::Failed(error) => self.fail(self.places.locate(failed(&error, &self.narrowed_by))),
            Event::Shifted { index, dropped_tokens } => {
                self.loaded.metrics.context_shifts.inc();
                if let Some(choice) = self.choices.get_mut(index as usize) {
                    choice.shifted += dropped_tokens;
                }
            }
            // Requests of this route do not ask for it.
            Event::Embedding(_) => {}
        }
    }

    fn take_prompt(&mut self, known: &PromptLogprobs) {
        let text = &self.loaded.text;
        let ids = std::mem::take(&mut self.prompt);
        let tokens = ids.into_iter().enumerate().map(|(at, id)| PromptToken {
            id,
            bytes: text.token_bytes(id),
            known: at.checked_sub(1).and_then(|before| known.tokens.get(before).copied()),
            top: known.top_at(at).iter().map(|&(id, value)| (id, text.token_bytes(id), value)).collect(),
        });
        self.ready.push_back(Update::Prompt(tokens.collect()));
    }

    fn take_token(&mut self, token: &Token) {
        let Some(choice) = self.choices.get_mut(token.index as usize) else { return };
        choice.clock.token(&self.loaded.metrics);
        choice.at_end = self.loaded.text.tokenizer().stop_ids().contains(&token.id);
        if let Some(held) = &mut self.held
            && token.index == 0
        {
            held.ids.push(token.id);
        }
        if let Some(logprob) = token.logprob
            && choice.decoder.in_answer_channel()
            && (choice.tells_all || is_text(&self.loaded.text, token.id))
        {
            let text = &self.loaded.text;
            let bytes = text.token_bytes(token.id);
            let place = choice.told_bytes;
            if is_text(text, token.id) {
                choice.told_bytes += bytes.len();
            }
            let told = TokenLogprob {
                id: token.id,
                bytes,
                logprob,
                top: token
                    .top
                    .as_slice()
                    .iter()
                    .map(|&(id, logprob)| (id, text.token_bytes(id), logprob))
                    .collect(),
            };
            choice.logprobs.push_back((place, told));
        }
        let events = choice.decoder.push(token.id);
        choice.give(token.index, events, &mut self.ready);
    }

    fn take_end(&mut self, finished: &Finished) {
        if let Some(fault) = cut_off(finished.reason) {
            return self.cut(finished.index, fault);
        }
        let Some(choice) = self.choices.get_mut(finished.index as usize) else { return };
        if let FinishReason::Stop(id) = finished.reason
            && self.loaded.text.tokenizer().stop_ids().contains(&id)
        {
            // The id that ended the turn also ends the message before it.
            let events = choice.decoder.push(id);
            choice.give(finished.index, events, &mut self.ready);
        }
        let events = choice.decoder.finish();
        choice.give(finished.index, events, &mut self.ready);
        let finish = match choice.decoder.end() {
            Some(OutputEnd::StopString(index)) => {
                Finish::StopString(self.stops.get(index).cloned().unwrap_or_default())
            }
            Some(OutputEnd::EndOfTurn) => Finish::Stop,
            None if choice.at_end => Finish::Stop,
            None => Finish::of(finished.reason),
        };
        let finish = if finish == Finish::Stop && choice.offered && choice.decoder.tool_calls() > 0 {
            Finish::ToolCalls
        } else {
            finish
        };
        if !choice.logprobs.is_empty() && !matches!(finish, Finish::StopString(_)) {
            // Tokens without text of their own at the end, such as half a character.
            let logprobs = choice.logprobs.drain(..).map(|(_, told)| told).collect();
            let piece = OutputEvent::Content(String::new());
            self.ready.push_back(Update::Piece { choice: finished.index, piece, logprobs });
        }
        choice.clock.finish(&self.loaded.metrics, finish.label());
        tracing::info!(
            prompt_tokens = finished.usage.prompt_tokens,
            cached_tokens = finished.usage.cached_tokens,
            completion_tokens = finished.usage.completion_tokens,
            queue_ms = finished.timings.queue.as_millis() as u64,
            prefill_ms = finished.timings.prefill.as_millis() as u64,
            decode_ms = finished.timings.decode.as_millis() as u64,
            finish = finish.label(),
            "a choice ended"
        );
        choice.finished = true;
        let usage = Usage {
            prompt: finished.usage.prompt_tokens,
            cached: finished.usage.cached_tokens,
            restored: finished.usage.restored_tokens,
            handed: finished.usage.handed_tokens,
            images: self.image_tokens,
            completion: finished.usage.completion_tokens,
            reasoning: choice.decoder.reasoning_tokens() as u32,
        };
        let seconds = Seconds {
            queue: finished.timings.queue.as_secs_f64(),
            prefill: finished.timings.prefill.as_secs_f64(),
            decode: finished.timings.decode.as_secs_f64(),
        };
        let outcome = Outcome { shifted: choice.shifted, finish, usage, seconds };
        self.ready.push_back(Update::Finished { choice: finished.index, outcome });
        if self.choices.iter().all(|choice| choice.finished) {
            self.ready.push_back(Update::End);
            self.ended = true;
        }
    }

    /// The server ended a choice: what is there is not the answer, and must not look like one.
    fn cut(&mut self, index: u32, fault: ApiError) {
        if let Some(choice) = self.choices.get_mut(index as usize) {
            choice.clock.finish(&self.loaded.metrics, "abort");
        }
        tracing::warn!(reason = fault.message, "an answer was cut off");
        self.loaded.metrics.clocks.failed();
        self.ready.push_back(Update::Failed(fault));
        self.ended = true;
    }

    fn fail(&mut self, fault: ApiError) {
        tracing::error!(message = fault.message, "a request failed after it was accepted");
        self.loaded.metrics.clocks.failed();
        self.ready.push_back(Update::Failed(fault));
        self.ended = true;
    }
}

impl Stream for Generation {
    type Item = Update;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Update>> {
        loop {
            if let Some(update) = self.ready.pop_front() {
                return Poll::Ready(Some(update));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            match ready!(self.stream.events.as_mut().poll_next(cx)) {
                Some(event) => self.take_event(event),
                None => self.fail(ApiError::internal("The engine ended the request without saying why")),
            }
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            self.loaded.metrics.cancelled.inc();
        }
        if let Some(HeldTokens { owner, slot, ids }) = self.held.take() {
            let count = self.loaded.backend.slots();
            self.loaded.slots.note(owner, slot, count, ids);
        }
    }
}

impl Choice {
    fn give(&mut self, index: u32, events: Vec<OutputEvent>, ready: &mut VecDeque<Update>) {
        for event in events {
            let piece = if self.offered { event } else { shown(event) };
            // What a stop string has cut off is not told of either: a token goes with the text that it begins.
            let mut logprobs = Vec::new();
            if let OutputEvent::Content(text) = &piece {
                self.given_bytes += text.len();
                while let Some((_, told)) = self.logprobs.pop_front_if(|(place, _)| *place < self.given_bytes)
                {
                    logprobs.push(told);
                }
            }
            ready.push_back(Update::Piece { choice: index, piece, logprobs });
        }
    }
}

struct Prepared {
    request: Request,
    options: OutputOptions,
    notice: Notice,
    narrowed_by: String,
}

fn prepare(
    loaded: &Loaded,
    work: GenerationParams,
    seed: u64,
    max_tokens: Option<u32>,
) -> Result<Prepared, ApiError> {
    let (text, context) = (&loaded.text, loaded.facts.context_tokens);
    let found = text.places(&work.prompt)?;
    let ids = &found.ids;
    if ids.is_empty() {
        return Err(ApiError::field("messages", "The prompt is empty"));
    }
    let shift = work.context_shift.unwrap_or(false).then(|| text.shift_plan(&work.prompt, ids, work.keep));
    // Plain text is cut anywhere, which might be inside an image.
    let shift = shift.filter(|plan| !plan.plain || found.images.is_empty());
    // The engine says so too, but only after the grammars of all tools were made. Old turns may go yet.
    if ids.len() > context && shift.as_ref().is_none_or(|plan| plan.turns.len() < 2) {
        return Err(ApiError::context_length(ids.len(), context));
    }
    check_ids(&work, text.vocabulary())?;
    let options = text.output_options(&work.prompt, &work.stops);
    let one_call = matches!(&work.prompt, Prompt::Chat(conversation) if !conversation.parallel_calls);
    // The engine sends no event for an id that ends the text; the decoder knows the end of a turn by itself.
    let ends = if work.tells_last { &[] } else { text.tokenizer().stop_ids() };
    let room = if shift.is_some() { usize::MAX } else { context - ids.len() };
    let limit = max_tokens.map_or(room, |limit| room.min(limit as usize));
    let stops = [ends, &work.stop_ids].concat();
    let mut request = Request::new(text.with_pictures(&work.prompt, found)?, stops);
    let (constraint, notice) = form::constraint(text, &work, &options, limit)?;
    request.constraint = constraint;
    let narrowed_by = narrowed_by(&work);
    request.max_tokens = max_tokens;
    request.sampling = work.sampling;
    if work.ignore_end {
        let ends = text.ending_ids(&options);
        request.sampling.logit_bias.extend(ends.iter().map(|id| (*id, f32::NEG_INFINITY)));
    }
    request.seed = Some(seed);
    request.n = work.choices;
    request.logprobs = work.logprobs;
    request.prompt_logprobs = work.prompt_logprobs;
    request.cache = work.use_cache;
    // Lower goes first for clients, higher in the engine.
    request.priority = -work.priority;
    if let Some(plan) = shift {
        request.context_policy = ContextPolicy::Shift(plan);
    }
    request.stop_watch = text.stop_matcher(&options, one_call)?.map(|matcher| {
        Box::new(move |_| Box::new(Watch(matcher.clone())) as Box<dyn StopWatch>) as StopWatchFactory
    });
    Ok(Prepared { request, options, notice, narrowed_by })
}

/// Prompt tokens that are rows of images.
fn image_tokens(loaded: &Loaded, request: &Request) -> u32 {
    let hidden = loaded.facts.hidden.max(1);
    request.prompt.images.iter().map(|image| image.positions(hidden) as u32).sum()
}

/// Ids that the model does not have are named by the field they came in.
fn check_ids(work: &GenerationParams, vocabulary: usize) -> Result<(), ApiError> {
    let unknown = |field: &str, id: u32| {
        ApiError::field(field, format!("Token id {id} is outside the model's vocabulary of {vocabulary}"))
    };
    if let Some(id) = work.stop_ids.iter().find(|id| **id as usize >= vocabulary) {
        return Err(unknown("stop_token_ids", *id));
    }
    match work.sampling.logit_bias.iter().find(|(id, _)| *id as usize >= vocabulary) {
        Some((id, _)) => Err(unknown("logit_bias", *id)),
        None => Ok(()),
    }
}

/// The field that narrows most what may be written, as [`Places`] takes it.
fn narrowed_by(work: &GenerationParams) -> String {
    let has_tools = matches!(&work.prompt, Prompt::Chat(conversation) if !conversation.tools.is_empty());
    if !work.sampling.logit_bias.is_empty() {
        "logit_bias".into()
    } else if work.form != crate::generation_params::ResponseFormat::Free {
        "response_format".into()
    } else if has_tools {
        "tools".into()
    } else {
        "logit_bias".into()
    }
}

/// The engine's view of where the text ends, if it needs one.
struct Watch(StopMatcher);

impl StopWatch for Watch {
    fn push(&mut self, token: u32) -> bool {
        self.0.push(token)
    }
}

/// A call that nobody offered, as text.
fn shown(event: OutputEvent) -> OutputEvent {
    OutputEvent::Content(match event {
        OutputEvent::ToolCallStart { index: 0, name, .. } => format!("{name}("),
        OutputEvent::ToolCallStart { name, .. } => format!("\n{name}("),
        OutputEvent::ToolCallArguments { json_delta, .. } => json_delta,
        OutputEvent::ToolCallEnd { .. } => ")".into(),
        OutputEvent::Content(_) | OutputEvent::Reasoning(_) => return event,
    })
}

/// Whether a token is part of the visible text.
fn is_text(text: &TextPipeline, id: u32) -> bool {
    matches!(text.tokenizer().token_kind(id), Some(TokenKind::Normal | TokenKind::UserDefined))
}

/// The number of tokens of a prompt.
pub async fn count_prompt(loaded: &Arc<Loaded>, work: GenerationParams) -> Result<usize, ApiError> {
    let loaded = Arc::clone(loaded);
    compute(move || {
        let counted = loaded.text.prompt_ids(&work.prompt).map(|ids| ids.len());
        counted.map_err(|fault| work.places.locate(fault))
    })
    .await
}

/// Reads a prompt and generates nothing: afterwards the engine knows it, or has had it brought from a pack.
pub(crate) async fn read_prompt(
    loaded: &Loaded,
    prompt: impl Into<muser_engine::Prompt>,
    cache: bool,
) -> Result<Usage, ApiError> {
    let mut request = Request::new(prompt, Vec::new());
    let tokens = request.prompt.tokens.len();
    request.max_tokens = Some(0);
    request.cache = cache;
    request.scope = Owner::current()?.scope(None);
    let mut stream = loaded.backend.submit(request).map_err(|refusal| refused(loaded, &refusal, tokens))?;
    let mut usage = Usage::default();
    while let Some(event) = stream.events.next().await {
        match event {
            Event::Finished(finished) => {
                usage = Usage {
                    prompt: finished.usage.prompt_tokens,
                    cached: finished.usage.cached_tokens,
                    restored: finished.usage.restored_tokens,
                    handed: finished.usage.handed_tokens,
                    ..Usage::default()
                };
            }
            Event::Failed(error) => return Err(failed(&error, "prompt")),
            _ => {}
        }
    }
    Ok(usage)
}

/// The mean of the final hidden states of `text`, scaled to unit length, and the number of its tokens.
pub async fn embed(loaded: &Arc<Loaded>, text: String) -> Result<(Vec<f32>, usize), ApiError> {
    let ids = {
        let loaded = Arc::clone(loaded);
        compute(move || Ok(loaded.text.tokenizer().encode_prompt(&text, Specials::Plain))).await?
    };
    if ids.is_empty() {
        return Err(ApiError::field("input", "An empty text has no embedding with this model"));
    }
    let tokens = ids.len();
    let mut request = Request::new(ids, Vec::new());
    request.kind = RequestKind::Embed;
    let mut stream = loaded.backend.submit(request).map_err(|refusal| refused(loaded, &refusal, tokens))?;
    let mut vector = None;
    while let Some(event) = stream.events.next().await {
        match event {
            Event::Embedding(values) => vector = Some(values.into_vec()),
            Event::Failed(error) => return Err(failed(&error, "input")),
            _ => {}
        }
    }
    let Some(mut vector) = vector else {
        return Err(ApiError::not_implemented("The loaded backend gives no embeddings"));
    };
    scale_to_unit(&mut vector);
    Ok((vector, tokens))
}

/// Scales a vector to unit length, unless it has none.
pub(crate) fn scale_to_unit(vector: &mut [f32]) {
    let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
}

/// When a place may be free, in whole seconds: as expected, or before anything has ended a guess, some seconds for each round of
/// the slots before this request's turn.
fn seconds_of_queue(waiting: usize, slots: usize, expected: Option<Duration>) -> u32 {
    match expected {
        Some(wait) => (wait.as_secs_f64().ceil() as u32).clamp(1, 600),
        None => (1 + 2 * (waiting / slots.max(1))).min(60) as u32,
    }
}

/// The engine's refusal as an answer.
fn refused(loaded: &Loaded, refusal: &SubmitError, prompt_tokens: usize) -> ApiError {
    match refusal {
        SubmitError::ContextLength { prompt_tokens, context, .. } => {
            ApiError::context_length(*prompt_tokens, *context)
        }
        SubmitError::Capacity { needed_blocks, available_blocks } => {
            let mut fault = ApiError::context_length(prompt_tokens, loaded.facts.context_tokens);
            fault.message = format!(
                "{} (the KV memory given to this server holds {available_blocks} blocks of 256 tokens, this request \
                 needs {needed_blocks})",
                fault.message
            );
            fault
        }
        SubmitError::QueueFull { waiting, .. } => {
            let slots = loaded.backend.slots().max(1);
            let expected = loaded.backend.snapshot().expected_wait(slots);
            ApiError::queue_full(seconds_of_queue(*waiting, slots, expected))
        }
        SubmitError::Invalid { field, expected, found } => {
            ApiError::field(*field, format!("'{field}' is {found}, expected {expected}"))
        }
        SubmitError::ShuttingDown => ApiError::unavailable("The server is stopping"),
        other => ApiError::internal(other.to_string()),
    }
}

/// Why a choice ended that neither the model nor the client ended.
fn cut_off(reason: FinishReason) -> Option<ApiError> {
    match reason {
        FinishReason::Cancelled => Some(ApiError::unavailable(
            "The server is stopping and has cut this answer off; it is not complete",
        )),
        FinishReason::SlowReader => Some(ApiError::unavailable(
            "The answer was not read as fast as it was made, and has been cut off; it is not complete",
        )),
        _ => None,
    }
}

/// A failure after acceptance as an answer. What the device or the end of the server did may go well another time.
fn failed(error: &RequestError, narrowed_by: &str) -> ApiError {
    match error {
        RequestError::QueueTimeout { .. } | RequestError::Device(_) | RequestError::ShutDown => {
            ApiError::unavailable(error.to_string())
        }
        RequestError::Constraint(reason) => ApiError::field(
            narrowed_by,
            format!("What '{narrowed_by}' asks for cannot be gone on with here: {reason}"),
        ),
        other => ApiError::internal(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Snapshot;

    #[test]
    fn who_finds_the_queue_full_comes_back_after_its_rounds() {
        let cases = [
            (0, 2, 1),
            (1, 2, 1),
            (2, 2, 3),
            (6, 2, 7),
            (6, 4, 3),
            (58, 2, 59),
            (60, 2, 60),
            (1 << 40, 1, 60),
            (6, 0, 13),
        ];
        for (waiting, slots, expected) in cases {
            assert_eq!(
                seconds_of_queue(waiting, slots, None),
                expected,
                "{waiting} waiting for {slots} slots"
            );
        }
        // Ten seconds a request, four at a time: one ends every 2.5 s.
        let queue = |waiting, seconds| Snapshot {
            waiting,
            turnaround: Duration::from_secs(seconds),
            ..Snapshot::default()
        };
        let after = |snapshot: Snapshot| seconds_of_queue(7, 4, snapshot.expected_wait(4));
        assert_eq!(after(queue(0, 10)), 3);
        assert_eq!(after(queue(3, 10)), 10);
        assert_eq!(after(queue(1 << 40, 10)), 600);
        assert_eq!(after(queue(3, 0)), 3, "nothing has ended yet");
    }
}
