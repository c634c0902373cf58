//! Synthetic model files: valid, deterministic, any geometry, any block type.
//!
//! Speed does not depend on what weights say, so benchmarks and most tests need no trained model. A file is a function of
//! its options: every tensor has a random stream of its own, keyed by its name and the seed, and may be filled in any
//! order by any number of threads. Weights have zero mean and a spread that keeps activations near one through all
//! layers, so that the arithmetic sees ordinary numbers.

mod draft;
mod fill;
mod output;
mod plan;
mod projector;
mod vocabulary;

use std::path::Path;

use muser_gguf::{GgmlType, GgufHeader, GgufWriter};

pub use plan::{Mix, Preset, SynthOptions};
use plan::{Planned, with_tensors};

use crate::{DflashConfig, Geometry, ModelError, VisionConfig};

/// Writes a file at the speed of the disk, in memory that does not grow with it. `progress` is given bytes done and bytes
/// in total. The file appears under its name only when it is whole.
pub fn write(
    path: impl AsRef<Path>,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, ModelError> {
    let (header, tensors) = lay_out(options)?;
    output::to_file(path.as_ref(), &header, &tensors, options.seed, progress)
}

/// The same file in memory.
pub fn to_bytes(options: &SynthOptions) -> Result<Vec<u8>, ModelError> {
    let (header, tensors) = lay_out(options)?;
    output::to_memory(&header, &tensors, options.seed)
}

/// A small file in memory for tests of kernels: this geometry, every matrix of type `ty`. The vocabulary must have at
/// least 268 tokens, the 256 bytes and the special ones.
pub fn tiny(geometry: &Geometry, ty: GgmlType, seed: u64) -> Result<Vec<u8>, ModelError> {
    let mut options = SynthOptions::new(Preset::Tiny, Mix::Uniform(ty));
    options.geometry = Some(geometry.clone());
    options.seed = seed;
    to_bytes(&options)
}

/// Writes a draft model for a target of this vocabulary and seed; progress as for [`write()`]. `mix` chooses types as it
/// does for a text model.
pub fn write_draft(
    path: impl AsRef<Path>,
    config: &DflashConfig,
    mix: Mix,
    seed: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, ModelError> {
    let (header, tensors) = draft::lay_out(config, mix, seed)?;
    output::to_file(path.as_ref(), &header, &tensors, seed, progress)
}

/// The same file in memory.
pub fn draft_to_bytes(config: &DflashConfig, mix: Mix, seed: u64) -> Result<Vec<u8>, ModelError> {
    let (header, tensors) = draft::lay_out(config, mix, seed)?;
    output::to_memory(&header, &tensors, seed)
}

/// Writes a projector, as [`write_draft`] writes a draft.
pub fn write_projector(
    path: impl AsRef<Path>,
    config: &VisionConfig,
    mix: Mix,
    seed: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<u64, ModelError> {
    let (header, tensors) = projector::lay_out(config, projector::adapter_of(config), mix, seed)?;
    output::to_file(path.as_ref(), &header, &tensors, seed, progress)
}

/// The same file in memory.
pub fn projector_to_bytes(config: &VisionConfig, mix: Mix, seed: u64) -> Result<Vec<u8>, ModelError> {
    projector_with_adapter(config, projector::adapter_of(config), mix, seed)
}

/// The same with an adapter of another inner width.
pub fn projector_with_adapter(
    config: &VisionConfig,
    adapter: usize,
    mix: Mix,
    seed: u64,
) -> Result<Vec<u8>, ModelError> {
    let (header, tensors) = projector::lay_out(config, adapter, mix, seed)?;
    output::to_memory(&header, &tensors, seed)
}

/// Only the header of a file, for tests that need no weights.
pub fn header(options: &SynthOptions) -> Result<GgufHeader, ModelError> {
    Ok(lay_out(options)?.0)
}

/// The tensor table of a file, without its data: names, dimensions, types. For sizes and cost arithmetic.
pub fn table(options: &SynthOptions) -> Result<Vec<(String, Vec<u64>, GgmlType)>, ModelError> {
    let geometry = plan::geometry(options);
    Ok(plan::tensors(&geometry, options).into_iter().map(|t| (t.name, t.dims, t.ty)).collect())
}

/// The tensor table of a draft file.
pub fn draft_table(config: &DflashConfig, mix: Mix) -> Vec<(String, Vec<u64>, GgmlType)> {
    draft::tensors(config, mix).into_iter().map(|t| (t.name, t.dims, t.ty)).collect()
}

/// The tensor table of a projector file.
pub fn projector_table(config: &VisionConfig, mix: Mix) -> Vec<(String, Vec<u64>, GgmlType)> {
    projector::tensors(config, projector::adapter_of(config), mix)
        .into_iter()
        .map(|t| (t.name, t.dims, t.ty))
        .collect()
}

fn lay_out(options: &SynthOptions) -> Result<(GgufHeader, Vec<Planned>), ModelError> {
    let geometry = plan::geometry(options);
    let vocabulary = match &options.tokenizer_model {
        Some(path) => vocabulary::from_ranks(path, geometry.vocab)?,
        None => vocabulary::made_up(geometry.vocab)?,
    };
    let tensors = plan::tensors(&geometry, options);
    let mut writer = GgufWriter::new();
    plan::metadata(&mut writer, &geometry, options)?;
    vocabulary.write(&mut writer)?;
    with_tensors(writer, tensors)
}

#[cfg(test)]
mod tests;
