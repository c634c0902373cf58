//! Custom tools: tools whose one input is text, not JSON.
//!
//! The model knows only tools with parameters, so a custom tool is shown as one with a single string, `input`. The call
//! comes back as JSON, piece by piece; [`InputText`] takes the text out of it as it comes.

use serde_json::{Map, Value, json};

/// The one parameter.
const INPUT: &str = "input";

/// The function that stands for a custom tool: `name`, `description` and `format`, as both of OpenAI's APIs have them.
pub fn as_function(tool: &Map<String, Value>) -> Value {
    let format = tool.get("format");
    // Chat completions put the grammar one level deeper than responses do.
    let grammar =
        format.map(|format| format.get("grammar").filter(|inner| inner.is_object()).unwrap_or(format));
    let text = |key: &str| grammar.and_then(|grammar| grammar.get(key)).and_then(Value::as_str);
    let about = match (text("definition"), text("syntax")) {
        (Some(definition), syntax) => {
            format!("Text that follows this {} grammar:\n{definition}", syntax.unwrap_or("lark"))
        }
        (None, _) => "The whole input, as plain text.".to_owned(),
    };
    let mut function = Map::new();
    for key in ["name", "description"] {
        if let Some(value) = tool.get(key) {
            function.insert(key.into(), value.clone());
        }
    }
    let properties = json!({INPUT: {"type": "string", "description": about}});
    function.insert(
        "parameters".into(),
        json!({"type": "object", "properties": properties, "required": [INPUT], "additionalProperties": false}),
    );
    json!({"type": "function", "function": function})
}

/// The arguments of a call of a custom tool, from its input.
pub fn arguments(input: &str) -> Value {
    json!({INPUT: input})
}

/// The input of a finished call.
pub fn input_of(arguments: &str) -> String {
    let mut reader = InputText::default();
    let mut text = reader.push(arguments);
    text.push_str(&reader.finish());
    text
}

/// Nobody writes more white space than this before the input.
const LONGEST_OPENING: usize = 256;

/// Takes the text out of the JSON of a call, in whatever pieces that comes.
#[derive(Debug, Default)]
pub struct InputText {
    state: State,
    /// What has been read, until it is clear that the input begins.
    held: String,
    /// The first half of a pair of UTF-16 units.
    high: Option<u16>,
}

#[derive(Debug, Default)]
enum State {
    /// Before the quote that opens the input.
    #[default]
    Before,
    Text,
    /// After a backslash, with the digits of a `\u` so far.
    Escape(Option<String>),
    Done,
}

impl InputText {
    /// The text that a fragment of the arguments adds.
    pub fn push(&mut self, fragment: &str) -> String {
        let mut out = String::new();
        for c in fragment.chars() {
            match &mut self.state {
                State::Before => {
                    self.held.push(c);
                    if c == '"' && self.held.len() < LONGEST_OPENING && opens_input(&self.held) {
                        self.held.clear();
                        self.state = State::Text;
                    }
                }
                State::Text => match c {
                    '"' => {
                        self.flush_half(&mut out);
                        self.state = State::Done;
                    }
                    '\\' => self.state = State::Escape(None),
                    c => {
                        self.flush_half(&mut out);
                        out.push(c);
                    }
                },
                State::Escape(None) if c == 'u' => self.state = State::Escape(Some(String::new())),
                State::Escape(None) => {
                    self.flush_half(&mut out);
                    out.push(match c {
                        'n' => '\n',
                        't' => '\t',
                        'r' => '\r',
                        'b' => '\u{8}',
                        'f' => '\u{c}',
                        other => other,
                    });
                    self.state = State::Text;
                }
                State::Escape(Some(digits)) => {
                    digits.push(c);
                    if digits.len() >= 4 {
                        let unit = u16::from_str_radix(digits, 16).unwrap_or(0xfffd);
                        self.state = State::Text;
                        self.take_unit(unit, &mut out);
                    }
                }
                State::Done => {}
            }
        }
        out
    }

    /// What is left at the end: of a call that was not what was expected, all that it said.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.flush_half(&mut out);
        let held = std::mem::take(&mut self.held);
        if matches!(self.state, State::Before) && !matches!(held.trim(), "" | "{}") {
            out.push_str(&held);
        }
        self.state = State::Done;
        out
    }

    fn take_unit(&mut self, unit: u16, out: &mut String) {
        if let Some(high) = self.high.take() {
            if let Some(Ok(c)) = char::decode_utf16([high, unit]).next() {
                out.push(c);
                return;
            }
            out.push(char::REPLACEMENT_CHARACTER);
        }
        if (0xd800..0xdc00).contains(&unit) {
            self.high = Some(unit);
        } else {
            out.push(char::from_u32(unit.into()).unwrap_or(char::REPLACEMENT_CHARACTER));
        }
    }

    fn flush_half(&mut self, out: &mut String) {
        if self.high.take().is_some() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Whether `{"input":"` has been read, white space aside.
fn opens_input(held: &str) -> bool {
    let bare: String = held.chars().filter(|c| !c.is_whitespace()).collect();
    bare == format!("{{\"{INPUT}\":\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_the_same_however_it_is_cut() {
        for text in ["", "*** Begin Patch\n+\t\"a\\b\"\r\n", "\u{8}\u{c}/é😀\u{1}", "{\"input\":\"x\"}"] {
            let json = arguments(text).to_string();
            // All escaped, as some encoders do.
            let units: Vec<String> = text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
            for json in [json, format!("{{ \"input\" : \"{}\" }}", units.concat())] {
                assert_eq!(input_of(&json), text);
                let mut reader = InputText::default();
                let mut read: String = json.chars().map(|c| reader.push(&c.to_string())).collect();
                read.push_str(&reader.finish());
                assert_eq!(read, text, "{json}");
            }
        }
    }

    #[test]
    fn what_was_cut_or_broken_is_kept() {
        assert_eq!(input_of("{\"input\":\"half a"), "half a");
        assert_eq!(input_of("{\"input\":\"a\\ud83d"), "a\u{fffd}");
        assert_eq!(input_of("{\"input\":\"\\ud83dx\\udc00\""), "\u{fffd}x\u{fffd}");
        assert_eq!(input_of("{}"), "");
        assert_eq!(input_of("{\"other\":1}"), "{\"other\":1}");
    }

    #[test]
    fn a_grammar_is_told_in_both_shapes() {
        let of = |tool: Value| as_function(tool.as_object().expect("object"))["function"].clone();
        let flat = of(json!({"type": "custom", "name": "p", "description": "d",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}}));
        let deep = of(json!({"name": "p", "description": "d",
            "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: \"a\""}}}));
        assert_eq!(flat, deep);
        let about = flat["parameters"]["properties"]["input"]["description"].as_str().unwrap_or_default();
        assert!(about.contains("lark grammar:\nstart: \"a\""), "{about}");
        assert_eq!(of(json!({"name": "p"}))["parameters"]["required"], json!(["input"]));
    }
}
