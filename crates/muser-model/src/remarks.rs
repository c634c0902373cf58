//! What is unlike the released files: remarks for people who look into a file. Odd is not wrong.

use muser_gguf::{GgmlType, GgufFile, Value};

use crate::{ARCHITECTURE, Geometry, Model};

/// Short remarks about a file, with as much of the model as could be had of it; empty for a file like the released ones.
pub fn findings(file: &GgufFile, geometry: Option<&Geometry>, model: Option<&Model>) -> Vec<String> {
    let mut odd = Vec::new();
    container(file, &mut odd);
    types(file, &mut odd);
    keys(file, &mut odd);
    if let Some(geometry) = geometry {
        unused_tensors(file, geometry, &mut odd);
        figures(file, geometry, &mut odd);
        tokenizer(file, &mut odd);
    }
    if let Some(model) = model {
        weights(model, &mut odd);
    }
    odd
}

fn container(file: &GgufFile, odd: &mut Vec<String>) {
    if file.version() != 3 {
        odd.push(format!("container version {}, usual is 3", file.version()));
    }
    if file.alignment() != 32 {
        odd.push(format!("tensors are aligned to {} bytes, usual is 32", file.alignment()));
    }
    for shard in 0..file.shard_count() {
        places(file, shard, odd);
    }
}

/// Gaps, bytes after the end, a missing last padding.
fn places(file: &GgufFile, shard: usize, odd: &mut Vec<String>) {
    let name = file.shard_path(shard).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let tensors = file.tensors().iter().filter(|tensor| tensor.shard == shard);
    let mut places: Vec<(usize, usize)> =
        tensors.map(|tensor| (tensor.offset, tensor.offset + tensor.len)).collect();
    places.sort_unstable();
    let alignment = file.alignment() as usize;
    let (mut end, mut gap_bytes) = (file.data_start(shard), 0);
    for (start, tensor_end) in places {
        gap_bytes += start.saturating_sub(end.next_multiple_of(alignment));
        end = tensor_end;
    }
    if gap_bytes != 0 {
        odd.push(format!("{gap_bytes} bytes of gaps between the tensors of {name}"));
    }
    let (padded, len) = (end.next_multiple_of(alignment), file.shard_bytes(shard).len());
    if len > padded {
        odd.push(format!("{} bytes follow the last tensor of {name}", len - padded));
    } else if len < padded && end > file.data_start(shard) {
        odd.push(format!("the last tensor of {name} is not padded"));
    }
}

fn types(file: &GgufFile, odd: &mut Vec<String>) {
    const RELEASED: [GgmlType; 4] = [GgmlType::F32, GgmlType::Q4_K, GgmlType::Q5_K, GgmlType::Q6_K];
    // What else is in a file that was made of a published NVFP4 checkpoint.
    const BESIDE_NVFP4: [GgmlType; 3] = [GgmlType::NVFP4, GgmlType::BF16, GgmlType::Q8_0];
    let usual = |ty: &GgmlType| RELEASED.contains(ty) || is_nvfp4(file) && BESIDE_NVFP4.contains(ty);
    let mut seen: Vec<GgmlType> = file.tensors().iter().map(|tensor| tensor.ty).collect();
    seen.sort_unstable();
    seen.dedup();
    for ty in seen.iter().filter(|ty| !ty.is_decodable()) {
        odd.push(format!("muser knows the size of type {} but cannot decode it", ty.name()));
    }
    let others: Vec<&str> =
        seen.iter().filter(|ty| ty.is_decodable() && !usual(ty)).map(|ty| ty.name()).collect();
    if !others.is_empty() {
        odd.push(format!("types that the released files do not have: {}", list(&others)));
    }
}

/// Does the file say that it is mostly NVFP4?
fn is_nvfp4(file: &GgufFile) -> bool {
    file.get("general.file_type").and_then(Value::as_integer) == Some(39)
}

/// Keys below the architecture's prefix that muser reads, or checks to be without effect.
const KNOWN_KEYS: [&str; 22] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.dimension_count",
    "rope.scaling.type",
    "vocab_size",
    "final_logit_softcapping",
    "logit_scale",
    "attn_logit_softcapping",
    "expert_count",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
];

fn keys(file: &GgufFile, odd: &mut Vec<String>) {
    let unknown: Vec<&str> = file
        .metadata()
        .filter(|(key, _)| {
            key.strip_prefix(ARCHITECTURE)
                .and_then(|rest| rest.strip_prefix('.'))
                .is_some_and(|rest| !KNOWN_KEYS.contains(&rest))
        })
        .map(|(key, _)| key)
        .collect();
    if !unknown.is_empty() {
        odd.push(format!("keys that muser does not know: {}", list(&unknown)));
    }
    let imatrix = file.metadata().filter(|(key, _)| key.starts_with("quantize.imatrix.")).count();
    if imatrix > 0 {
        odd.push(format!("it was quantised with an importance matrix ({imatrix} keys)"));
    }
}

fn unused_tensors(file: &GgufFile, geometry: &Geometry, odd: &mut Vec<String>) {
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
        // Scales of activations stand beside some matrices of NVFP4 files, for programs whose activations have four bits.
        let Some((stem, kind @ ("weight" | "scale" | "input_scale"))) = name.rsplit_once('.') else {
            return false;
        };
        let stem = if kind == "scale" { stem.strip_suffix(".weight").unwrap_or(stem) } else { stem };
        let part_of = |part: &str| kind == "weight" || !part.ends_with("norm");
        match stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, part)) => {
                let inside = layer.parse::<usize>().is_ok_and(|layer| layer < geometry.layers());
                inside && PARTS.contains(&part) && part_of(part)
            }
            None => matches!(stem, "token_embd" | "output" | "output_norm") && part_of(stem),
        }
    };
    let unused: Vec<&str> =
        file.tensors().iter().map(|tensor| tensor.name.as_str()).filter(|name| !used(name)).collect();
    if !unused.is_empty() {
        odd.push(format!("tensors that are not part of the architecture and are ignored: {}", list(&unused)));
    }
}

fn figures(file: &GgufFile, g: &Geometry, odd: &mut Vec<String>) {
    let key = |name: &str| format!("{ARCHITECTURE}.attention.{name}");
    if let Some(value) = file.get(&key("sliding_window_pattern"))
        && !matches!(value, Value::Array(_))
    {
        odd.push(format!(
            "the window pattern is a period ({}), not one bool for each layer",
            value.describe()
        ));
    }
    if file.get(&key("sliding_window")).is_none() {
        odd.push("no window is given: sliding layers see the whole context".to_owned());
    }
    if g.sliding != Geometry::period_of_four(g.layers()) {
        odd.push("the window pattern is not three sliding layers and a full one".to_owned());
    }
    if g.softcap.is_none() {
        odd.push("there is no soft cap on the logits, the released model has 20".to_owned());
    }
    let usual = (256.0 / g.hidden as f64).sqrt();
    if (f64::from(g.logit_scale) / usual - 1.0).abs() > 1e-5 {
        odd.push(format!("the logit scale is {}, usual for this width is {usual:.6}", g.logit_scale));
    }
}

fn tokenizer(file: &GgufFile, odd: &mut Vec<String>) {
    let len = |name: &str| match file.get(&format!("tokenizer.ggml.{name}")) {
        Some(Value::Array(array)) => Some(array.len()),
        _ => None,
    };
    let Some(tokens) = len("tokens") else {
        odd.push("there is no tokenizer: only token ids go in and out".to_owned());
        return;
    };
    for (key, usual) in [("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "llama4")] {
        match file.get(key) {
            Some(Value::String(found)) if found == usual => {}
            Some(found) => odd.push(format!("{key} is {}, usual is {usual:?}", found.describe())),
            None => odd.push(format!("there is no {key}, usual is {usual:?}")),
        }
    }
    if len("merges").is_none() {
        odd.push("there is no tokenizer.ggml.merges".to_owned());
    }
    match len("token_type") {
        Some(types) if types == tokens => {}
        Some(types) => odd.push(format!("there are {tokens} tokens, but {types} token types")),
        None => odd.push("there is no tokenizer.ggml.token_type".to_owned()),
    }
    for name in ["bos", "eos", "eot"] {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match file.get(&key).and_then(Value::as_integer) {
            Some(id) if (0..tokens as i128).contains(&id) => {}
            Some(id) => odd.push(format!("{key} is {id}, there are {tokens} tokens")),
            None => odd.push(format!("there is no {key}; it is looked up by its name")),
        }
    }
    if let Some(value) = file.get("tokenizer.ggml.eom_token_id") {
        odd.push(format!("an end-of-message id ({}) is given; it never stops an answer", value.describe()));
    }
    if file.get("tokenizer.chat_template").is_none() {
        odd.push("there is no chat template: only plain completion works".to_owned());
    }
}

/// In the released files the q-norm holds 3.87 throughout and the k-norm ones, and no matrix of their types has a factor.
fn weights(model: &Model, odd: &mut Vec<String>) {
    let differs = |values: &[f32], constant: f32| values.iter().any(|value| (value - constant).abs() > 1e-3);
    let q = model.layers.iter().filter(|layer| differs(&layer.attn_q_norm, 3.87)).count();
    let k = model.layers.iter().filter(|layer| differs(&layer.attn_k_norm, 1.0)).count();
    if q > 0 {
        odd.push(format!("the q-norm of {q} layers is not the constant 3.87"));
    }
    if k > 0 {
        odd.push(format!("the k-norm of {k} layers is not the constant 1"));
    }
    // NVFP4 is made to have one; beside another type it is odd.
    let scaled = model.matrices().filter(|m| m.scale != 1.0 && m.ty != GgmlType::NVFP4).count();
    if scaled > 0 {
        odd.push(format!("{scaled} matrices that are not NVFP4 have a factor of their own (.scale)"));
    }
}

/// A few names, and how many more there are.
fn list(names: &[&str]) -> String {
    const SHOWN: usize = 5;
    let shown = names.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    match names.len().checked_sub(SHOWN) {
        Some(more @ 1..) => format!("{shown} and {more} more"),
        _ => shown,
    }
}
