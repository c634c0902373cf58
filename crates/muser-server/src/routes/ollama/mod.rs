//! Ollama's routes: `/api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings`, `/api/tags`, `/api/show`, `/api/ps`,
//! `/api/version`.
//!
//! Streams are lines of JSON, and streaming is the default. Calls are given out whole, so their arguments are
//! collected until the next piece.

pub mod answer;
pub mod request;

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};

use self::answer::{Lines, Shape};
use super::embeddings::{dimensions, inputs, vectors};
use super::models::check_name;
use crate::answer::Update;
use crate::app::{Loaded, ModelFacts, SharedApp};
use crate::body::read_body;
use crate::error::{ApiError, Dialect};
use crate::fields::{Body, Field};
use crate::generation::Generation;
use crate::generation_params::GenerationParams;
use crate::sse;

/// `POST /api/chat`.
pub async fn chat(State(app): State<SharedApp>, request: Request) -> Response {
    let arrived = Instant::now();
    Dialect::Ollama
        .answer(run(&app, request, request::CHAT_FIELDS, request::chat, Shape::Chat, arrived).await)
}

/// `POST /api/generate`.
pub async fn generate(State(app): State<SharedApp>, request: Request) -> Response {
    let arrived = Instant::now();
    Dialect::Ollama.answer(
        run(&app, request, request::GENERATE_FIELDS, request::generate, Shape::Generate, arrived).await,
    )
}

async fn run(
    app: &SharedApp,
    request: Request,
    fields: &'static [Field],
    parse: fn(Body<'_>) -> Result<GenerationParams, ApiError>,
    shape: Shape,
    arrived: Instant,
) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, fields).await?;
    let body = Body(&body);
    check_name(app, &loaded, body.text("model"))?;
    let mut lines = Lines::new(shape, loaded.facts.name.clone(), arrived);
    if request::only_loads(body, shape) {
        return Ok(Json(lines.loaded()).into_response());
    }
    let generation = Generation::start(app, &loaded, parse(body)?, arrived).await?;
    let notice = generation.notice();
    if !body.flag("stream").unwrap_or(true) {
        let answers = generation.answers().await?;
        let whole = lines.whole(answers.into_iter().next().unwrap_or_default());
        return Ok(notice.on(Json(whole).into_response()));
    }
    // A line without text is nothing to every client, and keeps the stream alive while a long prompt is read.
    let silent = lines.clone();
    let filler = move || Bytes::from(format!("{}\n", silent.empty()));
    let events = generation.flat_map(move |update| {
        let mut out = Vec::with_capacity(2);
        match update {
            Update::Piece { piece, logprobs, .. } => lines.piece(piece, &logprobs, &mut out),
            Update::Finished { outcome, .. } => lines.finish(&outcome, &mut out),
            Update::Failed(fault) => out.push(fault.body(Dialect::Ollama)),
            Update::Started { .. } | Update::Prompt(_) | Update::End => {}
        }
        stream::iter(out.into_iter().map(|line| Bytes::from(format!("{line}\n"))))
    });
    Ok(notice.on(sse::respond_with(events, "application/x-ndjson", app.config.keep_alive, filler)))
}

/// `POST /api/embed`: the vectors of one or several texts.
pub async fn embed(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::Ollama.answer(run_embed(&app, request, request::EMBED_FIELDS, Instant::now()).await)
}

/// `POST /api/embeddings`: the same in its older shape, for one text.
pub async fn embeddings(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::Ollama.answer(run_embed(&app, request, request::EMBEDDINGS_FIELDS, Instant::now()).await)
}

async fn run_embed(
    app: &SharedApp,
    request: Request,
    fields: &'static [Field],
    arrived: Instant,
) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, fields).await?;
    let body = Body(&body);
    check_name(app, &loaded, body.text("model"))?;
    if let Some(text) = body.get("prompt") {
        let (vectors, _) = vectors(&loaded, inputs(Some(text))?, None).await?;
        return Ok(Json(json!({"embedding": vectors.first()})).into_response());
    }
    let dimensions = dimensions(body, &loaded)?;
    let (vectors, tokens) = vectors(&loaded, inputs(body.get("input"))?, dimensions).await?;
    Ok(Json(json!({
        "model": loaded.facts.name,
        "embeddings": vectors,
        "total_duration": arrived.elapsed().as_nanos() as u64,
        "load_duration": 0,
        "prompt_eval_count": tokens,
    }))
    .into_response())
}

/// `GET /api/tags`.
pub async fn tags(State(app): State<SharedApp>) -> Response {
    Dialect::Ollama
        .answer(app.loaded().map(|loaded| Json(json!({"models": [entry(loaded)]})).into_response()))
}

/// `GET /api/ps`.
pub async fn running(State(app): State<SharedApp>) -> Response {
    Dialect::Ollama.answer(app.loaded().map(|loaded| {
        let mut model = entry(loaded);
        model["context_length"] = loaded.facts.context_tokens.into();
        model["size_vram"] = 0.into();
        model["expires_at"] = NEVER.into();
        Json(json!({"models": [model]})).into_response()
    }))
}

/// The version of Ollama whose interface this is: clients switch features on by it, and refuse to talk to old ones.
const SPOKEN: &str = "0.13.0";

/// `GET /api/version`.
pub async fn version() -> Response {
    Json(json!({"version": SPOKEN, "muser": env!("CARGO_PKG_VERSION")})).into_response()
}

/// `POST /api/show`.
pub async fn show(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::Ollama.answer(describe(&app, request).await)
}

async fn describe(app: &SharedApp, request: Request) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, request::SHOW_FIELDS).await?;
    let body = Body(&body);
    check_name(app, &loaded, body.text("model").or(body.text("name")))?;
    let facts = &loaded.facts;
    Ok(Json(json!({
        "modelfile": "",
        "parameters": "",
        "template": loaded.text.template_source(),
        "details": details(&loaded),
        "model_info": {
            "general.architecture": "muse-glimmer",
            "general.parameter_count": facts.parameters,
            "muse-glimmer.context_length": facts.context_tokens,
            "muse-glimmer.embedding_length": facts.hidden,
        },
        "capabilities": capabilities(loaded.text.sees()),
        "modified_at": muser_text::utc(loaded.created),
    }))
    .into_response())
}

fn capabilities(sees: bool) -> Vec<&'static str> {
    let vision = sees.then_some("vision");
    ["completion", "tools", "thinking"].into_iter().chain(vision).collect()
}

fn entry(loaded: &Loaded) -> Value {
    json!({
        "name": loaded.facts.name,
        "model": loaded.facts.name,
        "modified_at": muser_text::utc(loaded.created),
        "size": loaded.facts.file_bytes,
        "digest": digest(&loaded.facts),
        "details": details(loaded),
    })
}

/// The model stays loaded as long as the server runs.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// A digest of what is known of the model: clients cut it and compare it, and reading the whole file for one of its
/// content would delay every start by many seconds.
fn digest(facts: &ModelFacts) -> String {
    use std::fmt::Write as _;
    let known = format!(
        "{}\n{}\n{}\n{}\n{}",
        facts.name, facts.quantization, facts.parameters, facts.file_bytes, facts.hidden
    );
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, known.as_bytes());
    digest.as_ref().iter().fold(String::with_capacity(64), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn details(loaded: &Loaded) -> Value {
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": "muse-glimmer",
        "families": ["muse-glimmer"],
        "parameter_size": format!("{:.1}M", loaded.facts.parameters as f64 / 1e6),
        "quantization_level": loaded.facts.quantization,
    })
}
