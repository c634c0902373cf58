//! What a command line says by itself.

use clap::ArgMatches;
use clap::parser::ValueSource;

/// Is an argument there because somebody wrote it, in the line or in the environment?
pub fn is_explicit(matches: &ArgMatches, id: &str) -> bool {
    let is_known = matches.try_contains_id(id).is_ok();
    is_known && matches!(matches.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable))
}

/// The command that a line names, with its own matches.
pub fn leaf(matches: &ArgMatches) -> (Vec<String>, &ArgMatches) {
    let (mut path, mut at) = (Vec::new(), matches);
    while let Some((name, below)) = at.subcommand() {
        path.push(name.to_owned());
        at = below;
    }
    (path, at)
}
