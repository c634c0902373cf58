//! Arguments of `muser top`.

use std::path::PathBuf;

use clap::Args;

use crate::env_vars;

/// Arguments of `muser top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// The server: `http://`, `https://`, or `unix:` and the path of its socket
    #[arg(long, value_name = "URL", env = env_vars::MUSER_URL, default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// File whose first key is shown to the server, as `muser serve --key-file` reads it
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub interval: u16,
    /// Print everything once as plain text; so too where standard output is no terminal
    #[arg(long)]
    pub once: bool,
    /// Print the server's answer once, as one JSON object (docs/api.md has its shape)
    #[arg(long, conflicts_with = "once")]
    pub json: bool,
}
