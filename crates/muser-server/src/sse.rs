//! Server-sent events: framing, and the comment lines that keep a silent stream alive.
//!
//! Headers leave at once and the stream says something at least once an interval, also through a long prefill or
//! while a tool call is held back, so that neither clients nor proxies give up. The comment lines are `:` lines,
//! which the event-stream format defines as nothing. The body is polled by the connection itself: dropping the
//! connection drops the generation, and a reader that does not read is not read ahead for.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use futures_util::{Stream, StreamExt as _};
use serde_json::Value;
use tokio::time::{Instant, Sleep, sleep};

/// One event of a stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A `data:` line.
    Data(Value),
    /// An `event:` line and a `data:` line.
    Named(&'static str, Value),
    /// `data: [DONE]`.
    Done,
}

impl Event {
    /// The bytes on the wire.
    pub fn encode(&self) -> Bytes {
        // JSON text never holds a raw line break, so one data line is enough.
        match self {
            Self::Data(value) => format!("data: {value}\n\n"),
            Self::Named(name, value) => format!("event: {name}\ndata: {value}\n\n"),
            Self::Done => "data: [DONE]\n\n".to_owned(),
        }
        .into()
    }
}

/// The comment line.
const COMMENT: &[u8] = b": keep-alive\n\n";

/// Turns encoded events into a body with something that means nothing in the silences.
struct KeepAlive<S, F> {
    events: S,
    filler: F,
    interval: Duration,
    silence: Pin<Box<Sleep>>,
}

impl<S: Stream<Item = Bytes> + Unpin, F: Fn() -> Bytes + Unpin> Stream for KeepAlive<S, F> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = Pin::new(&mut self.events).poll_next(cx);
        let item = match next {
            Poll::Ready(item) => item,
            Poll::Pending => {
                if self.silence.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                Some((self.filler)())
            }
        };
        let next_comment = Instant::now() + self.interval;
        self.silence.as_mut().reset(next_comment);
        Poll::Ready(item.map(Ok))
    }
}

/// The response whose body is `events`.
pub fn respond<S>(events: S, keep_alive: Duration) -> Response
where
    S: Stream<Item = Event> + Send + 'static,
{
    let encoded = events.map(|event| event.encode());
    respond_with(encoded, "text/event-stream", keep_alive, || Bytes::from_static(COMMENT))
}

/// The response whose body is `pieces`, with `filler` in between when nothing else is said for an interval.
pub fn respond_with<S, F>(pieces: S, content_type: &'static str, keep_alive: Duration, filler: F) -> Response
where
    S: Stream<Item = Bytes> + Send + 'static,
    F: Fn() -> Bytes + Send + Unpin + 'static,
{
    let (events, silence) = (Box::pin(pieces), Box::pin(sleep(keep_alive)));
    let body = KeepAlive { events, filler, interval: keep_alive, silence };
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks reverse proxies not to hold the stream back.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;
    use serde_json::json;

    #[test]
    fn line_breaks_in_text_stay_inside_one_data_line() {
        let event = Event::Data(json!({"text": "a\n\nb\r"}));
        assert_eq!(event.encode(), "data: {\"text\":\"a\\n\\nb\\r\"}\n\n");
        assert_eq!(Event::Named("ping", json!({})).encode(), "event: ping\ndata: {}\n\n");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_filled_with_comments() {
        let events = stream::once(async {
            sleep(Duration::from_millis(3500)).await;
            Event::Done
        });
        let body = respond(events, Duration::from_secs(1)).into_body().into_data_stream();
        let chunks: Vec<Bytes> = body.map(|chunk| chunk.expect("infallible")).collect().await;
        assert_eq!(chunks, [COMMENT, COMMENT, COMMENT, b"data: [DONE]\n\n"]);
    }
}
