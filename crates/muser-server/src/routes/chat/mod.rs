//! `/v1/chat/completions`.

pub mod answer;
pub mod history;
pub mod request;

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, stream};

use self::answer::{CustomCalls, Head};
use super::models::check_name;
use crate::answer::{Update, Usage};
use crate::app::{SharedApp, unix_seconds};
use crate::body::read_body;
use crate::error::{ApiError, Dialect};
use crate::generation::Generation;
use crate::sse::{self, Event};

/// `POST /v1/chat/completions`.
pub async fn completions(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::OpenAi.answer(run(&app, request, Instant::now()).await)
}

async fn run(app: &SharedApp, request: Request, arrived: Instant) -> Result<Response, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let body = read_body(request, &app.config.limits, request::FIELDS).await?;
    loaded.metrics.note_transfer_params(&body);
    let asked = request::parse(&body)?;
    check_name(app, &loaded, asked.model.as_deref())?;
    let with_logprobs = asked.work.logprobs.is_some();
    let generation = Generation::start(app, &loaded, asked.work, arrived).await?;
    let notice = generation.notice();
    let head = Head {
        custom: asked.custom,
        id: app.new_id("chatcmpl-"),
        created: unix_seconds(),
        model: loaded.facts.name.clone(),
        seed: generation.seed(),
    };
    if asked.stream {
        let events = events(generation, head, asked.include_usage);
        return Ok(notice.on(sse::respond(events, app.config.keep_alive)));
    }
    let answers = generation.answers().await?;
    Ok(notice.on(Json(head.completion(&answers, with_logprobs)).into_response()))
}

/// The chunks of a stream. Each choice begins with its role, as late as its first piece: tools that measure the time
/// to the first token count the first chunk.
fn events(generation: Generation, head: Head, include_usage: bool) -> impl Stream<Item = Event> + Send {
    let mut opened = vec![false; generation.choices()];
    let mut custom = CustomCalls::default();
    let mut usage = Usage::default();
    let last_head = head.clone();
    generation.flat_map(move |update| {
        let mut events = Vec::with_capacity(2);
        let mut open = |choice: u32, events: &mut Vec<Event>| {
            if let Some(opened) = opened.get_mut(choice as usize)
                && !std::mem::replace(opened, true)
            {
                events.push(Event::Data(head.opening(choice)));
            }
        };
        match update {
            Update::Started { .. } | Update::Prompt(_) => {}
            Update::Piece { choice, piece, logprobs } => {
                open(choice, &mut events);
                if let Some(chunk) = head.piece(choice, &piece, &logprobs, &mut custom) {
                    events.push(Event::Data(chunk));
                }
            }
            Update::Finished { choice, outcome } => {
                open(choice, &mut events);
                events.extend(head.last_input(choice, &mut custom).map(Event::Data));
                events.push(Event::Data(head.closing(choice, &outcome)));
                usage.add_choice(outcome.usage);
            }
            Update::Failed(fault) => events.push(Event::Data(fault.body(Dialect::OpenAi))),
            Update::End => {
                if include_usage {
                    events.push(Event::Data(last_head.usage(usage)));
                }
                events.push(Event::Done);
            }
        }
        stream::iter(events)
    })
}
