//! GGUF files.

mod error;
mod file;
mod types;

pub use error::GgufError;
pub use file::{GgufFile, TensorInfo, Value};
pub use types::GgmlType;
