//! Synthetic checkpoints of any size, to measure conversions with and to test them: the tensors, settings and shards of a published
//! one, with random weights.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use muser_model::Geometry;
use serde_json::{Map, Value, json};

use crate::ConvertError;
use crate::error::io;

/// Bytes of a shard, about: that of published ones.
const SHARD_BYTES: u64 = 5_000_000_000;
/// Values written at a time.
const PIECE: u64 = 1 << 20;

/// How the matrices of layers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SynthKind {
    /// All of it in BF16.
    Bf16,
    /// NVFP4 as compressed-tensors writes it; table, head and norms in BF16.
    Nvfp4,
}

/// A tensor to be written.
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<u64>,
    fill: Fill,
}

#[derive(Clone, Copy)]
enum Fill {
    /// BF16 numbers of about 2^-6.
    Weights,
    /// BF16 numbers near zero: norms lack their 1.
    Norms,
    /// Any byte.
    Codes,
    /// E4M3 numbers between 2 and 240.
    Scales,
    /// A divisor.
    Divisor,
}

/// Writes a checkpoint into `folder`, which is made if it is not there. `progress` is told bytes done and in all.
///
/// # Errors
/// Files cannot be written.
pub fn write(
    folder: &Path,
    geometry: &Geometry,
    kind: SynthKind,
    seed: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, ConvertError> {
    std::fs::create_dir_all(folder).map_err(|source| io(folder, source))?;
    let tensors = tensors(geometry, kind);
    let bytes = |tensor: &Tensor| tensor.shape.iter().product::<u64>() * size(tensor.dtype);
    let total: u64 = tensors.iter().map(bytes).sum();
    let mut shards: Vec<Vec<&Tensor>> = vec![Vec::new()];
    let mut in_shard = 0;
    for tensor in &tensors {
        if in_shard > 0 && in_shard + bytes(tensor) > SHARD_BYTES {
            shards.push(Vec::new());
            in_shard = 0;
        }
        in_shard += bytes(tensor);
        if let Some(shard) = shards.last_mut() {
            shard.push(tensor);
        }
    }
    let (mut done, mut random) = (0, seed | 1);
    let mut map = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        map.extend(shard.iter().map(|tensor| (tensor.name.clone(), Value::from(name.as_str()))));
        let path = folder.join(&name);
        let mut report = |bytes: u64| {
            done += bytes;
            progress(done, total);
        };
        write_shard(&path, shard, &mut random, &mut report).map_err(|source| io(&path, source))?;
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    put(folder, "model.safetensors.index.json", &index)?;
    put(folder, "config.json", &config(geometry, kind))?;
    put(folder, "tokenizer.json", &tokenizer(geometry.vocab))?;
    Ok(total)
}

fn put(folder: &Path, name: &str, value: &Value) -> Result<(), ConvertError> {
    let path = folder.join(name);
    std::fs::write(&path, value.to_string()).map_err(|source| io(&path, source))
}

fn size(dtype: &str) -> u64 {
    match dtype {
        "F32" => 4,
        "BF16" => 2,
        _ => 1,
    }
}

fn write_shard(
    path: &Path,
    tensors: &[&Tensor],
    random: &mut u64,
    report: &mut dyn FnMut(u64),
) -> std::io::Result<()> {
    let (mut table, mut at) = (Map::new(), 0u64);
    for tensor in tensors {
        let end = at + tensor.shape.iter().product::<u64>() * size(tensor.dtype);
        let row = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end] });
        table.insert(tensor.name.clone(), row);
        at = end;
    }
    let table = Value::Object(table).to_string();
    let mut out = BufWriter::new(File::create(path)?);
    out.write_all(&(table.len() as u64).to_le_bytes())?;
    out.write_all(table.as_bytes())?;
    let mut piece = Vec::new();
    for tensor in tensors {
        let mut left = tensor.shape.iter().product::<u64>();
        while left > 0 {
            let values = left.min(PIECE);
            fill(tensor.fill, (values * size(tensor.dtype)) as usize, random, &mut piece);
            out.write_all(&piece)?;
            report(piece.len() as u64);
            left -= values;
        }
    }
    out.flush()
}

fn fill(fill: Fill, bytes: usize, random: &mut u64, out: &mut Vec<u8>) {
    let (pattern, keep) = match fill {
        Fill::Weights => (0x3c80_3c80_3c80_3c80, 0x807f_807f_807f_807f),
        Fill::Norms => (0x3c00_3c00_3c00_3c00, 0x807f_807f_807f_807f),
        Fill::Codes => (0, u64::MAX),
        Fill::Scales => (0x4040_4040_4040_4040, 0x3737_3737_3737_3737),
        Fill::Divisor => (u64::from(2000.0f32.to_bits()), 0),
    };
    out.clear();
    while out.len() < bytes {
        // xorshift
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        out.extend_from_slice(&(*random & keep | pattern).to_le_bytes());
    }
    out.truncate(bytes);
}

fn tensors(g: &Geometry, kind: SynthKind) -> Vec<Tensor> {
    let mut all = Vec::new();
    let floats = |name: String, shape: Vec<usize>, fill| Tensor {
        name,
        dtype: "BF16",
        shape: shape.into_iter().map(|dim| dim as u64).collect(),
        fill,
    };
    let prefix = "model.language_model.";
    all.push(floats("lm_head.weight".to_owned(), vec![g.vocab, g.hidden], Fill::Weights));
    all.push(floats(format!("{prefix}embed_tokens.weight"), vec![g.vocab, g.hidden], Fill::Weights));
    for layer in 0..g.layers() {
        let name = |part: &str, leaf: &str| format!("{prefix}layers.{layer}.{part}.{leaf}");
        for norm in [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ] {
            all.push(floats(name(norm, "weight"), vec![g.hidden], Fill::Norms));
        }
        for (part, rows, cols) in [
            ("self_attn.q_proj", g.q_width(), g.hidden),
            ("self_attn.k_proj", g.kv_width(), g.hidden),
            ("self_attn.v_proj", g.kv_width(), g.hidden),
            ("self_attn.gate_proj", g.q_width(), g.hidden),
            ("self_attn.o_proj", g.hidden, g.q_width()),
            ("mlp.gate_proj", g.ffn, g.hidden),
            ("mlp.up_proj", g.ffn, g.hidden),
            ("mlp.down_proj", g.hidden, g.ffn),
        ] {
            if kind == SynthKind::Bf16 {
                all.push(floats(name(part, "weight"), vec![rows, cols], Fill::Weights));
                continue;
            }
            let (rows, cols) = (rows as u64, cols as u64);
            let mut put = |leaf: &str, dtype, shape, fill| {
                all.push(Tensor { name: name(part, leaf), dtype, shape, fill });
            };
            put("weight_global_scale", "F32", vec![1], Fill::Divisor);
            put("weight_packed", "U8", vec![rows, cols / 2], Fill::Codes);
            put("weight_scale", "F8_E4M3", vec![rows, cols / 16], Fill::Scales);
        }
    }
    all.push(floats(format!("{prefix}norm.weight"), vec![g.hidden], Fill::Weights));
    all
}

fn config(g: &Geometry, kind: SynthKind) -> Value {
    let kinds = |sliding: &bool| if *sliding { "sliding_attention" } else { "full_attention" };
    let mut config = json!({
        "model_type": "muse_glimmer",
        "text_config": {
            "model_type": "muse_glimmer_text",
            "vocab_size": g.vocab,
            "hidden_size": g.hidden,
            "intermediate_size": g.ffn,
            "num_hidden_layers": g.layers(),
            "num_attention_heads": g.heads,
            "num_key_value_heads": g.kv_heads,
            "head_dim": g.head_dim,
            "max_position_embeddings": g.context,
            "sliding_window": g.window,
            "layer_types": g.sliding.iter().map(kinds).collect::<Vec<_>>(),
            "rope_parameters": { "rope_type": "default", "rope_theta": g.rope_theta },
            "rms_norm_eps": 1e-5,
            "output_multiplier": g.logit_scale,
            "final_logit_softcapping": g.softcap,
            "tie_word_embeddings": false,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    });
    if kind == SynthKind::Nvfp4 {
        config["quantization_config"] = json!({
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": { "group_0": {
                "targets": ["Linear"],
                "weights": { "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16 },
            } },
            "ignore": ["lm_head"],
        });
    }
    config
}

fn tokenizer(vocab: usize) -> Value {
    let tokens: Map<String, Value> = (0..vocab).map(|id| (format!("t{id}"), Value::from(id))).collect();
    json!({ "model": { "type": "BPE", "vocab": tokens, "merges": [] } })
}
