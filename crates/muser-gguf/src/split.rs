//! Sets of files: one model cut into `NAME-00001-of-0000N.gguf` and so on, each a GGUF file of its own.
//!
//! The first file has the metadata; each has some of the tensors and says which part it is (`split.no`, `split.count`).
//! A set opens only if all parts are there and agree.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::GgufError;
use crate::cursor::Fault;
use crate::map::map_file;
use crate::parse::Header;

/// Most parts of a set.
const MAX_PARTS: i128 = 1000;

/// One mapped and parsed file.
pub(crate) struct Shard {
    /// Path, or what to call it.
    pub(crate) path: PathBuf,
    pub(crate) map: Mmap,
    /// What is mapped, if it is a file.
    pub(crate) file: Option<File>,
    pub(crate) header: Header,
}

impl Shard {
    pub(crate) fn open(path: &Path) -> Result<Shard, GgufError> {
        let (map, file) = map_file(path)?;
        Ok(Shard { file: Some(file), ..Shard::parse(path.to_owned(), map)? })
    }

    pub(crate) fn parse(path: PathBuf, map: Mmap) -> Result<Shard, GgufError> {
        match Header::parse(&map) {
            Ok(header) => Ok(Shard { path, map, file: None, header }),
            Err(what) => Err(GgufError::Invalid { path: path.display().to_string(), what }),
        }
    }

    pub(crate) fn invalid(&self, what: Fault) -> GgufError {
        GgufError::Invalid { path: self.path.display().to_string(), what }
    }

    fn integer(&self, key: &str) -> Result<Option<i128>, GgufError> {
        match self.header.get(&self.map, key) {
            None => Ok(None),
            Some(value) => match value.as_integer() {
                Some(number) => Ok(Some(number)),
                None => Err(self
                    .invalid(format!("metadata key {key}: expected an integer, found {}", value.describe()))),
            },
        }
    }

    /// Number of parts of the set that this file belongs to; 1 when it stands alone.
    pub(crate) fn part_count(&self) -> Result<usize, GgufError> {
        match self.integer("split.count")? {
            None | Some(0 | 1) => Ok(1),
            Some(count @ 2..=MAX_PARTS) => Ok(count as usize),
            Some(count) => Err(self.invalid(format!(
                "metadata key split.count: expected at most {MAX_PARTS} parts, found {count}"
            ))),
        }
    }
}

/// Opens all parts of the set that `given` is part of, in order.
pub(crate) fn open_set(given: Shard, count: usize) -> Result<Vec<Shard>, GgufError> {
    let name = given.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some((stem, given_part)) = split_name(name, count) else {
        return Err(given.invalid(format!(
            "the file is one part of {count}: expected a name that ends in -NNNNN-of-{count:05}.gguf, so that the other \
             parts can be found"
        )));
    };
    let stem = stem.to_owned();
    let folder = given.path.parent().map(Path::to_owned).unwrap_or_default();
    let mut given = Some(given);
    let mut parts = Vec::new();
    for part in 1..=count {
        let shard = match given.take_if(|_| part == given_part) {
            Some(shard) => shard,
            None => Shard::open(&folder.join(format!("{stem}-{part:05}-of-{count:05}.gguf")))?,
        };
        check_part(&shard, part, count)?;
        parts.push(shard);
    }
    check_set(&parts)?;
    Ok(parts)
}

/// `NAME-00002-of-00003.gguf` with count 3 → `("NAME", 2)`.
fn split_name(name: &str, count: usize) -> Option<(&str, usize)> {
    let rest = name.strip_suffix(&format!("-of-{count:05}.gguf"))?;
    let (stem, digits) = rest.rsplit_once('-')?;
    if digits.len() != 5 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let part: usize = digits.parse().ok()?;
    (1..=count).contains(&part).then_some((stem, part))
}

fn check_part(shard: &Shard, part: usize, count: usize) -> Result<(), GgufError> {
    let found = shard.integer("split.count")?;
    if found != Some(count as i128) {
        let found = found.map_or_else(|| "no such key".to_owned(), |v| v.to_string());
        return Err(shard.invalid(format!(
            "metadata key split.count: expected {count} as in the first file, found {found}"
        )));
    }
    let found = shard.integer("split.no")?;
    if found != Some(part as i128 - 1) {
        let found = found.map_or_else(|| "no such key".to_owned(), |v| v.to_string());
        return Err(shard.invalid(format!(
            "metadata key split.no: expected {} for part {part} of {count}, found {found}",
            part - 1
        )));
    }
    Ok(())
}

fn check_set(parts: &[Shard]) -> Result<(), GgufError> {
    let Some(first) = parts.first() else { return Ok(()) };
    let architecture = first.header.get(&first.map, "general.architecture");
    for other in &parts[1..] {
        let found = other.header.get(&other.map, "general.architecture");
        if let (Some(expected), Some(found)) = (architecture, found)
            && expected != found
        {
            return Err(other.invalid(format!(
                "metadata key general.architecture: expected {} as in the first file, found {}",
                expected.describe(),
                found.describe()
            )));
        }
    }
    let total: usize = parts.iter().map(|part| part.header.tensors.len()).sum();
    match first.integer("split.tensors.count")? {
        Some(expected) if expected != total as i128 => Err(first.invalid(format!(
            "metadata key split.tensors.count: expected {total}, the tensors of all {} parts, found {expected}",
            parts.len()
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::split_name;

    #[test]
    fn names_of_parts() {
        assert_eq!(split_name("m-00002-of-00003.gguf", 3), Some(("m", 2)));
        assert_eq!(split_name("a-b-00001-of-00010.gguf", 10), Some(("a-b", 1)));
        for name in [
            "m-00004-of-00003.gguf",
            "m-00000-of-00003.gguf",
            "m-1-of-00003.gguf",
            "m-0000x-of-00003.gguf",
            "m.gguf",
        ] {
            assert_eq!(split_name(name, 3), None, "{name}");
        }
    }
}
