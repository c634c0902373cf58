//! Arguments of `muser config`.

use clap::{Args, Subcommand};

/// Arguments of `muser config`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// The commands on the configuration.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print what is in force for a command, as a file that could be used, and where each value came from
    Show(ConfigShowArgs),
    /// Print the path of the configuration file
    Path,
}

/// Arguments of `muser config show`.
#[derive(Debug, Args)]
pub struct ConfigShowArgs {
    /// Print one JSON object (before the command)
    #[arg(long)]
    pub json: bool,
    /// The command, with as many of its flags as one likes, such as `serve --port 9000`; without it what the file sets is shown
    #[arg(value_name = "COMMAND", trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
}
