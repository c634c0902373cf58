//! One safetensors file: a length, a table in JSON, data. The table is believed only where it fits the bytes that are there.

use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::ConvertError;
use crate::error::{io, wrong};

/// Most bytes of a table. That of the 30B model in BF16 has 100 KB, quantised 400 KB.
const MAX_TABLE: u64 = 16 << 20;
/// Most dimensions of a tensor.
const MAX_DIMS: usize = 8;

/// Types of values that checkpoints of this model have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    F16,
    BF16,
    E4M3,
    /// A power of two in a byte.
    E8M0,
    U8,
    /// Not read by any part of this crate.
    Other(String),
}

impl Dtype {
    fn of(name: &str) -> Dtype {
        match name {
            "F32" => Dtype::F32,
            "F16" => Dtype::F16,
            "BF16" => Dtype::BF16,
            "F8_E4M3" => Dtype::E4M3,
            "F8_E8M0" => Dtype::E8M0,
            "U8" => Dtype::U8,
            other => Dtype::Other(other.to_owned()),
        }
    }

    /// Name in the file.
    pub(crate) fn name(&self) -> &str {
        match self {
            Dtype::F32 => "F32",
            Dtype::F16 => "F16",
            Dtype::BF16 => "BF16",
            Dtype::E4M3 => "F8_E4M3",
            Dtype::E8M0 => "F8_E8M0",
            Dtype::U8 => "U8",
            Dtype::Other(name) => name,
        }
    }

    /// Bytes of a value.
    pub(crate) fn size(&self) -> Option<u64> {
        Some(match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            Dtype::E4M3 | Dtype::E8M0 | Dtype::U8 => 1,
            Dtype::Other(_) => return None,
        })
    }

    /// Is it a float that stands for itself?
    pub(crate) fn is_float(&self) -> bool {
        matches!(self, Dtype::F32 | Dtype::F16 | Dtype::BF16)
    }
}

/// Where a tensor is.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// Number of the file in its checkpoint.
    pub(crate) shard: usize,
    /// First byte in the file.
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Entry {
    /// Type and shape, for messages.
    pub(crate) fn describe(&self) -> String {
        format!("{} {:?}", self.dtype.name(), self.shape)
    }
}

/// An open file.
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

impl Shard {
    /// Opens file number `shard` and checks its table.
    pub(crate) fn open(path: &Path, shard: usize) -> Result<(Shard, Vec<Entry>), ConvertError> {
        let file = File::open(path).map_err(|source| io(path, source))?;
        let len = file.metadata().map_err(|source| io(path, source))?.len();
        let place = path.display().to_string();
        if len < 8 {
            return Err(wrong(place, "a safetensors file", format!("{len} bytes")));
        }
        let mut head = [0; 8];
        read_at(&file, &mut head, 0).map_err(|source| io(path, source))?;
        let table_len = u64::from_le_bytes(head);
        if table_len > MAX_TABLE {
            return Err(wrong(place, format!("a table of at most {MAX_TABLE} bytes"), table_len.to_string()));
        }
        if table_len > len - 8 {
            return Err(wrong(
                place,
                format!("a table inside the {len} bytes of the file"),
                table_len.to_string(),
            ));
        }
        let mut table = vec![0; table_len as usize];
        read_at(&file, &mut table, 8).map_err(|source| io(path, source))?;
        let entries = entries(&table, shard, &place, len - 8 - table_len)?;
        Ok((Shard { path: path.to_owned(), file }, entries))
    }

    /// Reads bytes of a tensor of this file.
    pub(crate) fn read(&self, entry: &Entry, at: u64, out: &mut [u8]) -> Result<(), ConvertError> {
        debug_assert!(at + out.len() as u64 <= entry.len);
        read_at(&self.file, out, entry.offset + at).map_err(|source| io(&self.path, source))
    }
}

/// What a table says of `data_len` bytes of data behind it.
pub(crate) fn entries(
    table: &[u8],
    shard: usize,
    place: &str,
    data_len: u64,
) -> Result<Vec<Entry>, ConvertError> {
    let start = 8 + table.len() as u64;
    let table: Table =
        serde_json::from_slice(table).map_err(|error| wrong(place, "a table in JSON", error.to_string()))?;
    check(table, shard, place, start, data_len)
}

/// Every tensor has the bytes that its type and shape take, and together they are the data: nothing overlaps, nothing is left.
fn check(
    table: Table,
    shard: usize,
    place: &str,
    start: u64,
    data_len: u64,
) -> Result<Vec<Entry>, ConvertError> {
    let mut entries = Vec::with_capacity(table.0.len());
    for (name, row) in table.0 {
        let place = format!("{place}: tensor {name}");
        let [begin, end] = row.data_offsets;
        if begin > end || end > data_len {
            return Err(wrong(
                place,
                format!("bytes inside the {data_len} of data"),
                format!("{begin} to {end}"),
            ));
        }
        if row.shape.len() > MAX_DIMS {
            let expected = format!("at most {MAX_DIMS} dimensions");
            return Err(wrong(place, expected, row.shape.len().to_string()));
        }
        let dtype = Dtype::of(&row.dtype);
        let values = row.shape.iter().try_fold(1u64, |all, dim| all.checked_mul(*dim));
        if let Some(size) = dtype.size()
            && values.and_then(|values| values.checked_mul(size)) != Some(end - begin)
        {
            let expected = format!("as many bytes as {} {:?} takes", dtype.name(), row.shape);
            return Err(wrong(place, expected, (end - begin).to_string()));
        }
        entries.push(Entry { name, dtype, shape: row.shape, shard, offset: start + begin, len: end - begin });
    }
    let mut order: Vec<&Entry> = entries.iter().collect();
    order.sort_by_key(|entry| (entry.offset, entry.len));
    let mut next = start;
    for entry in order {
        if entry.offset != next {
            let (expected, found) = (format!("data from byte {next} on"), format!("from {}", entry.offset));
            return Err(wrong(format!("{place}: tensor {}", entry.name), expected, found));
        }
        next += entry.len;
    }
    if next != start + data_len {
        let rest = start + data_len - next;
        return Err(wrong(place, "no data beside that of tensors", format!("{rest} bytes more")));
    }
    Ok(entries)
}

/// One row of the table.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The table in the file's order, names once.
struct Table(Vec<(String, Row)>);

impl<'de> Deserialize<'de> for Table {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Rows;
        impl<'de> Visitor<'de> for Rows {
            type Value = Table;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Table, A::Error> {
                let (mut rows, mut names) = (Vec::new(), HashSet::new());
                while let Some(name) = map.next_key::<String>()? {
                    if !names.insert(name.clone()) {
                        return Err(A::Error::custom(format!("{name} twice")));
                    }
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    rows.push((name, map.next_value()?));
                }
                Ok(Table(rows))
            }
        }
        deserializer.deserialize_map(Rows)
    }
}

#[cfg(unix)]
pub(crate) fn read_at(file: &File, out: &mut [u8], at: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, at)
}

#[cfg(windows)]
pub(crate) fn read_at(file: &File, mut out: &mut [u8], mut at: u64) -> std::io::Result<()> {
    while !out.is_empty() {
        let read = std::os::windows::fs::FileExt::seek_read(file, out, at)?;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        out = &mut out[read..];
        at += read as u64;
    }
    Ok(())
}
