//! Arguments about pictures, shared by the commands that write text.

use clap::{Args, ValueEnum};
use muser_backend::arith::vision::PositionRule;

use super::CompanionChoice;

/// What the model sees with.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Image options")]
pub struct ProjectorArgs {
    /// Vision projector (mmproj, GGUF): auto takes one that lies beside the model and fits it, off none
    #[arg(long, value_name = "auto|off|PATH", default_value = "auto")]
    pub mmproj: CompanionChoice,
    /// Most tokens that one image becomes: fewer are faster and show less
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub image_max_tokens: u32,
    /// How the position table is read for images that are not square
    #[arg(long, value_name = "RULE", default_value = "raster", hide_short_help = true)]
    pub image_positions: PositionChoice,
}

/// How the position table is read for images that are not square.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PositionChoice {
    /// Each patch at its own row and column, as vLLM and llama.cpp do
    Raster,
    /// With rows and columns swapped, as transformers 5.24 does
    Reference,
}

impl From<PositionChoice> for PositionRule {
    fn from(choice: PositionChoice) -> Self {
        match choice {
            PositionChoice::Raster => Self::Raster,
            PositionChoice::Reference => Self::Reference,
        }
    }
}
