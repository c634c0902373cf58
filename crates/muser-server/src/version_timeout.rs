//! A connection must open with something, and in time.
//!
//! Which of the two HTTP versions a client speaks is told by its first bytes, and only then do the versions' own time
//! limits run. A client that says nothing, or stops inside the first line of HTTP/2, would hold its place for ever;
//! here it loses it. Once the version is told, this wrapper does nothing.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use crate::activity::Activity;

/// What an HTTP/2 connection begins with.
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Wraps a stream; reading fails with `TimedOut` if the version is not told within the limit. Says to the connection's
/// [`Activity`] what it hears.
#[derive(Debug)]
pub(crate) struct Opening<S> {
    stream: S,
    activity: Arc<Activity>,
    /// Bytes of [`HTTP2`] seen so far, and the clock; nothing once the version is told.
    waiting: Option<(usize, Pin<Box<Sleep>>)>,
}

impl<S> Opening<S> {
    /// Gives the peer of `stream` this long.
    pub(crate) fn new(stream: S, limit: Duration, activity: Arc<Activity>) -> Self {
        Self { stream, activity, waiting: Some((0, Box::pin(sleep(limit)))) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Opening<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let news = buffer.filled().get(before..).unwrap_or_default();
        if !news.is_empty() {
            self.activity.heard();
        }
        let Some((seen, clock)) = &mut self.waiting else { return outcome };
        let left = &HTTP2[*seen..];
        if news.len() >= left.len() || !left.starts_with(news) {
            self.activity.speaks(news.starts_with(left));
            self.waiting = None;
            return outcome;
        }
        *seen += news.len();
        if clock.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client says nothing")));
        }
        outcome
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Opening<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    /// What a read after `sent` and a silence of twice the limit gives.
    async fn check(sent: &[u8], in_time: bool) {
        let (ours, mut theirs) = tokio::io::duplex(64);
        let mut ours = Opening::new(ours, Duration::from_secs(10), Activity::new());
        let mut buffer = vec![0; sent.len()];
        if !sent.is_empty() {
            theirs.write_all(sent).await.expect("room");
            ours.read_exact(&mut buffer).await.expect("read");
            assert_eq!(buffer, sent);
        }
        let speaking = tokio::spawn(async move {
            sleep(Duration::from_secs(20)).await;
            let _ = theirs.write_all(b"more").await;
            theirs
        });
        let outcome = ours.read(&mut [0; 4]).await.map_err(|error| error.kind());
        assert_eq!(outcome, if in_time { Ok(4) } else { Err(io::ErrorKind::TimedOut) });
        speaking.await.expect("spoke");
    }

    #[tokio::test(start_paused = true)]
    async fn only_an_open_question_has_a_limit() {
        check(b"", false).await;
        check(b"P", false).await;
        check(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r", false).await;
        check(HTTP2, true).await;
        check(b"POST", true).await;
        check(b"G", true).await;
    }
}
