//! Arguments of the commands that write text: `run` and `chat`, and the model options that others share.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use muser_fit::DeviceList;

use super::{DraftArgs, NodeUseArgs, PackStoreArgs, ProjectorArgs};
use crate::env_vars;

/// Positions that prompt and answer may have together unless `--ctx` says otherwise: keys and values of the released model
/// then take half a gigabyte.
pub const DEFAULT_CONTEXT: usize = 32_768;

/// Which model, and on what.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Model options")]
pub struct ModelArgs {
    /// Model file (GGUF), or the name of a pulled one; default: the newest pulled model, else the bundled Muse Tiny
    #[arg(long, short, value_name = "PATH|NAME", env = env_vars::MUSER_MODEL, hide_env_values = true)]
    pub model: Option<String>,
    /// What computes
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    pub backend: BackendChoice,
    /// Devices that share the model's layers, in this order: cpu, cuda:N, wgpu:N, each with =LAYERS where their number matters and
    /// @SIZE where not all of its memory is to be used; or auto, for what is best here. The text is the same
    #[arg(long, value_name = "LIST", conflicts_with_all = ["backend", "adapter"])]
    pub devices: Option<DeviceList>,
    /// GPU of the wgpu backend: its number, or a part of its name; default: the fastest kind that there is, never software
    #[arg(long, value_name = "NAME|N")]
    pub adapter: Option<String>,
    /// Most threads of the CPU backend, which takes fewer while other programs make that faster; default: what the machine and its limits allow
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Most tokens that prompt and answer may have together; default: as many as the model allows, up to 32768
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx: Option<u32>,
    /// How the CUDA backend computes prompts
    #[arg(long, value_name = "KIND", default_value = "exact")]
    pub prefill: PrefillChoice,
    /// How keys and values are stored; default: 16, with the scalar backend f32
    #[arg(long, value_name = "TYPE")]
    pub kv: Option<KvChoice>,
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvChoice {
    /// 16 bits a value, in integers
    #[value(name = "16")]
    Int16,
    /// 8 bits a value, in integers: half the memory, a little less exact
    #[value(name = "8")]
    Int8,
    /// 16 bits a value in floats (scalar backend)
    F16,
    /// 32 bits a value in floats (scalar backend)
    F32,
}

/// How the CUDA backend computes prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum PrefillChoice {
    /// With the bits of decoding: results do not depend on how a prompt is cut into steps
    #[default]
    Exact,
    /// With weights rounded to 8 bits (Hopper cards; elsewhere as exact): faster, other bits
    Fast,
}

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// A card that holds the model and passes its self-test (with CUDA, else with Vulkan or Metal), else a card and the CPU together, else
    /// the CPU; a note says which and why
    #[default]
    Auto,
    /// The fast CPU kernels
    Cpu,
    /// An NVIDIA card (Ampere or newer; needs its driver and the NVRTC library), with the bits of `cpu`
    // The old name, from when there was a faster `cuda` with other bits.
    #[value(alias = "cuda-exact")]
    Cuda,
    /// A GPU with Vulkan or Metal, with the bits of `cpu`
    #[value(aliases = ["vulkan", "metal"])]
    Wgpu,
    /// The scalar reference in f32: slow, for comparisons
    Scalar,
}

/// How the next token is chosen. Defaults are the model's published ones.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling options")]
pub struct SamplingArgs {
    /// Temperature; 0 always takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 1.0, value_parser = non_negative, allow_negative_numbers = true)]
    pub temp: f32,
    /// Keep the most likely tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = probability, allow_negative_numbers = true)]
    pub top_p: f32,
    /// Keep this many of the most likely tokens; 0 keeps all
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub top_k: u32,
    /// Drop tokens less likely than this share of the most likely one
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = probability, allow_negative_numbers = true)]
    pub min_p: f32,
    /// Divide the logits of tokens seen before (multiply when negative); 1 is off
    #[arg(long, value_name = "F", default_value_t = 1.0, value_parser = positive, allow_negative_numbers = true)]
    pub repeat_penalty: f32,
    /// Take this off the logits of tokens in the answer so far
    #[arg(long, value_name = "F", default_value_t = 0.0, value_parser = finite, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Take this off the logits for each time a token is in the answer so far
    #[arg(long, value_name = "F", default_value_t = 0.0, value_parser = finite, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Seed of the random choices; same seed, same answer; default: a new one, told with --json
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Stop after this many tokens, reasoning included; default: when the model ends or the context is full
    #[arg(long, short = 'n', value_name = "N")]
    pub max_tokens: Option<u32>,
    /// Stop before this text appears (may be given several times)
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
}

/// How long the model thinks before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReasoningChoice {
    /// Answer directly
    None,
    /// A few sentences of thought
    Low,
    /// In between
    Medium,
    /// As long as it takes
    High,
}

/// Arguments of `muser run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The prompt; read from standard input when absent or `-`
    #[arg(value_name = "PROMPT")]
    pub prompt: Option<String>,
    /// Instructions that come before the prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// How long the model thinks before it answers; default: what its chat template says
    #[arg(long, value_name = "STRENGTH")]
    pub reasoning: Option<ReasoningChoice>,
    /// Plain completion: no chat template, the prompt is simply continued
    #[arg(long, conflicts_with_all = ["system", "reasoning", "tools"])]
    pub raw: bool,
    /// Tools that the model may call: a JSON file with an array of function definitions
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
    /// An image to ask about: PNG, JPEG, WebP or GIF (may be given several times)
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    pub image: Vec<PathBuf>,
    /// Keep what is read and written in packs, and do not read again what is kept there (--pack=DIR, with the equals sign);
    /// default folder: `packs` in `MUSER_HOME`
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true, default_missing_value = "default")]
    pub pack: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
    /// Who reads prompts.
    #[command(flatten)]
    pub nodes: NodeUseArgs,
    /// How packs are kept.
    #[command(flatten)]
    pub packs: PackStoreArgs,
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Who proposes them.
    #[command(flatten)]
    pub draft: DraftArgs,
    /// What the model sees with.
    #[command(flatten)]
    pub projector: ProjectorArgs,
}

/// Arguments of `muser chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// Instructions that come before the first turn
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// How long the model thinks before it answers; default: what its chat template says
    #[arg(long, value_name = "STRENGTH")]
    pub reasoning: Option<ReasoningChoice>,
    /// Keep what is read and written in packs, and do not read again what is kept there (--pack=DIR, with the equals sign);
    /// default folder: `packs` in `MUSER_HOME`
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true, default_missing_value = "default")]
    pub pack: Option<PathBuf>,
    /// Who reads prompts.
    #[command(flatten)]
    pub nodes: NodeUseArgs,
    /// How packs are kept.
    #[command(flatten)]
    pub packs: PackStoreArgs,
    /// Do not read or write `chat_history` in `MUSER_HOME`, where lines that were entered are kept in plain for the arrow keys
    #[arg(long)]
    pub no_history: bool,
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Who proposes them.
    #[command(flatten)]
    pub draft: DraftArgs,
    /// What the model sees with.
    #[command(flatten)]
    pub projector: ProjectorArgs,
}

fn number(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value.is_finite() { Ok(value) } else { Err("must be finite".into()) }
}

fn finite(text: &str) -> Result<f32, String> {
    number(text)
}

fn non_negative(text: &str) -> Result<f32, String> {
    let value = number(text)?;
    if value >= 0.0 { Ok(value) } else { Err("must not be negative".into()) }
}

fn positive(text: &str) -> Result<f32, String> {
    let value = number(text)?;
    if value > 0.0 { Ok(value) } else { Err("must be above 0".into()) }
}

fn probability(text: &str) -> Result<f32, String> {
    let value = number(text)?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err("must be from 0 to 1".into()) }
}
