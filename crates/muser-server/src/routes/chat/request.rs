//! The body of `/v1/chat/completions`.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::history;
use crate::conversation::{allow, allowed_tools, conversation, strength, tool_choice};
use crate::error::ApiError;
use crate::fields::{Body, Field, Kind};
use crate::generation_params::{Conversation, GenerationParams, Prompt, ResponseFormat};
use crate::params::{self, SAMPLING_FIELDS, concat, limit_field};

const STREAM_OPTIONS: &[Field] = &[
    Field::optional("include_usage", Kind::Bool, "one more chunk at the end, with usage and no choices"),
    Field::ignored("include_obfuscation", ""),
];

const JSON_SCHEMA: &[Field] = &[
    Field::optional("name", Kind::Text, ""),
    Field::optional("schema", Kind::Either(&[Kind::Map, Kind::Bool]), "JSON schema of the answer"),
    Field::ignored("strict", "a schema is always enforced"),
    Field::ignored("description", ""),
];

/// The fields of `response_format`.
pub const RESPONSE_FORMAT: &[Field] = &[
    Field::required("type", Kind::OneOf(&["text", "json_object", "json_schema"]), ""),
    Field::optional("json_schema", Kind::Object(JSON_SCHEMA), "for type json_schema"),
    Field::optional("schema", Kind::Map, "the schema in llama-server's place"),
];

const STRUCTURED_OUTPUTS: &[Field] = &[
    Field::optional("json", Kind::Either(&[Kind::Map, Kind::Text]), "a JSON schema"),
    Field::optional("regex", Kind::Text, "a regular expression for the whole answer"),
    Field::optional("choice", Kind::List(&Kind::Text), "the answer is one of these"),
    Field::optional("grammar", Kind::Text, "Lark, or GBNF (told by `::=`)"),
    Field::optional("json_object", Kind::Bool, "any JSON object"),
    Field::refused("structural_tag", "use tools"),
];

/// The other spellings of a form of the answer: llama-server's and vLLM's.
pub const FORM_FIELDS: &[Field] = &[
    Field::optional("grammar", Kind::Text, "for the answer: Lark, or GBNF (told by `::=`)"),
    Field::optional("json_schema", Kind::Map, "a JSON schema, in llama-server's place"),
    Field::optional("guided_json", Kind::Either(&[Kind::Map, Kind::Text]), "a JSON schema, in vLLM's place"),
    Field::optional("guided_regex", Kind::Text, "a regular expression for the whole answer"),
    Field::optional("guided_choice", Kind::List(&Kind::Text), "the answer is one of these"),
    Field::optional("guided_grammar", Kind::Text, "as grammar"),
    Field::optional("regex", Kind::Text, "a regular expression, in SGLang's place"),
    Field::optional("ebnf", Kind::Text, "as grammar, in SGLang's place"),
    Field::optional(
        "structured_outputs",
        Kind::Object(STRUCTURED_OUTPUTS),
        "the same, in vLLM's newer place; it wins over the older one",
    ),
];

/// What vLLM takes and is not to be had here; ignoring it would give another answer than the one asked for.
pub const ABSENT_FIELDS: &[Field] = &[
    Field::refused("use_beam_search", "answers are sampled"),
    Field::refused("include_stop_str_in_output", "the text ends before a stop string"),
    Field::refused("truncate_prompt_tokens", "a prompt that does not fit is a 400"),
];

/// The reasoning strengths of the API.
pub const EFFORTS: Kind = Kind::OneOf(&["none", "minimal", "low", "medium", "high", "xhigh", "max"]);

/// What gateways of vLLM's kind send along.
pub const TRANSFER_PARAMS: Field = Field::ignored(
    "kv_transfer_params",
    "the node that it names is not asked: nodes are those of nodes.toml, chosen by measured rates; counted",
);

const OWN: &[Field] = &[
    Field::required(
        "messages",
        Kind::List(&Kind::Any),
        "roles system, developer (the same), user, assistant, tool; content as string, null or parts of type text and image_url (data URLs only; detail low: at most 256 tokens); without a projector images are a 400, but for a tool's, of which the model is told",
    ),
    Field::optional(
        "model",
        Kind::Text,
        "any name means the loaded model, unless the server is told to be strict",
    ),
    Field::optional("stream", Kind::Bool, ""),
    Field::optional("stream_options", Kind::Object(STREAM_OPTIONS), ""),
    limit_field("max_completion_tokens", "reasoning included; 0: only read the prompt; -1: no limit"),
    limit_field("max_tokens", "the same, in the older spelling"),
    Field::optional("n", Kind::Integer { min: 1, max: 16 }, "default 1; choices share the prompt"),
    Field::optional("logprobs", Kind::Bool, "log-probabilities of the answer's tokens"),
    Field::optional("top_logprobs", Kind::Integer { min: 0, max: 20 }, "needs logprobs"),
    Field::optional(
        "response_format",
        Kind::Object(RESPONSE_FORMAT),
        "holds for the answer, not for reasoning",
    ),
    Field::optional("tools", Kind::List(&Kind::Any), "types function and custom"),
    Field::optional(
        "tool_choice",
        Kind::Either(&[Kind::Text, Kind::Map]),
        "auto, none, required, one by name, or allowed_tools",
    ),
    Field::optional("parallel_tool_calls", Kind::Bool, "default true"),
    Field::optional(
        "reasoning_effort",
        EFFORTS,
        "the model's strength; minimal is low, max is xhigh, none answers at once",
    ),
    Field::optional(
        "chat_template_kwargs",
        Kind::Map,
        "more variables for the template; enable_thinking false is none",
    ),
    Field::ignored("user", "not kept"),
    Field::ignored("metadata", "not kept"),
    TRANSFER_PARAMS,
    Field::ignored("store", "nothing is stored"),
    Field::ignored("service_tier", "there is one"),
    Field::ignored("safety_identifier", "not kept"),
    Field::ignored("prompt_cache_key", "prefixes are found by content"),
    Field::ignored("prompt_cache_retention", ""),
    Field::ignored("prediction", "no effect on the answer"),
    Field::ignored("verbosity", "the model has no such control"),
    Field::ignored("timings_per_token", "timings come at the end"),
    Field::refused("functions", "use tools"),
    Field::refused("function_call", "use tool_choice"),
    Field::optional(
        "continue_final_message",
        Kind::Bool,
        "goes on from the last message, an assistant's, instead of beginning a turn",
    ),
    Field::optional(
        "prompt_logprobs",
        Kind::Integer { min: 0, max: 20 },
        "log-probabilities of the prompt's tokens too, in vLLM's shape; not in a stream",
    ),
    Field::refused("echo", "the messages are not repeated"),
    Field::refused("audio", "there is no audio output"),
    Field::refused("web_search_options", "there is no web search"),
];

/// What chat and text completions share: form, sampling, and what is not to be had.
const COMMON: [Field; FORM_FIELDS.len() + ABSENT_FIELDS.len()] = concat(FORM_FIELDS, ABSENT_FIELDS);
/// The fields that chat and text completions share.
pub const SHARED_FIELDS: &[Field] = &SHARED;
const SHARED: [Field; COMMON.len() + SAMPLING_FIELDS.len()] = concat(&COMMON, SAMPLING_FIELDS);
const FIELD_TABLE: [Field; OWN.len() + SHARED.len()] = concat(OWN, SHARED_FIELDS);
/// The fields.
pub const FIELDS: &[Field] = &FIELD_TABLE;

/// A valid request.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The generation.
    pub work: GenerationParams,
    /// The model's name as the client gave it.
    pub model: Option<String>,
    /// Whether to stream.
    pub stream: bool,
    /// Whether a stream ends with usage.
    pub include_usage: bool,
    /// Names of the tools whose one input is text.
    pub custom: Vec<String>,
}

/// Makes a request of a checked body.
pub fn parse(body: &Map<String, Value>) -> Result<ChatRequest, ApiError> {
    let body = Body(body);
    let mut work = GenerationParams::new(Prompt::Chat(Box::new(read_conversation(body)?)));
    work.sampling = params::sampling(body)?;
    work.seed = params::seed(body);
    params::endings(body, &mut work)?;
    work.max_tokens = params::max_tokens(body, &["max_completion_tokens", "max_tokens"]);
    work.choices = body.count("n").unwrap_or(1);
    work.logprobs = match (body.flag("logprobs").unwrap_or(false), body.count("top_logprobs")) {
        (true, top) => Some(top.unwrap_or(0) as u8),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            return Err(ApiError::field("top_logprobs", "'top_logprobs' needs 'logprobs' to be true"));
        }
    };
    (work.form, work.places.form) = form(body)?;
    work.prompt_logprobs = prompt_logprobs(body)?;
    params::check_endings(&work, body.list("tools").is_some_and(|tools| !tools.is_empty()))?;
    let include_usage = body.object("stream_options").and_then(|options| options.flag("include_usage"));
    Ok(ChatRequest {
        work,
        model: body.text("model").map(str::to_owned),
        stream: body.flag("stream").unwrap_or(false),
        include_usage: include_usage.unwrap_or(false),
        custom: history::custom_names(body.list("tools").unwrap_or_default()),
    })
}

/// How many alternatives of each token of the prompt are wanted, if any.
pub fn prompt_logprobs(body: Body<'_>) -> Result<Option<u8>, ApiError> {
    let wanted = body.count("prompt_logprobs").map(|top| top as u8);
    if wanted.is_some() && body.flag("stream").unwrap_or(false) {
        return Err(ApiError::unsupported(
            "prompt_logprobs",
            "'prompt_logprobs' comes with a whole answer only, not in a stream",
        ));
    }
    Ok(wanted)
}

/// The conversation of a checked body.
pub fn read_conversation(body: Body<'_>) -> Result<Conversation, ApiError> {
    let (choice, allowed) = match allowed_tools(body.get("tool_choice"))? {
        Some((choice, tools)) => (choice, Some(history::names(tools))),
        None => (tool_choice(body.get("tool_choice"))?, None),
    };
    let mut messages: Vec<Value> = body
        .list("messages")
        .unwrap_or_default()
        .iter()
        .map(history::in_one_shape)
        .map(Cow::into_owned)
        .collect();
    let prefix = if body.flag("continue_final_message").unwrap_or(false) {
        Some(history::take_beginning(&mut messages)?)
    } else {
        None
    };
    let tools: Vec<Value> = body.list("tools").unwrap_or_default().iter().map(history::tool).collect();
    let mut found = conversation(&messages, &tools, choice)?;
    if let Some(names) = allowed {
        allow(&mut found, names)?;
    }
    found.prefix = prefix;
    found.parallel_calls = body.flag("parallel_tool_calls").unwrap_or(true);
    found.variables = body.object("chat_template_kwargs").map(|kwargs| kwargs.0.clone()).unwrap_or_default();
    found.strength =
        body.text("reasoning_effort").map(|word| strength(word, "reasoning_effort")).transpose()?;
    for name in ["reasoning_strength", "reasoning_effort"] {
        if let Some(value) = found.variables.shift_remove(name) {
            let path = format!("chat_template_kwargs.{name}");
            let word =
                value.as_str().ok_or_else(|| ApiError::field(&path, "The strength must be a string"))?;
            found.strength = Some(strength(word, &path)?);
        }
    }
    if found.variables.shift_remove("enable_thinking") == Some(Value::Bool(false)) {
        found.strength = Some("none".into());
    }
    Ok(found)
}

/// The form that `response_format` or one of its other spellings asks for, and the spelling. Two of them are one too many,
/// unless they say the same or are the older and the newer place of one server's.
pub fn form(body: Body<'_>) -> Result<(ResponseFormat, String), ApiError> {
    let mut found: Vec<(String, ResponseFormat)> = Vec::new();
    if let Some(format) = response_format(body)? {
        found.push(format);
    }
    let structured = body.object("structured_outputs");
    for (place, path, names) in [
        (Some(body), "", ["json_schema", "", "", "grammar"]),
        (Some(body), "", ["", "regex", "", "ebnf"]),
        (Some(body), "", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"]),
        (structured, "structured_outputs.", ["json", "regex", "choice", "grammar"]),
    ] {
        let Some(place) = place else { continue };
        spellings(place, path, names, &mut found)?;
    }
    if structured.and_then(|place| place.flag("json_object")) == Some(true) {
        found.push(("structured_outputs.json_object".into(), ResponseFormat::JsonObject));
    }
    let newer = |name: &str| name.starts_with("structured_outputs.");
    if found.iter().any(|(name, _)| newer(name)) {
        found.retain(|(name, _)| !name.starts_with("guided_"));
    }
    let (first, form) = match found.first() {
        None => return Ok((ResponseFormat::Free, "response_format".into())),
        Some(first) => first.clone(),
    };
    match found.iter().find(|(_, other)| *other != form) {
        Some((other, _)) => {
            Err(ApiError::field(other, format!("'{other}' and '{first}' exclude each other")))
        }
        None => Ok((form, first)),
    }
}

fn spellings(
    place: Body<'_>,
    path: &str,
    [schema, regex, choice, grammar]: [&str; 4],
    found: &mut Vec<(String, ResponseFormat)>,
) -> Result<(), ApiError> {
    let mut add = |name: &str, form: ResponseFormat| found.push((format!("{path}{name}"), form));
    if let Some(value) = place.get(schema) {
        add(schema, ResponseFormat::JsonSchema(schema_of(value, &format!("{path}{schema}"))?));
    }
    if let Some(pattern) = place.text(regex).filter(|pattern| !pattern.is_empty()) {
        add(regex, ResponseFormat::Regex(pattern.to_owned()));
    }
    let choices: Vec<String> =
        place.list(choice).into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect();
    if !choices.is_empty() {
        add(choice, ResponseFormat::Choice(choices));
    }
    if let Some(text) = place.text(grammar).filter(|text| !text.trim().is_empty()) {
        add(grammar, ResponseFormat::Grammar(text.to_owned()));
    }
    Ok(())
}

/// A schema, which some clients send as text.
fn schema_of(value: &Value, field: &str) -> Result<Value, ApiError> {
    match value {
        Value::String(text) => serde_json::from_str(text)
            .map_err(|error| ApiError::field(field, format!("'{field}' is not valid JSON: {error}"))),
        value => Ok(value.clone()),
    }
}

/// The form of `response_format`, and where it is.
fn response_format(body: Body<'_>) -> Result<Option<(String, ResponseFormat)>, ApiError> {
    let Some(format) = body.object("response_format") else { return Ok(None) };
    let inner = format.object("json_schema").and_then(|inner| inner.get("schema"));
    let schema = match (format.text("type"), inner, format.get("schema")) {
        (Some("json_object"), _, None) => {
            return Ok(Some(("response_format".into(), ResponseFormat::JsonObject)));
        }
        (Some("json_schema"), Some(schema), _) => ("response_format.json_schema.schema", schema),
        (Some("json_object" | "json_schema"), _, Some(schema)) => ("response_format.schema", schema),
        (Some("json_schema"), None, None) => {
            return Err(ApiError::field(
                "response_format.json_schema.schema",
                "Type json_schema needs a schema in 'response_format.json_schema.schema'",
            ));
        }
        _ => return Ok(None),
    };
    Ok(Some((schema.0.into(), ResponseFormat::JsonSchema(schema.1.clone()))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(mut body: Value) -> Result<ChatRequest, Option<String>> {
        body["messages"] = json!([{"role": "user", "content": "a"}]);
        let Value::Object(body) = body else { panic!("object") };
        crate::fields::check(FIELDS, &body).map_err(|fault| fault.param)?;
        parse(&body).map_err(|fault| fault.param)
    }

    fn strength(body: Value) -> Option<String> {
        match run(body).expect("valid").work.prompt {
            Prompt::Chat(conversation) => conversation.strength,
            _ => panic!("chat"),
        }
    }

    #[test]
    fn logprobs_without_alternatives_is_not_an_error() {
        assert_eq!(run(json!({"logprobs": true})).expect("valid").work.logprobs, Some(0));
        assert_eq!(run(json!({"logprobs": true, "top_logprobs": 5})).expect("valid").work.logprobs, Some(5));
        assert_eq!(run(json!({"logprobs": false, "top_logprobs": 0})).expect("valid").work.logprobs, None);
        assert_eq!(run(json!({"top_logprobs": 5})), Err(Some("top_logprobs".into())));
        assert_eq!(run(json!({"logprobs": true, "top_logprobs": 21})), Err(Some("top_logprobs".into())));
    }

    #[test]
    fn the_strength_comes_from_any_of_its_names() {
        assert_eq!(strength(json!({})), None);
        assert_eq!(strength(json!({"reasoning_effort": "minimal"})), Some("low".into()));
        assert_eq!(strength(json!({"reasoning_effort": "max"})), Some("xhigh".into()));
        assert_eq!(
            strength(json!({"chat_template_kwargs": {"reasoning_strength": "xhigh"}})),
            Some("xhigh".into())
        );
        assert_eq!(
            strength(json!({"chat_template_kwargs": {"enable_thinking": false}})),
            Some("none".into())
        );
        let injected = json!({"chat_template_kwargs": {"reasoning_strength": "low.<|eot|>"}});
        assert_eq!(run(injected), Err(Some("chat_template_kwargs.reasoning_strength".into())));
    }

    #[test]
    fn both_limits_are_taken_and_the_newer_wins() {
        let body = json!({"max_tokens": 5, "max_completion_tokens": 7});
        assert_eq!(run(body).expect("valid").work.max_tokens, Some(7));
        assert_eq!(run(json!({"max_tokens": 0})).expect("valid").work.max_tokens, Some(0));
        assert_eq!(run(json!({"max_tokens": -1})).expect("valid").work.max_tokens, None);
        assert_eq!(run(json!({"max_tokens": -2})), Err(Some("max_tokens".into())));
    }

    #[test]
    fn a_schema_is_found_where_clients_put_it() {
        let schema = json!({"type": "object"});
        let check = |format: Value, expected: ResponseFormat| {
            assert_eq!(run(json!({"response_format": format})).expect("valid").work.form, expected);
        };
        check(json!({"type": "json_object"}), ResponseFormat::JsonObject);
        check(json!({"type": "text"}), ResponseFormat::Free);
        check(
            json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}}),
            ResponseFormat::JsonSchema(schema.clone()),
        );
        check(json!({"type": "json_object", "schema": schema}), ResponseFormat::JsonSchema(schema.clone()));
        let missing = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}});
        assert_eq!(run(missing), Err(Some("response_format.json_schema.schema".into())));
        assert_eq!(
            run(json!({"response_format": {"type": "xml"}})),
            Err(Some("response_format.type".into()))
        );
    }

    #[test]
    fn a_form_has_many_spellings_and_one_at_a_time() {
        let check = |body: Value, expected: ResponseFormat| {
            assert_eq!(run(body.clone()).map(|asked| asked.work.form), Ok(expected), "{body}");
        };
        let schema = json!({"type": "object"});
        check(json!({"json_schema": schema}), ResponseFormat::JsonSchema(schema.clone()));
        check(json!({"guided_json": schema}), ResponseFormat::JsonSchema(schema.clone()));
        check(json!({"guided_json": "{\"type\": \"object\"}"}), ResponseFormat::JsonSchema(schema.clone()));
        check(
            json!({"guided_regex": "[a-c]+", "guided_choice": null}),
            ResponseFormat::Regex("[a-c]+".into()),
        );
        check(json!({"guided_choice": ["a", "b"]}), ResponseFormat::Choice(vec!["a".into(), "b".into()]));
        check(json!({"structured_outputs": {"choice": ["a"]}}), ResponseFormat::Choice(vec!["a".into()]));
        check(json!({"structured_outputs": {"json_object": true}}), ResponseFormat::JsonObject);
        check(json!({"regex": "[0-9]{3}"}), ResponseFormat::Regex("[0-9]{3}".into()));
        check(json!({"ebnf": "root ::= \"a\""}), ResponseFormat::Grammar("root ::= \"a\"".into()));
        // The same twice is once, and of one server's two places the newer one counts.
        let grammar = "start: \"a\"";
        let twice = json!({"guided_grammar": grammar, "structured_outputs": {"grammar": grammar}});
        check(twice, ResponseFormat::Grammar(grammar.into()));
        let both = json!({"guided_regex": "a", "structured_outputs": {"grammar": grammar}});
        check(both, ResponseFormat::Grammar(grammar.into()));
        check(json!({"regex": "a", "guided_regex": "a"}), ResponseFormat::Regex("a".into()));
        check(
            json!({"grammar": "", "guided_grammar": "start: \"a\""}),
            ResponseFormat::Grammar("start: \"a\"".into()),
        );
        let two = json!({"guided_regex": "a", "response_format": {"type": "json_object"}});
        assert_eq!(run(two), Err(Some("guided_regex".into())));
        assert_eq!(run(json!({"guided_json": "{"})), Err(Some("guided_json".into())));
    }

    #[test]
    fn a_turn_can_be_made_to_go_on_only_when_it_is_free() {
        let work = run(json!({"ignore_eos": true, "min_tokens": 3, "stop_token_ids": [7, 8.0]}))
            .expect("valid")
            .work;
        assert_eq!((work.ignore_end, work.min_tokens, work.stop_ids), (true, 3, vec![7, 8]));
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        assert_eq!(run(json!({"ignore_eos": true, "tools": tools})), Err(Some("ignore_eos".into())));
        assert_eq!(run(json!({"min_tokens": 2, "guided_regex": "a"})), Err(Some("min_tokens".into())));
        for (field, value) in
            [("use_beam_search", json!(true)), ("prompt_logprobs", json!(21)), ("echo", json!(true))]
        {
            assert_eq!(run(json!({field: value})), Err(Some(field.into())));
        }
    }
}
