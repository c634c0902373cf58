//! What is asked of a reading of the output, and what it finds.

use crate::tokenizer::Markers;
use serde_json::Value;

/// A piece of output. Pieces of the same kind that follow each other belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputEvent {
    /// Text of the model's reasoning.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// A tool call begins.
    ToolCallStart {
        /// Number of the call in this generation, from 0.
        index: usize,
        /// Its id: the prefix of [`crate::OutputDecoder::name_calls`] and the number.
        id: String,
        /// Name of the tool: one of the request's, if the model's text means one.
        name: String,
    },
    /// A piece of the JSON text of the arguments.
    ToolCallArguments {
        /// Number of the call.
        index: usize,
        /// All pieces of a call, joined, are the JSON object.
        json_delta: String,
    },
    /// The call is complete. A call that was cut off never ends.
    ToolCallEnd {
        /// Number of the call.
        index: usize,
        /// The whole JSON object.
        arguments: String,
    },
}

/// How the output is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OutputMode {
    /// Messages with headers: the prompt ended with `<|start|>assistant`.
    #[default]
    Chat,
    /// The same, but the prompt opened the answer already ([`crate::ChatInput::answer_directly`]).
    ChatAnswer,
    /// Plain text, all of it content.
    Raw(Markers),
}

/// Options of an [`crate::OutputDecoder`].
#[derive(Clone, Debug, Default)]
pub struct OutputOptions {
    /// How to read the output.
    pub mode: OutputMode,
    /// The tools of the request, as [`crate::normalise_tools`] gives them.
    pub tools: Vec<Value>,
    /// Stop strings; applied to the answer, in raw mode to everything.
    pub stop: Vec<String>,
}

/// Where in its output the model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputChannel {
    /// Between messages, or in a header.
    Header,
    /// In reasoning.
    Reasoning,
    /// In the answer.
    Answer,
    /// In a message to a tool.
    Tool,
    /// The turn is over.
    Ended,
}

/// Why the output ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputEnd {
    /// The model ended its turn.
    EndOfTurn,
    /// The stop string with this index was found.
    StopString(usize),
}
