//! Conversations at the door, for every API: messages and tools in OpenAI's shape become what the template expects.
//!
//! `muser-text` brings them into one shape and names the field at fault; what is added here is what only a server
//! knows: the images of its messages, and which tool choices make sense.

use muser_text::{TextError, normalise_messages, normalise_tools};
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::generation_params::{Conversation, ToolChoice};
use crate::pictures;

/// A fault of the text side as an answer: the client's faults are 400 and name the field, the model file's are ours.
pub fn text_fault(fault: &TextError) -> ApiError {
    match fault {
        TextError::Request { field, expected, found } => {
            ApiError::field(field, format!("Invalid value for '{field}': expected {expected}, found {found}"))
        }
        TextError::Grammar { .. } | TextError::Schema { .. } => {
            ApiError::field("response_format", sentence(fault))
        }
        // A template that raises or runs dry on this conversation is no reason to send it again.
        TextError::Template { .. } => ApiError::field("messages", format!("{fault}")),
        other => ApiError::internal(other.to_string()),
    }
}

/// A fault as a sentence of its own.
pub(crate) fn sentence(fault: &TextError) -> String {
    let text = fault.to_string();
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

/// A conversation from OpenAI's `messages` and `tools`.
pub fn conversation(
    messages: &[Value],
    tools: &[Value],
    choice: ToolChoice,
) -> Result<Conversation, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field("messages", "'messages' must hold at least one message"));
    }
    let sent = messages;
    let mut messages = normalise_messages(sent).map_err(|fault| text_fault(&fault))?;
    let pictures = pictures::of_messages(sent)?;
    let mut numbers = 0..;
    for (index, message) in messages.iter_mut().enumerate() {
        if message["role"] == "tool" {
            show_as_text(&mut message["content"]);
        }
        for (at, part) in message["content"].as_array_mut().into_iter().flatten().enumerate() {
            if part["type"] == "image" {
                part["number"] = numbers.next().into();
            } else if part["type"] != "text" {
                let place = format!("messages[{index}].content[{at}]");
                return Err(ApiError::unsupported(place, "Video is not supported by the loaded model"));
            }
        }
    }
    let sent = tools;
    let tools = normalise_tools(sent).map_err(|fault| text_fault(&fault))?;
    check_choice(&choice, &tools)?;
    let is_strict =
        |tool: &&Value| tool.get("function").unwrap_or(tool)["strict"] == true || tool["strict"] == true;
    let name = |tool: &Value| tool.get("function").unwrap_or(tool)["name"].as_str().map(str::to_owned);
    Ok(Conversation {
        messages,
        // Tools that must not be called are not shown either: the model is not tempted and the prompt is shorter.
        tools: if choice == ToolChoice::None { Vec::new() } else { tools },
        strict_tools: sent.iter().filter(is_strict).filter_map(name).collect(),
        tool_choice: choice,
        allowed: None,
        parallel_calls: true,
        strength: None,
        prefix: None,
        variables: Map::new(),
        pictures,
    })
}

/// The text that stands for something that this model cannot be shown.
pub fn unshown(kind: &str) -> String {
    format!("[{kind}: this model reads text only]")
}

/// What a tool gave back: images, and text on lines of its own. Refusing what cannot be shown would end the session of an agent
/// that looked at it, so the model is told that it was there.
fn show_as_text(content: &mut Value) {
    let Some(parts) = content.as_array() else { return };
    let (mut out, mut text): (Vec<Value>, Option<String>) = (Vec::new(), None);
    for part in parts {
        if part["type"] == "image" {
            out.extend(text.take().map(|text| json!({"type": "text", "text": text})));
            out.push(part.clone());
            continue;
        }
        let said = match part["text"].as_str() {
            Some(text) => text.to_owned(),
            None => unshown(part["type"].as_str().unwrap_or("part")),
        };
        text = Some(text.map_or(said.clone(), |before| format!("{before}\n{said}")));
    }
    *content = match (out.is_empty(), text) {
        (true, text) => text.unwrap_or_default().into(),
        (false, text) => {
            out.extend(text.map(|text| json!({"type": "text", "text": text})));
            out.into()
        }
    };
}

/// The conversation for a model that sees nothing: where it may be told of an image it is; an image that it would have to see is a
/// fault, with `reason`.
pub(crate) fn without_pictures(found: &Conversation, reason: &str) -> Result<Conversation, ApiError> {
    if let Some(picture) = found.pictures.iter().find(|picture| !picture.told) {
        return Err(ApiError::unsupported(&picture.place, reason));
    }
    let mut found = found.clone();
    found.pictures.clear();
    for message in &mut found.messages {
        let Some(parts) = message["content"].as_array() else { continue };
        let (mut text, mut noted) = (String::new(), false);
        for part in parts {
            let said = part["text"].as_str();
            if !text.is_empty() && !text.ends_with('\n') && (said.is_none() || noted) {
                text.push('\n');
            }
            noted = said.is_none();
            text.push_str(said.map_or_else(|| unshown("image"), str::to_owned).as_str());
        }
        message["content"] = text.into();
    }
    Ok(found)
}

fn check_choice(choice: &ToolChoice, tools: &[Value]) -> Result<(), ApiError> {
    match choice {
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool["function"]["name"] == name.as_str()) => {
            Err(ApiError::field(
                "tool_choice",
                format!("'tool_choice' names {}, which is not among the tools", Value::from(name.as_str())),
            ))
        }
        ToolChoice::Required if tools.is_empty() => {
            Err(ApiError::field("tool_choice", "'tool_choice' asks for a call, but there are no tools"))
        }
        _ => Ok(()),
    }
}

/// OpenAI's `tool_choice`, in the shapes of both of its APIs.
pub fn tool_choice(value: Option<&Value>) -> Result<ToolChoice, ApiError> {
    let fault =
        || ApiError::field("tool_choice", "'tool_choice' must be auto, none, required or name a function");
    match value {
        None | Some(Value::Null) => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" | "any" => Ok(ToolChoice::Required),
            _ => Err(fault()),
        },
        Some(value) => {
            let inner = value.get("function").or(value.get("custom")).unwrap_or(value);
            let name = inner.get("name").and_then(Value::as_str);
            name.map(|name| ToolChoice::Named(name.to_owned())).ok_or_else(fault)
        }
    }
}

/// A `tool_choice` of type allowed_tools, in the shapes of both of OpenAI's APIs: the choice, and the tools it names as the
/// client wrote them. `None` for any other choice.
pub fn allowed_tools(value: Option<&Value>) -> Result<Option<(ToolChoice, &[Value])>, ApiError> {
    let Some(value) = value.filter(|value| value["type"] == "allowed_tools") else { return Ok(None) };
    let inner = value.get("allowed_tools").unwrap_or(value);
    let choice = match inner.get("mode").and_then(Value::as_str) {
        None | Some("auto") => ToolChoice::Auto,
        Some("required") => ToolChoice::Required,
        Some(_) => return Err(ApiError::field("tool_choice.mode", "'mode' must be auto or required")),
    };
    let tools = inner.get("tools").and_then(Value::as_array);
    tools
        .map(|tools| Some((choice, tools.as_slice())))
        .ok_or_else(|| ApiError::field("tool_choice.tools", "'tools' must be a list of tools"))
}

/// Narrows a conversation to the tools that were allowed by name.
pub fn allow(found: &mut Conversation, names: Vec<String>) -> Result<(), ApiError> {
    if let Some(name) = names.iter().find(|name| found.tool_names().all(|known| known != name.as_str())) {
        return Err(ApiError::field(
            "tool_choice",
            format!("'tool_choice' names {}, which is not among the tools", Value::from(name.as_str())),
        ));
    }
    if names.is_empty() && found.tool_choice == ToolChoice::Required {
        return Err(ApiError::field("tool_choice", "'tool_choice' asks for a call, but allows no tool"));
    }
    found.allowed = Some(names);
    Ok(())
}

/// The model's word for a strength. The word goes into the system message, so no other text may come this way.
pub fn strength(word: &str, field: &str) -> Result<String, ApiError> {
    match word {
        "minimal" => Ok("low".into()),
        "none" | "low" | "medium" | "high" | "xhigh" => Ok(word.into()),
        "max" => Ok("xhigh".into()),
        _ => Err(ApiError::field(
            field,
            format!(
                "Unknown strength {}; expected none, minimal, low, medium, high, xhigh or max",
                Value::from(word)
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_messages(messages: Value) -> Result<Vec<Value>, Option<String>> {
        let messages = messages.as_array().expect("list").clone();
        conversation(&messages, &[], ToolChoice::Auto)
            .map(|found| found.messages)
            .map_err(|fault| fault.param)
    }

    #[test]
    fn developer_is_system_and_unknown_roles_are_named() {
        let developer = check_messages(json!([{"role": "developer", "content": "x"}])).expect("valid");
        assert_eq!(developer[0]["role"], "system");
        for role in ["foo", "", "ipython"] {
            let outcome =
                check_messages(json!([{"role": "user", "content": "a"}, {"role": role, "content": "b"}]));
            assert_eq!(outcome, Err(Some("messages[1].role".into())), "{role}");
        }
        assert_eq!(check_messages(json!([])), Err(Some("messages".into())));
        assert_eq!(check_messages(json!([3])), Err(Some("messages[0]".into())));
    }

    #[test]
    fn an_assistant_without_content_is_the_same_however_it_is_written() {
        let calls =
            json!([{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]);
        let check = |mut message: Value| {
            message["tool_calls"] = calls.clone();
            check_messages(json!([message])).expect("valid")
        };
        let null = check(json!({"role": "assistant", "content": null}));
        assert_eq!(null, check(json!({"role": "assistant"})));
        assert_eq!(null, check(json!({"role": "assistant", "content": ""})));
    }

    #[test]
    fn images_are_refused_by_name_and_never_fetched() {
        let image = json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]);
        let outcome = check_messages(json!([{"role": "user", "content": image}]));
        assert_eq!(outcome, Err(Some("messages[0].content[1]".into())));
    }

    #[test]
    fn a_choice_must_be_among_the_tools() {
        let tools = [json!({"type": "function", "function": {"name": "f"}})];
        let check = |choice: Value, tools: &[Value]| {
            let choice = tool_choice(Some(&choice)).map_err(|fault| fault.param)?;
            let messages = [json!({"role": "user", "content": "a"})];
            conversation(&messages, tools, choice).map(|found| found.tools.len()).map_err(|fault| fault.param)
        };
        let fault = || Err(Some("tool_choice".to_owned()));
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(check(json!("required"), &tools), Ok(1));
        assert_eq!(check(json!("none"), &tools), Ok(0));
        assert_eq!(check(named.clone(), &tools), Ok(1));
        assert_eq!(check(json!({"type": "function", "name": "f"}), &tools), Ok(1));
        assert_eq!(check(named, &[]), fault());
        assert_eq!(check(json!("required"), &[]), fault());
        assert_eq!(check(json!("perhaps"), &tools), fault());
        assert_eq!(check(json!({}), &tools), fault());
        assert_eq!(check(json!({"type": "custom", "custom": {"name": "f"}}), &tools), Ok(1));
    }

    #[test]
    fn faults_of_tools_are_named_as_the_client_wrote_them() {
        let check = |tool: Value, expected: &str| {
            let messages = [json!({"role": "user", "content": "a"})];
            let tools = [json!({"name": "first"}), tool];
            let fault = conversation(&messages, &tools, ToolChoice::Auto).expect_err(expected);
            assert_eq!(fault.param.as_deref(), Some(expected));
        };
        check(json!({"type": "function", "function": {"name": "user"}}), "tools[1].function.name");
        check(json!({"name": "first"}), "tools[1].name");
        let properties = json!({"properties": {"a\">": {}}});
        check(json!({"name": "f", "parameters": properties}), "tools[1].parameters.properties");
    }

    #[test]
    fn strict_tools_are_known() {
        let tools = [
            json!({"type": "function", "function": {"name": "f", "strict": true}}),
            json!({"type": "function", "name": "g", "strict": false, "parameters": {}}),
            json!({"function": {"name": "h", "parameters": {}}, "strict": true}),
        ];
        let messages = [json!({"role": "user", "content": "a"})];
        let found = conversation(&messages, &tools, ToolChoice::Auto).expect("valid");
        assert_eq!(found.strict_tools, ["f", "h"]);
    }

    #[test]
    fn a_strength_is_one_of_the_known_words() {
        assert_eq!(strength("minimal", "x"), Ok("low".into()));
        assert_eq!(strength("xhigh", "x"), Ok("xhigh".into()));
        assert!(strength("low.<|eot|>", "x").is_err());
    }
}
