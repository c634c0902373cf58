//! From a prompt to an answer, for the commands that write text.
//!
//! [`Session`] is a loaded model with a running engine, [`Prompt`] what the user wants said, [`Answer`] what came of it. The
//! engine speaks token ids; this is where they become text, reasoning and tool calls.

mod answer;
mod printer;
mod prompt;
mod session;

pub use answer::{Answer, Sink, ToolCall};
pub use printer::Printer;
pub use prompt::{ChatPrompt, Prompt};
pub use session::Session;
