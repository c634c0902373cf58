//! Where the output ends, for the engine: it must know when to stop, but not what was said.

use super::event::{OutputMode, OutputOptions};
use super::machine::Machine;
use super::sink::Nobody;
use crate::Tokenizer;
use crate::error::TextError;
use std::sync::Arc;

/// Watches ids for the end of the output only. It runs between two steps of the device, so it makes no text, no events
/// and no JSON, and after it was made it allocates nothing: characters are joined in one buffer, and what could be a header,
/// a tag or a stop string stands in others, whose size is set here. (Only what no model writes on purpose outgrows them:
/// a parameter of four thousand bytes under a key that its call has already, or as much white space between tags.)
#[derive(Debug)]
pub struct StopMatcher {
    machine: Machine,
    one_call: bool,
}

impl StopMatcher {
    /// A matcher for one generation, under the same options as its [`super::OutputDecoder`], so that the two agree.
    /// `one_call`: a whole tool call ends it, too.
    ///
    /// `None` if only ids can end this output, those of [`Tokenizer::stop_ids`]: raw text without stop strings. A chat's turn
    /// can always end otherwise, since a model may go on with somebody else's message.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        options: &OutputOptions,
        one_call: bool,
    ) -> Result<Option<StopMatcher>, TextError> {
        if options.stop.is_empty() && matches!(options.mode, OutputMode::Raw(_)) {
            return Ok(None);
        }
        let reads_bodies = !options.stop.is_empty() || one_call || options.mode == OutputMode::ChatAnswer;
        let machine = Machine::new(tokenizer, options)?.for_watching(reads_bodies);
        Ok(Some(StopMatcher { machine, one_call }))
    }

    /// Takes the next id; true if the generation ends with it.
    pub fn push(&mut self, id: u32) -> bool {
        let mut nobody = Nobody::default();
        self.machine.push(id, &mut nobody);
        self.machine.end().is_some() || (self.one_call && nobody.called)
    }
}

impl Clone for StopMatcher {
    /// For another choice: with buffers of its own, of full size.
    fn clone(&self) -> StopMatcher {
        StopMatcher { machine: self.machine.clone().with_room(), one_call: self.one_call }
    }
}
