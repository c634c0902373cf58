//! What can be asked of a response that was kept.

use axum::Json;
use axum::extract::{Path, RawQuery, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use crate::app::SharedApp;
use crate::auth::owner;
use crate::error::{ApiError, Dialect};

/// Most items in one list.
const MOST_ITEMS: usize = 100;

fn none(id: &str) -> ApiError {
    ApiError::not_found(format!("There is no response {} here (any more)", Value::from(id)))
}

/// `GET /v1/responses/{id}`.
pub async fn retrieve(State(app): State<SharedApp>, Path(id): Path<String>, headers: HeaderMap) -> Response {
    let kept = app.responses.get(owner(&app.keys(), &headers), &id);
    Dialect::OpenAi.answer(kept.map(|kept| Json(kept.response()).into_response()).ok_or_else(|| none(&id)))
}

/// `DELETE /v1/responses/{id}`.
pub async fn delete(State(app): State<SharedApp>, Path(id): Path<String>, headers: HeaderMap) -> Response {
    Dialect::OpenAi.answer(if app.responses.delete(owner(&app.keys(), &headers), &id) {
        Ok(Json(json!({"id": id, "object": "response", "deleted": true})).into_response())
    } else {
        Err(none(&id))
    })
}

/// `POST /v1/responses/{id}/cancel`: what is here has ended.
pub async fn cancel(State(app): State<SharedApp>, Path(id): Path<String>, headers: HeaderMap) -> Response {
    let fault = match app.responses.get(owner(&app.keys(), &headers), &id) {
        Some(_) => ApiError::bad("Only a response that was started with 'background' can be cancelled"),
        None => none(&id),
    };
    fault.into_response_as(Dialect::OpenAi)
}

/// `GET /v1/responses/{id}/input_items`, with `limit`, `order` and `after`.
pub async fn input_items(
    State(app): State<SharedApp>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    let kept = app.responses.get(owner(&app.keys(), &headers), &id).ok_or_else(|| none(&id));
    let listed = kept.and_then(|kept| page(kept.input(), query.as_deref().unwrap_or_default()));
    Dialect::OpenAi.answer(listed.map(|page| Json(page).into_response()))
}

/// The part of a list that a query asks for; the newest come first unless it says otherwise.
fn page(mut items: Vec<Value>, query: &str) -> Result<Value, ApiError> {
    let asked = |name: &str| {
        query
            .split('&')
            .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
            .filter(|value| !value.is_empty())
    };
    let limit = match asked("limit").map(str::parse::<usize>) {
        None => 20,
        Some(Ok(limit @ 1..=MOST_ITEMS)) => limit,
        Some(_) => return Err(ApiError::field("limit", format!("'limit' must be 1 to {MOST_ITEMS}"))),
    };
    match asked("order") {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(_) => return Err(ApiError::field("order", "'order' must be asc or desc")),
    }
    if let Some(after) = asked("after") {
        let Some(at) = items.iter().position(|item| item["id"] == after) else {
            return Err(ApiError::field("after", "'after' must be the id of an item of this list"));
        };
        items.drain(..=at);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first, last) = (id(items.first()), id(items.last()));
    Ok(json!({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_come_in_pages() {
        let items: Vec<Value> = (0..25).map(|index| json!({"id": format!("i{index}")})).collect();
        let ids = |query: &str| {
            let page = page(items.clone(), query).map_err(|fault| fault.param)?;
            Ok((page["first_id"].clone(), page["last_id"].clone(), page["has_more"] == true))
        };
        assert_eq!(ids(""), Ok((json!("i24"), json!("i5"), true)));
        assert_eq!(ids("order=asc&limit=2"), Ok((json!("i0"), json!("i1"), true)));
        assert_eq!(ids("order=asc&after=i23&limit=2"), Ok((json!("i24"), json!("i24"), false)));
        assert_eq!(ids("after=i0"), Ok((Value::Null, Value::Null, false)));
        assert_eq!(ids("limit=1"), Ok((json!("i24"), json!("i24"), true)));
        assert_eq!(ids("limit=100"), Ok((json!("i24"), json!("i0"), false)));
        for (query, param) in [
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("limit=x", "limit"),
            ("order=up", "order"),
            ("after=no", "after"),
        ] {
            assert_eq!(ids(query), Err(Some(param.to_owned())), "{query}");
        }
    }
}
