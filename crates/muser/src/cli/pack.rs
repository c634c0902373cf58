//! Arguments of `muser pack`: the packs of a store and their keys.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Arguments of `muser pack`.
#[derive(Debug, Args)]
pub struct PackArgs {
    /// Folder of the packs; default: `packs` in `MUSER_HOME`
    #[arg(long, global = true, value_name = "DIR")]
    pub packs: Option<PathBuf>,
    /// Key file of the store; default: `keys/packs.key` in `MUSER_HOME`
    #[arg(long, global = true, value_name = "FILE")]
    pub pack_key_file: Option<PathBuf>,
    /// The store was made without encryption
    #[arg(long, global = true)]
    pub pack_plain: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: PackCommand,
}

/// The commands on packs.
#[derive(Debug, Subcommand)]
pub enum PackCommand {
    /// List the packs of the store
    Ls(PackLsArgs),
    /// Say what a pack holds and what it was computed with
    Show(PackShowArgs),
    /// Read packs whole and check every byte
    Verify(PackVerifyArgs),
    /// Write a pack into a file, sealed with a key of its own, which is written beside it
    Export(PackExportArgs),
    /// Take the pack of a file into the store
    Import(PackImportArgs),
    /// Keep a pack until it is removed, or (--off) let it be dropped to make room
    Pin(PackPinArgs),
    /// Remove packs and every segment that no other pack needs
    Rm(PackRmArgs),
    /// Delete what no pack needs; with --max-gb also the least recently used packs
    Gc(PackGcArgs),
    /// Rebuild the catalog from every pack and session that is whole; nothing is deleted
    Recover,
    /// Take the store as it is, though it is older than what was seen of it, or another one
    Accept,
    /// The key of the store: its epochs, rotation, revocation
    Key(PackKeyArgs),
}

/// Arguments of `muser pack ls`.
#[derive(Clone, Copy, Debug, Args)]
pub struct PackLsArgs {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `muser pack show`.
#[derive(Debug, Args)]
pub struct PackShowArgs {
    /// The pack's name, or its beginning
    #[arg(value_name = "PACK")]
    pub pack: String,
    /// Print the token ids too: they are the prompt
    #[arg(long)]
    pub tokens: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `muser pack verify`.
#[derive(Debug, Args)]
pub struct PackVerifyArgs {
    /// The packs' names, or their beginnings; default: all
    #[arg(value_name = "PACK")]
    pub packs_named: Vec<String>,
}

/// Arguments of `muser pack export`.
#[derive(Debug, Args)]
pub struct PackExportArgs {
    /// The pack's name, or its beginning
    #[arg(value_name = "PACK")]
    pub pack: String,
    /// The file to write; it must not exist
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Where the key that opens the file is written; default: `FILE.key`
    #[arg(long, value_name = "FILE")]
    pub key_out: Option<PathBuf>,
}

/// Arguments of `muser pack import`.
#[derive(Debug, Args)]
pub struct PackImportArgs {
    /// The file to read
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The key that was made with the file; default: this store's
    #[arg(long, value_name = "FILE")]
    pub source_key: Option<PathBuf>,
    /// Take what another key has sealed: whoever made it could have chosen what the model goes on from
    #[arg(long)]
    pub trust: bool,
    /// Keep the pack until it is removed
    #[arg(long)]
    pub pin: bool,
}

/// Arguments of `muser pack pin`.
#[derive(Debug, Args)]
pub struct PackPinArgs {
    /// The pack's name, or its beginning
    #[arg(value_name = "PACK")]
    pub pack: String,
    /// Let it be dropped to make room
    #[arg(long)]
    pub off: bool,
}

/// Arguments of `muser pack rm`.
#[derive(Debug, Args)]
pub struct PackRmArgs {
    /// The packs' names, or their beginnings
    #[arg(value_name = "PACK", required_unless_present = "all", conflicts_with = "all")]
    pub packs_named: Vec<String>,
    /// Every pack, pinned ones included
    #[arg(long)]
    pub all: bool,
}

/// Arguments of `muser pack gc`.
#[derive(Clone, Copy, Debug, Args)]
pub struct PackGcArgs {
    /// Then drop the least recently used packs until the store holds at most so many gigabytes
    #[arg(long, value_name = "GB")]
    pub max_gb: Option<f64>,
}

/// Arguments of `muser pack key`.
#[derive(Debug, Args)]
pub struct PackKeyArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: PackKeyCommand,
}

/// The commands on keys.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum PackKeyCommand {
    /// Say which key it is and which epochs it has
    Show,
    /// Seal with a new epoch from now on; what was sealed before stays readable
    Rotate {
        /// Then seal every pack and session of the store anew, so that older epochs can be revoked without losing any
        #[arg(long)]
        reseal: bool,
    },
    /// Destroy the secret of an epoch: what was sealed in it can never be read again
    Revoke {
        /// Its number
        #[arg(value_name = "EPOCH")]
        epoch: u32,
    },
    /// Read nothing that is older than an epoch
    Minimum {
        /// Its number
        #[arg(value_name = "EPOCH")]
        epoch: u32,
    },
}
