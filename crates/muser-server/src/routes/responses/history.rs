//! The items of a request to `/v1/responses`, as messages.
//!
//! One turn of the model is several items here and one message there. Every kind that agents send is either said to the
//! model or passed over: an item that came from somewhere else, or that this model's answers never hold, must not end the
//! conversation.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::tools::Toolbox;
use crate::body::say_once;
use crate::conversation::unshown;
use crate::custom_tools;
use crate::error::ApiError;
use crate::pictures;

/// Messages with the place of each in the request.
#[derive(Debug, Default)]
pub struct History {
    /// The messages.
    pub messages: Vec<Value>,
    /// Their places.
    pub places: Vec<String>,
    /// Where items stood that are passed over, and why.
    pub left_out: Vec<(String, String)>,
}

/// What begins the text of reasoning and of summaries that were given out encoded.
const OURS: &str = "muser1:";

/// Text that a client keeps for us and need not understand. It is not a secret: the client has it in the clear too.
pub fn encoded(text: &str) -> String {
    STANDARD.encode(format!("{OURS}{text}"))
}

fn decoded(item: &Value) -> Option<String> {
    let bytes = STANDARD.decode(item.get("encrypted_content")?.as_str()?).ok()?;
    String::from_utf8(bytes).ok()?.strip_prefix(OURS).map(str::to_owned)
}

impl History {
    /// A system message from a field.
    pub fn system(&mut self, text: &str, place: &str) {
        self.push(json!({"role": "system", "content": text}), place);
    }

    fn push(&mut self, message: Value, place: &str) {
        self.messages.push(message);
        self.places.push(place.to_owned());
    }

    /// Changes the assistant's message that is being put together.
    fn assistant(&mut self, place: &str, change: impl FnOnce(&mut Map<String, Value>)) {
        if self.messages.last().is_none_or(|message| message["role"] != "assistant") {
            self.push(json!({"role": "assistant"}), place);
        }
        if let Some(Value::Object(message)) = self.messages.last_mut() {
            change(message);
        }
    }

    fn append(&mut self, key: &str, text: &str, place: &str) {
        self.assistant(place, |message| match message.entry(key).or_insert_with(|| "".into()) {
            Value::String(before) => before.push_str(text),
            other => *other = text.into(),
        });
    }

    fn call(&mut self, id: &str, name: &str, arguments: &Value, place: &str) {
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        self.assistant(place, |message| {
            if let Some(calls) = message.entry("tool_calls").or_insert_with(|| json!([])).as_array_mut() {
                calls.push(call);
            }
        });
    }

    fn output(&mut self, id: &str, content: Value, place: &str) {
        self.push(json!({"role": "tool", "tool_call_id": id, "content": content}), place);
    }

    /// Adds an item.
    pub fn item(&mut self, item: &Value, place: &str, tools: &Toolbox) -> Result<(), ApiError> {
        let text = |key: &str| item.get(key).and_then(Value::as_str);
        let needed = |key: &str| {
            text(key)
                .ok_or_else(|| ApiError::field(format!("{place}.{key}"), format!("'{key}' must be a string")))
        };
        let name = || {
            let name = needed("name")?;
            if name.is_empty() {
                return Err(ApiError::field(format!("{place}.name"), "'name' must not be empty"));
            }
            Ok(tools.shown_in_history(name, text("namespace")))
        };
        let call_id = text("call_id").or(text("id")).unwrap_or_default();
        match kind(item) {
            "message" => self.message(needed("role")?, item, place),
            "reasoning" => {
                let parts = [item.get("content"), item.get("summary")];
                let said = parts.into_iter().flatten().map(joined_text).find(|text| !text.is_empty());
                if let Some(thought) = said.or_else(|| decoded(item)) {
                    self.append("reasoning_content", &thought, place);
                }
            }
            "function_call" => {
                let arguments = item.get("arguments").cloned().unwrap_or(Value::Null);
                self.call(call_id, &name()?, &arguments, place);
            }
            "custom_tool_call" => {
                let input = text("input").unwrap_or_default();
                self.call(call_id, &name()?, &custom_tools::arguments(input), place);
            }
            kind @ ("local_shell_call" | "shell_call") => {
                let arguments = item.get("action").cloned().unwrap_or_else(|| json!({}));
                self.call(call_id, kind.trim_end_matches("_call"), &arguments, place);
            }
            "apply_patch_call" => {
                let arguments = item.get("operation").cloned().unwrap_or_else(|| json!({}));
                self.call(call_id, "apply_patch", &arguments, place);
            }
            // Without an id for the call, which one kind leaves out, its own names it.
            "function_call_output" | "custom_tool_call_output" => {
                self.output(needed("call_id")?, output(item.get("output"), place), place);
            }
            "local_shell_call_output" | "shell_call_output" | "apply_patch_call_output" => {
                self.output(call_id, output(item.get("output"), place), place);
            }
            "mcp_call" => {
                let arguments = item.get("arguments").cloned().unwrap_or(Value::Null);
                self.call(call_id, &name()?, &arguments, place);
                let result = item.get("output").filter(|output| !output.is_null()).or(item.get("error"));
                self.output(call_id, output(result, place), place);
            }
            "compaction" | "compaction_summary" | "context_compaction" => {
                if let Some(summary) = decoded(item) {
                    let said = format!("Summary of the conversation so far:\n\n{summary}");
                    self.push(json!({"role": "user", "content": said}), place);
                }
            }
            // A reference that is left is to reasoning, which may be missing.
            "item_reference" => {}
            other => {
                say_once("/v1/responses", "an item of a kind that is not known here is passed over", other);
                let why = format!("passed over, items of type {} are not known here", Value::from(other));
                self.left_out.push((place.to_owned(), why));
            }
        }
        Ok(())
    }

    fn message(&mut self, role: &str, item: &Value, place: &str) {
        let content = item.get("content").cloned().unwrap_or(Value::Null);
        if role == "assistant" {
            let said = output_text(Some(&content));
            self.append("content", &said, place);
        } else {
            self.push(json!({"role": role, "content": content}), place);
        }
    }
}

/// The kind of an item; those without a type are told by what they hold.
pub fn kind(item: &Value) -> &str {
    match item.get("type").and_then(Value::as_str) {
        Some(kind) => kind,
        None if item.get("role").is_some() => "message",
        None if item.get("call_id").is_some() && item.get("output").is_some() => "function_call_output",
        None if item.get("call_id").is_some() => "function_call",
        None => "reasoning",
    }
}

/// What a tool gave back: text, or parts if there are images in it.
fn output(value: Option<&Value>, place: &str) -> Value {
    let parts = value.and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    if !parts.iter().any(|part| pictures::is_image(&part["type"])) {
        return output_text(value).into();
    }
    let shown = parts.iter().enumerate().map(|(index, part)| {
        if pictures::is_image(&part["type"]) {
            let mut image = part.clone();
            image[pictures::PLACE] = format!("{place}.output[{index}]").into();
            return image;
        }
        let text = output_text(Some(&json!([part])));
        json!({"type": "text", "text": text})
    });
    shown.collect()
}

/// What a tool gave back without images, or an assistant said, as text: what cannot be shown is said to have been there.
fn output_text(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) if parts.iter().all(|part| text_of(part).is_some()) => {
            parts.iter().filter_map(text_of).collect()
        }
        Some(Value::Array(parts)) if parts.iter().any(|part| part.get("type").is_some()) => {
            let texts = parts.iter().map(|part| match (text_of(part), part["type"].as_str()) {
                (Some(text), _) => text.to_owned(),
                (None, Some(kind)) => unshown(kind.trim_start_matches("input_")),
                (None, None) => part.to_string(),
            });
            texts.collect::<Vec<_>>().join("\n")
        }
        Some(other) => other.to_string(),
    }
}

fn text_of(part: &Value) -> Option<&str> {
    part.as_str().or_else(|| part.get("text")?.as_str()).or_else(|| part.get("refusal")?.as_str())
}

/// The text of a string or of parts; anything else has none.
fn joined_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(text_of).collect(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(items: Value) -> Vec<Value> {
        let mut history = History::default();
        for (index, item) in items.as_array().expect("list").iter().enumerate() {
            history.item(item, &format!("input[{index}]"), &Toolbox::default()).expect("valid");
        }
        assert_eq!(history.messages.len(), history.places.len());
        history.messages
    }

    #[test]
    fn every_kind_is_said_or_passed_over() {
        for item in [
            json!({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "other"}}),
            json!({"type": "file_search_call", "id": "fs_1", "queries": [], "results": null}),
            json!({"type": "computer_call", "call_id": "c", "action": {}}),
            json!({"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}),
            json!({"type": "code_interpreter_call", "id": "ci", "code": "1", "outputs": []}),
            json!({"type": "image_generation_call", "id": "ig", "result": "AAAA"}),
            json!({"type": "tool_search_call", "call_id": "t", "arguments": {}}),
            json!({"type": "tool_search_output", "call_id": "t", "tools": []}),
            json!({"type": "mcp_list_tools", "tools": []}),
            json!({"type": "mcp_approval_request", "name": "x"}),
            json!({"type": "mcp_approval_response", "approve": true}),
            json!({"type": "compaction", "encrypted_content": "from another server"}),
            json!({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}),
            json!({"type": "item_reference", "id": "rs_1"}),
            json!({"type": "ghost_of_next_year", "call_id": "g", "output": "x"}),
        ] {
            assert_eq!(history(json!([item])), Vec::<Value>::new(), "{item}");
        }
        let calls = history(json!([
            {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "x\n"},
            {"type": "custom_tool_call_output", "call_id": "a", "output": "ok"},
            {"type": "local_shell_call", "call_id": "b", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "b", "output": "files"},
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x", "stderr": ""}]},
            {"type": "apply_patch_call", "call_id": "d", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "d", "status": "completed"},
            {"type": "mcp_call", "id": "e", "name": "roll", "arguments": "{}", "output": "4"},
        ]));
        let names: Vec<&Value> = calls
            .iter()
            .filter_map(|message| message.get("tool_calls"))
            .map(|calls| &calls[0]["function"]["name"])
            .collect();
        assert_eq!(names, ["patch", "local_shell", "shell", "apply_patch", "roll"]);
        assert_eq!(calls[0]["tool_calls"][0]["function"]["arguments"], json!({"input": "x\n"}));
        let outputs: Vec<&Value> = calls
            .iter()
            .filter(|message| message["role"] == "tool")
            .map(|message| &message["content"])
            .collect();
        assert_eq!(outputs, ["ok", "files", "[{\"stdout\":\"x\",\"stderr\":\"\"}]", "", "4"]);
    }

    #[test]
    fn what_cannot_be_shown_is_said_to_have_been_there() {
        let parts =
            json!([{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:x"}]);
        let seen = history(json!([
            {"type": "function_call_output", "call_id": "a", "output": parts},
            {"type": "message", "role": "assistant", "content": [{"type": "output_image"}]},
        ]));
        assert_eq!(seen[0]["content"][0]["text"], "see");
        assert_eq!(seen[0]["content"][1][pictures::PLACE], "input[0].output[1]");
        assert_eq!(seen[1]["content"], "[output_image: this model reads text only]");
    }

    #[test]
    fn encoded_text_comes_back() {
        let back = history(json!([
            {"type": "compaction", "encrypted_content": encoded("They met.")},
            {"type": "reasoning", "summary": [], "content": null, "encrypted_content": encoded("Hm.")},
        ]));
        assert_eq!(back[0]["content"], "Summary of the conversation so far:\n\nThey met.");
        assert_eq!(back[1]["reasoning_content"], "Hm.");
    }

    #[test]
    fn many_items_of_one_turn_are_joined_in_one_pass() {
        let item = json!({"type": "message", "role": "assistant", "content": "0123456789"});
        let begun = std::time::Instant::now();
        let joined = history(Value::Array(vec![item; 60_000]));
        assert_eq!(joined[0]["content"].as_str().map(str::len), Some(600_000));
        assert!(begun.elapsed().as_secs() < 5, "{:?}", begun.elapsed());
    }
}
