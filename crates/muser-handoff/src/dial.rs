//! The way to another node.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, TlsStream};

use crate::frame::{Frame, HEADER_BYTES, Header, Hello, Kind, Load};
use crate::ids::{NodeKey, Nonce};
use crate::planes::{Component, Plane, Planes};
use crate::registry::Entry;
use crate::secret::{Secret, Secrets};
use crate::tls::{self, ALPN};
use crate::{NodeError, Refusal};

/// TCP and TLS to an address.
pub(crate) async fn connect(
    config: rustls::ClientConfig,
    address: &str,
) -> Result<tokio_rustls::client::TlsStream<TcpStream>, String> {
    let alpn = config.alpn_protocols.first().cloned();
    let tcp = TcpStream::connect(address).await.map_err(|error| format!("{address}: {error}"))?;
    let _ = tcp.set_nodelay(true);
    // No name is checked: it is the key that counts.
    let name = ServerName::try_from("muser-node").map_err(|error| error.to_string())?;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.map_err(|error| {
        match tls::handshake_fault(&error) {
            "key" => format!("{address} has another key than the one that is pinned"),
            _ => format!("{address}: {error}"),
        }
    })?;
    if stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec) != alpn {
        return Err(format!("{address} speaks another protocol"));
    }
    Ok(stream)
}

/// The key that a peer has shown.
pub(crate) fn peer_key(certificates: Option<&[CertificateDer<'_>]>) -> Option<NodeKey> {
    certificates.and_then(|all| all.first()).and_then(tls::key_of)
}

/// Reads a HELLO, which nothing may come before.
pub(crate) async fn read_hello(from: &mut (impl AsyncRead + Unpin)) -> Result<Hello, Option<Refusal>> {
    let mut header = [0; HEADER_BYTES];
    from.read_exact(&mut header).await.map_err(|_| None)?;
    let header = Header::decode(header)?;
    if header.kind != Kind::Hello {
        return Err(Some(Refusal::Order { frame: header.kind.name() }));
    }
    let mut body = vec![0; header.body as usize];
    from.read_exact(&mut body).await.map_err(|_| None)?;
    match Frame::decode(Kind::Hello, &body)?.0 {
        Frame::Hello(hello) => Ok(*hello),
        _ => Err(Some(Refusal::Order { frame: header.kind.name() })),
    }
}

/// Opens a stream to a node and exchanges HELLOs. The error says what is wrong, and names what was refused, if it was that.
pub(crate) async fn open_stream(
    secret: &Secret,
    entry: &Entry,
    address: &str,
    hello: Hello,
) -> Result<(TlsStream<TcpStream>, NodeKey, Hello), (String, Option<Refusal>)> {
    let fault = |fault: String| (fault, None);
    let pinned = entry.clone();
    let trusts: tls::Trusts = Arc::new(move |key| pinned.has_key(key));
    let config = tls::client(secret, trusts, ALPN).map_err(|error| fault(error.to_string()))?;
    let stream = connect(config, address).await.map_err(fault)?;
    let key = peer_key(stream.get_ref().1.peer_certificates());
    let key = key.ok_or_else(|| fault("no key was shown".into()))?;
    let mut stream = TlsStream::Client(stream);
    let (connection, number) = (hello.connection, hello.stream);
    let ours = Frame::Hello(Box::new(hello)).encode(0);
    let said = async {
        stream.write_all(&ours).await?;
        stream.flush().await
    };
    said.await.map_err(|error| fault(error.to_string()))?;
    let theirs = read_hello(&mut stream).await.map_err(|refusal| {
        let closed =
            || format!("{address} closed the connection: it does not know this node's key, or has no place");
        (refusal.as_ref().map_or_else(closed, ToString::to_string), refusal)
    })?;
    if (theirs.connection, theirs.stream) != (connection, number) {
        return Err((Refusal::Stream.to_string(), Some(Refusal::Stream)));
    }
    Ok((stream, key, theirs))
}

/// What a node says to somebody who only looks.
#[derive(Clone, Debug)]
pub struct Visit {
    /// Who it is.
    pub hello: Hello,
    /// How busy it is.
    pub load: Load,
    /// How long its HELLO took.
    pub round_trip: Duration,
}

/// Looks at a node of the registry, without an engine.
///
/// # Errors
/// If it has no address, cannot be reached in time, or does not know this node.
pub async fn visit(home: &Path, entry: &Entry, time: Duration) -> Result<Visit, NodeError> {
    let Some(address) = entry.address.clone() else {
        return Err(NodeError::caller(
            "the node's address",
            "one in the registry",
            "none: it dials this node",
        ));
    };
    let secrets = Secrets::open_or_create(home)?;
    let connection = Nonce::fresh().ok_or_else(|| NodeError::System("no random bytes".into()))?;
    let hello = hello_of_visitor(connection, entry.newest_key())?;
    let unreachable = |reason: String| NodeError::Unreachable { address: address.clone(), reason };
    let looking = async {
        let opened = open_stream(&secrets.current, entry, &address, hello).await;
        let (mut stream, _, hello) = opened.map_err(|(fault, _)| unreachable(fault))?;
        let asked = Instant::now();
        let load = read_load(&mut stream).await.map_err(|error| unreachable(error.to_string()))?;
        let _ = stream.shutdown().await;
        Ok((hello, load, asked))
    };
    let began = Instant::now();
    let looked = tokio::time::timeout(time, looking).await;
    let (hello, load, said) = looked.map_err(|_| unreachable("no answer in time".into()))??;
    // TCP, TLS and HELLO are three ways there and back.
    Ok(Visit { hello, load, round_trip: said.duration_since(began) / 3 })
}

fn hello_of_visitor(connection: Nonce, knows: NodeKey) -> Result<Hello, NodeError> {
    let digits = muser_backend::arith::attention::Digits::One;
    let group = muser_kv::KvGroup::Full;
    let plane = Plane { group, component: Component::Target, layers: 1, heads: 1, dim: 4, digits };
    let planes = Planes::new(vec![plane]).map_err(|refusal| NodeError::System(refusal.to_string()))?;
    Ok(Hello {
        connection,
        stream: 0,
        streams: 1,
        serves_prefill: false,
        serves_sessions: false,
        max_positions: 0,
        max_transfers: 0,
        rows_a_minute: 0,
        identity: [0; 32],
        draft: [0; 32],
        semantic: [0; 32],
        window: 0,
        planes,
        route: String::new(),
        build: crate::BUILD.into(),
        parts: Vec::new(),
        knows,
        next_key: NodeKey([0; 32]),
        next_proof: [0; 64],
    })
}

async fn read_load(from: &mut (impl AsyncRead + Unpin)) -> std::io::Result<Load> {
    let refused = |refusal: Refusal| std::io::Error::other(refusal.to_string());
    loop {
        let mut header = [0; HEADER_BYTES];
        from.read_exact(&mut header).await?;
        let header = Header::decode(header).map_err(refused)?;
        if !matches!(header.kind, Kind::Load | Kind::Abort) {
            return Err(refused(Refusal::Order { frame: header.kind.name() }));
        }
        let mut body = vec![0; header.body as usize];
        from.read_exact(&mut body).await?;
        match Frame::decode(header.kind, &body).map_err(refused)?.0 {
            Frame::Load(load) => return Ok(load),
            Frame::Abort(abort) => return Err(std::io::Error::other(abort.reason.label())),
            _ => {}
        }
    }
}
