//! `muser detokenize`: ids to text.

use crate::cli::DetokenizeArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: DetokenizeArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser detokenize` is not built yet")
}
