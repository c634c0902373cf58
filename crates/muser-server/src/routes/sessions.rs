//! `/v1/sessions`: conversations that outlive the process. A session is the messages of a conversation, sealed, and a
//! pinned pack of the prefix that they make, so that going on costs only what is new.
//!
//! Saving reads the conversation through the engine, which computes what it does not know yet, waits for the pack, and
//! pins it. Restoring reads it again, which brings the pack into memory. Neither depends on the pack: without it the
//! prefix is computed as for any other request.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Path, Request, State as Shared};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Map, Value, json};

use super::chat::request::{EFFORTS, read_conversation};
use crate::answer::Usage;
use crate::app::{SharedApp, unix_seconds};
use crate::body::read_body;
use crate::error::{ApiError, Dialect};
use crate::fields::{Body, Field, Kind};
use crate::generation::{read_prompt, run_blocking};
use crate::generation_params::Prompt;
use crate::owner::Owner;
use crate::packs::{Keepsake, Place, State, check_name};

macro_rules! fields {
    ($($first:expr),*) => {
        &[
            $($first,)*
            Field::optional("messages", Kind::List(&Kind::Any), "as for /v1/chat/completions"),
            Field::optional("tools", Kind::List(&Kind::Any), "they are part of the prompt, so of the prefix too"),
            Field::optional("reasoning_effort", EFFORTS, "likewise"),
            Field::optional("chat_template_kwargs", Kind::Map, "likewise"),
        ]
    };
}

/// The fields of `/v1/sessions`.
pub const CREATE_FIELDS: &[Field] = fields!(Field::optional(
    "name",
    Kind::Text,
    "letters, digits, spaces, '.', '_', '-'; default: a new one"
));
/// The fields of `/v1/sessions/{name}/save`.
pub const SAVE_FIELDS: &[Field] = fields!();

/// What makes the prompt.
const CONVERSATION: [&str; 4] = ["messages", "tools", "reasoning_effort", "chat_template_kwargs"];

/// `POST /v1/sessions`.
pub async fn create(Shared(app): Shared<SharedApp>, request: Request) -> Response {
    let outcome = async {
        let packs = Arc::clone(app.packs()?);
        let body = read_body(request, &app.config.limits, CREATE_FIELDS).await?;
        let name = Body(&body).text("name").map_or_else(|| app.new_id("session-"), str::to_owned);
        check_name("name", &name)?;
        let place = Place::of_current(Keepsake::Session, &name)?;
        // Looked at before any work, and again when it is written: of several that create one name, one does.
        let wanted = place.clone();
        if run_blocking(move || packs.recall(&wanted)).await?.is_some() {
            return Err(ApiError::conflict(
                "name",
                "There is a session of this name; save to it, or delete it first",
            ));
        }
        save_as(&app, place, State::New, conversation_of(&body), unix_seconds()).await
    };
    Dialect::OpenAi.answer(outcome.await)
}

/// `GET /v1/sessions`.
pub async fn list(Shared(app): Shared<SharedApp>) -> Response {
    let outcome = async {
        let packs = Arc::clone(app.packs()?);
        let found = run_blocking({
            let owner = Owner::current()?;
            move || packs.list(owner, Keepsake::Session)
        })
        .await?;
        let data: Vec<Value> =
            found.iter().map(|(name, content, written)| object(name, content, *written)).collect();
        Ok(Json(json!({"object": "list", "data": data})).into_response())
    };
    Dialect::OpenAi.answer(outcome.await)
}

/// `GET /v1/sessions/{name}`.
pub async fn one(Shared(app): Shared<SharedApp>, Path(name): Path<String>) -> Response {
    let outcome = async {
        let (content, written) = recall(&app, &name).await?;
        let mut object = object(&name, &content, written);
        show_conversation(&mut object, &content);
        Ok(Json(object).into_response())
    };
    Dialect::OpenAi.answer(outcome.await)
}

/// `POST /v1/sessions/{name}/save`: with messages instead of the ones before, or the same ones again.
pub async fn save(Shared(app): Shared<SharedApp>, Path(name): Path<String>, request: Request) -> Response {
    let outcome = async {
        let (content, _) = recall(&app, &name).await?;
        let body = read_body(request, &app.config.limits, SAVE_FIELDS).await?;
        let given = conversation_of(&body);
        let conversation = if given.contains_key("messages") {
            given
        } else {
            content["conversation"].as_object().cloned().unwrap_or_default()
        };
        let created = content["created"].as_u64().unwrap_or(0);
        let place = Place::of_current(Keepsake::Session, &name)?;
        save_as(&app, place, State::Created(created), conversation, created).await
    };
    Dialect::OpenAi.answer(outcome.await)
}

/// `POST /v1/sessions/{name}/restore`: brings the prefix back and gives the conversation.
pub async fn restore(Shared(app): Shared<SharedApp>, Path(name): Path<String>) -> Response {
    let outcome = async {
        let begun = Instant::now();
        let (content, written) = recall(&app, &name).await?;
        let conversation = content["conversation"].as_object().cloned().unwrap_or_default();
        let usage = match engine_prompt(&app, &conversation).await? {
            Some(prompt) => read_prompt(app.loaded()?, prompt, true).await?,
            None => Usage::default(),
        };
        let mut object = object(&name, &content, written);
        show_conversation(&mut object, &content);
        object["usage"] = usage.openai();
        object["restore_ms"] = (begun.elapsed().as_secs_f64() * 1e3).into();
        Ok(Json(object).into_response())
    };
    Dialect::OpenAi.answer(outcome.await)
}

/// `DELETE /v1/sessions/{name}`.
pub async fn delete(Shared(app): Shared<SharedApp>, Path(name): Path<String>) -> Response {
    let outcome = async {
        let packs = Arc::clone(app.packs()?);
        check_name("name", &name)?;
        let wanted = Place::of_current(Keepsake::Session, &name)?;
        if !run_blocking(move || packs.forget(&wanted)).await? {
            return Err(no_session());
        }
        Ok(Json(json!({"name": name, "object": "session.deleted", "deleted": true})).into_response())
    };
    Dialect::OpenAi.answer(outcome.await)
}

fn no_session() -> ApiError {
    ApiError::not_found("There is no session of this name")
}

async fn recall(app: &SharedApp, name: &str) -> Result<(Value, u64), ApiError> {
    let packs = Arc::clone(app.packs()?);
    check_name("name", name)?;
    let place = Place::of_current(Keepsake::Session, name)?;
    run_blocking(move || packs.recall(&place)).await?.ok_or_else(no_session)
}

fn conversation_of(body: &Map<String, Value>) -> Map<String, Value> {
    let given = body.iter().filter(|(key, value)| CONVERSATION.contains(&key.as_str()) && !value.is_null());
    given.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// The prompt of a conversation, as a request with these messages would have it; none of an empty one.
async fn engine_prompt(
    app: &SharedApp,
    conversation: &Map<String, Value>,
) -> Result<Option<muser_engine::Prompt>, ApiError> {
    if Body(conversation).list("messages").is_none_or(<[Value]>::is_empty) {
        return Ok(None);
    }
    let prompt = Prompt::Chat(Box::new(read_conversation(Body(conversation))?));
    let loaded = Arc::clone(app.loaded()?);
    run_blocking(move || loaded.text.engine_prompt(&prompt)).await.map(Some)
}

async fn save_as(
    app: &SharedApp,
    place: Place,
    state: State,
    conversation: Map<String, Value>,
    created: u64,
) -> Result<Response, ApiError> {
    let packs = Arc::clone(app.packs()?);
    let loaded = app.loaded()?;
    let saving = packs.begin_save()?;
    let (mut usage, mut prompt) = (Usage::default(), Vec::new());
    if let Some(read) = engine_prompt(app, &conversation).await? {
        usage = read_prompt(loaded, read.clone(), true).await?;
        // Ids alone do not say what an image shows: its prefix is kept as every other's is, and not by the session's name.
        prompt = if read.images.is_empty() { read.tokens } else { Vec::new() };
    }
    let model = loaded.facts.name.clone();
    let mut object = run_blocking(move || {
        let _saving = saving;
        let content = packs.save(&place, state, &prompt, |kept| {
            json!({
                "created": created,
                "model": model,
                "conversation": conversation,
                "tokens": prompt.len(),
                "pack": kept.map(|kept| kept.json()),
            })
        })?;
        Ok(object(&place.name, &content, unix_seconds()))
    })
    .await?;
    object["usage"] = usage.openai();
    Ok(Json(object).into_response())
}

fn object(name: &str, content: &Value, written: u64) -> Value {
    json!({
        "name": name,
        "object": "session",
        "created": content["created"],
        "updated": written,
        "model": content["model"],
        "message_count": content["conversation"]["messages"].as_array().map_or(0, Vec::len),
        "tokens": content["tokens"],
        "pack": content["pack"],
    })
}

fn show_conversation(object: &mut Value, content: &Value) {
    for key in CONVERSATION {
        if let Some(value) = content["conversation"].get(key) {
            object[key] = value.clone();
        }
    }
    if object.get("messages").is_none() {
        object["messages"] = json!([]);
    }
}
