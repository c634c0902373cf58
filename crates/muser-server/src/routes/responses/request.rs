//! The body of `/v1/responses`: a list of items instead of messages, perhaps after a response that was kept.

use std::sync::Arc;

use serde_json::{Value, json};

use super::history::{self, History};
use super::store::{Kept, Owner, Responses};
use super::tools::Toolbox;
use crate::conversation::{allow, conversation, strength};
use crate::error::ApiError;
use crate::fields::{Body, Field, Kind};
use crate::generation_params::{Conversation, GenerationParams, Prompt, ResponseFormat};
use crate::params::{self, SAMPLING_FIELDS, concat, limit_field};
use crate::places::Places;

const REASONING: &[Field] = &[
    Field::optional("effort", Kind::Text, "none, minimal, low, medium, high, xhigh or max"),
    Field::optional("summary", Kind::Text, "any: the reasoning is given as a summary too"),
    Field::optional("generate_summary", Kind::Text, "the same, in the older spelling"),
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
    Field::optional(
        "input",
        Kind::Either(&[Kind::Text, Kind::List(&Kind::Map)]),
        "needed; text or items; items need neither type nor id",
    ),
    Field::optional("instructions", Kind::Text, "a system message before all others"),
    Field::optional(
        "model",
        Kind::Text,
        "any name means the loaded model, unless the server is told to be strict",
    ),
    Field::optional("stream", Kind::Bool, ""),
    limit_field("max_output_tokens", "reasoning included"),
    Field::optional(
        "tools",
        Kind::List(&Kind::Map),
        "types function, custom and namespace; those of other types are left out",
    ),
    Field::optional(
        "tool_choice",
        Kind::Either(&[Kind::Text, Kind::Map]),
        "auto, none, required, one by name, or allowed_tools",
    ),
    Field::optional("parallel_tool_calls", Kind::Bool, "default true"),
    Field::optional("reasoning", Kind::Object(REASONING), ""),
    Field::optional("text", Kind::Object(TEXT), ""),
    Field::optional("metadata", Kind::Map, "given back"),
    Field::optional(
        "store",
        Kind::Bool,
        "default true: kept in memory, among the last 1024 and 64 MiB, for this key alone",
    ),
    Field::optional(
        "previous_response_id",
        Kind::Text,
        "goes on from a response that was kept; its instructions are not taken over",
    ),
    Field::optional(
        "include",
        Kind::List(&Kind::Text),
        "reasoning.encrypted_content (encoded, not secret) and message.output_text.logprobs; others have no effect",
    ),
    Field::optional(
        "top_logprobs",
        Kind::Integer { min: 0, max: 20 },
        "log-probabilities of the answer's tokens",
    ),
    Field::optional(
        "truncation",
        Kind::OneOf(&["auto", "disabled"]),
        "auto: of input that does not fit the oldest turns are left out; else it is a 400",
    ),
    Field::ignored("user", "not kept"),
    Field::ignored("service_tier", "there is one"),
    Field::ignored("prompt_cache_key", "prefixes are found by content"),
    Field::ignored("prompt_cache_retention", ""),
    Field::ignored("safety_identifier", "not kept"),
    Field::ignored("stream_options", ""),
    Field::ignored("max_tool_calls", "tools are called by the client"),
    Field::ignored("client_metadata", "not kept"),
    Field::refused("conversation", "use previous_response_id, or send the whole history"),
    Field::refused("background", "answers come while the connection is open"),
    Field::refused("prompt", "there are no stored prompts"),
];

const FIELD_TABLE: [Field; OWN.len() + SAMPLING_FIELDS.len()] = concat(OWN, SAMPLING_FIELDS);
/// The fields.
pub const FIELDS: &[Field] = &FIELD_TABLE;

/// A valid request.
#[derive(Debug)]
pub struct Asked {
    /// The generation.
    pub work: GenerationParams,
    /// What the tools are to the client.
    pub tools: Toolbox,
    /// The items of the input, references resolved, each with an id.
    pub input: Vec<Value>,
    /// The response that it goes on from.
    pub before: Option<Arc<Kept>>,
    /// Whether to keep the response.
    pub store: bool,
    /// Whether to leave out old turns of what does not fit.
    pub shorten: bool,
    /// What the answer is to show.
    pub shows: Shows,
}

/// What an answer shows beside the text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shows {
    /// Reasoning as a summary too.
    pub summary: bool,
    /// Reasoning encoded, for clients that keep nothing else of it.
    pub encrypted: bool,
    /// Log-probabilities.
    pub logprobs: bool,
}

/// A request from a checked body.
pub fn parse(body: Body<'_>, store: &Responses, owner: Owner) -> Result<Asked, ApiError> {
    let before = body.text("previous_response_id").filter(|id| !id.is_empty());
    let before = before.map(|id| store.get(owner, id).ok_or_else(|| no_previous(id))).transpose()?;
    let tools = Toolbox::of(body.list("tools").unwrap_or_default())?;
    let input = items(body, store, owner)?;
    let mut history = History::default();
    if let Some(text) = body.text("instructions").filter(|text| !text.is_empty()) {
        history.system(text, "instructions");
    }
    for item in before.iter().flat_map(|kept| kept.items()) {
        history.item(&item, "previous_response_id", &tools)?;
    }
    for (index, item) in input.iter().enumerate() {
        history.item(item, &format!("input[{index}]"), &tools)?;
    }
    if history.messages.is_empty() {
        return Err(ApiError::field(
            "input",
            "'input' must hold at least one item that can be shown to the model",
        ));
    }
    let History { messages, places, left_out } = history;
    let places = Places {
        prompt: "input",
        messages: places,
        tools: tools.places.clone(),
        schema: Some("parameters"),
        form: "text.format.schema".into(),
    };
    let conversation = read_conversation(body, &messages, &tools).map_err(|fault| places.locate(fault))?;
    let mut work = GenerationParams::new(Prompt::Chat(Box::new(conversation)));
    work.places = places;
    work.left_out = tools.left_out.iter().cloned().chain(left_out).collect();
    read_parameters(body, &mut work)?;
    params::check_endings(&work, !tools.functions.is_empty())?;
    let includes = |what: &str| body.list("include").unwrap_or_default().iter().any(|item| item == what);
    let reasoning = body.object("reasoning");
    let summary =
        |name: &str| reasoning.and_then(|reasoning| reasoning.text(name)).is_some_and(|word| word != "none");
    let top_logprobs = body.count("top_logprobs").unwrap_or(0);
    let logprobs = top_logprobs > 0 || includes("message.output_text.logprobs");
    work.logprobs = logprobs.then_some(top_logprobs as u8);
    Ok(Asked {
        work,
        tools,
        input,
        before,
        store: body.flag("store").unwrap_or(true),
        shorten: body.text("truncation") == Some("auto"),
        shows: Shows {
            summary: summary("summary") || summary("generate_summary"),
            encrypted: includes("reasoning.encrypted_content"),
            logprobs,
        },
    })
}

fn no_previous(id: &str) -> ApiError {
    let message = format!(
        "There is no response {} here (any more); send the whole history, or set 'store' and use the same key",
        Value::from(id)
    );
    let mut fault = ApiError::field("previous_response_id", message);
    fault.code = Some("previous_response_not_found");
    fault
}

/// The items of the input. References are followed; one to reasoning that is not there is dropped, since an answer does not
/// depend on it.
fn items(body: Body<'_>, store: &Responses, owner: Owner) -> Result<Vec<Value>, ApiError> {
    match body.get("input") {
        Some(Value::String(text)) => Ok(vec![
            json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}),
        ]),
        Some(Value::Array(items)) => items
            .iter()
            .enumerate()
            .map(|(index, item)| {
                if history::kind(item) != "item_reference" {
                    return Ok(item.clone());
                }
                let id = item["id"].as_str().unwrap_or_default();
                match store.item(owner, id) {
                    Some(found) => Ok(found),
                    None if id.starts_with("rs_") => Ok(item.clone()),
                    None => {
                        let message = format!("There is no item {} here; send the item itself", item["id"]);
                        Err(ApiError::field(format!("input[{index}].id"), message))
                    }
                }
            })
            .collect(),
        _ => Ok(Vec::new()),
    }
}

fn read_parameters(body: Body<'_>, work: &mut GenerationParams) -> Result<(), ApiError> {
    work.sampling = params::sampling(body)?;
    work.seed = params::seed(body);
    params::endings(body, work)?;
    work.max_tokens = body.count("max_output_tokens");
    let format = body.object("text").and_then(|text| text.object("format"));
    work.form =
        match (format.and_then(|format| format.text("type")), format.and_then(|format| format.get("schema")))
        {
            (Some("json_object"), _) => ResponseFormat::JsonObject,
            (Some("json_schema"), Some(schema)) => ResponseFormat::JsonSchema(schema.clone()),
            (Some("json_schema"), None) => {
                return Err(ApiError::field("text.format.schema", "Type json_schema needs a 'schema'"));
            }
            _ => ResponseFormat::Free,
        };
    Ok(())
}

fn read_conversation(body: Body<'_>, messages: &[Value], tools: &Toolbox) -> Result<Conversation, ApiError> {
    let (choice, allowed) = tools.choice(body.get("tool_choice"))?;
    let mut found = conversation(messages, &tools.functions, choice)?;
    if let Some(names) = allowed {
        allow(&mut found, names)?;
    }
    found.parallel_calls = body.flag("parallel_tool_calls").unwrap_or(true);
    let effort = body.object("reasoning").and_then(|reasoning| reasoning.text("effort"));
    found.strength = effort.map(|word| strength(word, "reasoning.effort")).transpose()?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(body: Value) -> Result<Asked, Option<String>> {
        let Value::Object(body) = body else { panic!("object") };
        crate::fields::check(FIELDS, &body).map_err(|fault| fault.param)?;
        parse(Body(&body), &Responses::default(), None).map_err(|fault| fault.param)
    }

    fn run(body: Value) -> Result<Conversation, Option<String>> {
        ask(body).map(|asked| match asked.work.prompt {
            Prompt::Chat(conversation) => *conversation,
            other => panic!("{other:?}"),
        })
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
    fn what_is_not_there_is_named() {
        let user = json!({"role": "user", "content": "a"});
        for (body, param) in [
            (json!({"input": "a", "previous_response_id": "resp_1"}), "previous_response_id"),
            (json!({"input": "a", "conversation": "conv_1"}), "conversation"),
            (json!({"input": [user, {"type": "item_reference", "id": "msg_1"}]}), "input[1].id"),
            (json!({"input": []}), "input"),
            (json!({"input": [{"type": "web_search_call"}]}), "input"),
            (json!({"instructions": null}), "input"),
        ] {
            assert_eq!(run(body.clone()).err(), Some(Some(param.into())), "{body}");
        }
        assert!(run(json!({"input": "a", "previous_response_id": null})).is_ok());
        assert!(run(json!({"input": [user, {"type": "item_reference", "id": "rs_1"}]})).is_ok());
    }

    #[test]
    fn faults_name_the_item_whatever_stands_before_it() {
        let image = json!({"role": "user", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:x"}]});
        let output = json!({"type": "function_call_output", "call_id": "c", "output": "x"});
        let user = json!({"role": "user", "content": "a"});
        for (item, param) in [
            (image, "input[2].content[1]"),
            (json!({"role": "wizard", "content": "a"}), "input[2].role"),
            (json!({"role": "user", "content": 3}), "input[2].content"),
            (json!({"type": "function_call", "call_id": "c", "name": ""}), "input[2].name"),
            (json!({"type": "function_call_output", "output": "a"}), "input[2].call_id"),
        ] {
            let body = json!({"instructions": "Be brief.", "input": [user, output, item]});
            assert_eq!(run(body).err(), Some(Some(param.into())), "{item}");
        }
        let tools = json!([{"type": "web_search"}, {"type": "function", "name": "a b"}]);
        assert_eq!(run(json!({"input": "a", "tools": tools})).err(), Some(Some("tools[1].name".into())));
    }

    #[test]
    fn allowed_tools_leave_the_others_in_the_prompt() {
        let tools = json!([{"type": "function", "name": "f"}, {"type": "function", "name": "g"}]);
        let choice =
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]});
        let found = run(json!({"input": "a", "tools": tools, "tool_choice": choice})).expect("valid");
        assert_eq!(found.tools.len(), 2);
        assert_eq!(found.allowed, Some(vec!["g".into()]));
        let none = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]});
        let body = json!({"input": "a", "tools": tools, "tool_choice": none});
        assert_eq!(run(body).err(), Some(Some("tool_choice".into())));
    }

    #[test]
    fn what_the_answer_shows_is_asked_for() {
        let shows = |body: Value| ask(body).expect("valid").shows;
        assert_eq!(shows(json!({"input": "a"})), Shows::default());
        let all = json!({
            "input": "a", "reasoning": {"summary": "auto"}, "top_logprobs": 2,
            "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        });
        assert_eq!(shows(all.clone()), Shows { summary: true, encrypted: true, logprobs: true });
        assert_eq!(ask(all).expect("valid").work.logprobs, Some(2));
        let listed = json!({"input": "a", "include": ["message.output_text.logprobs"]});
        assert_eq!(ask(listed).expect("valid").work.logprobs, Some(0));
        assert_eq!(ask(json!({"input": "a", "truncation": "some"})).err(), Some(Some("truncation".into())));
    }
}
