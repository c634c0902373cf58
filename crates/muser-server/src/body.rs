//! The way in of every POST: the body's bytes within limits, then JSON, then an object that its table accepts.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex};

use axum::extract::Request;
use http_body_util::{BodyExt as _, Limited};
use serde_json::{Map, Value};
use tokio::time::timeout;

use crate::bodies;
use crate::config::Limits;
use crate::error::ApiError;
use crate::fields::{Field, check};
use crate::shown_path::ShownPath;
use crate::work_room::{SHORT_BODY_BYTES, compute, note_body, reserve};

/// Memory for a long body is taken in pieces of this size.
const PAID_AT_ONCE: usize = 1 << 20;

/// Reads the body of `request` and checks it against `table`.
///
/// The content type is not looked at: many clients send none, or a wrong one. Everything that takes time in proportion to the
/// body happens beside the threads that drive connections, within the memory that there is for bodies.
pub async fn read_body(
    request: Request,
    limits: &Limits,
    table: &'static [Field],
) -> Result<Map<String, Value>, ApiError> {
    let path = request.extensions().get::<ShownPath>().cloned();
    let codings = bodies::codings(request.headers())?;
    let bytes = read_bytes(request, limits).await?;
    note_body(bytes.len());
    let limit = limits.body_bytes;
    let (bytes, cost) = compute(move || {
        let bytes = bodies::decode(bytes, &codings, limit)?;
        let cost = bodies::cost(&bytes)?;
        Ok((bytes, cost))
    })
    .await?;
    note_body(bytes.len());
    if cost > SHORT_BODY_BYTES {
        reserve(cost).await?;
    }
    let (body, unknown) = compute(move || {
        let body = parse(&bytes)?;
        let unknown = check(table, &body)?;
        Ok((body, unknown))
    })
    .await?;
    // Behind the guard every request has one.
    log_unknown(path.as_ref().map_or("", |path| &path.0), &unknown);
    Ok(body)
}

async fn read_bytes(request: Request, limits: &Limits) -> Result<Vec<u8>, ApiError> {
    let limit = limits.body_bytes;
    let announced = request.headers().get(axum::http::header::CONTENT_LENGTH);
    let announced =
        announced.and_then(|value| value.to_str().ok()).and_then(|value| value.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limit as u64) {
        return Err(ApiError::body_too_large(limit));
    }
    match timeout(limits.body_time, collect(request.into_body(), limit)).await {
        Err(_) => Err(ApiError::body_timeout()),
        Ok(outcome) => outcome,
    }
}

/// The bytes of a body; those of a long one are paid for as they come.
async fn collect(body: axum::body::Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let mut body = Limited::new(body, limit);
    let (mut bytes, mut paid) = (Vec::<u8>::new(), SHORT_BODY_BYTES);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            if error.is::<http_body_util::LengthLimitError>() {
                ApiError::body_too_large(limit)
            } else {
                ApiError::bad("The request's body broke off")
            }
        })?;
        let Ok(data) = frame.into_data() else { continue };
        while bytes.len() + data.len() > paid {
            reserve(PAID_AT_ONCE).await?;
            paid += PAID_AT_ONCE;
        }
        if bytes.capacity() < bytes.len() + data.len() {
            // No more than is paid for: doubling takes up to three times as much while it copies.
            bytes.reserve_exact(paid - bytes.len());
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

fn parse(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    // Some programs begin every text with a byte order mark.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let text = std::str::from_utf8(bytes)
        .map_err(|error| ApiError::bad(format!("The body is not UTF-8 (at byte {})", error.valid_up_to())))?;
    match serde_json::from_str(text) {
        Ok(Value::Object(body)) => Ok(body),
        Ok(_) => Err(ApiError::bad("The body must be a JSON object")),
        Err(error) => Err(ApiError::bad(format!("The body is not valid JSON: {error}"))),
    }
}

/// Each unknown field is worth one line in the log for the life of the process, and no more.
fn log_unknown(path: &str, unknown: &[String]) {
    for field in unknown {
        // List positions differ from request to request; the kind of field does not.
        let field: String = field.chars().filter(|c| !c.is_ascii_digit()).collect();
        say_once(path, "unknown request field ignored", &field);
    }
}

/// A line in the log the first time that a route meets `subject`.
pub(crate) fn say_once(route: &str, what: &str, subject: &str) {
    const REMEMBERED: usize = 1000;
    static SEEN: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    let subject: String = subject.chars().take(120).collect();
    let Ok(mut seen) = SEEN.lock() else { return };
    if seen.len() < REMEMBERED && seen.insert(format!("{route} {what} {subject}")) {
        tracing::info!(route, subject, "{what} (said once)");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    fn limits() -> Limits {
        Limits { body_bytes: 64, ..Limits::default() }
    }

    async fn read(bytes: impl Into<Body>) -> Result<Map<String, Value>, u16> {
        let request = Request::post("/x").body(bytes.into()).expect("request");
        read_body(request, &limits(), &[]).await.map_err(|fault| fault.status.as_u16())
    }

    #[tokio::test]
    async fn bodies_that_cannot_be_read_are_the_clients_fault() {
        assert_eq!(read("{\"a\": 1}").await.map(|body| body.len()), Ok(1));
        assert_eq!(read("[1]").await, Err(400));
        assert_eq!(read("").await, Err(400));
        assert_eq!(read(&b"{\"a\": \"\xff\xfe\"}"[..]).await, Err(400));
        assert_eq!(read("x".repeat(65)).await, Err(413));
    }

    #[tokio::test]
    async fn byte_order_marks_are_passed_over() {
        assert_eq!(read("\u{feff}{\"a\": 1}").await.map(|body| body.len()), Ok(1));
        // A mark of another encoding is no JSON, and neither is a second one.
        assert_eq!(read(&b"\xff\xfe{\0}\0"[..]).await, Err(400));
        assert_eq!(read("\u{feff}\u{feff}{}").await, Err(400));
    }

    #[tokio::test]
    async fn deep_nesting_does_not_overflow() {
        let request = Request::post("/x").body(Body::from("[".repeat(1 << 20))).expect("request");
        let outcome = read_body(request, &Limits::default(), &[]).await;
        assert_eq!(outcome.map_err(|fault| fault.status.as_u16()), Err(400));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_ends_times_out() {
        let endless = Body::from_stream(futures_util::stream::pending::<Result<&[u8], std::io::Error>>());
        assert_eq!(read(endless).await, Err(408));
    }
}
