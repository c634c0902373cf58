//! `muser doctor`: what this machine offers.

use crate::cli::DoctorArgs;
use crate::output::Console;

/// Runs the command.
pub fn run(_args: DoctorArgs, _console: &Console) -> anyhow::Result<()> {
    anyhow::bail!("`muser doctor` is not built yet")
}
