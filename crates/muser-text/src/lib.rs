//! Tokenizer, detokenizer, chat templates, channel and tool-call parser, stop strings.
//!
//! Text comes in as prompts and conversations and leaves as ids; ids come back from the model and leave as text, shaped
//! into reasoning, answer and tool calls. Nothing here knows tensors, requests or HTTP.

mod bpe;
mod byte_alphabet;
mod char_class;
mod chat;
mod detokenizer;
mod error;
#[cfg(feature = "grammar")]
pub mod grammar;
mod merges;
mod output;
mod pre_split;
mod schema;
mod special_tokens;
#[cfg(test)]
mod test_support;
mod tokenizer;
mod utf8;
mod vocabulary;

pub use byte_alphabet::spell_bytes;
pub use chat::{
    ChatInput, ChatTemplate, Clock, PARTIAL_JSON, PromptIds, normalise_messages, normalise_tools, utc,
    utc_now,
};
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use output::{
    OutputChannel, OutputDecoder, OutputEnd, OutputEvent, OutputMode, OutputOptions, StopMatcher,
};
pub use tokenizer::{ChannelTokens, Markers, Specials, Tokenizer};
pub use utf8::Utf8Joiner;
pub use vocabulary::{TokenKind, VocabSource};
