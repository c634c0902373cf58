//! The bodies of Ollama's routes.

use serde_json::{Map, Value, json};

use super::answer::Shape;
use crate::conversation::{conversation, strength};
use crate::error::ApiError;
use crate::fields::{Body, Field, INTEGER, Kind};
use crate::generation_params::{GenerationParams, Prompt, ResponseFormat, ToolChoice};
use crate::params::{self, FACTOR, PENALTY, SHARE, TEXTS};
use crate::pictures;
use crate::routes::embeddings::DIMENSIONS;

const OPTIONS: &[Field] = &[
    Field::optional("num_predict", INTEGER, "most tokens to generate; negative: no limit"),
    Field::optional("temperature", Kind::Number { min: 0.0, max: f32::MAX as f64 }, "default 1"),
    Field::optional("top_p", SHARE, "default 0.95"),
    Field::optional("top_k", Kind::Integer { min: -1, max: u32::MAX as i64 }, "default 64"),
    Field::optional("min_p", SHARE, "default 0"),
    Field::optional("seed", Kind::Seed, "drawn when absent or -1"),
    Field::optional("stop", TEXTS, ""),
    Field::optional("presence_penalty", PENALTY, ""),
    Field::optional("frequency_penalty", PENALTY, ""),
    Field::optional("repeat_penalty", FACTOR, "default 1 (off)"),
    Field::ignored("num_ctx", "the context is set when the server starts"),
    Field::ignored("num_keep", ""),
    Field::ignored("num_gpu", ""),
    Field::ignored("num_thread", ""),
    Field::ignored("num_batch", ""),
];

const THINK: Kind = Kind::Either(&[Kind::Bool, Kind::Text]);
const FORMAT: Kind = Kind::Either(&[Kind::Text, Kind::Map]);

/// The fields of `/api/chat`.
pub const CHAT_FIELDS: &[Field] = &[
    Field::optional(
        "model",
        Kind::Text,
        "any name means the loaded model, unless the server is told to be strict",
    ),
    Field::optional("messages", Kind::List(&Kind::Map), "empty: only says that the model is loaded"),
    Field::optional("tools", Kind::List(&Kind::Map), ""),
    Field::optional("format", FORMAT, "json, or a JSON schema"),
    Field::optional("options", Kind::Object(OPTIONS), ""),
    Field::optional("stream", Kind::Bool, "default true"),
    Field::optional("think", THINK, "false answers at once; low, medium or high is the strength"),
    Field::optional("logprobs", Kind::Bool, "log-probabilities of the answer's tokens"),
    Field::optional("top_logprobs", Kind::Integer { min: 0, max: 20 }, "alternatives per token"),
    Field::ignored("keep_alive", "the model stays loaded"),
];

/// The fields of `/api/generate`.
pub const GENERATE_FIELDS: &[Field] = &[
    Field::optional(
        "model",
        Kind::Text,
        "any name means the loaded model, unless the server is told to be strict",
    ),
    Field::optional("prompt", Kind::Text, "empty: only says that the model is loaded"),
    Field::optional("system", Kind::Text, ""),
    Field::optional("raw", Kind::Bool, "the prompt as it is, without template"),
    Field::optional("format", FORMAT, "json, or a JSON schema"),
    Field::optional("options", Kind::Object(OPTIONS), ""),
    Field::optional("stream", Kind::Bool, "default true"),
    Field::optional("think", THINK, ""),
    Field::optional("logprobs", Kind::Bool, "log-probabilities of the answer's tokens"),
    Field::optional("top_logprobs", Kind::Integer { min: 0, max: 20 }, "alternatives per token"),
    Field::ignored("keep_alive", "the model stays loaded"),
    Field::ignored("context", "send the conversation to /api/chat"),
    Field::refused("suffix", "the model was not trained to fill gaps"),
    Field::refused("template", "the model's own template is used"),
    Field::optional("images", Kind::List(&Kind::Text), "in base64; they stand before the prompt"),
];

/// The fields of `/api/show`.
pub const SHOW_FIELDS: &[Field] = &[
    Field::optional("model", Kind::Text, ""),
    Field::optional("name", Kind::Text, "the older spelling"),
    Field::ignored("verbose", ""),
];

/// The fields of `/api/embed`.
pub const EMBED_FIELDS: &[Field] = &[
    Field::optional("model", Kind::Text, ""),
    Field::required("input", Kind::Either(&[Kind::Text, Kind::List(&Kind::Text)]), "a text or several"),
    Field::ignored("truncate", "a text that does not fit is a 400"),
    Field::ignored("options", ""),
    Field::ignored("keep_alive", "the model stays loaded"),
    Field::optional("dimensions", DIMENSIONS, "the first so many values, scaled to unit length again"),
];

/// The fields of `/api/embeddings`.
pub const EMBEDDINGS_FIELDS: &[Field] = &[
    Field::optional("model", Kind::Text, ""),
    Field::required("prompt", Kind::Text, ""),
    Field::ignored("options", ""),
    Field::ignored("keep_alive", "the model stays loaded"),
];

/// Whether a body only asks for the model to be loaded, as Ollama's command does before a conversation.
pub fn only_loads(body: Body<'_>, shape: Shape) -> bool {
    match shape {
        Shape::Chat => body.list("messages").is_none_or(<[Value]>::is_empty),
        Shape::Generate => {
            let blank = |name: &str| body.text(name).is_none_or(str::is_empty);
            blank("prompt") && blank("system")
        }
    }
}

/// A generation from the body of `/api/chat`.
pub fn chat(body: Body<'_>) -> Result<GenerationParams, ApiError> {
    let list = body.list("messages").unwrap_or_default();
    let mut messages = Vec::with_capacity(list.len());
    for (index, message) in list.iter().enumerate() {
        let mut message: Map<String, Value> = message.as_object().cloned().unwrap_or_default();
        let images =
            message.shift_remove("images").filter(|images| *images != json!([]) && !images.is_null());
        if let Some(images) = images {
            let text = message.get("content").and_then(Value::as_str).unwrap_or_default();
            let content = with_images(&images, text, &format!("messages[{index}].images"))?;
            message.insert("content".into(), content);
        }
        for (from, to) in [("thinking", "reasoning_content"), ("tool_name", "name")] {
            if let Some(value) = message.shift_remove(from) {
                message.insert(to.into(), value);
            }
        }
        messages.push(Value::Object(message));
    }
    work(body, &messages, body.list("tools").unwrap_or_default())
}

/// A generation from the body of `/api/generate`.
pub fn generate(body: Body<'_>) -> Result<GenerationParams, ApiError> {
    let prompt = body.text("prompt").unwrap_or_default();
    if body.flag("raw").unwrap_or(false) {
        let mut work = GenerationParams::new(Prompt::Text(prompt.to_owned()));
        work.places.prompt = "prompt";
        options(body, &mut work)?;
        return Ok(work);
    }
    let mut messages = Vec::new();
    if let Some(system) = body.text("system").filter(|system| !system.is_empty()) {
        messages.push(json!({"role": "system", "content": system}));
    }
    let content = match body.get("images").filter(|images| **images != json!([]) && !images.is_null()) {
        Some(images) => with_images(images, prompt, "images")?,
        None => prompt.into(),
    };
    messages.push(json!({"role": "user", "content": content}));
    work(body, &messages, &[])
}

/// The content of a message with images: they stand before its text.
fn with_images(images: &Value, text: &str, field: &str) -> Result<Value, ApiError> {
    let fault = || ApiError::field(field, format!("'{field}' must be a list of images in base64"));
    let images = images.as_array().ok_or_else(fault)?;
    let mut parts = Vec::with_capacity(images.len() + 1);
    for (index, image) in images.iter().enumerate() {
        let place = format!("{field}[{index}]");
        parts.push(pictures::part(image.as_str().ok_or_else(fault)?, &place));
    }
    parts.push(json!({"type": "text", "text": text}));
    Ok(parts.into())
}

fn work(body: Body<'_>, messages: &[Value], tools: &[Value]) -> Result<GenerationParams, ApiError> {
    let mut conversation = conversation(messages, tools, ToolChoice::Auto)?;
    conversation.strength = match body.get("think") {
        Some(Value::Bool(false)) => Some("none".into()),
        Some(Value::String(word)) => Some(strength(word, "think")?),
        _ => None,
    };
    let mut work = GenerationParams::new(Prompt::Chat(Box::new(conversation)));
    options(body, &mut work)?;
    Ok(work)
}

fn options(body: Body<'_>, work: &mut GenerationParams) -> Result<(), ApiError> {
    if let Some(options) = body.object("options") {
        work.sampling = params::sampling(options).map_err(|fault| fault.under("options"))?;
        work.seed = params::seed(options);
        work.stops = params::stops(options, "stop").map_err(|fault| fault.under("options"))?;
        work.max_tokens = options.count("num_predict");
    }
    let top = body.count("top_logprobs").map(|top| top as u8);
    work.logprobs = match body.flag("logprobs") {
        Some(true) => Some(top.unwrap_or(0)),
        _ => top.filter(|top| *top > 0),
    };
    work.places.form = "format".into();
    work.form = match body.get("format") {
        None => ResponseFormat::Free,
        Some(Value::String(word)) if word.is_empty() => ResponseFormat::Free,
        Some(Value::String(word)) if word == "json" => ResponseFormat::JsonObject,
        Some(schema @ Value::Object(_)) => ResponseFormat::JsonSchema(schema.clone()),
        Some(_) => return Err(ApiError::field("format", "'format' must be json or a JSON schema")),
    };
    Ok(())
}
