//! Reading a file.

use crate::GgmlType;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any unsigned integer.
    U64(u64),
}

/// One tensor of the table.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Dimensions, contiguous one first.
    pub dims: Vec<u64>,
    /// Type.
    pub ty: GgmlType,
    /// Which file of a split set holds it.
    pub shard: usize,
    /// Byte offset of its data in that file.
    pub offset: usize,
    /// Bytes of its data.
    pub len: usize,
}

/// An open file or split set, mapped.
pub struct GgufFile {
    shards: Vec<Vec<u8>>,
}

impl GgufFile {
    /// All bytes of one file of the set.
    pub fn shard_bytes(&self, shard: usize) -> &[u8] {
        &self.shards[shard]
    }
}
