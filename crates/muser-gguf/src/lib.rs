//! GGUF files: a fail-closed reader over a memory map, a streaming writer, the block layouts of the quantised types and
//! their scalar dequantisation.
//!
//! The reader copies nothing that can be large: metadata arrays (a vocabulary has 640,000 strings) and tensor data stay
//! in the map and are handed out as borrowed slices. Everything that comes from the file is checked against the bytes
//! that are there before it is believed; a file that opens has tensors that lie inside it, aligned and apart.

mod cursor;
mod dequant;
mod error;
mod file;
mod map;
mod parse;
mod split;
mod types;
mod value;
mod writer;

pub use dequant::{
    E2M1_DOUBLED, IQ4_LEVELS, dequantize_row, k4_scale_min, mxfp4_scale, nvfp4_scale, q3_k_scale,
};
pub use error::GgufError;
pub use file::{GgufFile, TensorInfo};
pub use types::GgmlType;
pub use value::{Array, ByteStrings, Value, ValueType};
pub use writer::{DataSink, GgufHeader, GgufWriter, write_at};
