//! Who may call.
//!
//! Which paths are open is decided by the parsed path alone, the same that routing looks at. Without keys
//! [`Believed`](crate::believed::Believed) decides.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use crate::app::{App, SharedApp};
use crate::error::{ApiError, Dialect};
use crate::keys::{Keys, digest};
use crate::owner::Owner;
use crate::refusals;
use crate::shown_path::{KnownPaths, ShownPath};
use crate::wrong_keys::Caller;

/// Paths that answer without a key: the health check, and the pages with their assets, which hold nothing secret.
pub const OPEN_PATHS: [&str; 10] = [
    "/health",
    "/v1/health",
    "/",
    "/page.css",
    "/page.js",
    "/common.js",
    "/dashboard",
    "/dashboard.css",
    "/dashboard.js",
    "/favicon.svg",
];

/// Refuses requests without a valid key, and calls of strangers' web pages where no key protects us; logs every request.
pub(crate) async fn guard(
    State((app, known)): State<(SharedApp, Arc<KnownPaths>)>,
    mut request: Request,
    next: Next,
) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let begun = Instant::now();
    let shown = known.shown(&path);
    request.extensions_mut().insert(ShownPath(shown.clone()));
    let mut response = match admit(&app, &request) {
        Ok(owner) => owner.answering(next.run(request)).await,
        Err(fault) => {
            let caller = request.extensions().get::<Caller>().copied().unwrap_or_default();
            if fault.status == StatusCode::UNAUTHORIZED {
                app.wrong_keys.wait(caller).await;
            }
            fault.into_response_as(Dialect::of_path(&path))
        }
    };
    let status = response.status();
    if app.is_stopping() || status == StatusCode::UNAUTHORIZED {
        // Nobody keeps a place who has nothing to come back for.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    // Which route it was is all that a request adds to the log; its words, names and prompts never do.
    let headers_ms = begun.elapsed().as_millis() as u64;
    tracing::info!(%method, path = shown, status = status.as_u16(), headers_ms, "request");
    if status.is_client_error() || status.is_server_error() {
        refusals::note(&app, &method, &shown, &response);
    }
    response
}

/// Whose a request is: a digest of its key, and nothing where no key is asked for.
pub(crate) fn owner(keys: &Keys, headers: &HeaderMap) -> Option<[u8; 32]> {
    presented_keys(headers).find(|key| keys.accept(key)).map(digest)
}

/// Whose request this is, if it may be answered.
fn admit(app: &App, request: &Request) -> Result<Owner, ApiError> {
    if OPEN_PATHS.contains(&request.uri().path()) {
        return Ok(Owner::EVERYBODY);
    }
    let keys = app.keys();
    if keys.is_empty() {
        app.believed.check(request.method(), request.uri(), request.headers())?;
        return Ok(Owner::EVERYBODY);
    }
    let known = presented_keys(request.headers()).find_map(|key| keys.owner_of(key));
    let known = known.ok_or_else(ApiError::unauthorized)?;
    Ok(if app.config.shared_cache { Owner::EVERYBODY } else { known })
}

/// The keys that a request shows: clients that speak two dialects fill both headers, and proxies use one for themselves.
fn presented_keys(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers.get_all(header::AUTHORIZATION).iter().filter_map(|value| {
        let (scheme, rest) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| rest.trim_ascii())
    });
    bearer.chain(headers.get_all("x-api-key").iter().map(|value| value.as_bytes().trim_ascii()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_from_both_headers() {
        let check = |sent: &[(&'static str, &'static str)], expected: &[&str]| {
            let mut headers = HeaderMap::new();
            for (name, value) in sent {
                headers.append(*name, HeaderValue::from_static(value));
            }
            let found: Vec<&[u8]> = presented_keys(&headers).collect();
            assert_eq!(found, expected.iter().map(|key| key.as_bytes()).collect::<Vec<_>>(), "{sent:?}");
        };
        check(&[("authorization", "Bearer abc")], &["abc"]);
        check(&[("authorization", "bearer  abc ")], &["abc"]);
        check(&[("authorization", "Basic abc")], &[]);
        check(&[("authorization", "Bear")], &[]);
        check(&[("x-api-key", "abc")], &["abc"]);
        check(&[("authorization", "Basic dTpw"), ("x-api-key", "abc")], &["abc"]);
        check(&[("authorization", "Bearer none"), ("x-api-key", "abc")], &["none", "abc"]);
    }
}
