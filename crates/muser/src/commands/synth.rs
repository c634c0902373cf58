//! `muser synth`: writes a synthetic model file.

use muser_model::synth::{self, SynthOptions};

use crate::cli::SynthArgs;
use crate::output::{Console, HintExt as _, Progress};

/// Runs the command.
pub fn run(args: SynthArgs, console: &Console) -> anyhow::Result<()> {
    if !args.force && args.out.exists() {
        return Err(anyhow::anyhow!("{}: the file is already there", args.out.display()))
            .hint("--force replaces it");
    }
    let mut options = SynthOptions::new(args.preset.into(), args.mix);
    options.seed = args.seed;
    options.tokenizer_model = args.tokenizer_model;
    let mut progress = None;
    let outcome = synth::write(&args.out, &options, &mut |done, total| {
        progress.get_or_insert_with(|| Progress::bytes(console, "writing", total)).set(done);
    });
    if let Some(progress) = progress {
        progress.finish();
    }
    let file_bytes = outcome?;
    let table = synth::table(&options)?;
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
