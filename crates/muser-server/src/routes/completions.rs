//! `/v1/completions`: text after text, without template or channels.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, stream};
use serde_json::{Map, Value, json};

use super::chat::answer::finite;
use super::chat::request::SHARED_FIELDS;
use super::models::check_name;
use crate::answer::{Answer, Outcome, Piece, TokenLogprob, Update, Usage};
use crate::app::{SharedApp, unix_seconds};
use crate::error::{ApiError, Dialect};
use crate::exchange::read_body;
use crate::fields::{Body, COUNT, Field, Kind, whole};
use crate::generation::Generation;
use crate::params::{self, concat, limit_field};
use crate::sse::{self, Event};
use crate::work::{Prompt, Work};

/// OpenAI's default; clients that want more say so.
const DEFAULT_MAX_TOKENS: u32 = 16;

const STREAM_OPTIONS: &[Field] =
    &[Field::optional("include_usage", Kind::Bool, "one more chunk at the end, with usage and no choices")];

const OWN: &[Field] = &[
    Field::required(
        "prompt",
        Kind::Either(&[Kind::Text, Kind::List(&Kind::Either(&[Kind::Text, COUNT, Kind::List(&COUNT)]))]),
        "a string, token ids, or a list of either",
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
    Field::optional("echo", Kind::Bool, "the prompt before the answer; not with logprobs"),
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
    let body = Body(&body);
    check_name(app, &loaded, body.text("model"))?;
    let prompts = prompts(body)?;
    let pattern = work(body)?;
    let choices = pattern.choices as usize;
    let wanted = prompts.len() * choices;
    if wanted > app.config.limits.answers_per_request {
        return Err(ApiError::field(
            "prompt",
            format!(
                "{wanted} answers are asked for, at most {} are given",
                app.config.limits.answers_per_request
            ),
        ));
    }
    let echo = body.flag("echo").unwrap_or(false);
    if echo && pattern.logprobs.is_some() {
        return Err(ApiError::unsupported("echo", "'echo' together with 'logprobs' is not supported"));
    }
    let mut generations = Vec::with_capacity(prompts.len());
    let mut echoes = Vec::new();
    for prompt in prompts {
        echoes.push(if echo { loaded.text.prompt_text(&prompt)? } else { String::new() });
        let work = Work { prompt, ..pattern.clone() };
        generations.push(Generation::start(app, &loaded, work, arrived).await?);
    }
    let head = Head {
        id: app.new_id("cmpl-"),
        created: unix_seconds(),
        model: loaded.facts.name.clone(),
        seed: generations.first().map_or(0, Generation::seed),
        choices,
        echoes,
    };
    if body.flag("stream").unwrap_or(false) {
        let options = body.object("stream_options");
        let include_usage = options.and_then(|options| options.flag("include_usage")).unwrap_or(false);
        return Ok(sse::respond(events(generations, head, include_usage), app.config.keep_alive));
    }
    let mut answers = Vec::with_capacity(wanted);
    // They run at the same time in the engine; here they are only collected in order.
    for generation in generations {
        answers.push(generation.answers().await?);
    }
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

fn work(body: Body<'_>) -> Result<Work, ApiError> {
    let mut work = Work::new(Prompt::Tokens(Vec::new()));
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
    work.form = super::chat::request::form(body)?;
    params::check_endings(&work, false)?;
    Ok(work)
}

struct Head {
    id: String,
    created: u64,
    model: String,
    seed: u64,
    /// Choices per prompt.
    choices: usize,
    echoes: Vec<String>,
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
            for answer in answers {
                prompt_usage.add_choice(answer.outcome.usage);
                let logprobs = logprobs(&answer.logprobs);
                choices.push(json!({
                    "text": format!("{echo}{}", answer.content),
                    "index": choices.len(),
                    "logprobs": logprobs,
                    "finish_reason": answer.outcome.finish.openai(),
                }));
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

    fn chunk(&self, index: usize, text: &str, tokens: &[TokenLogprob], outcome: Option<&Outcome>) -> Value {
        let mut object = self.object(vec![json!({
            "text": text,
            "index": index,
            "logprobs": logprobs(tokens),
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
    let streams = generations
        .into_iter()
        .enumerate()
        .map(|(prompt, generation)| generation.map(move |update| (prompt, update)));
    stream::select_all(streams).flat_map(move |(prompt, update)| {
        let mut events = Vec::with_capacity(1);
        let index = |choice: u32| prompt * head.choices + choice as usize;
        match update {
            Update::Started { .. } => {
                let echo = &head.echoes[prompt];
                if !echo.is_empty() {
                    let chunks =
                        (0..head.choices as u32).map(|choice| head.chunk(index(choice), echo, &[], None));
                    events.extend(chunks.map(Event::Data));
                }
            }
            Update::Piece { choice, piece: Piece::Content(text) | Piece::Reasoning(text), logprobs } => {
                events.push(Event::Data(head.chunk(index(choice), &text, &logprobs, None)));
            }
            Update::Piece { .. } => {}
            Update::Finished { choice, outcome } => {
                events.push(Event::Data(head.chunk(index(choice), "", &[], Some(&outcome))));
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

/// The older log-probability object: parallel lists, alternatives by text.
fn logprobs(tokens: &[TokenLogprob]) -> Value {
    if tokens.is_empty() {
        return Value::Null;
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut offset = 0;
    let mut offsets = Vec::with_capacity(tokens.len());
    for token in tokens {
        offsets.push(offset);
        offset += text(&token.bytes).chars().count();
    }
    let top: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let mut map = Map::new();
            // The sampled token is always among its alternatives.
            map.insert(text(&token.bytes), finite(token.logprob).into());
            for (_, bytes, logprob) in &token.top {
                map.entry(text(bytes)).or_insert_with(|| finite(*logprob).into());
            }
            Value::Object(map)
        })
        .collect();
    json!({
        "tokens": tokens.iter().map(|token| text(&token.bytes)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| finite(token.logprob)).collect::<Vec<_>>(),
        "top_logprobs": top,
        "text_offset": offsets,
    })
}
