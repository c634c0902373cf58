//! `muser inspect`: what is in a model file.

use crate::cli::InspectArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: InspectArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser inspect` is not built yet")
}
