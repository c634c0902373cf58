//! The body of `/v1/responses`: a list of items instead of messages.
//!
//! The route keeps nothing, so a reference to an earlier response is a 400: dropping it silently would answer without
//! the history that the client counts on.

use serde_json::{Map, Value, json};

use crate::conversation::{conversation, strength, tool_choice};
use crate::error::ApiError;
use crate::fields::{Body, Field, Kind};
use crate::params::{self, SAMPLING_FIELDS, concat, limit_field};
use crate::work::{Conversation, Form, Prompt, Work};

const REASONING: &[Field] = &[
    Field::optional("effort", Kind::Text, "none, minimal, low, medium, high or xhigh"),
    Field::ignored("summary", "the reasoning itself is given"),
    Field::ignored("generate_summary", ""),
];

const FORMAT: &[Field] = &[
    Field::required("type", Kind::OneOf(&["text", "json_object", "json_schema"]), ""),
    Field::optional("schema", Kind::Map, "for type json_schema"),
    Field::ignored("name", ""),
    Field::ignored("strict", "a schema is always enforced"),
    Field::ignored("description", ""),
];

const TEXT: &[Field] = &[
    Field::optional("format", Kind::Object(FORMAT), "holds for the answer, not for reasoning"),
    Field::ignored("verbosity", "the model has no such control"),
];

const OWN: &[Field] = &[
    Field::required(
        "input",
        Kind::Either(&[Kind::Text, Kind::List(&Kind::Map)]),
        "text or items; items need neither type nor id",
    ),
    Field::optional("instructions", Kind::Text, "a system message before all others"),
    Field::optional(
        "model",
        Kind::Text,
        "any name means the loaded model, unless the server is told to be strict",
    ),
    Field::optional("stream", Kind::Bool, ""),
    limit_field("max_output_tokens", "reasoning included"),
    Field::optional("tools", Kind::List(&Kind::Map), "type function only"),
    Field::optional(
        "tool_choice",
        Kind::Either(&[Kind::Text, Kind::Map]),
        "auto, none, required, or one by name",
    ),
    Field::optional("parallel_tool_calls", Kind::Bool, "default true"),
    Field::optional("reasoning", Kind::Object(REASONING), ""),
    Field::optional("text", Kind::Object(TEXT), ""),
    Field::optional("metadata", Kind::Map, "given back"),
    Field::ignored("store", "nothing is stored"),
    Field::ignored("include", ""),
    Field::ignored("user", "not kept"),
    Field::ignored("truncation", "input that does not fit is a 400"),
    Field::ignored("service_tier", "there is one"),
    Field::ignored("prompt_cache_key", "prefixes are found by content"),
    Field::ignored("prompt_cache_retention", ""),
    Field::ignored("safety_identifier", "not kept"),
    Field::ignored("stream_options", ""),
    Field::ignored("top_logprobs", ""),
    Field::ignored("client_metadata", "not kept"),
    Field::refused("previous_response_id", "nothing is stored; send the whole history"),
    Field::refused("conversation", "nothing is stored; send the whole history"),
    Field::refused("background", "answers come while the connection is open"),
    Field::refused("prompt", "there are no stored prompts"),
];

const FIELD_TABLE: [Field; OWN.len() + SAMPLING_FIELDS.len()] = concat(OWN, SAMPLING_FIELDS);
/// The fields.
pub const FIELDS: &[Field] = &FIELD_TABLE;

/// A generation from a checked body.
pub fn parse(body: Body<'_>) -> Result<Work, ApiError> {
    let mut work = Work::new(Prompt::Chat(read_conversation(body)?));
    work.sampling = params::sampling(body)?;
    work.seed = params::seed(body);
    params::endings(body, &mut work)?;
    work.max_tokens = body.count("max_output_tokens");
    let format = body.object("text").and_then(|text| text.object("format"));
    work.form =
        match (format.and_then(|format| format.text("type")), format.and_then(|format| format.get("schema")))
        {
            (Some("json_object"), _) => Form::JsonObject,
            (Some("json_schema"), Some(schema)) => Form::JsonSchema(schema.clone()),
            (Some("json_schema"), None) => {
                return Err(ApiError::field("text.format.schema", "Type json_schema needs a 'schema'"));
            }
            _ => Form::Free,
        };
    params::check_endings(&work, body.list("tools").is_some_and(|tools| !tools.is_empty()))?;
    Ok(work)
}

fn read_conversation(body: Body<'_>) -> Result<Conversation, ApiError> {
    let mut messages = Vec::new();
    if let Some(text) = body.text("instructions").filter(|text| !text.is_empty()) {
        messages.push(json!({"role": "system", "content": text}));
    }
    match body.get("input") {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                self::item(item, &format!("input[{index}]"), &mut messages)?;
            }
        }
        _ => {}
    }
    if messages.is_empty() {
        return Err(ApiError::field("input", "'input' must hold at least one item"));
    }
    let mut tools = Vec::new();
    for (index, tool) in body.list("tools").unwrap_or_default().iter().enumerate() {
        match tool.get("type").and_then(Value::as_str) {
            Some("function") => tools.push(tool.clone()),
            // Agents list what their vendor hosts; what cannot be called here is not shown to the model.
            Some(
                "web_search" | "web_search_preview" | "local_shell" | "image_generation" | "file_search",
            ) => {}
            _ => {
                return Err(ApiError::unsupported(
                    format!("tools[{index}].type"),
                    "Only tools of type function are supported",
                ));
            }
        }
    }
    let choice = tool_choice(body.get("tool_choice"))?;
    let mut found = conversation(&messages, &tools, choice)?;
    found.parallel_calls = body.flag("parallel_tool_calls").unwrap_or(true);
    let effort = body.object("reasoning").and_then(|reasoning| reasoning.text("effort"));
    found.strength = effort.map(|word| strength(word, "reasoning.effort")).transpose()?;
    Ok(found)
}

fn item(item: &Value, path: &str, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let text = |key: &str| item.get(key).and_then(Value::as_str);
    let needed = |key: &str| {
        text(key).ok_or_else(|| ApiError::field(format!("{path}.{key}"), format!("'{key}' must be a string")))
    };
    let kind = match text("type") {
        Some(kind) => kind,
        // Items without a type are told by what they hold.
        None if item.get("role").is_some() => "message",
        None if item.get("call_id").is_some() && item.get("output").is_some() => "function_call_output",
        None if item.get("call_id").is_some() => "function_call",
        None => "reasoning",
    };
    match kind {
        "message" => {
            let content = item.get("content").cloned().unwrap_or(Value::Null);
            match needed("role")? {
                "assistant" => last_assistant(out, |message| {
                    let said = joined_text(&content);
                    append(message, "content", &said);
                }),
                role => out.push(json!({"role": role, "content": content})),
            }
        }
        "reasoning" => {
            let parts = [item.get("content"), item.get("summary")];
            let thought = parts.into_iter().flatten().map(joined_text).find(|text| !text.is_empty());
            if let Some(thought) = thought {
                last_assistant(out, |message| append(message, "reasoning_content", &thought));
            }
        }
        "function_call" => {
            let call = json!({
                "id": text("call_id").or(text("id")).unwrap_or_default(),
                "type": "function",
                "function": {"name": needed("name")?, "arguments": item.get("arguments").cloned().unwrap_or(Value::Null)},
            });
            last_assistant(out, |message| {
                if let Some(calls) = message.entry("tool_calls").or_insert_with(|| json!([])).as_array_mut() {
                    calls.push(call);
                }
            });
        }
        "function_call_output" => out.push(json!({
            "role": "tool",
            "tool_call_id": needed("call_id")?,
            "content": match item.get("output") {
                Some(Value::String(text)) => text.clone(),
                Some(parts @ Value::Array(_)) => joined_text(parts),
                Some(other) => other.to_string(),
                None => String::new(),
            },
        })),
        "item_reference" => {
            return Err(ApiError::unsupported(
                format!("{path}.type"),
                "Nothing is stored; send the item itself",
            ));
        }
        other => {
            return Err(ApiError::unsupported(
                format!("{path}.type"),
                format!("Items of type {} are not supported", Value::from(other)),
            ));
        }
    }
    Ok(())
}

/// One turn of the model is several items here and one message there.
fn last_assistant(out: &mut Vec<Value>, change: impl FnOnce(&mut Map<String, Value>)) {
    if out.last().is_none_or(|message| message["role"] != "assistant") {
        out.push(json!({"role": "assistant"}));
    }
    if let Some(Value::Object(message)) = out.last_mut() {
        change(message);
    }
}

fn append(message: &mut Map<String, Value>, key: &str, text: &str) {
    let before = message.get(key).and_then(Value::as_str).unwrap_or_default();
    let joined = format!("{before}{text}");
    message.insert(key.into(), joined.into());
}

/// The text of a string or of parts; anything else has none.
fn joined_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part.as_str().or_else(|| part.get("text")?.as_str())).collect()
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(body: Value) -> Result<Conversation, Option<String>> {
        crate::routes::tests::conversation_of(FIELDS, parse, body)
    }

    #[test]
    fn items_without_type_or_id_are_understood() {
        let input = json!([
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "reasoning", "content": null, "summary": []},
            {"call_id": "c1", "name": "w", "arguments": "{\"city\":\"Paris\"}"},
            {"call_id": "c1", "output": "14"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "14 degrees"}]},
        ]);
        let found = run(json!({"input": input, "instructions": "Be brief."})).expect("valid").messages;
        let roles: Vec<&str> = found.iter().filter_map(|message| message["role"].as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "assistant"]);
        assert_eq!(found[2]["tool_calls"][0]["function"]["arguments"], json!({"city": "Paris"}));
    }

    #[test]
    fn one_turn_of_several_items_is_one_message() {
        let input = json!([
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        ]);
        let found = run(json!({"input": input})).expect("valid").messages;
        assert_eq!(found.len(), 2);
        assert_eq!(found[1]["reasoning_content"], "hm");
        assert_eq!(found[1]["tool_calls"].as_array().map(Vec::len), Some(2));
    }

    #[test]
    fn what_is_stored_elsewhere_is_refused() {
        for (field, value) in [("previous_response_id", json!("resp_1")), ("conversation", json!("conv_1"))] {
            assert_eq!(run(json!({"input": "a", field: value})), Err(Some(field.into())));
        }
        assert!(run(json!({"input": "a", "previous_response_id": null})).is_ok());
        assert_eq!(
            run(json!({"input": [{"type": "item_reference", "id": "x"}]})),
            Err(Some("input[0].type".into()))
        );
    }
}
