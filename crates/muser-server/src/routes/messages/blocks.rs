//! The messages of `/v1/messages`, block by block.
//!
//! Images are shown, if the model sees. Of whatever else a block holds the model is told that it was there: an agent that read a
//! document goes on with its session, and the model does not answer about nothing. What another server did by itself, such as
//! a search, is passed over.

use serde_json::{Value, json};

use crate::conversation::unshown;
use crate::error::ApiError;
use crate::pictures;

/// Messages in OpenAI's shape, with the place of each.
#[derive(Debug, Default)]
pub struct Turns {
    /// The messages.
    pub messages: Vec<Value>,
    /// Their places.
    pub places: Vec<String>,
}

impl Turns {
    /// Adds a message.
    pub fn push(&mut self, message: Value, place: &str) {
        self.messages.push(message);
        self.places.push(place.to_owned());
    }

    /// Takes off an assistant's last message that only says something: the answer goes on from there.
    pub fn take_beginning(&mut self) -> Option<String> {
        let last = self.messages.last().filter(|last| last["role"] == "assistant")?;
        let text = last["content"].as_str()?.to_owned();
        if last.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty()) {
            return None;
        }
        self.messages.pop();
        self.places.pop();
        Some(text)
    }

    /// Adds what a message says; results of tools become messages of their own, before the text beside them.
    pub fn message(&mut self, value: &Value, path: &str) -> Result<(), ApiError> {
        let Some(role @ ("user" | "assistant" | "system")) = value.get("role").and_then(Value::as_str) else {
            return Err(ApiError::field(format!("{path}.role"), "'role' must be user, assistant or system"));
        };
        let blocks = match value.get("content") {
            Some(Value::String(text)) => {
                self.push(json!({"role": role, "content": text}), path);
                return Ok(());
            }
            Some(Value::Array(blocks)) => blocks,
            _ => {
                let message = "'content' must be a string or a list of blocks";
                return Err(ApiError::field(format!("{path}.content"), message));
            }
        };
        let (mut text, mut reasoning, mut calls) = (Text::default(), String::new(), Vec::new());
        let mut results = false;
        for (index, block) in blocks.iter().enumerate() {
            let here = format!("{path}.content[{index}]");
            let needed = |key: &str| needed(block, key, &here);
            match needed("type")? {
                "thinking" => reasoning.push_str(needed("thinking")?),
                "tool_use" => {
                    let name = needed("name")?;
                    if name.is_empty() {
                        return Err(ApiError::field(format!("{here}.name"), "'name' must not be empty"));
                    }
                    let input = block.get("input").cloned().unwrap_or_else(|| json!({}));
                    let function = json!({"name": name, "arguments": input});
                    calls.push(json!({"id": needed("id")?, "type": "function", "function": function}));
                }
                "tool_result" => {
                    results = true;
                    let content = result(block.get("content"), &here)?;
                    let id = needed("tool_use_id")?;
                    self.push(json!({"role": "tool", "tool_call_id": id, "content": content}), path);
                }
                "image" if role != "assistant" => text.show(image(block, &here)?),
                _ => shown(block, &here, &mut text)?,
            }
        }
        if role == "assistant" {
            let message = json!({"role": role, "content": text.text, "reasoning_content": reasoning, "tool_calls": calls});
            self.push(message, path);
        } else if !text.is_empty() || !results {
            self.push(json!({"role": role, "content": text.content()}), path);
        }
        Ok(())
    }
}

/// Text that is put together.
#[derive(Debug, Default)]
struct Text {
    /// Images, and the text before them.
    parts: Vec<Value>,
    text: String,
    /// A note ended it.
    noted: bool,
}

impl Text {
    /// An image at this place.
    fn show(&mut self, image: Value) {
        if !self.text.is_empty() {
            self.parts.push(json!({"type": "text", "text": std::mem::take(&mut self.text)}));
        }
        self.parts.push(image);
        self.noted = false;
    }

    fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.text.is_empty()
    }

    /// A string, or parts if there are images.
    fn content(mut self) -> Value {
        if self.parts.is_empty() {
            return self.text.into();
        }
        if !self.text.is_empty() {
            self.parts.push(json!({"type": "text", "text": self.text}));
        }
        self.parts.into()
    }

    /// Something that is not the client's own text stands on lines of its own.
    fn aside(&mut self, note: &str) {
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
        }
        self.text.push_str(note);
        self.noted = true;
    }

    fn say(&mut self, text: &str) {
        if std::mem::take(&mut self.noted) && !text.is_empty() {
            self.text.push('\n');
        }
        self.text.push_str(text);
    }
}

fn needed<'a>(block: &'a Value, key: &str, here: &str) -> Result<&'a str, ApiError> {
    let fault = || ApiError::field(format!("{here}.{key}"), format!("'{key}' must be a string"));
    block.get(key).and_then(Value::as_str).ok_or_else(fault)
}

/// An image as a part of a message. A model that sees nothing is told of it.
fn image(block: &Value, here: &str) -> Result<Value, ApiError> {
    let source = &block["source"];
    let data = match source["type"].as_str() {
        Some("base64") => source["data"].as_str(),
        Some("url") => source["url"].as_str(),
        _ => None,
    };
    let Some(data) = data else {
        let message =
            "An image needs a 'source' of type base64 with 'data'; this server keeps no files to refer to";
        return Err(ApiError::field(format!("{here}.source"), message));
    };
    let mut part = pictures::part(data, here);
    part[pictures::TOLD] = true.into();
    Ok(part)
}

/// Adds what the model is shown of a block.
fn shown(block: &Value, here: &str, out: &mut Text) -> Result<(), ApiError> {
    let field = |key: &str| block.get(key).and_then(Value::as_str);
    match needed(block, "type", here)? {
        "text" => out.say(needed(block, "text", here)?),
        "document" => match document(&block["source"]) {
            Some(text) => {
                field("title").into_iter().for_each(|title| out.aside(title));
                out.aside(&text);
            }
            None => out.aside(&unshown("document")),
        },
        "search_result" => {
            [field("title"), field("source")].into_iter().flatten().for_each(|line| out.aside(line));
            out.aside(&texts(&block["content"]));
        }
        "tool_reference" => out.aside(&format!("[tool: {}]", field("tool_name").unwrap_or_default())),
        "compaction" => out.aside(field("content").unwrap_or_default()),
        kind if kind == "redacted_thinking" || elsewhere(kind) => {}
        kind => out.aside(&unshown(kind)),
    }
    Ok(())
}

/// Whether a kind of block tells what another server did by itself.
fn elsewhere(kind: &str) -> bool {
    kind.ends_with("_tool_result") || matches!(kind, "server_tool_use" | "mcp_tool_use")
}

/// The text of a document, if that is what it holds.
fn document(source: &Value) -> Option<String> {
    match source["type"].as_str()? {
        "text" => source["data"].as_str().map(str::to_owned),
        "content" => Some(match &source["content"] {
            Value::String(text) => text.clone(),
            blocks => texts(blocks),
        }),
        _ => None,
    }
}

fn texts(blocks: &Value) -> String {
    let texts = blocks.as_array().into_iter().flatten().filter_map(|block| block["text"].as_str());
    texts.collect::<Vec<_>>().join("\n")
}

fn result(content: Option<&Value>, path: &str) -> Result<Value, ApiError> {
    match content {
        None | Some(Value::Null) => Ok("".into()),
        Some(Value::String(text)) => Ok(text.as_str().into()),
        Some(Value::Array(blocks)) => {
            let mut text = Text::default();
            for (index, block) in blocks.iter().enumerate() {
                let here = format!("{path}.content[{index}]");
                if block["type"] == "image" {
                    text.show(image(block, &here)?);
                } else {
                    shown(block, &here, &mut text)?;
                }
            }
            Ok(text.content())
        }
        Some(_) => {
            Err(ApiError::field(format!("{path}.content"), "'content' must be a string or a list of blocks"))
        }
    }
}
