//! What a client is told when its request cannot be served, and what the operator is told when the server cannot start.
//!
//! A request's fault is one value, [`ApiError`], whatever the route; only at the edge does it take the shape that
//! the route's clients parse ([`Dialect`]). The invariant: a fault of the request is never a 5xx, because client
//! libraries send those again on their own, and a body is always valid JSON, whatever bytes the request held.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::refusal::Refusal;

/// Content codings that bodies may have.
pub const CODINGS: &str = "gzip, deflate, zstd and br";

/// Why the server could not be started or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The configuration asks for something that is not safe or not possible.
    #[error("the server's configuration is refused: {0}")]
    Config(String),
    /// A file named in the configuration cannot be used.
    #[error("cannot use {what} file {path}: {reason}")]
    File {
        /// What the file is for.
        what: &'static str,
        /// Its path.
        path: String,
        /// What went wrong.
        reason: String,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address asked for.
        address: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The model's text side cannot be used.
    #[error("the model's vocabulary or chat template cannot be used: {0}")]
    Text(String),
}

/// The shape of errors on a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `{"error":{"message","type","param","code"}}`, also understood by llama-server's clients.
    OpenAi,
    /// `{"type":"error","error":{"type","message"}}`.
    Anthropic,
    /// `{"error":"message"}`.
    Ollama,
}

impl Dialect {
    /// The dialect that clients of `path` speak; used where no route was reached (key check, unknown path).
    pub fn of_path(path: &str) -> Self {
        if path.starts_with("/v1/messages") {
            Self::Anthropic
        } else if path.starts_with("/api/") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }

    /// The finished answer for either outcome of a handler.
    pub fn answer(self, outcome: Result<Response, ApiError>) -> Response {
        outcome.unwrap_or_else(|fault| fault.into_response_as(self))
    }
}

/// A request that is not served, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// For people; one sentence.
    pub message: String,
    /// The field of the request at fault, as a path such as `messages[2].content`.
    pub param: Option<String>,
    /// A stable word for programs.
    pub code: Option<&'static str>,
    /// Seconds after which trying again makes sense.
    pub retry_after_s: Option<u32>,
    /// Of a prompt that does not fit: its tokens, and how many would.
    pub overflow: Option<(usize, usize)>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after_s: None, overflow: None }
    }

    /// 400: the field `param` of the request cannot be accepted.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut fault = Self::new(StatusCode::BAD_REQUEST, message);
        fault.param = Some(param.into());
        fault.code = Some("invalid_value");
        fault
    }

    /// 400: the request as a whole cannot be accepted.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400: the request asks for something this server does not have.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut fault = Self::field(param, message);
        fault.code = Some("unsupported_value");
        fault
    }

    /// 400 with the code that clients turn into their context-window error: the prompt does not fit. An output limit that is
    /// too large is no fault; it is cut to what fits.
    pub fn context_length(prompt_tokens: usize, context_tokens: usize) -> Self {
        let mut fault = Self::new(
            StatusCode::BAD_REQUEST,
            format!(
                "This model's maximum context length is {context_tokens} tokens. However, your messages resulted in \
                 {prompt_tokens} tokens. Please reduce the length of the messages"
            ),
        );
        fault.code = Some("context_length_exceeded");
        fault.param = Some("messages".into());
        fault.overflow = Some((prompt_tokens, context_tokens.min(prompt_tokens.saturating_sub(1))));
        fault
    }

    /// 401: no key or a wrong one.
    pub fn unauthorized() -> Self {
        let mut fault = Self::new(
            StatusCode::UNAUTHORIZED,
            "This server needs a key: send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'",
        );
        fault.code = Some("invalid_api_key");
        fault
    }

    /// 403: a browser page of another origin.
    pub fn foreign_origin() -> Self {
        let mut fault =
            Self::new(StatusCode::FORBIDDEN, "Requests from web pages of other origins are not allowed here");
        fault.code = Some("origin_not_allowed");
        fault
    }

    /// 403: a name that the operator did not say is ours.
    pub fn foreign_host() -> Self {
        let mut fault = Self::new(
            StatusCode::FORBIDDEN,
            "This server asks for no key, so it answers to its address, to localhost and to names given with \
             --allowed-host only",
        );
        fault.code = Some("host_not_allowed");
        fault
    }

    /// 404: no such route.
    pub fn no_route(path: &str) -> Self {
        let mut fault = Self::new(StatusCode::NOT_FOUND, format!("There is no route {}", Value::from(path)));
        fault.code = Some("not_found");
        fault
    }

    /// 404: a model that is not loaded.
    pub fn no_model(name: &str, loaded: &str) -> Self {
        let mut fault = Self::new(
            StatusCode::NOT_FOUND,
            format!("The model {} does not exist here; the loaded model is '{loaded}'", Value::from(name)),
        );
        fault.param = Some("model".into());
        fault.code = Some("model_not_found");
        fault
    }

    /// 404: something that clients name is not there.
    pub fn not_found(message: impl Into<String>) -> Self {
        let mut fault = Self::new(StatusCode::NOT_FOUND, message);
        fault.code = Some("not_found");
        fault
    }

    /// 409: the name is taken.
    pub fn conflict(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut fault = Self::field(param, message);
        fault.status = StatusCode::CONFLICT;
        fault.code = Some("already_exists");
        fault
    }

    /// The owner keeps as much as one may.
    pub fn over_quota(message: impl Into<String>) -> Self {
        let mut answer = Self::bad(message);
        answer.status = StatusCode::INSUFFICIENT_STORAGE;
        answer.code = Some("over_quota");
        answer
    }

    /// 400: the server was started without packs.
    pub fn no_packs() -> Self {
        let mut fault = Self::bad("This server keeps no packs; start it with --packs");
        fault.code = Some("not_enabled");
        fault
    }

    /// 405.
    pub fn method_not_allowed(method: &str, path: &str) -> Self {
        let mut fault = Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            format!("{} does not take {method} requests", Value::from(path)),
        );
        fault.code = Some("method_not_allowed");
        fault
    }

    /// 408: the body did not arrive in time.
    pub fn body_timeout() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "The request's body did not arrive in time")
    }

    /// 413: the body is longer than allowed.
    pub fn body_too_large(limit_bytes: usize) -> Self {
        let mut fault = Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("The request's body is longer than the limit of {limit_bytes} bytes"),
        );
        fault.code = Some("request_too_large");
        fault
    }

    /// 415: a body in a coding that is not known.
    pub fn unknown_encoding(coding: &str) -> Self {
        let mut fault = Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!("Bodies with Content-Encoding {} cannot be read; {} can", Value::from(coding), CODINGS),
        );
        fault.code = Some("unsupported_encoding");
        fault
    }

    /// 429: other bodies hold the memory that there is for bodies.
    pub fn bodies_full() -> Self {
        let mut fault = Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            "Other requests hold the memory that this server has for request bodies; try again in 2 s",
        );
        fault.code = Some("rate_limit_exceeded");
        fault.retry_after_s = Some(2);
        fault
    }

    /// 429: the queue is full.
    pub fn queue_full(retry_after_s: u32) -> Self {
        let mut fault = Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!("The server's queue is full; try again in {retry_after_s} s"),
        );
        fault.code = Some("rate_limit_exceeded");
        fault.retry_after_s = Some(retry_after_s);
        fault
    }

    /// 500: a fault of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 501: a thing this server or the loaded backend does not do.
    pub fn not_implemented(message: impl Into<String>) -> Self {
        let mut fault = Self::new(StatusCode::NOT_IMPLEMENTED, message);
        fault.code = Some("not_implemented");
        fault
    }

    /// 503: loading, stopping, or the device is gone.
    pub fn unavailable(message: impl Into<String>) -> Self {
        let mut fault = Self::new(StatusCode::SERVICE_UNAVAILABLE, message);
        fault.code = Some("unavailable");
        fault.retry_after_s = Some(2);
        fault
    }

    /// Puts `prefix` before the path of the field at fault.
    #[must_use]
    pub fn under(mut self, prefix: &str) -> Self {
        self.param = self.param.map(|param| format!("{prefix}.{param}"));
        self
    }

    /// The word for the class of the fault, as OpenAI names them.
    pub fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            500 | 501 | 507 => "server_error",
            503 => "unavailable_error",
            _ => "invalid_request_error",
        }
    }

    /// The body in a dialect; also used for an error after the headers of a stream.
    pub fn body(&self, dialect: Dialect) -> Value {
        match dialect {
            Dialect::OpenAi => json!({"error": {
                "message": self.message, "type": self.kind(), "param": self.param, "code": self.code,
            }}),
            Dialect::Anthropic => {
                let kind = match self.status.as_u16() {
                    413 => "request_too_large",
                    500 | 501 | 507 => "api_error",
                    503 => "overloaded_error",
                    _ => self.kind(),
                };
                let message = match (self.overflow, &self.param) {
                    // Agents look for these words to shorten the conversation.
                    (Some((tokens, most)), _) => {
                        format!("prompt is too long: {tokens} tokens > {most} maximum")
                    }
                    (None, Some(param)) => format!("{param}: {}", self.message),
                    (None, None) => self.message.clone(),
                };
                json!({"type": "error", "error": {"type": kind, "message": message}})
            }
            Dialect::Ollama => {
                let message = match (self.overflow, &self.param) {
                    (Some((tokens, most)), _) => {
                        format!("prompt too long; exceeded max context length by {} tokens", tokens - most)
                    }
                    (None, Some(param)) => format!("{param}: {}", self.message),
                    (None, None) => self.message.clone(),
                };
                json!({"error": message})
            }
        }
    }

    /// The HTTP answer in a dialect.
    pub fn into_response_as(self, dialect: Dialect) -> Response {
        let mut response = (self.status, Json(self.body(dialect))).into_response();
        let code = self.code.unwrap_or_else(|| self.kind());
        response.extensions_mut().insert(Refusal::new(code, self.param.as_deref(), &self.message));
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.status == StatusCode::UNSUPPORTED_MEDIA_TYPE {
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip, deflate, zstd, br"));
        }
        // A client library would send a taken name again and again.
        let lasting = self.status.is_server_error() || self.status == StatusCode::CONFLICT;
        if lasting && self.status != StatusCode::SERVICE_UNAVAILABLE {
            // The same request would fail the same way.
            headers.insert(HeaderName::from_static("x-should-retry"), HeaderValue::from_static("false"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_dialect_has_its_own_shape() {
        let fault = ApiError::field("top_p", "too large");
        assert_eq!(
            fault.body(Dialect::OpenAi),
            json!({"error": {"message": "too large", "type": "invalid_request_error", "param": "top_p", "code": "invalid_value"}})
        );
        assert_eq!(
            fault.body(Dialect::Anthropic),
            json!({"type": "error", "error": {"type": "invalid_request_error", "message": "top_p: too large"}})
        );
        assert_eq!(fault.body(Dialect::Ollama), json!({"error": "top_p: too large"}));
    }

    #[test]
    fn a_full_queue_says_when_to_come_back() {
        let response = ApiError::queue_full(7).into_response_as(Dialect::OpenAi);
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "7");
    }

    #[test]
    fn a_context_error_has_the_words_that_each_familys_clients_look_for() {
        let fault = ApiError::context_length(36_000, 32_768);
        assert_eq!(fault.code, Some("context_length_exceeded"));
        let openai = fault.body(Dialect::OpenAi)["error"]["message"].to_string();
        assert!(openai.contains("maximum context length is 32768 tokens"), "{openai}");
        assert!(openai.contains("36000"), "{openai}");
        let anthropic = &fault.body(Dialect::Anthropic)["error"];
        assert_eq!(anthropic["message"], "prompt is too long: 36000 tokens > 32768 maximum");
        assert_eq!(anthropic["type"], "invalid_request_error");
        let ollama = &fault.body(Dialect::Ollama)["error"];
        assert_eq!(*ollama, json!("prompt too long; exceeded max context length by 3232 tokens"));
        // One that fills the context to the last token leaves no room for an answer.
        let full = ApiError::context_length(4096, 4096).body(Dialect::Anthropic);
        assert_eq!(full["error"]["message"], "prompt is too long: 4096 tokens > 4095 maximum");
    }
}
