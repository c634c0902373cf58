//! `muser logits`: logits of every position.

use crate::cli::LogitsArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: LogitsArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser logits` is not built yet")
}
