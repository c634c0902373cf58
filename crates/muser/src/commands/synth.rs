//! `muser synth`: writes a synthetic model file, or a draft or a projector for one.

use muser_model::synth::{self, Preset, SynthOptions};

use crate::cli::SynthArgs;
use crate::output::{Console, HintExt as _, Progress};

/// Runs the command.
pub fn run(args: SynthArgs, console: &Console) -> anyhow::Result<()> {
    if !args.force && args.out.exists() {
        return Err(anyhow::anyhow!("{}: the file is already there", args.out.display()))
            .hint("--force replaces it");
    }
    let mut progress = None;
    let mut report = |done, total| {
        progress.get_or_insert_with(|| Progress::bytes(console, "writing", total)).set(done);
    };
    let preset: Preset = args.preset.into();
    if let Some(kind) = args.checkpoint {
        let kind = kind.into();
        let written =
            muser_convert::synth::write(&args.out, &preset.geometry(), kind, args.seed, &mut report);
        if let Some(progress) = progress {
            progress.finish();
        }
        console.note(format!("{}: {} tensor bytes", args.out.display(), written?));
        return Ok(());
    }
    let outcome = if args.draft {
        let table = synth::draft_table(&preset.draft(), args.mix);
        synth::write_draft(&args.out, &preset.draft(), args.mix, args.seed, &mut report).map(|n| (n, table))
    } else if args.projector {
        let table = synth::projector_table(&preset.projector(), args.mix);
        synth::write_projector(&args.out, &preset.projector(), args.mix, args.seed, &mut report)
            .map(|n| (n, table))
    } else {
        let mut options = SynthOptions::new(preset, args.mix);
        options.seed = args.seed;
        options.tokenizer_model = args.tokenizer_model;
        synth::write(&args.out, &options, &mut report)
            .and_then(|bytes| synth::table(&options).map(|table| (bytes, table)))
    };
    if let Some(progress) = progress {
        progress.finish();
    }
    let (file_bytes, table) = outcome?;
    let tensor_bytes: u64 = table
        .iter()
        .map(|(_, dims, ty)| dims.iter().product::<u64>() / ty.block_len() as u64 * ty.block_bytes() as u64)
        .sum();
    console.note(format!(
        "{}: {} tensors, {tensor_bytes} tensor bytes, {file_bytes} bytes in all",
        args.out.display(),
        table.len(),
    ));
    Ok(())
}
