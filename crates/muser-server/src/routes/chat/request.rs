//! The body of `/v1/chat/completions`.

use serde_json::{Map, Value};

use crate::conversation::{conversation, strength, tool_choice};
use crate::error::ApiError;
use crate::fields::{Body, Field, Kind};
use crate::params::{self, SAMPLING_FIELDS, concat, limit_field};
use crate::work::{Conversation, Form, Prompt, Work};

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

/// The reasoning strengths of the API.
pub const EFFORTS: Kind = Kind::OneOf(&["none", "minimal", "low", "medium", "high", "xhigh"]);

const OWN: &[Field] = &[
    Field::required(
        "messages",
        Kind::List(&Kind::Any),
        "roles system, developer (the same), user, assistant, tool; content as string, null or text parts; images are a 400",
    ),
    Field::optional(
        "model",
        Kind::Text,
        "any name means the loaded model, unless the server is told to be strict",
    ),
    Field::optional("stream", Kind::Bool, ""),
    Field::optional("stream_options", Kind::Object(STREAM_OPTIONS), ""),
    limit_field("max_completion_tokens", "reasoning included; 0: only read the prompt"),
    limit_field("max_tokens", "the same, in the older spelling"),
    Field::optional("n", Kind::Integer { min: 1, max: 16 }, "default 1; choices share the prompt"),
    Field::optional("logprobs", Kind::Bool, "log-probabilities of the answer's tokens"),
    Field::optional("top_logprobs", Kind::Integer { min: 0, max: 20 }, "needs logprobs"),
    Field::optional(
        "response_format",
        Kind::Object(RESPONSE_FORMAT),
        "holds for the answer, not for reasoning",
    ),
    Field::optional("grammar", Kind::Text, "for the answer: Lark, or GBNF (told by `::=`)"),
    Field::optional("tools", Kind::List(&Kind::Any), "type function only"),
    Field::optional(
        "tool_choice",
        Kind::Either(&[Kind::Text, Kind::Map]),
        "auto, none, required, or one by name",
    ),
    Field::optional("parallel_tool_calls", Kind::Bool, "default true"),
    Field::optional(
        "reasoning_effort",
        EFFORTS,
        "the model's strength; minimal is low, none answers at once",
    ),
    Field::optional(
        "chat_template_kwargs",
        Kind::Map,
        "more variables for the template; enable_thinking false is none",
    ),
    Field::ignored("user", "not kept"),
    Field::ignored("metadata", "not kept"),
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
    Field::refused("audio", "there is no audio output"),
    Field::refused("web_search_options", "there is no web search"),
];

const FIELD_TABLE: [Field; OWN.len() + SAMPLING_FIELDS.len()] = concat(OWN, SAMPLING_FIELDS);
/// The fields.
pub const FIELDS: &[Field] = &FIELD_TABLE;

/// A valid request.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The generation.
    pub work: Work,
    /// The model's name as the client gave it.
    pub model: Option<String>,
    /// Whether to stream.
    pub stream: bool,
    /// Whether a stream ends with usage.
    pub include_usage: bool,
}

/// Makes a request of a checked body.
pub fn parse(body: &Map<String, Value>) -> Result<ChatRequest, ApiError> {
    let body = Body(body);
    let mut work = Work::new(Prompt::Chat(read_conversation(body)?));
    work.sampling = params::sampling(body)?;
    work.seed = params::seed(body);
    work.stops = params::stops(body, "stop")?;
    work.max_tokens = params::max_tokens(body, &["max_completion_tokens", "max_tokens"]);
    work.choices = body.count("n").unwrap_or(1);
    work.logprobs = match (body.flag("logprobs").unwrap_or(false), body.count("top_logprobs")) {
        (true, top) => Some(top.unwrap_or(0) as u8),
        (false, None | Some(0)) => None,
        (false, Some(_)) => {
            return Err(ApiError::field("top_logprobs", "'top_logprobs' needs 'logprobs' to be true"));
        }
    };
    work.form = form(body)?;
    work.use_cache = body.flag("cache_prompt").unwrap_or(true);
    let include_usage = body.object("stream_options").and_then(|options| options.flag("include_usage"));
    Ok(ChatRequest {
        work,
        model: body.text("model").map(str::to_owned),
        stream: body.flag("stream").unwrap_or(false),
        include_usage: include_usage.unwrap_or(false),
    })
}

/// The conversation of a checked body.
pub fn read_conversation(body: Body<'_>) -> Result<Conversation, ApiError> {
    let choice = tool_choice(body.get("tool_choice"))?;
    let messages = body.list("messages").unwrap_or_default();
    let mut found = conversation(messages, body.list("tools").unwrap_or_default(), choice)?;
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

/// The form that `response_format` or `grammar` asks for.
pub fn form(body: Body<'_>) -> Result<Form, ApiError> {
    let grammar = body.text("grammar").filter(|grammar| !grammar.trim().is_empty());
    let format = body.object("response_format");
    let form = match format.and_then(|format| format.text("type")) {
        Some("json_object") => match format.and_then(|format| format.get("schema")) {
            Some(schema) => Form::JsonSchema(schema.clone()),
            None => Form::JsonObject,
        },
        Some("json_schema") => {
            let inner = format.and_then(|format| format.object("json_schema"));
            let schema = inner.and_then(|inner| inner.get("schema"));
            match schema.or_else(|| format.and_then(|format| format.get("schema"))) {
                Some(schema) => Form::JsonSchema(schema.clone()),
                None => {
                    return Err(ApiError::field(
                        "response_format.json_schema.schema",
                        "Type json_schema needs a schema in 'response_format.json_schema.schema'",
                    ));
                }
            }
        }
        _ => Form::Free,
    };
    match (form, grammar) {
        (form, None) => Ok(form),
        (Form::Free, Some(grammar)) => Ok(Form::Grammar(grammar.to_owned())),
        (_, Some(_)) => Err(ApiError::field("grammar", "'grammar' and 'response_format' exclude each other")),
    }
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
        assert_eq!(run(json!({"max_tokens": -1})), Err(Some("max_tokens".into())));
    }

    #[test]
    fn a_schema_is_found_where_clients_put_it() {
        let schema = json!({"type": "object"});
        let check = |format: Value, expected: Form| {
            assert_eq!(run(json!({"response_format": format})).expect("valid").work.form, expected);
        };
        check(json!({"type": "json_object"}), Form::JsonObject);
        check(json!({"type": "text"}), Form::Free);
        check(
            json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}}),
            Form::JsonSchema(schema.clone()),
        );
        check(json!({"type": "json_object", "schema": schema}), Form::JsonSchema(schema.clone()));
        let missing = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}});
        assert_eq!(run(missing), Err(Some("response_format.json_schema.schema".into())));
        assert_eq!(
            run(json!({"response_format": {"type": "xml"}})),
            Err(Some("response_format.type".into()))
        );
    }
}
