//! Synthetic draft models: the tensors and keys of a DFlash file with random weights.
//!
//! Such a draft proposes nothing useful, but it costs what a real one costs. It has no tokenizer of its own, so that it fits
//! any target of its width.

use muser_gguf::{GgmlType, GgufHeader, GgufWriter, Value};

use super::fill::Fill;
use super::plan::{Mix, Planned, with_tensors};
use crate::{DFLASH_ARCHITECTURE, DflashConfig, ModelError};

pub(super) fn lay_out(
    config: &DflashConfig,
    mix: Mix,
    seed: u64,
) -> Result<(GgufHeader, Vec<Planned>), ModelError> {
    let mut writer = GgufWriter::new();
    metadata(&mut writer, config, mix, seed)?;
    with_tensors(writer, tensors(config, mix))
}

fn metadata(writer: &mut GgufWriter, c: &DflashConfig, mix: Mix, seed: u64) -> Result<(), ModelError> {
    let key = |name: &str| format!("{DFLASH_ARCHITECTURE}.{name}");
    let figure = |what: &str, value: usize| {
        u32::try_from(value).map_err(|_| ModelError::Synth(format!("{what} of {value} is too large")))
    };
    writer.put("general.architecture", Value::String(DFLASH_ARCHITECTURE))?;
    writer.put("general.type", Value::String("model"))?;
    writer.put("general.name", Value::String(&format!("synthetic dflash {} seed {seed}", mix.name())))?;
    writer.put("general.file_type", Value::U32(mix.file_type()))?;
    writer.put("general.quantization_version", Value::U32(2))?;
    for (name, value) in [
        ("block_count", c.sliding.len()),
        ("context_length", c.context),
        ("embedding_length", c.hidden),
        ("feed_forward_length", c.ffn),
        ("attention.head_count", c.heads),
        ("attention.head_count_kv", c.kv_heads),
        ("attention.key_length", c.head_dim),
        ("attention.value_length", c.head_dim),
        ("attention.sliding_window", c.window),
        ("block_size", c.block_size),
    ] {
        writer.put(&key(name), Value::U32(figure(name, value)?))?;
    }
    writer.put(&key("attention.layer_norm_rms_epsilon"), Value::F32(c.rms_eps))?;
    writer.put_bools(&key("attention.sliding_window_pattern"), c.sliding.iter().copied())?;
    writer.put(&key("rope.freq_base"), Value::F32(c.rope_theta))?;
    let mut layers = Vec::new();
    for layer in &c.target_layers {
        layers.push(figure("target_layers", *layer)? as i32);
    }
    writer.put_i32s(&key("target_layers"), layers)?;
    writer.put("tokenizer.ggml.mask_token_id", Value::U32(c.mask_token))?;
    Ok(())
}

pub(super) fn tensors(c: &DflashConfig, mix: Mix) -> Vec<Planned> {
    let mut tensors = Vec::new();
    let matrix = |stem: &str, cols: usize, rows: usize| {
        let ty = pick_type(stem, mix);
        let sigma = (cols as f64).powf(-0.5);
        // As in text models, the blocks of NVFP4 need a factor beside the matrix.
        let factor = (ty == GgmlType::NVFP4).then_some(sigma / Fill::NVFP4_SIGMA);
        let fill = Fill::Random { mean: 0.0, sigma: factor.map_or(sigma, |_| Fill::NVFP4_SIGMA) };
        let mut made =
            vec![Planned { name: format!("{stem}.weight"), dims: vec![cols as u64, rows as u64], ty, fill }];
        if let Some(factor) = factor {
            let fill = Fill::Constant(factor as f32);
            made.push(Planned { name: format!("{stem}.scale"), dims: vec![1], ty: GgmlType::F32, fill });
        }
        made
    };
    let norm = |stem: &str, len: usize| Planned {
        name: format!("{stem}.weight"),
        dims: vec![len as u64],
        ty: GgmlType::F32,
        fill: Fill::Random { mean: 1.0, sigma: 0.1 },
    };
    tensors.extend(matrix("fc", c.target_layers.len() * c.hidden, c.hidden));
    tensors.push(norm("enc.output_norm", c.hidden));
    tensors.push(norm("output_norm", c.hidden));
    for layer in 0..c.sliding.len() {
        let name = |part: &str| format!("blk.{layer}.{part}");
        for (part, len) in [
            ("attn_norm", c.hidden),
            ("ffn_norm", c.hidden),
            ("attn_q_norm", c.head_dim),
            ("attn_k_norm", c.head_dim),
        ] {
            tensors.push(norm(&name(part), len));
        }
        for (part, cols, rows) in [
            ("attn_q", c.hidden, c.q_width()),
            ("attn_k", c.hidden, c.kv_width()),
            ("attn_v", c.hidden, c.kv_width()),
            ("attn_output", c.q_width(), c.hidden),
            ("ffn_gate", c.hidden, c.ffn),
            ("ffn_up", c.hidden, c.ffn),
            ("ffn_down", c.ffn, c.hidden),
        ] {
            tensors.extend(matrix(&name(part), cols, rows));
        }
    }
    tensors
}

/// Drafts have few layers: mixes with more bits have them for `attn_v` and `ffn_down` of every layer.
fn pick_type(stem: &str, mix: Mix) -> GgmlType {
    let more_bits = stem.ends_with("attn_v") || stem.ends_with("ffn_down");
    match mix {
        Mix::Medium(_) if more_bits => GgmlType::Q6_K,
        Mix::Uniform(ty) | Mix::Small(ty) | Mix::Medium(ty) => ty,
    }
}
