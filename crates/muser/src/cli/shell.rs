//! Arguments of the commands that write files for shells and for `man`.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

/// Arguments of `muser completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell; what it reads goes to standard output
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

/// Arguments of `muser man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Where the pages go, one for each command: `man -l FOLDER/muser.1` reads them there, a folder `man1` in a place of `MANPATH`
    /// makes them known by name
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}
