//! `muser models`: lists model files.

use crate::cli::ModelsArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: ModelsArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser models` is not built yet")
}
