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

mod header;
mod parameter_types;
mod stops;
mod tool_block;

use crate::detokenizer::{Markers, Utf8Joiner};
use crate::error::TextError;
use crate::{ChannelTokens, TokenKind, Tokenizer};
use header::{Reading, Recipient};
use parameter_types::ToolTypes;
use serde_json::Value;
use std::sync::Arc;
use stops::StopStrings;
use tool_block::{BLOCK_START, BodyEnd, Found, ToolBlock};

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
    tokenizer: Arc<Tokenizer>,
    /// `None`: raw mode.
    channels: Option<ChannelTokens>,
    markers: Markers,
    /// The prompt opened the answer, so that the model does not reason: the turn ends with that answer.
    direct: bool,
    tools: Arc<ToolTypes>,
    stops: StopStrings,
    joiner: Utf8Joiner,
    state: State,
    /// Text of the body that could be the header of a message whose opening is missing: ` to=NAME`.
    held: String,
    /// A marker ended such a header: the recipient, and the text since.
    split: Option<(Recipient, String)>,
    /// A further body of the kind began: a line break goes before its text.
    reasoning: Joint,
    content: Joint,
    calls: usize,
    reasoning_tokens: usize,
    end: Option<OutputEnd>,
}

#[derive(Clone, Debug)]
enum State {
    /// `opened`: after `<|start|>`.
    Header {
        text: String,
        opened: bool,
    },
    Reasoning,
    Answer,
    Tool(Box<ToolBlock>),
    Ended,
}

/// Joins the bodies of one kind by line breaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Joint {
    #[default]
    Nothing,
    Text,
    /// There was text, and the next text is of another body.
    Break,
}

/// What an id is to the state machine.
enum Piece<'a> {
    Bytes(&'a [u8]),
    Start,
    Message,
    EndOfMessage,
    EndOfTurn,
    Invisible,
}

impl OutputDecoder {
    /// A decoder for one generation. Chat modes need a vocabulary with channel markup.
    pub fn new(tokenizer: Arc<Tokenizer>, options: &OutputOptions) -> Result<OutputDecoder, TextError> {
        let (chat, state, markers) = match options.mode {
            OutputMode::Chat => (true, State::Header { text: String::new(), opened: false }, Markers::Hide),
            OutputMode::ChatAnswer => (true, State::Answer, Markers::Hide),
            OutputMode::Raw(markers) => (false, State::Answer, markers),
        };
        let channels = if chat {
            Some(tokenizer.channels().ok_or_else(|| {
                TextError::vocabulary(
                    "tokenizer.ggml.tokens",
                    "the markers <|start|>, <|message|>, <|eom|> and <|eot|>",
                    "a vocabulary without them",
                )
            })?)
        } else {
            None
        };
        Ok(OutputDecoder {
            tokenizer,
            channels,
            markers,
            tools: Arc::new(ToolTypes::new(&options.tools)),
            direct: options.mode == OutputMode::ChatAnswer,
            stops: StopStrings::new(&options.stop)?,
            joiner: Utf8Joiner::default(),
            state,
            held: String::new(),
            split: None,
            reasoning: Joint::Nothing,
            content: Joint::Nothing,
            calls: 0,
            reasoning_tokens: 0,
            end: None,
        })
    }

    /// Takes the next generated id. After the end ([`Self::end`]) ids are ignored.
    pub fn push(&mut self, id: u32) -> Vec<OutputEvent> {
        let mut events = Vec::new();
        if self.end.is_some() {
            return events;
        }
        if matches!(self.state, State::Reasoning) {
            self.reasoning_tokens += 1;
        }
        let tokenizer = self.tokenizer.clone();
        match self.piece_of(&tokenizer, id) {
            Piece::Bytes(bytes) => self.push_bytes(bytes, &mut events),
            marker => self.push_marker(&marker, &mut events),
        }
        events
    }

    /// The generation ends here, whatever the reason: gives out what was held back.
    pub fn finish(&mut self) -> Vec<OutputEvent> {
        let mut events = Vec::new();
        if self.end.is_none() {
            self.flush_bytes(&mut events);
            self.close_body(BodyEnd::Cut, &mut events);
            if self.end.is_none() {
                self.flush_stops(&mut events);
                self.state = State::Ended;
            }
        }
        events
    }

    /// Why the output ended by itself, if it did.
    pub fn end(&self) -> Option<OutputEnd> {
        self.end
    }

    /// Where the next id belongs.
    pub fn channel(&self) -> OutputChannel {
        match self.state {
            State::Header { .. } => OutputChannel::Header,
            State::Reasoning => OutputChannel::Reasoning,
            State::Answer => OutputChannel::Answer,
            State::Tool(_) => OutputChannel::Tool,
            State::Ended => OutputChannel::Ended,
        }
    }

    /// Does the next id belong to the answer?
    pub fn in_answer_channel(&self) -> bool {
        self.channel() == OutputChannel::Answer
    }

    /// Number of ids that came while the model was reasoning.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Number of tool calls begun.
    pub fn tool_calls(&self) -> usize {
        self.calls
    }

    fn piece_of<'a>(&self, tokenizer: &'a Tokenizer, id: u32) -> Piece<'a> {
        let (Some(bytes), Some(kind)) = (tokenizer.token_bytes(id), tokenizer.token_kind(id)) else {
            return Piece::Invisible;
        };
        if let Some(channels) = self.channels {
            if id == channels.start {
                return Piece::Start;
            } else if id == channels.message {
                return Piece::Message;
            } else if id == channels.end_of_message {
                return Piece::EndOfMessage;
            } else if id == channels.end_of_turn || Some(id) == tokenizer.eos() {
                return Piece::EndOfTurn;
            }
        }
        match kind {
            TokenKind::Normal | TokenKind::UserDefined => Piece::Bytes(bytes),
            TokenKind::Control | TokenKind::Unused if self.markers == Markers::Show => Piece::Bytes(bytes),
            TokenKind::Control | TokenKind::Unused => Piece::Invisible,
        }
    }

    fn push_bytes(&mut self, bytes: &[u8], events: &mut Vec<OutputEvent>) {
        let mut text = String::new();
        self.joiner.push(bytes, &mut text);
        self.text(&text, events);
    }

    fn flush_bytes(&mut self, events: &mut Vec<OutputEvent>) {
        let mut text = String::new();
        self.joiner.flush(&mut text);
        self.text(&text, events);
    }

    fn push_marker(&mut self, marker: &Piece<'_>, events: &mut Vec<OutputEvent>) {
        self.flush_bytes(events);
        if self.end.is_some() {
            return;
        }
        match marker {
            Piece::Start if self.direct && matches!(self.state, State::Answer) => {
                self.close_body(BodyEnd::ByModel, events);
                self.end_turn(events);
            }
            Piece::Start => {
                match &self.state {
                    // A repeated opening. A header that was begun before it leads nowhere.
                    State::Header { .. } => {}
                    _ => self.close_body(BodyEnd::ByModel, events),
                }
                self.next_header(true);
            }
            Piece::Message => self.message_marker(events),
            Piece::EndOfMessage if self.direct => {
                self.close_body(BodyEnd::ByModel, events);
                self.end_turn(events);
            }
            Piece::EndOfMessage => {
                self.close_body(BodyEnd::ByModel, events);
                self.next_header(false);
            }
            Piece::EndOfTurn => {
                self.close_body(BodyEnd::ByModel, events);
                self.end_turn(events);
            }
            Piece::Invisible | Piece::Bytes(_) => {}
        }
    }

    fn message_marker(&mut self, events: &mut Vec<OutputEvent>) {
        match &self.state {
            State::Header { text, .. } => {
                let recipient = match header::read(text) {
                    Reading::Header(recipient) => recipient,
                    Reading::Text { .. } => Recipient::User,
                };
                self.open_body(&recipient);
            }
            State::Reasoning | State::Answer => {
                self.resolve_split(events);
                match header::tail_recipient(&self.held) {
                    // Only a block shows that a call was meant; until then the text is held back.
                    Some(recipient @ Recipient::Tool(_)) => self.split = Some((recipient, String::new())),
                    Some(Recipient::Itself) if self.direct => {
                        self.held.clear();
                        self.close_body(BodyEnd::ByModel, events);
                        self.end_turn(events);
                    }
                    Some(recipient) => {
                        self.held.clear();
                        self.close_body(BodyEnd::ByModel, events);
                        self.open_body(&recipient);
                    }
                    None => {}
                }
            }
            // Models put stray ones into names.
            State::Tool(_) | State::Ended => {}
        }
    }

    /// Text of the current message, or of its header.
    fn text(&mut self, text: &str, events: &mut Vec<OutputEvent>) {
        if text.is_empty() || self.end.is_some() {
            return;
        }
        match &mut self.state {
            State::Header { text: header, opened } => {
                header.push_str(text);
                let opened = *opened;
                let Reading::Text { assistant, rest } = header::read(header) else { return };
                if opened && !assistant {
                    // Someone else's message: the model goes on with the conversation by itself.
                    self.end_turn(events);
                } else {
                    let rest = rest.to_owned();
                    self.open_body(&Recipient::User);
                    self.text(&rest, events);
                }
            }
            State::Reasoning | State::Answer if self.channels.is_some() => self.body_text(text, events),
            State::Answer => self.give_content(text, events),
            State::Reasoning | State::Ended => {}
            State::Tool(block) => {
                let mut found = Vec::new();
                block.push(text, &self.tools, &mut found);
                self.give_found(found, events);
            }
        }
    }

    /// Text of reasoning or answer: holds back what could be a header without its opening.
    fn body_text(&mut self, text: &str, events: &mut Vec<OutputEvent>) {
        if let Some((recipient, since)) = &mut self.split {
            since.push_str(text);
            if BLOCK_START.starts_with(since.as_str()) && since.len() < BLOCK_START.len() {
                return;
            }
            if since.starts_with(BLOCK_START) {
                let (recipient, since) = (recipient.clone(), since.clone());
                self.split = None;
                self.held.clear();
                self.close_body(BodyEnd::ByModel, events);
                self.open_body(&recipient);
                self.text(&since, events);
            } else {
                let since = std::mem::take(since);
                self.split = None;
                let held = std::mem::take(&mut self.held);
                self.give_body(&held, events);
                self.text(&since, events);
            }
            return;
        }
        let mut joined = std::mem::take(&mut self.held);
        joined.push_str(text);
        self.held = joined.split_off(header::tail_start(&joined));
        self.give_body(&joined, events);
    }

    /// A header without its opening was not followed by a block: it was text.
    fn resolve_split(&mut self, events: &mut Vec<OutputEvent>) {
        if let Some((_, since)) = self.split.take() {
            let held = std::mem::take(&mut self.held);
            self.give_body(&held, events);
            self.body_text(&since, events);
        }
    }

    /// Ends the current message.
    fn close_body(&mut self, end: BodyEnd, events: &mut Vec<OutputEvent>) {
        match &mut self.state {
            State::Header { text, opened } => {
                // No marker came: without an opening it was text, however it looks. Unless the output was cut off:
                // then what looks like a header was going to be one.
                let cut_header = end == BodyEnd::Cut && matches!(header::read(text), Reading::Header(_));
                if !*opened && !cut_header && !text.trim().is_empty() {
                    let text = std::mem::take(text);
                    self.open_body(&Recipient::User);
                    self.give_body(&text, events);
                    self.close_body(end, events);
                }
            }
            State::Reasoning | State::Answer => {
                self.resolve_split(events);
                let held = std::mem::take(&mut self.held);
                self.give_body(&held, events);
            }
            State::Tool(block) => {
                let mut found = Vec::new();
                block.close(end, &self.tools, &mut found);
                self.give_found(found, events);
            }
            State::Ended => {}
        }
        if self.end.is_none() {
            for joint in [&mut self.reasoning, &mut self.content] {
                if *joint == Joint::Text {
                    *joint = Joint::Break;
                }
            }
        }
    }

    fn next_header(&mut self, opened: bool) {
        if self.end.is_none() {
            self.state = State::Header { text: String::new(), opened };
        }
    }

    fn open_body(&mut self, recipient: &Recipient) {
        if self.end.is_none() {
            self.state = match recipient {
                Recipient::Itself => State::Reasoning,
                Recipient::User => State::Answer,
                Recipient::Tool(name) => State::Tool(Box::new(ToolBlock::new(name))),
            };
        }
    }

    fn end_turn(&mut self, events: &mut Vec<OutputEvent>) {
        if self.end.is_none() {
            self.flush_stops(events);
            self.end = Some(OutputEnd::EndOfTurn);
            self.state = State::Ended;
        }
    }

    fn give_body(&mut self, text: &str, events: &mut Vec<OutputEvent>) {
        match self.state {
            State::Reasoning if !text.is_empty() => {
                let text = self.reasoning.join(text);
                emit(text, OutputEvent::Reasoning, events);
            }
            State::Reasoning => {}
            _ => self.give_content(text, events),
        }
    }

    /// Content passes the stop strings: all of it is one text to them.
    fn give_content(&mut self, text: &str, events: &mut Vec<OutputEvent>) {
        if self.end.is_some() || text.is_empty() {
            return;
        }
        let filtered = self.stops.push(&self.content.join(text));
        emit(filtered.text, OutputEvent::Content, events);
        if let Some(index) = filtered.stopped {
            self.end = Some(OutputEnd::StopString(index));
            self.state = State::Ended;
        }
    }

    /// What could have become a stop string does not.
    fn flush_stops(&mut self, events: &mut Vec<OutputEvent>) {
        let rest = self.stops.flush();
        emit(rest, OutputEvent::Content, events);
    }

    fn give_found(&mut self, found: Vec<Found>, events: &mut Vec<OutputEvent>) {
        for found in found {
            if self.end.is_some() {
                return;
            }
            match found {
                Found::Start(name) => {
                    // Text before a call is given out before it.
                    self.flush_stops(events);
                    events.push(OutputEvent::ToolCallStart { index: self.calls, name });
                    self.calls += 1;
                }
                Found::Arguments(json_delta) => {
                    let index = self.calls.saturating_sub(1);
                    if let Some(OutputEvent::ToolCallArguments { json_delta: last, .. }) = events.last_mut() {
                        last.push_str(&json_delta);
                    } else {
                        events.push(OutputEvent::ToolCallArguments { index, json_delta });
                    }
                }
                Found::End(arguments) => {
                    events.push(OutputEvent::ToolCallEnd { index: self.calls.saturating_sub(1), arguments });
                }
                Found::Text(text) => self.give_content(&text, events),
            }
        }
    }
}

impl Joint {
    /// `text`, after a line break if it begins a further body.
    fn join(&mut self, text: &str) -> String {
        let separator = if *self == Joint::Break { "\n" } else { "" };
        *self = Joint::Text;
        format!("{separator}{text}")
    }
}

/// Adds text to the last event if that is of the same kind, else as a new event.
fn emit(text: String, kind: fn(String) -> OutputEvent, events: &mut Vec<OutputEvent>) {
    if text.is_empty() {
        return;
    }
    let event = kind(text);
    match (events.last_mut(), event) {
        (Some(OutputEvent::Content(last)), OutputEvent::Content(text))
        | (Some(OutputEvent::Reasoning(last)), OutputEvent::Reasoning(text)) => last.push_str(&text),
        (_, event) => events.push(event),
    }
}

/// Watches ids for the end of the output only: for the engine, which must know when to stop but not what was said.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    decoder: OutputDecoder,
}

impl StopMatcher {
    /// A matcher for one generation, under the same options as its [`OutputDecoder`], so that the two agree.
    pub fn new(tokenizer: Arc<Tokenizer>, options: &OutputOptions) -> Result<StopMatcher, TextError> {
        Ok(StopMatcher { decoder: OutputDecoder::new(tokenizer, options)? })
    }

    /// Takes the next id; true if the generation ends with it.
    pub fn push(&mut self, id: u32) -> bool {
        self.decoder.push(id);
        self.decoder.end.is_some()
    }
}

#[cfg(test)]
mod tests;
