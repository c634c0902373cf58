//! Why the engine did not start or did not take a request.

use muser_backend::ExecError;

/// The engine could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A figure of the configuration makes no sense.
    #[error("engine configuration: {key} is {found}, expected {expected}")]
    Config {
        /// Which figure.
        key: &'static str,
        /// What is possible.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The KV budget does not hold one sequence.
    #[error(
        "KV budget of {budget} bytes is too small: the smallest that works for this model is {needed} bytes"
    )]
    KvBudget {
        /// Bytes needed for one block and one window.
        needed: u64,
        /// Bytes given.
        budget: u64,
    },
    /// The executor failed to allocate its KV blocks.
    #[error(transparent)]
    Exec(#[from] ExecError),
    /// The operating system gave no thread.
    #[error("cannot start the engine thread: {0}")]
    Thread(std::io::Error),
}

/// A request was refused at the door.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The prompt leaves no room in the context.
    #[error(
        "the prompt has {prompt_tokens} tokens, at most {max_prompt_tokens} fit the context of {context}"
    )]
    ContextLength {
        /// Positions in the prompt.
        prompt_tokens: usize,
        /// Longest prompt that would be taken.
        max_prompt_tokens: usize,
        /// Most positions of a sequence.
        context: usize,
    },
    /// The context would allow it but the KV memory would not, even with nothing else running.
    #[error(
        "the request needs {needed_blocks} KV blocks of 256 positions, the budget has {available_blocks}: \
         give the engine more KV memory or ask for less"
    )]
    Capacity {
        /// Blocks of the full group for prompt and `max_tokens`.
        needed_blocks: usize,
        /// Blocks there are.
        available_blocks: usize,
    },
    /// Too many requests are waiting.
    #[error("{waiting} requests are waiting, the limit is {limit}")]
    QueueFull {
        /// Requests waiting now.
        waiting: usize,
        /// Most that may.
        limit: usize,
    },
    /// A field has a value that cannot be.
    #[error("{field} is {found}, expected {expected}")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// What is possible.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The engine takes no more requests.
    #[error("the engine is shutting down")]
    ShuttingDown,
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
