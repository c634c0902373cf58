//! `muser run`: answers one prompt.

use crate::cli::RunArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: RunArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser run` is not built yet")
}
