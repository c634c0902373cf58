//! Arguments of the commands around the local model store: `pull` and `models`.

use clap::Args;

/// Arguments of `muser pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// Short name of an official file, `owner/repo/file`, or a URL
    #[arg(value_name = "NAME|URL")]
    pub source: Option<String>,
}

/// Arguments of `muser models`.
#[derive(Debug, Args)]
pub struct ModelsArgs {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}
