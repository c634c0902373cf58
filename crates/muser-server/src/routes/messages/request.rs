//! The body of `/v1/messages`, as OpenAI-shaped messages for the one normaliser.

use serde_json::{Map, Value, json};

use crate::conversation::{conversation, strength};
use crate::error::ApiError;
use crate::fields::{Body, Field, Kind};
use crate::params::{self, SHARE, limit_field};
use crate::work::{Conversation, Prompt, ToolChoice, Work};

const THINKING: &[Field] = &[
    Field::required(
        "type",
        Kind::OneOf(&["enabled", "disabled", "adaptive"]),
        "disabled answers at once; absent or enabled: the model's strength",
    ),
    Field::ignored("budget_tokens", "the model has strengths, not budgets; see output_config.effort"),
    Field::ignored("display", ""),
];

const OUTPUT_CONFIG: &[Field] = &[
    Field::optional("effort", Kind::Text, "low, medium, high, xhigh or max"),
    Field::refused("format", "use /v1/chat/completions with response_format"),
];

const TOOL_CHOICE: &[Field] = &[
    Field::required("type", Kind::OneOf(&["auto", "any", "tool", "none"]), ""),
    Field::optional("name", Kind::Text, "for type tool"),
    Field::optional("disable_parallel_tool_use", Kind::Bool, ""),
];

macro_rules! fields {
    ($max_tokens:expr) => {
        &[
            Field::required(
                "messages",
                Kind::List(&Kind::Map),
                "roles user and assistant; content as string or blocks",
            ),
            $max_tokens,
            Field::optional(
                "model",
                Kind::Text,
                "any name means the loaded model, unless the server is told to be strict",
            ),
            Field::optional(
                "system",
                Kind::Either(&[Kind::Text, Kind::List(&Kind::Map)]),
                "billing blocks that differ from call to call are left out",
            ),
            Field::optional("stop_sequences", Kind::List(&Kind::Text), ""),
            Field::optional("stream", Kind::Bool, ""),
            Field::optional("temperature", Kind::Number { min: 0.0, max: f32::MAX as f64 }, "default 1"),
            Field::optional("top_p", SHARE, "default 0.95"),
            Field::optional("top_k", Kind::Integer { min: -1, max: u32::MAX as i64 }, "default 64"),
            Field::optional("tools", Kind::List(&Kind::Map), "custom tools only"),
            Field::optional("tool_choice", Kind::Object(TOOL_CHOICE), ""),
            Field::optional("thinking", Kind::Object(THINKING), ""),
            Field::optional("output_config", Kind::Object(OUTPUT_CONFIG), ""),
            Field::ignored("metadata", "not kept"),
            Field::ignored("service_tier", "there is one"),
            Field::ignored("context_management", "nothing is edited"),
            Field::ignored("betas", ""),
            Field::refused("mcp_servers", "the server calls nobody"),
            Field::refused("container", "there is no code execution"),
        ]
    };
}

/// The fields of `/v1/messages`.
pub const FIELDS: &[Field] = fields!(Field::required(
    "max_tokens",
    crate::fields::COUNT,
    "reasoning included; 0: only read the prompt"
));
/// The fields of `/v1/messages/count_tokens`.
pub const COUNT_FIELDS: &[Field] = fields!(limit_field("max_tokens", "without effect here"));

/// A generation from a checked body.
pub fn parse(body: Body<'_>) -> Result<Work, ApiError> {
    let mut work = Work::new(Prompt::Chat(read_conversation(body)?));
    work.sampling = params::sampling(body)?;
    work.stops = params::stops(body, "stop_sequences")?;
    work.max_tokens = body.count("max_tokens");
    Ok(work)
}

fn read_conversation(body: Body<'_>) -> Result<Conversation, ApiError> {
    let mut messages = Vec::new();
    if let Some(text) = system(body.get("system"))? {
        messages.push(json!({"role": "system", "content": text}));
    }
    let list = body.list("messages").unwrap_or_default();
    if list.is_empty() {
        return Err(ApiError::field("messages", "'messages' must hold at least one message"));
    }
    for (index, value) in list.iter().enumerate() {
        message(value, &format!("messages[{index}]"), &mut messages)?;
    }
    let mut tools = Vec::new();
    for (index, tool) in body.list("tools").unwrap_or_default().iter().enumerate() {
        let kind = tool.get("type").and_then(Value::as_str).unwrap_or("custom");
        if kind != "custom" {
            return Err(ApiError::unsupported(
                format!("tools[{index}].type"),
                format!("Server tools such as {} are not supported", Value::from(kind)),
            ));
        }
        let mut function = Map::new();
        for (to, from) in [("name", "name"), ("description", "description"), ("parameters", "input_schema")] {
            if let Some(value) = tool.get(from) {
                function.insert(to.into(), value.clone());
            }
        }
        tools.push(json!({"type": "function", "function": function}));
    }
    let choice = body.object("tool_choice");
    let tool_choice = match choice.and_then(|choice| choice.text("type")) {
        Some("any") => ToolChoice::Required,
        Some("none") => ToolChoice::None,
        Some("tool") => match choice.and_then(|choice| choice.text("name")) {
            Some(name) => ToolChoice::Named(name.to_owned()),
            None => {
                return Err(ApiError::field("tool_choice.name", "'tool_choice' of type tool needs a 'name'"));
            }
        },
        _ => ToolChoice::Auto,
    };
    let mut found = conversation(&messages, &tools, tool_choice)?;
    let single = choice.and_then(|choice| choice.flag("disable_parallel_tool_use")).unwrap_or(false);
    found.parallel_calls = !single;
    let effort = body.object("output_config").and_then(|config| config.text("effort"));
    found.strength = effort.map(|word| strength(word, "output_config.effort")).transpose()?;
    if body.object("thinking").and_then(|thinking| thinking.text("type")) == Some("disabled") {
        found.strength = Some("none".into());
    }
    Ok(found)
}

/// What starts a block that agents put before their system text, with numbers that change from call to call: in the
/// prompt it would make every prefix a new one.
const BILLING: &str = "x-anthropic-billing-header:";

fn system(value: Option<&Value>) -> Result<Option<String>, ApiError> {
    let texts: Vec<&str> = match value {
        None => return Ok(None),
        Some(Value::String(text)) => vec![text],
        Some(value) => value
            .as_array()
            .into_iter()
            .flatten()
            .enumerate()
            .map(|(index, block)| {
                block.get("text").and_then(Value::as_str).ok_or_else(|| {
                    ApiError::field(format!("system[{index}].text"), "A system block needs a text")
                })
            })
            .collect::<Result<_, _>>()?,
    };
    let kept: Vec<&str> = texts.into_iter().filter(|text| !text.trim_start().starts_with(BILLING)).collect();
    Ok(if kept.is_empty() { None } else { Some(kept.join("\n\n")) })
}

fn message(value: &Value, path: &str, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let Some(role @ ("user" | "assistant" | "system")) = value.get("role").and_then(Value::as_str) else {
        return Err(ApiError::field(format!("{path}.role"), "'role' must be user or assistant"));
    };
    let blocks = match value.get("content") {
        Some(Value::String(text)) => {
            out.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Some(Value::Array(blocks)) => blocks,
        _ => {
            return Err(ApiError::field(
                format!("{path}.content"),
                "'content' must be a string or a list of blocks",
            ));
        }
    };
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for (index, block) in blocks.iter().enumerate() {
        let here = format!("{path}.content[{index}]");
        let needed = |key: &str| {
            block
                .get(key)
                .and_then(Value::as_str)
                .ok_or_else(|| ApiError::field(format!("{here}.{key}"), format!("'{key}' must be a string")))
        };
        match needed("type")? {
            "text" => text.push_str(needed("text")?),
            "thinking" => reasoning.push_str(needed("thinking")?),
            "redacted_thinking" => {}
            "tool_use" => calls.push(json!({
                "id": needed("id")?,
                "type": "function",
                "function": {"name": needed("name")?, "arguments": block.get("input").cloned().unwrap_or(json!({}))},
            })),
            "tool_result" => out.push(json!({
                "role": "tool",
                "tool_call_id": needed("tool_use_id")?,
                "content": tool_result(block.get("content"), &here)?,
            })),
            kind => {
                return Err(ApiError::unsupported(
                    format!("{here}.type"),
                    format!("Blocks of type {} are not supported by the loaded model", Value::from(kind)),
                ));
            }
        }
    }
    if role == "assistant" {
        out.push(json!({"role": role, "content": text, "reasoning_content": reasoning, "tool_calls": calls}));
    } else if !text.is_empty() || !blocks.iter().any(|block| block["type"] == "tool_result") {
        out.push(json!({"role": role, "content": text}));
    }
    Ok(())
}

fn tool_result(content: Option<&Value>, path: &str) -> Result<String, ApiError> {
    match content {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(blocks)) => blocks
            .iter()
            .enumerate()
            .map(|(index, block)| {
                block.get("text").and_then(Value::as_str).ok_or_else(|| {
                    ApiError::unsupported(
                        format!("{path}.content[{index}]"),
                        "Only text blocks of tool results are supported by the loaded model",
                    )
                })
            })
            .collect(),
        Some(_) => {
            Err(ApiError::field(format!("{path}.content"), "'content' must be a string or a list of blocks"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(body: Value) -> Result<Conversation, Option<String>> {
        crate::routes::tests::conversation_of(FIELDS, parse, body)
    }

    #[test]
    fn billing_blocks_leave_no_trace() {
        let check = |nonce: &str| {
            let system = json!([
                {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=1; cch={nonce};")},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ]);
            run(json!({"max_tokens": 5, "system": system, "messages": [{"role": "user", "content": "a"}]}))
                .expect("valid")
        };
        assert_eq!(check("1a2b"), check("ffff"));
        assert_eq!(check("1a2b").messages[0]["content"], "Be brief.");
    }

    #[test]
    fn tool_results_come_before_the_text_beside_them() {
        let messages = json!([
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "call it", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "w", "input": {"city": "Paris"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "14"}]},
                {"type": "text", "text": "and tomorrow?"},
            ]},
        ]);
        let found = run(json!({"max_tokens": 5, "messages": messages})).expect("valid").messages;
        let roles: Vec<&str> = found.iter().filter_map(|message| message["role"].as_str()).collect();
        assert_eq!(roles, ["user", "assistant", "tool", "user"]);
        assert_eq!(found[1]["reasoning_content"], "call it");
        assert_eq!(found[1]["tool_calls"][0]["function"]["arguments"], json!({"city": "Paris"}));
        assert_eq!(found[2]["content"], "14");
    }

    #[test]
    fn faults_name_the_block() {
        let image = json!([{"type": "image", "source": {"type": "url", "url": "http://x"}}]);
        let outcome = run(json!({"max_tokens": 5, "messages": [{"role": "user", "content": image}]}));
        assert_eq!(outcome, Err(Some("messages[0].content[0].type".into())));
        assert_eq!(
            run(json!({"messages": [{"role": "user", "content": "a"}]})),
            Err(Some("max_tokens".into()))
        );
        let body = json!({"max_tokens": 1, "messages": [{"role": "tool", "content": "a"}]});
        assert_eq!(run(body), Err(Some("messages[0].role".into())));
    }
}
