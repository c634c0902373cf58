//! A narrow door for fuzzers: a connection without a socket.

use axum::Router;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::config::Limits;

/// Serves what comes over `stream` until it ends.
pub async fn serve<S>(stream: S, router: Router, limits: &Limits)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    crate::listen::serve_stream(stream, router, limits).await;
}
