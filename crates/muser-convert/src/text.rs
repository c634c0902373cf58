//! The text model: names, row orders, norms and keys as in the released files.

use muser_gguf::{GgufWriter, Value as Put};
use muser_model::ARCHITECTURE;
use serde_json::Value;

use crate::ConvertError;
use crate::checkpoint::Checkpoint;
use crate::error::wrong;
use crate::figures::Figures;
use crate::plan::{Order, Plan};
use crate::scheme::Scheme;
use crate::source::Source;
use crate::tokenizer::Tokenizer;
use crate::{Choices, Laid};

/// Where a decoder may begin: beside a tower, alone, and in older exports.
const PREFIXES: [&str; 3] = ["model.language_model.", "model.", "language_model.model."];
/// Norms whose stored weight lacks the 1 that it is applied with.
const CENTRED: [(&str, &str); 4] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

struct Config {
    layers: usize,
    context: usize,
    hidden: usize,
    ffn: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    window: usize,
    sliding: Vec<bool>,
    rope_theta: f64,
    rms_eps: f64,
    qk_scale: f64,
    logit_scale: f64,
    softcap: f64,
}

impl Config {
    fn read(figures: &Figures<'_>) -> Result<Config, ConvertError> {
        let f = figures;
        f.only("tie_word_embeddings", &Value::Bool(false))?;
        f.only("attention_bias", &Value::Bool(false))?;
        f.only("hidden_activation", &Value::from("silu"))?;
        // There is no key for it: loaders know it.
        f.only("post_norm_eps", &Value::from(1e-8))?;
        let layers = f.size("num_hidden_layers")?;
        let config = Config {
            layers,
            context: f.size("max_position_embeddings")?,
            hidden: f.size("hidden_size")?,
            ffn: f.size("intermediate_size")?,
            heads: f.size("num_attention_heads")?,
            kv_heads: f.size("num_key_value_heads")?,
            head_dim: f.size("head_dim")?,
            vocab: f.size("vocab_size")?,
            window: f.size("sliding_window")?,
            sliding: f.sliding(layers)?,
            rope_theta: f.rope_theta()?,
            rms_eps: f.number("rms_norm_eps", Some(1e-5))?,
            qk_scale: f.number("qk_scale_factor", Some(3.87))?,
            logit_scale: f.number("output_multiplier", Some(0.196_116_135_138_184_04))?,
            softcap: f.number("final_logit_softcapping", Some(20.0))?,
        };
        config.check_rotation(figures)?;
        Ok(config)
    }

    /// Layers with a window rotate, others do not: there is no key for anything else.
    fn check_rotation(&self, figures: &Figures<'_>) -> Result<(), ConvertError> {
        let name = "layer_rope_theta";
        let Some(found) = figures.value.get(name).filter(|value| !value.is_null()) else { return Ok(()) };
        let expected: Vec<f64> =
            self.sliding.iter().map(|sliding| if *sliding { self.rope_theta } else { 0.0 }).collect();
        let list: Vec<f64> = found.as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
        if list == expected {
            return Ok(());
        }
        let expected = format!("{} for layers with a window and 0 for the others", self.rope_theta);
        Err(figures.fault(name, &expected, Some(found)))
    }
}

/// Plans a text model.
pub(crate) fn lay_out(
    checkpoint: &Checkpoint,
    scheme: &Scheme,
    choices: &Choices,
    name: &str,
) -> Result<Laid, ConvertError> {
    let root = &checkpoint.config;
    let model_type = root.get("model_type").and_then(Value::as_str).unwrap_or("none");
    if !matches!(model_type, "muse_glimmer" | "muse_glimmer_text") {
        return Err(wrong("config.json: model_type", "muse_glimmer", model_type));
    }
    let (value, place) = match root.get("text_config") {
        Some(text) => (text, "config.json: text_config"),
        None => (root, "config.json"),
    };
    let figures = Figures { value, place };
    let c = Config::read(&figures)?;
    let prefix = PREFIXES
        .into_iter()
        .find(|prefix| checkpoint.names().any(|name| name.starts_with(&format!("{prefix}embed_tokens."))))
        .ok_or_else(|| wrong("the checkpoint", "tensors of model.language_model.embed_tokens", "none"))?;
    let mut plan = Plan::new(choices.types);
    tensors(checkpoint, scheme, &c, prefix, &mut plan)?;
    let head = if checkpoint.names().any(|name| name.starts_with("lm_head.")) {
        "lm_head"
    } else {
        "language_model.lm_head"
    };
    let rest = Source::of(checkpoint, scheme, head, c.vocab, c.hidden)?;
    plan.rest_matrix("output", rest)?;
    refuse_strangers(checkpoint, &[prefix, "lm_head.", "language_model.lm_head."], prefix, c.layers)?;

    let mut writer = GgufWriter::new();
    keys(&mut writer, &c, &plan, name)?;
    let tokenizer = Tokenizer::of(checkpoint, c.vocab)?;
    let tokenizer = tokenizer
        .ok_or_else(|| wrong(checkpoint.folder.display().to_string(), "a tokenizer.json", "no such file"))?;
    tokenizer.put(checkpoint, &figures, &mut writer)?;
    let header = plan.lay_out(writer)?;
    Ok(Laid { plan, header })
}

fn tensors(
    checkpoint: &Checkpoint,
    scheme: &Scheme,
    c: &Config,
    prefix: &str,
    plan: &mut Plan,
) -> Result<(), ConvertError> {
    let table = Source::of(checkpoint, scheme, &format!("{prefix}embed_tokens"), c.vocab, c.hidden)?;
    plan.rest_matrix("token_embd", table)?;
    let norm = vector(checkpoint, &format!("{prefix}norm.weight"), c.hidden)?;
    plan.values("output_norm.weight".to_owned(), vec![c.hidden as u64], norm);
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let pairs = Order::Pairs { head: c.head_dim };
    if !c.head_dim.is_multiple_of(2) {
        return Err(wrong("config.json: head_dim", "an even number", c.head_dim.to_string()));
    }
    for layer in 0..c.layers {
        let module = |part: &str| format!("{prefix}layers.{layer}.{part}");
        let stem = |part: &str| format!("blk.{layer}.{part}");
        for (theirs, ours) in CENTRED {
            let mut norm = vector(checkpoint, &module(&format!("{theirs}.weight")), c.hidden)?;
            norm.iter_mut().for_each(|weight| *weight += 1.0);
            plan.values(format!("{}.weight", stem(ours)), vec![c.hidden as u64], norm);
        }
        for (ours, value) in [("attn_q_norm", c.qk_scale as f32), ("attn_k_norm", 1.0)] {
            plan.values(format!("{}.weight", stem(ours)), vec![c.head_dim as u64], vec![value; c.head_dim]);
        }
        for (theirs, ours, rows, cols, order) in [
            ("self_attn.q_proj", "attn_q", q, c.hidden, pairs),
            ("self_attn.k_proj", "attn_k", kv, c.hidden, pairs),
            ("self_attn.v_proj", "attn_v", kv, c.hidden, Order::AsTheyAre),
            ("self_attn.gate_proj", "attn_gate", q, c.hidden, Order::AsTheyAre),
            ("self_attn.o_proj", "attn_output", c.hidden, q, Order::AsTheyAre),
            ("mlp.gate_proj", "ffn_gate", c.ffn, c.hidden, Order::AsTheyAre),
            ("mlp.up_proj", "ffn_up", c.ffn, c.hidden, Order::AsTheyAre),
            ("mlp.down_proj", "ffn_down", c.hidden, c.ffn, Order::AsTheyAre),
        ] {
            let source = Source::of(checkpoint, scheme, &module(theirs), rows, cols)?;
            plan.layer_matrix(&stem(ours), source, order)?;
        }
    }
    Ok(())
}

/// A vector of floats.
pub(crate) fn vector(checkpoint: &Checkpoint, name: &str, len: usize) -> Result<Vec<f32>, ConvertError> {
    let entry = checkpoint.entry(name)?;
    if entry.shape != [len as u64] || !entry.dtype.is_float() {
        return Err(wrong(format!("tensor {name}"), format!("{len} floats"), entry.describe()));
    }
    checkpoint.floats(entry)
}

/// What nobody has read of the decoder is something that would be left out of the formula.
fn refuse_strangers(
    checkpoint: &Checkpoint,
    ours: &[&str],
    prefix: &str,
    layers: usize,
) -> Result<(), ConvertError> {
    const MODULES: [&str; 12] = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.gate_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ];
    let known = |name: &str| {
        if !ours.iter().any(|ours| name.starts_with(ours)) {
            // The tower goes into a file of its own.
            return ["model.vision_", "vision_", "model.visual."]
                .iter()
                .any(|vision| name.starts_with(vision));
        }
        let Some(rest) = name.strip_prefix(prefix) else { return true };
        if rest.starts_with("vision_") || rest.starts_with("visual.") {
            return true;
        }
        let Some((layer, rest)) = rest.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else {
            return rest.starts_with("embed_tokens.") || rest == "norm.weight";
        };
        // Scales of a KV cache of eight bits, which is not how muser keeps it.
        let of_cache = ["self_attn.k_scale", "self_attn.v_scale"].contains(&rest);
        let of_module = |module: &&str| rest.strip_prefix(*module).is_some_and(|leaf| leaf.starts_with('.'));
        layer.parse::<usize>().is_ok_and(|layer| layer < layers)
            && (of_cache || MODULES.iter().any(of_module))
    };
    let stranger = checkpoint.names().filter(|name| !known(name)).min();
    match stranger.and_then(|name| checkpoint.get(name)) {
        Some(entry) => {
            Err(wrong(format!("tensor {}", entry.name), "only tensors of this model", entry.describe()))
        }
        None => Ok(()),
    }
}

fn keys(writer: &mut GgufWriter, c: &Config, plan: &Plan, name: &str) -> Result<(), ConvertError> {
    let key = |name: &str| format!("{ARCHITECTURE}.{name}");
    writer.put("general.architecture", Put::String(ARCHITECTURE))?;
    writer.put("general.type", Put::String("model"))?;
    writer.put("general.name", Put::String(name))?;
    writer.put("general.size_label", Put::String(&plan.size_label()))?;
    writer.put("general.file_type", Put::U32(plan.file_type()))?;
    writer.put("general.quantization_version", Put::U32(2))?;
    for (name, value) in [
        ("block_count", c.layers),
        ("context_length", c.context),
        ("embedding_length", c.hidden),
        ("feed_forward_length", c.ffn),
        ("attention.head_count", c.heads),
        ("attention.head_count_kv", c.kv_heads),
        ("attention.key_length", c.head_dim),
        ("attention.value_length", c.head_dim),
    ] {
        writer.put(&key(name), Put::U32(value as u32))?;
    }
    writer.put(&key("attention.layer_norm_rms_epsilon"), Put::F32(c.rms_eps as f32))?;
    writer.put(&key("attention.sliding_window"), Put::U32(c.window as u32))?;
    writer.put_bools(&key("attention.sliding_window_pattern"), c.sliding.iter().copied())?;
    writer.put(&key("rope.freq_base"), Put::F32(c.rope_theta as f32))?;
    writer.put(&key("final_logit_softcapping"), Put::F32(c.softcap as f32))?;
    writer.put(&key("logit_scale"), Put::F32(c.logit_scale as f32))?;
    Ok(())
}
