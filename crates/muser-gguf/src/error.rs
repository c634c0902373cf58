//! Why a file cannot be read.

/// Errors of reading a GGUF file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// File.
        path: String,
        /// Cause.
        source: std::io::Error,
    },
    /// The file is not valid GGUF.
    #[error("{path}: {what}")]
    Invalid {
        /// File.
        path: String,
        /// What was expected, what was found, where.
        what: String,
    },
}
