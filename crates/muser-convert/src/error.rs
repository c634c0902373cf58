//! Why a checkpoint was not converted.

use std::path::Path;

/// Errors of a conversion, grouped by whose fault they are.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// File or folder.
        path: String,
        /// Cause.
        source: std::io::Error,
    },
    /// The checkpoint is broken, or of a kind that is not known.
    #[error("{place}: expected {expected}, found {found}")]
    Checkpoint {
        /// File, tensor or setting.
        place: String,
        /// What would have been right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// Another conversion writes the same file.
    #[error("{0}: another process is writing this file")]
    Busy(String),
    /// What was written is not a file that muser would load: the checkpoint is not this model.
    #[error("the result would not load: {0}")]
    Result(#[from] muser_model::ModelError),
    /// The container could not be laid out.
    #[error(transparent)]
    Gguf(#[from] muser_gguf::GgufError),
}

pub(crate) fn io(path: &Path, source: std::io::Error) -> ConvertError {
    ConvertError::Io { path: path.display().to_string(), source }
}

pub(crate) fn wrong(
    place: impl Into<String>,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> ConvertError {
    ConvertError::Checkpoint { place: place.into(), expected: expected.into(), found: found.into() }
}
