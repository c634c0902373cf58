//! The body of `/v1/messages`, as OpenAI-shaped messages for the one normaliser.

use serde_json::{Map, Value, json};

use super::blocks::Turns;
use crate::body::say_once;
use crate::conversation::{conversation, strength};
use crate::error::ApiError;
use crate::fields::{Body, Field, Kind};
use crate::generation_params::{Conversation, GenerationParams, Prompt, ResponseFormat, ToolChoice};
use crate::params::{self, SHARE, limit_field};
use crate::places::Places;

const THINKING: &[Field] = &[
    Field::required(
        "type",
        Kind::OneOf(&["enabled", "disabled", "adaptive"]),
        "disabled answers at once; absent or enabled: the model's strength",
    ),
    Field::ignored("budget_tokens", "the model has strengths, not budgets; see output_config.effort"),
    Field::ignored("display", ""),
];

const FORMAT: &[Field] = &[
    Field::required("type", Kind::OneOf(&["json_schema"]), ""),
    Field::required("schema", Kind::Map, "JSON schema of the answer"),
    Field::ignored("name", ""),
];

const OUTPUT_CONFIG: &[Field] = &[
    Field::optional("effort", Kind::Text, "low, medium, high, xhigh or max"),
    Field::optional("format", Kind::Object(FORMAT), "holds for the answer, not for thinking"),
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
                "roles user, assistant and system; content as string or blocks; what cannot be shown is said to have been there; an \
                 assistant's last message is gone on with",
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
            Field::optional("tools", Kind::List(&Kind::Map), "custom tools; those that a server would run are left out"),
            Field::optional("tool_choice", Kind::Object(TOOL_CHOICE), ""),
            Field::optional("thinking", Kind::Object(THINKING), ""),
            Field::optional("output_config", Kind::Object(OUTPUT_CONFIG), ""),
            Field::optional("output_format", Kind::Object(FORMAT), "the older place of output_config.format"),
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
pub fn parse(body: Body<'_>) -> Result<GenerationParams, ApiError> {
    let Tools { functions, places, left_out } = tools(body.list("tools").unwrap_or_default());
    let (conversation, places) = read_conversation(body, &functions, places)?;
    let continues = conversation.prefix.is_some();
    let mut work = GenerationParams::new(Prompt::Chat(Box::new(conversation)));
    work.places = places;
    work.left_out = left_out;
    work.sampling = params::sampling(body)?;
    work.stops = params::stops(body, "stop_sequences")?;
    work.max_tokens = body.count("max_tokens");
    let config = body.object("output_config").and_then(|config| config.object("format"));
    let format = config.map(|format| (format, "output_config.format"));
    if let Some((format, place)) = format.or_else(|| Some((body.object("output_format")?, "output_format"))) {
        if continues {
            let message = format!("'{place}' needs a whole answer, and the last message has begun one");
            return Err(ApiError::unsupported(place, message));
        }
        work.form = ResponseFormat::JsonSchema(format.get("schema").cloned().unwrap_or_default());
        work.places.form = format!("{place}.schema");
    }
    Ok(work)
}

fn read_conversation(
    body: Body<'_>,
    tools: &[Value],
    tool_places: Vec<String>,
) -> Result<(Conversation, Places), ApiError> {
    let mut turns = Turns::default();
    if let Some(text) = system(body.get("system"))? {
        turns.push(json!({"role": "system", "content": text}), "system");
    }
    let list = body.list("messages").unwrap_or_default();
    if list.is_empty() {
        return Err(ApiError::field("messages", "'messages' must hold at least one message"));
    }
    for (index, value) in list.iter().enumerate() {
        turns.message(value, &format!("messages[{index}]"))?;
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
    let prefix = turns.take_beginning();
    if prefix.is_some() && matches!(tool_choice, ToolChoice::Required | ToolChoice::Named(_)) {
        let message = "A call cannot be asked for when the last message has begun the answer";
        return Err(ApiError::unsupported("tool_choice", message));
    }
    let places = Places {
        messages: turns.places,
        tools: tool_places,
        schema: Some("input_schema"),
        ..Places::default()
    };
    let mut found =
        conversation(&turns.messages, tools, tool_choice).map_err(|fault| places.locate(fault))?;
    found.prefix = prefix;
    let single = choice.and_then(|choice| choice.flag("disable_parallel_tool_use")).unwrap_or(false);
    found.parallel_calls = !single;
    let effort = body.object("output_config").and_then(|config| config.text("effort"));
    found.strength = effort.map(|word| strength(word, "output_config.effort")).transpose()?;
    if body.object("thinking").and_then(|thinking| thinking.text("type")) == Some("disabled") {
        found.strength = Some("none".into());
    }
    Ok((found, places))
}

/// The tools of a request.
#[derive(Default)]
struct Tools {
    /// Those that the client runs, as functions.
    functions: Vec<Value>,
    /// Where they stood.
    places: Vec<String>,
    /// Where the others stood, and why they are left out.
    left_out: Vec<(String, String)>,
}

/// Tools that only their vendor's server runs are left out: what cannot be called is not shown to the model.
fn tools(list: &[Value]) -> Tools {
    let mut found = Tools::default();
    for (index, tool) in list.iter().enumerate() {
        let kind = tool.get("type").and_then(Value::as_str).unwrap_or("custom");
        if kind != "custom" {
            say_once("/v1/messages", "a tool that a server would run is left out", kind);
            let why = format!("left out, tools of type {} are not to be had here", Value::from(kind));
            found.left_out.push((format!("tools[{index}]"), why));
            continue;
        }
        let mut function = Map::new();
        for (to, from) in [
            ("name", "name"),
            ("description", "description"),
            ("parameters", "input_schema"),
            ("strict", "strict"),
        ] {
            if let Some(value) = tool.get(from) {
                function.insert(to.into(), value.clone());
            }
        }
        found.functions.push(json!({"type": "function", "function": function}));
        found.places.push(format!("tools[{index}]"));
    }
    found
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
    fn what_cannot_be_shown_is_said_to_have_been_there() {
        let picture =
            json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}});
        let note = |kind: &str| format!("[{kind}: this model reads text only]");
        let text = |blocks: Value| {
            let messages = json!([{"role": "user", "content": blocks}]);
            let found = run(json!({"max_tokens": 5, "messages": messages})).expect("valid");
            let found = crate::conversation::without_pictures(&found, "none").expect("may be told").messages;
            found[0]["content"].as_str().expect("text").to_owned()
        };
        assert_eq!(text(json!([{"type": "text", "text": "a"}, picture])), format!("a\n{}", note("image")));
        let plain = json!({"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}});
        assert_eq!(text(json!([plain])), "T\nd");
        let pdf = json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}});
        assert_eq!(text(json!([pdf])), note("document"));
        let result = |content: Value| json!({"type": "tool_result", "tool_use_id": "t", "content": content});
        assert_eq!(
            text(json!([result(json!([{"type": "text", "text": "a"}, picture]))])),
            format!("a\n{}", note("image"))
        );
        let reference = json!({"type": "tool_reference", "tool_name": "grep"});
        assert_eq!(text(json!([result(json!([reference]))])), "[tool: grep]");
        let found = json!({"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "x"}]});
        assert_eq!(text(json!([result(json!([found]))])), "T\ns\nx");
        assert_eq!(text(json!([{"type": "of_next_year"}])), note("of_next_year"));
    }

    #[test]
    fn what_other_servers_did_is_passed_over() {
        let messages = json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
                {"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "s", "input": {}},
                {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Found."},
            ]},
            {"role": "user", "content": "b"},
        ]);
        let tools = json!([
            {"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"},
            {"name": "f", "input_schema": {}}, {"type": "custom", "name": "g", "input_schema": {}},
        ]);
        let body = json!({"max_tokens": 5, "messages": messages, "tools": tools});
        let found = run(body.clone()).expect("valid");
        assert_eq!(found.messages[1]["content"], "Found.");
        assert_eq!(found.tools.len(), 2);
        let mut forced = body;
        forced["tool_choice"] = json!({"type": "tool", "name": "web_search"});
        assert_eq!(run(forced).err(), Some(Some("tool_choice".into())));
    }

    #[test]
    fn an_assistants_last_message_is_gone_on_with() {
        let body = |last: Value, more: Value| {
            let mut body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "a"}, last]});
            body.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
            body
        };
        let begun = json!({"role": "assistant", "content": [{"type": "text", "text": "Once"}]});
        let found = run(body(begun.clone(), json!({}))).expect("valid");
        assert_eq!((found.prefix, found.messages.len()), (Some("Once".into()), 1));
        let tools = json!([{"name": "f", "input_schema": {}}]);
        let forced = json!({"tools": tools, "tool_choice": {"type": "any"}});
        assert_eq!(run(body(begun.clone(), forced)).err(), Some(Some("tool_choice".into())));
        let format = json!({"type": "json_schema", "schema": {"type": "object"}});
        let formed = json!({"output_config": {"format": format}});
        assert_eq!(run(body(begun, formed)).err(), Some(Some("output_config.format".into())));
        // A call waits for its result, not for more text.
        let calling = json!({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]});
        assert_eq!(run(body(calling, json!({}))).expect("valid").prefix, None);
    }

    #[test]
    fn a_schema_is_taken_from_both_places() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let format = json!({"type": "json_schema", "schema": schema});
        for more in
            [json!({"output_config": {"format": format, "effort": "low"}}), json!({"output_format": format})]
        {
            let mut body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]});
            body.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
            let Value::Object(body) = body else { panic!("object") };
            crate::fields::check(FIELDS, &body).expect("valid");
            assert_eq!(parse(Body(&body)).expect("valid").form, ResponseFormat::JsonSchema(schema.clone()));
        }
        let wrong = json!({"max_tokens": 1, "messages": [], "output_config": {"format": {"type": "xml"}}});
        assert_eq!(run(wrong), Err(Some("output_config.format.type".into())));
    }

    #[test]
    fn faults_name_the_block_whatever_stands_before_it() {
        let body = |messages: Value| json!({"max_tokens": 5, "system": "s", "messages": messages});
        let user = json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": "x"}, {"type": "text", "text": "a"}]});
        for (last, param) in [
            (json!({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text"),
            (json!({"role": "user", "content": [{"text": "a"}]}), "messages[1].content[0].type"),
            (json!({"role": "user", "content": 3}), "messages[1].content"),
            (json!({"role": "tool", "content": "a"}), "messages[1].role"),
            (
                json!({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "", "input": {}}]}),
                "messages[1].content[0].name",
            ),
        ] {
            assert_eq!(run(body(json!([user, last]))), Err(Some(param.into())), "{last}");
        }
        assert_eq!(
            run(json!({"messages": [{"role": "user", "content": "a"}]})),
            Err(Some("max_tokens".into()))
        );
        let tools = json!([{"type": "web_search_20250305", "name": "w"}, {"name": "f", "input_schema": 3}]);
        let wrong = json!({"max_tokens": 1, "messages": [user], "tools": tools});
        assert_eq!(run(wrong), Err(Some("tools[1].input_schema".into())));
    }
}
