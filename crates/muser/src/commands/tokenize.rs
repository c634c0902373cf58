//! `muser tokenize`: text to ids.

use crate::cli::TokenizeArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: TokenizeArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser tokenize` is not built yet")
}
