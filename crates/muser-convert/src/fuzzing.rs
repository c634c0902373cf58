//! A narrow door for fuzzers: the table of a safetensors file without the file.

use crate::ConvertError;
use crate::safetensors::entries;

/// Name, first byte and length of each tensor.
pub fn table(table: &[u8], data_len: u64) -> Result<Vec<(String, u64, u64)>, ConvertError> {
    let entries = entries(table, 0, "a table", data_len)?;
    Ok(entries.into_iter().map(|entry| (entry.name, entry.offset, entry.len)).collect())
}
