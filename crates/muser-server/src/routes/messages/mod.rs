//! `/v1/messages` and `/v1/messages/count_tokens`, in Anthropic's shape.

pub mod answer;
pub mod blocks;
pub mod request;

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, stream};
use serde_json::json;

use self::answer::{Blocks, Head};
use super::models::check_name;
use crate::answer::Update;
use crate::app::SharedApp;
use crate::body::read_body;
use crate::error::{ApiError, Dialect};
use crate::fields::Body;
use crate::generation::{Generation, count_prompt};
use crate::sse::{self, Event};

/// `POST /v1/messages`.
pub async fn messages(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::Anthropic.answer(run(&app, request, Instant::now()).await)
}

/// `POST /v1/messages/count_tokens`.
pub async fn count_tokens(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::Anthropic.answer(count(&app, request).await)
}

async fn run(app: &SharedApp, request: Request, arrived: Instant) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, request::FIELDS).await?;
    let body = Body(&body);
    check_name(app, &loaded, body.text("model"))?;
    let generation = Generation::start(app, &loaded, request::parse(body)?, arrived).await?;
    let notice = generation.notice();
    let head = Head { id: app.new_id("msg_"), model: loaded.facts.name.clone() };
    if body.flag("stream").unwrap_or(false) {
        return Ok(notice.on(sse::respond(events(generation, head), app.config.keep_alive)));
    }
    let answers = generation.answers().await?;
    let answer = answers.into_iter().next().unwrap_or_default();
    Ok(notice.on(Json(head.whole(&answer)).into_response()))
}

async fn count(app: &SharedApp, request: Request) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, request::COUNT_FIELDS).await?;
    let body = Body(&body);
    check_name(app, &loaded, body.text("model"))?;
    let tokens = count_prompt(&loaded, request::parse(body)?).await?;
    Ok(Json(json!({"input_tokens": tokens})).into_response())
}

fn events(generation: Generation, head: Head) -> impl Stream<Item = Event> + Send {
    let mut blocks = Blocks::default();
    generation.flat_map(move |update| {
        let mut events = Vec::with_capacity(2);
        match update {
            Update::Started { prompt_tokens, cached_tokens } => {
                events.push(head.start(prompt_tokens, cached_tokens));
            }
            Update::Piece { piece, .. } => blocks.piece(piece, &mut events),
            Update::Finished { outcome, .. } => blocks.finish(&outcome, &mut events),
            Update::Failed(fault) => events.push(Event::Named("error", fault.body(Dialect::Anthropic))),
            Update::Prompt(_) | Update::End => {}
        }
        stream::iter(events)
    })
}
