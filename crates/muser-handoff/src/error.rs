//! What can go wrong with a node's files, codes and addresses, and whose fault it is.

use std::path::PathBuf;

/// A node cannot be set up as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// A file that holds secrets or rights cannot be used.
    #[error("{} cannot be used: {reason}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A line of `nodes.toml` means nothing.
    #[error("{} line {line}: {reason}", path.display())]
    Registry {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What was expected and found.
        reason: String,
    },
    /// The caller asked for something that cannot be.
    #[error("{what}: {expected} expected, {found} found")]
    Caller {
        /// What was asked for.
        what: &'static str,
        /// What would have been right.
        expected: String,
        /// What came.
        found: String,
    },
    /// The other node does not answer.
    #[error("{address} does not answer: {reason}")]
    Unreachable {
        /// Where.
        address: String,
        /// Why.
        reason: String,
    },
    /// The other node has another key than the one that is pinned, or that the code names.
    #[error("{address} has the key {found}, expected is {expected}")]
    WrongKey {
        /// Where.
        address: String,
        /// The key, or the hash of it, that was expected.
        expected: String,
        /// The key that is there.
        found: String,
    },
    /// The other node does not take the code.
    #[error("{address} does not take the code: {reason}")]
    Code {
        /// Where.
        address: String,
        /// Why, and what helps.
        reason: String,
    },
    /// The system gave no random bytes, or TLS cannot be set up.
    #[error("{0}")]
    System(String),
}

impl NodeError {
    pub(crate) fn file(path: impl Into<PathBuf>, reason: impl std::fmt::Display) -> Self {
        Self::File { path: path.into(), reason: reason.to_string() }
    }

    pub(crate) fn caller(what: &'static str, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Caller { what, expected: expected.into(), found: found.into() }
    }

    /// Is it the caller's fault (usage), rather than of what was met?
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Caller { .. })
    }
}
