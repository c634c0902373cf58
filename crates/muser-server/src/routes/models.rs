//! `/v1/models`: what is loaded. Cheap and independent of the engine, because clients poll it and measure with it.

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use crate::app::{Loaded, SharedApp};
use crate::error::{ApiError, Dialect};

/// `GET /v1/models`.
pub async fn list(State(app): State<SharedApp>) -> Response {
    let outcome = app.loaded().map(|loaded| Json(list_of(loaded)).into_response());
    Dialect::OpenAi.answer(outcome)
}

/// `GET /v1/models/{name}`; names may hold slashes.
pub async fn one(State(app): State<SharedApp>, Path(name): Path<String>) -> Response {
    let outcome = app.loaded().and_then(|loaded| {
        if means(&name, &loaded.facts.name) {
            Ok(Json(entry(loaded)).into_response())
        } else {
            Err(ApiError::no_model(&name, &loaded.facts.name))
        }
    });
    Dialect::OpenAi.answer(outcome)
}

/// The list, with what Anthropic's clients look for beside what OpenAI's do.
fn list_of(loaded: &Loaded) -> Value {
    let name = &loaded.facts.name;
    json!({"object": "list", "data": [entry(loaded)], "has_more": false, "first_id": name, "last_id": name})
}

fn entry(loaded: &Loaded) -> Value {
    let facts = &loaded.facts;
    json!({
        "id": facts.name,
        "object": "model",
        "created": loaded.created,
        "owned_by": "muser",
        "type": "model",
        "display_name": facts.name,
        "created_at": muser_text::utc(loaded.created),
        // Agents look for the context length under one of these names.
        "max_model_len": facts.context_tokens,
        "context_length": facts.context_tokens,
        "meta": {
            "n_ctx": facts.context_tokens,
            "n_ctx_train": facts.context_tokens,
            "n_vocab": loaded.text.vocabulary(),
            "n_embd": facts.hidden,
            "n_params": facts.parameters,
            "size": facts.file_bytes,
            "quantization": facts.quantization,
        },
    })
}

/// Ollama's clients put a tag behind a name that has none.
fn means(name: &str, loaded: &str) -> bool {
    name == loaded || name.strip_suffix(":latest") == Some(loaded)
}

/// Refuses a request for another model, if the operator wants that; by default any name means the loaded model,
/// because clients come with names of their own.
pub fn check_name(app: &SharedApp, loaded: &Loaded, name: Option<&str>) -> Result<(), ApiError> {
    match name {
        Some(name)
            if app.config.strict_model_name && !name.is_empty() && !means(name, &loaded.facts.name) =>
        {
            Err(ApiError::no_model(name, &loaded.facts.name))
        }
        _ => Ok(()),
    }
}
