//! `muser completions` and `muser man`: what the definitions in `cli` are to shells and to `man`.

use std::io::Write as _;

use anyhow::Context as _;
use clap::CommandFactory as _;

use crate::cli::{Cli, CompletionsArgs, ManArgs};
use crate::output::Console;

/// Writes completions to standard output.
pub fn completions(args: CompletionsArgs) -> anyhow::Result<()> {
    // Into memory first: the generator takes a closed pipe for a fault of its own.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "muser", &mut script);
    let mut out = std::io::stdout().lock();
    out.write_all(&script)?;
    out.flush()?;
    Ok(())
}

/// Writes one page for each command, groups and their members included.
pub fn manual(args: ManArgs, console: &Console) -> anyhow::Result<()> {
    std::fs::create_dir_all(&args.folder).with_context(|| args.folder.display().to_string())?;
    clap_mangen::generate_to(Cli::command(), &args.folder)
        .with_context(|| format!("cannot write manual pages to {}", args.folder.display()))?;
    console.note(format!("manual pages are in {}", args.folder.display()));
    Ok(())
}
