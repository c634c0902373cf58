//! What can be said about a model file without running it: facts, and what is odd about it.
//!
//! A file that opens as GGUF is always described, also when it is no model that muser runs; why it is not is one of the
//! facts. "Odd" means unlike the released files, not wrong.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use muser_gguf::{GgmlType, GgufFile, Value};

use crate::known::{KnownFile, identify_size};
use crate::{ARCHITECTURE, DFLASH_ARCHITECTURE, DflashConfig, Draft, Geometry, Model, ModelError};

/// What kind of model a file is.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// A text model.
    Text(Box<Geometry>),
    /// A DFlash draft.
    Draft(Box<DflashConfig>),
    /// Something that muser does not run as a model of its own, or a broken one.
    Unusable,
}

/// Tensors of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypeShare {
    /// Block type.
    pub ty: GgmlType,
    /// Tensors.
    pub tensors: u64,
    /// Values.
    pub parameters: u64,
    /// Bytes, without padding.
    pub bytes: u64,
}

/// All facts about a file.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// The file or the files of the set.
    pub paths: Vec<PathBuf>,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// Container version.
    pub version: u32,
    /// Alignment of tensor data.
    pub alignment: u32,
    /// Metadata keys.
    pub keys: usize,
    /// Tensors.
    pub tensors: usize,
    /// `general.architecture`.
    pub architecture: Option<String>,
    /// `general.name`.
    pub name: Option<String>,
    /// Bytes before the tensor data of the first file.
    pub data_start: usize,
    /// Bytes of all tensors, without padding.
    pub tensor_bytes: u64,
    /// Values of all tensors.
    pub parameters: u64,
    /// Tensors by type, largest share first.
    pub types: Vec<TypeShare>,
    /// Kind and shape.
    pub kind: Kind,
    /// Name of the released model that has exactly this shape.
    pub known_shape: Option<&'static str>,
    /// The released file that has this size.
    pub known_file: Option<&'static KnownFile>,
    /// Why muser cannot run it; `None` when it can.
    pub problem: Option<String>,
    /// What is unlike the released files.
    pub odd: Vec<String>,
}

/// Opens and describes a file.
pub fn inspect(path: impl AsRef<Path>) -> Result<Inspection, ModelError> {
    Ok(inspect_file(&Arc::new(GgufFile::open(path)?)))
}

/// Describes an open file.
pub fn inspect_file(file: &Arc<GgufFile>) -> Inspection {
    let shards = 0..file.shard_count();
    let file_bytes = shards.clone().map(|shard| file.shard_bytes(shard).len() as u64).sum();
    let text = |key: &str| file.get(key).and_then(Value::as_str).map(str::to_owned);
    let types = type_shares(file);
    let mut odd = Vec::new();
    let (kind, problem) = load(file, &mut odd);
    odd_container(file, &mut odd);
    odd_keys(file, &mut odd);
    if !matches!(kind, Kind::Unusable) {
        odd_tensors(file, &types, &mut odd);
        odd_tokenizer(file, &mut odd);
    }
    Inspection {
        paths: shards.map(|shard| file.shard_path(shard).to_owned()).collect(),
        file_bytes,
        version: file.version(),
        alignment: file.alignment(),
        keys: file.metadata().count(),
        tensors: file.tensors().len(),
        architecture: text("general.architecture"),
        name: text("general.name"),
        data_start: file.data_start(0),
        tensor_bytes: types.iter().map(|share| share.bytes).sum(),
        parameters: types.iter().map(|share| share.parameters).sum(),
        types,
        known_shape: match &kind {
            Kind::Text(geometry) => geometry.known_name(),
            _ => None,
        },
        known_file: (file.shard_count() == 1).then(|| identify_size(file_bytes)).flatten(),
        kind,
        problem,
        odd,
    }
}

fn type_shares(file: &GgufFile) -> Vec<TypeShare> {
    let mut shares: Vec<TypeShare> = Vec::new();
    for tensor in file.tensors() {
        let (parameters, bytes) = (tensor.values(), tensor.len as u64);
        match shares.iter_mut().find(|share| share.ty == tensor.ty) {
            Some(share) => {
                share.tensors += 1;
                share.parameters += parameters;
                share.bytes += bytes;
            }
            None => shares.push(TypeShare { ty: tensor.ty, tensors: 1, parameters, bytes }),
        }
    }
    shares.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    shares
}

/// Tries to load the file as what it says it is.
fn load(file: &Arc<GgufFile>, odd: &mut Vec<String>) -> (Kind, Option<String>) {
    let problem = |error: ModelError| (Kind::Unusable, Some(error.to_string()));
    match file.get("general.architecture").and_then(Value::as_str) {
        Some(DFLASH_ARCHITECTURE) => match Draft::from_gguf(Arc::clone(file)) {
            Ok(draft) => (Kind::Draft(Box::new(draft.config)), None),
            Err(error) => problem(error),
        },
        _ => match Model::from_gguf(Arc::clone(file)) {
            Ok(model) => {
                odd_weights(&model, odd);
                (Kind::Text(Box::new(model.geometry)), None)
            }
            Err(error) => problem(error),
        },
    }
}

fn odd_weights(model: &Model, odd: &mut Vec<String>) {
    let g = &model.geometry;
    let usual = (g.hidden as f64 / 256.0).powf(-0.5);
    if (f64::from(g.logit_scale) / usual - 1.0).abs() > 1e-5 {
        odd.push(format!("logit_scale is {}, usual for this width is {usual:.6}", g.logit_scale));
    }
    if g.softcap.is_none() {
        odd.push("there is no final_logit_softcapping".to_owned());
    }
    if g.sliding != Geometry::period_of_four(g.layers()) {
        odd.push("the window pattern is not three sliding layers and a full one".to_owned());
    }
    let constant = |vector: &[f32]| vector.iter().all(|value| *value == vector[0]);
    if model.layers.iter().any(|layer| !constant(&layer.attn_q_norm) || !constant(&layer.attn_k_norm)) {
        odd.push("attn_q_norm or attn_k_norm vectors are not constant".to_owned());
    }
    let scaled = model.layers.iter().flat_map(|layer| {
        [&layer.attn_q, &layer.attn_k, &layer.attn_v, &layer.attn_gate, &layer.attn_output]
            .into_iter()
            .chain([&layer.ffn_gate, &layer.ffn_up, &layer.ffn_down])
    });
    let scaled =
        scaled.chain([&model.output, &model.token_embd]).filter(|matrix| matrix.scale != 1.0).count();
    if scaled != 0 {
        odd.push(format!("{scaled} matrices have a factor of their own (.scale)"));
    }
}

fn odd_container(file: &GgufFile, odd: &mut Vec<String>) {
    if file.version() != 3 {
        odd.push(format!("container version {}, usual is 3", file.version()));
    }
    if file.alignment() != 32 {
        odd.push(format!("alignment {}, usual is 32", file.alignment()));
    }
    if file.shard_count() != 1 {
        odd.push(format!("a split set of {} files", file.shard_count()));
    }
    for shard in 0..file.shard_count() {
        let name = file.shard_path(shard).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut places: Vec<(usize, usize)> = file
            .tensors()
            .iter()
            .filter(|tensor| tensor.shard == shard)
            .map(|tensor| (tensor.offset, tensor.offset + tensor.len))
            .collect();
        places.sort_unstable();
        let alignment = file.alignment() as usize;
        let mut end = file.data_start(shard);
        let mut gap_bytes = 0;
        for (start, tensor_end) in places {
            gap_bytes += start.saturating_sub(end.next_multiple_of(alignment));
            end = tensor_end;
        }
        if gap_bytes != 0 {
            odd.push(format!("{name}: {gap_bytes} bytes of gaps between tensors"));
        }
        let (padded, len) = (end.next_multiple_of(alignment), file.shard_bytes(shard).len());
        if len > padded {
            odd.push(format!("{name}: {} bytes after the last tensor", len - padded));
        } else if len < padded && len > file.data_start(shard) {
            odd.push(format!("{name}: the last tensor is not padded"));
        }
    }
}

/// Keys below the architecture's prefix that muser reads or knows to mean nothing.
const KNOWN_MODEL_KEYS: [&str; 25] = [
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
    "attention.causal",
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
    "block_size",
    "target_layers",
];

/// First parts of keys that describe the file and do not change what is computed.
const KNOWN_PREFIXES: [&str; 4] = ["general", "tokenizer", "quantize", "split"];

fn odd_keys(file: &GgufFile, odd: &mut Vec<String>) {
    let architecture = file.get("general.architecture").and_then(Value::as_str).unwrap_or_default();
    let mut unknown = Vec::new();
    for (key, value) in file.metadata() {
        let (prefix, rest) = key.split_once('.').unwrap_or((key, ""));
        let known = KNOWN_PREFIXES.contains(&prefix)
            || (prefix == architecture || prefix == ARCHITECTURE) && KNOWN_MODEL_KEYS.contains(&rest);
        if !known {
            unknown.push(key);
        }
        if rest == "attention.sliding_window_pattern" && !matches!(value, Value::Array(_)) {
            odd.push(format!(
                "the window pattern is a period ({}), not one bool for each layer",
                value.describe()
            ));
        }
    }
    if !unknown.is_empty() {
        odd.push(format!("keys that muser does not know: {}", list(&unknown)));
    }
}

fn odd_tensors(file: &GgufFile, types: &[TypeShare], odd: &mut Vec<String>) {
    let official = [GgmlType::F32, GgmlType::Q4_K, GgmlType::Q5_K, GgmlType::Q6_K];
    let others: Vec<&str> =
        types.iter().filter(|share| !official.contains(&share.ty)).map(|share| share.ty.name()).collect();
    if !others.is_empty() {
        odd.push(format!("types that the released files do not have: {}", list(&others)));
    }
    let unused: Vec<&str> =
        file.tensors().iter().map(|tensor| tensor.name.as_str()).filter(|name| !is_used(name)).collect();
    if !unused.is_empty() {
        odd.push(format!("tensors that muser does not use: {}", list(&unused)));
    }
}

fn is_used(name: &str) -> bool {
    const LAYER: [&str; 14] = [
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
    let Some((stem, last)) = name.rsplit_once('.') else { return false };
    if !matches!(last, "weight" | "scale") {
        return false;
    }
    match stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((_, part)) => LAYER.contains(&part),
        None => matches!(stem, "token_embd" | "output" | "output_norm" | "fc" | "enc.output_norm"),
    }
}

fn odd_tokenizer(file: &GgufFile, odd: &mut Vec<String>) {
    let text = |key: &str| file.get(key).and_then(Value::as_str);
    for (key, usual) in [("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "llama4")] {
        match text(key) {
            Some(found) if found == usual => {}
            Some(found) => odd.push(format!("{key} is {found:?}, usual is {usual:?}")),
            None => odd.push(format!("there is no {key}")),
        }
    }
    let len = |key: &str| match file.get(key) {
        Some(Value::Array(array)) => Some(array.len()),
        _ => None,
    };
    let tokens = len("tokenizer.ggml.tokens");
    if tokens.is_none() {
        odd.push("there is no tokenizer: only token ids can be given and returned".to_owned());
        return;
    }
    for key in ["tokenizer.ggml.merges", "tokenizer.ggml.token_type"] {
        if len(key).is_none() {
            odd.push(format!("there is no {key}"));
        }
    }
    if let (Some(tokens), Some(types)) = (tokens, len("tokenizer.ggml.token_type"))
        && tokens != types
    {
        odd.push(format!("{tokens} tokens, but {types} token types"));
    }
    if text("tokenizer.chat_template").is_none() {
        odd.push("there is no chat template".to_owned());
    }
    for name in ["bos", "eos", "eot"] {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match file.get(&key).and_then(Value::as_integer) {
            Some(id) if (0..tokens.unwrap_or(0) as i128).contains(&id) => {}
            Some(id) => odd.push(format!("{key} is {id}, there are {} tokens", tokens.unwrap_or(0))),
            None => odd.push(format!("there is no {key}")),
        }
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
