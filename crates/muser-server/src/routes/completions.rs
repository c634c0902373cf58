//! `/v1/completions`: text after text, without template or channels.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use muser_text::OutputEvent;
use serde_json::{Value, json};

use super::chat::answer::prompt_logprobs;
use super::chat::request::{SHARED_FIELDS, TRANSFER_PARAMS};
use super::models::check_name;
use super::token_lists::{self, Entry, Place};
use crate::answer::{Answer, Outcome, Update, Usage};
use crate::app::{SharedApp, unix_seconds};
use crate::body::read_body;
use crate::error::{ApiError, Dialect};
use crate::fields::{Body, COUNT, Field, Kind, whole};
use crate::generation::Generation;
use crate::generation_params::{GenerationParams, Prompt};
use crate::params::{self, concat, drawn_seed, limit_field};
use crate::places::Places;
use crate::sse::{self, Event};

/// Most prompts in one request. So many answers as one request may have are in the engine at once; the others wait.
const MAX_PROMPTS: usize = 2048;

/// OpenAI's default; clients that want more say so.
const DEFAULT_MAX_TOKENS: u32 = 16;

const STREAM_OPTIONS: &[Field] =
    &[Field::optional("include_usage", Kind::Bool, "one more chunk at the end, with usage and no choices")];

const OWN: &[Field] = &[
    Field::required(
        "prompt",
        Kind::Either(&[Kind::Text, Kind::List(&Kind::Either(&[Kind::Text, COUNT, Kind::List(&COUNT)]))]),
        "a string, token ids, or a list of up to 2048 of either",
    ),
    Field::optional(
        "model",
        Kind::Text,
        "any name means the loaded model, unless the server is told to be strict",
    ),
    limit_field("max_tokens", "default 16; 0: only read the prompt; -1: no limit"),
    limit_field("max_completion_tokens", "the same"),
    Field::optional("n", Kind::Integer { min: 1, max: 16 }, "default 1"),
    Field::optional("best_of", Kind::Integer { min: 1, max: 16 }, "only the same as n"),
    Field::optional(
        "echo",
        Kind::Bool,
        "the prompt before the answer, with logprobs too if they are asked for",
    ),
    Field::optional(
        "prompt_logprobs",
        Kind::Integer { min: 0, max: 20 },
        "log-probabilities of the prompt's tokens, in vLLM's shape; not in a stream",
    ),
    Field::optional(
        "logprobs",
        Kind::Integer { min: 0, max: 20 },
        "alternatives per token; 0: the sampled token only",
    ),
    Field::optional("stream", Kind::Bool, ""),
    Field::optional("stream_options", Kind::Object(STREAM_OPTIONS), ""),
    Field::optional("response_format", Kind::Object(super::chat::request::RESPONSE_FORMAT), ""),
    Field::ignored("user", "not kept"),
    Field::ignored("metadata", "not kept"),
    TRANSFER_PARAMS,
    Field::refused("suffix", "the model was not trained to fill gaps"),
];

const FIELD_TABLE: [Field; OWN.len() + SHARED_FIELDS.len()] = concat(OWN, SHARED_FIELDS);
/// The fields.
pub const FIELDS: &[Field] = &FIELD_TABLE;

/// `POST /v1/completions`.
pub async fn completions(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::OpenAi.answer(run(&app, request, Instant::now()).await)
}

async fn run(app: &SharedApp, request: Request, arrived: Instant) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, FIELDS).await?;
    loaded.metrics.note_transfer_params(&body);
    let body = Body(&body);
    check_name(app, &loaded, body.text("model"))?;
    let prompts = prompts(body)?;
    let mut pattern = work(body)?;
    // One seed for all, which the answer names.
    let seed = *pattern.seed.get_or_insert_with(|| drawn_seed(app.random_u64()));
    let choices = pattern.choices as usize;
    let streams = body.flag("stream").unwrap_or(false);
    let limit = app.config.limits.answers_per_request;
    let most = if streams { limit / choices } else { MAX_PROMPTS };
    if prompts.len() > most || choices > limit {
        let message = format!(
            "{} prompts with {choices} answers each are asked for, at most {most} are taken",
            prompts.len()
        );
        return Err(ApiError::field("prompt", message));
    }
    let echo = body.flag("echo").unwrap_or(false);
    let mut echoes = Vec::with_capacity(prompts.len());
    for prompt in &prompts {
        let text = if echo { loaded.text.prompt_text(prompt)? } else { String::new() };
        let begins = matches!(prompt, Prompt::Text(_)) && loaded.text.tokenizer().bos().is_some();
        echoes.push(Echo { text, begins });
    }
    let head = Head {
        id: app.new_id("cmpl-"),
        created: unix_seconds(),
        model: loaded.facts.name.clone(),
        seed,
        choices,
        echoes,
        top: pattern.logprobs.filter(|_| echo).map(usize::from),
        tells_prompt: body.get("prompt_logprobs").is_some(),
    };
    let several = prompts.len() > 1;
    let works = prompts.into_iter().enumerate().map(|(index, prompt)| {
        let mut work = GenerationParams { prompt, ..pattern.clone() };
        if several {
            work.places.messages = vec![format!("prompt[{index}]")];
        }
        work
    });
    let start = |work: GenerationParams| Generation::start(app, &loaded, work, arrived);
    if streams {
        let mut generations = Vec::new();
        for work in works {
            generations.push(start(work).await?);
        }
        let options = body.object("stream_options");
        let include_usage = options.and_then(|options| options.flag("include_usage")).unwrap_or(false);
        return Ok(sse::respond(events(generations, head, include_usage), app.config.keep_alive));
    }
    let answers: Vec<Vec<Answer>> = stream::iter(works)
        .map(|work| async { start(work).await?.answers().await })
        .buffered((limit / choices).max(1))
        .try_collect()
        .await?;
    Ok(Json(head.completion(&answers)).into_response())
}

fn prompts(body: Body<'_>) -> Result<Vec<Prompt>, ApiError> {
    let ids =
        |values: &[Value]| values.iter().map(|id| whole(id)?.try_into().ok()).collect::<Option<Vec<u32>>>();
    let fault = || ApiError::field("prompt", "'prompt' must be a string, token ids, or a list of either");
    let value = body.get("prompt").ok_or_else(fault)?;
    match value {
        Value::String(text) => Ok(vec![Prompt::Text(text.clone())]),
        Value::Array(items) if items.is_empty() => {
            Err(ApiError::field("prompt", "'prompt' is an empty list"))
        }
        Value::Array(items) if items.iter().all(Value::is_number) => {
            Ok(vec![Prompt::Tokens(ids(items).ok_or_else(fault)?)])
        }
        Value::Array(items) => items
            .iter()
            .map(|item| match item {
                Value::String(text) => Ok(Prompt::Text(text.clone())),
                Value::Array(list) => ids(list).map(Prompt::Tokens).ok_or_else(fault),
                _ => Err(fault()),
            })
            .collect(),
        _ => Err(fault()),
    }
}

fn work(body: Body<'_>) -> Result<GenerationParams, ApiError> {
    let mut work = GenerationParams::new(Prompt::Tokens(Vec::new()));
    work.places = Places { prompt: "prompt", ..Places::default() };
    work.sampling = params::sampling(body)?;
    work.seed = params::seed(body);
    params::endings(body, &mut work)?;
    let names = ["max_completion_tokens", "max_tokens"];
    let named = names.iter().any(|name| body.get(name).is_some());
    work.max_tokens = if named { params::max_tokens(body, &names) } else { Some(DEFAULT_MAX_TOKENS) };
    work.choices = body.count("n").unwrap_or(1);
    if body.count("best_of").is_some_and(|best_of| best_of != work.choices) {
        return Err(ApiError::unsupported("best_of", "'best_of' other than 'n' is not supported"));
    }
    work.logprobs = body.count("logprobs").map(|top| top as u8);
    (work.form, work.places.form) = super::chat::request::form(body)?;
    work.prompt_logprobs = super::chat::request::prompt_logprobs(body)?;
    if body.flag("echo").unwrap_or(false) && work.logprobs.is_some() {
        work.prompt_logprobs = work.prompt_logprobs.max(work.logprobs);
        work.tells_last = work.max_tokens == Some(1);
    }
    params::check_endings(&work, false)?;
    Ok(work)
}

/// What of a prompt is repeated.
struct Echo {
    text: String,
    /// Its first token was put before the text and is not part of it.
    begins: bool,
}

struct Head {
    id: String,
    created: u64,
    model: String,
    seed: u64,
    /// Choices per prompt.
    choices: usize,
    echoes: Vec<Echo>,
    /// Alternatives of the prompt's tokens, where those are repeated with log-probabilities.
    top: Option<usize>,
    /// The prompt's tokens are told of by themselves.
    tells_prompt: bool,
}

impl Head {
    fn object(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": concat!("muser-", env!("CARGO_PKG_VERSION")),
            "choices": choices,
        })
    }

    fn completion(&self, answers: &[Vec<Answer>]) -> Value {
        let mut usage = Usage::default();
        let mut choices = Vec::new();
        for (echo, answers) in self.echoes.iter().zip(answers) {
            let mut prompt_usage = Usage::default();
            // The first answer has what is known of the prompt.
            let prompt = answers.first().and_then(|answer| answer.prompt.as_deref());
            let repeated = match (prompt, self.top) {
                (Some(prompt), Some(top)) => token_lists::of_prompt(prompt, top, echo.begins),
                _ => Vec::new(),
            };
            for answer in answers {
                prompt_usage.add_choice(answer.outcome.usage);
                let mut entries = repeated.clone();
                entries.extend(answer.logprobs.iter().map(Entry::from));
                let mut choice = json!({
                    "text": format!("{}{}", echo.text, answer.content),
                    "index": choices.len(),
                    "logprobs": token_lists::object(&entries, &mut Place::default()),
                    "finish_reason": answer.outcome.finish.openai(),
                });
                if let Some(prompt) = prompt.filter(|_| self.tells_prompt) {
                    choice["prompt_logprobs"] = prompt_logprobs(prompt);
                }
                choices.push(choice);
            }
            usage.add_prompt(prompt_usage);
        }
        let mut object = self.object(choices);
        object["usage"] = usage.openai();
        object["seed"] = self.seed.into();
        if let [answers] = answers
            && let [only] = answers.as_slice()
        {
            object["timings"] = only.outcome.timings();
        }
        object
    }

    fn chunk(&self, index: usize, text: &str, logprobs: Value, outcome: Option<&Outcome>) -> Value {
        let mut object = self.object(vec![json!({
            "text": text,
            "index": index,
            "logprobs": logprobs,
            "finish_reason": outcome.map(|outcome| outcome.finish.openai()),
        })]);
        if let Some(outcome) = outcome {
            object["timings"] = outcome.timings();
            object["seed"] = self.seed.into();
        }
        object
    }
}

fn events(generations: Vec<Generation>, head: Head, include_usage: bool) -> impl Stream<Item = Event> + Send {
    let mut left = generations.len();
    let mut usages = vec![Usage::default(); left];
    let mut repeated: Vec<Vec<Entry>> = vec![Vec::new(); left];
    let mut places = vec![Place::default(); left * head.choices];
    let streams = generations
        .into_iter()
        .enumerate()
        .map(|(prompt, generation)| generation.map(move |update| (prompt, update)));
    stream::select_all(streams).flat_map(move |(prompt, update)| {
        let mut events = Vec::with_capacity(1);
        let index = |choice: u32| prompt * head.choices + choice as usize;
        match update {
            Update::Prompt(tokens) => {
                if let Some(top) = head.top {
                    repeated[prompt] = token_lists::of_prompt(&tokens, top, head.echoes[prompt].begins);
                }
            }
            Update::Started { .. } => {
                let echo = &head.echoes[prompt].text;
                let entries = std::mem::take(&mut repeated[prompt]);
                if !echo.is_empty() {
                    events.extend((0..head.choices as u32).map(|choice| {
                        let logprobs = token_lists::object(&entries, &mut places[index(choice)]);
                        Event::Data(head.chunk(index(choice), echo, logprobs, None))
                    }));
                }
            }
            Update::Piece {
                choice,
                piece: OutputEvent::Content(text) | OutputEvent::Reasoning(text),
                logprobs,
            } => {
                let entries: Vec<Entry> = logprobs.iter().map(Entry::from).collect();
                let logprobs = token_lists::object(&entries, &mut places[index(choice)]);
                events.push(Event::Data(head.chunk(index(choice), &text, logprobs, None)));
            }
            Update::Piece { .. } => {}
            Update::Finished { choice, outcome } => {
                events.push(Event::Data(head.chunk(index(choice), "", Value::Null, Some(&outcome))));
                usages[prompt].add_choice(outcome.usage);
            }
            Update::Failed(fault) => events.push(Event::Data(fault.body(Dialect::OpenAi))),
            Update::End => {
                left -= 1;
                if left == 0 {
                    if include_usage {
                        let mut usage = Usage::default();
                        usages.iter().for_each(|one| usage.add_prompt(*one));
                        let mut object = head.object(Vec::new());
                        object["usage"] = usage.openai();
                        events.push(Event::Data(object));
                    }
                    events.push(Event::Done);
                }
            }
        }
        stream::iter(events)
    })
}
