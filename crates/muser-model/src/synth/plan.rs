//! Which tensors and keys a synthetic file has.

use std::path::PathBuf;

use muser_gguf::{GgmlType, GgufHeader, GgufWriter, Value};

use super::fill::Fill;
use crate::{ARCHITECTURE, DflashConfig, Geometry, ModelError, VisionConfig};

/// Factor that the released model's `attn_q_norm` vectors carry.
const Q_NORM: f32 = 3.87;

/// What to make.
#[derive(Clone, Debug)]
pub struct SynthOptions {
    /// Shape of the model, unless `geometry` says otherwise.
    pub preset: Preset,
    /// Types of the matrices.
    pub mix: Mix,
    /// Another seed gives other weights.
    pub seed: u64,
    /// A tiktoken file (lines of base64 and rank) whose vocabulary is used; without it a small byte-level one is made.
    pub tokenizer_model: Option<PathBuf>,
    /// Shape in place of the preset's.
    pub geometry: Option<Geometry>,
    /// Types for tensors whose name contains the text, or begins with what follows `^`; the first that fits counts.
    pub overrides: Vec<(String, GgmlType)>,
    /// Write `sliding_window_pattern` as a period, which some files have in place of one bool for each layer.
    pub scalar_pattern: bool,
}

impl SynthOptions {
    /// A preset with a mix, seed 1.
    pub fn new(preset: Preset, mix: Mix) -> SynthOptions {
        SynthOptions {
            preset,
            mix,
            seed: 1,
            tokenizer_model: None,
            geometry: None,
            overrides: Vec::new(),
            scalar_pattern: false,
        }
    }
}

/// One tensor to be made.
pub(super) struct Planned {
    pub(super) name: String,
    pub(super) dims: Vec<u64>,
    pub(super) ty: GgmlType,
    pub(super) fill: Fill,
}

/// A named shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// 4 layers of 256 values: 4 million parameters, for tests.
    Tiny,
    /// 12 layers of 768 values: 0.1 billion parameters.
    B0_1,
    /// 16 layers of 2048 values: 1 billion parameters.
    B1,
    /// The released shape: 52 layers of 6656 values, 27.9 billion parameters.
    B30,
}

impl Preset {
    /// `tiny`, `0.1b`, `1b` or `30b`.
    pub fn from_name(name: &str) -> Option<Preset> {
        Some(match name {
            "tiny" => Preset::Tiny,
            "0.1b" => Preset::B0_1,
            "1b" => Preset::B1,
            "30b" => Preset::B30,
            _ => return None,
        })
    }

    /// All names, for help texts.
    pub const NAMES: [&'static str; 4] = ["tiny", "0.1b", "1b", "30b"];

    /// The shape.
    pub fn geometry(self) -> Geometry {
        let (layers, hidden, ffn, heads, head_dim, vocab, window) = match self {
            Preset::Tiny => (4, 256, 768, 4, 64, 512, 32),
            Preset::B0_1 => (12, 768, 2304, 8, 128, 8192, 2048),
            Preset::B1 => (16, 2048, 6144, 16, 128, 32768, 2048),
            Preset::B30 => return Geometry::released(),
        };
        Geometry {
            hidden,
            ffn,
            heads,
            head_dim,
            vocab,
            window,
            sliding: Geometry::period_of_four(layers),
            logit_scale: (hidden as f64 / 256.0).powf(-0.5) as f32,
            ..Geometry::released()
        }
    }

    /// A draft for a model of this shape that costs about the same share of it as the released draft of the released
    /// model: as many layers for its depth, features from the same places.
    pub fn draft(self) -> DflashConfig {
        let (g, released) = (self.geometry(), DflashConfig::released());
        if self == Preset::B30 {
            return released;
        }
        let all = Geometry::released().layers();
        let scaled = |layers: usize| ((layers * g.layers() + all / 2) / all).max(1);
        let mut target_layers: Vec<usize> =
            released.target_layers.iter().map(|layer| layer * g.layers() / all).collect();
        target_layers.dedup();
        DflashConfig {
            hidden: g.hidden,
            ffn: g.ffn,
            heads: g.heads,
            kv_heads: g.heads / (released.heads / released.kv_heads),
            head_dim: g.head_dim,
            window: g.window,
            sliding: vec![true; scaled(released.sliding.len())],
            target_layers,
            mask_token: g.vocab as u32 - 1,
            vocab: None,
            ..released
        }
    }
}

impl Preset {
    /// A projector for a model of this shape: the released one scaled down, its rows as wide as the model.
    pub fn projector(self) -> VisionConfig {
        let released = VisionConfig::released();
        let (layers, hidden, ffn, heads, image) = match self {
            Preset::Tiny => (4, 256, 768, 4, 224),
            Preset::B0_1 => (8, 512, 1536, 8, 448),
            Preset::B1 => (16, 768, 4608, 8, 896),
            Preset::B30 => return released,
        };
        VisionConfig { layers, hidden, ffn, heads, image, projection: self.geometry().hidden, ..released }
    }
}

/// Types of the matrices of a file. Vectors are always F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// One type for all.
    Uniform(GgmlType),
    /// The base type, and Q6_K for `output`.
    Small(GgmlType),
    /// The base type, Q6_K for `output` and for `attn_v` and `ffn_down` of half of the layers. The released shape with
    /// base Q4_K has Q5_K for `output`, as the official file.
    Medium(GgmlType),
}

impl Mix {
    /// `q4_k_s`, `q4_k_m`, `q5_k_s`, `q5_k_m`, `nvfp4_s`, or the name of any type that muser decodes.
    pub fn from_name(name: &str) -> Option<Mix> {
        let name = name.to_lowercase();
        if let Some(base) = name.strip_suffix("_s").and_then(k_type) {
            return Some(Mix::Small(base));
        }
        if name == "nvfp4_s" {
            return Some(Mix::Small(GgmlType::NVFP4));
        }
        if let Some(base) = name.strip_suffix("_m").and_then(k_type) {
            return Some(Mix::Medium(base));
        }
        GgmlType::from_name(&name).filter(|ty| ty.is_decodable() && *ty != GgmlType::Q8_K).map(Mix::Uniform)
    }

    /// Name as people write it, lower case.
    pub fn name(self) -> String {
        match self {
            Mix::Uniform(ty) => ty.name().to_lowercase(),
            Mix::Small(ty) => format!("{}_s", ty.name().to_lowercase()),
            Mix::Medium(ty) => format!("{}_m", ty.name().to_lowercase()),
        }
    }

    /// The figure of `general.file_type`; 0 where there is none.
    pub(super) fn file_type(self) -> u32 {
        match self.name().as_str() {
            "f16" => 1,
            "q4_0" => 2,
            "q4_1" => 3,
            "q8_0" => 7,
            "q5_0" => 8,
            "q5_1" => 9,
            "q2_k" => 10,
            "q3_k" | "q3_k_s" => 11,
            "q3_k_m" => 12,
            "q4_k" | "q4_k_s" => 14,
            "q4_k_m" => 15,
            "q5_k" | "q5_k_s" => 16,
            "q5_k_m" => 17,
            "q6_k" => 18,
            "iq4_nl" => 25,
            "iq4_xs" => 30,
            "bf16" => 32,
            "mxfp4" => 38,
            "nvfp4" | "nvfp4_s" => 39,
            _ => 0,
        }
    }
}

fn k_type(name: &str) -> Option<GgmlType> {
    GgmlType::from_name(name).filter(|ty| {
        matches!(ty, GgmlType::Q2_K | GgmlType::Q3_K | GgmlType::Q4_K | GgmlType::Q5_K | GgmlType::Q6_K)
    })
}

/// The header of a file whose metadata is written, and its tensors.
pub(super) fn with_tensors(
    mut writer: GgufWriter,
    tensors: Vec<Planned>,
) -> Result<(GgufHeader, Vec<Planned>), ModelError> {
    for tensor in &tensors {
        writer.tensor(&tensor.name, &tensor.dims, tensor.ty)?;
    }
    Ok((writer.finish(), tensors))
}

pub(super) fn geometry(options: &SynthOptions) -> Geometry {
    options.geometry.clone().unwrap_or_else(|| options.preset.geometry())
}

pub(super) fn metadata(
    writer: &mut GgufWriter,
    geometry: &Geometry,
    options: &SynthOptions,
) -> Result<(), ModelError> {
    let g = geometry;
    let key = |name: &str| format!("{ARCHITECTURE}.{name}");
    let name = format!("synthetic muse-glimmer {} seed {}", options.mix.name(), options.seed);
    writer.put("general.architecture", Value::String(ARCHITECTURE))?;
    writer.put("general.type", Value::String("model"))?;
    writer.put("general.name", Value::String(&name))?;
    writer.put("general.file_type", Value::U32(options.mix.file_type()))?;
    writer.put("general.quantization_version", Value::U32(2))?;
    for (name, value) in [
        ("block_count", g.layers()),
        ("context_length", g.context),
        ("embedding_length", g.hidden),
        ("feed_forward_length", g.ffn),
        ("attention.head_count", g.heads),
        ("attention.head_count_kv", g.kv_heads),
        ("attention.key_length", g.head_dim),
        ("attention.value_length", g.head_dim),
        ("attention.sliding_window", g.window),
        ("vocab_size", g.vocab),
    ] {
        let value =
            u32::try_from(value).map_err(|_| ModelError::Synth(format!("{name} of {value} is too large")))?;
        writer.put(&key(name), Value::U32(value))?;
    }
    writer.put(&key("attention.layer_norm_rms_epsilon"), Value::F32(g.rms_eps))?;
    writer.put(&key("rope.freq_base"), Value::F32(g.rope_theta))?;
    writer.put(&key("logit_scale"), Value::F32(g.logit_scale))?;
    if let Some(cap) = g.softcap {
        writer.put(&key("final_logit_softcapping"), Value::F32(cap))?;
    }
    let pattern = key("attention.sliding_window_pattern");
    if options.scalar_pattern {
        if !g.layers().is_multiple_of(4) || g.sliding != Geometry::period_of_four(g.layers()) {
            return Err(ModelError::Synth(
                "the scalar form of the window pattern needs whole periods of four layers".to_owned(),
            ));
        }
        writer.put(&pattern, Value::U32(4))?;
    } else {
        writer.put_bools(&pattern, g.sliding.iter().copied())?;
    }
    Ok(())
}

pub(super) fn tensors(geometry: &Geometry, options: &SynthOptions) -> Vec<Planned> {
    let g = geometry;
    let mut plan = Plan { geometry, options, tensors: Vec::new() };
    let unit = |inputs: usize| (inputs as f64).powf(-0.5);
    plan.matrix("token_embd", None, g.hidden, g.vocab, 0.02);
    plan.norm("output_norm".to_owned(), g.hidden);
    // Logits with a spread of about 3 before the cap.
    plan.matrix("output", None, g.hidden, g.vocab, 3.0 / f64::from(g.logit_scale) * unit(g.hidden));
    for layer in 0..g.layers() {
        let at = Some(layer);
        let name = |part: &str| format!("blk.{layer}.{part}");
        plan.norm(name("attn_norm"), g.hidden);
        plan.matrix("attn_q", at, g.hidden, g.q_width(), unit(g.hidden));
        plan.matrix("attn_k", at, g.hidden, g.kv_width(), unit(g.hidden));
        plan.matrix("attn_v", at, g.hidden, g.kv_width(), unit(g.hidden));
        plan.matrix("attn_gate", at, g.hidden, g.q_width(), unit(g.hidden));
        plan.vector(name("attn_q_norm"), g.head_dim, Fill::Constant(Q_NORM));
        plan.vector(name("attn_k_norm"), g.head_dim, Fill::Constant(1.0));
        plan.matrix("attn_output", at, g.q_width(), g.hidden, unit(g.q_width()));
        plan.norm(name("post_attention_norm"), g.hidden);
        plan.norm(name("ffn_norm"), g.hidden);
        plan.matrix("ffn_gate", at, g.hidden, g.ffn, unit(g.hidden));
        plan.matrix("ffn_up", at, g.hidden, g.ffn, unit(g.hidden));
        plan.matrix("ffn_down", at, g.ffn, g.hidden, unit(g.ffn));
        plan.norm(name("post_ffw_norm"), g.hidden);
    }
    plan.tensors
}

struct Plan<'a> {
    geometry: &'a Geometry,
    options: &'a SynthOptions,
    tensors: Vec<Planned>,
}

impl Plan<'_> {
    fn matrix(&mut self, part: &str, layer: Option<usize>, cols: usize, rows: usize, sigma: f64) {
        let stem = layer.map_or_else(|| part.to_owned(), |layer| format!("blk.{layer}.{part}"));
        let name = format!("{stem}.weight");
        let ty = self.pick_type(&name, part, layer);
        // The scales of NVFP4 blocks reach too few small numbers; real files carry a factor beside the matrix.
        let factor = (ty == GgmlType::NVFP4).then_some(sigma / Fill::NVFP4_SIGMA);
        let sigma = if factor.is_some() { Fill::NVFP4_SIGMA } else { sigma };
        let fill = Fill::Random { mean: 0.0, sigma };
        self.tensors.push(Planned { name, dims: vec![cols as u64, rows as u64], ty, fill });
        if let Some(factor) = factor {
            self.vector_named(format!("{stem}.scale"), 1, Fill::Constant(factor as f32));
        }
    }

    fn norm(&mut self, stem: String, len: usize) {
        self.vector(stem, len, Fill::Random { mean: 1.0, sigma: 0.1 });
    }

    fn vector(&mut self, stem: String, len: usize, fill: Fill) {
        self.vector_named(stem + ".weight", len, fill);
    }

    fn vector_named(&mut self, name: String, len: usize, fill: Fill) {
        self.tensors.push(Planned { name, dims: vec![len as u64], ty: GgmlType::F32, fill });
    }

    fn pick_type(&self, name: &str, part: &str, layer: Option<usize>) -> GgmlType {
        for (pattern, ty) in &self.options.overrides {
            let fits = match pattern.strip_prefix('^') {
                Some(prefix) => name.starts_with(prefix),
                None => name.contains(pattern.as_str()),
            };
            if fits {
                return *ty;
            }
        }
        let base = match self.options.mix {
            Mix::Uniform(ty) => return ty,
            Mix::Small(ty) | Mix::Medium(ty) => ty,
        };
        let medium = matches!(self.options.mix, Mix::Medium(_));
        if part == "output" {
            let official = medium && base == GgmlType::Q4_K && *self.geometry == Geometry::released();
            return if official { GgmlType::Q5_K } else { GgmlType::Q6_K };
        }
        let more_bits = layer.is_some_and(|layer| more_bits(layer, self.geometry.layers()));
        if medium && more_bits && matches!(part, "attn_v" | "ffn_down") { GgmlType::Q6_K } else { base }
    }
}

/// The usual rule of mixed K-quants: the first and last eighth of the layers, and every third between.
fn more_bits(layer: usize, layers: usize) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}
