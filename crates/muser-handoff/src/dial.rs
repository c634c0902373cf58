//! The way to another node.

use std::sync::Arc;

use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::tls;

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
