//! Arguments about draft models, shared by the commands that write text.

use clap::{Args, ValueEnum};
use muser_engine::{DraftLength, DraftSampling};

use super::CompanionChoice;

/// Which draft model, and how much it proposes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Draft options")]
pub struct DraftArgs {
    /// Draft model (DFlash, GGUF) that proposes tokens: auto takes one that lies beside the model and fits it, off none
    #[arg(long, value_name = "auto|off|PATH", default_value = "auto")]
    pub draft: CompanionChoice,
    /// Proposals in a round; auto: as many as pay by what is measured, none where none do
    #[arg(long, value_name = "auto|N", default_value = "auto", value_parser = length)]
    pub draft_len: DraftLength,
    /// How proposals for sampled text are verified
    #[arg(long, value_name = "HOW", default_value = "exact")]
    pub draft_sampling: SamplingChoice,
}

/// How proposals for sampled text are verified. Greedy text is the same with both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SamplingChoice {
    /// The text is that of sampling without a draft, token for token
    Exact,
    /// The distribution is that of sampling without a draft; a seed repeats its text only with a fixed --draft-len
    Rejection,
}

impl From<SamplingChoice> for DraftSampling {
    fn from(choice: SamplingChoice) -> Self {
        match choice {
            SamplingChoice::Exact => Self::Exact,
            SamplingChoice::Rejection => Self::Rejection,
        }
    }
}

/// Reads `auto` or a number of proposals.
pub(super) fn length(text: &str) -> Result<DraftLength, String> {
    if text == "auto" {
        return Ok(DraftLength::Auto);
    }
    let most = muser_engine::MOST_PROPOSALS;
    match text.parse() {
        Ok(n) if n <= most => Ok(DraftLength::Fixed(n)),
        _ => Err(format!("expected auto or a number from 0 to {most}")),
    }
}
