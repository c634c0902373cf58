//! `muser convert`: a Hugging Face checkpoint to a GGUF file.

use muser_convert::{Choices, ConvertError, Part, Types, convert};

use crate::cli::ConvertArgs;
use crate::output::{Console, HintExt as _, Progress};

/// Values to a step of the bar.
const MILLION: u64 = 1_000_000;

/// Runs the command.
pub fn run(args: ConvertArgs, console: &Console) -> anyhow::Result<()> {
    let part = match (args.mmproj, args.dflash) {
        (true, _) => Part::Projector,
        (_, true) => Part::Draft,
        _ => Part::Text,
    };
    let choices = Choices {
        part,
        types: Types { layers: args.layers.into(), rest: args.rest.into() },
        name: args.name,
        force: args.force,
    };
    let mut progress = None;
    let mut report = |done: u64, total: u64| {
        progress
            .get_or_insert_with(|| Progress::steps(console, "converting", total / MILLION, "million values"))
            .set(done / MILLION);
    };
    let outcome = convert(&args.folder, &args.out, &choices, &mut report);
    if let Some(progress) = progress {
        progress.finish();
    }
    let there = matches!(
        &outcome,
        Err(ConvertError::Io { source, .. }) if source.kind() == std::io::ErrorKind::AlreadyExists
    );
    if there {
        return Err(anyhow::anyhow!("{}: the file is already there", args.out.display()))
            .hint("--force replaces it");
    }
    let summary = outcome?;
    console.note(format!("{}: {} tensors, {} bytes", args.out.display(), summary.tensors, summary.bytes));
    Ok(())
}
