//! `/v1/embeddings`: the mean of the final hidden states, scaled to unit length.
//!
//! Token ids are refused: clients that send them have cut the text with another model's vocabulary, and the numbers
//! would mean other words here.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::{Value, json};

use super::models::check_name;
use crate::app::{Loaded, SharedApp};
use crate::body::read_body;
use crate::error::{ApiError, Dialect};
use crate::fields::{Body, COUNT, Field, Kind};
use crate::generation::{embed, scale_to_unit};

/// Most texts in one request.
const MAX_INPUTS: usize = 2048;
/// How many values of a vector may be asked for; the model's width is looked at later.
pub(super) const DIMENSIONS: Kind = Kind::Integer { min: 1, max: u32::MAX as i64 };
/// Texts of one request in the engine at once, so that others find a place too.
const AT_ONCE: usize = 4;

/// The fields.
pub const FIELDS: &[Field] = &[
    Field::required(
        "input",
        Kind::Either(&[Kind::Text, Kind::List(&Kind::Either(&[Kind::Text, COUNT, Kind::List(&COUNT)]))]),
        "a string or a list of up to 2048; token ids are a 400, since they come from another vocabulary",
    ),
    Field::optional(
        "model",
        Kind::Text,
        "any name means the loaded model, unless the server is told to be strict",
    ),
    Field::optional(
        "encoding_format",
        Kind::OneOf(&["float", "base64"]),
        "base64: little-endian 32-bit floats",
    ),
    Field::optional("dimensions", DIMENSIONS, "the first so many values, scaled to unit length again"),
    Field::ignored("user", "not kept"),
];

/// `POST /v1/embeddings`.
pub async fn embeddings(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::OpenAi.answer(run(&app, request).await)
}

async fn run(app: &SharedApp, request: Request) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, FIELDS).await?;
    let body = Body(&body);
    check_name(app, &loaded, body.text("model"))?;
    let base64 = body.text("encoding_format") == Some("base64");
    let dimensions = dimensions(body, &loaded)?;
    let (vectors, tokens) = vectors(&loaded, inputs(body.get("input"))?, dimensions).await?;
    let object = |(index, vector): (usize, &Vec<f32>)| json!({"object": "embedding", "index": index, "embedding": encode(vector, base64)});
    let data: Vec<Value> = vectors.iter().enumerate().map(object).collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(Json(json!({"object": "list", "data": data, "model": loaded.facts.name, "usage": usage}))
        .into_response())
}

/// The vectors of some texts, in their order, and the number of their tokens.
pub(super) async fn vectors(
    loaded: &Arc<Loaded>,
    inputs: Vec<String>,
    dimensions: Option<usize>,
) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    let work = inputs.into_iter().enumerate().map(|(index, text)| {
        let loaded = Arc::clone(loaded);
        async move {
            embed(&loaded, text).await.map_err(|mut fault| {
                if fault.status.is_client_error() && fault.param.is_some() {
                    fault.param = Some(format!("input[{index}]"));
                }
                fault
            })
        }
    });
    let found: Vec<(Vec<f32>, usize)> = stream::iter(work).buffered(AT_ONCE).try_collect().await?;
    let tokens = found.iter().map(|(_, tokens)| tokens).sum();
    let cut = |mut vector: Vec<f32>| {
        if let Some(dimensions) = dimensions {
            vector.truncate(dimensions);
            scale_to_unit(&mut vector);
        }
        vector
    };
    Ok((found.into_iter().map(|(vector, _)| cut(vector)).collect(), tokens))
}

/// The number of values that a body asks for.
pub(super) fn dimensions(body: Body<'_>, loaded: &Loaded) -> Result<Option<usize>, ApiError> {
    let width = loaded.facts.hidden;
    match body.count("dimensions").map(|count| count as usize) {
        Some(count) if count > width => {
            let message = format!("'dimensions' is {count}, and the model's vectors have {width} values");
            Err(ApiError::field("dimensions", message))
        }
        asked => Ok(asked),
    }
}

/// The texts of an `input`.
pub(super) fn inputs(value: Option<&Value>) -> Result<Vec<String>, ApiError> {
    let tokens = || {
        ApiError::unsupported(
            "input",
            "Token ids are not accepted: they come from another model's vocabulary; send text (in LangChain: \
             check_embedding_ctx_length=False)",
        )
    };
    let list = match value {
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(items)) => items
            .iter()
            .map(|item| item.as_str().map(str::to_owned).ok_or_else(tokens))
            .collect::<Result<_, _>>()?,
        _ => Vec::new(),
    };
    if list.is_empty() || list.len() > MAX_INPUTS {
        return Err(ApiError::field(
            "input",
            format!("'input' must hold 1 to {MAX_INPUTS} texts, found {}", list.len()),
        ));
    }
    Ok(list)
}

fn encode(vector: &[f32], base64: bool) -> Value {
    if base64 {
        let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
        STANDARD.encode(bytes).into()
    } else {
        vector.iter().map(|value| Value::from(*value)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_little_endian_floats() {
        assert_eq!(encode(&[1.0, -2.5], true), "AACAPwAAIMA=");
        assert_eq!(encode(&[1.0, -2.5], false), json!([1.0, -2.5]));
    }

    #[test]
    fn only_texts_are_taken() {
        assert_eq!(inputs(Some(&json!("a"))), Ok(vec!["a".into()]));
        assert_eq!(inputs(Some(&json!(["a", ""]))), Ok(vec!["a".into(), String::new()]));
        for wrong in [json!([1, 2]), json!([[1], [2]]), json!(["a", 3]), json!([])] {
            assert!(inputs(Some(&wrong)).is_err(), "{wrong}");
        }
    }
}
