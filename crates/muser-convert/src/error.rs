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
    ConvertError::Checkpoint {
        place: shown(place.into()),
        expected: shown(expected.into()),
        found: shown(found.into()),
    }
}

/// Errors end up on terminals: names out of a checkpoint, and what a parser says of them, have their control characters escaped.
fn shown(text: String) -> String {
    if !text.contains(char::is_control) {
        return text;
    }
    let escaped = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_checkpoint_says_of_itself_moves_no_cursor() {
        let error = wrong("a\u{1b}[2J", "JSON", "unknown field `2&\u{7f}`\n").to_string();
        assert_eq!(error, "a\\u{1b}[2J: expected JSON, found unknown field `2&\\u{7f}`\\n");
        assert_eq!(wrong("ä", "b", "c").to_string(), "ä: expected b, found c");
    }
}
