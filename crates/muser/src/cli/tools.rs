//! Arguments of the commands that look into models and machines.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use muser_convert::synth::SynthKind;
use muser_model::synth::{Mix, Preset};

use super::ModelArgs;

/// Arguments of `muser tokenize`.
#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// The text; read from standard input when absent
    #[arg(value_name = "TEXT")]
    pub text: Option<String>,
    /// Read names of special tokens, such as `<|eot|>`, as these tokens; otherwise they are plain text
    #[arg(long)]
    pub special: bool,
    /// Print a JSON array of ids instead of a table
    #[arg(long)]
    pub json: bool,
    /// Model file whose vocabulary is used, or the name of a pulled one
    #[arg(long, short, value_name = "PATH|NAME", env = crate::env_vars::MUSER_MODEL, hide_env_values = true)]
    pub model: Option<String>,
}

/// Arguments of `muser detokenize`.
#[derive(Debug, Args)]
pub struct DetokenizeArgs {
    /// Token ids, separated by spaces or commas or as a JSON array; read from standard input when absent
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    /// Print special tokens by name; otherwise they print nothing
    #[arg(long)]
    pub special: bool,
    /// Print a JSON object with the text
    #[arg(long)]
    pub json: bool,
    /// Model file whose vocabulary is used, or the name of a pulled one
    #[arg(long, short, value_name = "PATH|NAME", env = crate::env_vars::MUSER_MODEL, hide_env_values = true)]
    pub model: Option<String>,
}

/// Arguments of `muser logits`.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    /// File of token ids: a JSON array, or separated by spaces, commas or newlines (`-` is standard input)
    #[arg(long, value_name = "FILE")]
    pub ids: PathBuf,
    /// Where the logits go: NumPy format, f32, shape [positions, vocabulary]
    #[arg(long, value_name = "FILE.npy")]
    pub out: PathBuf,
    /// Positions per step; bounds the memory, never changes a bit of the result
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    pub chunk: u16,
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
}

/// Arguments of `muser inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Model file (GGUF), or the name of a pulled one
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Read the whole file and compare its SHA-256 with those of the official files
    #[arg(long)]
    pub verify: bool,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
}

/// Arguments of `muser synth`.
#[derive(Debug, Args)]
pub struct SynthArgs {
    /// The file to write
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Geometry
    #[arg(long, value_name = "SIZE")]
    pub preset: SynthPreset,
    /// Types of the matrices: a block type such as q8_0 for all of them, or a mix such as q4_k_s or nvfp4_s (Q6_K for the
    /// vocabulary matrix); q4_k_m at size 30b is the mix of the official 17 GB file
    #[arg(long, value_name = "MIX", default_value = "q4_k_m", value_parser = parse_mix)]
    pub mix: Mix,
    /// Seed of the weights; same seed, same bytes
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Take the vocabulary from this tiktoken rank file instead of a made-up one
    #[arg(long, value_name = "FILE")]
    pub tokenizer_model: Option<PathBuf>,
    /// Write a DFlash draft that fits a model of this size and costs the share of it that a real one would; what it
    /// proposes is noise
    #[arg(long, conflicts_with = "tokenizer_model")]
    pub draft: bool,
    /// Write a vision projector (mmproj) that fits a model of this size; what it sees is noise. At size 30b it has the
    /// official file's tensors
    #[arg(long, conflicts_with_all = ["tokenizer_model", "draft"])]
    pub projector: bool,
    /// Write a Hugging Face checkpoint into the folder OUT, to measure `muser convert` with
    #[arg(long, value_name = "KIND", conflicts_with_all = ["tokenizer_model", "draft", "projector", "mix"])]
    pub checkpoint: Option<CheckpointKind>,
    /// Replace the file if it is there
    #[arg(long)]
    pub force: bool,
}

/// How the layers of a synthetic checkpoint are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CheckpointKind {
    /// BF16
    Bf16,
    /// NVFP4 as compressed-tensors writes it; table and vocabulary matrix in BF16
    Nvfp4,
}

impl From<CheckpointKind> for SynthKind {
    fn from(kind: CheckpointKind) -> Self {
        match kind {
            CheckpointKind::Bf16 => Self::Bf16,
            CheckpointKind::Nvfp4 => Self::Nvfp4,
        }
    }
}

/// Geometry of a synthetic model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SynthPreset {
    /// 4 layers of 256, vocabulary 512: for tests
    Tiny,
    /// 12 layers of 768, vocabulary 8192
    #[value(name = "0.1b")]
    P01b,
    /// 16 layers of 2048, vocabulary 32768
    #[value(name = "1b")]
    P1b,
    /// The geometry of Muse Glimmer 30B: 16.8 GB with the official mix
    #[value(name = "30b")]
    P30b,
}

impl From<SynthPreset> for Preset {
    fn from(preset: SynthPreset) -> Self {
        match preset {
            SynthPreset::Tiny => Self::Tiny,
            SynthPreset::P01b => Self::B0_1,
            SynthPreset::P1b => Self::B1,
            SynthPreset::P30b => Self::B30,
        }
    }
}

fn parse_mix(name: &str) -> Result<Mix, String> {
    Mix::from_name(name)
        .ok_or_else(|| "expected a block type (q8_0, q6_k, f16, ...) or a mix (q4_k_m, q5_k_s, ...)".into())
}

/// Arguments of `muser doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Threads to plan for; default: what the machine and its limits allow
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Do not test the kernels
    #[arg(long)]
    pub no_self_test: bool,
}
