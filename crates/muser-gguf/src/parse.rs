//! The header of one file: metadata entries and tensor table, checked against the bytes that are there.
//!
//! Invariant: memory grows with entries that were read and found valid, never with a count that the file claims; after
//! [`Header::parse`] every tensor lies inside the file, aligned, apart from all others, with a name of its own.

use std::collections::HashMap;

use crate::GgmlType;
use crate::cursor::{Cursor, Fault};
use crate::types::describe_unknown_id;
use crate::value::{Value, ValueType};

/// Most metadata keys and tensors of one file: thirty times what the largest known files have.
const MAX_KEYS: u64 = 65_536;
const MAX_TENSORS: u64 = 65_536;
const MAX_KEY_BYTES: usize = 65_535;
const MAX_NAME_BYTES: usize = 256;
const MAX_DIMS: u32 = 4;
const DEFAULT_ALIGNMENT: u32 = 32;
const MAX_ALIGNMENT: u32 = 65_536;

/// Bytes of the shortest metadata entry: empty key's length, type, one-byte value.
const LEAST_ENTRY_BYTES: u64 = 8 + 4 + 1;
/// Bytes of the shortest tensor entry: empty name's length, dimension count, one dimension, type, offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// A metadata entry: where its value starts.
pub(crate) struct Entry {
    pub(crate) key: Box<str>,
    pub(crate) ty: ValueType,
    start: usize,
}

/// A tensor of the table, its place made absolute.
pub(crate) struct RawTensor {
    pub(crate) name: String,
    pub(crate) dims: Vec<u64>,
    pub(crate) ty: GgmlType,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// All of a file but the data.
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) entries: Vec<Entry>,
    index: HashMap<Box<str>, usize>,
    pub(crate) tensors: Vec<RawTensor>,
    pub(crate) alignment: u32,
    /// Byte after the last tensor entry.
    pub(crate) table_end: usize,
    /// First byte of the data section.
    pub(crate) data_start: usize,
}

impl Header {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Header, Fault> {
        let mut cursor = Cursor::new(bytes, 0);
        let version = read_version(&mut cursor)?;
        let tensor_count = cursor.u64("the tensor count")?;
        let entry_count = cursor.u64("the metadata key count")?;
        check_count("metadata keys", entry_count, MAX_KEYS, LEAST_ENTRY_BYTES, cursor.left())?;
        check_count("tensors", tensor_count, MAX_TENSORS, LEAST_TENSOR_BYTES, cursor.left())?;

        let mut header = Header {
            version,
            entries: Vec::new(),
            index: HashMap::new(),
            tensors: Vec::new(),
            alignment: DEFAULT_ALIGNMENT,
            table_end: 0,
            data_start: 0,
        };
        for number in 0..entry_count {
            let entry = read_entry(&mut cursor).map_err(|fault| format!("metadata key {number}: {fault}"))?;
            if header.index.insert(entry.key.clone(), header.entries.len()).is_some() {
                return Err(format!("metadata key {} appears twice", shorten(&entry.key)));
            }
            header.entries.push(entry);
        }
        header.alignment = header.read_alignment(bytes)?;
        header.read_tensors(cursor, tensor_count)?;
        Ok(header)
    }

    /// The value of `key`; `bytes` are those that were parsed.
    pub(crate) fn get<'a>(&self, bytes: &'a [u8], key: &str) -> Option<Value<'a>> {
        self.entries[*self.index.get(key)?].value(bytes)
    }

    fn read_alignment(&self, bytes: &[u8]) -> Result<u32, Fault> {
        let fault = |found: String| {
            format!(
                "metadata key general.alignment: expected a u32 power of two from 8 to {MAX_ALIGNMENT}, found {found}"
            )
        };
        match self.get(bytes, "general.alignment") {
            None => Ok(DEFAULT_ALIGNMENT),
            Some(Value::U32(v)) if v.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&v) => Ok(v),
            Some(value) => Err(fault(format!("{} {}", value.value_type().name(), value.describe()))),
        }
    }

    fn read_tensors(&mut self, mut cursor: Cursor<'_>, count: u64) -> Result<(), Fault> {
        let alignment = u64::from(self.alignment);
        let mut names = HashMap::new();
        let mut padded_total = 0_u64;
        // Offsets are relative to the data section, whose start is known only after the table.
        let mut relative = Vec::new();
        for number in 0..count {
            let (tensor, offset) =
                read_tensor(&mut cursor).map_err(|fault| format!("tensor {number}: {fault}"))?;
            if let Some(other) = names.insert(tensor.name.clone(), number) {
                return Err(format!(
                    "tensor name {} appears twice, as tensor {other} and {number}",
                    tensor.name
                ));
            }
            if offset % alignment != 0 {
                return Err(format!(
                    "tensor {}: expected an offset that is a multiple of {alignment}, found {offset}",
                    tensor.name
                ));
            }
            padded_total = (tensor.len as u64)
                .checked_next_multiple_of(alignment)
                .and_then(|padded| padded_total.checked_add(padded))
                .ok_or_else(|| {
                    format!("tensor {}: the padded sizes up to it overflow 64 bits", tensor.name)
                })?;
            self.tensors.push(tensor);
            relative.push(offset);
        }
        self.table_end = cursor.pos();
        self.data_start = self.table_end.next_multiple_of(self.alignment as usize);
        let file_len = self.table_end + cursor.left();
        for (tensor, offset) in self.tensors.iter_mut().zip(relative) {
            let start = (self.data_start as u64).checked_add(offset);
            let end = start.and_then(|start| start.checked_add(tensor.len as u64));
            match (start, end) {
                (Some(start), Some(end)) if end <= file_len as u64 => tensor.offset = start as usize,
                _ => {
                    return Err(format!(
                        "tensor {}: {} bytes at offset {offset} of the data section (which starts at {}) end beyond \
                         the file's {file_len} bytes; the file is cut short or damaged",
                        tensor.name, tensor.len, self.data_start
                    ));
                }
            }
        }
        self.check_apart()
    }

    fn check_apart(&self) -> Result<(), Fault> {
        let mut order: Vec<&RawTensor> = self.tensors.iter().collect();
        order.sort_unstable_by_key(|tensor| tensor.offset);
        for pair in order.windows(2) {
            if pair[0].offset + pair[0].len > pair[1].offset {
                return Err(format!(
                    "tensors {} (bytes {} to {}) and {} (from byte {}) overlap",
                    pair[0].name,
                    pair[0].offset,
                    pair[0].offset + pair[0].len,
                    pair[1].name,
                    pair[1].offset
                ));
            }
        }
        Ok(())
    }
}

impl Entry {
    /// The value; `bytes` are those that were parsed. `None` only if they have changed since.
    pub(crate) fn value<'a>(&self, bytes: &'a [u8]) -> Option<Value<'a>> {
        Value::read(&mut Cursor::new(bytes, self.start), self.ty, 0).ok()
    }
}

fn read_version(cursor: &mut Cursor<'_>) -> Result<u32, Fault> {
    let left = cursor.left();
    let magic: [u8; 4] = cursor.array("the magic")?;
    if &magic != b"GGUF" {
        let hint = match &magic {
            b"vers" if left < 1024 => "; this looks like a git-lfs pointer, not the file itself",
            b"FUGG" => "; this is a big-endian file, muser reads little-endian ones",
            _ => "",
        };
        return Err(format!(
            "expected a GGUF file (first bytes \"GGUF\"), found {:?}{hint}",
            magic.escape_ascii().to_string()
        ));
    }
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => Ok(version),
        _ if version.swap_bytes() <= 0xFFFF => Err(format!(
            "expected a little-endian file, found big-endian GGUF version {}",
            version.swap_bytes()
        )),
        _ => Err(format!("expected GGUF version 2 or 3, found {version}")),
    }
}

fn check_count(what: &str, count: u64, most: u64, least_bytes: u64, left: usize) -> Result<(), Fault> {
    let room = left as u64 / least_bytes;
    if count > room {
        return Err(format!(
            "the header claims {count} {what}, the {left} bytes after it have room for {room}"
        ));
    }
    if count > most {
        return Err(format!("expected at most {most} {what}, found {count}"));
    }
    Ok(())
}

fn read_entry(cursor: &mut Cursor<'_>) -> Result<Entry, Fault> {
    let key = cursor.text("its name")?;
    if key.is_empty() || key.len() > MAX_KEY_BYTES {
        return Err(format!("expected a name of 1 to {MAX_KEY_BYTES} bytes, found {}", key.len()));
    }
    check_printable(key)?;
    let within = |fault| format!("{}: {fault}", shorten(key));
    let id = cursor.u32("its type").map_err(within)?;
    let ty =
        ValueType::from_id(id).ok_or_else(|| within(format!("expected a value type 0 to 12, found {id}")))?;
    let start = cursor.pos();
    Value::read(cursor, ty, 0).map_err(within)?;
    Ok(Entry { key: key.into(), ty, start })
}

/// Reads one tensor entry; the offset comes beside it, relative to the data section.
fn read_tensor(cursor: &mut Cursor<'_>) -> Result<(RawTensor, u64), Fault> {
    let name = cursor.text("its name")?;
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return Err(format!("expected a name of 1 to {MAX_NAME_BYTES} bytes, found {}", name.len()));
    }
    check_printable(name)?;
    let within = |fault| format!("{name}: {fault}");
    let dim_count = cursor.u32("its dimension count").map_err(within)?;
    if dim_count == 0 || dim_count > MAX_DIMS {
        return Err(within(format!("expected 1 to {MAX_DIMS} dimensions, found {dim_count}")));
    }
    let mut dims = Vec::with_capacity(dim_count as usize);
    for axis in 0..dim_count {
        let dim = cursor.u64("a dimension").map_err(within)?;
        if dim == 0 {
            return Err(within(format!("expected dimension {axis} above zero, found 0")));
        }
        dims.push(dim);
    }
    let id = cursor.u32("its type").map_err(within)?;
    let ty = GgmlType::from_id(id).ok_or_else(|| {
        within(format!("expected a ggml type that muser knows, found {}", describe_unknown_id(id)))
    })?;
    let len = tensor_bytes(&dims, ty).map_err(within)?;
    let offset = cursor.u64("its offset").map_err(within)?;
    Ok((RawTensor { name: name.to_owned(), dims, ty, offset: 0, len }, offset))
}

/// Bytes of a tensor; all arithmetic checked.
pub(crate) fn tensor_bytes(dims: &[u64], ty: GgmlType) -> Result<usize, Fault> {
    let block_len = ty.block_len() as u64;
    let row = dims.first().copied().unwrap_or(1);
    if row % block_len != 0 {
        return Err(format!(
            "expected rows of a multiple of {block_len} values for {}, found {row}",
            ty.name()
        ));
    }
    dims.iter()
        .try_fold(1_u64, |product, dim| product.checked_mul(*dim))
        .and_then(|values| (values / block_len).checked_mul(ty.block_bytes() as u64))
        .and_then(|bytes| usize::try_from(bytes).ok())
        // Sizes beyond this would overflow signed offsets elsewhere; no file is as long.
        .filter(|bytes| isize::try_from(*bytes).is_ok())
        .ok_or_else(|| format!("its dimensions {dims:?} of type {} overflow the size of a file", ty.name()))
}

/// Names end up on terminals and in logs.
fn check_printable(name: &str) -> Result<(), Fault> {
    if name.chars().any(char::is_control) {
        return Err(format!("expected a name without control characters, found {:?}", shorten(name)));
    }
    Ok(())
}

/// A name for a message, cut to a line.
fn shorten(name: &str) -> String {
    if name.len() <= 80 {
        return name.to_owned();
    }
    name.chars().take(77).chain("...".chars()).collect()
}
