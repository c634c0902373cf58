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

mod event;
mod header;
mod machine;
mod parameter_types;
mod sink;
mod stop_matcher;
mod stops;
mod tool_block;

use crate::Tokenizer;
use crate::error::TextError;
use machine::Machine;
use sink::Events;
use std::sync::Arc;

pub use event::{OutputChannel, OutputEnd, OutputEvent, OutputMode, OutputOptions};
pub use stop_matcher::StopMatcher;

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
