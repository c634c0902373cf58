//! `muser chat`: a conversation.

use crate::cli::ChatArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: ChatArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser chat` is not built yet")
}
