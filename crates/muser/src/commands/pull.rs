//! `muser pull`: brings a model file.

use crate::cli::PullArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: PullArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser pull` is not built yet")
}
