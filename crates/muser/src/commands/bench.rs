//! `muser bench`: measures speed.

use crate::cli::BenchArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: BenchArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser bench` is not built yet")
}
