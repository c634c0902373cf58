//! Spellings in chat histories and tool lists that are brought into the usual one before anything looks at them: custom
//! tools and their calls, the older `function_call`, and a last message to go on from.

use std::borrow::Cow;

use serde_json::{Value, json};

use crate::custom_tools;
use crate::error::ApiError;

/// The names of the custom tools.
pub fn custom_names(tools: &[Value]) -> Vec<String> {
    let names = tools.iter().filter_map(|tool| is_custom(tool)?.get("name")?.as_str().map(str::to_owned));
    names.collect()
}

fn is_custom(tool: &Value) -> Option<&serde_json::Map<String, Value>> {
    if tool["type"] == "custom" { tool.get("custom")?.as_object() } else { None }
}

/// A tool as a function.
pub fn tool(tool: &Value) -> Value {
    is_custom(tool).map_or_else(|| tool.clone(), custom_tools::as_function)
}

/// The names in a list of tools, wherever they have them; a tool without a name is hosted elsewhere and is none here.
pub fn names(tools: &[Value]) -> Vec<String> {
    let name = |tool: &Value| {
        let inner = tool.get("function").or(tool.get("custom")).unwrap_or(tool);
        inner.get("name")?.as_str().map(str::to_owned)
    };
    tools.iter().filter_map(name).collect()
}

/// A message whose calls are calls of functions in a list.
pub fn in_one_shape(message: &Value) -> Cow<'_, Value> {
    let custom = |call: &Value| call.get("custom").is_some_and(Value::is_object);
    let calls = message.get("tool_calls").and_then(Value::as_array);
    let has_custom = calls.is_some_and(|calls| calls.iter().any(custom));
    let old = message.get("function_call").filter(|call| call.is_object() && calls.is_none_or(Vec::is_empty));
    if !has_custom && old.is_none() {
        return Cow::Borrowed(message);
    }
    let mut message = message.clone();
    if let Some(old) = old {
        message["tool_calls"] = json!([{"type": "function", "function": old}]);
        return Cow::Owned(message);
    }
    for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
        if custom(call) {
            let input = call["custom"]["input"].as_str().unwrap_or_default();
            let arguments = custom_tools::arguments(input);
            *call = json!({
                "id": call["id"], "type": "function",
                "function": {"name": call["custom"]["name"], "arguments": arguments},
            });
        }
    }
    Cow::Owned(message)
}

/// Takes off the last message, which the model is to go on with, and gives its text.
pub fn take_beginning(messages: &mut Vec<Value>) -> Result<String, ApiError> {
    let fault = |what: &str| {
        let what = format!("'continue_final_message' needs {what} as the last message");
        Err(ApiError::field("continue_final_message", what))
    };
    match messages.last() {
        Some(last) if last["role"] == "assistant" => {
            if last.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty()) {
                return fault("an assistant's text, without calls,");
            }
            let text = match &last["content"] {
                Value::String(text) => text.clone(),
                Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
                _ => String::new(),
            };
            messages.pop();
            Ok(text)
        }
        _ => fault("an assistant's"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_all_spellings_are_calls_of_functions() {
        let check = |message: Value, expected: Value| {
            assert_eq!(in_one_shape(&message)["tool_calls"], expected);
        };
        check(
            json!({"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "p", "input": "a"}}]}),
            json!([{"id": "c", "type": "function", "function": {"name": "p", "arguments": {"input": "a"}}}]),
        );
        let old = json!({"name": "f", "arguments": "{}"});
        check(
            json!({"role": "assistant", "content": null, "function_call": old}),
            json!([{"type": "function", "function": old}]),
        );
        let plain = json!({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]});
        assert!(matches!(in_one_shape(&plain), Cow::Borrowed(_)));
    }

    #[test]
    fn only_an_assistants_text_can_be_gone_on_with() {
        let take = |messages: Value| {
            let mut messages = messages.as_array().expect("list").clone();
            take_beginning(&mut messages).map(|text| (text, messages.len())).map_err(|fault| fault.param)
        };
        let user = json!({"role": "user", "content": "a"});
        let fault = || Err(Some("continue_final_message".to_owned()));
        assert_eq!(take(json!([user, {"role": "assistant", "content": "Once"}])), Ok(("Once".into(), 1)));
        let parts = json!([{"type": "text", "text": "On"}, {"type": "text", "text": "ce"}]);
        assert_eq!(take(json!([user, {"role": "assistant", "content": parts}])), Ok(("Once".into(), 1)));
        assert_eq!(take(json!([user])), fault());
        assert_eq!(take(json!([])), fault());
        let calling = json!({"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]});
        assert_eq!(take(json!([user, calling])), fault());
    }
}
