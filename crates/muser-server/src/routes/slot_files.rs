//! `POST /slots/{id}?action=save|restore|erase`: llama-server's way to keep a slot, mapped on packs.
//!
//! A file name is the name of a record with the slot's token ids, and of a pinned pack with their state; no file of that
//! name is ever made. After a restore, in this process or another, a request that begins with these tokens computes only
//! what is new, whichever slot it names.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, Request, State};
use axum::response::{IntoResponse as _, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::SharedApp;
use crate::body::read_body;
use crate::error::{ApiError, Dialect};
use crate::fields::{Body, Field, Kind};
use crate::generation::{read_prompt, run_blocking};
use crate::owner::Owner;
use crate::packs::{self, Keepsake, Place, check_name};

/// The fields.
pub const FIELDS: &[Field] = &[Field::optional(
    "filename",
    Kind::Text,
    "for save and restore: letters, digits, spaces, '.', '_', '-'",
)];

/// The query.
#[derive(Debug, Deserialize)]
pub struct Action {
    #[serde(default)]
    action: String,
}

/// `POST /slots/{id}?action=…`.
pub async fn act(
    State(app): State<SharedApp>,
    Path(slot): Path<String>,
    action: Result<Query<Action>, QueryRejection>,
    request: Request,
) -> Response {
    let answer = match action {
        Ok(Query(action)) => run(&app, &slot, &action.action, request).await,
        Err(_) => Err(ApiError::field("action", "'action' must be given once: save, restore or erase")),
    };
    Dialect::OpenAi.answer(answer)
}

async fn run(app: &SharedApp, slot: &str, action: &str, request: Request) -> Result<Response, ApiError> {
    let loaded = app.loaded()?;
    app.packs()?;
    let count = loaded.backend.slots();
    let slot: usize =
        slot.parse().ok().filter(|slot| *slot < count).ok_or_else(|| {
            ApiError::field("id", format!("The slots are 0 to {}", count.saturating_sub(1)))
        })?;
    if action == "erase" {
        return Ok(Json(json!({"id_slot": slot, "n_erased": loaded.slots.erase(Owner::current()?, slot)}))
            .into_response());
    }
    let body = read_body(request, &app.config.limits, FIELDS).await?;
    let name = Body(&body)
        .text("filename")
        .ok_or_else(|| ApiError::field("filename", "Missing required field 'filename'"))?
        .to_owned();
    check_name("filename", &name)?;
    match action {
        "save" => save(app, slot, name).await,
        "restore" => restore(app, slot, name).await,
        _ => Err(ApiError::field("action", "'action' must be save, restore or erase")),
    }
}

async fn save(app: &SharedApp, slot: usize, name: String) -> Result<Response, ApiError> {
    let begun = Instant::now();
    let packs = Arc::clone(app.packs()?);
    let loaded = app.loaded()?;
    let saving = packs.begin_save()?;
    let place = Place::of_current(Keepsake::Slot, &name)?;
    let ids = loaded.slots.ids(place.owner, slot);
    if ids.is_empty() {
        return Err(ApiError::field("id", format!("Slot {slot} holds nothing")));
    }
    // Usually all of it is in memory; what has been dropped since is computed again, so that it can be kept.
    read_prompt(loaded, fitting(&ids, loaded.facts.context_tokens), true).await?;
    let object = run_blocking(move || {
        let _saving = saving;
        let content = packs.save(
            &place,
            packs::State::Any,
            &ids,
            |kept| json!({"ids": ids, "pack": kept.map(|kept| kept.json())}),
        )?;
        let figure = |name: &str| content["pack"].get(name).and_then(Value::as_u64).unwrap_or(0);
        Ok(json!({
            "id_slot": slot,
            "filename": name,
            "n_saved": figure("tokens"),
            "n_written": figure("bytes"),
            "timings": {"save_ms": milliseconds(begun)},
        }))
    });
    Ok(Json(object.await?).into_response())
}

async fn restore(app: &SharedApp, slot: usize, name: String) -> Result<Response, ApiError> {
    let begun = Instant::now();
    let packs = Arc::clone(app.packs()?);
    let loaded = app.loaded()?;
    let place = Place::of_current(Keepsake::Slot, &name)?;
    let owner = place.owner;
    let found = run_blocking(move || packs.recall(&place)).await?;
    let Some((content, _)) = found else {
        return Err(ApiError::field("filename", "Nothing has been saved under this name"));
    };
    let ids: Vec<u32> = content["ids"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|id| id.as_u64()?.try_into().ok())
        .collect();
    if ids.is_empty() || ids.iter().any(|id| *id as usize >= loaded.text.vocabulary()) {
        return Err(ApiError::field("filename", "What was saved under this name belongs to another model"));
    }
    let usage = read_prompt(loaded, fitting(&ids, loaded.facts.context_tokens), true).await?;
    loaded.slots.note(owner, Some(slot), loaded.backend.slots(), ids);
    Ok(Json(json!({
        "id_slot": slot,
        "filename": name,
        "n_restored": usage.cached,
        "n_read": content["pack"].get("bytes").and_then(Value::as_u64).unwrap_or(0),
        "timings": {"restore_ms": milliseconds(begun)},
    }))
    .into_response())
}

/// A slot that was filled to the end of its context is read again without its last token.
fn fitting(ids: &[u32], context_tokens: usize) -> Vec<u32> {
    ids[..ids.len().min(context_tokens.saturating_sub(1))].to_vec()
}

fn milliseconds(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}
