//! Connections: accepting them within limits, TLS, and the end.
//!
//! Connections are driven here and not by a helper, because the time and size limits on heads, the stalled-write
//! limit and the order of shutting down are ours to keep: first no new connections, then running requests are
//! finished or cut off as the policy says, then the sockets close.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use crate::app::{App, SharedApp};
use crate::config::{ServerConfig, ShutdownPolicy};
use crate::error::ServerError;
use crate::opening::Opening;
use crate::routes;
use crate::stall::StallLimit;

/// A bound server that is not yet running.
pub struct Server {
    app: SharedApp,
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<TlsAcceptor>,
}

impl Server {
    /// Checks the configuration, reads keys and certificates, and takes the address.
    pub async fn bind(config: ServerConfig) -> Result<Self, ServerError> {
        let tls = tls_acceptor(&config)?;
        let app = App::new(config)?;
        let wanted = app.config.address;
        let bind_fault = |source| ServerError::Bind { address: wanted.to_string(), source };
        let listener = TcpListener::bind(wanted).await.map_err(bind_fault)?;
        let address = listener.local_addr().map_err(bind_fault)?;
        Ok(Self { app, listener, address, tls })
    }

    /// The address taken (with the port that the system chose, if the configuration said 0).
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where the server is, for a browser.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// The shared state, to load the model into.
    pub fn app(&self) -> SharedApp {
        Arc::clone(&self.app)
    }

    /// Serves until `stop` completes, then shuts down by the configured policy.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let service = routes::router(&self.app);
        let graceful = GracefulShutdown::new();
        let permits = Arc::new(Semaphore::new(self.app.config.limits.connections));
        tokio::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                accepted = accept(&self.listener, &permits) => accepted,
            };
            let Some((stream, permit)) = accepted else { continue };
            self.drive(stream, permit, service.clone(), &graceful);
        }
        drop(self.listener);
        self.app.stop();
        let patience = match self.app.config.shutdown {
            ShutdownPolicy::Finish(patience) => patience,
            ShutdownPolicy::Cancel => Duration::ZERO,
        };
        let mut closing = Box::pin(graceful.shutdown());
        if timeout(patience, &mut closing).await.is_err() {
            // Streams see their requests end, say so to their clients and end too.
            if let Some(loaded) = self.app.loaded_if_any() {
                loaded.backend.cut_off();
            }
            let _ = timeout(Duration::from_secs(2), closing).await;
        }
    }

    fn drive(
        &self,
        stream: TcpStream,
        permit: OwnedSemaphorePermit,
        service: Router,
        graceful: &GracefulShutdown,
    ) {
        // Tokens are small writes that should not wait for one another.
        let _ = stream.set_nodelay(true);
        let app = Arc::clone(&self.app);
        let limits = app.config.limits.clone();
        let stream = StallLimit::new(stream, limits.stalled_write_time);
        let watcher = graceful.watcher();
        let tls = self.tls.clone();
        tokio::spawn(async move {
            let _permit = permit;
            let _counted = OpenConnection::new(&app);
            match tls {
                None => serve_connection(stream, service, &app.config, watcher).await,
                Some(acceptor) => {
                    let handshake = timeout(limits.head_time, acceptor.accept(stream)).await;
                    if let Ok(Ok(stream)) = handshake {
                        serve_connection(stream, service, &app.config, watcher).await;
                    } else {
                        tracing::debug!("a TLS handshake failed");
                    }
                }
            }
        });
    }
}

/// Counts a connection while it lives.
struct OpenConnection(Option<Arc<crate::app::Loaded>>);

impl OpenConnection {
    fn new(app: &App) -> Self {
        let loaded = app.loaded_if_any().cloned();
        if let Some(loaded) = &loaded {
            loaded.metrics.connections.inc();
        }
        Self(loaded)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        if let Some(loaded) = &self.0 {
            loaded.metrics.connections.dec();
        }
    }
}

async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    // The permit comes first: beyond the limit, connections wait in the system's queue.
    let permit = Arc::clone(permits).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, permit)),
        Err(error) => {
            // Out of file descriptors, most likely: wait until some are closed.
            tracing::warn!(%error, "cannot accept a connection");
            sleep(Duration::from_millis(50)).await;
            None
        }
    }
}

async fn serve_connection<S>(
    stream: S,
    service: Router,
    config: &ServerConfig,
    watcher: hyper_util::server::graceful::Watcher,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let limits = &config.limits;
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time)
        .max_buf_size(limits.head_bytes.max(8192));
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(limits.head_bytes).unwrap_or(u32::MAX))
        .max_concurrent_streams(100)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(limits.stalled_write_time);
    let stream = Opening::new(stream, limits.head_time);
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
    if let Err(error) = watcher.watch(connection.into_owned()).await {
        tracing::debug!(%error, "a connection ended early");
    }
}

fn tls_acceptor(config: &ServerConfig) -> Result<Option<TlsAcceptor>, ServerError> {
    let (Some(certificate), Some(key)) = (&config.tls_certificate, &config.tls_key) else { return Ok(None) };
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| file_fault("TLS certificate", certificate, &error))?;
    if chain.is_empty() {
        return Err(file_fault("TLS certificate", certificate, &"it holds no certificate"));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| file_fault("TLS key", key, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| file_fault("TLS certificate", certificate, &error))?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|error| file_fault("TLS certificate", certificate, &error))?;
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Some(TlsAcceptor::from(Arc::new(tls))))
}

fn file_fault(what: &'static str, path: &Path, reason: &dyn std::fmt::Display) -> ServerError {
    ServerError::File { what, path: path.display().to_string(), reason: reason.to_string() }
}
