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

/// What the parser found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// A call of this tool begins.
    Start(String),
    /// A piece of the JSON of its arguments.
    Arguments(String),
    /// The call ends; these are all its arguments.
    End(String),
    /// Not part of a call.
    Text(String),
}

/// How a body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyEnd {
    /// The model ended it: what is unfinished is meant so.
    ByModel,
    /// It was cut off.
    Cut,
}

#[derive(Clone, Debug)]
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
#[derive(Clone, Debug)]
struct ParameterValue {
    types: Types,
    /// Text so far, of a value that is not streamed.
    raw: String,
    repeated_key: Option<String>,
    quotes: Quotes,
    /// Where in the text a closing tag was passed over since it stands inside a JSON string.
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

/// Parser of one body.
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
    keys: Vec<String>,
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
    Whole { name: String, len: usize },
    Open,
    Broken,
}

impl ToolBlock {
    pub(crate) fn new(recipient: &str) -> ToolBlock {
        ToolBlock {
            recipient: recipient.to_owned(),
            phase: Phase::Outside,
            buffer: String::new(),
            raw: String::new(),
            name: String::new(),
            announced: false,
            keys: Vec::new(),
            arguments: String::new(),
            calls: 0,
            any_close: false,
        }
    }

    pub(crate) fn push(&mut self, text: &str, tools: &ToolTypes, found: &mut Vec<Found>) {
        self.buffer.push_str(text);
        while self.step(tools, found) {}
    }

    /// The body ends.
    pub(crate) fn close(&mut self, end: BodyEnd, tools: &ToolTypes, found: &mut Vec<Found>) {
        if end == BodyEnd::ByModel && self.back_to_first_close(found) {
            while self.step(tools, found) {}
        }
        match (&self.phase, end) {
            (Phase::Value(_), BodyEnd::ByModel) => {
                // What is still here could begin a closing tag. More than its first character is no accident.
                let rest = std::mem::take(&mut self.buffer);
                if rest.len() == 1 {
                    self.value_text(&rest, found);
                }
                self.end_value(found);
                self.end_call(found);
            }
            (phase, BodyEnd::ByModel) => {
                let in_call = matches!(phase, Phase::Call { .. }) && self.announced;
                // A closing tag that is there only in part is not worth showing.
                let closing = (in_call && CALL_CLOSE.starts_with(&self.buffer))
                    || ((in_call || self.calls > 0) && BLOCK_CLOSE.starts_with(&self.buffer));
                if !closing {
                    self.give_text(found);
                }
                if in_call {
                    self.end_call(found);
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
    fn step(&mut self, tools: &ToolTypes, found: &mut Vec<Found>) -> bool {
        match &self.phase {
            Phase::Text => {
                self.give_text(found);
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
                        Tag::Whole { name, len } => {
                            self.consume(len);
                            self.name = self.resolve(&name, tools);
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
                self.step_call(tools, found)
            }
            Phase::Value(_) => self.step_value(found),
        }
    }

    fn step_call(&mut self, tools: &ToolTypes, found: &mut Vec<Found>) -> bool {
        match self.head(&[PARAMETER_OPEN, CALL_CLOSE, BLOCK_CLOSE, CALL_OPEN]) {
            Head::Literal(0) => match self.tag(PARAMETER_OPEN) {
                Tag::Whole { name, len } => {
                    self.consume(len);
                    self.begin_value(name, tools, found);
                    true
                }
                Tag::Open => false,
                Tag::Broken => self.stray(found),
            },
            Head::Literal(1) => {
                self.consume(CALL_CLOSE.len());
                self.announce(found);
                self.end_call(found);
                true
            }
            // The call was not closed. With parameters it is clear enough where it ended.
            Head::Literal(_) if self.announced => {
                self.end_call(found);
                true
            }
            Head::Open => false,
            Head::Literal(_) | Head::Other => self.stray(found),
        }
    }

    fn step_value(&mut self, found: &mut Vec<Found>) -> bool {
        if let Some(end) = self.buffer.find(PARAMETER_CLOSE) {
            let value: String = self.buffer.drain(..end).collect();
            self.value_text(&value, found);
            self.buffer.drain(..PARAMETER_CLOSE.len());
            if !self.pass_over_close() {
                self.end_value(found);
            }
            return true;
        }
        let held =
            (1..PARAMETER_CLOSE.len()).rev().find(|len| self.buffer.ends_with(&PARAMETER_CLOSE[..*len]));
        let safe = self.buffer.len() - held.unwrap_or(0);
        let value: String = self.buffer.drain(..safe).collect();
        self.value_text(&value, found);
        false
    }

    /// A closing tag that stands inside a string of a JSON value is text of it.
    fn pass_over_close(&mut self) -> bool {
        let any_close = self.any_close;
        let Phase::Value(value) = &mut self.phase else { return false };
        if any_close || value.types.allows_text() || !value.quotes.open {
            return false;
        }
        value.passed_over.get_or_insert(value.raw.len());
        value.raw.push_str(PARAMETER_CLOSE);
        value.quotes.push(PARAMETER_CLOSE);
        true
    }

    /// The body ends in a value of which a closing tag was passed over: then it was not inside a string after all.
    fn back_to_first_close(&mut self, found: &mut Vec<Found>) -> bool {
        let Phase::Value(value) = &mut self.phase else { return false };
        let Some(at) = value.passed_over.take() else { return false };
        let rest = value.raw.split_off(at);
        self.buffer.insert_str(0, &rest[PARAMETER_CLOSE.len()..]);
        self.any_close = true;
        self.end_value(found);
        true
    }

    /// Text in a call that is no tag: without a parameter so far it is no call, else the text stands beside the call.
    fn stray(&mut self, found: &mut Vec<Found>) -> bool {
        if !self.announced {
            return self.degrade();
        }
        let first = self.buffer.chars().next().map_or(0, char::len_utf8);
        let end = self.buffer[first..].find('<').map_or(self.buffer.len(), |at| first + at);
        let text: String = self.buffer.drain(..end).collect();
        if text.is_empty() {
            return false;
        }
        found.push(Found::Text(text));
        self.phase = Phase::Call { stray: true };
        true
    }

    /// It is not a block after all.
    fn degrade(&mut self) -> bool {
        self.phase = Phase::Text;
        true
    }

    fn begin_value(&mut self, key: String, tools: &ToolTypes, found: &mut Vec<Found>) {
        self.announce(found);
        let repeated_key = self.keys.contains(&key).then(|| key.clone());
        let types = tools.parameter(&self.name, &key);
        if repeated_key.is_none() {
            let separator = if self.keys.is_empty() { '{' } else { ',' };
            let quote = if types.is_text() { "\"" } else { "" };
            self.give_arguments(&format!("{separator}{}:{quote}", json_string(&key)), found);
            self.keys.push(key);
        }
        self.phase = Phase::Value(ParameterValue {
            types,
            raw: String::new(),
            repeated_key,
            quotes: Quotes::default(),
            passed_over: None,
        });
    }

    fn value_text(&mut self, text: &str, found: &mut Vec<Found>) {
        let Phase::Value(value) = &mut self.phase else { return };
        if value.types.is_text() && value.repeated_key.is_none() {
            if !text.is_empty() {
                let quoted = json_string(text);
                self.give_arguments(&quoted[1..quoted.len() - 1], found);
            }
        } else {
            value.raw.push_str(text);
            value.quotes.push(text);
        }
    }

    fn end_value(&mut self, found: &mut Vec<Found>) {
        let Phase::Value(value) = std::mem::replace(&mut self.phase, Phase::Call { stray: false }) else {
            return;
        };
        let ParameterValue { types, raw, repeated_key, .. } = value;
        match repeated_key {
            // The first value is given out already, and an object has a key once.
            Some(key) => {
                found.push(Found::Text(format!("{PARAMETER_OPEN}{key}{OPEN_END}{raw}{PARAMETER_CLOSE}")));
            }
            None if types.is_text() => self.give_arguments("\"", found),
            None => self.give_arguments(&types.to_json(&raw), found),
        }
    }

    fn announce(&mut self, found: &mut Vec<Found>) {
        if !self.announced {
            self.announced = true;
            self.raw.clear();
            found.push(Found::Start(self.name.clone()));
        }
    }

    fn end_call(&mut self, found: &mut Vec<Found>) {
        self.give_arguments(if self.keys.is_empty() { "{}" } else { "}" }, found);
        found.push(Found::End(std::mem::take(&mut self.arguments)));
        self.calls += 1;
        self.announced = false;
        self.raw.clear();
        self.phase = Phase::Block;
    }

    fn give_arguments(&mut self, json: &str, found: &mut Vec<Found>) {
        self.arguments.push_str(json);
        found.push(Found::Arguments(json.to_owned()));
    }

    /// Gives out all that was not given out, as text; white space alone is nothing.
    fn give_text(&mut self, found: &mut Vec<Found>) {
        let mut text = std::mem::take(&mut self.raw);
        text.push_str(&std::mem::take(&mut self.buffer));
        let worth_showing = matches!(self.phase, Phase::Text) || !text.trim().is_empty();
        if worth_showing && !text.is_empty() {
            found.push(Found::Text(text));
        }
    }

    fn consume(&mut self, len: usize) {
        let consumed: String = self.buffer.drain(..len).collect();
        if !self.announced {
            self.raw.push_str(&consumed);
        }
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

    fn tag(&self, open: &str) -> Tag {
        let rest = &self.buffer[open.len()..];
        let end = rest.find(OPEN_END);
        let name = &rest[..end.unwrap_or(rest.len())];
        // While the end is open, its quotation mark may be part of what is there.
        if name.len() > MAX_NAME + usize::from(end.is_none()) || name.contains('\n') {
            return Tag::Broken;
        }
        match end {
            Some(end) => {
                Tag::Whole { name: name.replace("<|message|>", ""), len: open.len() + end + OPEN_END.len() }
            }
            None => Tag::Open,
        }
    }

    /// The tool that is meant: by the tag, else by the message header, else what the tag says.
    fn resolve(&self, name: &str, tools: &ToolTypes) -> String {
        tools.resolve(name).or_else(|| tools.resolve(&self.recipient)).unwrap_or(name).to_owned()
    }
}

fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
