//! Connections: accepting them within limits, and the end.
//!
//! Connections are driven here and not by a helper, because the time and size limits on heads, the stalled-write
//! limit and the order of shutting down are ours to keep. At the end new requests get 503, and so does `/health`, while
//! running ones are finished or cut off as the policy says; then the sockets close.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tower::ServiceExt as _;

use crate::activity::{Activity, Due, Place, Places};
use crate::app::{App, SharedApp};
use crate::config::{Limits, ServerConfig, ShutdownPolicy};
use crate::dashboard::INTERVAL;
use crate::error::ServerError;
use crate::listeners::{Listeners, Wire};
use crate::routes;
use crate::tls::Tls;
use crate::version_timeout::Opening;
use crate::work_room::WorkRoom;
use crate::write_timeout::StallLimit;
use crate::wrong_keys::Caller;

/// Time for a connection that is closed in good manners to say goodbye.
const GOODBYE: Duration = Duration::from_secs(2);

/// A bound server that is not yet running.
pub struct Server {
    app: SharedApp,
    listeners: Listeners,
    tls: Tls,
}

/// Reads the server's key and certificate files again.
#[derive(Clone)]
pub struct Reloader {
    app: SharedApp,
    tls: Tls,
}

impl Reloader {
    /// Takes up what the files say now. If one of them cannot be used, all stays as it was.
    pub fn reload(&self) -> Result<(), ServerError> {
        let keys = self.app.config.load_keys()?;
        self.tls.reload(&self.app.config)?;
        self.app.set_keys(keys);
        Ok(())
    }
}

/// What all connections are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Serving,
    /// Finish what runs and close.
    Draining,
    /// Close.
    Ended,
}

/// What every connection needs.
struct Shared {
    app: SharedApp,
    router: Router,
    places: Arc<Places>,
    tls: Tls,
    phase: watch::Sender<Phase>,
}

impl Server {
    /// Checks the configuration, reads keys and certificates, and takes the addresses.
    pub async fn bind(config: ServerConfig) -> Result<Self, ServerError> {
        let tls = Tls::load(&config)?;
        let app = App::new(config)?;
        let listeners = Listeners::bind(&app.config).await?;
        Ok(Self { app, listeners, tls })
    }

    /// The address taken (with the port that the system chose, if the configuration said 0).
    pub fn address(&self) -> SocketAddr {
        self.listeners.address()
    }

    /// Where the server is, for a browser; for a Unix socket its path.
    pub fn url(&self) -> String {
        let scheme = if self.tls.current().is_some() { "https" } else { "http" };
        match &self.app.config.socket {
            Some(path) => format!("unix:{}", path.display()),
            None => format!("{scheme}://{}", self.listeners.address()),
        }
    }

    /// The shared state, to load the model into.
    pub fn app(&self) -> SharedApp {
        Arc::clone(&self.app)
    }

    /// For taking up changed keys and certificates while the server runs.
    pub fn reloader(&self) -> Reloader {
        Reloader { app: Arc::clone(&self.app), tls: self.tls.clone() }
    }

    /// Serves until `stop` completes, then shuts down by the configured policy.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let room = match WorkRoom::open() {
            Ok(room) => Some(room),
            Err(error) => {
                tracing::error!(%error, "no threads for requests; connections do their work");
                None
            }
        };
        self.app.set_work_room(room.as_ref().and_then(WorkRoom::handle));
        let _remembering = Remembering::start(&self.app);
        let limits = &self.app.config.limits;
        let shared = Shared {
            router: routes::router(&self.app),
            places: Places::new(limits.connections, limits.connections_per_address),
            tls: self.tls,
            phase: watch::channel(Phase::Serving).0,
            app: self.app,
        };
        // Held by every connection that was there before the end began.
        let (working, mut all_done) = mpsc::channel::<()>(1);
        tokio::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                accepted = accept(&self.listeners, &shared.places) => accepted,
            };
            if let Some(accepted) = accepted {
                shared.drive(accepted, Some(working.clone()));
            }
        }
        shared.app.stop();
        shared.phase.send_replace(Phase::Draining);
        drop(working);
        let end = shared.drain(&mut all_done);
        tokio::pin!(end);
        loop {
            let accepted = tokio::select! {
                () = &mut end => break,
                accepted = accept(&self.listeners, &shared.places) => accepted,
            };
            if let Some(accepted) = accepted {
                shared.drive(accepted, None);
            }
        }
        shared.phase.send_replace(Phase::Ended);
        shared.app.set_work_room(None);
    }
}

impl Shared {
    async fn drain(&self, all_done: &mut mpsc::Receiver<()>) {
        let patience = match self.app.config.shutdown {
            ShutdownPolicy::Finish(patience) => patience,
            ShutdownPolicy::Cancel => Duration::ZERO,
        };
        if timeout(patience, all_done.recv()).await.is_err() {
            // Streams see their requests end, say so to their clients and end too.
            if let Some(loaded) = self.app.loaded_if_any() {
                loaded.backend.abort_all();
            }
            let _ = timeout(GOODBYE, all_done.recv()).await;
        }
    }

    fn drive(&self, accepted: Accepted, working: Option<mpsc::Sender<()>>) {
        let Accepted { wire, caller, activity, place } = accepted;
        let app = Arc::clone(&self.app);
        let limits = app.config.limits.clone();
        let stream = StallLimit::new(wire, limits.stalled_write_time);
        let (tls, router, phase) = (self.tls.current(), self.router.clone(), self.phase.subscribe());
        tokio::spawn(async move {
            let (_place, _working) = (place, working);
            let _counted = OpenConnection::new(&app);
            match tls {
                None => serve_connection(stream, router, &limits, (caller, activity), phase).await,
                Some(acceptor) => {
                    let handshake = timeout(limits.head_time, acceptor.accept(stream)).await;
                    if let Ok(Ok(stream)) = handshake {
                        serve_connection(stream, router, &limits, (caller, activity), phase).await;
                    } else {
                        tracing::debug!("a TLS handshake failed");
                    }
                }
            }
        });
    }
}

/// Writes the dashboard's history while it lives.
struct Remembering(tokio::task::JoinHandle<()>);

impl Remembering {
    fn start(app: &SharedApp) -> Self {
        let app = Arc::clone(app);
        Self(tokio::spawn(async move {
            loop {
                sleep(INTERVAL).await;
                app.sample();
            }
        }))
    }
}

impl Drop for Remembering {
    fn drop(&mut self) {
        self.0.abort();
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

/// A connection that has a place.
struct Accepted {
    wire: Wire,
    caller: Caller,
    activity: Arc<Activity>,
    place: Place,
}

async fn accept(listeners: &Listeners, places: &Arc<Places>) -> Option<Accepted> {
    match listeners.accept().await {
        Ok((wire, from)) => {
            let activity = Activity::new();
            let place = places.take(from, &activity).await;
            if place.is_none() {
                tracing::debug!(?from, "an address has all the connections that it may have");
            }
            Some(Accepted { wire, caller: Caller(from), activity, place: place? })
        }
        Err(error) => {
            // Out of file descriptors, most likely: wait until some are closed.
            tracing::warn!(%error, "cannot accept a connection");
            sleep(Duration::from_millis(200)).await;
            None
        }
    }
}

/// Serves a stream of bytes as if it were a connection, for fuzzers.
pub(crate) async fn serve_stream<S>(stream: S, router: Router, limits: &Limits)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (_phase, seen) = watch::channel(Phase::Serving);
    serve_connection(stream, router, limits, (Caller(None), Activity::new()), seen).await;
}

async fn serve_connection<S>(
    stream: S,
    router: Router,
    limits: &Limits,
    (caller, activity): (Caller, Arc<Activity>),
    mut phase: watch::Receiver<Phase>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut builder = Builder::new(TokioExecutor::new());
    // Heads and silences are timed here: hyper's limit for heads would also be the one between two requests.
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(None)
        .max_buf_size(limits.head_bytes.max(8192));
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(limits.head_bytes).unwrap_or(u32::MAX))
        .max_concurrent_streams(100)
        .keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(limits.stalled_write_time);
    let stream = Opening::new(stream, limits.head_time, Arc::clone(&activity));
    let service = service_fn({
        let activity = Arc::clone(&activity);
        move |mut request: Request<Incoming>| {
            let (router, busy) = (router.clone(), activity.request());
            request.extensions_mut().insert(caller);
            async move {
                router
                    .oneshot(request.map(Body::new))
                    .await
                    .map(|answer| answer.map(|body| busy.until_sent(body)))
            }
        }
    });
    let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
    tokio::pin!(connection);
    // After it has been told to close, an idle connection has until then.
    let mut leave_by: Option<Instant> = None;
    loop {
        let due = activity.due(limits.head_time, limits.idle_time);
        let clock = match (due, leave_by) {
            (Due::Never, _) => None,
            (_, Some(until)) | (Due::Idle(until) | Due::Head(until), None) => Some(until),
            (Due::Now, None) => Some(Instant::now()),
        };
        tokio::select! {
            outcome = connection.as_mut() => {
                if let Err(error) = outcome {
                    tracing::debug!(%error, "a connection ended early");
                }
                return;
            }
            () = async { sleep_until(clock.unwrap_or_else(Instant::now)).await }, if clock.is_some() => {
                if leave_by.is_some() || matches!(due, Due::Head(_)) {
                    return;
                }
                connection.as_mut().graceful_shutdown();
                leave_by = Some(Instant::now() + GOODBYE);
            }
            changed = phase.changed() => {
                if changed.is_err() || *phase.borrow() == Phase::Ended {
                    return;
                }
                if leave_by.is_none() {
                    connection.as_mut().graceful_shutdown();
                    leave_by = Some(Instant::now() + GOODBYE);
                }
            }
            () = activity.changed() => {}
        }
    }
}
