//! Why a vocabulary, a template, a conversation or a grammar is refused. Each message names whose fault it is, what was
//! expected, what was found and where.

/// Errors of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The model file's tokenizer metadata is missing or contradicts itself.
    #[error("the model file is wrong: {key}: expected {expected}, found {found}")]
    Vocabulary {
        /// Metadata key, with the index for an array.
        key: String,
        /// What would have been right.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// The model file's chat template does not compile, raised an error, or ran out of its budget.
    #[error("the chat template of the model failed{}: {what}", line_suffix(*.line))]
    Template {
        /// Line of the template, counted from 1, if known.
        line: Option<usize>,
        /// The reason.
        what: String,
    },
    /// The caller's conversation or options are not valid.
    #[error("{field}: expected {expected}, found {found}")]
    Request {
        /// Path of the field, as in `messages[2].role`.
        field: String,
        /// What would have been right.
        expected: String,
        /// What the caller gave.
        found: String,
    },
    /// The caller's JSON schema says something that cannot be kept.
    #[error("{} is not usable{}: {what}", schema_of(.tool.as_deref()), place(.path))]
    Schema {
        /// The tool whose schema it is; none: the schema of the answer.
        tool: Option<String>,
        /// Where in the schema, as in `properties.a.items`; empty at its root.
        path: String,
        /// What it is.
        what: String,
    },
    /// The caller's grammar, regular expression or JSON schema is not valid or too large.
    #[error("{kind} is not usable: {what}")]
    Grammar {
        /// Which kind: `the JSON schema`, `the Lark grammar`, `the regular expression`, ...
        kind: &'static str,
        /// The reason.
        what: String,
    },
    /// Nobody waits for it any more.
    #[error("given up, since nobody waits for it any more")]
    Abandoned,
}

impl TextError {
    pub(crate) fn vocabulary(
        key: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> TextError {
        TextError::Vocabulary { key: key.into(), expected: expected.into(), found: found.into() }
    }

    pub(crate) fn request(
        field: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> TextError {
        TextError::Request { field: field.into(), expected: expected.into(), found: found.into() }
    }

    /// Is it the caller's input that is wrong, and not the model file?
    pub fn is_request_fault(&self) -> bool {
        matches!(self, TextError::Request { .. } | TextError::Grammar { .. } | TextError::Schema { .. })
    }
}

fn schema_of(tool: Option<&str>) -> String {
    tool.map_or_else(
        || "the JSON schema".to_owned(),
        |name| format!("the schema of the tool {}", shown(name)),
    )
}

fn place(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!(" at {path}") }
}

fn line_suffix(line: Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(" at line {line}"))
}

/// Text for an error message: quoted, escaped, cut to a readable length.
pub(crate) fn shown(text: &str) -> String {
    const LIMIT: usize = 60;
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}
