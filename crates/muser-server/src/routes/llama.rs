//! llama-server's routes, under its names: `/completion`, `/tokenize`, `/detokenize`, `/apply-template`, `/props`,
//! `/slots`, `/infill`, `/lora-adapters`.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, stream};
use muser_text::{Markers, OutputEvent, Specials};
use serde_json::{Value, json};

use super::chat::answer::finite;
use crate::answer::{Answer, Finish, Outcome, TokenLogprob, Update};
use crate::app::{Loaded, SharedApp};
use crate::body::read_body;
use crate::error::{ApiError, Dialect};
use crate::fields::{Body, COUNT, Field, INTEGER, Kind, whole};
use crate::generation::Generation;
use crate::generation_params::{GenerationParams, Prompt, PromptPart, ResponseFormat};
use crate::params::{self, SAMPLING_FIELDS, concat};
use crate::pictures::{MOST_IMAGES, Picture};
use crate::places::Places;
use crate::sse::{self, Event};

/// What stands for an image in a `prompt_string`.
const MEDIA_MARKER: &str = "<__media__>";

const MULTIMODAL: &[Field] = &[
    Field::required("prompt_string", Kind::Text, "the text, with <__media__> for each image"),
    Field::optional("multimodal_data", Kind::List(&Kind::Text), "the images in base64, in their order"),
];

const COMPLETION_OWN: &[Field] = &[
    Field::required(
        "prompt",
        Kind::Either(&[
            Kind::Text,
            Kind::List(&Kind::Either(&[Kind::Text, COUNT])),
            Kind::Object(MULTIMODAL),
        ]),
        "a string, token ids, or both mixed; or prompt_string with images",
    ),
    Field::optional(
        "n_predict",
        INTEGER,
        "default -1, like any negative number: until the end; 0: only read the prompt",
    ),
    Field::optional("max_tokens", INTEGER, "the same"),
    Field::optional("stream", Kind::Bool, ""),
    Field::optional("n_probs", Kind::Integer { min: 0, max: 20 }, "alternatives per token"),
    Field::optional("json_schema", Kind::Map, ""),
    Field::optional("grammar", Kind::Text, "Lark, or GBNF (told by `::=`)"),
    Field::optional("return_tokens", Kind::Bool, "token ids are given in any case when n_probs is above 0"),
    Field::ignored("timings_per_token", "timings come at the end"),
    Field::optional(
        "n_keep",
        Kind::Integer { min: -1, max: u32::MAX as i64 },
        "with context_shift: tokens at the beginning that stay; -1: all of the prompt; default 0; the token that begins a \
         text stays in any case. A prompt that does not fit is a 400",
    ),
    Field::ignored("samplers", "the order of filters is fixed and documented"),
    Field::refused("image_data", "use a prompt with prompt_string and multimodal_data"),
];
const COMPLETION_TABLE: [Field; COMPLETION_OWN.len() + SAMPLING_FIELDS.len()] =
    concat(COMPLETION_OWN, SAMPLING_FIELDS);
/// The fields of `/completion`.
pub const COMPLETION_FIELDS: &[Field] = &COMPLETION_TABLE;

/// The fields of `/tokenize`.
pub const TOKENIZE_FIELDS: &[Field] = &[
    Field::optional("content", Kind::Text, "the text; this, prompt or messages is needed"),
    Field::optional(
        "prompt",
        Kind::Text,
        "the text, in vLLM's shape: the answer has a count, and the token that begins a text",
    ),
    Field::optional(
        "messages",
        Kind::List(&Kind::Any),
        "a conversation through the template, in vLLM's shape",
    ),
    Field::optional("tools", Kind::List(&Kind::Any), "with messages"),
    Field::optional("add_special_tokens", Kind::Bool, "with prompt; default true"),
    Field::optional("add_special", Kind::Bool, "default false: without the token that begins a text"),
    Field::optional(
        "parse_special",
        Kind::Bool,
        "markers become control tokens; default true, with prompt only where add_special_tokens is false",
    ),
    Field::optional("with_pieces", Kind::Bool, "the text of each token too"),
];

/// The fields of `/detokenize`.
pub const DETOKENIZE_FIELDS: &[Field] = &[Field::required("tokens", Kind::List(&COUNT), "")];

/// The fields of `/apply-template`.
pub const TEMPLATE_FIELDS: &[Field] = &[
    Field::required("messages", Kind::List(&Kind::Any), "as for /v1/chat/completions"),
    Field::optional("tools", Kind::List(&Kind::Any), ""),
    Field::optional("tool_choice", Kind::Either(&[Kind::Text, Kind::Map]), ""),
    Field::optional("chat_template_kwargs", Kind::Map, ""),
    Field::optional("reasoning_effort", super::chat::request::EFFORTS, ""),
];

/// `POST /tokenize`.
pub async fn tokenize(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::OpenAi.answer(run_tokenize(&app, request).await)
}

async fn run_tokenize(app: &SharedApp, request: Request) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, TOKENIZE_FIELDS).await?;
    if body.get("content").is_none_or(Value::is_null) {
        return count_tokens(&loaded, Body(&body)).await;
    }
    let answer = tokio::task::spawn_blocking(move || {
        let body = Body(&body);
        let content = body.text("content").unwrap_or_default();
        let specials =
            if body.flag("parse_special").unwrap_or(true) { Specials::Parse } else { Specials::Plain };
        let tokenizer = loaded.text.tokenizer();
        let mut ids = tokenizer.encode(content, specials);
        if body.flag("add_special").unwrap_or(false) {
            tokenizer.ensure_bos(&mut ids);
        }
        if !body.flag("with_pieces").unwrap_or(false) {
            return json!({"tokens": ids});
        }
        let pieces: Vec<Value> = ids
            .iter()
            .map(|id| {
                let bytes = loaded.text.token_bytes(*id);
                // A token that is not whole characters is given as bytes.
                let piece = std::str::from_utf8(&bytes).map_or_else(|_| json!(bytes), |text| json!(text));
                json!({"id": id, "piece": piece})
            })
            .collect();
        json!({"tokens": pieces})
    });
    let answer = answer.await.map_err(|_| ApiError::internal("The tokenizer failed"))?;
    Ok(Json(answer).into_response())
}

/// vLLM's shape of `/tokenize`.
async fn count_tokens(loaded: &Arc<Loaded>, body: Body<'_>) -> Result<Response, ApiError> {
    let ids = if let Some(text) = body.text("prompt") {
        let (text, whole) = (text.to_owned(), body.flag("add_special_tokens").unwrap_or(true));
        // A text that needs no beginning was rendered by its sender, or is a marker itself.
        let specials =
            if body.flag("parse_special").unwrap_or(!whole) { Specials::Parse } else { Specials::Plain };
        let loaded = Arc::clone(loaded);
        let cut = move || {
            let mut ids = loaded.text.tokenizer().encode(&text, specials);
            if whole {
                loaded.text.tokenizer().ensure_bos(&mut ids);
            }
            Ok(ids)
        };
        tokio::task::spawn_blocking(cut).await
    } else if body.get("messages").is_some() {
        let prompt = Prompt::Chat(Box::new(super::chat::request::read_conversation(body)?));
        let loaded = Arc::clone(loaded);
        tokio::task::spawn_blocking(move || loaded.text.prompt_ids(&prompt)).await
    } else {
        return Err(ApiError::field("content", "One of 'content', 'prompt' and 'messages' is needed"));
    };
    let ids = ids.map_err(|_| ApiError::internal("The tokenizer failed"))??;
    Ok(Json(json!({"count": ids.len(), "max_model_len": loaded.facts.context_tokens, "tokens": ids}))
        .into_response())
}

/// `GET /tokenizer_info`: what tools that render prompts themselves ask for, in vLLM's shape.
pub async fn tokenizer_info(State(app): State<SharedApp>) -> Response {
    Dialect::OpenAi.answer(app.loaded().map(|loaded| {
        let tokenizer = loaded.text.tokenizer();
        let text = |id: Option<u32>| id.map(|id| tokenizer.decode(&[id], Markers::Show));
        let end = text(tokenizer.eos());
        Json(json!({
            "tokenizer_class": "muser",
            "model_max_length": loaded.facts.context_tokens,
            "vocab_size": loaded.text.vocabulary(),
            "bos_token": text(tokenizer.bos()),
            "eos_token": end,
            // Nothing is padded here; tools that ask want some token.
            "pad_token": end,
            "unk_token": null,
            "add_bos_token": tokenizer.bos().is_some(),
            "chat_template": loaded.text.template_source(),
        }))
        .into_response()
    }))
}

/// `POST /detokenize`.
pub async fn detokenize(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::OpenAi.answer(run_detokenize(&app, request).await)
}

async fn run_detokenize(app: &SharedApp, request: Request) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, DETOKENIZE_FIELDS).await?;
    let tokens = Body(&body).list("tokens").unwrap_or_default();
    let ids: Vec<u32> = tokens.iter().filter_map(|id| whole(id)?.try_into().ok()).collect();
    let vocabulary = loaded.text.vocabulary();
    if let Some(index) = ids.iter().position(|id| *id as usize >= vocabulary) {
        return Err(ApiError::field(
            format!("tokens[{index}]"),
            format!("Token id {} is outside the model's vocabulary of {vocabulary}", ids[index]),
        ));
    }
    let text = loaded.text.tokenizer().decode(&ids, Markers::Show);
    // The one name is llama-server's, the other vLLM's.
    Ok(Json(json!({"content": text, "prompt": text})).into_response())
}

/// `POST /apply-template`.
pub async fn apply_template(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::OpenAi.answer(run_template(&app, request).await)
}

async fn run_template(app: &SharedApp, request: Request) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, TEMPLATE_FIELDS).await?;
    let prompt = Prompt::Chat(Box::new(super::chat::request::read_conversation(Body(&body))?));
    let text = tokio::task::spawn_blocking(move || loaded.text.prompt_text(&prompt));
    let text = text.await.map_err(|_| ApiError::internal("The template failed"))??;
    Ok(Json(json!({"prompt": text})).into_response())
}

/// `GET /props`.
pub async fn props(State(app): State<SharedApp>) -> Response {
    Dialect::OpenAi.answer(app.loaded().map(|loaded| {
        let facts = &loaded.facts;
        let numerics = loaded.backend.numerics();
        let slots = loaded.backend.slots();
        Json(json!({
            "default_generation_settings": {
                "n_ctx": facts.context_tokens,
                "params": {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "min_p": 0.0, "n_predict": -1},
            },
            "total_slots": slots,
            "model_alias": facts.name,
            "model_path": facts.path,
            "chat_template": loaded.text.template_source(),
            "modalities": {"vision": loaded.text.sees(), "audio": false, "video": false},
            "media_marker": MEDIA_MARKER,
            "build_info": concat!("muser ", env!("CARGO_PKG_VERSION")),
            "device": loaded.backend.device(),
            "kv_type": numerics.kv_type,
            "numeric_route": numerics.route,
        }))
        .into_response()
    }))
}

/// `GET /slots`. Prompts are not shown: other users' text is nobody's business.
pub async fn slots(State(app): State<SharedApp>) -> Response {
    Dialect::OpenAi.answer(app.loaded().map(|loaded| {
        let snapshot = app.without_sizes(loaded.backend.snapshot());
        // For all slots together: who waits gets the next one that is free.
        let wait = snapshot.expected_wait(loaded.backend.slots());
        let queue =
            json!({"waiting": snapshot.waiting, "expected_wait_s": wait.map(|wait| wait.as_secs_f64())});
        // These hold memory and no slot.
        let handoffs: Vec<Value> = app
            .handoffs()
            .into_iter()
            .map(|one| {
                json!({
                    "node": one.node,
                    "n_prompt_tokens": one.positions,
                    "n_rows": one.rows,
                    "n_bytes": one.bytes,
                })
            })
            .collect();
        let slots: Vec<Value> = snapshot
            .slots
            .iter()
            .map(|slot| {
                json!({
                    "id": slot.id,
                    "n_ctx": loaded.facts.context_tokens,
                    "is_processing": slot.busy,
                    "n_prompt_tokens": slot.prompt_tokens,
                    "n_prompt_tokens_processed": slot.processed_tokens,
                    "n_prompt_tokens_cache": slot.cached_tokens,
                    "next_token": [{"n_decoded": slot.generated_tokens, "has_next_token": slot.busy}],
                    "queue": queue,
                    "handoffs": handoffs,
                })
            })
            .collect();
        Json(slots).into_response()
    }))
}

/// `GET /lora-adapters`: there are none.
pub async fn adapters() -> Response {
    Json(json!([])).into_response()
}

/// `POST /infill`.
pub async fn infill() -> Response {
    let fault = ApiError::not_implemented("The model was not trained to fill gaps; use /v1/chat/completions");
    fault.into_response_as(Dialect::OpenAi)
}

/// `POST /completion`.
pub async fn completion(State(app): State<SharedApp>, request: Request) -> Response {
    let arrived = Instant::now();
    Dialect::OpenAi.answer(run_completion(&app, request, arrived).await)
}

async fn run_completion(app: &SharedApp, request: Request, arrived: Instant) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, COMPLETION_FIELDS).await?;
    let body = Body(&body);
    let generation = Generation::start(app, &loaded, work(body)?, arrived).await?;
    let head = Head { model: loaded.facts.name.clone(), seed: generation.seed() };
    if body.flag("stream").unwrap_or(false) {
        return Ok(sse::respond(events(generation, head), app.config.keep_alive));
    }
    let answer = generation.answers().await?.into_iter().next().unwrap_or_default();
    Ok(Json(head.whole(&answer)).into_response())
}

fn work(body: Body<'_>) -> Result<GenerationParams, ApiError> {
    let mut work = GenerationParams::new(prompt(body)?);
    work.places = Places { prompt: "prompt", ..Places::default() };
    work.sampling = params::sampling(body)?;
    work.seed = params::seed(body);
    params::endings(body, &mut work)?;
    work.keep = body.integer("n_keep").unwrap_or(0);
    // Negative: no limit.
    work.max_tokens = body.count("n_predict").or_else(|| body.count("max_tokens"));
    work.logprobs = body.count("n_probs").filter(|top| *top > 0).map(|top| top as u8);
    work.form = match (body.get("json_schema"), body.text("grammar").filter(|grammar| !grammar.is_empty())) {
        (Some(schema), None) => ResponseFormat::JsonSchema(schema.clone()),
        (None, Some(grammar)) => ResponseFormat::Grammar(grammar.to_owned()),
        (None, None) => ResponseFormat::Free,
        (Some(_), Some(_)) => {
            return Err(ApiError::field("grammar", "'grammar' and 'json_schema' exclude each other"));
        }
    };
    if work.form != ResponseFormat::Free {
        work.places.form = if body.get("json_schema").is_some() { "json_schema" } else { "grammar" }.into();
    }
    params::check_endings(&work, false)?;
    Ok(work)
}

fn prompt(body: Body<'_>) -> Result<Prompt, ApiError> {
    match body.get("prompt") {
        Some(Value::Array(items)) => items
            .iter()
            .enumerate()
            .map(|(index, item)| match item {
                Value::String(text) => Ok(PromptPart::Text(text.clone())),
                item => whole(item).and_then(|id| u32::try_from(id).ok()).map(PromptPart::Token).ok_or_else(
                    || ApiError::field(format!("prompt[{index}]"), "A part must be text or a token id"),
                ),
            })
            .collect::<Result<_, _>>()
            .map(Prompt::Mixed),
        Some(Value::String(text)) => Ok(Prompt::Text(text.clone())),
        Some(Value::Object(parts)) => with_pictures(Body(parts)),
        _ => Err(ApiError::field("prompt", "'prompt' must be a string or a list")),
    }
}

/// Text with images where its markers are.
fn with_pictures(body: Body<'_>) -> Result<Prompt, ApiError> {
    let text = body.text("prompt_string").unwrap_or_default();
    let data = body.list("multimodal_data").unwrap_or_default();
    let texts: Vec<&str> = text.split(MEDIA_MARKER).collect();
    let (markers, images) = (texts.len() - 1, data.len());
    if markers != images {
        return Err(ApiError::field(
            "prompt.multimodal_data",
            format!(
                "'prompt_string' has {markers} times {MEDIA_MARKER}, 'multimodal_data' has {images} images"
            ),
        ));
    }
    if images > MOST_IMAGES {
        let message = format!("At most {MOST_IMAGES} images are taken in a request");
        return Err(ApiError::field("prompt.multimodal_data", message));
    }
    let mut parts = Vec::with_capacity(2 * texts.len());
    for (index, text) in texts.into_iter().enumerate() {
        if let Some(image) = index.checked_sub(1).and_then(|before| data.get(before)) {
            let place = format!("prompt.multimodal_data[{}]", index - 1);
            let image = image.as_str().unwrap_or_default();
            parts.push(PromptPart::Picture(Picture::from_text(image, place)?));
        }
        parts.push(PromptPart::Text(text.to_owned()));
    }
    Ok(Prompt::Mixed(parts))
}

struct Head {
    model: String,
    seed: u64,
}

impl Head {
    fn whole(&self, answer: &Answer) -> Value {
        let mut object = self.last(&answer.outcome);
        object["content"] = answer.content.as_str().into();
        add_tokens(&mut object, &answer.logprobs);
        object
    }

    fn last(&self, outcome: &Outcome) -> Value {
        let (kind, word) = match &outcome.finish {
            Finish::StopString(stop) => ("word", stop.as_str()),
            Finish::Length => ("limit", ""),
            Finish::Stop | Finish::ToolCalls => ("eos", ""),
        };
        json!({
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": true,
            "model": self.model,
            "tokens_predicted": outcome.usage.completion,
            "tokens_evaluated": outcome.usage.prompt,
            "tokens_cached": outcome.usage.cached,
            "generation_settings": {"seed": self.seed},
            "stop_type": kind,
            "stopping_word": word,
            "truncated": outcome.shifted > 0,
            "has_new_line": false,
            "timings": outcome.timings(),
        })
    }
}

fn add_tokens(object: &mut Value, tokens: &[TokenLogprob]) {
    if tokens.is_empty() {
        return;
    }
    let entry = |id: u32, bytes: &[u8], logprob: f32| json!({"id": id, "token": String::from_utf8_lossy(bytes), "bytes": bytes, "logprob": finite(logprob)});
    object["tokens"] = tokens.iter().map(|token| Value::from(token.id)).collect();
    object["completion_probabilities"] = tokens
        .iter()
        .map(|token| {
            let mut object = entry(token.id, &token.bytes, token.logprob);
            object["top_logprobs"] =
                token.top.iter().map(|(id, bytes, logprob)| entry(*id, bytes, *logprob)).collect();
            object
        })
        .collect();
}

fn events(generation: Generation, head: Head) -> impl Stream<Item = Event> + Send {
    generation.flat_map(move |update| {
        let event = match update {
            Update::Piece {
                piece: OutputEvent::Content(text) | OutputEvent::Reasoning(text),
                logprobs,
                ..
            } => {
                let mut object = json!({"index": 0, "content": text, "tokens": [], "stop": false});
                add_tokens(&mut object, &logprobs);
                Some(object)
            }
            Update::Finished { outcome, .. } => Some(head.last(&outcome)),
            Update::Failed(fault) => Some(fault.body(Dialect::OpenAi)),
            Update::Piece { .. } | Update::Prompt(_) | Update::Started { .. } | Update::End => None,
        };
        stream::iter(event.map(Event::Data))
    })
}
