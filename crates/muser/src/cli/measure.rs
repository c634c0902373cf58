//! Arguments of the commands that measure and reckon: `bench` and `cost`.

use clap::Args;

use super::ModelArgs;

/// Arguments of `muser bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
}

/// Arguments of `muser cost`.
#[derive(Debug, Args)]
pub struct CostArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
}
