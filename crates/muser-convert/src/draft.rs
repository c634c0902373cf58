//! The DFlash draft of a model, which is published as a checkpoint of its own.

use muser_gguf::{GgufWriter, Value as Put};
use muser_model::DFLASH_ARCHITECTURE;
use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::error::wrong;
use crate::figures::Figures;
use crate::plan::{Order, Plan};
use crate::scheme::Scheme;
use crate::source::Source;
use crate::text::vector;
use crate::tokenizer::Tokenizer;
use crate::{Choices, ConvertError, Laid};

const MASK: &str = "mask_token_id";

/// Plans a draft.
pub(crate) fn lay_out(
    checkpoint: &Checkpoint,
    scheme: &Scheme,
    choices: &Choices,
    name: &str,
) -> Result<Laid, ConvertError> {
    let root = &checkpoint.config;
    let model_type = root.get("model_type").and_then(Value::as_str).unwrap_or("none");
    if model_type != "muse_glimmer_assistant" {
        return Err(wrong("config.json: model_type", "muse_glimmer_assistant", model_type));
    }
    let f = Figures { value: root, place: "config.json" };
    f.only("hidden_act", &Value::from("silu"))?;
    let layers = f.size("num_hidden_layers")?;
    let (hidden, ffn, head_dim) = (f.size("hidden_size")?, f.size("intermediate_size")?, f.size("head_dim")?);
    let (heads, kv_heads) = (f.size("num_attention_heads")?, f.size("num_key_value_heads")?);
    let sliding = f.sliding(layers)?;
    let taps = taps(&f)?;
    let mask = f.id(MASK).ok_or_else(|| f.fault(MASK, "an id", root.get(MASK)))?;

    let mut plan = Plan::new(choices.types);
    let source = |module: &str, rows, cols| Source::of(checkpoint, scheme, module, rows, cols);
    plan.rest_matrix("fc", source("encoder.fc", hidden, taps.len() * hidden)?)?;
    for (theirs, ours) in [("encoder.output_norm_enc", "enc.output_norm"), ("norm", "output_norm")] {
        let norm = vector(checkpoint, &format!("{theirs}.weight"), hidden)?;
        plan.values(format!("{ours}.weight"), vec![hidden as u64], norm);
    }
    for layer in 0..layers {
        let module = |part: &str| format!("layers.{layer}.{part}");
        let stem = |part: &str| format!("blk.{layer}.{part}");
        for (theirs, ours, len) in [
            ("input_layernorm", "attn_norm", hidden),
            ("post_attention_layernorm", "ffn_norm", hidden),
            ("self_attn.q_norm", "attn_q_norm", head_dim),
            ("self_attn.k_norm", "attn_k_norm", head_dim),
        ] {
            let norm = vector(checkpoint, &format!("{}.weight", module(theirs)), len)?;
            plan.values(format!("{}.weight", stem(ours)), vec![len as u64], norm);
        }
        // Drafts rotate halves, as their checkpoints do: no row moves.
        for (theirs, ours, rows, cols) in [
            ("self_attn.q_proj", "attn_q", heads * head_dim, hidden),
            ("self_attn.k_proj", "attn_k", kv_heads * head_dim, hidden),
            ("self_attn.v_proj", "attn_v", kv_heads * head_dim, hidden),
            ("self_attn.o_proj", "attn_output", hidden, heads * head_dim),
            ("mlp.gate_proj", "ffn_gate", ffn, hidden),
            ("mlp.up_proj", "ffn_up", ffn, hidden),
            ("mlp.down_proj", "ffn_down", hidden, ffn),
        ] {
            plan.layer_matrix(&stem(ours), source(&module(theirs), rows, cols)?, Order::AsTheyAre)?;
        }
    }
    refuse_strangers(checkpoint, layers)?;

    let mut writer = GgufWriter::new();
    let key = |name: &str| format!("{DFLASH_ARCHITECTURE}.{name}");
    writer.put("general.architecture", Put::String(DFLASH_ARCHITECTURE))?;
    writer.put("general.type", Put::String("model"))?;
    writer.put("general.name", Put::String(name))?;
    writer.put("general.size_label", Put::String(&plan.size_label()))?;
    writer.put("general.file_type", Put::U32(plan.file_type()))?;
    writer.put("general.quantization_version", Put::U32(2))?;
    for (name, value) in [
        ("block_count", layers),
        ("context_length", f.size("max_position_embeddings")?),
        ("embedding_length", hidden),
        ("feed_forward_length", ffn),
        ("attention.head_count", heads),
        ("attention.head_count_kv", kv_heads),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("attention.sliding_window", f.size("sliding_window")?),
        ("block_size", f.size("block_size")?),
    ] {
        writer.put(&key(name), Put::U32(value as u32))?;
    }
    let eps = f.number("rms_norm_eps", Some(1e-5))?;
    writer.put(&key("attention.layer_norm_rms_epsilon"), Put::F32(eps as f32))?;
    writer.put_bools(&key("attention.sliding_window_pattern"), sliding)?;
    writer.put(&key("rope.freq_base"), Put::F32(f.rope_theta()? as f32))?;
    writer.put_i32s(&key("target_layers"), taps.iter().map(|layer| *layer as i32))?;
    // Its ids are the target's; a folder need not repeat them.
    if let Some(vocab) = f.value.get("vocab_size").and_then(Value::as_u64)
        && let Some(tokenizer) = Tokenizer::of(checkpoint, vocab as usize)?
    {
        tokenizer.put(checkpoint, &f, &mut writer)?;
    }
    writer.put("tokenizer.ggml.mask_token_id", Put::U32(mask))?;
    let header = plan.lay_out(writer)?;
    Ok(Laid { plan, header })
}

/// Target layers whose inputs are read: the checkpoint names the layers before, whose outputs these are.
fn taps(f: &Figures<'_>) -> Result<Vec<u32>, ConvertError> {
    let name = "target_layer_ids";
    let found = f.value.get(name);
    let list = found.and_then(Value::as_array).filter(|list| !list.is_empty() && list.len() <= 64);
    let list = list.ok_or_else(|| f.fault(name, "a list of layers", found))?;
    list.iter()
        .map(|layer| {
            let layer = layer.as_u64().filter(|layer| *layer < 1 << 16);
            layer.map(|layer| layer as u32 + 1).ok_or_else(|| f.fault(name, "numbers of layers", found))
        })
        .collect()
}

fn refuse_strangers(checkpoint: &Checkpoint, layers: usize) -> Result<(), ConvertError> {
    let known = |name: &str| match name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
        Some((layer, rest)) => {
            let inside = layer.parse::<usize>().is_ok_and(|layer| layer < layers);
            let parts = ["self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm."];
            inside && parts.iter().any(|part| rest.starts_with(part))
        }
        None => {
            name.starts_with("encoder.fc.")
                || ["encoder.output_norm_enc.weight", "norm.weight"].contains(&name)
        }
    };
    match checkpoint.names().filter(|name| !known(name)).min().and_then(|name| checkpoint.get(name)) {
        Some(entry) => {
            let expected = "only tensors of a DFlash draft (a DFlash2 draft is something else)";
            Err(wrong(format!("tensor {}", entry.name), expected, entry.describe()))
        }
        None => Ok(()),
    }
}
