//! The state machine that reads the model's output: what each id is, to which message its text belongs, where all ends.

use super::event::{OutputChannel, OutputEnd, OutputMode, OutputOptions};
use super::header::{self, Reading, Recipient};
use super::parameter_types::ToolTypes;
use super::sink::Sink;
use super::stops::StopStrings;
use super::tool_block::{BLOCK_START, BodyEnd, Calls, ToolBlock};
use crate::error::TextError;
use crate::utf8::Utf8Joiner;
use crate::{ChannelTokens, Markers, TokenKind, Tokenizer};
use std::mem;
use std::sync::Arc;

/// Reads one generation. Buffers are fields, and used again and again.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    tokenizer: Arc<Tokenizer>,
    /// `None`: raw mode.
    channels: Option<ChannelTokens>,
    markers: Markers,
    /// The prompt opened the answer, so that the model does not reason: the turn ends with that answer.
    direct: bool,
    /// Nothing in a body can end the output: only headers and markers are read.
    headers_only: bool,
    tools: Arc<ToolTypes>,
    joiner: Utf8Joiner,
    /// Text of the id that is being read.
    text: String,
    state: State,
    /// Text of the header, in [`State::Header`].
    header: String,
    /// The body, in [`State::Tool`].
    block: ToolBlock,
    /// Text of the body that could be the header of a message whose opening is missing: ` to=NAME`.
    held: String,
    /// A marker ended such a header; then this is the text since.
    split: Option<String>,
    /// The buffer of `split` while it is not in use.
    spare: String,
    out: Output,
    reasoning_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// `opened`: after `<|start|>`.
    Header {
        opened: bool,
    },
    Reasoning,
    Answer,
    Tool,
    Ended,
}

/// What has left the machine, and whether that ended it.
#[derive(Clone, Debug)]
struct Output {
    stops: StopStrings,
    /// A further body of the kind began: a line break goes before its text.
    reasoning: Joint,
    content: Joint,
    calls: usize,
    end: Option<OutputEnd>,
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

/// Bytes that a watch's buffer for text of a header holds from the start: a recipient and more space than models write.
const HEADER_ROOM: usize = 2 * header::MAX_RECIPIENT;

/// Bytes of each buffer of a watch's tool block.
const BLOCK_ROOM: usize = 4096;

impl Machine {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, options: &OutputOptions) -> Result<Machine, TextError> {
        let (chat, state, markers) = match options.mode {
            OutputMode::Chat => (true, State::Header { opened: false }, Markers::Hide),
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
        Ok(Machine {
            tokenizer,
            channels,
            markers,
            direct: options.mode == OutputMode::ChatAnswer,
            headers_only: false,
            tools: Arc::new(ToolTypes::new(&options.tools)),
            joiner: Utf8Joiner::default(),
            text: String::new(),
            state,
            header: String::new(),
            block: ToolBlock::with_room(0),
            held: String::new(),
            split: None,
            spare: String::new(),
            out: Output {
                stops: StopStrings::new(&options.stop)?,
                reasoning: Joint::Nothing,
                content: Joint::Nothing,
                calls: 0,
                end: None,
            },
            reasoning_tokens: 0,
        })
    }

    /// The machine for a sink that does not read. `reads_bodies`: something in a body may end the output.
    pub(super) fn for_watching(mut self, reads_bodies: bool) -> Machine {
        self.headers_only = !reads_bodies;
        self.with_room()
    }

    /// With buffers that need not grow. Only before the first id.
    pub(super) fn with_room(mut self) -> Machine {
        // A byte that is no character makes three.
        self.text.reserve(3 * self.tokenizer.longest_token() + 4);
        self.header.reserve(HEADER_ROOM + self.text.capacity());
        if !self.headers_only {
            self.held.reserve(HEADER_ROOM + self.text.capacity());
            self.spare.reserve(HEADER_ROOM + self.text.capacity());
            if self.channels.is_some() {
                self.block = ToolBlock::with_room(BLOCK_ROOM);
            }
        }
        self
    }

    /// Takes the next generated id. After the end ids are ignored.
    pub(super) fn push<S: Sink>(&mut self, id: u32, sink: &mut S) {
        if self.out.end.is_some() {
            return;
        }
        if self.state == State::Reasoning {
            self.reasoning_tokens += 1;
        }
        let tokenizer = self.tokenizer.clone();
        match self.piece_of(&tokenizer, id) {
            Piece::Bytes(bytes) => self.push_bytes(bytes, sink),
            marker => self.push_marker(&marker, sink),
        }
    }

    /// The generation ends here, whatever the reason: gives out what was held back.
    pub(super) fn finish<S: Sink>(&mut self, sink: &mut S) {
        if self.out.end.is_none() {
            self.flush_bytes(sink);
            self.close_body(BodyEnd::Cut, sink);
            if self.out.end.is_none() {
                self.out.flush(sink);
                self.state = State::Ended;
            }
        }
    }

    pub(super) fn end(&self) -> Option<OutputEnd> {
        self.out.end
    }

    pub(super) fn channel(&self) -> OutputChannel {
        match self.state {
            _ if self.out.end.is_some() => OutputChannel::Ended,
            State::Header { .. } => OutputChannel::Header,
            State::Reasoning => OutputChannel::Reasoning,
            State::Answer => OutputChannel::Answer,
            State::Tool => OutputChannel::Tool,
            State::Ended => OutputChannel::Ended,
        }
    }

    pub(super) fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    pub(super) fn tool_calls(&self) -> usize {
        self.out.calls
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

    /// Does text tell anything here?
    fn reads_text(&self) -> bool {
        !self.headers_only || matches!(self.state, State::Header { .. })
    }

    pub(super) fn push_bytes<S: Sink>(&mut self, bytes: &[u8], sink: &mut S) {
        if !self.reads_text() {
            return;
        }
        let mut text = mem::take(&mut self.text);
        text.clear();
        self.joiner.push(bytes, &mut text);
        self.text(&text, sink);
        self.text = text;
    }

    fn flush_bytes<S: Sink>(&mut self, sink: &mut S) {
        let mut text = mem::take(&mut self.text);
        text.clear();
        self.joiner.flush(&mut text);
        if self.reads_text() {
            self.text(&text, sink);
        }
        self.text = text;
    }

    fn push_marker<S: Sink>(&mut self, marker: &Piece<'_>, sink: &mut S) {
        self.flush_bytes(sink);
        if self.out.end.is_some() {
            return;
        }
        match marker {
            Piece::Start if self.direct && self.state == State::Answer => {
                self.close_body(BodyEnd::ByModel, sink);
                self.end_turn(sink);
            }
            Piece::Start => {
                match self.state {
                    // A repeated opening. A header that was begun before it leads nowhere.
                    State::Header { .. } => {}
                    _ => self.close_body(BodyEnd::ByModel, sink),
                }
                self.next_header(true);
            }
            Piece::Message => self.message_marker(sink),
            Piece::EndOfMessage if self.direct => {
                self.close_body(BodyEnd::ByModel, sink);
                self.end_turn(sink);
            }
            Piece::EndOfMessage => {
                self.close_body(BodyEnd::ByModel, sink);
                self.next_header(false);
            }
            Piece::EndOfTurn => {
                self.close_body(BodyEnd::ByModel, sink);
                self.end_turn(sink);
            }
            Piece::Invisible | Piece::Bytes(_) => {}
        }
    }

    fn message_marker<S: Sink>(&mut self, sink: &mut S) {
        match self.state {
            State::Header { .. } => {
                let header = mem::take(&mut self.header);
                self.open_body(match header::read(&header) {
                    Reading::Header(recipient) => recipient,
                    Reading::Text { .. } => Recipient::User,
                });
                self.header = header;
            }
            State::Reasoning | State::Answer => {
                self.resolve_split(sink);
                let mut held = mem::take(&mut self.held);
                match header::tail_recipient(&held) {
                    // Only a block shows that a call was meant; until then the text is held back.
                    Some(Recipient::Tool(_)) => self.split = Some(mem::take(&mut self.spare)),
                    Some(Recipient::Itself) if self.direct => {
                        self.close_body(BodyEnd::ByModel, sink);
                        self.end_turn(sink);
                        held.clear();
                    }
                    Some(recipient) => {
                        self.close_body(BodyEnd::ByModel, sink);
                        self.open_body(recipient);
                        held.clear();
                    }
                    None => {}
                }
                self.held = held;
            }
            // Models put stray ones into names.
            State::Tool | State::Ended => {}
        }
    }

    /// Text of the current message, or of its header.
    fn text<S: Sink>(&mut self, text: &str, sink: &mut S) {
        if text.is_empty() || self.out.end.is_some() {
            return;
        }
        match self.state {
            State::Header { opened } => {
                self.header.push_str(text);
                let header = mem::take(&mut self.header);
                match header::read(&header) {
                    Reading::Header(_) => {}
                    // Someone else's message: the model goes on with the conversation by itself.
                    Reading::Text { assistant: false, .. } if opened => self.end_turn(sink),
                    Reading::Text { rest, .. } => {
                        self.open_body(Recipient::User);
                        if !self.headers_only {
                            self.text(rest, sink);
                        }
                    }
                }
                self.header = header;
            }
            State::Reasoning | State::Answer if self.channels.is_some() => self.body_text(text, sink),
            State::Answer => self.out.content(text, sink),
            State::Reasoning | State::Ended => {}
            State::Tool => self.block.push(text, &self.tools, &mut Given { out: &mut self.out, sink }),
        }
    }

    /// Text of reasoning or answer: holds back what could be a header without its opening.
    fn body_text<S: Sink>(&mut self, text: &str, sink: &mut S) {
        let Some(mut since) = self.split.take() else {
            self.held.push_str(text);
            let safe = header::tail_start(&self.held);
            self.out.body(self.state, &self.held[..safe], sink);
            self.held.drain(..safe);
            return;
        };
        since.push_str(text);
        if BLOCK_START.starts_with(&since) && since.len() < BLOCK_START.len() {
            self.split = Some(since);
            return;
        }
        if since.starts_with(BLOCK_START) {
            let mut held = mem::take(&mut self.held);
            self.close_body(BodyEnd::ByModel, sink);
            if let Some(recipient) = header::tail_recipient(&held) {
                self.open_body(recipient);
            }
            held.clear();
            self.held = held;
        } else {
            self.out.body(self.state, &self.held, sink);
            self.held.clear();
        }
        self.text(&since, sink);
        self.put_back(since);
    }

    /// A header without its opening was not followed by a block: it was text.
    fn resolve_split<S: Sink>(&mut self, sink: &mut S) {
        if let Some(since) = self.split.take() {
            self.out.body(self.state, &self.held, sink);
            self.held.clear();
            self.body_text(&since, sink);
            self.put_back(since);
        }
    }

    fn put_back(&mut self, mut since: String) {
        since.clear();
        self.spare = since;
    }

    /// Ends the current message.
    fn close_body<S: Sink>(&mut self, end: BodyEnd, sink: &mut S) {
        match self.state {
            State::Header { opened } => {
                // No marker came: without an opening it was text, however it looks. Unless the output was cut off:
                // then what looks like a header was going to be one.
                let cut_header =
                    end == BodyEnd::Cut && matches!(header::read(&self.header), Reading::Header(_));
                if !opened && !cut_header && !self.header.trim().is_empty() {
                    self.open_body(Recipient::User);
                    self.out.body(self.state, &self.header, sink);
                    self.close_body(end, sink);
                }
            }
            State::Reasoning | State::Answer => {
                self.resolve_split(sink);
                self.out.body(self.state, &self.held, sink);
                self.held.clear();
            }
            State::Tool => self.block.close(end, &self.tools, &mut Given { out: &mut self.out, sink }),
            State::Ended => {}
        }
        if self.out.end.is_none() {
            for joint in [&mut self.out.reasoning, &mut self.out.content] {
                if *joint == Joint::Text {
                    *joint = Joint::Break;
                }
            }
        }
    }

    fn next_header(&mut self, opened: bool) {
        if self.out.end.is_none() {
            self.state = State::Header { opened };
            self.header.clear();
        }
    }

    fn open_body(&mut self, recipient: Recipient<'_>) {
        if self.out.end.is_none() {
            self.state = match recipient {
                Recipient::Itself => State::Reasoning,
                Recipient::User => State::Answer,
                Recipient::Tool(name) => {
                    if !self.headers_only {
                        self.block.begin(name);
                    }
                    State::Tool
                }
            };
        }
    }

    fn end_turn<S: Sink>(&mut self, sink: &mut S) {
        if self.out.end.is_none() {
            self.out.flush(sink);
            self.out.end = Some(OutputEnd::EndOfTurn);
            self.state = State::Ended;
        }
    }
}

impl Output {
    fn body<S: Sink>(&mut self, state: State, text: &str, sink: &mut S) {
        if state != State::Reasoning {
            self.content(text, sink);
        } else if !text.is_empty() {
            if let Some(separator) = self.reasoning.join() {
                sink.reasoning(separator);
            }
            sink.reasoning(text);
        }
    }

    /// Content passes the stop strings: all of it is one text to them.
    fn content<S: Sink>(&mut self, text: &str, sink: &mut S) {
        if self.end.is_some() || text.is_empty() {
            return;
        }
        let separator = self.content.join();
        for text in separator.into_iter().chain([text]) {
            let stopped = if S::READS {
                self.stops.push(text, |text| sink.content(text))
            } else {
                self.stops.watch(text)
            };
            if let Some(index) = stopped {
                self.end = Some(OutputEnd::StopString(index));
                return;
            }
        }
    }

    /// What could have become a stop string does not.
    fn flush<S: Sink>(&mut self, sink: &mut S) {
        self.stops.flush(|text| sink.content(text));
    }
}

/// What a tool block gives, on its way out. After a stop string nothing leaves any more.
struct Given<'a, S> {
    out: &'a mut Output,
    sink: &'a mut S,
}

impl<S: Sink> Calls for Given<'_, S> {
    const READS: bool = S::READS;

    fn start(&mut self, name: &str) {
        if self.out.end.is_none() {
            // Text before a call is given out before it.
            self.out.flush(self.sink);
            self.sink.call_start(self.out.calls, name);
            self.out.calls += 1;
        }
    }

    fn arguments(&mut self, json: &str) {
        if self.out.end.is_none() {
            self.sink.call_arguments(self.out.calls.saturating_sub(1), json);
        }
    }

    fn end(&mut self, arguments: &str) {
        if self.out.end.is_none() {
            self.sink.call_end(self.out.calls.saturating_sub(1), arguments);
        }
    }

    fn text(&mut self, text: &str) {
        self.out.content(text, self.sink);
    }
}

impl Joint {
    /// Text comes: the line break that goes before it, if it begins a further body.
    fn join(&mut self) -> Option<&'static str> {
        (mem::replace(self, Joint::Text) == Joint::Break).then_some("\n")
    }
}
