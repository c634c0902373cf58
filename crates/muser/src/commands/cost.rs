//! `muser cost`: what a token costs.

use crate::cli::CostArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: CostArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser cost` is not built yet")
}
