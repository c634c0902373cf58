//! `muser synth`: writes a synthetic model.

use crate::cli::SynthArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: SynthArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser synth` is not built yet")
}
