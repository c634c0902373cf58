//! The routes, one family a file, and the table that names them all.

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::HeaderValue;
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

use crate::app::SharedApp;
use crate::auth;
use crate::describe::{self, Route};
use crate::error::{ApiError, Dialect};
use crate::shown_path::KnownPaths;
use crate::work_room;

pub mod chat;
pub mod completions;
pub mod dashboard;
pub mod embeddings;
pub mod gateways;
pub mod llama;
pub mod messages;
pub mod models;
pub mod ollama;
pub mod packs;
pub mod page;
pub mod responses;
pub mod sessions;
pub mod slot_files;
pub mod status;
pub mod token_lists;

const JSON: &[&str] = &["application/json"];
const JSON_OR_EVENTS: &[&str] = &["application/json", "text/event-stream"];
const JSON_OR_LINES: &[&str] = &["application/json", "application/x-ndjson"];

/// All routes with a description.
pub const ROUTES: &[Route] = &[
    Route {
        method: "POST",
        path: "/v1/chat/completions",
        family: "OpenAI",
        summary: "A turn of a conversation, whole or as a stream.",
        fields: chat::request::FIELDS,
        answers: JSON_OR_EVENTS,
    },
    Route {
        method: "POST",
        path: "/v1/completions",
        family: "OpenAI",
        summary: "Text after text, without template.",
        fields: completions::FIELDS,
        answers: JSON_OR_EVENTS,
    },
    Route {
        method: "POST",
        path: "/v1/responses",
        family: "OpenAI",
        summary: "A turn as a list of items, kept in memory unless store is false.",
        fields: responses::request::FIELDS,
        answers: JSON_OR_EVENTS,
    },
    Route {
        method: "POST",
        path: "/v1/responses/input_tokens",
        family: "OpenAI",
        summary: "The number of tokens of a prompt.",
        fields: responses::request::FIELDS,
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/v1/responses/compact",
        family: "OpenAI",
        summary: "A conversation as its last questions and a summary by the model.",
        fields: responses::request::FIELDS,
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/v1/responses/{id}",
        family: "OpenAI",
        summary: "A response that was kept.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "DELETE",
        path: "/v1/responses/{id}",
        family: "OpenAI",
        summary: "Forgets one.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/v1/responses/{id}/input_items",
        family: "OpenAI",
        summary: "The items that it answered; ?limit=, order=, after=.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/v1/responses/{id}/cancel",
        family: "OpenAI",
        summary: "400: none runs in the background.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/v1/embeddings",
        family: "OpenAI",
        summary: "The mean of the final hidden states, scaled to unit length.",
        fields: embeddings::FIELDS,
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/v1/messages",
        family: "Anthropic",
        summary: "A turn of a conversation, whole or as a stream.",
        fields: messages::request::FIELDS,
        answers: JSON_OR_EVENTS,
    },
    Route {
        method: "POST",
        path: "/v1/messages/count_tokens",
        family: "Anthropic",
        summary: "The number of tokens of a prompt.",
        fields: messages::request::COUNT_FIELDS,
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/v1/models",
        family: "OpenAI",
        summary: "The loaded model, with its context length; never waits for the engine.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/v1/models/{model}",
        family: "OpenAI",
        summary: "The same for one name.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/completion",
        family: "llama-server",
        summary: "Text after text.",
        fields: llama::COMPLETION_FIELDS,
        answers: JSON_OR_EVENTS,
    },
    Route {
        method: "POST",
        path: "/tokenize",
        family: "llama-server",
        summary: "Text to token ids.",
        fields: llama::TOKENIZE_FIELDS,
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/detokenize",
        family: "llama-server",
        summary: "Token ids to text.",
        fields: llama::DETOKENIZE_FIELDS,
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/tokenizer_info",
        family: "llama-server",
        summary: "Special tokens and chat template, in vLLM's shape.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/apply-template",
        family: "llama-server",
        summary: "The prompt of a conversation as text.",
        fields: llama::TEMPLATE_FIELDS,
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/props",
        family: "llama-server",
        summary: "Facts about model and server.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/slots",
        family: "llama-server",
        summary: "What each slot is doing; no prompts. `queue` is that of all slots: how many wait, and how long one that comes now may; `handoffs` are prompts that other nodes read for this server now, with rows computed there and bytes that came.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/slots/{id}",
        family: "llama-server",
        summary: "With ?action=save, restore or erase: keeps what a slot holds under a name, beyond the process; needs packs.",
        fields: slot_files::FIELDS,
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/lora-adapters",
        family: "llama-server",
        summary: "An empty list.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/infill",
        family: "llama-server",
        summary: "501: the model was not trained to fill gaps.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/api/chat",
        family: "Ollama",
        summary: "A turn of a conversation, as lines unless stream is false.",
        fields: ollama::request::CHAT_FIELDS,
        answers: JSON_OR_LINES,
    },
    Route {
        method: "POST",
        path: "/api/generate",
        family: "Ollama",
        summary: "One answer to one prompt.",
        fields: ollama::request::GENERATE_FIELDS,
        answers: JSON_OR_LINES,
    },
    Route {
        method: "POST",
        path: "/api/embed",
        family: "Ollama",
        summary: "The vectors of one or several texts.",
        fields: ollama::request::EMBED_FIELDS,
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/api/embeddings",
        family: "Ollama",
        summary: "The vector of one text, in the older shape.",
        fields: ollama::request::EMBEDDINGS_FIELDS,
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/api/show",
        family: "Ollama",
        summary: "Facts about the model.",
        fields: ollama::request::SHOW_FIELDS,
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/api/tags",
        family: "Ollama",
        summary: "The loaded model.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/api/ps",
        family: "Ollama",
        summary: "The loaded model.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/api/version",
        family: "Ollama",
        summary: "The version of Ollama's interface that is spoken here, and muser's own.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/v1/packs",
        family: "packs",
        summary: "The stored prefixes: names, sizes, whether the loaded model can use them.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/v1/packs/{id}",
        family: "packs",
        summary: "One of them.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "DELETE",
        path: "/v1/packs/{id}",
        family: "packs",
        summary: "Removes one, and what no other needs of it.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/v1/packs/{id}/pin",
        family: "packs",
        summary: "Keeps one from being dropped to make room, or lets go of it.",
        fields: packs::PIN_FIELDS,
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/v1/sessions",
        family: "packs",
        summary: "A conversation that outlives the process: its messages, sealed, and a pinned pack of their prefix.",
        fields: sessions::CREATE_FIELDS,
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/v1/sessions",
        family: "packs",
        summary: "All sessions, without their messages.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/v1/sessions/{name}",
        family: "packs",
        summary: "One session with its messages.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "DELETE",
        path: "/v1/sessions/{name}",
        family: "packs",
        summary: "Forgets a session and removes its pack.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/v1/sessions/{name}/save",
        family: "packs",
        summary: "Keeps these messages instead of the ones before, or the same ones again.",
        fields: sessions::SAVE_FIELDS,
        answers: JSON,
    },
    Route {
        method: "POST",
        path: "/v1/sessions/{name}/restore",
        family: "packs",
        summary: "Brings the session's prefix into memory and gives its messages; usage says what was restored.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/model_info",
        family: "gateways",
        summary: "Which model is served, for gateways of SGLang's kind.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/server_info",
        family: "gateways",
        summary: "The same with the server's limits.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/get_load",
        family: "gateways",
        summary: "Requests, and tokens that running ones hold in the KV cache.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/v1/loads",
        family: "gateways",
        summary: "The same in SGLang's newer shape.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/load",
        family: "gateways",
        summary: "The number of requests, as vLLM has it.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/health",
        family: "operation",
        summary: "200 when ready, 503 while loading or stopping; needs no key.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/metrics",
        family: "operation",
        summary: "Prometheus metrics under the names known from vLLM.",
        fields: &[],
        answers: &["application/openmetrics-text", "text/plain"],
    },
    Route {
        method: "GET",
        path: "/status",
        family: "operation",
        summary: "Slots, queue and memory now; what the page at `/` shows.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/v1/dashboard",
        family: "operation",
        summary: "What `/dashboard` and `muser top` show: figures of now and the past hour, each marked; `?since=` for new rows only.",
        fields: &[],
        answers: JSON,
    },
    Route {
        method: "GET",
        path: "/openapi.json",
        family: "operation",
        summary: "This description, for programs.",
        fields: &[],
        answers: JSON,
    },
];

/// Other paths of some routes: clients of llama-server and vLLM leave the version out, or put it where there is none.
pub const ALIASES: &[(&str, &str)] = &[
    ("/chat/completions", "/v1/chat/completions"),
    ("/completions", "/completion"),
    ("/responses", "/v1/responses"),
    ("/embeddings", "/v1/embeddings"),
    ("/models", "/v1/models"),
    ("/v1/health", "/health"),
    ("/version", "/api/version"),
    ("/get_model_info", "/model_info"),
    ("/get_server_info", "/server_info"),
];

/// All paths that answer.
pub(crate) fn known_paths() -> KnownPaths {
    let tables = ROUTES.iter().map(|route| route.path).chain(ALIASES.iter().map(|(alias, _)| *alias));
    KnownPaths::new(tables.chain(auth::OPEN_PATHS))
}

/// `GET /openapi.json`.
async fn openapi() -> Response {
    axum::Json(describe::openapi(ROUTES)).into_response()
}

/// The service behind every connection.
pub fn router(app: &SharedApp) -> Router {
    let router = Router::new()
        .route("/chat/completions", post(chat::completions))
        .route("/completions", post(llama::completion))
        .route("/responses", post(responses::responses))
        .route("/embeddings", post(embeddings::embeddings))
        .route("/models", get(models::list))
        .route("/v1/health", get(status::health))
        .route("/version", get(ollama::version))
        .route("/model_info", get(gateways::model_info))
        .route("/get_model_info", get(gateways::model_info))
        .route("/server_info", get(gateways::server_info))
        .route("/get_server_info", get(gateways::server_info))
        .route("/get_load", get(gateways::load_by_rank))
        .route("/v1/loads", get(gateways::loads))
        .route("/load", get(gateways::load))
        .route("/", get(page::html))
        .route("/page.css", get(page::css))
        .route("/page.js", get(page::js))
        .route("/common.js", get(page::common))
        .route("/dashboard", get(page::dashboard))
        .route("/dashboard.css", get(page::dashboard_css))
        .route("/dashboard.js", get(page::dashboard_js))
        .route("/favicon.svg", get(page::icon))
        .route("/health", get(status::health))
        .route("/metrics", get(status::metrics))
        .route("/status", get(status::status))
        .route("/v1/dashboard", get(dashboard::dashboard))
        .route("/openapi.json", get(openapi))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::one))
        .route("/v1/chat/completions", post(chat::completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/compact", post(responses::compact))
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/completion", post(llama::completion))
        .route("/tokenize", post(llama::tokenize))
        .route("/detokenize", post(llama::detokenize))
        .route("/tokenizer_info", get(llama::tokenizer_info))
        .route("/apply-template", post(llama::apply_template))
        .route("/props", get(llama::props))
        .route("/slots", get(llama::slots))
        .route("/slots/{id}", post(slot_files::act))
        .route("/v1/packs", get(packs::list))
        .route("/v1/packs/{id}", get(packs::one).delete(packs::delete))
        .route("/v1/packs/{id}/pin", post(packs::pin))
        .route("/v1/sessions", get(sessions::list).post(sessions::create))
        .route("/v1/sessions/{name}", get(sessions::one).delete(sessions::delete))
        .route("/v1/sessions/{name}/save", post(sessions::save))
        .route("/v1/sessions/{name}/restore", post(sessions::restore))
        .route("/lora-adapters", get(llama::adapters))
        .route("/infill", post(llama::infill))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(ollama::embed))
        .route("/api/embeddings", post(ollama::embeddings))
        .route("/api/show", post(ollama::show))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::running))
        .route("/api/version", get(ollama::version))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        // Bodies are limited where they are read, with an error in the route's shape.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Arc::clone(app), work_room::enter))
        .layer(from_fn_with_state((Arc::clone(app), Arc::new(known_paths())), auth::guard))
        .layer(CatchPanicLayer::custom(panicked));
    let router = match cors(app) {
        Some(layer) => router.layer(layer),
        None => router,
    };
    router.with_state(Arc::clone(app))
}

/// Which pages of other origins may read answers: with a key those that the operator listed, without one also those of this
/// machine, which may call anyway.
fn cors(app: &SharedApp) -> Option<CorsLayer> {
    let keyed = !app.keys().is_empty();
    if keyed && !app.believed.any_listed() {
        return None;
    }
    let allowed = if app.believed.every_origin() {
        AllowOrigin::any()
    } else {
        let app = Arc::clone(app);
        AllowOrigin::predicate(move |origin: &HeaderValue, request| {
            origin.to_str().is_ok_and(|origin| app.believed.may_read(origin, request, keyed))
        })
    };
    // A wildcard for headers does not cover the one with the key, so what is asked for is named.
    Some(
        CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods(Any)
            .allow_headers(AllowHeaders::mirror_request()),
    )
}

async fn no_route(request: Request) -> Response {
    let path = request.uri().path();
    ApiError::no_route(path).into_response_as(Dialect::of_path(path))
}

async fn wrong_method(request: Request) -> Response {
    let path = request.uri().path();
    ApiError::method_not_allowed(request.method().as_str(), path).into_response_as(Dialect::of_path(path))
}

/// The last resort: a bug of ours ends one request and is logged by the panic hook.
fn panicked(_: Box<dyn std::any::Any + Send + 'static>) -> Response {
    ApiError::internal("The server failed on this request; its log has the reason")
        .into_response_as(Dialect::OpenAi)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use crate::error::ApiError;
    use crate::fields::{Body, Field, check};
    use crate::generation_params::{Conversation, GenerationParams, Prompt};

    /// The conversation that a route's table and parser make of a body, or the field at fault.
    pub(super) fn conversation_of(
        fields: &[Field],
        parse: fn(Body<'_>) -> Result<GenerationParams, ApiError>,
        body: Value,
    ) -> Result<Conversation, Option<String>> {
        let Value::Object(body) = body else { panic!("object") };
        check(fields, &body).map_err(|fault| fault.param)?;
        match parse(Body(&body)).map_err(|fault| fault.param)?.prompt {
            Prompt::Chat(conversation) => Ok(*conversation),
            _ => panic!("chat"),
        }
    }
}
