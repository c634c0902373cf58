//! `/v1/packs`: the stored prefixes, by name and size only. What they hold is sealed and not shown.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse as _, Response};
use muser_pack::{PackId, PackInfo};
use serde_json::{Value, json};

use crate::app::SharedApp;
use crate::body::read_body;
use crate::error::{ApiError, Dialect};
use crate::fields::{Body, Field, Kind};
use crate::generation::run_blocking;
use crate::owner::Owner;
use crate::packs::{Packs, pack_fault};

/// The fields of `/v1/packs/{id}/pin`.
pub const PIN_FIELDS: &[Field] =
    &[Field::required("pinned", Kind::Bool, "true: never dropped to make room; false: like any other")];

/// `GET /v1/packs`.
pub async fn list(State(app): State<SharedApp>) -> Response {
    Dialect::OpenAi.answer(run_list(&app).await)
}

async fn run_list(app: &SharedApp) -> Result<Response, ApiError> {
    let packs = Arc::clone(app.packs()?);
    let owner = Owner::current()?;
    let object = run_blocking(move || {
        // What other processes have published shows too.
        packs.library().refresh().map_err(|fault| pack_fault(&fault))?;
        let usage = packs.library().store().usage().map_err(|fault| pack_fault(&fault))?;
        let own = packs.of_owner(owner);
        let data: Vec<Value> = own.iter().map(|pack| object(&packs, pack)).collect();
        // What others have is not to be told from how full the store is.
        let held_bytes =
            if owner.is_everybody() { usage.held_bytes } else { own.iter().map(|pack| pack.bytes).sum() };
        Ok(json!({
            "object": "list",
            "data": data,
            "held_bytes": held_bytes,
            "budget_bytes": usage.budget_bytes,
        }))
    });
    Ok(Json(object.await?).into_response())
}

/// `GET /v1/packs/{id}`.
pub async fn one(State(app): State<SharedApp>, Path(id): Path<String>) -> Response {
    Dialect::OpenAi.answer(run_one(&app, &id, |_, _| Ok(())).await)
}

/// `POST /v1/packs/{id}/pin`.
pub async fn pin(State(app): State<SharedApp>, Path(id): Path<String>, request: Request) -> Response {
    let outcome = async {
        app.packs()?;
        let body = read_body(request, &app.config.limits, PIN_FIELDS).await?;
        let pinned = Body(&body).flag("pinned").unwrap_or(true);
        let owner = Owner::current()?;
        run_one(&app, &id, move |packs, id| {
            if pinned {
                packs.pin_for(owner, id)
            } else {
                packs.library().set_pinned(id, false).map_err(|fault| pack_fault(&fault))
            }
        })
        .await
    };
    Dialect::OpenAi.answer(outcome.await)
}

/// `DELETE /v1/packs/{id}`.
pub async fn delete(State(app): State<SharedApp>, Path(id): Path<String>) -> Response {
    let outcome = async {
        let packs = Arc::clone(app.packs()?);
        let name = parse(&id)?;
        let owner = Owner::current()?;
        run_blocking(move || {
            packs.find(owner, name)?;
            packs.library().remove(name).map_err(|fault| pack_fault(&fault))
        })
        .await?;
        Ok(Json(json!({"id": id, "object": "pack.deleted", "deleted": true})).into_response())
    };
    Dialect::OpenAi.answer(outcome.await)
}

async fn run_one(
    app: &SharedApp,
    id: &str,
    first: impl FnOnce(&Packs, PackId) -> Result<(), ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let packs = Arc::clone(app.packs()?);
    let id = parse(id)?;
    let owner = Owner::current()?;
    let object = run_blocking(move || {
        packs.find(owner, id)?;
        first(&packs, id)?;
        packs.find(owner, id).map(|pack| object(&packs, &pack))
    });
    Ok(Json(object.await?).into_response())
}

/// No pack has a name of another form.
fn parse(id: &str) -> Result<PackId, ApiError> {
    PackId::parse(id).ok_or_else(|| ApiError::not_found("There is no such pack"))
}

fn object(packs: &Packs, pack: &PackInfo) -> Value {
    json!({
        "id": pack.id.to_string(),
        "object": "pack",
        "created": pack.created_unix_s,
        "tokens": pack.positions,
        "segments": pack.segments.0 + pack.segments.1,
        "bytes": pack.bytes,
        "pinned": pack.pinned,
        // Others were computed by another model, or by this one on other hardware.
        "usable": packs.is_ours(pack),
    })
}
