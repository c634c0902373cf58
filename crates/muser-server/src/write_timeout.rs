//! A connection that gives up on a peer which does not read.
//!
//! When a client stops reading, the socket's buffer fills and writes wait. The wait must not last for ever: the
//! request behind it holds a slot. The clock runs only while a write waits, so a long silence of ours is never held
//! against the client.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// Wraps a stream; a write that waits longer than the limit fails with `TimedOut`.
#[derive(Debug)]
pub(crate) struct StallLimit<S> {
    stream: S,
    limit: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> StallLimit<S> {
    /// Limits waiting writes of `stream` to `limit`.
    pub(crate) fn new(stream: S, limit: Duration) -> Self {
        Self { stream, limit, waiting: None }
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.waiting = None;
            return outcome;
        }
        let limit = self.limit;
        let clock = self.waiting.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(clock.as_mut().poll(cx));
        clock.as_mut().reset(Instant::now() + limit);
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallLimit<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallLimit<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, outcome)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Below us is a socket, whose flush never waits.
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
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.watch(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    // Time stands still but for what is waited for, so a busy machine is not a slow peer.
    #[tokio::test(start_paused = true)]
    async fn a_peer_that_does_not_read_is_given_up() {
        let (ours, _theirs) = tokio::io::duplex(64);
        let mut ours = StallLimit::new(ours, Duration::from_millis(50));
        let start = Instant::now();
        let outcome = ours.write_all(&[0; 1000]).await;
        assert_eq!(outcome.map_err(|error| error.kind()), Err(io::ErrorKind::TimedOut));
        assert!(start.elapsed() >= Duration::from_millis(50));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_but_reading_peer_is_kept() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        let mut ours = StallLimit::new(ours, Duration::from_millis(200));
        let reader = tokio::spawn(async move {
            let (mut total, mut buffer) = (0, [0; 64]);
            while total < 704 {
                // Each wait is just within the limit, all of them together far beyond it.
                sleep(Duration::from_millis(190)).await;
                total += theirs.read(&mut buffer).await.expect("read");
            }
            total
        });
        let start = Instant::now();
        ours.write_all(&[0; 640]).await.expect("all written");
        assert!(start.elapsed() > Duration::from_secs(1));
        // Silence of ours is not held against the peer either.
        sleep(Duration::from_hours(1)).await;
        ours.write_all(&[0; 64]).await.expect("written");
        assert_eq!(reader.await.expect("reader"), 704);
    }
}
