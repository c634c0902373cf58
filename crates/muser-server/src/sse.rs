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
use futures_util::Stream;
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

/// Turns encoded events into a body with comment lines in the silences.
struct KeepAlive<S> {
    events: S,
    interval: Duration,
    silence: Pin<Box<Sleep>>,
}

impl<S: Stream<Item = Bytes> + Unpin> Stream for KeepAlive<S> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = Pin::new(&mut self.events).poll_next(cx);
        let item = match next {
            Poll::Ready(item) => item,
            Poll::Pending => {
                if self.silence.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                Some(Bytes::from_static(COMMENT))
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
    use futures_util::StreamExt as _;
    let encoded = Box::pin(events.map(|event| event.encode()));
    let body = KeepAlive { events: encoded, interval: keep_alive, silence: Box::pin(sleep(keep_alive)) };
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks reverse proxies not to hold the stream back.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::{StreamExt as _, stream};
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
