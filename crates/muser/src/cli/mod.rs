//! The command line as data: every command, flag and help text. Help, usage errors and `docs/cli.md` are generated from
//! these definitions; `src/commands` never reads an argument that is not declared here.

mod companion;
mod config;
mod convert;
mod draft;
mod fit;
mod generation;
mod measure;
mod node;
mod node_serve;
mod node_use;
mod pack;
mod pack_store;
mod parallel;
mod projector;
#[cfg(test)]
mod reference;
mod serve;
mod shell;
mod store;
mod tools;
mod top;

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

pub use companion::CompanionChoice;
pub use config::{ConfigArgs, ConfigCommand, ConfigShowArgs};
pub use convert::ConvertArgs;
pub use draft::DraftArgs;
pub use fit::{FitArgs, Memory};
pub use generation::{
    BackendChoice, ChatArgs, DEFAULT_CONTEXT, KvChoice, ModelArgs, PrefillChoice, ReasoningChoice, RunArgs,
    SamplingArgs,
};
pub use measure::{BenchArgs, CostArgs, RepackChoice};
pub use node::{NodeAddArgs, NodeArgs, NodeCommand, NodeListArgs, NodeRotateArgs};
pub use node_serve::{NodeServeArgs, NodeTestArgs};
pub use node_use::NodeUseArgs;
pub use pack::{
    PackArgs, PackCommand, PackExportArgs, PackGcArgs, PackImportArgs, PackKeyCommand, PackRmArgs,
    PackShowArgs, PackVerifyArgs,
};
pub use pack_store::PackStoreArgs;
pub use parallel::Parallel;
pub use projector::{PositionChoice, ProjectorArgs};
pub use serve::ServeArgs;
pub use shell::{CompletionsArgs, ManArgs};
pub use store::{ModelsArgs, PullArgs};
pub use tools::{DetokenizeArgs, DoctorArgs, InspectArgs, LogitsArgs, SynthArgs, TokenizeArgs};
pub use top::TopArgs;

use crate::env_vars;

/// Exit codes, shown below the help of every command and in the reference.
pub const EXIT_CODES: &str = "\
Exit codes:
  0    success; also when the reader of a pipe went away
  1    failure while running: a file, the model, the device, the network
  2    wrong usage
  130  interrupted by Ctrl-C";

/// Run Muse Glimmer models on your own machine: from a GGUF file to text
#[derive(Debug, Parser)]
#[command(name = "muser", version, after_help = EXIT_CODES, max_term_width = 110, arg_required_else_help = true)]
pub struct Cli {
    /// Flags of every command.
    #[command(flatten)]
    pub global: GlobalArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Global options")]
pub struct GlobalArgs {
    /// Only results, warnings and errors; no notes, no progress
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// More logs on standard error (-v info, -vv debug)
    #[arg(long, short, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// Colour on standard error
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: ColorChoice,
    /// File of values for flags that are not given, or `off`; default: `muser.toml` in `MUSER_HOME`, if it is there
    #[arg(long, global = true, value_name = "FILE|off", env = env_vars::MUSER_CONFIG)]
    pub config: Option<PathBuf>,
}

/// When to use colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ColorChoice {
    /// On a terminal, unless `NO_COLOR` is set
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// The commands, in the order of the help page.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer one prompt
    Run(RunArgs),
    /// Talk to a model, turn by turn
    Chat(ChatArgs),
    /// Serve a model over HTTP, in the shapes of OpenAI, Anthropic, Ollama and llama-server
    Serve(ServeArgs),
    /// Watch a server: throughput, latency, queue, memory, what caches saved
    Top(TopArgs),
    /// Bring a model file to this machine
    Pull(PullArgs),
    /// List the model files on this machine
    Models(ModelsArgs),
    /// Look after the packs: prompts that were computed once and kept
    Pack(PackArgs),
    /// Look after the nodes: machines that may read prompts for each other
    Node(NodeArgs),
    /// Say what is in a model file and what is odd about it
    Inspect(InspectArgs),
    /// Text to token ids
    Tokenize(TokenizeArgs),
    /// Token ids to text
    Detokenize(DetokenizeArgs),
    /// Write the logits of every position to a .npy file
    Logits(LogitsArgs),
    /// Measure speed on this machine
    Bench(BenchArgs),
    /// Work out what a token costs
    Cost(CostArgs),
    /// Work out which layers fit on which device, and how fast that is, on this machine or another
    Fit(FitArgs),
    /// Make a model file of a Hugging Face checkpoint, NVFP4 and FP8 ones too
    Convert(ConvertArgs),
    /// Write a synthetic model file of any size
    Synth(SynthArgs),
    /// Say what this machine offers, what muser uses of it and whether it computes right
    Doctor(DoctorArgs),
    /// Say which values hold for the flags that are not given, and where they come from
    Config(ConfigArgs),
    /// Write what a shell needs to complete commands and flags
    Completions(CompletionsArgs),
    /// Write the manual pages into a folder
    Man(ManArgs),
}
