//! Why a model could not be brought or found.

use std::path::PathBuf;
use std::time::Duration;

/// Errors of the hub, grouped by whose fault they are.
///
/// URLs in messages never carry their query: redirects to storage hosts are signed there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    // The caller's.
    /// A name, URL or path that means nothing here.
    #[error("\"{given}\" is not a model name, URL or owner/repo/file: {why}")]
    BadName {
        /// What was given.
        given: String,
        /// Why it cannot be used.
        why: String,
    },
    /// No model of that name is in the store.
    #[error("no model \"{name}\" in {dir}; there is {available}")]
    NoSuchModel {
        /// What was asked for.
        name: String,
        /// The store.
        dir: PathBuf,
        /// What is there, in words.
        available: String,
    },
    /// A name fits several files of the store.
    #[error("\"{name}\" fits {candidates} in the model store, expected one")]
    Ambiguous {
        /// What was asked for.
        name: String,
        /// What fits.
        candidates: String,
    },
    /// Neither `MUSER_HOME` nor a home folder is known.
    #[error("cannot tell where models are kept: neither MUSER_HOME nor HOME is set")]
    NoHome,
    /// The network is needed and was forbidden.
    #[error("{name} is not complete in {dir} and offline mode forbids fetching it")]
    Offline {
        /// File wanted.
        name: String,
        /// The store.
        dir: PathBuf,
    },
    /// The progress callback asked to stop.
    #[error("stopped after {bytes} bytes; the next pull goes on from there")]
    Cancelled {
        /// Bytes that are kept.
        bytes: u64,
    },

    // This machine's.
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// Another process is pulling the same file.
    #[error("another muser is pulling {name} (it holds {lock})")]
    Busy {
        /// File wanted.
        name: String,
        /// The lock file.
        lock: PathBuf,
    },
    /// The file system is too full.
    #[error("{dir} has {available} bytes free, the rest of {name} needs {needed}")]
    NoSpace {
        /// Folder.
        dir: PathBuf,
        /// File wanted.
        name: String,
        /// Bytes still to come, with a margin.
        needed: u64,
        /// Bytes free.
        available: u64,
    },
    /// A different file of that name is already there.
    #[error(
        "{path} is already there and is another file: expected {expected}, found {found} (force replaces it)"
    )]
    Exists {
        /// The file.
        path: PathBuf,
        /// Size or hash that was expected.
        expected: String,
        /// Size or hash of the file.
        found: String,
    },

    // The network's.
    /// No connection, or it broke.
    #[error("connection to {host} failed: {what}")]
    Network {
        /// Host and port.
        host: String,
        /// What the network said.
        what: String,
    },
    /// Nothing arrived for too long.
    #[error("{host} sent nothing for {seconds} s after {bytes} bytes")]
    Stalled {
        /// Host and port.
        host: String,
        /// The limit.
        seconds: f32,
        /// Bytes that are there.
        bytes: u64,
    },
    /// The body ended early.
    #[error("{host} ended the transfer early: expected {expected} bytes, found {found}")]
    Truncated {
        /// Host and port.
        host: String,
        /// Size of the file.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },

    /// The host is not who it says, or speaks no TLS that we do.
    #[error("no secure connection to {host}: {what}")]
    Tls {
        /// Host and port.
        host: String,
        /// What the handshake said.
        what: String,
    },

    // The server's.
    /// A status other than success.
    #[error("{url}: the server answered {status}{hint}")]
    Status {
        /// Address, without its query.
        url: String,
        /// HTTP status.
        status: u16,
        /// What to do about it.
        hint: String,
        /// What the server asked to wait.
        retry_after: Option<Duration>,
    },
    /// The server broke the protocol.
    #[error("{url}: the server's fault: expected {expected}, found {found}")]
    Protocol {
        /// Address, without its query.
        url: String,
        /// What would have been right.
        expected: String,
        /// What came.
        found: String,
    },
    /// The server wants to be asked much later.
    #[error("{url}: the server asks to wait {seconds} s, more than the {limit} s that this pull waits")]
    WaitTooLong {
        /// Address, without its query.
        url: String,
        /// What it asked for.
        seconds: u64,
        /// What we would do.
        limit: u64,
    },
    /// A redirect that leads nowhere.
    #[error("{url}: more than {limit} redirects, the last to {last}")]
    RedirectLoop {
        /// Address, without its query.
        url: String,
        /// Redirects followed.
        limit: usize,
        /// Where the last one pointed.
        last: String,
    },
    /// A redirect that cannot be followed.
    #[error("{url}: the server's fault: expected a redirect to a usable address, found {found}")]
    BadRedirect {
        /// Address, without its query.
        url: String,
        /// What came.
        found: String,
    },
    /// The file changed on the server between two requests.
    #[error("{url}: the file changed on the server: it was {expected}, now it is {found}")]
    Changed {
        /// Address, without its query.
        url: String,
        /// Identity before.
        expected: String,
        /// Identity now.
        found: String,
    },
    /// The server has another file than the one known by this name.
    #[error("{url}: not the file known by this name: expected {expected}, the server has {found}")]
    NotTheKnownFile {
        /// Address, without its query.
        url: String,
        /// Known size or hash.
        expected: String,
        /// Size or hash there.
        found: String,
    },
    /// What came is no model file.
    #[error("{url}: expected a GGUF file, the server sent {found}; nothing was kept")]
    NotAModel {
        /// Address, without its query.
        url: String,
        /// What it looks like.
        found: String,
    },
    /// A proxy named by the environment cannot be used.
    #[error("{variable}: expected the address of an HTTP proxy such as http://proxy:3128, found {why}")]
    BadProxy {
        /// The environment variable.
        variable: String,
        /// What is wrong with it.
        why: String,
    },
    /// A token would have gone over the network for everyone to read.
    #[error("{url}: a token is not sent without TLS; use https, or unset HF_TOKEN and MUSER_HUB_TOKEN")]
    TokenInTheClear {
        /// Address, without its query.
        url: String,
    },

    /// All bytes came and they are not the right ones.
    #[error(
        "{name} arrived damaged or is another file: expected SHA-256 {expected}, found {found}; it was deleted"
    )]
    WrongHash {
        /// File wanted.
        name: String,
        /// Expected hash, hexadecimal.
        expected: String,
        /// Hash of what came.
        found: String,
    },
    /// A passing fault that did not pass.
    #[error("gave up after {attempts} attempts without progress: {last}")]
    GaveUp {
        /// Attempts in a row that brought nothing new.
        attempts: u32,
        /// What the last one said.
        #[source]
        last: Box<HubError>,
    },
}

impl HubError {
    /// Is it worth trying again?
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Network { .. }
            | Self::Stalled { .. }
            | Self::Truncated { .. }
            | Self::Protocol { .. }
            | Self::Changed { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 416 | 425 | 429 | 500 | 502 | 503 | 504),
            _ => false,
        }
    }

    /// Wraps an I/O error with the path it belongs to.
    pub(crate) fn io(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}
