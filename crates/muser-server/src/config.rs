//! What the operator decides, and the rule about which addresses may be listened on.
//!
//! A loopback address needs nothing. Any other address needs a key file and a TLS certificate, or the word
//! `insecure` said out loud: an open inference port on a network is free computing for strangers.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use zeroize::Zeroizing;

use crate::error::ServerError;
use crate::keys::Keys;
use crate::pictures::MOST_TOKENS;

/// Limits that keep one client from hurting the others.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Longest request body in bytes.
    pub body_bytes: usize,
    /// Longest request head (request line and headers) in bytes.
    pub head_bytes: usize,
    /// Time for the head of a request to arrive.
    pub head_time: Duration,
    /// Time for the body of a request to arrive.
    pub body_time: Duration,
    /// Time a client may refuse to take data that is ready for it, before it is dropped.
    pub stalled_write_time: Duration,
    /// Time that a connection may stay open between two requests.
    pub idle_time: Duration,
    /// Connections at once. Beyond it the one that has been idle longest makes room; while none is, more wait in the
    /// system's accept queue.
    pub connections: usize,
    /// Connections of one address at once; more are closed.
    pub connections_per_address: usize,
    /// Memory for the bodies of all requests that are being read or answered, in bytes.
    pub bodies_bytes: usize,
    /// Answers asked for in one request (`n`, or a list of prompts).
    pub answers_per_request: usize,
    /// Sessions (and, counted by themselves, saved slots) that one owner may keep.
    pub keepsakes_per_owner: usize,
    /// Bytes that one owner's sessions (and, counted by themselves, saved slots) may have in all.
    pub keepsake_bytes_per_owner: u64,
    /// Tokens that one image may become.
    pub image_tokens: u32,
    /// Output tokens when the request names no limit; `None`: as many as the context holds.
    pub default_output_tokens: Option<u32>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 32 << 20,
            head_bytes: 64 << 10,
            head_time: Duration::from_secs(10),
            body_time: Duration::from_mins(1),
            stalled_write_time: Duration::from_secs(30),
            idle_time: Duration::from_mins(2),
            connections: 1024,
            connections_per_address: 512,
            bodies_bytes: 512 << 20,
            answers_per_request: 16,
            keepsakes_per_owner: 1000,
            keepsake_bytes_per_owner: 1 << 30,
            image_tokens: MOST_TOKENS,
            default_output_tokens: None,
        }
    }
}

/// What happens to running requests when the server is told to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShutdownPolicy {
    /// Take no new requests and finish the running ones, for at most this long.
    Finish(Duration),
    /// Cut running requests off.
    Cancel,
}

/// Everything the server needs to know besides the model.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Where to listen.
    pub address: SocketAddr,
    /// More addresses, with the port of the first: those of a host name that has several.
    pub more_addresses: Vec<SocketAddr>,
    /// A Unix socket to listen on instead.
    pub socket: Option<PathBuf>,
    /// File with one key a line.
    pub key_file: Option<PathBuf>,
    /// PEM file with the certificate chain.
    pub tls_certificate: Option<PathBuf>,
    /// PEM file with the private key.
    pub tls_key: Option<PathBuf>,
    /// Listen beyond loopback without key or TLS.
    pub insecure: bool,
    /// All keys share cached prefixes, packs, sessions and slots, so that each may learn what the others have.
    pub shared_cache: bool,
    /// Host names that requests may ask for where no key is asked for, besides addresses and `localhost`; `*`: any.
    pub allowed_hosts: Vec<String>,
    /// Origins that browsers may call from; empty: none, `*`: any.
    pub cors_origins: Vec<String>,
    /// Refuse requests whose `model` is not the loaded one.
    pub strict_model_name: bool,
    /// What becomes of a text that fills the context, unless the request says: old parts go, or the text ends.
    pub context_shift: bool,
    /// Limits.
    pub limits: Limits,
    /// What happens to running requests at the end.
    pub shutdown: ShutdownPolicy,
    /// Interval of the comment lines that keep a silent stream alive.
    pub keep_alive: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            address: SocketAddr::from(([127, 0, 0, 1], 8080)),
            more_addresses: Vec::new(),
            socket: None,
            key_file: None,
            tls_certificate: None,
            tls_key: None,
            insecure: false,
            shared_cache: false,
            allowed_hosts: Vec::new(),
            cors_origins: Vec::new(),
            strict_model_name: false,
            context_shift: false,
            limits: Limits::default(),
            shutdown: ShutdownPolicy::Finish(Duration::from_secs(30)),
            keep_alive: Duration::from_secs(1),
        }
    }
}

impl ServerConfig {
    /// The rule about addresses, and that the TLS files come in pairs.
    pub fn check(&self) -> Result<(), ServerError> {
        if self.tls_certificate.is_some() != self.tls_key.is_some() {
            return Err(ServerError::Config("TLS needs both the certificate file and the key file".into()));
        }
        let protected = self.key_file.is_some() && self.tls_certificate.is_some();
        let Some(open) = self.addresses().find(|address| !address.ip().is_loopback()) else { return Ok(()) };
        if self.insecure || protected {
            return Ok(());
        }
        let missing = match (&self.key_file, &self.tls_certificate) {
            (None, None) => "a key file and a TLS certificate",
            (None, Some(_)) => "a key file",
            _ => "a TLS certificate",
        };
        Err(ServerError::Config(format!(
            "{open} can be reached from other machines, so {missing} is needed (or --insecure, which leaves it open)",
        )))
    }

    /// The addresses that are listened on: none for a Unix socket.
    fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        let tcp = std::iter::once(self.address).chain(self.more_addresses.iter().copied());
        tcp.filter(|_| self.socket.is_none())
    }

    /// Whether other machines can reach the server.
    pub fn reaches_others(&self) -> bool {
        self.addresses().any(|address| !address.ip().is_loopback())
    }

    /// The keys that are accepted; none means that no key is asked for.
    pub fn load_keys(&self) -> Result<Keys, ServerError> {
        let Some(path) = &self.key_file else { return Ok(Keys::default()) };
        let fault =
            |reason: String| ServerError::File { what: "key", path: path.display().to_string(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| fault(error.to_string()))?;
        let text = Zeroizing::new(text);
        let keys = Keys::from_lines(&text);
        if keys.is_empty() {
            return Err(fault("it holds no key (one a line, '#' starts a comment)".into()));
        }
        warn_if_open("key", path);
        if keys.shortest() < SAFE_KEY_BYTES {
            tracing::warn!(
                file = %path.display(),
                "a key has fewer than {SAFE_KEY_BYTES} characters: whoever can reach the server can guess it"
            );
        }
        Ok(keys)
    }
}

/// Keys from this length on cannot be guessed over a network.
const SAFE_KEY_BYTES: usize = 16;

/// Says that a secret can be read by others. It is no error: how secrets get into containers is not ours to decide.
pub(crate) fn warn_if_open(what: &str, path: &Path) {
    #[cfg(unix)]
    if let Ok(found) = std::fs::metadata(path)
        && std::os::unix::fs::PermissionsExt::mode(&found.permissions()) & 0o004 != 0
    {
        tracing::warn!(file = %path.display(), "every user of this machine may read the {what} file (chmod 600)");
    }
    #[cfg(not(unix))]
    let _ = (what, path);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(address: &str, key: bool, tls: bool, insecure: bool) -> bool {
        let config = ServerConfig {
            address: address.parse().expect("address"),
            key_file: key.then(|| "keys".into()),
            tls_certificate: tls.then(|| "cert.pem".into()),
            tls_key: tls.then(|| "key.pem".into()),
            insecure,
            ..ServerConfig::default()
        };
        config.check().is_ok()
    }

    #[test]
    fn only_loopback_is_open_by_default() {
        assert!(check("127.0.0.1:1", false, false, false));
        assert!(check("[::1]:1", false, false, false));
        for address in ["0.0.0.0:1", "192.168.1.9:1", "[::]:1"] {
            assert!(!check(address, false, false, false), "{address} open");
            assert!(!check(address, true, false, false), "{address} without TLS");
            assert!(!check(address, false, true, false), "{address} without key");
            assert!(check(address, true, true, false), "{address} protected");
            assert!(check(address, false, false, true), "{address} insecure");
        }
    }

    #[test]
    fn an_empty_key_file_is_refused() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("keys");
        std::fs::write(&path, "# nothing\n\n").expect("write");
        let config = ServerConfig { key_file: Some(path), ..ServerConfig::default() };
        assert!(config.load_keys().is_err());
    }
}
