//! The body of a message to a tool: a block of calls.
//!
//! ```text
//! <atem:function_calls>
//! <atem:invoke name="NAME">
//! <atem:parameter name="KEY">VALUE</atem:parameter>
//! </atem:invoke>
//! </atem:function_calls>
//! ```
//!
//! Calls are given out while they are written. A call is announced with its first parameter or its end, and not before:
//! until then what follows may turn out not to be a call, and then all of it is shown as text. Once announced it stays a
//! call; what does not belong into it is shown as text beside it. So nothing the model wrote is lost or makes an error.
//!
//! String values are raw up to the first closing tag and are streamed; other values are given out whole. A closing tag
//! inside a string of a JSON value is part of that string, unless the value then never ends.

use super::parameter_types::ToolTypes;
use crate::schema::Types;
use std::mem;

/// Who takes what the parser finds.
pub(crate) trait Calls {
    /// Whether the arguments are read: else no JSON is made, and no text of them is kept.
    const READS: bool;
    /// A call of this tool begins.
    fn start(&mut self, name: &str);
    /// A piece of the JSON of its arguments.
    fn arguments(&mut self, json: &str);
    /// The call ends; these are all its arguments.
    fn end(&mut self, arguments: &str);
    /// Not part of a call.
    fn text(&mut self, text: &str);
}

/// How a body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyEnd {
    /// The model ended it: what is unfinished is meant so.
    ByModel,
    /// It was cut off.
    Cut,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Before the block.
    Outside,
    /// In the block, between calls.
    Block,
    /// In a call, between parameters. `stray`: text that does not belong there has begun.
    Call { stray: bool },
    /// In a value.
    Value(ParameterValue),
    /// After the block.
    After,
    /// Not a block: the rest is text.
    Text,
}

/// A value that is being read.
#[derive(Clone, Copy, Debug)]
struct ParameterValue {
    types: Types,
    /// The call has a value of this key: it becomes text beside the call.
    repeated: bool,
    quotes: Quotes,
    /// Where in its kept text a closing tag was passed over since it stands inside a JSON string.
    passed_over: Option<usize>,
}

/// Is JSON text inside a string?
#[derive(Clone, Copy, Debug, Default)]
struct Quotes {
    open: bool,
    escaped: bool,
}

impl Quotes {
    fn push(&mut self, text: &str) {
        for byte in text.bytes() {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.open => self.escaped = true,
                b'"' => self.open = !self.open,
                _ => {}
            }
        }
    }
}

/// Parser of the bodies of a generation, one after the other. Its buffers are made once and used for all of them.
#[derive(Clone, Debug)]
pub(crate) struct ToolBlock {
    /// From the message header.
    recipient: String,
    phase: Phase,
    /// Text that is not consumed yet.
    buffer: String,
    /// Consumed text that is not given out yet in any form.
    raw: String,
    /// Resolved name of the call that is open.
    name: String,
    announced: bool,
    /// Keys of the call so far, each with a line break behind it, which no key has.
    keys: String,
    /// Key of the value that is being read.
    key: String,
    /// Text of the value so far, if it is not streamed.
    value: String,
    /// Name in the tag that was read last.
    tag_name: String,
    arguments: String,
    calls: usize,
    /// Every closing tag closes, also those inside JSON strings.
    any_close: bool,
}

const BLOCK_OPEN: &str = "<atem:function_calls>";
const BLOCK_CLOSE: &str = "</atem:function_calls>";
const CALL_OPEN: &str = "<atem:invoke name=\"";
const CALL_CLOSE: &str = "</atem:invoke>";
const PARAMETER_OPEN: &str = "<atem:parameter name=\"";
const PARAMETER_CLOSE: &str = "</atem:parameter>";
const OPEN_END: &str = "\">";

/// What a body that is a block must begin with.
pub(crate) const BLOCK_START: &str = "<atem:";

/// Longest name in a tag, in bytes.
const MAX_NAME: usize = 512;

/// What the buffer begins with.
enum Head {
    /// The literal with this index.
    Literal(usize),
    /// Perhaps one of the literals: more text will tell.
    Open,
    /// None of them.
    Other,
}

/// A tag with a name, at the start of the buffer.
enum Tag {
    /// It has so many bytes, and its name is in `tag_name`.
    Whole(usize),
    Open,
    Broken,
}

impl ToolBlock {
    /// A parser whose buffers hold `room` bytes each from the start.
    pub(crate) fn with_room(room: usize) -> ToolBlock {
        let buffer = || String::with_capacity(room);
        ToolBlock {
            recipient: buffer(),
            phase: Phase::Text,
            buffer: buffer(),
            raw: buffer(),
            name: buffer(),
            announced: false,
            keys: buffer(),
            key: buffer(),
            value: buffer(),
            tag_name: buffer(),
            arguments: String::new(),
            calls: 0,
            any_close: false,
        }
    }

    /// A body begins.
    pub(crate) fn begin(&mut self, recipient: &str) {
        self.recipient.clear();
        self.recipient.push_str(recipient);
        self.phase = Phase::Outside;
        self.buffer.clear();
        self.raw.clear();
        self.announced = false;
        self.calls = 0;
        self.any_close = false;
    }

    pub(crate) fn push<O: Calls>(&mut self, text: &str, tools: &ToolTypes, out: &mut O) {
        self.buffer.push_str(text);
        while self.step(tools, out) {}
    }

    /// The body ends.
    pub(crate) fn close<O: Calls>(&mut self, end: BodyEnd, tools: &ToolTypes, out: &mut O) {
        if end == BodyEnd::ByModel && self.back_to_first_close(out) {
            while self.step(tools, out) {}
        }
        match (self.phase, end) {
            (Phase::Value(_), BodyEnd::ByModel) => {
                // What is still here could begin a closing tag. More than its first character is no accident.
                if self.buffer.len() == 1 {
                    self.take_value(1, out);
                }
                self.end_value(out);
                self.end_call(out);
            }
            (phase, BodyEnd::ByModel) => {
                let in_call = matches!(phase, Phase::Call { .. }) && self.announced;
                // A closing tag that is there only in part is not worth showing.
                let closing = (in_call && CALL_CLOSE.starts_with(&self.buffer))
                    || ((in_call || self.calls > 0) && BLOCK_CLOSE.starts_with(&self.buffer));
                if !closing {
                    self.give_text(out);
                }
                if in_call {
                    self.end_call(out);
                }
            }
            // A call that was cut off is not ended: its arguments may be half a value. And what was the beginning of a
            // call until it was cut off is not shown as text.
            (_, BodyEnd::Cut) => {}
        }
        self.buffer.clear();
        self.raw.clear();
        self.phase = Phase::Text;
    }

    /// Consumes something from the buffer; false if more text is needed.
    fn step<O: Calls>(&mut self, tools: &ToolTypes, out: &mut O) -> bool {
        match self.phase {
            Phase::Text => {
                self.give_text(out);
                false
            }
            Phase::Outside | Phase::After => {
                self.skip_space();
                match self.head(&[BLOCK_OPEN, CALL_OPEN]) {
                    Head::Literal(0) => {
                        self.consume(BLOCK_OPEN.len());
                        self.phase = Phase::Block;
                        true
                    }
                    Head::Literal(_) => {
                        self.phase = Phase::Block;
                        true
                    }
                    Head::Open => false,
                    Head::Other => self.degrade(),
                }
            }
            Phase::Block => {
                self.skip_space();
                match self.head(&[CALL_OPEN, BLOCK_CLOSE]) {
                    Head::Literal(0) => match self.tag(CALL_OPEN) {
                        Tag::Whole(len) => {
                            self.consume(len);
                            self.resolve(tools);
                            self.announced = false;
                            self.keys.clear();
                            self.arguments.clear();
                            self.phase = Phase::Call { stray: false };
                            true
                        }
                        Tag::Open => false,
                        Tag::Broken => self.degrade(),
                    },
                    Head::Literal(_) if self.calls > 0 => {
                        self.consume(BLOCK_CLOSE.len());
                        self.raw.clear();
                        self.phase = Phase::After;
                        true
                    }
                    Head::Open => false,
                    Head::Literal(_) | Head::Other => self.degrade(),
                }
            }
            Phase::Call { stray } => {
                if !stray {
                    self.skip_space();
                }
                self.step_call(tools, out)
            }
            Phase::Value(_) => self.step_value(out),
        }
    }

    fn step_call<O: Calls>(&mut self, tools: &ToolTypes, out: &mut O) -> bool {
        match self.head(&[PARAMETER_OPEN, CALL_CLOSE, BLOCK_CLOSE, CALL_OPEN]) {
            Head::Literal(0) => match self.tag(PARAMETER_OPEN) {
                Tag::Whole(len) => {
                    self.consume(len);
                    self.begin_value(tools, out);
                    true
                }
                Tag::Open => false,
                Tag::Broken => self.stray(out),
            },
            Head::Literal(1) => {
                self.consume(CALL_CLOSE.len());
                self.announce(out);
                self.end_call(out);
                true
            }
            // The call was not closed. With parameters it is clear enough where it ended.
            Head::Literal(_) if self.announced => {
                self.end_call(out);
                true
            }
            Head::Open => false,
            Head::Literal(_) | Head::Other => self.stray(out),
        }
    }

    fn step_value<O: Calls>(&mut self, out: &mut O) -> bool {
        if let Some(end) = self.buffer.find(PARAMETER_CLOSE) {
            self.take_value(end, out);
            self.buffer.drain(..PARAMETER_CLOSE.len());
            if !self.pass_over_close() {
                self.end_value(out);
            }
            return true;
        }
        let held =
            (1..PARAMETER_CLOSE.len()).rev().find(|len| self.buffer.ends_with(&PARAMETER_CLOSE[..*len]));
        let safe = self.buffer.len() - held.unwrap_or(0);
        self.take_value(safe, out);
        false
    }

    /// A closing tag that stands inside a string of a JSON value is text of it.
    fn pass_over_close(&mut self) -> bool {
        let any_close = self.any_close;
        let Phase::Value(value) = &mut self.phase else { return false };
        if any_close || value.types.allows_text() || !value.quotes.open {
            return false;
        }
        value.passed_over.get_or_insert(self.value.len());
        self.value.push_str(PARAMETER_CLOSE);
        value.quotes.push(PARAMETER_CLOSE);
        true
    }

    /// The body ends in a value of which a closing tag was passed over: then it was not inside a string after all.
    fn back_to_first_close<O: Calls>(&mut self, out: &mut O) -> bool {
        let Phase::Value(value) = &mut self.phase else { return false };
        let Some(at) = value.passed_over.take() else { return false };
        self.buffer.insert_str(0, &self.value[at + PARAMETER_CLOSE.len()..]);
        self.value.truncate(at);
        self.any_close = true;
        self.end_value(out);
        true
    }

    /// Text in a call that is no tag: without a parameter so far it is no call, else the text stands beside the call.
    fn stray<O: Calls>(&mut self, out: &mut O) -> bool {
        if !self.announced {
            return self.degrade();
        }
        let first = self.buffer.chars().next().map_or(0, char::len_utf8);
        let end = self.buffer[first..].find('<').map_or(self.buffer.len(), |at| first + at);
        if end == 0 {
            return false;
        }
        out.text(&self.buffer[..end]);
        self.buffer.drain(..end);
        self.phase = Phase::Call { stray: true };
        true
    }

    /// It is not a block after all.
    fn degrade(&mut self) -> bool {
        self.phase = Phase::Text;
        true
    }

    fn begin_value<O: Calls>(&mut self, tools: &ToolTypes, out: &mut O) {
        self.announce(out);
        mem::swap(&mut self.key, &mut self.tag_name);
        self.value.clear();
        let repeated = self.keys.split_terminator('\n').any(|key| key == self.key);
        let types = tools.parameter(&self.name, &self.key);
        if !repeated {
            if O::READS {
                let separator = if self.keys.is_empty() { '{' } else { ',' };
                let quote = if types.is_text() { "\"" } else { "" };
                let opening = format!("{separator}{}:{quote}", json_string(&self.key));
                self.give_arguments(&opening, out);
            }
            self.keys.push_str(&self.key);
            self.keys.push('\n');
        }
        self.phase =
            Phase::Value(ParameterValue { types, repeated, quotes: Quotes::default(), passed_over: None });
    }

    /// Takes so many bytes of the buffer as text of the value.
    fn take_value<O: Calls>(&mut self, len: usize, out: &mut O) {
        let Phase::Value(value) = &mut self.phase else { return };
        let text = &self.buffer[..len];
        if value.types.is_text() && !value.repeated {
            if O::READS && !text.is_empty() {
                let quoted = json_string(text);
                self.give_arguments(&quoted[1..quoted.len() - 1], out);
            }
        } else {
            value.quotes.push(text);
            // Where nobody reads the JSON only what may become text beside the call is kept.
            if O::READS || value.repeated || value.passed_over.is_some() {
                self.value.push_str(text);
            }
        }
        self.buffer.drain(..len);
    }

    fn end_value<O: Calls>(&mut self, out: &mut O) {
        let Phase::Value(ParameterValue { types, repeated, .. }) = self.phase else { return };
        self.phase = Phase::Call { stray: false };
        if repeated {
            // The first value is given out already, and an object has a key once.
            for part in [PARAMETER_OPEN, &self.key, OPEN_END, &self.value, PARAMETER_CLOSE] {
                out.text(part);
            }
        } else if types.is_text() {
            self.give_arguments("\"", out);
        } else if O::READS {
            let json = types.to_json(&self.value);
            self.give_arguments(&json, out);
        }
    }

    fn announce<O: Calls>(&mut self, out: &mut O) {
        if !self.announced {
            self.announced = true;
            self.raw.clear();
            out.start(&self.name);
        }
    }

    fn end_call<O: Calls>(&mut self, out: &mut O) {
        self.give_arguments(if self.keys.is_empty() { "{}" } else { "}" }, out);
        out.end(&self.arguments);
        self.arguments.clear();
        self.calls += 1;
        self.announced = false;
        self.raw.clear();
        self.phase = Phase::Block;
    }

    fn give_arguments<O: Calls>(&mut self, json: &str, out: &mut O) {
        if O::READS {
            self.arguments.push_str(json);
            out.arguments(json);
        }
    }

    /// Gives out all that was not given out, as text; white space alone is nothing.
    fn give_text<O: Calls>(&mut self, out: &mut O) {
        let is_text = |text: &str| !text.trim().is_empty();
        if matches!(self.phase, Phase::Text) || is_text(&self.raw) || is_text(&self.buffer) {
            out.text(&self.raw);
            out.text(&self.buffer);
        }
        self.raw.clear();
        self.buffer.clear();
    }

    fn consume(&mut self, len: usize) {
        if !self.announced {
            self.raw.push_str(&self.buffer[..len]);
        }
        self.buffer.drain(..len);
    }

    fn skip_space(&mut self) {
        let len = self.buffer.len() - self.buffer.trim_start().len();
        if len > 0 {
            self.consume(len);
        }
    }

    fn head(&self, literals: &[&str]) -> Head {
        if let Some(index) = literals.iter().position(|literal| self.buffer.starts_with(literal)) {
            return Head::Literal(index);
        }
        if literals.iter().any(|literal| literal.starts_with(&self.buffer)) {
            Head::Open
        } else {
            Head::Other
        }
    }

    fn tag(&mut self, open: &str) -> Tag {
        let rest = &self.buffer[open.len()..];
        let end = rest.find(OPEN_END);
        let name = &rest[..end.unwrap_or(rest.len())];
        // While the end is open, its quotation mark may be part of what is there.
        if name.len() > MAX_NAME + usize::from(end.is_none()) || name.contains('\n') {
            return Tag::Broken;
        }
        match end {
            Some(end) => {
                self.tag_name.clear();
                name.split("<|message|>").for_each(|part| self.tag_name.push_str(part));
                Tag::Whole(open.len() + end + OPEN_END.len())
            }
            None => Tag::Open,
        }
    }

    /// The tool that is meant: by the tag, else by the message header, else what the tag says.
    fn resolve(&mut self, tools: &ToolTypes) {
        let name = tools.resolve(&self.tag_name).or_else(|| tools.resolve(&self.recipient));
        self.name.clear();
        self.name.push_str(name.unwrap_or(&self.tag_name));
    }
}

fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
