//! What gateways of other programs ask a server: which model it has, and how busy it is, at SGLang's addresses and vLLM's.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use muser_kv::BLOCK_LEN;
use serde_json::{Value, json};

use crate::app::{Loaded, SharedApp, unix_seconds};
use crate::backend::Snapshot;
use crate::error::Dialect;

/// `GET /model_info`, `/get_model_info`. No path of a model or tokenizer: gateways would look for it on a hub.
pub async fn model_info(State(app): State<SharedApp>) -> Response {
    answer(&app, |loaded, _| {
        json!({
            "served_model_name": loaded.facts.name,
            "is_generation": true,
            "context_length": loaded.facts.context_tokens,
            "has_image_understanding": loaded.text.sees(),
        })
    })
}

/// `GET /server_info`, `/get_server_info`.
pub async fn server_info(State(app): State<SharedApp>) -> Response {
    answer(&app, |loaded, now| {
        json!({
            "served_model_name": loaded.facts.name,
            "version": concat!("muser ", env!("CARGO_PKG_VERSION")),
            "context_length": loaded.facts.context_tokens,
            "max_running_requests": loaded.backend.slots(),
            "max_total_num_tokens": tokens(now.kv_blocks_total),
            "dp_size": 1,
            "tp_size": 1,
            "disaggregation_mode": "null",
        })
    })
}

/// `GET /get_load`: requests, and tokens that running ones hold in the KV cache.
pub async fn load_by_rank(State(app): State<SharedApp>) -> Response {
    answer(&app, |_, now| {
        json!([{
            "dp_rank": 0,
            "num_reqs": now.running + now.waiting,
            "num_waiting_reqs": now.waiting,
            "num_tokens": tokens(now.kv_blocks_used),
        }])
    })
}

/// `GET /v1/loads`.
pub async fn loads(State(app): State<SharedApp>) -> Response {
    answer(&app, |loaded, now| {
        json!({
            "timestamp": muser_text::utc(unix_seconds()),
            "version": concat!("muser ", env!("CARGO_PKG_VERSION")),
            "dp_rank_count": 1,
            "loads": [{
                "dp_rank": 0,
                "num_running_reqs": now.running,
                "num_waiting_reqs": now.waiting,
                "num_total_reqs": now.running + now.waiting,
                "num_used_tokens": tokens(now.kv_blocks_used),
                "max_total_num_tokens": tokens(now.kv_blocks_total),
                "token_usage": now.kv_blocks_used as f64 / now.kv_blocks_total.max(1) as f64,
                "max_running_requests": loaded.backend.slots(),
            }],
        })
    })
}

/// `GET /load`, as vLLM has it.
pub async fn load(State(app): State<SharedApp>) -> Response {
    answer(&app, |_, now| json!({"server_load": now.running + now.waiting}))
}

/// Positions of so many blocks: a sum over all requests, so nothing of a single one.
fn tokens(blocks: u64) -> u64 {
    blocks * BLOCK_LEN as u64
}

fn answer(app: &SharedApp, say: impl FnOnce(&Loaded, &Snapshot) -> Value) -> Response {
    Dialect::OpenAi
        .answer(app.loaded().map(|loaded| Json(say(loaded, &loaded.backend.snapshot())).into_response()))
}
