//! `/v1/responses/compact`: a long conversation as its last questions and a summary, written by the model.

use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use muser_text::Specials;
use serde_json::{Value, json};

use super::answer::usage;
use super::history::{encoded, kind};
use super::request::Asked;
use super::{Taken, take};
use crate::app::{SharedApp, unix_seconds};
use crate::error::{ApiError, Dialect};
use crate::generation::Generation;
use crate::generation_params::{Prompt, ResponseFormat, ToolChoice};
use crate::shorten;
use crate::text::TextPipeline;

/// What the model is asked.
const ASK: &str = "Stop here and write a summary of our conversation for a colleague who takes over and has not read it: \
                   what was asked, what was done and found, names, paths and figures that matter, and what remains to be \
                   done. Write only the summary.";

/// Longest summary, in tokens.
const SUMMARY_TOKENS: u32 = 2048;

/// `POST /v1/responses/compact`.
pub async fn compact(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::OpenAi.answer(run(&app, request, Instant::now()).await)
}

async fn run(app: &SharedApp, request: Request, arrived: Instant) -> Result<Response, ApiError> {
    let Taken { loaded, asked, .. } = take(app, request).await?;
    let Asked { mut work, input, before, .. } = asked;
    if let Prompt::Chat(conversation) = &mut work.prompt {
        conversation.messages.push(json!({"role": "user", "content": ASK}));
        conversation.strength = Some("none".into());
        conversation.tool_choice = ToolChoice::None;
        conversation.tools.clear();
        conversation.allowed = None;
    }
    work.places.messages.push("input".into());
    let context = loaded.facts.context_tokens;
    let most = SUMMARY_TOKENS.min((context / 4).max(1) as u32);
    (work.form, work.logprobs) = (ResponseFormat::Free, None);
    work.max_tokens = Some(work.max_tokens.map_or(most, |asked| asked.clamp(1, most)));
    // What is too long is what this route is for.
    let work = shorten::to_fit(&loaded, work).await?;
    let generation = Generation::start(app, &loaded, work, arrived).await?;
    let answer = generation.answers().await?.into_iter().next().unwrap_or_default();
    let mut items: Vec<Value> = before.iter().flat_map(|kept| kept.items()).collect();
    items.extend(input);
    let mut output = last_questions(&loaded.text, items, context / 8);
    let id = app.new_id("resp_");
    output.push(json!({
        "id": format!("cmp_{}", id.trim_start_matches("resp_")),
        "type": "compaction",
        "encrypted_content": encoded(&answer.content),
    }));
    Ok(Json(json!({
        "id": id,
        "object": "response.compaction",
        "created_at": unix_seconds(),
        "output": output,
        "usage": usage(answer.outcome.usage),
    }))
    .into_response())
}

/// The user's last messages, as many as fit into `most` tokens.
fn last_questions(text: &TextPipeline, items: Vec<Value>, most: usize) -> Vec<Value> {
    let mut left = most;
    let mut kept = Vec::new();
    for item in items.into_iter().rev() {
        if kind(&item) != "message" || item["role"] != "user" {
            continue;
        }
        let said = match &item["content"] {
            Value::String(text) => text.clone(),
            parts => {
                parts.as_array().into_iter().flatten().filter_map(|part| part["text"].as_str()).collect()
            }
        };
        let tokens = text.tokenizer().encode(&said, Specials::Plain).len();
        if tokens > left {
            break;
        }
        left -= tokens;
        kept.push(item);
    }
    kept.reverse();
    kept
}
