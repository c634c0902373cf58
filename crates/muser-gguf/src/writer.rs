//! Writing files: first the whole header from memory, then tensor data in order, of any size, in bounded memory.
//!
//! The header is laid out completely before the first byte of data, so that a caller can also write the data itself, from
//! several threads and at the places that [`GgufHeader::place`] names.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write};

use crate::parse::tensor_bytes;
use crate::value::{Array, Value, ValueType};
use crate::{GgmlType, GgufError};

/// Collects metadata and the tensor table of a file to be written.
pub struct GgufWriter {
    alignment: u32,
    keys: HashSet<String>,
    names: HashSet<String>,
    metadata: Vec<u8>,
    table: Vec<u8>,
    /// Offset in the data section and length of each tensor.
    places: Vec<(u64, u64)>,
    data_len: u64,
}

impl Default for GgufWriter {
    fn default() -> GgufWriter {
        GgufWriter::new()
    }
}

impl GgufWriter {
    /// A file without metadata and tensors, data aligned to 32 bytes.
    pub fn new() -> GgufWriter {
        GgufWriter {
            alignment: 32,
            keys: HashSet::new(),
            names: HashSet::new(),
            metadata: Vec::new(),
            table: Vec::new(),
            places: Vec::new(),
            data_len: 0,
        }
    }

    /// Adds a value; an [`Array`] of another file is copied.
    pub fn put(&mut self, key: &str, value: Value<'_>) -> Result<&mut GgufWriter, GgufError> {
        if key == "general.alignment" {
            match value {
                Value::U32(alignment) if alignment.is_power_of_two() && self.places.is_empty() => {
                    self.alignment = alignment;
                }
                _ => {
                    return Err(GgufError::Write(
                        "general.alignment must be a u32 power of two, set before the first tensor"
                            .to_owned(),
                    ));
                }
            }
        }
        self.key(key, value.value_type())?;
        let out = &mut self.metadata;
        match value {
            Value::U8(v) => out.push(v),
            Value::I8(v) => out.extend(v.to_le_bytes()),
            Value::U16(v) => out.extend(v.to_le_bytes()),
            Value::I16(v) => out.extend(v.to_le_bytes()),
            Value::U32(v) => out.extend(v.to_le_bytes()),
            Value::I32(v) => out.extend(v.to_le_bytes()),
            Value::F32(v) => out.extend(v.to_le_bytes()),
            Value::Bool(v) => out.push(u8::from(v)),
            Value::String(v) => put_string(out, v.as_bytes()),
            Value::U64(v) => out.extend(v.to_le_bytes()),
            Value::I64(v) => out.extend(v.to_le_bytes()),
            Value::F64(v) => out.extend(v.to_le_bytes()),
            Value::Array(array) => put_array(out, array),
        }
        Ok(self)
    }

    /// Adds an array of strings.
    pub fn put_strings<S: AsRef<[u8]>>(
        &mut self,
        key: &str,
        strings: impl IntoIterator<Item = S>,
    ) -> Result<&mut GgufWriter, GgufError> {
        self.array(key, ValueType::String, strings, |out, string| put_string(out, string.as_ref()))
    }

    /// Adds an array of bools.
    pub fn put_bools(
        &mut self,
        key: &str,
        bools: impl IntoIterator<Item = bool>,
    ) -> Result<&mut GgufWriter, GgufError> {
        self.array(key, ValueType::Bool, bools, |out, v| out.push(u8::from(v)))
    }

    /// Adds an array of 32-bit integers.
    pub fn put_i32s(
        &mut self,
        key: &str,
        integers: impl IntoIterator<Item = i32>,
    ) -> Result<&mut GgufWriter, GgufError> {
        self.array(key, ValueType::I32, integers, |out, v| out.extend(v.to_le_bytes()))
    }

    /// Adds an array of floats.
    pub fn put_f32s(
        &mut self,
        key: &str,
        floats: impl IntoIterator<Item = f32>,
    ) -> Result<&mut GgufWriter, GgufError> {
        self.array(key, ValueType::F32, floats, |out, v| out.extend(v.to_le_bytes()))
    }

    /// Adds a tensor to the table, after those added before; dimensions contiguous one first.
    pub fn tensor(&mut self, name: &str, dims: &[u64], ty: GgmlType) -> Result<&mut GgufWriter, GgufError> {
        let fault = |what: String| GgufError::Write(format!("tensor {name}: {what}"));
        if !self.names.insert(name.to_owned()) {
            return Err(fault("the name is already taken".to_owned()));
        }
        if dims.is_empty() || dims.len() > 4 || dims.contains(&0) {
            return Err(fault(format!("expected 1 to 4 dimensions above zero, found {dims:?}")));
        }
        let len = tensor_bytes(dims, ty).map_err(fault)? as u64;
        put_string(&mut self.table, name.as_bytes());
        self.table.extend((dims.len() as u32).to_le_bytes());
        for dim in dims {
            self.table.extend(dim.to_le_bytes());
        }
        self.table.extend(ty.id().to_le_bytes());
        self.table.extend(self.data_len.to_le_bytes());
        self.places.push((self.data_len, len));
        self.data_len = len
            .checked_next_multiple_of(u64::from(self.alignment))
            .and_then(|padded| self.data_len.checked_add(padded))
            .ok_or_else(|| fault("the file would be longer than 64 bits can say".to_owned()))?;
        Ok(self)
    }

    /// Lays the file out.
    pub fn finish(self) -> GgufHeader {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend((self.places.len() as u64).to_le_bytes());
        bytes.extend((self.keys.len() as u64).to_le_bytes());
        bytes.extend(self.metadata);
        bytes.extend(self.table);
        bytes.resize(bytes.len().next_multiple_of(self.alignment as usize), 0);
        GgufHeader { bytes, places: self.places, data_len: self.data_len }
    }

    fn key(&mut self, key: &str, ty: ValueType) -> Result<(), GgufError> {
        if !self.keys.insert(key.to_owned()) {
            return Err(GgufError::Write(format!("metadata key {key} is already set")));
        }
        put_string(&mut self.metadata, key.as_bytes());
        self.metadata.extend((ty as u32).to_le_bytes());
        Ok(())
    }

    fn array<T>(
        &mut self,
        key: &str,
        element: ValueType,
        items: impl IntoIterator<Item = T>,
        put: impl Fn(&mut Vec<u8>, T),
    ) -> Result<&mut GgufWriter, GgufError> {
        self.key(key, ValueType::Array)?;
        self.metadata.extend((element as u32).to_le_bytes());
        let count_at = self.metadata.len();
        self.metadata.extend([0; 8]);
        let mut count = 0_u64;
        for item in items {
            put(&mut self.metadata, item);
            count += 1;
        }
        self.metadata[count_at..count_at + 8].copy_from_slice(&count.to_le_bytes());
        Ok(self)
    }
}

/// A laid-out header: its bytes, and where each tensor's data goes.
pub struct GgufHeader {
    bytes: Vec<u8>,
    places: Vec<(u64, u64)>,
    data_len: u64,
}

impl GgufHeader {
    /// Everything before the data section, padding included.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// First byte in the file and number of bytes of tensor `index`, in the order of the table.
    pub fn place(&self, index: usize) -> (u64, u64) {
        let (offset, len) = self.places[index];
        (self.bytes.len() as u64 + offset, len)
    }

    /// Bytes of the whole file.
    pub fn file_len(&self) -> u64 {
        self.bytes.len() as u64 + self.data_len
    }

    /// Writes the header and gives a sink for the data of all tensors, in order and without padding.
    pub fn stream<W: Write>(&self, mut out: W) -> Result<DataSink<'_, W>, GgufError> {
        out.write_all(&self.bytes).map_err(sink_error)?;
        Ok(DataSink { header: self, out, tensor: 0, written: 0 })
    }
}

/// Takes tensor data in order, in pieces of any size, and pads between tensors.
pub struct DataSink<'a, W> {
    header: &'a GgufHeader,
    out: W,
    tensor: usize,
    written: u64,
}

impl<W: Write> DataSink<'_, W> {
    /// Writes a piece, which may end inside a tensor but must not cross into the next.
    pub fn write(&mut self, piece: &[u8]) -> Result<(), GgufError> {
        let Some((_, len)) = self.header.places.get(self.tensor).copied() else {
            return Err(GgufError::Write(format!("{} bytes after the last tensor", piece.len())));
        };
        if piece.len() as u64 > len - self.written {
            return Err(GgufError::Write(format!(
                "tensor {} takes {len} bytes, more were given: {} after {}",
                self.tensor,
                piece.len(),
                self.written
            )));
        }
        self.out.write_all(piece).map_err(sink_error)?;
        self.written += piece.len() as u64;
        if self.written == len {
            let (start, _) = self.header.places[self.tensor];
            let next = self.header.places.get(self.tensor + 1).map_or(self.header.data_len, |place| place.0);
            let padding = vec![0; (next - start - len) as usize];
            self.out.write_all(&padding).map_err(sink_error)?;
            self.tensor += 1;
            self.written = 0;
        }
        Ok(())
    }

    /// Checks that all data was given, and hands the output back.
    pub fn finish(mut self) -> Result<W, GgufError> {
        if self.tensor != self.header.places.len() {
            return Err(GgufError::Write(format!(
                "data of {} tensors was given, the table has {}",
                self.tensor,
                self.header.places.len()
            )));
        }
        self.out.flush().map_err(sink_error)?;
        Ok(self.out)
    }
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend((string.len() as u64).to_le_bytes());
    out.extend(string);
}

fn put_array(out: &mut Vec<u8>, array: Array<'_>) {
    out.extend((array.element() as u32).to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    out.extend(array.raw_bytes());
}

fn sink_error(source: io::Error) -> GgufError {
    GgufError::Io { path: "the output".to_owned(), source }
}

/// Writes all of `bytes` at a place of a file, which several threads may do at the same time.
#[cfg(unix)]
pub fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Writes all of `bytes` at a place of a file, which several threads may do at the same time.
#[cfg(windows)]
pub fn write_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[written..];
        offset += written as u64;
    }
    Ok(())
}
