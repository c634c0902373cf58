//! Arguments about packs, shared by the commands that compute.

use std::path::PathBuf;

use clap::Args;

/// Where packs are and how they are sealed.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Pack options")]
pub struct PackStoreArgs {
    /// Most that the packs may take, in MiB; the least recently used go first
    #[arg(long, value_name = "MIB", default_value_t = 32 << 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub pack_mib: u64,
    /// Key file of the packs, made with mode 0600 if it does not exist; default: `keys/packs.key` in `MUSER_HOME`
    #[arg(long, value_name = "FILE")]
    pub pack_key_file: Option<PathBuf>,
    /// Do not encrypt packs; they stay authenticated
    #[arg(long)]
    pub pack_plain: bool,
    /// Reuse packs but write none
    #[arg(long)]
    pub pack_read_only: bool,
}
