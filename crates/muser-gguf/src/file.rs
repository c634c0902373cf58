//! An open file or set of files: metadata by key, tensors by name, bytes of the map.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::map::{IN_MEMORY, bring, give_back, map_copy};
use crate::split::{Shard, open_set};
use crate::value::{Array, ByteStrings, Value};
use crate::{GgmlType, GgufError};

/// One tensor of the table.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Dimensions, contiguous one first; 1 to 4 of them, none zero.
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

impl TensorInfo {
    /// Number of values. Cannot overflow: the size in bytes was checked when the file was opened.
    pub fn values(&self) -> u64 {
        self.dims.iter().product()
    }
}

/// An open file or split set, mapped.
pub struct GgufFile {
    shards: Vec<Shard>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl std::fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GgufFile")
            .field("path", &self.path())
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

impl GgufFile {
    /// Maps a file. If it is one part of a split set, the other parts beside it are opened too.
    pub fn open(path: impl AsRef<Path>) -> Result<GgufFile, GgufError> {
        let shard = Shard::open(path.as_ref())?;
        let count = shard.part_count()?;
        GgufFile::from_shards(if count == 1 { vec![shard] } else { open_set(shard, count)? })
    }

    /// A file that is in memory; it cannot be part of a split set.
    pub fn from_bytes(bytes: impl AsRef<[u8]>) -> Result<GgufFile, GgufError> {
        let shard = Shard::parse(PathBuf::from(IN_MEMORY), map_copy(bytes.as_ref())?)?;
        let count = shard.part_count()?;
        if count != 1 {
            return Err(
                shard.invalid(format!("one part of a split set of {count} cannot be opened from memory"))
            );
        }
        GgufFile::from_shards(vec![shard])
    }

    fn from_shards(mut shards: Vec<Shard>) -> Result<GgufFile, GgufError> {
        let mut tensors: Vec<TensorInfo> = Vec::new();
        let mut by_name = HashMap::new();
        for (shard, file) in shards.iter_mut().enumerate() {
            for raw in std::mem::take(&mut file.header.tensors) {
                if let Some(other) = by_name.insert(raw.name.clone(), tensors.len()) {
                    let first = tensors[other].shard + 1;
                    return Err(
                        file.invalid(format!("tensor name {} is in part {first} of the set too", raw.name))
                    );
                }
                let crate::parse::RawTensor { name, dims, ty, offset, len } = raw;
                tensors.push(TensorInfo { name, dims, ty, shard, offset, len });
            }
        }
        Ok(GgufFile { shards, tensors, by_name })
    }

    /// Path of the (first) file.
    pub fn path(&self) -> &Path {
        &self.first().path
    }

    /// Number of files of the set, 1 for a file that stands alone.
    pub fn shard_count(&self) -> usize {
        self.shards.len()
    }

    /// Path of one file of the set.
    pub fn shard_path(&self, shard: usize) -> &Path {
        &self.shards[shard].path
    }

    /// The file of the set that is mapped, whatever its path names by now; `None` for bytes that are in no file.
    pub fn shard_file(&self, shard: usize) -> Option<&std::fs::File> {
        self.shards[shard].file.as_ref()
    }

    /// All bytes of one file of the set.
    pub fn shard_bytes(&self, shard: usize) -> &[u8] {
        &self.shards[shard].map
    }

    /// Says that these bytes of a shard will be read once, soon: their pages are brought in together.
    pub fn will_read(&self, shard: usize, bytes: Range<usize>) {
        bring(&self.shards[shard].map, bytes.start, bytes.len());
    }

    /// Says that these bytes of a shard have been read and are not needed for now: their pages leave the process. Nothing
    /// changes for a later reader but the time.
    pub fn has_read(&self, shard: usize, bytes: Range<usize>) {
        let shard = &self.shards[shard];
        if shard.path.as_os_str() != IN_MEMORY {
            give_back(&shard.map, bytes.start, bytes.len());
        }
    }

    /// First byte of the data section of one file.
    pub fn data_start(&self, shard: usize) -> usize {
        self.shards[shard].header.data_start
    }

    /// Byte after the tensor table of one file; [`GgufFile::data_start`] is this, padded.
    pub fn header_bytes(&self, shard: usize) -> usize {
        self.shards[shard].header.table_end
    }

    /// Container version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.first().header.version
    }

    /// Alignment of tensor data in bytes.
    pub fn alignment(&self) -> u32 {
        self.first().header.alignment
    }

    /// Tensors in the order of the file(s).
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|index| &self.tensors[*index])
    }

    /// The bytes of a tensor of this file.
    pub fn tensor_data(&self, tensor: &TensorInfo) -> &[u8] {
        &self.shard_bytes(tensor.shard)[tensor.offset..][..tensor.len]
    }

    /// Metadata entries in the order of the file.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        let first = self.first();
        first.header.entries.iter().filter_map(|entry| Some((&*entry.key, entry.value(&first.map)?)))
    }

    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let first = self.first();
        first.header.get(&first.map, key)
    }

    fn first(&self) -> &Shard {
        // Both constructors give at least one file.
        &self.shards[0]
    }
}

/// Getters that name the key, what was expected and what was found. The plain ones want the key to be there; the
/// `opt_` ones give `None` where it is not, and still refuse a wrong type.
impl GgufFile {
    /// A string.
    pub fn str(&self, key: &str) -> Result<&str, GgufError> {
        self.required(key, "a string", Value::as_str)
    }

    /// A string, if there.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.optional(key, "a string", Value::as_str)
    }

    /// An integer of any type that fits.
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        self.required(key, "an unsigned 32-bit integer", as_int)
    }

    /// An integer of any type that fits, if there.
    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.optional(key, "an unsigned 32-bit integer", as_int)
    }

    /// An integer of any type that fits.
    pub fn u64(&self, key: &str) -> Result<u64, GgufError> {
        self.required(key, "an unsigned integer", as_int)
    }

    /// An integer of any type that fits, if there.
    pub fn opt_u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.optional(key, "an unsigned integer", as_int)
    }

    /// A float of either type.
    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        self.required(key, "a float", as_f32)
    }

    /// A float of either type, if there.
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.optional(key, "a float", as_f32)
    }

    /// A bool.
    pub fn bool(&self, key: &str) -> Result<bool, GgufError> {
        self.required(key, "a bool", as_bool)
    }

    /// A bool, if there.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.optional(key, "a bool", as_bool)
    }

    /// An array of any element type.
    pub fn array(&self, key: &str) -> Result<Array<'_>, GgufError> {
        self.required(key, "an array", as_array)
    }

    /// The strings of an array, as borrowed bytes.
    pub fn byte_strings(&self, key: &str) -> Result<ByteStrings<'_>, GgufError> {
        self.required(key, "an array of strings", |value| as_array(value)?.byte_strings())
    }

    /// The strings of an array as text, borrowed from the map.
    pub fn strings(&self, key: &str) -> Result<Vec<&str>, GgufError> {
        let mut out = Vec::new();
        for (index, bytes) in self.byte_strings(key)?.enumerate() {
            out.push(std::str::from_utf8(bytes).map_err(|_| GgufError::Key {
                key: key.to_owned(),
                expected: "UTF-8 text".to_owned(),
                found: format!("{:?} as string {index}", bytes.escape_ascii().to_string()),
            })?);
        }
        Ok(out)
    }

    /// The integers of an array, of any integer element type; all must fit `T`.
    pub fn integers<T: TryFrom<i128>>(&self, key: &str) -> Result<Vec<T>, GgufError> {
        self.required(key, "an array of integers in range", |value| {
            as_array(value)?.scalars()?.map(as_int).collect()
        })
    }

    /// The bools of an array.
    pub fn bools(&self, key: &str) -> Result<Vec<bool>, GgufError> {
        self.required(key, "an array of bools", |value| as_array(value)?.scalars()?.map(as_bool).collect())
    }

    /// The floats of an array.
    pub fn floats(&self, key: &str) -> Result<Vec<f32>, GgufError> {
        self.required(key, "an array of floats", |value| as_array(value)?.scalars()?.map(as_f32).collect())
    }

    fn optional<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| GgufError::Key {
            key: key.to_owned(),
            expected: expected.to_owned(),
            found: format!("{} {}", value.value_type().name(), value.describe()),
        })
    }

    fn required<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<T, GgufError> {
        self.optional(key, expected, convert)?.ok_or_else(|| GgufError::Key {
            key: key.to_owned(),
            expected: expected.to_owned(),
            found: "no such key".to_owned(),
        })
    }
}

fn as_int<T: TryFrom<i128>>(value: Value<'_>) -> Option<T> {
    value.as_integer().and_then(|number| T::try_from(number).ok())
}

fn as_f32(value: Value<'_>) -> Option<f32> {
    value.as_float().map(|number| number as f32)
}

fn as_bool(value: Value<'_>) -> Option<bool> {
    match value {
        Value::Bool(v) => Some(v),
        _ => None,
    }
}

fn as_array(value: Value<'_>) -> Option<Array<'_>> {
    match value {
        Value::Array(array) => Some(array),
        _ => None,
    }
}
