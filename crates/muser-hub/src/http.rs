//! One GET over HTTP/1.1, with redirects followed by hand.
//!
//! By hand, because the facts we need are on the way: a hub names size and SHA-256 in `X-Linked-*` headers of the
//! redirect, and a credential must not follow it to another host. Every wait has a limit.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use crate::connect::{Proxies, Way, connect_within, tunnel};
use crate::digest::Sha256;
use crate::error::HubError;
use crate::url::Url;

/// Most redirects of one request.
const MAX_REDIRECTS: usize = 8;

/// A bearer token; never shown, never sent to another host than the hub's.
#[derive(Clone)]
pub struct Token(Zeroizing<String>);

impl Token {
    /// From text; surrounding white space is dropped. `None` when empty or not printable ASCII.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        let fits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
        fits.then(|| Self(Zeroizing::new(text.to_owned())))
    }

    fn header(&self) -> Option<HeaderValue> {
        let mut value = HeaderValue::from_str(&format!("Bearer {}", self.0.as_str())).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Limits of the client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) connect: Duration,
    pub(crate) stall: Duration,
}

pub(crate) struct Client {
    tls: TlsConnector,
    limits: Limits,
    proxies: Proxies,
    /// The hub: what it says of contents is believed, and only it may see the token.
    hub: Url,
    token: Option<Token>,
    /// Where everything is asked for instead of addresses.
    socket: Option<std::path::PathBuf>,
}

/// What a server says about a file, collected over all hops.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// `X-Linked-Size`.
    pub(crate) linked_size: Option<u64>,
    /// `X-Linked-ETag`, unquoted.
    pub(crate) linked_etag: Option<String>,
    /// Whether the hub itself said so. Any server may vouch for itself.
    pub(crate) vouched: bool,
    /// `ETag` of the last hop as sent, weak ones included.
    pub(crate) etag: Option<String>,
    /// `Last-Modified` of the last hop.
    pub(crate) last_modified: Option<String>,
}

impl Facts {
    /// The content's SHA-256, when the linked ETag is one.
    pub(crate) fn sha256(&self) -> Option<Sha256> {
        Sha256::from_hex(self.linked_etag.as_deref()?)
    }
}

/// A response whose body has not been read.
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) facts: Facts,
    /// Address of the last hop.
    pub(crate) url: Url,
    /// Whether a token was sent there.
    pub(crate) with_token: bool,
    body: Incoming,
    stall: Duration,
    _connection: AbortOnDrop,
}

impl Reply {
    /// The next piece of the body; `None` at its proper end. `bytes_so_far` is for the message.
    pub(crate) async fn next(&mut self, bytes_so_far: u64) -> Result<Option<Bytes>, HubError> {
        loop {
            let frame = match timeout(self.stall, self.body.frame()).await {
                Err(_) => {
                    return Err(HubError::Stalled {
                        host: self.url.authority(),
                        seconds: self.stall.as_secs_f32(),
                        bytes: bytes_so_far,
                    });
                }
                Ok(None) => return Ok(None),
                Ok(Some(Err(e))) => return Err(network(&self.url, &e)),
                Ok(Some(Ok(frame))) => frame,
            };
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
    }
}

impl Client {
    pub(crate) fn new(
        limits: Limits,
        hub: Url,
        token: Option<Token>,
        proxies: Proxies,
        extra_roots: Option<&std::path::Path>,
    ) -> Result<Self, HubError> {
        let mut roots = rustls::RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
        if let Some(path) = extra_roots {
            add_roots(&mut roots, path)?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("ring supports TLS 1.2 and 1.3")
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { tls: TlsConnector::from(Arc::new(config)), limits, proxies, hub, token, socket: None })
    }

    /// The same, but every connection goes to a Unix socket.
    pub(crate) fn behind(self, socket: Option<std::path::PathBuf>) -> Self {
        Self { socket, ..self }
    }

    /// GETs `url` with `extra` headers, following redirects.
    pub(crate) async fn get(&self, url: &Url, extra: &[(HeaderName, String)]) -> Result<Reply, HubError> {
        let mut facts = Facts::default();
        let mut at = url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut reply = self.one(&at, extra).await?;
            let text = |name: &str| reply.headers.get(name).and_then(|v| v.to_str().ok()).map(str::trim);
            if facts.linked_size.is_none() {
                facts.linked_size = text("x-linked-size").and_then(|v| v.parse().ok());
            }
            if facts.linked_etag.is_none() {
                facts.linked_etag =
                    text("x-linked-etag").map(|v| v.trim_start_matches("W/").trim_matches('"').to_owned());
                facts.vouched = facts.linked_etag.is_some() && self.hub.same_origin(&at);
            }
            if !matches!(reply.status.as_u16(), 301 | 302 | 303 | 307 | 308) {
                facts.etag = text("etag").map(str::to_owned);
                facts.last_modified = text("last-modified").map(str::to_owned);
                reply.facts = facts;
                return Ok(reply);
            }
            let broken = |found: String| HubError::BadRedirect { url: at.to_string(), found };
            let location =
                reply.headers.get(header::LOCATION).map(|value| crate::url::printable(value.as_bytes()));
            let location = location.ok_or_else(|| broken("no Location header".to_owned()))?;
            let next = at.join(&location).map_err(broken)?;
            if at.is_https() && !next.is_https() {
                return Err(broken(format!("one from https to {next}")));
            }
            at = next;
        }
        Err(HubError::RedirectLoop { url: url.to_string(), limit: MAX_REDIRECTS, last: at.to_string() })
    }

    async fn one(&self, url: &Url, extra: &[(HeaderName, String)]) -> Result<Reply, HubError> {
        let late = |what: &str, limit: Duration| HubError::Network {
            host: url.authority(),
            what: format!("no {what} within {} s", limit.as_secs_f32()),
        };
        let (stream, plain_proxy) = timeout(self.limits.connect, self.connect(url))
            .await
            .map_err(|_| late("connection", self.limits.connect))??;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| network(url, &e))?;
        let connection = AbortOnDrop(tokio::spawn(async move {
            // An error of the connection also reaches the request or the body, where it is reported.
            let _ = connection.await;
        }));
        // A proxy is asked for the whole address.
        let target = match &plain_proxy {
            Some(_) => format!("http://{}{}", url.authority(), url.target()),
            None => url.target().to_owned(),
        };
        let mut request = Request::get(target)
            .header(header::HOST, url.authority())
            .header(header::USER_AGENT, concat!("muser/", env!("CARGO_PKG_VERSION")))
            .header(header::ACCEPT, "*/*")
            .header(header::ACCEPT_ENCODING, "identity");
        for (name, value) in extra {
            request = request.header(name, value);
        }
        if let Some(Some(credentials)) = plain_proxy {
            request = request.header(header::PROXY_AUTHORIZATION, credentials);
        }
        let token = self.token.as_ref().filter(|_| self.hub.same_origin(url)).and_then(Token::header);
        let with_token = token.is_some();
        if let Some(value) = token {
            if !url.is_https() && !is_here(url.host()) {
                return Err(HubError::TokenInTheClear { url: url.to_string() });
            }
            request = request.header(header::AUTHORIZATION, value);
        }
        let request = request.body(Empty::<Bytes>::new()).map_err(|e| HubError::Network {
            host: url.authority(),
            what: format!("the request cannot be written: {e}"),
        })?;
        let response = timeout(self.limits.stall, sender.send_request(request))
            .await
            .map_err(|_| late("answer", self.limits.stall))?
            .map_err(|e| network(url, &e))?;
        let (parts, body) = response.into_parts();
        Ok(Reply {
            status: parts.status,
            headers: parts.headers,
            facts: Facts::default(),
            url: url.clone(),
            with_token,
            body,
            stall: self.limits.stall,
            _connection: connection,
        })
    }

    /// A connection to the server or, for plain HTTP, to a proxy: then with the login that the proxy wants, if any.
    async fn connect(&self, url: &Url) -> Result<(Box<dyn Stream>, Option<Option<String>>), HubError> {
        if let Some(path) = &self.socket {
            return socket(path).await.map(|stream| (stream, None)).map_err(|error| network(url, &error));
        }
        let limit = self.limits.connect;
        let (host, port, credentials) = match self.proxies.way(url) {
            Way::Direct => (url.host(), url.port(), None),
            Way::Through { host, port, credentials } => (host, port, Some(credentials)),
        };
        let at_proxy = credentials.is_some();
        let mut tcp =
            connect_within(host, port, limit).await.map_err(|error| match network(url, &error) {
                HubError::Network { host: _, what } if at_proxy => {
                    HubError::Network { host: format!("the proxy {host}:{port}"), what }
                }
                other => other,
            })?;
        tcp.set_nodelay(true).map_err(|e| network(url, &e))?;
        if !url.is_https() {
            return Ok((Box::new(tcp), credentials.map(|login| login.map(str::to_owned))));
        }
        if let Some(credentials) = credentials {
            tunnel(&mut tcp, url, credentials).await?;
        }
        let name = ServerName::try_from(url.host().to_owned()).map_err(|e| network(url, &e))?;
        let tls = self.tls.connect(name, tcp).await.map_err(|e| match network(url, &e) {
            // Certificates do not get better by trying again; a broken connection may.
            HubError::Network { host, what } if e.kind() == std::io::ErrorKind::InvalidData => {
                HubError::Tls { host, what }
            }
            other => other,
        })?;
        Ok((Box::new(tls), None))
    }
}

#[cfg(unix)]
async fn socket(path: &std::path::Path) -> std::io::Result<Box<dyn Stream>> {
    Ok(Box::new(tokio::net::UnixStream::connect(path).await?))
}

#[cfg(not(unix))]
#[expect(clippy::unused_async, reason = "as where there are sockets")]
async fn socket(_: &std::path::Path) -> std::io::Result<Box<dyn Stream>> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// Whether a host is this machine, to which nobody listens on the way.
fn is_here(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn network(url: &Url, error: &dyn std::error::Error) -> HubError {
    let mut what = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !what.contains(&text) {
            what = format!("{what}: {text}");
        }
        cause = inner.source();
    }
    HubError::Network { host: url.authority(), what }
}

/// Adds the certificates of a PEM file, for people behind a proxy that signs for itself.
fn add_roots(roots: &mut rustls::RootCertStore, path: &std::path::Path) -> Result<(), HubError> {
    use rustls::pki_types::{CertificateDer, pem::PemObject};

    let bad = |e: &dyn fmt::Display| HubError::Io {
        path: path.to_owned(),
        source: std::io::Error::new(
            std::io::ErrorKind::InvalidData,
            format!("expected PEM certificates: {e}"),
        ),
    };
    for certificate in CertificateDer::pem_file_iter(path).map_err(|e| bad(&e))? {
        roots.add(certificate.map_err(|e| bad(&e))?).map_err(|e| bad(&e))?;
    }
    Ok(())
}
