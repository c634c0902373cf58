//! The facts about a file as plain data; `commands::inspect` prints them as text or JSON.

use std::collections::BTreeMap;

use muser_gguf::{GgmlType, GgufFile};
use muser_model::{Geometry, Model, remarks};
use serde::Serialize;

use super::identify;

/// All that `muser inspect` says.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Path of the (first) file.
    pub path: String,
    /// Files of the set.
    pub files: usize,
    /// Bytes of all files together.
    pub file_bytes: u64,
    /// Container version.
    pub gguf_version: u32,
    /// `general.architecture`.
    pub architecture: Option<String>,
    /// `general.name`.
    pub name: Option<String>,
    /// `general.file_type`, in words where known.
    pub file_type: Option<String>,
    /// Metadata entries.
    pub metadata_entries: usize,
    /// Tensors.
    pub tensors: usize,
    /// Values of all tensors.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes per type, most first.
    pub types: Vec<TypeShare>,
    /// Figures of the model, when they are right.
    pub geometry: Option<GeometryReport>,
    /// Figures of the tokenizer.
    pub tokenizer: Option<TokenizerReport>,
    /// Why muser cannot run it.
    pub cannot_run: Option<String>,
    /// Which official file it is, when that was checked or can be told from the size.
    pub identity: String,
    /// SHA-256 of each file, when asked for.
    pub sha256: Vec<String>,
    /// What a careful reader would stumble over.
    pub odd: Vec<String>,
    /// All tensors, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor_list: Option<Vec<TensorLine>>,
}

/// How much of a file is of one type.
#[derive(Debug, Serialize)]
pub struct TypeShare {
    /// Name of the type.
    #[serde(rename = "type")]
    pub ty: &'static str,
    /// Tensors.
    pub tensors: usize,
    /// Bytes.
    pub bytes: u64,
}

/// Figures of the model, by the names of the geometry.
#[derive(Debug, Serialize)]
pub struct GeometryReport {
    /// Name of the released model that has exactly these figures.
    pub shape_of: Option<&'static str>,
    pub layers: usize,
    pub full_layers: Vec<usize>,
    pub hidden: usize,
    pub ffn: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub context: usize,
    pub window: usize,
    pub rope_theta: f32,
    pub rms_eps: f32,
    pub post_norm_eps: f32,
    pub logit_scale: f32,
    pub softcap: Option<f32>,
    /// Bytes read for one token: all matrices but the embedding table.
    pub bytes_per_token: Option<u64>,
    /// Bytes of keys and values for one position beyond the window (f16).
    pub kv_bytes_per_position: u64,
    /// Bytes of keys and values for the whole context (f16).
    pub kv_bytes_context: u64,
}

/// Figures of the tokenizer, by the names of the metadata.
#[derive(Debug, Serialize)]
pub struct TokenizerReport {
    pub model: Option<String>,
    pub pre: Option<String>,
    pub tokens: usize,
    pub merges: usize,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub chat_template_bytes: Option<usize>,
}

/// One tensor.
#[derive(Debug, Serialize)]
pub struct TensorLine {
    pub name: String,
    #[serde(rename = "type")]
    pub ty: &'static str,
    pub dims: Vec<u64>,
    pub bytes: u64,
    pub offset: u64,
}

impl Report {
    /// Collects everything but hashes and the tensor table. `model` is what became of binding the weights.
    pub fn new(label: String, file: &GgufFile, model: &Result<Model, muser_model::ModelError>) -> Self {
        let text = |key: &str| file.get(key).and_then(muser_gguf::Value::as_str).map(str::to_owned);
        let model = model.as_ref();
        let geometry = model.as_ref().ok().map(|model| model.geometry.clone());
        let geometry = geometry.or_else(|| Geometry::from_gguf(file).ok());
        Self {
            path: label,
            files: file.shard_count(),
            file_bytes: (0..file.shard_count()).map(|shard| file.shard_bytes(shard).len() as u64).sum(),
            gguf_version: file.version(),
            architecture: text("general.architecture"),
            name: text("general.name"),
            file_type: file.opt_u32("general.file_type").ok().flatten().map(file_type_name),
            metadata_entries: file.metadata().count(),
            tensors: file.tensors().len(),
            parameters: file.tensors().iter().map(muser_gguf::TensorInfo::values).sum(),
            tensor_bytes: file.tensors().iter().map(|tensor| tensor.len as u64).sum(),
            types: type_shares(file),
            geometry: geometry.as_ref().map(|geometry| GeometryReport::new(geometry, model.ok())),
            tokenizer: TokenizerReport::new(file),
            cannot_run: model.err().map(ToString::to_string),
            identity: identify(file, None),
            sha256: Vec::new(),
            odd: remarks::findings(file, geometry.as_ref(), model.ok()),
            tensor_list: None,
        }
    }

    /// The tensor table.
    pub fn list_tensors(file: &GgufFile) -> Vec<TensorLine> {
        let line = |tensor: &muser_gguf::TensorInfo| TensorLine {
            name: tensor.name.clone(),
            ty: tensor.ty.name(),
            dims: tensor.dims.clone(),
            bytes: tensor.len as u64,
            offset: tensor.offset as u64,
        };
        file.tensors().iter().map(line).collect()
    }
}

impl GeometryReport {
    fn new(g: &Geometry, model: Option<&Model>) -> Self {
        let row = (g.kv_width() * 2 * 2) as u64;
        let sliding = g.sliding.iter().filter(|sliding| **sliding).count() as u64;
        let full = g.layers() as u64 - sliding;
        let all_bytes = |model: &Model| {
            model.file.tensors().iter().map(|tensor| tensor.len as u64).sum::<u64>()
                - model.token_embd.bytes().len() as u64
        };
        Self {
            shape_of: g.known_name(),
            layers: g.layers(),
            full_layers: (0..g.layers()).filter(|&layer| !g.sliding[layer]).collect(),
            hidden: g.hidden,
            ffn: g.ffn,
            heads: g.heads,
            kv_heads: g.kv_heads,
            head_dim: g.head_dim,
            vocab: g.vocab,
            context: g.context,
            window: g.window,
            rope_theta: g.rope_theta,
            rms_eps: g.rms_eps,
            post_norm_eps: g.post_norm_eps,
            logit_scale: g.logit_scale,
            softcap: g.softcap,
            bytes_per_token: model.map(all_bytes),
            kv_bytes_per_position: full * row,
            kv_bytes_context: (full * g.context as u64 + sliding * g.window.min(g.context) as u64) * row,
        }
    }
}

impl TokenizerReport {
    fn new(file: &GgufFile) -> Option<Self> {
        let text = |key: &str| file.get(key).and_then(muser_gguf::Value::as_str);
        let id = |key: &str| file.opt_u32(key).ok().flatten();
        let len = |key: &str| file.array(key).map_or(0, muser_gguf::Array::len);
        file.get("tokenizer.ggml.tokens")?;
        Some(Self {
            model: text("tokenizer.ggml.model").map(str::to_owned),
            pre: text("tokenizer.ggml.pre").map(str::to_owned),
            tokens: len("tokenizer.ggml.tokens"),
            merges: len("tokenizer.ggml.merges"),
            bos: id("tokenizer.ggml.bos_token_id"),
            eos: id("tokenizer.ggml.eos_token_id"),
            eot: id("tokenizer.ggml.eot_token_id"),
            chat_template_bytes: text("tokenizer.chat_template").map(str::len),
        })
    }
}

fn type_shares(file: &GgufFile) -> Vec<TypeShare> {
    let mut shares: BTreeMap<GgmlType, (usize, u64)> = BTreeMap::new();
    for tensor in file.tensors() {
        let share = shares.entry(tensor.ty).or_default();
        share.0 += 1;
        share.1 += tensor.len as u64;
    }
    let mut list: Vec<_> = shares
        .into_iter()
        .map(|(ty, (tensors, bytes))| TypeShare { ty: ty.name(), tensors, bytes })
        .collect();
    list.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    list
}

/// The names that quantisers give to `general.file_type`.
fn file_type_name(id: u32) -> String {
    let name = match id {
        0 => "all F32",
        1 => "mostly F16",
        2 => "mostly Q4_0",
        3 => "mostly Q4_1",
        7 => "mostly Q8_0",
        8 => "mostly Q5_0",
        9 => "mostly Q5_1",
        10 => "mostly Q2_K",
        11 => "mostly Q3_K_S",
        12 => "mostly Q3_K_M",
        13 => "mostly Q3_K_L",
        14 => "mostly Q4_K_S",
        15 => "mostly Q4_K_M",
        16 => "mostly Q5_K_S",
        17 => "mostly Q5_K_M",
        18 => "mostly Q6_K",
        25 => "mostly IQ4_NL",
        30 => "mostly IQ4_XS",
        32 => "mostly BF16",
        38 => "mostly MXFP4",
        39 => "mostly NVFP4",
        _ => return format!("type {id}"),
    };
    name.to_owned()
}
