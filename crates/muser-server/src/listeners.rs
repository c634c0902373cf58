//! Where connections come from: TCP addresses, or a Unix socket, which only its owner may open.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
#[cfg(unix)]
use tokio::net::{UnixListener, UnixStream};

use crate::config::ServerConfig;
use crate::error::ServerError;

/// What is listened on.
#[derive(Debug)]
pub(crate) struct Listeners {
    tcp: Vec<TcpListener>,
    #[cfg(unix)]
    unix: Option<(UnixListener, SocketFile)>,
    address: SocketAddr,
}

impl Listeners {
    /// Takes the addresses of the configuration. If the port is 0, all of them get the port that the first one got.
    pub(crate) async fn bind(config: &ServerConfig) -> Result<Self, ServerError> {
        if let Some(path) = &config.socket {
            return Self::bind_socket(config, path);
        }
        let fault =
            |address: SocketAddr| move |source| ServerError::Bind { address: address.to_string(), source };
        let first = TcpListener::bind(config.address).await.map_err(fault(config.address))?;
        let address = first.local_addr().map_err(fault(config.address))?;
        let mut tcp = vec![first];
        for mut more in config.more_addresses.iter().copied() {
            more.set_port(address.port());
            match TcpListener::bind(more).await {
                Ok(listener) => tcp.push(listener),
                // A name often has an address of a kind that this machine does not have.
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                    tracing::debug!(%more, "no such address here");
                }
                Err(source) => return Err(fault(more)(source)),
            }
        }
        Ok(Self {
            tcp,
            #[cfg(unix)]
            unix: None,
            address,
        })
    }

    #[cfg(unix)]
    fn bind_socket(config: &ServerConfig, path: &Path) -> Result<Self, ServerError> {
        let fault = |source| ServerError::Bind { address: format!("unix:{}", path.display()), source };
        clear_stale(path).map_err(fault)?;
        let listener = UnixListener::bind(path).map_err(fault)?;
        let file = SocketFile(path.to_owned());
        let owner_only = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(path, owner_only).map_err(fault)?;
        Ok(Self { tcp: Vec::new(), unix: Some((listener, file)), address: config.address })
    }

    #[cfg(not(unix))]
    fn bind_socket(_config: &ServerConfig, path: &Path) -> Result<Self, ServerError> {
        Err(ServerError::Config(format!("unix:{}: this system has no Unix sockets", path.display())))
    }

    /// The first address, with its port.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next connection of any of them, and where it comes from.
    pub(crate) async fn accept(&self) -> io::Result<(Wire, Option<IpAddr>)> {
        std::future::poll_fn(|cx| self.poll_accept(cx)).await
    }

    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Wire, Option<IpAddr>)>> {
        for listener in &self.tcp {
            if let Poll::Ready(accepted) = listener.poll_accept(cx) {
                return Poll::Ready(accepted.map(|(stream, from)| {
                    // Tokens are small writes that should not wait for one another.
                    let _ = stream.set_nodelay(true);
                    (Wire::Tcp(stream), Some(from.ip().to_canonical()))
                }));
            }
        }
        #[cfg(unix)]
        if let Some((listener, _)) = &self.unix
            && let Poll::Ready(accepted) = listener.poll_accept(cx)
        {
            return Poll::Ready(accepted.map(|(stream, _)| (Wire::Unix(stream), None)));
        }
        Poll::Pending
    }
}

/// Removes a socket that nobody listens on any more; anything else at its place is left alone.
#[cfg(unix)]
fn clear_stale(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt as _;
    let kind = match std::fs::symlink_metadata(path) {
        Ok(found) => found.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !kind.is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "something that is no socket is there"));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Err(error) => Err(error),
    }
}

/// The name of a socket, gone with its listener.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A connection of either kind.
#[derive(Debug)]
pub(crate) enum Wire {
    /// TCP.
    Tcp(TcpStream),
    /// A Unix socket.
    #[cfg(unix)]
    Unix(UnixStream),
}

macro_rules! either {
    ($wire:expr, $stream:ident => $call:expr) => {
        match $wire.get_mut() {
            Wire::Tcp($stream) => $call,
            #[cfg(unix)]
            Wire::Unix($stream) => $call,
        }
    };
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(cx, buffer))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Tcp(stream) => stream.is_write_vectored(),
            #[cfg(unix)]
            Self::Unix(stream) => stream.is_write_vectored(),
        }
    }
}
