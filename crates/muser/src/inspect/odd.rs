//! What a careful reader would stumble over in a file: departures from the released files that are no errors.

use muser_gguf::{GgmlType, GgufFile, Value};
use muser_model::{Geometry, Model};

/// Short remarks, most important first; empty for a file like the released ones.
pub fn findings(file: &GgufFile, geometry: Option<&Geometry>, model: Option<&Model>) -> Vec<String> {
    let mut odd = Vec::new();
    unknown_types(file, &mut odd);
    unused_tensors(file, geometry, &mut odd);
    if let Some(geometry) = geometry {
        metadata(file, &mut odd);
        geometry_remarks(geometry, &mut odd);
    }
    if let Some(model) = model {
        norm_remarks(model, &mut odd);
    }
    trailing_bytes(file, &mut odd);
    odd
}

fn unknown_types(file: &GgufFile, odd: &mut Vec<String>) {
    let mut seen: Vec<GgmlType> =
        file.tensors().iter().map(|t| t.ty).filter(|ty| !ty.is_decodable()).collect();
    seen.sort();
    seen.dedup();
    for ty in seen {
        odd.push(format!("muser knows the size of type {} but cannot decode it", ty.name()));
    }
}

fn unused_tensors(file: &GgufFile, geometry: Option<&Geometry>, odd: &mut Vec<String>) {
    let Some(geometry) = geometry else { return };
    const PARTS: [&str; 14] = [
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_gate",
        "attn_q_norm",
        "attn_k_norm",
        "attn_output",
        "post_attention_norm",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
        "post_ffw_norm",
    ];
    let used = |name: &str| {
        let Some((stem, kind @ ("weight" | "scale"))) = name.rsplit_once('.') else { return false };
        match stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, part)) => {
                layer.parse::<usize>().is_ok_and(|layer| layer < geometry.layers()) && PARTS.contains(&part)
            }
            None => stem == "token_embd" || stem == "output" || (stem == "output_norm" && kind == "weight"),
        }
    };
    let unused: Vec<&str> =
        file.tensors().iter().map(|t| t.name.as_str()).filter(|name| !used(name)).collect();
    if let Some(first) = unused.first() {
        odd.push(format!(
            "{} tensors are not part of the architecture and are ignored, such as {first}",
            unused.len()
        ));
    }
}

fn metadata(file: &GgufFile, odd: &mut Vec<String>) {
    let arch = muser_model::ARCHITECTURE;
    if let Some(value) = file.get(&format!("{arch}.attention.sliding_window_pattern"))
        && !matches!(value, Value::Array(_))
    {
        odd.push(format!(
            "the sliding-window pattern is a period ({}) instead of one flag per layer",
            value.describe()
        ));
    }
    if file.get(&format!("{arch}.attention.sliding_window")).is_none() {
        odd.push("no sliding window is given: sliding layers see the whole context".into());
    }
    if file.get("tokenizer.ggml.tokens").is_none() {
        odd.push("there is no tokenizer: only token ids go in and out".into());
    } else {
        if file.get("tokenizer.chat_template").is_none() {
            odd.push("there is no chat template: only --raw completion works".into());
        }
        if file.get("tokenizer.ggml.eot_token_id").is_none() {
            odd.push("the end-of-turn id is missing; it is looked up by its name".into());
        }
    }
    if let Some(value) = file.get("tokenizer.ggml.eom_token_id") {
        odd.push(format!("an end-of-message id ({}) is given; it never stops an answer", value.describe()));
    }
    let imatrix = file.metadata().filter(|(key, _)| key.starts_with("quantize.imatrix.")).count();
    if imatrix > 0 {
        odd.push(format!("it was quantised with an importance matrix ({imatrix} keys)"));
    }
}

fn geometry_remarks(g: &Geometry, odd: &mut Vec<String>) {
    if g.softcap.is_none() {
        odd.push("there is no soft cap on the logits; the released model has 20".into());
    }
    let usual = (256.0 / g.hidden as f64).sqrt();
    if (f64::from(g.logit_scale) / usual - 1.0).abs() > 1e-3 {
        odd.push(format!(
            "the logit scale is {}; for {} hidden values {usual:.6} is usual",
            g.logit_scale, g.hidden
        ));
    }
    if g.sliding.last() == Some(&true) {
        odd.push("the last layer is a sliding one; in the released model it sees everything".into());
    }
    if g.sliding.iter().all(|&sliding| sliding) || !g.sliding.contains(&true) {
        odd.push(
            "all layers attend in the same way; the released model has three sliding to one full".into(),
        );
    }
}

/// In the released files the q-norm holds 3.87 throughout and the k-norm ones.
fn norm_remarks(model: &Model, odd: &mut Vec<String>) {
    let differs = |values: &[f32], constant: f32| values.iter().any(|value| (value - constant).abs() > 1e-3);
    let q = model.layers.iter().filter(|layer| differs(&layer.attn_q_norm, 3.87)).count();
    let k = model.layers.iter().filter(|layer| differs(&layer.attn_k_norm, 1.0)).count();
    if q > 0 {
        odd.push(format!("the q-norm of {q} layers is not the constant 3.87"));
    }
    if k > 0 {
        odd.push(format!("the k-norm of {k} layers is not the constant 1"));
    }
}

fn trailing_bytes(file: &GgufFile, odd: &mut Vec<String>) {
    for shard in 0..file.shard_count() {
        let end = file
            .tensors()
            .iter()
            .filter(|tensor| tensor.shard == shard)
            .map(|tensor| tensor.offset + tensor.len)
            .max()
            .unwrap_or(file.data_start(shard));
        let left = file.shard_bytes(shard).len().saturating_sub(end);
        // Writers pad the last tensor like every other.
        if left >= file.alignment() as usize {
            odd.push(format!("{left} bytes follow the last tensor of {}", file.shard_path(shard).display()));
        }
    }
}
