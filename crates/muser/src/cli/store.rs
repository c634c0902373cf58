//! Arguments of the commands around the local model store: `pull` and `models`.

use clap::Args;

use crate::env_vars;

/// Arguments of `muser pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// Short names of official files (muse-glimmer-30b, dflash, mmproj, ...), `owner/repo[@revision]/file`, or URLs;
    /// default: the official K-quant file
    #[arg(value_name = "NAME|URL")]
    pub sources: Vec<String>,
    /// The hub that names and `owner/repo/file` refer to
    #[arg(long, value_name = "URL", env = env_vars::MUSER_HUB_URL)]
    pub hub: Option<String>,
    /// SHA-256 that the file must have (with one source)
    #[arg(long, value_name = "HEX")]
    pub sha256: Option<String>,
    /// Fetch nothing: succeed only with what is there
    #[arg(long)]
    pub offline: bool,
    /// Replace a different file of the same name
    #[arg(long)]
    pub force: bool,
    /// Give up on a connection that brings nothing for so long, and try again
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..))]
    pub stall_timeout: u16,
    /// Attempts in a row that may bring nothing new
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub retries: u32,
    /// Print one JSON object for each file
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `muser models`.
#[derive(Clone, Copy, Debug, Args)]
pub struct ModelsArgs {
    /// Hash files that were never checked, or that changed since
    #[arg(long)]
    pub verify: bool,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}
