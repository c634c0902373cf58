//! `/v1/responses`, without memory.

pub mod answer;
pub mod request;

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, stream};
use serde_json::Value;

use self::answer::{Head, Items};
use super::models::check_name;
use crate::answer::Update;
use crate::app::{SharedApp, unix_seconds};
use crate::error::{ApiError, Dialect};
use crate::exchange::read_body;
use crate::fields::Body;
use crate::generation::Generation;
use crate::sse::{self, Event};

/// `POST /v1/responses`.
pub async fn responses(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::OpenAi.answer(run(&app, request, Instant::now()).await)
}

async fn run(app: &SharedApp, request: Request, arrived: Instant) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let mut object = read_body(request, &app.config.limits, request::FIELDS).await?;
    let body = Body(&object);
    check_name(app, &loaded, body.text("model"))?;
    let stream = body.flag("stream").unwrap_or(false);
    let generation = Generation::start(app, &loaded, request::parse(body)?, arrived).await?;
    // The response repeats parts of the request; the input is not among them.
    object.shift_remove("input");
    let head = Head {
        id: app.new_id("resp_"),
        created: unix_seconds(),
        model: loaded.facts.name.clone(),
        request: Value::Object(object),
    };
    if stream {
        return Ok(sse::respond(events(generation, head), app.config.keep_alive));
    }
    let answers = generation.answers().await?;
    Ok(Json(head.whole(&answers.into_iter().next().unwrap_or_default())).into_response())
}

fn events(generation: Generation, head: Head) -> impl Stream<Item = Event> + Send {
    let mut items = Items::new(head);
    let mut first = Vec::new();
    items.start(&mut first);
    let rest = generation.flat_map(move |update| {
        let mut events = Vec::with_capacity(2);
        match update {
            Update::Piece { piece, .. } => items.piece(piece, &mut events),
            Update::Finished { outcome, .. } => items.finish(&outcome, &mut events),
            Update::Failed(fault) => items.fail(&fault.message, &mut events),
            Update::Started { .. } | Update::End => {}
        }
        stream::iter(events)
    });
    stream::iter(first).chain(rest)
}
