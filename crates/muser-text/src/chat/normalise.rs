//! Conversations and tool lists as clients send them, in the one shape that templates expect.
//!
//! Clients differ: content is a string, null, missing or a list of parts; arguments are a JSON string (OpenAI) or an
//! object; `developer` is `system`; a tool is `{type, function: {...}}` or flat. What means the same becomes the same, so
//! that it is the same prompt. What means nothing is an error that names the field.

use super::cut_json;
use crate::error::{TextError, shown};
use crate::schema::{Resolver, shapes};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};

/// Longest tool name accepted, in characters.
const MAX_TOOL_NAME: usize = 128;

/// Names of recipients that are no tools: a call of such a tool would be an answer, or reasoning.
const RECIPIENTS: [&str; 2] = ["self", "user"];

/// Longest name of a parameter, in bytes.
const MAX_KEY: usize = 256;

/// Most tools of a request: agents bring some hundreds, and each costs a part of the prompt and of the grammar.
const MAX_TOOLS: usize = 1024;

/// Brings the `messages` of a request into the shape for [`super::ChatInput`].
///
/// Roles: `system` and `developer` (the same), `user`, `assistant`, `tool` and `function` (the same). A tool's message
/// without a name gets that of the call it answers.
pub fn normalise_messages(messages: &[Value]) -> Result<Vec<Value>, TextError> {
    let mut called: HashMap<String, String> = HashMap::new();
    let mut out = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        let mut message = one_message(&format!("messages[{index}]"), message)?;
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            if let (Some(id), Some(name)) = (call["id"].as_str(), call["function"]["name"].as_str()) {
                called.insert(id.to_owned(), name.to_owned());
            }
        }
        if let Value::Object(fields) = &mut message
            && fields["role"] == "tool"
            && !fields.contains_key("name")
            && let Some(name) =
                fields.get("tool_call_id").and_then(Value::as_str).and_then(|id| called.get(id))
        {
            fields.insert("name".to_owned(), name.as_str().into());
        }
        out.push(message);
    }
    Ok(out)
}

/// Brings the `tools` of a request into the shape for [`super::ChatInput`]:
/// `{"type": "function", "function": {"name", "description", "parameters"}}` with all three fields there.
pub fn normalise_tools(tools: &[Value]) -> Result<Vec<Value>, TextError> {
    if tools.len() > MAX_TOOLS {
        return Err(TextError::request(
            "tools",
            format!("at most {MAX_TOOLS} tools"),
            tools.len().to_string(),
        ));
    }
    let mut names = HashSet::with_capacity(tools.len());
    let mut out = Vec::with_capacity(tools.len());
    for (index, tool) in tools.iter().enumerate() {
        let tool = one_tool(&format!("tools[{index}]"), tool)?;
        let name = tool["function"]["name"].as_str().unwrap_or_default().to_owned();
        if !names.insert(name.clone()) {
            let function = if tools[index].get("function").is_some() { ".function" } else { "" };
            return Err(TextError::request(
                format!("tools[{index}]{function}.name"),
                "a name that no other tool has",
                shown(&name),
            ));
        }
        out.push(tool);
    }
    Ok(out)
}

fn one_message(at: &str, message: &Value) -> Result<Value, TextError> {
    let Value::Object(fields) = message else {
        return Err(TextError::request(at, "an object", kind_of(message)));
    };
    let role = match fields.get("role") {
        Some(Value::String(role)) => match role.as_str() {
            "system" | "developer" => "system",
            "user" => "user",
            "assistant" => "assistant",
            "tool" | "function" => "tool",
            other => {
                return Err(TextError::request(
                    format!("{at}.role"),
                    "system, developer, user, assistant or tool",
                    shown(other),
                ));
            }
        },
        other => return Err(TextError::request(format!("{at}.role"), "a string", kind_of_field(other))),
    };
    let mut out = Map::new();
    out.insert("role".into(), role.into());
    out.insert("content".into(), content(&format!("{at}.content"), fields.get("content"))?);
    match role {
        "assistant" => {
            for key in ["reasoning_content", "reasoning"] {
                if let Some(reasoning) = optional_text(at, fields, key)?
                    && !reasoning.is_empty()
                {
                    out.insert("reasoning_content".into(), reasoning.into());
                    break;
                }
            }
            let calls = tool_calls(at, fields.get("tool_calls"))?;
            if !calls.is_empty() {
                out.insert("tool_calls".into(), calls.into());
            }
        }
        "tool" => {
            for key in ["tool_call_id", "name"] {
                if let Some(text) = optional_text(at, fields, key)?
                    && !text.is_empty()
                {
                    out.insert(key.into(), text.into());
                }
            }
        }
        _ => {}
    }
    Ok(Value::Object(out))
}

/// A string, or a list of parts if one of them is not text.
fn content(at: &str, content: Option<&Value>) -> Result<Value, TextError> {
    let parts = match content {
        None | Some(Value::Null) => return Ok("".into()),
        Some(Value::String(text)) => return Ok(text.as_str().into()),
        Some(Value::Array(parts)) => parts,
        Some(other) => {
            return Err(TextError::request(at, "a string, null or a list of parts", kind_of(other)));
        }
    };
    let mut out = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let at = format!("{at}[{index}]");
        if let Value::String(text) = part {
            out.push(json!({"type": "text", "text": text}));
            continue;
        }
        let field = |key: &str| match part.get(key) {
            Some(Value::String(text)) => Ok(text.as_str()),
            other => Err(TextError::request(format!("{at}.{key}"), "a string", kind_of_field(other))),
        };
        out.push(match field("type")? {
            "text" | "input_text" | "output_text" => json!({"type": "text", "text": field("text")?}),
            "refusal" => json!({"type": "text", "text": field("refusal")?}),
            "image" | "image_url" | "input_image" => json!({"type": "image"}),
            "video" | "video_url" | "input_video" => json!({"type": "video"}),
            other => {
                return Err(TextError::request(format!("{at}.type"), "text or image_url", shown(other)));
            }
        });
    }
    if out.iter().all(|part| part["type"] == "text") {
        return Ok(out.iter().filter_map(|part| part["text"].as_str()).collect::<String>().into());
    }
    Ok(out.into())
}

fn tool_calls(at: &str, calls: Option<&Value>) -> Result<Vec<Value>, TextError> {
    let calls = match calls {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(calls)) => calls,
        Some(other) => {
            return Err(TextError::request(format!("{at}.tool_calls"), "a list", kind_of(other)));
        }
    };
    let mut out = Vec::with_capacity(calls.len());
    for (index, call) in calls.iter().enumerate() {
        let at = format!("{at}.tool_calls[{index}]");
        let function = call.get("function").unwrap_or(call);
        let name = match function.get("name") {
            Some(Value::String(name)) if !name.is_empty() => name,
            Some(Value::String(_)) => {
                let at = format!("{at}.function.name");
                return Err(TextError::request(at, "the name of a tool", "an empty string"));
            }
            other => {
                return Err(TextError::request(
                    format!("{at}.function.name"),
                    "a string",
                    kind_of_field(other),
                ));
            }
        };
        let mut entry = Map::new();
        if let Some(id) = call.get("id").filter(|id| !id.is_null()) {
            entry.insert("id".into(), id.clone());
        }
        entry.insert("type".into(), "function".into());
        let arguments = arguments(&format!("{at}.function.arguments"), function.get("arguments"))?;
        entry.insert("function".into(), json!({"name": name, "arguments": arguments}));
        out.push(Value::Object(entry));
    }
    Ok(out)
}

/// The arguments of a call as an object. A client may send what it was sent, a JSON string, and that may be one of a
/// call that was cut off or went wrong: then what can be read of it counts, else the text itself.
fn arguments(at: &str, arguments: Option<&Value>) -> Result<Value, TextError> {
    let mut fields = match arguments {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(fields)) => match fields.get(PARTIAL_JSON) {
            Some(Value::String(text)) if fields.len() == 1 => read_or_raw(text),
            _ => fields.clone(),
        },
        Some(Value::String(text)) if text.trim().is_empty() => Map::new(),
        Some(Value::String(text)) => read_or_raw(text),
        Some(other) => {
            return Err(TextError::request(at, "a JSON object, or a string that holds one", kind_of(other)));
        }
    };
    fields.values_mut().for_each(without_closing_tags);
    Ok(Value::Object(fields))
}

fn read_or_raw(text: &str) -> Map<String, Value> {
    cut_json::object(text).unwrap_or_else(|| Map::from_iter([(RAW_ARGUMENTS.to_owned(), text.into())]))
}

/// The key under which an API that gives arguments as an object gives those of a call that was cut off.
pub const PARTIAL_JSON: &str = "partial_json";

/// Stands for the name of a parameter where the arguments cannot be read.
const RAW_ARGUMENTS: &str = "arguments";

/// A closing tag inside a value would end it in the prompt. In JSON the escape means the same; a text has no other way.
fn without_closing_tags(value: &mut Value) {
    match value {
        Value::String(text) if text.contains("</atem:") => *text = text.replace("</atem:", "<\\/atem:"),
        Value::Array(items) => items.iter_mut().for_each(without_closing_tags),
        Value::Object(fields) => fields.values_mut().for_each(without_closing_tags),
        _ => {}
    }
}

fn one_tool(at: &str, tool: &Value) -> Result<Value, TextError> {
    if let Some(kind) = tool.get("type")
        && kind != "function"
        && kind != "custom"
    {
        return Err(TextError::request(format!("{at}.type"), "\"function\"", kind.to_string()));
    }
    let (at, function) = match tool.get("function") {
        Some(function) => (format!("{at}.function"), function),
        None => (at.to_owned(), tool),
    };
    let name = match function.get("name") {
        Some(Value::String(name)) => name,
        other => return Err(TextError::request(format!("{at}.name"), "a string", kind_of_field(other))),
    };
    // The name stands in a message header and in an attribute: what would end those cannot be part of it.
    let breaks_markup = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '"' | '<' | '>');
    if name.is_empty() || name.chars().count() > MAX_TOOL_NAME || name.contains(breaks_markup) {
        return Err(TextError::request(
            format!("{at}.name"),
            format!("1 to {MAX_TOOL_NAME} characters without white space, quotes or angle brackets"),
            shown(name),
        ));
    }
    if RECIPIENTS.contains(&name.as_str()) {
        return Err(TextError::request(
            format!("{at}.name"),
            "a name other than \"self\" and \"user\", which mean the model and the user",
            shown(name),
        ));
    }
    let description = match function.get("description") {
        None | Some(Value::Null) => "",
        Some(Value::String(text)) => text,
        Some(other) => {
            return Err(TextError::request(format!("{at}.description"), "a string", kind_of(other)));
        }
    };
    let key = if function.get("parameters").is_none() && function.get("input_schema").is_some() {
        "input_schema"
    } else {
        "parameters"
    };
    let parameters = match function.get(key) {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(Value::Object(schema)) => Value::Object(schema.clone()),
        Some(other) => {
            return Err(TextError::request(format!("{at}.{key}"), "a JSON schema object", kind_of(other)));
        }
    };
    check_keys(&format!("{at}.{key}"), &parameters)?;
    Ok(json!({
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }))
}

/// A parameter's name stands in an attribute: what would end that, or a line, cannot be part of it.
fn check_keys(at: &str, parameters: &Value) -> Result<(), TextError> {
    let breaks_markup = |key: &str| {
        key.len() > MAX_KEY
            || key.contains("\">")
            || key.contains(['\n', '\r'])
            || key.contains("<|message|>")
    };
    let resolver = Resolver::new(parameters);
    for shape in shapes(&resolver, parameters) {
        if let Some((key, _)) = shape.properties.iter().find(|(key, _)| breaks_markup(key)) {
            return Err(TextError::request(
                format!("{at}.properties"),
                format!(
                    "names of at most {MAX_KEY} bytes without line breaks and \\\">, which a call cannot hold"
                ),
                shown(key),
            ));
        }
    }
    Ok(())
}

fn optional_text<'a>(
    at: &str,
    fields: &'a Map<String, Value>,
    key: &str,
) -> Result<Option<&'a str>, TextError> {
    match fields.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(TextError::request(format!("{at}.{key}"), "a string or null", kind_of(other))),
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a bool",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn kind_of_field(value: Option<&Value>) -> &'static str {
    value.map_or("nothing", kind_of)
}
