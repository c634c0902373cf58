//! Why a file is not a model that muser can run.

/// Errors of loading a model; all of them are the file's fault but for [`ModelError::Gguf`]'s I/O cases.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The container itself is broken or unreadable.
    #[error(transparent)]
    Gguf(#[from] muser_gguf::GgufError),
    /// A metadata key is missing or has a figure that cannot be.
    #[error("metadata key {key}: expected {expected}, found {found}")]
    Metadata {
        /// The key.
        key: String,
        /// What would have been right.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// A tensor is missing or has the wrong shape or type.
    #[error("tensor {name}: expected {expected}, found {found}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What would have been right.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// The caller asked for a synthetic file that cannot be.
    #[error("cannot make this file: {0}")]
    Synth(String),
}
