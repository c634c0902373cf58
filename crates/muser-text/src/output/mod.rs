//! From generated ids to reasoning, answer and tool calls, as they come.
//!
//! The model writes messages: `<|start|>assistant to=RECIPIENT<|message|>BODY` and `<|eom|>` (more follows) or `<|eot|>`
//! (the turn ends). The recipient tells what the body is: `self` reasoning, `user` the answer, another name a call of a
//! tool. A generation starts right after `<|start|>assistant`.
//!
//! The state machine works on ids: markers are single ids, so text that merely looks like one never changes the state.
//! It is lenient where models are sloppy (repeated or missing openings, a header without the end of the message before)
//! and never fails: what is no valid markup is text. Invariants, held by the tests: the events do not depend on how text
//! is cut into tokens; stop strings apply to the answer only, and nothing from a stop string on is given out.
//!
//! The machine stands in `machine.rs` and tells a sink what it finds. There are two: [`OutputDecoder`] makes the events
//! that are shown, where the text is shown; [`StopMatcher`] makes nothing and only sees the end, on the engine's thread.

mod header;
mod machine;
mod parameter_types;
mod sink;
mod stop_matcher;
mod stops;
mod tool_block;

use crate::Tokenizer;
use crate::detokenizer::Markers;
use crate::error::TextError;
use machine::Machine;
use serde_json::Value;
use sink::Events;
use std::sync::Arc;

pub use stop_matcher::StopMatcher;

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
        /// Its id: the prefix of [`OutputDecoder::name_calls`] and the number.
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

/// Options of an [`OutputDecoder`].
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

/// Turns ids into [`OutputEvent`]s.
#[derive(Clone, Debug)]
pub struct OutputDecoder {
    machine: Machine,
    call_prefix: String,
}

impl OutputDecoder {
    /// A decoder for one generation. Chat modes need a vocabulary with channel markup.
    pub fn new(tokenizer: Arc<Tokenizer>, options: &OutputOptions) -> Result<OutputDecoder, TextError> {
        Ok(OutputDecoder { machine: Machine::new(tokenizer, options)?, call_prefix: "call".into() })
    }

    /// What the ids of this generation's calls begin with.
    pub fn name_calls(&mut self, prefix: String) {
        self.call_prefix = prefix;
    }

    /// Takes the next generated id. After the end ([`Self::end`]) ids are ignored.
    pub fn push(&mut self, id: u32) -> Vec<OutputEvent> {
        self.with(|machine, events| machine.push(id, events))
    }

    /// The generation ends here, whatever the reason: gives out what was held back.
    pub fn finish(&mut self) -> Vec<OutputEvent> {
        self.with(|machine, events| machine.finish(events))
    }

    fn with(&mut self, act: impl FnOnce(&mut Machine, &mut Events<'_>)) -> Vec<OutputEvent> {
        let mut events = Events::new(&self.call_prefix);
        act(&mut self.machine, &mut events);
        events.list
    }

    /// Why the output ended by itself, if it did.
    pub fn end(&self) -> Option<OutputEnd> {
        self.machine.end()
    }

    /// Where the next id belongs.
    pub fn channel(&self) -> OutputChannel {
        self.machine.channel()
    }

    /// Does the next id belong to the answer?
    pub fn in_answer_channel(&self) -> bool {
        self.channel() == OutputChannel::Answer
    }

    /// Number of ids that came while the model was reasoning.
    pub fn reasoning_tokens(&self) -> usize {
        self.machine.reasoning_tokens()
    }

    /// Number of tool calls begun.
    pub fn tool_calls(&self) -> usize {
        self.machine.tool_calls()
    }
}

#[cfg(test)]
mod tests;
