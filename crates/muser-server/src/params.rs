//! The parameters that several routes share: sampling, limits, stops.
//!
//! Defaults are the model's published ones. The names are those of OpenAI, with llama-server's and vLLM's spellings
//! beside them; the getters take whichever is there.

use std::time::Duration;

use muser_engine::SamplingParams;
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::{self, Body, COUNT, Field, INTEGER, Kind, whole};
use crate::generation_params::{GenerationParams, ResponseFormat};

/// Presence and frequency penalties. Beyond these bounds sums of logits are no numbers any more.
pub const PENALTY: Kind = Kind::Number { min: -1000.0, max: 1000.0 };
/// Repetition penalties.
pub const FACTOR: Kind = Kind::Number { min: 0.01, max: 100.0 };
/// From zero to one.
pub const SHARE: Kind = Kind::Number { min: 0.0, max: 1.0 };
/// A string or a list of strings.
pub const TEXTS: Kind = Kind::Either(&[Kind::Text, Kind::List(&Kind::Text)]);

/// Any number of 32 bits whose opposite is one, too.
const PRIORITY: Kind = Kind::Integer { min: -(i32::MAX as i64), max: i32::MAX as i64 };

/// Largest bias of a token: beyond it sums are no numbers any more, and it decides everything anyway.
const MAX_BIAS: f64 = 1e6;

/// Most stop strings of a request.
const MAX_STOPS: usize = 64;
/// Longest of them in bytes.
const MAX_STOP_BYTES: usize = 4096;
/// Most tokens with a bias: each of them costs time at every step of every sequence.
const MAX_BIASES: usize = 16_384;

/// The sampling fields, to be joined into a route's table by [`concat()`].
pub const SAMPLING_FIELDS: &[Field] = &[
    Field::optional(
        "temperature",
        Kind::Number { min: 0.0, max: f32::MAX as f64 },
        "default 1; up to 0.001 means greedy",
    ),
    Field::optional("top_p", SHARE, "default 0.95; 0 means greedy"),
    Field::optional("top_k", Kind::Integer { min: -1, max: u32::MAX as i64 }, "default 64; 0 or -1: off"),
    Field::optional("min_p", SHARE, "default 0 (off)"),
    Field::optional("presence_penalty", PENALTY, "default 0"),
    Field::optional("frequency_penalty", PENALTY, "default 0"),
    Field::optional("repetition_penalty", FACTOR, "default 1 (off)"),
    Field::optional("repeat_penalty", FACTOR, "the same, in llama-server's spelling"),
    Field::optional(
        "logit_bias",
        Kind::Either(&[Kind::Map, Kind::List(&Kind::List(&Kind::Any))]),
        "token id to a number from -1000000 to 1000000, or pairs, up to 16384; `false` forbids a token",
    ),
    Field::optional(
        "seed",
        Kind::Seed,
        "drawn and reported when absent or -1; any other number of 64 bits, reported without sign",
    ),
    Field::optional(
        "stop",
        TEXTS,
        "up to 64 strings of up to 4096 bytes; the text ends before the first of them",
    ),
    Field::optional("stop_token_ids", Kind::List(&COUNT), "more ids that end the text, in vLLM's spelling"),
    Field::optional(
        "min_tokens",
        COUNT,
        "tokens before which the text may not end; not with a form or tools",
    ),
    Field::optional("ignore_eos", Kind::Bool, "go on up to the limit; not with a form or tools"),
    Field::optional("cache_prompt", Kind::Bool, "default true: reuse cached prefixes and leave this one"),
    Field::optional(
        "cache_salt",
        Kind::Text,
        "only requests with the same key and the same text here share cached prefixes, in vLLM's spelling",
    ),
    Field::optional(
        "priority",
        PRIORITY,
        "default 0; lower is computed earlier and set aside later, in vLLM's spelling",
    ),
    Field::optional(
        "timeout",
        Kind::Number { min: 0.001, max: 1e6 },
        "seconds from the arrival of the request after which the text ends where it is, as at its limit of tokens",
    ),
    Field::optional(
        "context_shift",
        Kind::Bool,
        "go on when the context is full: the oldest turns of a chat go, of plain text the older half; default: --context-shift",
    ),
    Field::optional(
        "id_slot",
        INTEGER,
        "a name for saving the slot later; any free place computes the request",
    ),
];

/// Joins tables at compile time.
pub const fn concat<const N: usize>(first: &[Field], second: &[Field]) -> [Field; N] {
    let mut joined = [Field::ignored("", ""); N];
    assert!(first.len() + second.len() == N, "N is the sum of both lengths");
    let mut index = 0;
    while index < N {
        joined[index] = if index < first.len() { first[index] } else { second[index - first.len()] };
        index += 1;
    }
    joined
}

/// The sampling parameters of a checked body.
pub fn sampling(body: Body<'_>) -> Result<SamplingParams, ApiError> {
    let mut params = SamplingParams::default();
    let set = |name: &str, place: &mut f32| {
        if let Some(number) = body.number(name) {
            *place = number as f32;
        }
    };
    set("temperature", &mut params.temperature);
    set("top_p", &mut params.top_p);
    set("min_p", &mut params.min_p);
    set("presence_penalty", &mut params.presence_penalty);
    set("frequency_penalty", &mut params.frequency_penalty);
    set("repeat_penalty", &mut params.repetition_penalty);
    set("repetition_penalty", &mut params.repetition_penalty);
    if let Some(top_k) = body.integer("top_k") {
        params.top_k = u32::try_from(top_k).unwrap_or(0);
    }
    if params.top_p <= 0.0 {
        // The nucleus of nothing is still the most likely token.
        params.top_p = 1.0;
        params.top_k = 1;
    }
    params.logit_bias = logit_bias(body)?;
    Ok(params)
}

/// The seed, if the client chose one.
pub fn seed(body: Body<'_>) -> Option<u64> {
    let value = body.get("seed")?;
    if whole(value) == Some(-1) { None } else { fields::seed(value) }
}

/// A seed to report when the client chose none: small enough for every JSON reader to keep exactly.
pub fn drawn_seed(random: u64) -> u64 {
    random >> 12
}

/// The stop strings; empty ones would stop at once and are left out.
pub fn stops(body: Body<'_>, name: &str) -> Result<Vec<String>, ApiError> {
    let stops: Vec<String> = match body.get(name) {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(value) => {
            value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
        }
    };
    if stops.len() > MAX_STOPS {
        return Err(ApiError::field(
            name,
            format!("'{name}' holds {} strings, at most {MAX_STOPS} are taken", stops.len()),
        ));
    }
    if let Some(long) = stops.iter().find(|stop| stop.len() > MAX_STOP_BYTES) {
        return Err(ApiError::field(
            name,
            format!("'{name}' holds a string of {} bytes, at most {MAX_STOP_BYTES} are taken", long.len()),
        ));
    }
    Ok(stops.into_iter().filter(|stop| !stop.is_empty()).collect())
}

fn logit_bias(body: Body<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let fault = || {
        let expected = format!("numbers from -{MAX_BIAS} to {MAX_BIAS} (or to false)");
        ApiError::field("logit_bias", format!("'logit_bias' must map token ids to {expected}"))
    };
    let bias = |value: &Value| match value {
        Value::Bool(false) => Ok(f32::NEG_INFINITY),
        value => {
            let number = value.as_f64().filter(|number| number.abs() <= MAX_BIAS);
            number.map(|number| number as f32).ok_or_else(fault)
        }
    };
    let entries = match body.get("logit_bias") {
        Some(Value::Object(map)) => map.len(),
        Some(Value::Array(pairs)) => pairs.len(),
        _ => 0,
    };
    if entries > MAX_BIASES {
        return Err(ApiError::field(
            "logit_bias",
            format!("'logit_bias' holds {entries} tokens, at most {MAX_BIASES} are taken"),
        ));
    }
    match body.get("logit_bias") {
        None => Ok(Vec::new()),
        Some(Value::Object(map)) => map
            .iter()
            .map(|(key, value)| Ok((key.trim().parse().map_err(|_| fault())?, bias(value)?)))
            .collect(),
        Some(value) => value
            .as_array()
            .into_iter()
            .flatten()
            .map(|pair| match pair.as_array().map(Vec::as_slice) {
                Some([id, value]) => {
                    let id = whole(id).and_then(|id| u32::try_from(id).ok()).ok_or_else(fault)?;
                    Ok((id, bias(value)?))
                }
                _ => Err(fault()),
            })
            .collect(),
    }
}

/// What the shared fields say about where the text ends, about its rank, and about the cache.
pub fn endings(body: Body<'_>, work: &mut GenerationParams) -> Result<(), ApiError> {
    work.stops = stops(body, "stop")?;
    let ids = body.list("stop_token_ids").unwrap_or_default();
    work.stop_ids = ids.iter().filter_map(|id| whole(id)?.try_into().ok()).collect();
    work.min_tokens = body.count("min_tokens").unwrap_or(0);
    work.ignore_end = body.flag("ignore_eos").unwrap_or(false);
    work.slot = body.integer("id_slot").and_then(|slot| usize::try_from(slot).ok());
    work.use_cache = body.flag("cache_prompt").unwrap_or(true);
    work.cache_salt = body.text("cache_salt").map(str::to_owned);
    work.priority = body.integer("priority").and_then(|rank| rank.try_into().ok()).unwrap_or(0);
    work.timeout = body.number("timeout").map(Duration::from_secs_f64);
    work.context_shift = body.flag("context_shift");
    Ok(())
}

/// A form that must be complete, or a call, cannot be made to go on.
pub fn check_endings(work: &GenerationParams, has_tools: bool) -> Result<(), ApiError> {
    let field = match (work.ignore_end, work.min_tokens) {
        (true, _) => "ignore_eos",
        (false, 1..) => "min_tokens",
        (false, 0) => return Ok(()),
    };
    if has_tools || work.form != ResponseFormat::Free {
        return Err(ApiError::unsupported(
            field,
            format!("'{field}' together with tools or a form of the answer is not supported"),
        ));
    }
    Ok(())
}

/// The first of the named limits that is there.
pub fn max_tokens(body: Body<'_>, names: &[&str]) -> Option<u32> {
    names.iter().find_map(|name| body.count(name))
}

/// A field for a limit of output tokens.
pub const fn limit_field(name: &'static str, note: &'static str) -> Field {
    Field::optional(name, Kind::Integer { min: -1, max: u32::MAX as i64 }, note)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn params(body: Value) -> Result<SamplingParams, Option<String>> {
        let Value::Object(body) = body else { panic!("object") };
        fields::check(SAMPLING_FIELDS, &body).map_err(|fault| fault.param)?;
        sampling(Body(&body)).map_err(|fault| fault.param)
    }

    #[test]
    fn bias_takes_string_keys_pairs_and_false() {
        let check = |body: Value, expected: &[(u32, f32)]| {
            assert_eq!(params(body).expect("valid").logit_bias, expected);
        };
        check(json!({"logit_bias": {"15": -100, "7": 1.5}}), &[(15, -100.0), (7, 1.5)]);
        check(json!({"logit_bias": [[3, false], [4, 2]]}), &[(3, f32::NEG_INFINITY), (4, 2.0)]);
        check(json!({"logit_bias": {"1": -1e6, "2": 1e6}}), &[(1, -1e6), (2, 1e6)]);
        let many = |count: usize| Value::Array(vec![json!([1, 0.5]); count]);
        assert!(params(json!({"logit_bias": many(MAX_BIASES)})).is_ok());
        for wrong in [
            json!({"x": 1}),
            json!({"1": "a"}),
            json!([[1]]),
            json!([["a", 1]]),
            json!([[5, 3e38], [5, 3e38]]),
            json!({"1": -2e6}),
            many(MAX_BIASES + 1),
        ] {
            assert_eq!(params(json!({"logit_bias": wrong})).err(), Some(Some("logit_bias".into())));
        }
    }

    #[test]
    fn odd_but_meaningful_values_are_taken() {
        let greedy = params(json!({"top_p": 0})).expect("valid");
        assert_eq!((greedy.top_p, greedy.top_k), (1.0, 1));
        assert_eq!(params(json!({"top_k": -1})).expect("valid").top_k, 0);
        assert_eq!(params(json!({"temperature": 1e6})).expect("valid").temperature, 1e6);
        assert_eq!(params(json!({"temperature": -1})).err(), Some(Some("temperature".into())));
        for (field, values) in [
            ("repeat_penalty", [0.0, -1.0, 1e-40, 1e3]),
            ("repetition_penalty", [0.0, -1.0, 1e-40, 1e3]),
            ("presence_penalty", [-3e38, 3e38, 1001.0, -1001.0]),
            ("frequency_penalty", [-3e38, 3e38, 1001.0, -1001.0]),
        ] {
            for value in values {
                assert_eq!(params(json!({field: value})).err(), Some(Some(field.into())), "{value}");
            }
        }
    }

    #[test]
    fn stops_are_a_string_or_a_list() {
        let check = |value: Value, expected: &[&str]| {
            let body = json!({"stop": value});
            assert_eq!(stops(Body(body.as_object().expect("object")), "stop").expect("valid"), expected);
        };
        check(json!("a"), &["a"]);
        check(json!(["a", "", "b"]), &["a", "b"]);
        check(json!(null), &[]);
        let read = |value: Value| {
            let body = json!({"stop": value});
            stops(Body(body.as_object().expect("object")), "stop").map_err(|fault| fault.param)
        };
        let refused = Err(Some("stop".into()));
        assert_eq!(read(json!(["a", "b".repeat(MAX_STOP_BYTES)])).map(|stops| stops.len()), Ok(2));
        assert_eq!(read(json!(["a", "b".repeat(MAX_STOP_BYTES + 1)])), refused);
        let many = |n| (0..n).map(|i| i.to_string()).collect::<Vec<_>>();
        assert_eq!(read(json!(many(MAX_STOPS))), Ok(many(64)));
        assert_eq!(read(json!(many(MAX_STOPS + 1))), refused);
    }

    #[test]
    fn a_drawn_seed_survives_double_precision() {
        // Above 2^53 a double knows even numbers only.
        assert!(drawn_seed(u64::MAX) < 1 << 53 && drawn_seed(u64::MAX) > 1 << 51);
        assert_ne!(drawn_seed(1 << 13), drawn_seed(1 << 12));
    }
}
