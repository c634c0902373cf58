//! Keys, and who may call without one.
//!
//! Keys are held as SHA-256 digests and compared in constant time, all of them on every request, so that neither
//! the place of a difference nor the number of the matching key shows in the time taken. The decision looks at the
//! parsed path of the request alone, the same that routing looks at, never at the `Host` header.

use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use subtle::{Choice, ConstantTimeEq as _};

use crate::app::SharedApp;
use crate::error::{ApiError, Dialect};
use crate::owner::Owner;

/// The accepted keys.
#[derive(Debug, Clone, Default)]
pub struct Keys {
    digests: Vec<[u8; 32]>,
}

impl Keys {
    /// Keys from text: one a line, blank lines and lines that start with `#` left out.
    pub fn from_lines(text: &str) -> Self {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self { digests: lines.map(|line| digest(line.as_bytes())).collect() }
    }

    /// Whether no key is asked for.
    pub fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }

    /// Whether `candidate` is one of the keys.
    pub fn accept(&self, candidate: &[u8]) -> bool {
        self.owner_of(candidate).is_some()
    }

    /// Who has this key, if it is one.
    pub fn owner_of(&self, candidate: &[u8]) -> Option<Owner> {
        let candidate = digest(candidate);
        let mut found = Choice::from(0);
        for known in &self.digests {
            found |= known.ct_eq(&candidate);
        }
        bool::from(found).then(|| Owner::of_key(&candidate))
    }
}

fn digest(bytes: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    out.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, bytes).as_ref());
    out
}

/// Paths that answer without a key: the health check, and the page with its assets, which hold nothing secret.
pub const OPEN_PATHS: [&str; 6] = ["/health", "/v1/health", "/", "/page.css", "/page.js", "/favicon.svg"];

/// Refuses requests without a valid key, and calls from web pages of other origins where no key protects us.
pub async fn guard(State(app): State<SharedApp>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let dialect = Dialect::of_path(path);
    let open = OPEN_PATHS.contains(&path);
    let mut owner = Owner::EVERYBODY;
    if !open {
        if !app.keys.is_empty() {
            match presented_key(request.headers()).and_then(|key| app.keys.owner_of(key)) {
                Some(known) if !app.config.shared_cache => owner = known,
                Some(_) => {}
                None => return ApiError::unauthorized().into_response_as(dialect),
            }
        } else if !app.config.insecure && !origin_allowed(request.headers(), &app.config.cors_origins) {
            return ApiError::foreign_origin().into_response_as(dialect);
        }
    }
    let (method, shown_path) = (request.method().clone(), path.to_owned());
    let begun = Instant::now();
    let response = owner.answering(next.run(request)).await;
    let status = response.status();
    // The path is all that a request's text adds to the log; bodies and prompts never do.
    let headers_ms = begun.elapsed().as_millis() as u64;
    tracing::info!(%method, path = shown_path, status = status.as_u16(), headers_ms, "request");
    if (status.is_client_error() || status.is_server_error())
        && let Some(loaded) = app.loaded_if_any()
    {
        loaded.metrics.count_refused(status.as_u16());
    }
    response
}

/// Whose a request is: a digest of its key, and nothing where no key is asked for.
pub(crate) fn owner(keys: &Keys, headers: &HeaderMap) -> Option<[u8; 32]> {
    if keys.is_empty() { None } else { presented_key(headers).map(digest) }
}

fn presented_key(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let value = value.as_bytes();
        let (scheme, rest) = value.split_at_checked(7)?;
        return scheme.eq_ignore_ascii_case(b"bearer ").then(|| rest.trim_ascii());
    }
    headers.get("x-api-key").map(HeaderValue::as_bytes)
}

/// Without a key, a page on any site could drive the server through its visitor's browser. Browsers name the page
/// in `Origin`; programs do not send it.
fn origin_allowed(headers: &HeaderMap, allowed: &[String]) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return true };
    let Ok(origin) = origin.to_str() else { return false };
    if allowed.iter().any(|item| item == "*" || item == origin) {
        return true;
    }
    let Some((_, authority)) = origin.split_once("://") else { return false };
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    matches!(host, "127.0.0.1" | "localhost" | "::1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_match_whole_lines_only() {
        let keys = Keys::from_lines("# comment\n alpha \n\nbeta\n");
        assert!(keys.accept(b"alpha") && keys.accept(b"beta"));
        for wrong in [&b"alph"[..], b"alphabet", b"", b"# comment", b"ALPHA"] {
            assert!(!keys.accept(wrong));
        }
    }

    #[test]
    fn a_key_is_read_from_both_headers() {
        let check = |name: &'static str, value: &'static str, expected: Option<&[u8]>| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            assert_eq!(presented_key(&headers), expected, "{name}: {value}");
        };
        check("authorization", "Bearer abc", Some(b"abc"));
        check("authorization", "bearer  abc ", Some(b"abc"));
        check("authorization", "Basic abc", None);
        check("authorization", "Bear", None);
        check("x-api-key", "abc", Some(b"abc"));
    }

    #[test]
    fn only_local_pages_may_call_without_a_key() {
        let check = |origin: &'static str, expected: bool| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ORIGIN, HeaderValue::from_static(origin));
            assert_eq!(origin_allowed(&headers, &["https://ui.example".into()]), expected, "{origin}");
        };
        check("http://127.0.0.1:8080", true);
        check("http://localhost", true);
        check("http://[::1]:9", true);
        check("https://ui.example", true);
        check("https://evil.example", false);
        check("http://localhost.evil.example", false);
        check("http://127.0.0.1.evil.example:80", false);
        check("null", false);
    }
}
