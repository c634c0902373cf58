//! Arguments of `muser convert`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use muser_convert::MatrixType;

/// Arguments of `muser convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Folder of the checkpoint: config.json, tokenizer.json, safetensors
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// The file to write
    #[arg(long, short, value_name = "FILE")]
    pub out: PathBuf,
    /// Type of the matrices of layers; with keep, those that are not NVFP4 go with --rest
    #[arg(long = "type", value_name = "TYPE", default_value = "keep")]
    pub layers: ConvertType,
    /// Type of the embedding table, the vocabulary matrix and the like
    #[arg(long, value_name = "TYPE", default_value = "keep")]
    pub rest: RestType,
    /// Write the vision projector of the checkpoint (mmproj) instead of its text model
    #[arg(long)]
    pub mmproj: bool,
    /// The folder is a DFlash draft's
    #[arg(long, conflicts_with = "mmproj")]
    pub dflash: bool,
    /// Name of the model in the file [default: the folder's]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Replace the file if it is there
    #[arg(long)]
    pub force: bool,
}

/// What matrices of layers become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ConvertType {
    /// What they are; FP8, which no GGUF file has, becomes BF16
    Keep,
    /// BF16
    Bf16,
    /// 8 bits in blocks of 32
    #[value(name = "q8_0")]
    Q8_0,
    /// 4-bit floats with a scale for 16 values and a factor; what is NVFP4 already stays as it is
    Nvfp4,
}

/// What other matrices become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RestType {
    /// What they are; FP8, which no GGUF file has, becomes BF16
    Keep,
    /// BF16
    Bf16,
    /// 8 bits in blocks of 32
    #[value(name = "q8_0")]
    Q8_0,
}

impl From<ConvertType> for MatrixType {
    fn from(ty: ConvertType) -> Self {
        match ty {
            ConvertType::Keep => Self::Keep,
            ConvertType::Bf16 => Self::Bf16,
            ConvertType::Q8_0 => Self::Q8_0,
            ConvertType::Nvfp4 => Self::Nvfp4,
        }
    }
}

impl From<RestType> for MatrixType {
    fn from(ty: RestType) -> Self {
        match ty {
            RestType::Keep => Self::Keep,
            RestType::Bf16 => Self::Bf16,
            RestType::Q8_0 => Self::Q8_0,
        }
    }
}
