//! The pages at `/` (chat and status) and `/dashboard` (for who runs the server) in a browser, from the binary, without a byte from elsewhere.
//!
//! The assets hold no secret and load without a key; what they call needs one. The content policy forbids the page
//! to load or call anything but this server, so that text from a model cannot make it do so either.

use axum::http::header;
use axum::response::{IntoResponse, Response};

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// `GET /`.
pub async fn html() -> Response {
    asset("text/html; charset=utf-8", include_str!("../page/page.html"))
}

/// `GET /page.css`.
pub async fn css() -> Response {
    asset("text/css; charset=utf-8", include_str!("../page/page.css"))
}

/// `GET /page.js`.
pub async fn js() -> Response {
    asset("text/javascript; charset=utf-8", include_str!("../page/page.js"))
}

/// `GET /common.js`: what both pages use.
pub async fn common() -> Response {
    asset("text/javascript; charset=utf-8", include_str!("../page/common.js"))
}

/// `GET /dashboard`.
pub async fn dashboard() -> Response {
    asset("text/html; charset=utf-8", include_str!("../page/dashboard.html"))
}

/// `GET /dashboard.css`.
pub async fn dashboard_css() -> Response {
    asset("text/css; charset=utf-8", include_str!("../page/dashboard.css"))
}

/// `GET /dashboard.js`.
pub async fn dashboard_js() -> Response {
    asset("text/javascript; charset=utf-8", include_str!("../page/dashboard.js"))
}

/// `GET /favicon.svg`.
pub async fn icon() -> Response {
    asset("image/svg+xml", include_str!("../page/favicon.svg"))
}

fn asset(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, text).into_response()
}
