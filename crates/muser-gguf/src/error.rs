//! Why a file cannot be read. Each message names whose fault it is, what was expected, what was found and where.

use crate::GgmlType;

/// Errors of reading, writing or decoding GGUF.
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
    /// A metadata key that the caller needs is missing or has another type or range.
    #[error("metadata key {key}: expected {expected}, found {found}")]
    Key {
        /// The key.
        key: String,
        /// What would have been right.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// The block type is known by name and size but its values cannot be decoded here.
    #[error(
        "type {} is not supported: muser decodes no IQ1, IQ2 or IQ3 codebooks and no integer tensors; take a file \
         quantised to Q2_K, Q3_K, IQ4_XS or more bits", .0.name()
    )]
    Unsupported(GgmlType),
    /// The caller gave a row whose length does not fit the block type.
    #[error("a row of {values} values of type {} needs {expected} bytes, the caller gave {found}", .ty.name())]
    RowLength {
        /// Block type.
        ty: GgmlType,
        /// Values asked for.
        values: usize,
        /// What such a row takes, in words, since there may be no such row.
        expected: String,
        /// Bytes given.
        found: usize,
    },
    /// The caller asked the writer for something that no valid file can hold.
    #[error("cannot write this file: {0}")]
    Write(String),
}
