//! Checkpoints as Hugging Face has them (safetensors, quantised or not) to the one GGUF file that muser runs.
//!
//! ```text
//! config.json, quantization_config ──► scheme          what the settings say
//! *.safetensors ──► safetensors, checkpoint            where tensors are, checked before they are believed
//!                        │
//!                        ▼
//!                     source                           what the tensors of a matrix are; its rows
//!                        │
//! text, draft, vision ─► plan ─► output ─► FILE.part ─► FILE
//! ```
//!
//! What a matrix is follows from names, types and shapes of its tensors together and has to agree with the settings; anything
//! else is refused by name. Names, orders, signs and divisors of every format: `docs/formats/nvfp4.md`.

mod checkpoint;
mod draft;
mod encode;
mod error;
mod figures;
#[doc(hidden)]
pub mod fuzzing;
mod output;
mod plan;
mod safetensors;
mod scheme;
mod source;
pub mod synth;
mod text;
mod tokenizer;
mod vision;

use std::path::Path;
use std::sync::Arc;

use muser_gguf::{GgufFile, GgufHeader};
use muser_model::{Draft, Model, Projector};

use crate::checkpoint::Checkpoint;
use crate::output::PartFile;
use crate::plan::Plan;
use crate::scheme::Scheme;

pub use error::ConvertError;
pub use plan::{MatrixType, Types};

/// Which file is made of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// The text model.
    #[default]
    Text,
    /// The vision projector of the same checkpoint.
    Projector,
    /// A DFlash draft, which has a checkpoint of its own.
    Draft,
}

/// Choices of a conversion.
#[derive(Clone, Debug, Default)]
pub struct Choices {
    /// Which file.
    pub part: Part,
    /// Types of its matrices.
    pub types: Types,
    /// Name of the model in the file; the folder's if there is none.
    pub name: Option<String>,
    /// Replace a file that is there.
    pub force: bool,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Tensors of the file.
    pub tensors: usize,
    /// Bytes of the file.
    pub bytes: u64,
}

/// A file that is planned.
struct Laid {
    plan: Plan,
    header: GgufHeader,
}

/// Writes a GGUF file made of the checkpoint in `folder`. `progress` is told values done and values in all.
///
/// The file appears under its name when it is complete, on the disk, and loads; until then it is `OUT.part`.
///
/// # Errors
/// The checkpoint is broken, contradicts itself or is of another model or format; files cannot be read or written.
pub fn convert(
    folder: &Path,
    out: &Path,
    choices: &Choices,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Summary, ConvertError> {
    let checkpoint = Checkpoint::open(folder)?;
    let scheme = Scheme::of(&checkpoint)?;
    let name = choices.name.clone().unwrap_or_else(|| name_of(folder));
    let lay_out = match choices.part {
        Part::Text => text::lay_out,
        Part::Projector => vision::lay_out,
        Part::Draft => draft::lay_out,
    };
    let Laid { plan, header } = lay_out(&checkpoint, &scheme, choices, &name)?;
    let part = PartFile::create(out, choices.force)?;
    output::write(&checkpoint, &plan, &header, &part, progress)?;
    let file = Arc::new(GgufFile::open(part.path())?);
    match choices.part {
        Part::Text => drop(Model::from_gguf(file)?),
        Part::Projector => drop(Projector::from_gguf(file)?),
        Part::Draft => drop(Draft::from_gguf(file)?),
    }
    part.publish(out)?;
    Ok(Summary { tensors: plan.tensors.len(), bytes: header.file_len() })
}

/// The folder's own name, also where it is given as `.`.
fn name_of(folder: &Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    whole.file_name().map_or("model".to_owned(), |name| name.to_string_lossy().into_owned())
}
