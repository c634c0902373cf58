//! `GET /v1/dashboard`: the one answer that `/dashboard` and `muser top` are made of.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use axum::response::{IntoResponse as _, Response};

use crate::app::{App, Loaded, SharedApp};
use crate::backend::{Slot, Snapshot};
use crate::dashboard::{
    COLUMNS, ColumnPart, DraftPart, ErrorPart, FIGURES, FigurePart, HistoryPart, INTERVAL, LENGTH, Machine,
    Mark, Marked, ModelPart, NodePart, Report, ServerPart, SlotPart, Totals, VERSION, View,
};
use crate::error::{ApiError, Dialect};

/// `GET /v1/dashboard`; answered while stopping and after the loss of the device too, when operators look hardest.
pub async fn dashboard(State(app): State<SharedApp>, uri: Uri) -> Response {
    let answer = match since(uri.query()) {
        Ok(since) => run(&app, since).await,
        Err(fault) => Err(fault),
    };
    Dialect::OpenAi.answer(answer)
}

/// The row after which rows are wanted.
fn since(query: Option<&str>) -> Result<u64, ApiError> {
    // The last one counts.
    let mut pairs = query.unwrap_or_default().rsplit('&').filter_map(|pair| pair.split_once('='));
    match pairs.find(|(name, _)| *name == "since") {
        None => Ok(0),
        Some((_, text)) => text
            .parse()
            .map_err(|_| ApiError::field("since", "'since' must be the number of a row, 0 or more")),
    }
}

async fn run(app: &SharedApp, since: u64) -> Result<Response, ApiError> {
    let Some(loaded) = app.loaded_if_any() else {
        return app.loaded().map(|_| ().into_response());
    };
    let now = app.without_sizes(app.snapshot(loaded).await);
    let machine = app.machine();
    if let Some(machine) = machine
        && machine.is_unmeasured()
        && now.running == 0
        && now.waiting == 0
    {
        let machine = Arc::clone(machine);
        tokio::task::spawn_blocking(move || machine.measure());
    }
    Ok(Json(report(app, loaded, &now, machine.map(AsRef::as_ref), since)).into_response())
}

fn report(app: &App, loaded: &Loaded, now: &Snapshot, machine: Option<&Machine>, since: u64) -> Report {
    let clocks = &loaded.metrics.clocks;
    let history = loaded.board.history();
    let at = loaded.board.begun().elapsed();
    let totals = Totals::of(now, clocks, loaded.metrics.cancelled.get(), history.last());
    let places = (loaded.backend.slots(), loaded.metrics.connections.get());
    let view = View::new(now, places, machine, (at, &totals), &history);
    let figures = FIGURES.iter().map(|figure| FigurePart {
        id: figure.id.into(),
        group: figure.group.into(),
        label: figure.label.into(),
        value: figure.value(&view),
        unit: figure.unit.into(),
        mark: figure.mark,
        over: figure.over.into(),
        what: figure.what.into(),
    });
    let (first, spans) = history.spans(since);
    let rows = spans.map(|span| COLUMNS.iter().map(|column| column.value(&span, machine)).collect());
    let columns = COLUMNS.iter().map(|column| ColumnPart {
        id: column.id.into(),
        label: column.label.into(),
        unit: column.unit.into(),
        mark: column.mark,
    });
    let (shown, measured) = (app.shows_sizes(), Mark::Measured);
    Report {
        version: VERSION,
        server: server(app, loaded, at.as_secs()),
        model: ModelPart {
            name: loaded.facts.name.clone(),
            quantization: loaded.facts.quantization.clone(),
            context_tokens: loaded.facts.context_tokens,
        },
        figures: figures.collect(),
        slots: Marked { mark: measured, list: now.slots.iter().map(|slot| slot_part(slot, shown)).collect() },
        errors: Marked {
            mark: measured,
            list: clocks.errors.list(Instant::now()).into_iter().map(error_part).collect(),
        },
        draft: Marked { mark: measured, list: draft(now) },
        nodes: Marked { mark: measured, list: nodes(app, shown) },
        history: HistoryPart {
            interval_s: INTERVAL.as_secs(),
            length: LENGTH,
            first,
            newest: history.newest(),
            columns: columns.collect(),
            rows: rows.collect(),
        },
    }
}

fn server(app: &App, loaded: &Loaded, uptime_s: u64) -> ServerPart {
    let reason = loaded.backend.lost();
    let state = match (app.is_stopping(), &reason) {
        (_, Some(_)) => "lost",
        (true, None) => "stopping",
        (false, None) => "ready",
    };
    ServerPart {
        version: env!("CARGO_PKG_VERSION").into(),
        state: state.into(),
        reason,
        device: loaded.backend.device(),
        started: loaded.created,
        uptime_s,
    }
}

fn slot_part(slot: &Slot, shown: bool) -> SlotPart {
    let state = match (slot.busy, shown) {
        (false, _) => "idle",
        (true, false) => "busy",
        (true, true) if slot.processed_tokens < slot.prompt_tokens => "reading",
        (true, true) => "writing",
    };
    SlotPart {
        id: slot.id,
        state: state.into(),
        prompt_tokens: slot.prompt_tokens,
        processed_tokens: slot.processed_tokens,
        cached_tokens: slot.cached_tokens,
        generated_tokens: slot.generated_tokens,
    }
}

fn error_part(error: crate::dashboard::ErrorCount) -> ErrorPart {
    ErrorPart {
        status: error.status,
        code: Cow::Borrowed(error.code),
        last_hour: error.last_hour,
        total: error.total,
        seconds_ago: error.seconds_ago,
    }
}

fn draft(now: &Snapshot) -> Vec<DraftPart> {
    let accepted = now.drafted_accepted_by_place.iter().enumerate();
    let drafts = now.drafts.max(1) as f64;
    // Five digits, as everywhere.
    let share = |count: u64| (1e5 * count as f64 / drafts).round() / 1e5;
    accepted.map(|(at, count)| DraftPart { place: at + 1, accepted_share: share(*count) }).collect()
}

/// What went wrong with a node may name addresses: for the operator, and not for everybody who has some key.
fn nodes(app: &App, shown: bool) -> Vec<NodePart> {
    let mut nodes = app.nodes();
    if !shown {
        nodes.iter_mut().for_each(|node| node.fault = None);
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_that_is_asked_for() {
        let check = |query: Option<&str>, expected: Option<u64>| {
            assert_eq!(since(query).ok(), expected, "{query:?}");
        };
        check(None, Some(0));
        check(Some(""), Some(0));
        check(Some("since=12"), Some(12));
        check(Some("a=b&since=1&since=2"), Some(2));
        check(Some("other=3"), Some(0));
        for wrong in ["since=", "since=-1", "since=x", "since=1.5", "since=99999999999999999999999"] {
            check(Some(wrong), None);
        }
    }
}
