//! Arguments of `muser node serve` and `muser node test`.

use std::net::SocketAddr;

use clap::Args;

use super::{DraftArgs, ModelArgs, PackStoreArgs, Parallel};

/// Arguments of `muser node serve`.
#[derive(Debug, Args)]
pub struct NodeServeArgs {
    /// Where nodes reach this one; those that `muser node list` knows may ask
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:7411")]
    pub node_listen: SocketAddr,
    /// Prompts read at a time
    #[arg(long, value_name = "N|auto", default_value = "16")]
    pub parallel: Parallel,
    /// Memory for keys and values in MiB; default: enough for all places, but at most what a card has left, on a CPU 4 GiB
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..))]
    pub kv_mib: Option<u64>,
    /// Keep what is read in packs, and do not read again what is kept there (--packs=DIR, with the equals sign); default
    /// folder: `packs` in `MUSER_HOME`
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true, default_missing_value = "default")]
    pub packs: Option<std::path::PathBuf>,
    /// How packs are kept.
    #[command(flatten)]
    pub pack_store: PackStoreArgs,
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Whose rows of a draft are read along.
    #[command(flatten)]
    pub draft: DraftArgs,
}

/// Arguments of `muser node test`.
#[derive(Debug, Args)]
pub struct NodeTestArgs {
    /// What the node is called here
    pub name: String,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
    /// Which model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Who proposes tokens.
    #[command(flatten)]
    pub draft: DraftArgs,
}
