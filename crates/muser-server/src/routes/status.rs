//! Health, metrics and the description.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use crate::app::SharedApp;
use crate::error::{ApiError, Dialect};
use crate::exposition;

/// `GET /health`: 200 only when a request would be taken.
pub async fn health(State(app): State<SharedApp>) -> Response {
    Dialect::OpenAi.answer(app.loaded().map(|_| Json(json!({"status": "ok"})).into_response()))
}

/// `GET /metrics`; also answered while stopping, when operators look hardest.
pub async fn metrics(State(app): State<SharedApp>, headers: HeaderMap) -> Response {
    let Some(loaded) = app.loaded_if_any() else {
        return Dialect::OpenAi.answer(app.loaded().map(|_| ().into_response()));
    };
    let text = loaded.metrics.encode(&app.snapshot(loaded).await, &app.node_totals(), &app.nodes());
    let (kind, text) = if exposition::wants_classic(&headers) {
        (exposition::CLASSIC, exposition::classic(&text))
    } else {
        (exposition::OPEN_METRICS, text)
    };
    ([(header::CONTENT_TYPE, kind), (header::VARY, "accept")], text).into_response()
}

/// `GET /status`: what the page shows.
pub async fn status(State(app): State<SharedApp>) -> Response {
    Dialect::OpenAi.answer(run_status(&app).await)
}

async fn run_status(app: &SharedApp) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    let now = app.without_sizes(app.snapshot(loaded).await);
    let slots: Vec<Value> = now
        .slots
        .iter()
        .map(|slot| {
            json!({
                "id": slot.id,
                "busy": slot.busy,
                "prompt_tokens": slot.prompt_tokens,
                "processed_tokens": slot.processed_tokens,
                "cached_tokens": slot.cached_tokens,
                "generated_tokens": slot.generated_tokens,
            })
        })
        .collect();
    Ok(Json(json!({
        "model": {"name": loaded.facts.name, "context_tokens": loaded.facts.context_tokens, "sees": loaded.text.sees()},
        "device": loaded.backend.device(),
        "packs": app.packs().is_ok().then(|| json!({
            "count": now.packs,
            "bytes": now.pack_bytes,
            "looked_up_tokens": now.external_queries,
            "restored_tokens": now.external_hits,
        })),
        "running": now.running,
        "waiting": now.waiting,
        "slots": slots,
        "kv": {
            "used_bytes": now.kv_bytes_used,
            "kept_bytes": now.kv_bytes_kept,
            "total_bytes": now.kv_bytes_total,
        },
    }))
    .into_response())
}
