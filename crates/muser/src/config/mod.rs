//! `muser.toml`: values for flags that are not given.
//!
//! Flags win over environment variables, these over the file, the file over what is built in. The file's values become the
//! *defaults* of clap's definitions, so that nothing else has to know of the file:
//!
//! ```toml
//! model = "muse-glimmer"        # every command that has the flag
//! [serve]
//! port = 9000                   # one command
//! allowed-host = ["a", "b"]     # a flag that may be given several times
//! context-shift = true          # a flag without a value
//! [node.serve]
//! node-listen = "0.0.0.0:7000"
//! ```
//!
//! A section counts for its command and those below it, the nearest section wins. Flags of every command, such as `quiet`,
//! stand above the sections. A key that is no flag and a value that its flag would refuse are errors, whatever command runs.

mod apply;
mod file;
mod given;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgMatches, Command};

pub use self::apply::{Sources, is_settable};
pub use self::file::Setting;
pub use self::given::leaf;
use crate::env_vars;

/// The command line, read with the configuration file's values as defaults.
pub struct Configured {
    /// What clap made of it.
    pub matches: ArgMatches,
    /// The definitions with the file's values.
    pub definitions: Command,
    /// Which values the file gave.
    pub sources: Sources,
}

/// Why a command line could not be read.
#[derive(Debug)]
pub enum ConfigError {
    /// The command line's fault, or its wish for help; clap prints it.
    Usage(clap::Error),
    /// The file's fault.
    File(String),
}

/// The file that would be read: what `--config` or `MUSER_CONFIG` names, else `muser.toml` in muser's folder if it is there.
/// `None`: there is none, or `off` was said.
pub fn path(matches: &ArgMatches) -> (Option<PathBuf>, bool) {
    match matches.try_get_one::<PathBuf>("config").ok().flatten() {
        Some(named) if named.as_os_str() == "off" || named.as_os_str().is_empty() => (None, true),
        Some(named) => (Some(named.clone()), true),
        None => (env_vars::muser_home().map(|home| home.join("muser.toml")), false),
    }
}

/// Reads a command line. `strict` is off for `config show`, which looks at command lines that lack something.
pub fn read(definitions: &Command, words: &[OsString], strict: bool) -> Result<Configured, ConfigError> {
    // What the line itself says, whatever is wrong with it: which command, which file, which flags are given.
    let given = definitions.clone().ignore_errors(true).try_get_matches_from(words);
    let mut definitions = definitions.clone();
    let mut sources = Sources::default();
    if let Ok(given) = &given {
        let (path, is_named) = path(given);
        let text = match &path {
            Some(path) => file::read(path, is_named).map_err(ConfigError::File)?,
            None => None,
        };
        if let (Some(path), Some(text)) = (path, text) {
            let settings = file::parse(&path, &text).map_err(ConfigError::File)?;
            (definitions, sources) =
                apply::apply(definitions, &path, &settings, given).map_err(ConfigError::File)?;
        }
    }
    let matches = definitions.clone().ignore_errors(!strict).try_get_matches_from(words);
    Ok(Configured { matches: matches.map_err(ConfigError::Usage)?, definitions, sources })
}

#[cfg(test)]
mod tests;
