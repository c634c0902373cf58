//! `/v1/responses`, with a memory that is bounded and lives as long as the process.

pub mod answer;
pub mod compact;
pub mod history;
pub mod request;
pub mod store;
pub mod stored;
pub mod tools;

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::{Stream, StreamExt as _, stream};
use serde_json::{Map, Value, json};

use self::answer::{Head, Items};
use self::request::Asked;
use self::store::{Kept, Owner};
use super::models::check_name;
use crate::answer::Update;
use crate::app::{Loaded, SharedApp, unix_seconds};
use crate::auth::owner;
use crate::body::read_body;
use crate::error::{ApiError, Dialect};
use crate::fields::Body;
use crate::generation::{Generation, count_prompt};
use crate::shorten;
use crate::sse::{self, Event};

pub use compact::compact;
pub use store::Responses;
pub use stored::{cancel, delete, input_items, retrieve};

/// `POST /v1/responses`.
pub async fn responses(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::OpenAi.answer(run(&app, request, Instant::now()).await)
}

/// `POST /v1/responses/input_tokens`.
pub async fn input_tokens(State(app): State<SharedApp>, request: Request) -> Response {
    Dialect::OpenAi.answer(count(&app, request).await)
}

/// A checked request with the model that is to answer it.
struct Taken {
    loaded: Arc<Loaded>,
    object: Map<String, Value>,
    owner: Owner,
    asked: Asked,
}

async fn take(app: &SharedApp, request: Request) -> Result<Taken, ApiError> {
    let loaded = Arc::clone(app.loaded()?);
    let owner = owner(&app.keys(), request.headers());
    let object = read_body(request, &app.config.limits, request::FIELDS).await?;
    check_name(app, &loaded, Body(&object).text("model"))?;
    let mut asked = request::parse(Body(&object), &app.responses, owner)?;
    if asked.shorten {
        asked.work = shorten::to_fit(&loaded, asked.work).await?;
    }
    Ok(Taken { loaded, object, owner, asked })
}

async fn count(app: &SharedApp, request: Request) -> Result<Response, ApiError> {
    let Taken { loaded, asked, .. } = take(app, request).await?;
    let tokens = count_prompt(&loaded, asked.work).await?;
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": tokens})).into_response())
}

/// What is needed to keep a response once it is there.
struct Keeping {
    app: SharedApp,
    owner: Owner,
    input: Vec<Value>,
    before: Option<Arc<Kept>>,
}

impl Keeping {
    fn keep(&mut self, response: &Value) {
        let mut input = std::mem::take(&mut self.input);
        let id = response["id"].as_str().unwrap_or_default().trim_start_matches("resp_");
        for (index, item) in input.iter_mut().enumerate() {
            if item.get("id").is_none_or(Value::is_null)
                && let Some(fields) = item.as_object_mut()
            {
                fields.insert("id".into(), format!("msg_{id}_in{index}").into());
            }
        }
        self.app.responses.keep(self.owner, response, &input, self.before.take());
    }
}

async fn run(app: &SharedApp, request: Request, arrived: Instant) -> Result<Response, ApiError> {
    let Taken { loaded, mut object, owner, asked } = take(app, request).await?;
    let stream = Body(&object).flag("stream").unwrap_or(false);
    let Asked { work, tools, input, before, store, shows, .. } = asked;
    let generation = Generation::start(app, &loaded, work, arrived).await?;
    let notice = generation.notice();
    // The response repeats parts of the request; the input is not among them.
    object.shift_remove("input");
    let head = Head {
        id: app.new_id("resp_"),
        created: unix_seconds(),
        model: loaded.facts.name.clone(),
        request: Value::Object(object),
        tools: Arc::new(tools),
        shows,
        store,
    };
    let mut keeping = store.then(|| Keeping { app: Arc::clone(app), owner, input, before });
    if stream {
        return Ok(notice.on(sse::respond(events(generation, head, keeping), app.config.keep_alive)));
    }
    let answers = generation.answers().await?;
    let response = head.whole(&answers.into_iter().next().unwrap_or_default());
    if let Some(keeping) = &mut keeping {
        keeping.keep(&response);
    }
    Ok(notice.on(Json(response).into_response()))
}

fn events(
    generation: Generation,
    head: Head,
    mut keeping: Option<Keeping>,
) -> impl Stream<Item = Event> + Send {
    let mut items = Items::new(head);
    let mut first = Vec::new();
    items.start(&mut first);
    let rest = generation.flat_map(move |update| {
        let mut events = Vec::with_capacity(2);
        match update {
            Update::Piece { piece, logprobs, .. } => items.piece(piece, &logprobs, &mut events),
            Update::Finished { outcome, .. } => {
                let response = items.finish(&outcome, &mut events);
                if let Some(mut keeping) = keeping.take() {
                    // Before the event is seen, since a client may go on from it at once.
                    keeping.keep(&response);
                }
            }
            Update::Failed(fault) => items.fail(&fault.message, &mut events),
            Update::Started { .. } | Update::Prompt(_) | Update::End => {}
        }
        stream::iter(events)
    });
    stream::iter(first).chain(rest)
}
