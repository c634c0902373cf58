//! `muser logits`: the logits of every position, for comparisons between backends and engines.
//!
//! Rows go to disk step by step, so memory is a chunk of logits (32 x 202,048 x 4 bytes is 26 MB), not all of them.

use std::fs::File;
use std::io::BufWriter;

use anyhow::Context as _;
use muser_model::Geometry;

use crate::cli::LogitsArgs;
use crate::model_file::ModelSource;
use crate::npy::NpyWriter;
use crate::one_sequence::read_through;
use crate::output::{Console, Progress, usage_error};
use crate::{executor, ids};

/// Runs the command.
pub fn run(args: LogitsArgs, console: &Console) -> anyhow::Result<()> {
    let tokens = ids::read_ids(&args.ids)?;
    if tokens.is_empty() {
        return Err(usage_error(format!("{}: no ids", args.ids.display())));
    }
    let source = ModelSource::choose(args.model.model.as_deref(), console)?;
    let model = source.load()?;
    let geometry = model.geometry.clone();
    check_ids(&tokens, &geometry)?;
    let mut executor = executor::build(model, &args.model, console)?;
    let chunk = usize::from(args.chunk).min(executor.info().max_rows);
    let file = File::create(&args.out).with_context(|| args.out.display().to_string())?;
    let mut npy = NpyWriter::new(BufWriter::new(file), tokens.len(), geometry.vocab)?;
    let progress = Progress::steps(console, "logits", tokens.len() as u64, "positions");
    read_through(executor.as_mut(), &geometry, &tokens, chunk, &mut |rows, logits| {
        progress.advance(rows as u64);
        npy.write_rows(logits).with_context(|| args.out.display().to_string())
    })?;
    progress.finish();
    npy.finish().with_context(|| args.out.display().to_string())?;
    console.note(format!(
        "{}: {} x {} logits by {}",
        args.out.display(),
        tokens.len(),
        geometry.vocab,
        executor.info().device
    ));
    Ok(())
}

fn check_ids(tokens: &[u32], geometry: &Geometry) -> anyhow::Result<()> {
    if let Some(at) = tokens.iter().position(|&id| id as usize >= geometry.vocab) {
        anyhow::bail!("id {at} is {}, the vocabulary ends at {}", tokens[at], geometry.vocab - 1);
    }
    anyhow::ensure!(
        tokens.len() <= geometry.context,
        "{} ids, the context of the model is {}",
        tokens.len(),
        geometry.context
    );
    Ok(())
}
